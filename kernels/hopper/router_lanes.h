// The router's tokens by eight lanes each, four tokens a warp, all scores of a token in registers: lane l holds the experts l, l + 8, ..., which
// are the project's eight lanes of a sum (kernels/reference/rows.h), so sums need no shared memory. For up to 256 experts; the same operations
// in the same order as router_device.h, so the same bits.
#pragma once

#include "kernels/hopper/router_device.h"

namespace fp8flow::hopper {

constexpr int kTokenLanes = kLaneCount, kTokensOfWarp = kWarpSize / kTokenLanes;
constexpr int kLanesThreads = 256, kLanesTokens = kLanesThreads / kTokenLanes;  // of a CTA
constexpr int kFewExperts = 64, kMostExperts = 256;                             // 8 or 32 a lane
constexpr int kMostChosen = 32;                                                 // 4 a lane

__device__ __forceinline__ int token_lane() { return static_cast<int>(threadIdx.x) % kTokenLanes; }
// Expert of register j.
__device__ __forceinline__ int expert_of(int j) { return token_lane() + j * kTokenLanes; }

__device__ __forceinline__ float lanes_largest(float v) {
#pragma unroll
    for (int mask = kTokenLanes / 2; mask > 0; mask /= 2)
        v = max_ignore_nan(v, __shfl_xor_sync(kWholeWarp, v, mask));
    return v;
}
__device__ __forceinline__ uint32_t lanes_max(uint32_t v) {
#pragma unroll
    for (int mask = kTokenLanes / 2; mask > 0; mask /= 2) v = max(v, __shfl_xor_sync(kWholeWarp, v, mask));
    return v;
}
__device__ __forceinline__ uint32_t lanes_min(uint32_t v) {
#pragma unroll
    for (int mask = kTokenLanes / 2; mask > 0; mask /= 2) v = min(v, __shfl_xor_sync(kWholeWarp, v, mask));
    return v;
}

// A row of `count` floats; NaN, which gives way to anything, past its end.
template <int N> __device__ __forceinline__ void lanes_load(const float* row, int count, float (&v)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = expert_of(j) < count ? row[expert_of(j)] : bits_float(0x7FC00000u);
}

// log(sum exp(v)) of the first `count`; s receives their softmax, zeros past it.
template <int N>
__device__ __forceinline__ float lanes_log_sum_exp(const float (&v)[N], int count, float (&s)[N]) {
    float largest = v[0];
#pragma unroll
    for (int j = 1; j < N; ++j) largest = max_ignore_nan(largest, v[j]);
    largest = lanes_largest(largest);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        s[j] = expert_of(j) < count ? exp_float(v[j] - largest) : 0.0f;
        sum += s[j];
    }
    sum = combine_lanes(sum);
#pragma unroll
    for (int j = 0; j < N; ++j)
        if (expert_of(j) < count) s[j] = div_float(s[j], sum);
    return largest + log_float(sum);
}

template <int N>
__device__ __forceinline__ void lanes_sigmoid(const float (&v)[N], int count, float (&s)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) s[j] = expert_of(j) < count ? sigmoid_float(v[j]) : 0.0f;
}

// Scores as the balancing losses see them; zeros past `count`.
template <int N>
__device__ __forceinline__ void lanes_normalized_scores(const float (&v)[N], int count, op::Score score,
                                                        float (&s)[N]) {
    if (score == op::Score::softmax) {
        lanes_log_sum_exp(v, count, s);
        return;
    }
    lanes_sigmoid(v, count, s);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += s[j];
    sum = combine_lanes(sum) + kScoreSumEps;
#pragma unroll
    for (int j = 0; j < N; ++j)
        if (expert_of(j) < count) s[j] = div_float(s[j], sum);
}

template <int N>
__device__ __forceinline__ void lanes_keys(const float (&v)[N], int count, uint32_t (&keys)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) keys[j] = expert_of(j) < count ? to_key(v[j]) : kExcluded;
}

// The topk best, best first, ties to the lowest index: use(k, expert) in all lanes of the token. Takes the chosen out of the keys.
template <int N, class Use>
__device__ __forceinline__ void lanes_choose(uint32_t (&keys)[N], int topk, const Use& use) {
    for (int k = 0; k < topk; ++k) {
        uint32_t largest = keys[0];
#pragma unroll
        for (int j = 1; j < N; ++j) largest = max(largest, keys[j]);
        largest = lanes_max(largest);
        uint32_t place = 0xFFFFFFFFu;
#pragma unroll
        for (int j = N - 1; j >= 0; --j)
            if (keys[j] == largest) place = static_cast<uint32_t>(expert_of(j));
        place = lanes_min(place);
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (place == static_cast<uint32_t>(expert_of(j))) keys[j] = kExcluded;
        use(k, static_cast<int>(place));
    }
}

// A token's row in shared memory: a word of space behind every 32, so that lanes can walk a group of experts each, and the rows of the four
// tokens of a warp in different banks.
template <int N> constexpr int kRowWords = N* kTokenLanes + kTokenLanes;
__device__ __forceinline__ int row_word(int expert) { return expert + expert / 32; }
static_assert(kMostExperts / 32 <= kTokenLanes);

// Excludes the experts of all groups but the group_topk best. A lane takes a group, of at most eight: its `counted` best, largest first, from
// `row`, where the token's keys are put for all its lanes to see.
template <int N>
__device__ __forceinline__ void lanes_exclude_groups(const op::RouterOptions& options, int experts, int topk,
                                                     uint32_t* row, uint32_t (&keys)[N]) {
    const int groups = static_cast<int>(options.num_groups),
              group_topk = static_cast<int>(options.group_topk);
    const int group_size = experts / groups, counted = topk / group_topk;
#pragma unroll
    for (int j = 0; j < N; ++j) row[row_word(expert_of(j))] = keys[j];
    __syncwarp();
    const int group = token_lane();
    uint32_t group_key = kExcluded;
    if (group < groups) {
        float sum = 0.0f;
        uint64_t previous = kNothingChosen;
        for (int i = 0; i < counted; ++i) {
            uint64_t best = 0;
#pragma unroll 4
            for (int n = 0; n < group_size; ++n) {
                const uint64_t pair = static_cast<uint64_t>(row[row_word(group * group_size + n)]) << 32 |
                                      (0xFFFFFFFFu - static_cast<uint32_t>(n));
                if (pair < previous && pair > best) best = pair;
            }
            sum += from_key(key_of(best));
            previous = best;
        }
        group_key = to_key(sum);
    }
    __syncwarp();
    bool chosen = false;
    for (int i = 0; i < group_topk; ++i) {
        const uint32_t largest = lanes_max(group_key);
        const uint32_t place = lanes_min(group_key == largest ? static_cast<uint32_t>(group) : 0xFFFFFFFFu);
        if (place == static_cast<uint32_t>(group)) {
            chosen = true;
            group_key = kExcluded;
        }
    }
    const uint32_t mine =
        __ballot_sync(kWholeWarp, chosen) >> (threadIdx.x % kWarpSize / kTokenLanes * kTokenLanes);
    const float per_group = 1.0f / static_cast<float>(group_size);
#pragma unroll
    for (int j = 0; j < N; ++j) {  // the middle of an expert is far from where groups meet
        const int of = static_cast<int>((static_cast<float>(expert_of(j)) + 0.5f) * per_group);
        if ((mine >> of & 1u) == 0) keys[j] = kExcluded;
    }
    __syncwarp();  // the row is free again
}

}  // namespace fp8flow::hopper
