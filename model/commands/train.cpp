// SPDX-License-Identifier: MIT
// `fp8flow train`: steps with progress, held-out evaluation, metrics, a report and a summary.
#include "model/checkpoint/folder.h"
#include "model/commands/next_steps.h"
#include "model/commands/training.h"
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
#include <filesystem>
#include <optional>

namespace fp8flow {

using namespace data;
using namespace weights;
using namespace checkpoint;
using namespace report;

namespace {

// The run continues in its own folder: it resumes from a checkpoint below it.
bool continues_in_folder(const Options& options, const Config& config) {
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
    // The file is begun with the first step, when --overwrite has removed the earlier run.
    const std::string& recorded = config.output.record_routing;
    const bool begins = load.empty() || (config.checkpoint.finetune && !continues);
    require(!begins || recorded.empty() || !std::filesystem::exists(recorded), ExitCode::output,
            "{}: exists; remove it, or record to another file", recorded);
    return continues;
}

// The setup of `fp8flow train`.
Training::Setup setup_of(const Options& options, ProcessGroup& world, RunLog& log) {
    Config config = load_config(options.config_path, options.overrides, world.size(), options.hf_config);
    require_own_layers(config);
    const BackendChoice backend = choose_backend(options.backend, options.placement, world);
    const bool continues = continues_in_folder(options, config);
    RunFolder::Request folder = run_folder_of(options, config.output.out);
    if (continues) folder.taken = RunFolder::Taken::enter;
    return {.options = options,
            .config = std::move(config),
            .world = world,
            .backend = backend,
            .provenance = make_provenance(options.command, backend, world.size()),
            .folder = std::move(folder),
            .continues = continues,
            .log_name = "train.log",
            .log = log};
}

class TrainRun : public Training {
public:
    TrainRun(const Options& options, ProcessGroup& world, RunLog& log)
        : Training(setup_of(options, world, log)), export_(export_plan(config_, options.hf_config)) {
        report_start(log_, config_, backend_, world.size());
        const std::string joined = predict::decide_joined(config_, backend_, world);
        const int64_t decided = config_.precision.moe_wgrad_micro_batches;
        predict::require_fit(log_, {config_}, backend_, world, options.placement.ranks_on_host,
                             options.where_short);
        std::shared_ptr<const TokenSource> data = open_data(config_);
        report_data(log_, config_, *data);
        make_trainer(std::move(data));
        for (const std::string& line :
             {frozen_text(trainer_->transformer().parameters()), trainer_->exchange_note()})
            if (!line.empty()) log_.line(line);
        if (config_.schedule.cuda_graph_impl != CudaGraphImpl::none && trainer_->captured() == nullptr)
            log_.line("note: schedule.cuda_graph_impl: nothing is captured on the reference backend");
        begin();
        // A resumed run keeps the value that it had.
        if (!joined.empty() && config_.precision.moe_wgrad_micro_batches == decided) log_.line(joined);
        eta_.emplace(config_.training.train_iters - first_step_);
        if (!folder_.is_first_rank()) return;
        if (const std::string hf = folder_.folder().path_of("hf");
            continues_ && !export_ && std::filesystem::exists(hf + "/model.safetensors.index.json"))
            log_.line("warning: " + hf + " has the weights of an earlier iteration; --export replaces them");
    }

    int run() {
        const double start = clock_seconds();
        train();
        note_stage(Stage::exporting, trainer_->steps_done());
        if (export_ && is_done()) export_model();
        note_stage(Stage::summary, trainer_->steps_done());
        if (world_.rank() == 0) finish(clock_seconds() - start);
        world_.barrier();
        if (!is_done()) return static_cast<int>(ExitCode::stopped);
        return static_cast<int>(save_failed_ ? ExitCode::checkpoint : ExitCode::ok);
    }

private:
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
        log_.line("weights: written to {}/{}{}", folder.path(), carried.empty() ? "" : " with ",
                  fmt::join(carried, ", "));
        exported_ = true;
    }

    void on_step(const StepResult& result, const StepValues& values) override {
        const int64_t iteration = result.step + 1;
        eta_->step_done(result.seconds, clock_seconds());
        wire_ += result.wire.total();
        ++reported_;
        if (!result.skipped.empty()) {
            ++skipped_;
            log_.line("warning: iteration {} is skipped, its update is not applied: {}", iteration,
                      result.skipped);
        } else {
            last_ = result;
        }
        report_graphs();
        redone_.add(result);
        experts_.add(result);
        if (result.redone > 0) log_.line(capacity_text(config_, result, trainer_->row_capacity()));
        if (iteration % config_.output.log_interval == 0 || iteration == config_.training.train_iters ||
            iteration == first_step_ + 1)
            log_.line(step_line(values, eta_->seconds_left(), log_.detail()));
    }

    // A run captures two graphs, and both again when memory has moved.
    void report_graphs() {
        const CapturedSteps* graphs = trainer_->captured();
        if (graphs == nullptr || graphs->num_captures() == num_captures_) return;
        num_captures_ = graphs->num_captures();
        log_.line(
            " steps are CUDA graphs from here on: {} kernels, {} copies and fills, captured "
            "in {:.0f} ms (graph {} of this run)",
            graphs->launches().kernels, graphs->launches().others, graphs->capture_seconds() * 1e3,
            num_captures_);
    }

    void on_drained(const StepResult& result) override { memory_ = memory_of(*trainer_, result.peak_bytes); }

    void on_evaluation(double nats) override {
        log_.line(" validation after iteration {}: {}", trainer_->steps_done(),
                  evaluation_text(config_, nats));
    }

    // By this run only, not by the runs that it continues.
    double tokens_read() const {
        return f64(reported_) * f64(config_.training.global_batch_size * config_.model.seq_length);
    }

    void finish(double seconds) {
        const RunTitle title{run_name(options_.config_path, options_.hf_config), config_, provenance_};
        // A run that was done already keeps what it had.
        if (reported_ > 0 || !std::filesystem::exists(folder_.folder().path_of(kPageFile)))
            folder_.folder().write_atomic(kPageFile,
                                          train_page(title, {.sums = records_.sums(),
                                                             .floor = data_->entropy_floor_nats(),
                                                             .steps_done = trainer_->steps_done(),
                                                             .first_step = first_step_,
                                                             .seconds = seconds,
                                                             .tokens_per_second = tokens_read() / seconds,
                                                             .last = last_,
                                                             .memory = memory_}));
        summary(seconds);
    }

    void summary(double seconds) {
        const int64_t done = trainer_->steps_done(), all = config_.training.train_iters;
        const double tokens = tokens_read();
        log_.line("");
        if (skipped_ + rollbacks_ + failed_saves_ > 0)
            log_.line("warning: {} skipped, {} back to a checkpoint, {} not written",
                      counted(skipped_, "iteration"), counted(rollbacks_, "time"),
                      counted(failed_saves_, "checkpoint"));
        if (const std::string dead = experts_.warning(); !dead.empty()) log_.line(dead);
        const std::string end = done == all ? "done"
                                            : fmt::format("stopped by {} after iteration {} of {}",
                                                          name_of_signal(stop_signal()), done, all);
        log_.result("{}: {}, {} tokens, {} with {} on {} ({:.0f} tokens/s)", end,
                    counted(done - first_step_, "iteration"), format_si(tokens), format_duration(seconds),
                    recipe_name(config_.precision), counted(world_.size(), "rank"), tokens / seconds);
        const std::vector<double>&losses = records_.sums().losses.y, &held_out = records_.sums().held_out.y;
        if (!losses.empty()) log_.result("  train loss     {:.4f} -> {:.4f}", losses.front(), losses.back());
        if (!held_out.empty()) log_.result("  " + evaluation_text(config_, held_out.back()));
        log_.line("  wire           rank 0 sends {} per step in MoE layers{}",
                  format_bytes(wire_ / f64(std::max<int64_t>(1, reported_))),
                  config_.parallel.expert_model_parallel_size == 1
                      ? " (expert parallel 1: every expert is on every rank)"
                      : "");
        const int64_t micro_batches =
            config_.training.global_batch_size / config_.training.micro_batch_size / world_.size();
        log_.line("  casts          {} explicit per step on rank 0, in {}", last_.casts,
                  counted(micro_batches, "micro-batch"));
        log_.line("  redone         " + redone_text(redone_));
        if (trainer_->evaluations_redone() > 0)
            log_.line("  evaluations    repeated {}, with a larger row capacity",
                      counted(trainer_->evaluations_redone(), "time"));
        log_.line("  memory         " + memory_text(memory_));
        nlohmann::json memory = memory_json(memory_);
        memory["redone"] = redone_json(redone_);
        add_provenance(memory, provenance_);
        if (reported_ > 0) folder_.folder().write_json("memory.json", memory);
        if (config_.output.tensor_stats && done > first_step_) {
            const TensorStats& stats = records_.tensor_stats();
            log_.line(stats.rows().empty()
                          ? fmt::format(
                                "warning: no quantised tensor was observed (recipe {}, every {} iterations)",
                                recipe_name(config_.precision), config_.output.tensor_stats_interval)
                          : tensor_stats_table(stats));
            folder_.folder().write_json("tensor_stats.json", tensor_stats_json(stats, provenance_));
            if (!stats.transposed().empty())
                folder_.folder().write_json("transposed_stats.json",
                                            transpose_stats_json(stats, provenance_));
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
        if (!config_.output.tensorboard_dir.empty()) files.push_back(config_.output.tensorboard_dir + "/");
        if (exported_) files.emplace_back("hf/");
        if (last_saved_ >= 0)
            files.push_back(config_.checkpoint.save.empty() ? std::string(kCheckpoints) + "/" : checkpoints_);
        log_.result("  files          {}/: {}", folder_.folder().path(), fmt::join(files, ", "));
    }

    std::vector<NextStep> next_steps() const {
        const std::string& out = config_.output.out;
        const int64_t iterations = config_.training.train_iters, ranks = world_.size();
        if (!is_done()) {
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
        const std::string config = config_of_run(options_, out);
        std::vector<std::string> validate = {config, "--out", out + "_validate"};
        if (config_.validate.warmup_iters >= iterations)
            validate.insert(validate.end(), {"--set", "validate.warmup_iters=0"});
        return {
            {"compare recipes", command_line("validate", with_options(validate, options_), ranks)},
            {"where the time goes",
             command_line("profile", with_options({config, "--out", out + "_profile"}, options_), ranks)}};
    }

    std::optional<ExportChoice> export_;
    std::optional<EtaEstimator> eta_;
    bool exported_ = false;
    int64_t num_captures_ = 0, skipped_ = 0, reported_ = 0;
    StepResult last_;
    MemoryUse memory_;
    RedoneSteps redone_;
    ExpertUse experts_;
    double wire_ = 0;  // of the reported steps, also those that were taken back
};

}  // namespace

int run_train(const Options& options, ProcessGroup& world) {
    RunLog log(world.rank(), options.detail);
    return TrainRun(options, world, log).run();
}

}  // namespace fp8flow
