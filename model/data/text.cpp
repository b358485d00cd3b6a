// SPDX-License-Identifier: MIT
// Loading, splitting and reading byte-level text.
#include "model/data/text.h"

#include "kernels/core/error.h"
#include "kernels/core/random.h"
#include "model/data/permutation.h"
#include "model/safetensors/input.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <utility>

namespace fp8flow::data {

namespace {

constexpr size_t kSniffBytes = 4096;  // a zero byte among them: binary, as for git and grep

// FNV-1a leaves the high bits of short strings poor; the finaliser spreads them before the comparison with a
// fraction.
uint64_t path_hash(const std::string& relative) { return mix64(fnv1a64(relative)); }

}  // namespace

bool is_held_out(const std::string& relative_path, double held_out_fraction) {
    return unit_interval(path_hash(relative_path)) < held_out_fraction;
}

TextSource::TextSource(const Config& config)
    : WindowedSource(config), where_(fmt::format("{}", fmt::join(config.data.data_path, ", "))) {
    const DataSpec& spec = config.data;
    FP8FLOW_CHECK(spec.held_out_fraction >= 0 && spec.held_out_fraction < 1 && spec.max_bytes > 0,
                  "held_out_fraction {}, max_bytes {}", spec.held_out_fraction, spec.max_bytes);
    split(load(spec), spec.held_out_fraction);
    require_one_window(Split::train, where_);
    if (spec.held_out_fraction > 0.0) require_one_window(Split::held_out, where_);
}

std::vector<TextSource::Document> TextSource::load(const DataSpec& spec) {
    const auto [files, warnings] = list_data_files(spec.data_path, spec.file_extensions);
    warnings_ = warnings;
    std::vector<Document> documents;
    std::unordered_set<uint64_t> contents;
    int64_t left = spec.max_bytes;
    for (const DataFile& file : files) {
        if (left == 0) {
            cut_ = true;
            break;
        }
        // One byte more than fits tells a file that ends here from one that is cut.
        std::vector<uint8_t> bytes = read_data_file(file.path, left + 1);
        if (bytes.empty()) {
            leave_out(file, empty_, "it is empty");
            continue;
        }
        const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        if (text.substr(0, kSniffBytes).find('\0') != std::string_view::npos) {
            leave_out(file, binary_, "it is binary (a zero byte in the first 4 KiB)");
            continue;
        }
        if (is_lfs_pointer(text)) {
            leave_out(file, pointers_, "it is a Git LFS pointer (git lfs pull fetches the file)");
            continue;
        }
        const uint64_t content = mix64(fnv1a64(text), text.size());
        if (!contents.insert(content).second) {
            leave_out(file, copies_, "it is a copy of another");
            continue;
        }
        if (std::ssize(bytes) > left) {
            bytes.resize(to_size(left));
            cut_ = true;
        }
        left -= std::ssize(bytes);
        fingerprint_ = mix64(fingerprint_, path_hash(file.relative), content);
        documents.push_back({file.relative, std::move(bytes), content});
    }
    require(
        !documents.empty(), ExitCode::data,
        "{}: no text: {} files found, of which {} binary (a zero byte in the first 4 KiB), {} empty, {} Git "
        "LFS pointers (git lfs pull fetches the files); name other files in data.data_path or widen its list "
        "of extensions",
        where_, files.size(), binary_, empty_, pointers_);
    if (cut_) {
        int64_t all = 0;
        for (const DataFile& file : files) all += file.bytes;
        warnings_.push_back(fmt::format(
            "data.max_bytes = {} cuts the text: {} of {} bytes are read, of {} of {} files; raise "
            "it to read more",
            spec.max_bytes, spec.max_bytes - left, all, documents.size(), files.size()));
    }
    return documents;
}

void TextSource::leave_out(const DataFile& file, int64_t& count, const char* reason) {
    ++count;
    if (file.named)
        warnings_.push_back(fmt::format("data.data_path: {} is not read: {}", printable(file.path), reason));
}

void TextSource::split(std::vector<Document> documents, double held_out_fraction) {
    fingerprint_ = mix64(fingerprint_, static_cast<uint64_t>(std::llround(held_out_fraction * 1e9)));
    if (documents.size() == 1 && held_out_fraction > 0.0) {
        single_file_ = true;
        std::vector<uint8_t>& bytes = documents[0].bytes;
        auto cut = bytes.begin() + static_cast<int64_t>(f64(bytes.size()) * (1.0 - held_out_fraction));
        // At a line end if one is near: words stay whole. A file without lines is cut where it is.
        const auto line_end = std::find(cut, std::min(cut + 4096, bytes.end()), '\n');
        if (line_end != bytes.end() && *line_end == '\n' && line_end + 1 != bytes.end()) cut = line_end + 1;
        append(Split::held_out,
               {documents[0].relative, {cut, bytes.end()}, documents[0].content, cut - bytes.begin()});
        bytes.erase(cut, bytes.end());
        append(Split::train, std::move(documents[0]));
        check_share(held_out_fraction, "the file is cut at a line end; name more text");
        return;
    }
    std::vector<bool> held_out(documents.size());
    size_t lowest = 0, highest = 0;  // the files nearest to the other side of the threshold
    size_t count = 0;
    for (size_t i = 0; i < documents.size(); ++i) {
        const uint64_t hash = path_hash(documents[i].relative);
        held_out[i] = is_held_out(documents[i].relative, held_out_fraction);
        count += held_out[i] ? 1 : 0;
        if (hash < path_hash(documents[lowest].relative)) lowest = i;
        if (hash > path_hash(documents[highest].relative)) highest = i;
    }
    if (held_out_fraction > 0.0 && count == 0) held_out[lowest] = true;
    if (count == documents.size()) held_out[highest] = false;
    for (size_t i = 0; i < documents.size(); ++i)
        append(held_out[i] ? Split::held_out : Split::train, std::move(documents[i]));
    if (held_out_fraction > 0.0)
        check_share(held_out_fraction,
                    fmt::format("whole files are, here {} of {}; name more files, or divide large ones",
                                part(Split::held_out).files.size(), held_out.size()));
}

void TextSource::append(Split split, Document document) {
    Part& part = parts_[to_size(split)];
    part.stream.insert(part.stream.end(), document.bytes.begin(), document.bytes.end());
    part.ends.push_back(std::ssize(part.stream));
    part.stream.push_back(0);
    part.files.push_back(std::move(document.relative));
    part.pieces.push_back({document.content, document.begin, document.begin + std::ssize(document.bytes)});
}

// Where a text that is cut ends is in its lengths.
uint64_t TextSource::fingerprint() const {
    if (!cut_) return fingerprint_;
    return mix64(fingerprint_, static_cast<uint64_t>(num_tokens(Split::train)),
                 static_cast<uint64_t>(num_tokens(Split::held_out)));
}

int64_t TextSource::num_tokens(Split split) const { return static_cast<int64_t>(part(split).stream.size()); }

void TextSource::read(Split split, int64_t first, std::span<int32_t> tokens) const {
    const Part& source = part(split);
    const int64_t end = first + std::ssize(tokens);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = source.stream[to_size(first) + i];
    for (auto at = std::ranges::lower_bound(source.ends, first); at != source.ends.end() && *at < end; ++at)
        tokens[to_size(*at - first)] = kEndOfDocument;
}

std::string TextSource::description() const {
    std::string text =
        fmt::format("byte-level text of {}: train {} files, {} tokens; held-out {} files, {} tokens", where_,
                    part(Split::train).files.size(), num_tokens(Split::train),
                    part(Split::held_out).files.size(), num_tokens(Split::held_out));
    if (single_file_) text += " (one file: its end is held out)";
    if (binary_ + empty_ + copies_ > 0)
        text += fmt::format("; left out {} binary, {} empty, {} copies", binary_, empty_, copies_);
    if (pointers_ > 0)
        text += fmt::format("; left out {} Git LFS pointers: git lfs pull fetches the files", pointers_);
    if (cut_) text += "; cut at data.max_bytes";
    return text;
}

}  // namespace fp8flow::data
