// SPDX-License-Identifier: MIT
// Runs that save and resume, for tests: over thread ranks or any other process group.
#pragma once

#include "model/checkpoint/reader.h"
#include "model/checkpoint/resume.h"
#include "model/checkpoint/saver.h"
#include "tests/support/training.h"

namespace fp8flow::test {

struct CheckpointedRun {
    std::string folder;  // of checkpoints; must exist
    int64_t steps = 10;  // the run ends after so many, counted from the first
    BackendKind backend = BackendKind::reference;
    Placement placement = {};
    uint64_t run = 1;  // CheckpointManifest::run
};

// Trains on from config.checkpoint.load, saves every checkpoint.save_interval steps.
inline TrainingRun train_with_checkpoints(ProcessGroup& world, const Config& config,
                                          const CheckpointedRun& options) {
    const auto data = open_data(config);
    Trainer trainer(config, world, choose_backend(options.backend, options.placement, world),
                    Arithmetic::stated, data);
    checkpoint::resume(trainer, config, *data, world, options.folder);
    std::optional<checkpoint::CheckpointSaver> saver;
    const int64_t interval = config.checkpoint.save_interval;
    if (interval > 0) saver.emplace(config, data->fingerprint(), world, options.folder, options.run);
    TrainingRun run;
    const auto keep = [&](std::optional<StepResult> result) {
        if (result) run.steps.push_back(std::move(*result));
    };
    while (trainer.steps_done() < options.steps) {
        keep(trainer.step());
        keep(trainer.drain());
        if (saver) saver->poll();
        if (saver && trainer.steps_done() % interval == 0) saver->save(trainer);
    }
    if (saver) saver->finish();
    run.state = collect(trainer, world, static_cast<int>(config.parallel.expert_model_parallel_size));
    return run;
}

inline TrainingRun train_with_checkpoints(const Config& config, int ranks, const CheckpointedRun& options) {
    TrainingRun first;
    run_thread_ranks(ranks, kTestDeadline, [&](ProcessGroup& world) {
        TrainingRun run = train_with_checkpoints(world, config, options);
        if (world.rank() == 0) first = std::move(run);
    });
    return first;
}

// Four steps at one go, and the last two of them in a run that continues one of two.
struct ResumedRun {
    TrainingRun whole, rest;
};
inline ResumedRun whole_and_resumed(Config config) {
    const TemporaryFolder whole_folder, folder;
    ResumedRun runs{.whole = train_with_checkpoints(config, 1, {whole_folder.path(), 4})};
    config.checkpoint.save_interval = 2;
    train_with_checkpoints(config, 1, {folder.path(), 2});
    config.checkpoint.load = "auto";
    config.checkpoint.save_interval = 0;
    runs.rest = train_with_checkpoints(config, 1, {folder.path(), 4});
    return runs;
}

}  // namespace fp8flow::test
