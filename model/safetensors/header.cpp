// SPDX-License-Identifier: MIT
// Reading a safetensors header: each tensor for itself, then the places of all are compared.
#include "model/safetensors/header.h"

#include "model/safetensors/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace fp8flow {

namespace {

// In the order of FileDType.
struct DTypeName {
    std::string_view name;
    int64_t bytes;
};
constexpr DTypeName kDTypes[] = {{"BOOL", 1},    {"U8", 1},      {"I8", 1},  {"F8_E5M2", 1},
                                 {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
                                 {"F16", 2},     {"BF16", 2},    {"I32", 4}, {"U32", 4},
                                 {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8}};
static_assert(std::size(kDTypes) == static_cast<size_t>(FileDType::f64) + 1);
constexpr const char* kMetadata = "__metadata__";
constexpr int64_t kLengthBytes = 8;

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; }

// `what`: the list, for messages.
std::vector<int64_t> integers(const nlohmann::json& list, const std::string& what, size_t most,
                              ExitCode code) {
    require(list.is_array(), code, "{} is {}, want a list of integers", what, kind_of(list));
    require(list.size() <= most, code, "{} has {} numbers, want at most {}", what, list.size(), most);
    std::vector<int64_t> numbers;
    for (const nlohmann::json& item : list) {
        const auto number = whole_number(item);
        require(number && *number >= 0, code, "{} holds {}, want integers from 0 to 2^63 - 1", what,
                item.is_number() ? item.dump() : kind_of(item));
        numbers.push_back(*number);
    }
    return numbers;
}

// {"dtype": text, "shape": [n...], "data_offsets": [begin, end]}
TensorEntry read_tensor(const std::string& name, const nlohmann::json& json, int64_t data_bytes,
                        const std::string& file, ExitCode code) {
    require_plain_tensor_name(name, file, code);
    require(json.is_object(), code, "{}: \"{}\" is {}, want an object", file, printable(name), kind_of(json));
    const std::string where = fmt::format("{}: tensor \"{}\"", file, printable(name));
    TensorEntry entry{.name = name};
    std::vector<int64_t> offsets;
    for (const auto& [key, value] : json.items()) {
        const std::string what = fmt::format("{}: {}", where, printable(key));
        if (key == "dtype") {
            require(value.is_string(), code, "{} is {}, want text", what, kind_of(value));
            const auto& text = value.get_ref<const std::string&>();
            const auto dtype = file_dtype_of(text);
            require(dtype.has_value(), code,
                    "{} \"{}\" is not supported (BOOL, U8 to I64, F8_E4M3, F8_E5M2, F8_E8M0, F16, BF16, F32, "
                    "F64 are)",
                    what, printable(text));
            entry.dtype = *dtype;
        } else if (key == "shape") {
            entry.shape = integers(value, what, kMaxTensorRank, code);
        } else {
            require(key == "data_offsets", code, "{}: unknown key \"{}\"", where, printable(key));
            offsets = integers(value, what, 2, code);
            require(offsets.size() == 2, code, "{} has {} numbers, want 2", what, offsets.size());
        }
    }
    for (const char* wanted : {"dtype", "shape", "data_offsets"})
        require(json.contains(wanted), code, "{}: \"{}\" is missing", where, wanted);
    entry.begin = offsets[0];
    entry.end = offsets[1];
    const auto bytes = checked_bytes(entry.dtype, entry.shape);
    require(bytes.has_value(), code, "{}: its shape has more bytes than 63 bits can count", where);
    require(entry.begin <= entry.end, code, "{}: data_offsets begin at {} and end at {}", where, entry.begin,
            entry.end);
    require(entry.end <= data_bytes, code,
            "{}: ends at byte {} of the data, the file has {}: it is cut off, or another header's", where,
            entry.end, data_bytes);
    require(entry.bytes() == *bytes, code, "{}: data_offsets span {} bytes, {} takes {}", where,
            entry.bytes(), describe(entry), *bytes);
    return entry;
}

// The tensors, sorted by place, cover the data from its first byte to its last.
std::string problem_of_places(const SafetensorsHeader& header) {
    int64_t covered = 0;
    const TensorEntry* before = nullptr;
    for (const TensorEntry& entry : header.tensors) {
        if (entry.begin < covered)
            return fmt::format("tensor \"{}\" begins at byte {} inside tensor \"{}\", which ends at {}",
                               printable(entry.name), entry.begin, printable(before->name), before->end);
        if (entry.begin > covered)
            return fmt::format("tensor \"{}\" begins at byte {}: bytes {} to {} belong to no tensor",
                               printable(entry.name), entry.begin, covered, entry.begin - 1);
        covered = entry.end;
        before = &entry;
    }
    if (covered != header.data_bytes)
        return fmt::format("{} bytes after the last tensor belong to no tensor", header.data_bytes - covered);
    return "";
}

}  // namespace

int64_t size_of(FileDType dtype) { return kDTypes[static_cast<size_t>(dtype)].bytes; }
const char* name_of(FileDType dtype) { return kDTypes[static_cast<size_t>(dtype)].name.data(); }

std::optional<FileDType> file_dtype_of(std::string_view name) {
    const auto* const found = std::ranges::find(kDTypes, name, &DTypeName::name);
    if (found == std::end(kDTypes)) return std::nullopt;
    return static_cast<FileDType>(found - std::begin(kDTypes));
}

std::string describe(const TensorEntry& entry) {
    return fmt::format("{}[{}]", name_of(entry.dtype), fmt::join(entry.shape, ", "));
}

std::optional<int64_t> checked_bytes(FileDType dtype, std::span<const int64_t> shape) {
    int64_t bytes = size_of(dtype);
    for (const int64_t dim : shape)
        if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) return std::nullopt;
    return bytes;
}

bool is_plain_tensor_name(std::string_view name) {
    return !name.empty() && name.size() <= kMaxTensorName && std::ranges::none_of(name, is_control);
}

void require_plain_tensor_name(std::string_view name, const std::string& file, ExitCode code) {
    require(is_plain_tensor_name(name), code,
            "{}: a tensor is named \"{}\": a name has 1 to {} bytes and no control characters", file,
            printable(name), kMaxTensorName);
}

int64_t header_length(std::span<const uint8_t> first, int64_t file_bytes, const std::string& file,
                      ExitCode code) {
    require(
        file_bytes >= kLengthBytes && first.size() >= kLengthBytes, code,
        "{}: {} bytes are too few for a safetensors file, which begins with the length of its header in 8",
        file, file_bytes);
    refuse_lfs_pointer({reinterpret_cast<const char*>(first.data()), first.size()}, file, code);
    uint64_t length = 0;  // little endian
    for (int i = kLengthBytes; i-- > 0;) length = length << 8 | first[static_cast<size_t>(i)];
    require(length <= static_cast<uint64_t>(kMaxHeaderBytes), code,
            "{}: its first 8 bytes claim a header of {} bytes, at most {} are read: no safetensors file, or "
            "a damaged one",
            file, length, kMaxHeaderBytes);
    require(static_cast<int64_t>(length) <= file_bytes - kLengthBytes, code,
            "{}: claims a header of {} bytes, only {} follow: the file is cut off", file, length,
            file_bytes - kLengthBytes);
    return static_cast<int64_t>(length);
}

SafetensorsHeader parse_header(std::string_view text, int64_t file_bytes, const std::string& file,
                               ExitCode code) {
    require(!text.empty() && text.front() == '{', code, "{}: its header does not begin with '{{'", file);
    SafetensorsHeader header;
    header.data_start = kLengthBytes + static_cast<int64_t>(text.size());
    header.data_bytes = file_bytes - header.data_start;
    const nlohmann::json json = parse_json(text, file, code);
    for (const auto& [name, value] : json.items()) {
        if (name != kMetadata) {
            header.tensors.push_back(read_tensor(name, value, header.data_bytes, file, code));
            continue;
        }
        require(value.is_object(), code, "{}: {} is {}, want an object", file, kMetadata, kind_of(value));
        for (const auto& [key, item] : value.items()) {
            require(item.is_string(), code, "{}: {} \"{}\" is {}, want text", file, kMetadata, printable(key),
                    kind_of(item));
            header.metadata[key] = item.get<std::string>();
        }
    }
    std::ranges::stable_sort(header.tensors, {},
                             [](const TensorEntry& entry) { return std::pair(entry.begin, entry.end); });
    const std::string problem = problem_of_places(header);
    require(problem.empty(), code, "{}: {}", file, problem);
    return header;
}

}  // namespace fp8flow
