// SPDX-License-Identifier: MIT
// What the trainer reads: a TokenSource maps (split, sample index) to seq_length + 1 tokens, and a Batcher
// maps a global batch to the sample indices of each rank. Both are pure functions of the seed and of the
// index, never of the number of ranks, so that every world size trains on the same tokens in the same order
// and a resumed run needs only a counter. Read next: text.h, synthetic.h, shards.h.
#pragma once

#include "model/config/config.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fp8flow::data {

enum class Split : uint8_t { train, held_out };
const char* name_of(Split split);

// num_tokens and samples_per_epoch of a source that never ends.
inline constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

class TokenSource {
public:
    virtual ~TokenSource() = default;

    // Ids are in [0, vocab_size()). The model pads this number up (make_vocab_size_divisible_by).
    virtual int64_t vocab_size() const = 0;
    virtual int64_t seq_length() const = 0;
    // 0 if the split does not exist.
    virtual int64_t num_tokens(Split split) const = 0;
    // Samples after which every window has been seen once; the next epoch is shuffled again.
    virtual int64_t samples_per_epoch(Split split) const = 0;
    // One line for the log: what the data is, how much of it, how it was split.
    virtual std::string description() const = 0;
    // How often `samples` samples of the training part read the data.
    virtual std::string epochs_text(int64_t samples) const;
    // What was named and is not read, or not as it was asked for, a sentence each.
    virtual std::vector<std::string> warnings() const { return {}; }
    // Equal on two machines or two runs only if the data are (for the check between ranks and on resume):
    // their tokens, the order of their windows under a seed, and the split. token_stream.h says how much of
    // large files it covers.
    virtual uint64_t fingerprint() const = 0;
    // The fingerprint in older checkpoints, which covers names and sizes of token files only.
    virtual uint64_t fingerprint_without_content() const { return fingerprint(); }
    // A checksum of which sample comes from which source, which a blend's fingerprint has the counts of; or
    // 0.
    virtual uint64_t order() const { return 0; }
    // Fills `tokens` [seq_length + 1]: inputs are tokens[0, seq_length), targets are tokens[1, seq_length].
    // Safe to call from several threads. Throws ExitCode::data if an id is outside the vocabulary or a file
    // has changed.
    virtual void sample(Split split, int64_t sample_index, std::span<int32_t> tokens) const = 0;
    // Bytes of text per token, where they are known.
    virtual std::optional<double> bytes_per_token() const { return std::nullopt; }
    // Bytes [begin, end) of a text with this checksum.
    struct Piece {
        uint64_t content = 0;
        int64_t begin = 0, end = 0;
    };
    // Of sources that divide text into splits by more than its content.
    virtual std::vector<Piece> pieces(Split) const { return {}; }
    // The least mean loss per token that any model can reach on these windows, where it is known.
    virtual std::optional<double> entropy_floor_nats() const { return std::nullopt; }
};

// Of the data and of the order in which a run reads it: of the first training windows, and of a blend.
uint64_t order_fingerprint(const TokenSource& source);

// Files that `source` holds out and `trained` trains on, at least in part.
int64_t held_out_in(const TokenSource& source, const TokenSource& trained);

// A finite stream of tokens per split, cut into windows of seq_length tokens that overlap by the one token
// which is a target first and an input next. Epoch e of a split visits the windows in the order of its own
// seeded permutation.
class WindowedSource : public TokenSource {
public:
    int64_t seq_length() const final { return seq_length_; }
    int64_t samples_per_epoch(Split split) const final;
    std::vector<std::string> warnings() const final { return warnings_; }
    void sample(Split split, int64_t sample_index, std::span<int32_t> tokens) const final;

protected:
    explicit WindowedSource(const Config& config);  // model.seq_length, training.seed

    // Copies tokens [first, first + tokens.size()) of the stream of `split`; the range is inside num_tokens.
    virtual void read(Split split, int64_t first, std::span<int32_t> tokens) const = 0;

    // Throws ExitCode::data unless `split` holds one window. `where` names the data, e.g. its path.
    void require_one_window(Split split, const std::string& where) const;
    // Adds a warning where the held-out part is far from `wanted`, its share of the tokens. `cause`: why.
    void check_share(double wanted, const std::string& cause);

    std::vector<std::string> warnings_;

private:
    int64_t seq_length_;
    uint64_t seed_;
};

// Which samples a rank takes. A global batch is cut into micro-batches of micro_batch_size x
// data_parallel_size consecutive samples, and each of these by rank, contiguously. Hence micro-batch m holds
// the same samples in the same order for every world size with the same product, and concatenating the ranks
// gives the global order. Where the global batch is no multiple of that product, the last micro-batch is
// shared out as evenly as it can be: lower ranks get one more, ranks may get none.
struct Batcher {
    int64_t global_batch_size = 1;
    int64_t micro_batch_size = 1;
    int64_t data_parallel_size = 1;

    struct Range {
        int64_t first = 0;  // sample index
        int64_t count = 0;
    };

    int64_t num_micro_batches() const;
    Range samples(int64_t global_batch, int64_t micro_batch, int64_t rank) const;
};

}  // namespace fp8flow::data
