// SPDX-License-Identifier: MIT
// StagedExchange: the exchange between ranks whose tensors live on a device, staged through host memory: rows
// are copied out, exchanged by a reference exchange, and copied back. Correct on any number of GPUs and
// nodes, and slow: every call synchronises with the host. It is the fallback of builds without NCCL where
// GPUs cannot reach each other's memory.
#pragma once

#include "kernels/exchange.h"

#include <memory>

namespace fp8flow {

class StagedExchange final : public Exchange {
public:
    // `device` holds the tensors of all calls and outlives the exchange; `host` is made with `host_ops`,
    // which work on host memory.
    StagedExchange(Device& device, std::unique_ptr<Ops> host_ops, std::unique_ptr<Exchange> host);
    int rank() const override { return host_->rank(); }
    int size() const override { return host_->size(); }
    int num_ranks(Ranks ranks) const override { return host_->num_ranks(ranks); }
    int rank_among(Ranks ranks) const override { return host_->rank_among(ranks); }

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
    // A host tensor of the same shape; with `rows` >= 0 the M axis (first) is cut to that many rows and
    // begins at the row base.
    TensorView mirror(const TensorView& view, int64_t rows = -1);
    TensorView copy_out(const TensorView& view, const Launch& launch, int64_t rows = -1);
    ScaledTensor copy_out(const ScaledTensor& tensor, const Launch& launch);
    void copy_in(const TensorView& host, const TensorView& device, const Launch& launch);
    // A collective in place: on a copy of the values in host memory.
    template <class Step> void on_host(const TensorView& values, const Launch& launch, Step step);
    DispatchPlan host_plan(const DispatchPlan& plan, const Launch& launch);
    int64_t row_base(const TensorView& view, const Launch& launch);
    void add_wire_bytes();

    Device& device_;
    std::unique_ptr<Ops> host_ops_;
    std::unique_ptr<Exchange> host_;
    Arena arena_;  // host memory of one call
};

}  // namespace fp8flow
