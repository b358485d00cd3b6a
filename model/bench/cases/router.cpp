// SPDX-License-Identifier: MIT
// Bench cases of the router: logits, top-k with what balancing takes and gives, the bias update.
#include "model/bench/cases/case.h"

namespace fp8flow::bench {

namespace {

const Keys kTokens = {{"T", "4096", "24", "tokens"}, {"E", "256", "16", "experts"}};
const Keys kProduct = {{"H", "7168", "256", "columns"},
                       {"dtype", "bf16", "bf16", "of x: bf16 | f32"},
                       {"weight", "bf16", "f32", "of the weight: bf16 | f32"}};
const Keys kOptions = {{"K", "8", "2", "experts of a token (top-k)"},
                       {"score", "sigmoid", "softmax", "softmax | sigmoid"},
                       {"pre_softmax", "no", "no", "softmax over all experts before the choice: yes | no"},
                       {"num_groups", "0", "0", "groups of experts for group-limited routing; 0: none"},
                       {"group_topk", "0", "0", "groups that a token may use"}};
const Key kBias = {"bias", "yes", "no", "expert bias (sigmoid only): yes | no"};
const Key kBalance = {"balance", "no", "yes", "also what balancing and z-loss need: yes | no"};
constexpr std::initializer_list<DType> kReal = {DType::bf16, DType::f32};

op::Score score(const Shape& shape) {
    return shape.choice("score", {"softmax", "sigmoid"}) == 0 ? op::Score::softmax : op::Score::sigmoid;
}
op::RouterOptions options(const Shape& shape) {
    return {.score = score(shape),
            .pre_softmax = shape.yes("pre_softmax"),
            .num_groups = shape.number("num_groups"),
            .group_topk = shape.number("group_topk")};
}
TensorView logits_of(Buffers& buffers, const Shape& shape) {
    return buffers.normal(DType::f32, {shape.number("T"), shape.positive("E")});
}

op::RouterLogits logits(Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E"), columns = shape.positive("H");
    return {.x = buffers.normal(shape.dtype("dtype", kReal), {tokens, columns}),
            .weight = buffers.normal(shape.dtype("weight", kReal), {experts, columns}, 0.02),
            .logits = buffers.output(DType::f32, {tokens, experts})};
}

Call logits_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E"), columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", kReal);
    op::RouterLogitsBackward args{
        .dlogits = buffers.normal(DType::f32, {tokens, experts}),
        .x = buffers.normal(dtype, {tokens, columns}),
        .weight = buffers.normal(shape.dtype("weight", kReal), {experts, columns}, 0.02),
        .dweight_mode = shape.gradient(),
        .dx = buffers.output(dtype, {tokens, columns}),
        .dweight = buffers.zeros(DType::f32, {experts, columns})};
    if (shape.yes("add")) args.dx_in = buffers.normal(dtype, {tokens, columns});
    return call_of(machine, &Ops::router_logits_backward, args);
}

// Tokens in one set, as a layer without losses by sequence has them. The z-loss has no key of its own.
op::RouterBalance balance_outputs(Buffers& buffers, int64_t tokens, int64_t experts) {
    const int64_t blocks = op::balance_blocks(tokens, 0);
    return {.counts = buffers.output(DType::f32, {1, experts}),
            .score_sums = buffers.output(DType::f32, {blocks, experts}),
            .log_squares = buffers.output(DType::f32, {blocks})};
}

op::RouterTopK top_k_arguments(Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E"), topk = shape.positive("K");
    op::RouterTopK args{.logits = logits_of(buffers, shape),
                        .options = options(shape),
                        .ids = buffers.output(DType::i32, {tokens, topk}),
                        .probs = buffers.output(DType::f32, {tokens, topk}),
                        .counts = buffers.zeros(DType::i64, {experts})};
    if (shape.yes("bias")) args.expert_bias = buffers.normal(DType::f32, {experts}, 0.01);
    return args;
}

Call top_k(Machine& machine, Buffers& buffers, const Shape& shape) {
    op::RouterTopK args = top_k_arguments(buffers, shape);
    if (shape.yes("balance")) args.balance = balance_outputs(buffers, shape.number("T"), shape.positive("E"));
    return call_of(machine, &Ops::router_top_k, args);
}

// Both losses, with their values, after a top-k of the same logits.
op::RouterTopKBackward backward_arguments(Buffers& buffers, const Shape& shape, const TensorView& logits,
                                          const TensorView& ids, const op::RouterBalance& balance) {
    op::RouterTopKBackward args{.logits = logits,
                                .ids = ids,
                                .dprobs = buffers.normal(DType::f32, {ids.dim(0), ids.dim(1)}),
                                .options = options(shape),
                                .balance = balance,
                                .dlogits = buffers.output(DType::f32, {ids.dim(0), logits.dim(1)})};
    if (!balance.counts) return args;
    args.terms[0] = {.counts = balance.counts, .weight = 1e-6f};
    args.z_weight = 1e-6f;
    args.losses = buffers.zeros(DType::f32, {op::kRouterLosses});
    return args;
}

Call top_k_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E"), topk = shape.positive("K");
    // distinct experts of each token
    const auto& ids = buffers.once<std::vector<int32_t>>([&] {
        std::vector<int32_t> chosen(to_size(tokens * topk));
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t k = 0; k < topk; ++k)
                chosen[to_size(t * topk + k)] = static_cast<int32_t>((t * 7 + k * 3 + k) % experts);
        return chosen;
    });
    op::RouterBalance balance;
    if (shape.yes("balance")) {
        const int64_t blocks = op::balance_blocks(tokens, 0);
        balance = {.counts = buffers.integers(DType::f32, {1, experts}, tokens + 1),
                   .score_sums = buffers.normal(DType::f32, {blocks, experts}),
                   .log_squares = buffers.normal(DType::f32, {blocks})};
    }
    return call_of(machine, &Ops::router_top_k_backward,
                   backward_arguments(buffers, shape, logits_of(buffers, shape),
                                      buffers.values(ids).reshape({tokens, topk}), balance));
}

// What a layer does with its logits, forward and backward: choose, count, sum scores; both losses, and all
// gradients.
Call route(Machine& machine, Buffers& buffers, const Shape& shape) {
    op::RouterTopK choice = top_k_arguments(buffers, shape);
    choice.balance = balance_outputs(buffers, shape.number("T"), shape.positive("E"));
    const op::RouterTopKBackward back =
        backward_arguments(buffers, shape, choice.logits, choice.ids, choice.balance);
    Ops& ops = machine.ops;
    return {[&ops, choice, back](const Launch& launch) {
                ops.router_top_k(choice, launch);
                ops.router_top_k_backward(back, launch);
            },
            Work{{.bytes = cost(choice).bytes + cost(back).bytes,
                  .flops = cost(choice).flops + cost(back).flops,
                  .written = cost(choice).written + cost(back).written}}};
}

op::ExpertBiasUpdate bias_update(Buffers& buffers, const Shape& shape) {
    const int64_t experts = shape.positive("E");
    return {.counts = buffers.integers(DType::i64, {experts}, 1000),
            .bias = buffers.normal(DType::f32, {experts}, 0.01)};
}

}  // namespace

std::vector<Case> router_cases() {
    return {{"router_logits", "scores of all experts for each token", kTokens + kProduct,
             local<&Ops::router_logits, logits>},
            {"router_logits_backward", "gradients of x and of the router's weight",
             kTokens + kProduct +
                 Keys{{"add", "yes", "yes", "add another gradient of x: yes | no"},
                      {"mode", "overwrite", "overwrite", "dweight: overwrite | accumulate"}},
             logits_backward},
            {"router_top_k", "choice of experts, probabilities, counts",
             kTokens + kOptions + Keys{kBias, kBalance}, top_k},
            {"router_top_k_backward", "gradient of the logits from probabilities and losses",
             kTokens + kOptions + Keys{kBalance}, top_k_backward},
            {"route", "choice, counts, balancing and z-loss, and all gradients, as a layer calls them",
             kTokens + kOptions + Keys{{"bias", "no", "no", kBias.meaning}}, route},
            {"expert_bias_update",
             "aux-loss-free balancing: the bias after a step",
             {{"E", "256", "16", "experts"}},
             local<&Ops::expert_bias_update, bias_update>}};
}

}  // namespace fp8flow::bench
