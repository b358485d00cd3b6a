// What RMSNorm's kernels share: arguments, the order of a sum over a row, and the launchers of the kernels for wide BF16 rows.
#pragma once

#include "kernels/hopper/device/scales.h"
#include "kernels/ops/norm.h"

namespace fp8flow::hopper {

struct NormForward {
    RowView x, gamma, y;  // y optional
    int64_t rows;
    float eps, gamma_offset;
    float* rstd;
    RowView codes;              // optional
    RowScales scales;           // data == nullptr: per-tensor codes
    const float* tensor_scale;  // of per-tensor codes
    uint32_t* amax;             // optional
    QuantizeRule rule;
};

struct NormBackward {
    RowView dy, x, gamma, dresidual, dx;  // dresidual optional
    int64_t rows;
    float gamma_offset;
    const float* rstd;
    int64_t chunk_rows, chunks;  // of dgamma
    float* partials;             // [chunks, H]
};

__device__ __forceinline__ void load_gamma(const RowView& gamma, float offset, int col, float (&g)[kUnit]) {
    load_unit(gamma, 0, col, g);
    if (offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = offset + g[i];
}

// The sum over a row: thread t holds strand t (units t, t + 256, ...). A barrier stands between the two functions; every thread gets the sum.
// `warp_sums` are eight words, 0 where the CTA has no such warp.
__device__ __forceinline__ void put_strand(float strand, float* warp_sums) {
    for (int step = 16; step > 0; step /= 2) strand += __shfl_xor_sync(0xFFFFFFFFu, strand, step);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = strand;
}
__device__ __forceinline__ float row_sum(const float* warp_sums) {
    return combine_lanes(warp_sums[threadIdx.x % 8], 0xFFFFFFFFu);
}

// One unit of the output: values before rounding (0 past the row's end) to y, codes, scales and the maximum.
__device__ __forceinline__ void write_unit(const NormForward& args, int64_t row, int col, float multiplier,
                                           float (&v)[kUnit], uint32_t& amax) {
    const int width = args.x.cols;
    if (args.amax != nullptr) amax = max(amax, unit_magnitude(v));
    if (args.y && col < width) store_unit(args.y, row, col, v);
    if (!args.codes) return;
    if (args.scales.data == nullptr) {
        if (col < width) store_codes(args.codes, row, col, encode_unit(v, multiplier, args.codes.dtype));
        return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {  // to BF16 and back
        const uint32_t pair = pack_bf16(v[i], v[i + 1]);
        v[i] = __uint_as_float(pair << 16);
        v[i + 1] = __uint_as_float(pair & 0xFFFF0000u);
    }
    quantize_unit(v, true, args.codes, args.scales, row, col, args.rule);
}
__device__ __forceinline__ void merge_amax(const NormForward& args, uint32_t amax) {
    if (args.amax == nullptr) return;
    for (int step = 16; step > 0; step /= 2) amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    if (threadIdx.x % 32 == 0) atomicMax(args.amax, amax);
}

// Shared memory beyond the default 48 KiB, the kernel's own variables included, has to be asked for.
template <class Kernel> void allow_shared_memory(Kernel kernel, int bytes) {
    constexpr int kDefault = 48 * 1024, kOwn = 4 * 1024;
    if (bytes > kDefault - kOwn)
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   "shared memory of rms_norm");
}

// False: these rows need the other kernels.
bool launch_norm_rows(const NormForward& args, const Launch& launch);
bool launch_norm_backward_rows(const NormBackward& args,
                               const Launch& launch);  // dx and the partial sums of dgamma

}  // namespace fp8flow::hopper
