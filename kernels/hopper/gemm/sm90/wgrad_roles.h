// SPDX-License-Identifier: MIT
// The skeleton of the weight gradients (fp8_wgrad.cu, bf16_wgrad.cu): raster order of tiles, shared memory
// and barriers, producers, the consumers' side of the pipeline, roles of the warps, launch. A `Policy` states
// the operands of a kernel:
//
//   kSets                           most sets of operands
//   kStageK, kStagesA, kStagesB     contraction elements of a stage; stages of A, and of B for each warpgroup
//   kOperandStageBytes              of one operand: 128 rows or columns of a tile
//   Scales                          what else the stages hold in shared memory
//   kLoadBytes<kOperand>            that arrive at the barrier of a stage
//   steps(tile)                     stages of a tile that has any
//   descriptor(stage)               of the operand of a stage, for wgmma
//   load(how, from, output, full, to)   issues the copies of an operand, from index `output` on
//   load_scales<kOperand>(p, from, output, full, scales, at)   and of its scales
//
// Grid: persistent, one CTA per SM, tiles of 128 x 256, clusters of two CTAs. Raster: bands of 4096 rows
// (kWgradRasterRows), so that a group's operands (11 MB in FP8, 23 MB in BF16 at 4096 x 7168, 1024 rows) are
// read from memory once and stay in L2, and D is touched once.
//
// Warps of the producer warpgroup: one thread for A and the tile ring, one for the B of each consumer
// warpgroup, which reads the ring like a consumer; the fourth warp zeroes the tiles of groups without rows,
// which the ring does not have. Where a tile's sets of operands lie, they all read from its group's table. A
// consumer warpgroup owns 128 x 128 of a tile: two blocks of 64 rows. A consumer warp owns 16 rows of a block
// and its own staging boxes, so it waits for no other warp; lane 0 issues its copies from and to D and waits
// until the boxes may be written again. Direct stores from registers would make a warpgroup wait as long as
// the stores take; reduce-add in memory runs at 1.4 TB/s, load and store at 3.9.
//
//   barrier                    arrivals of a phase                            waited for by
//   a_full[s], b_full[w][s]    1 producer + kLoadBytes                        warps that read the stage
//   a_empty[s], b_empty[w][s]  1 per warp, of both CTAs, that reads the stage   producer that writes there
//   tile_full[r]               1 A's producer                                 B's producers, consumer threads
//   tile_empty[r]              1 per B's producer and consumer thread         A's producer
//   d_full[warp]               1 lane 0 + 8 KiB of old D                      the warp
//
// cluster_sync before the first copy and before exit.
#pragma once

#include "kernels/hopper/gemm/sm90/wgrad_epilogue.h"

namespace fp8flow::hopper::gemm {

constexpr int kWgradRasterRows = 32;  // rasterisation: row tiles of a band

// ---- tiles
//
// Where the rows of a group lie in each set of operands, as A's producer finds it when the group begins: the
// contraction index and the scales of step 0, extrapolated from the set, and the step after its last.
template <int kSets> struct GroupSets {
    static_assert((kSets & (kSets - 1)) == 0, "set_of halves");
    struct Set {
        const float *scales_a, *scales_b;
        int32_t a_k, b_k, end;  // end of the last set: no step reaches it
    };
    Set of[kSets];

    // The set of a step, without a branch.
    __device__ __forceinline__ const Set& set_of(int step) const {
        int set = 0;
#pragma unroll
        for (int half = kSets / 2; half > 0; half /= 2) set += step >= of[set + half - 1].end ? half : 0;
        return of[set];
    }
    // Returns the number of steps.
    template <int kStageK>
    __device__ int32_t fill(const GemmProblem& p, const OperandSets<kSets>& from, int64_t group) {
        int32_t before = 0;
#pragma unroll 1
        for (int i = 0; i < from.num; ++i) {
            const auto& set = from.sets[i];
            const auto k = [&](const int64_t* base) {
                return static_cast<int32_t>(set.groups.offset(group) + (base != nullptr ? *base : 0)) -
                       before * kStageK;
            };
            const int32_t a_k = k(set.base_a), b_k = k(set.base_b);
            before += static_cast<int32_t>((set.groups.count(group) + kStageK - 1) / kStageK);
            of[i] = {set.scales_a + a_k / kStageK * p.a.scale.block_stride,
                     set.scales_b + b_k / kStageK * p.b.scale.block_stride, a_k, b_k, before};
        }
        for (int i = from.num - 1; i < kSets; ++i) of[i].end = INT32_MAX;
        return before;
    }
};
// sets: which GroupSets of WgradStorage is its group's.
struct WgradTile : WorkTile {
    int32_t sets;
};
// While a table is filled, readers may still use those of the last two tiles.
constexpr int kGroupSlots = kTileSlots + 1;

template <class Policy>
using WgradScheduler = TileScheduler<Policy::kStageK, kWgradRasterRows, Policy::kSets>;

// One warp: zeros in the tiles of CTA `rank` of groups without rows, 16 bytes per lane; and in their sums of
// squares. These tiles are always divided evenly.
template <class Policy, Squares kSquares>
__device__ void clear_tiles(const GemmProblem& p, int rank, const OperandSets<Policy::kSets>& sets) {
    const int64_t width = p.d_dtype == DType::bf16 ? 2 : 4;
    WgradScheduler<Policy> scheduler(p, rank, &sets);
    WorkTile tile;
    for (int64_t pair = blockIdx.x / kClusterCtas; scheduler.find(pair, tile);
         pair += gridDim.x / kClusterCtas) {
        if (!scheduler.is_empty()) continue;
        const int64_t lane = threadIdx.x % 32,
                      bytes = (min(tile.b_output + kTileCols, p.n) - tile.b_output) * width;
        uint8_t* row = static_cast<uint8_t*>(p.d) + (tile.d_row * p.n + tile.b_output) * width;
        for (int i = 0; i < tile.rows; ++i, row += p.n * width)
            for (int64_t at = 16 * lane; at < bytes; at += 16 * 32)
                store_vector(reinterpret_cast<float4*>(row + at), float4{});
        if constexpr (kSquares == Squares::sum) {
            const int64_t column = tile.b_output + lane / op::kSquaresPatches * op::kSquaresTile;
            if (column < min(tile.b_output + kTileCols, p.n))
                squares_of(p, tile.group, tile.a_output, column)[lane % op::kSquaresPatches] = 0.0;
        }
    }
}

// ---- shared memory
template <class Policy> struct WgradStorage {
    alignas(1024) uint8_t a[Policy::kStagesA][Policy::kOperandStageBytes];
    alignas(1024) uint8_t b[kConsumerWarpgroups][Policy::kStagesB][Policy::kOperandStageBytes];
    alignas(1024) Staging staging[kConsumerWarps];
    typename Policy::Scales scales;
    WgradTile tiles[kTileSlots];
    GroupSets<Policy::kSets> sets[kGroupSlots];
    Mbarrier a_full[Policy::kStagesA], a_empty[Policy::kStagesA];
    Mbarrier b_full[kConsumerWarpgroups][Policy::kStagesB], b_empty[kConsumerWarpgroups][Policy::kStagesB];
    Mbarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    Mbarrier d_full[kConsumerWarps];
    SharedQueue queue;

    // The pipeline of one operand: of A, which both consumer warpgroups read, or of B of one of them.
    template <Multicast kOperand> __device__ __forceinline__ uint8_t* data(int warpgroup, int stage) {
        return kOperand == Multicast::a ? a[stage] : b[warpgroup][stage];
    }
    template <Multicast kOperand> __device__ __forceinline__ Mbarrier* full(int warpgroup, int stage) {
        return kOperand == Multicast::a ? &a_full[stage] : &b_full[warpgroup][stage];
    }
    template <Multicast kOperand> __device__ __forceinline__ Mbarrier* empty(int warpgroup, int stage) {
        return kOperand == Multicast::a ? &a_empty[stage] : &b_empty[warpgroup][stage];
    }
    __device__ void init_barriers() {
        init_ring(a_full, a_empty, kConsumerWarps * kClusterCtas);
        for (int w = 0; w < kConsumerWarpgroups; ++w)
            init_ring(b_full[w], b_empty[w], kConsumerWarps / kConsumerWarpgroups * kClusterCtas);
        init_ring(tile_full, tile_empty, kConsumerThreads + kConsumerWarpgroups);
        for (Mbarrier& full : d_full) mbarrier_init(&full, 1);
        init_ring(queue.full, queue.empty, kClusterCtas);
    }
};

// ---- producers
//
// Tensor maps of the operands of each set, and of D.
template <int kSets> struct WgradMaps {
    CUtensorMap a[kSets], b[kSets], d;
    OperandSets<kSets> sets;
};

// Where the operand of a step is loaded from.
struct StepSource {
    const CUtensorMap* map;
    const float* scales;
    int32_t k;
};
// Where in the pipeline it goes.
struct StageOf {
    int warpgroup, index;  // warpgroup: of B
};

template <class Policy> struct WgradProducer {
    const GemmProblem& p;
    WgradStorage<Policy>& shared;
    const WgradMaps<Policy::kSets>& maps;

    // One thread: all stages of A, and the tile ring; of groups with rows only.
    __device__ __forceinline__ void produce_a() const {
        WgradScheduler<Policy> scheduler(p, static_cast<int>(cluster_rank()), &maps.sets);
        PairReader pairs(p.queue, shared.queue);
        RingPosition<Policy::kStagesA> stage;
        RingPosition<kTileSlots> ring;
        RingPosition<kGroupSlots> sets;
        int filled = -1, steps = 0;
        for (;;) {
            WgradTile tile{};
            tile.past_end = !scheduler.find(pairs.next(), tile);
            if (!tile.past_end && scheduler.is_empty()) continue;
            mbarrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
            if (!tile.past_end && static_cast<int>(tile.group) != filled) {
                sets.advance();
                steps = shared.sets[sets.index].template fill<Policy::kStageK>(p, maps.sets, tile.group);
                filled = static_cast<int>(tile.group);
            }
            tile.sets = sets.index;
            tile.steps = steps;
            shared.tiles[ring.index] = tile;
            mbarrier_arrive(&shared.tile_full[ring.index]);
            if (tile.past_end) return;
            ring.advance();
            load_tile<Multicast::a>(tile, 0, stage);
        }
    }
    // One thread: all stages of B of a consumer warpgroup.
    __device__ __forceinline__ void produce_b(int warpgroup) const {
        RingPosition<Policy::kStagesB> stage;
        for (RingPosition<kTileSlots> ring;; ring.advance()) {
            WgradTile tile;
            take_tile(shared, ring, tile);
            if (tile.past_end) return;
            load_tile<Multicast::b>(tile, warpgroup, stage);
        }
    }

private:
    template <Multicast kOperand, class Position>
    __device__ __forceinline__ void load_tile(const WgradTile& tile, int warpgroup, Position& stage) const {
        constexpr bool kA = kOperand == Multicast::a;
        const int64_t output = kA ? tile.a_output : tile.b_output + warpgroup * kWarpgroupCols;
        const int steps = Policy::steps(tile);
#pragma unroll 1
        for (int set = 0, step = 0; step < steps; ++set) {
            const auto& of = shared.sets[tile.sets].of[set];
            const int end = min(of.end, steps);
            StepSource from{kA ? &maps.a[set] : &maps.b[set],
                            (kA ? of.scales_a : of.scales_b) + step * block_stride<kOperand>(),
                            (kA ? of.a_k : of.b_k) + step * Policy::kStageK};
#pragma unroll 1
            for (; step < end; ++step) {
                Mbarrier* full = shared.template full<kOperand>(warpgroup, stage.index);
                mbarrier_wait(shared.template empty<kOperand>(warpgroup, stage.index),
                              stage.parity ^ 1);  // consumers of both CTAs
                mbarrier_arrive_expect_tx(full, Policy::template kLoadBytes<kOperand>);
                Policy::load(load_of(tile.multicast, kOperand), from, output, full,
                             shared.template data<kOperand>(warpgroup, stage.index));
                Policy::template load_scales<kOperand>(p, from, output, full, shared.scales,
                                                       {warpgroup, stage.index});
                from.scales += block_stride<kOperand>();
                from.k += Policy::kStageK;
                stage.advance();
            }
        }
    }
    template <Multicast kOperand> __device__ __forceinline__ int64_t block_stride() const {
        return (kOperand == Multicast::a ? p.a : p.b).scale.block_stride;
    }
};

// ---- consumers
//
// A consumer warp's side of the pipeline. a, b: descriptors of the current stage, advanced during wgmma.
template <class Policy> class ConsumerStages {
public:
    uint64_t a, b;

    __device__ __forceinline__ ConsumerStages(WgradStorage<Policy>& shared, int warpgroup)
        : a(Policy::descriptor(shared.a[0])),
          b(Policy::descriptor(shared.b[warpgroup][0])),
          shared_(shared),
          warpgroup_(warpgroup),
          other_a_(cluster_address(shared.a_empty, cluster_rank() ^ 1)),
          other_b_(cluster_address(shared.b_empty[warpgroup], cluster_rank() ^ 1)) {}

    __device__ __forceinline__ int index_a() const { return at_a_.index; }
    __device__ __forceinline__ int index_b() const { return at_b_.index; }

    __device__ __forceinline__ void wait() const {
        mbarrier_wait(&shared_.a_full[at_a_.index], at_a_.parity);
        mbarrier_wait(&shared_.b_full[warpgroup_][at_b_.index], at_b_.parity);
    }
    __device__ __forceinline__ void next() {
        constexpr int kBytes = static_cast<int>(Policy::kOperandStageBytes);
        at_a_.advance();
        at_b_.advance();
        a = advance_descriptor(a, kBytes * (at_a_.index == 0 ? 1 - Policy::kStagesA : 1));
        b = advance_descriptor(b, kBytes * (at_b_.index == 0 ? 1 - Policy::kStagesB : 1));
    }
    // Releases the stage before the current one, to the producers of both CTAs, once all lanes are done with
    // it.
    __device__ __forceinline__ void release_previous() const {
        __syncwarp();
        const int last_a = (at_a_.index == 0 ? Policy::kStagesA : at_a_.index) - 1,
                  last_b = (at_b_.index == 0 ? Policy::kStagesB : at_b_.index) - 1;
        const int lane = static_cast<int>(threadIdx.x % kWarpSize);
        if (lane == 0) {
            mbarrier_arrive(&shared_.a_empty[last_a]);
            mbarrier_arrive(&shared_.b_empty[warpgroup_][last_b]);
        }
        if (lane == 1) {
            mbarrier_arrive_remote(other_a_ + last_a * sizeof(Mbarrier));
            mbarrier_arrive_remote(other_b_ + last_b * sizeof(Mbarrier));
        }
    }

private:
    WgradStorage<Policy>& shared_;
    const int warpgroup_;
    const uint32_t other_a_, other_b_;  // barriers `empty` of the other CTA
    RingPosition<Policy::kStagesA> at_a_{};
    RingPosition<Policy::kStagesB> at_b_{};
};

// A consumer warp's index, and its part of block 0 of a tile.
__device__ __forceinline__ int consumer_warp() {
    return warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize) - kWarpgroup / kWarpSize;
}
__device__ __forceinline__ BlockOrigin first_block(const WorkTile& tile, int warpgroup, int warp) {
    return {static_cast<int>(tile.b_output) + warpgroup * kWarpgroupCols,
            static_cast<int>(tile.a_output) + warp % 4 * kWarpRows, static_cast<int>(tile.group)};
}

// ---- the CTA
//
// consume<kMode>(shared, warpgroup): one consumer warpgroup, all tiles.
template <class Policy, Squares kSquares, class Consume>
__device__ __forceinline__ void run_wgrad_roles(const GemmProblem& p, const WgradMaps<Policy::kSets>& maps,
                                                Consume consume) {
    using Shared = WgradStorage<Policy>;
    Shared& shared = prepare_shared<Shared>([](Shared& s) { s.init_barriers(); });
    const int role = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    if (role == 0) {
        release_registers<kProducerRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
        if (warp > kConsumerWarpgroups) {
            // with a queue this warp of CTA 0 fills it, and that of CTA 1 clears the tiles of both
            const int rank = static_cast<int>(cluster_rank());
            if (threadIdx.x == kQueueThread) fill_queue<WgradScheduler<Policy>>(p, shared.queue, &maps.sets);
            if (p.mode == Gradient::accumulate || (p.queue != nullptr && rank == 0)) return;
            for (int of = p.queue != nullptr ? 0 : rank; of <= rank; ++of)
                clear_tiles<Policy, kSquares>(p, of, maps.sets);
            return;
        }
        if (threadIdx.x % kWarpSize != 0) return;
        const WgradProducer<Policy> producer{p, shared, maps};
        if (warp == 0)
            producer.produce_a();
        else
            producer.produce_b(warp - 1);
        cluster_sync_unaligned();
    } else {
        acquire_registers<kConsumerRegisters>();
        if (p.mode == Gradient::accumulate)
            consume.template operator()<Gradient::accumulate>(shared, role - 1);
        else
            consume.template operator()<Gradient::overwrite>(shared, role - 1);
        cluster_sync();  // no CTA exits while the other may still write to it
    }
}

template <int kSets>
WgradMaps<kSets> wgrad_maps(const GemmProblem& p, const std::vector<StoredSet>& stored, int box_rows) {
    WgradMaps<kSets> maps{.d =
                              tensor_map_of_groups(p.d, p.d_dtype, p.groups.num_groups, p.m, p.n, kWarpRows)};
    for (const auto& [set, a, b] : stored) {
        const int i = maps.sets.num++;
        maps.a[i] = operand_map(set.a, a, box_rows);
        maps.b[i] = operand_map(set.b, b, box_rows);
        maps.sets.sets[i] = {set.groups, set.a.row_base, set.b.row_base,
                             static_cast<const float*>(set.a.scale.scales),
                             static_cast<const float*>(set.b.scale.scales)};
    }
    return maps;
}

// Launches kernel_of<kOutput, kSquares>(), a kernel of the problem and its maps.
template <class Policy, class KernelOf>
void launch_wgrad(const GemmProblem& p, const Launch& how, const WgradMaps<Policy::kSets>& maps,
                  KernelOf kernel_of) {
    const auto run = [&]<Squares kSquares>() {
        const auto kernel = p.d_dtype == DType::bf16 ? kernel_of.template operator()<DType::bf16, kSquares>()
                                                     : kernel_of.template operator()<DType::f32, kSquares>();
        launch_persistent<WgradStorage<Policy>>(kernel, p, how, maps);
    };
    p.squares != nullptr ? run.template operator()<Squares::sum>() : run.template operator()<Squares::none>();
}

}  // namespace fp8flow::hopper::gemm
