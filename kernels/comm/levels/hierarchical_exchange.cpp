// SPDX-License-Identifier: MIT
// Each call becomes one call over the rail and one inside the host, with plans derived from that of the whole
// group. The order of received rows is that of a one-level exchange, so the operations after it give the same
// bits.
#include "kernels/comm/levels/hierarchical_exchange.h"

#include "kernels/comm/group_exchange.h"
#include "kernels/core/error.h"

#include <utility>

namespace fp8flow {

LevelGroups make_level_groups(ProcessGroup& group, const HostLayout& hosts) {
    FP8FLOW_CHECK(hosts.num_ranks() == group.size(), "hosts of {} ranks for {}", hosts.num_ranks(),
                  group.size());
    require(
        hosts.hosts_have_equal_sizes(), ExitCode::usage,
        "parallel.moe_token_dispatcher_type: hierarchical needs the same number of ranks of an "
        "expert-parallel group on each host, but of {} ranks {} are on the host of rank 0, {} hosts in all; "
        "change parallel.expert_model_parallel_size, or choose flex or alltoall",
        group.size(), hosts.ranks(0).size(), hosts.num_hosts());
    const int host = hosts.host(group.rank());
    return {.rail = group.split(hosts.local_rank(group.rank()), host), .inside = group.split(host)};
}

namespace {

Exchange::GroupRanks group_ranks_of(const HierarchicalExchange::Parts& parts) {
    Exchange::GroupRanks ranks = parts.flat->group_ranks();
    if (!parts.rail) ranks.experts = parts.inside->group_ranks().experts;
    return ranks;
}

}  // namespace

HierarchicalExchange::HierarchicalExchange(Ops& ops, CombineOrder order, const HostLayout& hosts, Parts parts,
                                           DeriveLevelPlans& derive)
    : Exchange(ops, order, group_ranks_of(parts)),
      parts_(std::move(parts)),
      tables_(ops.device(), "hierarchical exchange"),
      map_(make_level_map(hosts, rank(), ops.device(), tables_)),
      derive_(derive),
      kept_(ops.device(), "plans of the hierarchical exchange") {
    const int hosts_on_rail = parts_.rail ? parts_.rail->size() : 1,
              host = parts_.rail ? parts_.rail->rank() : 0;
    FP8FLOW_CHECK(
        hosts_on_rail == map_.hosts && host == map_.host && parts_.inside->size() == map_.ranks_per_host &&
            parts_.inside->rank() == map_.local_rank,
        "rank {} of {} on the rail, {} of {} inside the host, for {} hosts of {} ranks", host, hosts_on_rail,
        parts_.inside->rank(), parts_.inside->size(), map_.hosts, map_.ranks_per_host);
}

void HierarchicalExchange::check_peers() {
    for_each_part([](Exchange& part) { part.check_peers(); });
}

void HierarchicalExchange::require_capturable() const {
    for_each_part([](const Exchange& part) { part.require_capturable(); });
}

WireBytes HierarchicalExchange::wire_bytes() const {
    WireBytes sum;
    for_each_part([&](const Exchange& part) {
        const WireBytes sent = part.wire_bytes();
        sum.routing += sent.routing;
        sum.dispatch += sent.dispatch;
        sum.combine += sent.combine;
        sum.between_hosts += sent.between_hosts;
    });
    return sum;
}

void HierarchicalExchange::copy_wire_counters(uint64_t* host, const Launch& launch) {
    for_each_part([&](Exchange& part) {
        part.copy_wire_counters(host, launch);
        host += kWireWords;
    });
}

void HierarchicalExchange::reset_counts() {
    Exchange::reset_counts();
    for_each_part([](Exchange& part) { part.reset_counts(); });
}

void HierarchicalExchange::do_gather_routing(const Routing& routing, const Launch& launch) {
    key_.reset();
    of_group().gather_routing(routing.ids, routing.probs, routing.all_ids, routing.all_probs, launch);
}

HierarchicalExchange::PlanKey HierarchicalExchange::key_of(const DispatchPlan& plan) {
    return {.ids = plan.all_ids.data,
            .rows = plan.recv_rows.data,
            .source = plan.row_source.data,
            .base = plan.row_source.row_base,
            .offsets = plan.groups.offsets.as<int64_t>(),
            .slots = plan.all_ids.dim(1),
            .tokens = plan.num_tokens,
            .capacity = plan.groups.row_capacity};
}

const LevelPlans& HierarchicalExchange::plans_of(const Call& call) {
    const auto& [plan, scratch, launch] = call;
    if (key_ == key_of(plan)) return levels_;
    key_.reset();  // in case the allocation throws
    kept_.rewind({});
    levels_ = allocate_level_plans(plan, map_, kept_);
    ArenaScope scope(scratch);
    derive_(plan, map_, levels_, scratch, launch);
    key_ = key_of(plan);
    return levels_;
}

ScaledTensor HierarchicalExchange::cross_hosts(const ScaledTensor& rows, const LevelPlans& levels,
                                               const Call& call) {
    const ScaledTensor from_rail = rows_like(rows, levels.inside.num_tokens, call.scratch);
    parts_.rail->dispatch_rows(rows, levels.rail, from_rail, call.scratch, call.launch);
    return from_rail;
}

void HierarchicalExchange::do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) {
    const auto& [plan, scratch, launch] = call;
    if (!parts_.rail) return of_group().dispatch(rows, plan, dst, scratch, launch);
    ArenaScope scope(scratch);
    const LevelPlans& levels = plans_of(call);
    parts_.inside->dispatch(cross_hosts(rows, levels, call), levels.inside, dst, scratch, launch);
}

// Inside the host rows arrive in order (local rank, host, token). Values and scales are then permuted to
// order (rank, token).
void HierarchicalExchange::do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received,
                                            const Call& call) {
    const auto& [plan, scratch, launch] = call;
    if (!parts_.rail) return of_group().dispatch_rows(rows, plan, received, scratch, launch);
    ArenaScope scope(scratch);
    const LevelPlans& levels = plans_of(call);
    const ScaledTensor from_rail = cross_hosts(rows, levels, call),
                       arrived = rows_like(rows, received.data.dim(0), scratch);
    parts_.inside->dispatch_rows(from_rail, levels.inside, arrived, scratch, launch);
    for (const auto& [from, to] : {std::pair(arrived.data, received.data), {arrived.scales, received.scales}})
        if (from)
            ops_.permute_pad({.src = {.data = from},
                              .row_source = levels.inside_row_of,
                              .groups = levels.received,
                              .dst = {.data = to}},
                             launch);
}

void HierarchicalExchange::do_combine(const Combine& args, const Call& call) {
    const auto& [plan, scratch, launch] = call;
    if (!parts_.rail || order_ == CombineOrder::invariant)
        return of_group().combine(args, plan, scratch, launch);
    ArenaScope scope(scratch);
    const LevelPlans& levels = plans_of(call);
    const int64_t most = levels.inside.num_tokens;
    const TensorView sums = scratch.tensor(args.src.data.dtype, {most, args.src.data.dim(1)}, "combine");
    TensorView probs;
    if (args.dprob) probs = scratch.tensor(DType::f32, {most, plan.topk}, "combine");
    parts_.inside->combine({.src = args.src,
                            .row_prob = args.row_prob,
                            .drow_prob = args.drow_prob,
                            .y = {sums},
                            .dprob = probs},
                           levels.inside, scratch, launch);
    parts_.rail->combine({.src = {sums},
                          .residual = args.residual,
                          .addend = args.addend,
                          .drow_prob = probs ? probs.reshape({most * plan.topk}) : probs,
                          .y = args.y,
                          .dprob = args.dprob},
                         levels.rail, scratch, launch);
}

void HierarchicalExchange::do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values,
                                         const Launch& launch) {
    parts_.flat->all_reduce(reduce, ranks, values, launch);
}

void HierarchicalExchange::do_reduce_scatter(const Sharded& sharded, const Launch& launch) {
    parts_.flat->reduce_scatter(sharded.ranks, sharded.values, sharded.shards, launch);
}

void HierarchicalExchange::do_all_gather(const Sharded& sharded, const Launch& launch) {
    parts_.flat->all_gather(sharded.ranks, sharded.values, sharded.shards, launch);
}

std::unique_ptr<Exchange> make_host_levels(const ExchangeGroups& groups, Ops& ops, CombineOrder order) {
    const HostLayout& hosts = groups.hosts;
    HierarchicalExchange::Parts parts{make_level_groups(groups.expert_parallel, hosts), {}, {}, {}};
    const ExchangeGroups rail(*parts.groups.rail, -1, HostLayout::consecutive(0, hosts.num_hosts(), 1));
    parts.flat = std::make_unique<GroupExchange>(groups, ops, order);
    parts.rail = std::make_unique<GroupExchange>(rail, ops, CombineOrder::rank);
    parts.inside = std::make_unique<GroupExchange>(*parts.groups.inside, ops, CombineOrder::rank);
    return std::make_unique<HierarchicalExchange>(ops, order, hosts, std::move(parts), derive_level_plans);
}

}  // namespace fp8flow
