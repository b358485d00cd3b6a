// SPDX-License-Identifier: MIT
// Measuring cases: builds the rotating sets of one case's tensors, times its calls, counts its launches, and
// compares with the ceilings. Read next: case.h, model/measure/measure.h, report.h.
#pragma once

#include "model/bench/cases/case.h"
#include "model/measure/machine.h"

#include <memory>
#include <optional>
#include <string>

namespace fp8flow::bench {

// One measured operation; times in seconds, of the slowest rank.
struct Row {
    std::string operation, shape, short_shape;
    Timing timing;
    Work work;
    std::optional<double> ceiling_seconds;  // what the same work takes at the measured ceilings
    std::string ceiling;                    // that rate, as text
    std::string baseline;                   // another implementation, timed in this run
    std::optional<Timing> baseline_timing;
    std::string baseline_result;  // of a plugin: "equal", how its result differs, or why it was left out
    std::string regime;
    std::optional<int64_t> launches;  // kernels, fills and copies of one call
    int64_t tensor_bytes = 0;         // of all tensors of one call, intermediates included
};

class Runner {
public:
    Runner(const BackendChoice& choice, ProcessGroup& world, const MeasureOptions& options);
    // From now on the library's kernels are timed in the same run as ours.
    void add_plugin(const std::string& path);
    const Plugin* plugin() const { return plugin_.get(); }

    // Collective over the world. Throws Error(usage) for shapes that the operation refuses.
    Row measure(const Case& what, const Shape& shape, Subject::Regimes regimes = Subject::Regimes::all);
    // One call of the case instead of measurements, recorded by an attached profiler. One rank. Returns the
    // number of kernels, 0 where they are not counted.
    int64_t capture(const Case& what, const Shape& shape);
    std::string device_name() { return machine_.probe().device_name(); }
    // The tensors of the case as a plugin gets them; runs nothing.
    std::string describe(const Case& what, const Shape& shape);
    // Rates between the GPUs, where a row was compared with them; else empty.
    std::string wire_note() const;

private:
    struct Sets;
    // Makes one more set of tensors. Throws Error(usage) for shapes that the operation refuses.
    void build(Sets& sets, Machine& machine, const Case& what, const Shape& shape);
    Row timed(const Case& what, const Shape& shape, Subject::Regimes regimes);
    bool check_baseline(Row& row, const Call& call, const Launch& launch);
    void add_ceiling(Row& row, const Case& what);
    double largest(double seconds) const { return machine_.together().largest(seconds); }

    BackendChoice choice_;
    std::unique_ptr<Ops> ops_;
    ProcessGroup& world_;
    MachineCeilings machine_;
    RandomFiller filler_;
    std::unique_ptr<Plugin> plugin_;
};

}  // namespace fp8flow::bench
