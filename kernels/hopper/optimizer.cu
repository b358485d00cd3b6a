// The optimizer on the GPU: sums of squares for the gradient norm, and AdamW on fp32 masters. Both bit-equal to the reference.
#include "kernels/hopper/adamw.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/weight_tiles.h"
#include "kernels/hopper/workspace.h"

#include <cuda_pipeline.h>

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kWarpSize = 32;
constexpr int kChain = static_cast<int>(op::kNormSquaredBlock);  // terms of one sum

// out[i] = sum of the squares of values[i * kChain ... ] in ascending order. Moves: the values once (1.07 GB, 0.25 ms, at 2^28 values and 4.3
// TB/s). A warp takes 32 neighbouring chains, one a thread; 64 columns of all of them are a stage in shared memory, copied
// there in pieces of 256 bytes without registers, so that two stages are always on their way while a third is added: 128 KB an SM
// (through registers, a warp's loads and its additions took turns: 74 % of the ceiling). Rows are padded by 16 bytes: four values at
// a time without bank conflicts. Warps are independent; a __syncwarp before a stage is read, which is also behind the last reading of
// the stage that is requested then. A square is exact in double, so that one fused operation adds what a multiplication
// and an addition would. One writer a sum: deterministic, and the bits of the reference.
constexpr int kWarps = 4, kSumCtas = 2;
constexpr int kColumns = 64, kPitch = kColumns + 4, kStages = 3;
constexpr int kStageFloats = kWarpSize * kPitch, kSumBytes = kWarps * kStages * kStageFloats * 4;
static_assert(kChain % kColumns == 0);

// 64 columns of the 32 chains from `first` on, zeros behind the last value: + 0 changes no bit of a sum of squares.
__device__ __forceinline__ void request_stage(const float* values, int64_t count, bool vectorised,
                                              int64_t first, int column, float* stage) {
    constexpr int kRowThreads = kColumns / 4, kRows = kWarpSize / kRowThreads;  // of one access of the warp
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize, row = lane / kRowThreads,
              four = lane % kRowThreads * 4;
    int64_t at = (first + row) * kChain + column + four;
    float* to = stage + row * kPitch + four;
    if (vectorised && (first + kWarpSize) * kChain <= count) {
#pragma unroll
        for (int i = 0; i < kWarpSize / kRows; ++i)
            __pipeline_memcpy_async(to + i * kRows * kPitch, values + at + i * kRows * kChain, 16);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kWarpSize / kRows; ++i, at += kRows * kChain, to += kRows * kPitch)
        for (int k = 0; k < 4; ++k) to[k] = at + k < count ? values[at + k] : 0.0f;
}

__global__ __launch_bounds__(kWarps* kWarpSize) void chain_sums_kernel(const float* values, int64_t count,
                                                                       bool vectorised, double* out) {
    extern __shared__ float4 stage_memory[];
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float* const stages = reinterpret_cast<float*>(stage_memory) + warp * kStages * kStageFloats;
    const int64_t chains = (count + kChain - 1) / kChain,
                  step = static_cast<int64_t>(gridDim.x) * kWarps * kWarpSize,
                  begin = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kWarpSize;
    int64_t ahead = begin;  // what is requested next
    int ahead_column = 0;
    const auto request = [&](int stage) {
        if (ahead < chains) {
            request_stage(values, count, vectorised, ahead, ahead_column, stages + stage * kStageFloats);
            ahead_column += kColumns;
            if (ahead_column == kChain) {
                ahead_column = 0;
                ahead += step;
            }
        }
        __pipeline_commit();  // also nothing: the waits below count
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) request(stage);
    int stage = 0, free_stage = kStages - 1;
    for (int64_t first = begin; first < chains; first += step) {
        double sum = 0;
#pragma unroll 1
        for (int column = 0; column < kChain; column += kColumns) {
            __pipeline_wait_prior(kStages - 2);
            __syncwarp();
            request(free_stage);
            const float4* row =
                reinterpret_cast<const float4*>(stages + stage * kStageFloats + lane * kPitch);
#pragma unroll
            for (int i = 0; i < kColumns / 4; ++i) {
                const float4 x = row[i];
                sum = __fma_rn(static_cast<double>(x.x), static_cast<double>(x.x), sum);
                sum = __fma_rn(static_cast<double>(x.y), static_cast<double>(x.y), sum);
                sum = __fma_rn(static_cast<double>(x.z), static_cast<double>(x.z), sum);
                sum = __fma_rn(static_cast<double>(x.w), static_cast<double>(x.w), sum);
            }
            free_stage = stage;
            stage = stage + 1 < kStages ? stage + 1 : 0;
        }
        if (first + lane < chains) out[first + lane] = sum;
    }
}

// The same for sums of sums, of which there are few: a CTA takes four chains at once into shared memory, all loads in flight, and the first
// thread of each warp adds one of them (about 3 us a chain; 32 chains a warp would be many round trips to memory one behind another).
// A barrier before the additions, and one before the next chains; the loop bounds are the same for the CTA.
constexpr int kSumChains = 4, kSumThreads = kSumChains * kWarpSize;
__global__ __launch_bounds__(kSumThreads) void double_chain_sums_kernel(const double* __restrict__ values,
                                                                        int64_t count, double* out) {
    __shared__ double tile[kSumChains * kChain];
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t chains = (count + kChain - 1) / kChain;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kSumChains; first < chains;
         first += static_cast<int64_t>(gridDim.x) * kSumChains) {
        const int64_t start = first * kChain;
#pragma unroll
        for (int i = 0; i < kSumChains * kChain / kSumThreads; ++i) {
            const int at = i * kSumThreads + thread;
            if (start + at < count) tile[at] = values[start + at];
        }
        __syncthreads();
        const int64_t chain = first + thread / kWarpSize;
        if (thread % kWarpSize == 0 && chain < chains) {
            const double* terms = tile + thread / kWarpSize * kChain;
            const int64_t left = count - chain * kChain;
            const int end = static_cast<int>(left < kChain ? left : kChain);
            double sum = 0;
#pragma unroll 16
            for (int i = 0; i < end; ++i) sum += terms[i];
            out[chain] = sum;
        }
        __syncthreads();
    }
}

// sum += the sums of the last block, in ascending order, rounded once. One CTA; the values pass through shared memory, thread 0 adds. At
// most kChain of them, read once; the chain of dependent additions decides the time (about 5 ns each).
constexpr int kFinishThreads = 256;
__global__ __launch_bounds__(kFinishThreads) void finish_sum_kernel(const double* sums, int64_t count,
                                                                    float* result) {
    __shared__ double tile[kFinishThreads];
    double total = 0;
    for (int64_t first = 0; first < count; first += kFinishThreads) {
        const int64_t at = first + threadIdx.x;
        tile[threadIdx.x] = at < count ? sums[at] : 0.0;
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll 16
            for (int i = 0; i < kFinishThreads; ++i) total += tile[i];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *result = static_cast<float>(static_cast<double>(*result) + total);
}

// Moves 28 bytes a parameter and the working copy (2 or 4). A thread takes four parameters at a time by 16-byte accesses; element-wise, so
// deterministic; compiled without contraction, so every operation rounds as in the reference. Leaves at once when *status != 0.
constexpr int kAdamWThreads = 256;
__global__ __launch_bounds__(kAdamWThreads) void adamw_kernel(const AdamWArgs args, bool vectorised) {
    if (args.status != nullptr && *args.status != 0) return;
    const float grad_scale = *args.grad_scale;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kAdamWThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kAdamWThreads;
    const int64_t vectors = vectorised ? args.count / 4 : 0;
    for (int64_t i = thread; i < vectors; i += threads) {
        const float4 grad = reinterpret_cast<const float4*>(args.grad)[i];
        float4 master = reinterpret_cast<float4*>(args.master)[i];
        float4 m = reinterpret_cast<float4*>(args.m)[i];
        float4 v = reinterpret_cast<float4*>(args.v)[i];
        const Element x = updated(args, grad_scale, grad.x, {master.x, m.x, v.x});
        const Element y = updated(args, grad_scale, grad.y, {master.y, m.y, v.y});
        const Element z = updated(args, grad_scale, grad.z, {master.z, m.z, v.z});
        const Element w = updated(args, grad_scale, grad.w, {master.w, m.w, v.w});
        master = make_float4(x.master, y.master, z.master, w.master);
        reinterpret_cast<float4*>(args.master)[i] = master;
        reinterpret_cast<float4*>(args.m)[i] = make_float4(x.m, y.m, z.m, w.m);
        reinterpret_cast<float4*>(args.v)[i] = make_float4(x.v, y.v, z.v, w.v);
        if (args.copy == nullptr) continue;
        if (args.copy_dtype == DType::f32) {
            reinterpret_cast<float4*>(args.copy)[i] = master;
        } else {
            const uint32_t low = to_bf16(master.x).bits | static_cast<uint32_t>(to_bf16(master.y).bits) << 16;
            const uint32_t high = to_bf16(master.z).bits | static_cast<uint32_t>(to_bf16(master.w).bits)
                                                               << 16;
            reinterpret_cast<uint2*>(args.copy)[i] = make_uint2(low, high);
        }
    }
    for (int64_t i = vectors * 4 + thread; i < args.count; i += threads) {
        const Element now = updated(args, grad_scale, args.grad[i], {args.master[i], args.m[i], args.v[i]});
        args.master[i] = now.master;
        args.m[i] = now.m;
        args.v[i] = now.v;
        if (args.copy != nullptr) store_float(args.copy, args.copy_dtype, i, now.master);
    }
}

}  // namespace

void HopperOps::do_norm_squared(const op::NormSquared& args, const Launch& launch) {
    const int64_t count = args.x.numel();
    if (count == 0) return;
    int64_t sums = ceil_div(count, kChain), room = sums;
    for (int64_t level = sums; level > kChain; room += level) level = ceil_div(level, kChain);
    double* partials = workspace_->partials_for<double>(room);
    check_cuda(
        cudaFuncSetAttribute(chain_sums_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSumBytes),
        "shared memory of norm_squared");
    const bool vectorised = reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0;
    chain_sums_kernel<<<grid_for(ceil_div(sums, kWarps * kWarpSize), launch, kSumCtas), kWarps * kWarpSize,
                        kSumBytes, stream_of(launch)>>>(args.x.as<float>(), count, vectorised, partials);
    for (; sums > kChain; partials += sums, sums = ceil_div(sums, kChain))
        double_chain_sums_kernel<<<grid_for(ceil_div(ceil_div(sums, kChain), kSumChains), launch),
                                   kSumThreads, 0, stream_of(launch)>>>(partials, sums, partials + sums);
    finish_sum_kernel<<<1, kFinishThreads, 0, stream_of(launch)>>>(partials, sums, args.sum.as<float>());
    check_launch("norm_squared");
}

void HopperOps::do_adamw(const op::AdamW& args, const Launch& launch) {
    const int64_t count = args.master.numel();
    if (count == 0) return;
    const AdamWArgs kernel_args = adamw_args(args);
    bool vectorised = true;
    for (const TensorView* view : {&args.grad, &args.master, &args.m, &args.v, &args.copy})
        vectorised = vectorised && reinterpret_cast<uintptr_t>(view->data) % 16 == 0;
    adamw_kernel<<<grid_for(ceil_div(count, 4 * kAdamWThreads), launch), kAdamWThreads, 0,
                   stream_of(launch)>>>(kernel_args, vectorised);
    check_launch("adamw");
}

// Weights in whole 128x128 blocks take the step and become codes in one kernel; others one after the other.
void HopperOps::do_adamw_quantize(const op::AdamWQuantize& args, const Launch& launch) {
    if (!launch_weight_tiles(args.adamw.master, &args.adamw, {args.scale_format, args.mx_rounding},
                             args.fprop, args.dgrad, launch))
        Ops::do_adamw_quantize(args, launch);
}

}  // namespace fp8flow
