// SPDX-License-Identifier: MIT
// Sums of squares of a weight gradient D [group, M, N] that is in memory, FP32 or BF16, patch by patch in the
// order of kernels/ops/squares.h. For what the epilogues of sm90/ do not cover: GEMMs of other kernels, and
// groups without rows, which an accumulating GEMM passes over.
//
// Lower bound: D once (3.76 GB at 32 x 4096 x 7168, 0.82 ms at 4.6 TB/s); of the empty groups alone, nothing
// where there are none.
//
// Warp: a patch; an access is 8 rows x 32 bytes (16 of BF16), 16 of them in flight per lane. No barrier. Each
// warp reads the sizes of 32 groups at once.
//
// Deterministic: one writer per sum, fixed order, the same as in the epilogues.
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/widened.h"
#include "kernels/hopper/gemm/problem.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize, kCtas = 4;
static_assert(op::kSquaresLanes == kWarpSize);

// The sum of a patch, in all lanes. `d`: of the group; row, column: the patch's first.
template <class T>
__device__ double patch_sum(const T* d, int64_t m, int64_t n, int64_t row, int64_t column) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    constexpr int kHalf = static_cast<int>(op::kSquaresTile) / 2;
    float quarters = 0.0f;
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
        const int64_t i = row + quarter / 2 * kHalf + lane / 4,
                      j = column + quarter % 2 * kHalf + lane % 4 * 2;
        op::SquareStrands strands;
#pragma unroll
        for (int chunk = 0; chunk < kHalf / 8; ++chunk)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int64_t at = i + 8 * half, col = j + 8 * chunk;
                const auto value = [&](int64_t place) {
                    return at < m && place < n ? widened(d[at * n + place]) : 0.0f;
                };
                strands.add(chunk / 2 % 2, value(col), value(col + 1));
            }
        quarters += strands.sum();
    }
    double sum = op::lane_of_squares(quarters);
    for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const __grid_constant__ GemmProblem p, SquaresOf which) {
    pdl_wait();
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps,
                  warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    const int64_t columns = (p.n + op::kSquaresTile - 1) / op::kSquaresTile,
                  patches = (p.m + op::kSquaresTile - 1) / op::kSquaresTile * columns * op::kSquaresPatches;
    for (int64_t first = 0; first < p.groups.num_groups; first += kWarpSize) {
        const bool wanted = first + lane < p.groups.num_groups &&
                            (which == SquaresOf::all_groups || p.adds_nothing(first + lane));
        for (unsigned left = __ballot_sync(kFullMask, wanted); left != 0; left &= left - 1) {
            const int64_t group = first + __ffs(static_cast<int>(left)) - 1, before = group * patches % warps;
            const T* d = static_cast<const T*>(p.d) + group * p.m * p.n;
            for (int64_t patch = (warp + warps - before) % warps; patch < patches; patch += warps) {
                const int64_t tile = patch / op::kSquaresPatches;
                const double sum = patch_sum(
                    d, p.m, p.n,
                    tile / columns * op::kSquaresTile + patch % op::kSquaresPatches * op::kSquaresRows,
                    tile % columns * op::kSquaresTile);
                if (lane == 0) p.squares[group * patches + patch] = sum;
            }
        }
    }
}

}  // namespace

void launch_squares(const GemmProblem& problem, SquaresOf which, const Launch& launch) {
    const int64_t patches = problem.groups.num_groups * ceil_div(problem.m, op::kSquaresTile) *
                            ceil_div(problem.n, op::kSquaresTile) * op::kSquaresPatches;
    if (patches == 0) return;
    launch_pdl(problem.d_dtype == DType::bf16 ? squares_kernel<Bf16> : squares_kernel<float>,
               grid_for(ceil_div(patches, kWarps), launch, kCtas), kThreads, launch, "squares of a gradient",
               problem, which);
}

}  // namespace fp8flow::hopper::gemm
