// SPDX-License-Identifier: MIT
// Writes a safetensors file as a stream: the header first, from the declared names and shapes, then each
// tensor's bytes in the declared order, in parts of any size. Nothing of a tensor is kept.
#pragma once

#include "model/safetensors/header.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fp8flow {

struct TensorDeclaration {
    std::string name;
    FileDType dtype = FileDType::f32;
    std::vector<int64_t> shape;
};

class SafetensorsWriter {
public:
    using Sink = std::function<void(const void* data, size_t bytes)>;

    // Hands the header to the sink. Throws Error(internal) for names and shapes that no reader would take.
    SafetensorsWriter(const std::vector<TensorDeclaration>& tensors,
                      const std::map<std::string, std::string>& metadata, Sink sink);

    // The next bytes of `name`, which is the first declared tensor that is not complete yet.
    void append(std::string_view name, const void* data, int64_t bytes);
    // Checks that every tensor is complete.
    void finish();

    int64_t file_bytes() const { return header_.data_start + header_.data_bytes; }  // of the finished file
    const SafetensorsHeader& header() const { return header_; }  // with every tensor's place

private:
    void skip_complete();

    SafetensorsHeader header_;
    Sink sink_;
    size_t at_ = 0;        // tensor being written
    int64_t written_ = 0;  // of its bytes
};

}  // namespace fp8flow
