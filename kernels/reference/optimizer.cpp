// The optimizer of the reference backend: sums of squares for the gradient norm, and AdamW on fp32 masters.
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <vector>

namespace fp8flow {

namespace {

// The sums of blocks of kNormSquaredBlock terms, each in ascending order.
template <class Term> std::vector<double> block_sums(int64_t count, Term term) {
    const int64_t blocks = ceil_div(count, op::kNormSquaredBlock);
    std::vector<double> sums(static_cast<std::size_t>(blocks));
#pragma omp parallel for
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t end = std::min(count, (block + 1) * op::kNormSquaredBlock);
        double sum = 0;
        for (int64_t i = block * op::kNormSquaredBlock; i < end; ++i) sum += term(i);
        sums[static_cast<std::size_t>(block)] = sum;
    }
    return sums;
}

}  // namespace

void ReferenceOps::do_norm_squared(const op::NormSquared& args, const Launch&) {
    const float* x = args.x.as<float>();
    if (args.x.numel() == 0) return;
    std::vector<double> sums = block_sums(
        args.x.numel(), [&](int64_t i) { return static_cast<double>(x[i]) * static_cast<double>(x[i]); });
    while (sums.size() > 1)
        sums = block_sums(static_cast<int64_t>(sums.size()),
                          [&](int64_t i) { return sums[static_cast<std::size_t>(i)]; });
    float* sum = args.sum.as<float>();
    *sum = static_cast<float>(static_cast<double>(*sum) + sums[0]);
}

void ReferenceOps::do_adamw(const op::AdamW& args, const Launch&) {
    if (args.status && *args.status.as<int32_t>() != 0) return;
    const float* grad = args.grad.as<float>();
    float* master = args.master.as<float>();
    float* first_moment = args.m.as<float>();
    float* second_moment = args.v.as<float>();
    const float grad_scale = *args.grad_scale.as<float>();
    const float lr = args.lr, beta1 = args.beta1, beta2 = args.beta2, eps = args.eps,
                weight_decay = args.weight_decay;
    const float correction1 = args.correction1, correction2 = args.correction2;
    const float rest1 = 1.0f - beta1, rest2 = 1.0f - beta2;
    const int64_t count = args.master.numel();
    constexpr int64_t kChunk = 4096;
#pragma omp parallel for
    for (int64_t start = 0; start < count; start += kChunk) {
        const int64_t end = std::min(count, start + kChunk);
#pragma omp simd
        for (int64_t i = start; i < end; ++i) {
            const float g = grad[i] * grad_scale;
            const float m = beta1 * first_moment[i] + rest1 * g;
            const float v = beta2 * second_moment[i] + rest2 * (g * g);
            const float step = div_float(m, correction1) / (sqrt_float(div_float(v, correction2)) + eps);
            first_moment[i] = m;
            second_moment[i] = v;
            master[i] = master[i] - lr * (step + weight_decay * master[i]);
        }
        if (args.copy) reference::store_floats(args.copy, start, end - start, master + start);
    }
}

}  // namespace fp8flow
