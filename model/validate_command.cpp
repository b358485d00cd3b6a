// `fp8flow validate`: the same data, seed and initial weights under every recipe, compared with BF16 and with a control arm.
#include "model/commands.h"
#include "model/progress.h"
#include "model/run_report.h"
#include "model/svg.h"
#include "model/table.h"
#include "model/validate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

namespace fp8flow {

namespace {

struct Arm {
    std::string name;
    Config config;
    Arithmetic arithmetic = Arithmetic::stated;
};

constexpr const char* kControl = "bf16 control";

// The baseline first, then the recipes, the control arm last.
std::vector<Arm> make_arms(const Config& config) {
    std::vector<Recipe> recipes = {Recipe::bf16};
    for (Recipe recipe : config.validate.recipes)
        if (std::find(recipes.begin(), recipes.end(), recipe) == recipes.end()) recipes.push_back(recipe);
    std::vector<Arm> arms;
    for (Recipe recipe : recipes) {
        // the config's own precision options belong to its own recipe
        Config own = recipe == config.precision.recipe ? config : with_recipe(config, recipe);
        arms.push_back({std::string(recipe_name(recipe)), own});
    }
    if (config.validate.control_arm) arms.push_back({kControl, arms.front().config, Arithmetic::alternative});
    for (const Arm& arm : arms) {
        for (const std::string& line : diff_configs(arms.front().config, arm.config)) {
            const bool allowed = line.starts_with("precision.") || line.starts_with("moe.moe_row_alignment");
            require(allowed, ExitCode::usage,
                    "validate compares runs that differ in the recipe alone; {} and {} differ in {}",
                    arms.front().name, arm.name, line);
        }
    }
    return arms;
}

class ValidateRun {
public:
    ValidateRun(const RunOptions& options, ProcessGroup& world)
        : world_(world),
          config_(load_config(options.config_path, options.overrides, world.size())),
          backend_(choose_backend(options.backend)),
          arms_(make_arms(config_)),
          eta_(config_.training.train_iters * static_cast<int64_t>(arms_.size())) {
        require(config_.validate.warmup_iters < config_.training.train_iters, ExitCode::usage,
                "validate.warmup_iters is {} and training.train_iters {}: no step is left to compare",
                config_.validate.warmup_iters, config_.training.train_iters);
        for (const Arm& arm : arms_) check_config(arm.config, world.size());
        if (world.rank() == 0) {
            folder_.emplace(config_.output.out);
            log_ = RunLog(*folder_, "validate.log");
            folder_->write_atomic("config.yaml", dump_config(config_));
            curve_file_.emplace(folder_->open_lines("loss.jsonl", LineFile::Start::truncate));
        }
        report_start(log_, config_, backend_, world.size(), options.ranks_on_host);
        data_ = open_data(config_);
        log_.line("data: " + data_->description());
    }

    int run() {
        std::string names;
        for (const Arm& arm : arms_) names += (names.empty() ? "" : ", ") + arm.name;
        log_.line(fmt::format("arms: {} ({} iterations each, same data, seed and initial weights)", names,
                              config_.training.train_iters));
        for (const Arm& arm : arms_) curves_.push_back(train_arm(arm));
        int status = 0;
        if (world_.rank() == 0) status = report();
        world_.broadcast(&status, sizeof status, 0);
        return status;
    }

private:
    Curve train_arm(const Arm& arm) {
        const auto start = std::chrono::steady_clock::now();
        Trainer trainer(arm.config, world_, backend_, arm.arithmetic, data_);
        Curve curve;
        curve.name = arm.name;
        for (int64_t i = 0; i < arm.config.training.train_iters; ++i) {
            const StepResult step = trainer.step();
            eta_.step_done(step.seconds);
            curve.loss.push_back(step.lm_loss);
            curve.grad_norm.push_back(step.grad_norm);
            curve.wire_bytes_per_step = step.wire.total();
            curve.casts_per_step = step.casts;
            if ((i + 1) % config_.output.log_interval == 0 || i + 1 == arm.config.training.train_iters)
                log_.line(progress_line(curve));
            if (curve_file_)
                curve_file_->write_json({{"arm", arm.name},
                                         {"iteration", i + 1},
                                         {"lm loss", step.lm_loss},
                                         {"grad norm", step.grad_norm}});
        }
        if (config_.training.eval_iters > 0) curve.held_out = trainer.evaluate(config_.training.eval_iters);
        curve.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        return curve;
    }

    // "fp8_flow       | iteration   12/  100 | lm loss 3.2428 | relative error 0.0630 % | ETA 0:01:20"
    std::string progress_line(const Curve& curve) const {
        std::string error;
        if (!curves_.empty()) {
            Curve base = curves_.front();
            base.loss.resize(curve.loss.size());
            base.grad_norm.resize(curve.loss.size());
            error = fmt::format(
                " | relative error {}",
                format_percent(compare(curve, base, config_.validate.ema_decay, 0).relative_error.back(), 4));
        }
        const int64_t iterations = config_.training.train_iters;
        return fmt::format(" {:<14} | iteration {:>{}}/{} | lm loss {:.4f}{} | ETA {}", curve.name,
                           curve.loss.size(), std::to_string(iterations).size(), iterations,
                           curve.loss.back(), error, format_clock(eta_.seconds_left().value_or(0)));
    }

    int report() {
        const ValidateSpec& v = config_.validate;
        const Curve& base = curves_.front();
        std::vector<Comparison> comparisons;
        double noise = 0;
        for (size_t i = 1; i < curves_.size(); ++i) {
            comparisons.push_back(compare(curves_[i], base, v.ema_decay, v.warmup_iters));
            if (curves_[i].name == kControl) noise = comparisons.back().max;
        }
        Table table({{"arm", Align::left},
                     {"final loss (EMA)"},
                     {"held out"},
                     {"max rel. error"},
                     {"mean"},
                     {"raw max"},
                     {"signed, end"},
                     {"grad norm ratio"},
                     {"casts/step"},
                     {"wire/step"},
                     {"verdict", Align::left}});
        auto cells = [&](const Curve& curve) {
            return std::vector<std::string>{curve.name, format_fixed(ema(curve.loss, v.ema_decay).back(), 4),
                                            curve.held_out > 0 ? format_fixed(curve.held_out, 4) : "-"};
        };
        auto tail = [](const Curve& curve) {
            return std::vector<std::string>{format_count(curve.casts_per_step),
                                            format_bytes(curve.wire_bytes_per_step)};
        };
        auto add = [&](std::vector<std::string> row, std::vector<std::string> middle, const Curve& curve,
                       const std::string& verdict) {
            row.insert(row.end(), middle.begin(), middle.end());
            for (const std::string& cell : tail(curve)) row.push_back(cell);
            row.push_back(verdict);
            table.add_row(row);
        };
        add(cells(base), {"-", "-", "-", "-", "-"}, base, "baseline");
        bool all_pass = true;
        nlohmann::json result = {
            {"bar", v.max_relative_loss_error}, {"noise floor", noise},
            {"warmup_iters", v.warmup_iters},   {"ema_decay", v.ema_decay},
            {"ranks", world_.size()},           {"iterations", config_.training.train_iters}};
        for (size_t i = 0; i < comparisons.size(); ++i) {
            const Comparison& c = comparisons[i];
            const bool control = c.name == kControl;
            const Verdict verdict = judge(c.max, noise, v.max_relative_loss_error);
            if (!control) all_pass = all_pass && verdict == Verdict::pass;
            const std::string text = control ? "noise floor" : name_of(verdict);
            add(cells(curves_[i + 1]),
                {format_percent(c.max, 4), format_percent(c.mean, 4), format_percent(c.raw_max, 4),
                 format_percent(c.signed_last, 4), format_fixed(c.grad_norm_ratio, 4)},
                curves_[i + 1], text);
            result["arms"].push_back({{"arm", c.name},
                                      {"max relative error", c.max},
                                      {"mean relative error", c.mean},
                                      {"raw max", c.raw_max},
                                      {"signed, end", c.signed_last},
                                      {"grad norm ratio", c.grad_norm_ratio},
                                      {"held out", curves_[i + 1].held_out},
                                      {"casts per step", curves_[i + 1].casts_per_step},
                                      {"wire bytes per step", curves_[i + 1].wire_bytes_per_step},
                                      {"seconds", curves_[i + 1].seconds},
                                      {"verdict", text}});
        }
        folder_->write_atomic("validate.json", result.dump(2) + "\n");
        folder_->write_atomic("loss.svg", picture(comparisons));
        log_.line("");
        log_.line(fmt::format(
            "relative loss error |EMA - EMA_bf16| / EMA_bf16 over iterations {} to {}, bar {}:",
            v.warmup_iters + 1, config_.training.train_iters, format_percent(v.max_relative_loss_error)));
        log_.line(table.text(2));
        if (!v.control_arm)
            log_.line("  no control arm: the noise floor is unknown (validate.control_arm)");
        else if (noise > 0.5 * v.max_relative_loss_error)
            log_.line(
                fmt::format("  inconclusive: another summation order of bf16 alone moves the loss by {}, "
                            "more than half the bar; use more "
                            "tokens per step (training.global_batch_size), a lower training.lr, or stronger "
                            "smoothing (validate.ema_decay)",
                            format_percent(noise, 4)));
        log_.line(
            fmt::format("  files  {}/: loss.svg, loss.jsonl, validate.json, validate.log", folder_->path()));
        log_.line(fmt::format("verdict: {}", all_pass                                  ? "pass"
                                             : noise > 0.5 * v.max_relative_loss_error ? "inconclusive"
                                                                                       : "miss"));
        return all_pass ? 0 : static_cast<int>(ExitCode::verdict_miss);
    }

    std::string picture(const std::vector<Comparison>& comparisons) const {
        LineChart chart;
        chart.title = "Loss under every recipe";
        chart.subtitle =
            fmt::format("EMA {}, same data, seed and initial weights", config_.validate.ema_decay);
        chart.x_label = "iteration";
        Panel losses{.y_label = "loss (nats per token)"},
            errors{.y_label = "relative error to bf16", .y_scale = AxisScale::log};
        auto series = [](const std::string& name, const std::vector<double>& y, double factor) {
            Series s{.name = name};
            for (size_t i = 0; i < y.size(); ++i) {
                s.x.push_back(static_cast<double>(i + 1));
                s.y.push_back(y[i] * factor);
            }
            s.dashed = name == kControl;
            return s;
        };
        for (const Curve& curve : curves_)
            losses.series.push_back(series(curve.name, ema(curve.loss, config_.validate.ema_decay), 1.0));
        for (const Comparison& c : comparisons)
            errors.series.push_back(series(c.name, c.relative_error, 100.0));
        errors.tick_suffix = " %";
        errors.lines.push_back({config_.validate.max_relative_loss_error * 100.0, "bar"});
        chart.panels = {losses, errors};
        return render_svg(chart);
    }

    ProcessGroup& world_;
    Config config_;
    BackendChoice backend_;
    std::vector<Arm> arms_;
    EtaEstimator eta_;
    std::optional<OutputFolder> folder_;
    std::shared_ptr<const TokenSource> data_;
    std::optional<LineFile> curve_file_;
    RunLog log_;
    std::vector<Curve> curves_;
};

}  // namespace

int run_validate(const RunOptions& options, ProcessGroup& world) { return ValidateRun(options, world).run(); }

}  // namespace fp8flow
