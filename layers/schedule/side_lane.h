// SPDX-License-Identifier: MIT
// The side lane of a rank: a stream beside the main one, for work of a MoE layer that the main lane does not
// wait for at once. Which work that is: ScheduleSpec.
//
// The rules that make this safe, and the same bits as one lane:
// - It makes no calls of the exchange.
// - A lane's work runs in the order in which the host gives it. Side work follows what the main lane was
//   given before begin(); the main lane follows side work where it calls await() or join().
// - The side lane takes scratch, and what it makes and drops, from arenas of its own, reused in the order of
//   its stream; operations have workspaces by lane. What one lane makes and the other reads lives until the
//   main lane has joined.
// - A layer call ends joined: nothing runs beside the layer after it.
// Read next: moe_layer.cpp, flows/steps.h.
#pragma once

#include "layers/context.h"
#include "layers/spec.h"

namespace fp8flow {

class SideLane {
public:
    SideLane(Device& device, const ScheduleSpec& schedule);
    ~SideLane();
    SideLane(const SideLane&) = delete;
    SideLane& operator=(const SideLane&) = delete;

    const ScheduleSpec& schedule() const { return schedule_; }
    std::vector<Arena*> arenas() { return {&scratch_, &dropped_}; }

    // The micro-batch of the main lane's context on this lane. Its work follows all that `main` was given.
    // Kept for the backward: in `saved` as ever; or what this lane keeps it drops itself before it ends
    // (recomputation).
    enum class Kept { for_backward, dropped };
    Context begin(const Context& main, Kept kept = Kept::for_backward);
    // What this lane was given so far, for await(). One mark at a time.
    Event mark();
    // The main lane's work from now on follows the mark; or everything this lane was given.
    void await(const Context& main, Event mark);
    void join(const Context& main);
    // Whether it may be at work.
    bool busy() const { return busy_; }

private:
    Device& device_;
    ScheduleSpec schedule_;
    Arena scratch_, dropped_;
    Stream stream_;
    Event main_, side_, mark_;
    bool busy_ = false, marked_ = false;  // marked: nothing was given to this lane since the mark
};

}  // namespace fp8flow
