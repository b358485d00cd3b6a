// SPDX-License-Identifier: MIT
// What every stage of a step has to do, as closed formulas of the configuration: bytes of device memory,
// FLOPs, launches, bytes to other ranks. The same counts that `profile` takes from the calls of a real step
// (kernels/ops/checks_*.cpp), under the same names, so that a profile can be compared row by row.
#pragma once

#include "model/config/config.h"
#include "model/plan/plan.h"

#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::predict {

constexpr double kPlain = 2, kWord = 4;  // bytes of a BF16 and of a 32-bit element

// What crosses ranks in a stage. dispatch: rows go out while others are written; combine: sums are sent, then
// added; reduction: gradients over replicas.
enum class Wire : uint8_t { none, dispatch, combine, dense_reduction, expert_reduction };

// One stage in one direction, of one layer and micro-batch, or of one micro-batch, or of one step.
struct Work {
    std::string part, stage, direction;
    double launches = 0;
    double bytes = 0;
    double bf16_flops = 0, fp8_flops = 0;  // of GEMMs
    double bf16_idle = 0, fp8_idle = 0;    // FLOPs that SMs without a tile, and tiles past an edge, leave out
    Wire wire = Wire::none;
    double wire_bytes = 0;  // that this rank sends, whatever the way

    // What a rank does with the rows that it received, between a dispatch and a combine.
    bool of_experts() const {
        return part == "moe layer" && (stage.starts_with("fc") || stage == "swiglu" || stage == "transpose");
    }
};

// True for the recipes that the formulas know: bf16, fp8_blockwise, fp8_flow without an optimisation off.
bool knows(const PrecisionSpec& precision);

// Of the layers that have a weight ("moe.experts.linear_fc1"), the share that trains it (training.freeze).
double trained_share(const Config& config, std::string_view weight);

struct LayerWork {
    std::vector<Work> moe, attention, dense;
};
// accumulates: the share of a step's micro-batches that add to a gradient, (n - 1) / n of n.
LayerWork layer_work(const Config& config, const PrecisionSpec& precision, double accumulates);
// Embedding, final norm and head, of one micro-batch.
std::vector<Work> ends_work(const Config& config, double accumulates);
// Gradient reduction and optimizer, of one step.
std::vector<Work> update_work(const Config& config, int64_t gpus);

}  // namespace fp8flow::predict
