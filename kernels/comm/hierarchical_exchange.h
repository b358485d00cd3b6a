// SPDX-License-Identifier: MIT
// HierarchicalExchange: the reference of two levels of exchange, for expert-parallel groups on several hosts
// with as many ranks each. A rank's row crosses to another host once, to the rank with its own place there
// (its rail), which sends it on to every rank of its host that has one of the token's experts. Sums go the
// same way back: inside the host first, then one row per (token, host) over the rail. Orders of sums:
// kernels/exchange.h. With combine order `invariant` each (token, k) row goes directly to the owner, and so
// does each probability's gradient: one row each crosses hosts by any way, and by the rail it would take a
// second message inside the host.
#pragma once

#include "kernels/comm/group_exchange.h"

#include <memory>
#include <vector>

namespace fp8flow {

class HierarchicalExchange final : public GroupExchange {
public:
    // Collective over `group`. Throws Error(usage) where its hosts have different numbers of its ranks.
    HierarchicalExchange(ProcessGroup& group, Ops& ops, CombineOrder order, HostLayout hosts);

protected:
    void do_gather_routing(const TensorView& ids, const TensorView& probs, const TensorView& all_ids,
                           const TensorView& all_probs, const Launch& launch) override;
    void do_dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& received,
                          Arena& scratch, const Launch& launch) override;
    void combine_rank_sums(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                           const Launch& launch) override;

private:
    using Parts = std::vector<ProcessGroup::Part>;
    using Tokens = std::vector<std::vector<int64_t>>;  // by rank of the rail, ascending

    // Of `source`, with an expert on the host.
    std::vector<int64_t> tokens_for_host(const DispatchPlan& plan, int source, int host) const;
    Tokens leaving(const DispatchPlan& plan) const;   // this rank's, by the host that they go to
    Tokens arriving(const DispatchPlan& plan) const;  // of the rail's ranks, for this host
    const std::vector<int>& rail() const { return rails_[static_cast<std::size_t>(place_)]; }
    void gather_blocks(const TensorView& all);
    TensorView cross_hosts(const ScaledTensor& rows, const DispatchPlan& plan, Arena& scratch);
    TensorView host_sums(const Combine& args, const DispatchPlan& plan, const TensorView& own, Arena& scratch,
                         const Launch& launch);
    void count_rail(double& leg, const Parts& parts);
    void count_inside(double& leg, const Parts& parts);

    int host_, place_;
    std::vector<std::vector<int>> rails_;  // by place: its ranks, ascending
    std::vector<int> on_rail_;             // by host: the number of its rank on this rank's rail
    std::unique_ptr<ProcessGroup> rail_group_, inside_group_;
};

}  // namespace fp8flow
