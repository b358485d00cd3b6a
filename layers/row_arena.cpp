// SPDX-License-Identifier: MIT
// Buffers by tensor kind, and views into them.
#include "layers/row_arena.h"

#include "kernels/core/error.h"

#include <algorithm>

namespace fp8flow {

RowArena::RowArena(Device& device, int64_t capacity, int64_t max_layers)
    : device_(device), capacity_(round_up(capacity, kBlock)), max_layers_(max_layers) {
    const size_t bytes = 2 * static_cast<size_t>(max_layers + 1) * sizeof(int64_t);
    words_ = static_cast<int64_t*>(device_.allocate(bytes));
    device_.fill(words_, 0, bytes);
}

RowArena::~RowArena() {
    device_.free(words_);
    for (const auto& [key, data] : buffers_) device_.free(data);
}

TensorView RowArena::next_row_base() const {
    FP8FLOW_CHECK(depth_ < max_layers_, "{} layers pushed, capacity {}", depth_ + 1, max_layers_);
    return make_view(words_ + depth_ + 1, DType::i64, {1});
}

TensorView RowArena::rows_wanted() const {
    return make_view(words_ + max_layers_ + 1 + depth_, DType::i64, {1});
}

RowArena::Wanted RowArena::wanted() const {
    std::vector<int64_t> rows(static_cast<size_t>(max_layers_ + 1));
    device_.copy_out(rows.data(), words_ + max_layers_ + 1, rows.size() * sizeof(int64_t));
    Wanted wanted;
    for (const int64_t layer : rows) {
        wanted.layer = std::max(wanted.layer, round_up(layer, kBlock));
        wanted.together += round_up(layer, kBlock);
    }
    return wanted;
}

int64_t RowArena::used_rows() const {
    int64_t rows = 0;
    device_.copy_out(&rows, words_ + deepest_, sizeof rows);
    return std::min(rows, capacity_);
}

void RowArena::place(TensorView& view, const std::string& key) {
    void*& buffer = buffers_[key];
    if (buffer == nullptr) {
        buffer = device_.allocate(static_cast<size_t>(view.bytes()));
        reserved_ += view.bytes();
        bytes_per_row_[key] = static_cast<double>(view.bytes()) / static_cast<double>(capacity_);
    }
    view.data = buffer;
    view.row_base = row_base();
}

TensorView RowArena::tensor(DType dtype, int64_t width, const char* kind) {
    TensorView view = make_view(nullptr, dtype, {capacity_, width});
    place(view, fmt::format("{} {} x{}", kind, name_of(dtype), width));
    return view;
}

TensorView RowArena::vector(DType dtype, const char* kind) {
    return tensor(dtype, 1, kind).reshape({capacity_});
}

namespace {
TensorView scale_view(const ScaledTensor& tensor) {
    const ScaleShape s = scale_shape(tensor.layout, tensor.data);
    FP8FLOW_CHECK(s.rank == 2, "scale layout {} has no rows", name_of(tensor.layout));
    return make_view(nullptr, s.dtype, {s.dims[0], s.dims[1]});
}
}  // namespace

ScaledTensor RowArena::fp8(DType dtype, int64_t width, ScaleLayout layout, const char* kind) {
    ScaledTensor result{.data = tensor(dtype, width, kind), .layout = layout};
    if (layout == ScaleLayout::row) {
        result.scales = vector(DType::f32, (std::string(kind) + " scales").c_str());
    } else if (layout != ScaleLayout::none && layout != ScaleLayout::tensor) {
        place(result.scales = scale_view(result),
              fmt::format("{} scales {} x{}", kind, name_of(layout), width));
    }
    return result;
}

ScaledTensor RowArena::fp8_transposed(DType dtype, int64_t width, ScaleLayout layout, const char* kind) {
    ScaledTensor result{.data = make_view(nullptr, dtype, {width, capacity_}), .layout = layout};
    place(result.data, fmt::format("{} {} {}x", kind, name_of(dtype), width));
    if (layout == ScaleLayout::vec128 || layout == ScaleLayout::tile128 || layout == ScaleLayout::mx32) {
        place(result.scales = scale_view(result),
              fmt::format("{} scales {} {}x", kind, name_of(layout), width));
    }
    return result;
}

}  // namespace fp8flow
