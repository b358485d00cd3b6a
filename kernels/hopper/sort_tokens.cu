// Sorting tokens by id, stable: a few by counting for each how many come before it, many by CUB's radix sort, whose time grows with their
// number and not with its square. Integers: the result is the same in every run.
#include "kernels/hopper/sort_tokens.h"

#include "kernels/core/error.h"

#include <cub/device/device_radix_sort.cuh>

namespace fp8flow::hopper {

namespace {

// Tokens by (id, position): sorted_ids and order, where order[i] is the position of the i-th. Moves: the ids, once a CTA (from L2). A token's
// place is the number of tokens before it: eight threads count it, each an eighth of a tile of ids in shared memory (16.8 M comparisons at
// T=4096: 3 us over the whole chip). Two barriers a tile; all threads see all tiles. Every place is taken once: one writer a word.
constexpr int kRankThreads = 256, kParts = 8, kRankTokens = kRankThreads / kParts, kRankTile = 2048;
__device__ __forceinline__ int is_before(int32_t id, int at, int32_t own_id, int own) {
    return id < own_id || (id == own_id && at < own);
}
__global__ __launch_bounds__(kRankThreads) void count_before_kernel(const int32_t* ids, int tokens,
                                                                    int32_t* sorted_ids, int32_t* order) {
    __shared__ __align__(16) int32_t tile[kRankTile];
    const int thread = static_cast<int>(threadIdx.x), part = thread % kParts;
    for (int64_t own = static_cast<int64_t>(blockIdx.x) * kRankTokens; own < tokens;
         own += static_cast<int64_t>(gridDim.x) * kRankTokens) {
        const int t = static_cast<int>(own) + thread / kParts;
        const int32_t id = t < tokens ? ids[t] : 0;
        int place = 0;
        for (int start = 0; start < tokens; start += kRankTile) {
            __syncthreads();  // the last tile is read
            for (int i = thread; i < kRankTile; i += kRankThreads)
                tile[i] = start + i < tokens ? ids[start + i] : INT32_MAX;  // before nobody
            __syncthreads();
#pragma unroll 8
            for (int i = part * 4; i < kRankTile; i += kParts * 4) {
                const int4 other = *reinterpret_cast<const int4*>(&tile[i]);
                const int at = start + i;
                place += is_before(other.x, at, id, t) + is_before(other.y, at + 1, id, t) +
                         is_before(other.z, at + 2, id, t) + is_before(other.w, at + 3, id, t);
            }
        }
        for (int mask = kParts / 2; mask > 0; mask /= 2) place += __shfl_xor_sync(0xFFFFFFFFu, place, mask);
        if (part != 0 || t >= tokens) continue;
        sorted_ids[place] = id;
        order[place] = t;
    }
}

// Up to here comparing all pairs takes less time (12 us) than the passes of a radix sort.
constexpr int64_t kMostCounted = 8192;

// positions[t] = t. Moves 4 bytes a token.
constexpr int kPositionThreads = 256;
__global__ __launch_bounds__(kPositionThreads) void positions_kernel(int tokens, int32_t* positions) {
    const int first = static_cast<int>(blockIdx.x) * kPositionThreads + static_cast<int>(threadIdx.x);
    for (int64_t t = first; t < tokens; t += static_cast<int64_t>(gridDim.x) * kPositionThreads)
        positions[t] = static_cast<int32_t>(t);
}

// Where CUB's scratch begins, behind the positions.
std::size_t positions_bytes(int64_t tokens) {
    return static_cast<std::size_t>(round_up(tokens * static_cast<int64_t>(sizeof(int32_t)), 256));
}

// With scratch null only the bytes that it takes are found; nothing is launched.
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
    FP8FLOW_CHECK(job.tokens <= INT32_MAX - kRankTile, "{} tokens: positions must fit 32 bits", job.tokens);
    const cudaStream_t stream = stream_of(launch);
    if (job.tokens <= kMostCounted) {
        count_before_kernel<<<grid_for(ceil_div(job.tokens, kRankTokens), launch), kRankThreads, 0, stream>>>(
            job.ids, static_cast<int>(job.tokens), job.sorted_ids, job.order);
        check_launch("sorting tokens");
        return;
    }
    int32_t* const positions = static_cast<int32_t*>(job.scratch);
    positions_kernel<<<grid_for(ceil_div(job.tokens, kPositionThreads), launch), kPositionThreads, 0,
                       stream>>>(static_cast<int>(job.tokens), positions);
    check_launch("sorting tokens");
    const std::size_t offset = positions_bytes(job.tokens);
    radix_sort(job, positions, static_cast<uint8_t*>(job.scratch) + offset,
               sort_tokens_scratch(job.tokens) - offset, stream);
}

}  // namespace fp8flow::hopper
