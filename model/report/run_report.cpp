// SPDX-License-Identifier: MIT
// Log lines, the step line and metrics records.
#include "model/report/run_report.h"

#include "model/config/fields.h"
#include "model/data/text.h"
#include "model/plan/plan.h"
#include "model/report/progress.h"
#include "model/report/records.h"
#include "model/report/table.h"
#include "model/safetensors/header.h"

#include <fmt/core.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace fp8flow::report {

using namespace data;
using namespace plan;

// A text of several lines may have a warning in one of them.
void RunLog::line(std::string_view text) {
    for (size_t begin = 0, end = 0; end != std::string_view::npos; begin = end + 1) {
        end = text.find('\n', begin);
        const std::string_view one = text.substr(begin, end - begin);
        write(one, terminal_.detail != Terminal::Detail::quiet || one.starts_with("warning:"));
    }
}

void RunLog::result(std::string_view text) { write(text, true); }

void RunLog::write(std::string_view text, bool shown) {
    if (!speaks_) return;
    if (shown) print(text);
    if (file_)
        file_->write_line(text);
    else
        kept_.emplace_back(text);
}

// A run outlives its terminal, or the reader of its pipe.
void RunLog::print(std::string_view text) {
    if (std::ferror(stdout) != 0) return;
    const std::string shown = fmt::format("{}\n", terminal_.color ? colored(text) : text);
    if (std::fwrite(shown.data(), 1, shown.size(), stdout) == shown.size() && std::fflush(stdout) == 0)
        return;
    const std::string lost = fmt::format(
        "warning: standard output cannot be written ({}); the run goes on, and its lines are in its log",
        std::strerror(errno));
    print_err(lost + "\n");
    write(lost, false);
}

void RunLog::open(const OutputFolder& folder, std::string_view name, LineFile::Start start) {
    file_.emplace(folder.open_lines(name, start));
    for (const std::string& text : kept_) file_->write_line(text);
    kept_.clear();
}

namespace {

constexpr const char* kRecords = "metrics.jsonl";

double flops_per_token(const Config& config) {
    double flops = 0;
    for (const FlopPart& part : count_flops(config)) flops += part.forward + part.backward;
    return flops;
}

// Worst utilisation over the MoE layers of a step.
struct LoadSummary {
    double max = 0;
    int64_t dead = 0;
};
LoadSummary worst_load(const StepResult& result) {
    LoadSummary worst;
    for (const LayerLoad& load : result.load) {
        worst.max = std::max(worst.max, load.max);
        worst.dead += load.dead_experts;
    }
    return worst;
}

int64_t sum_of(const std::map<std::string, int64_t>& bytes) {
    int64_t sum = 0;
    for (const auto& [category, count] : bytes) sum += count;
    return sum;
}

// A line for the sum, one for each of the largest categories, one for the others.
void add_memory_rows(Table& table, const std::string& name, const std::map<std::string, int64_t>& bytes) {
    constexpr size_t kShown = 6;
    std::vector<std::pair<std::string, int64_t>> sorted(bytes.begin(), bytes.end());
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
    table.add_row({name, format_bytes(static_cast<double>(sum_of(bytes)))});
    int64_t others = 0;
    for (size_t i = 0; i < sorted.size(); ++i) {
        if (i < kShown)
            table.add_row({"  " + sorted[i].first, format_bytes(static_cast<double>(sorted[i].second))});
        else
            others += sorted[i].second;
    }
    if (others > 0)
        table.add_row(
            {fmt::format("  {} others", sorted.size() - kShown), format_bytes(static_cast<double>(others))});
}

// The keys that differ from their defaults, a line for each section.
void report_config(RunLog& log, const Config& config) {
    const Config defaults;
    log.line(
        "configuration, where it differs from the defaults (every key: config.yaml, fp8flow --help-config):");
    for (const std::string& section : config_sections()) {
        std::string changed;
        for (const ConfigField& field : config_fields()) {
            if (field.section != section) continue;
            const std::string value = field.get(config);
            if (value != field.get(defaults))
                changed += fmt::format("{}{}: {}", changed.empty() ? "" : ", ", field.key, value);
        }
        if (!changed.empty()) log.line(fmt::format("  {:<10} {}", section, changed));
    }
}

}  // namespace

std::vector<nlohmann::json> records_until(const OutputFolder& folder, int64_t steps) {
    namespace fs = std::filesystem;
    const std::string path = folder.path_of(kRecords);
    std::error_code error;
    const fs::file_status status = fs::symlink_status(path, error);
    if (steps == 0 || !fs::exists(status)) return {};
    require(fs::is_regular_file(status), ExitCode::output,
            "{}: not a regular file; remove it, or set output.metrics=false", path);
    std::ifstream file(path, std::ios::binary);
    return parse_records(file, steps);
}

LineFile open_metrics(const OutputFolder& folder, const std::vector<nlohmann::json>& records) {
    std::string kept;
    for (const nlohmann::json& record : records) kept += record.dump() + "\n";
    folder.write_atomic(kRecords, kept);
    return folder.open_lines(kRecords, LineFile::Start::append);
}

std::string memory_table(const MemoryUse& memory) {
    Table table({{"memory of rank 0", Align::left}, {"bytes"}});
    add_memory_rows(table, "parameters", memory.parameters);
    add_memory_rows(table, "saved for backward", memory.saved);
    table.add_row({"saved, reserved", format_bytes(static_cast<double>(memory.saved_reserved))});
    table.add_row({"saved, used", format_bytes(static_cast<double>(memory.saved_used))});
    table.add_row({"workspace, reserved", format_bytes(static_cast<double>(memory.workspace.reserved))});
    table.add_row({"workspace, used", format_bytes(static_cast<double>(memory.workspace.used))});
    if (memory.capacity.layer > 0) {
        const auto rows = [](int64_t of_layer, int64_t together) {
            return fmt::format("{}, of all layers {}", of_layer, together);
        };
        table.add_row({"rows of a layer, reserved", rows(memory.capacity.layer, memory.capacity.together)});
        table.add_row(
            {"rows of a layer, most used", rows(memory.most_wanted.layer, memory.most_wanted.together)});
    }
    table.add_row(
        {"activations with workspace, peak", format_bytes(static_cast<double>(memory.activations))});
    return table.text(2);
}

nlohmann::json memory_json(const MemoryUse& memory) {
    return {{"parameters", memory.parameters},
            {"parameters, sum", sum_of(memory.parameters)},
            {"saved for backward", memory.saved},
            {"saved for backward, sum", sum_of(memory.saved)},
            {"saved for backward, reserved", memory.saved_reserved},
            {"saved for backward, used", memory.saved_used},
            {"workspace, reserved", memory.workspace.reserved},
            {"workspace, used", memory.workspace.used},
            {"routed rows of a layer, reserved", memory.capacity.layer},
            {"routed rows of a layer, most used", memory.most_wanted.layer},
            {"routed rows of all layers, reserved", memory.capacity.together},
            {"routed rows of all layers, most used", memory.most_wanted.together},
            {"activations, peak", memory.activations}};
}

void RedoneSteps::add(const StepResult& result) {
    if (observed == kObserved) return;
    ++observed;
    redone += result.redone > 0;
    times += result.redone;
    seconds += result.seconds;
    lost_seconds += result.redo_seconds;
}

std::string redone_text(const RedoneSteps& steps) {
    if (steps.redone == 0) return fmt::format("none of the first {}", counted(steps.observed, "iteration"));
    return fmt::format("{} of the first {}, {} in all: {:.3g} s lost, {:.1f} % of their time", steps.redone,
                       counted(steps.observed, "iteration"), counted(steps.times, "time"), steps.lost_seconds,
                       100 * steps.lost_seconds / std::max(steps.seconds, 1e-9));
}

nlohmann::json redone_json(const RedoneSteps& steps) {
    return {{"iterations observed", steps.observed},
            {"iterations redone", steps.redone},
            {"times", steps.times},
            {"seconds", steps.seconds},
            {"seconds lost", steps.lost_seconds}};
}

std::string capacity_text(const Config& config, const StepResult& result, const Trainer::Rows& capacity) {
    const double mean = static_cast<double>(config.training.micro_batch_size * config.model.seq_length *
                                            config.moe.moe_router_topk);
    return fmt::format(
        " iteration {} is repeated ({}, {:.3g} s lost): routed rows did not fit; the capacity is now {} "
        "rows per layer ({:.2f} x an even share) and {} for all layers",
        result.step + 1, counted(result.redone, "time"), result.redo_seconds, capacity.layer,
        static_cast<double>(capacity.layer) / mean, capacity.together);
}

std::string shell_word(const std::string& argument) {
    constexpr std::string_view kPlain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%";
    if (!argument.empty() && argument.find_first_not_of(kPlain) == std::string::npos) return argument;
    std::string text = "'";
    for (const char c : argument) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return text + "'";
}

namespace {

std::string own_program() {
    std::error_code error;
    std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
    if (error) program = "fp8flow";
    const std::filesystem::path near = program.lexically_proximate(std::filesystem::current_path(error));
    if (!near.empty() && near.begin()->string() != ".." && near.has_parent_path()) program = near;
    return program.string();
}

std::string started(const std::string& program, std::string_view command,
                    const std::vector<std::string>& arguments, int64_t world_size, const char* placement) {
    std::string text = world_size == 1
                           ? ""
                           : fmt::format("mpirun -n {} --quiet {}--bind-to none {}", world_size, placement,
                                         ::geteuid() == 0 ? "--allow-run-as-root " : "");
    text += shell_word(program) + " " + std::string(command);
    for (const std::string& argument : arguments) text += " " + shell_word(argument);
    return text;
}

}  // namespace

std::string command_line(std::string_view command, const std::vector<std::string>& arguments,
                         int64_t world_size) {
    return started(own_program(), command, arguments, world_size, "--oversubscribe ");
}

std::string gpu_command_line(std::string_view command, const std::vector<std::string>& arguments,
                             int64_t gpus, int64_t gpus_per_host) {
    return started(has_gpu_backend() ? own_program() : "build/cuda-release/fp8flow", command, arguments, gpus,
                   gpus > gpus_per_host ? "--hostfile hosts -x NCCL_NVLS_ENABLE=0 " : "");
}

std::string next_text(const std::vector<NextStep>& steps) {
    size_t width = 0;
    for (const NextStep& step : steps) width = std::max(width, step.what.size());
    std::string text;
    for (const NextStep& step : steps)
        text += fmt::format("{}  {:<4}  {:<{}}  {}", text.empty() ? "" : "\n", text.empty() ? "next" : "",
                            step.what, width, step.command);
    return text;
}

std::string run_config_yaml(const Config& config, const Provenance& provenance) {
    constexpr size_t kLongest = 4096;
    std::string text = fmt::format(
        "# Written by: {}\n# Not in this file: the number of ranks, --plugin, --backend and --force; the "
        "line above has them.\n",
        printable(provenance.command, kLongest));
    for (const std::string& warning : config.warnings) text += "# " + printable(warning, kLongest) + "\n";
    return text + dump_config(config);
}

std::string config_of_run(const std::string& config_path, const std::string& hf_config,
                          const std::vector<std::string>& overrides, const std::string& out) {
    const bool changed = std::any_of(overrides.begin(), overrides.end(), [](const std::string& setting) {
        return !setting.starts_with("output.out=");
    });
    return changed || !hf_config.empty() || config_path.empty() ? out + "/config.yaml" : config_path;
}

void report_start(RunLog& log, const Config& config, const BackendChoice& backend, int world_size) {
    const ParallelSpec& parallel = config.parallel;
    const RunPlan plan = make_plan(config, world_size);
    log.line(backend.note);
    const int64_t threads = omp_get_max_threads();
    log.line(fmt::format("ranks: {} = expert parallel {} x data parallel {}; {} of {} experts and {} on each",
                         world_size, parallel.expert_model_parallel_size,
                         world_size / parallel.expert_model_parallel_size,
                         config.moe.num_experts / parallel.expert_model_parallel_size, config.moe.num_experts,
                         counted(threads, "thread")));
    log.line(fmt::format(
        "model: {} layers, hidden {}, {} experts top-{} of width {}, {} parameters, {} active per token",
        config.model.num_layers, config.model.hidden_size, config.moe.num_experts, config.moe.moe_router_topk,
        config.moe.moe_ffn_hidden_size, format_si(static_cast<double>(plan.total_parameters())),
        format_si(static_cast<double>(plan.active_parameters()))));
    for (const std::string& text : config.warnings) log.line("warning: " + text);
    log.line(fmt::format("recipe: {} ({} on the wire forward and backward, BF16 combine)",
                         recipe_name(config.precision),
                         config.precision.sends_fp8_rows() ? "FP8 rows + scales" : "BF16 rows"));
    report_config(log, config);
}

std::string step_line(const Config& config, const StepResult& result, int world_size,
                      std::optional<double> eta_seconds, Terminal::Detail detail) {
    StepLine line;
    line.time = std::chrono::system_clock::now();
    line.iteration = result.step + 1;
    line.train_iters = config.training.train_iters;
    line.consumed_samples = (result.step + 1) * config.training.global_batch_size;
    line.elapsed_ms = result.seconds * 1e3;
    const double tokens_per_second = static_cast<double>(result.tokens) / result.seconds / world_size;
    line.tflops_per_gpu = tflops_per_rank(config, result, world_size);
    line.tokens_per_second = tokens_per_second;
    line.learning_rate = result.learning_rate;
    line.global_batch_size = config.training.global_batch_size;
    line.losses = {{"lm loss", result.lm_loss}};
    for (const RouterLoss& loss : result.router_losses) line.losses.push_back({loss.name, loss.mean()});
    line.grad_norm = result.grad_norm;
    line.skipped_iterations = result.skipped.empty() ? 0 : 1;
    line.nan_iterations = std::isfinite(result.lm_loss) && std::isfinite(result.grad_norm) ? 0 : 1;
    const LoadSummary load = worst_load(result);
    if (!result.load.empty()) line.load = load.max;
    line.dead_experts = load.dead;
    line.redone = result.redone;
    line.eta_seconds = eta_seconds;
    return detail == Terminal::Detail::verbose ? format_megatron_line(line) : format_step_line(line);
}

double tflops_per_rank(const Config& config, const StepResult& result, int world_size) {
    return static_cast<double>(result.tokens) / result.seconds / world_size * flops_per_token(config) * 1e-12;
}

nlohmann::json step_json(const Config& config, const StepResult& result, int world_size) {
    const double tokens = static_cast<double>(result.tokens) / result.seconds;
    const double tflops = tflops_per_rank(config, result, world_size);
    nlohmann::json record = {{"type", "step"},
                             {"iteration", result.step + 1},
                             {"lm_loss", result.lm_loss},
                             {"load_balancing_loss", 0.0},
                             {"load_balancing_loss_by_layer", nlohmann::json::array()},
                             {"z_loss", 0.0},
                             {"z_loss_by_layer", nlohmann::json::array()},
                             {"grad_norm", result.grad_norm},
                             {"learning_rate", result.learning_rate},
                             {"seconds", result.seconds},
                             {"tokens", result.tokens},
                             {"tokens_per_second", tokens},
                             {"tokens_per_second_per_gpu", tokens / world_size},
                             {"tflops", tflops * world_size},
                             {"tflops_per_gpu", tflops},
                             {"wire_bytes_routing", result.wire.routing},
                             {"wire_bytes_dispatch", result.wire.dispatch},
                             {"wire_bytes_combine", result.wire.combine},
                             {"casts", result.casts},
                             {"activation_bytes", result.peak_bytes},
                             {"redone", result.redone},
                             {"redo_seconds", result.redo_seconds}};
    for (const RouterLoss& loss : result.router_losses) {
        record[loss.name] = loss.mean();
        record[loss.name + "_by_layer"] = loss.by_layer;
    }
    record.update(flat({{"stage_seconds", result.stage_seconds}}));
    if (result.wire.between_hosts > 0) record["wire_bytes_between_hosts"] = result.wire.between_hosts;
    if (!result.skipped.empty()) record["skipped"] = result.skipped;
    for (const LayerLoad& load : result.load) {
        record["moe_layers"].push_back(load.layer);
        record["load_max"].push_back(load.max);
        record["load_min"].push_back(load.min);
        record["load_cv"].push_back(load.cv);
        record["dead_experts"].push_back(load.dead_experts);
    }
    return record;
}

nlohmann::json run_json(int64_t first_iteration, const Provenance& provenance) {
    nlohmann::json record = {{"type", "run"}, {"iteration", first_iteration}};
    add_provenance(record, provenance);
    return flat(record);
}

nlohmann::json evaluation_json(int64_t iteration, double nats) {
    return {{"type", "evaluation"},
            {"iteration", iteration},
            {"held_out_loss", nats},
            {"bits", nats / std::log(2.0)}};
}

std::string counted(int64_t count, std::string_view noun) {
    return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::vector<std::string> data_warnings(const Config& config, const TokenSource& data) {
    constexpr double kManyEpochs = 10;
    const TrainingSpec& t = config.training;
    std::vector<std::string> warnings;
    for (const std::string& warning : data.warnings()) warnings.push_back("warning: " + warning);
    const int64_t bytes = round_up(kByteVocabulary, config.model.make_vocab_size_divisible_by);
    if (config.data.data_kind == DataKind::text && config.model.vocab_size > bytes)
        warnings.push_back(fmt::format("warning: text has ids 0 to {} and model.vocab_size is {}: {}",
                                       kEndOfDocument, config.model.vocab_size, kTextIsBytes));
    const int64_t trained = data.samples_per_epoch(Split::train);
    if (trained == kUnlimited) return warnings;
    const double epochs =
        static_cast<double>(t.train_iters * t.global_batch_size) / static_cast<double>(trained);
    if (epochs > kManyEpochs)
        warnings.push_back(fmt::format(
            "warning: this run reads its data {:.0f} times and will learn it by heart: give more of it "
            "(data.data_path), or lower training.train_iters to {}",
            epochs, std::max<int64_t>(1, trained / t.global_batch_size)));
    const int64_t held_out = data.samples_per_epoch(Split::held_out);
    const auto asked = static_cast<double>(t.eval_iters) * static_cast<double>(t.global_batch_size);
    const int64_t fit = std::max<int64_t>(1, held_out / t.global_batch_size);
    if (held_out > 0 && asked > static_cast<double>(held_out))
        warnings.push_back(
            fmt::format("warning: an evaluation reads {:.0f} windows and the held-out part has {}, so it "
                        "reads them {:.3g} "
                        "times: hold more out{}",
                        asked, held_out, asked / static_cast<double>(held_out),
                        t.eval_iters > fit ? fmt::format(", or lower training.eval_iters to {}", fit) : ""));
    return warnings;
}

void report_data(RunLog& log, const Config& config, const TokenSource& data) {
    const TrainingSpec& t = config.training;
    const int64_t samples = t.train_iters * t.global_batch_size, epoch = data.samples_per_epoch(Split::train);
    std::string text = "data: " + data.description();
    if (epoch != kUnlimited)
        text += fmt::format("; {} read {} tokens, {:.3g} epochs", counted(t.train_iters, "iteration"),
                            samples * config.model.seq_length,
                            static_cast<double>(samples) / static_cast<double>(epoch));
    log.line(text);
    for (const std::string& warning : data_warnings(config, data)) log.line(warning);
}

std::string evaluation_text(const Config& config, double nats) {
    if (config.data.data_kind == DataKind::text)
        return fmt::format("held-out loss {:.4f} nats = {:.4f} bits per byte", nats, nats / std::log(2.0));
    return fmt::format("held-out loss {:.4f} nats, perplexity {:.3f}", nats, std::exp(nats));
}

}  // namespace fp8flow::report
