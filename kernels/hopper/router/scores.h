// SPDX-License-Identifier: MIT
// Scores, sums and probabilities for the router's top-k kernels. One warp works on one token and keeps its
// logits in registers. Operations are those of kernels/reference/router.cpp, in the same order, so the bits
// are the same. Read next: choice.h, top_k.cu.
#pragma once

#include "kernels/core/error.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/ops/router.h"

#include <bit>

namespace fp8flow::hopper::router {

constexpr float kScoreSumEps = 1e-20f;  // Megatron-LM, as in the reference
constexpr int64_t kMaxExperts = 1024;

__device__ __forceinline__ int warp_lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// The experts of a thread: lane, lane + 32, ..., at most kPlaces. kFull: all of them exist. A thread computes
// one address; the offsets of its experts are constants, which saves a fifth of the instructions.
template <int kPlaces, bool kFull> struct Row {
    static constexpr int kCount = kPlaces;
    int count;
    __device__ __forceinline__ int experts() const { return kFull ? kPlaces * kWarpSize : count; }
    __device__ __forceinline__ int expert(int j) const { return warp_lane() + j * kWarpSize; }
    __device__ __forceinline__ bool has(int j) const { return kFull || expert(j) < count; }
    __device__ __forceinline__ void load(const float* values, float (&x)[kPlaces]) const {
        const float* const own = values + warp_lane();
#pragma unroll
        for (int j = 0; j < kPlaces; ++j) x[j] = has(j) ? own[j * kWarpSize] : bits_float(0x7FC00000u);
    }
    __device__ __forceinline__ void store(const float (&x)[kPlaces], float* values) const {
        float* const own = values + warp_lane();
#pragma unroll
        for (int j = 0; j < kPlaces; ++j)
            if (has(j)) own[j * kWarpSize] = x[j];
    }
};

// Calls f(Row) with the narrowest row that holds the experts.
template <class F> void with_row(int64_t experts, F f) {
    FP8FLOW_CHECK(experts <= kMaxExperts, "moe.num_experts is {}, the router's kernels support {}", experts,
                  kMaxExperts);
    const int count = static_cast<int>(experts);
    switch (std::bit_ceil(static_cast<uint64_t>(ceil_div(experts, kWarpSize)))) {
        case 1: return f(Row<1, false>{count});
        case 2: return experts == 64 ? f(Row<2, true>{count}) : f(Row<2, false>{count});
        case 4: return experts == 128 ? f(Row<4, true>{count}) : f(Row<4, false>{count});
        case 8: return experts == 256 ? f(Row<8, true>{count}) : f(Row<8, false>{count});
        case 16: return experts == 512 ? f(Row<16, true>{count}) : f(Row<16, false>{count});
        default: return f(Row<32, false>{count});
    }
}

// Prefetches the logits of a warp's tokens [first, end) into L2, before the wait for the preceding kernel
// (PDL).
__device__ __forceinline__ void prefetch_rows(const float* logits, int64_t first, int64_t end, int experts) {
    constexpr int kLine = 128 / sizeof(float);
#pragma unroll 1
    for (int64_t at = first * experts + warp_lane() * kLine; at < end * experts; at += kWarpSize * kLine)
        prefetch_line_to_l2(logits + at);
}

template <int kCount> __device__ __forceinline__ float sum_of(const float (&values)[kCount]) {
    float lane = 0.0f;
#pragma unroll
    for (int j = 0; j < kCount; ++j) lane += values[j];
    return warp_sum(lane);
}

// A value as an unsigned integer that sorts in the same order: NaN lowest (1), +0 = -0. 0 marks experts that
// may not be chosen.
constexpr uint32_t kExcluded = 0;
constexpr uint32_t kNanKey = 1;
__device__ __forceinline__ uint32_t to_key(float value) {
    const uint32_t bits = float_bits(value + 0.0f);  // -0 + 0 = +0
    const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
    return value == value ? bits ^ (negative | 0x80000000u) : kNanKey;
}
__device__ __forceinline__ float from_key(uint32_t key) {
    if (key == kNanKey) return bits_float(0x7FC00000u);
    return bits_float((key & 0x80000000u) != 0 ? key & 0x7FFFFFFFu : ~key);
}
template <int kCount> __device__ __forceinline__ uint32_t max_key(const uint32_t (&keys)[kCount]) {
    uint32_t largest = keys[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) largest = max(largest, keys[j]);
    return largest;
}

// The largest value of a token; NaN only if all are NaN.
template <int kCount> __device__ __forceinline__ float max_logit(const float (&x)[kCount]) {
    float largest = x[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) largest = fmaxf(largest, x[j]);
    return from_key(__reduce_max_sync(kFullMask, to_key(largest)));
}

// Applies f to each value, one after the other, through shared memory of the warp ([E], 0 again afterwards).
// For rare, expensive f.
template <class R, class F>
__device__ __forceinline__ void map_in_shared(const R& row, float (&v)[R::kCount], float* shared,
                                              const F& f) {
#pragma unroll
    for (int j = 0; j < R::kCount; ++j)
        if (row.has(j)) shared[row.expert(j)] = v[j];
#pragma unroll 1
    for (int e = warp_lane(); e < row.experts(); e += kWarpSize) shared[e] = f(shared[e]);
#pragma unroll
    for (int j = 0; j < R::kCount; ++j)
        if (row.has(j)) {
            v[j] = shared[row.expert(j)];
            shared[row.expert(j)] = 0.0f;
        }
}

// terms = near_of(terms) if the whole warp may use it, else far_of(terms), which has the same bits; 0 without
// an expert. Returns their sum.
template <class R, class Near, class Far>
__device__ __forceinline__ float sum_of_terms(const R& row, float (&terms)[R::kCount], bool near,
                                              float* shared, const Near& near_of, const Far& far_of) {
    if (__all_sync(kFullMask, near)) {
#pragma unroll
        for (int j = 0; j < R::kCount; ++j) terms[j] = row.has(j) ? near_of(terms[j]) : 0.0f;
    } else {
        map_in_shared(row, terms, shared, far_of);
#pragma unroll
        for (int j = 0; j < R::kCount; ++j) terms[j] = row.has(j) ? terms[j] : 0.0f;
    }
    return sum_of(terms);
}

// terms = exp(logits - largest), 0 without an expert. Returns their sum. Arguments within kNearScore of 0 use
// a shorter exponential with the same bits.
constexpr float kNearScore = 64.0f;
static_assert(kNearScore <= kNear);
template <class R>
__device__ __forceinline__ float softmax_terms(const R& row, const float (&logits)[R::kCount], float largest,
                                               float* shared, float (&terms)[R::kCount]) {
    const float bound = largest - kNearScore;
    bool near = fabsf(largest) <= 0x1p100f;  // false if all are -infinity
#pragma unroll
    for (int j = 0; j < R::kCount; ++j) {
        near = near & (logits[j] >= bound | !row.has(j));  // no branches
        terms[j] = logits[j] - largest;
    }
    return sum_of_terms(
        row, terms, near, shared, [](float x) { return exp_near(x); }, [](float x) { return exp_float(x); });
}

// scores = sigmoid(logits), 0 without an expert. Returns their sum.
template <class R>
__device__ __forceinline__ float sigmoid_terms(const R& row, const float (&logits)[R::kCount], float* shared,
                                               float (&scores)[R::kCount]) {
    bool near = true;
#pragma unroll
    for (int j = 0; j < R::kCount; ++j) {
        near = near & (fabsf(logits[j]) <= kNearScore | !row.has(j));
        scores[j] = logits[j];
    }
    return sum_of_terms(
        row, scores, near, shared, [](float x) { return sigmoid_near(x); },
        [](float x) { return sigmoid_float(x); });
}

__device__ __forceinline__ bool is_post_softmax(const op::RouterOptions& options) {
    return options.score == op::Score::softmax && !options.pre_softmax;
}

// Sigmoid scores of the chosen are divided by their sum.
__device__ __forceinline__ bool is_normalised(const op::RouterOptions& options, int topk) {
    return options.normalise && topk > 1;
}

// Probabilities of a token's choices before scaling: base(logit) times a common factor. Thread l has choices
// l, l + 32,
// ... The first is in a register; others (K > 32 is rare) are computed again where they are needed.
struct ChosenProbs {
    bool sigmoid;
    float shift, factor;
    float own;  // base of choice k = lane
    __device__ __forceinline__ float base(float logit) const {
        return sigmoid ? sigmoid_float(logit) : exp_float(logit - shift);
    }
    template <class LogitOf> __device__ __forceinline__ float base_of(int k, const LogitOf& logit_of) const {
        return k < kWarpSize ? own : base(logit_of(k));
    }
};

// own: the logit of choice k = lane, logit_of(k) that of any choice. largest, sum: of the token's softmax
// over all experts (pre-softmax).
template <class LogitOf>
__device__ __forceinline__ ChosenProbs chosen_probs(const op::RouterOptions& options, int topk, float largest,
                                                    float sum, float own, const LogitOf& logit_of) {
    const bool has_own = warp_lane() < topk;
    ChosenProbs probs{options.score == op::Score::sigmoid, largest, 1.0f, 0.0f};
    if (is_post_softmax(options)) {
        uint32_t best = has_own ? to_key(own) : kExcluded;
#pragma unroll 1
        for (int k = warp_lane() + kWarpSize; k < topk; k += kWarpSize) best = max(best, to_key(logit_of(k)));
        probs.shift = from_key(__reduce_max_sync(kFullMask, best));
    }
    if (has_own) probs.own = probs.base(own);
    if (!probs.sigmoid && options.pre_softmax) {
        probs.factor = div_float(1.0f, sum);
    } else if (!probs.sigmoid || is_normalised(options, topk)) {
        float lane = probs.own;
#pragma unroll 1
        for (int k = warp_lane() + kWarpSize; k < topk; k += kWarpSize) lane += probs.base(logit_of(k));
        probs.factor = div_float(1.0f, warp_sum(lane) + (probs.sigmoid ? kScoreSumEps : 0.0f));
    }
    return probs;
}

}  // namespace fp8flow::hopper::router
