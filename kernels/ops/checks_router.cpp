// SPDX-License-Identifier: MIT
// Argument checks and costs of the router's ops.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

void check_projection(const TensorView& x, const TensorView& weight, const TensorView& logits) {
    check_plain(x, "x", {kAny, kAny});
    check_plain(weight, "weight", {kAny, x.dim(1)});
    FP8FLOW_CHECK(weight.dim(0) >= 1, "weight is {}", describe(weight));
    check_tensor(logits, "logits", DType::f32, {x.dim(0), weight.dim(0)});
}

// FLOPs of a GEMM of x and the weight.
double gemm_flops(const TensorView& x, const TensorView& weight) {
    return 2 * count_of(x) * static_cast<double>(weight.dim(0));
}

void check_logits(const TensorView& logits) {
    check_tensor(logits, "logits", DType::f32, {kAny, kAny});
    FP8FLOW_CHECK(logits.dim(1) >= 1, "logits is {}", describe(logits));
}

void check_options(const op::RouterOptions& options, int64_t topk, int64_t experts) {
    FP8FLOW_CHECK(topk >= 1 && topk <= experts, "moe_router_topk is {}, must be 1 to num_experts = {}", topk,
                  experts);
    if (options.num_groups == 0) return;
    FP8FLOW_CHECK(options.num_groups > 0 && experts % options.num_groups == 0,
                  "moe_router_num_groups is {}, must divide num_experts = {}", options.num_groups, experts);
    FP8FLOW_CHECK(
        options.group_topk >= 1 && options.group_topk <= options.num_groups && options.group_topk <= topk,
        "moe_router_group_topk is {}, must be 1 to the smaller of moe_router_num_groups = {} and "
        "moe_router_topk = {}",
        options.group_topk, options.num_groups, topk);
    const int64_t eligible = options.group_topk * (experts / options.num_groups);
    FP8FLOW_CHECK(eligible >= topk,
                  "moe_router_topk is {}, but {} groups of {} leave {} experts to choose from", topk,
                  options.group_topk, experts / options.num_groups, eligible);
}

// What router_top_k writes for balancing, or its backward reads.
void check_balance(const op::RouterBalance& balance, int64_t tokens, int64_t experts) {
    const int64_t sets = op::balance_sets(tokens, balance.set_tokens),
                  blocks = op::balance_blocks(tokens, balance.set_tokens);
    check_optional(balance.counts, "balance.counts", DType::f32, {sets, experts});
    check_optional(balance.score_sums, "balance.score_sums", DType::f32, {blocks, experts});
    check_optional(balance.log_squares, "balance.log_squares", DType::f32, {blocks});
}

}  // namespace

void check(const op::RouterLogits& args) { check_projection(args.x, args.weight, args.logits); }
OpCost cost(const op::RouterLogits& args) {
    return moves({args.x, args.weight}, {args.logits}, gemm_flops(args.x, args.weight), Unit::bf16_mma);
}

void check(const op::RouterLogitsBackward& args) {
    check_projection(args.x, args.weight, args.dlogits);
    check_plain(args.dx, "dx", {args.x.dim(0), args.x.dim(1)});
    if (args.dx_in) check_plain(args.dx_in, "dx_in", {args.x.dim(0), args.x.dim(1)});
    check_tensor(args.dweight, "dweight", DType::f32, {args.weight.dim(0), args.weight.dim(1)});
}
OpCost cost(const op::RouterLogitsBackward& args) {
    return moves({args.dlogits, args.x, args.weight, args.dx_in}, {args.dx, args.dweight},
                 2 * gemm_flops(args.x, args.weight), Unit::bf16_mma);
}

void check(const op::RouterTopK& args) {
    check_logits(args.logits);
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    check_tensor(args.ids, "ids", DType::i32, {tokens, kAny});
    const int64_t topk = args.ids.dim(1);
    check_options(args.options, topk, experts);
    check_tensor(args.probs, "probs", DType::f32, {tokens, topk});
    check_tensor(args.counts, "counts", DType::i64, {experts});
    check_optional(args.forced_ids, "forced_ids", DType::i32, {tokens, topk});
    if (args.expert_bias) {
        check_tensor(args.expert_bias, "expert_bias", DType::f32, {experts});
        FP8FLOW_CHECK(args.options.score == op::Score::sigmoid,
                      "moe_router_enable_expert_bias needs moe_router_score_function = sigmoid");
    }
    FP8FLOW_CHECK(!args.balance.counts == !args.balance.score_sums, "balance.counts without score_sums");
    check_balance(args.balance, tokens, experts);
}
OpCost cost(const op::RouterTopK& args) {
    const op::RouterBalance& balance = args.balance;
    return moves({args.logits, args.counts},
                 {args.ids, args.probs, balance.counts, balance.score_sums, balance.log_squares},
                 9 * count_of(args.logits));
}

void check(const op::RouterTopKBackward& args) {
    check_logits(args.logits);
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    check_tensor(args.ids, "ids", DType::i32, {tokens, kAny});
    check_options(args.options, args.ids.dim(1), experts);
    check_tensor(args.dprobs, "dprobs", DType::f32, {tokens, args.ids.dim(1)});
    check_tensor(args.dlogits, "dlogits", DType::f32, {tokens, experts});
    check_balance(args.balance, tokens, experts);
    const int64_t sets = op::balance_sets(tokens, args.balance.set_tokens);
    for (const op::BalanceTerm& term : args.terms) {
        if (!term.counts) continue;
        check_tensor(term.counts, "counts", DType::f32, {term.counts.dim(0) == 1 ? 1 : sets, experts});
        FP8FLOW_CHECK(!args.losses || args.balance.score_sums, "losses without score_sums");
    }
    if (!args.losses) return;
    check_tensor(args.losses, "losses", DType::f32, {op::kRouterLosses});
    FP8FLOW_CHECK(args.z_weight == 0.0f || args.balance.log_squares, "losses without log_squares");
}
OpCost cost(const op::RouterTopKBackward& args) {
    const auto& terms = args.terms;
    return moves({args.logits, args.ids, args.dprobs, terms[0].counts, terms[1].counts, terms[2].counts,
                  args.balance.score_sums, args.balance.log_squares, args.losses},
                 {args.dlogits}, 16 * count_of(args.logits));
}

void check(const op::ExpertBiasUpdate& args) {
    check_tensor(args.counts, "counts", DType::i64, {kAny});
    check_tensor(args.bias, "bias", DType::f32, {args.counts.dim(0)});
    check_optional(args.status, "status", DType::i32, {1});
}
OpCost cost(const op::ExpertBiasUpdate& args) { return moves({args.counts, args.bias}, {args.bias}); }

}  // namespace fp8flow
