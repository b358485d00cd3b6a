// SPDX-License-Identifier: MIT
// SplitExchange: rows over one exchange, reductions over another. For jobs on several hosts whose groups of
// ranks that share the experts are each on one: rows stay in the host's peer memory, sums cross the network.
#pragma once

#include "kernels/exchange.h"

#include <memory>

namespace fp8flow {

class SplitExchange final : public Exchange {
public:
    // `rows` is made for the expert-parallel group, `sums` for the world and the expert replicas.
    SplitExchange(std::unique_ptr<Exchange> rows, std::unique_ptr<Exchange> sums);
    int rank() const override { return rows_->rank(); }
    int size() const override { return rows_->size(); }
    int num_ranks(Ranks ranks) const override { return sums_->num_ranks(ranks); }
    int rank_among(Ranks ranks) const override { return sums_->rank_among(ranks); }
    void check_peers() override;
    void require_capturable() const override;
    // Of rows, as in every exchange.
    WireBytes wire_bytes() const override { return rows_->wire_bytes(); }
    void copy_wire_counters(uint64_t* host, const Launch& launch) override {
        rows_->copy_wire_counters(host, launch);
    }
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
    std::unique_ptr<Exchange> rows_, sums_;
};

}  // namespace fp8flow
