// SPDX-License-Identifier: MIT
// The report of `fp8flow validate` on runs that this process has trained, or that are joined (--join).
#include "model/commands/commands.h"
#include "model/commands/next_steps.h"
#include "model/report/page/run_pages.h"
#include "model/report/run_report.h"
#include "model/report/validate_report.h"
#include "model/validate/run_file.h"

#include <algorithm>

namespace fp8flow {

using namespace report;
using namespace validate;

namespace {

// Sorted. Refuses two runs of the same arm and seed.
std::vector<RunFile> joined_files(const Options& options) {
    std::vector<RunFile> files;
    for (const std::string& folder : options.joined) {
        const size_t before = files.size();
        for (RunFile& file : read_run_files(folder))
            if (file.is_done()) files.push_back(std::move(file));
        require(files.size() > before, ExitCode::data, "--join {}: no run of validate that is done in {}/{}",
                folder, folder, kRuns);
    }
    sort_run_files(files);
    // an ablation needs no run of bf16: all its arms are compared with the first one
    const std::string first = files.front().arm();
    const bool is_ablation = files.back().arm() != first && std::ranges::all_of(files, [&](const auto& file) {
                                 return file.arm() == first || file.content.at("against") == first;
                             });
    const bool has_baseline = files.front().content.at("number") == 0 || is_ablation;
    require(
        has_baseline, ExitCode::usage,
        "--join: no run of the baseline among them, which is the first arm: run it with --only, and join it");
    for (size_t i = 1; i < files.size(); ++i)
        require(files[i - 1].arm() != files[i].arm() || files[i - 1].seed() != files[i].seed(),
                ExitCode::usage, "--join: {} and {} are the same arm and seed; leave one out",
                files[i - 1].path, files[i].path);
    for (const RunFile& file : files) {
        const std::string against = file.content.at("against");
        require(against.empty() || std::ranges::count(files, against, &RunFile::arm) > 0, ExitCode::usage,
                "--join: {} is compared with the arm {}, and no run of it is among them: join it too",
                file.path, against);
    }
    check_agree(files, options.equal_commits);
    return files;
}

}  // namespace

void require_compared_steps(const Config& config) {
    require(config.validate.warmup_iters < config.training.train_iters, ExitCode::usage,
            "validate.warmup_iters is {} and training.train_iters {}: no step is left to compare; lower the "
            "one or raise the other",
            config.validate.warmup_iters, config.training.train_iters);
}

int write_validation(const Options& options, const Config& config, const Provenance& own,
                     const std::vector<RunFile>& files, const OutputFolder& folder, RunLog& log) {
    const Provenance provenance = as_trained(own, files.front().content);
    const std::vector<Arm> arms = arms_of(files);
    std::vector<Run> runs;
    nlohmann::json routing = nlohmann::json::array();  // of the first seed
    LineFile losses = folder.open_lines("loss.jsonl", LineFile::Start::truncate);
    for (const RunFile& file : files) {
        const Run& run = runs.emplace_back(run_of(file.content));
        const nlohmann::json& group = file.content.at("routing");
        if (run.seed == runs.front().seed && !group.is_null()) routing.push_back(group);
        for (size_t i = 0; i < run.curve.loss.size(); ++i)
            losses.write_json({{"arm", run.arm},
                               {"seed", run.seed},
                               {"iteration", i + 1},
                               {"lm_loss", run.curve.loss[i]},
                               {"grad_norm", run.curve.grad_norm[i]}});
    }
    const Outcomes outcomes = outcomes_of(runs, arms, config.validate);
    nlohmann::json json = validate_json(outcomes, arms, config);
    json["ranks"] = provenance.ranks;
    add_provenance(json, provenance);
    if (!options.equal_commits.empty()) json["equal_commits"] = options.equal_commits;
    folder.write_json("validate.json", json);
    const std::string name = run_name(options.config_path, options.hf_config);
    folder.write_atomic(kPageFile, validate_page({name, config, provenance}, outcomes, routing));

    log.line("");
    log.result(table_heading(outcomes, config) + ":");
    log.result(outcome_table(outcome_cells(outcomes, config)));
    log.result("  {}\n  {}", noise_text(outcomes), control_text(outcomes));
    log.result("  files  {}/: report.html, loss.jsonl, validate.json, config.yaml, validate.log, runs/",
               folder.path());
    const bool passes = outcomes.verdict == Verdict::pass,
               ablates = !passes && outcomes.judged > 0 && options.ablation == Ablation::none;
    std::vector<std::string> next = {config_of_run(options, config.output.out), "--out",
                                     config.output.out + (ablates ? "_ablation" : "_profile")};
    if (ablates) next.insert(next.begin() + 1, "--ablate");
    log.result(next_text(
        {{ablates ? "which optimisation it is" : "where the time goes",
          command_line(ablates ? "validate" : "profile", with_options(next, options), provenance.ranks)}}));
    log.result("verdict: {}{}", name_of(outcomes.verdict),
               outcomes.judged == 0 ? ": " + answer_text(outcomes, config) : "");
    return passes ? 0 : static_cast<int>(ExitCode::verdict_miss);
}

int run_join(const Options& options, ProcessGroup& world) {
    const std::vector<RunFile> files = joined_files(options);
    Config config = load_config(options.config_path, options.overrides, std::nullopt, options.hf_config);
    const RunFile& first = files.front();
    nlohmann::json keys = compared_keys(config);
    keys["precision.flow"] = first.content.at("configuration").value("precision.flow", "");  // of --plugin
    check_agree({first,
                 {{{"arm", first.arm()}, {"seed", first.seed()}, {"configuration", std::move(keys)}},
                  options.config_path}},
                {});
    require_compared_steps(config);
    RunFolder run_folder(run_folder_of(options, config.output.out), world);
    config.output.out = run_folder.name();
    RunLog log(world.rank(), options.detail);
    if (!run_folder.note().empty()) log.line(run_folder.note());
    run_folder.keep();
    int status = 0;
    if (run_folder.is_first_rank()) {
        const OutputFolder& folder = run_folder.folder();
        const Provenance provenance =
            make_provenance(options.command, choose_backend(BackendKind::reference), 1);
        log.open(folder, "validate.log");
        folder.write_atomic("config.yaml", run_config_yaml(config, provenance));
        const OutputFolder runs = folder.subfolder(kRuns);
        for (const RunFile& file : files)
            runs.subfolder(job_name(file.arm(), file.seed())).write_json(kRunFile, file.content, -1);
        for (const std::string& missing : missing_jobs(files))
            log.line("warning: " + missing + " is missing");
        status = write_validation(options, config, provenance, files, folder, log);
    }
    world.broadcast(&status, sizeof status, 0);
    return status;
}

}  // namespace fp8flow
