// SPDX-License-Identifier: MIT
// The wire lane of a rank: a stream for calls of the exchange beside the main lane. Where a context has one,
// all its calls go there: one wire order, equal on all ranks. Without one they stay on the main lane. Read
// next: turns.h.
#pragma once

#include "layers/schedule/side_lane.h"
#include "layers/schedule/turns.h"

namespace fp8flow {

class WireLane {
public:
    WireLane(Device& device, const ScheduleSpec& schedule);
    ~WireLane();
    WireLane(const WireLane&) = delete;
    WireLane& operator=(const WireLane&) = delete;

    // The launch of calls that follow what the context's lane was given so far. beside: other work runs
    // meanwhile, so with several ranks on a part of the SMs.
    enum class Width { all, beside };
    Launch begin(const Context& ctx, Width width);
    // The context's lane from now on follows all that this lane was given, or what it was when marked.
    void join(const Context& ctx);
    void mark(Event point);
    void await(const Context& ctx, Event point);

private:
    Device& device_;
    int wire_sms_;
    Stream stream_;
    Event main_, wire_;
};

// The launch of calls of the exchange, on the lane where the context's schedule has them, and the end of
// them: what the context is given afterwards follows. Between two micro-batches in turns the end is where the
// other goes on.
Launch begin_wire(const Context& ctx);
void end_wire(Context& ctx);

template <class Call> void on_wire(Context& ctx, Call&& call) {
    call(begin_wire(ctx));
    end_wire(ctx);
}

}  // namespace fp8flow
