// SPDX-License-Identifier: MIT
// Copies the results of a step to the host, and reads them.
#include "model/train/step_record.h"

namespace fp8flow {

namespace {
std::size_t bytes_of(const TensorView& view) { return static_cast<std::size_t>(view.bytes()); }
}  // namespace

StepRecord::StepRecord(Device& device, const TensorView& router_counts, const TensorView& router_losses)
    : device_(device),
      counts_(router_counts),
      losses_(router_losses),
      counts_at_(sizeof(Head)),
      losses_at_(counts_at_ + bytes_of(counts_)),
      memory_(device, losses_at_ + bytes_of(losses_)),
      event_(device) {
    *head() = {};
}

void StepRecord::begin(Exchange& exchange, const Launch& launch) {
    exchange.copy_wire_counters(head()->wire_before, launch);
}

void StepRecord::end(const Words& words, Exchange& exchange, const Launch& launch) {
    exchange.copy_wire_counters(head()->wire_after, launch);
    const auto copy = [&](void* to, const TensorView& from) {
        if (from) device_.copy_out_async(to, from.data, bytes_of(from), launch.stream);
    };
    copy(&head()->status, words.status);
    copy(&head()->sums, words.sums);
    copy(&head()->grad_norm, words.grad_norm);
    copy(memory_.at<void>(counts_at_), counts_);
    copy(memory_.at<void>(losses_at_), losses_);
}

WireBytes StepRecord::wire() const {
    const auto sent = [this](int leg) {
        uint64_t bytes = 0;
        for (int word = leg; word < Head::kWire; word += Exchange::kWireWords)
            bytes += head()->wire_after[word] - head()->wire_before[word];
        return static_cast<double>(bytes);
    };
    return {.routing = sent(0), .dispatch = sent(1), .combine = sent(2), .between_hosts = sent(3)};
}

std::span<const int64_t> StepRecord::expert_counts(int64_t layer) const {
    const auto experts = static_cast<std::size_t>(counts_.dim(1));
    return {memory_.at<int64_t>(counts_at_) + static_cast<std::size_t>(layer) * experts, experts};
}

std::span<const float> StepRecord::router_losses(int64_t layer) const {
    const auto losses = static_cast<std::size_t>(losses_.dim(1));
    return {memory_.at<float>(losses_at_) + static_cast<std::size_t>(layer) * losses, losses};
}

}  // namespace fp8flow
