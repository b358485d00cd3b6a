// SPDX-License-Identifier: MIT
// The loop, and what surrounds it: checkpoints, going back, the last state.
#include "model/commands/training.h"

#include "model/checkpoint/agree.h"
#include "model/checkpoint/resume.h"
#include "model/job/stop_signals.h"
#include "model/job/watchdog.h"
#include "model/plan/plan.h"
#include "model/report/run_report.h"
#include "model/report/step_values.h"
#include "model/report/table.h"
#include "model/weights/load.h"

#include <fmt/ranges.h>
#include <filesystem>
#include <random>

namespace fp8flow {

using namespace checkpoint;
using namespace report;

Training::Training(Setup setup)
    : world_(setup.world),
      options_(setup.options),
      config_(std::move(setup.config)),
      backend_(std::move(setup.backend)),
      provenance_(std::move(setup.provenance)),
      overwrites_(setup.folder.taken == RunFolder::Taken::overwrite),
      continues_(setup.continues),
      folder_(setup.folder, world_),
      log_(setup.log),
      log_name_(std::move(setup.log_name)) {
    config_.output.out = folder_.name();
    if (!folder_.note().empty()) log_.line(folder_.note());
    find_checkpoints();
}

void Training::make_trainer(std::shared_ptr<const data::TokenSource> data, Arithmetic arithmetic) {
    data_ = std::move(data);
    trainer_ = std::make_unique<Trainer>(config_, world_, backend_, arithmetic, data_);
    note_stage(Stage::weights);
    const std::string& weights = config_.checkpoint.pretrained_checkpoint;
    if (weights.empty()) return;
    for (const std::string& line :
         weights::load_model(weights, config_, trainer_->transformer(), trainer_->ops().device()))
        log_.line(line);
    trainer_->weights_replaced();
}

void Training::begin() {
    if (config_.output.time_stages) trainer_->time_stages(TimerDetail::stages);
    note_stage(Stage::resume);
    open_checkpoints();
    first_step_ = trainer_->steps_done();
    for (const auto& [category, bytes] : trainer_->parameter_bytes()) parameter_bytes_ += bytes;
    flops_per_token_ = sum_of(plan::count_flops(config_), &plan::FlopPart::both);
    trainer_->stop_when([] { return stop_signal() != 0; });
    // Configuration, data, weights and checkpoints are accepted: now files of an earlier run may go.
    folder_.keep();
    if (checkpoint_folder_) checkpoint_folder_->keep();
    if (folder_.is_first_rank()) {
        const OutputFolder& folder = folder_.folder();
        const std::vector<std::string> warnings = records_.open(folder, continues_ ? first_step_ : 0);
        if (!log_name_.empty())
            log_.open(folder, log_name_, continues_ ? LineFile::Start::append : LineFile::Start::truncate);
        warn(warnings);
        folder.write_atomic("config.yaml", run_config_yaml(config_, provenance_));
    }
    world_.barrier();  // before another rank writes below what the first one has cleared
}

void Training::train() {
    for (bool done = false; !done;) {
        try {
            steps();
            done = true;
        } catch (const Diverged& problem) {
            if (go_back(problem)) continue;
            keep_last_state();
            throw;
        } catch (const OutOfRowMemory&) {
            keep_last_state();
            throw;
        }
    }
    folder_.check();
}

// From the step that the model is at.
void Training::steps() {
    for (int64_t i = trainer_->steps_done(); i < config_.training.train_iters && !stopping_; ++i) {
        const bool observed =
            config_.output.tensor_stats && (i + 1) % config_.output.tensor_stats_interval == 0;
        trainer_->set_tensor_stats(observed ? &records_.tensor_stats() : nullptr);
        if (const auto result = trainer_->step()) report(*result);
        if (saver_) saving([&] { return saver_->poll(); });
        const bool last = i + 1 == config_.training.train_iters;
        const auto due = [&](int64_t interval) { return last || (interval > 0 && (i + 1) % interval == 0); };
        // Before the checkpoint: a run that resumes from it has the record.
        if (config_.training.eval_iters > 0 && due(config_.training.eval_interval)) evaluate();
        if (saver_ && (saves_last_ || !last) && (stopping_ || due(config_.checkpoint.save_interval))) {
            drain();
            save();
        }
    }
    drain();
    if (saver_) saving([&] { return saver_->finish(); });
}

void Training::report(const StepResult& result) {
    const int64_t iteration = result.step + 1;
    folder_.check_if_unsure();
    stopping_ = stopping_ || result.stop_asked;
    const StepValues values =
        values_of(config_, flops_per_token_, result, world_.size(), parameter_bytes_ + result.peak_bytes);
    const bool is_first = iteration == first_step_ + 1;
    if (is_first && !trainer_->routing_note().empty()) log_.line("warning: " + trainer_->routing_note());
    records_.add(values, is_first ? &provenance_ : nullptr);
    if (config_.output.tensor_stats) records_.add_tensor_stats(iteration);
    on_step(result, values);
}

void Training::drain() {
    const auto result = trainer_->drain();
    if (!result) return;
    report(*result);
    on_drained(*result);
}

void Training::evaluate() {
    drain();
    const double nats = trainer_->evaluate(config_.training.eval_iters);
    records_.add_evaluation(trainer_->steps_done(), nats);
    on_evaluation(nats);
}

void Training::save() {
    note_stage(Stage::checkpoint, trainer_->steps_done());
    saving([&] { return saver_->finish(); });
    saving([&] { return saver_->save(*trainer_); });
}

// A checkpoint that cannot be written ends the run. With checkpoint.on_error: warn it is a warning, and the
// next interval tries again. All ranks see the same error.
template <class Call> void Training::saving(Call call) {
    try {
        if (const std::optional<CheckpointSaver::Published> saved = call()) {
            report(*saved);
            save_failed_ = false;
        }
    } catch (const Error& error) {
        if (config_.checkpoint.on_error == OnError::stop || error.code() != ExitCode::checkpoint) throw;
        save_failed_ = true;
        ++failed_saves_;
        log_.line(
            "warning: no checkpoint was written ({} so far): {}; the run goes on, and tries "
            "again in {} iterations",
            failed_saves_, error.what(), config_.checkpoint.save_interval);
    }
}

void Training::report(const CheckpointSaver::Published& saved) {
    last_saved_ = saved.step;
    warn(saver_->take_problems());
    log_.line(
        " checkpoint after iteration {}: {} in {}, written in {} in the background; training "
        "paused {:.0f} ms",
        saved.step, format_bytes(saved.bytes), saved.path, format_duration(saved.seconds),
        saved.paused * 1e3);
}

// Returns to the last checkpoint and continues with the data after the step that diverged. False: not
// configured, done too often, or there is no checkpoint.
bool Training::go_back(const Diverged& problem) {
    if (config_.training.on_divergence != OnDivergence::rollback || rollbacks_ == kMostRollbacks)
        return false;
    saving([&] { return saver_->finish(); });
    const int64_t next_batch = problem.step + trainer_->first_batch() + 1;
    Config from = config_;
    from.checkpoint.load = "auto";
    from.checkpoint.finetune = false;
    note_stage(Stage::resume);
    // Not to that of another run in the same folder.
    const auto is_ours = [this](const CheckpointManifest& saved) {
        return saved.run == run_ || (continues_ && saved.step == first_step_);
    };
    const auto resumed =
        resume(*trainer_, from, *data_, world_, checkpoints_, std::make_shared<Disk>(), is_ours);
    if (!resumed) return false;
    ++rollbacks_;
    last_saved_ = resumed->step;
    trainer_->set_first_batch(next_batch - resumed->step);
    log_.line("warning: {}", problem.what());
    log_.line("back to iteration {} ({} of {} times), from there on with batch {}", resumed->step, rollbacks_,
              kMostRollbacks, next_batch + 1);
    records_.go_back(resumed->step);
    return true;
}

// The model is as before the step that diverged, and may have a checkpoint already. If none can be written,
// that is a warning: the run ends with the error of the step.
void Training::keep_last_state() {
    if (!saver_ || !saves_last_) return;
    try {
        saving([&] { return saver_->finish(); });
        if (last_saved_ == trainer_->steps_done()) return;
        save();
        saving([&] { return saver_->finish(); });
    } catch (const Error& error) {
        log_.line("warning: no checkpoint of the last state was written: {}", error.what());
    }
}

// Before anything of an earlier run is overwritten. The folder of this run's checkpoints is made by the first
// rank and known to all. It has a lock of its own: another run may name it as its checkpoint.save.
void Training::find_checkpoints() {
    const std::string& save = config_.checkpoint.save;
    if (config_.checkpoint.save_interval == 0 && !continues_) return;
    checkpoint_folder_.emplace(
        RunFolder::Request{.path = save.empty() ? config_.output.out + "/" + kCheckpoints : save,
                           .key = save.empty() ? "--out" : "checkpoint.save",
                           .command = provenance_.command,
                           .taken = RunFolder::Taken::enter,
                           .holder = options_.holder},
        world_);
    if (checkpoint_folder_->is_first_rank()) checkpoints_ = checkpoint_folder_->folder().path();
    world_.broadcast(checkpoints_, 0);
    if (config_.checkpoint.load.empty() && !(overwrites_ && save.empty())) refuse_newer_checkpoints(0);
}

// All below --out. Those in another folder are refused, as those of any other run.
void Training::remove_checkpoints() {
    on_all_ranks(world_, [&] {
        if (!folder_.is_first_rank()) return;
        const std::string path = folder_.folder().path_of(kCheckpoints);
        if (!std::filesystem::is_directory(path)) return;
        CheckpointFolder folder(std::make_shared<Disk>(), path);
        warn(folder.clean_up());
        const std::vector<std::string> problems = folder.keep_latest(0, std::nullopt);
        warn(problems);
        require(folder.steps().empty(), ExitCode::checkpoint, "{}: an earlier run's checkpoint stays: {}",
                path, fmt::join(problems, "; "));
    });
}

// The number of the step in a name decides which is newer, so those of another run would mix with ours.
void Training::refuse_newer_checkpoints(int64_t steps_done) {
    on_all_ranks(world_, [&] {
        if (world_.rank() != 0) return;
        const std::vector<int64_t> steps = CheckpointFolder(std::make_shared<Disk>(), checkpoints_).steps();
        const int64_t newest = steps.empty() ? 0 : steps.back();
        require(newest <= steps_done, ExitCode::checkpoint,
                "{} holds {} of an earlier run, up to iteration {}, and this one begins at {}: go on with "
                "--resume auto, or choose another --out, or remove them",
                checkpoints_, counted(std::ssize(steps), "checkpoint"), newest, steps_done);
    });
}

void Training::open_checkpoints() {
    const CheckpointSpec& spec = config_.checkpoint;
    const auto resumed = resume(*trainer_, config_, *data_, world_, checkpoints_);
    // A run keeps its identity when it is continued; one that begins, or branches off another, gets its own.
    std::random_device random;
    run_ = resumed && continues_ && !spec.finetune ? resumed->run : 0;
    while (run_ == 0) run_ = uint64_t{random()} << 32 | random();
    world_.broadcast(&run_, sizeof run_, 0);
    if (resumed) {
        if (std::filesystem::path(resumed->path).parent_path() == checkpoints_) last_saved_ = resumed->step;
        log_.line("resumed from {}, {} done", resumed->path, counted(resumed->step, "iteration"));
        for (const std::string& line : messages_of(*resumed)) log_.line(line);
        config_ = resumed->config;
        if (resumed->by_size)
            log_.line("note: an older version saved it: data files were compared by name and size");
    } else if (spec.load == "auto") {
        log_.line("warning: no checkpoint to resume from: beginning at iteration 1");
    }
    if (overwrites_) remove_checkpoints();
    if (checkpoints_.empty()) return;
    // The next --resume auto would take them, whether or not this run saves any.
    refuse_newer_checkpoints(trainer_->steps_done());
    if (spec.save_interval == 0) {
        if (world_.rank() == 0) warn(CheckpointFolder(std::make_shared<Disk>(), checkpoints_).clean_up());
        return;
    }
    saver_ = std::make_unique<CheckpointSaver>(config_, data_->fingerprint(), world_, checkpoints_, run_);
    warn(saver_->take_problems());
    saver_->check_owner_with([this] {
        folder_.check();
        checkpoint_folder_->check();
    });
}

void Training::warn(const std::vector<std::string>& problems) {
    for (const std::string& problem : problems) log_.line("warning: " + problem);
}

}  // namespace fp8flow
