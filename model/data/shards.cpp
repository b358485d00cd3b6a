// SPDX-License-Identifier: MIT
// Header checks of llm.c shards, and which part a file belongs to.
#include "model/data/shards.h"

#include "kernels/core/error.h"
#include "kernels/core/random.h"
#include "model/data/files.h"
#include "model/data/permutation.h"

#include <filesystem>
#include <regex>

namespace fp8flow::data {

namespace {

constexpr int64_t kShardHeaderBytes = 256 * 4;
constexpr int32_t kMagicUint16 = 20240520, kVersionUint16 = 1;
constexpr int32_t kMagicUint32 = 20240801, kVersionUint32 = 7;
constexpr int32_t kMagicEval = 20240522;

TokenRun open_header(const std::string& path) {
    const TokenFile file(path);
    require(file.size() >= kShardHeaderBytes, ExitCode::data,
            "{}: {} bytes, a token shard begins with a header of {}", path, file.size(), kShardHeaderBytes);
    int32_t header[256];
    file.read(0, header, kShardHeaderBytes);
    const int32_t magic = header[0], version = header[1], count = header[2];
    require(magic != kMagicEval, ExitCode::data,
            "{}: magic {} is an evaluation file of llm.c, not a token shard", path, magic);
    require(magic == kMagicUint16 || magic == kMagicUint32, ExitCode::data,
            "{}: magic {} is not that of a token shard ({} for uint16, {} for uint32 tokens)", path, magic,
            kMagicUint16, kMagicUint32);
    const int32_t wanted = magic == kMagicUint16 ? kVersionUint16 : kVersionUint32;
    require(version == wanted, ExitCode::data, "{}: version {} under magic {}, want {}", path, version, magic,
            wanted);
    require(count > 0, ExitCode::data, "{}: the header counts {} tokens", path, count);
    const TokenRun shard{.path = path,
                         .type = magic == kMagicUint16 ? TokenType::u16 : TokenType::u32,
                         .begin = kShardHeaderBytes,
                         .tokens = count,
                         .file_bytes = file.size()};
    const int64_t width = size_of(shard.type);
    require_size(
        file, path, kShardHeaderBytes + shard.tokens * width,
        fmt::format("the header counts {} tokens x {} bytes + {}", shard.tokens, width, kShardHeaderBytes));
    return shard;
}

}  // namespace

ShardSource::ShardSource(const Config& config, int64_t check_at_start_bytes)
    : StreamSource(config, check_at_start_bytes) {
    std::string first_path;
    int64_t width = 0;
    const DataFiles list = list_data_files(config.data.data_path, {".bin"});
    warnings_ = list.warnings;
    for (const DataFile& file : list.files) {
        const std::string name = std::filesystem::path(file.path).filename().string();
        static const std::regex train_names("_train([_.]|$)"), held_out_names("_val([_.]|$)");
        const bool train = std::regex_search(name, train_names);
        const bool held_out = std::regex_search(name, held_out_names);
        require(train != held_out, ExitCode::data,
                "{}: cannot tell its part from its name: it must hold either \"_train\" or \"_val\", e.g. "
                "name_train_000001.bin",
                file.path);
        TokenRun shard = open_header(file.path);
        if (first_path.empty()) {
            first_path = file.path;
            width = size_of(shard.type);
        }
        require(size_of(shard.type) == width, ExitCode::data,
                "{}: {}-byte tokens, but {} has {}-byte tokens: two tokenisers", file.path,
                size_of(shard.type), first_path, width);
        fingerprint_ = mix64(fingerprint_, fnv1a64(name), static_cast<uint64_t>(shard.tokens));
        add(train ? Split::train : Split::held_out, std::move(shard));
    }
    check();
}

std::string ShardSource::description() const {
    return fmt::format("token shards: train {} files, {} tokens; held-out {} files, {} tokens; vocabulary {}",
                       part(Split::train).num_runs(), num_tokens(Split::train),
                       part(Split::held_out).num_runs(), num_tokens(Split::held_out), vocab_size());
}

}  // namespace fp8flow::data
