// SPDX-License-Identifier: MIT
// Any GEMM on CUDA cores, in the reference's order of summation and therefore with its bits: all layouts,
// forms and groupings. The baseline of the tensor-core kernels' tests, and what runs where they are not
// supported (f32).
#include "kernels/hopper/gemm/problem.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kThreads = 128;
constexpr int kTileM = 64, kTileN = 128;  // 8x8 outputs per thread
constexpr int kChunk = 32;                // contraction elements in shared memory; divides every scale block
constexpr int kFragment = 8;
static_assert(kTileM * kTileN == kThreads * kFragment * kFragment);
static_assert(kBlock % kChunk == 0 && kMxBlock % kChunk == 0);

// Column of output i in row k of a shared tile. Four neighbours stay together (vector reads); the swizzle
// spreads the quads of an FP8 row, which a warp writes down eight columns of k at once, over all banks.
__device__ __forceinline__ int column(int k, int i) { return i ^ (((k >> 2) & 7) << 2); }

// Loads elements [0, kOutputs) x [0, kChunk) of an operand, from element `first`, decoded into
// tile[k][output]; zeros outside.
template <int kOutputs>
__device__ void load_tile(const GemmOperand& operand, int64_t first, int64_t outputs, int64_t depth,
                          float (&tile)[kChunk][kOutputs]) {
    constexpr int kQuads = kOutputs * kChunk / 4;
    if (operand.k_stride == 1) {
#pragma unroll 4
        for (int q = static_cast<int>(threadIdx.x); q < kQuads; q += kThreads) {
            const int output = q / (kChunk / 4), k = q % (kChunk / 4) * 4;
            const float4 x =
                load_quad(operand.data, operand.dtype, first + output * operand.output_stride + k,
                          output < outputs ? depth - k : 0);
            const int at = column(k, output);
            tile[k][at] = x.x;
            tile[k + 1][at] = x.y;
            tile[k + 2][at] = x.z;
            tile[k + 3][at] = x.w;
        }
        return;
    }
#pragma unroll 4
    for (int q = static_cast<int>(threadIdx.x); q < kQuads; q += kThreads) {
        const int k = q / (kOutputs / 4), output = q % (kOutputs / 4) * 4;
        *reinterpret_cast<float4*>(&tile[k][column(k, output)]) =
            load_quad(operand.data, operand.dtype, first + k * operand.k_stride + output,
                      k < depth ? outputs - output : 0);
    }
}

struct SimtShared {
    float a[kChunk][kTileM];
    float b[kChunk][kTileN];
    float scale_a[kTileM];
    float scale_b[kTileN];
    Tile tile;
};

// D(i, j) (+)= sum over k of A(i, k) B(j, k), all dtypes and layouts. Bytes: each operand tile once per tile
// of D across it (A n/128 times, B m/64 times), D once; 2*m*n*k FLOPs. CTA: tiles of 64 x 128 of D, one after
// the other; thread (y, x) owns rows 4y+{0..3}, 32+4y+{0..3} and columns 4x+{0..3}, 64+4x+{0..3}. Barriers:
// one after the tile's description is written, then two per chunk of 32: before shared memory is overwritten,
// and before it is read. Deterministic: an output is one thread's sum over ascending k, promoted at every
// scale block, and has one writer.
__global__ void __launch_bounds__(kThreads) simt_kernel(GemmProblem problem, int64_t num_tiles) {
    __shared__ SimtShared shared;
    const int thread = static_cast<int>(threadIdx.x), y = thread / 16, x = thread % 16;
    const bool scaled = problem.scaled();
    const int64_t block = promotion_block(problem);
    for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        __syncthreads();
        if (thread == 0) shared.tile = find_tile(problem, index, kTileM, kTileN);
        __syncthreads();
        const Tile tile = shared.tile;
        if (tile.past_end) return;
        if (tile.rows <= 0) continue;
        const int64_t cols = min(problem.n - tile.b_output, int64_t{kTileN});
        const int64_t depth = tile.valid > 0 ? tile.k : 0;
        const int64_t a_first = problem.a.at(tile.group, tile.a_output, tile.a_k),
                      b_first = problem.b.at(tile.group, tile.b_output, tile.b_k);
        float sum[kFragment][kFragment] = {}, partial[kFragment][kFragment] = {};
        for (int64_t k0 = 0; k0 < depth; k0 += kChunk) {
            const int steps = static_cast<int>(min(depth - k0, int64_t{kChunk}));
            __syncthreads();
            load_tile(problem.a, a_first + k0 * problem.a.k_stride, tile.valid, steps, shared.a);
            load_tile(problem.b, b_first + k0 * problem.b.k_stride, cols, steps, shared.b);
            if (scaled && (k0 == 0 || (block != 0 && k0 % block == 0))) {
                if (thread < kTileM && thread < tile.valid)
                    shared.scale_a[thread] =
                        load_scale(problem.a.scale, tile.group, tile.a_output + thread, tile.a_k + k0);
                if (thread < cols)
                    shared.scale_b[thread] =
                        load_scale(problem.b.scale, tile.group, tile.b_output + thread, tile.b_k + k0);
            }
            __syncthreads();
#pragma unroll 4
            for (int k = 0; k < steps; ++k) {
                float a[kFragment], b[kFragment];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    *reinterpret_cast<float4*>(a + 4 * half) =
                        *reinterpret_cast<const float4*>(&shared.a[k][column(k, 32 * half + 4 * y)]);
                    *reinterpret_cast<float4*>(b + 4 * half) =
                        *reinterpret_cast<const float4*>(&shared.b[k][column(k, 64 * half + 4 * x)]);
                }
#pragma unroll
                for (int i = 0; i < kFragment; ++i)
#pragma unroll
                    for (int j = 0; j < kFragment; ++j) partial[i][j] = fma_float(a[i], b[j], partial[i][j]);
            }
            const int64_t done = k0 + steps;
            if (done == depth || (block != 0 && done % block == 0)) {
#pragma unroll
                for (int i = 0; i < kFragment; ++i) {
#pragma unroll
                    for (int j = 0; j < kFragment; ++j) {
                        const float scale = scaled ? shared.scale_a[i / 4 * 32 + 4 * y + i % 4] *
                                                         shared.scale_b[j / 4 * 64 + 4 * x + j % 4]
                                                   : 1.0f;
                        sum[i][j] = scaled ? fma_float(partial[i][j], scale, sum[i][j]) : partial[i][j];
                        partial[i][j] = 0.0f;
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kFragment; ++i) {
            const int row = i / 4 * 32 + 4 * y + i % 4;
            if (row >= tile.rows) continue;
#pragma unroll
            for (int j = 0; j < kFragment; ++j) {
                const int col = j / 4 * 64 + 4 * x + j % 4;
                if (col >= cols) continue;
                store_sum(problem, tile.d_row + row, tile.b_output + col,
                          row < tile.valid ? sum[i][j] : 0.0f);
            }
        }
    }
}

}  // namespace

void launch_simt(const GemmProblem& problem, const Launch& launch) {
    const int64_t tiles = row_tiles_bound(problem, kTileM) * ceil_div(problem.n, kTileN);
    if (tiles == 0) return;
    constexpr int kPerSm = 2;  // CTAs that the register file holds
    launch_kernel(simt_kernel, grid_for(tiles, launch, kPerSm), kThreads, launch, "GEMM (simt)", problem,
                  tiles);
}

}  // namespace fp8flow::hopper::gemm
