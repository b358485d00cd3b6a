// SPDX-License-Identifier: MIT
// RMSNorm forward of a row in registers: its sum and its outputs. For the kernel that loads rows to registers
// (held_rows.cu) and the one that prefetches several rows to shared memory (norm_rows.cu). Contract:
// kernels/ops/norm.h.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/norm/norm_rows.h"

namespace fp8flow::hopper::norm {

// The outputs of the kernel.
// values  y of the type of x
// blocks  E4M3 with a power-of-two scale every 128 columns of a width that is a multiple of 128, and perhaps
//         y
// tensor  E4M3 with one scale, and perhaps y and the maximum
// any     whatever NormForward can ask for, decided unit by unit
// odd     the same as any, for rows that are loaded element by element
// With an FP8 output, y is BF16.
enum class NormForm { values, blocks, tensor, any, odd };
inline NormForm form_of(const NormForward& args) {
    if (args.fp8.data == nullptr)
        return args.y.data != nullptr && args.y.dtype == args.x.dtype && args.amax == nullptr
                   ? NormForm::values
                   : NormForm::any;
    if (args.fp8.dtype != DType::e4m3 || !args.fp8.vector) return NormForm::any;
    if (args.scales.data == nullptr) return NormForm::tensor;
    const bool whole_blocks = args.scales.block == kBlock && args.x.cols % kBlock == 0;
    return whole_blocks && args.amax == nullptr && args.rule.scale_format == ScaleFormat::pow2
               ? NormForm::blocks
               : NormForm::any;
}
constexpr bool is_any(NormForm form) { return form == NormForm::any || form == NormForm::odd; }
// Whether units of x, gamma and y are whole and aligned.
inline bool has_whole_units(const NormForward& args, NormForm form) {
    const DType y_type = form == NormForm::values ? args.x.dtype : DType::bf16;
    return args.x.vector && args.gamma.vector &&
           (args.y.data == nullptr || (args.y.vector && args.y.dtype == y_type));
}

template <DType kType> __device__ __forceinline__ float add_squares(const uint4& raw, float strand) {
    float v[kUnit];
    unpack_unit(raw, kType, v);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) strand = fma_float(v[i], v[i], strand);
    return strand;
}
// The sums of groups of 32 neighbouring strands of a segment that kTeam warps share. A thread has a strand of
// every kTeam * 32, 8 / kTeam in all. In each of the first steps a lane sends half of its strands and keeps
// the partners of the other half, so that six shuffles do what would take ten, and ten what would take forty.
// A lane ends with one of the eight sums: number sum_of_lane().
template <DType kType, int kTeam, int kUnits>
__device__ __forceinline__ float sum_of_neighbours(const uint4 (&raw)[kUnits], int lane) {
    constexpr int kStrands = kNormWarps / kTeam;
    float sums[kStrands];
#pragma unroll
    for (int s = 0; s < kStrands; ++s) {
        sums[s] = 0.0f;
#pragma unroll
        for (int j = s; j < kUnits; j += kStrands) sums[s] = add_squares<kType>(raw[j], sums[s]);
    }
    int step = 16;
#pragma unroll
    for (int half = kStrands / 2; half > 0; half /= 2, step /= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? sums[half + i] : sums[i], given = upper ? sums[i] : sums[half + i];
            sums[i] = kept + __shfl_xor_sync(kFullMask, given, step);
        }
    }
#pragma unroll
    for (int rest = 16 / kStrands; rest > 0; rest /= 2) sums[0] += __shfl_xor_sync(kFullMask, sums[0], rest);
    return sums[0];
}
// The number of that sum; `warp`: index of the warp in the team.
template <int kTeam> __device__ __forceinline__ int sum_of_lane(int warp, int lane) {
    return warp + lane / (4 * kTeam) * kTeam;
}
__device__ __forceinline__ float rstd_of(float sum, const NormForward& args) {
    return div_float(1.0f, sqrt_float(div_float(sum, static_cast<float>(args.x.cols)) + args.eps));
}

// The largest magnitudes of the even and of the odd columns of a unit, with any sign. NaN is ignored.
__device__ __forceinline__ uint32_t largest_pair(const uint4& unit) {
    return max_abs_bf16x2(max_abs_bf16x2(unit.x, unit.y), max_abs_bf16x2(unit.z, unit.w));
}
// FP8 values of BF16 pairs that are multiplied by a power of two as BF16: exact, except where the result is
// below the normal numbers of BF16, which encode to 0.
__device__ __forceinline__ uint2 encode_pairs(const uint4& unit, uint32_t multiplier) {
    const uint4 scaled = {mul_bf16x2(unit.x, multiplier), mul_bf16x2(unit.y, multiplier),
                          mul_bf16x2(unit.z, multiplier), mul_bf16x2(unit.w, multiplier)};
    float v[kUnit];
    unpack_unit(scaled, DType::bf16, v);
    return {pack_fp8(v[0], v[1], v[2], v[3], DType::e4m3), pack_fp8(v[4], v[5], v[6], v[7], DType::e4m3)};
}

// FP8 values and scales of BF16 units, 16 threads per block. The maxima of two units share a word, and in the
// first steps a thread sends half of its words, as in sum_of_neighbours. Each thread computes the scale of
// one unit of its block and broadcasts it; values are encoded from BF16 pairs.
template <int kUnits, int kStride>
__device__ __forceinline__ void write_blocks(const NormForward& args, int64_t row, const RowPart& part,
                                             int thread, const uint4 (&units)[kUnits], uint2* fp8) {
    constexpr int kWords = kUnits / 2;
    static_assert(kUnits == 2 * kWords && kWords <= kBlockThreads / 2);
    uint32_t words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        const uint32_t a = largest_pair(units[2 * w]), b = largest_pair(units[2 * w + 1]);
        words[w] = max_abs_bf16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
    const int lane = thread % kBlockThreads;
    int step = kBlockThreads / 2;
#pragma unroll
    for (int half = kWords / 2; half > 0; half /= 2, step /= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const uint32_t kept = upper ? words[half + i] : words[i],
                           given = upper ? words[i] : words[half + i];
            words[i] = max_abs_bf16x2(kept, __shfl_xor_sync(kFullMask, given, step));
        }
    }
#pragma unroll
    for (int rest = kBlockThreads / 2 / kWords; rest > 0; rest /= 2)
        words[0] = max_abs_bf16x2(words[0], __shfl_xor_sync(kFullMask, words[0], rest));
    // the upper bits of the lane select the word; the lane takes one of its two units
    constexpr int kLanesOfWord = kBlockThreads / kWords;
    const uint32_t pair = abs_bf16x2(words[0]), amax = lane % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u;
    const QuantScale mine = quant_scale(__uint_as_float(amax), kE4m3Max, ScaleFormat::pow2);
    const uint32_t multiplier = __float_as_uint(mine.multiplier), both = __byte_perm(multiplier, 0, 0x3232);
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const uint32_t of_unit = __shfl_sync(kFullMask, both, j / 2 * kLanesOfWord + j % 2, kBlockThreads);
        if (thread + j * kStride < part.units) fp8[j * kStride] = encode_pairs(units[j], of_unit);
    }
    const int unit = lane / kLanesOfWord * 2 + lane % 2,
              block = thread / kBlockThreads + unit * (kStride / kBlockThreads);
    if (lane % kLanesOfWord < 2 && block < part.units / kBlockThreads)
        args.scales.store(row, part.first / kBlock + block,
                          {mine.multiplier, mine.dequant, float_to_e8m0(mine.dequant)});
}

// All outputs of a row but rstd. gamma(unit, j, g) returns the effective weights of a unit inside the row,
// the j-th of the thread. All kStride threads of the part call it. `largest`: bits of the maximum.
template <NormForm kForm, DType kType, int kUnits, int kStride, class Gamma>
__device__ __forceinline__ void write_row(const NormForward& args, int64_t row, const RowPart& part,
                                          int thread, float rstd, float multiplier, const Gamma& gamma,
                                          uint4 (&raw)[kUnits], uint32_t& largest) {
    const int first_unit = part.first / kUnit;
    const int padded = (part.units + kBlockThreads - 1) / kBlockThreads * kBlockThreads;
    const int64_t first = row * args.x.cols + part.first + thread * kUnit;
    uint4* y = reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.y.data) + first);
    uint2* fp8 = reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.fp8.data) + first);
    const bool with_y = args.y.data != nullptr;
    float peaks[2] = {};
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = thread + j * kStride, inside = min(unit, part.units - 1);
        if (unit >= (is_any(kForm) ? padded : part.units)) continue;
        opaque(raw[j]);  // as floats these would take twice the registers
        float v[kUnit], g[kUnit];
        gamma(first_unit + inside, j, g);
        unpack_unit(raw[j], kType, v);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) v[i] = v[i] * rstd * g[i];
        if constexpr (kForm == NormForm::values) {
            y[j * kStride] = pack_unit<kType>(v);
        } else if constexpr (kForm == NormForm::tensor) {
            if (with_y) y[j * kStride] = pack_unit<DType::bf16>(v);
            fp8[j * kStride] = encode_unit(v, multiplier, DType::e4m3);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) peaks[i % 2] = fmaxf(peaks[i % 2], fabsf(v[i]));  // NaN ignored
        } else if constexpr (kForm == NormForm::blocks) {
            raw[j] = pack_unit<DType::bf16>(v);
            if (with_y) y[j * kStride] = raw[j];
        } else {
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[i] = unit < part.units ? v[i] : 0.0f;
            write_unit(args, row, (first_unit + unit) * kUnit, multiplier, v, largest);
        }
    }
    if constexpr (kForm == NormForm::blocks) write_blocks<kUnits, kStride>(args, row, part, thread, raw, fp8);
    if constexpr (kForm == NormForm::tensor)
        largest = max(largest, __float_as_uint(fmaxf(peaks[0], peaks[1])));
}

// As merge_amax, for kernels of many CTAs: no atomic is issued where the global word is known to be as large.
// `seen`: its value as read by thread 0 at the start.
__device__ __forceinline__ void merge_amax_above(const NormForward& args, uint32_t amax, int32_t seen,
                                                 uint32_t* largest) {
    if (args.amax == nullptr) return;
    amax = __reduce_max_sync(kFullMask, amax);
    __syncthreads();  // *largest is 0
    if (threadIdx.x % 32 == 0) atomicMax(largest, amax);
    __syncthreads();
    if (threadIdx.x == 0 && static_cast<int32_t>(*largest) > seen)
        atomicMax(args.amax, static_cast<int32_t>(*largest));
}

// False where these rows need another kernel: nothing is launched.
bool launch_norm_held_rows(const NormForward& args, const Launch& launch);

}  // namespace fp8flow::hopper::norm
