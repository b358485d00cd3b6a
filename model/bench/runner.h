// SPDX-License-Identifier: MIT
// Measuring cases: builds the rotating sets of one case's tensors, times its calls, counts its launches, and
// compares with the ceilings. Read next: case.h, kernels/measure.h, report.h.
#pragma once

#include "kernels/ceilings.h"
#include "model/bench/bars.h"
#include "model/bench/cases/case.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow::bench {

// One measured operation; times in seconds, of the slowest rank.
struct Row {
    std::string operation, shape, short_shape;
    std::string backend;  // of a product that was measured on several
    Timing timing;
    Work work;
    std::optional<double> ceiling_seconds;  // what the same work takes at the measured ceilings
    std::string ceiling;                    // what that is
    std::string peer;                       // who else was measured on this shape
    std::optional<double> peer_seconds;
    std::string peer_gpu, peer_source;  // where, and who says so
    bool peer_comparable = false;       // on such a GPU
    std::optional<double> nmse;         // of a product, on a sample
    std::string regime;
    std::optional<int64_t> launches;  // kernels, fills and copies of one call
    int64_t tensor_bytes = 0;       // of all tensors of one call, also of what only stands between its passes
    std::string family;             // what the row shows; empty: baselines, and operations without a bar
    std::optional<Bar> bar;         // that it is held to
    std::optional<bool> holds_bar;  // see judge
    std::string missed;             // of the bar: share, time, launches, peer
};

class Runner {
public:
    // One Ops per kind of matrix product that is to be measured, the first being the program's own.
    struct Backend {
        std::string name;
        std::unique_ptr<Ops> ops;
    };
    Runner(std::vector<Backend> backends, const BackendChoice& choice, ProcessGroup& world,
           const MeasureOptions& options);
    ~Runner();

    // Collective over the world. Throws Error(usage) for shapes that the operation refuses.
    std::vector<Row> measure(const Case& what, const Shape& shape,
                             Subject::Regimes regimes = Subject::Regimes::all);
    // One call of the case instead of measurements, recorded by a profiler that listens; of a product the
    // program's own. One rank. Returns how many kernels that was, 0 where they are not counted.
    int64_t capture(const Case& what, const Shape& shape);
    std::string device_name() const { return probe_->device_name(); }
    // Rates between the GPUs, where a row was compared with them; else empty.
    std::string wire_note() const;

private:
    struct Sets;
    // Makes one more set of tensors. Throws Error(usage) for shapes that the operation refuses.
    void build(Sets& sets, Machine& machine, const Case& what, const Shape& shape);
    Row measure_on(Ops& ops, const Case& what, const Shape& shape, Subject::Regimes regimes);
    void add_ceiling(Row& row, const Case& what);
    double largest(double seconds) const;
    const PeerRates& peer_rates();  // zero where they cannot be measured
    Messages* messages();

    std::vector<Backend> backends_;
    BackendChoice choice_;
    ProcessGroup& world_;
    std::unique_ptr<Probe> probe_;
    std::unique_ptr<Ops> dense_;  // cuBLASLt's products, for the ceiling
    std::unique_ptr<Meter> meter_;
    std::unique_ptr<Ceilings> ceilings_;
    RandomFiller filler_;
    Together together_;
    std::optional<PeerRates> peers_;  // once asked for
    std::string no_peers_;            // why they are zero
    struct Wire {
        std::unique_ptr<Messages> messages;
    };
    std::optional<Wire> wire_;  // once asked for
};

}  // namespace fp8flow::bench
