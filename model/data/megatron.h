// SPDX-License-Identifier: MIT
// Pre-tokenised data as Megatron-LM's preprocess_data writes it: NAME.bin holds the tokens, NAME.idx says
// their type and where sequences and documents begin. Little endian: the 9 bytes "MMIDIDX\0\0", u64 version
// 1, u8 type, u64 sequences S, u64 D; then S i32 lengths, S i64 byte offsets into the .bin, and D i64
// sequence numbers, 0 first and S last, at which documents begin and end.
//
// The tokens are one stream in the order of the files, cut into windows like every data here (data.h):
// windows cross the ends of documents, as in Megatron's GPT data sets, but their shuffle is ours, not
// Megatron's. Read next: token_stream.h.
#pragma once

#include "model/data/token_stream.h"

#include <string>

namespace fp8flow::data {

// What an index says about its .bin.
struct MegatronIndex {
    TokenType type = TokenType::u16;
    int64_t sequences = 0, documents = 0, tokens = 0;
    int64_t held_out_from = 0;  // position of the first token that is held out
    uint32_t checksum = 0;      // of the whole index
};
// Reads an index whole, a block at a time, and trusts none of its numbers. Throws Error(data) with the file
// and the numbers.
MegatronIndex read_megatron_index(const std::string& path, double held_out_fraction);

// data_path: names without ending, as Megatron's --data-path has them; .idx or .bin files; folders; globs
// over .idx files. Of each file the last documents are held out, at least one; of a single document its end.
class MegatronSource final : public StreamSource {
public:
    explicit MegatronSource(const Config& config);

    std::string description() const override;
    // The mean over all documents, if scripts/preprocess_data.py made every file.
    std::optional<double> bytes_per_token() const override;

private:
    int64_t files_ = 0, documents_ = 0, text_bytes_ = 0;  // text_bytes_: -1 where a file's are not known
};

}  // namespace fp8flow::data
