// SPDX-License-Identifier: MIT
// Names of runs and devices, as titles have them.
#include "model/report/titles.h"

#include "model/report/run_report.h"

#include <filesystem>

namespace fp8flow::report {

std::string run_name(const std::string& config_path, const std::string& hf_config) {
    std::filesystem::path path = config_path;
    if (config_path.empty()) path = std::filesystem::path(hf_config).parent_path().filename();
    const std::string stem = path.stem().string();
    return stem.empty() ? "a model" : stem;
}

std::string model_shape(const Config& config) {
    return fmt::format("{}, hidden {}, {} experts top-{} of width {}",
                       counted(config.model.num_layers, "layer"), config.model.hidden_size,
                       config.moe.num_experts, config.moe.moe_router_topk, config.moe.moe_ffn_hidden_size);
}

std::string device_count(const Provenance& provenance) {
    return provenance.gpus > 0 ? counted(provenance.gpus, "GPU") : counted(provenance.ranks, "rank");
}

std::string device_name(const Provenance& provenance) {
    if (provenance.gpus > 0) return provenance.machine.gpu;
    return provenance.machine.cpu.empty() ? "CPU" : provenance.machine.cpu;
}

}  // namespace fp8flow::report
