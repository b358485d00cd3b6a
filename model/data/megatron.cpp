// SPDX-License-Identifier: MIT
// The index read in blocks, and its .bin.
#include "model/data/megatron.h"

#include "model/base/crc32c.h"
#include "model/data/files.h"
#include "model/data/permutation.h"
#include "model/safetensors/json.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

namespace fp8flow::data {

namespace {

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr int64_t kVersion = 1;
constexpr int64_t kIndexHeaderBytes = 9 + 8 + 1 + 8 + 8;
constexpr int64_t kMostEntries = int64_t{1} << 40;  // keeps the arithmetic on their number inside 63 bits
constexpr int64_t kEntriesAtOnce = 1 << 16;         // entries in memory

// NumPy types under the numbers that Megatron gives them.
struct NamedType {
    const char* name;
    std::optional<TokenType> type;
};
constexpr NamedType kTypes[] = {{"", {}},
                                {"uint8", TokenType::u8},
                                {"int8", {}},
                                {"int16", TokenType::i16},
                                {"int32", TokenType::i32},
                                {"int64", TokenType::i64},
                                {"float64", {}},
                                {"float32", {}},
                                {"uint16", TokenType::u16}};

template <class T> T read_at(const TokenFile& file, int64_t offset) {
    T value{};
    file.read(offset, &value, sizeof value);
    return value;
}

// An array in the file, read forwards.
template <class T> class Column {
public:
    Column(const TokenFile& file, int64_t offset, int64_t count)
        : file_(file), offset_(offset), left_(count) {}

    T next() {
        if (at_ == block_.size()) {
            block_.resize(to_size(std::min(kEntriesAtOnce, left_)));
            file_.read(offset_, block_.data(), static_cast<int64_t>(block_.size() * sizeof(T)));
            offset_ += static_cast<int64_t>(block_.size() * sizeof(T));
            left_ -= std::ssize(block_);
            at_ = 0;
        }
        return block_[at_++];
    }

private:
    const TokenFile& file_;
    int64_t offset_, left_;
    std::vector<T> block_;
    size_t at_ = 0;
};

uint32_t checksum_of(const TokenFile& file) {
    std::vector<uint8_t> block(to_size(kEntriesAtOnce) * 8);
    uint32_t crc = 0;
    for (int64_t done = 0; done < file.size();) {
        const int64_t count = std::min<int64_t>(std::ssize(block), file.size() - done);
        file.read(done, block.data(), count);
        crc = crc32c(block.data(), to_size(count), crc);
        done += count;
    }
    return crc;
}

bool exists(const std::string& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0;
}

// The entry as it names .idx files.
std::string index_entry(const std::string& entry) {
    if (entry.ends_with(".bin")) return entry.substr(0, entry.size() - 4) + ".idx";
    if (!exists(entry) && exists(entry + ".idx")) return entry + ".idx";
    return entry;
}

// NAME.json, which scripts/preprocess_data.py writes next to the tokens, names their vocabulary and counts
// them. Returns the bytes of their text, -1: unknown.
int64_t check_vocabulary(const std::string& path, int64_t vocab_size, int64_t tokens) {
    if (!exists(path)) return -1;
    const nlohmann::json about = parse_json(TokenFile(path).text(int64_t{1} << 26), path, ExitCode::data);
    const auto found = about.is_object() ? about.find("vocab_size") : about.end();
    if (found == about.end()) return -1;  // another tool's
    const int64_t wanted = whole_number(*found).value_or(0);
    require(wanted > 0, ExitCode::data, "{}: vocab_size is {}", path, found->dump());
    require(
        wanted <= vocab_size, ExitCode::data,
        "{}: the tokenizer has {} tokens, the model {}: set model.vocab_size, or use the model's tokenizer",
        path, wanted, vocab_size);
    const nlohmann::json state = about.value("state", nlohmann::json::object());
    const bool counts = state.is_object() && state.contains("tokens");
    require(!counts || whole_number(state["tokens"]) == tokens, ExitCode::data,
            "{}: counts {} tokens and the .idx file next to it {}: it belongs to other tokens; remove it",
            path, counts ? state["tokens"].dump() : "", tokens);
    return state.is_object() && state.contains("bytes") ? whole_number(state["bytes"]).value_or(-1) : -1;
}

}  // namespace

MegatronIndex read_megatron_index(const std::string& path, double held_out_fraction) {
    const TokenFile file(path);
    require(file.size() >= kIndexHeaderBytes, ExitCode::data,
            "{}: {} bytes, an index begins with a header of {}", path, file.size(), kIndexHeaderBytes);
    char magic[9];
    file.read(0, magic, sizeof magic);
    require(std::string_view(magic, sizeof magic) == kMagic, ExitCode::data,
            "{}: no index of Megatron's: it does not begin with MMIDIDX", path);
    const auto version = read_at<uint64_t>(file, 9);
    require(version == kVersion, ExitCode::data, "{}: version {}, want {}", path, version, kVersion);
    const auto code = read_at<uint8_t>(file, 17);
    require(code >= 1 && code < std::size(kTypes), ExitCode::data, "{}: token type {}, want 1 to {}", path,
            code, std::size(kTypes) - 1);
    require(kTypes[code].type.has_value(), ExitCode::data,
            "{}: tokens of type {}, want an integer of 8 unsigned or 16 to 64 bits", path, kTypes[code].name);
    MegatronIndex index{.type = *kTypes[code].type};
    const auto sequences = read_at<uint64_t>(file, 18), bounds = read_at<uint64_t>(file, 26);
    require(sequences >= 1 && sequences <= kMostEntries && bounds >= 2 && bounds <= kMostEntries,
            ExitCode::data, "{}: {} sequences and {} bounds of documents, want at least 1 and 2", path,
            sequences, bounds);
    index.sequences = static_cast<int64_t>(sequences);
    index.documents = static_cast<int64_t>(bounds) - 1;
    const int64_t lengths_at = kIndexHeaderBytes, offsets_at = lengths_at + 4 * index.sequences,
                  bounds_at = offsets_at + 8 * index.sequences,
                  expected = bounds_at + 8 * static_cast<int64_t>(bounds);
    require(file.size() != expected + index.sequences, ExitCode::data,
            "{}: has a mode for each sequence: multimodal data, which this program does not train on", path);
    require_size(file, path, expected,
                 fmt::format("{} sequences and {} bounds of documents", sequences, bounds));

    // Which sequence is the first that is held out.
    int64_t kept = index.documents;
    if (held_out_fraction > 0.0 && index.documents > 1)
        kept -= std::clamp<int64_t>(std::llround(held_out_fraction * f64(index.documents)), 1,
                                    index.documents - 1);
    int64_t held_out_sequence = index.sequences, before = 0;
    Column<int64_t> document_bounds(file, bounds_at, index.documents + 1);
    for (int64_t d = 0; d <= index.documents; ++d) {
        const int64_t bound = document_bounds.next();
        const bool ends = d == 0 ? bound == 0 : d < index.documents || bound == index.sequences;
        require(ends && bound >= before && bound <= index.sequences, ExitCode::data,
                "{}: document {} begins at sequence {}, want 0 first, {} last, and none before another", path,
                d, bound, index.sequences);
        if (d == kept) held_out_sequence = bound;
        before = bound;
    }

    const int64_t width = size_of(index.type);
    Column<int32_t> lengths(file, lengths_at, index.sequences);
    Column<int64_t> offsets(file, offsets_at, index.sequences);
    for (int64_t s = 0; s < index.sequences; ++s) {
        if (s == held_out_sequence) index.held_out_from = index.tokens;
        const int32_t length = lengths.next();
        require(length >= 0, ExitCode::data, "{}: sequence {} has {} tokens", path, s, length);
        const int64_t offset = offsets.next();
        require(
            offset == index.tokens * width, ExitCode::data,
            "{}: sequence {} begins at byte {}, the one before ends at {}: sequences must lie one after the "
            "other, as preprocess_data writes them",
            path, s, offset, index.tokens * width);
        index.tokens += length;
    }
    if (held_out_sequence == index.sequences) index.held_out_from = index.tokens;
    if (held_out_fraction > 0.0 && index.documents == 1)
        index.held_out_from = static_cast<int64_t>(f64(index.tokens) * (1.0 - held_out_fraction));
    index.checksum = checksum_of(file);
    return index;
}

MegatronSource::MegatronSource(const Config& config) : StreamSource(config) {
    const double held_out = config.data.held_out_fraction;
    std::vector<std::string> entries;
    for (const std::string& entry : config.data.data_path) entries.push_back(index_entry(entry));
    const DataFiles list = list_data_files(entries, {".idx", ".bin"});
    warnings_ = list.warnings;
    std::vector<std::string> alone;
    for (const DataFile& file : list.files) {
        if (file.path.ends_with(".bin")) {
            if (!exists(index_entry(file.path))) alone.push_back(file.path);
            continue;
        }
        require(file.path.ends_with(".idx"), ExitCode::data, "{}: neither an .idx nor a .bin file",
                file.path);
        const std::string prefix = file.path.substr(0, file.path.size() - 4), bin_path = prefix + ".bin";
        const MegatronIndex index = read_megatron_index(file.path, held_out);
        const int64_t bytes = check_vocabulary(prefix + ".json", config.model.vocab_size, index.tokens);
        text_bytes_ = bytes > 0 && text_bytes_ >= 0 ? text_bytes_ + bytes : -1;
        const TokenFile bin(bin_path);
        const int64_t width = size_of(index.type);
        require_size(bin, bin_path, index.tokens * width,
                     fmt::format("its index counts {} tokens x {} bytes", index.tokens, width));
        TokenRun run{
            .path = bin_path, .type = index.type, .tokens = index.held_out_from, .file_bytes = bin.size()};
        add(Split::train, run);
        run.skipped = index.held_out_from;
        run.tokens = index.tokens - index.held_out_from;
        add(Split::held_out, run);
        fingerprint_ = mix64(fingerprint_, index.checksum, static_cast<uint64_t>(index.held_out_from));
        documents_ += index.documents;
        ++files_;
    }
    if (!alone.empty())
        warnings_.push_back(
            fmt::format("{}: .bin files without an .idx file, which are left out: {}, for example {}",
                        where(), alone.size(), alone.front()));
    require(files_ > 0, ExitCode::data, "{}: no .idx file", where());
    check();
    if (held_out > 0.0)
        check_share(held_out,
                    fmt::format("the last of {} documents are, of each file at least one; name longer files",
                                documents_));
}

std::optional<double> MegatronSource::bytes_per_token() const {
    if (text_bytes_ <= 0) return std::nullopt;
    return f64(text_bytes_) / f64(num_tokens(Split::train) + num_tokens(Split::held_out));
}

std::string MegatronSource::description() const {
    return fmt::format(
        "Megatron data: {} files, {} documents; train {} tokens; held-out {} tokens; vocabulary {}", files_,
        documents_, num_tokens(Split::train), num_tokens(Split::held_out), vocab_size());
}

}  // namespace fp8flow::data
