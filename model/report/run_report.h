// SPDX-License-Identifier: MIT
// Texts of a run: its start, its memory, its data, its names.
#pragma once

#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/report/log.h"
#include "model/train/trainer.h"

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::report {

// Ranks, model, recipe, wire and configuration, before the run allocates memory.
void report_start(RunLog& log, const Config& config, const BackendChoice& backend, int world_size);
// The data, the epochs of this run, and warnings.
void report_data(RunLog& log, const Config& config, const data::TokenSource& data);
// Warnings if the data is not what the configuration names, too small for the run, or divided unevenly.
std::vector<std::string> data_warnings(const Config& config, const data::TokenSource& data);

// A line on the parameters that are not trained (training.freeze); empty: all are.
std::string frozen_text(const ParameterStore& parameters);

// Bytes of one rank by category, at the peak of a step.
struct MemoryUse {
    std::map<std::string, int64_t> parameters;  // weights, their copies, masters, moments, gradients
    // Kept from forward to backward; routed rows count with their reserved capacity.
    std::map<std::string, int64_t> saved;
    Trainer::MemorySums saved_sums, workspace;  // Trainer::saved_memory, workspace_memory
    Trainer::Rows capacity, most_wanted;        // routed rows
    int64_t activations = 0;                    // saved + workspace
};
int64_t sum_of(const std::map<std::string, int64_t>& bytes);
MemoryUse memory_of(const Trainer& trainer, int64_t activations);
std::string memory_text(const MemoryUse& memory);  // the sums of memory_json
nlohmann::json memory_json(const MemoryUse& memory);

// The cost of steps that were repeated because routed rows did not fit.
struct RedoneSteps {
    int64_t observed = 0, redone = 0, times = 0;  // steps; repeated ones; repetitions
    double seconds = 0, lost_seconds = 0;         // of the observed steps; lost by repeating

    void add(const StepResult& result);
};
std::string redone_text(const RedoneSteps& steps);
nlohmann::json redone_json(const RedoneSteps& steps);
// The new capacity for rows after a step that was repeated.
std::string capacity_text(const Config& config, const StepResult& result, const Trainer::Rows& capacity);

// config.yaml of a run: its command line as a comment, then every key.
std::string run_config_yaml(const Config& config, const Provenance& provenance);
// "quickstart" of configs/quickstart.yaml; the folder of a run's config.yaml, or of the Hugging Face
// config.json if there is no other.
std::string run_name(const std::string& config_path, const std::string& hf_config);
// "2 layers, hidden 256, 8 experts top-4 of width 256"
std::string model_shape(const Config& config);
// "4 GPUs" (NVIDIA H200), or "2 ranks" on the host's processor.
std::string device_count(const Provenance& provenance);
std::string device_name(const Provenance& provenance);

// "1 rank", "2 ranks"
std::string counted(int64_t count, std::string_view noun);
// "held-out loss 2.10 nats = 3.03 bits per byte"
std::string evaluation_text(const Config& config, double nats);

}  // namespace fp8flow::report
