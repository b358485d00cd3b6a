// SPDX-License-Identifier: MIT
// Grouped BF16 GEMM (wgmma), rows grouped: forward and data gradient on weights as stored; D BF16 or FP32.
// Group sizes are read on the device. Skeleton, shared memory and barriers: pipeline.h; weight gradients:
// bf16_wgrad.cu; FP8: fp8.cu.
//
// Lower bound: 2 m n k FLOPs at the BF16 rate of the tensor cores; every operand read once, D written once.
//
// Roles: a consumer warpgroup computes 64 rows by all 256 columns of the tile, 64 of the contraction per
// stage (512 cycles), with its sums in registers, 128 per thread. The wgmma of the next stage are issued
// before the last ones are waited for. Epilogue: BF16 results are packed into 64 registers, which takes about
// 100 cycles, and stored during the first stages of the next tile, an eighth in each. K-major operands are
// boxes of rows x 128 bytes; MN-major weights are panels of 64 outputs x 64 contraction rows.
//
// Deterministic: an element of D is one thread's sum over ascending k, written once.
#include "kernels/hopper/gemm/sm90/pipeline.h"

#include <utility>

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kStageK = 64;                                         // contraction elements of a stage
constexpr int kPanel = 64, kPanelBytes = kStageK * kStageRowBytes;  // outputs of an MN-major panel

// A thread's part of a finished tile, packed to BF16: of its row r (of two, 8 apart) and chunk j of 8
// columns, word 2 * j + r holds two columns.
struct FinishedTile {
    uint32_t words[64];
    int64_t row;
    int col, rows, valid;  // as in WorkTile
};

// A finished tile is stored in parts, each during a stage of the next one: all of it takes longer than the
// wgmma that can be in flight.
constexpr int kParts = 8;
using AllParts = std::make_integer_sequence<int, kParts>;

template <int kPart>
__device__ __forceinline__ void store_finished(const GemmProblem& p, const FinishedTile& f, int row0) {
    constexpr int kAccesses = 2 * kTileCols / 32;  // of a thread: two rows, a quad of lanes holds 32 columns
    const int quad = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int at = kAccesses * kPart / kParts; at < kAccesses * (kPart + 1) / kParts; ++at) {
        const int r = at / (kAccesses / 2), j = at % (kAccesses / 2) * 4;
        const int row = row0 + 8 * r;
        Bf16* const d = static_cast<Bf16*>(p.d) + (f.row + row) * p.n + f.col + 8 * quad;
        const int columns = row < f.rows ? static_cast<int>(min(p.n - f.col, int64_t{kTileCols})) : 0;
        uint32_t words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) words[c] = row < f.valid ? f.words[2 * (j + c) + r] : 0;
        const uint4 chunk = gather_chunk(words);
        if (8 * (j + quad) < columns) store_vector(reinterpret_cast<uint4*>(d + 8 * j), chunk);
    }
}

// One consumer warpgroup. The contraction is not empty (launch_wgmma), so every tile has a stage.
template <int kAcrossB> __device__ void mainloop(const GemmProblem& p, SharedStorage& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = warpgroup * 64 + thread / 32 * 16 + lane / 4;
    const int steps = static_cast<int>((p.k + kStageK - 1) / kStageK);  // of every tile
    RingPosition<kStages> stage;
    RingPosition<kTileSlots> ring;
    WorkTile tile;
    FinishedTile finished;
    bool more = next_tile(shared, ring, tile), unstored = false;
    while (more) {
        float sum[128];
        int before = 0;  // stage whose wgmma may still be in flight
        const auto run_step = [&](int step, auto overlap) {
            mbarrier_wait(&shared.full[stage.index], stage.parity);
            const uint8_t* a = shared.stages[stage.index];
            const uint8_t* b = a + kTileRows * kStageRowBytes;
            const uint64_t at_a = k_major_descriptor(a + warpgroup * 64 * kStageRowBytes),
                           at_b = kAcrossB ? mn_major_descriptor(b) : k_major_descriptor(b);
            wgmma_fence();
            wgmma_fence_operand(sum);
#pragma unroll
            for (int k = 0; k < kStageK / 16; ++k)
                wgmma_bf16<0, kAcrossB>(sum, at_a + 2 * k,
                                        at_b + (kAcrossB ? 16 * kStageRowBytes / 16 : 2) * k,
                                        step > 0 || k > 0);
            wgmma_commit();
            wgmma_fence_operand(sum);
            overlap();
            wgmma_wait<1>();
            if (step > 0) release_stage(shared, before);
            before = stage.index;
            stage.advance();
        };
        run_step(0, [] {});
        const auto step_and_store = [&]<int kPart>() {
            const auto store = [&] {
                if (unstored) store_finished<kPart>(p, finished, row0);
            };
            kPart + 1 < steps ? run_step(kPart + 1, store) : store();
        };
        [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
            (step_and_store.template operator()<kPart>(), ...);
        }
        (AllParts{});
        for (int step = kParts + 1; step < steps; ++step) run_step(step, [] {});
        finished.row = tile.d_row;
        finished.col = static_cast<int>(tile.b_output);
        finished.rows = tile.rows;
        finished.valid = tile.valid;
        more = next_tile(shared, ring, tile);  // during the last wgmma
        wgmma_wait<0>();
        wgmma_fence_operand(sum);
        release_stage(shared, before);
        if (p.d_dtype == DType::f32) {
            store_row_f32<0>(p, finished.row + row0, finished.col, sum, use_of(finished, row0));
            store_row_f32<1>(p, finished.row + row0 + 8, finished.col, sum, use_of(finished, row0 + 8));
        }
        // unconditionally, so that the old words need no registers up to here
#pragma unroll
        for (int i = 0; i < 64; ++i) finished.words[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
        unstored = p.d_dtype == DType::bf16;
    }
    if (unstored) [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
            (store_finished<kPart>(p, finished, row0), ...);
        }
    (AllParts{});
}

template <int kAcrossB>
__global__ void __launch_bounds__(kCtaThreads, 1)
    bf16_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b) {
    const auto load = [&](SharedStorage& shared) {
        const int rank = static_cast<int>(cluster_rank());
        produce_tiles<kStageK>(
            problem, shared, kStageBytes,
            [&](const WorkTile& tile, auto multicast, int step, int index, Mbarrier* full) {
                const int a_k = static_cast<int>(tile.a_k) + step * kStageK,
                          b_k = static_cast<int>(tile.b_k) + step * kStageK;
                const int a = static_cast<int>(tile.a_output), b = static_cast<int>(tile.b_output);
                const int group = static_cast<int>(tile.group);
                uint8_t *to_a = shared.stages[index], *to_b = to_a + kTileRows * kStageRowBytes;
                load_operand<2>(load_of(multicast, Multicast::a), rank, &map_a, full, to_a,
                                kTileRows / 2 * kStageRowBytes,
                                [&](int i) { return make_int2(a_k, a + i * kTileRows / 2); });
                if (kAcrossB) {
                    load_operand<kTileCols / kPanel>(
                        load_of(multicast, Multicast::b), rank, &map_b, full, to_b, kPanelBytes, [&](int i) {
                            return make_int2(b + i * kPanel, group * static_cast<int>(problem.k) + b_k);
                        });
                } else {
                    load_operand<2>(load_of(multicast, Multicast::b), rank, &map_b, full, to_b,
                                    kTileCols / 2 * kStageRowBytes, [&](int i) {
                                        return make_int2(
                                            b_k, group * static_cast<int>(problem.n) + b + i * kTileCols / 2);
                                    });
                }
            });
    };
    run_roles(
        load, [&](SharedStorage& shared, int warpgroup) { mainloop<kAcrossB>(problem, shared, warpgroup); },
        [&](SharedStorage& shared) { fill_queue<TileScheduler<kStageK>>(problem, shared.queue); });
}

}  // namespace

bool wgmma_supports_bf16(const GemmProblem& p) {
    const bool along_a = p.a.k_stride == 1, along_b = p.b.k_stride == 1;
    if (p.a.dtype != DType::bf16 || p.b.dtype != DType::bf16) return false;
    if (p.grouped == Grouped::contraction) return !along_a && !along_b;
    // MN-major weights: a stage must not reach into the next expert's
    return along_a && (along_b || p.k % kStageK == 0);
}

void launch_wgmma_bf16(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                       const Launch& launch) {
    const bool along_b = p.b.k_stride == 1;
    launch_persistent<SharedStorage>(along_b ? bf16_kernel<0> : bf16_kernel<1>, p, launch,
                                     operand_map(p.a, a, kTileRows / 2),
                                     operand_map(p.b, b, along_b ? kTileCols / 2 : kPanel));
}

}  // namespace fp8flow::hopper::gemm
