// SPDX-License-Identifier: MIT
// Two threads of which one runs at a time: how they switch, and how an error in one ends both.
#include "layers/schedule/interleaved.h"

#include <thread>

namespace fp8flow {

InterleavedPair::InterleavedPair(Device& device)
    : device_(device), micro_batches_{{*this, 0, device.make_event()}, {*this, 1, device.make_event()}} {}

InterleavedPair::~InterleavedPair() {
    for (const InterleavedMicroBatch& one : micro_batches_) device_.free_event(one.point_);
}

void InterleavedPair::wait_for_turn(int side) {
    for (int now = turn_of_.load(); now != side; now = turn_of_.load()) turn_of_.wait(now);
}

void InterleavedPair::give_turn(int side) {
    turn_of_.store(side);
    turn_of_.notify_all();
}

void InterleavedMicroBatch::yield(Context& ctx) {
    const int other = 1 - side_;
    if (pair_.done_[other]) return;
    const StageTimer::Position position = ctx.timer.position();
    pair_.give_turn(other);
    pair_.wait_for_turn(side_);
    ctx.timer.set_position(position);
    if (pair_.error_) std::rethrow_exception(pair_.error_);
}

void InterleavedPair::play(StageTimer& timer, const Work& work, int side) {
    wait_for_turn(side);
    try {
        if (!error_) {
            timer.set_position({.micro_batch = side});
            work(micro_batches_[side]);
        }
    } catch (...) {
        if (!error_) error_ = std::current_exception();
    }
    done_[side] = true;
    give_turn(1 - side);
}

void InterleavedPair::run(StageTimer& timer, const Work& first, const Work& second) {
    done_[0] = done_[1] = false;
    error_ = nullptr;
    turn_of_ = 0;
    const Work on_own_thread = [&](InterleavedMicroBatch& micro_batch) {
        device_.enter_thread();
        second(micro_batch);
    };
    std::thread other([&] { play(timer, on_own_thread, 1); });
    play(timer, first, 0);
    other.join();
    timer.set_position({});
    if (error_) std::rethrow_exception(error_);
}

}  // namespace fp8flow
