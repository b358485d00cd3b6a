// What the router's kernels share: one warp works on one token, whose scores lie in shared memory. Scores, softmax and sums follow
// kernels/reference/router_scores.cpp operation by operation, so they have its bits.
#pragma once

#include "kernels/hopper/vector_io.h"
#include "kernels/ops/router.h"

namespace fp8flow::hopper {

constexpr int kWarpSize = 32;
constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;
constexpr float kScoreSumEps = 1e-20f;  // Megatron-LM, as in the reference
constexpr int kMaxTokenWarps = 8;
constexpr int64_t kSharedBytes = 48 << 10;  // what a CTA gets without asking

// Warps of a CTA whose tokens need `floats` words of shared memory each.
inline int token_warps(int64_t floats) {
    const int64_t bytes = floats * static_cast<int64_t>(sizeof(float));
    FP8FLOW_CHECK(bytes <= kSharedBytes,
                  "the router needs {} bytes of shared memory per token, has {}; lower num_experts", bytes,
                  kSharedBytes);
    return static_cast<int>(std::min<int64_t>(kMaxTokenWarps, kSharedBytes / std::max<int64_t>(bytes, 1)));
}

__device__ __forceinline__ int warp_lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// Sum of values[0..count) in the project's eight lanes; every thread gets it. The values must be visible to the warp.
__device__ __forceinline__ float warp_lane_sum(const float* values, int count) {
    float lane = 0.0f;
    for (int i = warp_lane() % kLaneCount; i < count; i += kLaneCount) lane += values[i];
    return combine_lanes(lane);
}
__device__ __forceinline__ float warp_lane_dot(const float* a, const float* b, int count) {
    float lane = 0.0f;
    for (int i = warp_lane() % kLaneCount; i < count; i += kLaneCount) lane = fma_float(a[i], b[i], lane);
    return combine_lanes(lane);
}

// log(sum exp(values)) of a token; softmax (shared memory, visible to the warp afterwards) receives the probabilities. values may be
// global or shared and may be the same array as softmax.
__device__ __forceinline__ float warp_log_sum_exp(const float* values, int count, float* softmax) {
    float largest = bits_float(0x7FC00000u);  // NaN: gives way to anything
    for (int i = warp_lane(); i < count; i += kWarpSize) largest = max_ignore_nan(largest, values[i]);
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2)
        largest = max_ignore_nan(largest, __shfl_xor_sync(kWholeWarp, largest, mask));
    for (int i = warp_lane(); i < count; i += kWarpSize) softmax[i] = exp_float(values[i] - largest);
    __syncwarp();
    const float sum = warp_lane_sum(softmax, count);
    __syncwarp();
    for (int i = warp_lane(); i < count; i += kWarpSize) softmax[i] = div_float(softmax[i], sum);
    __syncwarp();
    return largest + log_float(sum);
}

// Scores as the balancing losses see them: softmax, or sigmoid / (sum + eps).
__device__ __forceinline__ void warp_normalized_scores(const float* logits, int experts, op::Score score,
                                                       float* scores) {
    if (score == op::Score::softmax) {
        warp_log_sum_exp(logits, experts, scores);
        return;
    }
    for (int e = warp_lane(); e < experts; e += kWarpSize) scores[e] = sigmoid_float(logits[e]);
    __syncwarp();
    const float sum = warp_lane_sum(scores, experts) + kScoreSumEps;
    __syncwarp();
    for (int e = warp_lane(); e < experts; e += kWarpSize) scores[e] = div_float(scores[e], sum);
    __syncwarp();
}

// ---- choice ---------------------------------------------------------------------------------------------------------------------
// A value as an unsigned number of the same order: NaN lowest (1), +0 = -0; 0 is kept for what may not be chosen.
constexpr uint32_t kExcluded = 0;
constexpr uint32_t kNanKey = 1;
__device__ __forceinline__ uint32_t to_key(float value) {
    uint32_t bits = float_bits(value);
    if (is_nan_bits(bits)) return kNanKey;
    if (value == 0.0f) bits = 0;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_key(uint32_t key) {
    if (key == kNanKey) return bits_float(0x7FC00000u);
    return bits_float((key & 0x80000000u) != 0 ? key & 0x7FFFFFFFu : ~key);
}

// The place of the best key that comes after `previous` (a pair as returned; ~0: none yet): the largest, ties to the lowest index. The
// pair is (key, ~index); all threads get it. 0: nothing left.
__device__ __forceinline__ uint64_t warp_next_best(const uint32_t* keys, int count, uint64_t previous) {
    uint64_t best = 0;
    for (int i = warp_lane(); i < count; i += kWarpSize) {
        const uint64_t pair = static_cast<uint64_t>(keys[i]) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(i));
        if (keys[i] != kExcluded && pair < previous && pair > best) best = pair;
    }
    const uint32_t key = static_cast<uint32_t>(best >> 32), largest = __reduce_max_sync(kWholeWarp, key);
    const uint32_t place =
        __reduce_max_sync(kWholeWarp, key == largest ? static_cast<uint32_t>(best) : uint32_t{0});
    return static_cast<uint64_t>(largest) << 32 | place;
}
__device__ __forceinline__ int index_of(uint64_t pair) {
    return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(pair));
}
__device__ __forceinline__ uint32_t key_of(uint64_t pair) { return static_cast<uint32_t>(pair >> 32); }
constexpr uint64_t kNothingChosen = ~uint64_t{0};

// The topk best of the keys (shared memory, visible to the warp), best first, ties to the lowest index: use(k, index) in all threads. Up to
// 256 keys stand in registers, eight a thread: a choice is a maximum of the keys, a minimum of the indices that have it, and the removal
// of the chosen (about 35 instructions, where a search of pairs in shared memory takes over 100).
constexpr int kKeysInRegisters = 8;
template <class Use>
__device__ __forceinline__ void warp_choose(const uint32_t* keys, int count, int topk, const Use& use) {
    if (count > kKeysInRegisters * kWarpSize) {
        uint64_t best = kNothingChosen;
        for (int k = 0; k < topk; ++k) {
            best = warp_next_best(keys, count, best);
            use(k, index_of(best));
        }
        return;
    }
    uint32_t own[kKeysInRegisters];
#pragma unroll
    for (int j = 0; j < kKeysInRegisters; ++j) {
        const int i = warp_lane() + j * kWarpSize;
        own[j] = i < count ? keys[i] : kExcluded;
    }
    for (int k = 0; k < topk; ++k) {
        uint32_t largest = own[0];
#pragma unroll
        for (int j = 1; j < kKeysInRegisters; ++j) largest = max(largest, own[j]);
        largest = __reduce_max_sync(kWholeWarp, largest);
        uint32_t place = 0xFFFFFFFFu;
#pragma unroll
        for (int j = kKeysInRegisters - 1; j >= 0; --j)
            if (own[j] == largest) place = static_cast<uint32_t>(warp_lane() + j * kWarpSize);
        place = __reduce_min_sync(kWholeWarp, place);
#pragma unroll
        for (int j = 0; j < kKeysInRegisters; ++j)
            if (place == static_cast<uint32_t>(warp_lane() + j * kWarpSize)) own[j] = kExcluded;
        use(k, static_cast<int>(place));
    }
}

}  // namespace fp8flow::hopper
