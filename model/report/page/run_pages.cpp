// SPDX-License-Identifier: MIT
// What the pages of `train` and `validate` hold, section by section.
#include "model/report/page/run_pages.h"

#include "model/report/svg_canvas.h"
#include "model/report/table.h"

#include <algorithm>

namespace fp8flow::report {

namespace {

using nlohmann::json;

constexpr const char* kProfileSays = "`fp8flow profile` with this configuration measures it.";

void add_run_facts(Page& page, const RunTitle& title) {
    const TrainingSpec& training = title.config.training;
    page.fact("tokens a step", format_count(training.global_batch_size * title.config.model.seq_length));
    page.fact("ranks", fmt::format("{}, expert parallel {}", title.provenance.ranks,
                                   title.config.parallel.expert_model_parallel_size));
}

}  // namespace

std::string train_page(const RunTitle& title, const TrainLosses& losses, const TrainEnd& end) {
    const Config& config = title.config;
    Page page(fmt::format("{}: training under {}", title.name, recipe_name(config.precision)), config,
              title.provenance);
    page.fact("iterations", fmt::format("{} of {}", end.steps_done, config.training.train_iters));
    if (!losses.train.y.empty())
        page.fact("training loss", fmt::format("{:.4f} to {:.4f} nats per token", losses.train.y.front(),
                                               losses.train.y.back()));
    if (!losses.held_out.y.empty()) page.fact("held out", evaluation_text(config, losses.held_out.y.back()));
    page.fact("time", format_duration(end.seconds));
    page.fact("tokens per second, all ranks", format_si(losses.tokens_per_second));
    add_run_facts(page, title);

    page.set("loss", json::array({chart_json(train_panel(losses), "nats per token", "iteration")}));
    if (end.last.stage_seconds.empty()) {
        page.absent("stages", std::string("Not timed in this run (output.time_stages). ") + kProfileSays);
    } else {
        // "backward/fc1 dgrad": a row a direction
        PageRows rows;
        for (const auto& [stage, seconds] : end.last.stage_seconds) {
            const size_t slash = std::min(stage.find('/'), stage.size());
            const std::string direction = stage.substr(0, slash);
            if (rows.rows.empty() || rows.rows.back().label != direction)
                rows.rows.push_back({direction, {}});
            const std::string name = slash == stage.size() ? stage : stage.substr(slash + 1);
            rows.rows.back().parts.emplace_back(name, seconds * 1e3);
        }
        page.set("stages", bars_json({rows}, "ms"), "The last iteration, rank 0.");
    }
    page.absent("timeline", kProfileSays);
    const MemoryUse& memory = end.memory;
    page.set(
        "memory",
        bars_json({{"", memory_rows(memory.parameters, memory.saved, memory.workspace.reserved)}}, "bytes"),
        "Rank 0, at the peak of a step; saved rows as room is set aside for them.");
    if (end.routing.empty())
        page.absent("routing", "No step of this run has counted tokens of experts.");
    else
        page.set("routing", {{"groups", json::array({end.routing.json("Layers, over this run")})}},
                 "Tokens of an expert over the mean of its layer: 1 is balanced.");
    return page.html();
}

std::string validate_page(const RunTitle& title, const ValidateLosses& losses,
                          const std::vector<RoutingHistory>& routing) {
    const Config& config = title.config;
    Page page(title.name + ", " + verdict_text(config, losses), config, title.provenance);
    page.fact("verdict", losses.verdict);
    add_run_facts(page, title);
    const ValidatePanels panels = validate_panels(config, losses);
    PageRows saved;
    json groups = json::array();
    for (size_t i = 0; i < losses.curves.size(); ++i) {
        const validate::Curve& curve = losses.curves[i];
        std::string text = fmt::format("{} a step", format_duration(curve.seconds_per_step));
        if (curve.held_out > 0) text += fmt::format(", held out {:.4f}", curve.held_out);
        if (i > 0)
            text = fmt::format("at most {} from {}, {}",
                               curve.name == losses.control_arm
                                   ? format_percent(losses.comparisons[i - 1].max, 4)
                                   : error_text(losses.comparisons[i - 1].max, losses.noise),
                               losses.curves[curve.against].name, text);
        page.fact(curve.name, text);
        page.color(curve.name, kPalette[i % kPalette.size()]);
        saved.rows.push_back({curve.name, {{"saved for the backward", curve.saved_bytes}}});
        if (i < routing.size() && !routing[i].empty()) groups.push_back(routing[i].json(curve.name));
    }
    page.set("loss",
             json::array({chart_json(panels.losses, "loss, nats per token", "iteration"),
                          chart_json(panels.differences, "difference of the loss", "iteration")}),
             fmt::format("Same data, seed and initial weights; EMA {}; the verdict counts from iteration {}.",
                         config.validate.ema_decay, config.validate.warmup_iters + 1));
    page.absent("stages", kProfileSays);
    page.absent("timeline", kProfileSays);
    page.set("memory", bars_json({saved}, "bytes"),
             "Kept for the backward by rank 0; `fp8flow plan` has the rest.");
    page.set("routing", {{"groups", std::move(groups)}},
             "Tokens of an expert over the mean of its layer: 1 is balanced.");
    return page.html();
}

}  // namespace fp8flow::report
