// SPDX-License-Identifier: MIT
// The header's text from the declarations, and the bookkeeping of the stream after it.
#include "model/safetensors/writer.h"

#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {

namespace {

// JSON padded with spaces, so that the data begins at a multiple of 8.
std::string header_text(const SafetensorsHeader& header) {
    nlohmann::ordered_json json = nlohmann::ordered_json::object();
    if (!header.metadata.empty()) json["__metadata__"] = header.metadata;
    for (const TensorEntry& entry : header.tensors)
        json[entry.name] = {{"dtype", name_of(entry.dtype)},
                            {"shape", entry.shape},
                            {"data_offsets", {entry.begin, entry.end}}};
    std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::vector<TensorDeclaration>& tensors,
                                     const std::map<std::string, std::string>& metadata, Sink sink)
    : sink_(std::move(sink)) {
    header_.metadata = metadata;
    std::set<std::string_view> names;
    for (const TensorDeclaration& tensor : tensors) {
        const auto bytes = checked_bytes(tensor.dtype, tensor.shape);
        FP8FLOW_CHECK(is_plain_tensor_name(tensor.name) && tensor.name != "__metadata__" &&
                          names.insert(tensor.name).second,
                      "tensor name \"{}\"", printable(tensor.name));
        int64_t end = 0;
        FP8FLOW_CHECK(bytes && tensor.shape.size() <= kMaxTensorRank &&
                          !__builtin_add_overflow(header_.data_bytes, *bytes, &end),
                      "shape of tensor \"{}\"", tensor.name);
        header_.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, header_.data_bytes, end});
        header_.data_bytes = end;
    }
    const std::string text = header_text(header_);
    FP8FLOW_CHECK(static_cast<int64_t>(text.size()) <= kMaxHeaderBytes, "a header of {} bytes", text.size());
    header_.data_start = 8 + static_cast<int64_t>(text.size());
    std::string first;  // the length, little endian
    for (int i = 0; i < 8; ++i) first += static_cast<char>(text.size() >> (8 * i) & 0xFF);
    sink_(first.data(), first.size());
    sink_(text.data(), text.size());
}

void SafetensorsWriter::skip_complete() {
    while (at_ < header_.tensors.size() && written_ == header_.tensors[at_].bytes()) {
        ++at_;
        written_ = 0;
    }
}

void SafetensorsWriter::append(std::string_view name, const void* data, int64_t bytes) {
    if (bytes == 0) return;
    skip_complete();
    FP8FLOW_CHECK(at_ < header_.tensors.size() && header_.tensors[at_].name == name,
                  "wrote \"{}\", want \"{}\"", name,
                  at_ < header_.tensors.size() ? header_.tensors[at_].name : "nothing more");
    FP8FLOW_CHECK(bytes > 0 && bytes <= header_.tensors[at_].bytes() - written_,
                  "{}: {} bytes more, {} are missing", name, bytes, header_.tensors[at_].bytes() - written_);
    sink_(data, static_cast<size_t>(bytes));
    written_ += bytes;
}

void SafetensorsWriter::finish() {
    skip_complete();
    FP8FLOW_CHECK(at_ == header_.tensors.size(), "tensor \"{}\" was not written", header_.tensors[at_].name);
}

}  // namespace fp8flow
