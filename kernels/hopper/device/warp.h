// SPDX-License-Identifier: MIT
// A warp: its size, the mask of all its lanes, and values that all lanes share.
#pragma once

#include <cuda_runtime.h>

namespace fp8flow::hopper {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xFFFFFFFFu;

#ifdef __CUDACC__
// Tells the compiler that a value is the same in all lanes: what follows from it (stages, descriptors, trip
// counts) then stays in uniform registers.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(kFullMask, value, 0); }
// The sum over a warp at distance 16, 8, 4, 2, 1; every lane gets it.
template <class T> __device__ __forceinline__ T warp_sum(T lane) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
        lane += __shfl_xor_sync(kFullMask, lane, distance);
    return lane;
}
// Eight neighbouring threads each hold one partial sum (a lane of kernels/reference/rows.h); all of them get
// ((0+4)+(2+6)) + ((1+5)+(3+7)). Every thread of `mask` calls it.
__device__ __forceinline__ float combine_lanes(float lane, unsigned mask = kFullMask) {
    lane += __shfl_xor_sync(mask, lane, 4);
    lane += __shfl_xor_sync(mask, lane, 2);
    return lane + __shfl_xor_sync(mask, lane, 1);
}
#endif

}  // namespace fp8flow::hopper
