// SPDX-License-Identifier: MIT
// `fp8flow train`: steps with progress, held-out evaluation, metrics, a report and a summary.
#include "model/base/provenance.h"
#include "model/checkpoint/agree.h"
#include "model/checkpoint/resume.h"
#include "model/checkpoint/saver.h"
#include "model/commands/commands.h"
#include "model/commands/next_steps.h"
#include "model/commands/train_records.h"
#include "model/config/hf_config.h"
#include "model/job/stop_signals.h"
#include "model/job/watchdog.h"
#include "model/report/page/run_pages.h"
#include "model/report/progress.h"
#include "model/report/records.h"
#include "model/report/run_report.h"
#include "model/report/table.h"
#include "model/report/tensor_stats.h"
#include "model/weights/export.h"

#include <fmt/ranges.h>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>

namespace fp8flow {

using namespace data;
using namespace weights;
using namespace checkpoint;
using namespace report;

namespace {

// The run continues in its own folder: it resumes from a checkpoint below it.
bool continues_in_folder(const RunOptions& options, const Config& config) {
    const std::string& load = config.checkpoint.load;
    const auto real = [](const std::string& path) {
        std::error_code error;
        return (std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error) / "")
            .string();
    };
    const auto is_below = [&](const std::string& path) {
        return !path.empty() && real(path).starts_with(real(config.output.out));
    };
    const bool continues = load == "auto" || is_below(load);
    const std::string& weights = config.checkpoint.pretrained_checkpoint;
    require(options.taken != RunFolder::Taken::overwrite || !is_below(weights), ExitCode::usage,
            "--overwrite would remove what --weights {} reads: choose another --out", weights);
    require(!continues || options.taken != RunFolder::Taken::overwrite, ExitCode::usage,
            "--overwrite would remove what --resume {} continues: give one of the two", load);
    return continues;
}

class TrainRun {
public:
    TrainRun(const RunOptions& options, ProcessGroup& world)
        : world_(world),
          options_(options),
          config_(load_config(options.config_path, options.overrides, world.size(), options.hf_config)),
          backend_(choose_backend(options.backend, options.placement, world)),
          provenance_(make_provenance(options.command, backend_, world.size())),
          export_(export_plan(config_, options.hf_config)),
          continues_(continues_in_folder(options, config_)),
          run_folder_({.path = config_.output.out,
                       .command = options.command,
                       .taken = continues_ ? RunFolder::Taken::enter : options.taken,
                       .holder = options.holder},
                      world),
          log_(world.rank(), options.terminal) {
        require_own_layers(config_);
        config_.output.out = run_folder_.name();
        config_to_name_ = config_of_run(options, config_.output.out);
        if (!run_folder_.note().empty()) log_.line(run_folder_.note());
        find_checkpoints();
        report_start(log_, config_, backend_, world.size());
        const std::string joined = predict::decide_joined(config_, backend_, world);
        const int64_t decided = config_.precision.moe_wgrad_micro_batches;
        predict::require_fit(log_, {config_}, backend_, world, options.placement.ranks_on_host,
                             options.where_short);
        data_ = open_data(config_);
        report_data(log_, config_, *data_);
        trainer_ = std::make_unique<Trainer>(config_, world, backend_, Arithmetic::stated, data_);
        for (const std::string& line :
             {frozen_text(trainer_->transformer().parameters()), trainer_->exchange_note()})
            if (!line.empty()) log_.line(line);
        if (config_.schedule.cuda_graph_impl != CudaGraphImpl::none && trainer_->captured() == nullptr)
            log_.line("note: schedule.cuda_graph_impl: nothing is captured on the reference backend");
        note_stage(Stage::weights);
        if (const std::string& weights = config_.checkpoint.pretrained_checkpoint; !weights.empty()) {
            for (const std::string& line :
                 load_model(weights, config_, trainer_->transformer(), trainer_->ops().device()))
                log_.line(line);
            trainer_->weights_replaced();
        }
        if (config_.output.time_stages) trainer_->time_stages(TimerDetail::stages);
        note_stage(Stage::resume);
        open_checkpoints();
        // A run that is resumed keeps what it had.
        if (!joined.empty() && config_.precision.moe_wgrad_micro_batches == decided) log_.line(joined);
        first_step_ = trainer_->steps_done();
        for (const auto& [category, bytes] : trainer_->parameter_bytes()) parameter_bytes_ += bytes;
        eta_.emplace(config_.training.train_iters - first_step_);
        trainer_->stop_when([] { return stop_signal() != 0; });
        // Configuration, data, weights and checkpoints are accepted: now files of an earlier run may go.
        run_folder_.keep();
        if (checkpoint_folder_) checkpoint_folder_->keep();
        if (run_folder_.is_first_rank()) open_files();
        world.barrier();  // before another rank writes below what the first one has cleared
    }

    int run() {
        const auto start = std::chrono::steady_clock::now();
        for (bool done = false; !done;) {
            try {
                train();
                done = true;
            } catch (const Diverged& problem) {
                if (go_back(problem)) continue;
                keep_last_state();
                throw;
            } catch (const OutOfRoom&) {
                keep_last_state();
                throw;
            }
        }
        const bool stopped = trainer_->steps_done() < config_.training.train_iters;
        run_folder_.check();
        note_stage(Stage::exporting, trainer_->steps_done());
        if (export_ && !stopped) export_model();
        note_stage(Stage::summary, trainer_->steps_done());
        if (world_.rank() == 0)
            finish(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        world_.barrier();
        if (stopped) return static_cast<int>(ExitCode::stopped);
        return static_cast<int>(save_failed_ ? ExitCode::checkpoint : ExitCode::ok);
    }

private:
    // From the step that the model is at to the last step, or to one after which a signal asked to stop.
    void train() {
        for (int64_t i = trainer_->steps_done(); i < config_.training.train_iters && !stopping_; ++i) {
            const bool observed =
                config_.output.tensor_stats && (i + 1) % config_.output.tensor_stats_interval == 0;
            trainer_->set_tensor_stats(observed ? &records_.tensor_stats() : nullptr);
            if (const auto result = trainer_->step()) report(*result);
            if (saver_) saving([&] { return saver_->poll(); });
            const bool last = i + 1 == config_.training.train_iters;
            const auto due = [&](int64_t interval) {
                return last || (interval > 0 && (i + 1) % interval == 0);
            };
            // Before the checkpoint: a run that resumes from it has the record.
            if (config_.training.eval_iters > 0 && due(config_.training.eval_interval)) evaluate();
            if (saver_ && (stopping_ || due(config_.checkpoint.save_interval))) {
                drain();
                save();
            }
        }
        drain();
        if (saver_) saving([&] { return saver_->finish(); });
    }

    void save() {
        note_stage(Stage::checkpoint, trainer_->steps_done());
        saving([&] { return saver_->finish(); });
        saving([&] { return saver_->save(*trainer_); });
    }

    // What cannot be written ends the run, or with checkpoint.on_error: warn is said, and tried again at the
    // next interval. All ranks see the same error.
    template <class Call> void saving(Call call) {
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
                fmt::format("warning: no checkpoint was written ({} so far): {}; the run goes on, and tries "
                            "again in {} iterations",
                            failed_saves_, error.what(), config_.checkpoint.save_interval));
        }
    }

    // To the last checkpoint, and on with the data after the step that diverged. False: that is not wanted,
    // or has been done too often, or there is none.
    bool go_back(const Diverged& problem) {
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
        log_.line(fmt::format("warning: {}", problem.what()));
        log_.line(fmt::format("back to iteration {} ({} of {} times), from there on with batch {}",
                              resumed->step, rollbacks_, kMostRollbacks, next_batch + 1));
        records_.go_back(resumed->step);
        return true;
    }

    // The model is that before the step that diverged; it may have a checkpoint already. A checkpoint that
    // cannot be written does not hide why the run ends.
    void keep_last_state() {
        if (!saver_) return;
        try {
            saving([&] { return saver_->finish(); });
            if (last_saved_ == trainer_->steps_done()) return;
            save();
            saving([&] { return saver_->finish(); });
        } catch (const Error& error) {
            log_.line(fmt::format("warning: no checkpoint of the last state was written: {}", error.what()));
        }
    }

    void open_files() {
        folder_ = &run_folder_.folder();
        if (const std::string hf = folder_->path_of("hf");
            continues_ && !export_ && std::filesystem::exists(hf + "/model.safetensors.index.json"))
            log_.line("warning: " + hf + " has the weights of an earlier iteration; --export replaces them");
        const std::vector<std::string> warnings = records_.open(*folder_, continues_ ? first_step_ : 0);
        log_.open(*folder_, "train.log", continues_ ? LineFile::Start::append : LineFile::Start::truncate);
        warn(warnings);
        folder_->write_atomic("config.yaml", run_config_yaml(config_, provenance_));
    }

    // The folder of this run's checkpoints, made by the first rank and known to all. It has a lock of its
    // own: another run may name it as its checkpoint.save.
    std::string checkpoint_path() {
        const std::string& save = config_.checkpoint.save;
        checkpoint_folder_.emplace(
            RunFolder::Request{.path = save.empty() ? config_.output.out + "/" + kCheckpoints : save,
                               .key = save.empty() ? "--out" : "checkpoint.save",
                               .command = provenance_.command,
                               .taken = RunFolder::Taken::enter,
                               .holder = options_.holder},
            world_);
        std::string path;
        if (checkpoint_folder_->is_first_rank()) path = checkpoint_folder_->folder().path();
        world_.broadcast(path, 0);
        return path;
    }

    // Before anything of an earlier run is overwritten.
    void find_checkpoints() {
        if (config_.checkpoint.save_interval == 0 && !continues_) return;
        checkpoints_ = checkpoint_path();
        const bool replaces = options_.taken == RunFolder::Taken::overwrite;
        if (config_.checkpoint.load.empty() && !(replaces && config_.checkpoint.save.empty()))
            refuse_newer_checkpoints(0);
    }

    // All below --out; another folder's are refused like anybody's.
    void remove_overwritten_checkpoints() {
        on_all_ranks(world_, [&] {
            if (!run_folder_.is_first_rank()) return;
            const std::string path = run_folder_.folder().path_of(kCheckpoints);
            if (!std::filesystem::is_directory(path)) return;
            CheckpointFolder folder(std::make_shared<Disk>(), path);
            warn(folder.clean_up());
            const std::vector<std::string> problems = folder.keep_latest(0, std::nullopt);
            warn(problems);
            require(folder.steps().empty(), ExitCode::checkpoint, "{}: an earlier run's checkpoint stays: {}",
                    path, fmt::join(problems, "; "));
        });
    }

    void warn(const std::vector<std::string>& problems) {
        for (const std::string& problem : problems) log_.line("warning: " + problem);
    }

    // A run keeps its identity when it is continued; one that begins, or branches off another, gets its own.
    void identify(const std::optional<Resumed>& resumed) {
        std::random_device random;
        run_ = resumed && continues_ && !config_.checkpoint.finetune ? resumed->run : 0;
        while (run_ == 0) run_ = uint64_t{random()} << 32 | random();
        world_.broadcast(&run_, sizeof run_, 0);
    }

    // Older and newer by the step in its name: those of another run would be mixed with ours.
    void refuse_newer_checkpoints(int64_t steps_done) {
        on_all_ranks(world_, [&] {
            if (world_.rank() != 0) return;
            const std::vector<int64_t> steps =
                CheckpointFolder(std::make_shared<Disk>(), checkpoints_).steps();
            const int64_t newest = steps.empty() ? 0 : steps.back();
            require(
                newest <= steps_done, ExitCode::checkpoint,
                "{} holds {} of an earlier run, up to iteration {}, and this one begins at {}: go on with "
                "--resume auto, or choose another --out, or remove them",
                checkpoints_, counted(static_cast<int64_t>(steps.size()), "checkpoint"), newest, steps_done);
        });
    }

    void open_checkpoints() {
        const CheckpointSpec& spec = config_.checkpoint;
        const auto resumed = resume(*trainer_, config_, *data_, world_, checkpoints_);
        identify(resumed);
        if (resumed) {
            if (std::filesystem::path(resumed->path).parent_path() == checkpoints_)
                last_saved_ = resumed->step;
            log_.line(
                fmt::format("resumed from {}, {} done", resumed->path, counted(resumed->step, "iteration")));
            for (const std::string& line : messages_of(*resumed)) log_.line(line);
            config_ = resumed->config;
            if (resumed->by_size)
                log_.line("note: an older version saved it: data files were compared by name and size");
        } else if (spec.load == "auto") {
            log_.line("warning: no checkpoint to resume from: beginning at iteration 1");
        }
        if (options_.taken == RunFolder::Taken::overwrite) remove_overwritten_checkpoints();
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
            run_folder_.check();
            checkpoint_folder_->check();
        });
    }

    void report(const CheckpointSaver::Published& saved) {
        last_saved_ = saved.step;
        warn(saver_->take_problems());
        log_.line(
            fmt::format(" checkpoint after iteration {}: {} in {}, written in {} in the background; training "
                        "paused {:.0f} ms",
                        saved.step, format_bytes(saved.bytes), saved.path, format_duration(saved.seconds),
                        saved.paused * 1e3));
    }

    void export_model() {
        Arena scratch(trainer_->ops().device(), "export");
        const std::vector<WeightTarget> targets =
            whole_targets_of(trainer_->transformer(), trainer_->exchange(), scratch);
        trainer_->ops().device().synchronize();
        trainer_->exchange().check_peers();
        // the first ranks that share the experts hold everything
        if (world_.rank() >= config_.parallel.expert_model_parallel_size) return;
        const OutputFolder folder = OutputFolder(config_.output.out).subfolder("hf");
        const std::vector<std::string> carried =
            export_weights(folder, targets, {config_.model, config_.moe}, *export_,
                           trainer_->expert_parallel_group(), trainer_->ops().device());
        log_.line(fmt::format("weights: written to {}/{}{}", folder.path(), carried.empty() ? "" : " with ",
                              fmt::join(carried, ", ")));
        exported_ = true;
    }

    // Results arrive one step late.
    void report(const StepResult& result) {
        const int64_t iteration = result.step + 1;
        run_folder_.check_if_unsure();
        stopping_ = stopping_ || result.stop_asked;
        eta_->step_done(result.seconds);
        wire_ += result.wire.total();
        ++reported_;
        if (!result.skipped.empty()) {
            ++skipped_;
            log_.line(fmt::format("warning: iteration {} is skipped, its update is not applied: {}",
                                  iteration, result.skipped));
        } else {
            last_ = result;
        }
        report_graphs();
        redone_.add(result);
        experts_.add(result);
        if (result.redone > 0) log_.line(capacity_text(config_, result, trainer_->row_capacity()));
        const StepValues values =
            values_of(config_, result, world_.size(), parameter_bytes_ + result.peak_bytes);
        if (iteration % config_.output.log_interval == 0 || iteration == config_.training.train_iters ||
            iteration == first_step_ + 1)
            log_.line(step_line(values, eta_->seconds_left(), log_.detail()));
        records_.add(values, iteration == first_step_ + 1 ? &provenance_ : nullptr);
        if (config_.output.tensor_stats) records_.add_tensor_stats(iteration);
    }

    // Two of them, and again where memory has moved.
    void report_graphs() {
        const CapturedSteps* graphs = trainer_->captured();
        if (graphs == nullptr || graphs->num_captures() == num_captures_) return;
        num_captures_ = graphs->num_captures();
        log_.line(
            fmt::format(" steps are CUDA graphs from here on: {} kernels, {} copies and fills, captured "
                        "in {:.0f} ms (graph {} of this run)",
                        graphs->launches().kernels, graphs->launches().others,
                        graphs->capture_seconds() * 1e3, num_captures_));
    }

    // Of the last step so far, with nothing in flight.
    void keep_memory(const StepResult& result) {
        const Trainer::MemorySums saved = trainer_->saved_memory();
        memory_ = {.parameters = trainer_->parameter_bytes(),
                   .saved = trainer_->saved_bytes(),
                   .saved_reserved = saved.reserved,
                   .saved_used = saved.used,
                   .workspace = trainer_->workspace_memory(),
                   .capacity = trainer_->row_capacity(),
                   .most_wanted = trainer_->most_wanted(),
                   .activations = result.peak_bytes};
    }

    void drain() {
        const auto result = trainer_->drain();
        if (!result) return;
        report(*result);
        keep_memory(*result);
    }

    void evaluate() {
        drain();
        const double nats = trainer_->evaluate(config_.training.eval_iters);
        records_.add_evaluation(trainer_->steps_done(), nats);
        log_.line(fmt::format(" validation after iteration {}: {}", trainer_->steps_done(),
                              evaluation_text(config_, nats)));
    }

    // By this run, not by those that it continues.
    double tokens_read() const {
        return static_cast<double>(reported_) *
               static_cast<double>(config_.training.global_batch_size * config_.model.seq_length);
    }

    void finish(double seconds) {
        const RunTitle title{run_name(options_.config_path, options_.hf_config), config_, provenance_};
        folder_->write_atomic(kPageFile, train_page(title, {.losses = records_.losses(),
                                                            .held_out = records_.held_out(),
                                                            .floor = data_->entropy_floor_nats(),
                                                            .steps_done = trainer_->steps_done(),
                                                            .seconds = seconds,
                                                            .tokens_per_second = tokens_read() / seconds,
                                                            .last = last_,
                                                            .memory = memory_,
                                                            .routing = records_.routing(),
                                                            .tensors = records_.tensors()}));
        summary(seconds);
    }

    void summary(double seconds) {
        const int64_t done = trainer_->steps_done(), all = config_.training.train_iters;
        const double tokens = tokens_read();
        log_.line("");
        if (skipped_ + rollbacks_ + failed_saves_ > 0)
            log_.line(fmt::format("warning: {} skipped, {} back to a checkpoint, {} not written",
                                  counted(skipped_, "iteration"), counted(rollbacks_, "time"),
                                  counted(failed_saves_, "checkpoint")));
        if (const std::string dead = experts_.warning(); !dead.empty()) log_.line(dead);
        if (trainer_->evaluations_redone() > 0)
            log_.line(fmt::format("  evaluations    done again {}, with a larger row capacity",
                                  counted(trainer_->evaluations_redone(), "time")));
        const std::string end = done == all ? "done"
                                            : fmt::format("stopped by {} after iteration {} of {}",
                                                          name_of_signal(stop_signal()), done, all);
        log_.result(fmt::format("{}: {}, {} tokens, {} with {} on {} ({:.0f} tokens/s)", end,
                                counted(done - first_step_, "iteration"), format_si(tokens),
                                format_duration(seconds), recipe_name(config_.precision),
                                counted(world_.size(), "rank"), tokens / seconds));
        const std::vector<double>&losses = records_.losses().y, &held_out = records_.held_out().y;
        if (!losses.empty())
            log_.result(fmt::format("  train loss     {:.4f} -> {:.4f}", losses.front(), losses.back()));
        if (!held_out.empty()) log_.result("  " + evaluation_text(config_, held_out.back()));
        log_.line(fmt::format("  wire           {} per step, sent by rank 0 for MoE layers{}",
                              format_bytes(wire_ / static_cast<double>(std::max<int64_t>(1, reported_))),
                              config_.parallel.expert_model_parallel_size == 1
                                  ? " (expert parallel 1: every expert is on every rank)"
                                  : ""));
        const int64_t micro_batches =
            config_.training.global_batch_size / config_.training.micro_batch_size / world_.size();
        log_.line(fmt::format(
            "  casts          {} explicit per step on rank 0, in {}", last_.casts,
            micro_batches == 1 ? "1 micro-batch" : fmt::format("{} micro-batches", micro_batches)));
        log_.line("  redone         " + redone_text(redone_));
        log_.line("  memory         " + memory_text(memory_));
        nlohmann::json memory = memory_json(memory_);
        memory["redone"] = redone_json(redone_);
        add_provenance(memory, provenance_);
        folder_->write_atomic("memory.json", memory.dump(2) + "\n");
        if (config_.output.tensor_stats && done > first_step_) {
            const TensorStats& stats = records_.tensor_stats();
            log_.line(stats.rows().empty()
                          ? fmt::format("  no quantised tensor was observed (recipe {}, every {} iterations)",
                                        recipe_name(config_.precision), config_.output.tensor_stats_interval)
                          : tensor_stats_table(stats));
            folder_->write_atomic("tensor_stats.json", tensor_stats_json(stats, provenance_).dump(2) + "\n");
            if (!stats.transposed().empty())
                folder_->write_atomic("transposed_stats.json",
                                      transpose_stats_json(stats, provenance_).dump(2) + "\n");
        }
        report_files();
        log_.result(next_text(next_steps()));
    }

    void report_files() {
        std::vector<std::string> files = {"report.html", "config.yaml", "train.log", "memory.json"};
        if (config_.output.metrics) files.emplace_back("metrics.jsonl");
        if (config_.output.tensor_stats)
            files.insert(files.end(), {std::string("tensor_stats.json"), std::string(kTensorStatsFile)});
        if (!records_.tensor_stats().transposed().empty()) files.emplace_back("transposed_stats.json");
        if (records_.has_events()) files.push_back(config_.output.tensorboard_dir + "/");
        if (exported_) files.emplace_back("hf/");
        if (last_saved_ >= 0)
            files.push_back(config_.checkpoint.save.empty() ? std::string(kCheckpoints) + "/" : checkpoints_);
        log_.result(fmt::format("  files          {}/: {}", folder_->path(), fmt::join(files, ", ")));
    }

    std::vector<NextStep> next_steps() const {
        const std::string& out = config_.output.out;
        const int64_t iterations = config_.training.train_iters, ranks = world_.size();
        if (trainer_->steps_done() < iterations) {
            std::vector<std::string> line = {out + "/config.yaml", "--out", out};
            if (saver_)
                line.insert(line.end(), {"--resume", "auto"});
            else
                line.insert(line.end(), {"--overwrite", "--set", "checkpoint.save_interval=100"});
            if (saver_ && config_.checkpoint.finetune)  // it goes on with its own checkpoints
                line.insert(line.end(), {"--set", "checkpoint.finetune=false"});
            return {{saver_ ? "continue from here" : "no checkpoint to continue from: begin again, with some",
                     command_line("train", with_options(line, options_), ranks)}};
        }
        std::vector<std::string> validate = {config_to_name_, "--out", out + "_validate"};
        if (config_.validate.warmup_iters >= iterations)
            validate.insert(validate.end(), {"--set", "validate.warmup_iters=0"});
        return {{"compare recipes", command_line("validate", with_options(validate, options_), ranks)},
                {"where the time goes",
                 command_line("profile", with_options({config_to_name_, "--out", out + "_profile"}, options_),
                              ranks)}};
    }

    ProcessGroup& world_;
    RunOptions options_;
    Config config_;
    std::string config_to_name_;  // in commands that come next
    BackendChoice backend_;
    Provenance provenance_;
    std::optional<ExportChoice> export_;
    bool continues_;
    RunFolder run_folder_;
    std::optional<RunFolder> checkpoint_folder_;  // where it saves or looks for one
    const OutputFolder* folder_ = nullptr;        // of the first rank, which writes
    std::shared_ptr<const TokenSource> data_;
    std::unique_ptr<Trainer> trainer_;
    std::string checkpoints_;  // folder of this run's checkpoints; empty: neither saved nor looked for
    std::unique_ptr<CheckpointSaver> saver_;
    int64_t first_step_ = 0;
    bool stopping_ = false;  // a rank was asked to; the same on all
    bool exported_ = false;
    bool save_failed_ = false;  // the last checkpoint
    int64_t last_saved_ = -1, failed_saves_ = 0, rollbacks_ = 0, skipped_ = 0;
    int64_t num_captures_ = 0, parameter_bytes_ = 0, reported_ = 0;
    uint64_t run_ = 0;  // CheckpointManifest::run
    std::optional<EtaEstimator> eta_;
    RunLog log_;
    TrainRecords records_{config_};
    StepResult last_;
    MemoryUse memory_;
    RedoneSteps redone_;
    ExpertUse experts_;
    double wire_ = 0;  // of the reported steps, also those that were taken back
};

}  // namespace

int run_train(const RunOptions& options, ProcessGroup& world) { return TrainRun(options, world).run(); }

}  // namespace fp8flow
