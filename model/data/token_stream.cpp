// SPDX-License-Identifier: MIT
// Opening, reading, and the check of ids.
#include "model/data/token_stream.h"

#include "kernels/core/error.h"
#include "kernels/core/tensor.h"
#include "model/base/crc32c.h"
#include "model/data/permutation.h"

#include <algorithm>
#include <bit>

namespace fp8flow::data {

namespace {

static_assert(std::endian::native == std::endian::little, "tokens are read as they lie");

constexpr int64_t kTokensAtOnce = 1 << 16;  // tokens in memory at a time while a whole file is checked

// Ids keep all their bits until they are known to be small: llm.c 786 trained on token -1149026846.
template <class Id>
void read_ids(const TokenFile& file, const TokenRun& run, int64_t first, std::span<int32_t> out,
              int64_t vocab_size) {
    std::vector<Id> ids(out.size());
    const auto width = static_cast<int64_t>(sizeof(Id));
    file.read(run.begin + (run.skipped + first) * width, ids.data(), std::ssize(ids) * width);
    for (size_t i = 0; i < ids.size(); ++i) {
        const auto id = static_cast<int64_t>(ids[i]);
        require(id >= 0 && id < vocab_size, ExitCode::data, "{}: token {} is {}, the vocabulary has {} ids",
                run.path, run.skipped + first + static_cast<int64_t>(i), id, vocab_size);
        out[i] = static_cast<int32_t>(id);
    }
}

void read_run(const TokenRun& run, int64_t first, std::span<int32_t> out, int64_t vocab_size) {
    const TokenFile file(run.path);
    require(file.size() == run.file_bytes, ExitCode::data, "{}: changed since the start: {} bytes, was {}",
            run.path, file.size(), run.file_bytes);
    switch (run.type) {
        case TokenType::u8: return read_ids<uint8_t>(file, run, first, out, vocab_size);
        case TokenType::u16: return read_ids<uint16_t>(file, run, first, out, vocab_size);
        case TokenType::u32: return read_ids<uint32_t>(file, run, first, out, vocab_size);
        case TokenType::i16: return read_ids<int16_t>(file, run, first, out, vocab_size);
        case TokenType::i32: return read_ids<int32_t>(file, run, first, out, vocab_size);
        case TokenType::i64: return read_ids<int64_t>(file, run, first, out, vocab_size);
    }
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : InputFile(path, ExitCode::data) {
    char first[64];
    const auto given = std::min<int64_t>(size(), sizeof first);
    read(0, first, given);
    refuse_lfs_pointer({first, to_size(given)}, path, ExitCode::data);
}

int64_t size_of(TokenType type) {
    constexpr int64_t kBytes[] = {1, 2, 4, 2, 4, 8};
    return kBytes[to_size(type)];
}

void TokenStream::add(TokenRun run) {
    if (run.tokens == 0) return;
    const int64_t first = tokens_;
    tokens_ += run.tokens;
    runs_.push_back({std::move(run), first});
}

void TokenStream::read(int64_t first, std::span<int32_t> out, int64_t vocab_size) const {
    FP8FLOW_CHECK(first >= 0 && first + std::ssize(out) <= tokens_, "tokens {} to {} of {}", first,
                  first + std::ssize(out), tokens_);
    if (out.empty()) return;
    auto at = std::ranges::upper_bound(runs_, first, {}, &Placed::first) - 1;
    while (!out.empty()) {  // the range may span files
        const int64_t inside = first - at->first;
        const auto count = to_size(std::min<int64_t>(at->run.tokens - inside, std::ssize(out)));
        read_run(at->run, inside, out.first(count), vocab_size);
        out = out.subspan(count);
        first += static_cast<int64_t>(count);
        ++at;
    }
}

int64_t TokenStream::bytes() const {
    int64_t bytes = 0;
    for (const Placed& placed : runs_) bytes += placed.run.tokens * size_of(placed.run.type);
    return bytes;
}

uint64_t TokenStream::content(int64_t bytes_per_file) const {
    constexpr int64_t kBlock = int64_t{64} << 10;
    std::vector<uint8_t> block(kBlock);
    uint64_t state = 0;
    for (const Placed& placed : runs_) {
        const TokenRun& run = placed.run;
        const TokenFile file(run.path);
        const int64_t width = size_of(run.type), bytes = run.tokens * width;
        const int64_t begin = run.begin + run.skipped * width, last = std::max<int64_t>(0, bytes - kBlock);
        const int64_t blocks =
            std::min(ceil_div(bytes, kBlock), std::max<int64_t>(2, ceil_div(bytes_per_file, kBlock)));
        const int64_t step = ceil_div(last, std::max<int64_t>(1, blocks - 1));
        for (int64_t i = 0; i < blocks; ++i) {
            const int64_t at = std::min(i * step, last), count = std::min(kBlock, bytes - at);
            file.read(begin + at, block.data(), count);
            state = mix64(state, crc32c(block.data(), to_size(count)));
        }
    }
    return state;
}

void TokenStream::check_all(int64_t vocab_size) const {
    std::vector<int32_t> block;
    for (int64_t first = 0; first < tokens_; first += kTokensAtOnce) {
        block.resize(to_size(std::min(kTokensAtOnce, tokens_ - first)));
        read(first, block, vocab_size);
    }
}

StreamSource::StreamSource(const Config& config, int64_t check_at_start_bytes)
    : WindowedSource(config),
      vocab_size_(config.model.vocab_size),
      check_at_start_bytes_(check_at_start_bytes),
      where_(config.data.data_path.size() == 1 ? config.data.data_path[0] : "data.data_path") {
    FP8FLOW_CHECK(vocab_size_ > 0 && vocab_size_ <= INT32_MAX, "vocabulary of {}", vocab_size_);
}

void require_size(const TokenFile& file, const std::string& path, int64_t expected, const std::string& why) {
    require(file.size() == expected, ExitCode::data, "{}: {} by {} bytes: {} = {} bytes, the file has {}",
            path, file.size() < expected ? "truncated" : "too long", std::abs(file.size() - expected), why,
            expected, file.size());
}

void StreamSource::check() {
    require_one_window(Split::train, where_);
    int64_t bytes = 0, runs = 0;
    for (const TokenStream& part : parts_) {
        if (part.bytes() <= check_at_start_bytes_) part.check_all(vocab_size_);
        bytes += part.bytes();
        runs += part.num_runs();
    }
    const int64_t each = bytes <= kBytesOfContent ? bytes : kBytesOfContent / runs;
    content_ = mix64(parts_[0].content(each), parts_[1].content(each));
}

uint64_t StreamSource::fingerprint() const { return mix64(fingerprint_, content_); }

}  // namespace fp8flow::data
