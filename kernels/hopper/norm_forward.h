// A row of RMSNorm's forward in registers: its sum, and what it becomes. For the kernel that takes rows one by one
// (norm_held_rows.cu) and the one that has several on their way (norm_rows.cu). Contract: kernels/ops/norm.h.
#pragma once

#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/norm_rows.h"

namespace fp8flow::hopper {

// What the rows become. values: y of the same type. blocks: E4M3 with a power-of-two scale every 128 columns, which are all there, and perhaps y; tensor: E4M3
// by one scale, perhaps y and the maximum; any: whatever NormForward can ask for, decided unit by unit. Where there are codes, y is BF16.
// odd: the same as any, of rows that are fetched element by element.
enum class NormForm { values, blocks, tensor, any, odd };
inline NormForm form_of(const NormForward& args) {
    if (args.codes.data == nullptr)
        return args.y.data != nullptr && args.y.dtype == args.x.dtype && args.amax == nullptr
                   ? NormForm::values
                   : NormForm::any;
    if (args.codes.dtype != DType::e4m3 || !args.codes.vector) return NormForm::any;
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
// The strand of a thread of 256 with this row.
template <DType kType, int kUnits> __device__ __forceinline__ float strand_of(const uint4 (&raw)[kUnits]) {
    float strand = 0.0f;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) strand = add_squares<kType>(raw[j], strand);
    return strand;
}
// The sum over a row that a warp has alone, a unit a strand: lane l has strand l of every 32 neighbours. In each of the first three steps a lane
// gives half of its sums away and takes the other half's partners, so that ten shuffles do what would be forty.
template <DType kType, int kUnits>
__device__ __forceinline__ float sum_over_warp(const uint4 (&raw)[kUnits], int lane) {
    static_assert(kUnits <= kNormWarps);
    constexpr uint32_t kAll = 0xFFFFFFFFu;
    float sums[kNormWarps];
#pragma unroll
    for (int j = 0; j < kNormWarps; ++j)
        sums[j] = j < kUnits ? add_squares<kType>(raw[j < kUnits ? j : 0], 0.0f) : 0.0f;
#pragma unroll
    for (int half = kNormWarps / 2, step = 16; half > 0; half /= 2, step /= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? sums[half + i] : sums[i], given = upper ? sums[i] : sums[half + i];
            sums[i] = kept + __shfl_xor_sync(kAll, given, step);
        }
    }
    float sum = sums[0];  // of the 32 neighbours that the lane's upper three bits name
#pragma unroll
    for (const int step : {2, 1, 16, 8, 4}) sum += __shfl_xor_sync(kAll, sum, step);
    return sum;
}
__device__ __forceinline__ float rstd_of(float sum, const NormForward& args) {
    return div_float(1.0f, sqrt_float(div_float(sum, static_cast<float>(args.x.cols)) + args.eps));
}

// The largest magnitudes of a unit, of its even and of its odd columns. NaN gives way to a number.
__device__ __forceinline__ uint32_t largest_pair(const uint4& unit) {
    return max_bf16x2(max_bf16x2(abs_bf16x2(unit.x), abs_bf16x2(unit.y)),
                      max_bf16x2(abs_bf16x2(unit.z), abs_bf16x2(unit.w)));
}

// Codes and scales of BF16 units, 16 threads a block. The maxima of two units travel together, a thread makes the scale of one unit of its block
// for all, and the codes are made from pairs.
template <int kUnits, int kStride>
__device__ __forceinline__ void write_blocks(const NormForward& args, int64_t row, const RowPart& part,
                                             int thread, const uint4 (&units)[kUnits], uint2* codes) {
    constexpr uint32_t kAll = 0xFFFFFFFFu;
    constexpr int kPairs = (kUnits + 1) / 2;
    uint32_t pairs[kPairs];
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        const uint32_t a = largest_pair(units[2 * p]),
                       b = 2 * p + 1 < kUnits ? largest_pair(units[2 * p + 1 < kUnits ? 2 * p + 1 : 0]) : a;
        pairs[p] = max_bf16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
#pragma unroll
    for (int step = kBlockThreads / 2; step > 0; step /= 2)
#pragma unroll
        for (int p = 0; p < kPairs; ++p)
            pairs[p] = max_bf16x2(pairs[p], __shfl_xor_sync(kAll, pairs[p], step));
    const int lane = thread % kBlockThreads;
    uint32_t pair = pairs[0];
#pragma unroll
    for (int p = 1; p < kPairs; ++p)
        if (lane / 2 == p) pair = pairs[p];
    const uint32_t amax = lane % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u;
    const QuantScale mine =
        quant_scale(__uint_as_float(amax), kE4m3Max, ScaleFormat::pow2);  // of unit `lane`
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const float multiplier = __shfl_sync(kAll, mine.multiplier, j, kBlockThreads);
        const int unit = thread + j * kStride;
        if (unit >= part.units) continue;
        float v[kUnit];
        unpack_unit(units[j], DType::bf16, v);
        codes[unit] = encode_unit(v, multiplier, DType::e4m3);
    }
    const int block = thread / kBlockThreads + lane * (kStride / kBlockThreads);
    if (lane < kUnits && block < part.units / kBlockThreads)
        args.scales.store(row, part.first / kBlock + block,
                          {mine.multiplier, mine.dequant, float_to_e8m0(mine.dequant)});
}

// All outputs of a row but rstd. `codes`: where those of the part's first unit go (not with `any`, which knows itself); gamma(unit, g)
// gives the effective weights of a unit of the row, which is there. All threads of the row call it. `largest`: bits.
template <NormForm kForm, DType kType, int kUnits, int kStride, class Gamma>
__device__ __forceinline__ void write_row(const NormForward& args, int64_t row, const RowPart& part,
                                          int thread, float rstd, float multiplier, const Gamma& gamma,
                                          uint2* codes, uint4 (&raw)[kUnits], uint32_t& largest) {
    const int first_unit = part.first / kUnit;
    const int padded = (part.units + kBlockThreads - 1) / kBlockThreads * kBlockThreads;
    float peak = 0.0f;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = thread + j * kStride, there = min(unit, part.units - 1);
        if (is_any(kForm) ? unit >= padded : kForm != NormForm::blocks && unit >= part.units) continue;
        float v[kUnit], g[kUnit];
        gamma(first_unit + there, j, g);
        unpack_unit(raw[j], kType, v);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) v[i] = v[i] * rstd * g[i];
        if constexpr (kForm == NormForm::values) {
            __stcs(unit_of(args.y, row, first_unit + unit), pack_unit<kType>(v));
        } else if constexpr (kForm == NormForm::tensor) {
            if (args.y) *unit_of(args.y, row, first_unit + unit) = pack_unit<DType::bf16>(v);
            codes[unit] = encode_unit(v, multiplier, DType::e4m3);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) peak = fmaxf(peak, fabsf(v[i]));  // NaN ignored
        } else if constexpr (kForm == NormForm::blocks) {
            raw[j] = pack_unit<DType::bf16>(v);
            if (args.y && unit < part.units) *unit_of(args.y, row, first_unit + unit) = raw[j];
        } else {
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[i] = unit < part.units ? v[i] : 0.0f;
            write_unit(args, row, (first_unit + unit) * kUnit, multiplier, v, largest);
        }
    }
    if constexpr (kForm == NormForm::blocks)
        write_blocks<kUnits, kStride>(args, row, part, thread, raw, codes);
    if constexpr (kForm == NormForm::tensor) largest = max(largest, __float_as_uint(peak));
}

// As merge_amax, for kernels of many CTAs: nothing is sent where the word outside is known to hold as much. `seen`: what it held, of thread 0.
__device__ __forceinline__ void merge_amax_above(const NormForward& args, uint32_t amax, int32_t seen,
                                                 uint32_t* largest) {
    if (args.amax == nullptr) return;
    amax = __reduce_max_sync(0xFFFFFFFFu, amax);
    __syncthreads();  // *largest is 0
    if (threadIdx.x % 32 == 0) atomicMax(largest, amax);
    __syncthreads();
    if (threadIdx.x == 0 && static_cast<int32_t>(*largest) > seen)
        atomicMax(args.amax, static_cast<int32_t>(*largest));
}

// False: these rows need the other kernels.
bool launch_norm_held_rows(const NormForward& args, const Launch& launch);

}  // namespace fp8flow::hopper
