// SPDX-License-Identifier: MIT
// From the packed projection to q, k and v, and back: split, norm of the heads and rotation in one pass each
// way, with the reference's bits. Contract: kernels/ops/attention.h. Other dtypes and head sizes: composed of
// layout.cu and norm/ (kernels/ops.cpp).
#include "kernels/hopper/attention/heads.h"

#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/norm/dgamma.h"
#include "kernels/hopper/runtime/launch.h"

#include <initializer_list>

namespace fp8flow::hopper::attention {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBatch = 4;  // heads that a group of lanes loads together

// A tensor [T, heads, D]; a warp processes the heads of one token.
struct Heads {
    uint16_t* data;      // forward: out; backward: dq, dk, dv
    uint16_t* raw;       // forward: out, backward: in; before the norm
    float* rstd;         // [T * heads]
    const float* gamma;  // [D]; null: no norm
    int count;
};
struct HeadsArgs {
    uint16_t* qkv;      // forward: in; backward: out
    const float* bias;  // forward with kBias: [all heads * D]
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

// A lane's unit of eight columns in a head of D columns, and the angles of its pairs.
struct Place {
    int unit, other;  // other: the lane with the second columns of the pairs
    bool active, low;
    float cosine[kUnit], sine[kUnit];
};
template <int kLanes>
__device__ __forceinline__ Place place_of(const HeadsArgs& args, int64_t position, float sign) {
    Place place;
    const int units = args.depth / kUnit, half = units / 2;
    place.unit = static_cast<int>(threadIdx.x) % kLanes;
    place.active = place.unit < units;
    place.low = place.unit < half;
    place.other = place.low ? place.unit + half : place.unit - half;
    if (!place.active) place.other = place.unit;
    const int first = place.active ? (place.low ? place.unit : place.unit - half) : 0;
    const float4* angle =
        reinterpret_cast<const float4*>(args.table + position * args.depth) + first * (kUnit / 2);
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

__device__ __forceinline__ void load_gamma(const float* gamma, int unit, bool active, float (&g)[kUnit]) {
    if (gamma == nullptr || !active) return;
    load_floats(reinterpret_cast<const float4*>(gamma) + 2 * unit, g);
}

// unit + the bias of its columns, rounded to BF16; lanes without columns keep theirs.
__device__ __forceinline__ uint4 with_bias(const uint4& unit, const float* bias, int at, bool active) {
    float v[kUnit], b[kUnit] = {};
    unpack_unit(unit, DType::bf16, v);
    load_gamma(bias, at, active, b);
#pragma unroll
    for (int j = 0; j < kUnit; ++j) v[j] += b[j];
    return pack_unit_bf16(v);
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
    uint16_t* const data = is_q ? args.q.data : is_v ? args.v.data : args.k.data;
    uint16_t* const raw = is_q ? args.q.raw : args.k.raw;
    float* const rstd = is_q ? args.q.rstd : args.k.rstd;
    const int first = is_q ? 0 : is_v ? first_v : first_k;
    return {is_q, is_v, data, raw, rstd, token * count + n - first};
}
__device__ __forceinline__ uint4* unit_at(uint16_t* data, int64_t row, int depth, int unit) {
    return reinterpret_cast<uint4*>(data + row * depth) + unit;
}

// qkv -> q, k, v; with gammas also q_raw, k_raw and the factors of their norm.
// Lower bound: qkv in, q, k, v (and raw) out: T=4096, 16 + 2 x 4 heads of 64: 36 MB, 11 us; angles from L2.
// A warp takes a token at a time, so that the angles and gammas of its lanes stay in registers; a group of
// lanes takes a head, a lane eight columns, kBatch heads in flight. No barriers. Deterministic: one writer
// per byte, sums in the order of the contract.
template <int kLanes, bool kBias>
__global__ void __launch_bounds__(kThreads) heads_kernel(const HeadsArgs args) {
    constexpr int kGroups = Group<kLanes>::kGroups;
    const int group = static_cast<int>(threadIdx.x) % 32 / kLanes,
              heads = args.q.count + args.k.count + args.v.count;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
    for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; token < args.tokens;
         token += warps) {
        const Place place = place_of<kLanes>(args, token % args.length, 1.0f);
        float gq[kUnit] = {}, gk[kUnit] = {};
        load_gamma(args.q.gamma, place.unit, place.active, gq);
        load_gamma(args.k.gamma, place.unit, place.active, gk);
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
                if constexpr (kBias)
                    unit = with_bias(unit, args.bias, n * args.depth / kUnit + place.unit, mine);
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

// Unit `n * depth + unit` of a token's gradient: BF16, or (kRows) FP8 with the block's scale. All lanes of a
// block call it; valid: the row exists and the lane has columns.
template <bool kRows>
__device__ __forceinline__ void store_gradient(const HeadsArgs& args, int64_t token, int n,
                                               const Place& place, const uint4& unit, bool valid) {
    if constexpr (kRows) {
        float v[kUnit];
        unpack_unit(valid ? unit : uint4{}, DType::bf16, v);
        const int col = valid ? n * args.depth + place.unit * kUnit : args.fp8.cols;
        quantize_unit(v, true, args.fp8, args.scales, token, col, args.rule);
    } else if (valid) {
        const int heads = args.q.count + args.k.count + args.v.count;
        *unit_at(args.qkv, token * heads + n, args.depth, place.unit) = unit;
    }
}

// dq, dk, dv -> dqkv without a norm: rotated back.
// Lower bound: dq, dk, dv in, dqkv out: T=4096, 16 + 2 x 4 heads of 64: 25 MB, 6 us. As heads_kernel. kRows:
// dqkv leaves as FP8 in place of BF16. A lane's columns then neighbour those of the next lane across heads,
// so half a warp has a block of 128.
template <int kLanes, bool kRows>
__global__ void __launch_bounds__(kThreads) heads_backward_kernel(const HeadsArgs args) {
    constexpr int kGroups = Group<kLanes>::kGroups;
    const int group = static_cast<int>(threadIdx.x) % 32 / kLanes,
              heads = args.q.count + args.k.count + args.v.count;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
    for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; token < args.tokens;
         token += warps) {
        const Place place = place_of<kLanes>(args, token % args.length, -1.0f);
        for (int first = 0; first < heads; first += kBatch * kGroups) {
            uint4 units[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int n = first + i * kGroups + group;
                const Head from = head_of(args, token, n);
                units[i] = n < heads && place.active ? *unit_at(from.data, from.row, args.depth, place.unit)
                                                     : uint4{};
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (first + i * kGroups >= heads) break;  // the same for the warp
                const int n = first + i * kGroups + group;
                const uint4 rotated = rotate<kLanes>(place, units[i]);
                if (!head_of(args, token, n).is_v) units[i] = rotated;
                store_gradient<kRows>(args, token, n, place, units[i], n < heads && place.active);
            }
        }
    }
}

// ---- backward with a norm. Rows of q and of k (token by token, all heads) belong to the chunks of gamma's
// gradient (kernels/ops/norm_order.h): row r to chunk r % kChunks.
constexpr int64_t kMostRows = int64_t{1} << 30;  // rows are unsigned
constexpr unsigned kChunks = static_cast<unsigned>(op::kGammaParts * op::gamma_chunks(1));

// How a CTA divides its rows: kOwn neighbouring chunks, a group of lanes per row, kPlaces rows of a chunk
// side by side, kSteps of these between two barriers.
template <int kLanes> struct Chains {
    static constexpr int kSteps = 2, kOwn = kLanes < 8 ? 16 / kLanes : 2, kGroups = kThreads / kLanes,
                         kPlaces = kGroups / kOwn, kRowsAhead = kSteps * kPlaces;
    static constexpr int kWidth = kLanes * kUnit,  // columns of a head, padded
        kColumns = kOwn * kWidth, kPerThread = kColumns > kThreads ? kColumns / kThreads : 1;
    static_assert(kChunks % kOwn == 0 && kGroups % kOwn == 0);

    // What the sums over rows read: rotated gradients, and the rows before the norm with their factors.
    struct Rows {
        uint4 gradient[kSteps][kThreads], raw[kSteps][kThreads];
        float rstd[kSteps][kGroups];
    };
};

// d through the backward of the norm of a head; gradient and raw are its unit.
template <int kLanes>
__device__ __forceinline__ uint4 norm_backward(const uint4& gradient, const uint4& raw, float rstd,
                                               const float (&gamma)[kUnit], int depth) {
    float d[kUnit], x[kUnit], strand = 0.0f;
    unpack_unit(gradient, DType::bf16, d);
    unpack_unit(raw, DType::bf16, x);
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
        d[j] *= gamma[j];
        strand = fma_float(d[j], x[j], strand);
    }
    const float sum = Group<kLanes>::sum(strand);
    const float c = rstd * rstd * div_float(sum, static_cast<float>(depth));
#pragma unroll
    for (int j = 0; j < kUnit; ++j) d[j] = rstd * (d[j] - x[j] * c);
    return pack_unit_bf16(d);
}

// sums += gradient x (raw x rstd) over the rows that a step left, ascending. A thread takes column
// threadIdx.x, + kThreads, .. of the CTA's chunks. left: rows of the chunk from this step on.
template <int kLanes, class LeftOf>
__device__ __forceinline__ void add_rows(const typename Chains<kLanes>::Rows& rows, const LeftOf& left_of,
                                         float (&sums)[Chains<kLanes>::kPerThread]) {
    using C = Chains<kLanes>;
#pragma unroll
    for (int n = 0; n < C::kPerThread; ++n) {
        const int at = static_cast<int>(threadIdx.x) + n * kThreads;
        if (at >= C::kColumns) break;
        const int left = left_of(at / C::kWidth);
#pragma unroll
        for (int i = 0; i < C::kRowsAhead; ++i) {
            const int step = i / C::kPlaces, place = i % C::kPlaces;
            const int element = place * C::kColumns + at;
            const auto value = [&](const uint4* units) {
                return __uint_as_float(uint32_t{reinterpret_cast<const uint16_t*>(units)[element]} << 16);
            };
            const float factor = rows.rstd[step][place * C::kOwn + at / C::kWidth];
            const float sum = fma_float(value(rows.gradient[step]), value(rows.raw[step]) * factor, sums[n]);
            if (i < left) sums[n] = sum;
        }
    }
}

// dq, dk, dv -> dqkv: rotated back, and through the backward of the norm; chunk_sums [2, kChunks, D]: the
// sums of gamma's gradient over the chunks, of q and of k (norm/dgamma.h adds them).
// Lower bound: dq, dk, dv and raw in, dqkv out: T=4096, 16 + 2 x 4 heads of 64: 36 MB, 9 us. kRows: half the
// bytes out.
// A CTA has kOwn chunks, two CTAs per SM. A group of lanes takes a row, a lane eight columns; the next step's
// rows are loaded before this step's are computed. Then the rows are in shared memory, where one thread per
// column of a chunk adds them up in ascending order: the sums are serial, and the rest is not.
// Barriers: one per step, the step's rows are in shared memory; two copies, so no barrier follows the sums.
// Deterministic: one writer per byte, sums in the order of the contract.
template <int kLanes, bool kRows>
__global__ void __launch_bounds__(kThreads, 2)
    heads_norm_backward_kernel(const HeadsArgs args, float* chunk_sums) {
    using C = Chains<kLanes>;
    __shared__ typename C::Rows shared[2];
    const int thread = static_cast<int>(threadIdx.x), group = thread / kLanes;
    int copy = 0;
    for (unsigned own = blockIdx.x * C::kOwn; own < kChunks; own += gridDim.x * C::kOwn) {
        int first_head = 0;
#pragma unroll 1
        for (int which = 0; which < 3; ++which) {  // q, k, v
            // selected, because an index would put the tensors into local memory
            const Heads of = which == 0 ? args.q : which == 1 ? args.k : args.v;
            const bool normed = which < 2;
            const unsigned count = static_cast<unsigned>(of.count),
                           rows = static_cast<unsigned>(args.tokens) * count;
            const unsigned first = own + group % C::kOwn + group / C::kOwn * kChunks;
            const int unit = thread % kLanes;
            const bool active = unit < args.depth / kUnit;
            uint4 gradients[C::kSteps], raws[C::kSteps];
            float rstds[C::kSteps], sums[C::kPerThread] = {}, gamma[kUnit] = {};
            const auto row_at = [&](unsigned start, int i) {
                return start + first + i * C::kPlaces * kChunks;
            };
            const auto load = [&](unsigned start) {
#pragma unroll
                for (int i = 0; i < C::kSteps; ++i) {
                    const unsigned row = row_at(start, i);
                    gradients[i] = raws[i] = uint4{};
                    rstds[i] = 0.0f;
                    if (row >= rows || !active) continue;
                    gradients[i] = *unit_at(of.data, row, args.depth, unit);
                    if (!normed) continue;
                    raws[i] = *unit_at(of.raw, row, args.depth, unit);
                    rstds[i] = of.rstd[row];
                }
            };
            load_gamma(of.gamma, unit, active, gamma);
            load(0);
            for (unsigned start = 0; start + own < rows; start += C::kRowsAhead * kChunks) {
                typename C::Rows& step = shared[copy];
                uint4 gradient[C::kSteps], raw[C::kSteps];
                float rstd[C::kSteps];
#pragma unroll
                for (int i = 0; i < C::kSteps; ++i)
                    gradient[i] = gradients[i], raw[i] = raws[i], rstd[i] = rstds[i];
                load(start + C::kRowsAhead * kChunks);
#pragma unroll
                for (int i = 0; i < C::kSteps; ++i) {
                    const unsigned row = row_at(start, i), token = row / count;
                    const Place place =
                        place_of<kLanes>(args, token % static_cast<unsigned>(args.length), -1.0f);
                    if (normed) {
                        gradient[i] = rotate<kLanes>(place, gradient[i]);
                        step.gradient[i][thread] = gradient[i];
                        step.raw[i][thread] = raw[i];
                        if (unit == 0) step.rstd[i][group] = rstd[i];
                        gradient[i] = norm_backward<kLanes>(gradient[i], raw[i], rstd[i], gamma, args.depth);
                    }
                    store_gradient<kRows>(args, token, first_head + static_cast<int>(row % count), place,
                                          gradient[i], row < rows && active);
                }
                if (!normed) continue;
                __syncthreads();
                add_rows<kLanes>(
                    step,
                    [&](unsigned chunk) {
                        const unsigned at = start + own + chunk;
                        return static_cast<int>(at < rows ? (rows - at - 1) / kChunks + 1 : 0);
                    },
                    sums);
                copy ^= 1;
            }
#pragma unroll
            for (int n = 0; n < C::kPerThread; ++n) {
                const int at = thread + n * kThreads, column = at % C::kWidth;
                if (normed && at < C::kColumns && column < args.depth)
                    chunk_sums[(which * kChunks + own + at / C::kWidth) * args.depth + column] = sums[n];
            }
            first_head += of.count;
        }
    }
}

// Launches the kernel for kLanes lanes per head. chunk_sums: for the backward pass with a norm.
enum class Pass { forward, backward };
template <int kLanes> void run(const HeadsArgs& args, Pass pass, float* chunk_sums, const Launch& launch) {
    const auto start = [&](auto kernel, unsigned ctas, auto... more) {
        launch_kernel(kernel, ctas, kThreads, launch,
                      pass == Pass::forward ? "qkv_heads" : "qkv_heads_backward", args, more...);
    };
    const unsigned ctas = grid_for(ceil_div(args.tokens, kWarps), launch),
                   chain_ctas = grid_for(kChunks / Chains<kLanes>::kOwn, launch, 2);
    const bool rows = static_cast<bool>(args.fp8.data);
    if (pass == Pass::forward)
        start(args.bias != nullptr ? heads_kernel<kLanes, true> : heads_kernel<kLanes, false>, ctas);
    else if (args.q.gamma != nullptr)
        start(rows ? heads_norm_backward_kernel<kLanes, true> : heads_norm_backward_kernel<kLanes, false>,
              chain_ctas, chunk_sums);
    else
        start(rows ? heads_backward_kernel<kLanes, true> : heads_backward_kernel<kLanes, false>, ctas);
}
void run(const HeadsArgs& args, Pass pass, float* chunk_sums, const Launch& launch) {
    const int64_t units = args.depth / kUnit;
    const auto of_lanes = units <= 2    ? run<2>
                          : units <= 4  ? run<4>
                          : units <= 8  ? run<8>
                          : units <= 16 ? run<16>
                                        : run<32>;
    of_lanes(args, pass, chunk_sums, launch);
}

// Whole units in half a head, at most a warp of them; a norm of heads; aligned.
bool takes(const TensorView& qkv, const TensorView& q, const TensorView& gamma,
           std::initializer_list<TensorView> views) {
    const int64_t depth = q.dim(2);
    if (gamma && gamma.numel() != depth) return false;
    if (q.dtype != DType::bf16 || depth % (2 * kUnit) != 0 || depth > 32 * kUnit || qkv.numel() == 0)
        return false;
    for (const TensorView& view : views)
        if (!is_aligned(view.data)) return false;
    return true;
}

uint16_t* halves(const TensorView& view) { return static_cast<uint16_t*>(view.data); }
float* floats(const TensorView& view) { return view ? view.as<float>() : nullptr; }
Heads heads_of(const TensorView& data, const TensorView& raw, const TensorView& rstd,
               const TensorView& gamma) {
    return {halves(data), halves(raw), floats(rstd), floats(gamma), static_cast<int>(data.dim(1))};
}

}  // namespace

bool launch_heads(const op::QkvHeads& a, const Launch& launch) {
    if (!takes(a.qkv, a.q, a.q_gamma,
               {a.qkv, a.q, a.k, a.v, a.table, a.q_raw, a.k_raw, a.q_gamma, a.k_gamma, a.bias}))
        return false;
    run({.qkv = halves(a.qkv),
         .bias = floats(a.bias),
         .q = heads_of(a.q, a.q_raw, a.q_rstd, a.q_gamma),
         .k = heads_of(a.k, a.k_raw, a.k_rstd, a.k_gamma),
         .v = heads_of(a.v, {}, {}, {}),
         .table = a.table.as<float>(),
         .tokens = a.q.dim(0),
         .length = a.table.dim(0),
         .depth = static_cast<int>(a.q.dim(2)),
         .eps = a.eps},
        Pass::forward, nullptr, launch);
    return true;
}

bool launch_heads_backward(const op::QkvHeadsBackward& a, float* partials, uint32_t* tickets,
                           const Launch& launch) {
    const int64_t depth = a.dq.dim(2), tokens = a.dq.dim(0), heads = a.dq.dim(1), kv_heads = a.dk.dim(1);
    if (a.rows && (depth & (depth - 1)) != 0) return false;  // lanes without columns would split a block
    if (!takes(a.dqkv, a.dq, a.q_gamma,
               {a.dqkv, a.dq, a.dk, a.dv, a.table, a.q_raw, a.k_raw, a.q_gamma, a.k_gamma}))
        return false;
    float* const chunk_sums = partials + norm::gamma_partials(depth, 2);
    const auto gamma = [&](const TensorView& d, const TensorView& raw, const TensorView& rstd,
                           const TensorView& dgamma, int64_t job) {
        return norm::GammaJob{halves(d),           halves(raw),    floats(rstd),
                              d.dim(0) * d.dim(1), floats(dgamma), chunk_sums + job * kChunks * depth};
    };
    const norm::GammaJob jobs[] = {gamma(a.dq, a.q_raw, a.q_rstd, a.dq_gamma, 0),
                                   gamma(a.dk, a.k_raw, a.k_rstd, a.dk_gamma, 1)};
    if (a.q_gamma) {
        const bool splits_blocks = heads * depth % kBlock != 0 || kv_heads * depth % kBlock != 0;
        if ((a.rows && splits_blocks) || tokens * std::max(heads, kv_heads) > kMostRows) return false;
        if (!norm::sums_narrow_gamma(jobs[0], depth) || !norm::sums_narrow_gamma(jobs[1], depth))
            return false;
    }
    run({.qkv = halves(a.dqkv),
         .bias = nullptr,
         .q = heads_of(a.dq, a.q_raw, a.q_rstd, a.q_gamma),
         .k = heads_of(a.dk, a.k_raw, a.k_rstd, a.k_gamma),
         .v = heads_of(a.dv, {}, {}, {}),
         .table = a.table.as<float>(),
         .tokens = tokens,
         .length = a.table.dim(0),
         .depth = static_cast<int>(depth),
         .eps = 0.0f,
         .fp8 = a.rows ? row_view(a.rows.data) : RowView{},
         .scales = row_scales(a.rows),
         .rule = {.scale_format = a.scale_format}},
        Pass::backward, chunk_sums, launch);
    if (a.q_gamma) norm::launch_narrow_gamma(jobs, depth, a.dgamma_mode, partials, tickets, launch);
    return true;
}

int64_t heads_backward_partials(int64_t depth) {
    return norm::gamma_partials(depth, 2) + 2 * kChunks * depth;
}

}  // namespace fp8flow::hopper::attention
