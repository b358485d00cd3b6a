// SPDX-License-Identifier: MIT
// Which micro-batch keeps its operands, and for how long.
#include "layers/schedule/delayed_wgrads.h"

#include "kernels/core/error.h"

namespace fp8flow {

void DelayedWgrads::begin_micro_batch(int64_t index, int64_t count) {
    place_ = index % joined_;
    waits_ = place_ + 1 < joined_ && index + 1 < count;
    if (place_ == 0) forget();
}

void DelayedWgrads::forget() {
    waiting_.clear();
    arena_.rewind({});
}

void DelayedWgrads::keep(const Parameter& weight, const op::WgradOperands& operands, Gradient mode) {
    FP8FLOW_CHECK(waits_, "{}: no micro-batch follows that its gradient could wait for", weight.spec.name);
    Waiting& waiting = waiting_[&weight];
    FP8FLOW_CHECK(waiting.count == place_, "{}: {} gradients wait before micro-batch {} of {}",
                  weight.spec.name, waiting.count, place_, joined_);
    if (place_ == 0) waiting.mode = mode;
    waiting.operands[static_cast<size_t>(waiting.count++)] = operands;
}

std::optional<DelayedWgrads::Waiting> DelayedWgrads::take(const Parameter& weight) {
    const auto found = waiting_.find(&weight);
    if (waits_ || found == waiting_.end()) return std::nullopt;
    const Waiting waiting = found->second;
    waiting_.erase(found);
    return waiting;
}

}  // namespace fp8flow
