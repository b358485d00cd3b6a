// SPDX-License-Identifier: MIT
// Columns of a swizzled tile of BF16 rows in shared memory: their maxima, and 16 rows of a column as codes.
// For the kernels that keep tiles on chip until a column's scale is known (group_columns.cu,
// column_tiles.cu).
#pragma once

#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"

namespace fp8flow::hopper {

constexpr int kWidestTile = 3;  // rows of 1 << 3 units: 128 bytes

// The place of a warp that takes every kTurn-th slot of a ring, and which pass of the ring it is in.
template <int kSlots, int kTurn> struct RingTurn {
    int index;
    uint32_t parity = 0;
    __device__ explicit RingTurn(int first) : index(first) {}
    __device__ void advance() {
        index += kTurn;
        if (index >= kSlots) {
            index -= kSlots;
            parity ^= 1;
        }
    }
    // The task of the tile in the slot, as soon as its rows are there.
    template <class Shared> __device__ auto landed(Shared& shared) const {
        mbarrier_wait(&shared.full[index], parity);
        return shared.tasks[index];
    }
};

// Where 16 bytes of a row stand in a tile whose rows have 1 << shift units: TMA changes the
// places of 128 bytes' units by the row.
__device__ __forceinline__ int unit_place(int row, int unit, int shift) {
    return (row << (4 + shift)) + ((unit ^ (row >> (kWidestTile - shift) & ((1 << shift) - 1))) << 4);
}

// Largest magnitudes so far of the columns of a unit: with any sign, for maxima_over_lanes(); or without
// signs.
__device__ __forceinline__ void take_maxima(uint32_t (&largest)[4], const uint4& words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = max_abs_bf16x2(largest[i], word_of(words, i));
}
__device__ __forceinline__ void take_magnitudes(uint32_t (&largest)[4], const uint4& words) {
    largest[0] = max_bf16x2(largest[0], abs_bf16x2(words.x));
    largest[1] = max_bf16x2(largest[1], abs_bf16x2(words.y));
    largest[2] = max_bf16x2(largest[2], abs_bf16x2(words.z));
    largest[3] = max_bf16x2(largest[3], abs_bf16x2(words.w));
}
// The maxima of all lanes for the four words of a unit, each in one of lanes 0, 2, 4 and 6: that of
// word_of_lane().
__device__ __forceinline__ uint32_t maxima_over_lanes(const uint32_t (&largest)[4], int lane) {
    const bool high = (lane & 2) != 0, odd = (lane & 4) != 0;
    uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        half[i] = max_abs_bf16x2(high ? largest[2 + i] : largest[i],
                                 __shfl_xor_sync(kFullMask, high ? largest[i] : largest[2 + i], 2));
    uint32_t pair =
        max_abs_bf16x2(odd ? half[1] : half[0], __shfl_xor_sync(kFullMask, odd ? half[0] : half[1], 4));
#pragma unroll
    for (const int step : {1, 8, 16}) pair = max_abs_bf16x2(pair, __shfl_xor_sync(kFullMask, pair, step));
    return abs_bf16x2(pair);
}
__device__ __forceinline__ bool has_word(int lane) { return lane < 8 && lane % 2 == 0; }
__device__ __forceinline__ int word_of_lane(int lane) { return (lane & 2) + lane / 4; }

// Eight neighbouring threads turn a piece of 16 rows each. Each reads its rows in an order of its own, row i
// ^ piece (and 8 behind) at step i, in other banks than those of the seven others, and puts the codes in
// order.
class PieceOrder {
public:
    __device__ explicit PieceOrder(int piece) : swaps_((piece & 4) != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) order_ |= static_cast<uint32_t>(i ^ (piece & 3)) << (4 * i);
    }
    // 16 rows of a column: those of the words' lower halves, or of the upper ones.
    template <DType kCodes, bool kUpper>
    __device__ __forceinline__ uint4 encode(const uint32_t (&words)[16], float multiplier) const {
        uint32_t codes[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint32_t word = words[4 * q + k];
                v[k] = __uint_as_float(kUpper ? word & 0xFFFF0000u : word << 16) * multiplier;
            }
            codes[q] = __byte_perm(pack_fp8(v[0], v[1], v[2], v[3], kCodes), 0, order_);
        }
        return swaps_ ? uint4{codes[1], codes[0], codes[3], codes[2]}
                      : uint4{codes[0], codes[1], codes[2], codes[3]};
    }

private:
    uint32_t order_ = 0;  // of four codes
    bool swaps_;
};

}  // namespace fp8flow::hopper
