// SPDX-License-Identifier: MIT
// Options of the command line have the types and ranges of configuration keys: 5e3 is an integer, nan is no
// number. And the options of validate. Internal to main.cpp.
#pragma once

#include "model/commands/commands.h"
#include "model/config/builders.h"
#include "model/safetensors/header.h"

#include <CLI/CLI.hpp>

#include <filesystem>
#include <string>

namespace fp8flow {

// For CLI::Option::transform: the value as a key of this type writes it, or why it is none.
inline CLI::Validator typed(const ConfigField& field) {
    return {[field](std::string& text) {
                Config config;
                if (const auto refusal = field.set(config, {false, {text}}))
                    return fmt::format("got {}, want {}{}{}", printable(text), refusal->want,
                                       refusal->hint.empty() ? "" : "; ", refusal->hint);
                text = field.get(config);
                return std::string();
            },
            field.type};
}
inline CLI::Validator integer_in(builders::IntegerRange range) {
    return typed(builders::integer(
        "", "", [](auto& c) -> auto& { return c.training.train_iters; }, range, ""));
}
inline CLI::Validator number_in(builders::NumberRange range) {
    return typed(builders::number(
        "", "", [](auto& c) -> auto& { return c.training.lr; }, range, ""));
}

// Lists: 1,2,3; and options that may be given again.
template <class Values>
CLI::Option* add_repeated(CLI::App* command, const char* name, Values& values, const char* meaning) {
    return command->add_option(name, values, meaning)->allow_extra_args(false);
}
template <class Values>
CLI::Option* add_list(CLI::App* command, const char* name, Values& values, const char* meaning) {
    return add_repeated(command, name, values, meaning)->delimiter(',');
}
template <class Value>
CLI::Option* add_integer(CLI::App* command, const char* name, Value& value, builders::IntegerRange range,
                         const char* meaning) {
    return command->add_option(name, value, meaning)->transform(integer_in(range));
}
template <class Value>
CLI::Option* add_number(CLI::App* command, const char* name, Value& value, builders::NumberRange range,
                        const char* meaning) {
    return command->add_option(name, value, meaning)->transform(number_in(range));
}

// `resume` and `weights`: those of train.
inline void add_validate_options(CLI::App& validate, RunOptions& options, std::string& resume,
                                 std::string& weights) {
    add_repeated(&validate, "--arm", options.arms,
                 "NAME:key=value,key=value: the configuration with these keys, repeatable; takes the "
                 "place of validate.recipes; NAME@BASE:... is compared with arm BASE")
        ->excludes("--ablate")
        ->excludes("--state-dtypes");
    add_list(&validate, "--seeds", options.seeds, "of every arm, 1,2,3 (default: training.seed)")
        ->transform(integer_in({.max = INT64_MAX}));
    validate.add_option("--only", options.only,
                        "ARM:SEED: train this one, in --out/runs/ARM-SEED; --join makes the report");
    validate.add_option("--routing-of", options.routing_of,
                        "ARM: the other arms route every token as this one did with the same seed");
    validate
        .add_option("--join", options.joined,
                    "FOLDER ...: the report of runs in these folders; trains nothing")
        ->excludes("--only")
        ->excludes("--routing-of")
        ->excludes("--arm")
        ->excludes("--seeds");
    add_list(&validate, "--equal-commits", options.equal_commits,
             "A,B: runs of programs of these commits are compared as if they were one program's; what "
             "runs compute must be the same in all of them");
    validate
        .add_option("--resume", resume,
                    "auto: continue the validation in --out; done runs are read, an interrupted one goes "
                    "on from its checkpoint (checkpoint.save_interval) or begins again")
        ->check(CLI::IsMember({"auto"}))
        ->excludes("--join")
        ->excludes("--overwrite");
    validate.add_option(
        "--weights", weights,
        "every arm starts from a Hugging Face model: a .safetensors file, an index, or a folder");
}

inline void add_trained_options(std::initializer_list<CLI::App*> commands, RunOptions& options,
                                std::string& backend) {
    for (CLI::App* command : commands) {
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
        command->add_option("--backend", backend, "auto | reference | hopper")->take_last();
    }
}
inline void add_evaluate_options(CLI::App& evaluate, EvaluateOptions& options, std::string& out,
                                 bool& quiet) {
    evaluate.add_option("--out", out, "folder for evaluate.json (default: the run's)")->take_last();
    evaluate.add_flag("--quiet", quiet, "print warnings and the result only");
    add_integer(&evaluate, "--windows", options.windows, {.min = 1, .max = int64_t{1} << 40},
                "held-out windows of each source, at most all (default: training.eval_iters x "
                "training.global_batch_size)");
}
inline void add_generate_options(CLI::App& generate, GenerateOptions& options) {
    const auto ids = [&](const char* name, std::vector<int64_t>& values, const char* meaning) {
        return add_list(&generate, name, values, meaning)->transform(integer_in({.max = INT32_MAX}));
    };
    generate.add_option("--prompt", options.prompt, "text, for models of bytes (vocabulary of 257)");
    ids("--tokens", options.tokens, "1,2,3: token ids instead (scripts/tokens.py makes and reads them)")
        ->excludes("--prompt");
    ids("--stop", options.stop_tokens, "1,2: token ids that end the text, and are not printed");
    add_integer(&generate, "--max-tokens", options.max_tokens, {.min = 1, .max = 1 << 20},
                "of the text after the prompt (default: 64)");
    add_number(&generate, "--temperature", options.sampling.temperature, {.max = 1e6},
               "0: the most probable token (greedy); larger: more variety (default: 1)");
    add_number(&generate, "--top-p", options.sampling.top_p, {.max = 1},
               "draw from the most probable tokens that together have this probability (default: 1)");
    add_integer(&generate, "--top-k", options.sampling.top_k, {.max = INT32_MAX},
                "draw from so many tokens, 0: all (default: 0)");
    add_integer(&generate, "--seed", options.sampling.seed, {.max = INT64_MAX}, "of the draws (default: 1)");
}
// A folder is that of a run; its results go there.
inline void complete_trained_options(RunOptions& options, const std::string& out) {
    require(!options.config_path.empty() || !options.hf_config.empty(), ExitCode::usage,
            "want a run's folder, a configuration (see configs/), or --hf-config config.json");
    std::error_code error;
    if (!std::filesystem::is_directory(options.config_path, error)) return;
    options.run = options.config_path;
    options.config_path += "/config.yaml";
    if (!out.empty()) return;
    options.overrides.push_back("output.out=" + builders::quoted(options.run));
    options.taken = RunFolder::Taken::enter;
}

// --join takes the configuration of its first folder, if none is named.
inline void complete_validate_options(RunOptions& options) {
    if (!options.joined.empty() && options.config_path.empty())
        options.config_path = options.joined.front() + "/config.yaml";
    require(!options.config_path.empty() || !options.hf_config.empty(), ExitCode::usage,
            "validate: want a configuration (see configs/), --hf-config config.json, or --join FOLDER ...");
}

// Throws Error(usage) for an argument that is empty, as an unset variable of a shell leaves it: no option
// means anything by it, and "not given" would be another run.
inline void require_values(int argc, const char* const* argv) {
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

}  // namespace fp8flow
