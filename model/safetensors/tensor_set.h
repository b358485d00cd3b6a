// SPDX-License-Identifier: MIT
// The tensors of a model in one or several safetensors files, as a name to a place. The files of an index are
// opened when one of their tensors is looked up, so that one layer of a large model needs only the files that
// hold it.
#pragma once

#include "model/safetensors/file.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fp8flow {

class TensorSet {
public:
    // `path`: a .safetensors file, an index (.json), or a folder that holds model.safetensors.index.json,
    // model.safetensors, or a single .safetensors file. An index may name only plain files next to it.
    // Throws Error(data) where it cannot be read as such.
    explicit TensorSet(const std::string& path);

    const std::string& path() const { return path_; }
    std::vector<std::string> names() const;
    bool contains(const std::string& name) const { return file_of_.contains(name); }

    struct Item {
        const SafetensorsFile* file = nullptr;
        const TensorEntry* entry = nullptr;
        explicit operator bool() const { return entry != nullptr; }
        std::span<const uint8_t> bytes() const { return file->bytes(*entry); }
    };
    // Absent if there is no such tensor. Opens and checks the file that holds it, and that it has every
    // tensor that the index gives it and none of those that the index gives another file.
    Item find(const std::string& name) const;
    // Tensors that the files opened so far hold and the index does not name.
    const std::vector<Item>& unindexed() const { return unindexed_; }
    // Files of a folder that end in .safetensors and are no part of the set.
    const std::vector<std::string>& unread() const { return unread_; }

private:
    const SafetensorsFile& open(const std::string& file) const;

    std::string path_, folder_;
    bool indexed_ = false;
    std::map<std::string, std::string> file_of_;  // tensor -> plain file name
    std::vector<std::string> unread_;
    mutable std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
    mutable std::vector<Item> unindexed_;
};

// What an index file says: tensor -> plain file name. Throws Error(data).
std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file);

constexpr size_t kMostListedProblems = 100;
// One Error(code) with a line per problem, at most kMostListedProblems and the number of the others; nothing
// if there is none.
void throw_problems(const std::vector<std::string>& problems, ExitCode code);

}  // namespace fp8flow
