// SPDX-License-Identifier: MIT
// Which micro-batch keeps its operands, and for how long.
#include "layers/schedule/delayed_wgrads.h"

#include "kernels/core/error.h"

namespace fp8flow {

void DelayedWgrads::begin_micro_batch(int64_t index, int64_t count) {
    const bool first = index % 2 == 0;
    waits_ = first && index + 1 < count;
    if (!first) return;
    forget();
}

void DelayedWgrads::forget() {
    waiting_.clear();
    arena_.rewind({});
}

void DelayedWgrads::keep(const Parameter& weight, const Waiting& waiting) {
    FP8FLOW_CHECK(waits_, "{}: no micro-batch follows that its gradient could wait for", weight.spec.name);
    const bool added = waiting_.emplace(&weight, waiting).second;
    FP8FLOW_CHECK(added, "{}: two gradients wait", weight.spec.name);
}

std::optional<DelayedWgrads::Waiting> DelayedWgrads::take(const Parameter& weight) {
    const auto found = waiting_.find(&weight);
    if (waits_ || found == waiting_.end()) return std::nullopt;
    const Waiting waiting = found->second;
    waiting_.erase(found);
    return waiting;
}

}  // namespace fp8flow
