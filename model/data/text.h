// SPDX-License-Identifier: MIT
// Byte-level text of files that the user names: tokens 0..255 are bytes, 256 ends a document (a file). Whole
// files go to the train or to the held-out part by a fixed hash of their relative path, so that held-out text
// is never trained on. Bits per byte = loss in nats / ln 2 per token; the end-of-document token counts as one
// byte, in the loss and in the number of bytes (one in several thousand for usual files). Read next:
// files.h.
#pragma once

#include "model/config/config.h"
#include "model/data/data.h"
#include "model/data/files.h"

#include <array>
#include <string>
#include <vector>

namespace fp8flow::data {

inline constexpr int32_t kEndOfDocument = 256;
// What to do where a model has another vocabulary.
inline constexpr const char* kTextIsBytes =
    "text is read byte by byte; tokenise it for this vocabulary with Megatron-LM's tools/preprocess_data.py "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL, and read it with data.data_kind: "
    "megatron";

// Where a file goes if the data has many: a pure function of its relative path.
bool is_held_out(const std::string& relative_path, double held_out_fraction);

class TextSource final : public WindowedSource {
public:
    // Reads everything up to max_bytes. Binary files (a zero byte in the first 4 KiB), empty files and
    // byte-wise copies of an earlier file are left out: a copy could otherwise lie in both parts. If the hash
    // leaves a part empty, the file nearest to the threshold changes sides; a single file is cut at a line
    // end instead. Throws ExitCode::data with path and numbers.
    explicit TextSource(const Config& config);

    int64_t vocab_size() const override { return kByteVocabulary; }
    int64_t num_tokens(Split split) const override;
    std::string description() const override;
    std::optional<double> bytes_per_token() const override { return 1.0; }
    uint64_t fingerprint() const override;
    uint64_t fingerprint_without_content() const override { return fingerprint_; }
    std::vector<Piece> pieces(Split split) const override { return part(split).pieces; }

    // Relative paths of the files of a part, for the log and for tests.
    const std::vector<std::string>& files(Split split) const { return part(split).files; }

protected:
    void read(Split split, int64_t first, std::span<int32_t> tokens) const override;

private:
    struct Document {
        std::string relative;
        std::vector<uint8_t> bytes;
        uint64_t content = 0;
        int64_t begin = 0;  // of the bytes in the file
    };
    // Documents one after the other, each followed by one placeholder byte at a position in `ends`.
    struct Part {
        std::vector<uint8_t> stream;
        std::vector<int64_t> ends;
        std::vector<std::string> files;
        std::vector<Piece> pieces;
    };

    std::vector<Document> load(const DataSpec& spec);
    // Counts a file that is not read, and warns if the user named it.
    void leave_out(const DataFile& file, int64_t& count, const char* reason);
    void split(std::vector<Document> documents, double held_out_fraction);
    void append(Split split, Document document);
    const Part& part(Split split) const { return parts_[to_size(split)]; }

    std::array<Part, 2> parts_;
    std::string where_;
    uint64_t fingerprint_ = 0;                                    // of paths, contents and the split
    int64_t binary_ = 0, empty_ = 0, copies_ = 0, pointers_ = 0;  // files left out, by reason
    bool cut_ = false;                                            // max_bytes was reached
    bool single_file_ = false;
};

}  // namespace fp8flow::data
