// Log lines, the step line, metrics records: what a run tells its user.
#include "model/run_report.h"

#include "model/plan.h"
#include "model/progress.h"
#include "model/table.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace fp8flow {

RunLog::RunLog(const OutputFolder& folder, std::string_view name)
    : file_(folder.open_lines(name, LineFile::Start::truncate)) {}

void RunLog::line(std::string_view text) {
    if (!file_) return;
    fmt::print("{}\n", text);
    std::fflush(stdout);
    file_->write_line(text);
}

namespace {

double flops_per_token(const Config& config) {
    double flops = 0;
    for (const FlopPart& part : count_flops(config)) flops += part.forward + part.backward;
    return flops;
}

// Worst utilisation over the MoE layers of a step.
struct LoadSummary {
    double max = 1, min = 1, cv = 0;
    int64_t dead = 0;
};
LoadSummary worst_load(const StepResult& result) {
    LoadSummary worst;
    if (result.load.empty()) return worst;
    worst.max = 0;
    for (const LayerLoad& load : result.load) {
        worst.max = std::max(worst.max, load.max);
        worst.min = std::min(worst.min, load.min);
        worst.cv = std::max(worst.cv, load.cv);
        worst.dead += load.dead_experts;
    }
    return worst;
}

}  // namespace

void report_start(RunLog& log, const Config& config, Trainer& trainer, const TokenSource& data,
                  const BackendChoice& backend, int world_size) {
    const ParallelSpec& parallel = config.parallel;
    int64_t active = 0;
    for (const ParameterPart& part : count_parameters(config)) active += part.active;
    log.line(backend.note);
    log.line(fmt::format("ranks: {} (expert parallel {}, experts per rank {}, data parallel {})", world_size,
                         parallel.expert_model_parallel_size,
                         config.moe.num_experts / parallel.expert_model_parallel_size, world_size));
    log.line(fmt::format(
        "model: {} layers, hidden {}, {} experts top-{} of width {}, {} parameters, {} active per token",
        config.model.num_layers, config.model.hidden_size, config.moe.num_experts, config.moe.moe_router_topk,
        config.moe.moe_ffn_hidden_size, format_si(static_cast<double>(trainer.parameters_total())),
        format_si(static_cast<double>(active))));
    const bool fp8_wire =
        config.precision.recipe == Recipe::fp8_flow && config.precision.moe_quantize_before_dispatch;
    log.line(fmt::format("recipe: {} ({} on the wire forward and backward, BF16 combine)",
                         recipe_name(config.precision.recipe), fp8_wire ? "FP8 rows + scales" : "BF16 rows"));
    log.line("data: " + data.description());
    if (const auto floor = data.entropy_floor_nats())
        log.line(fmt::format("floor of the loss (entropy of the source): {:.4f} nats", *floor));
}

std::string step_line(const Config& config, const StepResult& result, int world_size,
                      std::optional<double> eta_seconds) {
    StepLine line;
    line.time = std::chrono::system_clock::now();
    line.iteration = result.step + 1;
    line.train_iters = config.training.train_iters;
    line.consumed_samples = (result.step + 1) * config.training.global_batch_size;
    line.elapsed_ms = result.seconds * 1e3;
    const double tokens_per_second = static_cast<double>(result.tokens) / result.seconds / world_size;
    line.tflops_per_gpu = tokens_per_second * flops_per_token(config) * 1e-12;
    line.tokens_per_second = tokens_per_second;
    line.learning_rate = result.learning_rate;
    line.global_batch_size = config.training.global_batch_size;
    line.losses = {{"lm loss", result.lm_loss}};
    if (!config.moe.moe_router_load_balancing_type.empty())
        line.losses.push_back({"load_balancing_loss", result.balancing_loss});
    if (config.moe.moe_z_loss_coeff > 0) line.losses.push_back({"z_loss", result.z_loss});
    line.grad_norm = result.grad_norm;
    line.skipped_iterations = 0;
    line.nan_iterations = 0;
    const LoadSummary load = worst_load(result);
    line.extra = {{"load max/mean", fmt::format("{:.2f}", load.max)}};
    if (load.dead > 0) line.extra.push_back({"dead experts", fmt::format("{}", load.dead)});
    if (result.redone > 0) line.extra.push_back({"redone", fmt::format("{}", result.redone)});
    line.eta_seconds = eta_seconds;
    return format_step_line(line);
}

nlohmann::json step_json(const Config& config, const StepResult& result, int world_size) {
    nlohmann::json record = {{"iteration", result.step + 1},
                             {"lm loss", result.lm_loss},
                             {"load_balancing_loss", result.balancing_loss},
                             {"z_loss", result.z_loss},
                             {"grad norm", result.grad_norm},
                             {"learning rate", result.learning_rate},
                             {"iteration-time", result.seconds},
                             {"tokens", result.tokens},
                             {"tokens per second", static_cast<double>(result.tokens) / result.seconds},
                             {"TFLOP/s per rank", static_cast<double>(result.tokens) / result.seconds /
                                                      world_size * flops_per_token(config) * 1e-12},
                             {"stage seconds", result.stage_seconds},
                             {"wire bytes",
                              {{"routing", result.wire.routing},
                               {"dispatch", result.wire.dispatch},
                               {"combine", result.wire.combine}}},
                             {"casts", result.casts},
                             {"activation bytes", result.peak_bytes},
                             {"redone", result.redone}};
    for (const LayerLoad& load : result.load)
        record["load"].push_back({{"layer", load.layer},
                                  {"max", load.max},
                                  {"min", load.min},
                                  {"cv", load.cv},
                                  {"dead", load.dead_experts}});
    return record;
}

std::string evaluation_text(const Config& config, double nats) {
    if (config.data.data_kind == DataKind::text)
        return fmt::format("held-out loss {:.4f} nats = {:.4f} bits per byte", nats, nats / std::log(2.0));
    return fmt::format("held-out loss {:.4f} nats, perplexity {:.3f}", nats, std::exp(nats));
}

}  // namespace fp8flow
