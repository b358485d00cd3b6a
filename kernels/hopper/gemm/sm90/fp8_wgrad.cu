// SPDX-License-Identifier: MIT
// Grouped FP8 weight gradients (wgmma): dW [group, M, N] FP32 or BF16 (+)= dY^T X over the rows of each
// group, from transposed copies, with a scale per 128 of the contraction, for tiles (tile128) or for rows and
// columns (vec128). Sets::two: a tile's steps are those of the first set of operands, then those of the
// second. Read first: pipeline.h, wgrad_roles.h (tiles, roles, barriers), wgrad_epilogue.h, fp8_scales.h; the
// consumers are in fp8_wgrad_mainloop.h.
//
// Floor at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP, 1.4 ms at the 1400 TFLOP/s that the power limit
// leaves; D is 3.76 GB, 0.87 ms to write and 1.90 ms to read and write in these tiles; operands are 0.37 GB.
// The two must overlap: one after the other they take 2.3 ms (overwrite) and 3.3 ms (accumulate).
//
// Grid, roles: wgrad_roles.h; B multicast. 16 KiB come from L2 for every 512 cycles of MMA (7.5 GB). A
// consumer thread has 128 sums and 64 partial sums.
//
// Epilogue: the sums of one block go to the staging boxes during wgmma of the other, and TMA stores them. An
// SM writes at most 32 bytes a clock to L2, all together 19 each, so the boxes are not yet free when the
// second block needs them. Therefore a tile's first two steps, and its last two where D is overwritten, run
// together, first block first: the first block is stored during the last wgmma batches of the second, the
// second during the first two batches of the next tile, a half in each. Accumulating: the old values of both
// blocks are loaded through the boxes during the mainloop: the second block's are added to its sums at once
// (kFetchStep, kAddStep), then the first block's, when it is stored. D in BF16: half the bytes, boxes for
// both blocks, so all old values are loaded at kFetchStep, and each block is added to them and rounded when
// it is stored. Squares: each store adds the squares of what it writes; a short tile's second block is then
// loaded and stored like the first, because the sums of a reduce-add in memory are known there only.
//
// Shared memory: stages of [128 rows x 128 bytes], 128-byte swizzled: 4 of A and 2 x 3 of B (160 KiB); with
// row and column scales 3 + 2 x 3 and these scales, 512 bytes of each operand; 8 KiB of staging boxes a warp
// (64 KiB); tile ring; barriers.
//
// Deterministic: an element of D is one thread's sum over ascending k; its old value is added once, at a step
// that depends only on its place and on the rows of its group, whatever the other groups hold.
//
// Measured (H200, bursts): 1.79 ms (overwrite) and 2.50 ms in the program, 1.82 and 2.30 stand-alone on
// another machine. Bounds, and what was tried: docs/design_notes.md.
#include "kernels/hopper/gemm/sm90/fp8_wgrad_mainloop.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kStageOutputs = 128;  // rows of A, or columns of B, in a stage
constexpr uint32_t kScaleBytes = kStageOutputs * sizeof(float);
constexpr int kOperandBoxRows = kStageOutputs / 2;  // of one TMA load of an operand
static_assert(kTileRows == kStageOutputs && kWarpgroupCols == kStageOutputs);

// Transposed copies, K-major: a stage is 128 rows of 128 bytes of each.
template <class Multiply, ScaleMode kMode, Sets kBoth> struct Fp8Policy {
    using Wgmma = Multiply;
    static constexpr Sets kSets = kBoth;
    static constexpr bool kRowScales = has_row_scales(kMode), kColumnScales = has_column_scales(kMode);
    static constexpr int kStageK = kFp8StageK, kStagesA = kMode == ScaleMode::tiles ? 4 : 3, kStagesB = 3;
    static constexpr uint32_t kOperandStageBytes = kStageOutputs * kStageRowBytes;
    template <Multicast kOperand>
    static constexpr bool kLoadsScales = kOperand == Multicast::a ? kRowScales : kColumnScales;
    template <Multicast kOperand>
    static constexpr uint32_t kLoadBytes = kOperandStageBytes + (kLoadsScales<kOperand> ? kScaleBytes : 0);

    // of the stages; tile scales are not staged in shared memory
    struct Scales {
        alignas(16) float rows[kStagesA][kRowScales ? kStageOutputs : 1];
        alignas(16) float columns[kConsumerWarpgroups][kStagesB][kColumnScales ? kStageOutputs : 1];
        TileScales<kSets> tiles[kConsumerWarps];
    };

    static __device__ __forceinline__ int steps(const WgradTile<kSets>& tile) { return tile.steps; }
    static __device__ __forceinline__ uint64_t descriptor(const uint8_t* stage) {
        return k_major_descriptor(stage);
    }
    static __device__ __forceinline__ void load(Load load, const StepSource& from, int64_t output,
                                                Mbarrier* full, uint8_t* to) {
        const int x = static_cast<int>(from.k), y = static_cast<int>(output);
        load_operand<2>(load, static_cast<int>(cluster_rank()), from.map, full, to,
                        kOperandBoxRows * kStageRowBytes,
                        [&](int i) { return make_int2(x, y + i * kOperandBoxRows); });
    }
    template <Multicast kOperand>
    static __device__ __forceinline__ void load_scales(const GemmProblem& p, const StepSource& from,
                                                       int64_t output, Mbarrier* full, Scales& to,
                                                       const StageOf& at) {
        if constexpr (!kLoadsScales<kOperand>) return;
        if constexpr (kOperand == Multicast::a)
            bulk_load(scales_at(p.a.scale, from.scales, from.k, output), full, to.rows[at.index],
                      kScaleBytes);
        else  // columns past the last are not stored: any scale will do
            bulk_load(scales_at(p.b.scale, from.scales, from.k, min(output, p.n - kWarpgroupCols)), full,
                      to.columns[at.warpgroup][at.index], kScaleBytes);
    }
};

template <class Policy, DType kOutput, Squares kSquares>
__global__ void __launch_bounds__(kCtaThreads, 1)
    wgrad_kernel(const __grid_constant__ GemmProblem problem,
                 const __grid_constant__ WgradMaps<Policy::kSets> maps) {
    run_wgrad_roles<Policy, kSquares>(
        problem, maps, [&]<Gradient kMode>(WgradStorage<Policy>& shared, int warpgroup) {
            Fp8WgradConsumer<Policy, kMode, kOutput, kSquares>(problem, shared, &maps.d, warpgroup).run();
        });
}

template <class Wgmma, ScaleMode kScaleMode, Sets kSets>
void launch(const GemmProblem& p, const Launch& how, const WgradMaps<kSets>& maps) {
    using Policy = Fp8Policy<Wgmma, kScaleMode, kSets>;
    launch_wgrad<Policy>(p, how, maps, [&]<DType kOutput, Squares kSquares>() {
        return wgrad_kernel<Policy, kOutput, kSquares>;
    });
}

template <Sets kSets>
void launch_sets(const GemmProblem& p, const Launch& how, const WgradMaps<kSets>& maps) {
    const bool columns = p.b.scale.outputs_per_scale == 1, e5m2 = p.a.dtype == DType::e5m2;
    const auto run = columns ? (e5m2 ? launch<WgmmaE5m2, ScaleMode::rows_columns, kSets>
                                     : launch<WgmmaE4m3, ScaleMode::rows_columns, kSets>)
                             : (e5m2 ? launch<WgmmaE5m2, ScaleMode::tiles, kSets>
                                     : launch<WgmmaE4m3, ScaleMode::tiles, kSets>);
    run(p, how, maps);
}

CUtensorMap map_of(const GemmOperand& operand, const StoredShape& shape) {
    return operand_map(operand, shape, kOperandBoxRows);
}

}  // namespace

void launch_wgmma_fp8_wgrad(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                            const Launch& how) {
    launch_sets<Sets::one>(p, how, {{map_of(p.a, a)}, {map_of(p.b, b)}, gradient_map(p)});
}

void launch_wgmma_fp8_wgrad_two(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                                const StoredShape& second_a, const StoredShape& second_b, const Launch& how) {
    launch_sets<Sets::two>(p, how,
                           {{map_of(p.a, a), map_of(p.second.a, second_a)},
                            {map_of(p.b, b), map_of(p.second.b, second_b)},
                            gradient_map(p)});
}

}  // namespace fp8flow::hopper::gemm
