// SPDX-License-Identifier: MIT
// The protocol: warm-up, pause, queued samples, then calls back to back.
#include "model/measure/measure.h"

#include "kernels/core/error.h"
#include "kernels/core/random_fill.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace fp8flow {

namespace {

constexpr int64_t kMostSets = 64;
constexpr int64_t kCacheMultiple = 3;                // bytes between two uses of a set, in units of the cache
constexpr int64_t kFlushBytes = int64_t{256} << 20;  // over four times the L2 of an H200
constexpr double kLongestDelay = 0.05;
constexpr double kQueueingOfSample = 1e-5;  // marks and flushing, on the host
constexpr double kMeetDelay = 50e-6;        // covers how far ranks come apart after they have met

void pause(double seconds) {
    if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace

Meter::Meter(Device& device, Probe& probe, const MeasureOptions& options)
    : device_(device), probe_(probe), options_(options), timeline_(device.make_timeline()) {
    FP8FLOW_CHECK(options.samples >= 1 && options.warmups >= 0 && options.calls_per_short_sample >= 1,
                  "{} samples, {} warm-ups, {} calls", options.samples, options.warmups,
                  options.calls_per_short_sample);
}

Meter::~Meter() {
    if (flush_buffer_ != nullptr) device_.free(flush_buffer_);
}

int64_t Meter::sets_for(int64_t set_bytes) const {
    const int64_t wanted = kCacheMultiple * probe_.cache_bytes();
    if (wanted == 0) return 1;
    // one more than fills it, so that a set is evicted before its turn comes again
    return std::clamp<int64_t>(ceil_div(wanted, std::max<int64_t>(set_bytes, 1)) + 1, 2, kMostSets);
}

Subject::Cache Meter::cache_of(int64_t set_bytes, int64_t num_sets) const {
    const bool fits = (num_sets - 1) * set_bytes < kCacheMultiple * probe_.cache_bytes();
    return fits ? Subject::Cache::flush : Subject::Cache::cold_by_rotation;
}

// Reads only: reads evict without leaving dirty lines that the next call would have to write back.
void Meter::flush_cache() {
    if (flush_buffer_ == nullptr) {
        flush_buffer_ = device_.allocate(kFlushBytes);
        fill_random(device_, make_view(flush_buffer_, DType::f32, {kFlushBytes / 4}));
    }
    probe_.stream_traffic({.from = flush_buffer_, .bytes_read = kFlushBytes});
}

Timing Meter::time(const Subject& subject) { return time(subject, options_); }

Timing Meter::time_burst(const Subject& subject) {
    MeasureOptions burst = options_;
    burst.idle_seconds = burst.sustained_seconds = 0;
    return time(subject, burst);
}

Timing Meter::time(const Subject& subject, const MeasureOptions& options) {
    const bool flush = subject.cache == Subject::Cache::flush && probe_.cache_bytes() > 0;
    int64_t turn = 0;
    const auto call = [&] { subject.call(turn++ % subject.num_sets); };

    call();  // modules are loaded, algorithms chosen, workspaces made
    if (flush) flush_cache();
    device_.synchronize();
    constexpr int kTrials = 3;
    timeline_->reset();
    probe_.delay(1e-3);
    const double before = clock_seconds();
    const int64_t first = timeline_->mark({});
    for (int i = 0; i < kTrials; ++i) call();
    const int64_t last = timeline_->mark({});
    const double queueing = (clock_seconds() - before) / kTrials;
    double estimate = timeline_->seconds_between(first, last) / kTrials;
    if (subject.together != nullptr) estimate = subject.together->largest(estimate);

    pause(options.idle_seconds);
    for (int i = 0; i < options.warmups; ++i) call();
    const bool alone = flush || subject.together != nullptr;  // each call is a sample
    const int calls = !alone && estimate < kShortCall ? options.calls_per_short_sample : 1;
    std::vector<std::pair<int64_t, int64_t>> marks;
    timeline_->reset();
    if (subject.together == nullptr)
        probe_.delay(std::min(kLongestDelay, kQueueingOfSample * (options.samples + 10) +
                                                 1.5 * queueing * calls * options.samples));
    for (int sample = 0; sample < options.samples; ++sample) {
        if (flush) flush_cache();
        if (subject.together != nullptr) {
            device_.synchronize();
            subject.together->barrier();
            probe_.delay(kMeetDelay);
        }
        const int64_t start = timeline_->mark({});
        for (int i = 0; i < calls; ++i) call();
        marks.emplace_back(start, timeline_->mark({}));
    }
    device_.synchronize();

    std::vector<double> seconds;
    seconds.reserve(marks.size());
    for (const auto& [start, end] : marks) seconds.push_back(timeline_->seconds_between(start, end) / calls);
    std::ranges::sort(seconds);
    const auto at = [&](double share) {
        return seconds[static_cast<std::size_t>(share * static_cast<double>(seconds.size() - 1) + 0.5)];
    };
    Timing timing{.median = at(0.5), .min = seconds.front(), .p90 = at(0.9), .samples = options.samples};
    if (options.sustained_seconds > 0 && subject.regimes == Subject::Regimes::all && !flush)
        timing.sustained = sustained(subject, options.sustained_seconds, std::max(timing.median, estimate));
    return timing;
}

// Calls back to back for about `seconds`; the mean of the second half, after clocks have settled. All ranks
// make the same number of calls.
double Meter::sustained(const Subject& subject, double seconds, double estimate) {
    constexpr double kMostCalls = 100000;
    if (subject.together != nullptr) estimate = subject.together->largest(estimate);
    const auto calls = static_cast<int64_t>(std::clamp(seconds / std::max(estimate, 1e-9), 4.0, kMostCalls));
    const int64_t half = calls / 2;
    timeline_->reset();
    int64_t middle = 0;
    for (int64_t i = 0; i < calls; ++i) {
        if (i == half) middle = timeline_->mark({});
        subject.call(i % subject.num_sets);
    }
    const double total = timeline_->seconds_between(middle, timeline_->mark({}));
    return total / static_cast<double>(calls - half);
}

}  // namespace fp8flow
