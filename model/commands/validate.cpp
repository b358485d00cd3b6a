// SPDX-License-Identifier: MIT
// `fp8flow validate`: the same data, seed and initial weights under every recipe, compared with BF16 and with
// a control arm.
#include "model/validate/validate.h"
#include "model/base/provenance.h"
#include "model/commands/commands.h"
#include "model/commands/next_steps.h"
#include "model/commands/validate_jobs.h"
#include "model/job/stop_signals.h"
#include "model/report/page/run_pages.h"
#include "model/report/run_report.h"
#include "model/report/validate_report.h"
#include "model/validate/arms.h"

#include <algorithm>
#include <optional>

namespace fp8flow {

using namespace data;
using namespace validate;
using namespace report;

namespace {

// From the files of runs to the table, the report and the verdict. On the first rank.
class ValidateReport {
public:
    ValidateReport(const RunOptions& options, const Config& config, const Provenance& provenance,
                   const std::vector<RunFile>& files, const OutputFolder& folder, RunLog& log)
        : options_(options),
          config_(config),
          provenance_(with_machine(provenance, files.front().content)),
          config_to_name_(config_of_run(options, config.output.out)),
          arms_(arms_of(files)),
          folder_(folder),
          log_(log) {
        const int64_t seed = files.front().content.at("seed");
        for (const RunFile& file : files) {
            runs_.push_back(run_of(file.content));
            const nlohmann::json& group = file.content.at("routing");
            if (runs_.back().seed == seed && !group.is_null()) routing_.push_back(group);
        }
    }

    int write() const {
        const ValidateSpec& v = config_.validate;
        const Outcomes outcomes = outcomes_of(runs_, arms_, v);
        nlohmann::json json = validate_json(outcomes, arms_, config_);
        json["ranks"] = provenance_.ranks;
        add_provenance(json, provenance_);
        write_losses();
        folder_.write_atomic("validate.json", json.dump(2) + "\n");
        const std::string name = run_name(options_.config_path, options_.hf_config);
        folder_.write_atomic(kPageFile, validate_page({name, config_, provenance_}, outcomes, routing_));
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
        log_.result(fmt::format(
            "  files  {}/: report.html, loss.jsonl, validate.json, config.yaml, validate.log, runs/",
            folder_.path()));
        log_.result(next_text({next_step(all_pass)}));
        log_.result(fmt::format("verdict: {}", name_of(outcomes.verdict)));
        return all_pass ? 0 : static_cast<int>(ExitCode::verdict_miss);
    }

private:
    void write_losses() const {
        LineFile lines = folder_.open_lines("loss.jsonl", LineFile::Start::truncate);
        for (const Run& run : runs_)
            for (size_t i = 0; i < run.curve.loss.size(); ++i)
                lines.write_json({{"arm", run.arm},
                                  {"seed", run.seed},
                                  {"iteration", i + 1},
                                  {"lm_loss", run.curve.loss[i]},
                                  {"grad_norm", run.curve.grad_norm[i]}});
    }

    NextStep next_step(bool all_pass) const {
        const std::string& out = config_.output.out;
        if (all_pass || options_.ablation != Ablation::none)
            return {
                "where the time goes",
                command_line("profile", with_options({config_to_name_, "--out", out + "_profile"}, options_),
                             provenance_.ranks)};
        return {
            "which optimisation it is",
            command_line("validate",
                         with_options({config_to_name_, "--ablate", "--out", out + "_ablation"}, options_),
                         provenance_.ranks)};
    }

    const RunOptions& options_;
    const Config& config_;
    Provenance provenance_;
    std::string config_to_name_;
    std::vector<Arm> arms_;
    std::vector<Run> runs_;
    const OutputFolder& folder_;
    RunLog& log_;
    nlohmann::json routing_ = nlohmann::json::array();  // groups of RoutingHistory, of the first seed
};

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
          options_(options),
          arms_(make_arms(config_, options.ablation, world.size(), options.arms)),
          seeds_(options.seeds),
          log_(world.rank(), options.terminal) {
        require(
            config_.validate.warmup_iters < config_.training.train_iters, ExitCode::usage,
            "validate.warmup_iters is {} and training.train_iters {}: no step is left to compare; lower the "
            "one or raise the other",
            config_.validate.warmup_iters, config_.training.train_iters);
        for (const Arm& arm : arms_) check_config(arm.config, world.size());
        if (seeds_.empty()) seeds_ = {static_cast<int64_t>(config_.training.seed)};
        std::ranges::sort(seeds_);
        require(std::ranges::adjacent_find(seeds_) == seeds_.end(), ExitCode::usage,
                "--seeds: got a seed twice, want each once");
        std::vector<ValidateJob> jobs = validate_jobs(arms_, seeds_, options_.only, options_.routing_of);
        RunFolder::Request request = run_folder_of(options, config_);
        if (!options.only.empty()) request.path += "/" + jobs.front().name();
        run_folder_.emplace(request, world);
        if (options.only.empty()) config_.output.out = run_folder_->name();
        if (!run_folder_->note().empty()) log_.line(run_folder_->note());
        report_start(log_, config_, backend_, world.size());
        if (!joined_.empty()) log_.line(joined_);
        predict::require_fit(log_, configs_of(arms_), backend_, world, options.placement.ranks_on_host,
                             options.where_short);
        const std::shared_ptr<const TokenSource> data = open_data(config_);
        report_data(log_, config_, *data);
        run_folder_->keep();
        jobs_.emplace(ValidateJobs::Shared{config_, arms_, seeds_, options_, backend_, provenance_, world_,
                                           *run_folder_, log_},
                      std::move(jobs), data);
        if (!run_folder_->is_first_rank()) return;
        const bool resumes = options.taken == RunFolder::Taken::enter;
        log_.open(run_folder_->folder(), "validate.log",
                  resumes ? LineFile::Start::append : LineFile::Start::truncate);
        run_folder_->folder().write_atomic("config.yaml", run_config_yaml(config_, provenance_));
    }

    int run() {
        std::string names, seeds;
        for (const Arm& arm : arms_) names += (names.empty() ? "" : ", ") + arm.name;
        for (const int64_t seed : seeds_) seeds += fmt::format("{}{}", seeds.empty() ? "" : ", ", seed);
        log_.line(fmt::format("arms: {} ({} iterations each, same data, seed and initial weights)", names,
                              config_.training.train_iters));
        if (seeds_.size() > 1) log_.line("seeds: " + seeds);
        const bool done = jobs_->run();
        run_folder_->check();
        if (!done) {
            log_.result(fmt::format("stopped by {}", name_of_signal(stop_signal())));
            log_.result(
                next_text({{"continue from here", fmt::format("{} --out {} --resume auto", options_.command,
                                                              shell_word(config_.output.out))}}));
            return static_cast<int>(ExitCode::stopped);
        }
        int status = 0;
        if (world_.rank() == 0 && options_.only.empty())
            status =
                ValidateReport(options_, config_, provenance_, jobs_->files(), run_folder_->folder(), log_)
                    .write();
        else if (world_.rank() == 0)
            log_.result(fmt::format("  files  {}\nnext  when all are done  {}", jobs_->files().front().path,
                                    command_line("validate", {"--join", config_.output.out}, 1)));
        world_.broadcast(&status, sizeof status, 0);
        return status;
    }

private:
    ProcessGroup& world_;
    Config config_;
    BackendChoice backend_;
    std::string joined_;  // what was decided of micro-batches
    Provenance provenance_;
    RunOptions options_;
    std::vector<Arm> arms_;
    std::vector<int64_t> seeds_;
    std::optional<RunFolder> run_folder_;
    RunLog log_;
    std::optional<ValidateJobs> jobs_;
};

// Without two runs of the same arm and seed.
std::vector<RunFile> joined_files(const std::vector<std::string>& folders) {
    std::vector<RunFile> files;
    for (const std::string& folder : folders) {
        const size_t before = files.size();
        for (const std::string& one : folders_with_runs(folder))
            std::ranges::move(read_run_files(one), std::back_inserter(files));
        require(files.size() > before, ExitCode::data,
                "--join {}: no run of validate in {}/{}, or in one of "
                "the folders below it",
                folder, folder, kRuns);
    }
    sort_run_files(files);
    require(
        files.front().content.at("number") == 0, ExitCode::usage,
        "--join: no run of the baseline among them, which is the first arm: run it with --only, and join it");
    const auto same = [](const RunFile& a, const RunFile& b) {
        return a.content.at("arm") == b.content.at("arm") && a.content.at("seed") == b.content.at("seed");
    };
    const auto twice = std::ranges::adjacent_find(files, same);
    require(twice == files.end(), ExitCode::usage,
            "--join: {} and {} are the same arm and seed; leave one out",
            twice == files.end() ? "" : twice->path, twice == files.end() ? "" : (twice + 1)->path);
    check_agree(files);
    return files;
}

}  // namespace

int run_validate(const RunOptions& options, ProcessGroup& world) { return ValidateRun(options, world).run(); }

int run_join(const RunOptions& options, ProcessGroup& world) {
    const std::vector<RunFile> files = joined_files(options.joined);
    Config config = load_config(options.config_path, options.overrides, std::nullopt, options.hf_config);
    RunFolder run_folder(run_folder_of(options, config), world);
    config.output.out = run_folder.name();
    RunLog log(world.rank(), options.terminal);
    if (!run_folder.note().empty()) log.line(run_folder.note());
    run_folder.keep();
    int status = 0;
    if (run_folder.is_first_rank()) {
        const OutputFolder& folder = run_folder.folder();
        const BackendChoice backend = choose_backend(BackendKind::reference, options.placement, world);
        const Provenance provenance = make_provenance(options.command, backend, 1);
        log.open(folder, "validate.log");
        folder.write_atomic("config.yaml", run_config_yaml(config, provenance));
        const OutputFolder runs = folder.subfolder(kRuns);
        for (const RunFile& file : files)
            runs.write_atomic(job_name(file.content.at("arm"), file.content.at("seed")) + ".json",
                              file.content.dump() + "\n");
        for (const std::string& missing : missing_jobs(files))
            log.line("warning: " + missing + " is missing");
        status = ValidateReport(options, config, provenance, files, folder, log).write();
    }
    world.broadcast(&status, sizeof status, 0);
    return status;
}

}  // namespace fp8flow
