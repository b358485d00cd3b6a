// SPDX-License-Identifier: MIT
// FP8 weight gradients of one group and few outputs, as of a shared expert: dW [M, N] FP32 (+)= dY^T X, from
// transposed copies with a scale per 128 x 128 tile. The bits of fp8_wgrad.cu.
//
// Lower bound at 4096 rows, 768 x 1024: 6.4 GFLOP, 5 us at 1.3 PFLOP/s; 7.3 MB of operands, 2 us. The sums
// over rows cannot be divided, so the number of tiles is the number of SMs at work: 24 tiles of 128 x 256
// took 1,240 cycles per 128 rows, 27 us. Here they are 96 tiles of 64 x 128, 256 cycles of wgmma per 128
// rows.
//
// CTA: a producer thread (warpgroup 0) and a consumer warpgroup that owns the tile. Steps go in pairs: the
// second's wgmma runs while the first's sums are promoted.
//
//   barrier    arrivals of a phase             waited for by
//   full[s]    1 producer + 24 KiB             consumer threads
//   empty[s]   1 per consumer warp             producer
//
// Deterministic: one thread sums an element of D over ascending k and adds its old value once.
#include "kernels/hopper/gemm/sm90/fp8_wgrad_small.h"

#include "kernels/hopper/gemm/sm90/fp8_mainloop.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kRows = 64, kCols = 128, kDepth = 8;  // of a tile; stages
constexpr uint32_t kBytesA = kRows * kStageRowBytes, kBytesB = kCols * kStageRowBytes;

struct SmallStorage {
    alignas(1024) uint8_t a[kDepth][kBytesA];
    alignas(1024) uint8_t b[kDepth][kBytesB];
    Mbarrier full[kDepth], empty[kDepth];
};
static_assert(kSharedBytes<SmallStorage> <= kMaxSharedBytes);

// The products of both operands' scales, read 32 steps ahead: lane l holds those of step l of every 32.
class StepFactors {
public:
    __device__ __forceinline__ StepFactors(const GemmProblem& p, int64_t row, int64_t col, int steps)
        : p_(p), steps_(steps), a_(first(p.a, row)), b_(first(p.b, col)), next_(read(0)) {}
    // Called once for every step, in order.
    __device__ __forceinline__ float of_step(int step) {
        if (step % 32 == 0) {
            held_ = next_;
            next_ = read(step + 32);
        }
        return __shfl_sync(kFullMask, held_, step % 32);
    }

private:
    __device__ __forceinline__ const float* first(const GemmOperand& operand, int64_t output) const {
        const OperandScale& s = operand.scale;
        return static_cast<const float*>(s.scales) +
               (operand.base() + p_.groups.offset(0)) / kFp8StageK * s.block_stride +
               output / kFp8StageK * s.output_stride;
    }
    __device__ __forceinline__ float read(int step) const {
        step += static_cast<int>(threadIdx.x) % kWarpSize;
        return step < steps_ ? a_[step * p_.a.scale.block_stride] * b_[step * p_.b.scale.block_stride] : 0.0f;
    }

    const GemmProblem& p_;
    int steps_;
    const float *a_, *b_;
    float held_ = 0.0f, next_;
};

// A thread's part of a tile, to D: 16 pairs of columns of two rows 8 apart. Old values are loaded first.
__device__ __forceinline__ void store_tile(const GemmProblem& p, int64_t row, int64_t col,
                                           const float (&sum)[64]) {
    float2 old[32] = {};
    const auto each = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int64_t at_row = row + 8 * (i % 2), at_col = col + 8 * (i / 2);
            if (at_row < p.m && at_col < p.n)
                visit(i, *reinterpret_cast<float2*>(static_cast<float*>(p.d) + at_row * p.n + at_col));
        }
    };
    const bool adds = p.mode == Gradient::accumulate;
    if (adds) each([&](int i, const float2& d) { old[i] = d; });
    each([&](int i, float2& d) {
        const float2 own = {sum[2 * i], sum[2 * i + 1]};
        d = adds ? float2{old[i].x + own.x, old[i].y + own.y} : own;
    });
}

template <class Wgmma>
__global__ void __launch_bounds__(2 * kWarpgroup, 1)
    small_wgrad_kernel(const __grid_constant__ GemmProblem p, const __grid_constant__ CUtensorMap map_a,
                       const __grid_constant__ CUtensorMap map_b) {
    SmallStorage& shared = prepare_shared<SmallStorage>(
        [](SmallStorage& s) { init_ring(s.full, s.empty, kWarpgroup / kWarpSize); });
    const int steps = static_cast<int>((p.groups.count(0) + kFp8StageK - 1) / kFp8StageK);
    if (steps == 0 && p.mode == Gradient::accumulate) return;  // a group without rows adds nothing
    const int64_t col_tiles = (p.n + kCols - 1) / kCols, tiles = (p.m + kRows - 1) / kRows * col_tiles;
    if (warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup) == 0) {
        if (threadIdx.x != 0) return;
        const int64_t a_k = p.a.base() + p.groups.offset(0), b_k = p.b.base() + p.groups.offset(0);
        RingPosition<kDepth> stage;
        for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
            for (int step = 0; step < steps; ++step) {
                Mbarrier* const full = &shared.full[stage.index];
                mbarrier_wait(&shared.empty[stage.index], stage.parity ^ 1);
                mbarrier_arrive_expect_tx(full, kBytesA + kBytesB);
                tma_load(&map_a, full, shared.a[stage.index], static_cast<int>(a_k) + step * kFp8StageK,
                         static_cast<int>(tile / col_tiles) * kRows);
                tma_load(&map_b, full, shared.b[stage.index], static_cast<int>(b_k) + step * kFp8StageK,
                         static_cast<int>(tile % col_tiles) * kCols);
                stage.advance();
            }
        return;
    }
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarpSize;
    RingPosition<kDepth> ahead, stage;  // of the next wgmma, of the next promotion
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t row = tile / col_tiles * kRows, col = tile % col_tiles * kCols;
        StepFactors factors(p, row, col, steps);
        float sum[64], first[64], second[64];
#pragma unroll
        for (float& value : sum) value = 0.0f;
        const auto start = [&](float(&partial)[64]) {
            mbarrier_wait(&shared.full[ahead.index], ahead.parity);
            start_mma<Wgmma>(partial, k_major_descriptor(shared.a[ahead.index]),
                             k_major_descriptor(shared.b[ahead.index]));
            ahead.advance();
        };
        const auto finish = [&](float(&partial)[64], int step) {
            wgmma_fence_operand(partial);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(&shared.empty[stage.index]);
            stage.advance();
            const float factor = factors.of_step(step);
            promote(partial, sum, factor, factor);
        };
        int step = 0;
        if (steps % 2 == 1) {
            start(first);
            wgmma_wait<0>();
            finish(first, step++);
        }
        for (; step < steps; step += 2) {
            start(first);
            start(second);
            wgmma_wait<1>();
            finish(first, step);
            wgmma_wait<0>();
            finish(second, step + 1);
        }
        store_tile(p, row + thread / kWarpSize * kWarpRows + lane / 4, col + lane % 4 * 2, sum);
    }
}

}  // namespace

bool is_small_wgrad(const GemmProblem& p) {
    return p.groups.num_groups == 1 && p.d_dtype == DType::f32 && p.a.scale.outputs_per_scale == kBlock &&
           p.b.scale.outputs_per_scale == kBlock && ceil_div(p.m, kRows) * ceil_div(p.n, kCols) <= kNumSms;
}

void launch_wgmma_fp8_wgrad_small(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                                  const Launch& how) {
    constexpr size_t kBytes = kSharedBytes<SmallStorage>;
    const auto kernel =
        p.a.dtype == DType::e5m2 ? small_wgrad_kernel<WgmmaE5m2> : small_wgrad_kernel<WgmmaE4m3>;
    launch_pdl(kernel, grid_for(ceil_div(p.m, kRows) * ceil_div(p.n, kCols), how, 1), dim3(2 * kWarpgroup),
               kBytes, how, "GEMM (wgmma)", p, operand_map(p.a, a, kRows), operand_map(p.b, b, kCols));
}

}  // namespace fp8flow::hopper::gemm
