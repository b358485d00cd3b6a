// SPDX-License-Identifier: MIT
// Two interleaved micro-batches (overlap_moe_expert_parallel_comm): while an exchange call of one micro-batch
// is on the wire, the other micro-batch computes.
//
// Each micro-batch has a host thread, so that forward and backward remain ordinary functions. One thread runs
// at a time. They switch at exchange calls, in the same order on all ranks and in every run. Compute runs on
// the main stream and exchange calls on the wire stream, both in the order in which they were queued. A
// micro-batch waits for its own exchange call before it continues, so its arenas are reused in the order of
// its own calls. The two micro-batches share no arena.
#pragma once

#include "layers/context.h"

#include <atomic>
#include <exception>
#include <functional>

namespace fp8flow {

class InterleavedPair;

// One of the two micro-batches; its context points to it.
class InterleavedMicroBatch {
public:
    // The event after its last exchange call.
    Event point() const { return point_; }
    // Lets the other micro-batch run; returns when it yields or is done. Throws the error that ended it, if
    // any.
    void yield(Context& ctx);

private:
    friend class InterleavedPair;
    InterleavedMicroBatch(InterleavedPair& pair, int side, Event point)
        : pair_(pair), side_(side), point_(point) {}
    InterleavedPair& pair_;
    int side_;
    Event point_;
};

class InterleavedPair {
public:
    explicit InterleavedPair(Device& device);
    ~InterleavedPair();
    InterleavedPair(const InterleavedPair&) = delete;
    InterleavedPair& operator=(const InterleavedPair&) = delete;

    // Runs both to the end; `first` begins. Both must store their InterleavedMicroBatch in their contexts.
    // Throws the error that ended one of them, if any.
    using Work = std::function<void(InterleavedMicroBatch&)>;
    void run(StageTimer& timer, const Work& first, const Work& second);

private:
    friend class InterleavedMicroBatch;
    void wait_for_turn(int side);
    void give_turn(int side);
    void play(StageTimer& timer, const Work& work, int side);

    Device& device_;
    InterleavedMicroBatch micro_batches_[2];
    std::atomic<int> turn_of_{0};
    bool done_[2] = {};
    std::exception_ptr error_;
};

}  // namespace fp8flow
