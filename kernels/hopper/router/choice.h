// SPDX-License-Identifier: MIT
// Top-k of one token by one warp: the K largest keys in order, ties to the lowest index, and the limit to the
// best groups of experts.
#pragma once

#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/router/scores.h"

namespace fp8flow::hopper::router {

// (key, index) as one integer: larger is better; ties to the lowest index.
__device__ __forceinline__ uint64_t pair_of(uint32_t key, int index) {
    return static_cast<uint64_t>(key) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(index));
}
__device__ __forceinline__ int index_of(uint64_t pair) {
    return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(pair));
}
__device__ __forceinline__ uint32_t key_of(uint64_t pair) { return static_cast<uint32_t>(pair >> 32); }

// The exact top-k of one token, one choice per round: the maximum over the keys, then the lowest index that
// has it. For any K and any ties. Thread k % 32 calls emit(k, index).
template <class R, class Emit>
__device__ __forceinline__ void choose_in_rounds(const R& row, uint32_t (&keys)[R::kCount], int topk,
                                                 const Emit& emit) {
#pragma unroll 1
    for (int k = 0; k < topk; ++k) {
        const uint32_t largest = __reduce_max_sync(kFullMask, max_key(keys));
        uint32_t index = 0xFFFFFFFFu;
#pragma unroll
        for (int j = R::kCount - 1; j >= 0; --j)
            if (keys[j] == largest) index = static_cast<uint32_t>(row.expert(j));
        index = __reduce_min_sync(kFullMask, index);
#pragma unroll
        for (int j = 0; j < R::kCount; ++j)
            if (index == static_cast<uint32_t>(row.expert(j))) keys[j] = kExcluded;
        if (warp_lane() == k % kWarpSize) emit(k, static_cast<int>(index));
    }
}

// Batcher's odd-even merge sort, largest first; all indices are known to the compiler.
template <int kCount> __device__ __forceinline__ void sort_descending(uint32_t (&v)[kCount]) {
#pragma unroll
    for (int p = 1; p < kCount; p *= 2)
#pragma unroll
        for (int k = p; k >= 1; k /= 2)
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const bool starts = i >= k % p && (i - k % p) % (2 * k) < k;
                if (!starts || i + k >= kCount || i / (2 * p) != (i + k) / (2 * p)) continue;
                const uint32_t larger = max(v[i], v[i + k]);
                v[i + k] = min(v[i], v[i + k]);
                v[i] = larger;
            }
}

// The top-k of each token of a warp, best first, ties to the lowest index. Thread k % 32 calls emit(u, k,
// index) for token u. key_at(u, j) is key j of the thread; key_again(u, j) reads it again if registers did
// not keep it. The low bits of a key are replaced by its expert index, so that one maximum over the warp
// finds both. Each thread sorts its keys once; then only its largest takes part. If two neighbours in the
// result differ in the replaced bits only, their order is unknown, and choose_in_rounds decides by the exact
// keys (random logits of 256 experts: one token in a hundred). The tokens of a warp are interleaved, because
// each choice is a chain of warp-wide maxima.
constexpr int kSortedPlaces = 16;
template <int kTokens, class R, class KeyAt, class KeyAgain, class Emit>
__device__ __forceinline__ void choose(const R& row, int topk, const KeyAt& key_at, const KeyAgain& key_again,
                                       const Emit& emit) {
    uint32_t unknown = (1u << kTokens) - 1;
    if constexpr (R::kCount <= kSortedPlaces) {
        if (topk < kWarpSize) {
            constexpr uint32_t kPlaces = R::kCount * kWarpSize - 1;
            uint32_t v[kTokens][R::kCount], chosen[kTokens];
#pragma unroll
            for (int u = 0; u < kTokens; ++u) {
#pragma unroll
                for (int j = 0; j < R::kCount; ++j)
                    v[u][j] = (key_at(u, j) & ~kPlaces) | (kPlaces - static_cast<uint32_t>(row.expert(j)));
                sort_descending(v[u]);
            }
#pragma unroll 1
            for (int k = 0; k <= topk;
                 ++k) {  // one more than needed, to compare the last choice with the next
#pragma unroll
                for (int u = 0; u < kTokens; ++u) {
                    const uint32_t best = __reduce_max_sync(kFullMask, v[u][0]);
                    if (warp_lane() == k) chosen[u] = best;
                    const bool mine = v[u][0] == best;
#pragma unroll
                    for (int j = 0; j + 1 < R::kCount; ++j) v[u][j] = mine ? v[u][j + 1] : v[u][j];
                    v[u][R::kCount - 1] = mine ? 0 : v[u][R::kCount - 1];
                }
            }
#pragma unroll
            for (int u = 0; u < kTokens; ++u) {
                const uint32_t next = __shfl_down_sync(kFullMask, chosen[u], 1);
                if (__any_sync(kFullMask, warp_lane() < topk && (chosen[u] | kPlaces) == (next | kPlaces)))
                    continue;
                unknown ^= 1u << u;
                if (warp_lane() < topk)
                    emit(u, warp_lane(), static_cast<int>(kPlaces - (chosen[u] & kPlaces)));
            }
        }
    }
#pragma unroll 1
    for (int u = 0; u < kTokens; ++u) {
        if ((unknown >> u & 1) == 0) continue;
        uint32_t keys[R::kCount];
#pragma unroll
        for (int j = 0; j < R::kCount; ++j) keys[j] = key_again(u, j);
        choose_in_rounds(row, keys, topk, [&](int k, int index) { emit(u, k, index); });
    }
}

// Sets the keys of all groups of experts but the `kept` best ones to kExcluded. The score of a group is the
// sum of its best values, largest first. Neighbouring threads search one group together. keys, group_keys
// (one word per group): in shared memory, visible to the warp before and after.
__device__ __noinline__ void exclude_groups(int groups, int kept, int experts, int topk, uint32_t* keys,
                                            uint32_t* group_keys) {
    const int size = experts / groups, counted = topk / kept;
    int threads = 1;  // per group
    while (2 * threads * groups <= kWarpSize) threads *= 2;
    const int part = warp_lane() % threads, at_once = kWarpSize / threads;
    const int rotation = warp_lane() / threads * threads % size;  // groups start at different banks
    for (int first = 0; first < groups; first += at_once) {
        const int group = first + warp_lane() / threads;
        float sum = 0.0f;
        uint64_t last = ~uint64_t{0};
        for (int i = 0; i < counted; ++i) {
            uint64_t best = 0;
            for (int m = part; m < size && group < groups; m += threads) {
                const int e = group * size + (m + rotation < size ? m + rotation : m + rotation - size);
                const uint64_t pair = pair_of(keys[e], e);
                if (pair < last && pair > best) best = pair;
            }
            for (int distance = 1; distance < threads; distance *= 2)
                best = max(best, __shfl_xor_sync(kFullMask, best, distance));
            last = best;
            sum += from_key(key_of(best));
        }
        if (part == 0 && group < groups) group_keys[group] = to_key(sum);
    }
    __syncwarp();
    for (int first = 0; first < groups; first += at_once) {
        const int group = first + warp_lane() / threads;
        if (group >= groups) continue;
        const uint64_t pair = pair_of(group_keys[group], group);
        int better = 0;
        for (int g = 0; g < groups; ++g) better += pair_of(group_keys[g], g) > pair;
        if (better < kept) continue;
        for (int m = part; m < size; m += threads) keys[group * size + m] = kExcluded;
    }
    __syncwarp();
}

}  // namespace fp8flow::hopper::router
