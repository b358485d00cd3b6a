// SPDX-License-Identifier: MIT
// What late_stream.h declares: compiled once, since LateOps has a function for every operation.
#include "tests/support/layers/late_stream.h"

#include <utility>

namespace fp8flow::test {

void LateDevice::give(Stream stream, std::function<void()> work, bool independent) {
    Queue* queue = late_stream(stream);
    if (queue == nullptr || at_work_) return run(work);
    if (independent && queue->ordered >= queue->ran) {
        queue->waiting.insert(queue->waiting.begin() + (queue->ordered - queue->ran), std::move(work));
        ++queue->ordered;
    } else {
        queue->waiting.push_back(std::move(work));
        if (!independent) queue->ordered = queue->given;
    }
    ++queue->given;
}

void LateDevice::run(const std::function<void()>& work) {
    const bool inner = std::exchange(at_work_, true);
    work();
    at_work_ = inner;
}

void LateDevice::run_until(const Point& point) {
    Queue& queue = *point.queue;
    while (queue.ran < point.given) {
        ++queue.ran;
        const std::function<void()> work = std::move(queue.waiting.front());
        queue.waiting.pop_front();
        run(work);
    }
}

void LateDevice::free(void* data) {
    run_main();
    device_.free(data);
}

void LateDevice::copy_in(void* device, const void* host, std::size_t bytes, Stream stream) {
    run_main();
    device_.copy_in(device, host, bytes, stream);
}

void LateDevice::copy_out(void* host, const void* device, std::size_t bytes, Stream stream) {
    run_main();
    device_.copy_out(host, device, bytes, stream);
}

void LateDevice::copy(void* to, const void* from, std::size_t bytes, Stream stream) {
    give(stream, [this, to, from, bytes] { device_.copy(to, from, bytes); });
}

void LateDevice::fill(void* device, uint8_t value, std::size_t bytes, Stream stream) {
    give(stream, [this, device, value, bytes] { device_.fill(device, value, bytes); });
}

void LateDevice::synchronize() {
    for (Queue& queue : queues_) run_until({&queue, queue.given});
    run_main();
}

void LateDevice::record(Event event, Stream stream) {
    Queue* queue = late_stream(stream);
    if (queue != nullptr) queue->ordered = -1;
    *static_cast<Point*>(event.handle) = {queue, queue == nullptr ? 0 : queue->given};
}

void LateDevice::follow(Stream stream, Event event) {
    const Point point = *static_cast<Point*>(event.handle);
    if (point.queue != nullptr) give(stream, [this, point] { run_until(point); });
}

namespace {

// A call without work is none: what comes after it cannot rely on its waiting.
template <class Args> bool has_work(const Args&) { return true; }
bool has_work(const op::AdamW& args) { return args.master.numel() > 0; }

}  // namespace

#define FP8FLOW_DEFINE(name, Args)                                                 \
    void LateOps::do_##name(const op::Args& args, const Launch& launch) {          \
        if (!has_work(args)) return;                                               \
        device_.give(                                                              \
            launch.stream, [this, args] { ops_.name(args); }, launch.independent); \
    }
FP8FLOW_FOR_EACH_OP(FP8FLOW_DEFINE)
#undef FP8FLOW_DEFINE

void LateExchange::reset_counts() {
    Exchange::reset_counts();
    exchange_.reset_counts();
}

// What a call works with may be gone by the time it is made, so it is copied.
void LateExchange::do_gather_routing(const Routing& routing, const Launch& launch) {
    device_.give(launch.stream, [this, ids = routing.ids, probs = routing.probs, all_ids = routing.all_ids,
                                 all_probs = routing.all_probs] {
        exchange_.gather_routing(ids, probs, all_ids, all_probs);
    });
}

void LateExchange::do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) {
    device_.give(call.launch.stream, [=, this, plan = call.plan] {
        ArenaScope scope(scratch_);
        exchange_.dispatch(rows, plan, dst, scratch_);
    });
}

void LateExchange::do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received,
                                    const Call& call) {
    device_.give(call.launch.stream, [=, this, plan = call.plan] {
        ArenaScope scope(scratch_);
        exchange_.dispatch_rows(rows, plan, received, scratch_);
    });
}

void LateExchange::do_combine(const Combine& args, const Call& call) {
    device_.give(call.launch.stream, [=, this, plan = call.plan] {
        ArenaScope scope(scratch_);
        exchange_.combine(args, plan, scratch_);
    });
}

void LateExchange::do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) {
    device_.give(launch.stream, [=, this] { exchange_.all_reduce(reduce, ranks, values); });
}

void LateExchange::do_reduce_scatter(const Sharded& sharded, const Launch& launch) {
    device_.give(launch.stream,
                 [this, ranks = sharded.ranks, values = sharded.values, shards = sharded.shards] {
                     exchange_.reduce_scatter(ranks, values, shards);
                 });
}

void LateExchange::do_all_gather(const Sharded& sharded, const Launch& launch) {
    device_.give(launch.stream, [this, ranks = sharded.ranks, values = sharded.values,
                                 shards = sharded.shards] { exchange_.all_gather(ranks, values, shards); });
}

}  // namespace fp8flow::test
