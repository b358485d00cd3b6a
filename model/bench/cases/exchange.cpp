// SPDX-License-Identifier: MIT
// Bench cases of what crosses ranks: routing, dispatch with three kinds of wire, combine, reductions. Ranks
// start each call together and the slowest counts.
#include "kernels/core/error.h"
#include "model/bench/cases/routing.h"

namespace fp8flow::bench {

namespace {

Work moved(double read, double written, double sent) {
    return {{.bytes = read + written, .written = written}, sent};
}
template <class... Views> double bytes_of(const Views&... views) { return (0.0 + ... + f64(views.bytes())); }
// Of `rows` rows [rows, C], with their scales for each 128 columns.
double row_bytes(const ScaledTensor& tensor, int64_t rows) {
    const int64_t columns = tensor.data.cols(),
                  scales = tensor.scales ? ceil_div(columns, kBlock) * size_of(tensor.scales.dtype) : 0;
    return f64(rows * (columns * size_of(tensor.data.dtype) + scales));
}

const Keys kTokens = {
    {"T", "4096", "24", "tokens on each rank"},
    {"E", "256", "8", "experts on all ranks together"},
    {"K", "8", "2", "experts of a token (top-k)"},
    {"rows", "balanced", "ragged", "rows of the experts: balanced | ragged | skewed | empty"},
    {"align", "128", "128", "multiple of rows that an expert's group is padded to"}};
const Keys kWidth = {{"H", "7168", "256", "columns of a row"}};
const Key kDispatcher = {"dispatcher", "flex", "flex", "flex (peer memory) | alltoall (NCCL)"};
const Key kSms = {"sms", "0", "0", "SMs that the exchange may use; 0: all"};
const Key kOrder = {"order", "rank", "rank", "order of combine: rank | invariant"};

// An exchange for the limits of one shape, shared by all sets.
struct Wire {
    RankGroups groups;
    std::unique_ptr<Exchange> exchange;
    std::unique_ptr<Arena> scratch;
};
struct Limits {
    int64_t tokens = 1, experts = 1, topk = 1, columns = kBlock;
    CombineOrder order = CombineOrder::rank;
};
std::shared_ptr<Wire> make_wire(Machine& machine, const Shape& shape, const Limits& limits) {
    Config config;
    config.parallel.expert_model_parallel_size = machine.world.size();
    config.parallel.moe_token_dispatcher_type = shape.choice("dispatcher", {"flex", "alltoall"}) == 0
                                                    ? TokenDispatcher::flex
                                                    : TokenDispatcher::alltoall;
    config.training.micro_batch_size = 1;
    config.training.global_batch_size = machine.world.size();
    config.model.seq_length = limits.tokens;
    config.model.hidden_size = limits.columns;
    config.moe.num_experts = limits.experts;
    config.moe.moe_router_topk = limits.topk;
    config.moe.moe_combine_order = limits.order;
    auto wire = std::make_shared<Wire>();
    wire->groups = make_rank_groups(machine.world, machine.world.size());
    wire->exchange = make_exchange(machine.backend, wire->groups, machine.ops, config).exchange;
    wire->scratch = std::make_unique<Arena>(machine.ops.device(), "exchange");
    return wire;
}

// The routing of all ranks on this rank, and its plan.
struct Exchanged {
    std::shared_ptr<Wire> wire;
    int64_t tokens = 0, topk = 0;
    PlanCounts counts;
    DispatchPlan plan;
};
Exchanged exchanged(Machine& machine, Buffers& buffers, const Shape& shape, CombineOrder order) {
    const int64_t ranks = machine.world.size(), rank = machine.world.rank(),
                  alignment = shape.positive("align");
    const int64_t columns = shape.positive("H"), tokens = shape.number("T"), topk = shape.positive("K");
    require(shape.positive("E") % ranks == 0, ExitCode::usage,
            "bench {}: E: got {}, want a multiple of the {} ranks", shape.operation(), shape.number("E"),
            ranks);
    const auto& wire = buffers.once<std::shared_ptr<Wire>>([&] {
        return make_wire(machine, shape,
                         {.tokens = tokens,
                          .experts = shape.positive("E"),
                          .topk = topk,
                          .columns = columns,
                          .order = order});
    });
    const auto& all = buffers.once<std::vector<Routing>>([&] { return routings_of(shape, ranks); });
    const auto& counts = buffers.once<PlanCounts>([&] { return plan_counts(all, rank, alignment); });
    const TensorView all_ids = buffers.output(DType::i32, {ranks, tokens, topk});
    const TensorView all_probs = buffers.output(DType::f32, {ranks, tokens, topk});
    wire->exchange->gather_routing(buffers.values(all[to_size(rank)].ids).reshape({tokens, topk}),
                                   buffers.values(all[to_size(rank)].probs).reshape({tokens, topk}), all_ids,
                                   all_probs);
    const op::PlanDispatch plan = plan_arguments(buffers, all_ids, all_probs, rank, counts, alignment);
    machine.ops.plan_dispatch(plan);
    return {wire, tokens, topk, counts, plan_of(plan, tokens)};
}

Call gather(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t ranks = machine.world.size(), tokens = shape.number("T"), topk = shape.positive("K");
    const auto& wire = buffers.once<std::shared_ptr<Wire>>([&] {
        return make_wire(machine, shape, {.tokens = tokens, .experts = shape.positive("E"), .topk = topk});
    });
    const TensorView ids = buffers.integers(DType::i32, {tokens, topk}, shape.positive("E"));
    const TensorView probs = buffers.normal(DType::f32, {tokens, topk});
    const TensorView all_ids = buffers.output(DType::i32, {ranks, tokens, topk});
    const TensorView all_probs = buffers.output(DType::f32, {ranks, tokens, topk});
    return {
        [=](const Launch& launch) { wire->exchange->gather_routing(ids, probs, all_ids, all_probs, launch); },
        moved(bytes_of(ids, probs), bytes_of(all_ids, all_probs), f64(ranks - 1) * bytes_of(ids, probs))};
}

// Rows that are sent: bf16; fp8: FP8 values and scales; fp8_casts: BF16 rows, quantised before the wire and
// dequantised after it.
Call dispatch(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Exchanged in = exchanged(machine, buffers, shape, CombineOrder::rank);
    const int64_t columns = shape.positive("H"), kind = shape.choice("wire", {"bf16", "fp8", "fp8_casts"});
    Ops* ops = &machine.ops;
    const TensorView plain = kind == 1 ? TensorView{} : buffers.normal(DType::bf16, {in.tokens, columns});
    ScaledTensor rows{plain, {}, ScaleLayout::none}, dst;
    if (kind == 1) rows = buffers.fp8_input(DType::e4m3, {in.tokens, columns}, ScaleLayout::vec128_wire);
    if (kind == 2) rows = buffers.fp8_output(DType::e4m3, {in.tokens, columns}, ScaleLayout::vec128_wire);
    dst = buffers.fp8_output(rows.data.dtype, {in.counts.padded, columns},
                             kind == 0 ? ScaleLayout::none : ScaleLayout::vec128);
    const double sent = row_bytes(rows, in.counts.sent_away);
    const auto send = [wire = in.wire, plan = in.plan, rows, dst](const Launch& launch) {
        const ArenaScope scope(*wire->scratch);
        wire->exchange->dispatch(rows, plan, dst, *wire->scratch, launch);
    };
    if (kind < 2) return {send, moved(row_bytes(rows, in.tokens), row_bytes(dst, in.counts.padded), sent)};
    const TensorView back = buffers.output(DType::bf16, {in.counts.padded, columns});
    return {[=](const Launch& launch) {
                ops->quantize_rows({.src = plain, .dst = rows}, launch);
                send(launch);
                ops->dequantize({.src = dst, .groups = in.plan.groups, .dst = back}, launch);
            },
            moved(bytes_of(plain), bytes_of(back), sent)};
}

Call dispatch_rows(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Exchanged in = exchanged(machine, buffers, shape, CombineOrder::rank);
    const int64_t columns = shape.positive("H"), slots = in.plan.all_ids.dim(0) * in.plan.all_ids.dim(1);
    const bool fp8 = shape.choice("wire", {"bf16", "fp8"}) == 1;
    const DType dtype = fp8 ? DType::e4m3 : DType::bf16;
    const ScaleLayout layout = fp8 ? ScaleLayout::vec128_wire : ScaleLayout::none;
    const ScaledTensor rows = buffers.operand(dtype, {in.tokens, columns}, layout);
    const ScaledTensor received = buffers.fp8_output(dtype, {slots, columns}, layout);
    return {[wire = in.wire, plan = in.plan, rows, received](const Launch& launch) {
                const ArenaScope scope(*wire->scratch);
                wire->exchange->dispatch_rows(rows, plan, received, *wire->scratch, launch);
            },
            moved(row_bytes(rows, in.tokens), row_bytes(received, in.counts.received),
                  row_bytes(rows, in.counts.sent_away))};
}

Call combine(Machine& machine, Buffers& buffers, const Shape& shape) {
    const bool by_rank = shape.choice("order", {"rank", "invariant"}) == 0;
    const Exchanged in =
        exchanged(machine, buffers, shape, by_rank ? CombineOrder::rank : CombineOrder::invariant);
    const int64_t columns = shape.positive("H");
    const TensorView src = buffers.normal(DType::bf16, {in.counts.padded, columns});
    TensorView y = buffers.output(DType::bf16, {in.tokens, columns});
    Exchange::Combine args{.src = {src}, .y = {y}};
    // own tokens that have an expert on this rank need no wire
    const int64_t own_copies = in.tokens * in.topk - in.counts.copies_away;
    const int64_t sent = by_rank ? in.counts.received - in.counts.kept : in.counts.valid - own_copies;
    double read = row_bytes({src}, in.counts.valid), wire_bytes = row_bytes({y}, sent);
    if (shape.yes("residual")) args.residual = buffers.normal(DType::bf16, {in.tokens, columns});
    if (shape.yes("dprob")) {
        args.drow_prob = buffers.normal(DType::f32, {in.counts.padded});
        args.dprob = buffers.output(DType::f32, {in.tokens, in.topk});
        read += f64(4 * in.counts.valid);
        wire_bytes += f64(4 * (in.counts.valid - own_copies));
    }
    Work work = moved(read + bytes_of(args.residual), bytes_of(y, args.dprob), wire_bytes);
    DispatchPlan plan = in.plan;
    if (shape.choice("part", {"whole", "sent"}) == 1 && machine.world.size() > 1) {
        // rows of this rank's own tokens are not sent
        plan.num_tokens = 0;
        y = y.slice(0, 0);
        args.y = {y};
        args.residual = args.dprob = args.drow_prob = {};
        work = moved(row_bytes({src}, in.counts.valid - (by_rank ? own_copies : 0)), 0, row_bytes({y}, sent));
    }
    return {[wire = in.wire, plan, args](const Launch& launch) {
                const ArenaScope scope(*wire->scratch);
                wire->exchange->combine(args, plan, *wire->scratch, launch);
            },
            work};
}

Call all_reduce(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t ranks = machine.world.size();
    const auto& wire = buffers.once<std::shared_ptr<Wire>>([&] { return make_wire(machine, shape, {}); });
    const Reduce reduce = shape.choice("reduce", {"sum", "max"}) == 0 ? Reduce::sum : Reduce::max;
    // repeated sums over ranks grow without bound; what they cost does not depend on the values
    const TensorView values = buffers.normal(DType::f32, {shape.number("N")}, 1e-6);
    // each rank's shard is gathered by its owner and sent back
    const double sent = 2 * bytes_of(values) * f64(ranks - 1) / f64(ranks);
    return {[=](const Launch& launch) { wire->exchange->all_reduce(reduce, Ranks::world, values, launch); },
            moved(bytes_of(values), bytes_of(values), sent)};
}

}  // namespace

std::vector<Case> exchange_cases() {
    return {
        {"gather_routing",
         "all ranks' routing to every rank",
         {kTokens[0], kTokens[1], kTokens[2], kDispatcher},
         gather,
         Runs::together},
        {"dispatch", "tokens to their experts' padded rows on all ranks",
         kTokens + kWidth +
             Keys{{"wire", "fp8", "fp8", "rows: bf16 | fp8 | fp8_casts (quantise and dequantise included)"},
                  kSms,
                  kDispatcher},
         dispatch, Runs::together},
        {"dispatch_rows", "first half of the unfused dispatch: rows as received",
         kTokens + kWidth + Keys{{"wire", "fp8", "fp8", "rows: bf16 | fp8"}, kDispatcher}, dispatch_rows,
         Runs::together},
        {"combine", "experts' rows summed at their tokens' owners",
         kTokens + kWidth +
             Keys{kOrder,
                  {"residual", "yes", "yes", "add the residual: yes | no"},
                  {"dprob", "no", "yes", "also gradients of the probabilities: yes | no"},
                  {"part", "whole", "whole", "whole | sent (owners do not add: the wire alone)"},
                  kSms,
                  kDispatcher},
         combine, Runs::together},
        {"all_reduce",
         "sum or largest of a tensor over all ranks",
         {{"N", "29360128", "1000", "values"}, {"reduce", "sum", "sum", "sum | max"}, kDispatcher},
         all_reduce,
         Runs::together}};
}

}  // namespace fp8flow::bench
