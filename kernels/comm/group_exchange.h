// SPDX-License-Identifier: MIT
// GroupExchange: the reference exchange, in host memory, over a ProcessGroup (MPI processes or threads of one
// process). The reference permute_pad copies received rows to their experts, and plain FP32 loops add them.
// It defines the order of sums that the GPU exchanges are compared with.
#pragma once

#include "kernels/comm/exchange_groups.h"

#include <vector>

namespace fp8flow {

class GroupExchange final : public Exchange {
public:
    // `ops` must work on host memory.
    GroupExchange(const ExchangeGroups& groups, Ops& ops, CombineOrder order)
        : Exchange(ops, order, groups.group_ranks()), groups_(groups) {}

protected:
    void do_gather_routing(const Routing& routing, const Launch& launch) override;
    void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received, const Call& call) override;
    void do_combine(const Combine& args, const Call& call) override;
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) override;
    void do_reduce_scatter(const Sharded& sharded, const Launch& launch) override;
    void do_all_gather(const Sharded& sharded, const Launch& launch) override;

private:
    using Parts = std::vector<ProcessGroup::Part>;  // by rank

    void count_sent(double& counter, const Parts& parts);
    // Sends rows, or one value per row, and counts the bytes.
    void exchange_rows(double& counter, const TensorView& outbox, const Parts& send_parts,
                       const TensorView& inbox, const Parts& recv_parts);
    void combine_rank_sums(const Combine& args, const Call& call);
    void combine_choices(const Combine& args, const Call& call);
    TensorView choice_rows(const TensorView& src, const Call& call);
    void add_returned_rows(const Combine& args, const Call& call, const TensorView& returned,
                           const Parts& parts);
    void return_dprobs(const Combine& args, const Call& call);

    ExchangeGroups groups_;
};

}  // namespace fp8flow
