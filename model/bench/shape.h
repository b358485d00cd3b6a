// SPDX-License-Identifier: MIT
// The shape of a benchmarked operation: named numbers and words, given as "T=4096,H=7168,dtype=bf16"; what is
// not given has a default.
#pragma once

#include "kernels/core/scaled_tensor.h"

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::bench {

// layer: the default, as in a DeepSeek-V3 layer with 4096 tokens on the GPU. small: for a quick look, and for
// the CPU.
struct Key {
    const char* name;
    const char* layer;
    const char* small;
    const char* meaning;
};
using Keys = std::vector<Key>;

enum class Size : uint8_t { layer, small };

class Shape {
public:
    // `given`: "key=value,key=value". Throws Error(usage) that names the operation for a key it does not
    // have.
    Shape(std::string operation, const Keys& keys, Size size, std::string_view given);

    // All throw Error(usage) for values they cannot be.
    int64_t number(std::string_view key) const;    // 0 to 2^40
    int64_t positive(std::string_view key) const;  // 1 to 2^40
    bool yes(std::string_view key) const;          // yes | no
    // The place of the value in `words`.
    int64_t choice(std::string_view key, const std::vector<std::string>& words) const;
    DType dtype(std::string_view key, std::initializer_list<DType> allowed) const;
    ScaleLayout layout(std::string_view key, std::initializer_list<ScaleLayout> allowed) const;
    ScaleFormat scale_format() const;  // key "scale"
    MxRounding mx_rounding() const;    // key "rounding"
    Gradient gradient() const;         // key "mode"

    bool has(std::string_view key) const;
    const std::string& operation() const { return operation_; }
    std::string text() const;        // every key, "T=4096 H=7168 dtype=bf16"
    std::string short_text() const;  // numbers, and the words that are not the default's

private:
    const std::string& value(std::string_view key) const;
    [[noreturn]] void refuse(std::string_view key, const std::string& want) const;

    struct Value {
        std::string name, given, usual;
    };
    std::string operation_;
    std::vector<Value> values_;
};

}  // namespace fp8flow::bench
