// SPDX-License-Identifier: MIT
// Names and scale shapes of the FP8 layouts: the one place that turns a layout into dimensions.
#include "kernels/core/scaled_tensor.h"

#include "kernels/core/error.h"

namespace fp8flow {

const char* name_of(ScaleLayout layout) {
    switch (layout) {
        case ScaleLayout::none: return "none";
        case ScaleLayout::tensor: return "tensor";
        case ScaleLayout::row: return "row";
        case ScaleLayout::vec128_wire: return "vec128_wire";
        case ScaleLayout::vec128: return "vec128";
        case ScaleLayout::block128: return "block128";
        case ScaleLayout::tile128: return "tile128";
        case ScaleLayout::group_row: return "group_row";
        case ScaleLayout::mx32: return "mx32";
    }
    return "?";
}

ScaleShape scale_shape(ScaleLayout layout, const TensorView& codes, int64_t groups) {
    FP8FLOW_CHECK(codes.rank == 2 || codes.rank == 3, "codes {}", describe(codes));
    const bool batched = codes.rank == 3;
    const int64_t batch = codes.dims[0], rows = codes.dim(-2), cols = codes.dim(-1);
    auto shaped = [&](int64_t a, int64_t b, DType dtype) {
        return batched ? ScaleShape{3, {batch, a, b}, dtype} : ScaleShape{2, {a, b, 0}, dtype};
    };
    switch (layout) {
        case ScaleLayout::none: break;
        case ScaleLayout::tensor: return {1, {1, 0, 0}, DType::f32};
        case ScaleLayout::row:
            return batched ? ScaleShape{2, {batch, rows, 0}, DType::f32}
                           : ScaleShape{1, {rows, 0, 0}, DType::f32};
        case ScaleLayout::vec128_wire: return shaped(rows, ceil_div(cols, kBlock), DType::e8m0);
        case ScaleLayout::vec128: return shaped(ceil_div(cols, kBlock), rows, DType::f32);
        case ScaleLayout::block128:
            return shaped(ceil_div(rows, kBlock), round_up(ceil_div(cols, kBlock), 4), DType::f32);
        case ScaleLayout::tile128: return shaped(ceil_div(cols, kBlock), ceil_div(rows, kBlock), DType::f32);
        case ScaleLayout::group_row: return {2, {groups, rows, 0}, DType::f32};
        case ScaleLayout::mx32: return shaped(ceil_div(cols, kMxBlock), rows, DType::e8m0);
    }
    return {0, {0, 0, 0}, DType::f32};
}

void check_fp8(const ScaledTensor& tensor, const char* what, int64_t groups) {
    FP8FLOW_CHECK(is_fp8(tensor.data.dtype), "{}: codes are {}", what, describe(tensor.data));
    const ScaleShape want = scale_shape(tensor.layout, tensor.data, groups);
    const TensorView& scales = tensor.scales;
    const bool free_dtype = tensor.layout == ScaleLayout::vec128_wire && scales.dtype == DType::f32;
    bool same = want.rank == scales.rank && (scales.dtype == want.dtype || free_dtype);
    for (int i = 0; i < want.rank && same; ++i) same = scales.dims[i] == want.dims[i];
    FP8FLOW_CHECK(same, "{}: layout {} of codes {} does not fit scales {}", what, name_of(tensor.layout),
                  describe(tensor.data), describe(scales));
}

}  // namespace fp8flow
