// Bench cases of the router: logits, top-k, balancing losses and their gradients, the bias update.
#include "model/bench/case.h"

namespace fp8flow::bench {

namespace {

const std::vector<Key> kTokens = {{"T", "4096", "24", "tokens"}, {"E", "256", "16", "experts"}};
const std::vector<Key> kProduct = {{"H", "7168", "256", "columns"},
                                   {"dtype", "bf16", "bf16", "of x: bf16 | f32"},
                                   {"weight", "bf16", "f32", "of the weight: bf16 | f32"}};
const std::vector<Key> kOptions = {
    {"K", "8", "2", "experts of a token (top-k)"},
    {"score", "sigmoid", "softmax", "softmax | sigmoid"},
    {"pre_softmax", "no", "no", "softmax over all experts before the choice: yes | no"},
    {"num_groups", "0", "0", "groups of experts for group-limited routing; 0: none"},
    {"group_topk", "0", "0", "groups that a token may use"}};
const Key kScore = {"score", "softmax", "softmax", "softmax | sigmoid"};
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
double product_flops(const Shape& shape) {
    return 2.0 * static_cast<double>(shape.number("T")) * static_cast<double>(shape.number("E")) *
           static_cast<double>(shape.number("H"));
}

Call logits(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E"), columns = shape.positive("H");
    const op::RouterLogits args{
        .x = buffers.normal(shape.dtype("dtype", kReal), {tokens, columns}),
        .weight = buffers.normal(shape.dtype("weight", kReal), {experts, columns}, 0.02),
        .logits = buffers.output(DType::f32, {tokens, experts})};
    return call_of(
        machine, &Ops::router_logits, args,
        Work{}.reads_all(args.x, args.weight).writes_all(args.logits).computes(product_flops(shape)));
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
    Work work;
    work.reads_all(args.dlogits, args.x, args.weight)
        .writes_all(args.dx, args.dweight)
        .computes(2 * product_flops(shape));
    if (shape.yes("add")) {
        args.dx_in = buffers.normal(dtype, {tokens, columns});
        work.reads_all(args.dx_in);
    }
    if (args.dweight_mode == Gradient::accumulate) work.reads_all(args.dweight);
    return call_of(machine, &Ops::router_logits_backward, args, work);
}

Call top_k(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E"), topk = shape.positive("K");
    op::RouterTopK args{.logits = logits_of(buffers, shape),
                        .options = options(shape),
                        .ids = buffers.output(DType::i32, {tokens, topk}),
                        .probs = buffers.output(DType::f32, {tokens, topk}),
                        .counts = buffers.zeros(DType::i64, {experts})};
    Work work;
    work.reads_all(args.logits, args.counts).writes_all(args.ids, args.probs, args.counts);
    if (shape.yes("bias")) {
        args.expert_bias = buffers.normal(DType::f32, {experts}, 0.01);
        work.reads_all(args.expert_bias);
    }
    return call_of(machine, &Ops::router_top_k, args, work);
}

Call top_k_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E"), topk = shape.positive("K");
    // distinct experts of each token
    const auto& ids = buffers.once<std::vector<int32_t>>([&] {
        std::vector<int32_t> chosen(static_cast<std::size_t>(tokens * topk));
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t k = 0; k < topk; ++k)
                chosen[static_cast<std::size_t>(t * topk + k)] =
                    static_cast<int32_t>((t * 7 + k * 3 + k) % experts);
        return chosen;
    });
    const op::RouterTopKBackward args{.logits = logits_of(buffers, shape),
                                      .ids = buffers.values(ids).reshape({tokens, topk}),
                                      .dprobs = buffers.normal(DType::f32, {tokens, topk}),
                                      .options = options(shape),
                                      .dlogits = buffers.output(DType::f32, {tokens, experts})};
    return call_of(machine, &Ops::router_top_k_backward, args,
                   Work{}.reads_all(args.logits, args.ids, args.dprobs).writes_all(args.dlogits));
}

Call score_sums(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t experts = shape.positive("E");
    const op::RouterScoreSums args{.logits = logits_of(buffers, shape),
                                   .score = score(shape),
                                   .topk = shape.positive("K"),
                                   .counts = buffers.output(DType::f32, {experts}),
                                   .score_sums = buffers.output(DType::f32, {experts})};
    return call_of(machine, &Ops::router_score_sums, args,
                   Work{}.reads_all(args.logits).writes_all(args.counts, args.score_sums));
}

Call aux_loss_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E");
    op::RouterAuxLossBackward args{.logits = logits_of(buffers, shape),
                                   .counts = buffers.integers(DType::f32, {experts}, tokens + 1),
                                   .score = score(shape),
                                   .weight = 1e-6f,
                                   .dlogits = buffers.zeros(DType::f32, {tokens, experts})};
    Work work;
    work.reads_all(args.logits, args.counts, args.dlogits).writes_all(args.dlogits);
    if (shape.yes("loss")) {
        args.score_sums = buffers.normal(DType::f32, {experts});
        args.loss = buffers.zeros(DType::f32, {1});
        work.reads_all(args.score_sums, args.loss).writes_all(args.loss);
    }
    return call_of(machine, &Ops::router_aux_loss_backward, args, work);
}

Call z_loss(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E");
    op::RouterZLoss args{.logits = logits_of(buffers, shape),
                         .weight = 1e-6f,
                         .grad_weight = 1e-6f,
                         .loss = buffers.zeros(DType::f32, {1})};
    Work work;
    work.reads_all(args.logits, args.loss).writes_all(args.loss);
    if (shape.yes("gradient")) {
        args.dlogits = buffers.zeros(DType::f32, {tokens, experts});
        work.reads_all(args.dlogits).writes_all(args.dlogits);
    }
    return call_of(machine, &Ops::router_z_loss, args, work);
}

// What a layer does with its logits, forward and backward, save the gradient of the choice: choose, count, sum scores, both losses with
// their gradients.
Call route(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), experts = shape.positive("E"), topk = shape.positive("K");
    const TensorView logits = logits_of(buffers, shape),
                     dlogits = buffers.zeros(DType::f32, {tokens, experts}),
                     losses = buffers.zeros(DType::f32, {2});
    const op::RouterTopK choice{.logits = logits,
                                .options = options(shape),
                                .ids = buffers.output(DType::i32, {tokens, topk}),
                                .probs = buffers.output(DType::f32, {tokens, topk}),
                                .counts = buffers.zeros(DType::i64, {experts})};
    const op::RouterScoreSums sums{.logits = logits,
                                   .score = score(shape),
                                   .topk = topk,
                                   .counts = buffers.output(DType::f32, {experts}),
                                   .score_sums = buffers.output(DType::f32, {experts})};
    const op::RouterAuxLossBackward balance{.logits = logits,
                                            .counts = sums.counts,
                                            .score = score(shape),
                                            .weight = 1e-6f,
                                            .score_sums = sums.score_sums,
                                            .loss = losses.slice(0, 1),
                                            .dlogits = dlogits};
    const op::RouterZLoss z{.logits = logits,
                            .weight = 1e-6f,
                            .grad_weight = 1e-6f,
                            .loss = losses.slice(1, 1),
                            .dlogits = dlogits};
    Ops& ops = machine.ops;
    return {[&ops, choice, sums, balance, z](const Launch& launch) {
                ops.router_top_k(choice, launch);
                ops.router_score_sums(sums, launch);
                ops.router_aux_loss_backward(balance, launch);
                ops.router_z_loss(z, launch);
            },
            Work{}
                .reads_all(logits, dlogits, choice.counts, losses)
                .writes_all(dlogits, choice.ids, choice.probs, choice.counts, losses)};
}

Call bias_update(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t experts = shape.positive("E");
    const op::ExpertBiasUpdate args{.counts = buffers.integers(DType::i64, {experts}, 1000),
                                    .bias = buffers.normal(DType::f32, {experts}, 0.01)};
    return call_of(machine, &Ops::expert_bias_update, args,
                   Work{}.reads_all(args.counts, args.bias).writes_all(args.bias));
}

}  // namespace

Case router_logits_case() {
    return {"router_logits", "scores of all experts for each token", kTokens + kProduct, logits};
}
Case router_logits_backward_case() {
    return {"router_logits_backward", "gradients of x and of the router's weight",
            kTokens + kProduct +
                std::vector<Key>{{"add", "yes", "yes", "add another gradient of x: yes | no"},
                                 {"mode", "overwrite", "overwrite", "dweight: overwrite | accumulate"}},
            logits_backward};
}
Case router_top_k_case() {
    return {
        "router_top_k", "choice of experts, probabilities, counts",
        kTokens + kOptions + std::vector<Key>{{"bias", "yes", "no", "expert bias (sigmoid only): yes | no"}},
        top_k};
}
Case router_top_k_backward_case() {
    return {"router_top_k_backward", "gradient of the logits from the probabilities", kTokens + kOptions,
            top_k_backward};
}
Case router_score_sums_case() {
    return {"router_score_sums", "what the balancing loss needs: counts and sums of scores",
            kTokens + std::vector<Key>{{"K", "8", "2", "experts of a token (top-k)"}, kScore}, score_sums};
}
Case router_aux_loss_backward_case() {
    return {"router_aux_loss_backward", "balancing loss and its gradient",
            kTokens + std::vector<Key>{kScore, {"loss", "yes", "yes", "also the loss: yes | no"}},
            aux_loss_backward};
}
Case router_z_loss_case() {
    return {"router_z_loss", "z-loss and its gradient",
            kTokens + std::vector<Key>{{"gradient", "yes", "yes", "also the gradient: yes | no"}}, z_loss};
}
Case route_case() {
    return {"route", "choice, counts, balancing and z-loss with their gradients, as a layer calls them",
            kTokens + kOptions, route};
}
Case expert_bias_update_case() {
    return {"expert_bias_update",
            "aux-loss-free balancing: the bias after a step",
            {{"E", "256", "16", "experts"}},
            bias_update};
}

}  // namespace fp8flow::bench
