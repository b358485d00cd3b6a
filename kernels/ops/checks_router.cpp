// SPDX-License-Identifier: MIT
// Argument checks and costs of the router's ops.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

double product(double a, double b, double c) { return a * b * c; }

void check_projection(const TensorView& x, const TensorView& weight, const TensorView& logits) {
    FP8FLOW_CHECK(x.rank == 2 && is_bf16_or_f32(x.dtype), "x is {}", describe(x));
    FP8FLOW_CHECK(
        weight.rank == 2 && is_bf16_or_f32(weight.dtype) && weight.dim(0) >= 1 && weight.dim(1) == x.dim(1),
        "weight is {} for x {}", describe(weight), describe(x));
    check_tensor(logits, "logits", DType::f32, {x.dim(0), weight.dim(0)});
}

void check_logits(const TensorView& logits) {
    FP8FLOW_CHECK(logits.rank == 2 && logits.dtype == DType::f32 && logits.dim(1) >= 1, "logits is {}",
                  describe(logits));
}

void check_topk(int64_t topk, int64_t experts) {
    FP8FLOW_CHECK(topk >= 1 && topk <= experts, "moe_router_topk is {}, must be 1 to num_experts = {}", topk,
                  experts);
}

void check_options(const op::RouterOptions& options, int64_t topk, int64_t experts) {
    check_topk(topk, experts);
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
    if (balance.counts) check_tensor(balance.counts, "balance.counts", DType::f32, {sets, experts});
    if (balance.score_sums)
        check_tensor(balance.score_sums, "balance.score_sums", DType::f32, {blocks, experts});
    if (balance.log_squares) check_tensor(balance.log_squares, "balance.log_squares", DType::f32, {blocks});
}

}  // namespace

void check(const op::RouterLogits& args) { check_projection(args.x, args.weight, args.logits); }

OpCost cost(const op::RouterLogits& args) {
    return with_writes({.bytes = bytes_of({args.x, args.weight, args.logits}),
                        .flops = 2 * product(args.x.dim(0), args.x.dim(1), args.weight.dim(0)),
                        .unit = Unit::bf16_mma},
                       bytes_of({args.logits}));
}

void check(const op::RouterLogitsBackward& args) {
    check_projection(args.x, args.weight, args.dlogits);
    FP8FLOW_CHECK(is_bf16_or_f32(args.dx.dtype), "dx is {}", describe(args.dx));
    check_tensor(args.dx, "dx", args.dx.dtype, {args.x.dim(0), args.x.dim(1)});
    if (args.dx_in) {
        FP8FLOW_CHECK(is_bf16_or_f32(args.dx_in.dtype), "dx_in is {}", describe(args.dx_in));
        check_tensor(args.dx_in, "dx_in", args.dx_in.dtype, {args.x.dim(0), args.x.dim(1)});
    }
    check_tensor(args.dweight, "dweight", DType::f32, {args.weight.dim(0), args.weight.dim(1)});
}

OpCost cost(const op::RouterLogitsBackward& args) {
    return with_writes(
        {.bytes = bytes_of({args.dlogits, args.x, args.weight, args.dx_in, args.dx, args.dweight}),
         .flops = 4 * product(args.x.dim(0), args.x.dim(1), args.weight.dim(0)),
         .unit = Unit::bf16_mma},
        bytes_of({args.dx, args.dweight}));
}

void check(const op::RouterTopK& args) {
    check_logits(args.logits);
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    FP8FLOW_CHECK(args.ids.rank == 2, "ids is {}", describe(args.ids));
    const int64_t topk = args.ids.dim(1);
    check_options(args.options, topk, experts);
    check_tensor(args.ids, "ids", DType::i32, {tokens, topk});
    check_tensor(args.probs, "probs", DType::f32, {tokens, topk});
    check_tensor(args.counts, "counts", DType::i64, {experts});
    if (args.forced_ids) check_tensor(args.forced_ids, "forced_ids", DType::i32, {tokens, topk});
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
    const double written =
        bytes_of({args.ids, args.probs, balance.counts, balance.score_sums, balance.log_squares});
    return with_writes({.bytes = bytes_of({args.logits, args.counts}) + written,
                        .flops = 9.0 * static_cast<double>(args.logits.numel())},
                       written);
}

void check(const op::RouterTopKBackward& args) {
    check_logits(args.logits);
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    FP8FLOW_CHECK(args.ids.rank == 2, "ids is {}", describe(args.ids));
    check_options(args.options, args.ids.dim(1), experts);
    check_tensor(args.ids, "ids", DType::i32, {tokens, args.ids.dim(1)});
    check_tensor(args.dprobs, "dprobs", DType::f32, {tokens, args.ids.dim(1)});
    check_tensor(args.dlogits, "dlogits", DType::f32, {tokens, experts});
    check_balance(args.balance, tokens, experts);
    const int64_t sets = op::balance_sets(tokens, args.balance.set_tokens);
    for (const op::BalanceTerm& term : args.terms) {
        if (!term.counts) continue;
        FP8FLOW_CHECK(term.counts.rank == 2, "counts is {}", describe(term.counts));
        check_tensor(term.counts, "counts", DType::f32, {term.counts.dim(0) == 1 ? 1 : sets, experts});
        FP8FLOW_CHECK(!args.losses || args.balance.score_sums, "losses without score_sums");
    }
    if (!args.losses) return;
    check_tensor(args.losses, "losses", DType::f32, {op::kRouterLosses});
    FP8FLOW_CHECK(args.z_weight == 0.0f || args.balance.log_squares, "losses without log_squares");
}

OpCost cost(const op::RouterTopKBackward& args) {
    const auto& terms = args.terms;
    return with_writes({.bytes = bytes_of({args.logits, args.ids, args.dprobs, terms[0].counts,
                                           terms[1].counts, terms[2].counts, args.balance.score_sums,
                                           args.balance.log_squares, args.losses, args.dlogits}),
                        .flops = 16.0 * static_cast<double>(args.logits.numel())},
                       bytes_of({args.dlogits}));
}

void check(const op::ExpertBiasUpdate& args) {
    FP8FLOW_CHECK(args.counts.rank == 1, "counts is {}", describe(args.counts));
    check_tensor(args.counts, "counts", DType::i64, {args.counts.dim(0)});
    check_tensor(args.bias, "bias", DType::f32, {args.counts.dim(0)});
    if (args.status) check_tensor(args.status, "status", DType::i32, {1});
}

OpCost cost(const op::ExpertBiasUpdate& args) {
    return with_writes({.bytes = bytes_of({args.counts, args.bias, args.bias}), .flops = 0},
                       bytes_of({args.bias}));
}

}  // namespace fp8flow
