// SPDX-License-Identifier: MIT
// A kind of GPU, for predictions: its datasheet, and the shares of its rates that profiles measured.
// scripts/calibrate.py makes the shares.
#pragma once

#include "model/predict/stages.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow::predict {

// Rates of the datasheet; FLOPs per clock of all SMs, so that a clock can be stated.
struct Datasheet {
    std::string gpu;
    double memory_bytes = 0;
    double memory_rate = 0;                        // bytes per second
    double bf16_per_clock = 0, fp8_per_clock = 0;  // dense FLOPs
    double boost_clock = 0;                        // Hz; MFU is against bf16_per_clock at it
    double clock = 0;                              // Hz, under load; 0: the calibration's
    double peer_rate = 0;                          // bytes per second to other GPUs of the host
    double network_rate = 0;                       // of the GPU's own network adapter
    bool network_given = false;                    // by --network
    int64_t gpus_per_host = 8;

    double peak() const { return bf16_per_clock * boost_clock; }
};

// Of one recipe. Shares are of the datasheet's rates, by "part/stage/direction".
struct RecipeShares {
    double clock = 0;              // Hz, in the profile
    double whole_over_stages = 1;  // a layer without marks between its stages over the sum of its stages
    std::map<std::string, double> shares;
};

struct CoreAttention {
    int64_t kv_channels = 0;
    double forward = 0, backward = 0;  // shares of the BF16 rate
};

struct CheckSummary {
    double mean_layer = 0, worst_layer = 0, mean_step = 0, worst_step = 0;  // absolute relative errors
    int64_t runs = 0, gpus = 1;  // gpus: of the largest run of all models
    bool unseen = false;         // of models that gave the calibration no number
};

// Step times on several hosts that were parts of one machine, over their prediction.
struct HostRuns {
    double least = 1, most = 1;
    int64_t runs = 0;
};

struct Calibration {
    std::string gpu, source, commit, date;  // the profile's file name, commit and date
    double launch_seconds = 0, exchange_seconds = 0;
    double host_seconds = 0;  // of the host, for each launch; 0: not known
    double late_share = 0;    // waiting for slower ranks in combine, as a share of the experts' time
    std::map<std::string, RecipeShares> recipes = {};
    std::vector<CoreAttention> core_attention = {};
    std::optional<CheckSummary> check = {};
    HostRuns host_runs = {};
};

struct Gpu {
    Datasheet sheet;
    Calibration calibration;
    bool calibrated = false;  // by a profile of this kind; otherwise the shares are another kind's
};

std::vector<std::string> known_gpus();
// A name of known_gpus(), or a file: a kind like those in configs/gpus, or a calibration alone. Throws
// Error(usage).
Gpu load_gpu(const std::string& name_or_file);
// Of the name that a device reports: "NVIDIA H200"; absent: not a kind that ships.
std::optional<std::string> kind_of_device(const std::string& device);

}  // namespace fp8flow::predict
