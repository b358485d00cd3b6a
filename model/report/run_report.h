// SPDX-License-Identifier: MIT
// Log lines (terminal and file), metrics and the closing summary of a run. Only rank 0 prints.
#pragma once

#include "model/base/output.h"
#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/report/terminal.h"
#include "model/train/trainer.h"

#include <nlohmann/json.hpp>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::report {

// Prints on the first rank and appends to <out>/<name>; silent on other ranks. open() creates the file and
// writes the earlier lines, so that a run that does not start leaves no file. A quiet terminal shows warnings
// and results; the file has every line.
class RunLog {
public:
    RunLog(int rank, Terminal terminal) : speaks_(rank == 0), terminal_(terminal) {}
    void line(std::string_view text);
    void result(std::string_view text);  // what the run was started for
    void open(const OutputFolder& folder, std::string_view name,
              LineFile::Start start = LineFile::Start::truncate);

    Terminal::Detail detail() const { return terminal_.detail; }

private:
    void write(std::string_view text, bool shown);
    void print(std::string_view text);

    bool speaks_;
    Terminal terminal_;
    std::vector<std::string> kept_;
    std::optional<LineFile> file_;
};

// The records (records.h) of metrics.jsonl below `folder`; none where it is absent or for 0 steps. Throws
// Error(output) if it is no regular file.
std::vector<nlohmann::json> records_until(const OutputFolder& folder, int64_t steps);
// metrics.jsonl with these records, open for appending.
LineFile open_metrics(const OutputFolder& folder, const std::vector<nlohmann::json>& records);

// Ranks, model, recipe, wire and configuration, before the run allocates memory.
void report_start(RunLog& log, const Config& config, const BackendChoice& backend, int world_size);
// The data, the epochs of this run, and warnings.
void report_data(RunLog& log, const Config& config, const data::TokenSource& data);
// Warnings if the data is not what the configuration names, too small for the run, or divided unevenly.
std::vector<std::string> data_warnings(const Config& config, const data::TokenSource& data);

// Bytes of one rank by category, at the peak of a step.
struct MemoryUse {
    std::map<std::string, int64_t> parameters;  // weights, their copies, masters, moments, gradients
    // Kept from forward to backward; routed rows count with their reserved capacity.
    std::map<std::string, int64_t> saved;
    int64_t saved_reserved = 0, saved_used = 0;  // Trainer::saved_memory
    Trainer::MemorySums workspace;
    Trainer::Rows capacity, most_wanted;  // routed rows
    int64_t activations = 0;              // saved + workspace
};
std::string memory_table(const MemoryUse& memory);  // the largest categories
nlohmann::json memory_json(const MemoryUse& memory);

// The cost of steps that were repeated because routed rows did not fit, among the first kObserved of a run.
struct RedoneSteps {
    static constexpr int64_t kObserved = 200;
    int64_t observed = 0, redone = 0, times = 0;  // steps; repeated steps; repetitions
    double seconds = 0, lost_seconds = 0;         // of the observed steps; lost by repeating

    void add(const StepResult& result);
};
std::string redone_text(const RedoneSteps& steps);
nlohmann::json redone_json(const RedoneSteps& steps);
// The new capacity for rows after a step that was repeated.
std::string capacity_text(const Config& config, const StepResult& result, const Trainer::Rows& capacity);

// An argument as a shell takes it.
std::string shell_word(const std::string& argument);
// A shell line that starts `command` as this run was started.
std::string command_line(std::string_view command, const std::vector<std::string>& arguments,
                         int64_t world_size);
// The same with a CUDA build on that many GPUs; on several hosts with a hostfile.
std::string gpu_command_line(std::string_view command, const std::vector<std::string>& arguments,
                             int64_t gpus, int64_t gpus_per_host);
// A command to run next, and its purpose.
struct NextStep {
    std::string what, command;
};
std::string next_text(const std::vector<NextStep>& steps);
// config.yaml of a run: its command line as a comment, then every key.
std::string run_config_yaml(const Config& config, const Provenance& provenance);
// The configuration file for a command after this run: the one that the run read, or, if options other than
// --out changed it, config.yaml below `out`.
std::string config_of_run(const std::string& config_path, const std::string& hf_config,
                          const std::vector<std::string>& overrides, const std::string& out);

double tflops_per_rank(const Config& config, const StepResult& result, int world_size);  // model FLOPs
// Records of metrics.jsonl (docs/usage/train.md): a step, an evaluation, and the start of a run.
nlohmann::json step_json(const Config& config, const StepResult& result, int world_size);
nlohmann::json evaluation_json(int64_t iteration, double nats);
nlohmann::json run_json(int64_t first_iteration, const Provenance& provenance);
// One line; verbose: with Megatron-LM's fields.
std::string step_line(const Config& config, const StepResult& result, int world_size,
                      std::optional<double> eta_seconds, Terminal::Detail detail);
// "1 rank", "2 ranks"
std::string counted(int64_t count, std::string_view noun);
// "held-out loss 2.10 nats = 3.03 bits per byte"
std::string evaluation_text(const Config& config, double nats);

}  // namespace fp8flow::report
