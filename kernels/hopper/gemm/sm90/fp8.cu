// SPDX-License-Identifier: MIT
// Grouped FP8 GEMM (wgmma): A e4m3 or e5m2, B e4m3, D BF16 or FP32. Scales per 128 of the contraction or
// constant along it. Rows grouped (forward, data gradient), or contraction grouped on transposed copies
// (weight gradient; with scales per 128: fp8_wgrad.cu). Group sizes are read on the device.
//
// Floor: 2 m n k FLOPs at the FP8 rate of the tensor cores; every operand read once, D written once (and read
// once, if accumulated).
//
// Grid, roles: pipeline.h. Stages of 128 contraction elements. A consumer warpgroup computes all 128 rows of
// its own 128 columns, 64 rows at a time. Promotion: tensor cores sum 128 elements of the contraction (they
// keep about 14 bits of a running sum), then FP32 FMAs on CUDA cores scale that sum and add it to the result
// in registers. Scales that are constant along the contraction (per row and column, or per tensor) are
// applied once, to the final sums; the promotion every 128 stays.
//
// Two mainloops:
//   alternating (here): the second warpgroup starts half a step late, so one promotes while the other has the
//     tensor cores (ping-pong within a tile). FP32 D, tile scales, column scales, constant scales.
//   overlapped (fp8_mainloop.h): BF16 D with row scales of A, that is forward and data gradient. Only the
//     promotion is outside wgmma; D is stored through shared memory and TMA (bf16_epilogue.h).
//
// Shared memory: 4 stages of [128 rows of A | 256 rows of B] x 128 bytes, 128-byte swizzled; scales of the
// stages' rows and columns (overlapped: staging boxes of D in place of the column scales); ring of 2 tiles;
// barriers.
//
//   barrier          use
//   full[s], ...     pipeline.h; full[s]: 48 KiB (+ 512 bytes of row scales, + 1024 of column scales)
//   named 1 to 3     alternating by tile: warpgroup 0 has its first sums of a tile, warpgroup 1 starts
//   named 4 to 6     same alternation: warpgroup 0 has zeroed A past the group's end in a stage
//   named 7          all threads of warpgroup 0 have done so
//
// Deterministic: an element of D is one thread's sum over ascending k, whatever the other groups hold. Tried
// and measured: docs/design_notes.md.
#include "kernels/hopper/gemm/sm90/bf16_epilogue.h"
#include "kernels/hopper/gemm/sm90/fp8_mainloop.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kStageK = kFp8StageK;

// Zeros in 128 rows of a stage, one row a thread of the warpgroup, from contraction element `first` (1 to
// 127) on.
__device__ void zero_row_tails(uint8_t* rows, int first) {
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

// The last stage of a weight gradient where the group ends inside it: each warpgroup zeroes its columns of B,
// the first one A as well. The first one only arrives at the barrier, so it does not wait for the second.
__device__ void zero_k_tail(uint8_t* stage, int first, int warpgroup, int phase) {
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

// ---- alternating mainloop: one consumer warpgroup
template <class Wgmma, ScaleMode kScaleMode>
__device__ void alternating_mainloop(const GemmProblem& p, SharedStorage& shared, int warpgroup) {
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
                            tile.a_k / kStageK * p.a.scale.block_stride;
        const float* at_b = scales_b + tile.group * p.b.scale.group_stride +
                            min(col0, p.n - 1) / p.b.scale.outputs_per_scale * p.b.scale.output_stride +
                            tile.b_k / kStageK * p.b.scale.block_stride;
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
                tile.depth - step * kStageK < kStageK)
                zero_k_tail(shared.stages[stage.index], tile.depth - step * kStageK, warpgroup, phase);
            float factor[kRows] = {scale};
            if (kRowScales) {
#pragma unroll
                for (int i = 0; i < kRows; ++i)
                    factor[i] = shared.row_scales[stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)] * scale;
            }
            const uint64_t b = k_major_descriptor(a + (kTileRows + warpgroup * kWarpgroupCols) * kStageK);
            const float2* columns = reinterpret_cast<const float2*>(
                shared.col_scales[stage.index] + warpgroup * kWarpgroupCols + 2 * (lane % 4));
            mma_and_promote<Wgmma, kScaleMode>(k_major_descriptor(a), b, sum[0], factor[0],
                                               factor[kRows > 1 ? 1 : 0], columns, [] {});
            if (step == 0 && warpgroup == 0) named_barrier_arrive(1 + phase, kConsumerThreads);
            mma_and_promote<Wgmma, kScaleMode>(k_major_descriptor(a + 64 * kStageK), b, sum[1],
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

// ---- the CTA
template <class Wgmma, ScaleMode kScaleMode>
__global__ void __launch_bounds__(kCtaThreads, 1)
    fp8_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ CUtensorMap map_a,
               const __grid_constant__ CUtensorMap map_b) {
    run_roles([&](SharedStorage& shared) { produce_operands<kScaleMode>(problem, shared, &map_a, &map_b); },
              [&](SharedStorage& shared, int warpgroup) {
                  alternating_mainloop<Wgmma, kScaleMode>(problem, shared, warpgroup);
              });
}

// SharedStorage with staging boxes of D in place of column scales.
struct OverlappedStorage {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    Bf16Staging staging[kConsumerWarps];
    alignas(16) float row_scales[kStages][kTileRows];
    WorkTile tiles[kTileSlots];
    Mbarrier full[kStages], empty[kStages], tile_full[kTileSlots], tile_empty[kTileSlots];
};

template <class Wgmma>
__global__ void __launch_bounds__(kCtaThreads, 1)
    fp8_overlapped_kernel(const __grid_constant__ GemmProblem problem,
                          const __grid_constant__ CUtensorMap map_a,
                          const __grid_constant__ CUtensorMap map_b,
                          const __grid_constant__ CUtensorMap map_d) {
    run_roles<OverlappedStorage>(
        [&](OverlappedStorage& shared) {
            produce_operands<ScaleMode::rows_tiles>(problem, shared, &map_a, &map_b);
        },
        [&](OverlappedStorage& shared, int warpgroup) {
            Bf16Staging& staging = shared.staging[threadIdx.x / 32 - kWarpgroup / 32];
            overlapped_mainloop<Wgmma>(problem, shared, warpgroup,
                                       StoreEpilogue{problem, &map_d, staging, warpgroup});
        });
}

// Scales constant along the contraction.
bool scales_constant_along_k(const GemmProblem& p) {
    const auto constant = [](const OperandScale& s) {
        return s.scales != nullptr && s.dtype == DType::f32 && s.block == 0 && s.outputs_per_scale == 1;
    };
    return constant(p.a.scale) && constant(p.b.scale);
}

}  // namespace

bool wgmma_supports_fp8(const GemmProblem& p, int64_t alignment) {
    if (!is_fp8(p.a.dtype) || p.b.dtype != DType::e4m3 || p.a.k_stride != 1 || p.b.k_stride != 1)
        return false;
    if (scales_constant_along_k(p)) return p.grouped == Grouped::rows || alignment % 16 == 0;
    const auto scaled_by_128 = [](const OperandScale& s) {
        return s.scales != nullptr && s.dtype == DType::f32 && s.block == kStageK &&
               (s.outputs_per_scale == kStageK || s.outputs_per_scale == 1);
    };
    const bool a_rows = p.a.scale.outputs_per_scale == 1, b_columns = p.b.scale.outputs_per_scale == 1;
    // scales of rows and of columns are bulk copies, of a tile's rows and of a warpgroup's columns
    return scaled_by_128(p.a.scale) && scaled_by_128(p.b.scale) && alignment % kTileRows == 0 &&
           (!a_rows || p.a.scale.block_stride % 4 == 0) &&
           (!a_rows || p.grouped == Grouped::rows || (b_columns && p.m % kTileRows == 0)) &&
           (!b_columns || (a_rows && p.n % kWarpgroupCols == 0 && p.b.scale.block_stride % 4 == 0 &&
                           (p.grouped == Grouped::contraction || p.groups.num_groups == 1)));
}

namespace {

template <class Wgmma>
void launch(const GemmProblem& p, const CUtensorMap& map_a, const CUtensorMap& map_b, const Launch& launch) {
    const bool a_rows = p.a.scale.outputs_per_scale == 1, b_columns = p.b.scale.outputs_per_scale == 1,
               whole = scales_constant_along_k(p);
    if (!whole && a_rows && !b_columns && p.d_dtype == DType::bf16) {
        launch_persistent<OverlappedStorage>(fp8_overlapped_kernel<Wgmma>, p, launch, map_a, map_b,
                                             staging_map(p));
        return;
    }
    const auto kernel = whole       ? fp8_kernel<Wgmma, ScaleMode::outputs>
                        : b_columns ? fp8_kernel<Wgmma, ScaleMode::rows_columns>
                        : a_rows    ? fp8_kernel<Wgmma, ScaleMode::rows_tiles>
                                    : fp8_kernel<Wgmma, ScaleMode::tiles>;
    launch_persistent<SharedStorage>(kernel, p, launch, map_a, map_b);
}

}  // namespace

void launch_wgmma_fp8(const GemmProblem& p, const StoredShape& a, const StoredShape& b, const Launch& how) {
    const CUtensorMap map_a = operand_map(p.a, a, kTileRows / 2), map_b = operand_map(p.b, b, kTileCols / 2);
    p.a.dtype == DType::e5m2 ? launch<WgmmaE5m2>(p, map_a, map_b, how)
                             : launch<WgmmaE4m3>(p, map_a, map_b, how);
}

}  // namespace fp8flow::hopper::gemm
