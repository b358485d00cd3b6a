// SPDX-License-Identifier: MIT
// Decides which micro-batches keep their operands, and until when.
#include "layers/schedule/delayed_wgrads.h"

#include "kernels/core/error.h"

namespace fp8flow {

void DelayedWgrads::begin_micro_batch(int64_t index, int64_t count) {
    index_ = index % joined_;
    waits_ = index_ + 1 < joined_ && index + 1 < count;
    if (index_ == 0) forget();
}

void DelayedWgrads::forget() {
    waiting_.clear();
    arena_.rewind({});
}

void DelayedWgrads::keep(const Parameter& weight, const op::WgradOperands& operands, Gradient mode) {
    FP8FLOW_CHECK(waits_, "{}: its gradient cannot wait, because no micro-batch of its group follows",
                  weight.spec.name);
    Waiting& waiting = waiting_[&weight];
    FP8FLOW_CHECK(waiting.count == index_, "{}: {} gradients wait before micro-batch {} of {}",
                  weight.spec.name, waiting.count, index_, joined_);
    if (index_ == 0) waiting.mode = mode;
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
