// SPDX-License-Identifier: MIT
// Bench cases of SwiGLU weighted by the routing probability, plain and with FP8 outputs.
#include "model/bench/cases/case.h"

namespace fp8flow::bench {

namespace {

const Keys kKeys = group_keys() + Keys{{"F", "2048", "256", "columns of gate and of up"},
                                       {"prob", "yes", "yes", "times a probability: yes | no"}};
const Key kDtype = {"dtype", "bf16", "bf16", "bf16 | f32"};
const Keys kQuantized = {{"codes", "e4m3", "e4m3", "e4m3 | e5m2"},
                         {"scale", "pow2", "pow2", "scales: pow2 | fp32"}};
const Key kFused = {"fused", "yes", "yes", "yes | no: the plain result in memory, then quantised"};
const Key kDprob = {"dprob", "yes", "yes", "gradient of the probability: yes | no"};

DType fp8_type(const Shape& shape) { return shape.dtype("codes", {DType::e4m3, DType::e5m2}); }

// What all four share.
struct Input {
    Buffers& buffers;
    const Shape& shape;
    RowGroups groups = buffers.routed(shape);
    int64_t rows = groups.row_capacity, width = shape.positive("F");
    DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32});
    TensorView h = buffers.normal(dtype, {rows, 2 * width});
    TensorView prob = shape.yes("prob") ? buffers.normal(DType::f32, {rows}) : TensorView{};

    op::Swiglu forward() const {
        return {.h = h, .prob = prob, .groups = groups, .a = buffers.output(dtype, {rows, width})};
    }
    TensorView da() const { return buffers.normal(dtype, {rows, width}); }
    TensorView dprob() const {
        return shape.yes("dprob") ? buffers.output(DType::f32, {rows}) : TensorView{};
    }
    op::SwigluBackward backward(const TensorView& da, const TensorView& dprob) const {
        return {.da = da,
                .h = h,
                .prob = prob,
                .groups = groups,
                .dh = buffers.output(dtype, {rows, 2 * width}),
                .dprob = dprob};
    }
};

op::Swiglu forward(Buffers& buffers, const Shape& shape) { return Input{buffers, shape}.forward(); }

Call forward_quantized(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Input in{buffers, shape};
    const op::SwigluQuantize args{
        .h = in.h,
        .prob = in.prob,
        .groups = in.groups,
        .scale_format = shape.scale_format(),
        .a = buffers.fp8_output(fp8_type(shape), {in.rows, in.width}, ScaleLayout::vec128)};
    if (shape.yes("fused")) return call_of(machine, &Ops::swiglu_quantize, args);
    const op::Swiglu plain = in.forward();
    const op::QuantizeRows quantized{
        .src = plain.a, .groups = args.groups, .scale_format = args.scale_format, .dst = args.a};
    return two_calls(machine, args, &Ops::swiglu, plain, &Ops::quantize_rows, quantized);
}

op::SwigluBackward backward(Buffers& buffers, const Shape& shape) {
    const Input in{buffers, shape};
    const TensorView da = in.da();
    return in.backward(da, in.dprob());
}

Call backward_quantized(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Input in{buffers, shape};
    const op::SwigluBackwardQuantize args{
        .da = in.da(),
        .h = in.h,
        .prob = in.prob,
        .groups = in.groups,
        .scale_format = shape.scale_format(),
        .dh = buffers.fp8_output(fp8_type(shape), {in.rows, 2 * in.width}, ScaleLayout::vec128),
        .dprob = in.dprob()};
    if (shape.yes("fused")) return call_of(machine, &Ops::swiglu_backward_quantize, args);
    const op::SwigluBackward plain = in.backward(args.da, args.dprob);
    const op::QuantizeRows quantized{
        .src = plain.dh, .groups = args.groups, .scale_format = args.scale_format, .dst = args.dh};
    return two_calls(machine, args, &Ops::swiglu_backward, plain, &Ops::quantize_rows, quantized);
}

}  // namespace

std::vector<Case> swiglu_cases() {
    return {{"swiglu", "silu(gate) * up * probability", kKeys + Keys{kDtype}, local<&Ops::swiglu, forward>},
            {"swiglu_quantize", "the same, quantised in 1x128 blocks in the kernel",
             kKeys + Keys{kDtype} + kQuantized + Keys{kFused}, forward_quantized},
            {"swiglu_backward", "gradients of gate, up and probability", kKeys + Keys{kDtype, kDprob},
             local<&Ops::swiglu_backward, backward>},
            {"swiglu_backward_quantize", "the same, quantised in 1x128 blocks in the kernel",
             kKeys + Keys{kDtype, kDprob} + kQuantized + Keys{kFused}, backward_quantized}};
}

}  // namespace fp8flow::bench
