// SPDX-License-Identifier: MIT
// FP8 back to float, for every scale layout. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/quantize/dequantize.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kChunkUnits = 4;  // 8-byte loads of a thread, all issued before the first is used
constexpr int kChunkStep = 32 * kUnit, kChunkCols = kChunkUnits * kChunkStep;
constexpr int kChunkRows = kRowThreads / 32;
constexpr int kChunkCtas = 5;  // per SM: 40 KB in flight

// FP8 rows with 1x128 scales (vec128, vec128_wire) -> BF16.
// Lower bound: reads 1.03 bytes and writes 2 bytes per value: 712 MB, 0.174 ms at 32768 x 7168 and 4.1 TB/s.
// Grid: one CTA per 1024 columns of eight neighbouring rows, one row per warp. All four loads of a thread
// are issued before the first is used. No barriers.
// Deterministic: nothing is reduced.
template <DType kFp8>
__global__ void __launch_bounds__(kRowThreads, kChunkCtas)
    dequantize_blocks_kernel(const Dequantizer args, int chunks) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t total = args.groups.total(), src_base = args.fp8.base(), dst_base = args.dst.base();
    const bool wire = args.layout == ScaleLayout::vec128_wire;
    const int64_t row_stride = wire ? args.scale_cols : 1, block_stride = wire ? 1 : args.scale_cols;
    const int width = args.fp8.cols, tasks = static_cast<int>((total + kChunkRows - 1) / kChunkRows) * chunks;
    for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
        const int64_t row = static_cast<int64_t>(task / chunks) * kChunkRows + warp;
        if (row >= total) continue;
        const int first_col = task % chunks * kChunkCols + lane * kUnit;
        const uint8_t* in = static_cast<const uint8_t*>(args.fp8.data) + (src_base + row) * width + first_col;
        const int64_t scale_at =
            (src_base + row) * row_stride + first_col / static_cast<int>(kBlock) * block_stride;
        uint2 fp8[kChunkUnits];
        float scales[kChunkUnits];
#pragma unroll
        for (int u = 0; u < kChunkUnits; ++u) {
            if (first_col + u * kChunkStep >= width) continue;
            fp8[u] = *reinterpret_cast<const uint2*>(in + u * kChunkStep);
            const int64_t at = scale_at + u * (kChunkStep / static_cast<int>(kBlock)) * block_stride;
            scales[u] = args.scale_dtype == DType::e8m0
                            ? e8m0_to_float(static_cast<const uint8_t*>(args.scales)[at])
                            : static_cast<const float*>(args.scales)[at];
        }
        uint16_t* out = static_cast<uint16_t*>(args.dst.data) + (dst_base + row) * width + first_col;
#pragma unroll
        for (int u = 0; u < kChunkUnits; ++u) {
            if (first_col + u * kChunkStep >= width) continue;
            const uint32_t words[2] = {fp8[u].x, fp8[u].y};
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack_fp8x2(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))), kFp8);
                pairs[i] = pack_bf16(pair.x * scales[u], pair.y * scales[u]);
            }
            *reinterpret_cast<uint4*>(out + u * kChunkStep) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
        }
    }
}

// Every other row layout. A CTA takes blockDim.y rows at a time, grid-stride; a thread eight columns, which
// share a scale. Nothing is reduced.
__global__ void __launch_bounds__(kRowThreads) dequantize_rows_kernel(const Dequantizer args) {
    const int64_t total = args.groups.total(), src_base = args.fp8.base(), dst_base = args.dst.base(),
                  batch = blockIdx.y;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y, first_row = batch * args.rows;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < total;
         row += stride)
        for (int col = static_cast<int>(threadIdx.x) * kUnit; col < args.fp8.cols;
             col += static_cast<int>(blockDim.x) * kUnit) {
            float v[kUnit];
            load_unit(args.fp8, first_row + src_base + row, col, v);
            const float scale = scale_of(args, batch, src_base + row, col, 0);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[i] *= scale;
            store_unit(args.dst, first_row + dst_base + row, col, v);
        }
}

// Layouts of transposed copies (tile128, group_row): one element per thread, because groups and bases need
// not be aligned. Nothing is reduced.
__global__ void __launch_bounds__(kRowThreads) dequantize_columns_kernel(const Dequantizer args) {
    const int64_t total = args.groups.total(), src_base = args.fp8.base(), dst_base = args.dst.base(),
                  batch = blockIdx.y;
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x)
        for (int64_t col = threadIdx.x; col < total; col += blockDim.x) {
            const int64_t group = args.layout == ScaleLayout::group_row ? args.groups.group_of(col) : 0;
            const float code = load_float(args.fp8.data, args.fp8.dtype,
                                          (batch * args.rows + row) * args.fp8.cols + src_base + col);
            store_float(args.dst.data, args.dst.dtype,
                        (batch * args.rows + row) * args.dst.cols + dst_base + col,
                        code * scale_of(args, batch, row, src_base + col, group));
        }
}

}  // namespace

}  // namespace fp8flow::hopper::quantize

namespace fp8flow {

using namespace hopper;
using namespace hopper::quantize;

void HopperOps::do_dequantize(const op::Dequantize& args, const Launch& launch) {
    const TensorView& fp8 = args.src.data;
    const bool by_columns =
        args.src.layout == ScaleLayout::tile128 || args.src.layout == ScaleLayout::group_row;
    const int64_t batches = fp8.rank == 3 ? fp8.dim(0) : 1, rows = fp8.dim(-2);
    if (batches == 0 || rows == 0 || fp8.cols() == 0) return;
    Dequantizer job = dequantizer_of(args.src);
    job.dst = row_view(args.dst);
    job.groups = device_groups(args.groups, by_columns ? fp8.cols() : rows);
    constexpr const char* kOp = "dequantize";
    if (by_columns) {
        const dim3 grid(grid_for(rows, launch), static_cast<unsigned>(batches));
        return launch_kernel(dequantize_columns_kernel, grid, kRowThreads, launch, kOp, job);
    }
    const int64_t capacity = args.groups.num_groups > 0 ? args.groups.row_capacity : rows;
    const bool blocks = args.src.layout == ScaleLayout::vec128 || args.src.layout == ScaleLayout::vec128_wire;
    if (blocks && is_fp8(fp8.dtype) && batches == 1 && args.dst.dtype == DType::bf16 && job.fp8.vector &&
        job.dst.vector) {
        const int64_t chunks = ceil_div(fp8.cols(), kChunkCols),
                      tasks = ceil_div(capacity, kChunkRows) * chunks;
        if (tasks == 0) return;
        const auto kernel = of_fp8(fp8.dtype, [&]<DType kFp8>() { return dequantize_blocks_kernel<kFp8>; });
        return launch_kernel(kernel, grid_of_items(tasks, launch, kChunkCtas), kRowThreads, launch, kOp, job,
                             chunks);
    }
    const dim3 block = row_block(fp8.cols());
    const dim3 grid(grid_for(ceil_div(capacity, block.y), launch), static_cast<unsigned>(batches));
    launch_kernel(dequantize_rows_kernel, grid, block, launch, kOp, job);
}

}  // namespace fp8flow
