// SPDX-License-Identifier: MIT
// The wire lane of a rank: an urgent stream for calls of the exchange that run beside other work. Calls that
// nothing runs beside stay on the main lane. Each call follows the one before on whichever lane that was: one
// wire order, equal on all ranks. Read next: turns.h.
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

    // The launch of calls on this lane, which follow what the context's lane was given so far. narrow: with
    // several ranks on wire_sms SMs, since what is beside them takes as long.
    enum class Width { all, narrow };
    Launch begin(const Context& ctx, Width width);
    // What this lane was given so far.
    void mark(Event point);
    // The context's lane from now on follows the mark; or everything this lane was given.
    void await(const Context& ctx, Event point);
    void join(const Context& ctx);
    // Whether it was given calls since the last join.
    bool busy() const { return busy_; }

private:
    Device& device_;
    int wire_sms_;
    Stream stream_;
    Event main_, ready_, wire_;
    bool busy_ = false;
};

// The launch of calls of the exchange, on the wire lane where other work is beside them, and the end of them:
// what the context is given afterwards follows. Between two micro-batches in turns the end is where the other
// goes on.
Launch begin_wire(const Context& ctx);
void end_wire(Context& ctx);

template <class Call> void on_wire(Context& ctx, Call&& call) {
    call(begin_wire(ctx));
    end_wire(ctx);
}

}  // namespace fp8flow
