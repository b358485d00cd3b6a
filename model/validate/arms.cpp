// SPDX-License-Identifier: MIT
// Makes the arms, and checks that they may be compared.
#include "model/validate/arms.h"

#include "kernels/core/error.h"
#include "layers/flows/flow.h"
#include "model/config/builders.h"
#include "model/config/check.h"
#include "model/config/fields.h"
#include "model/safetensors/input.h"
#include "model/validate/run_file.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace fp8flow::validate {

using Names = std::vector<std::string>;

namespace {

// Name and keys. Names as in the artefact of FP8-Flow-MoE where it has them.
constexpr std::pair<const char*, const char*> kFlowSwitches[] = {
    {"no_quantize_first", "moe_quantize_before_dispatch=false"},
    {"double_quant", "moe_scaling_aware_transpose=false,scale_format=fp32"},
    {"double_quant pow2", "moe_scaling_aware_transpose=false"},
    {"no_perm_pad", "moe_permute_padding_for_fp8=false"},
    {"no_act_fusion", "moe_act_quantize_fusion=false"},
    {"no_norm_fusion", "moe_norm_quantize_fusion=false"},
    {"+ moe_expert", "recompute_granularity=selective,recompute_modules=[moe_expert]"},
};

void check_same_run(const Arm& base, const Arm& arm) {
    for (const std::string& line : diff_configs(base.config, arm.config)) {
        const bool allowed = line.starts_with("precision.") || line.starts_with("recompute.") ||
                             line.starts_with("schedule.") || line.starts_with("training.main_grads_dtype") ||
                             line.starts_with("training.exp_avg") ||
                             line.starts_with("moe.moe_row_alignment");
        require(allowed, ExitCode::usage, "arms must differ in the recipe only; {} and {} differ in {}",
                base.name, arm.name, line);
    }
}

constexpr const char* kJoined = "precision.moe_wgrad_micro_batches";

// Its value, which set_if_legal gives back to an arm that does not exclude it. Until then it is at most 1.
std::string take_joined(Config& config) {
    std::string value = field_named(kJoined).get(config);
    config.precision.moe_wgrad_micro_batches = std::min<int64_t>(config.precision.moe_wgrad_micro_batches, 1);
    return value;
}

void add_schedules(std::vector<Arm>& arms, const std::string& name, const Config& config, int ranks) {
    const TrainingSpec& training = config.training;
    const auto add = [&](const std::string& what, const ScheduleSpec& schedule) {
        Config own = config;
        own.schedule = schedule;
        own.schedule.wire_sms = config.schedule.wire_sms;
        set_if_legal(own, kJoined, take_joined(own));
        arms.push_back({name + what, own});
    };
    add("", {});
    add(" + wgrad", {.delay_wgrad_compute = true});
    add(" + shared", {.moe_shared_expert_overlap = true});
    add(" + shared + wgrad", {.moe_shared_expert_overlap = true, .delay_wgrad_compute = true});
    if (ranks > 1) add(" + reduce", {.overlap_grad_reduce = true});
    const bool several_micro_batches = training.global_batch_size > training.micro_batch_size * ranks;
    if (several_micro_batches) add(" + turns", {.overlap_moe_expert_parallel_comm = true});
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

// Splits at commas outside brackets.
Names settings_of(const std::string& text) {
    Names settings = {""};
    int depth = 0;
    for (const char c : text) {
        depth += c == '[' ? 1 : c == ']' ? -1 : 0;
        if (c == ',' && depth == 0)
            settings.emplace_back();
        else
            settings.back() += c;
    }
    return settings;
}

// The arm of one --arm. Its recipe or flow is applied first, so that options that this recipe does not have
// return to their defaults, as in the arms of recipes.
Arm parse_arm(const Config& base, const std::string& text, int ranks) {
    const size_t colon = text.find(':'), at = std::min(text.find('@'), colon);
    const std::string name = text.substr(0, at);
    require(colon != std::string::npos && !name.empty() && at + 1 != colon && colon + 1 < text.size(),
            ExitCode::usage, "--arm: got {}, want NAME:key=value,key=value or NAME@BASE:key=value,key=value",
            printable(text));
    require(
        file_name_of(name) != file_name_of(kControlArm), ExitCode::usage,
        "--arm {}: got the name of the control arm (validate.control_arm), which is not judged; want another",
        printable(name));
    const Names settings = settings_of(text.substr(colon + 1));
    Config start = base;
    for (const std::string& setting : settings) {
        const size_t equals = std::min(setting.find('='), setting.size() - 1);
        const std::string key = setting.substr(0, equals), value = setting.substr(equals + 1);
        if (key == "flow" || key == "precision.flow")
            start = with_recipe(base, base_of_flow(value).value_or(base.precision.recipe));
        if (key != "recipe" && key != "precision.recipe") continue;
        Config named;
        if (!field_named("precision.recipe").set(named, {.items = {value}}))
            start = with_recipe(base, named.precision.recipe);
    }
    // A number that the program has chosen is for arms only that do not exclude it.
    const std::string joined = base.origin.contains(kJoined) ? "" : take_joined(start);
    Names overrides = {"precision.flow=" + builders::quoted(start.precision.flow)};
    overrides.insert(overrides.end(), settings.begin(), settings.end());
    try {
        Arm arm{name, parse_config(dump_config(start), "configuration", overrides, ranks)};
        if (!joined.empty() && arm.config.origin[kJoined] != "--set")
            set_if_legal(arm.config, kJoined, joined);
        if (at != colon) arm.against = text.substr(at + 1, colon - at - 1);
        return arm;
    } catch (const Error& error) {
        fail(error.code(), "--arm {}: {}", printable(name), error.what());
    }
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
    for (const std::string& flow : config.precision.flow.empty() ? registered_flows() : Names{}) {
        Config own = with_recipe(config, *base_of_flow(flow));
        own.precision.flow = flow;
        add(own);
    }
    if (ablation == Ablation::flow_switches) {
        const std::string name(recipe_name(Recipe::fp8_flow));
        const bool runs = std::ranges::find(arms, name, &Arm::name) != arms.end();
        for (const auto& [own, keys] : kFlowSwitches)
            arms.push_back(parse_arm(
                config, fmt::format("{}{}:recipe={},{}", own, runs ? "@" + name : "", name, keys), ranks));
    }
    for (const Arm& arm : arms) check_same_run(arms.front(), arm);
    return arms;
}

std::vector<Arm> make_arms(const Config& config, Ablation ablation, int ranks, const Names& options) {
    std::vector<Recipe> recipes = {Recipe::bf16};  // without repetitions
    const bool has_recipes = options.empty() || config.origin.contains("validate.recipes");
    for (Recipe recipe : has_recipes ? config.validate.recipes : std::vector<Recipe>{})
        if (std::ranges::find(recipes, recipe) == recipes.end()) recipes.push_back(recipe);
    std::vector<Arm> arms;
    if (ablation == Ablation::state_dtypes && recipes.size() > 1) {  // the baseline has FP32 state only
        arms = {{std::string(recipe_name(recipes.front())), with_recipe(config, recipes.front())}};
        recipes.erase(recipes.begin());
    }
    std::vector<Arm> others;
    if (options.empty())
        others = recipe_arms(config, recipes, ablation, ranks);
    else
        for (Recipe recipe : recipes)
            others.push_back({std::string(recipe_name(recipe)), with_recipe(config, recipe)});
    for (const std::string& text : options) others.push_back(parse_arm(config, text, ranks));
    for (Arm& arm : others) {
        arms.push_back(std::move(arm));
        check_same_run(arms.front(), arms.back());
    }
    if (const ControlArm control = config.validate.control_arm; control != ControlArm::none) {
        arms.push_back({kControlArm, arms.front().config});
        arms.back().moves_start = control == ControlArm::ulp;
        if (control == ControlArm::exact) arms.back().arithmetic = Arithmetic::alternative;
    }
    std::set<std::string> names;
    for (Arm& arm : arms) {
        require(names.insert(file_name_of(arm.name)).second, ExitCode::usage,
                "--arm {}: two arms have this name, or names that differ in special characters only",
                arm.name);
        require(arm.against.empty() ||
                    (arm.against != arm.name && std::ranges::count(arms, arm.against, &Arm::name) > 0),
                ExitCode::usage, "--arm {}@{}: want the name of another arm after the @", arm.name,
                printable(arm.against));
        for (const ConfigField& field : config_fields())
            if (const std::string value = field.get(arm.config); value != field.get(arms.front().config))
                arm.keys[field.name()] = value;
    }
    return arms;
}

std::vector<Config> configs_of(const std::vector<Arm>& arms) {
    std::vector<Config> configs;
    std::ranges::transform(arms, std::back_inserter(configs), &Arm::config);
    return configs;
}

}  // namespace fp8flow::validate
