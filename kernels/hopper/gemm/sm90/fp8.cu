// SPDX-License-Identifier: MIT
// Grouped FP8 products on Hopper's warpgroup instructions, with one scale per 128 elements of the contraction
// or with scales that are constant along it: forward and data gradient (rows grouped), and the weight
// gradient from transposed copies (contraction grouped; with a scale per 128: fp8_wgrad.cu). Group sizes are
// read on the device. Read next: pipeline.h (tiles, barriers, storing), gemm/problem.h (what a product is),
// docs/worklogs/gemm.md (what was tried and measured).
//
// Floor: 2 m n k FLOPs at the tensor cores' FP8 rate; every operand read once and D written once (and read
// once, if accumulated). One CTA: a loading warp and two computing warpgroups, on every SM,
// walking tiles of 128 x 256 of D in a fixed order. The loader owns the walk over the groups: it puts a
// description of each tile into a ring of two and streams the tile's operands, 128 of the contraction at a
// time, through a ring of four stages. The two CTAs of a cluster work on neighbouring tiles of one group:
// each loads half of the operand that they have in common, for both. Each warpgroup multiplies all 128 rows
// by its own 128 columns, 64 rows at a time: tensor cores sum 128 products, then CUDA cores scale that sum
// and add it to the FP32 result in registers, while the other warpgroup keeps the tensor cores busy: the
// second starts half a turn late. Forward and input gradient need no such turn: their warpgroups do
// everything but the additions behind products (fp8_mainloop.h), and their rows of D leave through shared
// memory (bf16_epilogue.h). Scales that are constant along the contraction (per row and column, or per
// tensor) are applied once, to the finished sums; the promotion every 128 stays, because tensor cores keep
// about 14 bits of a running sum.
//
// Shared memory: 4 stages of [128 rows of A | 256 rows of B] x 128 bytes, 128-byte swizzled; the stages' row
// and column scales, or in place of those of columns the slabs of D; the ring of tiles; barriers. Barriers:
// full[s] one arrival + 48 KiB of copies (+ 512 bytes of row scales, 1024 of column scales), waited for by
// the computing warps; empty[s] one arrival a computing warp of either CTA after its last product from the
// stage, waited for by the loader that writes there; tile_full[r] one arrival of the loader, tile_empty[r]
// one a computing thread that has read the tile; named barriers 1 to 3, by turns: the first warpgroup has its
// first sums of a tile; 4 to 6, by the same turns: it has cleared what stands behind the group in A's part of
// a stage; 7: all of the first warpgroup have. The CTAs of a cluster meet before the first copy and before
// they leave. Deterministic: an element of D is one thread's sum over ascending k, whatever the other groups
// hold.

#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/bf16_epilogue.h"
#include "kernels/hopper/gemm/sm90/fp8_mainloop.h"
#include "kernels/hopper/gemm/sm90/fp8_scales.h"

namespace fp8flow::hopper {

namespace {

constexpr int kDepth = kFp8Depth;

// 128 rows of a stage, one for each thread of the warpgroup, become zero from contraction element `first` (1
// to 127) on.
__device__ void clear_rows_behind(uint8_t* rows, int first) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const int keep = first % 16;  // bytes of the piece that is half inside
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

// The last stage of a weight gradient whose group does not end with it. Each warpgroup clears its columns of
// B, the first one A, too; it only announces that, so that it waits for nobody.
__device__ void clear_behind(uint8_t* stage, int first, int warpgroup, int turn) {
    clear_rows_behind(stage + (kTileRows + warpgroup * kColumns) * kStageRowBytes, first);
    if (warpgroup == 0) clear_rows_behind(stage, first);
    fence_async_shared();
    if (warpgroup == 0) {
        named_barrier_sync(1 + 2 * (kRing + 1), kWarpgroup);
        named_barrier_arrive(1 + kRing + 1 + turn, kMathThreads);
    } else {
        named_barrier_sync(1 + kRing + 1 + turn, kMathThreads);
    }
}

// Finished sums of 2 x 64 rows by 128 columns from col0 on, times the scales of their rows and columns.
__device__ __forceinline__ void scale_outputs(const DeviceProduct& p, const MathTile& tile, int row0,
                                              int64_t col0, float (&sum)[2][64]) {
    const DeviceScale &a = p.a.scale, &b = p.b.scale;
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

// ---- computing: one warpgroup
template <class Wgmma, Scales kScales>
__device__ void multiply_tiles(const DeviceProduct& p, WgmmaShared& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * 16 + lane / 4;  // this thread's rows: row0 + {0, 8} of each 64
    const float* scales_a = static_cast<const float*>(p.a.scale.scales);
    const float* scales_b = static_cast<const float*>(p.b.scale.scales);
    constexpr bool kRowScales = has_row_scales(kScales);
    constexpr int kRows = kRowScales ? 4 : 1;
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;
    // one named barrier more than tiles in the ring: the first warpgroup is never further ahead
    int turn = 0;
    for (;;) {
        MathTile tile;
        if (!next_tile(shared, ring, tile)) return;

        const int64_t col0 = tile.b_output + warpgroup * kColumns;
        // scales that are constant over the warpgroup's part of the tile: lane l holds those of step l of
        // every 32 steps
        const float* at_a = scales_a + tile.a_output / p.a.scale.outputs_per_scale * p.a.scale.output_stride +
                            tile.a_k / kDepth * p.a.scale.block_stride;
        const float* at_b = scales_b + tile.group * p.b.scale.group_stride +
                            min(col0, p.n - 1) / p.b.scale.outputs_per_scale * p.b.scale.output_stride +
                            tile.b_k / kDepth * p.b.scale.block_stride;
        const auto read_scale = [&](int step) {
            if (kScales == Scales::rows_columns || kScales == Scales::outputs) return 1.0f;
            if (step >= tile.steps) return 0.0f;
            const float b = at_b[step * p.b.scale.block_stride];
            return kRowScales ? b : at_a[step * p.a.scale.block_stride] * b;
        };
        float scales = read_scale(lane), next_scales = 0.0f;
        float sum[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i)
            sum[0][i] = sum[1][i] = 0.0f;  // a loop that stays one would put them in local memory
        // The second warpgroup starts when the first has its first sums: from then on they take turns on the
        // tensor cores.
        if (warpgroup == 1 && tile.steps > 0) named_barrier_sync(1 + turn, kMathThreads);
        for (int step = 0; step < tile.steps; ++step) {
            if (step % 32 == 0) {
                if (step > 0) scales = next_scales;
                next_scales = read_scale(step + 32 + lane);
            }
            const float scale = kScales == Scales::outputs ? 1.0f : __shfl_sync(kFullMask, scales, step % 32);
            mbarrier_wait(&shared.full[stage.index], stage.parity);
            const uint8_t* a = shared.stages[stage.index];
            if (kScales == Scales::outputs && p.grouped == Grouped::contraction &&
                tile.depth - step * kDepth < kDepth)
                clear_behind(shared.stages[stage.index], tile.depth - step * kDepth, warpgroup, turn);
            float factor[kRows] = {scale};
            if (kRowScales) {
#pragma unroll
                for (int i = 0; i < kRows; ++i)
                    factor[i] = shared.row_scales[stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)] * scale;
            }
            const uint64_t b = k_major_descriptor(a + (kTileRows + warpgroup * kColumns) * kDepth);
            const float2* columns = reinterpret_cast<const float2*>(shared.col_scales[stage.index] +
                                                                    warpgroup * kColumns + 2 * (lane % 4));
            add_products<Wgmma, kScales>(k_major_descriptor(a), b, sum[0], factor[0],
                                         factor[kRows > 1 ? 1 : 0], columns, [] {});
            if (step == 0 && warpgroup == 0) named_barrier_arrive(1 + turn, kMathThreads);
            add_products<Wgmma, kScales>(k_major_descriptor(a + 64 * kDepth), b, sum[1], factor[kRows / 2],
                                         factor[kRows - 1], columns,
                                         [&] { release_stage(shared, stage.index); });
            stage.advance();
        }
        if (tile.steps > 0) turn = turn == kRing ? 0 : turn + 1;
        // a group without rows has no scales
        if (kScales == Scales::outputs && tile.steps > 0) scale_outputs(p, tile, row0, col0, sum);
        store_rows(p, tile, row0, col0, sum[0]);
        store_rows(p, tile, row0 + 64, col0, sum[1]);
    }
}

// ---- the CTA
template <class Wgmma, Scales kScales>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    fp8_kernel(const __grid_constant__ DeviceProduct product, const __grid_constant__ CUtensorMap map_a,
               const __grid_constant__ CUtensorMap map_b) {
    run_roles([&](WgmmaShared& shared) { load_operands<kScales>(product, shared, &map_a, &map_b); },
              [&](WgmmaShared& shared, int warpgroup) {
                  multiply_tiles<Wgmma, kScales>(product, shared, warpgroup);
              });
}

// WgmmaShared with the slabs of D in place of scales of columns.
struct OverlapShared {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    RowSlab slabs[kMathWarps];
    alignas(16) float row_scales[kStages][kTileRows];
    MathTile tiles[kRing];
    Mbarrier full[kStages], empty[kStages], tile_full[kRing], tile_empty[kRing];
};
static_assert(sizeof(OverlapShared) <= kMostShared);

template <class Wgmma>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    fp8_overlapped_kernel(const __grid_constant__ DeviceProduct product,
                          const __grid_constant__ CUtensorMap map_a,
                          const __grid_constant__ CUtensorMap map_b,
                          const __grid_constant__ CUtensorMap map_d) {
    run_roles<OverlapShared>(
        [&](OverlapShared& shared) { load_operands<Scales::rows_tiles>(product, shared, &map_a, &map_b); },
        [&](OverlapShared& shared, int warpgroup) {
            RowSlab& slab = shared.slabs[threadIdx.x / 32 - kWarpgroup / 32];
            multiply_tiles_overlapped<Wgmma>(product, shared, warpgroup,
                                             StoreTile{product, &map_d, slab, warpgroup});
        });
}

// Scales that are constant along the contraction.
bool whole_sums(const DeviceProduct& p) {
    const auto constant = [](const DeviceScale& s) {
        return s.scales != nullptr && s.dtype == DType::f32 && s.block == 0 && s.outputs_per_scale == 1;
    };
    return constant(p.a.scale) && constant(p.b.scale);
}

}  // namespace

bool wgmma_takes_fp8(const DeviceProduct& p, int64_t alignment) {
    if (whole_sums(p))
        return is_fp8(p.a.dtype) && p.b.dtype == DType::e4m3 && p.a.k_stride == 1 && p.b.k_stride == 1 &&
               (p.grouped == Grouped::rows || alignment % 16 == 0);
    const auto scaled_by_128 = [](const DeviceScale& s) {
        return s.scales != nullptr && s.dtype == DType::f32 && s.block == kDepth &&
               (s.outputs_per_scale == kDepth || s.outputs_per_scale == 1);
    };
    const bool a_rows = p.a.scale.outputs_per_scale == 1, b_columns = p.b.scale.outputs_per_scale == 1;
    return is_fp8(p.a.dtype) && p.b.dtype == DType::e4m3 && p.a.k_stride == 1 && p.b.k_stride == 1 &&
           scaled_by_128(p.a.scale) && scaled_by_128(p.b.scale) && alignment % kTileRows == 0 &&
           // scales of single rows and columns are copied in pieces of 16 bytes, those of a whole tile
           (!a_rows || p.a.scale.block_stride % 4 == 0) &&
           (!a_rows || p.grouped == Grouped::rows || (b_columns && p.m % kTileRows == 0)) &&
           (!b_columns || (a_rows && p.n % kTileCols == 0 && p.b.scale.block_stride % 4 == 0 &&
                           (p.grouped == Grouped::contraction || p.groups.num_groups == 1)));
}

namespace {

template <class Wgmma>
void launch(const DeviceProduct& p, const CUtensorMap& map_a, const CUtensorMap& map_b,
            const Launch& launch) {
    const bool a_rows = p.a.scale.outputs_per_scale == 1, b_columns = p.b.scale.outputs_per_scale == 1,
               whole = whole_sums(p);
    if (!whole && a_rows && !b_columns && p.d_dtype == DType::bf16) {
        launch_wgmma_kernel(fp8_overlapped_kernel<Wgmma>, p, launch, sizeof(OverlapShared), map_a, map_b,
                            rows_map(p));
        return;
    }
    const auto kernel = whole       ? fp8_kernel<Wgmma, Scales::outputs>
                        : b_columns ? fp8_kernel<Wgmma, Scales::rows_columns>
                        : a_rows    ? fp8_kernel<Wgmma, Scales::rows_tiles>
                                    : fp8_kernel<Wgmma, Scales::tiles>;
    launch_wgmma_kernel(kernel, p, launch, kSharedBytes, map_a, map_b);
}

}  // namespace

void launch_wgmma_fp8(const DeviceProduct& p, const StoredShape& a, const StoredShape& b, const Launch& how) {
    if (is_blockwise_wgrad(p)) {
        launch_wgmma_wgrad(p, a, b, how);
        return;
    }
    const CUtensorMap map_a = tensor_map(p.a.data, p.a.dtype, a.rows, a.cols, kTileRows / 2),
                      map_b = tensor_map(p.b.data, p.b.dtype, b.rows, b.cols, kTileCols / 2);
    p.a.dtype == DType::e5m2 ? launch<WgmmaE5m2>(p, map_a, map_b, how)
                             : launch<WgmmaE4m3>(p, map_a, map_b, how);
}

}  // namespace fp8flow::hopper
