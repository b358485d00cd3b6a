// SPDX-License-Identifier: MIT
// Statistics of the error of quantisation (--tensor-stats), and clip_fp8. Contracts: kernels/ops/measure.h,
// quantize.h.
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/quantize/dequantize.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kTile = static_cast<int>(kBlock), kStreams = kRowThreads / kTile, kWarps = kRowThreads / 32;
constexpr int kCounts = op::kQuantizationCounts, kWords = op::kQuantizationWords;
constexpr int kMeasureCtas = 4;  // per SM

struct Measure {
    Dequantizer quantized, source;
    DeviceGroups groups;
    bool transposed;
    int tile_cols;
    double* partials;  // [CTAs, kWords]
};

// The counts of one value, and the exponent of its scale. All lanes of a warp are in one row.
__device__ __forceinline__ void measure_value(const Measure& args, int64_t row, int64_t source_row, int col,
                                              op::QuantizationCounts& counts, unsigned* exponents) {
    const Dequantizer& q = args.quantized;
    const int64_t r = args.transposed ? col : row, c = args.transposed ? row : col;
    const float code = load_float(q.fp8.data, q.fp8.dtype, r * q.fp8.cols + c),
                scale = scale_of(q, 0, r, c, 0);
    const RowView& source = args.source.fp8;
    const double truth =
        static_cast<double>(load_float(source.data, source.dtype, source_row * source.cols + col)) *
        static_cast<double>(scale_of(args.source, 0, source_row, col, 0));
    counts.count(code, scale, truth, fp8_max(q.fp8.dtype));
    const unsigned exponent = float_bits(scale) >> 23 & 0xFFu, lanes = __activemask(),
                   same = __match_any_sync(lanes, exponent);
    if (static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(same)) - 1)
        atomicAdd(exponents + exponent, __popc(same));
}

// Grid-stride over tiles of 128 x 128 values. A thread takes a column of 64 rows, so that all lanes of a
// warp are in one row, with the same scale and group. (In a transposed copy they are in 32 rows; the tile
// stays in L1.)
// Lower bound: 3.03 bytes per value for BF16 rows, but about 50 instructions per value take longer.
// Deterministic: threads, lanes, warps and CTAs add in fixed orders, and the shared counters are integers.
__global__ void __launch_bounds__(kRowThreads, kMeasureCtas) measure_kernel(const Measure args) {
    __shared__ unsigned exponents[op::QuantizationSums::kExponents];
    __shared__ double warps[kWarps][kCounts];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    for (int i = thread; i < op::QuantizationSums::kExponents; i += kRowThreads) exponents[i] = 0;
    __syncthreads();
    op::QuantizationCounts counts;
    const int64_t total = args.groups.total(), base = args.quantized.fp8.base(),
                  source_base = args.source.fp8.base();
    const int64_t tiles = (total + kTile - 1) / kTile * args.tile_cols;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t first = tile / args.tile_cols * kTile + thread / kTile * (kTile / kStreams);
        const int col = static_cast<int>(tile % args.tile_cols) * kTile + thread % kTile;
        if (first >= total) continue;
        RowCursor rows(args.groups, first);
        for (int64_t row = first; row < min(total, first + kTile / kStreams); ++row)
            if (rows.next_is_valid() && col < args.source.fp8.cols)
                measure_value(args, base + row, source_base + row, col, counts, exponents);
    }
    double words[kCounts];
    memcpy(words, &counts, sizeof(words));
#pragma unroll
    for (int w = 0; w < kCounts; ++w) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            words[w] = op::join_quantization(w, words[w], __shfl_xor_sync(kFullMask, words[w], step));
        if (lane == 0) warps[thread / 32][w] = words[w];
    }
    __syncthreads();
    double* const out = args.partials + static_cast<int64_t>(blockIdx.x) * kWords;
    if (thread < kCounts) {
        double joined = warps[0][thread];
        for (int warp = 1; warp < kWarps; ++warp)
            joined = op::join_quantization(thread, joined, warps[warp][thread]);
        out[thread] = joined;
    }
    for (int i = thread; i < op::QuantizationSums::kExponents; i += kRowThreads)
        out[kCounts + i] = exponents[i];
}

// sums += partials, CTA by CTA, one word per thread.
__global__ void join_partials_kernel(const double* partials, int ctas, double* sums) {
    const int word = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (word >= kWords) return;
    double joined = sums[word];
    for (int cta = 0; cta < ctas; ++cta)
        joined = op::join_quantization(word, joined, partials[static_cast<int64_t>(cta) * kWords + word]);
    sums[word] = joined;
}

// Clips FP8 values, one CTA per row, grid-stride. Nothing is reduced.
__global__ void __launch_bounds__(kRowThreads)
    clip_kernel(const RowView rows, const DeviceGroups groups, uint8_t most) {
    const int64_t total = groups.total(), base = rows.base();
    for (int64_t row = blockIdx.x; row < total; row += gridDim.x) {
        uint8_t* const fp8 = static_cast<uint8_t*>(rows.data) + (base + row) * rows.cols;
        for (int col = static_cast<int>(threadIdx.x); col < rows.cols; col += kRowThreads)
            fp8[col] = fp8_clip(fp8[col], most, rows.dtype);
    }
}

}  // namespace

}  // namespace fp8flow::hopper::quantize

namespace fp8flow {

using namespace hopper;
using namespace hopper::quantize;

void HopperOps::do_measure_quantization(const op::MeasureQuantization& args, const Launch& launch) {
    const TensorView& source = args.source.data;
    const int64_t rows = args.groups.num_groups > 0 ? args.groups.row_capacity : source.dim(0),
                  tile_cols = ceil_div(source.cols(), kBlock), tiles = ceil_div(rows, kBlock) * tile_cols;
    if (tiles == 0) return;
    const unsigned grid = grid_for(tiles, launch, kMeasureCtas);
    const Measure job = {.quantized = dequantizer_of(args.quantized),
                         .source = dequantizer_of(args.source),
                         .groups = device_groups(args.groups, source.dim(0)),
                         .transposed = args.copy == op::MeasureQuantization::Copy::transposed,
                         .tile_cols = static_cast<int>(tile_cols),
                         .partials = workspace(launch).partials_for<double>(int64_t{grid} * kWords)};
    constexpr const char* kOp = "measure_quantization";
    launch_kernel(measure_kernel, grid, kRowThreads, launch, kOp, job);
    launch_kernel(join_partials_kernel, static_cast<unsigned>(ceil_div(kWords, 32)), 32, launch, kOp,
                  job.partials, grid, args.sums.as<double>());
}

void HopperOps::do_clip_fp8(const op::ClipFp8& args, const Launch& launch) {
    const int64_t rows = args.groups.num_groups > 0 ? args.groups.row_capacity : args.rows.dim(0);
    if (rows == 0 || args.rows.cols() == 0) return;
    const uint8_t most = to_fp8(fp8_max(args.rows.dtype) * args.share, args.rows.dtype);
    launch_kernel(clip_kernel, grid_for(rows, launch), kRowThreads, launch, "clip_fp8", row_view(args.rows),
                  device_groups(args.groups, rows), most);
}

}  // namespace fp8flow
