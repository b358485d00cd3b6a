// SPDX-License-Identifier: MIT
// StageTimer: when each stage of the token's journey began and ended on the device, forward and backward, and
// what it had to do. Off by default: a scope then costs one branch. The stage names are the words of the
// journey: norm, route, plan, dispatch, fc1, swiglu, ...
//
// Parts (the MoE layer, attention, head, optimizer, ...) contain stages; stages may contain stages. A scope
// leaves two marks in the timeline of the stream it works on and does nothing else, so nothing waits;
// resolve(), after the step, turns marks into seconds. Stages of the side stream lie in the span that the
// host has open, but take no time of it.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/op_observer.h"
#include "kernels/core/timeline.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fp8flow {

enum class StageLevel : uint8_t { part = 1, stage = 2 };
// parts: only parts leave marks, so that events between kernels do not count in the time of a whole layer;
// they also measure the device's clock.
enum class TimerDetail : uint8_t { off = 0, parts = 1, stages = 2 };

struct StageSpan {
    const char* name = "";       // of the stage or part; a string literal
    const char* direction = "";  // "forward", "backward" or "update"
    int layer = -1;
    int parent = -1;  // index of the span around this one
    StageLevel level = StageLevel::stage;
    StreamRole role = StreamRole::main;
    int micro_batch = 0;          // 0 or 1: of two interleaved ones
    int64_t first = 0, last = 0;  // marks
    double wire_bytes = 0;        // that left this rank, children not counted
    int64_t peak_bytes = 0;       // of the watched arenas while it was open, children counted
    double begin = 0, seconds = 0,
           own_seconds = 0;  // resolved: since the step's first mark; with and without children of its stream
    double clock = 0;        // resolved: the device's mean clock in Hz; 0: not known
};

class StageTimer final : public OpObserver {
public:
    // From now on, with the marks of a device's timeline.
    void enable(std::unique_ptr<Timeline> timeline, TimerDetail detail);
    void disable() { detail_ = TimerDetail::off; }
    bool enabled() const { return detail_ != TimerDetail::off; }
    // Also record the memory in use (a sum of peaks, each arena's own: an upper bound).
    void watch(std::vector<Arena*> arenas) { arenas_ = std::move(arenas); }

    void set_direction(const char* direction) { at_.direction = direction; }
    void set_layer(int layer) { at_.layer = layer; }  // -1: none
    // Where in the journey the host is. Two interleaved micro-batches are at different places.
    struct Position {
        const char* direction = "forward";
        int layer = -1;
        int span = -1;        // the innermost open one
        int micro_batch = 0;  // 0 or 1: of two interleaved ones
    };
    Position position() const { return at_; }
    void set_position(const Position& position) { at_ = position; }

    class Scope {
    public:
        Scope(StageTimer& timer, StageLevel level, const char* name, const Launch& launch)
            : timer_(timer.detail_ >= static_cast<TimerDetail>(level) ? &timer : nullptr),
              stream_(launch.stream) {
            if (timer_) timer_->open(level, name, launch);
        }
        ~Scope() {
            if (timer_) timer_->close(stream_);
        }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

    private:
        StageTimer* timer_;
        Stream stream_;
    };

    // Forgets the last step; keeps storage.
    void reset();
    // Waits for the device to pass the last mark and computes all times.
    void resolve();

    struct Call {
        OpCall call;
        int span = -1;  // the innermost span it was made in
    };
    const std::vector<StageSpan>& spans() const { return spans_; }
    const std::vector<Call>& calls() const { return calls_; }
    // After resolve(): "forward/fc1" -> seconds, every moment counted once (see stage_of).
    std::map<std::string, double> seconds() const;

    void op_called(const OpCall& call) override;
    void exchange_began(const OpCall& call) override;
    void exchange_ended(double wire_bytes) override;

private:
    void open(StageLevel level, const char* name, const Launch& launch);
    void close(Stream stream);
    int64_t take_arena_peak();

    TimerDetail detail_ = TimerDetail::off;
    Position at_;
    bool in_exchange_ = false;
    std::unique_ptr<Timeline> timeline_;
    std::vector<Arena*> arenas_;
    std::vector<StageSpan> spans_;
    std::vector<Call> calls_;
};

// The part and the stage that the moments of a span (its children's not counted) and its calls are counted
// under: a cast under "cast", everything else under the outermost stage inside its part; a part's own moments
// under its own name.
struct StageName {
    const char* part = "";
    const char* stage = "";
};
StageName stage_of(const std::vector<StageSpan>& spans, int index);

}  // namespace fp8flow
