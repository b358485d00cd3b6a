// SPDX-License-Identifier: MIT
// Two interleaved micro-batches (overlap_moe_expert_parallel_comm): the host queues a piece of one, then a
// piece of the other. A piece ends at an exchange call. While that call is on the wire, the other micro-batch
// computes.
//
// Each micro-batch has a host thread, so that forward and backward remain functions that are read from top to
// bottom. One thread runs at a time; they switch at exchange calls, in an order that is the same on all ranks
// and in every run. Compute runs on the main stream and exchange calls run on the wire stream, both in the
// order in which they were queued. A micro-batch waits for its own exchange call before it continues, so its
// arenas are reused in the order of its own program; the two micro-batches share no arena.
#pragma once

#include "layers/context.h"

#include <atomic>
#include <exception>
#include <functional>

namespace fp8flow {

class Turns;

// One of the two micro-batches; its context points to it.
class Turn {
public:
    // The event after this turn's exchange call.
    Event point() const { return point_; }
    // Lets the other micro-batch run; returns when it ends its turn or is done. Throws the error that ended
    // it, if there was one.
    void pass(Context& ctx);

private:
    friend class Turns;
    Turn(Turns& turns, int side, Event point) : turns_(turns), side_(side), point_(point) {}
    Turns& turns_;
    int side_;
    Event point_;
};

class Turns {
public:
    explicit Turns(Device& device);
    ~Turns();
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // Runs both to the end; `first` begins. Both store their Turn in the contexts that they make. Throws the
    // error that ended one of them, if there was one.
    using Work = std::function<void(Turn&)>;
    void run(StageTimer& timer, const Work& first, const Work& second);

private:
    friend class Turn;
    void wait_for_turn(int side);
    void give_turn(int side);
    void play(StageTimer& timer, const Work& work, int side);

    Device& device_;
    Turn turns_[2];
    std::atomic<int> turn_of_{0};
    bool done_[2] = {};
    std::exception_ptr error_;
};

}  // namespace fp8flow
