// SPDX-License-Identifier: MIT
// FP8 quantisation of activations (by rows, by columns, both, per tensor) and of weights (fprop and dgrad
// copies, once per optimizer step); dequantisation; scales in the GEMM's order; the update of a delayed
// scale. Contracts: kernels/ops/quantize.h. Shared parts: quantizers.h.
#include "kernels/core/scale_place.h"
#include "kernels/reference/quantizers.h"
#include "kernels/reference/reference_ops.h"

#include <algorithm>
#include <cstring>

namespace fp8flow {

using namespace reference;

// ---- activations

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

// FP8 values in one or both orientations, without scales.
void encode_tiles(const TensorView& src, const std::vector<GroupRange>& ranges, float multiplier,
                  const TensorView& rows, const TensorView& transposed) {
    const LoadSegment load = segments_of(src);
    const std::vector<Tile> tiles = tiles_of(ranges, src.cols());
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < tiles.size(); ++i) {
        float values[kBlock * kBlock];
        load_tile(load, tiles[i], values);
        store_tile(values, tiles[i], multiplier, rows, transposed);
    }
}

}  // namespace

void ReferenceOps::do_quantize_rows(const op::QuantizeRows& args, const Launch& launch) {
    if (args.dst.layout == ScaleLayout::tensor) {
        return do_quantize_tensor(
            {.src = args.src, .groups = args.groups, .scale_format = args.scale_format, .rows = args.dst},
            launch);
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

    // Without groups the transposed copy alone may have pads.
    if (args.rows) encode_tiles(args.src, ranges, scale.multiplier, args.rows.data, {});
    if (args.transposed)
        encode_tiles(args.src, column_ranges(args.groups, args.src.dim(0), args.transposed.data),
                     scale.multiplier, {}, args.transposed.data);
}

// ---- weights

namespace {

// Expert e of a weight that may also come without the leading dimension.
TensorView expert_of(const TensorView& view, int64_t expert) { return view.rank == 3 ? view[expert] : view; }
ScaledTensor expert_of(const ScaledTensor& tensor, int64_t expert) {
    if (tensor.data.rank != 3) return tensor;
    ScaledTensor result = tensor;
    result.data = tensor.data[expert];
    if (tensor.scales.rank > 1) result.scales = tensor.scales[expert];  // none or one scale: of all experts
    return result;
}

// Scale tables are padded to a multiple of 4 columns: the pads hold 0.
void zero_scales(const ScaledTensor& tensor) {
    if (tensor) std::fill_n(tensor.scales.as<float>(), tensor.scales.numel(), 0.0f);
}

void set_block_scale(const ScaledTensor& tensor, int64_t block_row, int64_t block_col, float scale) {
    tensor.scales.as<float>()[block_row * tensor.scales.cols() + block_col] = scale;
}

void quantize_blocks(const TensorView& src, ScaleFormat format, const ScaledTensor& fprop,
                     const ScaledTensor& dgrad) {
    const LoadSegment load = segments_of(src);
    const std::vector<Tile> tiles = tiles_of(group_ranges({}, src.dim(0)), src.cols());
    const DType dtype = fprop ? fprop.data.dtype : dgrad.data.dtype;
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < tiles.size(); ++i) {
        const Tile& tile = tiles[i];
        float values[kBlock * kBlock];
        load_tile(load, tile, values);
        const QuantScale scale = quant_scale(amax_of(values, tile.count * tile.cols), fp8_max(dtype), format);
        store_tile(values, tile, scale.multiplier, fprop.data, dgrad.data);
        if (fprop) set_block_scale(fprop, tile.row / kBlock, tile.col / kBlock, scale.dequant);
        if (dgrad) set_block_scale(dgrad, tile.col / kBlock, tile.row / kBlock, scale.dequant);
    }
}

// One scale for all experts.
void quantize_whole(const op::QuantizeWeight& args, int64_t experts) {
    const DType dtype = args.fprop ? args.fprop.data.dtype : args.dgrad.data.dtype;
    const TensorView all = args.src.reshape({args.src.rows(), args.src.cols()});
    const float amax = amax_of_rows(all, group_ranges({}, all.dim(0)));
    const QuantScale scale = quant_scale(amax, fp8_max(dtype), args.scale_format);
    if (args.fprop) *args.fprop.scales.as<float>() = scale.dequant;
    if (args.dgrad) *args.dgrad.scales.as<float>() = scale.dequant;
    for (int64_t e = 0; e < experts; ++e) {
        const TensorView src = expert_of(args.src, e);
        encode_tiles(src, group_ranges({}, src.dim(0)), scale.multiplier, expert_of(args.fprop, e).data,
                     expert_of(args.dgrad, e).data);
    }
}

}  // namespace

void ReferenceOps::do_quantize_weight(const op::QuantizeWeight& args, const Launch&) {
    if (!args.fprop && !args.dgrad) return;
    const ScaleLayout layout = args.fprop ? args.fprop.layout : args.dgrad.layout;
    const int64_t experts = args.src.rank == 3 ? args.src.dim(0) : 1;
    if (layout == ScaleLayout::tensor) return quantize_whole(args, experts);
    if (layout == ScaleLayout::block128) {
        zero_scales(args.fprop);
        zero_scales(args.dgrad);
    }
    const QuantizeRule rule = {args.scale_format, args.mx_rounding};
    for (int64_t e = 0; e < experts; ++e) {
        const TensorView src = expert_of(args.src, e);
        const ScaledTensor fprop = expert_of(args.fprop, e), dgrad = expert_of(args.dgrad, e);
        if (layout == ScaleLayout::block128) {
            quantize_blocks(src, args.scale_format, fprop, dgrad);
            continue;
        }
        const std::vector<GroupRange> all = group_ranges({}, src.dim(0));
        if (fprop) quantize_by_rows(src, all, rule, fprop);
        if (dgrad) quantize_by_columns(segments_of(src), src.cols(), all, rule, dgrad);
    }
}

// ---- FP8 back to float, for every scale layout

namespace {

// Scale of the value at (row, col) of a 2-D tensor; both absolute in their buffers. `group`: of the routed
// rows, for group_row.
float scale_of(const ScaledTensor& t, int64_t row, int64_t col, int64_t group) {
    if (t.layout == ScaleLayout::none) return 1.0f;
    int64_t at = scale_place(t.layout, t.data).of(row, col);
    if (t.layout == ScaleLayout::group_row) at += group * t.data.dim(0);
    float scale;
    load_floats(t.scales, at, 1, &scale);
    return scale;
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
    for (int64_t e = 0; e < args.src.data.dim(0); ++e)
        dequantize_matrix(expert_of(args.src, e), {}, args.dst[e]);
}

// ---- what quantisation did

namespace {

float value_at(const TensorView& view, int64_t index) {
    float value;
    load_floats(view, index, 1, &value);
    return value;
}

// Row `row` of both tensors, absolute in their buffers.
void measure_row(const op::MeasureQuantization& args, int64_t row, int64_t source_row,
                 op::QuantizationSums& sums) {
    const bool transposed = args.copy == op::MeasureQuantization::Copy::transposed;
    const TensorView &fp8 = args.quantized.data, &source = args.source.data;
    const float largest = fp8_max(fp8.dtype);
    for (int64_t col = 0; col < source.cols(); ++col) {
        const int64_t r = transposed ? col : row, c = transposed ? row : col;
        const float value = value_at(fp8, r * fp8.cols() + c), scale = scale_of(args.quantized, r, c, 0);
        const double truth = static_cast<double>(value_at(source, source_row * source.cols() + col)) *
                             static_cast<double>(scale_of(args.source, source_row, col, 0));
        sums.counts.count(value, scale, truth, largest);
        ++sums.exponents[float_bits(scale) >> 23 & 0xFF];
    }
}

}  // namespace

void ReferenceOps::do_measure_quantization(const op::MeasureQuantization& args, const Launch&) {
    constexpr int64_t kRows = 64;  // of a partial sum
    const int64_t base = base_of(args.quantized.data), source_base = base_of(args.source.data);
    double* const sums = args.sums.as<double>();
    for (const GroupRange& range : group_ranges(args.groups, args.source.data.dim(0))) {
        std::vector<op::QuantizationSums> parts(static_cast<size_t>(ceil_div(range.count, kRows)));
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < parts.size(); ++i) {
            const int64_t first = range.first + static_cast<int64_t>(i) * kRows;
            for (int64_t row = first; row < std::min(first + kRows, range.first + range.count); ++row)
                measure_row(args, base + row, source_base + row, parts[i]);
        }
        for (const op::QuantizationSums& part : parts) {
            double words[op::kQuantizationWords];
            std::memcpy(words, &part, sizeof words);
            for (int w = 0; w < op::kQuantizationWords; ++w)
                sums[w] = op::join_quantization(w, sums[w], words[w]);
        }
    }
}

void ReferenceOps::do_clip_fp8(const op::ClipFp8& args, const Launch&) {
    const DType dtype = args.rows.dtype;
    const uint8_t most = to_fp8(fp8_max(dtype) * args.share, dtype);
    const int64_t cols = args.rows.cols();
    for (const GroupRange& range : group_ranges(args.groups, args.rows.dim(0))) {
        uint8_t* fp8 = args.rows.bytes_ptr() + (base_of(args.rows) + range.first) * cols;
        for (int64_t i = 0; i < (range.end - range.first) * cols; ++i) fp8[i] = fp8_clip(fp8[i], most, dtype);
    }
}

// ---- scales

void ReferenceOps::do_relayout_scales(const op::RelayoutScales& args, const Launch&) {
    const int64_t tokens = args.wire.dim(0), blocks = args.wire.dim(1);
    float* out = args.vec128.as<float>();
    std::vector<float> row(static_cast<size_t>(blocks));
    for (int64_t t = 0; t < tokens; ++t) {
        load_row(args.wire, t, row.data());
        for (int64_t b = 0; b < blocks; ++b) out[b * tokens + t] = row[static_cast<size_t>(b)];
    }
}

void ReferenceOps::do_delayed_scale_update(const op::DelayedScaleUpdate& args, const Launch&) {
    if (args.status && *args.status.as<int32_t>() != 0) return;
    float* history = args.history.as<float>();
    const int64_t length = args.history.numel();
    history[*args.position.as<int64_t>() % length] = *args.amax.as<float>();
    float largest = 0.0f;
    for (int64_t i = 0; i < length; ++i) largest = max_ignore_nan(largest, history[i]);
    *args.scale.as<float>() = quant_scale(largest, kE4m3Max, args.scale_format).dequant;
    *args.amax.as<float>() = 0.0f;
}

}  // namespace fp8flow
