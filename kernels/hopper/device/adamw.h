// SPDX-License-Identifier: MIT
// AdamW's update of one element and of four, shared by the optimizer kernels, with gradient and moments in
// FP32 or BF16. Contract: kernels/ops/optimizer.h.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/core/stochastic_rounding.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/widened.h"
#include "kernels/ops/optimizer.h"

#include <type_traits>

namespace fp8flow::hopper {

struct AdamWArgs {
    const void* grad;
    float* master;
    void *m, *v, *copy;
    DType copy_dtype;
    int64_t count, first_element;
    uint64_t m_key, v_key;
    const int64_t* rounding_step;
    const float *schedule, *grad_scale;
    const int32_t* status;
    float beta1, beta2, rest1, rest2, eps, weight_decay;
};

// Values that change from step to step, read once per thread.
struct AdamWStep {
    float grad_scale, lr, correction1, correction2;
    uint64_t m_key, v_key;
};
__device__ __forceinline__ AdamWStep adamw_step(const AdamWArgs& args) {
    const uint64_t step_key = args.rounding_step != nullptr ? static_cast<uint64_t>(*args.rounding_step) : 0;
    return {*args.grad_scale, args.schedule[0],      args.schedule[1],
            args.schedule[2], args.m_key ^ step_key, args.v_key ^ step_key};
}

// Types of the gradient and of the moments: float or Bf16.
template <class G, class M, class V> struct AdamWTypes {
    using Grad = G;
    using First = M;
    using Second = V;
};

struct Element {
    float master, m, v;
};

__device__ __forceinline__ Element updated(const AdamWArgs& args, const AdamWStep& its, float grad,
                                           Element old) {
    const float g = grad * its.grad_scale;
    const float m = args.beta1 * old.m + args.rest1 * g;
    const float v = args.beta2 * old.v + args.rest2 * (g * g);
    const float step = div_float(m, its.correction1) / (sqrt_float(div_float(v, its.correction2)) + args.eps);
    return {old.master - its.lr * (step + args.weight_decay * old.master), m, v};
}

// ---- one element
template <class T>
__device__ __forceinline__ void store_state(void* to, int64_t i, float value, uint64_t key, int64_t element) {
    if constexpr (std::is_same_v<T, float>)
        static_cast<float*>(to)[i] = value;
    else
        static_cast<Bf16*>(to)[i] = round_stochastically(value, rounding_bits_of_element(key, element));
}

// Returns the new master.
template <class Types>
__device__ __forceinline__ float step_one(const AdamWArgs& args, const AdamWStep& its, int64_t i) {
    using First = typename Types::First;
    using Second = typename Types::Second;
    const Element now = updated(args, its, widened(static_cast<const typename Types::Grad*>(args.grad)[i]),
                                {args.master[i], widened(static_cast<const First*>(args.m)[i]),
                                 widened(static_cast<const Second*>(args.v)[i])});
    args.master[i] = now.master;
    store_state<First>(args.m, i, now.m, its.m_key, args.first_element + i);
    store_state<Second>(args.v, i, now.v, its.v_key, args.first_element + i);
    return now.master;
}

// ---- four neighbouring elements
template <class T> using Four = std::conditional_t<std::is_same_v<T, float>, float4, uint2>;

__device__ __forceinline__ float4 values_of(const float4& four) { return four; }
__device__ __forceinline__ float4 values_of(const uint2& four) {
    const float2 low = unpack_bf16x2(four.x), high = unpack_bf16x2(four.y);
    return {low.x, low.y, high.x, high.y};
}
template <class T> __device__ __forceinline__ Four<T> load_state(const void* from, int64_t at) {
    return *reinterpret_cast<const Four<T>*>(static_cast<const T*>(from) + at);
}
template <class T>
__device__ __forceinline__ void store_state(void* to, int64_t at, const float4& x, uint64_t key,
                                            int64_t element) {
    if constexpr (std::is_same_v<T, float>) {
        *reinterpret_cast<float4*>(static_cast<float*>(to) + at) = x;
    } else {
        const uint32_t row = rounding_row(key, element / kRoundingRow),
                       pair = static_cast<uint32_t>(element % kRoundingRow / 2);
        *reinterpret_cast<uint2*>(static_cast<Bf16*>(to) + at) =
            uint2{round_pair(x.x, x.y, rounding_word(row, pair)),
                  round_pair(x.z, x.w, rounding_word(row, pair + 1))};
    }
}

// As they lie in memory, loaded ahead of their step.
template <class Types> struct FourParameters {
    Four<typename Types::Grad> grad;
    float4 master;
    Four<typename Types::First> m;
    Four<typename Types::Second> v;
};
// steps: false for the masters alone.
template <class Types>
__device__ __forceinline__ FourParameters<Types> load_four(const AdamWArgs& args, bool steps, int64_t at) {
    FourParameters<Types> four;
    four.master = *reinterpret_cast<const float4*>(args.master + at);
    if (steps) {
        four.grad = load_state<typename Types::Grad>(args.grad, at);
        four.m = load_state<typename Types::First>(args.m, at);
        four.v = load_state<typename Types::Second>(args.v, at);
    }
    return four;
}

// Returns the new masters, which are stored, too, as is the working copy. `at` and args.first_element are
// multiples of four.
template <class Types>
__device__ __forceinline__ float4 step_four(const AdamWArgs& args, const AdamWStep& its,
                                            const FourParameters<Types>& old, int64_t at) {
    const float4 grad = values_of(old.grad), m = values_of(old.m), v = values_of(old.v);
    const Element x = updated(args, its, grad.x, {old.master.x, m.x, v.x});
    const Element y = updated(args, its, grad.y, {old.master.y, m.y, v.y});
    const Element z = updated(args, its, grad.z, {old.master.z, m.z, v.z});
    const Element w = updated(args, its, grad.w, {old.master.w, m.w, v.w});
    const float4 master = {x.master, y.master, z.master, w.master};
    *reinterpret_cast<float4*>(args.master + at) = master;
    store_state<typename Types::First>(args.m, at, float4{x.m, y.m, z.m, w.m}, its.m_key,
                                       args.first_element + at);
    store_state<typename Types::Second>(args.v, at, float4{x.v, y.v, z.v, w.v}, its.v_key,
                                        args.first_element + at);
    if (args.copy != nullptr && args.copy_dtype == DType::f32) {
        *reinterpret_cast<float4*>(static_cast<float*>(args.copy) + at) = master;
    } else if (args.copy != nullptr) {
        const uint32_t low = to_bf16(master.x).bits | static_cast<uint32_t>(to_bf16(master.y).bits) << 16,
                       high = to_bf16(master.z).bits | static_cast<uint32_t>(to_bf16(master.w).bits) << 16;
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.copy) + at) = uint2{low, high};
    }
    return master;
}

// ---- host
inline AdamWArgs adamw_args(const op::AdamW& args) {
    return {.grad = args.grad.data,
            .master = args.master.as<float>(),
            .m = args.m.data,
            .v = args.v.data,
            .copy = args.copy ? args.copy.data : nullptr,
            .copy_dtype = args.copy.dtype,
            .count = args.master.numel(),
            .first_element = args.first_element,
            .m_key = args.m_key,
            .v_key = args.v_key,
            .rounding_step = args.rounding_step ? args.rounding_step.as<int64_t>() : nullptr,
            .schedule = args.schedule.as<float>(),
            .grad_scale = args.grad_scale.as<float>(),
            .status = args.status ? args.status.as<int32_t>() : nullptr,
            .beta1 = args.beta1,
            .beta2 = args.beta2,
            .rest1 = 1.0f - args.beta1,
            .rest2 = 1.0f - args.beta2,
            .eps = args.eps,
            .weight_decay = args.weight_decay};
}

// Calls `call` with the types of an update as its template argument.
template <class Call> void with_types(const op::AdamW& args, Call&& call) {
    const auto second = [&]<class G, class M>() {
        args.v.dtype == DType::f32 ? call.template operator()<AdamWTypes<G, M, float>>()
                                   : call.template operator()<AdamWTypes<G, M, Bf16>>();
    };
    const auto first = [&]<class G>() {
        args.m.dtype == DType::f32 ? second.template operator()<G, float>()
                                   : second.template operator()<G, Bf16>();
    };
    args.grad.dtype == DType::f32 ? first.template operator()<float>() : first.template operator()<Bf16>();
}

}  // namespace fp8flow::hopper
