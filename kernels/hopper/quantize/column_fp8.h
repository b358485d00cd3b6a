// SPDX-License-Identifier: MIT
// Helpers of the kernels that keep BF16 tiles in shared memory until the scale of a column is known
// (group_columns.cu, small_groups.cu, column_tiles.cu): column maxima of a swizzled tile, and encoding of 16
// rows of a column. README.md defines unit, piece, tile and column block.
#pragma once

#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/warp.h"

namespace fp8flow::hopper::quantize {

constexpr int kWidestShift = 3;  // a row of 1 << 3 units: 128 bytes
// The first tile of a group begins at a multiple of 32 rows of the output, so that stores are whole sectors.
constexpr int kSectorRows = 32;

// Position of a warp that takes every kStep-th slot of a ring of kSlots slots, and the phase parity of the
// slot.
template <int kSlots, int kStep> struct SlotCursor {
    int index;
    uint32_t parity = 0;
    __device__ explicit SlotCursor(int first) : index(first) {}
    __device__ void advance() {
        index += kStep;
        if (index >= kSlots) {
            index -= kSlots;
            parity ^= 1;
        }
    }
    // Waits until TMA has written the tile in the slot. Returns its task.
    template <class Shared> __device__ auto wait_full(Shared& shared) const {
        mbarrier_wait(&shared.full[index], parity);
        return shared.tasks[index];
    }
};

// Byte offset of a unit in a tile with rows of 1 << shift units, as TMA swizzles it: the units within 128
// bytes are permuted by the row.
__device__ __forceinline__ int unit_offset(int row, int unit, int shift) {
    return (row << (4 + shift)) + ((unit ^ (row >> (kWidestShift - shift) & ((1 << shift) - 1))) << 4);
}

// Running maxima of the columns of a unit. update_maxima keeps signs, for reduce_maxima(); update_magnitudes
// stores magnitudes.
__device__ __forceinline__ void update_maxima(uint32_t (&largest)[4], const uint4& words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = max_abs_bf16x2(largest[i], word_of(words, i));
}
__device__ __forceinline__ void update_magnitudes(uint32_t (&largest)[4], const uint4& words) {
    largest[0] = max_bf16x2(largest[0], abs_bf16x2(words.x));
    largest[1] = max_bf16x2(largest[1], abs_bf16x2(words.y));
    largest[2] = max_bf16x2(largest[2], abs_bf16x2(words.z));
    largest[3] = max_bf16x2(largest[3], abs_bf16x2(words.w));
}
// The maxima over all lanes of the four words of a unit. Lanes 0, 2, 4 and 6 return one word each
// (word_of_lane).
__device__ __forceinline__ uint32_t reduce_maxima(const uint32_t (&largest)[4], int lane) {
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
__device__ __forceinline__ bool holds_word(int lane) { return lane < 8 && lane % 2 == 0; }
__device__ __forceinline__ int word_of_lane(int lane) { return (lane & 2) + lane / 4; }

// Eight neighbouring threads transpose a piece of 16 rows each. At step i a thread reads row i ^ piece (and
// the row 8 further), so that the eight touch different banks; encode() restores the order of the rows.
class PieceEncoder {
public:
    __device__ explicit PieceEncoder(int piece) : swaps_((piece & 4) != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) order_ |= static_cast<uint32_t>(i ^ (piece & 3)) << (4 * i);
    }
    // 16 rows of a column: the lower halves of the words, or the upper ones.
    template <DType kFp8, bool kUpper>
    __device__ __forceinline__ uint4 encode(const uint32_t (&words)[16], float multiplier) const {
        uint32_t fp8[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint32_t word = words[4 * q + k];
                v[k] = __uint_as_float(kUpper ? word & 0xFFFF0000u : word << 16) * multiplier;
            }
            fp8[q] = __byte_perm(pack_fp8(v[0], v[1], v[2], v[3], kFp8), 0, order_);
        }
        return swaps_ ? uint4{fp8[1], fp8[0], fp8[3], fp8[2]} : uint4{fp8[0], fp8[1], fp8[2], fp8[3]};
    }

private:
    uint32_t order_ = 0;  // byte permutation of four FP8 values
    bool swaps_;
};

}  // namespace fp8flow::hopper::quantize
