// SPDX-License-Identifier: MIT
// The reference backend with side and wire streams that work as late as possible: their work, exchange calls
// included, runs only when the main stream waits for it. A missing wait, or memory that is reused too early,
// then changes bytes. be_late_on_main reverses the roles. The plain reference backend runs all work in
// program order and cannot show such faults.
#pragma once

#include "kernels/exchange.h"
#include "kernels/reference/reference_ops.h"

#include <deque>
#include <functional>

namespace fp8flow::test {

class LateDevice final : public Device {
public:
    explicit LateDevice(Device& device) : device_(device) {}
    // Reverses the roles: the main stream works as late as possible and all others at once. Call it before
    // any work.
    void be_late_on_main() { main_is_late_ = true; }
    ~LateDevice() override { synchronize(); }

    void* allocate(std::size_t bytes) override { return device_.allocate(bytes); }
    void free(void* data) override;
    void copy_in(void* device, const void* host, std::size_t bytes, Stream stream) override;
    void copy_out(void* host, const void* device, std::size_t bytes, Stream stream) override;
    void copy(void* to, const void* from, std::size_t bytes, Stream stream) override;
    void fill(void* device, uint8_t value, std::size_t bytes, Stream stream) override;
    void synchronize() override;
    int64_t free_bytes() const override { return device_.free_bytes(); }

    Stream make_stream(Priority) override { return {&queues_.emplace_back()}; }
    Event make_event() override { return {&points_.emplace_back()}; }
    // An event of a stream that works at once has always passed.
    void record(Event event, Stream stream) override;
    void follow(Stream stream, Event event) override;

    // Now, or on a late stream later; what is independent (Launch) before the last work that is not.
    void give(Stream stream, std::function<void()> work, bool independent = false);
    int64_t waiting() const {
        std::size_t sum = 0;
        for (const Queue& queue : queues_) sum += queue.waiting.size();
        return static_cast<int64_t>(sum);
    }

private:
    struct Queue {
        std::deque<std::function<void()>> waiting;
        int64_t given = 0, ran = 0;
        // The last work that is not independent, as a place among all given; -1: none since the last event.
        int64_t ordered = -1;
    };
    struct Point {  // an event: what its stream had been given when it was recorded
        Queue* queue = nullptr;
        int64_t given = 0;
    };
    Queue* late_stream(Stream stream) {
        if (main_is_late_) return stream.handle == nullptr ? &main_ : nullptr;
        return static_cast<Queue*>(stream.handle);
    }
    void run_main() { run_until({&main_, main_.given}); }
    void run(const std::function<void()>& work);
    void run_until(const Point& point);

    Device& device_;
    bool main_is_late_ = false, at_work_ = false;
    Queue main_;
    std::deque<Queue> queues_;
    std::deque<Point> points_;
};

class LateOps final : public Ops {
public:
    Device& device() override { return device_; }
    LateDevice& late_device() { return device_; }

protected:
#define FP8FLOW_OVERRIDE(name, Args) void do_##name(const op::Args& args, const Launch& launch) override;
    FP8FLOW_FOR_EACH_OP(FP8FLOW_OVERRIDE)
#undef FP8FLOW_OVERRIDE

private:
    ReferenceOps ops_;
    LateDevice device_{ops_.device()};
};

// An exchange whose calls on another stream are late, too. All ranks wait in the same places, so that their
// calls still meet.
class LateExchange final : public Exchange {
public:
    LateExchange(Exchange& exchange, LateDevice& device)
        : Exchange(&exchange), exchange_(exchange), device_(device) {}

    void check_peers() override { exchange_.check_peers(); }
    WireBytes wire_bytes() const override { return exchange_.wire_bytes(); }
    void reset_counts() override;

protected:
    void do_gather_routing(const Routing& routing, const Launch& launch) override;
    void do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) override;
    void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received, const Call& call) override;
    void do_combine(const Combine& args, const Call& call) override;
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) override;
    void do_reduce_scatter(const Sharded& sharded, const Launch& launch) override;
    void do_all_gather(const Sharded& sharded, const Launch& launch) override;

private:
    Exchange& exchange_;
    LateDevice& device_;
    Arena scratch_{device_, "late exchange", true};
};

}  // namespace fp8flow::test
