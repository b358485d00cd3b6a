// FP8 weight gradients of groups of few rows (contraction grouped, D FP32), on Hopper's warpgroup instructions: one warpgroup stores its part
// of D while the other multiplies. Group sizes are read on the device. For longer contractions: gemm_wgmma_fp8.cu, whose bits these are.
// Read next: gemm_wgmma.h (tiles), gemm_wgmma_fp8.h (products of a stage), docs/gemm_worklog.md (what was tried and measured).
//
// Floor at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP, 1.4 ms at the 1400 TFLOP/s that the power limit leaves; D is 3.76 GB, 0.92 ms to
// write and 1.83 ms to read and write at 4.1 TB/s; operands are 0.37 GB. So the two must overlap: one after the other they take 2.3 and 3.3 ms.
// Measured: 2.16 ms overwritten, 3.34 ms accumulated (2.53 and 3.64 in gemm_wgmma_fp8.cu); additions in memory run at 2.3 TB/s, whoever waits.
//
// One CTA: three loading threads and two computing warpgroups, on every multiprocessor, walking tiles of 128 x 256 of D in a fixed order; each
// warpgroup owns 128 x 128 of a tile: two blocks of 64 rows, 128 sums and 64 partial sums a thread. Storing takes a warpgroup about half of
// the time of its 8 steps, during which the other has the tensor cores to itself. For that the two stay some steps apart, so what they
// read must not bind them to each other:
//   - B (each its own 128 columns): a ring of three stages for each warpgroup, and a loading thread for each;
//   - A (the 128 rows of both): one ring of eight stages, deep enough for the one ahead to do a tile of 1024 rows while the other stores.
// With rings of their own for A too, 32 KiB would come from L2 for every 512 cycles of products (15 GB, 8.6 TB/s at the time wanted); shared
// A and B common to the pair of CTAs of a cluster make that 16 KiB (7.5 GB), as in the other kernel.
// Tiles of a group are walked in bands of 4096 rows: then one group's operands (11 MB) are read from memory once and stay in L2, and D is
// touched once.
//
// D leaves from registers. A quad of lanes holds two whole sectors of a row, so every store (or addition in memory) of 16 bytes a lane moves
// 16 whole 32-byte sectors; 32 such instructions a thread and tile take less than a tenth of the issue slots of its products. Through shared
// memory and the copy engine, the sums would pass shared memory twice more, 256 KiB a tile of both warpgroups, where products and copies
// of operands already ask for 144 of the 128 bytes a cycle that it has; and a slab would cost a quarter of the stages of A.
//
// Shared memory: 8 stages of A and 2 x 3 of B, [128 rows x 128 bytes] each, 128-byte swizzled (224 KiB); with a scale a row and a column 7 + 2 x 3
// and their scales; the ring of tiles; barriers.
// Barriers: a_full[s], b_full[w][s] one arrival + 16 KiB of copies (+ 512 bytes of scales), waited for by the warps that read the stage;
// a_empty[s], b_empty[w][s] one arrival a warp, of either CTA, that reads such a stage, after its last product from it, waited for by the
// loading thread that writes there; tile_full[r] one arrival of A's loader, tile_empty[r] one a computing thread that has read the tile.
// Named barriers, which keep the warpgroups apart: at 1 the first tells the second that it is kLead steps and a half into a tile (half of the
// steps of a short one), before which the second does not start the same tile; at 2 the second tells the first the same, before which the
// first does not start the next. Nobody waits for ever: who waits holds no stage, and A has more of them than those steps need.
// The CTAs of a cluster meet before the first copy and before they leave.
// Deterministic: an element of D is one thread's sum over ascending k, written or added once, whatever the other groups hold.
#include "kernels/hopper/gemm_wgmma_fp8.h"

namespace fp8flow::hopper {

namespace {

constexpr int kStageSide = 128;  // rows of A, or columns of B, in a stage
constexpr uint32_t kSideBytes = kStageSide * kStageRowBytes;
constexpr uint32_t kScaleBytes = kStageSide * sizeof(float);
constexpr int kBoxRows = kStageSide / 2;  // of a copy
constexpr int kBandRows = 32;             // row tiles that are walked together
constexpr int kStagesB = 3;
constexpr int kLead = 3;
static_assert(kTileRows == kStageSide && kColumns == kStageSide);

template <Scales kScales> struct WgradShared {
    static constexpr int kStagesA = kScales == Scales::tiles ? 8 : 7;
    static_assert(kLead < kStagesA);
    alignas(1024) uint8_t a[kStagesA][kSideBytes];
    alignas(1024) uint8_t b[kMathWarpgroups][kStagesB][kSideBytes];
    // of the stages; scales of whole tiles are not kept here
    alignas(16) float row_scales[kStagesA][has_row_scales(kScales) ? kStageSide : 1];
    alignas(16) float col_scales[kMathWarpgroups][kStagesB][has_column_scales(kScales) ? kStageSide : 1];
    MathTile tiles[kRing];
    Barrier a_full[kStagesA], a_empty[kStagesA];
    Barrier b_full[kMathWarpgroups][kStagesB], b_empty[kMathWarpgroups][kStagesB];
    Barrier tile_full[kRing], tile_empty[kRing];
};
template <Scales kScales> constexpr size_t kWgradBytes = sizeof(WgradShared<kScales>) + 1024;
static_assert(kWgradBytes<Scales::tiles> <= 232448 && kWgradBytes<Scales::rows_columns> <= 232448);

// ---- loading: one thread for A and the ring of tiles, one for each warpgroup's B --------------------------------------------------------
template <class Each> __device__ __forceinline__ void walk_tiles(const DeviceProduct& p, Each each) {
    TileWalk<kFp8Depth, kBandRows> walk(p, static_cast<int>(cluster_rank()));
    for (int64_t index = blockIdx.x / kPair;; index += gridDim.x / kPair) {
        MathTile tile{};
        tile.past_end = !walk.find(index, tile);
        each(tile);
        if (tile.past_end) return;
    }
}

__device__ __forceinline__ const float* scales_at(const DeviceScale& s, int64_t k, int64_t output) {
    return static_cast<const float*>(s.scales) + k / kFp8Depth * s.block_stride + output;
}

// One operand's part of a stage, from contraction index k and output index `first` on; half of it, for both CTAs, where it is common.
__device__ __forceinline__ void load_side(bool common, const CUtensorMap* map, Barrier* full, uint8_t* to,
                                          int64_t k, int64_t first) {
    const int x = static_cast<int>(k), y = static_cast<int>(first);
    load_operand<2>(common ? Load::common : Load::own, static_cast<int>(cluster_rank()), map, full, to,
                    kBoxRows * kStageRowBytes, [&](int i) { return make_int2(x, y + i * kBoxRows); });
}

template <Scales kScales>
__device__ void load_a(const DeviceProduct& p, WgradShared<kScales>& shared, const CUtensorMap* map) {
    RingPosition<WgradShared<kScales>::kStagesA> stage;
    RingPosition<kRing> ring;
    walk_tiles(p, [&](const MathTile& tile) {
        barrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        barrier_arrive(&shared.tile_full[ring.index]);
        ring.advance();
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Barrier* full = &shared.a_full[stage.index];
            const int64_t k = tile.a_k + step * kFp8Depth;
            barrier_wait(&shared.a_empty[stage.index], stage.parity ^ 1);  // in both CTAs
            barrier_arrive_expect_bytes(full, kSideBytes + (has_row_scales(kScales) ? kScaleBytes : 0));
            load_side(tile.common == Common::a, map, full, shared.a[stage.index], k, tile.a_output);
            if (has_row_scales(kScales))
                bulk_load(scales_at(p.a.scale, k, tile.a_output), full, shared.row_scales[stage.index],
                          kScaleBytes);
            stage.advance();
        }
    });
}

template <Scales kScales>
__device__ void load_b(const DeviceProduct& p, WgradShared<kScales>& shared, const CUtensorMap* map,
                       int warpgroup) {
    RingPosition<kStagesB> stage;
    walk_tiles(p, [&](const MathTile& tile) {
        const int64_t col = tile.b_output + warpgroup * kColumns;
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Barrier* full = &shared.b_full[warpgroup][stage.index];
            const int64_t k = tile.b_k + step * kFp8Depth;
            barrier_wait(&shared.b_empty[warpgroup][stage.index], stage.parity ^ 1);  // in both CTAs
            barrier_arrive_expect_bytes(full, kSideBytes + (has_column_scales(kScales) ? kScaleBytes : 0));
            load_side(tile.common == Common::b, map, full, shared.b[warpgroup][stage.index], k, col);
            if (has_column_scales(kScales))  // columns past the last are not stored: any scales will do
                bulk_load(scales_at(p.b.scale, k, min(col, p.n - kColumns)), full,
                          shared.col_scales[warpgroup][stage.index], kScaleBytes);
            stage.advance();
        }
    });
}

// ---- computing: one warpgroup -----------------------------------------------------------------------------------------------------------
// A computing warp is done with a stage, in all its lanes: it tells both CTAs.
__device__ __forceinline__ void release(Barrier* a_empty, Barrier* b_empty) {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32, other = cluster_rank() ^ 1;
    if (lane == 0) {
        barrier_arrive(a_empty);
        barrier_arrive(b_empty);
    }
    if (lane == 1) {
        barrier_arrive_at(a_empty, other);
        barrier_arrive_at(b_empty, other);
    }
}

// Lanes 2i and 2i + 1 hold two neighbouring columns each of two chunks of 8; afterwards the even lane has all four of the first chunk, the
// odd one all four of the second.
__device__ __forceinline__ float4 join_columns(float2 first, float2 second) {
    const bool odd = threadIdx.x % 2 == 1;
    const float2 give = odd ? first : second;
    const float2 got = {__shfl_xor_sync(0xFFFFFFFFu, give.x, 1), __shfl_xor_sync(0xFFFFFFFFu, give.y, 1)};
    return odd ? float4{got.x, got.y, second.x, second.y} : float4{first.x, first.y, got.x, got.y};
}

// A thread's part of D: rows row0 + {0, 8} of each of the two blocks, 16 bytes an access: rows of D are a multiple of 16 bytes.
template <Gradient kMode>
__device__ __forceinline__ void store_tile(const DeviceProduct& p, const MathTile& tile, int row0,
                                           int64_t col0, const float (&sum)[2][64]) {
    const int quad = static_cast<int>(threadIdx.x % 4), first = quad % 2 * 8 + quad / 2 * 4;
    float* const d = static_cast<float*>(p.d) + (tile.d_row + row0) * p.n + col0 + first;
    const int columns = static_cast<int>(min(p.n - col0, int64_t{kColumns})) - first;  // of D from `first` on
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = 64 * (r / 2) + 8 * (r % 2);
        float4* const to = reinterpret_cast<float4*>(d + row * p.n);
        const int left = row0 + row < tile.rows ? columns : 0;
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const float* at = sum[r / 2] + 4 * j + 2 * (r % 2);
            const float4 value = join_columns({at[0], at[1]}, {at[4], at[5]});
            if (8 * j >= left) continue;
            if (kMode == Gradient::accumulate)
                add_in_memory(to + 2 * j, value);
            else
                store_in_memory(to + 2 * j, value);
        }
    }
}

template <class Wgmma, Scales kScales>
__device__ void multiply_tiles(const DeviceProduct& p, WgradShared<kScales>& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * 16 + lane / 4;            // this thread's rows: row0 + {0, 8} of each 64
    const int mine = 1 + warpgroup, others = 2 - warpgroup;  // named barriers: announced at, waited for at
    constexpr bool kRowScales = has_row_scales(kScales);
    constexpr int kRows = kRowScales ? 4 : 1;
    RingPosition<WgradShared<kScales>::kStagesA> a_stage;
    RingPosition<kStagesB> b_stage;
    RingPosition<kRing> ring;
    for (bool first = true;; first = false) {
        barrier_wait(&shared.tile_full[ring.index], ring.parity);
        const MathTile tile = shared.tiles[ring.index];
        barrier_arrive(&shared.tile_empty[ring.index]);
        __syncwarp();
        ring.advance();
        // every announcement is waited for, that of the last tile too
        if (warpgroup == 0 ? !first : !tile.past_end) meet(others, kMathThreads);
        if (tile.past_end) return;

        const int64_t col0 = tile.b_output + warpgroup * kColumns;
        // scales of whole tiles: lane l holds the product of those of step l of every 32 steps
        const float* at_a =
            scales_at(p.a.scale, tile.a_k, tile.a_output / kTileRows * p.a.scale.output_stride);
        const float* at_b =
            scales_at(p.b.scale, tile.b_k, min(col0, p.n - 1) / kColumns * p.b.scale.output_stride);
        const auto read_scale = [&](int step) {
            if (kRowScales) return 1.0f;
            if (step >= tile.steps) return 0.0f;
            return at_a[step * p.a.scale.block_stride] * at_b[step * p.b.scale.block_stride];
        };
        float scales = read_scale(lane), next_scales = 0.0f;
        float sum[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.0f;
        const int lead = min(tile.steps / 2, kLead);
        if (tile.steps == 0) announce(mine, kMathThreads);
        for (int step = 0; step < tile.steps; ++step) {
            if (step % 32 == 0) {
                if (step > 0) scales = next_scales;
                next_scales = read_scale(step + 32 + lane);
            }
            const float scale = __shfl_sync(0xFFFFFFFFu, scales, step % 32);
            barrier_wait(&shared.a_full[a_stage.index], a_stage.parity);
            barrier_wait(&shared.b_full[warpgroup][b_stage.index], b_stage.parity);
            float factor[kRows] = {scale};
            if (kRowScales) {
#pragma unroll
                for (int i = 0; i < kRows; ++i)
                    factor[i] = shared.row_scales[a_stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)];
            }
            const uint64_t a = swizzled_rows(shared.a[a_stage.index]),
                           below = swizzled_rows(shared.a[a_stage.index] + 64 * kStageRowBytes),
                           b = swizzled_rows(shared.b[warpgroup][b_stage.index]);
            const float2* columns =
                reinterpret_cast<const float2*>(shared.col_scales[warpgroup][b_stage.index] + 2 * (lane % 4));
            add_products<Wgmma, kScales>(a, b, sum[0], factor[0], factor[kRows > 1 ? 1 : 0], columns, [] {});
            if (step == lead) announce(mine, kMathThreads);
            add_products<Wgmma, kScales>(
                below, b, sum[1], factor[kRows / 2], factor[kRows - 1], columns,
                [&] { release(&shared.a_empty[a_stage.index], &shared.b_empty[warpgroup][b_stage.index]); });
            a_stage.advance();
            b_stage.advance();
        }
        if (p.mode == Gradient::accumulate)
            store_tile<Gradient::accumulate>(p, tile, row0, col0, sum);
        else
            store_tile<Gradient::overwrite>(p, tile, row0, col0, sum);
    }
}

// ---- the CTA ----------------------------------------------------------------------------------------------------------------------------
template <Scales kScales> __device__ WgradShared<kScales>& prepare() {
    using Shared = WgradShared<kScales>;
    extern __shared__ uint8_t raw[];
    // by the offset: through an integer the compiler would forget that this is shared memory
    Shared& shared = *reinterpret_cast<Shared*>(raw + (0u - shared_address(raw)) % 1024);
    if (threadIdx.x == 0) {
        for (int s = 0; s < Shared::kStagesA; ++s) {
            barrier_init(&shared.a_full[s], 1);
            barrier_init(&shared.a_empty[s], kMathWarps * kPair);
        }
        for (int w = 0; w < kMathWarpgroups; ++w) {
            for (int s = 0; s < kStagesB; ++s) {
                barrier_init(&shared.b_full[w][s], 1);
                barrier_init(&shared.b_empty[w][s], kMathWarps / kMathWarpgroups * kPair);
            }
        }
        for (int r = 0; r < kRing; ++r) {
            barrier_init(&shared.tile_full[r], 1);
            barrier_init(&shared.tile_empty[r], kMathThreads);
        }
        fence_barrier_init();
    }
    cluster_meet();
    return shared;
}

template <class Wgmma, Scales kScales>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    wgrad_kernel(const __grid_constant__ DeviceProduct product, const __grid_constant__ CUtensorMap map_a,
                 const __grid_constant__ CUtensorMap map_b) {
    WgradShared<kScales>& shared = prepare<kScales>();
    const int role = static_cast<int>(threadIdx.x) / kWarpgroup;
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
        multiply_tiles<Wgmma>(product, shared, role - 1);
        cluster_meet();  // nobody leaves while the other CTA may write here
    }
}

template <class Wgmma, Scales kScales>
void launch(const DeviceProduct& p, const CUtensorMap& map_a, const CUtensorMap& map_b, const Launch& how) {
    launch_wgmma_kernel(wgrad_kernel<Wgmma, kScales>, p, map_a, map_b, how, kWgradBytes<kScales>);
}

}  // namespace

void launch_wgmma_wgrad(const DeviceProduct& p, const StoredShape& a, const StoredShape& b,
                        const Launch& how) {
    const CUtensorMap map_a = tensor_map(p.a.codes, p.a.dtype, a.rows, a.cols, kBoxRows),
                      map_b = tensor_map(p.b.codes, p.b.dtype, b.rows, b.cols, kBoxRows);
    const bool columns = p.b.scale.outputs_per_scale == 1, e5m2 = p.a.dtype == DType::e5m2;
    const auto run =
        columns ? (e5m2 ? launch<WgmmaE5m2, Scales::rows_columns> : launch<WgmmaE4m3, Scales::rows_columns>)
                : (e5m2 ? launch<WgmmaE5m2, Scales::tiles> : launch<WgmmaE4m3, Scales::tiles>);
    run(p, map_a, map_b, how);
}

}  // namespace fp8flow::hopper
