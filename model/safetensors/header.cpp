// SPDX-License-Identifier: MIT
// Reading a safetensors header: a stream of JSON events goes through a small state machine that knows the
// only legal shape of the document, so that nesting, duplicates and foreign values are refused where they
// occur; then the places of all tensors are compared.
#include "model/safetensors/header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {

namespace {

struct DTypeName {
    FileDType dtype;
    const char* name;
    int64_t bytes;
};
constexpr std::array<DTypeName, 16> kDTypes = {{{FileDType::boolean, "BOOL", 1},
                                                {FileDType::u8, "U8", 1},
                                                {FileDType::i8, "I8", 1},
                                                {FileDType::e5m2, "F8_E5M2", 1},
                                                {FileDType::e4m3, "F8_E4M3", 1},
                                                {FileDType::e8m0, "F8_E8M0", 1},
                                                {FileDType::i16, "I16", 2},
                                                {FileDType::u16, "U16", 2},
                                                {FileDType::f16, "F16", 2},
                                                {FileDType::bf16, "BF16", 2},
                                                {FileDType::i32, "I32", 4},
                                                {FileDType::u32, "U32", 4},
                                                {FileDType::f32, "F32", 4},
                                                {FileDType::i64, "I64", 8},
                                                {FileDType::u64, "U64", 8},
                                                {FileDType::f64, "F64", 8}}};
constexpr const char* kMetadata = "__metadata__";
constexpr int64_t kLengthBytes = 8;

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; }

// The only legal document: {"__metadata__": {text: text}, name: {"dtype": text, "shape": [n...],
// "data_offsets": [begin, end]}, ...}
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
public:
    explicit HeaderReader(SafetensorsHeader& header) : header_(header) {}
    const std::string& problem() const { return problem_; }

    bool null() override { return foreign("null"); }
    bool boolean(bool) override { return foreign("true or false"); }
    bool number_float(double, const std::string& text) override { return number(text); }
    bool number_integer(int64_t value) override { return number(std::to_string(value)); }
    bool binary(binary_t&) override { return foreign("binary data"); }

    bool number_unsigned(uint64_t value) override {
        if (in_ != In::list) return foreign("a number");
        if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
            return number(std::to_string(value));
        return list_item(static_cast<int64_t>(value));
    }

    bool string(std::string& value) override {
        if (in_ == In::metadata) {
            header_.metadata[key_] = value;
            return true;
        }
        if (in_ != In::tensor || key_ != "dtype") return foreign("text");
        const auto dtype = file_dtype_of(value);
        if (!dtype)
            return refuse(
                "{}: dtype \"{}\" is not supported (BOOL, U8 to I64, F8_E4M3, F8_E5M2, F8_E8M0, F16, BF16, "
                "F32, F64 are)",
                tensor(), printable(value));
        entry_.dtype = *dtype;
        return true;
    }

    bool start_object(size_t) override {
        if (in_ == In::nothing) {
            in_ = In::file;
            return true;
        }
        if (in_ != In::file) return foreign("an object");
        if (key_ == kMetadata) {
            in_ = In::metadata;
        } else {
            in_ = In::tensor;
            entry_ = {};
            entry_.name = key_;
        }
        seen_.clear();
        return true;
    }

    bool key(std::string& name) override {
        if (in_ == In::file) {
            if (name != kMetadata && !is_plain_tensor_name(name))
                return refuse("a tensor is named \"{}\": a name has 1 to {} bytes and no control characters",
                              printable(name), kMaxTensorName);
            if (!names_.insert(name).second)
                return refuse("tensor \"{}\" appears twice in the header", printable(name));
        } else {
            if (in_ == In::tensor && name != "dtype" && name != "shape" && name != "data_offsets")
                return refuse("{}: unknown key \"{}\"", tensor(), printable(name));
            if (!seen_.insert(name).second) {
                return in_ == In::metadata ? refuse("{} has the key \"{}\" twice", kMetadata, printable(name))
                                           : refuse("{}: key \"{}\" appears twice", tensor(), name);
            }
        }
        key_ = name;
        return true;
    }

    bool end_object() override {
        if (in_ == In::tensor) {
            for (const char* wanted : {"dtype", "shape", "data_offsets"})
                if (!seen_.contains(wanted)) return refuse("{}: \"{}\" is missing", tensor(), wanted);
            if (!check_size()) return false;
            header_.tensors.push_back(std::move(entry_));
        }
        in_ = In::file;
        return true;
    }

    bool start_array(size_t) override {
        if (in_ != In::tensor || key_ == "dtype") return foreign("a list");
        in_ = In::list;
        offsets_.clear();
        return true;
    }

    bool end_array() override {
        in_ = In::tensor;
        if (key_ != "data_offsets") return true;
        if (offsets_.size() != 2)
            return refuse("{}: data_offsets has {} numbers, want 2", tensor(), offsets_.size());
        entry_.begin = offsets_[0];
        entry_.end = offsets_[1];
        return true;
    }

    bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
        return refuse("the header is no JSON at byte {}: {}", position, printable(error.what()));
    }

private:
    enum class In { nothing, file, metadata, tensor, list };

    template <class... Args> bool refuse(fmt::format_string<Args...> format, Args&&... args) {
        problem_ = fmt::format(format, std::forward<Args>(args)...);
        return false;
    }
    std::string tensor() const { return fmt::format("tensor \"{}\"", printable(entry_.name)); }

    // A value where another kind belongs.
    bool foreign(const char* got) {
        switch (in_) {
            case In::nothing: return refuse("the header is {}, want an object", got);
            case In::file: return refuse("\"{}\" is {}, want an object", printable(key_), got);
            case In::metadata: return refuse("{} \"{}\" is {}, want text", kMetadata, printable(key_), got);
            case In::tensor:
                return refuse("{}: {} is {}, want {}", tensor(), key_, got,
                              key_ == "dtype" ? "text" : "a list of integers");
            case In::list: return refuse("{}: {} holds {}, want integers", tensor(), key_, got);
        }
        return false;
    }

    // A number that is no integer of 0 to 2^63 - 1.
    bool number(const std::string& text) {
        if (in_ != In::list) return foreign("a number");
        return refuse("{}: {} holds {}, want integers from 0 to 2^63 - 1", tensor(), key_, printable(text));
    }

    bool list_item(int64_t value) {
        if (key_ == "shape") {
            if (entry_.shape.size() == kMaxTensorRank)
                return refuse("{}: more than {} dimensions", tensor(), kMaxTensorRank);
            entry_.shape.push_back(value);
        } else if (offsets_.size() == 2) {
            return refuse("{}: data_offsets has more than 2 numbers", tensor());
        } else {
            offsets_.push_back(value);
        }
        return true;
    }

    bool check_size() {
        const auto wanted = checked_bytes(entry_.dtype, entry_.shape);
        if (!wanted) return refuse("{}: its shape has more bytes than 63 bits can count", tensor());
        if (entry_.begin > entry_.end)
            return refuse("{}: data_offsets begin at {} and end at {}", tensor(), entry_.begin, entry_.end);
        if (entry_.end > header_.data_bytes)
            return refuse(
                "{}: ends at byte {} of the data, the file has {}: it is cut off, or another header's",
                tensor(), entry_.end, header_.data_bytes);
        if (entry_.bytes() != *wanted)
            return refuse("{}: data_offsets span {} bytes, {} takes {}", tensor(), entry_.bytes(),
                          describe(entry_), *wanted);
        return true;
    }

    SafetensorsHeader& header_;
    In in_ = In::nothing;
    std::string key_, problem_;
    TensorEntry entry_;
    std::vector<int64_t> offsets_;
    std::set<std::string> names_, seen_;  // of the file, of the object at hand
};

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
const char* name_of(FileDType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

std::optional<FileDType> file_dtype_of(std::string_view name) {
    for (const DTypeName& known : kDTypes)
        if (name == known.name) return known.dtype;
    return std::nullopt;
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

std::string printable(std::string_view text, size_t longest) {
    std::string out;
    for (const char c : text.substr(0, longest)) {
        if (c == '\n')
            out += "\\n";
        else if (is_control(c))
            out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
        else
            out += c;
    }
    if (text.size() > longest) out += "...";
    return out;
}

bool is_lfs_pointer(std::string_view text) {
    constexpr std::string_view kPointer = "version https://git-lfs.github.com/spec/";
    return text.starts_with(kPointer) || text == kPointer.substr(0, kLengthBytes);
}

void refuse_lfs_pointer(std::string_view text, const std::string& file, ExitCode code) {
    require(!is_lfs_pointer(text), code,
            "{}: is a Git LFS pointer, not the file itself; fetch it with git lfs pull, or download it again",
            file);
}

bool is_plain_tensor_name(std::string_view name) {
    return !name.empty() && name.size() <= kMaxTensorName &&
           std::none_of(name.begin(), name.end(), is_control);
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
    // the JSON reader would take one for the end of the text
    require(text.find('\0') == std::string_view::npos, code, "{}: its header has a zero byte", file);
    SafetensorsHeader header;
    header.data_start = kLengthBytes + static_cast<int64_t>(text.size());
    header.data_bytes = file_bytes - header.data_start;
    HeaderReader reader(header);
    const bool read = nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
    require(read, code, "{}: {}", file, reader.problem());
    std::stable_sort(header.tensors.begin(), header.tensors.end(),
                     [](const TensorEntry& a, const TensorEntry& b) {
                         return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
                     });
    const std::string problem = problem_of_places(header);
    require(problem.empty(), code, "{}: {}", file, problem);
    return header;
}

}  // namespace fp8flow
