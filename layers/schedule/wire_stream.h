// SPDX-License-Identifier: MIT
// The wire stream of a rank: a high-priority stream for exchange calls that run in parallel with other work.
// Exchange calls without parallel work stay on the main stream. Each exchange call waits for the one before
// it, on whichever stream that was, so the order of calls is the same on all ranks. Read next: interleaved.h.
#pragma once

#include "layers/schedule/interleaved.h"
#include "layers/schedule/side_stream.h"

namespace fp8flow {

class WireStream {
public:
    WireStream(Device& device, const ScheduleSpec& schedule);
    ~WireStream();
    WireStream(const WireStream&) = delete;
    WireStream& operator=(const WireStream&) = delete;

    // The launch for calls on this stream, which wait for the work queued on the context's stream. narrow:
    // with several ranks the calls use wire_sms SMs, to leave the others to parallel work.
    enum class Width { all, narrow };
    Launch begin(const Context& ctx, Width width);
    // Records the event after the queued work.
    void mark(Event point);
    // Later work of the context's stream waits for the event, or for all queued work of this stream.
    void await(const Context& ctx, Event point);
    void join(const Context& ctx);
    // Whether calls were queued since the last join.
    bool busy() const { return busy_; }
    // For calls in parallel with the side stream.
    Width width_next_to_side() const { return next_to_side_; }

private:
    Device& device_;
    int wire_sms_;
    Width next_to_side_;
    Stream stream_;
    Event main_, ready_, wire_;
    bool busy_ = false;
};

// Call these before and after every exchange call. begin_wire returns its launch: on the wire stream if other
// work runs in parallel. After end_wire, later work of the context waits for the call. With interleaved
// micro-batches the other micro-batch runs in end_wire.
Launch begin_wire(const Context& ctx);
void end_wire(Context& ctx);

template <class Call> void on_wire(Context& ctx, Call&& call) {
    call(begin_wire(ctx));
    end_wire(ctx);
}

}  // namespace fp8flow
