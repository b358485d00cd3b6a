// SPDX-License-Identifier: MIT
// Bench cases of the dispatch plan and the row movers, on one rank that has all experts.
#include "kernels/core/error.h"
#include "model/bench/cases/routing.h"

namespace fp8flow::bench {

namespace {

// T tokens of this rank, planned.
struct Planned {
    int64_t tokens, topk;
    PlanCounts counts;
    op::PlanDispatch plan;
};
Planned planned(Machine& machine, Buffers& buffers, const Shape& shape, int64_t alignment) {
    const auto& routing = buffers.once<Routing>([&] { return routing_of(shape); });
    const auto& counts = buffers.once<PlanCounts>([&] { return plan_counts({routing}, 0, alignment); });
    const TensorView ids = buffers.values(routing.ids).reshape({1, routing.tokens, routing.topk});
    const TensorView probs = buffers.values(routing.probs).reshape({1, routing.tokens, routing.topk});
    Planned result{routing.tokens, routing.topk, counts,
                   plan_arguments(buffers, ids, probs, 0, counts, alignment)};
    machine.ops.plan_dispatch(result.plan);
    return result;
}

const Keys kWidth = {{"H", "7168", "256", "columns of a row"}};
const Key kReal = {"dtype", "bf16", "bf16", "bf16 | f32"};
// The baseline that the fused form replaces: rows without pads in memory between two passes.
const Key kFused = {"fused", "yes", "yes", "yes | no: two passes, pads in one of their own"};

Call plan(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t ranks = shape.positive("ranks"), alignment = shape.positive("align"),
                  experts = shape.positive("E");
    require(experts % ranks == 0, ExitCode::usage,
            "bench plan_dispatch: ranks: got {}, want a divisor of E = {}", ranks, experts);
    const auto& all = buffers.once<std::vector<Routing>>([&] { return routings_of(shape, ranks); });
    const auto& counts = buffers.once<PlanCounts>([&] { return plan_counts(all, 0, alignment); });
    std::vector<int32_t> ids;
    std::vector<float> probs;
    for (const Routing& routing : all) {
        ids.insert(ids.end(), routing.ids.begin(), routing.ids.end());
        probs.insert(probs.end(), routing.probs.begin(), routing.probs.end());
    }
    const int64_t tokens = shape.number("T"), topk = shape.positive("K");
    const op::PlanDispatch args =
        plan_arguments(buffers, buffers.values(ids).reshape({ranks, tokens, topk}),
                       buffers.values(probs).reshape({ranks, tokens, topk}), 0, counts, alignment);
    return call_of(machine, &Ops::plan_dispatch, args);
}

Call permute(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Planned in = planned(machine, buffers, shape, shape.positive("align"));
    const int64_t columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32, DType::e4m3, DType::e5m2});
    const bool scaled = is_fp8(dtype) && shape.yes("scales");
    const op::PermutePad args{
        .src = scaled ? buffers.fp8_input(dtype, {in.tokens, columns}, ScaleLayout::vec128_wire)
                      : ScaledTensor{buffers.normal(dtype, {in.tokens, columns}), {}, ScaleLayout::none},
        .row_source = in.plan.row_source,
        .recv_rows = in.plan.recv_rows,
        .num_rows = buffers.values(std::vector<int64_t>{in.counts.received}),
        .groups = in.plan.groups,
        .dst = buffers.fp8_output(dtype, {in.counts.padded, columns},
                                  scaled ? ScaleLayout::vec128 : ScaleLayout::none)};
    if (shape.yes("fused")) return call_of(machine, &Ops::permute_pad, args);
    const Planned dense = planned(machine, buffers, shape, 1);
    const op::PermutePad permuted{
        .src = args.src,
        .row_source = dense.plan.row_source,
        .recv_rows = dense.plan.recv_rows,
        .num_rows = args.num_rows,
        .groups = dense.plan.groups,
        .dst = buffers.fp8_output(dtype, {dense.counts.padded, columns}, args.dst.layout)};
    const op::PadRows padded{
        .src = permuted.dst, .src_groups = permuted.groups, .dst_groups = args.groups, .dst = args.dst};
    return two_calls(machine, args, &Ops::permute_pad, permuted, &Ops::pad_rows, padded);
}

Call unpermute(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Planned in = planned(machine, buffers, shape, shape.positive("align"));
    const int64_t columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32});
    op::UnpermuteUnpad args{.src = buffers.normal(dtype, {in.counts.padded, columns}),
                            .recv_rows = in.plan.recv_rows,
                            .num_rows = buffers.values(std::vector<int64_t>{in.counts.received}),
                            .dst = buffers.output(dtype, {in.tokens, columns})};
    if (shape.yes("prob")) args.row_prob = in.plan.row_prob;
    if (shape.yes("fused")) return call_of(machine, &Ops::unpermute_unpad, args);
    const Planned dense = planned(machine, buffers, shape, 1);
    const op::UnpadRows unpadded{.src = args.src,
                                 .src_groups = in.plan.groups,
                                 .dst_groups = dense.plan.groups,
                                 .dst = buffers.output(dtype, {dense.counts.padded, columns})};
    op::UnpermuteUnpad unpermuted = args;
    unpermuted.src = unpadded.dst;
    unpermuted.recv_rows = dense.plan.recv_rows;
    if (args.row_prob) unpermuted.row_prob = dense.plan.row_prob;
    return two_calls(machine, args, &Ops::unpad_rows, unpadded, &Ops::unpermute_unpad, unpermuted);
}

Call probs_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Planned in = planned(machine, buffers, shape, shape.positive("align"));
    const int64_t columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32});
    const op::UnpermuteProbsBackward args{
        .ddst = buffers.normal(dtype, {in.tokens, columns}),
        .src = buffers.normal(dtype, {in.counts.padded, columns}),
        .row_source = in.plan.row_source,
        .recv_rows = in.plan.recv_rows,
        .num_rows = buffers.values(std::vector<int64_t>{in.counts.received}),
        .groups = in.plan.groups,
        .drow_prob = buffers.output(DType::f32, {in.counts.padded})};
    return call_of(machine, &Ops::unpermute_probs_backward, args);
}

// The same counts, once without and once with pads.
struct Pair {
    RowGroups dense, padded;
};
Pair group_pair(Buffers& buffers, const Shape& shape) {
    const std::vector<int64_t> counts =
        group_counts(shape.number("M"), shape.positive("G"), shape.choice("rows", distribution_names()));
    return {buffers.routed(counts, 1), buffers.routed(counts, shape.positive("align"))};
}

op::PadRows pad(Buffers& buffers, const Shape& shape) {
    const Pair groups = group_pair(buffers, shape);
    const int64_t columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32, DType::e4m3, DType::e5m2});
    const ScaleLayout layout = is_fp8(dtype) ? ScaleLayout::vec128 : ScaleLayout::none;
    return {.src = buffers.operand(dtype, {groups.dense.row_capacity, columns}, layout),
            .src_groups = groups.dense,
            .dst_groups = groups.padded,
            .dst = buffers.fp8_output(dtype, {groups.padded.row_capacity, columns}, layout)};
}

op::UnpadRows unpad(Buffers& buffers, const Shape& shape) {
    const Pair groups = group_pair(buffers, shape);
    const int64_t columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32});
    return {.src = buffers.normal(dtype, {groups.padded.row_capacity, columns}),
            .src_groups = groups.padded,
            .dst_groups = groups.dense,
            .dst = buffers.output(dtype, {groups.dense.row_capacity, columns})};
}

}  // namespace

std::vector<Case> permute_cases() {
    return {{"plan_dispatch", "who receives what, from all ranks' routing",
             routing_keys() + Keys{{"ranks", "1", "2", "ranks in the plan (E experts in all)"}}, plan},
            {"permute_pad", "tokens to their experts' padded rows, fused",
             routing_keys() + kWidth +
                 Keys{{"dtype", "e4m3", "e4m3", "bf16 | f32 | e4m3 | e5m2"},
                      {"scales", "yes", "yes", "FP8 values with 1x128 scales: yes | no"},
                      kFused},
             permute},
            {"unpermute_unpad", "experts' rows summed for each token, fused",
             routing_keys() + kWidth +
                 Keys{kReal, {"prob", "no", "yes", "times merging probabilities: yes | no"}, kFused},
             unpermute},
            {"unpermute_probs_backward", "gradient of merging probabilities",
             routing_keys() + kWidth + Keys{kReal}, probs_backward},
            {"pad_rows", "second half of the unfused permute and pad",
             group_keys() + kWidth + Keys{{"dtype", "e4m3", "e4m3", "bf16 | f32 | e4m3 | e5m2"}},
             local<&Ops::pad_rows, pad>},
            {"unpad_rows", "first half of the unfused unpad and unpermute",
             group_keys() + kWidth + Keys{kReal}, local<&Ops::unpad_rows, unpad>}};
}

}  // namespace fp8flow::bench
