// SPDX-License-Identifier: MIT
// Runs of one model on several numbers of GPUs, with several recipes, expert-parallel sizes and
// micro-batches: the table that `plan` prints.
#pragma once

#include "model/base/provenance.h"
#include "model/predict/fit.h"
#include "model/predict/time.h"

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::predict {

// What the configuration leaves open is searched.
struct Search {
    std::vector<int64_t> gpus;
    std::vector<Recipe> recipes;
    std::vector<int64_t> expert_parallel, micro_batches;  // sizes to try; empty: those of the configuration
    bool own_batch = false;  // the configuration states global_batch_size; else kSequences per GPU
};

inline constexpr int64_t kSequences = 8;  // per GPU and step, if the configuration does not set the batch

struct Choice {
    Config config;
    int64_t gpus = 1;
    StepTime time;
    std::optional<StepTime> per_host;  // if experts span hosts: with one row per (token, host)
    Fit fit;
    bool best = false;  // the fastest that fits, of its number of GPUs and recipe; if none fits, the nearest

    bool fastest_that_fits() const { return best && fit.fits(); }

    const char* basis(const Gpu& gpu) const;  // how far the figures are from anything measured
};

// What moe_wgrad_micro_batches changes: weight gradients of each micro-batch, or of several in one GEMM,
// those of the configuration or useful_joined.
struct Joining {
    bool used = false;
    int64_t micro_batches = 2;
    double layer_single = 0, layer_joined = 0;  // seconds of a MoE layer and micro-batch
    double bytes_single = 0, bytes_joined = 0;  // of a MoE layer: saved activations, rows that wait
};
// Absent: a step has one micro-batch, or the configuration refuses the key.
std::optional<Joining> joining_of(const Config& config, int64_t gpus, const Gpu& gpu);

// One run as it is configured.
Choice predicted(Config config, int64_t gpus, const Gpu& gpu);

// Searches the sizes that the configuration does not set.
Search open_search(const Config& config, std::vector<int64_t> gpus, std::vector<Recipe> recipes);

// One choice for each (GPUs, recipe, expert-parallel size), with the best micro-batch. Throws Error(usage) if
// no combination is legal.
std::vector<Choice> choose(const Config& config, const Search& search, const Gpu& gpu);

std::string choices_text(const std::vector<Choice>& choices, const Gpu& gpu);
std::string choices_markdown(const std::vector<Choice>& choices, const Gpu& gpu);
nlohmann::ordered_json choices_json(const std::vector<Choice>& choices, const Gpu& gpu,
                                    const Provenance& provenance);
// Of one run: printed above the tables of the plan, and "prediction" in its JSON.
std::string prediction_text(const Choice& choice, const Gpu& gpu);
nlohmann::ordered_json prediction_json(const Choice& choice, const Gpu& gpu);
std::string plan_page(const std::string& model, std::vector<Choice> choices, const Gpu& gpu,
                      const Provenance& provenance);  // report.html, of the best choices
std::string statement(const Gpu& gpu);  // "A prediction for the H200, calibrated ...", and its error

}  // namespace fp8flow::predict
