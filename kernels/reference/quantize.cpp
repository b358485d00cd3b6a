// SPDX-License-Identifier: MIT
// The activation quantisers: by rows, by columns, both, per tensor. Contracts: kernels/ops/quantize.h; the
// shared parts: quantizers.h.
#include "kernels/reference/quantizers.h"
#include "kernels/reference/reference_ops.h"

#include <algorithm>

namespace fp8flow {

using namespace reference;

namespace {

void quantize_columns_of(const TensorView& src, const RowGroups& groups, const QuantizeRule& rule,
                         const ScaledTensor& dst) {
    quantize_by_columns(segments_of(src), src.cols(), column_ranges(groups, src.dim(0), dst.data), rule, dst);
}

float amax_of_rows(const TensorView& src, const std::vector<GroupRange>& ranges) {
    const int64_t base = base_of(src);
    float amax = 0.0f;  // never NaN, so max is the same in any order
#pragma omp parallel
    {
        std::vector<float> values(static_cast<std::size_t>(src.cols()));
        float part = 0.0f;
        for (const GroupRange& range : ranges) {
#pragma omp for schedule(static) nowait
            for (int64_t row = range.first; row < range.first + range.count; ++row) {
                load_row(src, base + row, values.data());
                part = std::max(part, amax_of(values.data(), src.cols()));
            }
        }
#pragma omp critical
        amax = std::max(amax, part);
    }
    return amax;
}

}  // namespace

void ReferenceOps::do_quantize_rows(const op::QuantizeRows& args, const Launch& launch) {
    if (args.dst.layout == ScaleLayout::tensor) {
        do_quantize_tensor({.src = args.src,
                            .groups = args.groups,
                            .scale_format = args.scale_format,
                            .rows = args.dst,
                            .transposed = {}},
                           launch);
        return;
    }
    quantize_by_rows(args.src, group_ranges(args.groups, args.src.dim(0)),
                     {args.scale_format, args.mx_rounding}, args.dst);
}

void ReferenceOps::do_quantize_columns(const op::QuantizeColumns& args, const Launch&) {
    const QuantizeRule rule = {args.scale_format, args.mx_rounding};
    quantize_columns_of(args.src, args.groups, rule, args.dst);
    if (args.src2) quantize_columns_of(args.src2, args.groups, rule, args.dst2);
}

void ReferenceOps::do_quantize_dual(const op::QuantizeDual& args, const Launch&) {
    const QuantizeRule rule = {args.scale_format, args.mx_rounding};
    quantize_by_rows(args.src, group_ranges(args.groups, args.src.dim(0)), rule, args.rows);
    quantize_columns_of(args.src, args.groups, rule, args.columns);
}

void ReferenceOps::do_quantize_tensor(const op::QuantizeTensor& args, const Launch&) {
    std::vector<GroupRange> ranges = group_ranges(args.groups, args.src.dim(0));
    const DType dtype = args.rows ? args.rows.data.dtype : args.transposed.data.dtype;
    const QuantScale scale = quant_scale(amax_of_rows(args.src, ranges), fp8_max(dtype), args.scale_format);
    if (args.rows) *args.rows.scales.as<float>() = scale.dequant;
    if (args.transposed) *args.transposed.scales.as<float>() = scale.dequant;

    const LoadSegment load = segments_of(args.src);
    auto store = [&](const std::vector<GroupRange>& rows, const TensorView& row_codes,
                     const TensorView& transposed_codes) {
        const std::vector<Tile> tiles = tiles_of(rows, args.src.cols());
#pragma omp parallel for schedule(static)
        for (std::size_t i = 0; i < tiles.size(); ++i) {
            float values[kBlock * kBlock];
            load_tile(load, tiles[i], values);
            store_tile(values, tiles[i], scale.multiplier, row_codes, transposed_codes);
        }
    };
    // Without groups the transposed copy alone may have pads.
    if (args.rows) store(ranges, args.rows.data, {});
    if (args.transposed)
        store(column_ranges(args.groups, args.src.dim(0), args.transposed.data), {}, args.transposed.data);
}

}  // namespace fp8flow
