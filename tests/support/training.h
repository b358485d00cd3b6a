// SPDX-License-Identifier: MIT
// Training runs for tests: configs/test.yaml with overrides, trained over thread ranks or any other process
// group, and the state of the whole model afterwards, experts of all ranks in their global order.
#pragma once

#include "model/train/trainer.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

namespace fp8flow::test {

inline constexpr double kTestDeadline = 120.0;  // seconds; a loaded machine must not fail a test
inline const std::vector<Recipe> kRecipesAndFp32 = [] {
    std::vector<Recipe> all(kRecipes.begin(), kRecipes.end());
    all.push_back(Recipe::fp32);
    return all;
}();
// All but fp8_tensorwise, which order invariant refuses: a scale is the maximum over a rank's experts.
inline constexpr Recipe kInvariantRecipes[] = {Recipe::fp32,     Recipe::bf16,        Recipe::fp8_blockwise,
                                               Recipe::fp8_flow, Recipe::fp8_rowwise, Recipe::mxfp8};

// configs/test.yaml under a recipe (fp32 is internal and has no name in a file).
inline Config test_config(Recipe recipe, std::vector<std::string> overrides = {}) {
    const bool internal = recipe == Recipe::fp32;
    overrides.push_back(fmt::format("precision.recipe={}", recipe_name(internal ? Recipe::bf16 : recipe)));
    Config config = load_config(FP8FLOW_SOURCE_DIR "/configs/test.yaml", overrides);
    if (internal) config.precision.recipe = recipe;
    return config;
}

// On the reference backend, in the stated summation order.
struct ReferenceTrainer : Trainer {
    ReferenceTrainer(const Config& config, ProcessGroup& world,
                     const std::shared_ptr<const data::TokenSource>& data)
        : Trainer(config, world, choose_backend(BackendKind::reference), Arithmetic::stated, data) {}
    ReferenceTrainer(const Config& config, ProcessGroup& world)
        : ReferenceTrainer(config, world, open_data(config)) {}
};

using Values = std::map<std::string, std::vector<float>>;

// Slices of all ranks, `stride` apart, as the tensors of `holders` expert-parallel ranks one after the other.
inline std::vector<float> joined_slices(const std::vector<float>& all, size_t stride, const Parameter& p,
                                        size_t holders) {
    const auto numel = static_cast<size_t>(p.numel());
    std::vector<float> joined(holders * numel);
    for (size_t holder = 0; holder < holders; ++holder)
        for (size_t shard = 0; shard < p.shards.size(); ++shard) {
            const Slice& slice = p.shards[shard].front();
            std::copy_n(all.data() + (holder + holders * shard) * stride, slice.count,
                        joined.data() + holder * numel + static_cast<size_t>(slice.first));
        }
    return joined;
}

// The state of the whole model after a step: "weight NAME", "gradient NAME" (reduced, before clipping),
// "m NAME", "v NAME", "bias LAYER". Called by all ranks; every rank gets the same. Fails the test where ranks
// that hold the same parameter differ.
inline Values collect(Trainer& trainer, ProcessGroup& world, int expert_ranks) {
    Values values;
    trainer.transformer().parameters().gather_gradients(trainer.exchange());
    const auto ranks = static_cast<size_t>(world.size());
    const auto gather = [&](const std::string& name, const TensorView& view, bool expert,
                            const Parameter* divided = nullptr) {
        const auto here = static_cast<size_t>(view.numel());
        const size_t count = divided != nullptr ? static_cast<size_t>(divided->numel()) : here;
        std::vector<float> mine(count), all(count * ranks);
        if (view.dtype == DType::f32) {
            trainer.ops().device().copy_out(mine.data(), view.data, here * sizeof(float));
        } else {
            std::vector<Bf16> narrow(here);
            trainer.ops().device().copy_out(narrow.data(), view.data, here * sizeof(Bf16));
            for (size_t i = 0; i < here; ++i) mine[i] = to_float(narrow[i]);
        }
        world.all_gather(mine.data(), count * sizeof(float), all.data());
        const size_t holders = expert ? static_cast<size_t>(expert_ranks) : 1;
        if (divided != nullptr) {
            values[name] = joined_slices(all, count, *divided, holders);
            return;
        }
        for (size_t r = holders; r < ranks; ++r)
            EXPECT_EQ(std::memcmp(&all[r * count], &all[r % holders * count], count * sizeof(float)), 0)
                << name << " differs between ranks " << r % holders << " and " << r;
        all.resize(holders * count);
        values[name] = std::move(all);
    };
    for (const Parameter& p : trainer.transformer().parameters().all()) {
        const Parameter* divided = p.is_sharded() ? &p : nullptr;
        gather("weight " + p.spec.name, p.master, p.spec.expert, divided);
        if (!p.frozen) gather("gradient " + p.spec.name, p.main_grad, p.spec.expert);
        if (!p.has_moments) continue;
        gather("m " + p.spec.name, p.m, p.spec.expert, divided);
        gather("v " + p.spec.name, p.v, p.spec.expert, divided);
    }
    int layer = 0;
    for (const auto& block : trainer.transformer().blocks()) {
        if (block->router() != nullptr && block->router()->expert_bias())
            gather("bias " + std::to_string(layer), block->router()->expert_bias(), false);
        ++layer;
    }
    return values;
}

struct TrainingRun {
    std::vector<StepResult> steps;
    Values state;  // after the last step
    double held_out = 0;

    std::vector<double> losses() const {
        std::vector<double> result;
        for (const StepResult& step : steps) result.push_back(step.lm_loss);
        return result;
    }
    double mean_of_last(int64_t count) const {
        const std::vector<double> all = losses();
        return std::accumulate(all.end() - count, all.end(), 0.0) / static_cast<double>(count);
    }
};

struct RunOptions {
    int64_t steps = 5;
    int64_t eval_batches = 0;
    Arithmetic arithmetic = Arithmetic::stated;
    // Called by every rank before each step, and once after the last one. With it, steps are run one by one,
    // since it looks at the model; without it, one is always in flight.
    std::function<void(Trainer&, ProcessGroup&, int64_t)> before_step = {};
};

inline TrainingRun train_on(ProcessGroup& world, const Config& config,
                            const std::shared_ptr<const data::TokenSource>& data, const RunOptions& options) {
    Trainer trainer(config, world, choose_backend(BackendKind::reference), options.arithmetic, data);
    TrainingRun run;
    for (int64_t i = 0; i < options.steps; ++i) {
        if (options.before_step) {
            options.before_step(trainer, world, i);
            run.steps.push_back(trainer.run_step());
        } else if (auto result = trainer.step()) {
            run.steps.push_back(std::move(*result));
        }
    }
    if (auto result = trainer.drain()) run.steps.push_back(std::move(*result));
    if (options.before_step) options.before_step(trainer, world, options.steps);
    if (options.eval_batches > 0) run.held_out = trainer.evaluate(options.eval_batches);
    run.state = collect(trainer, world, static_cast<int>(config.parallel.expert_model_parallel_size));
    return run;
}

// The same over threads of this process; the ranks must agree on every number that they report.
inline TrainingRun train(const Config& config, int ranks, const RunOptions& options = {}) {
    const auto data = open_data(config);
    std::vector<TrainingRun> runs(static_cast<size_t>(ranks));
    run_thread_ranks(ranks, kTestDeadline, [&](ProcessGroup& world) {
        runs[static_cast<size_t>(world.rank())] = train_on(world, config, data, options);
    });
    for (const TrainingRun& run : runs) {
        for (size_t i = 0; i < run.steps.size(); ++i) {
            EXPECT_EQ(run.steps[i].lm_loss, runs[0].steps[i].lm_loss) << "step " << i;
            EXPECT_EQ(run.steps[i].grad_norm, runs[0].steps[i].grad_norm) << "step " << i;
            EXPECT_EQ(run.steps[i].redone, runs[0].steps[i].redone) << "step " << i;
        }
        EXPECT_EQ(run.held_out, runs[0].held_out);
    }
    return runs[0];
}

// `body` on each rank, with a trainer on the reference backend.
inline void on_trainers(const Config& config, int ranks,
                        const std::function<void(ReferenceTrainer&, ProcessGroup&)>& body) {
    const auto data = open_data(config);
    run_thread_ranks(ranks, kTestDeadline, [&](ProcessGroup& world) {
        ReferenceTrainer trainer(config, world, data);
        body(trainer, world);
    });
}

// One step, its stages timed by parts; then `look` at one rank after the other.
inline void after_timed_step(const Config& config, int ranks,
                             const std::function<void(Trainer&, ProcessGroup&)>& look) {
    std::mutex mutex;
    on_trainers(config, ranks, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
        trainer.time_stages(TimerDetail::parts);
        trainer.run_step();
        const std::lock_guard lock(mutex);
        look(trainer, world);
    });
}

// ||a - b|| / ||b||; NaN if anything is NaN.
template <class A, class B> double norm_wise_error(const A& a, const B& b) {
    if (a.size() != b.size()) return std::nan("");
    double error = 0, power = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
        error += (x - y) * (x - y);
        power += y * y;
    }
    return error == 0 ? 0 : std::sqrt(error / power);
}

// Bit by bit; `prefix` selects the kind ("weight ", "gradient ", ...), "" everything.
inline void expect_same_bits(const Values& a, const Values& b, const std::string& prefix = "") {
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [name, values] : a) {
        if (!name.starts_with(prefix)) continue;
        const auto other = b.find(name);
        ASSERT_NE(other, b.end()) << name;
        ASSERT_EQ(values.size(), other->second.size()) << name;
        EXPECT_EQ(std::memcmp(values.data(), other->second.data(), values.size() * sizeof(float)), 0) << name;
    }
}

// Every number that the runs report, and all bits of their state.
inline void expect_same_run(const TrainingRun& run, const TrainingRun& wanted) {
    ASSERT_EQ(run.losses(), wanted.losses());
    for (size_t i = 0; i < wanted.steps.size(); ++i) {
        EXPECT_EQ(run.steps[i].grad_norm, wanted.steps[i].grad_norm) << "step " << i;
        EXPECT_EQ(run.steps[i].skipped, wanted.steps[i].skipped) << "step " << i;
    }
    EXPECT_EQ(run.held_out, wanted.held_out);
    expect_same_bits(run.state, wanted.state);
}

inline void expect_close(const Values& a, const Values& b, const std::string& prefix, double bound) {
    ASSERT_EQ(a.size(), b.size());
    int compared = 0;
    for (const auto& [name, values] : a) {
        if (!name.starts_with(prefix)) continue;
        ++compared;
        const auto other = b.find(name);
        ASSERT_NE(other, b.end()) << name;
        EXPECT_LE(norm_wise_error(values, other->second), bound) << name;
    }
    EXPECT_GT(compared, 0) << prefix;
}

}  // namespace fp8flow::test
