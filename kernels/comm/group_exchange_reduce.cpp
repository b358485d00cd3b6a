// all_reduce of the reference exchange: small vectors over all ranks of the job.
#include "kernels/comm/group_exchange.h"

#include <span>

namespace fp8flow {

void GroupExchange::do_all_reduce(Reduce reduce, const TensorView& values, const Launch&) {
    ProcessGroup& group = world_ != nullptr ? *world_ : group_;
    const size_t count = static_cast<size_t>(values.numel());
    if (values.dtype == DType::i64) {
        FP8FLOW_CHECK(reduce == Reduce::sum, "only sums of {}", describe(values));
        group.all_reduce_sum(std::span<int64_t>(values.as<int64_t>(), count));
        return;
    }
    const std::span<float> floats(values.as<float>(), count);
    if (reduce == Reduce::sum)
        group.all_reduce_sum(floats);
    else
        group.all_reduce_max(floats);
}

}  // namespace fp8flow
