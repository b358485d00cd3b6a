// SPDX-License-Identifier: MIT
// AdamW's update of one element, shared by the optimizer kernels. Contract: kernels/ops/optimizer.h.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/ops/optimizer.h"

namespace fp8flow::hopper {

struct AdamWArgs {
    const float* grad;
    float *master, *m, *v;
    void* copy;
    DType copy_dtype;
    int64_t count;
    const float* grad_scale;
    const int32_t* status;
    float lr, beta1, beta2, rest1, rest2, eps, weight_decay, correction1, correction2;
};

struct Element {
    float master, m, v;
};

__device__ __forceinline__ Element updated(const AdamWArgs& args, float grad_scale, float grad, Element old) {
    const float g = grad * grad_scale;
    const float m = args.beta1 * old.m + args.rest1 * g;
    const float v = args.beta2 * old.v + args.rest2 * (g * g);
    const float step =
        div_float(m, args.correction1) / (sqrt_float(div_float(v, args.correction2)) + args.eps);
    return {old.master - args.lr * (step + args.weight_decay * old.master), m, v};
}

inline AdamWArgs adamw_args(const op::AdamW& args) {
    return {.grad = args.grad.as<float>(),
            .master = args.master.as<float>(),
            .m = args.m.as<float>(),
            .v = args.v.as<float>(),
            .copy = args.copy ? args.copy.data : nullptr,
            .copy_dtype = args.copy.dtype,
            .count = args.master.numel(),
            .grad_scale = args.grad_scale.as<float>(),
            .status = args.status ? args.status.as<int32_t>() : nullptr,
            .lr = args.lr,
            .beta1 = args.beta1,
            .beta2 = args.beta2,
            .rest1 = 1.0f - args.beta1,
            .rest2 = 1.0f - args.beta2,
            .eps = args.eps,
            .weight_decay = args.weight_decay,
            .correction1 = args.correction1,
            .correction2 = args.correction2};
}

}  // namespace fp8flow::hopper
