// Pieces of BF16 rows on their way to a warp of peer_combine_sums.cu: a ring in shared memory that keeps loads under way while sums are made,
// from one piece, row and token to the next. A thread reads only what it has asked for, so nobody waits for anybody.
#pragma once

#include "kernels/hopper/device/async_copy.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/peer_group.h"

namespace fp8flow::hopper {

constexpr int kLaneUnits = 4;                        // 16-byte units of a lane in a piece
constexpr int kPieceUnits = kLaneUnits * kPeerWarp;  // a piece: 1024 columns of a row

// The fp32 sums of a lane's columns of a piece.
struct PieceSum {
    float of[kLaneUnits][kUnit] = {};

    __device__ __forceinline__ void add(int j, uint4 raw) {
        float values[kUnit];
        unpack_unit(raw, DType::bf16, values);
#pragma unroll
        for (int e = 0; e < kUnit; ++e) of[j][e] += values[e];
    }
    __device__ __forceinline__ uint4 rounded(int j) const {
        const float(&v)[kUnit] = of[j];
        return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
    }
};

// kWhole: the last piece of a row is no shorter than the others.
template <bool kWhole> class PieceRing {
public:
    static constexpr int kStages = 4;                                                  // pieces under way
    static constexpr int64_t kBytes = int64_t{kStages} * kPieceUnits * sizeof(uint4);  // of a warp

    __device__ PieceRing(uint4* memory, int units)
        : units_(units), lane_(static_cast<int>(threadIdx.x) % kPeerWarp), memory_(memory + lane_) {}

    // visit(j): the lane's j-th unit of a piece exists.
    template <class Visit> __device__ __forceinline__ void for_units(int piece, Visit visit) const {
        const int first = piece * kPieceUnits + lane_;
#pragma unroll
        for (int j = 0; j < kLaneUnits; ++j)
            if (kWhole || first + j * kPeerWarp < units_) visit(j);
    }
    __device__ __forceinline__ bool has_room() const { return under_way_ < kStages; }
    // `from`: the lane's first unit of the piece, number `piece` of its row.
    __device__ __forceinline__ void ask(const uint4* from, int piece) {
        uint4* to = memory_ + newest_ * kPieceUnits;
        for_units(piece, [&](int j) { copy_async_16(to + j * kPeerWarp, from + j * kPeerWarp); });
        copies_async_commit();
        newest_ = behind(newest_);
        ++under_way_;
    }
    // The oldest piece under way.
    __device__ __forceinline__ void take(int piece, PieceSum& sum) {
        if (under_way_ == kStages)
            copies_async_wait_but<kStages - 1>();
        else
            copies_async_wait_but<0>();
        const uint4* from = memory_ + oldest_ * kPieceUnits;
        oldest_ = behind(oldest_);
        --under_way_;
        uint4 raw[kLaneUnits] = {};
        for_units(piece, [&](int j) { raw[j] = from[j * kPeerWarp]; });
#pragma unroll
        for (int j = 0; j < kLaneUnits; ++j) sum.add(j, raw[j]);
    }

private:
    static __device__ __forceinline__ int behind(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }

    const int units_, lane_;
    uint4* const memory_;
    int newest_ = 0, oldest_ = 0, under_way_ = 0;
};

// Pieces of sums on their way out of shared memory to a peer, by the copy engine, which says when they are there: behind ordinary stores a fence
// would wait for all that its multiprocessor has stored, and on a busy wire that takes tens of microseconds.
template <bool kWhole> class PieceSender {
public:
    static constexpr int kSlots = 2;                                                  // pieces under way
    static constexpr int64_t kBytes = int64_t{kSlots} * kPieceUnits * sizeof(uint4);  // of a warp
    static constexpr int kNothing = -1;

    __device__ explicit PieceSender(uint4* memory)
        : memory_(memory), lane_(static_cast<int>(threadIdx.x) % kPeerWarp) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) notes_[i] = kNothing;
    }
    // A piece of `units` units to `to`. `note` says what is complete with it, or kNothing; count(note) is called, in lane 0, when it is there.
    template <class Count>
    __device__ __forceinline__ void send(uint4* to, const PieceSum& sum, int units, int note, Count count) {
        if (lane_ == 0) {
            copies_wait_but<kSlots - 1>();
            count_oldest(note, count);
        }
        __syncwarp();
        uint4* slot = memory_ + slot_ * kPieceUnits;
        slot_ = slot_ + 1 == kSlots ? 0 : slot_ + 1;
#pragma unroll
        for (int j = 0; j < kLaneUnits; ++j) slot[lane_ + j * kPeerWarp] = sum.rounded(j);
        fence_shared_for_engines();
        __syncwarp();
        if (lane_ != 0) return;
        bulk_store(to, slot, static_cast<uint32_t>((kWhole ? kPieceUnits : units) * sizeof(uint4)));
        copies_commit();
    }
    // Until everything is there.
    template <class Count> __device__ __forceinline__ void finish(Count count) {
        if (lane_ == 0) {
            copies_wait();
#pragma unroll
            for (int i = 0; i < kSlots; ++i) count_oldest(kNothing, count);
        }
        __syncwarp();
    }

private:
    template <class Count> __device__ __forceinline__ void count_oldest(int newest, Count count) {
        if (notes_[0] != kNothing) count(notes_[0]);
#pragma unroll
        for (int i = 0; i + 1 < kSlots; ++i) notes_[i] = notes_[i + 1];
        notes_[kSlots - 1] = newest;
    }
    uint4* const memory_;
    const int lane_;
    int slot_ = 0;
    int notes_[kSlots];  // in lane 0: of the pieces under way, the oldest first
};

}  // namespace fp8flow::hopper
