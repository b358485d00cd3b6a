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

#include "kernels/comm/levels/level_plans.h"
#include "kernels/comm/process_group.h"
#include "kernels/exchange.h"

#include <memory>
#include <optional>

namespace fp8flow {

// The groups of a rank: its rail, in the order of hosts; its host; and itself.
struct LevelGroups {
    std::unique_ptr<ProcessGroup> rail, inside, alone;
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
    int rank() const override { return of_group().rank(); }
    int size() const override { return of_group().size(); }
    int num_ranks(Ranks ranks) const override { return parts_.flat->num_ranks(ranks); }
    int rank_among(Ranks ranks) const override { return parts_.flat->rank_among(ranks); }
    void check_peers() override;
    void require_capturable() const override;
    WireBytes wire_bytes() const override;
    void copy_wire_counters(uint64_t* host, const Launch& launch) override;
    void reset_counts() override;

protected:
    void do_gather_routing(const TensorView& ids, const TensorView& probs, const TensorView& all_ids,
                           const TensorView& all_probs, const Launch& launch) override;
    void do_dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst,
                     Arena& scratch, const Launch& launch) override;
    void do_dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& received,
                          Arena& scratch, const Launch& launch) override;
    void do_combine(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                    const Launch& launch) override;
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) override;
    void do_reduce_scatter(Ranks ranks, const TensorView& values, const Shares& shares,
                           const Launch& launch) override;
    void do_all_gather(Ranks ranks, const TensorView& values, const Shares& shares,
                       const Launch& launch) override;

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
    const LevelPlans& plans_of(const DispatchPlan& plan, Arena& scratch, const Launch& launch);
    // The rows that land here over the rail.
    ScaledTensor cross_hosts(const ScaledTensor& rows, const LevelPlans& levels, Arena& scratch,
                             const Launch& launch);

    Ops& ops_;
    CombineOrder order_;
    Parts parts_;
    Arena tables_;  // of the map
    LevelMap map_;
    DeriveLevelPlans& derive_;
    Arena kept_;
    std::optional<PlanKey> key_;
    LevelPlans levels_;  // of the key
};

// In host memory: `ops` work on it, and all groups outlive the exchange. Collective over `group`.
std::unique_ptr<Exchange> make_host_levels(ProcessGroup& group, ProcessGroup& world,
                                           ProcessGroup& expert_replicas, Ops& ops, CombineOrder order,
                                           const HostLayout& hosts);

}  // namespace fp8flow
