// SPDX-License-Identifier: MIT
// Grouped BF16 products on Hopper's warpgroup instructions: forward and data gradient (weights as stored).
// Group sizes are read on the device. The skeleton, its shared memory and its barriers: pipeline.h; weight
// gradients: bf16_wgrad.cu; FP8: fp8.cu.
//
// Floor: 2 m n k FLOPs at the tensor cores' BF16 rate; every operand read once and D written once.
// Each of the two computing warpgroups multiplies 64 rows by all 256 columns of the tile, 64 of the
// contraction a stage (512 cycles), and keeps the sums in registers: 128 a thread. The next stage's products
// are started before the last one's are waited for. BF16 results of a finished tile are rounded into 64
// registers, which takes about 100 cycles, and stored behind the next tile's first stages, an eighth each. An
// operand that lies along the contraction is one box of rows x 128 bytes; weights that lie across it are
// panels of 64 outputs x 64 contraction rows. Deterministic: an element of D is one thread's sum over
// ascending k, written once.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/memory.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/pipeline.h"

#include <utility>

namespace fp8flow::hopper {

namespace {

constexpr int kDepth = 64;                                         // contraction elements of a stage
constexpr int kPanel = 64, kPanelBytes = kDepth * kStageRowBytes;  // outputs of a panel

// A finished tile's part of a thread, rounded: of its row r (of two, 8 apart) and chunk j of 8 columns, word
// 2 * j + r holds two columns.
struct Finished {
    uint32_t words[64];
    int64_t row;
    int col, rows, valid;  // as in MathTile
    __device__ RowUse use(int at) const {
        return at >= rows ? RowUse::none : at >= valid ? RowUse::zero : RowUse::product;
    }
};

// A finished tile is stored in parts, each behind a stage of the next one: all of it takes longer than the
// products that can be under way.
constexpr int kParts = 8;
using AllParts = std::make_integer_sequence<int, kParts>;

template <int kPart>
__device__ __forceinline__ void store_finished(const DeviceProduct& p, const Finished& f, int row0) {
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

// One warpgroup. The contraction is not empty (launch_wgmma), so every tile has a stage.
template <int kAcrossB>
__device__ void multiply_tiles(const DeviceProduct& p, WgmmaShared& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = warpgroup * 64 + thread / 32 * 16 + lane / 4;
    const int steps = static_cast<int>((p.k + kDepth - 1) / kDepth);  // of every tile
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;
    MathTile tile;
    Finished finished;
    bool more = next_tile(shared, ring, tile), unstored = false;
    while (more) {
        float sum[128];
        int before = 0;  // stage whose products may still be under way
        const auto multiply = [&](int step, auto behind) {
            mbarrier_wait(&shared.full[stage.index], stage.parity);
            const uint8_t* a = shared.stages[stage.index];
            const uint8_t* b = a + kTileRows * kStageRowBytes;
            const uint64_t at_a = k_major_descriptor(a + warpgroup * 64 * kStageRowBytes),
                           at_b = kAcrossB ? mn_major_descriptor(b) : k_major_descriptor(b);
            wgmma_fence();
            wgmma_fence_operand(sum);
#pragma unroll
            for (int k = 0; k < kDepth / 16; ++k)
                wgmma_bf16<0, kAcrossB>(sum, at_a + 2 * k,
                                        at_b + (kAcrossB ? 16 * kStageRowBytes / 16 : 2) * k,
                                        step > 0 || k > 0);
            wgmma_commit();
            wgmma_fence_operand(sum);
            behind();
            wgmma_wait<1>();
            if (step > 0) release_stage(shared, before);
            before = stage.index;
            stage.advance();
        };
        multiply(0, [] {});
        const auto multiply_and_store = [&]<int kPart>() {
            const auto store = [&] {
                if (unstored) store_finished<kPart>(p, finished, row0);
            };
            kPart + 1 < steps ? multiply(kPart + 1, store) : store();
        };
        [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
            (multiply_and_store.template operator()<kPart>(), ...);
        }
        (AllParts{});
        for (int step = kParts + 1; step < steps; ++step) multiply(step, [] {});
        finished.row = tile.d_row;
        finished.col = static_cast<int>(tile.b_output);
        finished.rows = tile.rows;
        finished.valid = tile.valid;
        more = next_tile(shared, ring, tile);  // behind the last products
        wgmma_wait<0>();
        wgmma_fence_operand(sum);
        release_stage(shared, before);
        if (p.d_dtype == DType::f32) {
            store_row_f32<0>(p, finished.row + row0, finished.col, sum, finished.use(row0));
            store_row_f32<1>(p, finished.row + row0 + 8, finished.col, sum, finished.use(row0 + 8));
        }
        // in any case, so that the old words need no registers up to here
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
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    bf16_kernel(const __grid_constant__ DeviceProduct product, const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b) {
    const auto load = [&](WgmmaShared& shared) {
        const int rank = static_cast<int>(cluster_rank());
        load_tiles<kDepth>(
            product, shared, kStageBytes,
            [&](const MathTile& tile, auto common, int step, int index, Mbarrier* full) {
                const int a_k = static_cast<int>(tile.a_k) + step * kDepth,
                          b_k = static_cast<int>(tile.b_k) + step * kDepth;
                const int a = static_cast<int>(tile.a_output), b = static_cast<int>(tile.b_output);
                const int group = static_cast<int>(tile.group);
                const auto load_of = [&](Common operand) {
                    return common == operand ? Load::common : Load::own;
                };
                uint8_t *to_a = shared.stages[index], *to_b = to_a + kTileRows * kStageRowBytes;
                load_operand<2>(load_of(Common::a), rank, &map_a, full, to_a, kTileRows / 2 * kStageRowBytes,
                                [&](int i) { return make_int2(a_k, a + i * kTileRows / 2); });
                if (kAcrossB) {
                    load_operand<kTileCols / kPanel>(
                        load_of(Common::b), rank, &map_b, full, to_b, kPanelBytes, [&](int i) {
                            return make_int2(b + i * kPanel, group * static_cast<int>(product.k) + b_k);
                        });
                } else {
                    load_operand<2>(load_of(Common::b), rank, &map_b, full, to_b,
                                    kTileCols / 2 * kStageRowBytes, [&](int i) {
                                        return make_int2(
                                            b_k, group * static_cast<int>(product.n) + b + i * kTileCols / 2);
                                    });
                }
            });
    };
    run_roles(load, [&](WgmmaShared& shared, int warpgroup) {
        multiply_tiles<kAcrossB>(product, shared, warpgroup);
    });
}

}  // namespace

bool wgmma_takes_bf16(const DeviceProduct& p) {
    const bool along_a = p.a.k_stride == 1, along_b = p.b.k_stride == 1;
    if (p.a.dtype != DType::bf16 || p.b.dtype != DType::bf16) return false;
    if (p.grouped == Grouped::contraction) return !along_a && !along_b;
    // weights across the contraction: a stage must not reach into the next expert's
    return along_a && (along_b || p.k % kDepth == 0);
}

void launch_wgmma_bf16(const DeviceProduct& p, const StoredShape& a, const StoredShape& b,
                       const Launch& launch) {
    if (p.grouped == Grouped::contraction) {
        launch_wgmma_bf16_wgrad(p, a, b, launch);
        return;
    }
    const bool along_b = p.b.k_stride == 1;
    const CUtensorMap map_a = tensor_map(p.a.data, p.a.dtype, a.rows, a.cols, kTileRows / 2),
                      map_b =
                          tensor_map(p.b.data, p.b.dtype, b.rows, b.cols, along_b ? kTileCols / 2 : kPanel);
    launch_wgmma_kernel(along_b ? bf16_kernel<0> : bf16_kernel<1>, p, launch, kSharedBytes, map_a, map_b);
}

}  // namespace fp8flow::hopper
