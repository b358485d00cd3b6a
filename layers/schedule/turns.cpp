// SPDX-License-Identifier: MIT
// Two threads; one runs at a time: how they switch, and how an error in one ends both.
#include "layers/schedule/turns.h"

#include <thread>

namespace fp8flow {

Turns::Turns(Device& device)
    : device_(device), turns_{{*this, 0, device.make_event()}, {*this, 1, device.make_event()}} {}

Turns::~Turns() {
    for (const Turn& turn : turns_) device_.free_event(turn.point_);
}

void Turns::wait_for_turn(int side) {
    for (int now = turn_of_.load(); now != side; now = turn_of_.load()) turn_of_.wait(now);
}

void Turns::give_turn(int side) {
    turn_of_.store(side);
    turn_of_.notify_all();
}

void Turn::pass(Context& ctx) {
    const int other = 1 - side_;
    if (turns_.done_[other]) return;
    const StageTimer::Position position = ctx.timer.position();
    turns_.give_turn(other);
    turns_.wait_for_turn(side_);
    ctx.timer.set_position(position);
    if (turns_.error_) std::rethrow_exception(turns_.error_);
}

void Turns::play(StageTimer& timer, const Work& work, int side) {
    wait_for_turn(side);
    try {
        if (!error_) {
            timer.set_position({.turn = side});
            work(turns_[side]);
        }
    } catch (...) {
        if (!error_) error_ = std::current_exception();
    }
    done_[side] = true;
    give_turn(1 - side);
}

void Turns::run(StageTimer& timer, const Work& first, const Work& second) {
    done_[0] = done_[1] = false;
    error_ = nullptr;
    turn_of_ = 0;
    const Work on_own_thread = [&](Turn& turn) {
        device_.enter_thread();
        second(turn);
    };
    std::thread other([&] { play(timer, on_own_thread, 1); });
    play(timer, first, 0);
    other.join();
    timer.set_position({});
    if (error_) std::rethrow_exception(error_);
}

}  // namespace fp8flow
