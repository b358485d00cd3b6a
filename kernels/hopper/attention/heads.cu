// SPDX-License-Identifier: MIT
// From the packed projection to q, k and v, and back: split, norm of the heads and rotation in one pass each
// way, with the reference's bits. Contract: kernels/ops/attention.h. Other dtypes and head sizes: composed of
// layout.cu and norm/ (kernels/ops.cpp).
#include "kernels/hopper/attention/heads.h"

#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/norm/dgamma.h"
#include "kernels/hopper/runtime/launch.h"

#include <initializer_list>

namespace fp8flow::hopper::attention {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBatch = 4;  // heads of a group of lanes whose loads are in flight together

// A tensor [T, heads, D] of which a warp takes a token's heads.
struct Heads {
    uint16_t* data;      // forward: out; backward: dq, dk, dv
    uint16_t* raw;       // forward: out, backward: in; before the norm
    float* rstd;         // [T * heads]
    const float* gamma;  // [D]; null: no norm
    int count;
};
struct HeadsArgs {
    uint16_t* qkv;  // forward: in; backward: out
    Heads q, k, v;
    const float* table;  // [S, D/2, 2]
    int64_t tokens, length;
    int depth;
    float eps;
    RowView fp8;  // backward: out in place of qkv, with kRows
    RowScales scales;
    QuantizeRule rule;
};

// The lanes of a warp that share a head: the smallest power of two that holds its units.
template <int kLanes> struct Group {
    static constexpr int kGroups = 32 / kLanes;
    // The sum over a row of at most 32 strands, in the order of kernels/ops/norm_order.h: halves, absent
    // strands are +0. Every lane of the group gets it.
    static __device__ __forceinline__ float sum(float strand) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            strand = step >= kLanes ? strand + 0.0f : strand + __shfl_xor_sync(kFullMask, strand, step);
        return strand;
    }
    // The unit of another lane of the group.
    static __device__ __forceinline__ uint4 of(const uint4& own, int lane) {
        return {__shfl_sync(kFullMask, own.x, lane, kLanes), __shfl_sync(kFullMask, own.y, lane, kLanes),
                __shfl_sync(kFullMask, own.z, lane, kLanes), __shfl_sync(kFullMask, own.w, lane, kLanes)};
    }
};

// What a lane knows of its place in a head of D columns: a unit of eight columns, and the angles of its
// pairs.
struct Place {
    int unit, other;  // other: the lane with the second columns of the pairs
    bool active, low;
    float cosine[kUnit], sine[kUnit];
};
template <int kLanes>
__device__ __forceinline__ Place place_of(const HeadsArgs& args, int64_t token, float sign) {
    Place place;
    const int units = args.depth / kUnit, half = units / 2;
    place.unit = static_cast<int>(threadIdx.x) % kLanes;
    place.active = place.unit < units;
    place.low = place.unit < half;
    place.other = place.low ? place.unit + half : place.unit - half;
    if (!place.active) place.other = place.unit;
    const int first = place.active ? (place.low ? place.unit : place.unit - half) : 0;
    const float4* angle = reinterpret_cast<const float4*>(args.table + (token % args.length) * args.depth) +
                          first * (kUnit / 2);
#pragma unroll
    for (int n = 0; n < kUnit / 2; ++n) {
        const float4 two = angle[n];
        place.cosine[2 * n] = two.x, place.sine[2 * n] = sign * two.y;
        place.cosine[2 * n + 1] = two.z, place.sine[2 * n + 1] = sign * two.w;
    }
    return place;
}

// The rotated unit, rounded to BF16.
template <int kLanes> __device__ __forceinline__ uint4 rotate(const Place& place, const uint4& own) {
    const uint4 others = Group<kLanes>::of(own, place.other);
    float a[kUnit], b[kUnit];
    unpack_unit(own, DType::bf16, a);
    unpack_unit(others, DType::bf16, b);
#pragma unroll
    for (int n = 0; n < kUnit; ++n)
        a[n] = place.low ? fma_float(a[n], place.cosine[n], -(b[n] * place.sine[n]))
                         : fma_float(a[n], place.cosine[n], b[n] * place.sine[n]);
    return pack_unit_bf16(a);
}

__device__ __forceinline__ void load_gamma(const float* gamma, const Place& place, float (&g)[kUnit]) {
    if (gamma == nullptr || !place.active) return;
    const float4* in = reinterpret_cast<const float4*>(gamma) + 2 * place.unit;
    const float4 a = in[0], b = in[1];
    g[0] = a.x, g[1] = a.y, g[2] = a.z, g[3] = a.w;
    g[4] = b.x, g[5] = b.y, g[6] = b.z, g[7] = b.w;
}

// Head `n` of a token's packed row: its tensor, and its row there.
struct Head {
    bool is_q, is_v;
    uint16_t *data, *raw;
    float* rstd;
    int64_t row;
};
__device__ __forceinline__ Head head_of(const HeadsArgs& args, int64_t token, int n) {
    // selected, because an index would put the tensors into local memory
    const int first_k = args.q.count, first_v = first_k + args.k.count;
    const bool is_q = n < first_k, is_v = n >= first_v;
    const int count = is_q ? args.q.count : is_v ? args.v.count : args.k.count;
    return {is_q,
            is_v,
            is_q   ? args.q.data
            : is_v ? args.v.data
                   : args.k.data,
            is_q ? args.q.raw : args.k.raw,
            is_q ? args.q.rstd : args.k.rstd,
            token * count + n -
                (is_q   ? 0
                 : is_v ? first_v
                        : first_k)};
}
__device__ __forceinline__ uint4* unit_at(uint16_t* data, int64_t row, int depth, int unit) {
    return reinterpret_cast<uint4*>(data + row * depth) + unit;
}

// qkv -> q, k, v; with gammas also q_raw, k_raw and the factors of their norm.
// Lower bound: qkv in, q, k, v (and raw) out: T=4096, 16 + 2 x 4 heads of 64: 36 MB, 11 us; angles from L2.
// A warp takes a token at a time, so that the angles and gammas of its lanes stay in registers; a group of
// lanes takes a head, a lane eight columns, kBatch heads in flight. No barriers. Deterministic: one writer a
// byte, sums in the order of the contract.
template <int kLanes> __global__ void __launch_bounds__(kThreads) heads_kernel(const HeadsArgs args) {
    constexpr int kGroups = Group<kLanes>::kGroups;
    const int group = static_cast<int>(threadIdx.x) % 32 / kLanes,
              heads = args.q.count + args.k.count + args.v.count;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
    for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; token < args.tokens;
         token += warps) {
        const Place place = place_of<kLanes>(args, token, 1.0f);
        float gq[kUnit] = {}, gk[kUnit] = {};
        load_gamma(args.q.gamma, place, gq);
        load_gamma(args.k.gamma, place, gk);
        for (int first = 0; first < heads; first += kBatch * kGroups) {
            uint4 units[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int n = first + i * kGroups + group;
                units[i] = n < heads && place.active
                               ? *unit_at(args.qkv, token * heads + n, args.depth, place.unit)
                               : uint4{};
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (first + i * kGroups >= heads) break;  // the same for the warp
                const int n = first + i * kGroups + group;
                const bool mine = n < heads && place.active;
                const Head to = head_of(args, token, n);
                uint4 unit = units[i];
                if (args.q.gamma != nullptr) {
                    float v[kUnit], strand = 0.0f;
                    unpack_unit(unit, DType::bf16, v);
#pragma unroll
                    for (int j = 0; j < kUnit; ++j) strand = fma_float(v[j], v[j], strand);
                    const float mean = div_float(Group<kLanes>::sum(strand), static_cast<float>(args.depth));
                    const float rstd = div_float(1.0f, sqrt_float(mean + args.eps));
                    if (!to.is_v) {
                        if (mine) *unit_at(to.raw, to.row, args.depth, place.unit) = unit;
                        if (mine && place.unit == 0) to.rstd[to.row] = rstd;
#pragma unroll
                        for (int j = 0; j < kUnit; ++j) v[j] = v[j] * rstd * (to.is_q ? gq[j] : gk[j]);
                        unit = pack_unit_bf16(v);
                    }
                }
                const uint4 rotated = rotate<kLanes>(place, unit);
                if (mine) *unit_at(to.data, to.row, args.depth, place.unit) = to.is_v ? unit : rotated;
            }
        }
    }
}

// dq, dk, dv -> dqkv: rotated back, and through the backward of the norm. With gammas the rotated gradients
// take the place of dq and dk, for the gradients of gamma.
// Lower bound: dq, dk, dv and raw in, dqkv out: T=4096, 16 + 2 x 4 heads of 64: 36 MB, 11 us, and 10 MB
// written back to L2. As heads_kernel. kRows: dqkv leaves as FP8 in place of BF16 (half the bytes out). A
// lane's columns then neighbour those of the next lane across heads, so half a warp has a block of 128.
template <int kLanes, bool kRows>
__global__ void __launch_bounds__(kThreads) heads_backward_kernel(const HeadsArgs args) {
    constexpr int kGroups = Group<kLanes>::kGroups;
    const int group = static_cast<int>(threadIdx.x) % 32 / kLanes,
              heads = args.q.count + args.k.count + args.v.count;
    const bool normed = args.q.gamma != nullptr;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
    for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; token < args.tokens;
         token += warps) {
        const Place place = place_of<kLanes>(args, token, -1.0f);
        float gq[kUnit] = {}, gk[kUnit] = {};
        load_gamma(args.q.gamma, place, gq);
        load_gamma(args.k.gamma, place, gk);
        for (int first = 0; first < heads; first += kBatch * kGroups) {
            uint4 units[kBatch], raws[kBatch];
            float rstds[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int n = first + i * kGroups + group;
                units[i] = raws[i] = uint4{};
                rstds[i] = 0.0f;
                if (n >= heads || !place.active) continue;
                const Head from = head_of(args, token, n);
                units[i] = *unit_at(from.data, from.row, args.depth, place.unit);
                if (!normed || from.is_v) continue;
                raws[i] = *unit_at(from.raw, from.row, args.depth, place.unit);
                rstds[i] = from.rstd[from.row];
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (first + i * kGroups >= heads) break;  // the same for the warp
                const int n = first + i * kGroups + group;
                const bool mine = n < heads && place.active;
                const Head from = head_of(args, token, n);
                uint4 unit = units[i];
                const uint4 rotated = rotate<kLanes>(place, unit);
                if (!from.is_v) unit = rotated;
                if (normed) {
                    float d[kUnit], x[kUnit], strand = 0.0f;
                    unpack_unit(unit, DType::bf16, d);
                    unpack_unit(raws[i], DType::bf16, x);
#pragma unroll
                    for (int j = 0; j < kUnit; ++j) {
                        d[j] *= from.is_q ? gq[j] : gk[j];
                        strand = fma_float(d[j], x[j], strand);
                    }
                    const float sum = Group<kLanes>::sum(strand), r = rstds[i];
                    const float c = r * r * div_float(sum, static_cast<float>(args.depth));
                    if (!from.is_v) {
                        if (mine) *unit_at(from.data, from.row, args.depth, place.unit) = unit;
#pragma unroll
                        for (int j = 0; j < kUnit; ++j) d[j] = r * (d[j] - x[j] * c);
                        unit = pack_unit_bf16(d);
                    }
                }
                if constexpr (kRows) {
                    float v[kUnit];
                    unpack_unit(mine ? unit : uint4{}, DType::bf16, v);
                    quantize_unit(v, true, args.fp8, args.scales, token, n * args.depth + place.unit * kUnit,
                                  args.rule);
                } else if (mine) {
                    *unit_at(args.qkv, token * heads + n, args.depth, place.unit) = unit;
                }
            }
        }
    }
}

using HeadsKernel = void (*)(HeadsArgs);
enum class Pass { forward, backward, backward_rows };
template <int kLanes> HeadsKernel kernel_of(Pass pass) {
    return pass == Pass::forward    ? heads_kernel<kLanes>
           : pass == Pass::backward ? heads_backward_kernel<kLanes, false>
                                    : heads_backward_kernel<kLanes, true>;
}
HeadsKernel kernel_of(int64_t depth, Pass pass) {
    const int64_t units = depth / kUnit;
    return units <= 2    ? kernel_of<2>(pass)
           : units <= 4  ? kernel_of<4>(pass)
           : units <= 8  ? kernel_of<8>(pass)
           : units <= 16 ? kernel_of<16>(pass)
                         : kernel_of<32>(pass);
}

// Whole units in half a head, at most a warp of them; aligned.
bool takes(const TensorView& qkv, const TensorView& q, std::initializer_list<TensorView> views) {
    const int64_t depth = q.dim(2);
    if (q.dtype != DType::bf16 || depth % (2 * kUnit) != 0 || depth > 32 * kUnit || qkv.numel() == 0)
        return false;
    for (const TensorView& view : views)
        if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) return false;
    return true;
}

uint16_t* halves(const TensorView& view) { return static_cast<uint16_t*>(view.data); }
float* floats(const TensorView& view) { return view ? view.as<float>() : nullptr; }
Heads heads_of(const TensorView& data, const TensorView& raw, const TensorView& rstd,
               const TensorView& gamma) {
    return {halves(data), halves(raw), floats(rstd), floats(gamma), static_cast<int>(data.dim(1))};
}

void run(const HeadsArgs& args, Pass pass, const Launch& launch) {
    kernel_of(
        args.depth,
        pass)<<<grid_for(ceil_div(args.tokens, kWarps), launch), kThreads, 0, stream_of(launch)>>>(args);
    check_launch(pass == Pass::forward ? "qkv_heads" : "qkv_heads_backward");
}

}  // namespace

bool launch_heads(const op::QkvHeads& a, const Launch& launch) {
    if (!takes(a.qkv, a.q, {a.qkv, a.q, a.k, a.v, a.table, a.q_raw, a.k_raw, a.q_gamma, a.k_gamma}))
        return false;
    run({.qkv = halves(a.qkv),
         .q = heads_of(a.q, a.q_raw, a.q_rstd, a.q_gamma),
         .k = heads_of(a.k, a.k_raw, a.k_rstd, a.k_gamma),
         .v = heads_of(a.v, {}, {}, {}),
         .table = a.table.as<float>(),
         .tokens = a.q.dim(0),
         .length = a.table.dim(0),
         .depth = static_cast<int>(a.q.dim(2)),
         .eps = a.eps},
        Pass::forward, launch);
    return true;
}

bool launch_heads_backward(const op::QkvHeadsBackward& a, float* partials, uint32_t* tickets,
                           const Launch& launch) {
    const int64_t depth = a.dq.dim(2);
    if (a.rows && (depth & (depth - 1)) != 0) return false;  // lanes without columns would part a block
    if (!takes(a.dqkv, a.dq, {a.dqkv, a.dq, a.dk, a.dv, a.table, a.q_raw, a.k_raw, a.q_gamma, a.k_gamma}))
        return false;
    const auto gamma = [](const TensorView& d, const TensorView& raw, const TensorView& rstd,
                          const TensorView& dgamma) {
        return norm::GammaJob{halves(d), halves(raw), floats(rstd), d.dim(0) * d.dim(1), floats(dgamma)};
    };
    const norm::GammaJob jobs[] = {gamma(a.dq, a.q_raw, a.q_rstd, a.dq_gamma),
                                   gamma(a.dk, a.k_raw, a.k_rstd, a.dk_gamma)};
    if (a.q_gamma && !(norm::sums_narrow_gamma(jobs[0], depth) && norm::sums_narrow_gamma(jobs[1], depth)))
        return false;
    run({.qkv = halves(a.dqkv),
         .q = heads_of(a.dq, a.q_raw, a.q_rstd, a.q_gamma),
         .k = heads_of(a.dk, a.k_raw, a.k_rstd, a.k_gamma),
         .v = heads_of(a.dv, {}, {}, {}),
         .table = a.table.as<float>(),
         .tokens = a.dq.dim(0),
         .length = a.table.dim(0),
         .depth = static_cast<int>(depth),
         .eps = 0.0f,
         .fp8 = a.rows ? row_view(a.rows.data) : RowView{},
         .scales = row_scales(a.rows),
         .rule = {.scale_format = a.scale_format}},
        a.rows ? Pass::backward_rows : Pass::backward, launch);
    if (a.q_gamma) norm::launch_narrow_gamma(jobs, depth, a.dgamma_mode, partials, tickets, launch);
    return true;
}

}  // namespace fp8flow::hopper::attention
