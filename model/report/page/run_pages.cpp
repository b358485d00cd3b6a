// SPDX-License-Identifier: MIT
// The data of the pages of `train` and `validate`.
#include "model/report/page/run_pages.h"

#include "model/report/table.h"
#include "model/report/validate_report.h"

#include <algorithm>
#include <cmath>

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

using Curves = std::vector<std::vector<double>>;

// The mean over seeds after the warm-up, and the band of the seeds around it.
json seeds_curve(const std::string& name, const Curves& seeds, int64_t warmup) {
    Series mean, low, high;
    for (size_t i = to_size(warmup); !seeds.empty() && i < seeds.front().size(); ++i) {
        double sum = 0, least = seeds.front()[i], most = least;
        for (const auto& values : seeds) {
            sum += values[i];
            least = std::min(least, values[i]);
            most = std::max(most, values[i]);
        }
        const auto iteration = f64(i + 1);
        mean.x.push_back(iteration);
        mean.y.push_back(sum / f64(seeds.size()));
        low.y.push_back(least);
        high.y.push_back(most);
    }
    low.x = high.x = mean.x;
    json properties = {{"name", name}, {"dashed", name == validate::kControlArm}};
    if (seeds.size() > 1) properties.update({{"low", curve(low, {})}, {"high", curve(high, {})}});
    return curve(mean, std::move(properties));
}

// 100 (EMA - EMA_base) / EMA_base of each pair of runs.
Curves differences_of(const validate::Outcome& outcome, double decay) {
    Curves result;
    for (const validate::Pair& pair : outcome.pairs) {
        result.push_back(validate::ema(pair.own->loss, decay));
        const std::vector<double> base = validate::ema(pair.base->loss, decay);
        for (size_t i = 0; i < base.size(); ++i) result.back()[i] = 100 * (result.back()[i] / base[i] - 1);
    }
    return result;
}

// The 95 % interval as a line, and a dot for each seed.
json interval_row(const validate::Outcome& outcome, const validate::Outcomes& outcomes) {
    const double half = outcome.training.half_width(), mean = outcome.training.mean;
    const bool known = std::isfinite(half);
    json dots = json::array();
    for (const validate::Pair& pair : outcome.pairs) {
        const double base = mean_in(outcomes.window, pair.base->loss);
        dots.push_back({100 * (mean_in(outcomes.window, pair.own->loss) / base - 1), outcome.arm});
    }
    const bool to_baseline = outcome.against == outcomes.arms.front().arm;
    return {{"label", outcome.arm},
            {"low", known ? json(100 * (mean - half) / outcome.base) : nullptr},
            {"high", known ? json(100 * (mean + half) / outcome.base) : nullptr},
            {"note",
             percent_text(outcome.training, outcome.base) + (to_baseline ? "" : " to " + outcome.against)},
            {"dots", std::move(dots)}};
}

// The cards "Loss" and "Difference of the loss at the end".
void add_losses(Page& page, const Config& config, const validate::Outcomes& outcomes) {
    const ValidateSpec& spec = config.validate;
    const double limit = spec.max_relative_loss_error * 100.0;
    bool others = false;
    json bands = json::array(), curves = json::array(), differences = json::array(), rows = json::array();
    for (const validate::Outcome& outcome : outcomes.arms) {
        Curves losses;
        for (const validate::Run* run : outcome.runs)
            losses.push_back(validate::ema(run->curve.loss, spec.ema_decay));
        curves.push_back(seeds_curve(outcome.arm, losses, 0));
        if (outcome.pairs.empty()) continue;
        differences.push_back(
            seeds_curve(outcome.arm, differences_of(outcome, spec.ema_decay), spec.warmup_iters));
        rows.push_back(interval_row(outcome, outcomes));
        others |= outcome.against != outcomes.arms.front().arm;
    }
    if (outcomes.noise)
        bands.push_back(
            {{"low", -100 * *outcomes.noise}, {"high", 100 * *outcomes.noise}, {"name", "noise floor"}});
    const std::string title = "difference of the loss";
    if (!rows.empty())
        page.set("loss_dots",
                 {{"x_label", title},
                  {"unit", " %"},
                  {"mark", 0},
                  {"zoom", true},
                  {"bands", json::array({{{"low", -limit}, {"high", limit}, {"name", "limit"}}})},
                  {"rows", std::move(rows)}});
    page.set("loss",
             {{{"title", "loss, nats per token, logarithmic"},
               {"x_label", "iteration"},
               {"log", true},
               {"series", curves}},
              {{"title", title + " from " + outcomes.arms.front().arm +
                             (others ? ", or from the arm named below" : "")},
               {"x_label", "iteration"},
               {"unit", " %"},
               {"zoom", true},
               {"series", std::move(differences)},
               {"lines", {{{"y", limit}, {"name", fmt::format("limit ±{:.3g} %", limit)}}, {{"y", -limit}}}},
               {"bands", std::move(bands)}}});
    page.set("loss_note", fmt::format("Same data and initial weights for each seed; EMA {}. Line: mean over "
                                      "seeds. Band: lowest to highest seed.",
                                      spec.ema_decay));
    page.set(
        "loss_dots_note",
        fmt::format("Mean loss of iterations {} to {}. Dot: a seed. Line: 95 % interval of the mean. {}.",
                    outcomes.window.first + 1, outcomes.window.end, noise_text(outcomes)));
}

}  // namespace

std::string train_page(const RunTitle& title, const TrainResult& run) {
    const Config& config = title.config;
    Page page = page_of(fmt::format("{}: training under {} on {}", title.name, recipe_name(config.precision),
                                    device_count(title.provenance)),
                        title);
    page.fact("iterations", fmt::format("{} of {}", run.steps_done, config.training.train_iters));
    const auto& [losses, held_out, routing, tensors] = run.sums;
    json curves = json::array({curve(losses, {{"name", "train"}})}), lines = json::array();
    if (!losses.y.empty())
        page.fact("training loss",
                  fmt::format("{:.4f} to {:.4f} nats per token", losses.y.front(), losses.y.back()));
    if (!held_out.y.empty()) {
        page.fact("held out", evaluation_text(config, held_out.y.back()));
        curves.push_back(curve(held_out, {{"name", "held out"}, {"points", true}}));
    }
    if (run.floor) lines.push_back({{"name", "entropy of the source"}, {"y", *run.floor}});
    const std::string part =
        run.first_step > 0 ? fmt::format(", from iteration {} on", run.first_step + 1) : "";
    page.fact("time" + part, format_duration(run.seconds));
    page.fact("tokens per second, all ranks" + part, format_si(run.tokens_per_second));
    page.set("loss", json::array({{{"title", "nats per token, logarithmic"},
                                   {"x_label", "iteration"},
                                   {"log", true},
                                   {"series", std::move(curves)},
                                   {"lines", std::move(lines)}}}));
    page.set("stage_seconds", run.last.stage_seconds);
    const json memory = {{"parameters", run.memory.parameters},
                         {"saved", run.memory.saved},
                         {"workspace", run.memory.workspace.reserved}};
    page.set("memory", json::array({memory}));
    if (!tensors.empty()) page.set("tensor_stats", tensors.heat());
    if (!routing.empty()) page.set("routing", json::array({routing.group("Layers, over this run")}));
    return page.html();
}

std::string validate_page(const RunTitle& title, const validate::Outcomes& outcomes, json routing) {
    const Config& config = title.config;
    Page page = page_of(
        fmt::format("{}, {}: {}", title.name, name_of(outcomes.verdict), answer_text(outcomes, config)),
        title);
    page.set("arms", outcome_cells(outcomes, config));
    page.set("arms_note", table_heading(outcomes, config) + ". " + control_text(outcomes) + ".");
    add_losses(page, config, outcomes);
    page.set("routing", std::move(routing));
    return page.html();
}

}  // namespace fp8flow::report
