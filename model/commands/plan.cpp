// SPDX-License-Identifier: MIT
// `fp8flow plan`: what a run will need, without running it.
#include "model/plan/plan.h"
#include "kernels/core/tensor.h"
#include "model/base/output.h"
#include "model/base/provenance.h"
#include "model/commands/commands.h"
#include "model/config/config.h"

#include <fmt/core.h>

namespace fp8flow {

using namespace plan;

namespace {

// With --gpus, a global batch that so many ranks do not share evenly is planned as the next larger one that
// they do, and the output says so.
Config config_for(const RunOptions& options, std::optional<int64_t> gpus) {
    if (!gpus) return load_config(options.config_path, options.overrides, gpus, options.hf_config);
    Config config = load_config(options.config_path, options.overrides, std::nullopt, options.hf_config);
    TrainingSpec& training = config.training;
    constexpr int64_t kMost = int64_t{1} << 31;  // larger ones are refused where they are counted
    if (training.micro_batch_size > kMost || training.global_batch_size > kMost) return config;
    const int64_t share = training.micro_batch_size * *gpus;
    if (const int64_t batch = round_up(training.global_batch_size, share);
        batch != training.global_batch_size) {
        fmt::print("training.global_batch_size is {}, and {} GPUs take multiples of {}: planned with {}\n",
                   training.global_batch_size, *gpus, share, batch);
        training.global_batch_size = batch;
    }
    return config;
}

}  // namespace

int run_plan(const RunOptions& options, std::optional<int64_t> gpus,
             const std::optional<std::string>& json_name) {
    const Config config = config_for(options, gpus);
    const int64_t ranks = gpus.value_or(config.parallel.expert_model_parallel_size);
    check_config(config, ranks);
    const RunPlan plan = make_plan(config, ranks);
    fmt::print("{}", plan_text(config, plan));
    if (json_name) {
        const OutputFolder folder(config.output.out);
        folder.write_atomic(*json_name, plan_json(config, plan, make_provenance(options.command, {}, 1)));
        fmt::print("written: {}\n", folder.path_of(*json_name));
    }
    return 0;
}

}  // namespace fp8flow
