// SPDX-License-Identifier: MIT
// FP8 back to float, for every scale layout. Contract: kernels/ops/quantize.h.
#include "kernels/reference/quantizers.h"
#include "kernels/reference/reference_ops.h"

#include <algorithm>

namespace fp8flow {

using namespace reference;

namespace {

float scale_at(const TensorView& scales, int64_t index) {
    return scales.dtype == DType::e8m0 ? e8m0_to_float(scales.bytes_ptr()[index])
                                       : static_cast<const float*>(scales.data)[index];
}

// Scale of code (row, col) of a 2-D tensor; both absolute in their buffers. `group`: of the routed rows, for
// group_row.
float scale_of(const ScaledTensor& t, int64_t row, int64_t col, int64_t group) {
    const int64_t width = t.scales.cols();
    switch (t.layout) {
        case ScaleLayout::none: return 1.0f;
        case ScaleLayout::tensor: return scale_at(t.scales, 0);
        case ScaleLayout::row: return scale_at(t.scales, row);
        case ScaleLayout::vec128_wire: return scale_at(t.scales, row * width + col / kBlock);
        case ScaleLayout::vec128: return scale_at(t.scales, col / kBlock * width + row);
        case ScaleLayout::block128: return scale_at(t.scales, row / kBlock * width + col / kBlock);
        case ScaleLayout::tile128: return scale_at(t.scales, col / kBlock * width + row / kBlock);
        case ScaleLayout::group_row: return scale_at(t.scales, group * width + row);
        case ScaleLayout::mx32: return scale_at(t.scales, col / kMxBlock * width + row);
    }
    return 0.0f;
}

// Columns [first, end) of row `row`, both relative to the bases.
struct Span {
    int64_t row, first, end, group;
};

void dequantize_span(const ScaledTensor& src, const Span& span, int64_t row_base, int64_t col_base,
                     const TensorView& dst, int64_t dst_row_base, int64_t dst_col_base) {
    float values[kBlock];
    const int64_t src_row = row_base + span.row, dst_row = dst_row_base + span.row;
    for (int64_t col = span.first; col < span.end;) {
        const int64_t src_col = col_base + col;
        const int64_t count =
            std::min(span.end - col, kMxBlock - src_col % kMxBlock);  // no layout changes scale inside 32
        const float scale = scale_of(src, src_row, src_col, span.group);
        load_floats(src.data, src_row * src.data.cols() + src_col, count, values);
        for (int64_t i = 0; i < count; ++i) values[i] *= scale;
        store_floats(dst, dst_row * dst.cols() + dst_col_base + col, count, values);
        col += count;
    }
}

void dequantize_matrix(const ScaledTensor& src, const RowGroups& groups, const TensorView& dst) {
    const int64_t rows = src.data.dim(0), cols = src.data.dim(1);
    const bool by_columns = src.layout == ScaleLayout::tile128 || src.layout == ScaleLayout::group_row;
    const int64_t src_base = base_of(src.data), dst_base = base_of(dst);
    for (const GroupRange& range : group_ranges(groups, by_columns ? cols : rows)) {
        const int64_t first = by_columns ? 0 : range.first, end = by_columns ? rows : range.end;
#pragma omp parallel for schedule(static)
        for (int64_t row = first; row < end; ++row) {
            const Span span = {row, by_columns ? range.first : 0, by_columns ? range.end : cols, range.group};
            dequantize_span(src, span, by_columns ? 0 : src_base, by_columns ? src_base : 0, dst,
                            by_columns ? 0 : dst_base, by_columns ? dst_base : 0);
        }
    }
}

}  // namespace

void ReferenceOps::do_dequantize(const op::Dequantize& args, const Launch&) {
    if (args.src.data.rank == 2) return dequantize_matrix(args.src, args.groups, args.dst);
    for (int64_t e = 0; e < args.src.data.dim(0); ++e) {
        ScaledTensor expert = args.src;
        expert.data = args.src.data[e];
        if (args.src.layout != ScaleLayout::tensor && args.src.layout != ScaleLayout::none)
            expert.scales = args.src.scales[e];
        dequantize_matrix(expert, {}, args.dst[e]);
    }
}

}  // namespace fp8flow
