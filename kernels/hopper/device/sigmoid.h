// SPDX-License-Identifier: MIT
// The sigmoid of several columns on the device: the bits of sigmoid_float (scalar_math.h) in a third of its
// instructions where no argument is extreme; for BF16 arguments, a table in shared memory.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/hopper/device/gated_unit.h"
#include "kernels/hopper/device/mbarrier.h"

#include <type_traits>

namespace fp8flow::hopper {

// 1 / d rounded once for 2^-126 <= d < 2^126: the result of __frcp_rn in that range, without its range test.
__device__ __forceinline__ float reciprocal_near(float d) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}
// sigmoid_float(x) for |x| <= kNear: 16 instructions.
__device__ __forceinline__ float sigmoid_near(float x) { return reciprocal_near(1.0f + exp_near(-x)); }

// Rotates the array by one element. A loop that is not unrolled visits an array in registers this way, since
// registers have no run-time index; after kCount rotations all elements are in place again.
template <int kCount> __device__ __forceinline__ void rotate(float (&v)[kCount]) {
    const float first = v[0];
#pragma unroll
    for (int i = 0; i + 1 < kCount; ++i) v[i] = v[i + 1];
    v[kCount - 1] = first;
}

// NaN arguments: the result may be any number; every caller multiplies it by its argument.
template <int kCount>
__device__ __forceinline__ void sigmoids_of(const float (&x)[kCount], float (&sigmoid)[kCount]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(x[i]));
    if (largest <= kNear) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sigmoid[i] = sigmoid_near(x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sigmoid[i] = x[i];
#pragma unroll 1
        for (int i = 0; i < kCount; ++i) {
            sigmoid[0] = sigmoid_float(sigmoid[0]);
            rotate(sigmoid);
        }
    }
}

// Sigmoids that a unit takes of BF16 gates: both signs and the magnitudes of [2^-24, 128), one binade after
// the other; smaller magnitudes have the sigmoid of 2^-24 (1/2), larger ones that of 127.5 (0 or 1). A unit
// that scales gates (by up to op::GluForm::kMaxAlpha) needs one more binade below: 1.7 * 2^-24 is not 1/2.
// NaN: any number, as sigmoids_of. Negative numbers start at a power of two, so that the sign is a bit of the
// index. Five instructions per column and 3.5 bank passes of shared memory per warp, instead of 17
// instructions.
template <class Unit> struct SigmoidTable {
    static constexpr int kBinades = std::is_same_v<Unit, SwigluUnit> ? 31 : 32;
    static constexpr int kFirst = (134 - kBinades) << 7, kMagnitudes = kBinades << 7,
                         kNegative = 1 << 12;  // in bits of BF16
    float entries[kNegative + kMagnitudes];

    __device__ __forceinline__ void fill(const Unit& unit, int thread, int threads) {
#pragma unroll 1
        for (int i = thread; i < kNegative + kMagnitudes; i += threads) {
            const int magnitude = kFirst + i % kNegative, sign = i / kNegative;
            const float x =
                unit.argument(unit.gate(bits_float(static_cast<uint32_t>(sign << 15 | magnitude) << 16)));
            entries[i] = fabsf(x) <= kNear ? sigmoid_near(x) : sigmoid_float(x);
        }
    }
    // Two numbers of a word. Their byte offsets are computed together: max(0, min(magnitude - first, last)),
    // then the sign.
    __device__ __forceinline__ void of_pair(uint32_t word, float& low, float& high) const {
        static_assert(kMagnitudes <= kNegative);
        constexpr uint32_t kBoth = 0x10001u, kMinusFirst = 0x10000u - kFirst;
        const uint32_t places =
            __viaddmin_s16x2_relu(word & 0x7FFF7FFFu, kMinusFirst * kBoth, (kMagnitudes - 1) * kBoth) << 2 |
            (word >> 1 & 4 * kNegative * kBoth);
        low = at(places & 0xFFFFu);
        high = at(places >> 16);
    }
    // Eight numbers: one unit of 16 bytes.
    __device__ __forceinline__ void sigmoids(const uint4& words, float (&sigmoid)[8]) const {
        of_pair(words.x, sigmoid[0], sigmoid[1]);
        of_pair(words.y, sigmoid[2], sigmoid[3]);
        of_pair(words.z, sigmoid[4], sigmoid[5]);
        of_pair(words.w, sigmoid[6], sigmoid[7]);
    }

private:
    // By address in shared memory: the load then adds the table's own address.
    __device__ __forceinline__ float at(uint32_t bytes) const {
        float entry;
        asm("ld.shared.f32 %0, [%1];" : "=f"(entry) : "r"(shared_address(entries) + bytes));
        return entry;
    }
};

}  // namespace fp8flow::hopper
