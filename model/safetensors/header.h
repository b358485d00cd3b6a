// SPDX-License-Identifier: MIT
// The header of a safetensors file: element types, tensors with shape and place, and a parser that trusts
// nothing. Every number is checked before it is used, so a file can neither make us allocate nor read outside
// its data. Read next: file.h.
#pragma once

#include "model/safetensors/input.h"

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow {

// Element types that the format knows and we store or convert. The narrower ones (F4, F6) and complex numbers
// are refused by name.
enum class FileDType : uint8_t {
    boolean,
    u8,
    i8,
    e5m2,
    e4m3,
    e8m0,
    i16,
    u16,
    f16,
    bf16,
    i32,
    u32,
    f32,
    i64,
    u64,
    f64
};
int64_t size_of(FileDType dtype);                               // bytes of one element
const char* name_of(FileDType dtype);                           // as in the file: "F8_E4M3"
std::optional<FileDType> file_dtype_of(std::string_view name);  // empty: not one of ours

// Limits on what a header may claim.
constexpr int64_t kMaxHeaderBytes = int64_t{16} << 20;
constexpr size_t kMaxTensorRank = 8;
constexpr size_t kMaxTensorName = 1024;

struct TensorEntry {
    std::string name;
    FileDType dtype = FileDType::f32;
    std::vector<int64_t> shape;  // empty: a scalar
    int64_t begin = 0, end = 0;  // bytes, from the start of the data section
    int64_t bytes() const { return end - begin; }
    int64_t numel() const { return bytes() / size_of(dtype); }
};
std::string describe(const TensorEntry& entry);  // "BF16[128, 256]"

struct SafetensorsHeader {
    std::vector<TensorEntry> tensors;  // by place: they cover the data section without gap or overlap
    std::map<std::string, std::string> metadata;  // "__metadata__"
    int64_t data_start = 0;                       // of the data section in the file
    int64_t data_bytes = 0;
};

// Elements of a shape times the size of one, or nothing where that exceeds 63 bits.
std::optional<int64_t> checked_bytes(FileDType dtype, std::span<const int64_t> shape);

// Bytes of the header after its 8-byte length: reads `first`, the first bytes of a file of
// `file_bytes`. Throws Error(code).
int64_t header_length(std::span<const uint8_t> first, int64_t file_bytes, const std::string& file,
                      ExitCode code);
// The header from its JSON text, in a file of `file_bytes` bytes. Throws Error(code) naming file and tensor.
SafetensorsHeader parse_header(std::string_view text, int64_t file_bytes, const std::string& file,
                               ExitCode code);

// Whether a name may appear in messages and files: not empty, not too long, no control characters.
bool is_plain_tensor_name(std::string_view name);
// Throws Error(code) naming `file`, which holds the name.
void require_plain_tensor_name(std::string_view name, const std::string& file, ExitCode code);

}  // namespace fp8flow
