// SPDX-License-Identifier: MIT
// The optimizer of the reference backend: sums of squares for the gradient norm, the clipping factor, and
// AdamW on FP32 masters.
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <span>
#include <vector>

namespace fp8flow {

namespace {

using reference::sum_in_halves;

constexpr int64_t kHalved = 32;  // neighbouring sums that are added in halves

// Block sums to strands b % kBlockStrands, these in halves.
double sum_of_blocks(std::span<const double> block_sums) {
    constexpr int64_t kStrands = op::kNormSquaredBlockStrands;
    static_assert(kStrands == kHalved * kHalved);
    double strands[kStrands] = {}, sums[kHalved];
    for (size_t block = 0; block < block_sums.size(); ++block) strands[block % kStrands] += block_sums[block];
    for (int64_t s = 0; s < kHalved; ++s) sums[s] = sum_in_halves<kHalved>(strands + s * kHalved);
    return sum_in_halves<kHalved>(sums);
}

void add_once(const TensorView& sum, double addend) {
    float* value = sum.as<float>();
    *value = static_cast<float>(static_cast<double>(*value) + addend);
}

// The squares of one block, in the order that kernels/ops/optimizer.h states.
double block_of_squares(const TensorView& values, int64_t begin, int64_t count) {
    float x[op::kNormSquaredBlock];
    reference::load_floats(values, begin, count, x);
    constexpr int64_t kStrands = op::kNormSquaredStrands, kFour = kStrands / kHalved;
    double strands[kStrands] = {}, sums[kHalved];
    for (int64_t first = 0; first < count; first += kStrands)
        for (int64_t s = 0; s < std::min(kStrands, count - first); ++s)
            strands[s] += static_cast<double>(x[first + s]) * static_cast<double>(x[first + s]);
    for (int64_t s = 0; s < kHalved; ++s) {
        const double* four = strands + s * kFour;
        sums[s] = (four[0] + four[1]) + (four[2] + four[3]);
    }
    return sum_in_halves<kHalved>(sums);
}

// Values from `start` on; `first`: the place of the moment's first element in the whole tensor.
void store_moment(const TensorView& moment, uint64_t key, int64_t first, int64_t start, int64_t count,
                  const float* values) {
    if (moment.dtype == DType::f32) {
        std::copy_n(values, count, moment.as<float>() + start);
        return;
    }
    for (int64_t i = 0; i < count; ++i)
        moment.as<Bf16>()[start + i] =
            round_stochastically(values[i], rounding_bits_of_element(key, first + start + i));
}

}  // namespace

void ReferenceOps::do_norm_squared(const op::NormSquared& args, const Launch&) {
    constexpr int64_t kBlockSize = op::kNormSquaredBlock;
    const int64_t count = args.x ? args.x.numel() : 0,
                  blocks = args.x ? ceil_div(count, kBlockSize) : args.block_sums.numel();
    if (blocks == 0) return;
    std::vector<double> own(static_cast<std::size_t>(args.block_sums ? 0 : blocks));
    double* const block_sums = args.block_sums ? args.block_sums.as<double>() : own.data();
    if (args.x) {
#pragma omp parallel for
        for (int64_t block = 0; block < blocks; ++block)
            block_sums[block] = block_of_squares(args.x, block * kBlockSize,
                                                 std::min(kBlockSize, count - block * kBlockSize));
    }
    if (args.sum) add_once(args.sum, sum_of_blocks({block_sums, static_cast<std::size_t>(blocks)}));
}

void ReferenceOps::do_add_squares(const op::AddSquares& args, const Launch&) {
    static_assert(op::kAddSquaresStrands == kHalved);
    const int64_t count = args.squares.numel();
    if (count == 0) return;
    const double* squares = args.squares.as<double>();
    std::vector<double> block_sums;
    for (int64_t begin = 0; begin < count; begin += op::kAddSquaresBlock) {
        double strands[kHalved] = {};
        for (int64_t i = begin; i < std::min(count, begin + op::kAddSquaresBlock); ++i)
            strands[i % kHalved] += squares[i];
        block_sums.push_back(sum_in_halves<kHalved>(strands));
    }
    add_once(args.sum, sum_of_blocks(block_sums));
}

void ReferenceOps::do_clip_factor(const op::ClipFactor& args, const Launch&) {
    const float norm = sqrt_float(*args.norm_squared.as<float>());
    int32_t* status = args.status.as<int32_t>();
    if (!(norm < bits_float(0x7F800000u)) && *status == 0) *status = op::kStepNonFinite;
    const float limit = args.limit ? *args.limit.as<float>() : 0.0f;
    if (limit > 0.0f && norm > limit && *status == 0) *status = op::kStepDiverged;
    const float factor = div_float(args.clip, norm + 1e-6f);
    *args.norm.as<float>() = norm;
    *args.factor.as<float>() = args.clip > 0.0f && factor < 1.0f ? factor : 1.0f;
}

void ReferenceOps::do_adamw(const op::AdamW& args, const Launch&) {
    if (args.status && *args.status.as<int32_t>() != 0) return;
    float* master = args.master.as<float>();
    const float grad_scale = *args.grad_scale.as<float>();
    const float* schedule = args.schedule.as<float>();
    const float lr = schedule[0], correction1 = schedule[1], correction2 = schedule[2];
    const float beta1 = args.beta1, beta2 = args.beta2, eps = args.eps, weight_decay = args.weight_decay;
    const uint64_t step_key =
        args.rounding_step ? static_cast<uint64_t>(*args.rounding_step.as<int64_t>()) : 0;
    const float rest1 = 1.0f - beta1, rest2 = 1.0f - beta2;
    const int64_t count = args.master.numel();
    constexpr int64_t kChunk = 4096;
#pragma omp parallel for
    for (int64_t start = 0; start < count; start += kChunk) {
        const int64_t end = std::min(count, start + kChunk);
        float grad[kChunk], first_moment[kChunk], second_moment[kChunk];
        reference::load_floats(args.grad, start, end - start, grad);
        reference::load_floats(args.m, start, end - start, first_moment);
        reference::load_floats(args.v, start, end - start, second_moment);
#pragma omp simd
        for (int64_t i = 0; i < end - start; ++i) {
            const float g = grad[i] * grad_scale;
            const float m = beta1 * first_moment[i] + rest1 * g;
            const float v = beta2 * second_moment[i] + rest2 * (g * g);
            const float step = div_float(m, correction1) / (sqrt_float(div_float(v, correction2)) + eps);
            first_moment[i] = m;
            second_moment[i] = v;
            master[start + i] = master[start + i] - lr * (step + weight_decay * master[start + i]);
        }
        store_moment(args.m, args.m_key ^ step_key, args.first_element, start, end - start, first_moment);
        store_moment(args.v, args.v_key ^ step_key, args.first_element, start, end - start, second_moment);
        if (args.copy) reference::store_floats(args.copy, start, end - start, master + start);
    }
}

}  // namespace fp8flow
