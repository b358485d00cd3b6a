// SPDX-License-Identifier: MIT
// One safetensors file, mapped into memory and checked as a whole when it is opened; reading a tensor is then
// a pointer into it. Read next: tensor_set.h for models spread over several files.
#pragma once

#include "model/safetensors/header.h"

#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

namespace fp8flow {

class SafetensorsFile {
public:
    // Throws Error(data) with file, tensor and numbers unless the whole file is in order.
    explicit SafetensorsFile(const std::string& path);
    ~SafetensorsFile();
    SafetensorsFile(const SafetensorsFile&) = delete;
    SafetensorsFile& operator=(const SafetensorsFile&) = delete;

    const std::string& path() const { return path_; }
    int64_t size() const { return file_.size(); }
    const SafetensorsHeader& header() const { return header_; }
    const std::vector<TensorEntry>& tensors() const { return header_.tensors; }
    const TensorEntry* find(std::string_view name) const;  // null: not in this file
    // The bytes in the file, at any alignment. Refuses a file that was truncated since it was opened. If it
    // is truncated while the bytes are read, the process ends, as with every mapped file.
    std::span<const uint8_t> bytes(const TensorEntry& entry) const;

private:
    std::string path_;
    InputFile file_;
    const uint8_t* data_ = nullptr;
    SafetensorsHeader header_;
    std::unordered_map<std::string_view, size_t> by_name_;  // into header_.tensors
};

// Elements first .. first + count of a tensor as floats. Throws Error(data) for integer and boolean tensors.
void read_floats(const TensorEntry& entry, std::span<const uint8_t> bytes, int64_t first,
                 std::span<float> out);

}  // namespace fp8flow
