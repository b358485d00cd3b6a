// SPDX-License-Identifier: MIT
// SwiGLU weighted by the routing probability, forward and backward, plain and quantised: which kernel runs,
// and the kernels for few rows and for rows of any kind. Contract: kernels/ops/swiglu.h.
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/swiglu/swiglu_rows.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::swiglu {

namespace {

constexpr int kCols = 16;  // neighbouring columns of a lane in a step
constexpr int kUnits = kCols / kUnit;
constexpr int kStep = kWarpSize * kCols;                       // columns of a warp in a step
constexpr int kBlockLanes = static_cast<int>(kBlock) / kCols;  // lanes of a 1x128 block

// Loads and stores of the columns of a lane; `left`: columns to the end of the half row. WideBf16: BF16 in
// whole aligned 16-byte words, kept as loaded until used.
struct WideBf16 {
    struct Raw {
        uint4 low, high;
    };
    // warps per CTA and CTAs per SM: 64 and 60 KB of values in flight
    static constexpr int kForwardWarps = 4, kForwardCtas = 8, kBackwardWarps = 4, kBackwardCtas = 5;
    static __device__ __forceinline__ Raw fetch(const RowView& t, int64_t at, int) {
        const uint4* in = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(t.data) + at);
        return {in[0], in[1]};
    }
    static __device__ __forceinline__ void values(const Raw& raw, int unit, float (&v)[kUnit]) {
        unpack_unit(unit == 0 ? raw.low : raw.high, DType::bf16, v);
    }
    static __device__ __forceinline__ void store(const RowView& t, int64_t at, int left, float (&v)[kCols]) {
        if (left <= 0) return;
        uint4* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.data) + at);
        out[0] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
        out[1] = {pack_bf16(v[8], v[9]), pack_bf16(v[10], v[11]), pack_bf16(v[12], v[13]),
                  pack_bf16(v[14], v[15])};
    }
    static __device__ __forceinline__ void store_fp8(const RowView& t, int64_t at, int, const uint4& fp8) {
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(t.data) + at) = fp8;
    }
};
// AnyValues: everything else, as FP32.
struct AnyValues {
    struct Raw {
        float v[kCols];
    };
    static constexpr int kForwardWarps = 4, kForwardCtas = 4, kBackwardWarps = 4, kBackwardCtas = 2;
    static __device__ __forceinline__ Raw fetch(const RowView& t, int64_t at, int left) {
        Raw raw = {};
#pragma unroll 1
        for (int i = 0; i < kCols; ++i) {
            raw.v[0] = i < left ? load_float(t.data, t.dtype, at + i) : 0.0f;
            rotate(raw.v);
        }
        return raw;
    }
    static __device__ __forceinline__ void values(const Raw& raw, int unit, float (&v)[kUnit]) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) v[i] = raw.v[unit * kUnit + i];
    }
    static __device__ __forceinline__ void store(const RowView& t, int64_t at, int left, float (&v)[kCols]) {
#pragma unroll 1
        for (int i = 0; i < kCols; ++i) {
            if (i < left) store_float(t.data, t.dtype, at + i, v[0]);
            rotate(v);
        }
    }
    static __device__ __forceinline__ void store_fp8(const RowView& t, int64_t at, int left,
                                                     const uint4& fp8) {
        const uint32_t words[kCols / 4] = {fp8.x, fp8.y, fp8.z, fp8.w};
        uint8_t* out = static_cast<uint8_t*>(t.data) + at;
#pragma unroll
        for (int i = 0; i < kCols; ++i)
            if (i < left) out[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
    }
};

// FP8 values and the scale of a 1x128 block, which eight lanes hold. All lanes must call it; those with
// nothing `left` hold zeros. Pads: zeros and scale 0.
template <class Source, DType kFp8>
__device__ __forceinline__ void store_block(const float (&v)[kCols], bool valid, ScaleFormat format,
                                            const RowView& fp8, int64_t at, int left, float* scale_at) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kCols; ++i) amax = fmaxf(amax, fabsf(v[i]));  // NaN ignored
#pragma unroll
    for (int step = kBlockLanes / 2; step > 0; step /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, step));
    const QuantScale scale = quant_scale(amax, fp8_max(kFp8), format);
    if (left <= 0) return;
    const float m = scale.multiplier;
    uint32_t words[kCols / 4];
#pragma unroll
    for (int i = 0; i < kCols / 4; ++i)
        words[i] = pack_fp8(v[4 * i] * m, v[4 * i + 1] * m, v[4 * i + 2] * m, v[4 * i + 3] * m, kFp8);
    Source::store_fp8(fp8, at, left, {words[0], words[1], words[2], words[3]});
    if (threadIdx.x % kBlockLanes == 0) *scale_at = valid ? scale.dequant : 0.0f;
}

// The rows of this warp: neighbours, and equally many per warp, give or take one.
struct RowRange {
    int64_t first, end;
    __device__ explicit RowRange(int64_t total) {
        const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.y,
                      warp = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
        first = total * warp / warps;
        end = total * (warp + 1) / warps;
    }
};

__device__ __forceinline__ float prob_of(const RowView& prob, int64_t row, bool valid) {
    return valid && prob ? static_cast<const float*>(prob.data)[row] : 1.0f;
}

// gate becomes that of the unit; its sigmoids.
template <class Unit>
__device__ __forceinline__ void unit_sigmoids(const Unit& unit, float (&gate)[kUnit],
                                              float (&sigmoid)[kUnit]) {
    float arguments[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
        gate[i] = unit.gate(gate[i]);
        arguments[i] = unit.argument(gate[i]);
    }
    sigmoids_of(arguments, sigmoid);
}

// h [M, 2F] (gate, up), prob -> a [M, F] = silu(gate) * up * prob, as values or FP8 with 1x128 scales; few
// rows, or rows of any kind.
// Lower bound: 2F values in and F values (or FP8 values and F/128 scales) out per row: 5.03 bytes per column,
// 0.082 ms at 32768 x 2048 and 4.1 TB/s.
// A warp owns neighbouring rows and takes 512 columns per step, 16 per lane. As soon as a step is in
// registers and multiplied, the next one, of the next row too, is loaded and in flight while the block is
// quantised and stored, and while other warps compute: 64 KB per SM. No barriers. Deterministic: the maximum
// of a 128-column block, over eight lanes, does not depend on the order. Instructions for 16 columns (SASS,
// FP8 output): 525, 272 of them the sigmoid. An SM issues 36 thread instructions per column at 4.1 TB/s
// and 1.75 GHz; these 33 kept the scheduler busy and memory at 79 %, so many BF16 rows run in swiglu_rows.cu.
template <class Args, class Source, Output kOutput>
__global__ void __launch_bounds__(Source::kForwardWarps* kWarpSize, Source::kForwardCtas)
    swiglu_kernel(const Args args) {
    const auto unit_form = unit_of(args);
    const RowRange rows(args.groups.total());
    if (rows.first >= rows.end) return;
    const int width = args.a.cols, first_col = static_cast<int>(threadIdx.x) * kCols;
    const int64_t a_base = args.a.base(), prob_base = args.prob.base();
    int64_t h_at =
                (args.h.base() + rows.first) * 2 * width + first_col,  // first column of this lane in the row
        a_at = (a_base + rows.first) * width + first_col;
    typename Source::Raw raw_gate, raw_up;
    const auto fetch = [&](int64_t at, bool valid, int left) {
        raw_gate = raw_up = {};
        if (!valid || left <= 0) return;
        raw_gate = Source::fetch(args.h, at, left);
        raw_up = Source::fetch(args.h, at + width, left);
    };
    RowCursor cursor(args.groups, rows.first);
    bool valid = cursor.next_is_valid();
    float prob = prob_of(args.prob, prob_base + rows.first, valid);
    fetch(h_at, valid, width - first_col);
    for (int64_t row = rows.first; row < rows.end; ++row) {
        const bool next_valid = row + 1 < rows.end && cursor.next_is_valid();
        const float next_prob = prob_of(args.prob, prob_base + row + 1, next_valid);
        for (int step = 0; step < width; step += kStep) {
            const int col = step + first_col, left = width - col;
            float a[kCols];
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                float gate[kUnit], up[kUnit], sigmoid[kUnit];
                Source::values(raw_gate, unit, gate);
                Source::values(raw_up, unit, up);
                unit_sigmoids(unit_form, gate, sigmoid);
#pragma unroll
                for (int i = 0; i < kUnit; ++i)
                    a[unit * kUnit + i] = gate[i] * sigmoid[i] * unit_form.up(up[i]) * prob;
            }
            const bool last = step + kStep >= width;
            fetch(h_at + (last ? 2 * width : step + kStep), last ? next_valid : valid,
                  last ? width - first_col : left - kStep);
            if constexpr (kOutput == Output::values)
                Source::store(args.a, a_at + step, left, a);
            else
                store_block<Source, fp8_of(kOutput)>(a, valid, args.scales.format, args.a, a_at + step, left,
                                                     args.scales.at(a_base + row, col));
        }
        h_at += 2 * width;
        a_at += width;
        valid = next_valid;
        prob = next_prob;
    }
}

// The sum of the 16 units of a block, two per lane, neighbours first; the same in all eight lanes.
__device__ __forceinline__ float sum_over_block(float unit0, float unit1) {
    float sum = unit0 + unit1;
#pragma unroll
    for (int step = 1; step < kBlockLanes; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    return sum;
}

// da [M, F], h [M, 2F], prob -> dh [M, 2F], as values or FP8 with 1x128 scales, and dprob [M]; few rows, or
// rows of any kind.
// Lower bound: 3F values in and 2F values (or FP8 values and scales) out per row: 8.06 bytes per column,
// 0.132 ms at 32768 x 2048 and 4.1 TB/s. Rows, columns and loads as in swiglu_kernel: 60 KB per SM. Pads:
// zeros. No barriers. Deterministic: dprob adds the units of a lane, the eight lanes of the block, the blocks
// of the row in ascending order, all inside the warp: the sum does not depend on the grid. Instructions for
// 16 columns (SASS, FP8 output): 770, 48 per column of the 58 that an SM issues at 4.1 TB/s and 1.75 GHz.
template <class Args, class Source, Output kOutput>
__global__ void __launch_bounds__(Source::kBackwardWarps* kWarpSize, Source::kBackwardCtas)
    swiglu_backward_kernel(const Args args) {
    const auto unit_form = unit_of(args);
    const RowRange rows(args.groups.total());
    if (rows.first >= rows.end) return;
    const int width = args.da.cols, first_col = static_cast<int>(threadIdx.x) * kCols;
    const int64_t prob_base = args.prob.base(), dh_base = args.dh.base(), dprob_base = args.dprob.base();
    int64_t h_at = (args.h.base() + rows.first) * 2 * width + first_col,
            da_at = (args.da.base() + rows.first) * width + first_col,
            dh_at = (dh_base + rows.first) * 2 * width + first_col;
    typename Source::Raw raw_da, raw_gate, raw_up;
    const auto fetch = [&](int64_t from_da, int64_t from_h, bool valid, int left) {
        raw_da = raw_gate = raw_up = {};
        if (!valid || left <= 0) return;
        raw_da = Source::fetch(args.da, from_da, left);
        raw_gate = Source::fetch(args.h, from_h, left);
        raw_up = Source::fetch(args.h, from_h + width, left);
    };
    RowCursor cursor(args.groups, rows.first);
    bool valid = cursor.next_is_valid();
    float prob = prob_of(args.prob, prob_base + rows.first, valid);
    fetch(da_at, h_at, valid, width - first_col);
    for (int64_t row = rows.first; row < rows.end; ++row) {
        const bool next_valid = row + 1 < rows.end && cursor.next_is_valid();
        const float next_prob = prob_of(args.prob, prob_base + row + 1, next_valid);
        float sum = 0.0f;
        for (int step = 0; step < width; step += kStep) {
            const int col = step + first_col, left = width - col;
            float dgate[kCols], dup[kCols], sums[kUnits] = {};
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                float da[kUnit], gate[kUnit], up[kUnit], sigmoids[kUnit];
                Source::values(raw_da, unit, da);
                Source::values(raw_gate, unit, gate);
                Source::values(raw_up, unit, up);
                float g[kUnit];
#pragma unroll
                for (int i = 0; i < kUnit; ++i) g[i] = gate[i];
                unit_sigmoids(unit_form, g, sigmoids);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) {
                    const float sigmoid = sigmoids[i], silu = g[i] * sigmoid, da_prob = da[i] * prob,
                                linear = unit_form.up(up[i]);
                    sums[unit] = fma_float(da[i], silu * linear, sums[unit]);
                    dgate[unit * kUnit + i] = unit_form.dgate(
                        da_prob * linear * sigmoid * (1.0f + unit_form.argument(g[i]) * (1.0f - sigmoid)),
                        gate[i]);
                    dup[unit * kUnit + i] = unit_form.dup(da_prob * silu, up[i]);
                }
            }
            const bool last = step + kStep >= width;
            fetch(da_at + (last ? width : step + kStep), h_at + (last ? 2 * width : step + kStep),
                  last ? next_valid : valid, last ? width - first_col : left - kStep);
            if constexpr (kOutput == Output::values) {
                Source::store(args.dh, dh_at + step, left, dgate);
                Source::store(args.dh, dh_at + step + width, left, dup);
            } else {  // width is a multiple of 128: no block has both halves
                constexpr DType kFp8 = fp8_of(kOutput);
                store_block<Source, kFp8>(dgate, valid, args.scales.format, args.dh, dh_at + step, left,
                                          args.scales.at(dh_base + row, col));
                store_block<Source, kFp8>(dup, valid, args.scales.format, args.dh, dh_at + step + width, left,
                                          args.scales.at(dh_base + row, width + col));
            }
            if (!args.dprob) continue;
            const float block = sum_over_block(sums[0], sums[1]);
#pragma unroll
            for (int lane = 0; lane < kWarpSize; lane += kBlockLanes)
                sum += __shfl_sync(kFullMask, block, lane);  // +0 after the last block of the row
        }
        if (args.dprob && threadIdx.x == 0) static_cast<float*>(args.dprob.data)[dprob_base + row] = sum;
        h_at += 2 * width;
        dh_at += 2 * width;
        da_at += width;
        valid = next_valid;
        prob = next_prob;
    }
}

int64_t rows_of(const RowGroups& groups, const TensorView& h) {
    return groups.num_groups > 0 ? groups.row_capacity : h.dim(0);
}

// The up half begins at column `width`: 16-byte accesses need it aligned too.
RowView halves_view(const TensorView& v) {
    RowView view = row_view(v);
    view.vector = view.vector && v.cols() / 2 % kUnit == 0;
    return view;
}

// Whether every lane has whole aligned units of BF16 or FP8, or none.
bool is_wide(const RowView& t, int width, Output output = Output::values) {
    return t.vector && (t.dtype == DType::bf16 || output != Output::values) && width % kCols == 0;
}
constexpr int64_t kManyColumns = int64_t{1} << 20;  // outputs; fewer do not pay for the tables of sigmoids

// work.operator()<Output>() for the output `t`.
template <class Work> void with_output(const RowView& t, const BlockScales& scales, Work work) {
    if (scales.data == nullptr)
        work.template operator()<Output::values>();
    else if (t.dtype == DType::e5m2)
        work.template operator()<Output::e5m2>();
    else
        work.template operator()<Output::e4m3>();
}

// A kernel of this file with its warps per CTA and CTAs per SM.
template <class Args>
void run(void (*kernel)(Args), int warps, int ctas, const Args& args, int64_t rows, const Launch& launch,
         const char* op) {
    constexpr int64_t kRowsOfCta = 4;  // per CTA: partly idle CTAs rather than few
    launch_kernel(kernel, grid_for(ceil_div(rows, kRowsOfCta), launch, ctas),
                  dim3(kWarpSize, static_cast<unsigned>(warps)), launch, op, args);
}

// op::Swiglu or op::SwigluQuantize.
template <class Op>
void launch_forward(const Op& op, const TensorView& a, const BlockScales& scales, RowTicket* tickets,
                    const Launch& launch) {
    const int64_t rows = rows_of(op.groups, op.h);
    const SwigluForward forward = {.h = halves_view(op.h),
                                   .prob = row_view(op.prob),
                                   .a = row_view(a),
                                   .scales = scales,
                                   .groups = device_groups(op.groups, rows),
                                   .tickets = tickets};
    const int width = forward.a.cols;
    if (rows == 0 || width == 0) return;
    with_unit(op.form, forward, [&]<class Args>(const Args& args) {
        with_output(args.a, scales, [&]<Output kOutput>() {
            if (!is_wide(args.h, width) || !is_wide(args.a, width, kOutput))
                run(swiglu_kernel<Args, AnyValues, kOutput>, AnyValues::kForwardWarps,
                    AnyValues::kForwardCtas, args, rows, launch, "swiglu");
            else if (rows * width < kManyColumns)
                run(swiglu_kernel<Args, WideBf16, kOutput>, WideBf16::kForwardWarps, WideBf16::kForwardCtas,
                    args, rows, launch, "swiglu");
            else
                launch_swiglu_rows(args, kOutput, rows, launch);
        });
    });
}

// op::SwigluBackward or op::SwigluBackwardQuantize.
template <class Op>
void launch_backward(const Op& op, const TensorView& dh, const BlockScales& scales, RowTicket* tickets,
                     const Launch& launch) {
    const int64_t rows = rows_of(op.groups, op.h);
    const SwigluGradient gradient = {.da = row_view(op.da),
                                     .h = halves_view(op.h),
                                     .prob = row_view(op.prob),
                                     .dh = halves_view(dh),
                                     .dprob = row_view(op.dprob),
                                     .scales = scales,
                                     .groups = device_groups(op.groups, rows),
                                     .tickets = tickets};
    const int width = gradient.da.cols;
    if (rows == 0) return;
    with_unit(op.form, gradient, [&]<class Args>(const Args& args) {
        with_output(args.dh, scales, [&]<Output kOutput>() {
            if (!is_wide(args.da, width) || !is_wide(args.h, width) || !is_wide(args.dh, width, kOutput))
                run(swiglu_backward_kernel<Args, AnyValues, kOutput>, AnyValues::kBackwardWarps,
                    AnyValues::kBackwardCtas, args, rows, launch, "swiglu_backward");
            else if (rows * width < kManyColumns)
                run(swiglu_backward_kernel<Args, WideBf16, kOutput>, WideBf16::kBackwardWarps,
                    WideBf16::kBackwardCtas, args, rows, launch, "swiglu_backward");
            else
                launch_swiglu_backward_rows(args, kOutput, rows, launch);
        });
    });
}

BlockScales block_scales(const ScaledTensor& t, ScaleFormat format) {
    return {t.scales.as<float>(), t.data.dim(0), format};
}
RowTicket* tickets_of(const HopperOps::Workspace& workspace) {
    return workspace.zeros_for<RowTicket>(RowTicket::kCount);
}

}  // namespace

}  // namespace fp8flow::hopper::swiglu

namespace fp8flow {

using namespace hopper;
using namespace hopper::swiglu;

void HopperOps::do_swiglu(const op::Swiglu& args, const Launch& launch) {
    launch_forward(args, args.a, {}, tickets_of(workspace(launch)), launch);
}

void HopperOps::do_swiglu_quantize(const op::SwigluQuantize& args, const Launch& launch) {
    launch_forward(args, args.a.data, block_scales(args.a, args.scale_format), tickets_of(workspace(launch)),
                   launch);
}

void HopperOps::do_swiglu_backward(const op::SwigluBackward& args, const Launch& launch) {
    launch_backward(args, args.dh, {}, tickets_of(workspace(launch)), launch);
}

void HopperOps::do_swiglu_backward_quantize(const op::SwigluBackwardQuantize& args, const Launch& launch) {
    launch_backward(args, args.dh.data, block_scales(args.dh, args.scale_format),
                    tickets_of(workspace(launch)), launch);
}

}  // namespace fp8flow
