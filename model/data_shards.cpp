// Header checks and bounds-checked reads of llm.c shards. pread, not mmap: a file that shrinks while we train
// must be an error with a name, not a signal.
#include "model/data_shards.h"

#include "kernels/core/error.h"
#include "model/data_files.h"
#include "model/permutation.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace fp8flow {

namespace {

static_assert(std::endian::native == std::endian::little, "shards are read as they lie");

constexpr int64_t kHeaderBytes = 256 * 4;
constexpr int32_t kMagicUint16 = 20240520, kVersionUint16 = 1;
constexpr int32_t kMagicUint32 = 20240801, kVersionUint32 = 7;
constexpr int32_t kMagicEval = 20240522;

// An open shard; closes itself.
class ShardFile {
public:
    explicit ShardFile(const std::string& path) : path_(path) {
        fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        require(fd_ >= 0, ExitCode::data, "{}: {}", path, std::strerror(errno));
        struct stat info {};
        const bool regular = ::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode);
        if (!regular) ::close(fd_);
        require(regular, ExitCode::data, "{}: not a regular file", path);
        size_ = info.st_size;
    }
    ~ShardFile() { ::close(fd_); }
    ShardFile(const ShardFile&) = delete;
    ShardFile& operator=(const ShardFile&) = delete;

    int64_t size() const { return size_; }

    void read(int64_t offset, void* out, int64_t bytes) const {
        auto* to = static_cast<uint8_t*>(out);
        while (bytes > 0) {
            const ssize_t got = ::pread(fd_, to, static_cast<size_t>(bytes), offset);
            if (got < 0 && errno == EINTR) continue;
            require(got >= 0, ExitCode::data, "{}: cannot read at byte {}: {}", path_, offset,
                    std::strerror(errno));
            require(got > 0, ExitCode::data, "{}: the file ends at byte {}, expected {} bytes more", path_,
                    offset, bytes);
            to += got;
            offset += got;
            bytes -= got;
        }
    }

private:
    std::string path_;
    int fd_ = -1;
    int64_t size_ = 0;
};

bool name_holds(const std::string& name, const std::string& word) {
    for (size_t at = name.find(word); at != std::string::npos; at = name.find(word, at + 1)) {
        const size_t next = at + word.size();
        if (next == name.size() || name[next] == '_' || name[next] == '.') return true;
    }
    return false;
}

}  // namespace

ShardSource::ShardSource(const ShardOptions& options)
    : WindowedSource(options.seq_length, options.seed), vocab_size_(options.vocab_size) {
    require(vocab_size_ > 0 && vocab_size_ <= INT32_MAX, ExitCode::usage,
            "token shards: vocab_size must be in [1, 2^31), got {}", vocab_size_);
    std::string first_path;
    int width = 0;
    for (const DataFile& file : list_data_files(options.data_path, {.extensions = {".bin"}})) {
        const std::string name = std::filesystem::path(file.path).filename().string();
        const bool train = name_holds(name, "_train");
        const bool held_out = name_holds(name, "_val");
        require(train != held_out, ExitCode::data,
                "{}: cannot tell its part from its name: it must hold either \"_train\" or \"_val\", e.g. "
                "name_train_000001.bin",
                file.path);
        Part& part = parts_[static_cast<size_t>(train ? Split::train : Split::held_out)];
        Shard shard = open_header(file.path);
        if (first_path.empty()) {
            first_path = file.path;
            width = shard.width;
        }
        require(shard.width == width, ExitCode::data,
                "{}: {}-byte tokens, but {} has {}-byte tokens: two tokenisers", file.path, shard.width,
                first_path, width);
        shard.first = part.tokens;
        part.tokens += shard.tokens;
        fingerprint_ =
            mix64(fingerprint_, fnv1a(name.data(), name.size()), static_cast<uint64_t>(shard.tokens));
        part.shards.push_back(std::move(shard));
    }
    const std::string where = options.data_path.size() == 1 ? options.data_path[0] : "data.data_path";
    require_one_window(Split::train, where);
    if (options.held_out == ShardOptions::HeldOut::required) require_one_window(Split::held_out, where);
    std::vector<int32_t> buffer;
    for (const Part& part : parts_) {
        if (part.tokens * 4 > options.check_at_start_bytes) continue;
        for (const Shard& shard : part.shards) {
            buffer.resize(static_cast<size_t>(shard.tokens));
            read_shard(shard, 0, buffer);
        }
    }
}

ShardSource::Shard ShardSource::open_header(const std::string& path) {
    const ShardFile file(path);
    require(file.size() >= kHeaderBytes, ExitCode::data,
            "{}: {} bytes, a token shard begins with a header of {}", path, file.size(), kHeaderBytes);
    int32_t header[256];
    file.read(0, header, kHeaderBytes);
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
    Shard shard{.path = path, .tokens = count, .width = magic == kMagicUint16 ? 2 : 4};
    const int64_t expected = kHeaderBytes + shard.tokens * shard.width;
    require(file.size() == expected, ExitCode::data,
            "{}: {} by {} bytes: the header counts {} tokens x {} bytes + {} = {} bytes, the file has {}",
            path, file.size() < expected ? "truncated" : "too long", std::abs(file.size() - expected),
            shard.tokens, shard.width, kHeaderBytes, expected, file.size());
    return shard;
}

void ShardSource::read_shard(const Shard& shard, int64_t first, std::span<int32_t> tokens) const {
    const ShardFile file(shard.path);
    const int64_t expected = kHeaderBytes + shard.tokens * shard.width;
    require(file.size() == expected, ExitCode::data, "{}: changed since the start: {} bytes, was {}",
            shard.path, file.size(), expected);
    const auto count = static_cast<int64_t>(tokens.size());
    const int64_t offset = kHeaderBytes + first * shard.width;
    // Ids stay unsigned until they are known to be small: llm.c 786 trained on token -1149026846.
    const auto check = [&](uint32_t id, int64_t at) {
        require(id < static_cast<uint64_t>(vocab_size_), ExitCode::data,
                "{}: token {} is {}, the vocabulary has {} ids", shard.path, first + at, id, vocab_size_);
        return static_cast<int32_t>(id);
    };
    if (shard.width == 2) {
        std::vector<uint16_t> ids(tokens.size());
        file.read(offset, ids.data(), count * 2);
        for (int64_t i = 0; i < count; ++i)
            tokens[static_cast<size_t>(i)] = check(ids[static_cast<size_t>(i)], i);
    } else {
        std::vector<uint32_t> ids(tokens.size());
        file.read(offset, ids.data(), count * 4);
        for (int64_t i = 0; i < count; ++i)
            tokens[static_cast<size_t>(i)] = check(ids[static_cast<size_t>(i)], i);
    }
}

void ShardSource::read(Split split, int64_t first, std::span<int32_t> tokens) const {
    const std::vector<Shard>& shards = part(split).shards;
    auto shard = std::upper_bound(shards.begin(), shards.end(), first,
                                  [](int64_t at, const Shard& s) { return at < s.first; }) -
                 1;
    while (!tokens.empty()) {  // a window may span shards
        const int64_t inside = first - shard->first;
        const auto count = static_cast<size_t>(
            std::min<int64_t>(shard->tokens - inside, static_cast<int64_t>(tokens.size())));
        read_shard(*shard, inside, tokens.first(count));
        tokens = tokens.subspan(count);
        first += static_cast<int64_t>(count);
        ++shard;
    }
}

std::string ShardSource::description() const {
    return fmt::format("token shards: train {} files, {} tokens; held-out {} files, {} tokens; vocabulary {}",
                       part(Split::train).shards.size(), num_tokens(Split::train),
                       part(Split::held_out).shards.size(), num_tokens(Split::held_out), vocab_size_);
}

}  // namespace fp8flow
