// SPDX-License-Identifier: MIT
// `fp8flow validate`: trains with the same data, seed and initial weights under every recipe, and compares
// the losses with BF16 and with a control arm. A job is an arm trained with one seed. It leaves
// runs/ARM-SEED/run.json (model/validate/run_file.h) next to the files of a training. A finished job is not
// run again. An interrupted one continues from its last checkpoint (checkpoint.save_interval), or begins
// again.
#include "model/checkpoint/agree.h"
#include "model/checkpoint/folder.h"
#include "model/commands/next_steps.h"
#include "model/commands/training.h"
#include "model/job/stop_signals.h"
#include "model/report/page/page.h"
#include "model/report/progress.h"
#include "model/report/records.h"
#include "model/report/run_report.h"
#include "model/report/table.h"
#include "model/validate/initial_weights.h"
#include "model/validate/run_file.h"

#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <filesystem>

namespace fp8flow {

using namespace report;
using namespace validate;
using checkpoint::on_all_ranks;
using nlohmann::json;

namespace {

constexpr const char* kRouting = "routing.safetensors";

class ValidateRun {
public:
    ValidateRun(const Options& options, ProcessGroup& world);
    int run();

private:
    struct Job {
        const Arm* arm;
        int64_t seed;
        std::string name() const { return job_name(arm->name, seed); }
        bool is_of(const RunFile& file) const { return file.arm() == arm->name && file.seed() == seed; }
    };
    class JobTraining;
    void choose_jobs();
    void read_files();
    bool run_jobs();                        // false: a signal asked to stop
    json begin_file(const Job& job) const;  // its content before the training
    std::string folder_of(const std::string& job) const;
    // On the first rank; null: not done.
    const RunFile* done(const std::string& arm, int64_t seed) const;
    // Collective. The arm of --routing-of diverged with this seed: the routing of later steps is not known.
    bool lacks_routing(const Job& job) const;
    std::string label_of(const Job& job) const;  // "fp8_flow", or "fp8_flow seed 2" if there are several

    ProcessGroup& world_;
    Config config_;
    BackendChoice backend_;
    std::string joined_;  // the line of decide_joined
    Provenance provenance_;
    Options options_;
    std::vector<Arm> arms_;
    std::vector<int64_t> seeds_;
    std::vector<Job> jobs_;                // in the order in which they run
    std::optional<RunFolder> run_folder_;  // absent with --only: the job has one
    RunLog log_;
    std::shared_ptr<const data::TokenSource> data_;
    std::vector<RunFile> known_;  // in the folder, on the first rank
    std::optional<EtaEstimator> eta_;
    bool started_ = false;
};

class ValidateRun::JobTraining : public Training {
public:
    // begun: the file of this job is there, but not complete.
    JobTraining(ValidateRun& run, const Job& job, bool begun)
        : Training(setup_of(run, job, begun)), run_(run), job_(job) {
        saves_last_ = false;
        const bool is_shared = config_.training.seed == run.config_.training.seed;
        make_trainer(is_shared ? run.data_ : open_data(config_), job.arm->arithmetic);
        if (!run.started_ && !trainer_->exchange_note().empty()) log_.line(trainer_->exchange_note());
        run.started_ = true;
        file_ = run.begin_file(job);
        file_["order"] = checksum_text(data::order_fingerprint(*data_));
        file_["initial weights"] =
            weights_fingerprint(trainer_->transformer(), trainer_->ops().device(), world_);
        if (job.arm->moves_start) {
            move_by_one_unit(trainer_->transformer(), trainer_->ops().device());
            trainer_->weights_replaced();
        }
        on_all_ranks(world_, [&] {
            std::vector<RunFile> files = run.known_;
            files.push_back({file_, "this run"});
            check_agree(files, run.options_.equal_commits);
        });
        begin();
        run.eta_->leave_out(first_step_);
        if (!folder_.is_first_rank()) return;
        const int64_t missing = missing_iterations(records(), first_step_);
        require(missing == 0, ExitCode::data, "{}: has no record of {}; remove this folder to train it again",
                folder_.name(), counted(missing, "iteration"));
        if (std::error_code error; first_step_ == 0 && job.arm->name == run.options_.routing_of)
            std::filesystem::remove(config_.output.record_routing, error);
        folder_.folder().write_json(kRunFile, file_, -1);
        const std::string& base = job.arm->against.empty() ? run.arms_.front().name : job.arm->against;
        if (const RunFile* file = run.done(base, job.seed))
            base_ = ema(run_of(file->content).curve.loss, config_.validate.ema_decay);
    }

    // False: stopped.
    bool run() {
        try {
            train();
        } catch (const Error& problem) {  // of a step, or of the held-out loss
            if (problem.code() != ExitCode::numeric) throw;
            diverged_ = true;
            log_.line("warning: {}: {}", run_.label_of(job_), problem.what());
        }
        if (!diverged_ && !is_done()) return false;
        finish();
        return true;
    }

private:
    static Setup setup_of(ValidateRun& run, const Job& job, bool begun) {
        Config config = job.arm->config;
        config.training.seed = static_cast<uint64_t>(job.seed);
        config.training.on_divergence = OnDivergence::stop;  // arms that skip steps do not compare
        config.training.eval_interval = 0;                   // at the end
        config.checkpoint.save.clear();
        config.checkpoint.load = begun ? "auto" : "";
        config.checkpoint.finetune = false;
        config.output.metrics = true;
        config.output.record_routing.clear();  // a file of one run
        if (const std::string& arm = run.options_.routing_of; !arm.empty()) {
            const std::string path = run.folder_of(job_name(arm, job.seed)) + "/" + kRouting;
            const bool records = job.arm->name == arm;
            (records ? config.output.record_routing : config.data.routing_path) = path;
            check_config(config, run.world_.size());
            on_all_ranks(run.world_, [&] {
                require(records || run.world_.rank() != 0 || run.done(arm, job.seed) != nullptr,
                        ExitCode::data,
                        "--routing-of {}: {} is not there, or not complete; run {}:{} first, with the same "
                        "--out",
                        arm, path, arm, job.seed);
            });
        }
        const bool overwrites = run.options_.taken == RunFolder::Taken::overwrite;
        return {.options = run.options_,
                .config = std::move(config),
                .world = run.world_,
                .backend = run.backend_,
                .provenance = run.provenance_,
                .folder = {.path = run.folder_of(job.name()),
                           .command = run.options_.command,
                           .taken = overwrites ? RunFolder::Taken::overwrite : RunFolder::Taken::enter,
                           .holder = run.options_.holder},
                .continues = begun,
                .log_name = run.options_.only.empty() ? "" : "validate.log",
                .log = run.log_};
    }

    std::vector<json> records() const {
        return read_records(folder_.folder().path_of(kMetricsFile), config_.training.train_iters);
    }

    // "fp8_flow       | iteration   12/  100 | lm loss 3.2428 | relative error 0.0630 % | ETA 0:01:20"
    void on_step(const StepResult& result, const StepValues&) override {
        const int64_t iteration = result.step + 1, iterations = config_.training.train_iters;
        run_.eta_->step_done(result.seconds, clock_seconds());
        if (iteration % config_.output.log_interval != 0 && iteration != iterations) return;
        std::string error;
        if (base_.size() >= to_size(iteration)) {
            const double own = ema(records_.sums().losses.y, config_.validate.ema_decay).back();
            error = fmt::format(" | relative error {}",
                                format_percent(std::abs(own / base_[to_size(result.step)] - 1), 4));
        }
        log_.line(" {:<14} | iteration {:>{}}/{} | lm loss {:.4f}{} | ETA {}", run_.label_of(job_), iteration,
                  std::to_string(iterations).size(), iterations, result.lm_loss, error,
                  format_clock(run_.eta_->seconds_left().value_or(0)));
    }

    void on_evaluation(double nats) override { held_out_ = nats; }

    // Completes the file of the job and removes its checkpoints.
    void finish() {
        const Trainer::MemorySums saved = trainer_->saved_memory();
        saver_.reset();
        if (!folder_.is_first_rank()) return;
        json losses = json::array(), grad_norms = json::array();
        std::vector<double> seconds;
        json last = json::object();
        for (json& step : records()) {
            if (step.at("type") != "step") continue;
            losses.push_back(step.at("lm_loss"));
            grad_norms.push_back(step.at("grad_norm"));
            seconds.push_back(step.at("seconds"));
            last = std::move(step);
        }
        const RoutingHistory& routing = records_.sums().routing;
        double wire = 0;
        for (const char* part : {"routing", "dispatch", "combine"})
            wire += last.value(std::string("wire_bytes_") + part, 0.0);
        file_.update(
            {{"diverged", diverged_},
             {"lm_loss", shortened(losses)},
             {"grad_norm", shortened(grad_norms)},
             {"held out", held_out_ ? json(*held_out_) : nullptr},
             {"casts per step", last.value("casts", 0)},
             {"wire bytes per step", wire},
             {"equal choices", routing.equal_choices()},
             {"routing", routing.empty() ? json(nullptr) : shortened(routing.group(job_.arm->name))}});
        file_[kChecksum] = checksum_of(file_);
        json& measured = file_["measured"];
        add_provenance(measured, provenance_);
        measured.update({{"seconds per step", spread_of(seconds).median},
                         {"saved bytes", sum_of(trainer_->saved_bytes())},
                         {"saved bytes reserved", saved.reserved},
                         {"saved bytes used", saved.used}});
        folder_.check();
        folder_.folder().write_json(kRunFile, file_, -1);
        std::erase_if(run_.known_, [&](const RunFile& file) { return job_.is_of(file); });
        run_.known_.push_back({file_, folder_.folder().path_of(kRunFile)});
        std::error_code error;
        std::filesystem::remove_all(folder_.folder().path_of(checkpoint::kCheckpoints), error);
    }

    ValidateRun& run_;
    const Job& job_;
    json file_;
    std::vector<double> base_;  // smoothed losses of the arm that it is compared with, on the first rank
    std::optional<double> held_out_;
    bool diverged_ = false;
};

ValidateRun::ValidateRun(const Options& options, ProcessGroup& world)
    : world_(world),
      config_(load_config(options.config_path, options.overrides, world.size(), options.hf_config)),
      backend_(choose_backend(options.backend, options.placement, world)),
      joined_(predict::decide_joined(config_, backend_, world)),
      provenance_(make_provenance(options.command, backend_, world.size())),
      options_(options),
      arms_(make_arms(config_, options.ablation, world.size(), options.arms)),
      seeds_(options.seeds),
      log_(world.rank(), options.detail) {
    require_compared_steps(config_);
    for (const Arm& arm : arms_) check_config(arm.config, world.size());
    if (seeds_.empty()) seeds_ = {static_cast<int64_t>(config_.training.seed)};
    std::ranges::sort(seeds_);
    require(std::ranges::adjacent_find(seeds_) == seeds_.end(), ExitCode::usage,
            "--seeds: got a seed twice, want each once");
    choose_jobs();
    if (options.only.empty()) {
        run_folder_.emplace(run_folder_of(options, config_.output.out), world);
        config_.output.out = run_folder_->name();
        if (!run_folder_->note().empty()) log_.line(run_folder_->note());
    }
    report_start(log_, config_, backend_, world.size());
    warn_of_unread(config_,
                   {"checkpoint.load", "checkpoint.save", "output.record_routing", "training.on_divergence"},
                   log_);
    if (!joined_.empty()) log_.line(joined_);
    predict::require_fit(log_, configs_of(arms_), backend_, world, options.placement.ranks_on_host,
                         options.where_short);
    data_ = open_data(config_);
    report_data(log_, config_, *data_);
    if (run_folder_) run_folder_->keep();
    on_all_ranks(world, [&] {
        if (world.rank() == 0) read_files();
    });
}

// On the first rank. Also writes the first files of this run.
void ValidateRun::read_files() {
    require(!std::filesystem::exists(config_.output.out + "/train.log"), ExitCode::output,
            "--out {}: holds a run of train, and its config.yaml would be replaced; choose another folder",
            config_.output.out);
    known_ = read_run_files(config_.output.out);
    const std::vector<RunFile> before = known_;
    // the order of arms, and what each is compared with, are those of this command
    for (RunFile& file : known_)
        for (size_t number = 0; number < arms_.size(); ++number)
            if (file.content.at("arm") == arms_[number].name)
                file.content.update({{"number", number}, {"against", arms_[number].against}});
    if (options_.taken == RunFolder::Taken::overwrite)  // with --only: others stay
        std::erase_if(known_, [&](const RunFile& file) { return jobs_.front().is_of(file); });
    std::vector<RunFile> files = known_;
    for (const Job& job : jobs_) files.push_back({begin_file(job), "this validation"});
    check_agree(files, options_.equal_commits);
    const OutputFolder folder(config_.output.out);
    folder.write_atomic("config.yaml", run_config_yaml(config_, provenance_));
    const bool resumes = options_.taken == RunFolder::Taken::enter;
    if (run_folder_)
        log_.open(folder, "validate.log", resumes ? LineFile::Start::append : LineFile::Start::truncate);
    for (size_t i = 0; run_folder_ && i < before.size(); ++i)
        if (known_[i].content != before[i].content)
            OutputFolder(std::filesystem::path(known_[i].path).parent_path().string())
                .write_json(kRunFile, known_[i].content, -1);
}

int ValidateRun::run() {
    std::vector<std::string> names;
    for (const Arm& arm : arms_) names.push_back(arm.name);
    log_.line("arms: {} ({} iterations each, same data, seed and initial weights)", fmt::join(names, ", "),
              config_.training.train_iters);
    if (seeds_.size() > 1) log_.line("seeds: {}", fmt::join(seeds_, ", "));
    const bool done = run_jobs();
    if (run_folder_) run_folder_->check();
    if (!done) {
        log_.result("stopped by {}", name_of_signal(stop_signal()));
        log_.result(
            next_text({{"continue from here", fmt::format("{} --out {} --resume auto", options_.command,
                                                          shell_word(config_.output.out))}}));
        return static_cast<int>(ExitCode::stopped);
    }
    int status = 0;
    if (world_.rank() == 0 && run_folder_) {
        std::vector<RunFile> files;
        for (const RunFile& file : known_)
            if (file.is_done() && std::ranges::any_of(jobs_, [&](const Job& job) { return job.is_of(file); }))
                files.push_back(file);
        sort_run_files(files);
        for (const Arm& arm : arms_)
            require(std::ranges::count(files, arm.name, &RunFile::arm) > 0, ExitCode::numeric,
                    "--routing-of {}: it diverged with every seed, so there is no run of {}",
                    options_.routing_of, arm.name);
        status = write_validation(options_, config_, provenance_, files, run_folder_->folder(), log_);
    } else if (world_.rank() == 0) {
        log_.result("  files  {}\nnext  when all are done  {}", folder_of(jobs_.front().name()),
                    command_line("validate", {"--join", config_.output.out}, 1));
    }
    world_.broadcast(&status, sizeof status, 0);
    return status;
}

void ValidateRun::choose_jobs() {
    const std::string &only = options_.only, &routing_of = options_.routing_of;
    const size_t colon = std::min(only.rfind(':'), only.size());
    const std::string arm = file_name_of(only.substr(0, colon));
    std::vector<std::string> names;
    for (const int64_t seed : seeds_)
        for (const Arm& one : arms_) {
            names.push_back(fmt::format("{}:{}", one.name, seed));
            if (only.empty() ||
                (arm == file_name_of(one.name) && only.substr(colon) == fmt::format(":{}", seed)))
                jobs_.push_back({&one, seed});
        }
    require(!jobs_.empty(), ExitCode::usage, "--only: got {}, want one of {}", only, fmt::join(names, ", "));
    require(routing_of.empty() || std::ranges::count(arms_, routing_of, &Arm::name) > 0, ExitCode::usage,
            "--routing-of: got {}, want the arm of one of {}", routing_of, fmt::join(names, ", "));
    std::ranges::stable_sort(
        jobs_, {}, [&](const Job& job) { return std::pair(job.seed, job.arm->name != routing_of); });
}

json ValidateRun::begin_file(const Job& job) const {
    json file = {{"arm", job.arm->name},
                 {"seed", job.seed},
                 {"number", job.arm - arms_.data()},
                 {"against", job.arm->against},
                 {"keys", job.arm->keys},
                 {"commit", provenance_.commit},
                 {"backend", provenance_.gpus > 0 ? "hopper" : "reference"},
                 {"ranks", provenance_.ranks},
                 {"data", checksum_text(data_->fingerprint())},
                 {"routing of", options_.routing_of},
                 {"configuration", compared_keys(config_)}};
    if (job.arm->name == kControlArm) file["validate.control_arm"] = job.arm->moves_start ? "ulp" : "exact";
    const auto library = options_.libraries.find(job.arm->config.precision.flow);
    if (library != options_.libraries.end()) file["plugin"] = library->second;
    return file;
}

bool ValidateRun::run_jobs() {
    enum State : uint8_t { fresh, begun, done };
    std::vector<uint8_t> states(jobs_.size(), fresh);
    for (size_t i = 0; i < jobs_.size(); ++i)
        for (const RunFile& file : known_)
            if (jobs_[i].is_of(file)) states[i] = file.is_done() ? done : begun;
    world_.broadcast(states.data(), states.size(), 0);
    eta_.emplace(config_.training.train_iters *
                 (std::ssize(states) - std::ranges::count(states, uint8_t{done})));
    for (size_t i = 0; i < jobs_.size(); ++i) {
        if (states[i] == done)
            log_.line(" {}: read from {}", label_of(jobs_[i]), folder_of(jobs_[i].name()));
        else if (lacks_routing(jobs_[i]))
            log_.line("warning: {}: left out, because {} has diverged and cannot give it experts",
                      label_of(jobs_[i]), job_name(options_.routing_of, jobs_[i].seed));
        else if (!JobTraining(*this, jobs_[i], states[i] == begun).run())
            return false;
    }
    return true;
}

const RunFile* ValidateRun::done(const std::string& arm, int64_t seed) const {
    for (const RunFile& file : known_)
        if (file.is_done() && file.arm() == arm && file.seed() == seed) return &file;
    return nullptr;
}

bool ValidateRun::lacks_routing(const Job& job) const {
    const RunFile* const given =
        job.arm->name == options_.routing_of ? nullptr : done(options_.routing_of, job.seed);
    uint8_t lacks = given != nullptr && given->content.at("diverged") == true ? 1 : 0;
    world_.broadcast(&lacks, sizeof lacks, 0);
    return lacks != 0;
}

std::string ValidateRun::folder_of(const std::string& job) const {
    return fmt::format("{}/{}/{}", config_.output.out, kRuns, job);
}

std::string ValidateRun::label_of(const Job& job) const {
    return seeds_.size() > 1 ? fmt::format("{} seed {}", job.arm->name, job.seed) : job.arm->name;
}

}  // namespace

int run_validate(const Options& options, ProcessGroup& world) { return ValidateRun(options, world).run(); }

}  // namespace fp8flow
