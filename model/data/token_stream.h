// SPDX-License-Identifier: MIT
// Tokens concatenated from files: opened when they are read, sizes checked again, every id compared with the
// vocabulary before it is used as an index; and a source with such streams as its splits. Shared by the
// readers of tokenised data. Read next: shards.h, megatron.h.
#pragma once

#include "model/data/data.h"
#include "model/safetensors/input.h"

#include <array>
#include <string>
#include <vector>

namespace fp8flow::data {

// A file of tokens. Throws Error(data) also for a pointer of Git LFS.
class TokenFile : public InputFile {
public:
    explicit TokenFile(const std::string& path);
};
// Throws Error(data) unless the file has `expected` bytes. `why`: their sum as text, "2 tokens x 4 bytes".
void require_size(const TokenFile& file, const std::string& path, int64_t expected, const std::string& why);

enum class TokenType : uint8_t { u8, u16, u32, i16, i32, i64 };
int64_t size_of(TokenType type);

// Tokens of one file.
struct TokenRun {
    std::string path;
    TokenType type = TokenType::u16;
    int64_t begin = 0;    // byte of the file's first token
    int64_t skipped = 0;  // tokens of the file before the first of these
    int64_t tokens = 0;
    int64_t file_bytes = 0;  // at the start; a file with another size later has changed
};

class TokenStream {
public:
    void add(TokenRun run);
    int64_t tokens() const { return tokens_; }
    int64_t num_runs() const { return std::ssize(runs_); }

    // Copies tokens [first, first + out.size()), which are inside. Throws Error(data) with file, position and
    // id where one is not in [0, vocab_size).
    void read(int64_t first, std::span<int32_t> out, int64_t vocab_size) const;
    int64_t bytes() const;
    // Reads everything.
    void check_all(int64_t vocab_size) const;
    // Checksum of what the files hold: of each at most about `bytes_per_file`, in blocks of 64 KiB from its
    // first tokens to its last ones, at equal distances, and never less than two.
    uint64_t content(int64_t bytes_per_file) const;

private:
    struct Placed {
        TokenRun run;
        int64_t first = 0;  // position of the first token in the stream
    };
    std::vector<Placed> runs_;
    int64_t tokens_ = 0;
};

// Tokens of files as a source; a reader of a format adds their runs and ends with check().
class StreamSource : public WindowedSource {
public:
    int64_t vocab_size() const final { return vocab_size_; }
    int64_t num_tokens(Split split) const final { return part(split).tokens(); }
    // With the content of the files: all of it up to kBytesOfContent, of more about as many bytes.
    uint64_t fingerprint() const final;
    uint64_t fingerprint_without_content() const final { return fingerprint_; }

protected:
    // Parts of up to check_at_start_bytes are checked whole at the start; larger ones when a sample is read.
    static constexpr int64_t kCheckAtStartBytes = int64_t{64} << 20;
    explicit StreamSource(const Config& config, int64_t check_at_start_bytes = kCheckAtStartBytes);

    void add(Split split, TokenRun run) { parts_[to_size(split)].add(std::move(run)); }
    const TokenStream& part(Split split) const { return parts_[to_size(split)]; }
    // One window to train on; and every id of small parts, those of larger ones when a sample is read. Reads
    // what the fingerprint covers.
    void check();
    const std::string& where() const { return where_; }  // the data, for messages
    void read(Split split, int64_t first, std::span<int32_t> tokens) const final {
        part(split).read(first, tokens, vocab_size_);
    }

    uint64_t fingerprint_ = 0;  // of names and sizes

private:
    static constexpr int64_t kBytesOfContent = int64_t{64} << 20;  // fast to read, also over a network

    std::array<TokenStream, 2> parts_;
    int64_t vocab_size_, check_at_start_bytes_;
    std::string where_;
    uint64_t content_ = 0;
};

}  // namespace fp8flow::data
