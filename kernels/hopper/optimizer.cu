// The optimizer on the GPU: sums of squares for the gradient norm, and AdamW on fp32 masters. Both bit-equal to the reference.
#include "kernels/hopper/adamw.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/weight_tiles.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kWarpSize = 32;
constexpr int kChain = static_cast<int>(op::kNormSquaredBlock);  // terms of one sum

__device__ __forceinline__ double term(float x) { return static_cast<double>(x) * static_cast<double>(x); }

// out[i] = sum of the terms of values[i * kChain ... ] in ascending order. Moves: the values once. A warp takes 32 neighbouring chains, one a
// thread; 32 columns of all of them pass through shared memory (rows padded by one word), so that global reads are whole 128-byte lines
// while each thread adds its own chain in order. Warps are independent; only __syncwarp. One writer a sum: deterministic, and the bits of
// the reference.
constexpr int kWarps = 8;
__global__ __launch_bounds__(kWarps* kWarpSize) void chain_sums_kernel(const float* values, int64_t count,
                                                                       double* out) {
    __shared__ float tiles[kWarps][kWarpSize][kWarpSize + 1];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    float(*tile)[kWarpSize + 1] = tiles[warp];
    const int64_t chains = (count + kChain - 1) / kChain;
    for (int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kWarpSize; first < chains;
         first += static_cast<int64_t>(gridDim.x) * kWarps * kWarpSize) {
        const int rows = static_cast<int>(chains - first < kWarpSize ? chains - first : kWarpSize);
        double sum = 0;
        for (int column = 0; column < kChain; column += kWarpSize) {
            const int64_t start = first * kChain + column;  // of the first chain; the other rows begin later
            if (start >= count) break;
            if (rows == kWarpSize &&
                start + static_cast<int64_t>(kWarpSize - 1) * kChain + kWarpSize <= count) {
#pragma unroll 16
                for (int row = 0; row < kWarpSize; ++row)
                    tile[row][lane] = values[start + static_cast<int64_t>(row) * kChain + lane];
            } else {
                for (int row = 0; row < rows; ++row) {
                    const int64_t at = start + static_cast<int64_t>(row) * kChain + lane;
                    tile[row][lane] =
                        at < count ? values[at] : 0.0f;  // + 0 changes no bit of a sum of squares
                }
            }
            __syncwarp();
            if (lane < rows) {
#pragma unroll
                for (int i = 0; i < kWarpSize; ++i) sum += term(tile[lane][i]);
            }
            __syncwarp();
        }
        if (lane < rows) out[first + lane] = sum;
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
    chain_sums_kernel<<<grid_for(ceil_div(sums, kWarps * kWarpSize), launch, 6), kWarps * kWarpSize, 0,
                        stream_of(launch)>>>(args.x.as<float>(), count, partials);
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
