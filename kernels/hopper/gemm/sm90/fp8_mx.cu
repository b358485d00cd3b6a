// SPDX-License-Identifier: MIT
// MXFP8 GEMMs (wgmma): D = A B^T with E8M0 scales per 32 of the contraction for each row of A and of B;
// grouped rows (forward, data gradient), dense, and weight gradients. A is e4m3 or e5m2, B e4m3, D BF16 or
// FP32.
//
// Hopper's tensor cores know no scales, so every wgmma (32 of the contraction, a scale block) is promoted on
// CUDA cores: one multiplication for the scale of an element of D, one FMA. A warp's element costs 2 / 32
// instructions per multiply-add. That is the bound, not the tensor cores: 128 x 256 x 128 takes 1,024 cycles
// of FP8 MMA and at least 2,048 of promotion on an SM. Decoding both operands to BF16 in memory would take as
// long for the MMA alone, and needs the memory.
//
// Grid, roles, barriers, tiles: pipeline.h. A consumer warpgroup computes all 128 rows of its own 128
// columns, 64 rows (a chain) at a time; while it waits for a wgmma the other one promotes. Scales of a stage
// are boxes of 4 blocks x 128 bytes, 128-byte swizzled: one of A, one of B for each warpgroup. The warpgroup
// decodes those of its columns to FP32 first.
//
//   shared memory      size
//   stages             4 x [128 rows of A | 256 rows of B] x 128 bytes, 128-byte swizzled
//   scales             4 x 3 boxes of 512 bytes
//   column factors     2 warpgroups x 2 steps x 4 blocks x 128 floats
//   named barrier 1, 2 the warpgroup has decoded the scales of this step. The other step's are written next:
//                      nobody reads them any more, because all threads have come from there
//
// Measured (H200, burst), 32 groups x 1024 rows, N 4096, K 7168: 6.16 ms (312 TFLOP/s), a third of that
// bound.
//
// Deterministic: one thread computes an element of D as a sum over ascending k, whatever the other groups
// hold.
#include "kernels/hopper/gemm/sm90/fp8_mainloop.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kBlockK = static_cast<int>(kMxBlock), kBlocks = kFp8StageK / kBlockK;  // of a stage
using ScaleBox = uint8_t[kBlocks][kWarpgroupCols];
static_assert(kWarpgroupCols == kStageRowBytes && kTileRows == kStageRowBytes);

struct MxStorage {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    alignas(1024) ScaleBox scales[kStages][1 + kConsumerWarpgroups];
    alignas(16) float columns[kConsumerWarpgroups][2][kBlocks][kWarpgroupCols];
    WorkTile tiles[kTileSlots];
    Mbarrier full[kStages], empty[kStages], tile_full[kTileSlots], tile_empty[kTileSlots];
    SharedQueue queue;
};

// Scales as TMA sees them: [blocks of all groups, rows of the operand].
struct ScaleMaps {
    CUtensorMap a, b;
};

// The scale of a block for row or column `at` of a box, as TMA swizzles it.
__device__ __forceinline__ float scale_in(const ScaleBox& box, int block, int at) {
    const int line = static_cast<int>(shared_address(box) / kStageRowBytes) + block;
    return e8m0_to_float(box[block][(at / 16 ^ line % 8) * 16 + at % 16]);
}

__device__ __forceinline__ void produce(const GemmProblem& p, MxStorage& shared, const CUtensorMap* map_a,
                                        const CUtensorMap* map_b, const ScaleMaps& maps) {
    const int blocks_of_group =
        p.grouped == Grouped::rows ? static_cast<int>((p.k + kBlockK - 1) / kBlockK) : 0;
    produce_stages(p, shared, map_a, map_b, sizeof(shared.scales[0]),
                   [&](const WorkTile& tile, int step, int index, Mbarrier* full) {
                       const int a_block = static_cast<int>(tile.a_k) / kBlockK + step * kBlocks,
                                 b_block = static_cast<int>(tile.group) * blocks_of_group +
                                           static_cast<int>(tile.b_k) / kBlockK + step * kBlocks;
                       ScaleBox* const to = shared.scales[index];
                       tma_load(&maps.a, full, to[0], static_cast<int>(tile.a_output), a_block);
                       for (int i = 0; i < kConsumerWarpgroups; ++i)
                           tma_load(&maps.b, full, to[1 + i],
                                    static_cast<int>(tile.b_output) + i * kWarpgroupCols, b_block);
                   });
}

// One consumer warpgroup, all its tiles.
template <class Wgmma>
__device__ __forceinline__ void mainloop(const GemmProblem& p, MxStorage& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, quad = thread % 4;
    const int row0 = first_row<Owned::columns>(warpgroup);
    RingPosition<kStages> stage;
    RingPosition<kTileSlots> ring;
    int buffer = 0;
    WorkTile tile;
    while (next_tile(shared, ring, tile)) {
        float sum[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.0f;
        for (int step = 0; step < tile.steps; ++step) {
            mbarrier_wait(&shared.full[stage.index], stage.parity);
            float(&columns)[kBlocks][kWarpgroupCols] = shared.columns[warpgroup][buffer];
            const ScaleBox *of_rows = &shared.scales[stage.index][0], *of_columns = of_rows + 1 + warpgroup;
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                columns[block][thread] = scale_in(*of_columns, block, thread);
            named_barrier_sync(1 + warpgroup, kWarpgroup);
            buffer ^= 1;
            const uint8_t* const a = shared.stages[stage.index];
            const uint64_t at_a = k_major_descriptor(a),
                           at_b = k_major_descriptor(a + (kTileRows + warpgroup * kWarpgroupCols) *
                                                             kStageRowBytes);
            // blocks past the contraction have no scales, and in a weight gradient the next group's values
            const int blocks = min(kBlocks, (tile.depth - step * kFp8StageK + kBlockK - 1) / kBlockK);
#pragma unroll 1
            for (int block = 0; block < blocks; ++block) {
                const float2* const factors = reinterpret_cast<const float2*>(columns[block] + 2 * quad);
#pragma unroll
                for (int chain = 0; chain < 2; ++chain) {
                    float partial[64];
                    start_mma<Wgmma, kBlockK>(
                        partial, advance_descriptor(at_a, 64 * chain * kStageRowBytes + block * kBlockK),
                        advance_descriptor(at_b, block * kBlockK));
                    const float above = scale_in(*of_rows, block, row0 + 64 * chain),
                                below = scale_in(*of_rows, block, row0 + 64 * chain + 8);
                    wait_mma(partial);
                    if (chain == 1 && block == blocks - 1) release_stage(shared, stage.index);
                    promote(partial, sum[chain], above, below, factors);
                }
            }
            stage.advance();
        }
        const int64_t col0 = tile.b_output + warpgroup * kWarpgroupCols;
        store_rows(p, tile, row0, col0, sum[0]);
        store_rows(p, tile, row0 + 64, col0, sum[1]);
    }
}

template <class Wgmma>
__global__ void __launch_bounds__(kCtaThreads, 1)
    mx_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ CUtensorMap map_a,
              const __grid_constant__ CUtensorMap map_b, const __grid_constant__ ScaleMaps maps) {
    run_roles<MxStorage>(
        [&](MxStorage& shared) { produce(problem, shared, &map_a, &map_b, maps); },
        [&](MxStorage& shared, int warpgroup) { mainloop<Wgmma>(problem, shared, warpgroup); },
        [&](MxStorage& shared) { fill_queue<TileScheduler<kFp8StageK>>(problem, shared.queue); });
}

// `blocks`: scale blocks along the contraction, summed over the weights of all groups.
CUtensorMap scale_map(const OperandScale& s, int64_t blocks) {
    return tensor_map(s.scales, s.dtype, blocks, s.block_stride, kBlocks, kStageRowBytes);
}

}  // namespace

bool wgmma_supports_mx(const GemmProblem& p, int64_t alignment) {
    const auto scaled_by_32 = [](const OperandScale& s) {
        return s.dtype == DType::e8m0 && s.block == kBlockK && s.outputs_per_scale == 1 &&
               s.block_stride % 16 == 0 && reinterpret_cast<uintptr_t>(s.scales) % 16 == 0;
    };
    return is_fp8(p.a.dtype) && p.b.dtype == DType::e4m3 && p.a.k_stride == 1 && p.b.k_stride == 1 &&
           scaled_by_32(p.a.scale) && scaled_by_32(p.b.scale) && p.k > 0 &&
           (p.grouped == Grouped::rows || alignment % kBlockK == 0);
}

void launch_wgmma_mx(const GemmProblem& p, const StoredShape& a, const StoredShape& b, const Launch& launch) {
    const int64_t groups_of_b = p.grouped == Grouped::rows ? p.num_weights : 1;
    const ScaleMaps maps{scale_map(p.a.scale, ceil_div(a.cols, kMxBlock)),
                         scale_map(p.b.scale, groups_of_b * ceil_div(b.cols, kMxBlock))};
    launch_persistent<MxStorage>(p.a.dtype == DType::e5m2 ? mx_kernel<WgmmaE5m2> : mx_kernel<WgmmaE4m3>, p,
                                 launch, operand_map(p.a, a, kTileRows / 2),
                                 operand_map(p.b, b, kTileCols / 2), maps);
}

}  // namespace fp8flow::hopper::gemm
