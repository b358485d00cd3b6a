// SPDX-License-Identifier: MIT
// Stable sort of tokens by id. Few tokens: each counts the tokens before it. Many: CUB's radix sort, because
// its time grows linearly. Integers: the result is the same in every run.
#include "kernels/hopper/head/sort_tokens.h"

#include "kernels/core/error.h"
#include "kernels/core/tensor.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/runtime/launch.h"

#include <cub/device/device_radix_sort.cuh>

namespace fp8flow::hopper::head {

namespace {

// Up to here comparing all pairs is faster than the passes of a radix sort.
constexpr int kMostCounted = 8192;

// Tokens by (id, position): sorted_ids, and order, where order[i] is the position of the i-th. A token's
// place is the number of tokens before it.
//
// Bytes: the ids, read once per CTA (from L2). CTA: all ids in shared memory. A warp counts for two tokens, a
// lane four ids at a time. Among positions below the token an equal id counts, above it does not, so that a
// pair takes one comparison except in the two chunks around the tokens (16.8 M at T=4096: 1.5 us over the
// whole chip). One barrier.
//
// Deterministic: every place is taken once, one writer per word.
constexpr int kRankThreads = 256, kWarpTokens = 2;
constexpr int kRankTokens = kRankThreads / kWarpSize * kWarpTokens;  // tokens per CTA
constexpr int kChunk = 4 * kWarpSize;                                // ids that a warp compares at once
__global__ __launch_bounds__(kRankThreads) void count_before_kernel(const int32_t* ids, int tokens,
                                                                    int32_t* sorted_ids, int32_t* order) {
    __shared__ __align__(16) int32_t all[kMostCounted];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
    pdl_wait();
    const int padded = (tokens + kChunk - 1) / kChunk * kChunk;
#pragma unroll 8
    for (int i = thread; i < padded; i += kRankThreads)
        all[i] = i < tokens ? ids[i] : INT32_MAX;  // before no token
    __syncthreads();
    for (int own = (static_cast<int>(blockIdx.x) * kRankThreads + thread) / kWarpSize * kWarpTokens;
         own < tokens; own += static_cast<int>(gridDim.x) * kRankTokens) {
        int id[kWarpTokens], place[kWarpTokens] = {};
#pragma unroll
        for (int n = 0; n < kWarpTokens; ++n) id[n] = all[min(own + n, tokens - 1)];
        const auto count = [&](int start, const auto& is_before) {  // is_before(id, its position, n)
            const int at = start + lane * 4;
            const int4 four = *reinterpret_cast<const int4*>(&all[at]);
#pragma unroll
            for (int n = 0; n < kWarpTokens; ++n)
                place[n] += is_before(four.x, at, n) + is_before(four.y, at + 1, n) +
                            is_before(four.z, at + 2, n) + is_before(four.w, at + 3, n);
        };
        // two chunks around the tokens: chunks below hold positions before both, chunks above positions after
        // both
        const int near = own / kChunk * kChunk, far = min(near + 2 * kChunk, padded);
#pragma unroll 4
        for (int start = 0; start < near; start += kChunk)
            count(start, [&](int other, int, int n) { return other <= id[n] ? 1 : 0; });
        for (int start = near; start < far; start += kChunk)
            count(start, [&](int other, int at, int n) {
                return other < id[n] || (other == id[n] && at < own + n) ? 1 : 0;
            });
#pragma unroll 4
        for (int start = far; start < padded; start += kChunk)
            count(start, [&](int other, int, int n) { return other < id[n] ? 1 : 0; });
#pragma unroll
        for (int n = 0; n < kWarpTokens; ++n) {
            place[n] = __reduce_add_sync(kFullMask, place[n]);
            if (lane != n || own + n >= tokens) continue;
            sorted_ids[place[n]] = id[n];
            order[place[n]] = own + n;
        }
    }
}

// positions[t] = t. Bytes: 4 written per token.
constexpr int kPositionThreads = 256;
__global__ __launch_bounds__(kPositionThreads) void positions_kernel(int tokens, int32_t* positions) {
    const int first = static_cast<int>(blockIdx.x) * kPositionThreads + static_cast<int>(threadIdx.x);
    for (int64_t t = first; t < tokens; t += static_cast<int64_t>(gridDim.x) * kPositionThreads)
        positions[t] = static_cast<int32_t>(t);
}

// Bytes of the positions in the scratch; CUB's part follows.
std::size_t positions_bytes(int64_t tokens) {
    return static_cast<std::size_t>(round_up(tokens * static_cast<int64_t>(sizeof(int32_t)), 256));
}

// With scratch null it returns the bytes needed and launches nothing.
std::size_t radix_sort(const SortTokens& job, const int32_t* positions, void* scratch, std::size_t bytes,
                       cudaStream_t stream) {
    check_cuda(cub::DeviceRadixSort::SortPairs(scratch, bytes, job.ids, job.sorted_ids, positions, job.order,
                                               static_cast<int>(job.tokens), 0, 32, stream),
               "sorting tokens");
    return bytes;
}

}  // namespace

std::size_t sort_tokens_scratch(int64_t tokens) {
    if (tokens <= kMostCounted) return 0;
    return positions_bytes(tokens) + radix_sort({.ids = nullptr,
                                                 .tokens = tokens,
                                                 .sorted_ids = nullptr,
                                                 .order = nullptr,
                                                 .scratch = nullptr},
                                                nullptr, nullptr, 0, nullptr);
}

void sort_tokens(const SortTokens& job, const Launch& launch) {
    FP8FLOW_CHECK(job.tokens <= INT32_MAX - kChunk, "{} tokens: positions must fit 32 bits", job.tokens);
    if (job.tokens <= kMostCounted) {
        launch_pdl(count_before_kernel, grid_for(ceil_div(job.tokens, kRankTokens), launch), kRankThreads,
                   launch, "sorting tokens", job.ids, static_cast<int>(job.tokens), job.sorted_ids,
                   job.order);
        return;
    }
    int32_t* const positions = static_cast<int32_t*>(job.scratch);
    launch_kernel(positions_kernel, grid_for(ceil_div(job.tokens, kPositionThreads), launch),
                  kPositionThreads, launch, "sorting tokens", static_cast<int>(job.tokens), positions);
    const std::size_t offset = positions_bytes(job.tokens);
    radix_sort(job, positions, static_cast<uint8_t*>(job.scratch) + offset,
               sort_tokens_scratch(job.tokens) - offset, stream_of(launch));
}

}  // namespace fp8flow::hopper::head
