// SPDX-License-Identifier: MIT
// Texts of a run: its start, its memory, its data, its names.
#include "model/report/run_report.h"

#include "model/data/text.h"
#include "model/plan/plan.h"
#include "model/report/table.h"
#include "model/safetensors/header.h"

#include <fmt/core.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

namespace fp8flow::report {

using namespace data;
using namespace plan;

int64_t sum_of(const std::map<std::string, int64_t>& bytes) {
    int64_t sum = 0;
    for (const auto& [category, count] : bytes) sum += count;
    return sum;
}

nlohmann::json memory_json(const MemoryUse& memory) {
    return {{"parameters", memory.parameters},
            {"parameters, sum", sum_of(memory.parameters)},
            {"saved for backward", memory.saved},
            {"saved for backward, sum", sum_of(memory.saved)},
            {"saved for backward, reserved", memory.saved_sums.reserved},
            {"saved for backward, used", memory.saved_sums.used},
            {"workspace, reserved", memory.workspace.reserved},
            {"workspace, used", memory.workspace.used},
            {"routed rows of a layer, reserved", memory.capacity.layer},
            {"routed rows of a layer, most used", memory.most_wanted.layer},
            {"routed rows of all layers, reserved", memory.capacity.together},
            {"routed rows of all layers, most used", memory.most_wanted.together},
            {"activations, peak", memory.activations}};
}

MemoryUse memory_of(const Trainer& trainer, int64_t activations) {
    return {.parameters = trainer.parameter_bytes(),
            .saved = trainer.saved_bytes(),
            .saved_sums = trainer.saved_memory(),
            .workspace = trainer.workspace_memory(),
            .capacity = trainer.row_capacity(),
            .most_wanted = trainer.most_wanted(),
            .activations = activations};
}

std::string memory_text(const MemoryUse& memory) {
    const auto text = [](int64_t bytes) { return format_bytes(f64(bytes)); };
    return fmt::format(
        "{} of parameters, gradients, moments; reserved: {} for saved activations ({} used), {} of workspace",
        text(sum_of(memory.parameters)), text(memory.saved_sums.reserved), text(memory.saved_sums.used),
        text(memory.workspace.reserved));
}

void RedoneSteps::add(const StepResult& result) {
    ++observed;
    redone += result.redone > 0;
    times += result.redone;
    seconds += result.seconds;
    lost_seconds += result.redo_seconds;
}

std::string redone_text(const RedoneSteps& steps) {
    if (steps.redone == 0) return fmt::format("none of {}", counted(steps.observed, "iteration"));
    return fmt::format("{} of {}, {} in all: {:.3g} s lost, {:.1f} % of their time", steps.redone,
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
    const double mean =
        f64(config.training.micro_batch_size * config.model.seq_length * config.moe.moe_router_topk);
    return fmt::format(
        " iteration {} is repeated ({}, {:.3g} s lost): routed rows did not fit; the capacity is now {} "
        "rows per layer ({:.2f} x an even share) and {} for all layers",
        result.step + 1, counted(result.redone, "time"), result.redo_seconds, capacity.layer,
        f64(capacity.layer) / mean, capacity.together);
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

void report_start(RunLog& log, const Config& config, const BackendChoice& backend, int world_size) {
    const ParallelSpec& parallel = config.parallel;
    const RunPlan plan = make_plan(config, world_size);
    log.line(backend.note);
    if (const std::string note = attention_note(backend, config); !note.empty()) log.line(note);
    const int64_t threads = omp_get_max_threads();
    log.line("ranks: {} = expert parallel {} x data parallel {}; {} of {} experts and {} on each", world_size,
             parallel.expert_model_parallel_size, world_size / parallel.expert_model_parallel_size,
             config.moe.num_experts / parallel.expert_model_parallel_size, config.moe.num_experts,
             counted(threads, "thread"));
    log.line("model: {}, {} parameters, {} active per token", model_shape(config),
             format_si(f64(plan.total_parameters())), format_si(f64(plan.active_parameters())));
    for (const std::string& text : config.warnings) log.line("warning: " + text);
    log.line("recipe: {} ({} on the wire forward and backward, BF16 combine)", recipe_name(config.precision),
             config.precision.sends_fp8_rows() ? "FP8 rows + scales" : "BF16 rows");
    log.line("configuration, default | this run (every key: config.yaml, fp8flow --help-config):");
    for (const std::string& line : diff_configs({}, config)) log.line("  " + line);
}

std::string counted(int64_t count, std::string_view noun) {
    return fmt::format("{} {}{}", count, noun, count == 1 ? "" : noun.ends_with("ch") ? "es" : "s");
}

std::string run_name(const std::string& config_path, const std::string& hf_config) {
    const std::filesystem::path path = config_path.empty() ? hf_config : config_path;
    if (!config_path.empty() && path.filename() != "config.yaml") return path.stem();
    const std::string folder = path.empty() ? "" : absolute(path).lexically_normal().parent_path().filename();
    return folder.empty() ? "a model" : folder;
}

std::string model_shape(const Config& config) {
    return fmt::format("{}, hidden {}, {} experts top-{} of width {}",
                       counted(config.model.num_layers, "layer"), config.model.hidden_size,
                       config.moe.num_experts, config.moe.moe_router_topk, config.moe.moe_ffn_hidden_size);
}

std::string device_count(const Provenance& provenance) {
    return provenance.gpus > 0 ? counted(provenance.gpus, "GPU") : counted(provenance.ranks, "rank");
}

std::string device_name(const Provenance& provenance) {
    if (provenance.gpus > 0) return provenance.machine.gpu;
    return provenance.machine.cpu.empty() ? "CPU" : provenance.machine.cpu;
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
    const double epochs = f64(t.train_iters * t.global_batch_size) / f64(trained);
    if (epochs > kManyEpochs)
        warnings.push_back(fmt::format(
            "warning: this run reads its data {:.0f} times and will learn it by heart: give more of it "
            "(data.data_path), or lower training.train_iters to {}",
            epochs, std::max<int64_t>(1, trained / t.global_batch_size)));
    const int64_t held_out = data.samples_per_epoch(Split::held_out);
    const double asked = f64(t.eval_iters) * f64(t.global_batch_size);
    const int64_t fit = std::max<int64_t>(1, held_out / t.global_batch_size);
    if (held_out > 0 && asked > f64(held_out))
        warnings.push_back(
            fmt::format("warning: an evaluation reads {:.0f} windows and the held-out part has {}, so it "
                        "reads them {:.3g} times: hold more out{}",
                        asked, held_out, asked / f64(held_out),
                        t.eval_iters > fit ? fmt::format(", or lower training.eval_iters to {}", fit) : ""));
    return warnings;
}

void report_data(RunLog& log, const Config& config, const TokenSource& data) {
    const TrainingSpec& t = config.training;
    const int64_t samples = t.train_iters * t.global_batch_size, epoch = data.samples_per_epoch(Split::train);
    std::string text = "data: " + data.description();
    if (epoch != kUnlimited)
        text += fmt::format("; {} read {} tokens, {}", counted(t.train_iters, "iteration"),
                            samples * config.model.seq_length, data.epochs_text(samples));
    log.line(text);
    if (config.model.attention && config.data.data_kind != DataKind::synthetic)
        log.line("note: a sequence may contain several documents; attention is not masked between them");
    for (const std::string& warning : data_warnings(config, data)) log.line(warning);
}

std::string frozen_text(const ParameterStore& parameters) {
    int64_t count = 0, frozen = 0, all = 0;
    std::string names;
    for (const Parameter& p : parameters.all()) {
        all += p.numel();
        if (!p.frozen) continue;
        frozen += p.numel();
        if (++count <= 4) names += (count > 1 ? ", " : "") + p.spec.name;
    }
    if (count == 0) return {};
    const bool has_moments =
        std::ranges::find(parameters.all(), false, &Parameter::has_moments) == parameters.all().end();
    return fmt::format("frozen: {} of {} parameters on this rank, in {} of {} tensors, {} moments: {}{}",
                       format_si(f64(frozen)), format_si(f64(all)), count, parameters.all().size(),
                       has_moments ? "with" : "without", names, count > 4 ? ", ..." : "");
}

std::string evaluation_text(const Config& config, double nats) {
    if (config.data.data_kind == DataKind::text)
        return fmt::format("held-out loss {:.4f} nats = {:.4f} bits per byte", nats, nats / std::log(2.0));
    return fmt::format("held-out loss {:.4f} nats, perplexity {:.3f}", nats, std::exp(nats));
}

}  // namespace fp8flow::report
