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

// What all four share.
struct Input {
    RoutedRows routed;
    int64_t width;
    DType dtype;
    TensorView h, prob;
};
Input input_of(Buffers& buffers, const Shape& shape) {
    Input in{.routed = buffers.routed(shape),
             .width = shape.positive("F"),
             .dtype = shape.dtype("dtype", {DType::bf16, DType::f32})};
    in.h = buffers.normal(in.dtype, {in.routed.capacity, 2 * in.width});
    if (shape.yes("prob")) in.prob = buffers.normal(DType::f32, {in.routed.capacity});
    return in;
}
DType fp8_type(const Shape& shape) { return shape.dtype("codes", {DType::e4m3, DType::e5m2}); }
TensorView dprob_of(Buffers& buffers, const Shape& shape, const Input& in) {
    return shape.yes("dprob") ? buffers.output(DType::f32, {in.routed.capacity}) : TensorView{};
}
TensorView da_of(Buffers& buffers, const Input& in) {
    return buffers.normal(in.dtype, {in.routed.capacity, in.width});
}

op::Swiglu plain_forward(Buffers& buffers, const Input& in) {
    return {.h = in.h,
            .prob = in.prob,
            .groups = in.routed.groups,
            .a = buffers.output(in.dtype, {in.routed.capacity, in.width})};
}
op::SwigluBackward plain_backward(Buffers& buffers, const Input& in, const TensorView& da,
                                  const TensorView& dprob) {
    return {.da = da,
            .h = in.h,
            .prob = in.prob,
            .groups = in.routed.groups,
            .dh = buffers.output(in.dtype, {in.routed.capacity, 2 * in.width}),
            .dprob = dprob};
}

Call forward(Machine& machine, Buffers& buffers, const Shape& shape) {
    return call_of(machine, &Ops::swiglu, plain_forward(buffers, input_of(buffers, shape)));
}

Call forward_quantized(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Input in = input_of(buffers, shape);
    const op::SwigluQuantize args{
        .h = in.h,
        .prob = in.prob,
        .groups = in.routed.groups,
        .scale_format = shape.scale_format(),
        .a = buffers.fp8_output(fp8_type(shape), {in.routed.capacity, in.width}, ScaleLayout::vec128)};
    if (shape.yes("fused")) return call_of(machine, &Ops::swiglu_quantize, args);
    const op::Swiglu plain = plain_forward(buffers, in);
    const op::QuantizeRows quantized{
        .src = plain.a, .groups = args.groups, .scale_format = args.scale_format, .dst = args.a};
    return two_calls(machine, args, &Ops::swiglu, plain, &Ops::quantize_rows, quantized);
}

Call backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Input in = input_of(buffers, shape);
    const TensorView da = da_of(buffers, in);
    return call_of(machine, &Ops::swiglu_backward,
                   plain_backward(buffers, in, da, dprob_of(buffers, shape, in)));
}

Call backward_quantized(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Input in = input_of(buffers, shape);
    const op::SwigluBackwardQuantize args{
        .da = da_of(buffers, in),
        .h = in.h,
        .prob = in.prob,
        .groups = in.routed.groups,
        .scale_format = shape.scale_format(),
        .dh = buffers.fp8_output(fp8_type(shape), {in.routed.capacity, 2 * in.width}, ScaleLayout::vec128),
        .dprob = dprob_of(buffers, shape, in)};
    if (shape.yes("fused")) return call_of(machine, &Ops::swiglu_backward_quantize, args);
    const op::SwigluBackward plain = plain_backward(buffers, in, args.da, args.dprob);
    const op::QuantizeRows quantized{
        .src = plain.dh, .groups = args.groups, .scale_format = args.scale_format, .dst = args.dh};
    return two_calls(machine, args, &Ops::swiglu_backward, plain, &Ops::quantize_rows, quantized);
}

}  // namespace

std::vector<Case> swiglu_cases() {
    return {
        {"swiglu", "silu(gate) * up * probability", kKeys + Keys{kDtype}, forward},
        {"swiglu_quantize", "the same, quantised in 1x128 blocks in the kernel",
         kKeys + Keys{kDtype} + kQuantized + Keys{kFused}, forward_quantized},
        {"swiglu_backward", "gradients of gate, up and probability", kKeys + Keys{kDtype, kDprob}, backward},
        {"swiglu_backward_quantize", "the same, quantised in 1x128 blocks in the kernel",
         kKeys + Keys{kDtype, kDprob} + kQuantized + Keys{kFused}, backward_quantized}};
}

}  // namespace fp8flow::bench
