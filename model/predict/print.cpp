// SPDX-License-Identifier: MIT
// The choices as text and JSON.
#include "model/predict/choose.h"
#include "model/report/plan_report.h"
#include "model/report/run_report.h"
#include "model/report/table.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>

namespace fp8flow::predict {

namespace {

using namespace report;
using nlohmann::ordered_json;

int64_t expert_parallel(const Choice& choice) { return choice.config.parallel.expert_model_parallel_size; }
double gibibytes(double bytes) { return bytes / 0x1p30; }

std::string step_text(double seconds) { return format_fixed(seconds * 1e3, seconds < 0.1 ? 1 : 0); }

// "2052", and between hosts "1540-3163".
std::string step_range(const StepTime& time) {
    return time.extrapolated() ? step_text(time.least) + "-" + step_text(time.most) : step_text(time.step);
}
std::string token_range(const StepTime& time) {
    return time.extrapolated() ? fmt::format("{} to {}", format_si(time.tokens / time.most),
                                             format_si(time.tokens / time.least))
                               : format_si(time.tokens_per_second());
}
std::string mfu_range(const StepTime& time, const Gpu& gpu) {
    const auto mfu = [&](double step) { return 100 * time.mfu(gpu.sheet) * time.step / step; };
    return time.extrapolated() ? fmt::format("{:.0f}-{:.0f} %", mfu(time.most), mfu(time.least))
                               : fmt::format("{:.0f} %", mfu(time.step));
}

// Why a prediction between hosts is a range.
std::string extrapolation_text(const StepTime& time, const Gpu& gpu, const char* indent = "") {
    const HostRuns& runs = gpu.calibration.host_runs;
    return fmt::format(
        "{0}extrapolation: no run between machines is measured. The range: networks of {1:.0f} to {2:.0f}\n"
        "{0}GB/s per GPU (--network); {3:.2f} to {4:.2f} times the prediction, as {5} on hosts made of one "
        "machine.\n",
        indent, time.network * 2e-9, time.network * 0.5e-9, runs.least, runs.most, counted(runs.runs, "run"));
}

enum class Wanted : uint8_t { text, markdown };

// Markdown names the keys that make a run fit; on a terminal they follow below the table.
Table table_of(const std::vector<Choice>& choices, const Gpu& gpu, Wanted wanted) {
    const bool several_hosts =
        std::ranges::any_of(choices, [](const auto& c) { return c.per_host.has_value(); });
    std::vector<Table::Column> columns = {{"GPUs"},        {"recipe", Align::left},
                                          {"EP"},          {"DP"},
                                          {"micro-batch"}, {"step ms"},
                                          {"tokens/s"},    {"MFU"},
                                          {"wire"}};
    if (several_hosts) columns.push_back({"per host ms"});
    columns.insert(columns.end(), {{"GiB/GPU"}, {"fits", Align::left}, {"basis", Align::left}});
    Table table(columns);
    int64_t gpus = 0;
    for (const Choice& c : choices) {
        if (gpus != 0 && gpus != c.gpus) table.add_rule();
        gpus = c.gpus;
        std::vector<std::string> cells = {
            std::to_string(c.gpus),
            std::string(recipe_name(c.config.precision.recipe)) + (c.fastest_that_fits() ? " *" : ""),
            std::to_string(expert_parallel(c)),
            std::to_string(c.gpus / expert_parallel(c)),
            std::to_string(c.config.training.micro_batch_size),
            step_range(c.time),
            token_range(c.time),
            mfu_range(c.time, gpu),
            format_percent(c.time.exposed / c.time.step, 0)};
        if (several_hosts) cells.push_back(c.per_host ? step_range(*c.per_host) : "-");
        const bool short_text = wanted == Wanted::text && !c.fit.settings.empty();
        cells.insert(cells.end(), {format_fixed(gibibytes(c.fit.needed), 1),
                                   short_text ? "with keys" : fit_text(c.fit), c.basis(gpu)});
        table.add_row(cells);
    }
    return table;
}

ordered_json json_of(const Choice& c, const Gpu& gpu) {
    ordered_json stages = ordered_json::array(), memory = ordered_json::array(),
                 largest = ordered_json::array();
    for (const StageTime& stage : c.time.stages)
        stages.push_back({{"part", stage.work.part},
                          {"stage", stage.work.stage},
                          {"direction", stage.work.direction},
                          {"seconds", stage.seconds},
                          {"wire_seconds", stage.wire},
                          {"runs", stage.runs},
                          {"launches", stage.work.launches},
                          {"roofline_seconds", roofline_seconds(stage.work, gpu.sheet, c.time.clock)},
                          {"bytes", stage.work.bytes},
                          {"gemm_flops", stage.work.bf16_flops + stage.work.fp8_flops},
                          {"wire_bytes", stage.work.wire_bytes}});
    for (const auto& item : c.fit.items)
        memory.push_back({{"category", item.category}, {"bytes", item.bytes}});
    for (const Consumer& consumer : c.fit.largest)
        largest.push_back(
            {{"category", consumer.item.category}, {"bytes", consumer.item.bytes}, {"key", consumer.key}});
    ordered_json result = {{"gpus", c.gpus},
                           {"recipe", std::string(recipe_name(c.config.precision.recipe))},
                           {"expert_model_parallel_size", expert_parallel(c)},
                           {"micro_batch_size", c.config.training.micro_batch_size},
                           {"global_batch_size", c.config.training.global_batch_size},
                           {"seq_length", c.config.model.seq_length},
                           {"tokens_per_step", c.time.tokens},
                           {"clock_hertz", c.time.clock},
                           {"layer_seconds", c.time.layer},
                           {"step_seconds", c.time.step},
                           {"step_seconds_range", nullptr},
                           {"tokens_per_second", c.time.tokens_per_second()},
                           {"mfu", c.time.mfu(gpu.sheet)},
                           {"wire_seconds", c.time.wire},
                           {"exposed_wire_seconds", c.time.exposed},
                           {"not_covered", not_covered(c.config)},
                           {"step_seconds_per_host", nullptr},
                           {"memory_bytes", c.fit.needed},
                           {"usable_bytes", c.fit.usable},
                           {"fits", c.fit.fits()},
                           {"settings_that_fit", c.fit.settings},
                           {"best", c.fastest_that_fits()},
                           {"basis", c.basis(gpu)},
                           {"memory", memory},
                           {"largest", largest},
                           {"stages", stages}};
    if (c.time.extrapolated()) result["step_seconds_range"] = {c.time.least, c.time.most};
    if (c.per_host) result["step_seconds_per_host"] = c.per_host->step;
    return result;
}

ordered_json calibration_of(const Gpu& gpu) {
    const Calibration& calibration = gpu.calibration;
    ordered_json result = {{"gpu", gpu.sheet.gpu},
                           {"calibrated", gpu.calibrated},
                           {"source", calibration.source},
                           {"commit", calibration.commit},
                           {"date", calibration.date}};
    if (calibration.check && gpu.calibrated)
        result["known_error"] = {{"runs", calibration.check->runs},
                                 {"mean_layer", calibration.check->mean_layer},
                                 {"worst_layer", calibration.check->worst_layer},
                                 {"mean_step", calibration.check->mean_step},
                                 {"worst_step", calibration.check->worst_step}};
    return result;
}

}  // namespace

std::string statement(const Gpu& gpu) {
    const Calibration& c = gpu.calibration;
    if (!gpu.calibrated)
        return fmt::format(
            "A prediction, uncalibrated: datasheet of the {}, shares of its rates as on the {}\n({}, {}).\n",
            gpu.sheet.gpu, c.gpu, c.source, c.date);
    std::string out = fmt::format("A prediction for the {}, calibrated {} from {} (commit {}).\n",
                                  gpu.sheet.gpu, c.date, c.source, c.commit);
    if (!c.check)
        return out + "Its error is not known: python3 scripts/calibrate.py --check RESULTS --gpu FILE.\n";
    return out + fmt::format(
                     "Mean error on {} runs on one host{}: layer {:.1f} % (worst {:.1f} %), step {:.1f} % "
                     "(worst {:.1f} %).\n",
                     c.check->runs, c.check->unseen ? ", of unseen models" : "", 100 * c.check->mean_layer,
                     100 * c.check->worst_layer, 100 * c.check->mean_step, 100 * c.check->worst_step);
}

std::string choices_text(const std::vector<Choice>& choices, const Gpu& gpu) {
    const Config& first = choices.front().config;
    std::string out = table_of(choices, gpu, Wanted::text).text();
    for (const Choice& choice : choices)
        if (choice.best && !choice.fit.fits())
            out += fmt::format("\n{}, {}, EP {}. {}", counted(choice.gpus, "GPU"),
                               recipe_name(choice.config.precision.recipe), expert_parallel(choice),
                               consumers_text(choice.fit, gpu.sheet));
    out += fmt::format(
        "\n* the fastest that fits, of its recipe and number of GPUs. wire: its share of a step. MFU is of "
        "{:.0f} TFLOP/s BF16.\n",
        gpu.sheet.peak() * 1e-12);
    if (std::ranges::any_of(choices, [](const auto& c) { return c.per_host.has_value(); }))
        out += fmt::format(
            "Experts on several hosts: {} for each (token, {}).\n'per host ms': one row for each (token, "
            "host), which NVLink fans out (moe_token_dispatcher_type: hierarchical).\n",
            one_row_per_host(first) ? "'step ms' too is with one row"
                                    : "the program sends one row through NCCL",
            one_row_per_host(first) ? "host" : "rank");
    const auto beyond = std::ranges::find_if(choices, [](const auto& c) { return c.time.extrapolated(); });
    if (beyond != choices.end()) out += extrapolation_text(beyond->time, gpu);
    out += fmt::format("Assumed: {}{}.\n", assumptions_text(first),
                       first.model.attention ? "" : "; no attention, in time, memory and MFU");
    return out + statement(gpu);
}

std::string choices_markdown(const std::vector<Choice>& choices, const Gpu& gpu) {
    return table_of(choices, gpu, Wanted::markdown).markdown();
}

ordered_json choices_json(const std::vector<Choice>& choices, const Gpu& gpu, const Provenance& provenance) {
    ordered_json json = {{"prediction", calibration_of(gpu)}, {"choices", ordered_json::array()}};
    for (const Choice& choice : choices) json["choices"].push_back(json_of(choice, gpu));
    add_provenance(json, provenance);
    return json;
}

std::string prediction_text(const Choice& c, const Gpu& gpu) {
    std::string out = fmt::format(
        "Step: {} ms at {:.0f} MHz, {} tokens/s, MFU {}; one MoE layer and micro-batch {:.3f} ms\n",
        step_range(c.time), c.time.clock * 1e-6, token_range(c.time), mfu_range(c.time, gpu),
        c.time.layer * 1e3);
    if (c.time.extrapolated()) out += extrapolation_text(c.time, gpu, "  ");
    std::map<std::string, double> parts;
    for (const StageTime& stage : c.time.stages) parts[stage.work.part] += stage.seconds * stage.runs;
    std::erase_if(parts, [](const auto& part) { return part.second <= 0; });
    int written = 0;
    for (const auto& [part, seconds] : parts) {
        out += written == 0 ? "  " : written % 6 == 0 ? ",\n  " : ", ";
        out += part + " " + step_text(seconds);
        ++written;
    }
    out += fmt::format("; wire {} ms of them\n", step_text(c.time.wire));
    if (const std::string left_out = not_covered(c.config); !left_out.empty())
        out += fmt::format("  not covered: {}\n", left_out);
    if (c.time.host_bound)
        out += "  the host's launches take longer than the GPU: schedule.cuda_graph_impl=full_iteration\n";
    if (c.per_host)
        out +=
            fmt::format("  {} ms with one row for each (token, host), which NVLink fans out (hierarchical)\n",
                        step_range(*c.per_host));
    if (const auto joined = joining_of(c.config, c.gpus, gpu))
        out += fmt::format(
            "Weight gradients of {} micro-batches in one GEMM (moe_wgrad_micro_batches{}):\n"
            "  layer {:.2f} -> {:.2f} ms ({:.3f} x the time), saved and waiting rows {:.2f} -> {:.2f} GiB "
            "per layer\n",
            joined->micro_batches, joined->used ? ", in use" : "", joined->layer_single * 1e3,
            joined->layer_joined * 1e3, joined->layer_joined / joined->layer_single,
            gibibytes(joined->bytes_single), gibibytes(joined->bytes_joined));
    out += c.fit.fits() ? fmt::format("Memory: fits, {:.1f} GiB of {:.1f} usable\n", gibibytes(c.fit.needed),
                                      gibibytes(c.fit.usable))
                        : consumers_text(c.fit, gpu.sheet);
    return out + statement(gpu);
}

ordered_json prediction_json(const Choice& choice, const Gpu& gpu) {
    ordered_json json = calibration_of(gpu);
    json.update(json_of(choice, gpu));
    if (const auto joined = joining_of(choice.config, choice.gpus, gpu))
        json["joined_weight_gradients"] = {{"used", joined->used},
                                           {"micro_batches", joined->micro_batches},
                                           {"layer_seconds_single", joined->layer_single},
                                           {"layer_seconds_joined", joined->layer_joined},
                                           {"layer_bytes_single", joined->bytes_single},
                                           {"layer_bytes_joined", joined->bytes_joined}};
    return json;
}

}  // namespace fp8flow::predict
