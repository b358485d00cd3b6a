// SPDX-License-Identifier: MIT
// Opening and closing spans while a step is launched, and their times afterwards.
#include "kernels/core/stage_timer.h"

#include "kernels/core/error.h"

#include <algorithm>
#include <cstring>

namespace fp8flow {

void StageTimer::enable(std::unique_ptr<Timeline> timeline, TimerDetail detail) {
    reset();
    timeline_ = std::move(timeline);
    detail_ = detail;
    if (detail == TimerDetail::parts) timeline_->count_cycles();
}

void StageTimer::reset() {
    FP8FLOW_CHECK(at_.span < 0, "stage timer reset inside stage {}",
                  spans_[static_cast<std::size_t>(at_.span)].name);
    spans_.clear();
    calls_.clear();
    if (timeline_ != nullptr) timeline_->reset();
}

int64_t StageTimer::take_arena_peak() {
    int64_t bytes = 0;
    for (Arena* arena : arenas_) bytes += arena->take_interval_peak();
    return bytes;
}

void StageTimer::open(StageLevel level, const char* name, const Launch& launch) {
    const int64_t peak = take_arena_peak();
    if (at_.span >= 0) {
        StageSpan& outer = spans_[static_cast<std::size_t>(at_.span)];
        outer.peak_bytes = std::max(outer.peak_bytes, peak);
    }
    StageSpan span{.name = name,
                   .direction = at_.direction,
                   .layer = at_.layer,
                   .parent = at_.span,
                   .level = level,
                   .role = launch.role,
                   .micro_batch = at_.micro_batch};
    timeline_->begin_range(at_.direction, name);
    span.first = timeline_->mark(launch.stream);
    at_.span = static_cast<int>(spans_.size());
    spans_.push_back(span);
}

void StageTimer::close(Stream stream) {
    StageSpan& span = spans_[static_cast<std::size_t>(at_.span)];
    span.last = timeline_->mark(stream);
    timeline_->end_range();
    span.peak_bytes = std::max(span.peak_bytes, take_arena_peak());
    at_.span = span.parent;
    if (at_.span < 0) return;
    StageSpan& outer = spans_[static_cast<std::size_t>(at_.span)];
    outer.peak_bytes = std::max(outer.peak_bytes, span.peak_bytes);
}

void StageTimer::resolve() {
    for (StageSpan& span : spans_) {
        span.begin = timeline_->seconds_between(spans_.front().first, span.first);
        span.seconds = timeline_->seconds_between(span.first, span.last);
        span.clock = timeline_->clock_between(span.first, span.last);
        span.own_seconds = span.seconds;
        // a child is never longer than what it lies in, but event times are rounded
        if (span.parent >= 0) {
            StageSpan& outer = spans_[static_cast<std::size_t>(span.parent)];
            if (outer.role == span.role) outer.own_seconds = std::max(0.0, outer.own_seconds - span.seconds);
        }
    }
}

void StageTimer::op_called(const OpCall& call) {
    if (at_.span >= 0 && !in_exchange_) calls_.push_back({call, at_.span});
}

void StageTimer::exchange_began(const OpCall& call) {
    op_called(call);
    in_exchange_ = true;
}

void StageTimer::exchange_ended(double wire_bytes) {
    in_exchange_ = false;
    if (at_.span >= 0) spans_[static_cast<std::size_t>(at_.span)].wire_bytes += wire_bytes;
}

StageName stage_of(const std::vector<StageSpan>& spans, int index) {
    const auto at = [&](int i) -> const StageSpan& { return spans[static_cast<std::size_t>(i)]; };
    StageName name{.part = "", .stage = at(index).name};
    const bool cast = std::strcmp(at(index).name, "cast") == 0;
    for (int i = index; i >= 0; i = at(i).parent) {
        if (at(i).level == StageLevel::part)
            name.part = at(i).name;
        else if (!cast)
            name.stage = at(i).name;
    }
    return name;
}

std::map<std::string, double> StageTimer::seconds() const {
    std::map<std::string, double> seconds;
    for (std::size_t i = 0; i < spans_.size(); ++i)
        seconds[std::string(spans_[i].direction) + "/" + stage_of(spans_, static_cast<int>(i)).stage] +=
            spans_[i].own_seconds;
    return seconds;
}

}  // namespace fp8flow
