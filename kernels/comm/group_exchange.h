// SPDX-License-Identifier: MIT
// GroupExchange: the reference exchange over a ProcessGroup (MPI processes or threads of one process) in host
// memory. Received rows are copied to their experts by the reference permute_pad; sums are plain fp32 loops.
// It defines the order that the GPU exchanges are compared with.
#pragma once

#include "kernels/comm/host_layout.h"
#include "kernels/comm/process_group.h"
#include "kernels/exchange.h"

#include <utility>
#include <vector>

namespace fp8flow {

class GroupExchange final : public Exchange {
public:
    // `ops` must work on host memory; both outlive the exchange.
    GroupExchange(ProcessGroup& group, Ops& ops, CombineOrder order);
    // Groups of all_reduce; default: the expert-parallel group is the world, and experts have no replicas.
    void set_groups(ProcessGroup& world, ProcessGroup& expert_replicas) {
        world_ = &world;
        expert_replicas_ = &expert_replicas;
    }
    // Of the expert-parallel group, to count what crosses hosts; default: one host.
    void set_hosts(HostLayout hosts) { hosts_ = std::move(hosts); }
    int num_ranks(Ranks ranks) const override;
    int rank_among(Ranks ranks) const override;
    int rank() const override { return group_.rank(); }
    int size() const override { return group_.size(); }

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
    ProcessGroup& group_of(Ranks ranks) const;  // of several ranks
    // Into this rank's part of all_ids and all_probs.
    void place_own_routing(const TensorView& ids, const TensorView& probs, const TensorView& all_ids,
                           const TensorView& all_probs) const;
    void count_sent(double& leg, const std::vector<ProcessGroup::Part>& parts);  // by rank
    // Sends rows or values of them and counts their bytes. Parts by rank.
    void exchange_rows(double& leg, const TensorView& outbox,
                       const std::vector<ProcessGroup::Part>& send_parts, const TensorView& inbox,
                       const std::vector<ProcessGroup::Part>& recv_parts);
    void combine_rank_sums(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                           const Launch& launch);
    TensorView rank_sums(const Combine& args, const DispatchPlan& plan, Arena& scratch, const Launch& launch);
    void combine_choices(const Combine& args, const DispatchPlan& plan, Arena& scratch, const Launch& launch);
    TensorView choice_rows(const TensorView& src, const DispatchPlan& plan, Arena& scratch);
    void add_returned_rows(const Combine& args, const DispatchPlan& plan, const TensorView& returned,
                           const std::vector<ProcessGroup::Part>& parts, const Launch& launch);
    void return_dprobs(const Combine& args, const DispatchPlan& plan, Arena& scratch);

    ProcessGroup& group_;
    Ops& ops_;
    HostLayout hosts_;
    ProcessGroup* world_ = nullptr;
    ProcessGroup* expert_replicas_ = nullptr;
    CombineOrder order_;
};

}  // namespace fp8flow
