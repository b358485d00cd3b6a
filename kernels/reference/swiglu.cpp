// SPDX-License-Identifier: MIT
// SwiGLU weighted by the routing probability, forward and backward, plain and fused with quantisation: one
// fp32 row function for each direction, and the stores of the row it computes.
#include "kernels/reference/quantizers.h"
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace fp8flow {

namespace {

using namespace reference;

float prob_of(const TensorView& prob, int64_t row) {
    return prob ? prob.as<float>()[base_of(prob) + row] : 1.0f;
}

void zero_row_of(const TensorView& view, int64_t row) {
    const int64_t row_bytes = view.cols() * size_of(view.dtype);
    std::memset(view.bytes_ptr() + (base_of(view) + row) * row_bytes, 0, static_cast<std::size_t>(row_bytes));
}

// A gate and an up as the form changes them. SwiGLU does not change them, not even the sign of a zero.
struct Unit {
    float alpha, offset, limit;
    bool plain;

    explicit Unit(const op::GluForm& form)
        : alpha(form.alpha),
          offset(form.offset),
          limit(form.limit > 0.0f ? form.limit : std::numeric_limits<float>::infinity()),
          plain(form.is_swiglu()) {}
    float gate(float g) const { return g > limit ? limit : g; }
    float up(float u) const { return plain ? u : (u > limit ? limit : u < -limit ? -limit : u) + offset; }
    bool holds_gate(float g) const { return g > limit; }
    bool holds_up(float u) const { return u > limit || u < -limit; }
};

// a[j] = (silu(gate[j]) * up[j]) * prob
void forward_row(const float* __restrict h, const Unit& unit, float prob, int64_t width,
                 float* __restrict a) {
    const float *gate = h, *up = h + width;
    for (int64_t j = 0; j < width; ++j) {
        const float g = unit.gate(gate[j]);
        a[j] = g * sigmoid_float(unit.alpha * g) * unit.up(up[j]) * prob;
    }
}

// The formulas of kernels/ops/swiglu.h; weighted[j] = silu(gate[j]) * up[j], the factor of da[j] in dprob.
void backward_row(const float* __restrict da, const float* __restrict h, const Unit& unit, float prob,
                  int64_t width, float* __restrict dh, float* __restrict weighted) {
    const float *gate = h, *up = h + width;
    float *dgate = dh, *dup = dh + width;
    for (int64_t j = 0; j < width; ++j) {
        const float g = unit.gate(gate[j]), u = unit.up(up[j]), argument = unit.alpha * g,
                    sigmoid = sigmoid_float(argument), silu = g * sigmoid, da_prob = da[j] * prob;
        dgate[j] =
            unit.holds_gate(gate[j]) ? 0.0f : da_prob * u * sigmoid * (1.0f + argument * (1.0f - sigmoid));
        dup[j] = unit.holds_up(up[j]) ? 0.0f : da_prob * silu;
        weighted[j] = silu * u;
    }
}

// The sum of products over at most 128 columns in the order of kernels/ops/swiglu.h.
float block_dot(const float* a, const float* b, int64_t count) {
    constexpr int64_t kUnit = 8, kUnits = kBlock / kUnit;
    float units[kUnits] = {};
    for (int64_t i = 0; i < count; ++i) units[i / kUnit] = fma_float(a[i], b[i], units[i / kUnit]);
    for (int64_t step = 1; step < kUnits; step *= 2)
        for (int64_t u = 0; u < kUnits; u += 2 * step) units[u] += units[u + step];
    return units[0];
}

float prob_gradient(const float* da, const float* weighted, int64_t width) {
    float sum = 0.0f;
    for (int64_t j = 0; j < width; j += kBlock)
        sum += block_dot(da + j, weighted + j, std::min(kBlock, width - j));
    return sum;
}

// Where rows are written: values, or FP8 values and scales.
struct PlainRows {
    const TensorView& view;
    void store(int64_t row, const float* values) const { store_row(view, base_of(view) + row, values); }
    void clear(int64_t row) const { zero_row_of(view, row); }
};
struct QuantizedRows {
    const ScaledTensor& rows;
    ScaleFormat format;
    void store(int64_t row, const float* values) const {
        quantize_row(values, rows, base_of(rows.data) + row, {.scale_format = format});
    }
    void clear(int64_t row) const { zero_row(rows, base_of(rows.data) + row); }
};

// Rows of `a` made from rows of h.
template <class Args, class Rows> void forward(const Args& args, const Rows& out) {
    const int64_t width = args.h.cols() / 2;
    const Unit unit(args.form);
    const std::vector<GroupRange> ranges = group_ranges(args.groups, args.h.dim(0));
    for_each_row(ranges, 3 * width, [&](int64_t row, RowKind kind, float* h_row) {
        if (kind == RowKind::pad) return out.clear(row);
        float* a_row = h_row + 2 * width;
        load_row(args.h, base_of(args.h) + row, h_row);
        forward_row(h_row, unit, prob_of(args.prob, row), width, a_row);
        out.store(row, a_row);
    });
}

// The same for rows of dh; dprob is written here.
template <class Args, class Rows> void backward(const Args& args, const Rows& out) {
    const int64_t width = args.da.cols();
    float* dprob = args.dprob ? args.dprob.template as<float>() + base_of(args.dprob) : nullptr;
    const Unit unit(args.form);
    const std::vector<GroupRange> ranges = group_ranges(args.groups, args.da.dim(0));
    for_each_row(ranges, 6 * width, [&](int64_t row, RowKind kind, float* h_row) {
        if (kind == RowKind::pad) {
            if (dprob != nullptr) dprob[row] = 0.0f;
            return out.clear(row);
        }
        float *dh_row = h_row + 2 * width, *da_row = h_row + 4 * width, *weighted = h_row + 5 * width;
        load_row(args.h, base_of(args.h) + row, h_row);
        load_row(args.da, base_of(args.da) + row, da_row);
        backward_row(da_row, h_row, unit, prob_of(args.prob, row), width, dh_row, weighted);
        if (dprob != nullptr) dprob[row] = prob_gradient(da_row, weighted, width);
        out.store(row, dh_row);
    });
}

}  // namespace

void ReferenceOps::do_swiglu(const op::Swiglu& args, const Launch&) { forward(args, PlainRows{args.a}); }

void ReferenceOps::do_swiglu_quantize(const op::SwigluQuantize& args, const Launch&) {
    forward(args, QuantizedRows{args.a, args.scale_format});
}

void ReferenceOps::do_swiglu_backward(const op::SwigluBackward& args, const Launch&) {
    backward(args, PlainRows{args.dh});
}

void ReferenceOps::do_swiglu_backward_quantize(const op::SwigluBackwardQuantize& args, const Launch&) {
    backward(args, QuantizedRows{args.dh, args.scale_format});
}

}  // namespace fp8flow
