// SPDX-License-Identifier: MIT
// One training per arm and seed.
#include "model/commands/validate_jobs.h"

#include "model/checkpoint/agree.h"
#include "model/checkpoint/resume.h"
#include "model/checkpoint/saver.h"
#include "model/job/stop_signals.h"
#include "model/report/page/page.h"
#include "model/report/records.h"
#include "model/report/run_report.h"
#include "model/report/step_values.h"
#include "model/report/table.h"
#include "model/validate/initial_weights.h"
#include "model/weights/load.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

namespace fp8flow {

using namespace checkpoint;
using namespace report;
using namespace validate;
using nlohmann::json;

namespace {

bool is_run_of(const RunFile& file, const std::string& arm, int64_t seed) {
    return file.content.at("arm") == arm && file.content.at("seed") == seed;
}

}  // namespace

// One job from its start, or its last checkpoint, to its file. Collective.
class ValidateJobs::Training {
public:
    Training(ValidateJobs& jobs, const Job& job)
        : shared_(jobs.shared_), jobs_(jobs), job_(job), config_(job.arm->config) {
        config_.training.seed = static_cast<uint64_t>(job.seed);
        config_.training.on_divergence = OnDivergence::stop;  // arms that skip steps do not compare
        config_.checkpoint.load = "auto";
        config_.checkpoint.finetune = false;
        data_ = config_.training.seed == shared_.config.training.seed ? jobs.data_ : open_data(config_);
        file_ = begin_run_file({.arm = *job.arm,
                                .number = job.number,
                                .seed = job.seed,
                                .config = shared_.config,
                                .provenance = shared_.provenance,
                                .data = jobs.data_->fingerprint(),
                                .order = data_->fingerprint(),
                                .routing_of = shared_.options.routing_of});
        if (!shared_.options.routing_of.empty()) share_routing();
        trainer_ =
            std::make_unique<Trainer>(config_, shared_.world, shared_.backend, job.arm->arithmetic, data_);
        if (const std::string& weights = config_.checkpoint.pretrained_checkpoint; !weights.empty())
            for (const std::string& line :
                 weights::load_model(weights, config_, trainer_->transformer(), trainer_->ops().device()))
                shared_.log.line(line);
        if (!jobs.started_ && !trainer_->exchange_note().empty()) shared_.log.line(trainer_->exchange_note());
        jobs.started_ = true;
        Device& device = trainer_->ops().device();
        file_["initial weights"] = weights_fingerprint(trainer_->transformer(), device, shared_.world);
        if (job.arm->moves_start) move_by_one_unit(trainer_->transformer(), device);
        trainer_->weights_replaced();
        trainer_->stop_when([] { return stop_signal() != 0; });
        for (const RunFile& run : jobs.done_)
            if (is_run_of(run, base_name(), job.seed)) base_ = run_of(run.content);
        continue_from_checkpoint();
        for (const json& step : steps_) add(step);
    }

    // --routing-of: that arm's job records, the others of the seed read.
    void share_routing() {
        const std::string& arm = shared_.options.routing_of;
        const std::string job = job_name(arm, job_.seed);
        const std::string runs = fmt::format("{}{}/{}/", shared_.config.output.out,
                                             shared_.options.only.empty() ? "" : "/" + job, kRuns);
        const std::string path = runs + job + ".routing";
        records_routing_ = job_.arm->name == arm;
        (records_routing_ ? config_.output.record_routing : config_.data.routing_path) = path;
        check_config(config_, shared_.world.size());
        on_all_ranks(shared_.world, [&] {
            require(records_routing_ ||
                        (std::filesystem::exists(path) && std::filesystem::exists(runs + job + ".json")),
                    ExitCode::data,
                    "--routing-of {}: {} is not there, or not complete; run {}:{} first, with the same --out",
                    arm, path, arm, job_.seed);
        });
    }

    // False: stopped.
    bool run() {
        const int64_t iterations = config_.training.train_iters;
        bool diverged = false;
        try {
            while (trainer_->steps_done() + in_flight_ < iterations && !stopping_) step();
            drain();
        } catch (const Diverged& problem) {
            diverged = true;
            shared_.log.line(fmt::format("warning: {}: {}", jobs_.label_of(job_), problem.what()));
        }
        if (saver_) saver_->finish();
        if (!diverged && trainer_->steps_done() < iterations) return false;
        file_["diverged"] = diverged;
        finish(diverged || config_.training.eval_iters == 0
                   ? json(nullptr)
                   : json(trainer_->evaluate(config_.training.eval_iters)));
        return true;
    }

private:
    const std::string& base_name() const {
        return job_.arm->against.empty() ? shared_.arms.front().name : job_.arm->against;
    }

    void step() {
        const auto result = trainer_->step();
        in_flight_ = 1;
        if (result) report(*result);
        if (!saver_) return;
        saver_->poll();
        const int64_t launched = trainer_->steps_done() + in_flight_;
        if (!stopping_ && launched % config_.checkpoint.save_interval != 0) return;
        drain();
        if (trainer_->steps_done() == config_.training.train_iters) return;
        saver_->finish();
        saver_->save(*trainer_);
    }

    void drain() {
        if (const auto result = trainer_->drain()) report(*result);
        in_flight_ = 0;
    }

    void report(const StepResult& result) {
        shared_.folder.check_if_unsure();
        stopping_ = stopping_ || result.stop_asked;
        jobs_.eta_->step_done(result.seconds);
        json record = values_of(config_, result, shared_.world.size()).record;
        record.update({{"arm", job_.arm->name}, {"seed", job_.seed}});
        add(record);
        if (lines_) lines_->write_json(record);
        const int64_t iteration = result.step + 1;
        if (iteration % config_.output.log_interval == 0 || iteration == config_.training.train_iters)
            shared_.log.line(jobs_.progress_line(job_, curve_, base_));
        steps_.push_back(std::move(record));
    }

    // To the sums.
    void add(const json& step) {
        curve_.loss.push_back(step.at("lm_loss").is_number() ? step.at("lm_loss").get<double>() : NAN);
        curve_.grad_norm.push_back(step.at("grad_norm").is_number() ? step.at("grad_norm").get<double>()
                                                                    : NAN);
        routing_.add(step);
    }

    // The steps of an interrupted run up to its checkpoint. Checkpoints beyond the steps that are on record
    // are not taken.
    void continue_from_checkpoint() {
        const std::string lines = job_.name() + ".jsonl";
        int64_t known = 0;
        on_all_ranks(shared_.world, [&] {
            if (!jobs_.runs_) return;
            const std::string path = jobs_.runs_->path_of(lines);
            for (json& record : read_records(path, config_.training.train_iters)) {
                if (record.at("type") == "run") check_agree({{record.at("job"), path}, {file_, "this run"}});
                if (record.at("type") == "step" && record.at("iteration") == steps_.size() + 1)
                    steps_.push_back(std::move(record));
            }
            known = static_cast<int64_t>(steps_.size());
        });
        shared_.world.broadcast(&known, sizeof known, 0);
        int64_t first = 0;
        if (config_.checkpoint.save_interval > 0) {
            open_checkpoints(known);
            const auto resumed =
                resume(*trainer_, config_, *data_, shared_.world, checkpoints_, std::make_shared<Disk>(),
                       [&](const CheckpointManifest& saved) { return saved.step <= known; });
            if (resumed) first = resumed->step;
            for (const std::string& line : resumed ? messages_of(*resumed) : std::vector<std::string>{})
                shared_.log.line(line);
            saver_.emplace(config_, data_->fingerprint(), shared_.world, checkpoints_,
                           std::hash<std::string>()(job_.name()));
            saver_->check_owner_with([this] { shared_.folder.check(); });
        }
        if (known > 0)
            shared_.log.line(
                fmt::format("{}: interrupted after iteration {}, {}", jobs_.label_of(job_), known,
                            first > 0 ? fmt::format("continues after iteration {}", first)
                                      : "begins again (checkpoint.save_interval saves checkpoints)"));
        steps_.resize(static_cast<size_t>(std::min(first, static_cast<int64_t>(steps_.size()))));
        if (std::error_code error; jobs_.runs_ && records_routing_ && first == 0)
            std::filesystem::remove(config_.output.record_routing, error);
        if (!jobs_.runs_) return;
        std::string kept = json{{"type", "run"}, {"iteration", 0}, {"job", file_}}.dump() + "\n";
        for (const json& step : steps_) kept += step.dump() + "\n";
        jobs_.runs_->write_atomic(lines, kept);
        lines_.emplace(jobs_.runs_->open_lines(lines, LineFile::Start::append));
    }

    void open_checkpoints(int64_t known) {
        on_all_ranks(shared_.world, [&] {
            if (shared_.world.rank() != 0) return;
            checkpoints_ = shared_.folder.folder().subfolder(kCheckpoints).subfolder(job_.name()).path();
            if (known == 0) remove_checkpoints();
        });
        shared_.world.broadcast(checkpoints_, 0);
    }

    void remove_checkpoints() {
        CheckpointFolder folder(std::make_shared<Disk>(), checkpoints_);
        for (const auto& problems : {folder.clean_up(), folder.keep_latest(0, std::nullopt)})
            for (const std::string& problem : problems) shared_.log.line("warning: " + problem);
    }

    // Without its checkpoints, which nobody needs any more.
    void finish(const json& held_out) {
        const Trainer::MemorySums saved = trainer_->saved_memory();
        if (!jobs_.runs_) return;
        std::vector<double> seconds;
        for (const json& step : steps_) seconds.push_back(step.at("seconds"));
        std::ranges::nth_element(seconds, seconds.begin() + static_cast<int64_t>(seconds.size() / 2));
        int64_t saved_bytes = 0;
        for (const auto& [category, bytes] : trainer_->saved_bytes()) saved_bytes += bytes;
        const json last = steps_.empty() ? json::object() : steps_.back();
        double wire = 0;
        for (const char* part : {"routing", "dispatch", "combine"})
            wire += last.value(std::string("wire_bytes_") + part, 0.0);
        file_.update({{"lm_loss", curve_.loss},
                      {"grad_norm", curve_.grad_norm},
                      {"held out", held_out},
                      {"casts per step", last.value("casts", 0)},
                      {"wire bytes per step", wire},
                      {"equal choices", routing_.equal_choices()},
                      {"routing", routing_.empty() ? json(nullptr) : routing_.group(job_.arm->name)}});
        json& measured = file_["measured"];
        add_provenance(measured, shared_.provenance);
        measured.update({{"seconds per step", seconds.empty() ? 0.0 : seconds[seconds.size() / 2]},
                         {"saved bytes", saved_bytes},
                         {"saved bytes reserved", saved.reserved},
                         {"saved bytes used", saved.used}});
        shared_.folder.check();
        jobs_.runs_->write_atomic(job_.name() + ".json", file_.dump() + "\n");
        jobs_.done_.push_back({file_, jobs_.runs_->path_of(job_.name() + ".json")});
        saver_.reset();
        if (checkpoints_.empty()) return;
        remove_checkpoints();
        std::error_code error;
        std::filesystem::remove(checkpoints_, error);  // if it is empty, as the folder around it
        std::filesystem::remove(std::filesystem::path(checkpoints_).parent_path(), error);
    }

    Shared& shared_;
    ValidateJobs& jobs_;
    const Job& job_;
    Config config_;
    std::shared_ptr<const data::TokenSource> data_;
    json file_;
    std::unique_ptr<Trainer> trainer_;
    std::string checkpoints_;  // the folder of this job's
    std::optional<CheckpointSaver> saver_;
    std::optional<Run> base_;
    std::vector<json> steps_;  // records of metrics
    std::optional<LineFile> lines_;
    Curve curve_;
    RoutingHistory routing_;
    int64_t in_flight_ = 0;
    bool stopping_ = false, records_routing_ = false;
};

std::vector<ValidateJob> validate_jobs(const std::vector<Arm>& arms, const std::vector<int64_t>& seeds,
                                       const std::string& only, const std::string& routing_of) {
    const size_t colon = std::min(only.rfind(':'), only.size());
    const std::string arm = job_name(only.substr(0, colon), 0);
    std::vector<ValidateJob> jobs;
    std::string names;
    for (const int64_t seed : seeds)
        for (size_t number = 0; number < arms.size(); ++number) {
            const ValidateJob job{&arms[number], static_cast<int64_t>(number), seed};
            names += fmt::format("{}{}:{}", names.empty() ? "" : ", ", job.arm->name, seed);
            if (only.empty() ||
                (arm == job_name(job.arm->name, 0) && only.substr(colon) == fmt::format(":{}", seed)))
                jobs.push_back(job);
        }
    require(!jobs.empty(), ExitCode::usage, "--only: got {}, want one of {}", only, names);
    require(routing_of.empty() || std::ranges::count(arms, routing_of, &Arm::name) > 0, ExitCode::usage,
            "--routing-of: got {}, want the arm of one of {}", routing_of, names);
    std::ranges::stable_sort(
        jobs, {}, [&](const ValidateJob& job) { return std::pair(job.seed, job.arm->name != routing_of); });
    return jobs;
}

ValidateJobs::ValidateJobs(const Shared& shared, std::vector<Job> jobs,
                           std::shared_ptr<const data::TokenSource> data)
    : shared_(shared), data_(std::move(data)), jobs_(std::move(jobs)) {
    on_all_ranks(shared_.world, [&] {
        if (!shared_.folder.is_first_rank()) return;
        runs_.emplace(shared_.folder.folder().subfolder(kRuns));
        done_ = read_run_files(shared_.folder.folder().path());
        check_agree(with_this(done_));
        std::erase_if(done_, [&](const RunFile& file) {
            return std::ranges::none_of(
                jobs_, [&](const Job& job) { return is_run_of(file, job.arm->name, job.seed); });
        });
    });
}

// And what is known of this validation before a training.
std::vector<RunFile> ValidateJobs::with_this(std::vector<RunFile> files) const {
    for (const Job& job : jobs_) {
        json file = begin_run_file({.arm = *job.arm,
                                    .number = job.number,
                                    .seed = job.seed,
                                    .config = shared_.config,
                                    .provenance = shared_.provenance,
                                    .data = data_->fingerprint(),
                                    .routing_of = shared_.options.routing_of});
        file.erase("order");
        files.push_back({std::move(file), "this validation"});
    }
    return files;
}

bool ValidateJobs::run() {
    std::vector<uint8_t> done(jobs_.size());
    for (size_t i = 0; i < jobs_.size(); ++i)
        done[i] = std::ranges::any_of(
            done_, [&](const RunFile& file) { return is_run_of(file, jobs_[i].arm->name, jobs_[i].seed); });
    shared_.world.broadcast(done.data(), done.size(), 0);
    eta_.emplace(shared_.config.training.train_iters * std::ranges::count(done, 0));
    for (size_t i = 0; i < jobs_.size(); ++i) {
        if (done[i] != 0)
            shared_.log.line(
                fmt::format(" {}: read from {}/{}.json", label_of(jobs_[i]), kRuns, jobs_[i].name()));
        else if (!Training(*this, jobs_[i]).run())
            return false;
    }
    return true;
}

std::vector<RunFile> ValidateJobs::files() const {
    std::vector<RunFile> files = done_;
    sort_run_files(files);
    return files;
}

std::string ValidateJobs::label_of(const Job& job) const {
    return shared_.seeds.size() > 1 ? fmt::format("{} seed {}", job.arm->name, job.seed) : job.arm->name;
}

// "fp8_flow       | iteration   12/  100 | lm loss 3.2428 | relative error 0.0630 % | ETA 0:01:20"
std::string ValidateJobs::progress_line(const Job& job, const Curve& curve,
                                        const std::optional<Run>& base) const {
    std::string error;
    if (base && base->curve.loss.size() >= curve.loss.size()) {
        Curve cut = base->curve;
        cut.loss.resize(curve.loss.size());
        cut.grad_norm.resize(curve.loss.size());
        const Comparison now = compare(curve, cut, shared_.config.validate.ema_decay, 0);
        error = fmt::format(" | relative error {}", format_percent(now.relative_error.back(), 4));
    }
    const int64_t iterations = shared_.config.training.train_iters;
    return fmt::format(" {:<14} | iteration {:>{}}/{} | lm loss {:.4f}{} | ETA {}", label_of(job),
                       curve.loss.size(), std::to_string(iterations).size(), iterations, curve.loss.back(),
                       error, format_clock(eta_->seconds_left().value_or(0)));
}

}  // namespace fp8flow
