// SPDX-License-Identifier: MIT
// `fp8flow plan`: what a run will need, without running it.
#include "model/plan/plan.h"
#include "model/base/output.h"
#include "model/base/provenance.h"
#include "model/commands/commands.h"
#include "model/config/config.h"

#include <fmt/core.h>

namespace fp8flow {

using namespace plan;

int run_plan(const RunOptions& options, std::optional<int64_t> gpus,
             const std::optional<std::string>& json_name) {
    const Config config = load_config(options.config_path, options.overrides, gpus, options.hf_config);
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
