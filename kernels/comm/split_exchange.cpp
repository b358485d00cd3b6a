// SPDX-License-Identifier: MIT
// Each call goes to the exchange that it is for.
#include "kernels/comm/split_exchange.h"

#include <utility>

namespace fp8flow {

SplitExchange::SplitExchange(std::unique_ptr<Exchange> rows, std::unique_ptr<Exchange> sums)
    : rows_(std::move(rows)), sums_(std::move(sums)) {}

void SplitExchange::check_peers() {
    rows_->check_peers();
    sums_->check_peers();
}

void SplitExchange::require_capturable() const {
    rows_->require_capturable();
    sums_->require_capturable();
}

void SplitExchange::reset_counts() {
    Exchange::reset_counts();
    rows_->reset_counts();
    sums_->reset_counts();
}

void SplitExchange::do_gather_routing(const TensorView& ids, const TensorView& probs,
                                      const TensorView& all_ids, const TensorView& all_probs,
                                      const Launch& launch) {
    rows_->gather_routing(ids, probs, all_ids, all_probs, launch);
}

void SplitExchange::do_dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst,
                                Arena& scratch, const Launch& launch) {
    rows_->dispatch(rows, plan, dst, scratch, launch);
}

void SplitExchange::do_dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan,
                                     const ScaledTensor& received, Arena& scratch, const Launch& launch) {
    rows_->dispatch_rows(rows, plan, received, scratch, launch);
}

void SplitExchange::do_combine(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                               const Launch& launch) {
    rows_->combine(args, plan, scratch, launch);
}

void SplitExchange::do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values,
                                  const Launch& launch) {
    sums_->all_reduce(reduce, ranks, values, launch);
}

void SplitExchange::do_reduce_scatter(Ranks ranks, const TensorView& values, const Shares& shares,
                                      const Launch& launch) {
    sums_->reduce_scatter(ranks, values, shares, launch);
}

void SplitExchange::do_all_gather(Ranks ranks, const TensorView& values, const Shares& shares,
                                  const Launch& launch) {
    sums_->all_gather(ranks, values, shares, launch);
}

}  // namespace fp8flow
