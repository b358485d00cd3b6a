// SPDX-License-Identifier: MIT
// Checks and constructors of TensorView.
#include "kernels/core/tensor.h"

#include "kernels/core/error.h"

namespace fp8flow {

TensorView make_view(void* data, DType dtype, std::initializer_list<int64_t> shape) {
    FP8FLOW_CHECK(shape.size() >= 1 && shape.size() <= TensorView::kMaxRank, "rank {}", shape.size());
    TensorView view;
    view.data = data;
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    int i = 0;
    for (int64_t dim : shape) {
        FP8FLOW_CHECK(dim >= 0, "dimension {} is {}", i, dim);
        view.dims[i++] = dim;
    }
    return view;
}

TensorView TensorView::reshape(std::initializer_list<int64_t> shape) const {
    TensorView view = make_view(data, dtype, shape);
    view.row_base = row_base;
    FP8FLOW_CHECK(view.numel() == numel(), "reshape {} to {}", describe(*this), describe(view));
    return view;
}

TensorView TensorView::slice(int64_t first, int64_t count) const {
    FP8FLOW_CHECK(rank > 0 && first >= 0 && count >= 0 && first + count <= dims[0], "slice [{}, +{}) of {}",
                  first, count, describe(*this));
    FP8FLOW_CHECK(row_base == nullptr, "slice of a view into a row arena");
    TensorView view = *this;
    int64_t stride = 1;
    for (int i = 1; i < rank; ++i) stride *= dims[i];
    view.data = bytes_ptr() + first * stride * size_of(dtype);
    view.dims[0] = count;
    return view;
}

TensorView TensorView::operator[](int64_t index) const {
    FP8FLOW_CHECK(rank > 1, "index into {}", describe(*this));
    TensorView view = slice(index, 1);
    for (int i = 1; i < rank; ++i) view.dims[i - 1] = dims[i];
    view.dims[rank - 1] = 0;
    --view.rank;
    return view;
}

void TensorView::fail_dtype(DType asked) const {
    fail(ExitCode::internal, "tensor is {}, want {}", name_of(dtype), name_of(asked));
}

RowGroups RowGroups::slice(int64_t first, int64_t count) const {
    RowGroups groups = *this;
    groups.num_groups = count;
    groups.counts = counts.slice(first, count);
    groups.offsets = offsets.slice(first, count + 1);
    groups.known_rows = cost_rows() * count / num_groups;  // as if all were alike
    return groups;
}

std::string describe(const TensorView& view) {
    if (!view) return "absent";
    std::string text = fmt::format("{}[", name_of(view.dtype));
    for (int i = 0; i < view.rank; ++i) text += fmt::format("{}{}", i ? ", " : "", view.dims[i]);
    return text + "]";
}

}  // namespace fp8flow
