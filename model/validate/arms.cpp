// SPDX-License-Identifier: MIT
// One arm per recipe, one per switch of the flow, one for the noise floor.
#include "model/validate/arms.h"

#include "kernels/core/error.h"

#include <algorithm>
#include <functional>

namespace fp8flow::validate {

namespace {

struct Switch {
    const char* name;
    std::function<void(Config&)> turn;
};

// Names as in the artefact of FP8-Flow-MoE where it has them.
const std::vector<Switch>& flow_switches() {
    static const std::vector<Switch> switches = {
        {"no_quantize_first", [](Config& c) { c.precision.moe_quantize_before_dispatch = false; }},
        {"double_quant",
         [](Config& c) {
             c.precision.moe_scaling_aware_transpose = false;
             c.precision.scale_format = ScaleFormat::fp32;
         }},
        {"double_quant pow2", [](Config& c) { c.precision.moe_scaling_aware_transpose = false; }},
        {"no_perm_pad", [](Config& c) { c.precision.moe_permute_padding_for_fp8 = false; }},
        {"no_act_fusion", [](Config& c) { c.precision.moe_act_quantize_fusion = false; }},
        {"no_norm_fusion", [](Config& c) { c.precision.moe_norm_quantize_fusion = false; }},
        {"+ moe_expert",
         [](Config& c) {
             c.recompute = {};
             c.recompute.recompute_granularity = RecomputeGranularity::selective;
             c.recompute.moe_expert = true;
         }},
    };
    return switches;
}

void check_same_run(const Arm& base, const Arm& arm) {
    for (const std::string& line : diff_configs(base.config, arm.config)) {
        const bool allowed = line.starts_with("precision.") || line.starts_with("recompute.") ||
                             line.starts_with("schedule.") || line.starts_with("training.main_grads_dtype") ||
                             line.starts_with("training.exp_avg") ||
                             line.starts_with("moe.moe_row_alignment");
        require(allowed, ExitCode::usage, "arms must differ in the recipe alone; {} and {} differ in {}",
                base.name, arm.name, line);
    }
}

void add_schedules(std::vector<Arm>& arms, const std::string& name, const Config& config, int ranks) {
    const TrainingSpec& training = config.training;
    const auto add = [&](const std::string& what, const ScheduleSpec& schedule) {
        Config own = config;
        own.schedule = schedule;
        own.schedule.wire_sms = config.schedule.wire_sms;
        arms.push_back({name + what, own});
    };
    add("", {});
    add(" + wgrad", {.delay_wgrad_compute = true});
    add(" + shared", {.moe_shared_expert_overlap = true});
    add(" + shared + wgrad", {.moe_shared_expert_overlap = true, .delay_wgrad_compute = true});
    if (ranks > 1) add(" + reduce", {.overlap_grad_reduce = true});
    const bool several_micro_batches = training.global_batch_size > training.micro_batch_size * ranks;
    if (several_micro_batches) {
        add(" + turns", {.overlap_moe_expert_parallel_comm = true});
        arms.back().config.precision.moe_wgrad_micro_batches = 1;
    }
    add(" + graph", {.cuda_graph_impl = CudaGraphImpl::full_iteration});
}

void add_state_dtypes(std::vector<Arm>& arms, const std::string& name, const Config& config) {
    const auto add = [&](const char* what, StateDtype gradients, StateDtype moments) {
        arms.push_back({name + what, config, Arithmetic::stated, *what != '\0' ? name : ""});
        arms.back().config.training.state = {
            .main_grads_dtype = gradients, .exp_avg_dtype = moments, .exp_avg_sq_dtype = moments};
    };
    add("", StateDtype::fp32, StateDtype::fp32);
    add(" + bf16 gradients", StateDtype::bf16, StateDtype::fp32);
    add(" + bf16 state", StateDtype::bf16, StateDtype::bf16);
}

}  // namespace

std::vector<Arm> recipe_arms(const Config& config, const std::vector<Recipe>& recipes, Ablation ablation,
                             int ranks) {
    std::vector<Arm> arms;
    const auto add = [&](const Config& own) {
        const std::string name(recipe_name(own.precision));
        if (ablation == Ablation::schedules)
            add_schedules(arms, name, own, ranks);
        else if (ablation == Ablation::state_dtypes)
            add_state_dtypes(arms, name, own);
        else
            arms.push_back({name, own});
    };
    for (Recipe recipe : recipes) add(with_recipe(config, recipe));
    if (!config.precision.flow.empty()) add(config);
    if (ablation == Ablation::flow_switches) {
        const Config flow = with_recipe(config, Recipe::fp8_flow);
        const std::string name(recipe_name(Recipe::fp8_flow));
        const bool runs = std::ranges::find(arms, name, &Arm::name) != arms.end();
        for (const Switch& one : flow_switches()) {
            arms.push_back({one.name, flow, Arithmetic::stated, runs ? name : ""});
            one.turn(arms.back().config);
        }
    }
    for (const Arm& arm : arms) check_same_run(arms.front(), arm);
    return arms;
}

std::vector<Arm> make_arms(const Config& config, Ablation ablation, int ranks) {
    std::vector<Recipe> recipes = {Recipe::bf16};
    for (Recipe recipe : config.validate.recipes)
        if (std::find(recipes.begin(), recipes.end(), recipe) == recipes.end()) recipes.push_back(recipe);
    std::vector<Arm> arms;
    if (ablation == Ablation::state_dtypes && recipes.size() > 1) {  // the baseline has FP32 state alone
        arms = {{std::string(recipe_name(recipes.front())), with_recipe(config, recipes.front())}};
        recipes.erase(recipes.begin());
    }
    for (Arm& arm : recipe_arms(config, recipes, ablation, ranks)) {
        arms.push_back(std::move(arm));
        check_same_run(arms.front(), arms.back());
    }
    if (config.validate.control_arm)
        arms.push_back({kControlArm, arms.front().config, Arithmetic::alternative});
    for (Arm& arm : arms) arm.keys = diff_configs(arms.front().config, arm.config);
    return arms;
}

std::vector<Config> configs_of(const std::vector<Arm>& arms) {
    std::vector<Config> configs;
    configs.reserve(arms.size());
    for (const Arm& arm : arms) configs.push_back(arm.config);
    return configs;
}

}  // namespace fp8flow::validate
