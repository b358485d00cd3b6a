// SPDX-License-Identifier: MIT
// What the warp-specialised GEMMs of this folder share: tile scheduler, pipeline stages, roles of warpgroups,
// stores from registers, launch. It includes the device headers for all of them. Mainloops: fp8.cu,
// fp8_mainloop.h, fp8_wgrad.cu, bf16.cu, bf16_wgrad.cu. Weight gradients have one pipeline per operand
// (wgrad_roles.h). In CUTLASS's words: persistent, warp-specialised, cooperative (both consumer warpgroups
// share a tile of 128 x 256), clusters of two CTAs with TMA multicast.
//
//   warpgroup 0    producer: one thread runs the tile scheduler and issues the TMA loads
//   warpgroup 1, 2 consumers: wgmma, promotion, epilogue
//
//   barrier        arrivals of a phase                             waited for by
//   full[s]        1 producer thread + bytes of the stage          consumer warps
//   empty[s]       1 per consumer warp of BOTH CTAs                producer: it writes into both CTAs
//   tile_full[r]   1 producer thread                               consumer threads
//   tile_empty[r]  1 per consumer thread (tile is in registers)    producer
//
// With a tile queue (tile_queue.h) a thread of the producer warpgroup takes tiles for its cluster.
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/memory.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/problem.h"
#include "kernels/hopper/gemm/sm90/tile_queue.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/runtime/tensor_map.h"

#include <cuda.h>
#include <type_traits>
#include <vector>

namespace fp8flow::hopper::gemm {

constexpr int kTileRows = 128, kTileCols = 256;  // of D
constexpr int kStageRowBytes = 128;              // contraction bytes of a row in a stage
constexpr int kWarpgroup = 128, kConsumerWarpgroups = 2, kConsumerWarps = kConsumerWarpgroups * 4;
constexpr int kConsumerThreads = kConsumerWarpgroups * kWarpgroup;
constexpr int kWarpgroupCols =
    kTileCols / kConsumerWarpgroups;  // of a warpgroup that owns all rows of a tile
constexpr int kCtaThreads = (1 + kConsumerWarpgroups) * kWarpgroup;
constexpr int kStages = 4, kTileSlots = 2;
// rasterisation: row tiles of a band. A wave of CTAs covers a square of D, so that operands are read from L2.
constexpr int kRasterRows = 16;
constexpr uint32_t kStageBytes = (kTileRows + kTileCols) * kStageRowBytes;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
// Staging of D between registers and TMA: boxes of a warp's 16 rows of a chain x 128 bytes, 128-byte
// swizzled.
constexpr int kWarpRows = 16;
constexpr uint32_t kBoxBytes = kWarpRows * kStageRowBytes;
constexpr int kBf16BoxCols = kStageRowBytes / static_cast<int>(sizeof(Bf16)),
              kBf16Boxes = kWarpgroupCols / kBf16BoxCols;

// The operand that both tiles of a cluster read, which TMA multicasts: B of two row tiles, A of two column
// tiles.
enum class Multicast : int32_t { a, b };

// The operands of a weight gradient: where each of at most kMax sets begins, for its contraction may continue
// over those of other micro-batches. GemmProblem has the strides and dtypes of all.
template <int kMax> struct OperandSets {
    struct Set {
        DeviceGroups groups;
        const int64_t *base_a, *base_b;  // null: 0
        const float *scales_a, *scales_b;
    };
    int num = 0;
    Set sets[kMax] = {};

    __device__ bool is_empty(int64_t group) const {
        for (int i = 0; i < num; ++i)
            if (sets[i].groups.count(group) != 0) return false;
        return true;
    }
};

// One CTA's tile of D, as the scheduler describes it to the consumers (CUTLASS: WorkTileInfo).
struct WorkTile {
    int64_t group;
    int64_t a_output, b_output;  // first row in A's scales, first column in B's
    int64_t a_k, b_k;            // first contraction index in A's and B's scales
    int64_t d_row;               // first row of D
    int32_t steps;               // mainloop steps: stages of the contraction
    int32_t depth;               // contraction elements; the last stage may reach past them
    int32_t rows, valid;         // rows of D to write: the first `valid` get results, the others (pads) zeros
    Multicast multicast;
    int32_t past_end;
};

struct SharedStorage {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    alignas(16) float row_scales[kStages][kTileRows];  // FP8: scales of A's rows
    alignas(16) float col_scales[kStages][kTileCols];  // FP8: scales of B's columns, if it has one per column
    WorkTile tiles[kTileSlots];
    Mbarrier full[kStages], empty[kStages], tile_full[kTileSlots], tile_empty[kTileSlots];
    SharedQueue queue;
};
// Shared memory: the most of a CTA, and the bytes of a launch. The launch adds padding to align the stages.
// If the padding does not fit, prepare_shared relies on the declared alignment of the base.
constexpr size_t kMaxSharedBytes = 227 * 1024, kSharedAlignment = 1024;
template <class Shared> constexpr bool kPadded = sizeof(Shared) + kSharedAlignment <= kMaxSharedBytes;
template <class Shared>
constexpr size_t kSharedBytes = sizeof(Shared) + (kPadded<Shared> ? kSharedAlignment : 0);

// The tile scheduler: the tiles of all groups in order, two at a time (one for each CTA of the cluster), for
// ascending indices. Both tiles belong to one group: two row tiles of one column tile; the last of an odd
// number of row tiles is taken two column tiles at a time. Order within a group: bands of kBandRows row
// tiles, column by column.
template <int kStageK, int kBandRows = kRasterRows, int kSets = 1> class TileScheduler {
public:
    // sets: where there may be several.
    __device__ TileScheduler(const GemmProblem& problem, int rank, const OperandSets<kSets>* sets = nullptr)
        : p_(problem), sets_(sets), rank_(rank), col_tiles_((problem.n + kTileCols - 1) / kTileCols) {
        enter_group();
    }
    // Whether the group of the last tile found has no rows.
    __device__ bool is_empty() const {
        if constexpr (kSets > 1)
            return sets_->is_empty(group_);
        else
            return count_ == 0;
    }
    // The tile of this CTA in pair `index`; false past the last pair.
    __device__ bool find(int64_t index, WorkTile& tile) {
        while (index >= first_ + pairs_) {
            first_ += pairs_;
            if (++group_ >= p_.groups.num_groups) return false;
            enter_group();
        }
        int64_t local = index - first_, row = 0, col = 0;
        if (const int64_t even = row_tiles_ / kClusterCtas * col_tiles_; local < even) {
            constexpr int kBandPairs = kBandRows / kClusterCtas;
            const int64_t band = local / (kBandPairs * col_tiles_),
                          in_band = local % (kBandPairs * col_tiles_),
                          height = min(int64_t{kBandPairs}, row_tiles_ / kClusterCtas - band * kBandPairs);
            row = (band * kBandPairs + in_band % height) * kClusterCtas + rank_;
            col = in_band / height;
            tile.multicast = Multicast::b;
        } else {
            row = row_tiles_ - 1;
            col = (local - even) * kClusterCtas + rank_;
            tile.multicast = Multicast::a;
        }
        row *= kTileRows;
        tile.b_output = col * kTileCols;
        tile.rows = static_cast<int32_t>(min(rows_ - row, int64_t{kTileRows}));
        if (p_.grouped == Grouped::contraction) {
            tile.group = group_;
            tile.a_output = row;
            tile.a_k = p_.a.base() + offset_;
            tile.b_k = p_.b.base() + offset_;
            tile.d_row = group_ * p_.m + row;
            tile.valid = tile.rows;
            tile.depth = static_cast<int32_t>(count_);
        } else {
            tile.group = p_.weight_of(group_);
            tile.a_output = p_.a.base() + offset_ + row;
            tile.a_k = tile.b_k = 0;
            tile.d_row = (p_.d_row_base != nullptr ? *p_.d_row_base : 0) + offset_ + row;
            tile.valid = static_cast<int32_t>(max(min(count_ - row, int64_t{tile.rows}), int64_t{0}));
            tile.depth = static_cast<int32_t>(p_.k);
        }
        tile.steps = (tile.depth + kStageK - 1) / kStageK;
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
        pairs_ = row_tiles_ / kClusterCtas * col_tiles_ +
                 row_tiles_ % kClusterCtas * ((col_tiles_ + 1) / kClusterCtas);
    }

    const GemmProblem& p_;
    const OperandSets<kSets>* sets_;
    int rank_;
    int64_t col_tiles_;
    int64_t group_ = 0, first_ = 0;  // index of the group's first pair
    int64_t count_ = 0, offset_ = 0, rows_ = 0, row_tiles_ = 0, pairs_ = 0;
};

// Loads one operand of a stage as kBoxes boxes of equal size, at consecutive places in shared memory; box(i)
// gives the coordinates of box i. Of a common operand each CTA loads half the boxes and multicasts them to
// both.
enum class Load { own, multicast };
__device__ constexpr Load load_of(Multicast common, Multicast operand) {
    return common == operand ? Load::multicast : Load::own;
}
template <int kBoxes, class Box>
__device__ __forceinline__ void load_operand(Load load, int rank, const CUtensorMap* map, Mbarrier* full,
                                             uint8_t* to, int box_bytes, Box box) {
    constexpr uint16_t kBoth = 0b11;
    if (load == Load::multicast) {
#pragma unroll
        for (int i = 0; i < kBoxes / kClusterCtas; ++i) {
            const int at = rank * (kBoxes / kClusterCtas) + i;
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

// The producer thread: all tiles of this CTA. `load(tile, multicast, step, stage, full)` issues the copies of
// one stage; together with what the other CTA multicasts, stage_bytes arrive. `multicast` is tile.multicast
// as a compile-time constant: every instruction here delays the next stage.
template <int kStageK, class Shared, class LoadStage>
__device__ void produce_tiles(const GemmProblem& p, Shared& shared, uint32_t stage_bytes, LoadStage load) {
    TileScheduler<kStageK> scheduler(p, static_cast<int>(cluster_rank()));
    RingPosition<kStages> stage;
    RingPosition<kTileSlots> ring;
    const auto load_tile = [&](const WorkTile& tile, auto multicast) {
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Mbarrier* full = &shared.full[stage.index];
            mbarrier_wait(&shared.empty[stage.index],
                          stage.parity ^ 1);  // consumers of both CTAs: each writes into both
            mbarrier_arrive_expect_tx(full, stage_bytes);
            load(tile, multicast, step, stage.index, full);
            stage.advance();
        }
    };
    PairReader pairs(p.queue, shared.queue);
    for (;;) {
        WorkTile tile{};
        tile.past_end = !scheduler.find(pairs.next(), tile);
        mbarrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        mbarrier_arrive(&shared.tile_full[ring.index]);
        if (tile.past_end) return;
        ring.advance();
        if (tile.multicast == Multicast::a)
            load_tile(tile, std::integral_constant<Multicast, Multicast::a>{});
        else
            load_tile(tile, std::integral_constant<Multicast, Multicast::b>{});
    }
}

// A consumer warp releases a stage, to the producers of both CTAs, once all its lanes are done with it.
template <class Shared> __device__ __forceinline__ void release_stage(Shared& shared, int stage) {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
    if (lane == 1) mbarrier_arrive_cta(&shared.empty[stage], cluster_rank() ^ 1);
}

// A thread takes the next tile of the ring.
template <class Shared, class Tile>
__device__ __forceinline__ void take_tile(Shared& shared, const RingPosition<kTileSlots>& ring, Tile& tile) {
    mbarrier_wait(&shared.tile_full[ring.index], ring.parity);
    tile = shared.tiles[ring.index];
    mbarrier_arrive(&shared.tile_empty[ring.index]);
}
// A consumer thread's next tile; false past the last.
template <class Shared, class Tile>
__device__ __forceinline__ bool next_tile(Shared& shared, RingPosition<kTileSlots>& ring, Tile& tile) {
    take_tile(shared, ring, tile);
    __syncwarp();  // wgmma is issued by whole warps
    tile.steps = warp_uniform(tile.steps);
    tile.past_end = warp_uniform(tile.past_end);
    ring.advance();
    return !tile.past_end;
}

// Initialises the barriers of a ring: a slot is full after one arrival (and its copies), empty after
// `releases`.
template <int kSize>
__device__ __forceinline__ void init_ring(Mbarrier (&full)[kSize], Mbarrier (&empty)[kSize], int releases) {
    for (int i = 0; i < kSize; ++i) {
        mbarrier_init(&full[i], 1);
        mbarrier_init(&empty[i], releases);
    }
}

// The shared memory of this CTA; one thread calls `init(shared)` for its barriers while the kernel before may
// still run. An alignment declared for all kernels makes the producer of the fused SwiGLU kernel spill.
template <class Shared, class Init> __device__ __forceinline__ Shared& prepare_shared(Init init) {
    uint8_t* raw;
    if constexpr (!kPadded<Shared>) {
        extern __shared__ __align__(1024) uint8_t aligned[];
        raw = aligned;
    } else {
        extern __shared__ uint8_t unaligned[];
        raw = unaligned;
    }
    // an offset, not a cast through an integer: the compiler must still know that this is shared memory
    Shared& shared = *reinterpret_cast<Shared*>(raw + (0u - shared_address(raw)) % kSharedAlignment);
    if (threadIdx.x == 0) {
        init(shared);
        fence_mbarrier_init();
    }
    cluster_sync();
    pdl_wait();
    return shared;
}

// One thread of the producer warpgroup fills the queue: this one.
constexpr int kQueueThread = kWarpgroup - kWarpSize;
template <class Scheduler, class... Sets>
__device__ void fill_queue(const GemmProblem& p, SharedQueue& shared, const Sets*... sets) {
    if (p.queue == nullptr || cluster_rank() != 0) return;
    Scheduler scheduler(p, 0, sets...);
    WorkTile tile;
    take_pairs(*p.queue, shared, [&](int64_t pair) { return scheduler.find(pair, tile); });
}

// The roles of a CTA: `produce(shared)` by one thread of warpgroup 0, `consume(shared, warpgroup)` by the
// consumers, `fill(shared)` by the thread for the queue.
struct NoQueue {
    template <class Shared> __device__ void operator()(Shared&) const {}
};
template <class Shared = SharedStorage, class Produce, class Consume, class Fill = NoQueue>
__device__ __forceinline__ void run_roles(Produce produce, Consume consume, Fill fill = {}) {
    Shared& shared = prepare_shared<Shared>([](Shared& s) {
        init_ring(s.full, s.empty, kConsumerWarps * kClusterCtas);
        init_ring(s.tile_full, s.tile_empty, kConsumerThreads);
        init_ring(s.queue.full, s.queue.empty, kClusterCtas);
    });
    const int role = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    if (role == 0) {
        release_registers<kProducerRegisters>();
        if (threadIdx.x == kQueueThread) fill(shared);
        if (threadIdx.x != 0) return;
        produce(shared);
        cluster_sync_unaligned();
    } else {
        acquire_registers<kConsumerRegisters>();
        consume(shared, role - 1);
        cluster_sync();  // no CTA exits while the other may still write to it
    }
}

// ---- epilogue from registers: 16 bytes (BF16) or 8 bytes (FP32) per thread and store
//
// A quad of lanes holds 4 chunks of 8 columns, each lane 2 columns of every chunk; afterwards lane q holds
// all of chunk q.
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

// FP32: lanes 2i and 2i + 1 each hold two neighbouring columns of two chunks of 8; afterwards the even lane
// has four columns of the first chunk, the odd one four of the second. Applied twice, it is the identity.
__device__ __forceinline__ float4 join_columns(float2 first, float2 second) {
    const bool odd = threadIdx.x % 2 == 1;
    const float2 give = odd ? first : second;
    const float2 got = {__shfl_xor_sync(kFullMask, give.x, 1), __shfl_xor_sync(kFullMask, give.y, 1)};
    return odd ? float4{got.x, got.y, second.x, second.y} : float4{first.x, first.y, got.x, got.y};
}

// What the epilogue writes to a row of D: nothing, zeros (pads), or the accumulators.
enum class RowUse { skip, zero, sums };

// One of the two rows of a thread's accumulator fragment (kHalf 0: upper, 1: 8 below). Columns of (sum[4 * j
// + 2 * kHalf], sum[4 * j + 2 * kHalf + 1]): 8 * j + 2 * quad and the next.
template <int kHalf, int kSums>
__device__ __forceinline__ void store_row_bf16(const GemmProblem& p, int64_t row, int64_t col0,
                                               const float (&sum)[kSums], RowUse use) {
    const int quad = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kSums / 4; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int at = 4 * (j + c) + 2 * kHalf;
            words[c] = use == RowUse::sums ? pack_bf16(sum[at], sum[at + 1]) : 0;
        }
        const uint4 chunk = gather_chunk(words);
        const int64_t col = col0 + 8 * (j + quad);
        if (use != RowUse::skip && col < p.n)
            store_vector(reinterpret_cast<uint4*>(static_cast<Bf16*>(p.d) + row * p.n + col), chunk);
    }
}
// The same to D in FP32, overwritten or accumulated (reduce-add in memory).
template <int kHalf, int kSums>
__device__ __forceinline__ void store_row_f32(const GemmProblem& p, int64_t row, int64_t col0,
                                              const float (&sum)[kSums], RowUse use) {
    const int quad = static_cast<int>(threadIdx.x % 4);
    if (use == RowUse::skip) return;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
        const int64_t col = col0 + 8 * j + 2 * quad;
        if (col >= p.n) continue;
        const int at = 4 * j + 2 * kHalf;
        float2* d = reinterpret_cast<float2*>(static_cast<float*>(p.d) + row * p.n + col);
        float2 value = use == RowUse::sums ? float2{sum[at], sum[at + 1]} : float2{0.0f, 0.0f};
        if (p.mode == Gradient::accumulate)
            reduce_add(d, value);
        else
            *d = value;
    }
}
// The same added to D in BF16, rounded stochastically.
template <int kHalf, int kSums>
__device__ __forceinline__ void add_row_bf16(const GemmProblem& p, int64_t row, int64_t col0,
                                             const float (&sum)[kSums], RowUse use) {
    const int quad = static_cast<int>(threadIdx.x % 4);
    if (use == RowUse::skip) return;
    const uint32_t counter = rounding_row(p.rounding.step_key(), p.rounding.first + row);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
        const int64_t col = col0 + 8 * j + 2 * quad;
        if (col >= p.n) continue;
        const int at = 4 * j + 2 * kHalf;
        auto* const d = reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.d) + row * p.n + col);
        const float2 value = use == RowUse::sums ? float2{sum[at], sum[at + 1]} : float2{0.0f, 0.0f};
        const float2 old = unpack_bf16x2(*d);
        *d = round_pair(old.x + value.x, old.y + value.y,
                        rounding_word(counter, static_cast<uint32_t>(col / 2)));
    }
}
// The same to D of either type.
template <int kHalf, int kSums>
__device__ __forceinline__ void store_row(const GemmProblem& p, int64_t row, int64_t col0,
                                          const float (&sum)[kSums], RowUse use) {
    if (p.d_dtype == DType::bf16 && p.mode == Gradient::accumulate)
        add_row_bf16<kHalf>(p, row, col0, sum, use);
    else if (p.d_dtype == DType::bf16)
        store_row_bf16<kHalf>(p, row, col0, sum, use);
    else
        store_row_f32<kHalf>(p, row, col0, sum, use);
}

template <class Tile> __device__ __forceinline__ RowUse use_of(const Tile& tile, int row) {
    return row >= tile.rows ? RowUse::skip : row >= tile.valid ? RowUse::zero : RowUse::sums;
}

template <int kSums>
__device__ __forceinline__ void store_rows(const GemmProblem& p, const WorkTile& tile, int row, int64_t col0,
                                           const float (&sum)[kSums]) {
    store_row<0>(p, tile.d_row + row, col0, sum, use_of(tile, row));
    store_row<1>(p, tile.d_row + row + 8, col0, sum, use_of(tile, row + 8));
}

// ---- epilogue through shared memory: of a warp's 16 rows, staged in a box
//
// Where they reach past the group: store(row, piece) for each 16 bytes, instead of TMA.
template <class Store> __device__ __forceinline__ void for_box_pieces(Store store) {
    constexpr int kPieces = kStageRowBytes / 16;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32; i < kWarpRows * kPieces; i += 32)
        store(i / kPieces, i % kPieces);
}
__device__ __forceinline__ uint4 piece_of(const uint8_t* box, int row, int piece) {
    return *reinterpret_cast<const uint4*>(box + row * kStageRowBytes + (piece ^ (row % 8)) * 16);
}
// Zeros in the sums of a chain that belong to pads. row: of the tile, this thread's upper one.
__device__ __forceinline__ void zero_pads(const WorkTile& tile, int row, float (&sums)[64]) {
    if (warp_uniform(tile.valid) >= kTileRows) return;
#pragma unroll
    for (int i = 0; i < 64; ++i)
        if (row + 8 * (i / 2 % 2) >= tile.valid) sums[i] = 0.0f;
}

// An operand as stored, leading dimensions flattened.
struct StoredShape {
    int64_t rows, cols;
};
inline CUtensorMap operand_map(const GemmOperand& operand, const StoredShape& shape, int box_rows) {
    return tensor_map(operand.data, operand.dtype, shape.rows, shape.cols, box_rows);
}
// Conditions of the kernels, and their launchers: rows grouped (fp8.cu, which also takes weight gradients
// with scales constant along the contraction; bf16.cu), weight gradients (fp8_wgrad.cu, bf16_wgrad.cu), and
// MXFP8 of both kinds (fp8_mx.cu).
bool wgmma_supports_fp8(const GemmProblem& problem, int64_t group_alignment);
bool wgmma_supports_mx(const GemmProblem& problem, int64_t group_alignment);
bool wgmma_supports_bf16(const GemmProblem& problem);
using LaunchWgmma = void(const GemmProblem& problem, const StoredShape& a, const StoredShape& b,
                         const Launch& launch);
LaunchWgmma launch_wgmma_fp8, launch_wgmma_mx, launch_wgmma_bf16, launch_wgmma_fp8_wgrad,
    launch_wgmma_bf16_wgrad;
// A weight gradient with several sets of operands (fp8_wgrad.cu).
struct StoredSet {
    OperandSet set;
    StoredShape a, b;
};
void launch_wgmma_fp8_wgrad_sets(const GemmProblem& problem, const std::vector<StoredSet>& sets,
                                 const Launch& launch);

// A launch of whole clusters: an odd SM limit is rounded down, a limit of one becomes two. The kernel must
// begin with prepare_shared (PDL).
template <class Kernel, class... Args>
void launch_clusters(Kernel kernel, unsigned ctas, size_t shared_bytes, const Launch& launch, const char* op,
                     const Args&... args) {
    cudaLaunchAttribute attributes[] = {cluster_attribute(kClusterCtas), pdl_attribute()};
    launch_with(attributes, kernel, std::max(1u, ctas / kClusterCtas) * kClusterCtas, dim3(kCtaThreads),
                shared_bytes, launch, op, args...);
}
// A persistent launch over all tiles of D. `maps`: tensor maps of A, B and whatever else the kernel copies.
template <class Shared, class Kernel, class... Maps>
void launch_persistent(Kernel kernel, const GemmProblem& problem, const Launch& launch, const Maps&... maps) {
    static_assert(kSharedBytes<Shared> <= kMaxSharedBytes);
    const int64_t tiles = row_tiles_bound(problem, kTileRows) * ceil_div(problem.n, kTileCols);
    if (tiles == 0) return;
    launch_clusters(kernel, grid_for(tiles, launch, 1), kSharedBytes<Shared>, launch, "GEMM (wgmma)", problem,
                    maps...);
}

}  // namespace fp8flow::hopper::gemm
