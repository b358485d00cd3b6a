// SPDX-License-Identifier: MIT
// The data of the pages of `train` and `validate`.
#include "model/report/page/run_pages.h"

#include "model/report/table.h"

#include <algorithm>

namespace fp8flow::report {

namespace {

using nlohmann::json;

Page page_of(const std::string& heading, const RunTitle& title) {
    const Config& config = title.config;
    Page page(heading, model_shape(config) + "; " + device_name(title.provenance), title.provenance);
    page.set("configuration", dump_config(config));
    page.fact("tokens per step", format_count(config.training.global_batch_size * config.model.seq_length));
    page.fact("ranks", fmt::format("{}, expert parallel {}", title.provenance.ranks,
                                   config.parallel.expert_model_parallel_size));
    return page;
}

// The last value of a curve, and the lowest and the highest after the warm-up.
json dot_row(const validate::Curve& curve, const std::vector<double>& percent, int64_t warmup,
             const ValidateLosses& losses) {
    const auto [low, high] = std::minmax_element(percent.begin() + warmup, percent.end());
    const bool clear = !losses.noise || resolved(percent.back(), 100.0 * *losses.noise);
    const std::string& base = losses.curves[curve.against].name;
    return {{"label", curve.against == 0 ? curve.name : fmt::format("{} (to {})", curve.name, base)},
            {"low", *low},
            {"high", *high},
            {"note", clear ? fmt::format("{:+.4f} %", percent.back()) : std::string(kNotResolved)},
            {"dots", json::array({json::array({percent.back(), curve.name})})}};
}

json curve_of(const std::string& name, const std::vector<double>& y, bool dashed) {
    Series series{.y = y};
    for (size_t i = 0; i < y.size(); ++i) series.x.push_back(static_cast<double>(i + 1));
    return curve(series, {{"name", name}, {"dashed", dashed}});
}

// The cards "Loss" and "Difference of the loss at the end": smoothed losses of all arms, and the signed
// differences of all but the baseline, with the limit and the noise floor as bands.
void add_losses(Page& page, const Config& config, const ValidateLosses& losses) {
    const ValidateSpec& spec = config.validate;
    const double limit = spec.max_relative_loss_error * 100.0, noise = losses.noise.value_or(0) * 100.0;
    json bands = json::array({{{"low", -limit}, {"high", limit}, {"name", "limit"}}});
    if (losses.noise) bands.push_back({{"low", -noise}, {"high", noise}, {"name", "noise floor"}});
    json curves = json::array(), differences = json::array(), rows = json::array();
    for (size_t i = 0; i < losses.curves.size(); ++i) {
        const validate::Curve& arm = losses.curves[i];
        const bool control = arm.name == losses.control_arm;
        std::vector<double> own = validate::ema(arm.loss, spec.ema_decay);
        curves.push_back(curve_of(arm.name, own, control));
        if (i == 0) continue;
        const std::vector<double> base = validate::ema(losses.curves[arm.against].loss, spec.ema_decay);
        for (size_t k = 0; k < own.size(); ++k) own[k] = 100.0 * (own[k] - base[k]) / base[k];
        differences.push_back(curve_of(arm.name, own, control));
        rows.push_back(dot_row(arm, own, spec.warmup_iters, losses));
    }
    const std::string title = "difference of the loss";
    if (!rows.empty())
        page.set(
            "loss_dots",
            {{"x_label", title}, {"unit", " %"}, {"mark", 0}, {"bands", bands}, {"rows", std::move(rows)}});
    page.set("loss",
             {{{"title", "loss, nats per token"}, {"x_label", "iteration"}, {"series", std::move(curves)}},
              {{"title", title},
               {"x_label", "iteration"},
               {"unit", " %"},
               {"series", std::move(differences)},
               {"bands", std::move(bands)}}});
    page.set("loss_note",
             fmt::format("Same data, seed and initial weights; EMA {}; the verdict counts from iteration {}.",
                         spec.ema_decay, spec.warmup_iters + 1));
}

// "0.063 %", and "(within the noise floor)" where another summation order moves the loss as far
std::string error_text(double error, std::optional<double> noise) {
    return fmt::format("{:.3g} %{}", error * 100.0,
                       !noise || resolved(error, *noise) ? "" : " (within the noise floor)");
}

// "pass: fp8_flow 0.063 % from the loss of bf16, limit 0.25 %"
std::string verdict_text(const Config& config, const ValidateLosses& losses) {
    std::string text;
    double worst = 0;
    int64_t count = 0;
    for (const validate::Comparison& c : losses.comparisons) {
        if (c.name == losses.control_arm) continue;
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", c.name, error_text(c.max, losses.noise));
        worst = std::max(worst, c.max);
        ++count;
    }
    if (count > 3) text = fmt::format("{} arms at most {}", count, error_text(worst, losses.noise));
    text += count > 0 ? " from the loss of " + losses.curves.front().name : "no recipe to compare";
    return fmt::format("{}: {}, limit {:.3g} %", losses.verdict, text,
                       config.validate.max_relative_loss_error * 100.0);
}

}  // namespace

std::string train_page(const RunTitle& title, const TrainResult& run) {
    const Config& config = title.config;
    Page page = page_of(fmt::format("{}: training under {} on {}", title.name, recipe_name(config.precision),
                                    device_count(title.provenance)),
                        title);
    page.fact("iterations", fmt::format("{} of {}", run.steps_done, config.training.train_iters));
    json curves = json::array({curve(run.losses, {{"name", "train"}})}), lines = json::array();
    if (!run.losses.y.empty())
        page.fact("training loss",
                  fmt::format("{:.4f} to {:.4f} nats per token", run.losses.y.front(), run.losses.y.back()));
    if (!run.held_out.y.empty()) {
        page.fact("held out", evaluation_text(config, run.held_out.y.back()));
        curves.push_back(curve(run.held_out, {{"name", "held out"}, {"points", true}}));
    }
    if (run.floor) lines.push_back({{"name", "entropy of the source"}, {"y", *run.floor}});
    page.fact("time", format_duration(run.seconds));
    page.fact("tokens per second, all ranks", format_si(run.tokens_per_second));
    page.set("loss", json::array({{{"title", "nats per token"},
                                   {"x_label", "iteration"},
                                   {"series", std::move(curves)},
                                   {"lines", std::move(lines)}}}));
    page.set("stage_seconds", run.last.stage_seconds);
    const json memory = {{"parameters", run.memory.parameters},
                         {"saved", run.memory.saved},
                         {"workspace", run.memory.workspace.reserved}};
    page.set("memory", json::array({memory}));
    if (!run.routing.empty()) page.set("routing", json::array({run.routing.group("Layers, over this run")}));
    return page.html();
}

std::string validate_page(const RunTitle& title, const ValidateLosses& losses,
                          const std::vector<RoutingHistory>& routing) {
    Page page = page_of(title.name + ", " + verdict_text(title.config, losses), title);
    json saved = json::array(), groups = json::array();
    for (size_t i = 0; i < losses.curves.size(); ++i) {
        const validate::Curve& curve = losses.curves[i];
        std::string text = fmt::format("{} per step", format_duration(curve.seconds_per_step));
        if (curve.held_out > 0) text += fmt::format(", held out {:.4f}", curve.held_out);
        if (i > 0) {
            const double most = losses.comparisons[i - 1].max;
            text = fmt::format(
                "at most {} from {}, {}",
                curve.name == losses.control_arm ? format_percent(most, 4) : error_text(most, losses.noise),
                losses.curves[curve.against].name, text);
        }
        page.fact(curve.name, text);
        saved.push_back({{"name", curve.name}, {"saved", {{"saved", curve.saved_bytes}}}});
        if (i < routing.size() && !routing[i].empty()) groups.push_back(routing[i].group(curve.name));
    }
    add_losses(page, title.config, losses);
    page.set("memory", std::move(saved));
    page.set("routing", std::move(groups));
    return page.html();
}

}  // namespace fp8flow::report
