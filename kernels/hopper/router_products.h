// The router's three products on BF16 rows, fast: logits, dx and dweight. What router_logits.cu launches where types and alignment allow it.
#pragma once

#include "kernels/hopper/launch.h"

namespace fp8flow::hopper {

// sums[b, t, e] = sum over the columns of block b (op::kRouterBlock, ascending) of x[t, h] * weight[e, h].
struct LogitSums {
    const void* x;       // bf16 [tokens, hidden], 16-byte aligned, hidden a multiple of 8
    const void* weight;  // bf16 [experts, hidden], the same
    int64_t tokens, hidden, experts;
    float* sums;
};
void launch_logit_sums(const LogitSums& job, const Launch& launch);

// sums[b, e, c] = sum over the tokens of block b, ascending, of dlogits[t, e] * x[t, c] of `columns` columns of rows `pitch` apart.
struct WeightSums {
    const float* dlogits;  // [tokens, experts]
    const void* x;         // bf16, 16-byte aligned, pitch and columns multiples of 8
    int64_t tokens, experts, columns, pitch;
    float* sums;
};
void launch_weight_sums(const WeightSums& job, const Launch& launch);

// dx[t, h] = bf16(sum over e, ascending, of dlogits[t, e] * weight[e, h], + dx_in[t, h]).
struct InputGradient {
    const float* dlogits;
    const void* weight;  // bf16 [experts, hidden], 16-byte aligned, hidden a multiple of 8
    const void* dx_in;   // bf16, or null; may be dx
    void* dx;            // bf16
    int64_t tokens, experts, hidden;
};
void launch_input_gradient(const InputGradient& job, const Launch& launch);

}  // namespace fp8flow::hopper
