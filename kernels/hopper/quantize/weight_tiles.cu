// SPDX-License-Identifier: MIT
// Weights to both FP8 copies in 128x128 blocks from one read, alone or at the end of an AdamW step. Other
// shapes: quantize_tiles.cu. Contracts: kernels/ops/quantize.h, kernels/ops/optimizer.h.
#include "kernels/hopper/quantize/weight_tiles.h"

#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/device/adamw.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kCtas = 2;
constexpr int kThreads = 256, kStepThreads = 512;  // without and with an AdamW step
constexpr int kRows = 8;                           // of a thread, 8 columns of each
constexpr int kPiece = kTransposedPiece, kPieces = kTransposedPieces;

struct CopyTiles {
    uint8_t* data;  // null: no such copy
    float* scales;
    int64_t scale_batch_stride;
    int scale_stride;
};

struct WeightJob {
    RowView src;
    AdamWArgs step;
    CopyTiles fprop, dgrad;
    int tiles, row_tiles, col_tiles;
    QuantizeRule rule;
};

struct Place {
    int batch, row_tile, col_tile;
};
__device__ __forceinline__ Place place_of(const WeightJob& job, int tile) {
    const int row = tile / job.col_tiles;
    return {row / job.row_tiles, row % job.row_tiles, tile % job.col_tiles};
}

// The scale of a tile from the maxima of the warps, four in a word; after a barrier.
template <DType kFp8, int kWords>
__device__ __forceinline__ BlockScale tile_scale(const WeightJob& job, const uint4 (&warp_max)[kWords]) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        const uint4 four = warp_max[i];
        amax = max(amax, max(max(four.x, four.y), max(four.z, four.w)));
    }
    return block_scale(amax, kFp8, false, job.rule);
}
// Stores the scale of a tile; the last tile of a row also clears the pads of the row. `tiles`: tiles per row.
// One thread calls it.
__device__ __forceinline__ void store_scale(const CopyTiles& copy, int batch, int row_tile, int col_tile,
                                            int tiles, float scale) {
    float* const row =
        copy.scales + batch * copy.scale_batch_stride + static_cast<int64_t>(row_tile) * copy.scale_stride;
    row[col_tile] = scale;
    if (col_tile + 1 == tiles)
        for (int pad = tiles; pad < copy.scale_stride; ++pad) row[pad] = 0.0f;
}

// Stores the transposed tile in 16-byte pieces, 8 threads per column. kColumns: neighbouring columns that a
// thread wrote.
template <int kColumns, int kCtaThreads>
__device__ __forceinline__ void store_transposed(const WeightJob& job, const Place& place,
                                                 const uint32_t* transposed) {
    const int rows = job.row_tiles * kTile, cols = job.col_tiles * kTile;
    const int piece = static_cast<int>(threadIdx.x) % kPieces;
    const int col = static_cast<int>(threadIdx.x) / kPieces;
    uint8_t* out = job.dgrad.data +
                   (static_cast<int64_t>(place.batch) * cols + place.col_tile * kTile + col) * rows +
                   place.row_tile * kTile + piece * kPiece;
    store_whole_columns<kCtaThreads, kColumns>(transposed, col, piece, out, rows);
}

// Eight rows of a unit from `at` on, all loads issued before the first is used.
__device__ __forceinline__ void load_rows(const WeightJob& job, int64_t at, float (&v)[kRows][kUnit]) {
    const int64_t stride = job.src.cols;
    if (job.src.dtype == DType::f32) {
        const float* in = static_cast<const float*>(job.src.data) + at;
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += stride) load_floats(in, v[k]);
        return;
    }
    const uint16_t* in = static_cast<const uint16_t*>(job.src.data) + at;
    uint4 words[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k, in += stride) words[k] = *reinterpret_cast<const uint4*>(in);
#pragma unroll
    for (int k = 0; k < kRows; ++k) unpack_unit(words[k], job.src.dtype, v[k]);
}

// Weights [E, N, K] FP32 or BF16 -> FP8 values [E, N, K] and their transpose [E, K, N], one scale per
// 128x128 tile; either copy may be absent.
// Lower bound: reads 4 bytes per weight (FP32) and writes two FP8 values: 5.64 GB, 1.38 ms at
// 32 x 4096 x 7168 and 4.1 TB/s.
// Grid: one CTA per tile, two CTAs per SM, 128 KB in flight. A tile is in registers, 8 rows x 8 columns per
// thread.
// Barriers (__syncthreads):
// 1  the maxima of the warps are in shared memory
// 2  the transposed tile is complete, and is stored
// 3  only if the launch is limited to fewer SMs and a CTA takes several tiles: this tile has been stored
// Deterministic: element-wise except for maxima.
template <DType kFp8>
__global__ void __launch_bounds__(kThreads, kCtas) weight_tiles_kernel(const WeightJob job) {
    __shared__ uint4 warp_max[kThreads / 128];
    __shared__ uint4 transposed_pieces[kTile * kPieces];
    uint32_t* const transposed = reinterpret_cast<uint32_t*>(transposed_pieces);
    const int thread = static_cast<int>(threadIdx.x), octet = thread / kBlockThreads,
              part = thread % kBlockThreads;
    const int rows = job.row_tiles * kTile, cols = job.col_tiles * kTile;
    pdl_wait();
    for (int tile = static_cast<int>(blockIdx.x); tile < job.tiles; tile += static_cast<int>(gridDim.x)) {
        if (tile != static_cast<int>(blockIdx.x)) __syncthreads();
        const Place place = place_of(job, tile);
        const int64_t first_row =
            static_cast<int64_t>(place.batch) * rows + place.row_tile * kTile + octet * kRows;
        const int64_t at = first_row * cols + place.col_tile * kTile + part * kUnit;
        float v[kRows][kUnit];
        load_rows(job, at, v);
        uint32_t amax = 0;
#pragma unroll
        for (int k = 0; k < kRows; ++k) amax = max(amax, unit_magnitude(v[k]));
        amax = __reduce_max_sync(kFullMask, amax);
        if (thread % 32 == 0) reinterpret_cast<uint32_t*>(warp_max)[thread / 32] = amax;
        __syncthreads();
        const BlockScale scale = tile_scale<kFp8>(job, warp_max);
        const float multiplier = scale.multiplier;
        if (job.fprop.data != nullptr) {
            if (thread == 0)
                store_scale(job.fprop, place.batch, place.row_tile, place.col_tile, job.col_tiles,
                            scale.dequant);
#pragma unroll
            for (int k = 0; k < kRows; ++k)
                *reinterpret_cast<uint2*>(job.fprop.data + at + static_cast<int64_t>(k) * cols) =
                    encode_unit(v[k], multiplier, kFp8);
        }
        if (job.dgrad.data == nullptr) continue;
        if (thread == 0)
            store_scale(job.dgrad, place.batch, place.col_tile, place.row_tile, job.row_tiles, scale.dequant);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {  // 8 rows of a column: half a piece
            const auto four = [&](int k) {
                return pack_fp8(v[k][i] * multiplier, v[k + 1][i] * multiplier, v[k + 2][i] * multiplier,
                                v[k + 3][i] * multiplier, kFp8);
            };
            *reinterpret_cast<uint2*>(transposed + transposed_index<kUnit>(part * kUnit + i, octet / 2) +
                                      octet % 2 * 2) = uint2{four(0), four(4)};
        }
        __syncthreads();
        store_transposed<kUnit, kThreads>(job, place, transposed);
    }
}

// A tile of the AdamW step: the masters stay in shared memory until the scale is known.
constexpr int kStepCols = 4, kStepRows = kTile * kTile / kStepCols / kStepThreads;  // per thread
struct StepShared {
    float4 masters[kStepRows * kStepThreads];  // each thread reads back its own
    uint4 transposed_pieces[kTile * kPieces];
    uint4 warp_max[kStepThreads / 128];
};

// AdamW step of weights [E, N, K] and both FP8 copies of the new masters, one scale per 128x128 tile.
// Lower bound: reads 16 bytes per weight and writes 14, and 2 for the BF16 copy: 7.05 GB, 1.72 ms at 8 x 4096
// x 7168 and 4.1 TB/s. With gradient and moments in BF16: reads 10 and writes 10. Grid: one CTA per tile. A
// warp takes 8 rows, one after the other, 16 bytes per thread, so that every access is a whole line (two
// adjacent 16-byte accesses per thread reach L2 as half sectors). The next row of a thread, or the first of
// the next tile of its CTA, is always in flight: 64 KB per SM. New masters are in shared memory, because in
// registers they would spill.
// Barriers (__syncthreads):
// 1  the maxima of the warps are in shared memory, and the previous tile has been stored; every thread then
//    encodes its own masters and transposes 4x4 squares of FP8 values
// 2  the transposed tile is complete, and is stored
// Deterministic: element-wise except for maxima. No multiply-add is contracted, so results round as in the
// reference. A step with *status != 0 writes no parameter; the copies are then those of the unchanged
// masters.
template <class Types, DType kFp8>
__global__ void __launch_bounds__(kStepThreads, kCtas)
    step_tiles_kernel(const WeightJob job, PdlOrder order) {
    extern __shared__ uint4 step_memory[];
    StepShared& shared = *reinterpret_cast<StepShared*>(step_memory);
    uint32_t* const transposed = reinterpret_cast<uint32_t*>(shared.transposed_pieces);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int rows = job.row_tiles * kTile, cols = job.col_tiles * kTile;
    pdl_begin(order);
    const bool steps = job.step.status == nullptr || *job.step.status == 0;
    const AdamWStep its = adamw_step(job.step);
    const auto start = [&](int tile) {
        const Place place = place_of(job, tile);
        const int64_t row =
            static_cast<int64_t>(place.batch) * rows + place.row_tile * kTile + warp * kStepRows;
        return row * cols + place.col_tile * kTile + lane * kStepCols;
    };
    int64_t at = start(static_cast<int>(blockIdx.x));  // a CTA has at least one tile
    FourParameters<Types> next = load_four<Types>(job.step, steps, at);
    for (int tile = static_cast<int>(blockIdx.x); tile < job.tiles; tile += static_cast<int>(gridDim.x)) {
        const int following = tile + static_cast<int>(gridDim.x);
        float largest = 0.0f;
#pragma unroll 1
        for (int k = 0; k < kStepRows; ++k) {
            const FourParameters<Types> now = next;
            const int64_t here = at;
            at += cols;
            if (k + 1 == kStepRows) at = start(following);
            if (k + 1 < kStepRows || following < job.tiles) next = load_four<Types>(job.step, steps, at);
            const float4 master = steps ? step_four(job.step, its, now, here) : now.master;
            shared.masters[k * kStepThreads + thread] = master;
            largest = fmaxf(fmaxf(largest, fmaxf(fabsf(master.x), fabsf(master.y))),
                            fmaxf(fabsf(master.z), fabsf(master.w)));
        }
        const uint32_t amax = __reduce_max_sync(kFullMask, __float_as_uint(largest));
        if (lane == 0) reinterpret_cast<uint32_t*>(shared.warp_max)[warp] = amax;
        __syncthreads();
        const BlockScale scale = tile_scale<kFp8>(job, shared.warp_max);
        const Place place = place_of(job, tile);
        if (thread == 0) {
            if (job.fprop.data != nullptr)
                store_scale(job.fprop, place.batch, place.row_tile, place.col_tile, job.col_tiles,
                            scale.dequant);
            if (job.dgrad.data != nullptr)
                store_scale(job.dgrad, place.batch, place.col_tile, place.row_tile, job.row_tiles,
                            scale.dequant);
        }
        uint32_t squares[kStepRows / 4][kStepCols];  // a word: four rows of a column
#pragma unroll
        for (int square = 0; square < kStepRows / 4; ++square) {
            uint32_t fp8[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float4 v = shared.masters[(square * 4 + k) * kStepThreads + thread];
                fp8[k] = pack_fp8(v.x * scale.multiplier, v.y * scale.multiplier, v.z * scale.multiplier,
                                  v.w * scale.multiplier, kFp8);
                if (job.fprop.data != nullptr)
                    *reinterpret_cast<uint32_t*>(job.fprop.data + start(tile) +
                                                 static_cast<int64_t>(square * 4 + k) * cols) = fp8[k];
            }
            transpose_4x4(fp8, squares[square]);
        }
        if (job.dgrad.data != nullptr) {
#pragma unroll
            for (int i = 0; i < kStepCols; ++i)  // 8 rows of a column: half a piece
                *reinterpret_cast<uint2*>(
                    transposed + transposed_index<kStepCols>(lane * kStepCols + i, warp / 2) + warp % 2 * 2) =
                    uint2{squares[0][i], squares[1][i]};
        }
        __syncthreads();
        if (job.dgrad.data != nullptr) store_transposed<kStepCols, kStepThreads>(job, place, transposed);
    }
    pdl_end(order);
}

CopyTiles copy_tiles(const ScaledTensor& copy) {
    if (!copy) return {};
    return {.data = static_cast<uint8_t*>(copy.data.data),
            .scales = copy.scales.as<float>(),
            .scale_batch_stride = copy.scales.rank == 3 ? copy.scales.dim(1) * copy.scales.dim(2) : 0,
            .scale_stride = static_cast<int>(copy.scales.cols())};
}

void launch_step(const WeightJob& job, const op::AdamW& step, DType fp8, const Launch& launch) {
    with_types(step, [&]<class Types>() {
        const auto kernel = of_fp8(fp8, [&]<DType kFp8>() { return step_tiles_kernel<Types, kFp8>; });
        launch_pdl(kernel, grid_of_items(job.tiles, launch, kCtas), kStepThreads, sizeof(StepShared), launch,
                   "step_tiles", job, pdl_order(launch));
    });
}

}  // namespace

bool launch_weight_tiles(const TensorView& src, const op::AdamW* step, const QuantizeRule& rule,
                         const ScaledTensor& fprop, const ScaledTensor& dgrad, const Launch& launch) {
    const int64_t rows = src.dim(-2), cols = src.dim(-1), batches = src.rank == 3 ? src.dim(0) : 1;
    const int64_t tiles = batches * (rows / kTile) * (cols / kTile);
    if (tiles == 0 || tiles > INT32_MAX / 2 || rows % kTile != 0 || cols % kTile != 0) return false;
    if ((!fprop && !dgrad) || (fprop && dgrad && fprop.data.dtype != dgrad.data.dtype)) return false;
    for (const ScaledTensor* copy : {&fprop, &dgrad})
        if (*copy && (copy->layout != ScaleLayout::block128 || !is_aligned(copy->data.data))) return false;
    WeightJob job = {.src = row_view(src),
                     .step = {},
                     .fprop = copy_tiles(fprop),
                     .dgrad = copy_tiles(dgrad),
                     .tiles = static_cast<int>(tiles),
                     .row_tiles = static_cast<int>(rows / kTile),
                     .col_tiles = static_cast<int>(cols / kTile),
                     .rule = rule};
    if (!job.src.vector) return false;
    const DType fp8 = fprop ? fprop.data.dtype : dgrad.data.dtype;
    if (step != nullptr) {
        for (const TensorView* view : {&step->grad, &step->master, &step->m, &step->v, &step->copy})
            if (!is_aligned(view->data)) return false;
        if (step->first_element % 4 != 0) return false;
        job.step = adamw_args(*step);
        launch_step(job, *step, fp8, launch);
        return true;
    }
    const auto kernel = of_fp8(fp8, [&]<DType kFp8>() { return weight_tiles_kernel<kFp8>; });
    launch_pdl(kernel, grid_of_items(job.tiles, launch, kCtas), kThreads, launch, "weight_tiles", job);
    return true;
}

}  // namespace fp8flow::hopper::quantize
