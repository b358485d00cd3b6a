// SPDX-License-Identifier: MIT
// Seconds of a step on a kind of GPU. A stage takes t = launches + sqrt(t_flops^2 + t_bytes^2), at the shares
// of a calibration. Rows on the wire follow the topology: NVLink inside a host, one network adapter per GPU
// between hosts. Read next: stages.h, gpu.h.
#pragma once

#include "model/predict/gpu.h"

#include <vector>

namespace fp8flow::predict {

// How rows cross hosts. flex and alltoall: one row for each (token, rank) through NCCL, the host stops twice.
// hierarchical: one row for each (token, host), which NVLink fans out. The plans of the two levels and the
// copies between them are not counted.
inline bool one_row_per_host(const Config& config) {
    return config.parallel.moe_token_dispatcher_type == TokenDispatcher::hierarchical;
}

struct StageTime {
    Work work;           // of one run
    double seconds = 0;  // of one run
    double wire = 0;     // of them on the wire
    double runs = 1;     // in a step
};

struct StepTime {
    std::vector<StageTime> stages;
    double layer = 0;  // one MoE layer and micro-batch, forward and backward
    double step = 0;
    double launches = 0;      // of a step
    bool host_bound = false;  // launching it takes longer than computing it
    double wire = 0;          // of a step, dispatch, combine and routing, hidden or not
    double exposed = 0;       // of a step, after what the schedule hides
    double clock = 0;
    double useful_flops = 0;  // of a step and GPU, as a model's FLOPs are counted
    double tokens = 0;        // of a step, all GPUs
    // Between hosts: the range of a step, for half and for twice this network. 0: within one host.
    double least = 0, most = 0, network = 0;

    bool extrapolated() const { return most > 0; }
    double tokens_per_second() const { return tokens / step; }
    double mfu(const Datasheet& sheet) const { return useful_flops / step / sheet.peak(); }
};

// What the formulas leave out of this configuration; empty: nothing. Such a run is predicted nevertheless:
// `plan` prints a note, and `scripts/calibrate.py --check` lists it separately.
std::string not_covered(const Config& config);
// True if the recipes of all layers have formulas and shares.
bool can_predict(const Config& config, const Gpu& gpu);
StepTime predict_step(const Config& config, int64_t gpus, const Gpu& gpu);

// The parts, for the JSON and tests. Seconds at full shares, without launches and wire.
double roofline_seconds(const Work& work, const Datasheet& sheet, double clock);
std::string key_of(const Work& work);  // "part/stage/direction"

}  // namespace fp8flow::predict
