// SPDX-License-Identifier: MIT
// Windows over a stream of tokens, their order, and the share of each rank in a global batch.
#include "model/data/data.h"

#include "kernels/core/error.h"
#include "model/base/crc32c.h"
#include "model/data/permutation.h"

#include <algorithm>
#include <map>

namespace fp8flow::data {

const char* name_of(Split split) { return split == Split::train ? "train" : "held-out"; }

std::string TokenSource::epochs_text(int64_t samples) const {
    return fmt::format("{:.3g} epochs", f64(samples) / f64(samples_per_epoch(Split::train)));
}

uint64_t order_fingerprint(const TokenSource& source) {
    constexpr int64_t kWindows = 16;
    std::vector<int32_t> tokens(to_size(source.seq_length() + 1));
    uint32_t checksum = 0;
    for (int64_t sample = 0; sample < kWindows; ++sample) {
        source.sample(Split::train, sample, tokens);
        checksum = crc32c(tokens.data(), tokens.size() * sizeof(int32_t), checksum);
    }
    return mix64(source.fingerprint(), checksum) ^ source.order();
}

int64_t held_out_in(const TokenSource& source, const TokenSource& trained) {
    std::multimap<uint64_t, TokenSource::Piece> pieces;
    for (const auto& piece : trained.pieces(Split::train)) pieces.emplace(piece.content, piece);
    return std::ranges::count_if(source.pieces(Split::held_out), [&](const TokenSource::Piece& piece) {
        const auto [first, last] = pieces.equal_range(piece.content);
        return std::any_of(first, last, [&](const auto& other) {
            return other.second.begin < piece.end && piece.begin < other.second.end;
        });
    });
}

WindowedSource::WindowedSource(const Config& config)
    : seq_length_(config.model.seq_length), seed_(config.training.seed) {
    FP8FLOW_CHECK(seq_length_ > 0, "seq_length {}", seq_length_);
}

int64_t WindowedSource::samples_per_epoch(Split split) const {
    return std::max<int64_t>(0, num_tokens(split) - 1) / seq_length_;
}

void WindowedSource::sample(Split split, int64_t sample_index, std::span<int32_t> tokens) const {
    FP8FLOW_CHECK(std::ssize(tokens) == seq_length_ + 1, "{} tokens for seq_length {}", tokens.size(),
                  seq_length_);
    FP8FLOW_CHECK(sample_index >= 0, "sample index {}", sample_index);
    const int64_t windows = samples_per_epoch(split);
    require(windows > 0, ExitCode::data, "the data has no {} part: {}", name_of(split), description());
    const int64_t epoch = sample_index / windows;
    const Permutation order(windows,
                            mix64(seed_, static_cast<uint64_t>(split), static_cast<uint64_t>(epoch)));
    read(split, order(sample_index % windows) * seq_length_, tokens);
}

void WindowedSource::require_one_window(Split split, const std::string& where) const {
    require(num_tokens(split) >= seq_length_ + 1, ExitCode::data,
            "{}: the {} part has {} tokens, one sample needs seq_length + 1 = {}; add data or lower "
            "model.seq_length",
            where, name_of(split), num_tokens(split), seq_length_ + 1);
}

void WindowedSource::check_share(double wanted, const std::string& cause) {
    constexpr double kFarOff = 3;
    const auto held_out = f64(num_tokens(Split::held_out));
    const double share = held_out / (held_out + f64(num_tokens(Split::train)));
    if (share <= kFarOff * wanted && share >= wanted / kFarOff) return;
    warnings_.push_back(
        fmt::format("{:.2g} % of the tokens are held out, though data.held_out_fraction is {}: {}",
                    100 * share, wanted, cause));
}

int64_t Batcher::num_micro_batches() const {
    const int64_t width = micro_batch_size * data_parallel_size;
    FP8FLOW_CHECK(width > 0 && global_batch_size > 0, "batch {} of micro-batch {} x {} ranks",
                  global_batch_size, micro_batch_size, data_parallel_size);
    return (global_batch_size + width - 1) / width;
}

Batcher::Range Batcher::samples(int64_t global_batch, int64_t micro_batch, int64_t rank) const {
    FP8FLOW_CHECK(global_batch >= 0 && micro_batch >= 0 && micro_batch < num_micro_batches() && rank >= 0 &&
                      rank < data_parallel_size,
                  "batch {}, micro-batch {} of {}, rank {} of {}", global_batch, micro_batch,
                  num_micro_batches(), rank, data_parallel_size);
    const int64_t width = micro_batch_size * data_parallel_size;
    const int64_t start = micro_batch * width;
    const int64_t size = std::min(width, global_batch_size - start);
    const int64_t share = size / data_parallel_size;
    const int64_t extra = size % data_parallel_size;
    return {global_batch * global_batch_size + start + rank * share + std::min(rank, extra),
            share + (rank < extra ? 1 : 0)};
}

}  // namespace fp8flow::data
