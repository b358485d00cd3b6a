// Activations to FP8 by rows, and with one scale for the whole tensor. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/quantize_rows.h"
#include "kernels/hopper/quantize_tiles.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;

namespace hopper {

namespace {

struct RowQuantizer {
    RowView src, codes;
    RowScales scales;
    DeviceGroups groups;
    QuantizeRule rule;
};

// Moves K values in, K codes and their scales out a row. A CTA takes blockDim.y rows at a time, grid-stride; a thread eight columns.
// Blocks of 32 or 128 columns reduce by shuffles, a whole row (scales.block == 0) by way of shared memory, read again from L2 for the codes.
// Only maxima are reduced: deterministic.
__global__ void __launch_bounds__(kRowThreads) quantize_rows_kernel(const RowQuantizer args) {
    __shared__ uint32_t block_amax[kRowThreads / kBlockThreads];
    const int64_t total = args.groups.total(), src_base = args.src.base(), dst_base = args.codes.base();
    const int width = args.src.cols, step = static_cast<int>(blockDim.x) * kUnit;
    const int row_blocks = static_cast<int>(blockDim.x) / kBlockThreads,
              first_block = static_cast<int>(threadIdx.y) * row_blocks;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
    for (int64_t row0 = static_cast<int64_t>(blockIdx.x) * blockDim.y; row0 < total; row0 += stride) {
        const int64_t row = row0 + threadIdx.y;
        const bool inside = row < total, valid = inside && args.groups.is_valid(row);
        float v[kUnit] = {};
        if (args.scales.block > 0) {
            for (int col0 = 0; col0 < width && inside; col0 += step) {
                const int col = col0 + static_cast<int>(threadIdx.x) * kUnit;
                if (valid) load_unit(args.src, src_base + row, col, v);
                quantize_unit(v, valid, args.codes, args.scales, dst_base + row, col, args.rule);
            }
            continue;
        }
        uint32_t amax = 0;
        for (int col = static_cast<int>(threadIdx.x) * kUnit; col < width && valid; col += step) {
            load_unit(args.src, src_base + row, col, v);
            amax = max(amax, unit_magnitude(v));
        }
        amax = max_over(amax, kBlockThreads);
        if (linear_thread() % kBlockThreads == 0) block_amax[linear_thread() / kBlockThreads] = amax;
        __syncthreads();
        for (int i = 0; i < row_blocks; ++i) amax = max(amax, block_amax[first_block + i]);
        __syncthreads();
        BlockScale scale = {0.0f, 0.0f, 0};
        if (valid) scale = block_scale(amax, args.codes.dtype, false, args.rule);
        for (int col = static_cast<int>(threadIdx.x) * kUnit; col < width && inside; col += step) {
            if (valid) load_unit(args.src, src_base + row, col, v);
            store_codes(args.codes, dst_base + row, col,
                        valid ? encode_unit(v, scale.multiplier, args.codes.dtype) : uint2{0, 0});
        }
        if (inside && threadIdx.x == 0 && width > 0) args.scales.store(dst_base + row, 0, scale);
    }
}

}  // namespace

void launch_quantize_rows(const TensorView& src, const RowGroups& groups, const QuantizeRule& rule,
                          const Fp8Tensor& dst, const Launch& launch) {
    const int64_t rows = groups.num_groups > 0 ? groups.row_capacity : src.rows();
    if (rows == 0 || src.cols() == 0) return;
    const dim3 block = row_block(src.cols());
    quantize_rows_kernel<<<grid_for(ceil_div(rows, block.y), launch), block, 0, stream_of(launch)>>>(
        {row_view(src), row_view(dst.codes), row_scales(dst), device_groups(groups, rows), rule});
    check_launch("quantize_rows");
}

}  // namespace hopper

void HopperOps::do_quantize_rows(const op::QuantizeRows& args, const Launch& launch) {
    if (args.dst.layout == ScaleLayout::tensor) {
        do_quantize_tensor({.src = args.src,
                            .groups = args.groups,
                            .scale_format = args.scale_format,
                            .rows = args.dst,
                            .transposed = {}},
                           launch);
        return;
    }
    launch_quantize_rows(args.src, args.groups, {args.scale_format, args.mx_rounding}, args.dst, launch);
}

void HopperOps::do_quantize_tensor(const op::QuantizeTensor& args, const Launch& launch) {
    const DType dtype = args.rows ? args.rows.codes.dtype : args.transposed.codes.dtype;
    const TileShape shape = tile_shape(args.src, args.groups, args.transposed.codes);
    const TileSource source = {.values = row_view(args.src)};
    uint32_t* amax = workspace_->partials_for<uint32_t>(1);
    launch_tensor_scale(source, shape, amax, dtype, {.scale_format = args.scale_format}, args.rows,
                        args.transposed, launch);
    TileOutput rows = tile_rows(args.rows, Share::word), columns = tile_columns(args.transposed, Share::word);
    rows.multipliers = columns.multipliers = reinterpret_cast<const float*>(amax);
    launch_quantize_tiles(source, shape, rows, columns, {.scale_format = args.scale_format}, launch);
}

}  // namespace fp8flow
