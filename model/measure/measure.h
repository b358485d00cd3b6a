// SPDX-License-Identifier: MIT
// Meter: how every published time of this project is taken. Two regimes, because a GPU at its power limit
// slows down under load: burst, a few calls after a pause, and sustained, calls back to back for most of a
// second. Inputs come from memory, not from the cache, and a delay hides the launch times of
// the host. Read next: probe.h.
#pragma once

#include "kernels/core/timeline.h"
#include "kernels/probe.h"

#include <functional>
#include <memory>
#include <optional>

namespace fp8flow {

class Device;

struct MeasureOptions {
    int warmups = 5;
    int samples = 30;
    int calls_per_short_sample = 10;  // a sample is so many calls where one is shorter than kShortCall
    double idle_seconds = 0.8;        // pause before a burst
    double sustained_seconds = 0.8;   // 0: no sustained regime
};

constexpr double kShortCall = 0.4e-3;  // seconds

// Seconds of one call.
struct Timing {
    double median = 0, min = 0, p90 = 0;  // burst
    std::optional<double> sustained;      // mean of the second half; absent where the cache is flushed
    int samples = 0;                      // of the burst
};

// Calls that all ranks make together. barrier: waits until every rank has arrived. largest: the largest value
// of all ranks.
struct Together {
    std::function<void()> barrier;
    std::function<double(double)> largest;
};

struct Subject {
    // Queues one call on input and output set `set` of `num_sets`.
    std::function<void(int64_t set)> call;
    int64_t num_sets = 1;
    // The sets together fit into the cache: read other memory before each call.
    enum class Cache { cold_by_rotation, flush } cache = Cache::cold_by_rotation;
    const Together* together = nullptr;  // for what ranks do together
    enum class Regimes { all, burst } regimes = Regimes::all;
};

class Meter {
public:
    // The device and the probe outlive the meter.
    Meter(Device& device, Probe& probe, const MeasureOptions& options);
    ~Meter();
    Meter(const Meter&) = delete;
    Meter& operator=(const Meter&) = delete;

    Timing time(const Subject& subject);
    // The same without the pause and the sustained regime, for ceilings of memory traffic, which the power
    // limit does not touch.
    Timing time_burst(const Subject& subject);

    // How many sets of `set_bytes` a caller should rotate, and whether they suffice to keep the cache cold.
    int64_t sets_for(int64_t set_bytes) const;
    Subject::Cache cache_of(int64_t set_bytes, int64_t num_sets) const;
    Device& device() { return device_; }
    Probe& probe() { return probe_; }
    const MeasureOptions& options() const { return options_; }

private:
    Timing time(const Subject& subject, const MeasureOptions& options);
    void flush_cache();
    double sustained(const Subject& subject, double seconds, double estimate);

    Device& device_;
    Probe& probe_;
    MeasureOptions options_;
    std::unique_ptr<Timeline> timeline_;
    void* flush_buffer_ = nullptr;
};

}  // namespace fp8flow
