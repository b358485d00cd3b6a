// SPDX-License-Identifier: MIT
// Which file holds a tensor: the index, and the check of each file against it.
#include "model/safetensors/tensor_set.h"

#include "model/safetensors/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {

namespace fs = std::filesystem;

namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kEnding = ".safetensors";
constexpr const char* kMap = "weight_map";

// A file next to the index: no folder, no way out of it, nothing hidden.
bool is_plain_sibling(std::string_view name) {
    const auto bad = [](char c) { return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20; };
    return name.size() <= 255 && name.size() > std::strlen(kEnding) && name.front() != '.' &&
           name.ends_with(kEnding) && std::ranges::none_of(name, bad);
}

// The file or index to open for a folder; `found`: the names of its .safetensors files.
std::string model_of_folder(const fs::path& folder, std::set<std::string>& found) {
    std::error_code error, ignored;
    for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
        if (at->path().extension() == kEnding) found.insert(at->path().filename().string());
    for (const char* name : {kIndexName, kSingleName})
        if (fs::exists(folder / name, ignored)) return folder / name;
    require(!error, class_of(error.value(), ExitCode::data), "{}: {}", folder.string(), error.message());
    require(found.size() == 1, ExitCode::data,
            "{}: holds {} .safetensors files and no {}, want one of the two; name a file", folder.string(),
            found.size(), kIndexName);
    return folder / *found.begin();
}

}  // namespace

void throw_problems(const std::vector<std::string>& problems, ExitCode code) {
    if (problems.empty()) return;
    const size_t listed = std::min(problems.size(), kMostListedProblems);
    std::string text = fmt::format("{}", fmt::join(std::span(problems).first(listed), "\n"));
    if (problems.size() > listed) text += fmt::format("\nand {} more", problems.size() - listed);
    throw Error(code, text);
}

std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file) {
    constexpr ExitCode code = ExitCode::data;
    const nlohmann::json json = parse_json(text, file, code);
    require(json.is_object(), code, "{}: is {}, want an object with weight_map", file, kind_of(json));
    require(json.contains(kMap), code, "{}: has no weight_map, which says in which file a tensor is", file);
    const nlohmann::json& map = json[kMap];
    require(map.is_object(), code, "{}: weight_map is {}, want an object", file, kind_of(map));
    require(!map.empty(), code, "{}: its weight_map is empty", file);
    std::map<std::string, std::string> files;
    for (const auto& [tensor, holder] : map.items()) {
        require_plain_tensor_name(tensor, file, code);
        require(holder.is_string(), code, "{}: the file of tensor \"{}\" is {}, want text", file,
                printable(tensor), kind_of(holder));
        const auto& name = holder.get_ref<const std::string&>();
        require(
            is_plain_sibling(name), code,
            "{}: tensor \"{}\" is said to be in \"{}\"; an index may name only .safetensors files next to "
            "it, without a folder",
            file, printable(tensor), printable(name));
        files[tensor] = name;
    }
    return files;
}

TensorSet::TensorSet(const std::string& path) : path_(path) {
    std::error_code ignored;
    std::set<std::string> found;
    const std::string model = fs::is_directory(path, ignored) ? model_of_folder(path, found) : path;
    const fs::path place(model);
    folder_ = place.parent_path().string();
    if (place.extension() == ".json") {
        file_of_ = parse_index(read_text_file(model, ExitCode::data), model);
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
    auto opened = std::make_unique<SafetensorsFile>((fs::path(folder_) / file).string());
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
        throw_problems(problems, ExitCode::data);
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
