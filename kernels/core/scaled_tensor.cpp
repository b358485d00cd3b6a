// SPDX-License-Identifier: MIT
// Names and scale shapes of the FP8 layouts: the one place that turns a layout into dimensions.
#include "kernels/core/scaled_tensor.h"

#include "kernels/core/error.h"

namespace fp8flow {

const char* name_of(ScaleLayout layout) {
    constexpr const char* kNames[] = {"none",     "tensor",  "row",       "vec128_wire", "vec128",
                                      "block128", "tile128", "group_row", "mx32"};
    static_assert(std::size(kNames) == static_cast<size_t>(ScaleLayout::mx32) + 1);
    return kNames[static_cast<size_t>(layout)];
}

const char* name_of(ScaleFormat format) {
    switch (format) {
        case ScaleFormat::pow2: return "pow2";
        case ScaleFormat::fp32: return "fp32";
        case ScaleFormat::undeclared: return "undeclared";
    }
    return "?";
}

ScaleShape scale_shape(ScaleLayout layout, const TensorView& values, int64_t groups) {
    FP8FLOW_CHECK(values.rank == 2 || values.rank == 3, "values {}", describe(values));
    const bool batched = values.rank == 3;
    const int64_t batch = values.dims[0], rows = values.dim(-2), cols = values.dim(-1);
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
    FP8FLOW_CHECK(is_fp8(tensor.data.dtype), "{}: values are {}", what, describe(tensor.data));
    const ScaleShape want = scale_shape(tensor.layout, tensor.data, groups);
    const TensorView& scales = tensor.scales;
    const bool free_dtype = tensor.layout == ScaleLayout::vec128_wire && scales.dtype == DType::f32;
    bool same = want.rank == scales.rank && (scales.dtype == want.dtype || free_dtype);
    for (int i = 0; i < want.rank && same; ++i) same = scales.dims[i] == want.dims[i];
    FP8FLOW_CHECK(same, "{}: layout {} of values {} does not fit scales {}", what, name_of(tensor.layout),
                  describe(tensor.data), describe(scales));
}

ScaleFormat format_of(const ScaledTensor& tensor) {
    return tensor.scales.dtype == DType::e8m0 ? ScaleFormat::pow2 : tensor.format;
}

void check_written(const ScaledTensor& dst, const char* what, ScaleFormat written) {
    FP8FLOW_CHECK(written == ScaleFormat::pow2 || written == ScaleFormat::fp32, "scale_format is {}",
                  name_of(written));
    if (dst.layout == ScaleLayout::mx32) return;  // E8M0, whatever the format of other layouts is
    FP8FLOW_CHECK(written == ScaleFormat::pow2 || dst.scales.dtype == DType::f32,
                  "scale_format fp32 does not fit into scales {}", describe(dst.scales));
    FP8FLOW_CHECK(dst.format == ScaleFormat::undeclared || dst.format == written,
                  "{} declares scales {}, and scale_format is {}", what, name_of(dst.format),
                  name_of(written));
}

void check_moved(const ScaledTensor& src, const ScaledTensor& dst, const char* what) {
    FP8FLOW_CHECK(dst.format == ScaleFormat::undeclared || dst.format == format_of(src),
                  "{} declares scales {}, and those of its source are {}", what, name_of(dst.format),
                  name_of(format_of(src)));
}

}  // namespace fp8flow
