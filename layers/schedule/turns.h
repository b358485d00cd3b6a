// SPDX-License-Identifier: MIT
// Two micro-batches in turns: the host gives the device a piece of one, then a piece of the other
// (overlap_moe_expert_parallel_comm). A piece ends at a call of the exchange; while that is on the wire, the
// other's piece computes.
//
// Each is a thread of its own, so that forward and backward stay functions that are read from top to bottom;
// one of them runs at a time, and they change places in the order of the program: the same on all ranks, and
// in every run. All compute is on the main lane and all calls of the exchange on the wire lane, both in the
// order of the turns. A micro-batch follows its own calls before it goes on, so its memory is used in the
// order of its own program; it shares none with the other.
#pragma once

#include "layers/context.h"

#include <atomic>
#include <exception>
#include <functional>

namespace fp8flow {

class Turns;

// The side of one micro-batch; its context carries it.
class Turn {
public:
    // What the wire lane was given in this turn, for the end of the wait.
    Event point() const { return point_; }
    // The other micro-batch goes on; returns when that has ended its turn, or is done. Throws what the other
    // ended with, if that was an error.
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

    // Runs both to their ends; `first` has the first turn. Both give their turn to the contexts that they
    // make. Throws the error that one of them ended with.
    using Work = std::function<void(Turn&)>;
    void run(StageTimer& timer, const Work& first, const Work& second);

private:
    friend class Turn;
    void wait_for_turn(int side);
    void give_turn(int side);
    void play(StageTimer& timer, const Work& work, int side);

    Device& device_;
    Turn turns_[2];
    std::atomic<int> whose_{0};
    bool done_[2] = {};
    std::exception_ptr error_;
};

}  // namespace fp8flow
