// SPDX-License-Identifier: MIT
// Activations to FP8 with scales along the row, and with one scale for the whole tensor. Contract:
// kernels/ops/quantize.h.
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/quantize/quantize_rows.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::quantize {

namespace {

struct RowQuantizer {
    RowView src, fp8;
    RowScales scales;
    DeviceGroups groups;
    QuantizeRule rule;
};

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kChunkUnits = 4;          // 16-byte loads of a thread, all issued before the first is used
constexpr int kChunkStep = 32 * kUnit;  // columns of one load of a warp
constexpr int kChunkRows = kRowThreads / 32, kChunkCols = kChunkUnits * kChunkStep;
constexpr int kChunkCtas = 5;  // per SM: 80 KB of BF16 in flight

// The loop of the kernels that go over 16-bit rows in chunks: a warp takes 1024 columns of a row, a CTA those
// of eight neighbouring rows. Calls use(row, valid, first column of the thread, words), with the thread's
// words at columns 0, 256, 512 and 768 from there; they are 0 in padding and past the end of the row. A
// thread has 64 bytes of loads in flight, an SM 80 KB. All threads of a warp make the same calls.
template <class Use>
__device__ __forceinline__ void each_chunk(const RowView& src, const DeviceGroups& groups, int chunks,
                                           Use use) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t total = groups.total(), src_base = src.base();
    const int width = src.cols, tasks = static_cast<int>((total + kChunkRows - 1) / kChunkRows) * chunks;
    for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
        const int64_t row = static_cast<int64_t>(task / chunks) * kChunkRows + warp;
        if (row >= total) continue;
        const int first_col = task % chunks * kChunkCols + lane * kUnit;
        const int64_t group = warp_group_of(groups, row);
        const bool valid = row - groups.offset(group) < groups.count(group);
        const uint16_t* in = static_cast<const uint16_t*>(src.data) + (src_base + row) * width + first_col;
        uint4 words[kChunkUnits];
#pragma unroll
        for (int u = 0; u < kChunkUnits; ++u) {
            words[u] = uint4{0, 0, 0, 0};
            if (valid && first_col + u * kChunkStep < width)
                words[u] = *reinterpret_cast<const uint4*>(in + u * kChunkStep);
        }
        use(row, valid, first_col, words);
    }
}

// 16-bit rows -> FP8 rows with 1x128 scales (vec128, vec128_wire).
// Lower bound: reads 2 bytes and writes 1.03 bytes per value: 712 MB, 0.174 ms at 32768 x 7168 and 4.1 TB/s.
// About 13 instructions per value; an SM can issue 20 in that time at 1.75 GHz.
// One CTA per task, so that the last wave is short. The scales of the eight rows of a CTA share a sector of
// the table. A half-warp has a 1x128 block and finds its maximum with shuffles: no barriers.
// Deterministic: only maxima are reduced.
template <DType kSource, DType kFp8, ScaleFormat kFormat>
__global__ void __launch_bounds__(kRowThreads, kChunkCtas)
    quantize_blocks_kernel(const RowQuantizer args, int chunks) {
    pdl_wait();
    const int64_t dst_base = args.fp8.base();
    each_chunk(args.src, args.groups, chunks,
               [&](int64_t row, bool valid, int first_col, const uint4(&words)[kChunkUnits]) {
                   const int width = args.src.cols;
                   uint8_t* out = static_cast<uint8_t*>(args.fp8.data) + (dst_base + row) * width + first_col;
                   int64_t scale_at = args.scales.index(dst_base + row, first_col / kTile);
#pragma unroll
                   for (int u = 0; u < kChunkUnits; ++u) {
                       float v[kUnit];
                       unpack_unit(words[u], kSource, v);
                       uint32_t amax = unit_magnitude(v);
#pragma unroll
                       for (int step = kBlockThreads / 2; step > 0; step /= 2)
                           amax = max(amax, __shfl_xor_sync(kFullMask, amax, step));
                       const QuantScale scale = quant_scale(__uint_as_float(amax), fp8_max(kFp8), kFormat);
                       const float dequant = valid ? scale.dequant : 0.0f;  // padding 0 encodes to 0
                       if (first_col + u * kChunkStep < width) {
                           *reinterpret_cast<uint2*>(out + u * kChunkStep) =
                               encode_unit(v, scale.multiplier, kFp8);
                           if (first_col % kTile == 0) {
                               if (args.scales.dtype == DType::e8m0)
                                   static_cast<uint8_t*>(args.scales.data)[scale_at] = float_to_e8m0(dequant);
                               else
                                   static_cast<float*>(args.scales.data)[scale_at] = dequant;
                           }
                       }
                       scale_at += kChunkStep / kTile * args.scales.block_stride;
                   }
               });
}

// The amax of all valid values.
// Lower bound: 2 bytes per value in. A persistent grid over the rows; every warp adds its maximum once by an
// integer atomic. The order does not matter: deterministic.
template <DType kSource>
__global__ void __launch_bounds__(kRowThreads, kChunkCtas)
    amax_kernel(const RowView src, const DeviceGroups groups, int chunks, uint32_t* amax) {
    uint32_t largest = 0;
    each_chunk(src, groups, chunks, [&](int64_t, bool, int, const uint4(&words)[kChunkUnits]) {
#pragma unroll
        for (int u = 0; u < kChunkUnits; ++u) {
            float v[kUnit];
            unpack_unit(words[u], kSource, v);
            largest = max(largest, unit_magnitude(v));
        }
    });
    largest = __reduce_max_sync(kFullMask, largest);
    if (threadIdx.x % 32 == 0) atomicMax(amax, largest);
}

// 16-bit rows -> FP8 with one multiplier for the tensor.
// Lower bound: 2 bytes per value in, 1 out. Nothing is reduced: deterministic.
template <DType kSource, DType kFp8>
__global__ void __launch_bounds__(kRowThreads, kChunkCtas)
    scaled_fp8_kernel(const RowView src, const RowView fp8, const DeviceGroups groups, int chunks,
                      const float* multiplier) {
    const float m = *multiplier;
    const int64_t dst_base = fp8.base();
    each_chunk(src, groups, chunks, [&](int64_t row, bool, int first_col, const uint4(&words)[kChunkUnits]) {
        uint8_t* out = static_cast<uint8_t*>(fp8.data) + (dst_base + row) * fp8.cols + first_col;
#pragma unroll
        for (int u = 0; u < kChunkUnits; ++u) {
            float v[kUnit];
            unpack_unit(words[u], kSource, v);
            if (first_col + u * kChunkStep < fp8.cols)
                *reinterpret_cast<uint2*>(out + u * kChunkStep) = encode_unit(v, m, kFp8);
        }
    });
}

// 16-bit rows -> FP8 with one scale per row, for rows that fit into the registers of a CTA.
// Lower bound: reads 2 bytes and writes 1 byte per value. Four loads in flight per thread, 80 KB per SM.
// One __syncthreads per row: the maxima of the warps are in shared memory. They alternate between two
// buffers, so that the next row does not wait for the readers of this one.
// Deterministic: only maxima are reduced.
constexpr int kWholeRowStep = kRowThreads * kUnit, kWholeRowLeast = 1024,
              kWholeRowMost = kChunkUnits * kWholeRowStep;
template <DType kSource, DType kFp8>
__global__ void __launch_bounds__(kRowThreads, kChunkCtas)
    quantize_whole_rows_kernel(const RowQuantizer args) {
    __shared__ uint32_t warp_max[2][kRowThreads / 32];
    pdl_wait();
    const int thread = static_cast<int>(threadIdx.x), width = args.src.cols, first_col = thread * kUnit;
    const int64_t total = args.groups.total(), src_base = args.src.base(), dst_base = args.fp8.base();
    int place = 0;
    for (int64_t row = blockIdx.x; row < total; row += gridDim.x, place ^= 1) {
        const int64_t group = warp_group_of(args.groups, row);
        const bool valid = row - args.groups.offset(group) < args.groups.count(group);
        const uint16_t* in =
            static_cast<const uint16_t*>(args.src.data) + (src_base + row) * width + first_col;
        uint4 words[kChunkUnits];
#pragma unroll
        for (int u = 0; u < kChunkUnits; ++u) {
            words[u] = uint4{0, 0, 0, 0};
            if (valid && first_col + u * kWholeRowStep < width)
                words[u] = *reinterpret_cast<const uint4*>(in + u * kWholeRowStep);
        }
        uint32_t amax = 0;
        float v[kUnit];
#pragma unroll
        for (int u = 0; u < kChunkUnits; ++u) {
            unpack_unit(words[u], kSource, v);
            amax = max(amax, unit_magnitude(v));
        }
        amax = __reduce_max_sync(kFullMask, amax);
        if (thread % 32 == 0) warp_max[place][thread / 32] = amax;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kRowThreads / 32; ++i) amax = max(amax, warp_max[place][i]);
        BlockScale scale = {0.0f, 0.0f, 0};
        if (valid) scale = block_scale(amax, kFp8, false, args.rule);
        uint8_t* out = static_cast<uint8_t*>(args.fp8.data) + (dst_base + row) * width + first_col;
#pragma unroll
        for (int u = 0; u < kChunkUnits; ++u) {
            unpack_unit(words[u], kSource, v);
            if (first_col + u * kWholeRowStep < width)  // padding 0 encodes to 0
                *reinterpret_cast<uint2*>(out + u * kWholeRowStep) = encode_unit(v, scale.multiplier, kFp8);
        }
        if (thread == 0) args.scales.store(dst_base + row, 0, scale);
    }
}

// Every other source and layout.
// Lower bound: reads each value and writes its FP8 value once, plus scales. A CTA takes blockDim.y rows at a
// time, grid-stride, eight columns per thread. The amax of blocks of 32 or 128 columns takes shuffles. The
// amax of a whole row (scales.block == 0) goes through shared memory, and the row is read again, from L2.
// Deterministic: only maxima are reduced.
__global__ void __launch_bounds__(kRowThreads) quantize_rows_kernel(const RowQuantizer args) {
    __shared__ uint32_t block_amax[kRowThreads / kBlockThreads];
    const int64_t total = args.groups.total(), src_base = args.src.base(), dst_base = args.fp8.base();
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
                quantize_unit(v, valid, args.fp8, args.scales, dst_base + row, col, args.rule);
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
        if (valid) scale = block_scale(amax, args.fp8.dtype, false, args.rule);
        for (int col = static_cast<int>(threadIdx.x) * kUnit; col < width && inside; col += step) {
            if (valid) load_unit(args.src, src_base + row, col, v);
            store_fp8(args.fp8, dst_base + row, col,
                      valid ? encode_unit(v, scale.multiplier, args.fp8.dtype) : uint2{0, 0});
        }
        if (inside && threadIdx.x == 0 && width > 0) args.scales.store(dst_base + row, 0, scale);
    }
}

bool is_wide(const RowView& src) { return is_half(src.dtype) && src.vector; }

struct ChunkGrid {
    unsigned ctas;
    int chunks;  // per row
};
// once: one CTA per task, unless the launch is limited; persistent: as many as fit on the SMs.
enum class Ctas { once, persistent };
ChunkGrid chunk_grid(int64_t rows, int64_t cols, Ctas ctas, const Launch& launch) {
    const int64_t chunks = ceil_div(cols, kChunkCols), tasks = ceil_div(rows, kChunkRows) * chunks;
    const bool once = ctas == Ctas::once && launch.sm_limit <= 0;
    return {once ? static_cast<unsigned>(tasks) : grid_for(tasks, launch, kChunkCtas),
            static_cast<int>(chunks)};
}

// The kernel of a 16-bit source and an FP8 type.
template <class KernelOf> auto of_types(DType source, DType fp8, KernelOf kernel_of) {
    return of_half(source, [&]<DType kSource>() {
        return of_fp8(fp8, [&]<DType kFp8>() { return kernel_of.template operator()<kSource, kFp8>(); });
    });
}

void launch_blocks(const RowQuantizer& args, int64_t rows, const Launch& launch) {
    const bool pow2 = args.rule.scale_format == ScaleFormat::pow2;
    const auto kernel = of_types(args.src.dtype, args.fp8.dtype, [&]<DType kSource, DType kFp8>() {
        return pow2 ? quantize_blocks_kernel<kSource, kFp8, ScaleFormat::pow2>
                    : quantize_blocks_kernel<kSource, kFp8, ScaleFormat::fp32>;
    });
    const ChunkGrid grid = chunk_grid(rows, args.src.cols, Ctas::once, launch);
    launch_pdl(kernel, grid.ctas, kRowThreads, launch, "quantize_rows", args, grid.chunks);
}

void launch_whole_rows(const RowQuantizer& args, int64_t rows, const Launch& launch) {
    const auto kernel = of_types(args.src.dtype, args.fp8.dtype, [&]<DType kSource, DType kFp8>() {
        return quantize_whole_rows_kernel<kSource, kFp8>;
    });
    launch_pdl(kernel, grid_for(rows, launch, 4 * kChunkCtas), kRowThreads, launch, "quantize_rows", args);
}

}  // namespace

void launch_quantize_rows(const TensorView& src, const RowGroups& groups, const QuantizeRule& rule,
                          const ScaledTensor& dst, const Launch& launch) {
    const int64_t rows = groups.num_groups > 0 ? groups.row_capacity : src.rows();
    if (rows == 0 || src.cols() == 0) return;
    const RowQuantizer args = {row_view(src), row_view(dst.data), row_scales(dst),
                               device_groups(groups, rows), rule};
    const bool wide = is_wide(args.src) && args.fp8.vector;
    if (wide && args.scales.block == kBlock && src.cols() % kBlock == 0)
        return launch_blocks(args, rows, launch);
    if (wide && args.scales.block == 0 && src.cols() >= kWholeRowLeast && src.cols() <= kWholeRowMost)
        return launch_whole_rows(args, rows, launch);
    const dim3 block = row_block(src.cols());
    launch_kernel(quantize_rows_kernel, grid_for(ceil_div(rows, block.y), launch), block, launch,
                  "quantize_rows", args);
}

bool launch_rows_amax(const RowView& src, const DeviceGroups& groups, int64_t rows, uint32_t* amax,
                      const Launch& launch) {
    if (!is_wide(src)) return false;
    const ChunkGrid grid = chunk_grid(rows, src.cols, Ctas::persistent, launch);
    const auto kernel = of_half(src.dtype, [&]<DType kSource>() { return amax_kernel<kSource>; });
    launch_kernel(kernel, grid.ctas, kRowThreads, launch, "amax", src, groups, grid.chunks, amax);
    return true;
}

namespace {

// False, and nothing is launched, if the rows do not suit chunks.
bool launch_scaled_fp8(const RowView& src, const RowView& fp8, const DeviceGroups& groups, int64_t rows,
                       const float* multiplier, const Launch& launch) {
    if (!is_wide(src) || !fp8.vector) return false;
    const ChunkGrid grid = chunk_grid(rows, src.cols, Ctas::once, launch);
    const auto kernel = of_types(
        src.dtype, fp8.dtype, [&]<DType kSource, DType kFp8>() { return scaled_fp8_kernel<kSource, kFp8>; });
    launch_kernel(kernel, grid.ctas, kRowThreads, launch, "quantize_tensor", src, fp8, groups, grid.chunks,
                  multiplier);
    return true;
}

}  // namespace

}  // namespace fp8flow::hopper::quantize

namespace fp8flow {

using namespace hopper;
using namespace hopper::quantize;

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
    const DType dtype = args.rows ? args.rows.data.dtype : args.transposed.data.dtype;
    const TileShape shape = tile_shape(args.src, args.groups, args.transposed.data);
    const TileSource source = {.values = row_view(args.src)};
    uint32_t* amax = workspace(launch).partials_for<uint32_t>(1);
    launch_tensor_scale(source, shape, amax, dtype, {.scale_format = args.scale_format}, args.rows,
                        args.transposed, launch);
    if (shape.capacity > 0 && shape.cols > 0 && args.rows && !args.transposed &&
        launch_scaled_fp8(source.values, row_view(args.rows.data), shape.groups, shape.capacity,
                          reinterpret_cast<const float*>(amax), launch))
        return;
    TileOutput rows = tile_rows(args.rows, Granularity::tensor),
               columns = tile_columns(args.transposed, Granularity::tensor);
    rows.multipliers = columns.multipliers = reinterpret_cast<const float*>(amax);
    launch_quantize_tiles(source, shape, rows, columns, {.scale_format = args.scale_format}, launch);
}

}  // namespace fp8flow
