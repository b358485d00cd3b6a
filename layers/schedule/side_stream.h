// SPDX-License-Identifier: MIT
// The side stream of a rank: a second CUDA stream for work of a MoE layer that runs in parallel with the main
// stream (ScheduleSpec says which work).
//
// Rules that make this safe and keep the bits of a single stream:
// - The side stream makes no exchange calls.
// - Side work waits for everything queued on the main stream before begin(). The main stream waits for side
//   work in await() and join() only.
// - The side stream has its own scratch arena, its own arena for tensors that it drops itself, and its own
//   operation workspaces. A tensor that one stream writes and the other reads lives until the main stream has
//   joined.
// - A layer call ends with join(): nothing runs in parallel with the next layer.
// Read next: moe_layer.cpp, flows/steps.h.
#pragma once

#include "layers/context.h"
#include "layers/spec.h"

namespace fp8flow {

class SideStream {
public:
    SideStream(Device& device, const ScheduleSpec& schedule);
    ~SideStream();
    SideStream(const SideStream&) = delete;
    SideStream& operator=(const SideStream&) = delete;

    const ScheduleSpec& schedule() const { return schedule_; }
    std::vector<Arena*> arenas() { return {&scratch_, &dropped_}; }

    // The main context on this stream, for work that waits for everything queued on `main`. for_backward:
    // saved activations go to main.saved. dropped: they go to an arena of this stream, which is rewound
    // before the call ends (recompute).
    enum class Kept { for_backward, dropped };
    Context begin(const Context& main, Kept kept = Kept::for_backward);
    // Records an event after the queued work, for await(). One mark at a time.
    Event mark();
    // Later work of the main stream waits for the mark, or for all queued work of this stream.
    void await(const Context& main, Event mark);
    void join(const Context& main);
    // Whether queued work may still run.
    bool busy() const { return busy_; }

private:
    Device& device_;
    ScheduleSpec schedule_;
    Arena scratch_, dropped_;
    Stream stream_;
    Event main_, side_, mark_;
    bool busy_ = false, marked_ = false;  // marked: no work was queued since the mark
};

}  // namespace fp8flow
