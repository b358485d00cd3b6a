// SPDX-License-Identifier: MIT
// `fp8flow validate`: the same data, seed and initial weights under every recipe, compared with BF16 and with
// a control arm.
#include "model/validate/validate.h"
#include "model/base/provenance.h"
#include "model/commands/commands.h"
#include "model/commands/next_steps.h"
#include "model/report/page/run_pages.h"
#include "model/report/progress.h"
#include "model/report/run_report.h"
#include "model/report/step_values.h"
#include "model/report/table.h"
#include "model/report/validate_report.h"
#include "model/validate/arms.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace fp8flow {

using namespace data;
using namespace validate;
using namespace report;

namespace {

Config validated_config(const RunOptions& options, int ranks) {
    Config config = load_config(options.config_path, options.overrides, ranks, options.hf_config);
    config.precision.fault_wrong_scale_index = options.plants_fault;
    return config;
}

class ValidateRun {
public:
    ValidateRun(const RunOptions& options, ProcessGroup& world)
        : world_(world),
          config_(validated_config(options, world.size())),
          backend_(choose_backend(options.backend, options.placement, world)),
          joined_(predict::decide_joined(config_, backend_, world)),
          provenance_(make_provenance(options.command, backend_, world.size())),
          name_(run_name(options.config_path, options.hf_config)),
          options_(options),
          ablation_(options.ablation != Ablation::none),
          arms_(make_arms(config_, options.ablation, world.size())),
          eta_(config_.training.train_iters * static_cast<int64_t>(arms_.size())),
          log_(world.rank(), options.terminal) {
        require(
            config_.validate.warmup_iters < config_.training.train_iters, ExitCode::usage,
            "validate.warmup_iters is {} and training.train_iters {}: no step is left to compare; lower the "
            "one or raise the other",
            config_.validate.warmup_iters, config_.training.train_iters);
        for (Arm& arm : arms_) {
            check_config(arm.config, world.size());
            arm.config.training.on_divergence = OnDivergence::stop;  // arms that skip steps do not compare
        }
        run_folder_.emplace(run_folder_of(options, config_), world);
        config_.output.out = run_folder_->name();
        config_to_name_ = config_of_run(options, config_.output.out);
        if (!run_folder_->note().empty()) log_.line(run_folder_->note());
        report_start(log_, config_, backend_, world.size());
        if (!joined_.empty()) log_.line(joined_);
        predict::require_fit(log_, configs_of(arms_), backend_, world, options.placement.ranks_on_host,
                             options.where_short);
        data_ = open_data(config_);
        report_data(log_, config_, *data_);
        if (!config_.checkpoint.pretrained_checkpoint.empty())
            log_.line(
                "warning: checkpoint.pretrained_checkpoint is read by train alone: every recipe starts from "
                "initial weights here");
        run_folder_->keep();
        if (!run_folder_->is_first_rank()) return;
        folder_ = &run_folder_->folder();
        log_.open(*folder_, "validate.log");
        folder_->write_atomic("config.yaml", run_config_yaml(config_, provenance_));
        curve_file_.emplace(folder_->open_lines("loss.jsonl", LineFile::Start::truncate));
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
        Trainer trainer(arm.config, world_, backend_, arm.arithmetic, data_);
        if (curves_.empty() && !trainer.exchange_note().empty()) log_.line(trainer.exchange_note());
        Curve curve;
        curve.name = arm.name;
        curve.against = index_of(arm.against);
        RoutingHistory routing;
        std::vector<double> seconds;
        const auto report = [&](const StepResult& step) {
            const int64_t iteration = step.step + 1;
            run_folder_->check_if_unsure();
            eta_.step_done(step.seconds);
            seconds.push_back(step.seconds);
            curve.loss.push_back(step.lm_loss);
            curve.grad_norm.push_back(step.grad_norm);
            curve.wire_bytes_per_step = step.wire.total();
            curve.casts_per_step = step.casts;
            routing.add(values_of(arm.config, step, world_.size()).record);
            if (iteration % config_.output.log_interval == 0 || iteration == arm.config.training.train_iters)
                log_.line(progress_line(curve));
            if (curve_file_)
                curve_file_->write_json({{"arm", arm.name},
                                         {"iteration", iteration},
                                         {"lm_loss", step.lm_loss},
                                         {"grad_norm", step.grad_norm}});
        };
        for (int64_t i = 0; i < arm.config.training.train_iters; ++i)
            if (const auto result = trainer.step()) report(*result);
        if (const auto result = trainer.drain()) report(*result);
        if (!routing.empty()) routing_.push_back(routing.group(arm.name));
        const Trainer::MemorySums saved = trainer.saved_memory();
        if (config_.training.eval_iters > 0) curve.held_out = trainer.evaluate(config_.training.eval_iters);
        std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
        curve.seconds_per_step = seconds[seconds.size() / 2];
        for (const auto& [category, bytes] : trainer.saved_bytes())
            curve.saved_bytes += static_cast<double>(bytes);
        curve.saved_reserved = static_cast<double>(saved.reserved);
        curve.saved_used = static_cast<double>(saved.used);
        return curve;
    }

    // Of the arm with that name, which has run; "": the first.
    size_t index_of(const std::string& name) const {
        for (size_t i = 0; i < curves_.size(); ++i)
            if (curves_[i].name == name) return i;
        return 0;
    }

    // "fp8_flow       | iteration   12/  100 | lm loss 3.2428 | relative error 0.0630 % | ETA 0:01:20"
    std::string progress_line(const Curve& curve) const {
        std::string error;
        if (!curves_.empty()) {
            Curve base = curves_[curve.against];
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
        const std::vector<Run> runs = runs_of_curves();
        const Outcomes outcomes = outcomes_of(runs, arms_, v);
        nlohmann::json json = validate_json(outcomes, arms_, config_);
        json["ranks"] = world_.size();
        add_provenance(json, provenance_);
        run_folder_->check();
        folder_->write_atomic("validate.json", json.dump(2) + "\n");
        folder_->write_atomic(kPageFile, validate_page({name_, config_, provenance_}, outcomes, routing_));
        const bool all_pass = outcomes.verdict == Verdict::pass;
        log_.line("");
        log_.line(
            fmt::format("smoothed loss: e = |EMA - EMA_base| / EMA_base over iterations {} to {}; costs "
                        "per step of rank 0:",
                        v.warmup_iters + 1, config_.training.train_iters));
        log_.line(details_table(outcomes));
        log_.result(table_heading(outcomes, config_));
        log_.result(outcome_table(outcomes, config_));
        log_.result(fmt::format("  {}\n  {}", noise_text(outcomes), control_text(outcomes)));
        log_.result(
            fmt::format("  files  {}/: report.html, loss.jsonl, validate.json, config.yaml, validate.log",
                        folder_->path()));
        log_.result(next_text({next_step(all_pass)}));
        log_.result(fmt::format("verdict: {}", name_of(outcomes.verdict)));
        return all_pass ? 0 : static_cast<int>(ExitCode::verdict_miss);
    }

    std::vector<Run> runs_of_curves() const {
        std::vector<Run> runs;
        for (const Curve& curve : curves_)
            runs.push_back({curve.name, static_cast<int64_t>(config_.training.seed), curve});
        return runs;
    }

    NextStep next_step(bool all_pass) const {
        const std::string& out = config_.output.out;
        if (all_pass || ablation_)
            return {
                "where the time goes",
                command_line("profile", with_options({config_to_name_, "--out", out + "_profile"}, options_),
                             world_.size())};
        return {
            "which optimisation it is",
            command_line("validate",
                         with_options({config_to_name_, "--ablate", "--out", out + "_ablation"}, options_),
                         world_.size())};
    }

    ProcessGroup& world_;
    Config config_;
    BackendChoice backend_;
    std::string joined_;  // what was decided of micro-batches
    Provenance provenance_;
    std::string name_, config_to_name_;
    RunOptions options_;
    bool ablation_;
    std::vector<Arm> arms_;
    EtaEstimator eta_;
    std::optional<RunFolder> run_folder_;
    const OutputFolder* folder_ = nullptr;  // of the first rank
    std::shared_ptr<const TokenSource> data_;
    std::optional<LineFile> curve_file_;
    RunLog log_;
    std::vector<Curve> curves_;
    nlohmann::json routing_ = nlohmann::json::array();  // one a curve
};

}  // namespace

int run_validate(const RunOptions& options, ProcessGroup& world) { return ValidateRun(options, world).run(); }

}  // namespace fp8flow
