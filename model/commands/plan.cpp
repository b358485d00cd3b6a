// SPDX-License-Identifier: MIT
// `fp8flow plan`: what a run will need and how long it will take, without running it.
#include "model/plan/plan.h"
#include "kernels/core/tensor.h"
#include "model/base/output.h"
#include "model/base/provenance.h"
#include "model/commands/commands.h"
#include "model/config/config.h"
#include "model/config/fields.h"
#include "model/predict/choose.h"
#include "model/report/page/page.h"
#include "model/report/plan_report.h"
#include "model/report/run_report.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {

using namespace plan;
using namespace predict;
using namespace report;

namespace {

Config read_config(const Options& options, std::optional<int64_t> gpus) {
    require(!options.config_path.empty() || !options.hf_config.empty(), ExitCode::usage,
            "plan: want a configuration, or --hf-config config.json (see configs/)");
    return load_config(options.config_path, options.overrides, gpus, options.hf_config);
}

// With --gpus, a global batch that cannot be divided evenly over the ranks is rounded up to one that can, and
// the output says so.
Config config_for(const Options& options, std::optional<int64_t> gpus) {
    if (!gpus) return read_config(options, gpus);
    Config config = read_config(options, std::nullopt);
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

void write(const std::string& out, const std::string& name, const std::string& text) {
    const OutputFolder folder(out);
    folder.write_atomic(name, text);
    fmt::print("written: {}\n", folder.path_of(name));
}

Gpu gpu_of(const Options& options) {
    Gpu gpu = load_gpu(options.plan.gpu);
    if (options.plan.mhz > 0) gpu.sheet.clock = options.plan.mhz * 1e6;
    gpu.sheet.network_given = options.plan.network > 0;
    if (options.plan.network > 0) gpu.sheet.network_rate = options.plan.network * 1e9;
    return gpu;
}

// Where --out, --json or --picture asks for files.
void write_page(const Options& options, const Config& config, const std::vector<Choice>& choices,
                const Gpu& gpu) {
    if (!is_asked(config, "output.out") && options.plan.picture.empty() && options.plan.json.empty()) return;
    if (choices.empty()) {
        fmt::print("no {}: it shows predicted times\n", kPageFile);
        return;
    }
    const std::string page = plan_page(run_name(options.config_path, options.hf_config), choices, gpu,
                                       make_provenance(options.command, {}, 1));
    write(config.output.out, kPageFile, page);
    const std::string& picture = options.plan.picture;
    if (!picture.empty())
        write(config.output.out, picture + (picture.ends_with(".html") ? "" : ".html"), page);
}

void print_warnings(const Config& config) {
    for (const std::string& text : config.warnings) fmt::print("warning: {}\n", text);
}

// One run: every table of the plan, and its prediction.
int plan_run(const Options& options, std::optional<int64_t> gpus) {
    Config config = config_for(options, gpus);
    const int64_t ranks = gpus.value_or(config.parallel.expert_model_parallel_size);
    check_config(config, ranks);
    const Gpu gpu = gpu_of(options);
    decide_joined(config, ranks, usable_bytes(gpu.sheet));
    const RunPlan plan = make_plan(config, ranks);
    const Fit fit = fit_of(config, ranks, gpu.sheet);
    const bool known = can_predict(config, gpu);
    std::vector<Choice> choices;
    if (known) {
        choices.push_back(predicted(config, ranks, gpu));
        choices.front().best = true;
    }
    print_warnings(config);
    fmt::print("{}", plan_text(config, plan,
                               known ? prediction_text(choices.front(), gpu)
                                     : "No prediction of time: shares are known of bf16, fp8_blockwise and "
                                       "fp8_flow with all optimisations on.\n" +
                                           consumers_text(fit, gpu.sheet)));
    if (!options.plan.json.empty()) {
        nlohmann::ordered_json json = plan_json(config, plan, make_provenance(options.command, {}, 1));
        if (known) json["prediction"] = prediction_json(choices.front(), gpu);
        write(config.output.out, options.plan.json, json.dump(2) + "\n");
    }
    write_page(options, config, choices, gpu);
    return 0;
}

// A line if the batch of the configuration is no multiple of micro-batch x GPUs in some rows; else empty.
std::string rounded_text(const Config& config, const std::vector<Choice>& choices) {
    const int64_t asked = config.training.global_batch_size;
    std::set<std::pair<int64_t, int64_t>> rounded;
    for (const Choice& c : choices)
        if (const int64_t batch = c.config.training.global_batch_size; batch != asked)
            rounded.emplace(c.gpus, batch);
    std::vector<std::string> texts;
    texts.reserve(rounded.size());
    for (const auto& [gpus, batch] : rounded) texts.push_back(fmt::format("{} on {} GPUs", batch, gpus));
    return texts.empty() ? ""
                         : fmt::format(
                               "training.global_batch_size is {}, rounded up to multiples of micro-batch "
                               "x GPUs: planned with {}\n",
                               asked, fmt::join(texts, ", "));
}

// Several runs in one table.
int plan_table(const Options& options) {
    const Config config = read_config(options, std::nullopt);
    std::vector<Recipe> recipes = options.plan.recipes;
    if (recipes.empty()) recipes = {Recipe::bf16, Recipe::fp8_blockwise, Recipe::fp8_flow};
    std::vector<int64_t> gpus = options.plan.gpus;
    if (gpus.empty()) gpus = {config.parallel.expert_model_parallel_size};
    Search search = open_search(config, gpus, recipes);
    if (!options.plan.expert_parallel.empty()) search.expert_parallel = options.plan.expert_parallel;
    if (!options.plan.micro_batches.empty()) search.micro_batches = options.plan.micro_batches;
    const Gpu gpu = gpu_of(options);
    const std::vector<Choice> choices = choose(config, search, gpu);
    if (!options.plan.markdown) print_warnings(config);
    const auto why = [&](bool given, const char* option, const char* key) {
        return given                         ? std::string(option)
               : config.origin.contains(key) ? fmt::format("{} ({})", key, config.origin.at(key))
                                             : fmt::format("searched, because {} is not set", key);
    };
    if (!options.plan.markdown)
        fmt::print("EP: {}; DP = GPUs / EP\nmicro-batch: {}\n{}\n",
                   why(!options.plan.expert_parallel.empty(), "--ep", "parallel.expert_model_parallel_size"),
                   why(!options.plan.micro_batches.empty(), "--micro-batch", "training.micro_batch_size"),
                   search.own_batch ? rounded_text(config, choices) : "");
    fmt::print("{}", options.plan.markdown ? choices_markdown(choices, gpu) : choices_text(choices, gpu));
    if (!options.plan.json.empty())
        write(config.output.out, options.plan.json,
              choices_json(choices, gpu, make_provenance(options.command, {}, 1)).dump(2) + "\n");
    write_page(options, config, choices, gpu);
    return 0;
}

}  // namespace

Recipe recipe_named(const std::string& name) {
    std::vector<std::string> names;
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_blockwise, Recipe::fp8_flow}) {
        if (recipe_name(recipe) == name) return recipe;
        names.emplace_back(recipe_name(recipe));
    }
    const std::string meant = did_you_mean(name, names);
    fail(ExitCode::usage, "--recipes: got {}, want one of {}{}{}", printable(name), fmt::join(names, ", "),
         meant.empty() ? "" : "; ", meant);
}

int run_plan(const Options& options) {
    const bool table = options.plan.gpus.size() > 1 || !options.plan.recipes.empty() ||
                       !options.plan.expert_parallel.empty() || !options.plan.micro_batches.empty() ||
                       options.plan.markdown;
    if (table || options.config_path.empty()) return plan_table(options);
    return plan_run(options,
                    options.plan.gpus.empty() ? std::nullopt : std::optional(options.plan.gpus.front()));
}

}  // namespace fp8flow
