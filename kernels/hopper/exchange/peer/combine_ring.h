// SPDX-License-Identifier: MIT
// The load pipeline of a warp of combine_sums.cu: a ring of stages in shared memory, each for a piece of a
// BF16 row (cp.async). Loads stay in flight while the warp adds, across pieces, rows and tokens. A thread
// reads only what it loaded itself, so the ring needs no barrier.
#pragma once

#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/exchange/peer/group.h"

#include <cuda_pipeline.h>

namespace fp8flow::hopper::peer {

constexpr int kLaneUnits = 4;                        // 16-byte units of a lane per piece
constexpr int kPieceUnits = kLaneUnits * kWarpSize;  // a piece: 1024 columns of a row

// FP32 sums of the columns of a piece that belong to one lane.
struct PieceSum {
    float value[kLaneUnits][kUnit] = {};

    __device__ __forceinline__ void add(int j, uint4 raw) {
        float values[kUnit];
        unpack_unit(raw, DType::bf16, values);
#pragma unroll
        for (int e = 0; e < kUnit; ++e) value[j][e] += values[e];
    }
    __device__ __forceinline__ uint4 rounded(int j) const { return pack_unit_bf16(value[j]); }
};

class PieceRing {
public:
    static constexpr int kStages = 4;                                                  // pieces in flight
    static constexpr int64_t kBytes = int64_t{kStages} * kPieceUnits * sizeof(uint4);  // per warp

    __device__ PieceRing(uint4* memory, int units)
        : units_(units), lane_(static_cast<int>(threadIdx.x) % kWarpSize), memory_(memory + lane_) {}

    // Calls visit(j, unit of the row) for each unit of the lane. The last piece of a row may be short.
    template <class Visit> __device__ __forceinline__ void for_units(int piece, Visit visit) const {
        const int first = piece * kPieceUnits + lane_;
#pragma unroll
        for (int j = 0; j < kLaneUnits; ++j)
            if (first + j * kWarpSize < units_) visit(j, first + j * kWarpSize);
    }
    __device__ __forceinline__ bool has_free_stage() const { return in_flight_ < kStages; }
    __device__ __forceinline__ bool is_empty() const { return in_flight_ == 0; }
    __device__ __forceinline__ void issue(const uint4* row, int piece) {
        uint4* to = memory_ + newest_ * kPieceUnits;
        for_units(piece, [&](int j, int at) {
            __pipeline_memcpy_async(to + j * kWarpSize, row + at, sizeof(uint4));
        });
        __pipeline_commit();
        newest_ = next_stage(newest_);
        ++in_flight_;
    }
    // Adds the oldest piece in flight, number `piece` of its row, to `sum`.
    __device__ __forceinline__ void consume(int piece, PieceSum& sum) {
        if (in_flight_ == kStages)
            __pipeline_wait_prior(kStages - 1);
        else
            __pipeline_wait_prior(0);
        const uint4* from = memory_ + oldest_ * kPieceUnits;
        oldest_ = next_stage(oldest_);
        --in_flight_;
        uint4 raw[kLaneUnits] = {};
        for_units(piece, [&](int j, int) { raw[j] = from[j * kWarpSize]; });
#pragma unroll
        for (int j = 0; j < kLaneUnits; ++j) sum.add(j, raw[j]);
    }

private:
    static __device__ __forceinline__ int next_stage(int stage) {
        return stage + 1 == kStages ? 0 : stage + 1;
    }

    const int units_, lane_;
    uint4* const memory_;
    int newest_ = 0, oldest_ = 0, in_flight_ = 0;
};

}  // namespace fp8flow::hopper::peer
