// SPDX-License-Identifier: MIT
// Heads of multi-latent attention: from the projections of the latents to q, k and v, and back, in one pass
// each way with the reference's bits. Contract: kernels/ops/attention.h.
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"

#include <algorithm>
#include <initializer_list>

namespace fp8flow::hopper::attention {

namespace {

constexpr int kThreads = 256;

// Forward: q in/out, kv and k_rope in, k and v out. Backward: their gradients; q in/out, k and v in, kv and
// k_rope out.
struct Latent {
    void *q, *k, *v, *kv, *k_rope;
    const float* table;  // [S, Dr/2, 2]
    int64_t tokens, length;
    int heads, nope, half, value;  // half: Dr/2
    DType dtype;
};

// Neighbouring columns that a thread moves together: eight of BF16, aligned; or one of any type.
struct EightColumns {
    static constexpr int kWidth = kUnit;
    static __device__ __forceinline__ void load(const void* data, DType, int64_t at, float (&x)[kWidth]) {
        unpack_unit(*reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + at), DType::bf16, x);
    }
    static __device__ __forceinline__ void store(void* data, DType, int64_t at, const float (&x)[kWidth]) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + at) = pack_unit_bf16(x);
    }
    static __device__ __forceinline__ void copy(const void* from, int64_t at, void* to, int64_t place,
                                                DType) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to) + place) =
            *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at);
    }
};
struct OneColumn {
    static constexpr int kWidth = 1;
    static __device__ __forceinline__ void load(const void* data, DType dtype, int64_t at,
                                                float (&x)[kWidth]) {
        x[0] = load_float(data, dtype, at);
    }
    static __device__ __forceinline__ void store(void* data, DType dtype, int64_t at,
                                                 const float (&x)[kWidth]) {
        store_float(data, dtype, at, x[0]);
    }
    static __device__ __forceinline__ void copy(const void* from, int64_t at, void* to, int64_t place,
                                                DType dtype) {
        store_float(to, dtype, place, load_float(from, dtype, at));
    }
};

// Pairs (low[i], high[i]) of columns from `first` on; sign -1: rotated back.
template <class Unit>
__device__ __forceinline__ void rotate(const Latent& args, int64_t token, int first, float sign,
                                       float (&low)[Unit::kWidth], float (&high)[Unit::kWidth]) {
    const float2* angle =
        reinterpret_cast<const float2*>(args.table) + token % args.length * args.half + first;
#pragma unroll
    for (int n = 0; n < Unit::kWidth; ++n) {
        const float cosine = angle[n].x, sine = sign * angle[n].y, x = low[n], y = high[n];
        low[n] = fma_float(x, cosine, -(y * sine));
        high[n] = fma_float(y, cosine, x * sine);
    }
}

// Columns [at, at + width) and the other halves of their pairs of `from`, rotated, to `to`.
template <class Unit>
__device__ __forceinline__ void rotate_pairs(const Latent& args, int64_t token, int first, float sign,
                                             const void* from, int64_t at, void* to, int64_t place) {
    float low[Unit::kWidth], high[Unit::kWidth];
    Unit::load(from, args.dtype, at, low);
    Unit::load(from, args.dtype, at + args.half, high);
    rotate<Unit>(args, token, first, sign, low, high);
    Unit::store(to, args.dtype, place, low);
    Unit::store(to, args.dtype, place + args.half, high);
}

// What a thread does for one head of a token: it copies columns of k, or copies columns of v, or rotates
// pairs.
struct Item {
    int64_t qk, kv, v;     // first elements of the head
    int key, value, pair;  // the first column of the item, or -1
};
template <class Unit> __device__ __forceinline__ Item item_of(const Latent& args, int64_t token, int index) {
    const int keys = args.nope / Unit::kWidth, values = args.value / Unit::kWidth,
              pairs = args.half / Unit::kWidth, all = keys + values + pairs;
    const int head = index / all, unit = index % all;
    const int64_t row = token * args.heads + head;
    return {row * (args.nope + 2 * args.half),
            row * (args.nope + args.value),
            row * args.value,
            unit < keys ? unit * Unit::kWidth : -1,
            unit >= keys && unit < keys + values ? (unit - keys) * Unit::kWidth : -1,
            unit >= keys + values ? (unit - keys - values) * Unit::kWidth : -1};
}
template <class Unit> __device__ __forceinline__ int items_of(const Latent& args) {
    return args.heads * ((args.nope + args.value + args.half) / Unit::kWidth);
}

// kv, k_rope -> k, v; q rotated in place.
// Lower bound: kv in, k and v out, the rotated columns of q both ways: T=4096, 128 heads of 128 + 64, 128:
// 738 MB, 180 us; k_rope and angles from L1. A CTA takes a token at a time, a thread eight columns (or one).
// No barriers. Deterministic: one writer per element.
template <class Unit> __global__ void __launch_bounds__(kThreads) latent_heads_kernel(const Latent args) {
    const int rope = 2 * args.half, items = items_of<Unit>(args);
    for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
        for (int i = static_cast<int>(threadIdx.x); i < items; i += kThreads) {
            const Item item = item_of<Unit>(args, token, i);
            if (item.key >= 0)
                Unit::copy(args.kv, item.kv + item.key, args.k, item.qk + item.key, args.dtype);
            if (item.value >= 0)
                Unit::copy(args.kv, item.kv + args.nope + item.value, args.v, item.v + item.value,
                           args.dtype);
            if (item.pair < 0) continue;
            const int64_t at = item.qk + args.nope + item.pair;
            rotate_pairs<Unit>(args, token, item.pair, 1.0f, args.q, at, args.q, at);
            rotate_pairs<Unit>(args, token, item.pair, 1.0f, args.k_rope, token * rope + item.pair, args.k,
                               at);
        }
    }
}

// dk, dv -> dkv, dk_rope; dq rotated back in place.
// Lower bound: dk and dv in, dkv out, the rotated columns of dq both ways: as the forward. As
// latent_heads_kernel; the first threads of the CTA add the rotated columns of dk over the heads while the
// others copy. Deterministic: a sum is one thread's, over ascending heads.
template <class Unit>
__global__ void __launch_bounds__(kThreads) latent_heads_backward_kernel(const Latent args) {
    const int depth = args.nope + 2 * args.half, items = items_of<Unit>(args);
    for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
        for (int first = static_cast<int>(threadIdx.x) * Unit::kWidth; first < args.half;
             first += kThreads * Unit::kWidth) {
            float low[Unit::kWidth] = {}, high[Unit::kWidth] = {};
#pragma unroll 8
            for (int head = 0; head < args.heads; ++head) {
                const int64_t at = (token * args.heads + head) * depth + args.nope + first;
                float x[Unit::kWidth], y[Unit::kWidth];
                Unit::load(args.k, args.dtype, at, x);
                Unit::load(args.k, args.dtype, at + args.half, y);
#pragma unroll
                for (int n = 0; n < Unit::kWidth; ++n) low[n] += x[n], high[n] += y[n];
            }
            rotate<Unit>(args, token, first, -1.0f, low, high);
            const int64_t to = token * 2 * args.half + first;
            Unit::store(args.k_rope, args.dtype, to, low);
            Unit::store(args.k_rope, args.dtype, to + args.half, high);
        }
        for (int i = static_cast<int>(threadIdx.x); i < items; i += kThreads) {
            const Item item = item_of<Unit>(args, token, i);
            if (item.key >= 0)
                Unit::copy(args.k, item.qk + item.key, args.kv, item.kv + item.key, args.dtype);
            if (item.value >= 0)
                Unit::copy(args.v, item.v + item.value, args.kv, item.kv + args.nope + item.value,
                           args.dtype);
            if (item.pair < 0) continue;
            const int64_t at = item.qk + args.nope + item.pair;
            rotate_pairs<Unit>(args, token, item.pair, -1.0f, args.q, at, args.q, at);
        }
    }
}

Latent latent_of(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& kv,
                 const TensorView& k_rope, const TensorView& table) {
    const int rope = static_cast<int>(k_rope.dim(1));
    return {.q = q.data,
            .k = k.data,
            .v = v.data,
            .kv = kv.data,
            .k_rope = k_rope.data,
            .table = table.as<float>(),
            .tokens = q.dim(0),
            .length = table.dim(0),
            .heads = static_cast<int>(q.dim(1)),
            .nope = static_cast<int>(q.dim(2)) - rope,
            .half = rope / 2,
            .value = static_cast<int>(v.dim(2)),
            .dtype = q.dtype};
}

bool is_wide(const Latent& args) {
    bool wide = args.dtype == DType::bf16 && args.nope % kUnit == 0 && args.half % kUnit == 0 &&
                args.value % kUnit == 0;
    for (const void* data : {args.q, args.k, args.v, args.kv, args.k_rope}) wide = wide && is_aligned(data);
    return wide;
}

using Kernel = void (*)(Latent);
void start(const Latent& args, Kernel wide, Kernel single, const Launch& launch, const char* name) {
    if (args.tokens == 0) return;
    launch_kernel(is_wide(args) ? wide : single, grid_for(args.tokens, launch), kThreads, launch, name, args);
}

}  // namespace

}  // namespace fp8flow::hopper::attention

namespace fp8flow {

using namespace hopper;
using namespace hopper::attention;

void HopperOps::do_latent_heads(const op::LatentHeads& args, const Launch& launch) {
    start(latent_of(args.q, args.k, args.v, args.kv, args.k_rope, args.table),
          latent_heads_kernel<EightColumns>, latent_heads_kernel<OneColumn>, launch, "latent_heads");
}

void HopperOps::do_latent_heads_backward(const op::LatentHeadsBackward& args, const Launch& launch) {
    start(latent_of(args.dq, args.dk, args.dv, args.dkv, args.dk_rope, args.table),
          latent_heads_backward_kernel<EightColumns>, latent_heads_backward_kernel<OneColumn>, launch,
          "latent_heads_backward");
}

}  // namespace fp8flow
