// SPDX-License-Identifier: MIT
// Reductions and gathers of the reference exchange.
#include "kernels/comm/group_exchange.h"
#include "kernels/core/error.h"

#include <span>

namespace fp8flow {

int GroupExchange::num_ranks(Ranks ranks) const {
    if (ranks == Ranks::world) return world_ != nullptr ? world_->size() : group_.size();
    return expert_replicas_ != nullptr ? expert_replicas_->size() : 1;
}

int GroupExchange::rank_among(Ranks ranks) const {
    if (ranks == Ranks::world) return world_ != nullptr ? world_->rank() : group_.rank();
    return expert_replicas_ != nullptr ? expert_replicas_->rank() : 0;
}

ProcessGroup& GroupExchange::group_of(Ranks ranks) const {
    if (ranks == Ranks::expert_replicas) return *expert_replicas_;
    return world_ != nullptr ? *world_ : group_;
}

void GroupExchange::do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch&) {
    if (num_ranks(ranks) == 1) return;
    ProcessGroup& group = group_of(ranks);
    const size_t count = static_cast<size_t>(values.numel());
    if (values.dtype == DType::i64) {
        FP8FLOW_CHECK(reduce == Reduce::sum, "only sums of {}", describe(values));
        group.all_reduce_sum(std::span<int64_t>(values.as<int64_t>(), count));
    } else if (values.dtype == DType::i32) {
        FP8FLOW_CHECK(reduce == Reduce::max && count == 1, "only the maximum of one word, not {}",
                      describe(values));
        int64_t word = *values.as<int32_t>();
        group.all_reduce_max(std::span<int64_t>(&word, 1));
        *values.as<int32_t>() = static_cast<int32_t>(word);
    } else if (values.dtype == DType::bf16) {
        FP8FLOW_CHECK(reduce == Reduce::sum, "only sums of {}", describe(values));
        group.all_reduce_sum(std::span<Bf16>(values.as<Bf16>(), count));
    } else if (reduce == Reduce::sum) {
        group.all_reduce_sum(std::span<float>(values.as<float>(), count));
    } else {
        group.all_reduce_max(std::span<float>(values.as<float>(), count));
    }
}

void GroupExchange::do_reduce_scatter(Ranks ranks, const TensorView& values, const Shares& shares,
                                      const Launch&) {
    ProcessGroup& group = group_of(ranks);
    const size_t count = static_cast<size_t>(values.numel());
    if (values.dtype == DType::i64)
        group.reduce_scatter_sum(std::span<int64_t>(values.as<int64_t>(), count), shares);
    else if (values.dtype == DType::bf16)
        group.reduce_scatter_sum(std::span<Bf16>(values.as<Bf16>(), count), shares);
    else
        group.reduce_scatter_sum(std::span<float>(values.as<float>(), count), shares);
}

void GroupExchange::do_all_gather(Ranks ranks, const TensorView& values, const Shares& shares,
                                  const Launch&) {
    group_of(ranks).all_gather_shares(values.data, static_cast<size_t>(size_of(values.dtype)), shares);
}

}  // namespace fp8flow
