// SPDX-License-Identifier: MIT
// The program's commands. Each returns the exit status; errors are thrown as Error and reported once, in
// main.
#pragma once

#include "kernels/comm/process_group.h"
#include "model/base/run_folder.h"
#include "model/commands/sampling.h"
#include "model/config/config.h"
#include "model/job/backend.h"
#include "model/predict/require_fit.h"
#include "model/report/log.h"
#include "model/validate/arms.h"
#include "model/validate/run_file.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow {

struct BenchOptions {
    std::vector<std::string> operations;
    std::vector<std::string> shapes;  // "T=4096,H=7168"
    std::string suite;
    std::string match;      // regular expression over "operation key=value ..."; empty: everything
    std::string out;        // folder for report.html, bench.json, bench.txt; empty: only print
    std::string plugin;     // library with kernels of the user (fp8flow/plugin.h); empty: none
    bool capture = false;   // instead of timing: one call of each row, for an attached profiler
    bool describe = false;  // instead of timing: names, shapes and layouts of the tensors
    int samples = 0;        // of a burst; 0: the protocol's
    std::optional<double> idle_seconds, sustained_seconds;
};

struct ReplayOptions {
    std::string input;    // safetensors with hidden_states and, for the backward pass, grad_output
    std::string routing;  // experts of every token; empty: the router chooses
    int64_t layer = 0;    // its number in the weights (Options::weights; empty: in the input)
    bool norm = false;    // the RMSNorm in front of the layer is part of it
    bool intermediates = false;
};

struct PlanOptions {
    std::vector<int64_t> gpus;    // empty: as many as share the experts
    std::string gpu = "h200";     // a kind of configs/gpus, or a file
    std::vector<Recipe> recipes;  // these, the next and more than one `gpus`: a table of runs
    std::vector<int64_t> expert_parallel, micro_batches;
    double mhz = 0;         // clock under load; 0: the calibration's
    double network = 0;     // GB/s of each GPU between hosts; 0: the kind's
    bool markdown = false;  // only the table
    std::string json;       // a file below output.out; empty: none
    std::string picture;    // NAME of NAME.html; empty: none
};

struct GenerateOptions {
    std::string prompt;           // bytes
    std::vector<int64_t> tokens;  // instead of a prompt
    std::vector<int64_t> stop_tokens;
    int64_t max_tokens = 64;
    Sampling sampling;
};

// Of the command line. Without config_path the configuration is that of hf_config; replay needs neither.
struct Options {
    std::string command;                                    // as it was typed, for the results
    RunFolder::Taken taken = RunFolder::Taken::next;        // overwrite: --overwrite
    FolderLock::Holder holder = FolderLock::Holder::keeps;  // is_replaced: --take-over
    report::Detail detail = report::Detail::normal;
    BackendKind backend = BackendKind::automatic;
    Placement placement;

    std::string config_path;
    std::vector<std::string> overrides;  // section.key=value
    std::string hf_config;  // a Hugging Face config.json, read before the configuration; empty: none
    std::vector<std::string> plugins;              // libraries with recipes of the user (fp8flow/recipe.h)
    std::map<std::string, std::string> libraries;  // by flow: the fingerprint of its library
    std::string weights;  // replay, evaluate, generate: safetensors with Hugging Face names; empty: others
    std::string run;      // evaluate, generate: the folder of train that config_path is in; empty: none
    int64_t windows = 0;  // evaluate: held-out windows of each source; 0: those of an evaluation in training
    int64_t dump_samples = 0;                // train: write token windows and train nothing
    validate::Ablation ablation = {};        // validate, profile
    std::vector<std::string> arms;           // validate: "NAME:key=value,key=value"
    std::vector<int64_t> seeds;              // validate; empty: training.seed
    std::string only;                        // validate: ARM:SEED; empty: all
    std::string routing_of;                  // validate: the others take the routing of this arm
    std::vector<std::string> joined;         // validate: folders of validations
    std::vector<std::string> equal_commits;  // validate: their runs are comparable
    std::optional<int64_t> measured_steps;   // profile
    predict::WhereShort where_short = {};    // train, validate, profile: warn: --force

    BenchOptions bench;
    ReplayOptions replay;
    PlanOptions plan;
    GenerateOptions generate;
};

// For a run of these options that writes to `out`.
inline RunFolder::Request run_folder_of(const Options& options, const std::string& out) {
    return {.path = out, .command = options.command, .taken = options.taken, .holder = options.holder};
}

// On the command line: not of a file, as the run's own configuration is.
bool is_asked(const Config& config, const char* key);
// Warns of each of these keys that the command line sets: the command does not read it.
void warn_of_unread(const Config& config, std::initializer_list<const char*> keys, report::RunLog& log);

int run_train(const Options& options, ProcessGroup& world);
// The token windows that the run would read, in their order, to <out>/samples.npy.
int run_dump_samples(const Options& options, ProcessGroup& world);
// Same data, seed and initial weights under every recipe of validate.recipes, plus a control arm.
int run_validate(const Options& options, ProcessGroup& world);
// The same report of runs that other processes have done (Options::joined).
int run_join(const Options& options, ProcessGroup& world);
// Refuses a warm-up as long as the run.
void require_compared_steps(const Config& config);
// From the files of runs, sorted, to the table, the report and the verdict. On the first rank.
int write_validation(const Options& options, const Config& config, const Provenance& provenance,
                     const std::vector<validate::RunFile>& files, const OutputFolder& folder,
                     report::RunLog& log);
// Where the time, the bytes and the memory of one layer go, stage by stage, under every recipe of
// profile.profile_recipes.
int run_profile(const Options& options, ProcessGroup& world);
// Held-out loss, bits per byte and next-token accuracy of a trained model: text, and <out>/evaluate.json.
int run_evaluate(const Options& options, ProcessGroup& world);
// Prints the tokens that a trained model puts after a prompt.
int run_generate(const Options& options, ProcessGroup& world);
// Two results of profile, printed; where `out` is not empty, also drawn: compare.html in it.
int run_compare(const std::string& before, const std::string& after, const std::string& command,
                const std::string& out);
// What runs need of this machine, and what is missing. `out`: where they would write.
int run_doctor(const std::string& out);
// Sizes, memory and time without running.
int run_plan(const Options& options);
Recipe recipe_named(const std::string& name);  // throws Error(usage)
// One MoE layer forward and backward on given tensors.
int run_replay(const Options& options, ProcessGroup& world);
// Times single operations. Rows of the results schema go to <out>/bench.json, the table to bench.txt.
int run_bench(const Options& options, ProcessGroup& world);
void print_bench_list();

}  // namespace fp8flow
