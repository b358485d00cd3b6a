// BF16 weight gradients (contraction grouped, D FP32), on Hopper's warpgroup instructions: one warpgroup stores its part of D while the other
// multiplies. Group sizes are read on the device. Read next: gemm_wgmma.h (tiles), gemm_wgmma_wgrad.cu (the FP8 ones, same rings).
//
// Floor at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP, 2.45 ms at the 785 TFLOP/s of a dense product; D is 3.76 GB, 0.92 ms to write and
// 1.83 ms to read and write at 4.1 TB/s; operands are 0.74 GB. So the two must overlap.
//
// One CTA: three loading threads and two computing warpgroups, on every multiprocessor, walking tiles of 128 x 256 of
// D in a fixed order. Each warpgroup owns 128 x 128 of a tile as two blocks of 64 rows: 128 sums a thread. A stage is 64 of the contraction,
// 512 cycles of products a warpgroup; the next stage's are under way before the last one's are waited for, so that one warpgroup alone
// keeps the tensor cores busy. What they read does not bind the two to each other:
//   - B (each its own 128 columns): a ring of three stages for each warpgroup, and a loading thread for each;
//   - A (the 128 rows of both): one ring of eight stages, so that they can be up to eight steps of 512 cycles apart.
// A or B is common to the pair of CTAs of a cluster. A group's operands (23 MB at the shape above) are read from memory once and stay in L2:
// tiles are walked in bands of 4096 rows. Accumulated sums are added in memory (docs/gemm_worklog.md: sums that begin with D took longer).
//
// Cycles of a tile of 1024 rows: 16,384 of products. A warpgroup stores 64 KiB in 2,000-3,000; the other has kLead steps and a half, 2,800
// cycles of products, before it comes to the same end.
//
// Operands lie across the contraction: a side of a stage is two panels of 64 outputs x 64 contraction rows, 128-byte swizzled (16 KiB). Rows of
// the contraction beyond the group are overwritten by zeros in shared memory: each warpgroup clears its B and A, A therefore twice, by the
// same zeros.
// Shared memory: 8 stages of A and 2 x 3 of B (224 KiB); the ring of tiles; barriers.
// Barriers: a_full[s], b_full[w][s] one arrival + 16 KiB of copies, waited for by the warps that read the stage; a_empty[s], b_empty[w][s] one
// arrival a warp, of either CTA, that reads such a stage, after its last product from it, waited for by the loading thread that writes
// there; tile_full[r] one arrival of A's loader, tile_empty[r] one a computing thread that has read the tile.
// Named barriers, which keep the warpgroups apart: at 1 the first tells the second that it is kLead steps and a half into a tile (half of the
// steps of a short one), before which the second does not start the same tile; at 2 the second tells the first the same, before which the
// first does not start the next. Nobody waits for ever: who waits holds no stage, and A has more of them than those steps need. 3 and 4: the
// threads of one warpgroup have cleared.
// The CTAs of a cluster meet before the first copy and before they leave.
// Deterministic: an element of D is one thread's sum over ascending k, whatever the other groups hold.
#include "kernels/hopper/gemm_wgmma.h"

namespace fp8flow::hopper {

namespace {

// contraction elements of a stage; 32 makes the same rings of twice as many stages
constexpr int kDepth = 64;
constexpr int kPanel = 64;  // outputs of a panel
constexpr int kPanelBytes = kDepth * kStageRowBytes;
constexpr int kSidePanels = 2;  // 128 outputs: the rows of a tile, or a warpgroup's columns
constexpr int kColumns = kTileCols / kMathWarpgroups;
constexpr uint32_t kSideBytes = kSidePanels * kPanelBytes;
constexpr int kStagesA = 512 / kDepth, kStagesB = 192 / kDepth;
constexpr int kLead = 352 / kDepth;  // in stages, as the steps of a tile
constexpr int kBandRows = 32;        // row tiles that are walked together
static_assert(kTileRows == kSidePanels * kPanel && kColumns == kSidePanels * kPanel);
static_assert(kLead < kStagesA);

struct WgradShared {
    alignas(1024) uint8_t a[kStagesA][kSideBytes];
    alignas(1024) uint8_t b[kMathWarpgroups][kStagesB][kSideBytes];
    MathTile tiles[kRing];
    Barrier a_full[kStagesA], a_empty[kStagesA];
    Barrier b_full[kMathWarpgroups][kStagesB], b_empty[kMathWarpgroups][kStagesB];
    Barrier tile_full[kRing], tile_empty[kRing];
};
constexpr size_t kWgradBytes = sizeof(WgradShared) + 1024;
static_assert(kWgradBytes <= 232448);

// ---- loading: one thread for A and the ring of tiles, one for each warpgroup's B, a warp that asks for D ----------------------------------
template <class Each> __device__ __forceinline__ void walk_tiles(const DeviceProduct& p, Each each) {
    TileWalk<kDepth, kBandRows> walk(p, static_cast<int>(cluster_rank()));
    for (int64_t index = blockIdx.x / kPair;; index += gridDim.x / kPair) {
        MathTile tile{};
        tile.past_end = !walk.find(index, tile);
        each(tile);
        if (tile.past_end) return;
    }
}

// One operand's part of a stage, from contraction row k and output `first` on; half of it, for both CTAs, where it is common.
__device__ __forceinline__ void load_side(bool common, const CUtensorMap* map, Barrier* full, uint8_t* to,
                                          int64_t k, int64_t first) {
    const int x = static_cast<int>(first), y = static_cast<int>(k);
    load_operand<kSidePanels>(common ? Load::common : Load::own, static_cast<int>(cluster_rank()), map, full,
                              to, kPanelBytes, [&](int i) { return make_int2(x + i * kPanel, y); });
}

__device__ void load_a(const DeviceProduct& p, WgradShared& shared, const CUtensorMap* map) {
    RingPosition<kStagesA> stage;
    RingPosition<kRing> ring;
    walk_tiles(p, [&](const MathTile& tile) {
        barrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        barrier_arrive(&shared.tile_full[ring.index]);
        ring.advance();
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Barrier* full = &shared.a_full[stage.index];
            barrier_wait(&shared.a_empty[stage.index], stage.parity ^ 1);  // in both CTAs
            barrier_arrive_expect_bytes(full, kSideBytes);
            load_side(tile.common == Common::a, map, full, shared.a[stage.index], tile.a_k + step * kDepth,
                      tile.a_output);
            stage.advance();
        }
    });
}

__device__ void load_b(const DeviceProduct& p, WgradShared& shared, const CUtensorMap* map, int warpgroup) {
    RingPosition<kStagesB> stage;
    walk_tiles(p, [&](const MathTile& tile) {
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Barrier* full = &shared.b_full[warpgroup][stage.index];
            barrier_wait(&shared.b_empty[warpgroup][stage.index], stage.parity ^ 1);  // in both CTAs
            barrier_arrive_expect_bytes(full, kSideBytes);
            load_side(tile.common == Common::b, map, full, shared.b[warpgroup][stage.index],
                      tile.b_k + step * kDepth, tile.b_output + warpgroup * kColumns);
            stage.advance();
        }
    });
}

// ---- D: registers to memory --------------------------------------------------------------------------------------------------------------
// A thread's part of D: four columns of every 16, in rows row0 + {0, 8} of each of the two blocks; a quad of lanes has two whole sectors of a row.
// use(at, sums): four neighbouring elements and where the first of their sums is, those at +0, +1, +4, +5; `inside` says whether D has them.
template <class Sums, class Use>
__device__ __forceinline__ void each_four(const DeviceProduct& p, const MathTile& tile, int row0,
                                          int64_t col0, Sums& sum, Use use) {
    const int quad = static_cast<int>(threadIdx.x % 4), first = quad % 2 * 8 + quad / 2 * 4;
    float* const d = static_cast<float*>(p.d) + (tile.d_row + row0) * p.n + col0 + first;
    const int columns = static_cast<int>(min(p.n - col0, int64_t{kColumns})) - first;  // of D from `first` on
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = 64 * (r / 2) + 8 * (r % 2);
        float4* const at = reinterpret_cast<float4*>(d + row * p.n);
        const int left = row0 + row < tile.rows ? columns : 0;
#pragma unroll
        for (int j = 0; j < 16; j += 2) use(at + 2 * j, 8 * j < left, &sum[r / 2][4 * j + 2 * (r % 2)]);
    }
}

template <Gradient kMode>
__device__ __forceinline__ void store_tile(const DeviceProduct& p, const MathTile& tile, int row0,
                                           int64_t col0, float (&sum)[2][64]) {
    each_four(p, tile, row0, col0, sum, [](float4* at, bool inside, const float* sums) {
        const float4 value = join_columns({sums[0], sums[1]}, {sums[4], sums[5]});
        if (!inside) return;
        if (kMode == Gradient::accumulate)
            add_in_memory(at, value);
        else
            store_in_memory(at, value);
    });
}

// ---- computing: one warpgroup -----------------------------------------------------------------------------------------------------------
// The stage's contraction rows from `first` on become zero in all panels of both sides. Each thread has seen the copies arrive.
__device__ void clear_rows(uint8_t* a, uint8_t* b, int first, int warpgroup) {
    const int words = (kDepth - first) * kStageRowBytes / 16;  // of a panel
    for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < 2 * kSidePanels * words; i += kWarpgroup) {
        const int panel = i / words;
        uint8_t* const side = panel < kSidePanels ? a : b;
        *reinterpret_cast<uint4*>(side + panel % kSidePanels * kPanelBytes + first * kStageRowBytes +
                                  i % words * 16) = uint4{};
    }
    fence_shared_for_engines();
    meet(3 + warpgroup, kWarpgroup);
}

template <Gradient kMode>
__device__ void multiply_tiles(const DeviceProduct& p, WgradShared& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const int row0 = thread / 32 * 16 + thread % 32 / 4;     // this thread's rows: row0 + {0, 8} of each 64
    const int mine = 1 + warpgroup, others = 2 - warpgroup;  // named barriers: announced at, waited for at
    RingPosition<kStagesA> a_stage;
    RingPosition<kStagesB> b_stage;
    RingPosition<kRing> ring;
    for (bool first = true;; first = false) {
        MathTile tile;
        const bool more = next_tile(shared, ring, tile);
        const int depth = same_in_warp(tile.depth);
        const int64_t col0 = tile.b_output + warpgroup * kColumns;
        float sum[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.0f;
        // every announcement is waited for, that of the last tile too
        if (warpgroup == 0 ? !first : more) meet(others, kMathThreads);
        if (!more) return;

        const int lead = min(tile.steps / 2, kLead);
        if (tile.steps == 0) announce(mine, kMathThreads);
        int a_before = 0, b_before = 0;  // the stage whose products may still be under way
        const auto release_before = [&] {
            release_stages(&shared.a_empty[a_before], &shared.b_empty[warpgroup][b_before]);
        };
        for (int step = 0; step < tile.steps; ++step) {
            barrier_wait(&shared.a_full[a_stage.index], a_stage.parity);
            barrier_wait(&shared.b_full[warpgroup][b_stage.index], b_stage.parity);
            uint8_t *const a = shared.a[a_stage.index], *const b = shared.b[warpgroup][b_stage.index];
            if (const int rest = depth - step * kDepth; rest < kDepth) clear_rows(a, b, rest, warpgroup);
            const uint64_t at_a = swizzled_columns<kDepth>(a), at_b = swizzled_columns<kDepth>(b);
            wgmma_fence();
            keep_in_place(sum[0]);
            keep_in_place(sum[1]);
#pragma unroll
            for (int k = 0; k < kDepth / 16; ++k) {
                constexpr int kStep = 16 * kStageRowBytes / 16, kBlockStep = kPanelBytes / 16;
                multiply_bf16<1, 1>(sum[0], at_a + kStep * k, at_b + kStep * k, 1);
                multiply_bf16<1, 1>(sum[1], at_a + kBlockStep + kStep * k, at_b + kStep * k, 1);
            }
            wgmma_commit();
            keep_in_place(sum[0]);
            keep_in_place(sum[1]);
            wgmma_wait<1>();
            if (step > 0) release_before();
            if (step == lead) announce(mine, kMathThreads);
            a_before = a_stage.index;
            b_before = b_stage.index;
            a_stage.advance();
            b_stage.advance();
        }
        wgmma_wait<0>();
        keep_in_place(sum[0]);
        keep_in_place(sum[1]);
        if (tile.steps > 0) release_before();
        store_tile<kMode>(p, tile, row0, col0, sum);
    }
}

// ---- the CTA ----------------------------------------------------------------------------------------------------------------------------
template <Gradient kMode>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    wgrad_kernel(const __grid_constant__ DeviceProduct product, const __grid_constant__ CUtensorMap map_a,
                 const __grid_constant__ CUtensorMap map_b) {
    WgradShared& shared = prepare_shared<WgradShared>([](WgradShared& s) {
        init_ring(s.a_full, s.a_empty, kMathWarps * kPair);
        for (int w = 0; w < kMathWarpgroups; ++w)
            init_ring(s.b_full[w], s.b_empty[w], kMathWarps / kMathWarpgroups * kPair);
        init_ring(s.tile_full, s.tile_empty, kMathThreads);
    });
    const int role = same_in_warp(static_cast<int>(threadIdx.x) / kWarpgroup);
    if (role == 0) {
        give_registers<kLoaderRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (threadIdx.x % 32 != 0 || warp > kMathWarpgroups) return;
        if (warp == 0)
            load_a(product, shared, &map_a);
        else
            load_b(product, shared, &map_b, warp - 1);
        cluster_meet_unaligned();
    } else {
        take_registers<kMathRegisters>();
        multiply_tiles<kMode>(product, shared, role - 1);
        cluster_meet();  // nobody leaves while the other CTA may write here
    }
}

}  // namespace

void launch_wgmma_bf16_wgrad(const DeviceProduct& p, const StoredShape& a, const StoredShape& b,
                             const Launch& launch) {
    const CUtensorMap map_a = tensor_map(p.a.codes, p.a.dtype, a.rows, a.cols, kDepth),
                      map_b = tensor_map(p.b.codes, p.b.dtype, b.rows, b.cols, kDepth);
    launch_wgmma_kernel(p.mode == Gradient::accumulate ? wgrad_kernel<Gradient::accumulate>
                                                       : wgrad_kernel<Gradient::overwrite>,
                        p, launch, kWgradBytes, map_a, map_b);
}

}  // namespace fp8flow::hopper
