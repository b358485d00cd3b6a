// The router's three products of BF16 rows on tensor cores: logits, dx and dweight. What router_logits.cu launches where types and alignment
// allow it.
#pragma once

#include "kernels/hopper/launch.h"

namespace fp8flow::hopper {

// logits[t, e] = the sum over h of x[t, h] * weight[e, h]: blocks of op::kRouterBlock columns, then the block sums in ascending order.
struct LogitProduct {
    const void* x;       // bf16 [tokens, hidden], 16-byte aligned, hidden a multiple of 8
    const void* weight;  // bf16 [experts, hidden], the same
    int64_t tokens, hidden, experts;
    float* logits;
};
void launch_logits(const LogitProduct& job, const Launch& launch);

// dlogits as the sum of two BF16 numbers an element, [2, tokens, pitch]; zeros past the experts. 16 of the 24 bits of a significand stay.
struct GradientParts {
    const uint16_t* data;
    int64_t tokens, experts;
    static int64_t pitch_of(int64_t experts) { return (experts + 7) / 8 * 8; }
    static int64_t elements(int64_t tokens, int64_t experts) { return 2 * tokens * pitch_of(experts); }
};
// `parts`: GradientParts::elements, 16-byte aligned.
GradientParts launch_gradient_parts(const float* dlogits, int64_t tokens, int64_t experts, uint16_t* parts,
                                    const Launch& launch);

// dweight[e, h] (+)= the sum over t of dlogits[t, e] * x[t, h]: blocks of op::kRouterBlock tokens, then the block sums in ascending order.
struct WeightGradient {
    GradientParts dlogits;
    const void* x;  // bf16 [tokens, hidden], 16-byte aligned, hidden a multiple of 8
    int64_t hidden;
    Gradient mode;
    float* dweight;
};
void launch_weight_gradient(const WeightGradient& job, const Launch& launch);

// dx[t, h] = bf16(the sum over e of dlogits[t, e] * weight[e, h], + dx_in[t, h]).
struct InputGradient {
    GradientParts dlogits;
    const void* weight;  // bf16 [experts, hidden], 16-byte aligned, hidden a multiple of 8
    const void* dx_in;   // bf16, or null; may be dx
    void* dx;            // bf16
    int64_t hidden;
};
void launch_input_gradient(const InputGradient& job, const Launch& launch);

}  // namespace fp8flow::hopper
