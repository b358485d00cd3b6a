// SPDX-License-Identifier: MIT
// Training: one run from its start, or its last checkpoint, to its last step or a signal, in a folder of its
// own. It has the trainer, the loop, held-out evaluation, checkpoints and records. `fp8flow train` is one,
// each job of `validate` another; they say what happens with a step. Read next: train_records.h.
#pragma once

#include "model/checkpoint/saver.h"
#include "model/commands/commands.h"
#include "model/commands/train_records.h"
#include "model/report/log.h"
#include "model/train/trainer.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow {

class Training {
public:
    struct Setup {
        const Options& options;
        Config config;
        ProcessGroup& world;
        BackendChoice backend;
        Provenance provenance;
        RunFolder::Request folder;
        bool continues;        // what is in the folder
        std::string log_name;  // in the folder; empty: the log is another's
        report::RunLog& log;
    };
    virtual ~Training() = default;

protected:
    // Each of these is collective. Opens the folder; refuses one with checkpoints that are newer than this
    // run.
    explicit Training(Setup setup);
    // With the weights of checkpoint.pretrained_checkpoint.
    void make_trainer(std::shared_ptr<const data::TokenSource> data,
                      Arithmetic arithmetic = Arithmetic::stated);
    // Resumes and opens the files. From here on those of an earlier run may be gone.
    void begin();
    // To the last step, or to one after which a signal asked to stop. A step that diverges throws, unless the
    // run may go back to a checkpoint; the last state has a checkpoint then.
    void train();
    bool is_done() const { return trainer_->steps_done() == config_.training.train_iters; }

    // Results arrive one step late.
    virtual void on_step(const StepResult& result, const report::StepValues& values) = 0;
    virtual void on_drained(const StepResult&) {}  // the last step so far, with nothing in flight
    virtual void on_evaluation(double nats) = 0;

    ProcessGroup& world_;
    const Options& options_;
    Config config_;
    BackendChoice backend_;
    Provenance provenance_;
    const bool overwrites_, continues_;
    RunFolder folder_;
    std::optional<RunFolder> checkpoint_folder_;  // where it saves or looks for one
    report::RunLog& log_;
    std::shared_ptr<const data::TokenSource> data_;
    std::unique_ptr<Trainer> trainer_;
    TrainRecords records_{config_};
    std::string checkpoints_;  // folder of this run's checkpoints; empty: neither saved nor looked for
    std::unique_ptr<checkpoint::CheckpointSaver> saver_;
    int64_t first_step_ = 0, last_saved_ = -1, failed_saves_ = 0, rollbacks_ = 0;
    bool save_failed_ = false;  // the last checkpoint
    bool saves_last_ = true;  // the state after the last step has a checkpoint, and that of a run that fails

private:
    void steps();
    void drain();
    void report(const StepResult& result);
    void report(const checkpoint::CheckpointSaver::Published& saved);
    void evaluate();
    void save();
    template <class Call> void saving(Call call);
    bool go_back(const Diverged& problem);
    void keep_last_state();
    void find_checkpoints();
    void remove_checkpoints();
    void open_checkpoints();
    void refuse_newer_checkpoints(int64_t steps_done);
    void warn(const std::vector<std::string>& problems);

    std::string log_name_;
    bool stopping_ = false;  // a rank was asked to; the same on all
    uint64_t run_ = 0;       // CheckpointManifest::run
    int64_t parameter_bytes_ = 0;
    double flops_per_token_ = 0;
};

}  // namespace fp8flow
