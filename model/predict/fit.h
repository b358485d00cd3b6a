// SPDX-License-Identifier: MIT
// Whether a run fits a GPU, what takes its memory, and which keys make it fit.
#pragma once

#include "model/plan/plan.h"
#include "model/predict/gpu.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::predict {

// Share of the driver's context, libraries, the communicator and fragmentation, which plan does not count.
inline constexpr double kOutsideShare = 0.05;
// Rows per expert of a weight gradient from which on its MMAs hide the traffic of the gradient: 2 x 2048
// FLOPs per element take as long as 11 bytes of memory traffic, and to read and write it is 8.
inline constexpr double kRowsOfJoined = 2048;

struct Consumer {
    plan::MemoryItem item;
    std::string key;  // what shrinks it
};

struct Fit {
    double needed = 0, usable = 0;  // bytes
    std::vector<plan::MemoryItem> items;
    std::vector<Consumer> largest = {};  // five at most, the largest first
    // Settings that make it fit, cheapest first; empty if it fits, or if none here is enough.
    std::vector<std::string> settings = {};
    bool fits() const { return needed <= usable; }
};

// host: the rank uses its host's memory, which holds the tokens of its steps too (the reference backend).
enum class Where : uint8_t { gpu, host };
Fit fit_of(const Config& config, int64_t gpus, double usable, Where where = Where::gpu);
inline double usable_bytes(double memory_bytes) { return (1 - kOutsideShare) * memory_bytes; }
inline double usable_bytes(const Datasheet& sheet) { return usable_bytes(sheet.memory_bytes); }
Fit fit_of(const Config& config, int64_t gpus, const Datasheet& sheet);
// "fits", "with a, b", or "no".
std::string fit_text(const Fit& fit);
std::string consumers_text(const Fit& fit, const Datasheet& sheet);  // lines; empty if it fits

// The memory of a rank with each micro-batch's weight gradients alone and with those of several joined
// (moe_wgrad_micro_batches). Absent: a rank has one micro-batch per step, there is no MoE layer, or the
// configuration is not legal with them or without.
struct JoinedMemory {
    std::vector<plan::MemoryItem> single, joined;
    int64_t moe_layers = 0;
    double cost() const { return plan::sum_of(joined) - plan::sum_of(single); }  // operands that wait
    double cost_per_layer() const { return cost() / f64(moe_layers); }
};
std::optional<JoinedMemory> joined_memory(const Config& config, int64_t ranks, int64_t micro_batches);

// The number of micro-batches to join for their weight gradients if memory does not matter: until a GEMM has
// kRowsOfJoined rows per expert with even routing, at least two. As few GEMMs as possible, as equal as
// possible: 9 micro-batches of at most 8 are 5 and 4.
int64_t useful_joined(const Config& config, int64_t ranks);

// Decides precision.moe_wgrad_micro_batches: auto. More than one needs a step with several micro-batches on a
// rank, a MoE layer, a recipe and a schedule that allow it, and memory: as many of useful_joined as fit. The
// decision depends on the configuration, the number of ranks and `usable` only: the bytes of the smallest
// GPU, not what is free there, so that a run has the same bits again. Returns a line with the decision and
// its cost; empty where the key was set, or where there is nothing to join.
std::string decide_joined(Config& config, int64_t ranks, double usable);

}  // namespace fp8flow::predict
