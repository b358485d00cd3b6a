// SPDX-License-Identifier: MIT
// Element-wise operations and small reductions: add, cast, zero, fill_normal, sum, and the count of NaN and
// infinity. All bit-equal to the reference.
#include "kernels/core/random.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/vector_io.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::head {

namespace {

constexpr int kThreads = 256;

// y = a + b, or y = a in another dtype when b is absent. Bytes: every element once. Eight elements per thread
// and iteration; y may alias a or b, because a thread writes what only it has read. kBf16: three BF16 tensors
// of whole vectors. It needs few registers, so all of an SM's threads run and keep enough reads in flight.
template <bool kBf16>
__global__ __launch_bounds__(kThreads, kBf16 ? 8 : 1) void add_kernel(DeviceView a, DeviceView b,
                                                                      DeviceView y, int64_t count,
                                                                      bool vectorised) {
    if constexpr (kBf16) a.dtype = b.dtype = y.dtype = DType::bf16;
    pdl_launch_dependents();
    pdl_wait();
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kUnit; i < count;
         i += static_cast<int64_t>(gridDim.x) * kThreads * kUnit) {
        const int64_t left = kBf16 ? kUnit : count - i;
        float values[kUnit];
        load_up_to_8(a.data, a.dtype, i, left, kBf16 || vectorised, values);
        if (kBf16 || b.data != nullptr) {
            float more[kUnit];
            load_up_to_8(b.data, b.dtype, i, left, kBf16 || vectorised, more);
#pragma unroll
            for (int j = 0; j < kUnit; ++j) values[j] += more[j];
        }
        store_up_to_8(y.data, y.dtype, i, left, kBf16 || vectorised, values);
    }
}

void launch_add(const TensorView& a, const TensorView& b, const TensorView& y, const Launch& launch,
                const char* op) {
    const int64_t count = y.numel();
    if (count == 0) return;
    const bool vectorised =
        is_vectorisable(a.data, kUnit) && is_vectorisable(b.data, kUnit) && is_vectorisable(y.data, kUnit);
    const auto is_bf16 = [](const TensorView& t) { return t.dtype == DType::bf16; };
    const bool all_bf16 = b && is_bf16(a) && is_bf16(b) && is_bf16(y) && vectorised && count % kUnit == 0;
    launch_pdl(all_bf16 ? add_kernel<true> : add_kernel<false>,
               grid_for(ceil_div(count, kThreads * kUnit), launch), kThreads, launch, op, device_view(a),
               device_view(b), device_view(y), count, vectorised);
}

// *sum += the values, in double: blocks of 64 in ascending order, one per thread, then the block sums, which
// thread 0 adds (about 5 ns each; the operation is meant for one value per token). One CTA, since a second
// would have to wait for the first's sums. Two barriers per iteration, reached by all threads. Deterministic:
// fixed order.
__global__ __launch_bounds__(kThreads) void sum_kernel(const float* values, int64_t count, float* sum) {
    constexpr int kBlockValues = static_cast<int>(op::kSumBlock);
    __shared__ double block_sums[kThreads];
    double total = 0;
    for (int64_t first = 0; first < count; first += kThreads * kBlockValues) {
        const int64_t start = first + threadIdx.x * kBlockValues;
        double block = 0;
        if (start + kBlockValues <= count) {
#pragma unroll 16
            for (int i = 0; i < kBlockValues; ++i) block += static_cast<double>(values[start + i]);
        } else {
            for (int64_t i = start; i < count; ++i) block += static_cast<double>(values[i]);
        }
        block_sums[threadIdx.x] = block;
        __syncthreads();
        if (threadIdx.x == 0) {
            const int64_t left = (count - first + kBlockValues - 1) / kBlockValues;
            const int blocks = left < kThreads ? static_cast<int>(left) : kThreads;
#pragma unroll 16
            for (int i = 0; i < blocks; ++i) total += block_sums[i];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *sum = static_cast<float>(static_cast<double>(*sum) + total);
}

// Counts NaN and infinity in x, and the index of the first. Bytes: x once. A thread adds what it finds with
// one integer atomic, if it is not 0. Deterministic: sums and minima of integers do not depend on the order.
// "No index yet" is -1, the largest unsigned number, which loses every minimum.
__global__ __launch_bounds__(kThreads) void count_non_finite_kernel(DeviceView x, int64_t count,
                                                                    bool vectorised,
                                                                    unsigned long long* found,
                                                                    unsigned long long* first) {
    unsigned long long mine = 0, lowest = ~0ull;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kUnit; i < count;
         i += static_cast<int64_t>(gridDim.x) * kThreads * kUnit) {
        float values[kUnit];
        load_up_to_8(x.data, x.dtype, i, count - i, vectorised, values);
#pragma unroll
        for (int j = kUnit - 1; j >= 0; --j) {
            if ((float_bits(values[j]) & 0x7F800000u) != 0x7F800000u) continue;
            ++mine;
            const unsigned long long at = static_cast<unsigned long long>(i + j);
            lowest = at < lowest ? at : lowest;
        }
    }
    if (mine == 0) return;
    atomicAdd(found, mine);
    atomicMin(first, lowest);
}

// y = scale * normal random numbers by global index. Bytes: y once. One element per thread: about 100
// double-precision operations, shared with the host bit for bit.
__global__ void fill_normal_kernel(uint64_t seed, uint64_t stream, uint64_t first, float scale, float* y,
                                   int64_t count) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
         i += int64_t{gridDim.x} * blockDim.x)
        y[i] = scale * random_normal(seed, stream, first + static_cast<uint64_t>(i));
}

}  // namespace

}  // namespace fp8flow::hopper::head

namespace fp8flow {

using namespace hopper;
using namespace hopper::head;

void HopperOps::do_fill_normal(const op::FillNormal& args, const Launch& launch) {
    const int64_t count = args.y.numel();
    if (count == 0) return;
    launch_kernel(fill_normal_kernel, grid_for(ceil_div(count, kThreads), launch), kThreads, launch,
                  "fill_normal", args.seed, args.stream, args.first, args.standard_deviation,
                  args.y.as<float>(), count);
}

void HopperOps::do_add(const op::Add& args, const Launch& launch) {
    launch_add(args.a, args.b, args.y, launch, "add");
}

void HopperOps::do_cast(const op::Cast& args, const Launch& launch) {
    launch_add(args.x, {}, args.y, launch, "cast");
}

void HopperOps::do_zero(const op::Zero& args, const Launch& launch) {
    clear_memory(args.y.data, args.y.bytes(), launch, "zero");
}

void HopperOps::do_sum(const op::Sum& args, const Launch& launch) {
    if (args.values.numel() == 0) return;
    launch_kernel(sum_kernel, 1, kThreads, launch, "sum", args.values.as<float>(), args.values.numel(),
                  args.sum.as<float>());
}

void HopperOps::do_count_non_finite(const op::CountNonFinite& args, const Launch& launch) {
    const int64_t count = args.x.numel();
    if (count == 0) return;
    static_assert(sizeof(unsigned long long) == sizeof(int64_t));
    launch_kernel(count_non_finite_kernel, grid_for(ceil_div(count, kThreads * kUnit), launch), kThreads,
                  launch, "count_non_finite", device_view(args.x), count, is_vectorisable(args.x.data, kUnit),
                  reinterpret_cast<unsigned long long*>(args.count.as<int64_t>()),
                  reinterpret_cast<unsigned long long*>(args.first.as<int64_t>()));
}

}  // namespace fp8flow
