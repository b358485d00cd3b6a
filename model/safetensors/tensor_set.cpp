// SPDX-License-Identifier: MIT
// Which file holds a tensor: the index, read as a stream of JSON events, and the check of each file against
// it.
#include "model/safetensors/tensor_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {

namespace fs = std::filesystem;

namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kEnding = ".safetensors";
constexpr int kMaxIndexDepth = 16;

// A file next to the index: no folder, no way out of it, nothing hidden.
bool is_plain_sibling(std::string_view name) {
    const auto bad = [](char c) { return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20; };
    return name.size() <= 255 && name.size() > std::strlen(kEnding) && name.front() != '.' &&
           name.ends_with(kEnding) && std::none_of(name.begin(), name.end(), bad);
}

// {"metadata": anything, "weight_map": {tensor: file, ...}}
class IndexReader : public nlohmann::json_sax<nlohmann::json> {
public:
    std::map<std::string, std::string> files;
    std::string problem;
    bool has_map = false;

    bool null() override { return other("null"); }
    bool boolean(bool) override { return other("true or false"); }
    bool number_integer(int64_t) override { return other("a number"); }
    bool number_unsigned(uint64_t) override { return other("a number"); }
    bool number_float(double, const std::string&) override { return other("a number"); }
    bool binary(binary_t&) override { return other("binary data"); }
    bool string(std::string& value) override {
        if (!in_map()) return other("text");
        if (!is_plain_sibling(value))
            return refuse(
                "tensor \"{}\" is said to be in \"{}\"; an index may name only .safetensors files next to "
                "it, "
                "without a folder",
                printable(tensor_), printable(value));
        files[tensor_] = value;
        return true;
    }
    bool key(std::string& name) override {
        if (depth_ == 1) {
            if (!sections_.insert(name).second) return refuse("\"{}\" appears twice", printable(name));
            section_ = name;
        } else if (in_map()) {
            if (!is_plain_tensor_name(name))
                return refuse("a tensor is named \"{}\": a name has 1 to {} bytes and no control characters",
                              printable(name), kMaxTensorName);
            if (files.contains(name))
                return refuse("tensor \"{}\" appears twice in weight_map", printable(name));
            tensor_ = name;
        }
        return true;
    }
    bool start_object(size_t) override {
        if (in_map()) return other("an object");
        if (depth_ == 1 && section_ == kMap) has_map = true;
        return deeper();
    }
    bool end_object() override { return --depth_, true; }
    bool start_array(size_t) override {
        return depth_ == 0 || in_map() || at_map() ? other("a list") : deeper();
    }
    bool end_array() override { return --depth_, true; }
    bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
        return refuse("no JSON at byte {}: {}", position, printable(error.what()));
    }

private:
    static constexpr const char* kMap = "weight_map";
    bool in_map() const { return depth_ == 2 && section_ == kMap; }
    bool at_map() const { return depth_ == 1 && section_ == kMap; }

    template <class... Args> bool refuse(fmt::format_string<Args...> format, Args&&... args) {
        problem = fmt::format(format, std::forward<Args>(args)...);
        return false;
    }
    bool deeper() {
        if (++depth_ > kMaxIndexDepth) return refuse("nested deeper than {}", kMaxIndexDepth);
        return true;
    }
    bool other(const char* got) {
        if (depth_ == 0) return refuse("is {}, want an object with weight_map", got);
        if (in_map()) return refuse("the file of tensor \"{}\" is {}, want text", printable(tensor_), got);
        if (at_map()) return refuse("weight_map is {}, want an object", got);
        return true;  // elsewhere, e.g. metadata: total_size
    }

    int depth_ = 0;
    std::string section_, tensor_;
    std::set<std::string> sections_;
};

std::string read_index_text(const std::string& path, const OpenTensors& options) {
    std::error_code error;
    const fs::file_status status =
        options.links == FileLinks::refuse ? fs::symlink_status(path, error) : fs::status(path, error);
    require(!error && fs::is_regular_file(status), class_of(error.value(), options.code), "{}: {}", path,
            error ? error.message() : "not a regular file");
    const uintmax_t size = fs::file_size(path, error);
    require(!error && size <= static_cast<uintmax_t>(kMaxIndexBytes), options.code,
            "{}: has {} bytes, at most {} are read: no index of safetensors files", path, size,
            kMaxIndexBytes);
    std::ifstream file(path, std::ios::binary);
    require(file.good(), options.code, "{}: cannot be read", path);
    std::string text(static_cast<size_t>(size), '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(file.gcount()));
    return text;
}

// The file or index to open for a folder; `found`: the names of its .safetensors files.
std::string model_of_folder(const fs::path& folder, ExitCode code, std::set<std::string>& found) {
    std::error_code error, ignored;
    for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
        if (at->path().extension() == kEnding) found.insert(at->path().filename().string());
    for (const char* name : {kIndexName, kSingleName})
        if (fs::exists(folder / name, ignored)) return folder / name;
    require(!error, class_of(error.value(), code), "{}: {}", folder.string(), error.message());
    require(found.size() == 1, code,
            "{}: holds {} .safetensors files and no {}, want one of the two; name a file", folder.string(),
            found.size(), kIndexName);
    return folder / *found.begin();
}

}  // namespace

void throw_problems(const std::vector<std::string>& problems, ExitCode code) {
    if (problems.empty()) return;
    std::string text = fmt::format(
        "{}",
        fmt::join(problems.begin(),
                  problems.begin() + static_cast<int64_t>(std::min(problems.size(), kMostListedProblems)),
                  "\n"));
    if (problems.size() > kMostListedProblems)
        text += fmt::format("\nand {} more", problems.size() - kMostListedProblems);
    throw Error(code, text);
}

std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file,
                                               ExitCode code) {
    refuse_lfs_pointer(text, file, code);
    // the JSON reader would take one for the end of the text
    require(text.find('\0') == std::string_view::npos, code, "{}: has a zero byte", file);
    IndexReader reader;
    const bool read = nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
    require(read, code, "{}: {}", file, reader.problem);
    require(reader.has_map, code, "{}: has no weight_map, which says in which file a tensor is", file);
    require(!reader.files.empty(), code, "{}: its weight_map is empty", file);
    return std::move(reader.files);
}

TensorSet::TensorSet(const std::string& path, const OpenTensors& options) : path_(path), options_(options) {
    std::error_code ignored;
    std::set<std::string> found;
    const std::string model =
        fs::is_directory(path, ignored) ? model_of_folder(path, options.code, found) : path;
    const fs::path place(model);
    folder_ = place.parent_path().string();
    if (place.extension() == ".json") {
        file_of_ = parse_index(read_index_text(model, options), model, options.code);
        indexed_ = true;
    } else {
        const std::string name = place.filename().string();
        for (const TensorEntry& entry : open(name).tensors()) file_of_[entry.name] = name;
    }
    for (const auto& [tensor, file] : file_of_) found.erase(file);
    unread_.assign(found.begin(), found.end());
}

std::vector<std::string> TensorSet::names() const {
    std::vector<std::string> names;
    for (const auto& [name, file] : file_of_) names.push_back(name);
    return names;
}

const SafetensorsFile& TensorSet::open(const std::string& file) const {
    auto& slot = files_[file];
    if (slot) return *slot;
    auto opened = std::make_unique<SafetensorsFile>((fs::path(folder_) / file).string(), options_);
    if (indexed_) {
        std::vector<std::string> problems;
        for (const TensorEntry& entry : opened->tensors()) {
            const auto listed = file_of_.find(entry.name);
            if (listed != file_of_.end() && listed->second != file)
                problems.push_back(fmt::format("{}: holds tensor \"{}\", which the index puts into {}",
                                               opened->path(), printable(entry.name), listed->second));
        }
        for (const auto& [name, holder] : file_of_)
            if (holder == file && opened->find(name) == nullptr)
                problems.push_back(fmt::format("{}: tensor \"{}\" is missing, the index puts it here",
                                               opened->path(), printable(name)));
        throw_problems(problems, options_.code);
        for (const TensorEntry& entry : opened->tensors())
            if (!file_of_.contains(entry.name)) unindexed_.push_back({opened.get(), &entry});
    }
    slot = std::move(opened);
    return *slot;
}

TensorSet::Item TensorSet::find(const std::string& name) const {
    const auto found = file_of_.find(name);
    if (found == file_of_.end()) return {};
    const SafetensorsFile& file = open(found->second);
    return {&file, file.find(name)};
}

}  // namespace fp8flow
