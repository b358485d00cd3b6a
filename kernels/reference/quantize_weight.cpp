// SPDX-License-Identifier: MIT
// Weights to FP8, once per optimizer step: the fprop copy and the dgrad copy. Contract:
// kernels/ops/quantize.h.
#include "kernels/reference/quantizers.h"
#include "kernels/reference/reference_ops.h"

#include <algorithm>

namespace fp8flow {

using namespace reference;

namespace {

// Expert e of a weight that may also come without the leading dimension.
TensorView expert_of(const TensorView& view, int64_t expert) { return view.rank == 3 ? view[expert] : view; }
ScaledTensor expert_of(const ScaledTensor& tensor, int64_t expert) {
    if (tensor.data.rank != 3) return tensor;
    ScaledTensor result = tensor;
    result.data = tensor.data[expert];
    if (tensor.layout != ScaleLayout::tensor) result.scales = tensor.scales[expert];
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
    const int64_t cols = args.src.cols(), rows = args.src.rows();
    float amax = 0.0f;
#pragma omp parallel
    {
        std::vector<float> values(static_cast<std::size_t>(cols));
        float part = 0.0f;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < rows; ++row) {
            load_row(args.src, row, values.data());
            part = std::max(part, amax_of(values.data(), cols));
        }
#pragma omp critical
        amax = std::max(amax, part);
    }
    const QuantScale scale = quant_scale(amax, fp8_max(dtype), args.scale_format);
    if (args.fprop) *args.fprop.scales.as<float>() = scale.dequant;
    if (args.dgrad) *args.dgrad.scales.as<float>() = scale.dequant;
    for (int64_t e = 0; e < experts; ++e) {
        const TensorView src = expert_of(args.src, e);
        const ScaledTensor fprop = args.fprop ? expert_of(args.fprop, e) : ScaledTensor{};
        const ScaledTensor dgrad = args.dgrad ? expert_of(args.dgrad, e) : ScaledTensor{};
        const LoadSegment load = segments_of(src);
        const std::vector<Tile> tiles = tiles_of(group_ranges({}, src.dim(0)), src.cols());
#pragma omp parallel for schedule(static)
        for (std::size_t i = 0; i < tiles.size(); ++i) {
            float values[kBlock * kBlock];
            load_tile(load, tiles[i], values);
            store_tile(values, tiles[i], scale.multiplier, fprop.data, dgrad.data);
        }
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
        const ScaledTensor fprop = args.fprop ? expert_of(args.fprop, e) : ScaledTensor{};
        const ScaledTensor dgrad = args.dgrad ? expert_of(args.dgrad, e) : ScaledTensor{};
        if (layout == ScaleLayout::block128) {
            quantize_blocks(src, args.scale_format, fprop, dgrad);
            continue;
        }
        const std::vector<GroupRange> all = group_ranges({}, src.dim(0));
        if (fprop) quantize_by_rows(src, all, rule, fprop);
        if (dgrad) quantize_by_columns(segments_of(src), src.cols(), all, rule, dgrad);
    }
}

}  // namespace fp8flow
