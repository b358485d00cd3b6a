// SPDX-License-Identifier: MIT
// HierarchicalExchange: an exchange between hosts plus an exchange inside each host, each with its own plan.
// An expert-parallel group has the same number of ranks on each of its hosts. Ranks with the same local rank
// form a rail. Dispatch sends a row at most once to each other host, over the rail; there the row goes to
// every rank with one of the token's experts. Combine and the gradients of probabilities go back the same
// way: sums inside the host first, then one row per (token, host) over the rail. The order of sums is in
// kernels/exchange.h.
//
// `flat`, the exchange of the whole group, gathers the routing and does the reductions. With combine order
// `invariant` it also combines: every (token, k) row crosses hosts once in any case, and the rail would add a
// second message inside the host.
//
// Without a rail each group is on one host: `inside` moves all rows, and only reductions cross hosts.
#pragma once

#include "kernels/comm/exchange_groups.h"
#include "kernels/comm/levels/level_plans.h"

#include <memory>
#include <optional>

namespace fp8flow {

// The groups of a rank: its rail, in the order of hosts, and its host.
struct LevelGroups {
    std::unique_ptr<ProcessGroup> rail, inside;
};
// Collective over `group`. Throws Error(usage) if its hosts have different numbers of ranks.
LevelGroups make_level_groups(ProcessGroup& group, const HostLayout& hosts);

class HierarchicalExchange final : public Exchange {
public:
    // rail, inside: exchanges of these groups in combine order `rank`, for N * S tokens per rank inside.
    // flat: of the whole group, in the order of this exchange. Their tensors are in the memory of `ops`.
    // Without a rail: inside is the exchange of the whole group, and flat only reduces.
    struct Parts {
        LevelGroups groups;
        std::unique_ptr<Exchange> flat, rail, inside;
    };
    HierarchicalExchange(Ops& ops, CombineOrder order, const HostLayout& hosts, Parts parts,
                         DeriveLevelPlans& derive);
    void check_peers() override;
    void require_capturable() const override;
    WireBytes wire_bytes() const override;
    void copy_wire_counters(uint64_t* host, const Launch& launch) override;
    void reset_counts() override;

protected:
    void do_gather_routing(const Routing& routing, const Launch& launch) override;
    void do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) override;
    void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received, const Call& call) override;
    void do_combine(const Combine& args, const Call& call) override;
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) override;
    void do_reduce_scatter(const Sharded& sharded, const Launch& launch) override;
    void do_all_gather(const Sharded& sharded, const Launch& launch) override;

private:
    // Distinguishes plans between two calls of gather_routing.
    struct PlanKey {
        const void *ids, *rows, *source;
        const int64_t *base, *offsets;
        int64_t slots, tokens, capacity;
        bool operator==(const PlanKey&) const = default;
    };
    static PlanKey key_of(const DispatchPlan& plan);
    // The exchange of the expert-parallel group.
    Exchange& of_group() const { return parts_.rail ? *parts_.flat : *parts_.inside; }
    template <class Visit> void for_each_part(Visit visit) const {
        for (const auto* part : {&parts_.flat, &parts_.rail, &parts_.inside})
            if (*part) visit(**part);
    }
    // Derives the plans once for each DispatchPlan and keeps them until the next one, or until routing is
    // gathered. So dispatch and combine of a layer use the same plans, and so do their backwards. Only one is
    // kept: plans of every layer until its backward would double the memory of plans. All calls are in one
    // order of streams, so nothing reads the old plans when they are replaced.
    const LevelPlans& plans_of(const Call& call);
    // Sends rows over the rail; returns those that arrive here.
    ScaledTensor cross_hosts(const ScaledTensor& rows, const LevelPlans& levels, const Call& call);

    Parts parts_;
    Arena tables_;  // of the map
    LevelMap map_;
    DeriveLevelPlans& derive_;
    Arena kept_;
    std::optional<PlanKey> key_;
    LevelPlans levels_;  // of key_
};

// In host memory, which `ops` work on. Collective over the expert-parallel group.
std::unique_ptr<Exchange> make_host_levels(const ExchangeGroups& groups, Ops& ops, CombineOrder order);

}  // namespace fp8flow
