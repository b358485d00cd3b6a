// SPDX-License-Identifier: MIT
// Titles, curves, bands and dots of losses.
#include "model/report/loss_pictures.h"

#include "model/report/run_report.h"
#include "model/report/table.h"
#include "model/report/titles.h"

#include <algorithm>
#include <cmath>

namespace fp8flow::report {

namespace {

constexpr const char* kNoiseColor = "#d9703a";

std::string tokens_of_step(const Config& config) {
    return format_count(config.training.global_batch_size * config.model.seq_length) + " tokens a step";
}

std::string validate_subtitle(const RunTitle& title) {
    const Config& config = title.config;
    return fmt::format("{}; {}, {} iterations on {} ({}); same data, seed and initial weights; EMA {}",
                       model_shape(config), tokens_of_step(config), config.training.train_iters,
                       device_count(title.provenance), device_name(title.provenance),
                       config.validate.ema_decay);
}

// Over iterations from 1.
Series step_series(const std::string& name, const std::vector<double>& y, bool dashed) {
    Series series{.name = name, .y = y, .dashed = dashed};
    for (size_t i = 0; i < y.size(); ++i) series.x.push_back(static_cast<double>(i + 1));
    return series;
}

// (EMA - EMA_base) / EMA_base per step, in percent, of curve `index`.
std::vector<double> signed_percent(const std::vector<validate::Curve>& curves, size_t index, double decay) {
    std::vector<double> own = validate::ema(curves[index].loss, decay);
    const std::vector<double> base = validate::ema(curves[curves[index].against].loss, decay);
    for (size_t i = 0; i < own.size(); ++i) own[i] = 100.0 * (own[i] - base[i]) / base[i];
    return own;
}

// The limit and the noise floor, in percent.
std::vector<Band> difference_bands(const Config& config, const ValidateLosses& losses) {
    const double limit = config.validate.max_relative_loss_error * 100.0;
    std::vector<Band> bands = {{-limit, limit, fmt::format("limit \u00b1{:.3g} %", limit)}};
    if (losses.noise)
        bands.push_back(
            {-*losses.noise * 100.0, *losses.noise * 100.0,
             fmt::format("noise floor \u00b1{:.2g} % (bf16, another summation order)", *losses.noise * 100.0),
             kNoiseColor});
    return bands;
}

}  // namespace

Panel train_panel(const TrainLosses& losses) {
    Panel panel{.series = {losses.train}};
    panel.series.front().name = "train";
    if (!losses.held_out.x.empty()) {
        panel.series.push_back(losses.held_out);
        panel.series.back().name = "held out";
        panel.series.back().points = true;
    }
    if (losses.floor) panel.lines.push_back({*losses.floor, "entropy of the source"});
    return panel;
}

ValidatePanels validate_panels(const Config& config, const ValidateLosses& losses) {
    const double decay = config.validate.ema_decay;
    ValidatePanels panels{.differences = {.bands = difference_bands(config, losses), .tick_suffix = " %"}};
    for (size_t i = 0; i < losses.curves.size(); ++i) {
        const validate::Curve& curve = losses.curves[i];
        const bool control = curve.name == losses.control_arm;
        panels.losses.series.push_back(step_series(curve.name, validate::ema(curve.loss, decay), control));
        if (i > 0)
            panels.differences.series.push_back(
                step_series(curve.name, signed_percent(losses.curves, i, decay), control));
    }
    return panels;
}

std::string train_picture(const RunTitle& title, const TrainLosses& losses) {
    const Config& config = title.config;
    LineChart chart;
    chart.title = fmt::format("{}: training loss under {} on {}", title.name, recipe_name(config.precision),
                              device_count(title.provenance));
    chart.subtitle = fmt::format("{}; {}", model_shape(config), tokens_of_step(config));
    if (losses.tokens_per_second > 0)
        chart.subtitle += fmt::format(", {} tokens/s in all", format_si(losses.tokens_per_second));
    chart.subtitle += "; " + device_name(title.provenance);
    chart.x_label = "iteration";
    Panel panel = train_panel(losses);
    panel.y_label = "loss (nats per token)";
    if (!losses.held_out.x.empty())
        panel.series.back().name += fmt::format(", last {:.4f}", losses.held_out.y.back());
    chart.panels = {panel};
    return render_svg(chart);
}

std::string error_text(double error, std::optional<double> noise) {
    return fmt::format("{:.3g} %{}", error * 100.0,
                       !noise || resolved(error, *noise) ? "" : " (within the noise floor)");
}

std::string verdict_text(const Config& config, const ValidateLosses& losses) {
    const std::string limit = fmt::format("limit {:.3g} %", config.validate.max_relative_loss_error * 100.0);
    std::vector<const validate::Comparison*> recipes;
    for (const validate::Comparison& c : losses.comparisons)
        if (c.name != losses.control_arm) recipes.push_back(&c);
    if (recipes.empty()) return losses.verdict + ": no recipe to compare, " + limit;
    const std::string base = losses.curves.front().name;
    std::string text;
    if (recipes.size() > 3) {
        const double worst = (*std::max_element(recipes.begin(), recipes.end(), [](auto a, auto b) {
                                 return a->max < b->max;
                             }))->max;
        text = fmt::format("{} arms at most {}", recipes.size(), error_text(worst, losses.noise));
    } else {
        for (const validate::Comparison* c : recipes)
            text +=
                fmt::format("{}{} {}", text.empty() ? "" : ", ", c->name, error_text(c->max, losses.noise));
    }
    return fmt::format("{}: {} from the loss of {}, {}", losses.verdict, text, base, limit);
}

std::string validate_picture(const RunTitle& title, const ValidateLosses& losses) {
    const Config& config = title.config;
    LineChart chart;
    chart.title = title.name + ", " + verdict_text(config, losses);
    chart.subtitle = validate_subtitle(title);
    chart.x_label = fmt::format("iteration (the verdict counts from {})", config.validate.warmup_iters + 1);
    ValidatePanels panels = validate_panels(config, losses);
    panels.losses.y_label = "loss (nats per token)";
    panels.differences.y_label = "difference of the loss";
    panels.differences.lines.push_back({0.0, ""});
    chart.panels = {panels.losses, panels.differences};
    return render_svg(chart);
}

std::string validate_dots(const RunTitle& title, const ValidateLosses& losses) {
    const Config& config = title.config;
    DotChart chart;
    chart.title = title.name + ", " + verdict_text(config, losses);
    chart.subtitle = validate_subtitle(title);
    chart.x_label = "difference of the loss at the end";
    chart.tick_suffix = " %";
    chart.legend =
        fmt::format("at the end; line: lowest to highest after iteration {}; dashed: no difference",
                    config.validate.warmup_iters);
    chart.bands = difference_bands(config, losses);
    chart.dots.push_back({.label = losses.curves.front().name, .note = "baseline"});
    for (size_t i = 1; i < losses.curves.size(); ++i) {
        const std::vector<double> percent = signed_percent(losses.curves, i, config.validate.ema_decay);
        const auto from = percent.begin() + config.validate.warmup_iters;
        const validate::Curve& curve = losses.curves[i];
        const std::string against =
            curve.against == 0 ? "" : " (to " + losses.curves[curve.against].name + ")";
        chart.dots.push_back({.label = curve.name + against,
                              .value = percent.back(),
                              .low = *std::min_element(from, percent.end()),
                              .high = *std::max_element(from, percent.end()),
                              .note = !losses.noise || resolved(percent.back(), 100.0 * *losses.noise)
                                          ? fmt::format("{:+.4f} %", percent.back())
                                          : std::string(kNotResolved)});
    }
    return render_svg(chart);
}

}  // namespace fp8flow::report
