// SPDX-License-Identifier: MIT
// The options of all commands. Long because they are one table.
#include "model/commands/command_line.h"

#include "layers/flows/flow.h"
#include "model/base/plugins.h"
#include "model/commands/next_steps.h"
#include "model/config/builders.h"
#include "model/safetensors/header.h"

#include <filesystem>

namespace fp8flow {

namespace {

using builders::IntegerRange;
using builders::NumberRange;
using report::Detail;
using validate::Ablation;

// Options have the types and ranges of configuration keys: 5e3 is an integer, nan is no number. For
// CLI::Option::transform: the value as a key of this type writes it, or why it is none.
CLI::Validator typed(const ConfigField& field) {
    return {[field](std::string& text) {
                Config config;
                if (const auto refusal = field.set(config, {false, {text}}))
                    return fmt::format("got {}, want {}", printable(text), refusal->text());
                text = field.get(config);
                return std::string();
            },
            field.type};
}
CLI::Validator integer_in(IntegerRange range) {
    return typed(builders::integer(
        "", "", [](auto& c) -> auto& { return c.training.train_iters; }, range, ""));
}

template <class Value>
void add_integer(CLI::App* command, const char* name, Value& value, IntegerRange range, const char* meaning) {
    command->add_option(name, value, meaning)->transform(integer_in(range));
}
template <class Value>
void add_number(CLI::App* command, const char* name, Value& value, NumberRange range, const char* meaning) {
    const auto field = builders::number(
        "", "", [](auto& c) -> auto& { return c.training.lr; }, range, "");
    command->add_option(name, value, meaning)->transform(typed(field));
}
// An option that may be given again.
template <class Values>
CLI::Option* add_repeated(CLI::App* command, const char* name, Values& values, const char* meaning) {
    return command->add_option(name, values, meaning)->allow_extra_args(false);
}
// 1,2,3
template <class Values>
CLI::Option* add_list(CLI::App* command, const char* name, Values& values, const char* meaning) {
    return add_repeated(command, name, values, meaning)->delimiter(',');
}
// A flag that gives `to` this value.
template <class Value>
CLI::Option* add_flag(CLI::App* command, const char* name, Value& to, Value value, const char* meaning) {
    return command->add_flag_callback(
        name, [&to, value] { to = value; }, meaning);
}

std::string setting(const char* key, const std::string& value) {
    return fmt::format("{}={}", key, builders::quoted(value));
}

// The command as it was typed, with the number of ranks that it was started on.
std::string typed_command(int argc, char** argv, int64_t ranks) {
    std::string text = ranks > 1 ? fmt::format("mpirun -n {} fp8flow", ranks) : "fp8flow";
    for (int i = 1; i < argc; ++i) text += " " + shell_word(argv[i]);
    return text;
}

// Refuses an empty argument, as an unset variable of a shell leaves it: it means nothing for any option, and
// without the option another run would start.
void require_values(int argc, const char* const* argv) {
    for (int i = 1; i < argc; ++i) {
        std::string name = argv[i];
        const bool attached = name.starts_with("--") && name.find('=') + 1 == name.size();
        if (!name.empty() && !attached) continue;
        if (attached)
            name.pop_back();
        else
            name = std::string(argv[i - 1]).starts_with("--") ? argv[i - 1] : fmt::format("argument {}", i);
        fail(ExitCode::usage, "{}: got an empty value, want one (is a variable of the shell unset?)",
             printable(name));
    }
}

}  // namespace

CommandLine::CommandLine() {
    app.require_subcommand(0, 1);
    app.add_flag("--help-config", help_config,
                 "print every configuration key with type, range, default and meaning");
    app.footer(
        "Exit status: 0 done, 1 validate's verdict is not pass, 2 command line or configuration, "
        "10 data, 11 checkpoint, 12 memory, 13 a step diverged,\n14 another rank was lost, "
        "15 output folder, 16 stopped by a signal after a step, 70 a fault of fp8flow.\n"
        "Several ranks: mpirun -n N --quiet fp8flow train CONFIG (or scripts/train.sh -n N CONFIG).");
    families->add_flag("--markdown", families_markdown, "as the table of docs/usage/data_and_weights.md");
    doctor->add_option("--out", out, "folder that runs will write to (default: runs)");
    add_configuration_options();
    add_run_options();
    add_train_options();
    add_validate_options();
    add_profile_options();
    add_trained_options();
    add_generate_options();
    add_replay_options();
    add_plan_options();
    add_bench_options();
}

// An option that sets a key, after --set.
CLI::Option* CommandLine::add_key(CLI::App* command, const char* name, const char* key, const char* meaning) {
    return command->add_option_function<std::string>(
        name, [this, key](const std::string& value) { keys_.push_back(setting(key, value)); }, meaning);
}

void CommandLine::add_backend(CLI::App* command) {
    command
        ->add_option_function<std::string>(
            "--backend", [this](const std::string& name) { options.backend = parse_backend(name); },
            "auto | reference | hopper")
        ->take_last();
}

void CommandLine::add_configuration_options() {
    for (CLI::App* command : {train, validate, profile, plan, replay}) {
        command->add_option("config", options.config_path, "YAML configuration (see configs/)")
            ->required(command == train);
        add_repeated(command, "--set", options.overrides, "section.key=value, repeatable");
        command->add_option("--out", out, "folder for everything the run writes (default: output.out)")
            ->take_last();
        command->add_option("--hf-config", options.hf_config,
                            "config.json of a Hugging Face model: fills model and moe; the configuration and "
                            "--set come after it (families: docs/usage/data_and_weights.md)");
        add_repeated(command, "--plugin", options.plugins,
                     "shared library with recipes of your own (include/fp8flow/recipe.h), repeatable; "
                     "validate and profile compare them with the others");
    }
}

void CommandLine::add_run_options() {
    for (CLI::App* command : {train, validate, profile, replay, bench}) {
        add_flag(command, "--overwrite", options.taken, RunFolder::Taken::overwrite,
                 "write into --out though it holds an earlier run (otherwise: into --out-2, --out-3, ...); "
                 "train removes that run's checkpoints");
        add_flag(
            command, "--take-over", options.holder, FolderLock::Holder::is_replaced,
            "together with --overwrite or --resume: end the run that holds --out, and take it (a run on a "
            "lost machine); alone: use a new --out on a file system without locks");
        add_backend(command);
        add_number(command, "--start-deadline", start_deadline, {.max = 1e6},
                   "seconds that a rank waits for the others until the configuration is read, 0: for ever "
                   "(default: 300)");
    }
    for (CLI::App* command : {train, validate, profile})
        add_flag(command, "--force", options.where_short, predict::WhereShort::warn,
                 "start a run though it will not fit into memory");
    for (CLI::App* command : {train, validate, profile, bench, evaluate})
        add_flag(command, "--quiet", options.detail, Detail::quiet,
                 command == bench      ? "no line for each row that is measured"
                 : command == evaluate ? "print warnings and the result only"
                                       : "print warnings and the result only; the log has every line");
    for (CLI::App* command : {validate, profile}) {
        add_flag(command, "--ablate", options.ablation, Ablation::flow_switches,
                 "also run fp8_flow with each of its optimisations switched off, one at a time");
        add_flag(command, "--state-dtypes", options.ablation, Ablation::state_dtypes,
                 "every recipe with FP32 gradients and moments, with BF16 gradients, and with all in BF16")
            ->excludes("--ablate");
    }
}

void CommandLine::add_train_options() {
    add_flag(train, "--verbose", options.detail, Detail::verbose,
             "step lines with every field of Megatron-LM's")
        ->excludes("--quiet");
    add_key(train, "--weights", "checkpoint.pretrained_checkpoint",
            "start from a Hugging Face model: a .safetensors file, an index, or a folder");
    add_key(train, "--export", "output.export_format",
            "bf16 | f32 | fp8: in the end write the weights with Hugging Face names to OUT/hf")
        ->check(CLI::IsMember({"bf16", "f32", "fp8"}));
    add_integer(train, "--dump-samples", options.dump_samples, {.min = 1, .max = int64_t{1} << 31},
                "N: write the first N token windows that the run would read to OUT/samples.npy, and train "
                "nothing");
    add_key(train, "--resume", "checkpoint.load",
            "resume from a checkpoint: auto (the newest complete one below --out, or start afresh), or a "
            "run's folder, its folder of checkpoints, or one of them (checkpoint.load)")
        ->take_last();
    add_key(train, "--routing", "data.routing_path",
            "a file with the experts of every token, in place of the routers' choices (data.routing_path)");
    add_key(train, "--record-routing", "output.record_routing",
            "write the experts that the routers choose to this file (output.record_routing)");
    train->add_flag_callback(
        "--tensor-stats", [this] { keys_.emplace_back("output.tensor_stats=true"); },
        "report underflow, saturation, scales and error of every quantised tensor");
}

void CommandLine::add_validate_options() {
    add_repeated(validate, "--arm", options.arms,
                 "NAME:key=value,key=value: the configuration with these keys, repeatable; takes the place "
                 "of validate.recipes; NAME@BASE:... is compared with arm BASE")
        ->excludes("--ablate")
        ->excludes("--state-dtypes");
    add_list(validate, "--seeds", options.seeds, "of every arm, 1,2,3 (default: training.seed)")
        ->transform(integer_in({.max = INT64_MAX}));
    validate->add_option("--only", options.only,
                         "ARM:SEED: train this one, in --out/runs/ARM-SEED; --join makes the report");
    validate->add_option("--routing-of", options.routing_of,
                         "ARM: the other arms route every token as this one did with the same seed");
    validate
        ->add_option("--join", options.joined,
                     "FOLDER ...: the report of runs in these folders; trains nothing")
        ->excludes("--only")
        ->excludes("--routing-of")
        ->excludes("--arm")
        ->excludes("--seeds");
    add_list(validate, "--equal-commits", options.equal_commits,
             "A,B: runs of programs of these commits are compared as if they were one program's; what runs "
             "compute must be the same in all of them");
    validate
        ->add_option_function<std::string>(
            "--resume", [this](const std::string&) { options.taken = RunFolder::Taken::enter; },
            "auto: continue the validation in --out; done runs are read, an interrupted one goes on from its "
            "checkpoint (checkpoint.save_interval) or begins again")
        ->check(CLI::IsMember({"auto"}))
        ->excludes("--join")
        ->excludes("--overwrite");
    add_key(validate, "--weights", "checkpoint.pretrained_checkpoint",
            "every arm starts from a Hugging Face model: a .safetensors file, an index, or a folder");
}

void CommandLine::add_profile_options() {
    add_flag(profile, "--schedules", options.ablation, Ablation::schedules,
             "every recipe serial, with the shared expert, the weight gradients, both and the gradient "
             "reduction overlapped, interleaved micro-batches, a step as one graph (section schedule)")
        ->excludes("--ablate")
        ->excludes("--state-dtypes");
    profile
        ->add_option("--compare", compared,
                     "OLD NEW: print two results (profile.json or run folders) side by side, the largest "
                     "difference first, and run nothing; with --out the picture compare.html")
        ->expected(2);
    add_list(profile, "--recipes", recipes_, "comma-separated (default: profile.profile_recipes)");
    add_integer(profile, "--steps", options.measured_steps, {.min = 1, .max = 100000},
                "steps that are measured (default: profile_step_end - profile_step_start)");
}

void CommandLine::add_trained_options() {
    for (CLI::App* command : {evaluate, generate}) {
        command->add_option(
            "run", options.config_path,
            "output folder of fp8flow train (its newest checkpoint), or a YAML configuration");
        add_repeated(command, "--set", options.overrides, "section.key=value, repeatable");
        command->add_option("--hf-config", options.hf_config,
                            "config.json of a Hugging Face model: fills model and moe");
        command->add_option(
            "--weights", options.weights,
            "weights of a Hugging Face model instead: a .safetensors file, an index, or a folder");
        add_repeated(command, "--plugin", options.plugins,
                     "shared library with recipes of your own, repeatable");
        add_backend(command);
    }
    evaluate->add_option("--out", out, "folder for evaluate.json (default: the run's)")->take_last();
    add_integer(evaluate, "--windows", options.windows, {.min = 1, .max = int64_t{1} << 40},
                "held-out windows of each source, at most all (default: training.eval_iters x "
                "training.global_batch_size)");
}

void CommandLine::add_generate_options() {
    GenerateOptions& own = options.generate;
    const auto ids = [&](const char* name, std::vector<int64_t>& values, const char* meaning) {
        return add_list(generate, name, values, meaning)->transform(integer_in({.max = INT32_MAX}));
    };
    generate->add_option("--prompt", own.prompt, "text, for models of bytes (vocabulary of 257)");
    ids("--tokens", own.tokens, "1,2,3: token ids instead (scripts/tokens.py makes and reads them)")
        ->excludes("--prompt");
    ids("--stop", own.stop_tokens, "1,2: token ids that end the text, and are not printed");
    add_integer(generate, "--max-tokens", own.max_tokens, {.min = 1, .max = 1 << 20},
                "of the text after the prompt (default: 64)");
    add_number(generate, "--temperature", own.sampling.temperature, {.max = 1e6},
               "0: the most probable token (greedy); larger: more variety (default: 1)");
    add_number(generate, "--top-p", own.sampling.top_p, {.max = 1},
               "draw from the most probable tokens that together have this probability (default: 1)");
    add_integer(generate, "--top-k", own.sampling.top_k, {.max = INT32_MAX},
                "draw from so many tokens, 0: all (default: 0)");
    add_integer(generate, "--seed", own.sampling.seed, {.max = INT64_MAX}, "of the draws (default: 1)");
}

void CommandLine::add_replay_options() {
    ReplayOptions& own = options.replay;
    replay->add_option("--input", own.input, "safetensors with hidden_states and grad_output")->required();
    replay->add_option("--weights", options.weights,
                       "safetensors with the layer's weights: a file, an index, or a folder (default: "
                       "--input)");
    add_integer(replay, "--layer", own.layer, {.max = 100000}, "its number in the weights (default: 0)");
    replay->add_flag("--norm", own.norm, "apply post_attention_layernorm in front of the layer");
    replay->add_option("--routing", own.routing,
                       "safetensors with the experts of every token, in place of the router's choice");
    replay->add_flag("--intermediates", own.intermediates,
                     "also write what the experts received and computed, by stage");
}

void CommandLine::add_plan_options() {
    PlanOptions& own = options.plan;
    add_list(plan, "--gpus", own.gpus,
             "number of ranks (default: parallel.expert_model_parallel_size); several, 8,64,512: a table")
        ->transform(integer_in({.min = 1, .max = 1 << 20}));
    plan->add_option("--gpu", own.gpu,
                     "h100 | h200 | h20 | h800, or a file: like those of configs/gpus, or made by "
                     "scripts/calibrate.py (default: h200)")
        ->take_last();
    add_list(plan, "--recipes", recipes_, "of the table (default: bf16,fp8_blockwise,fp8_flow)");
    add_list(plan, "--ep", own.expert_parallel, "expert-parallel sizes of the table")
        ->transform(typed(*find_leaf("expert_model_parallel_size")));
    add_list(plan, "--micro-batch", own.micro_batches, "micro-batch sizes of the table")
        ->transform(typed(*find_leaf("micro_batch_size")));
    add_number(plan, "--mhz", own.mhz, {.min = 100, .max = 10000},
               "clock of the GPU under load (default: the calibration's)");
    add_number(plan, "--network", own.network, {.min = 0.01, .max = 10000},
               "GB/s of each GPU between hosts (default: the kind's)");
    plan->add_flag("--markdown", own.markdown, "print the table alone, as Markdown");
    plan->add_option("--json", own.json, "also write the plan to this file below --out");
    plan->add_option("--picture", own.picture, "also write the report as NAME.html below --out");
}

void CommandLine::add_bench_options() {
    BenchOptions& own = options.bench;
    bench->add_option("operations", own.operations, "operations to time (--list)");
    add_repeated(bench, "--shape", own.shapes, "key=value,key=value of every named operation, repeatable");
    bench->add_option("--suite", own.suite,
                      "exchange | gemm | layer | model | small | upstream, or a file "
                      "(configs/suites/README.md), or what it has of the named operations");
    bench->add_option("--match", own.match,
                      "regular expression: only what matches in 'operation key=value key=value ...'");
    bench->add_flag("--list", list, "print operations, their keys and the suites");
    bench->add_option("--out", own.out, "folder for report.html, bench.json and bench.txt");
    bench
        ->add_flag("--capture", own.capture,
                   "do not time: run one call of each row between cudaProfilerStart and Stop, in an NVTX "
                   "range (ncu --profile-from-start off)")
        ->excludes("--out");
    bench
        ->add_flag("--describe", own.describe,
                   "do not time: names, dtypes, shapes and layouts of the tensors, as a --plugin gets them")
        ->excludes("--out")
        ->excludes("--capture");
    bench->add_option("--plugin", own.plugin,
                      "shared library with kernels of your own (include/fp8flow/plugin.h): results are "
                      "compared with these, and both are timed");
    add_integer(bench, "--samples", own.samples, {.min = 1, .max = 100000},
                "timed samples of a burst (default: 30)");
    add_number(bench, "--idle", own.idle_seconds, {.max = 60},
               "seconds of rest before a burst (default: 0.8)");
    add_number(bench, "--sustain", own.sustained_seconds, {.max = 60},
               "seconds of calls back to back, 0: none (default: 0.8)");
}

std::string CommandLine::meant_by(const std::string& word) const {
    std::vector<std::string> commands;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
        if (command->get_name() == word) return {};
        commands.push_back(command->get_name());
    }
    return nearest_name(word, commands);
}

void CommandLine::parse(int argc, char** argv, const JobStart& job) {
    require_values(argc, argv);
    app.parse(argc, argv);
    const bool has_config = !options.config_path.empty() || !options.hf_config.empty();
    require(!*profile || compared.empty() == has_config, ExitCode::usage,
            "profile: want a configuration (see configs/), --hf-config config.json, or --compare OLD NEW");
    require(!*validate || has_config || !options.joined.empty(), ExitCode::usage,
            "validate: want a configuration (see configs/), --hf-config config.json, or --join FOLDER ...");
    // the configuration of the first folder
    if (!options.joined.empty() && options.config_path.empty())
        options.config_path = options.joined.front() + "/config.yaml";
    if (*evaluate || *generate) complete_trained_options();
    for (const std::string& plugin : options.plugins) options.libraries.merge(load_recipes(plugin));
    // All of them are compared; a report needs none.
    if (!options.joined.empty() || ((*validate || *profile) && registered_flows().size() > 1))
        options.overrides.insert(options.overrides.begin(), "precision.flow=''");
    if (!out.empty()) keys_.push_back(setting("output.out", out));
    for (std::string& recipe : recipes_) CLI::detail::trim(recipe);
    for (const std::string& recipe : recipes_)
        if (*plan) options.plan.recipes.push_back(recipe_named(recipe));
    if (*profile && !recipes_.empty())
        keys_.push_back("profile.profile_recipes=" + builders::yaml_list(recipes_, builders::quoted));
    options.overrides.insert(options.overrides.end(), keys_.begin(), keys_.end());
    options.placement = job.placement;
    options.command = typed_command(argc, argv, job.placement.num_ranks);
}

// A folder is that of a run; its results go there.
void CommandLine::complete_trained_options() {
    require(!options.config_path.empty() || !options.hf_config.empty(), ExitCode::usage,
            "want a run's folder, a configuration (see configs/), or --hf-config config.json");
    // A run's config.yaml has what `auto` chose for its recipe. There is no backward, and another recipe may
    // refuse it.
    options.overrides.insert(options.overrides.begin(), "precision.moe_wgrad_micro_batches=auto");
    std::error_code error;
    if (!std::filesystem::is_directory(options.config_path, error)) return;
    options.run = options.config_path;
    options.config_path += "/config.yaml";
    if (!out.empty()) return;
    keys_.push_back(setting("output.out", options.run));
    options.taken = RunFolder::Taken::enter;
}

}  // namespace fp8flow
