// SPDX-License-Identifier: MIT
// The router's projection and its gradients: fp32 fma over blocks of the contraction in ascending order,
// vectorised across outputs. Four steps of the contraction share one load and store of the accumulators;
// their order stays.
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <vector>

namespace fp8flow {

namespace {

// A block of the weight (kColumns of all experts) is reused by kTokens tokens while it is in cache.
constexpr int64_t kColumns = 128, kTokens = 64;
static_assert(op::kRouterBlock % kColumns == 0 && op::kRouterBlock % kTokens == 0);

// out[i] = fma chain over `terms` ascending: out[i] += sum_j factors[j] * rows[j][i], rows `stride` apart.
void add_products(const float* factors, int64_t terms, const float* rows, int64_t stride, int64_t count,
                  float* __restrict__ out) {
    int64_t j = 0;
    for (; j + 4 <= terms; j += 4) {
        const float f0 = factors[j], f1 = factors[j + 1], f2 = factors[j + 2], f3 = factors[j + 3];
        const float *r0 = rows + j * stride, *r1 = r0 + stride, *r2 = r1 + stride, *r3 = r2 + stride;
        for (int64_t i = 0; i < count; ++i)
            out[i] = fma_float(f3, r3[i],
                               fma_float(f2, r2[i], fma_float(f1, r1[i], fma_float(f0, r0[i], out[i]))));
    }
    for (; j < terms; ++j)
        for (int64_t i = 0; i < count; ++i) out[i] = fma_float(factors[j], rows[j * stride + i], out[i]);
}

// out = sums for the first block of a contraction, out += sums for the others.
void add_block(Gradient mode, const float* sums, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = mode == Gradient::overwrite ? sums[i] : out[i] + sums[i];
}

std::vector<float> as_floats(const TensorView& view) {
    std::vector<float> values(static_cast<std::size_t>(view.numel()));
    reference::load_floats(view, 0, view.numel(), values.data());
    return values;
}

}  // namespace

void ReferenceOps::do_router_logits(const op::RouterLogits& args, const Launch&) {
    const int64_t tokens = args.x.dim(0), hidden = args.x.dim(1), experts = args.weight.dim(0);
    const std::vector<float> weight = as_floats(args.weight);
    std::vector<float> panel(weight.size());  // [H, E]: experts contiguous
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t h = 0; h < hidden; ++h) panel[h * experts + e] = weight[e * hidden + h];
    float* logits = args.logits.as<float>();
#pragma omp parallel
    {
        std::vector<float> x(kColumns), sums(static_cast<std::size_t>(kTokens * experts));
#pragma omp for schedule(static)
        for (int64_t start = 0; start < tokens; start += kTokens)
            for (int64_t block = 0; block < hidden; block += op::kRouterBlock) {
                const int64_t end = std::min(hidden, block + op::kRouterBlock),
                              count = std::min(kTokens, tokens - start);
                std::fill(sums.begin(), sums.end(), 0.0f);
                for (int64_t first = block; first < end; first += kColumns)
                    for (int64_t t = 0; t < count; ++t) {
                        const int64_t columns = std::min(kColumns, end - first);
                        reference::load_floats(args.x, (start + t) * hidden + first, columns, x.data());
                        add_products(x.data(), columns, panel.data() + first * experts, experts, experts,
                                     sums.data() + t * experts);
                    }
                add_block(block == 0 ? Gradient::overwrite : Gradient::accumulate, sums.data(),
                          count * experts, logits + start * experts);
            }
    }
}

void ReferenceOps::do_router_logits_backward(const op::RouterLogitsBackward& args, const Launch&) {
    const int64_t tokens = args.x.dim(0), hidden = args.x.dim(1), experts = args.weight.dim(0);
    const float* dlogits = args.dlogits.as<float>();
    const std::vector<float> weight = as_floats(args.weight);
#pragma omp parallel
    {
        std::vector<float> sum(kColumns), residual(kColumns);
#pragma omp for schedule(static)
        for (int64_t start = 0; start < tokens; start += kTokens)
            for (int64_t first = 0; first < hidden; first += kColumns)
                for (int64_t t = start; t < std::min(tokens, start + kTokens); ++t) {
                    const int64_t columns = std::min(kColumns, hidden - first), at = t * hidden + first;
                    std::fill(sum.begin(), sum.end(), 0.0f);
                    add_products(dlogits + t * experts, experts, weight.data() + first, hidden, columns,
                                 sum.data());
                    if (args.dx_in) {
                        reference::load_floats(args.dx_in, at, columns, residual.data());
                        for (int64_t h = 0; h < columns; ++h) sum[h] += residual[h];
                    }
                    reference::store_floats(args.dx, at, columns, sum.data());
                }
    }

    // dW: each thread takes blocks of columns, so that a block of x and its sums for all experts stay in
    // cache
    const int64_t blocks = ceil_div(hidden, kColumns);
    float* dweight = args.dweight.as<float>();
#pragma omp parallel
    {
        std::vector<float> sums(static_cast<std::size_t>(experts * kColumns)), totals(sums.size());
        std::vector<float> x(kTokens * kColumns), factors(kTokens);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = block * kColumns, columns = std::min(kColumns, hidden - first);
            std::fill(totals.begin(), totals.end(), 0.0f);
            for (int64_t start = 0; start < tokens; start += kTokens) {
                const int64_t count = std::min(kTokens, tokens - start);
                if (start % op::kRouterBlock == 0) std::fill(sums.begin(), sums.end(), 0.0f);
                for (int64_t t = 0; t < count; ++t)
                    reference::load_floats(args.x, (start + t) * hidden + first, columns,
                                           x.data() + t * kColumns);
                for (int64_t e = 0; e < experts; ++e) {
                    for (int64_t t = 0; t < count; ++t) factors[t] = dlogits[(start + t) * experts + e];
                    add_products(factors.data(), count, x.data(), kColumns, columns,
                                 sums.data() + e * kColumns);
                }
                if ((start + kTokens) % op::kRouterBlock == 0 || start + kTokens >= tokens)
                    add_block(start < op::kRouterBlock ? Gradient::overwrite : Gradient::accumulate,
                              sums.data(), experts * kColumns, totals.data());
            }
            for (int64_t e = 0; e < experts; ++e)
                add_block(args.dweight_mode, totals.data() + e * kColumns, columns,
                          dweight + e * hidden + first);
        }
    }
}

}  // namespace fp8flow
