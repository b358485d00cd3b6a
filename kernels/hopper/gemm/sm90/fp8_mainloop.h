// SPDX-License-Identifier: MIT
// What the FP8 GEMMs share: scale granularities, wgmma and promotion, the producer's loads, the scales of a
// step, and the alternating mainloop (fp8.cu, all that its overlapped mainloop does not compute). MXFP8:
// fp8_mx.cu.
#pragma once

#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper::gemm {

constexpr int kFp8StageK = 128;  // contraction elements of a stage, and between promotions

// Granularity of the scales of A and of B. Per 128 of the contraction: tiles (128 rows, 128 columns),
// rows_tiles (row, 128 columns), rows_columns (row, column). outputs: constant along the contraction, per row
// or one for A, per column or one for B.
enum class ScaleMode { tiles, rows_tiles, rows_columns, outputs };
constexpr bool has_row_scales(ScaleMode scales) {
    return scales == ScaleMode::rows_tiles || scales == ScaleMode::rows_columns;
}
constexpr bool has_column_scales(ScaleMode scales) { return scales == ScaleMode::rows_columns; }

// Position of a mainloop step in its tile. The first step overlaps with the epilogue of the previous tile,
// the second releases the stage that this epilogue held, the last fetches the next tile. Each is separate
// code, so that all other steps are a short loop: with these branches inside, the loop took 6 % longer.
enum class Step { only, first, second, between, last };

// A consumer warpgroup's part of a tile: two chains (accumulators of 64 rows x 128 columns). columns: all
// rows of its own 128 columns. rows: its own 64 rows, of 128 columns in the first half of D and of the 128
// columns of the second half that belong to them (gate and up).
enum class Owned { columns, rows };
// This thread's upper row in the first chain.
template <Owned kOwned> __device__ __forceinline__ int first_row(int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    return (kOwned == Owned::rows ? 64 * warpgroup : 0) + thread / 32 * 16 + thread % 32 / 4;
}

// Issues the wgmma of one chain over kK of the contraction, and waits for all that were issued.
template <class Wgmma, int kK = kFp8StageK>
__device__ __forceinline__ void start_mma(float (&partial)[64], uint64_t a, uint64_t b) {
    wgmma_fence();
    wgmma_fence_operand(partial);
#pragma unroll
    for (int k = 0; k < kK / 32; ++k)
        Wgmma::multiply(partial, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), k > 0);
    wgmma_commit();
}
__device__ __forceinline__ void wait_mma(float (&partial)[64]) {
    wgmma_wait<0>();
    wgmma_fence_operand(partial);
}
// Promotion: result += partial * scale, with `above` for a thread's upper row and `below` for its lower one.
// kBegins: as if result were 0.
template <bool kBegins = false>
__device__ __forceinline__ void promote(const float (&partial)[64], float (&result)[64], float above,
                                        float below) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
        result[i] = fma_float(partial[i], i / 2 % 2 == 0 ? above : below, kBegins ? 0.0f : result[i]);
}

// The same, also times `columns`: scales of this thread's first two columns, further ones 8 apart.
__device__ __forceinline__ void promote(const float (&partial)[64], float (&result)[64], float above,
                                        float below, const float2* columns) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 column = columns[4 * j];
        result[4 * j] = fma_float(partial[4 * j], above * column.x, result[4 * j]);
        result[4 * j + 1] = fma_float(partial[4 * j + 1], above * column.y, result[4 * j + 1]);
        result[4 * j + 2] = fma_float(partial[4 * j + 2], below * column.x, result[4 * j + 2]);
        result[4 * j + 3] = fma_float(partial[4 * j + 3], below * column.y, result[4 * j + 3]);
    }
}

// One chain over one stage. `read` is called once nothing of the stage is needed any more.
template <class Wgmma, ScaleMode kScaleMode, class Read>
__device__ __forceinline__ void mma_and_promote(uint64_t a, uint64_t b, float (&result)[64], float above,
                                                float below, const float2* columns, Read read) {
    float partial[64];
    start_mma<Wgmma>(partial, a, b);
    wait_mma(partial);
    if (has_column_scales(kScaleMode)) {
        promote(partial, result, above, below, columns);
        read();
    } else {
        read();
        promote(partial, result, above, below);
    }
}

// ---- producer: one thread
//
// B's part of a stage is 256 consecutive rows of B. If warpgroups own rows, it is 128 rows from each half of
// the group's B, and groups divide rows. load_scales(tile, step, stage, full) issues the copies of the
// scales, scale_bytes for each stage.
template <Owned kOwned = Owned::columns, class Shared, class LoadScales>
__device__ __forceinline__ void produce_stages(const GemmProblem& problem, Shared& shared,
                                               const CUtensorMap* map_a, const CUtensorMap* map_b,
                                               uint32_t scale_bytes, LoadScales load_scales) {
    constexpr bool kRowsOwned = kOwned == Owned::rows;
    const int rank = static_cast<int>(cluster_rank());
    const int b_half = kRowsOwned ? static_cast<int>(problem.n / 2) : kTileCols / 2;
    produce_tiles<kFp8StageK>(
        problem, shared, kStageBytes + scale_bytes,
        [&](const WorkTile& tile, auto multicast, int step, int index, Mbarrier* full) {
            const int64_t first_a = kRowsOwned ? 0 : tile.a_k, first_b = kRowsOwned ? 0 : tile.b_k;
            const int a_k = static_cast<int>(first_a) + step * kFp8StageK,
                      b_k = static_cast<int>(first_b) + step * kFp8StageK;
            const bool rows_grouped = kRowsOwned || problem.grouped == Grouped::rows;
            const int a = static_cast<int>(tile.a_output),
                      b = static_cast<int>((rows_grouped ? tile.group * problem.n : 0) +
                                           (kRowsOwned ? tile.b_output / 2 : tile.b_output));
            uint8_t *to_a = shared.stages[index], *to_b = to_a + kTileRows * kStageRowBytes;
            load_operand<2>(load_of(multicast, Multicast::a), rank, map_a, full, to_a,
                            kTileRows / 2 * kStageRowBytes,
                            [&](int i) { return make_int2(a_k, a + i * kTileRows / 2); });
            load_operand<2>(load_of(multicast, Multicast::b), rank, map_b, full, to_b,
                            kTileCols / 2 * kStageRowBytes,
                            [&](int i) { return make_int2(b_k, b + i * b_half); });
            load_scales(tile, step, index, full);
        });
}
// Scales of rows and of columns are bulk copies.
template <ScaleMode kScaleMode, Owned kOwned = Owned::columns, class Shared>
__device__ __forceinline__ void produce_operands(const GemmProblem& problem, Shared& shared,
                                                 const CUtensorMap* map_a, const CUtensorMap* map_b) {
    constexpr uint32_t kRowBytes = has_row_scales(kScaleMode) ? kTileRows * sizeof(float) : 0,
                       kColBytes = has_column_scales(kScaleMode) ? kTileCols * sizeof(float) : 0;
    produce_stages<kOwned>(
        problem, shared, map_a, map_b, kRowBytes + kColBytes,
        [&](const WorkTile& tile, int step, int index, Mbarrier* full) {
            const auto scales_at = [step](const OperandScale& s, int64_t k, int64_t output) {
                return static_cast<const float*>(s.scales) + (k / kFp8StageK + step) * s.block_stride +
                       output;
            };
            constexpr bool kRowsOwned = kOwned == Owned::rows;
            if (kRowBytes > 0)
                bulk_load(scales_at(problem.a.scale, kRowsOwned ? 0 : tile.a_k, tile.a_output), full,
                          shared.row_scales[index], kRowBytes);
            if constexpr (kColBytes > 0)
                // per warpgroup; it may be past the last column, and then its sums are not stored
                for (int64_t col = 0; col < kTileCols; col += kWarpgroupCols)
                    bulk_load(scales_at(problem.b.scale, kRowsOwned ? 0 : tile.b_k,
                                        min(tile.b_output + col, problem.n - kWarpgroupCols)),
                              full, shared.col_scales[index] + col, kWarpgroupCols * sizeof(float));
        });
}

// ---- scales of a step
//
// A thread holds the scales of its rows and of the columns of its chains. A's scales come from the stage. Of
// B's scales, lane l holds those of step l % kHeld, for the current and the following kHeld steps, and those
// of the next tile.
template <Owned kOwned> struct StepScales {
    static constexpr bool kRowsOwned = kOwned == Owned::rows;
    static constexpr int kRows = kRowsOwned ? 2 : 4, kCols = kRowsOwned ? 2 : 1, kHeld = 32 / kCols;
    const GemmProblem& p;
    int warpgroup, steps;
    const float *at_b, *next_at_b = nullptr;
    float held[2], next_held[2];
    float of_row[kRows], of_columns[kCols];  // of the current step

    __device__ __forceinline__ StepScales(const GemmProblem& problem, int of_warpgroup, int steps_of_tile,
                                          const WorkTile& tile)
        : p(problem),
          warpgroup(of_warpgroup),
          steps(steps_of_tile),
          at_b(first_of(tile)),
          held{read(at_b, 0), read(at_b, kHeld)} {}

    __device__ __forceinline__ const float* first_of(const WorkTile& t) const {
        static_assert(kWarpgroupCols == kFp8StageK, "a scale covers the columns of a chain");
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int64_t column = kRowsOwned ? min(t.b_output / 2, p.n / 2 - 1) + lane / kHeld * (p.n / 2)
                                          : min(t.b_output + warpgroup * kWarpgroupCols, p.n - 1);
        return static_cast<const float*>(p.b.scale.scales) + t.group * p.b.scale.group_stride +
               static_cast<int>(column) / kWarpgroupCols * p.b.scale.output_stride;
    }
    __device__ __forceinline__ float read(const float* at, int step) const {
        step += static_cast<int>(threadIdx.x) % 32 % kHeld;
        return step < steps ? at[step * p.b.scale.block_stride] : 0.0f;
    }
    // Reads the scales of a step from `rows` of its stage, which has arrived.
    __device__ __forceinline__ void read_step(int step, const float (&rows)[kTileRows], int row0) {
#pragma unroll
        for (int i = 0; i < kCols; ++i)
            of_columns[i] = __shfl_sync(kFullMask, held[0], step % kHeld + i * kHeld);
#pragma unroll
        for (int i = 0; i < kRows; ++i) of_row[i] = rows[row0 + 64 * (i / 2) + 8 * (i % 2)];
    }
    // Of this thread's upper and lower row in the first chain, then in the second.
    __device__ __forceinline__ float factor(int i) const {
        return of_row[i % kRows] * of_columns[i / 2 % kCols];
    }
    __device__ __forceinline__ void end_step(int step) {
        if ((step + 1) % kHeld != 0) return;
        held[0] = held[1];
        held[1] = read(at_b, step + 1 + kHeld);
    }
    __device__ __forceinline__ void prefetch(const WorkTile& next) {
        next_at_b = first_of(next);
        for (int i = 0; i < 2; ++i) next_held[i] = read(next_at_b, kHeld * i);
    }
    __device__ __forceinline__ void start_next_tile() {
        at_b = next_at_b;
        for (int i = 0; i < 2; ++i) held[i] = next_held[i];
    }
};

// ---- alternating mainloop
//
// A consumer warpgroup computes all 128 rows of its own 128 columns, 64 rows at a time. Warpgroup 1 starts
// half a step after warpgroup 0, so that one promotes while the other uses the tensor cores.
//
//   named barrier    use
//   1 to 3           alternating by tile: warpgroup 0 has its first sums of a tile, warpgroup 1 starts
//   4 to 6           same alternation: warpgroup 0 has zeroed A past the group's end in a stage
//   7                all threads of warpgroup 0 have done so

// Writes zeros to 128 rows of a stage from contraction element `first` (1 to 127) on, one row per thread of
// the warpgroup.
inline __device__ void zero_row_tails(uint8_t* rows, int first) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const int keep = first % 16;  // bytes to keep of the 16 where the group ends
    const auto kept = [keep](uint32_t word, int index) {
        const int bytes = min(max(keep - 4 * index, 0), 4);
        return bytes == 4 ? word : word & ((1u << (8 * bytes)) - 1u);
    };
#pragma unroll 1
    for (int piece = first / 16; piece < kStageRowBytes / 16; ++piece) {
        uint4* at = reinterpret_cast<uint4*>(rows + thread * kStageRowBytes) +
                    (piece ^ (thread % 8));  // as TMA swizzles
        *at = piece > first / 16 || keep == 0
                  ? uint4{}
                  : uint4{kept(at->x, 0), kept(at->y, 1), kept(at->z, 2), kept(at->w, 3)};
    }
}

// For the last stage of a weight gradient, if the group ends inside it. Each warpgroup zeroes its columns of
// B, and the first also zeroes A. The first only arrives at the barrier, so it does not wait for the second.
inline __device__ void zero_k_tail(uint8_t* stage, int first, int warpgroup, int phase) {
    zero_row_tails(stage + (kTileRows + warpgroup * kWarpgroupCols) * kStageRowBytes, first);
    if (warpgroup == 0) zero_row_tails(stage, first);
    fence_async_shared();
    if (warpgroup == 0) {
        named_barrier_sync(1 + 2 * (kTileSlots + 1), kWarpgroup);
        named_barrier_arrive(1 + kTileSlots + 1 + phase, kConsumerThreads);
    } else {
        named_barrier_sync(1 + kTileSlots + 1 + phase, kConsumerThreads);
    }
}

// Multiplies final sums, 2 x 64 rows by 128 columns from col0 on, by the scales of their rows and columns.
__device__ __forceinline__ void scale_outputs(const GemmProblem& p, const WorkTile& tile, int row0,
                                              int64_t col0, float (&sum)[2][64]) {
    const OperandScale &a = p.a.scale, &b = p.b.scale;
    const float* at_a =
        static_cast<const float*>(a.scales) + tile.group * a.group_stride + tile.a_output * a.output_stride;
    const float* at_b = static_cast<const float*>(b.scales) + tile.group * b.group_stride;
    float of_row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = row0 + 64 * (i / 2) + 8 * (i % 2);
        of_row[i] = row < tile.valid ? at_a[row * a.output_stride] : 0.0f;
    }
    const int64_t first = col0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int64_t col = first + 8 * j + e;
            const float of_column = col < p.n ? at_b[col * b.output_stride] : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i / 2][4 * j + 2 * (i % 2) + e] *= of_row[i] * of_column;
        }
    }
}

// One consumer warpgroup, all its tiles.
template <class Wgmma, ScaleMode kScaleMode>
inline __device__ void alternating_mainloop(const GemmProblem& p, SharedStorage& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * 16 + lane / 4;  // this thread's rows: row0 + {0, 8} of each 64
    const float* scales_a = static_cast<const float*>(p.a.scale.scales);
    const float* scales_b = static_cast<const float*>(p.b.scale.scales);
    constexpr bool kRowScales = has_row_scales(kScaleMode);
    constexpr int kRows = kRowScales ? 4 : 1;
    RingPosition<kStages> stage;
    RingPosition<kTileSlots> ring;
    // which named barrier: one more than slots in the tile ring, so that warpgroup 0 is never a full round
    // ahead
    int phase = 0;
    for (;;) {
        WorkTile tile;
        if (!next_tile(shared, ring, tile)) return;

        const int64_t col0 = tile.b_output + warpgroup * kWarpgroupCols;
        // scales that are constant over the warpgroup's part of the tile: lane l holds those of step l of
        // every 32
        const float* at_a = scales_a + tile.a_output / p.a.scale.outputs_per_scale * p.a.scale.output_stride +
                            tile.a_k / kFp8StageK * p.a.scale.block_stride;
        const float* at_b = scales_b + tile.group * p.b.scale.group_stride +
                            min(col0, p.n - 1) / p.b.scale.outputs_per_scale * p.b.scale.output_stride +
                            tile.b_k / kFp8StageK * p.b.scale.block_stride;
        const auto read_scale = [&](int step) {
            if (kScaleMode == ScaleMode::rows_columns || kScaleMode == ScaleMode::outputs) return 1.0f;
            if (step >= tile.steps) return 0.0f;
            const float b = at_b[step * p.b.scale.block_stride];
            return kRowScales ? b : at_a[step * p.a.scale.block_stride] * b;
        };
        float scales = read_scale(lane), next_scales = 0.0f;
        float sum[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i)
            sum[0][i] = sum[1][i] = 0.0f;  // unrolled: otherwise they go to local memory
        // Warpgroup 1 starts when warpgroup 0 has its first sums; from then on they alternate on the tensor
        // cores.
        if (warpgroup == 1 && tile.steps > 0) named_barrier_sync(1 + phase, kConsumerThreads);
        for (int step = 0; step < tile.steps; ++step) {
            if (step % 32 == 0) {
                if (step > 0) scales = next_scales;
                next_scales = read_scale(step + 32 + lane);
            }
            const float scale =
                kScaleMode == ScaleMode::outputs ? 1.0f : __shfl_sync(kFullMask, scales, step % 32);
            mbarrier_wait(&shared.full[stage.index], stage.parity);
            const uint8_t* a = shared.stages[stage.index];
            if (kScaleMode == ScaleMode::outputs && p.grouped == Grouped::contraction &&
                tile.depth - step * kFp8StageK < kFp8StageK)
                zero_k_tail(shared.stages[stage.index], tile.depth - step * kFp8StageK, warpgroup, phase);
            float factor[kRows] = {scale};
            if (kRowScales) {
#pragma unroll
                for (int i = 0; i < kRows; ++i)
                    factor[i] = shared.row_scales[stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)] * scale;
            }
            const uint64_t b = k_major_descriptor(a + (kTileRows + warpgroup * kWarpgroupCols) * kFp8StageK);
            const float2* columns = reinterpret_cast<const float2*>(
                shared.col_scales[stage.index] + warpgroup * kWarpgroupCols + 2 * (lane % 4));
            mma_and_promote<Wgmma, kScaleMode>(k_major_descriptor(a), b, sum[0], factor[0],
                                               factor[kRows > 1 ? 1 : 0], columns, [] {});
            if (step == 0 && warpgroup == 0) named_barrier_arrive(1 + phase, kConsumerThreads);
            mma_and_promote<Wgmma, kScaleMode>(k_major_descriptor(a + 64 * kFp8StageK), b, sum[1],
                                               factor[kRows / 2], factor[kRows - 1], columns,
                                               [&] { release_stage(shared, stage.index); });
            stage.advance();
        }
        if (tile.steps > 0) phase = phase == kTileSlots ? 0 : phase + 1;
        // a group without rows has no scales
        if (kScaleMode == ScaleMode::outputs && tile.steps > 0) scale_outputs(p, tile, row0, col0, sum);
        store_rows(p, tile, row0, col0, sum[0]);
        store_rows(p, tile, row0 + 64, col0, sum[1]);
    }
}

}  // namespace fp8flow::hopper::gemm
