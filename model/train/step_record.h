// SPDX-License-Identifier: MIT
// StepRecord: the results of a step in page-locked memory. The device copies them there after the step; the
// host reads them after the event that follows the copies.
#pragma once

#include "kernels/core/pinned.h"
#include "kernels/exchange.h"

#include <span>

namespace fp8flow {

class StepRecord {
public:
    // Router statistics: counts [layers, E] i64 and losses [layers, .] f32 of the model; absent without MoE
    // layers.
    StepRecord(Device& device, const TensorView& router_counts, const TensorView& router_losses);

    // Call order of a step: begin, the work of the step, end.
    void begin(Exchange& exchange, const Launch& launch);
    struct Words {
        TensorView status;     // [1] i32
        TensorView sums;       // [2] f32: losses, wishes to stop
        TensorView grad_norm;  // [1] f32
    };
    void end(const Words& words, Exchange& exchange, const Launch& launch);
    void mark(Stream stream) { event_.record(stream); }
    bool has_passed() const { return event_.has_passed(); }
    void wait() { event_.wait(); }

    // Valid after the event.
    int32_t status() const { return head()->status; }
    double loss_sum() const { return static_cast<double>(head()->sums[0]); }
    bool stop_asked() const { return head()->sums[1] > 0; }
    double grad_norm() const { return static_cast<double>(head()->grad_norm); }
    WireBytes wire() const;  // sent by this rank during the step
    int64_t num_layers() const { return counts_.rank > 0 ? counts_.dim(0) : 0; }
    std::span<const int64_t> expert_counts(int64_t layer) const;
    std::span<const float> router_losses(int64_t layer) const;  // Router::losses

private:
    struct Head {
        int32_t status;
        float sums[2], grad_norm;
        // Exchange::copy_wire_counters
        static constexpr int kWire = Exchange::kMostWireSets * Exchange::kWireWords;
        uint64_t wire_before[kWire], wire_after[kWire];
    };
    Head* head() const { return memory_.at<Head>(0); }

    Device& device_;
    TensorView counts_, losses_;
    std::size_t counts_at_, losses_at_;
    PinnedBuffer memory_;
    HostEvent event_;
};

}  // namespace fp8flow
