// SPDX-License-Identifier: MIT
// HierarchicalExchange: an exchange between hosts plus an exchange inside each host, each with its own plan.
// A group that shares the experts has the same number of ranks on each of its hosts. The ranks with one place
// in their hosts form a rail. Dispatch sends a row once to each other host over the rail; there the row goes
// to every rank with one of the token's experts. Sums and gradients of probabilities return the same way:
// first inside the host, then one row per (token, host) over the rail. The order of sums is in
// kernels/exchange.h.
//
// The exchange of the whole group, `flat`, gathers the routing and reduces. With combine order `invariant` it
// also combines: every (token, k) row crosses hosts once by any way, and over the rail it would take a second
// message inside the host.
//
// Without a rail, each group is on one host and only reductions cross hosts: `inside` moves all rows.
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
// Collective over `group`. Throws Error(usage) where its hosts have different numbers of its ranks.
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
    void do_reduce_scatter(const Shared& shared, const Launch& launch) override;
    void do_all_gather(const Shared& shared, const Launch& launch) override;

private:
    // Distinguishes plans between two calls of gather_routing.
    struct PlanKey {
        const void *ids, *rows, *source;
        const int64_t *base, *offsets;
        int64_t slots, tokens, capacity;
        bool operator==(const PlanKey&) const = default;
    };
    static PlanKey key_of(const DispatchPlan& plan);
    // The exchange of all ranks that share the experts.
    Exchange& of_group() const { return parts_.rail ? *parts_.flat : *parts_.inside; }
    template <class Visit> void for_each_part(Visit visit) const {
        for (const auto* part : {&parts_.flat, &parts_.rail, &parts_.inside})
            if (*part) visit(**part);
    }
    // Derived once for each plan: kept until another one comes, or routing is gathered, which every plan
    // follows. So dispatch and combine of a layer share them, and so do their backwards. Of one plan alone:
    // kept for each layer until its backward they would double what plans take. Calls are in one order of
    // streams, so nothing reads them any more when they are replaced.
    const LevelPlans& plans_of(const Call& call);
    // The rows that land here over the rail.
    ScaledTensor cross_hosts(const ScaledTensor& rows, const LevelPlans& levels, const Call& call);

    Parts parts_;
    Arena tables_;  // of the map
    LevelMap map_;
    DeriveLevelPlans& derive_;
    Arena kept_;
    std::optional<PlanKey> key_;
    LevelPlans levels_;  // of the key
};

// In host memory: `ops` work on it. Collective over the ranks that share the experts.
std::unique_ptr<Exchange> make_host_levels(const ExchangeGroups& groups, Ops& ops, CombineOrder order);

}  // namespace fp8flow
