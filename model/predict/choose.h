// SPDX-License-Identifier: MIT
// Runs of one model over numbers of GPUs, recipes, expert-parallel sizes and micro-batches: the table that
// `plan` prints.
#pragma once

#include "model/base/provenance.h"
#include "model/predict/fit.h"
#include "model/predict/time.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::predict {

// What the configuration leaves open is searched.
struct Search {
    std::vector<int64_t> gpus;
    std::vector<Recipe> recipes;
    std::vector<int64_t> expert_parallel, micro_batches;  // sizes to try; empty: those of the configuration
    bool own_batch = false;  // the configuration states global_batch_size; else kSequences a GPU
};

inline constexpr int64_t kSequences = 8;  // of a GPU and step, where nothing else is said

struct Choice {
    Config config;
    int64_t gpus = 1;
    StepTime time;
    std::optional<StepTime> per_host;  // with rows once per (token, host), where experts span hosts
    Fit fit;
    bool best = false;  // of its number of GPUs and recipe: shown in detail; the fastest, if it fits

    bool fastest_that_fits() const { return best && fit.fits(); }

    const char* basis(const Gpu& gpu) const;  // how far the figures are from anything measured
};

// One run as it is configured.
Choice predicted(Config config, int64_t gpus, const Gpu& gpu);

// What a configuration does not set: sizes that it leaves to the search.
Search open_search(const Config& config, std::vector<int64_t> gpus, std::vector<Recipe> recipes);

// One choice for each (GPUs, recipe, expert-parallel size), with its best micro-batch. Throws Error(usage)
// where no combination is legal.
std::vector<Choice> choose(const Config& config, const Search& search, const Gpu& gpu);

std::string choices_text(const std::vector<Choice>& choices, const Gpu& gpu);
std::string choices_markdown(const std::vector<Choice>& choices, const Gpu& gpu);
std::string choices_json(const std::vector<Choice>& choices, const Gpu& gpu, const Provenance& provenance);
// Of one run, below the plan's own tables; and added to its JSON.
std::string prediction_text(const Choice& choice, const Gpu& gpu);
std::string with_prediction(const std::string& plan_json, const Choice& choice, const Gpu& gpu);
// SVG: memory of the best choices against the GPU's, and where their step's time goes.
std::string memory_picture(const std::string& model, const std::vector<Choice>& choices, const Gpu& gpu);
std::string time_picture(const std::string& model, const std::vector<Choice>& choices, const Gpu& gpu);
std::string plan_page(const std::string& model, const std::vector<Choice>& choices, const Gpu& gpu,
                      const Provenance& provenance);  // report.html
std::string statement(const Gpu& gpu);  // that it is a prediction, its calibration and its error

}  // namespace fp8flow::predict
