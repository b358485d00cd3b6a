// SPDX-License-Identifier: MIT
// What the warpgroup products share: tiles and the walk over them, shared memory and its barriers, the
// loader's hand-over, and the way of sums from registers to D. Included by fp8.cu and bf16.cu, which hold the
// inner loops.
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/memory.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/gemm/problem.h"
#include "kernels/hopper/runtime/launch.h"

#include <cuda.h>
#include <type_traits>

namespace fp8flow::hopper {

constexpr int kTileRows = 128, kTileCols = 256;  // of D
constexpr int kStageRowBytes = 128;              // of the contraction in a stage
constexpr int kWarpgroup = 128, kMathWarpgroups = 2, kMathWarps = kMathWarpgroups * 4;
constexpr int kMathThreads = kMathWarpgroups * kWarpgroup;
constexpr int kColumns = kTileCols / kMathWarpgroups;  // of a warpgroup that has all rows of a tile
constexpr int kWgmmaThreads = (1 + kMathWarpgroups) * kWarpgroup;
constexpr int kStages = 4, kRing = 2;
constexpr int kPair = 2;  // CTAs of a cluster: they work on neighbouring tiles and share one operand
// row tiles that are walked together: a wave of CTAs covers a square of D, so that operands are read from L2
constexpr int kBand = 16;
constexpr uint32_t kStageBytes = (kTileRows + kTileCols) * kStageRowBytes;
constexpr int kLoaderRegisters = 40, kMathRegisters = 232;

// Which operand the pair has in common: two row tiles share B, two column tiles share A.
enum class Common : int32_t { a, b };

// Whether a contraction goes on over DeviceProduct::second.
enum class Sets { one, two };

// One CTA's tile.
struct MathTile {
    int64_t group;
    int64_t a_output, b_output;  // first row in A's scales, first column in B's
    int64_t a_k, b_k;            // first contraction index in A's and B's scales
    int64_t d_row;               // first row of D
    int32_t steps;               // stages of the contraction
    int32_t depth;               // contraction elements; the last stage may be partly beyond them
    int32_t rows, valid;  // rows of D to write, of which the first `valid` hold products and the others zeros
    Common common;
    int32_t past_end;
};

struct WgmmaShared {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    alignas(16) float row_scales[kStages][kTileRows];  // FP8: of A
    alignas(16) float col_scales[kStages][kTileCols];  // FP8: of B, where it has one a column
    MathTile tiles[kRing];
    Mbarrier full[kStages], empty[kStages], tile_full[kRing], tile_empty[kRing];
};
constexpr size_t kSharedBytes = sizeof(WgmmaShared) + 1024;  // the stages are aligned inside

// The tiles of all groups in order, by pairs; asked for ascending indices. A pair never spans two groups: it
// takes two row tiles of one column; the last of an odd number of row tiles is taken two columns at a time.
// Bands of kBandRows row tiles, column by column.
template <int kDepth, int kBandRows = kBand, Sets kSets = Sets::one> class TileWalk {
public:
    __device__ TileWalk(const DeviceProduct& product, int rank)
        : p_(product), rank_(rank), col_tiles_((product.n + kTileCols - 1) / kTileCols) {
        enter_group();
    }
    // False past the last pair.
    __device__ bool find(int64_t index, MathTile& tile) {
        while (index >= first_ + pairs_) {
            first_ += pairs_;
            if (++group_ >= p_.groups.num_groups) return false;
            enter_group();
        }
        int64_t local = index - first_, row = 0, col = 0;
        if (const int64_t even = row_tiles_ / kPair * col_tiles_; local < even) {
            constexpr int kBandPairs = kBandRows / kPair;
            const int64_t band = local / (kBandPairs * col_tiles_),
                          in_band = local % (kBandPairs * col_tiles_),
                          height = min(int64_t{kBandPairs}, row_tiles_ / kPair - band * kBandPairs);
            row = (band * kBandPairs + in_band % height) * kPair + rank_;
            col = in_band / height;
            tile.common = Common::b;
        } else {
            row = row_tiles_ - 1;
            col = (local - even) * kPair + rank_;
            tile.common = Common::a;
        }
        row *= kTileRows;
        tile.group = group_;
        tile.b_output = col * kTileCols;
        tile.rows = static_cast<int32_t>(min(rows_ - row, int64_t{kTileRows}));
        if (p_.grouped == Grouped::contraction) {
            tile.a_output = row;
            tile.a_k = p_.a.base() + offset_;
            tile.b_k = p_.b.base() + offset_;
            tile.d_row = group_ * p_.m + row;
            tile.valid = tile.rows;
            tile.depth = static_cast<int32_t>(count_);
        } else {
            tile.a_output = p_.a.base() + offset_ + row;
            tile.a_k = tile.b_k = 0;
            tile.d_row = (p_.d_row_base != nullptr ? *p_.d_row_base : 0) + offset_ + row;
            tile.valid = static_cast<int32_t>(max(min(count_ - row, int64_t{tile.rows}), int64_t{0}));
            tile.depth = static_cast<int32_t>(p_.k);
        }
        tile.steps = (tile.depth + kDepth - 1) / kDepth;
        return true;
    }

private:
    __device__ void enter_group() {
        count_ = p_.groups.count(group_);
        offset_ = p_.groups.offset(group_);
        if (p_.grouped == Grouped::contraction)  // a group without rows adds nothing
            rows_ = is_empty() && p_.mode == Gradient::accumulate ? 0 : p_.m;
        else
            rows_ = p_.groups.offset(group_ + 1) - offset_;
        row_tiles_ = (rows_ + kTileRows - 1) / kTileRows;
        pairs_ = row_tiles_ / kPair * col_tiles_ + row_tiles_ % kPair * ((col_tiles_ + 1) / kPair);
    }

    __device__ bool is_empty() const {
        return count_ == 0 && (kSets == Sets::one || p_.second.groups.count(group_) == 0);
    }

    const DeviceProduct& p_;
    int rank_;
    int64_t col_tiles_;
    int64_t group_ = 0, first_ = 0;  // first pair of the group
    int64_t count_ = 0, offset_ = 0, rows_ = 0, row_tiles_ = 0, pairs_ = 0;
};

// One operand of a stage in kBoxes boxes of equal size, one behind the other: box(i) is the pair of
// coordinates of box i. Of an operand that the pair has in common each CTA loads half the boxes, for both.
enum class Load { own, common };
template <int kBoxes, class Box>
__device__ __forceinline__ void load_operand(Load load, int rank, const CUtensorMap* map, Mbarrier* full,
                                             uint8_t* to, int box_bytes, Box box) {
    constexpr uint16_t kBoth = 0b11;
    if (load == Load::common) {
#pragma unroll
        for (int i = 0; i < kBoxes / kPair; ++i) {
            const int at = rank * (kBoxes / kPair) + i;
            const int2 place = box(at);
            tma_load_multicast(kBoth, map, full, to + at * box_bytes, place.x, place.y);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
        const int2 place = box(i);
        tma_load(map, full, to + i * box_bytes, place.x, place.y);
    }
}

// One thread of the loading warp: the way of every tile of this CTA. `load(tile, common, step, stage, full)`
// starts the copies of one stage; with what the other CTA of the pair loads for both, stage_bytes arrive.
// `common` is tile.common, a constant: a stage waits for every instruction.
template <int kDepth, class Shared, class LoadStage>
__device__ void load_tiles(const DeviceProduct& p, Shared& shared, uint32_t stage_bytes, LoadStage load) {
    TileWalk<kDepth> walk(p, static_cast<int>(cluster_rank()));
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;
    const auto load_tile = [&](const MathTile& tile, auto common) {
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Mbarrier* full = &shared.full[stage.index];
            mbarrier_wait(&shared.empty[stage.index],
                          stage.parity ^ 1);  // in both CTAs: they write to each other
            mbarrier_arrive_expect_tx(full, stage_bytes);
            load(tile, common, step, stage.index, full);
            stage.advance();
        }
    };
    for (int64_t index = blockIdx.x / kPair;; index += gridDim.x / kPair) {
        MathTile tile{};
        tile.past_end = !walk.find(index, tile);
        mbarrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        mbarrier_arrive(&shared.tile_full[ring.index]);
        if (tile.past_end) return;
        ring.advance();
        if (tile.common == Common::a)
            load_tile(tile, std::integral_constant<Common, Common::a>{});
        else
            load_tile(tile, std::integral_constant<Common, Common::b>{});
    }
}

// A computing warp is done with a stage, in all its lanes: it tells both CTAs.
__device__ __forceinline__ void release_stage(WgmmaShared& shared, int stage) {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
    if (lane == 1) mbarrier_arrive_cta(&shared.empty[stage], cluster_rank() ^ 1);
}

// A computing warp is done with a stage, in all its lanes: it tells both CTAs. Here with rings of A and B of
// their own.
__device__ __forceinline__ void release_stages(Mbarrier* a_empty, Mbarrier* b_empty) {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32, other = cluster_rank() ^ 1;
    if (lane == 0) {
        mbarrier_arrive(a_empty);
        mbarrier_arrive(b_empty);
    }
    if (lane == 1) {
        mbarrier_arrive_cta(a_empty, other);
        mbarrier_arrive_cta(b_empty, other);
    }
}

// A computing thread's next tile; false past the last.
template <class Shared, class Tile>
__device__ __forceinline__ bool next_tile(Shared& shared, RingPosition<kRing>& ring, Tile& tile) {
    mbarrier_wait(&shared.tile_full[ring.index], ring.parity);
    tile = shared.tiles[ring.index];
    mbarrier_arrive(&shared.tile_empty[ring.index]);
    __syncwarp();  // products are issued by whole warps
    tile.steps = warp_uniform(tile.steps);
    tile.past_end = warp_uniform(tile.past_end);
    ring.advance();
    return !tile.past_end;
}

// The barriers of a ring: a place is filled by one arrival (and copies), and free after `releases`.
template <int kSize>
__device__ __forceinline__ void init_ring(Mbarrier (&full)[kSize], Mbarrier (&empty)[kSize], int releases) {
    for (int i = 0; i < kSize; ++i) {
        mbarrier_init(&full[i], 1);
        mbarrier_init(&empty[i], releases);
    }
}

// The shared memory of this CTA, its barriers made ready by `init(shared)` in one thread while the kernel
// before may still end. One that leaves no room to align the stages relies on the base's declared alignment;
// declared for all, it makes the loader of the fused kernel spill.
constexpr size_t kMostShared = 227 * 1024, kAlignment = 1024;
template <class Shared, class Init> __device__ __forceinline__ Shared& prepare_shared(Init init) {
    uint8_t* raw;
    if constexpr (sizeof(Shared) + kAlignment > kMostShared) {
        extern __shared__ __align__(1024) uint8_t aligned[];
        raw = aligned;
    } else {
        extern __shared__ uint8_t unaligned[];
        raw = unaligned;
    }
    // by the offset: through an integer the compiler would forget that this is shared memory
    Shared& shared = *reinterpret_cast<Shared*>(raw + (0u - shared_address(raw)) % kAlignment);
    if (threadIdx.x == 0) {
        init(shared);
        fence_mbarrier_init();
    }
    cluster_sync();
    pdl_wait();
    return shared;
}

// The way of a CTA: `load(shared)` by one thread of the loading warpgroup, `multiply(shared, warpgroup)` by
// the computing ones.
template <class Shared = WgmmaShared, class LoadAll, class MultiplyAll>
__device__ __forceinline__ void run_roles(LoadAll load, MultiplyAll multiply) {
    Shared& shared = prepare_shared<Shared>([](Shared& s) {
        init_ring(s.full, s.empty, kMathWarps * kPair);
        init_ring(s.tile_full, s.tile_empty, kMathThreads);
    });
    const int role = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    if (role == 0) {
        release_registers<kLoaderRegisters>();
        if (threadIdx.x != 0) return;
        load(shared);
        cluster_sync_unaligned();
    } else {
        acquire_registers<kMathRegisters>();
        multiply(shared, role - 1);
        cluster_sync();  // nobody leaves while the other CTA may write here
    }
}

// ---- storing: from registers, 16 bytes (BF16) or 8 bytes (FP32) a thread and access
// --------------------------------------------------- A quad of lanes holds 4 chunks of 8 columns, each lane
// 2 columns of every chunk; afterwards lane q holds all of chunk q.
__device__ __forceinline__ uint4 gather_chunk(uint32_t (&w)[4]) {
    const unsigned lane = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
        const bool odd = lane & 1;
        const uint32_t received = __shfl_xor_sync(kFullMask, odd ? w[c] : w[c + 1], 1);
        if (odd)
            w[c] = received;
        else
            w[c + 1] = received;
    }
    const bool high = lane & 2;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const uint32_t received = __shfl_xor_sync(kFullMask, high ? w[c] : w[c + 2], 2);
        if (high)
            w[c] = received;
        else
            w[c + 2] = received;
    }
    return {w[0], w[1], w[2], w[3]};
}

// FP32: lanes 2i and 2i + 1 hold two neighbouring columns each of two chunks of 8; afterwards the even lane
// has all four of the first chunk, the odd one all four of the second. Done twice, it leaves everything as it
// was.
__device__ __forceinline__ float4 join_columns(float2 first, float2 second) {
    const bool odd = threadIdx.x % 2 == 1;
    const float2 give = odd ? first : second;
    const float2 got = {__shfl_xor_sync(kFullMask, give.x, 1), __shfl_xor_sync(kFullMask, give.y, 1)};
    return odd ? float4{got.x, got.y, second.x, second.y} : float4{first.x, first.y, got.x, got.y};
}

enum class RowUse { none, zero, product };

// One of the two rows that a thread holds of a block of sums: `values` is the first, d[4 * j] and d[4 * j +
// 1] its columns 8 * j + 2 * quad.
template <int kPair, int kSums>
__device__ __forceinline__ void store_row_bf16(const DeviceProduct& p, int64_t row, int64_t col0,
                                               const float (&sum)[kSums], RowUse use) {
    const int quad = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kSums / 4; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int at = 4 * (j + c) + 2 * kPair;
            words[c] = use == RowUse::product ? pack_bf16(sum[at], sum[at + 1]) : 0;
        }
        const uint4 chunk = gather_chunk(words);
        const int64_t col = col0 + 8 * (j + quad);
        if (use != RowUse::none && col < p.n)
            store_vector(reinterpret_cast<uint4*>(static_cast<Bf16*>(p.d) + row * p.n + col), chunk);
    }
}
// The same to D in FP32, overwritten or accumulated.
template <int kPair, int kSums>
__device__ __forceinline__ void store_row_f32(const DeviceProduct& p, int64_t row, int64_t col0,
                                              const float (&sum)[kSums], RowUse use) {
    const int quad = static_cast<int>(threadIdx.x % 4);
    if (use == RowUse::none) return;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
        const int64_t col = col0 + 8 * j + 2 * quad;
        if (col >= p.n) continue;
        const int at = 4 * j + 2 * kPair;
        float2* d = reinterpret_cast<float2*>(static_cast<float*>(p.d) + row * p.n + col);
        float2 value = use == RowUse::product ? float2{sum[at], sum[at + 1]} : float2{0.0f, 0.0f};
        if (p.mode == Gradient::accumulate)
            reduce_add(d, value);
        else
            *d = value;
    }
}
// The same to D of either type.
template <int kPair, int kSums>
__device__ __forceinline__ void store_row(const DeviceProduct& p, int64_t row, int64_t col0,
                                          const float (&sum)[kSums], RowUse use) {
    if (p.d_dtype == DType::bf16)
        store_row_bf16<kPair>(p, row, col0, sum, use);
    else
        store_row_f32<kPair>(p, row, col0, sum, use);
}

__device__ __forceinline__ RowUse use_of(const MathTile& tile, int row) {
    return row >= tile.rows ? RowUse::none : row >= tile.valid ? RowUse::zero : RowUse::product;
}

template <int kSums>
__device__ __forceinline__ void store_rows(const DeviceProduct& p, const MathTile& tile, int row,
                                           int64_t col0, const float (&sum)[kSums]) {
    store_row<0>(p, tile.d_row + row, col0, sum, use_of(tile, row));
    store_row<1>(p, tile.d_row + row + 8, col0, sum, use_of(tile, row + 8));
}

// ---- host side (tensor_maps.cu)
// -------------------------------------------------------------------------------------------------------- A
// row-major tensor as TMA sees it: boxes of `box_rows` rows x `box_row_bytes` (128, 64 or 32),
// swizzled as wide.
CUtensorMap tensor_map(const void* data, DType dtype, int64_t rows, int64_t cols, int box_rows,
                       int box_row_bytes = 128);
// An FP32 tensor of three dimensions, the same way: boxes of 1 x box_rows rows x 128 bytes.
CUtensorMap tensor_map_f32(const void* data, int64_t groups, int64_t rows, int64_t cols, int box_rows);

// An operand as stored, all leading dimensions taken together.
struct StoredShape {
    int64_t rows, cols;
};
// FP8 with a scale per 128 of the contraction or scales that are constant along it, and BF16.
bool wgmma_takes_fp8(const DeviceProduct& product, int64_t group_alignment);
void launch_wgmma_fp8(const DeviceProduct& product, const StoredShape& a, const StoredShape& b,
                      const Launch& launch);
// of the FP8 weight gradients with a scale per 128 of the contraction (fp8_wgrad.cu); of two sets of operands
void launch_wgmma_wgrad(const DeviceProduct& product, const StoredShape& a, const StoredShape& b,
                        const Launch& launch);
void launch_wgmma_wgrad_two(const DeviceProduct& product, const StoredShape& a, const StoredShape& b,
                            const StoredShape& second_a, const StoredShape& second_b, const Launch& launch);
bool wgmma_takes_bf16(const DeviceProduct& product);
void launch_wgmma_bf16(const DeviceProduct& product, const StoredShape& a, const StoredShape& b,
                       const Launch& launch);
// of the weight gradients among them (bf16_wgrad.cu)
void launch_wgmma_bf16_wgrad(const DeviceProduct& product, const StoredShape& a, const StoredShape& b,
                             const Launch& launch);

// In whole pairs: an odd limit of SMs is rounded down, a limit of one takes two. The kernel
// begins with prepare_shared.
template <class Kernel, class... Args>
void launch_wgmma_pairs(Kernel kernel, unsigned ctas, size_t shared_bytes, const Launch& launch,
                        const char* op, const Args&... args) {
    cudaLaunchAttribute attributes[] = {cluster_attribute(kPair), pdl_attribute()};
    launch_with(attributes, kernel, std::max(1u, ctas / kPair) * kPair, dim3(kWgmmaThreads), shared_bytes,
                launch, op, args...);
}
// `maps`: of A and B, and of what else the kernel copies.
template <class Kernel, class... Maps>
void launch_wgmma_kernel(Kernel kernel, const DeviceProduct& product, const Launch& launch,
                         size_t shared_bytes, const Maps&... maps) {
    const int64_t tiles = row_tiles_bound(product, kTileRows) * ceil_div(product.n, kTileCols);
    if (tiles == 0) return;
    allow_shared_memory(kernel, shared_bytes, "shared memory of a product");
    launch_wgmma_pairs(kernel, grid_for(tiles, launch, 1), shared_bytes, launch, "product (wgmma)", product,
                       maps...);
}

}  // namespace fp8flow::hopper
