// SPDX-License-Identifier: MIT
// Save, end, resume: 20 steps in two parts are the 20 steps of one run, bit for bit, for every recipe and
// number of ranks, also where the experts are shared by another number of ranks afterwards; and what may not
// be resumed from.
#include "tests/support/checkpoints.h"

#include "model/checkpoint/state.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <set>

namespace fp8flow::test {

using namespace checkpoint;

namespace {

namespace fs = std::filesystem;

// All state of a step: expert biases, delayed scales (in both blocks), moments.
Config config_of(Recipe recipe, int64_t expert_ranks, const Texts& keys = {}) {
    return test_config(
        recipe, with({fmt::format("parallel.expert_model_parallel_size={}", expert_ranks),
                      "moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true",
                      "training.train_iters=20", "checkpoint.save_interval=10"},
                     keys));
}
Config resuming(Config config, const std::string& load = "auto") {
    config.checkpoint.load = load;
    return config;
}

// The losses of `whole` after its first `skipped` steps are those of `rest`, and so are weights, moments,
// gradients and biases.
void expect_rest(const TrainingRun& whole, const TrainingRun& rest, size_t skipped) {
    ASSERT_EQ(rest.steps.size() + skipped, whole.steps.size());
    for (size_t i = 0; i < rest.steps.size(); ++i) {
        EXPECT_EQ(rest.steps[i].step, whole.steps[skipped + i].step);
        EXPECT_EQ(rest.steps[i].lm_loss, whole.steps[skipped + i].lm_loss) << "step " << skipped + i;
        EXPECT_EQ(rest.steps[i].grad_norm, whole.steps[skipped + i].grad_norm) << "step " << skipped + i;
        EXPECT_EQ(rest.steps[i].learning_rate, whole.steps[skipped + i].learning_rate);
        const std::vector<RouterLoss>&a = rest.steps[i].router_losses,
              &b = whole.steps[skipped + i].router_losses;
        EXPECT_TRUE(std::ranges::equal(a, b, {}, &RouterLoss::by_layer, &RouterLoss::by_layer));
    }
    expect_same_bits(rest.state, whole.state);
}

class CheckpointRecipes : public testing::TestWithParam<Recipe> {};

TEST_P(CheckpointRecipes, TwoHalvesAreTheWholeBitForBit) {
    struct Layout {
        int ranks;
        int64_t expert_ranks;
    };
    const bool all = GetParam() == Recipe::fp8_flow;
    const int64_t half = all ? 10 : 4;
    for (const Layout& layout :
         all ? std::vector<Layout>{{1, 1}, {2, 2}, {4, 2}} : std::vector<Layout>{{2, 2}}) {
        SCOPED_TRACE(fmt::format("{} ranks, {} share the experts", layout.ranks, layout.expert_ranks));
        TemporaryFolder folder;
        Config config = config_of(GetParam(), layout.expert_ranks);
        config.checkpoint.save_interval = half;
        Config plain = config;
        plain.checkpoint.save_interval = 0;
        const TrainingRun whole = train_with_checkpoints(plain, layout.ranks, {folder.path(), 2 * half});
        // Ends some steps after its last checkpoint.
        const TrainingRun first = train_with_checkpoints(config, layout.ranks, {folder.path(), half + 2});
        EXPECT_EQ(first.steps.back().lm_loss, whole.steps[static_cast<size_t>(half) + 1].lm_loss);
        EXPECT_TRUE(fs::exists(folder.path(checkpoint_name(half) + "/manifest.json")));
        expect_rest(whole, train_with_checkpoints(resuming(config), layout.ranks, {folder.path(), 2 * half}),
                    static_cast<size_t>(half));
    }
}

INSTANTIATE_TEST_SUITE_P(Recipes, CheckpointRecipes, testing::ValuesIn(kRecipes),
                         [](const auto& info) { return std::string(recipe_name(info.param)); });

// A checkpoint as an earlier version wrote it: its manifest has none of the keys that changed a rule.
TEST(Checkpoint, OfAnEarlierVersionGoesOnWithItsRules) {
    TemporaryFolder folder;
    const Config before =
        config_of(Recipe::fp8_flow, 2,
                  {"training.lr_warmup_iters=8", "moe.moe_router_load_balancing_type=global_aux_loss",
                   "moe.moe_aux_loss_coeff=0.5", "moe.moe_global_aux_loss_gradient=sum"});
    ASSERT_EQ(before.training.lr_warmup_style, LrWarmupStyle::from_first_step);
    Config saving = before;
    saving.checkpoint.save_interval = 3;
    const TrainingRun whole = train_with_checkpoints(saving, 2, {folder.path(), 5});
    const CheckpointFolder opened(std::make_shared<Disk>(), folder.path());
    CheckpointManifest manifest = CheckpointReader(opened, 3).manifest();
    for (const std::string line :
         {"  lr_warmup_style: from_first_step\n", "  moe_global_aux_loss_gradient: sum\n"})
        manifest.config.erase(manifest.config.find(line), line.size());
    manifest.applied_steps.reset();
    std::ofstream(folder.path(checkpoint_name(3) + "/manifest.json")) << manifest_text(manifest);

    Config now = resuming(before);
    now.checkpoint.save_interval = 0;
    now.training.lr_warmup_style = LrWarmupStyle::from_zero;
    now.moe.moe_global_aux_loss_gradient = GlobalLossGradient::mean;
    for (const char* key : {"training.lr_warmup_style", "moe.moe_global_aux_loss_gradient"})
        now.origin.erase(key);  // a file of that version does not have them either
    expect_rest(whole, train_with_checkpoints(now, 2, {folder.path(), 5}), 3);
    on_trainers(now, 2, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
        const auto resumed = resume(trainer, now, *open_data(now), world, folder.path());
        ASSERT_EQ(resumed->kept.size(), 2u);
        expect_contains(messages_of(*resumed).back(), "goes on with the rule of its checkpoint");
    });
    now.origin["training.lr_warmup_style"] = "--set";
    const TrainingRun chosen = train_with_checkpoints(now, 2, {folder.path(), 5});
    EXPECT_DOUBLE_EQ(chosen.steps.at(0).learning_rate, before.training.lr * 3 / 8);
    now.origin.erase("training.lr_warmup_style");
    now.checkpoint.load = folder.path();
    now.checkpoint.finetune = true;  // a run that begins with its weights has the rules of this version
    EXPECT_EQ(train_with_checkpoints(now, 2, {folder.path(), 1}).steps.at(0).learning_rate, 0);
}

// A step that is skipped before the checkpoint, and one after it.
TEST(Checkpoint, SkippedStepsAreNotAppliedAfterAResumeEither) {
    TemporaryFolder folder;
    for (const char* name : {"a", "whole", "parts"}) fs::create_directory(folder.path(name));
    Texts keys = {"training.lr=1e-5", "training.min_lr=0", "training.lr_warmup_iters=0",
                  "training.micro_batch_size=1"};
    std::vector<double> norms;
    const Config unlimited = config_of(Recipe::fp8_tensorwise, 1, keys);
    for (const StepResult& step : train_with_checkpoints(unlimited, 1, {folder.path("a"), 9}).steps)
        norms.push_back(step.grad_norm);
    const size_t largest = static_cast<size_t>(std::max_element(norms.begin(), norms.end()) - norms.begin());
    const auto save_at = static_cast<int64_t>(largest) + 1;
    std::sort(norms.begin(), norms.end());
    keys.insert(keys.end(), {"training.on_divergence=skip", "training.lr_warmup_iters=6",
                             fmt::format("training.grad_norm_limit={}", (norms[7] + norms[8]) / 2)});
    Config config = config_of(Recipe::fp8_tensorwise, 1, keys);
    config.checkpoint.save_interval = save_at;
    const TrainingRun whole = train_with_checkpoints(config, 1, {folder.path("whole"), 9});
    train_with_checkpoints(config, 1, {folder.path("parts"), save_at});
    const CheckpointFolder opened(std::make_shared<Disk>(), folder.path("parts"));
    EXPECT_EQ(CheckpointReader(opened, save_at).manifest().applied_steps, save_at - 1);
    const TrainingRun rest = train_with_checkpoints(resuming(config), 1, {folder.path("parts"), 9});
    expect_rest(whole, rest, static_cast<size_t>(save_at));
    EXPECT_EQ(whole.steps[largest].skipped.empty(), false);
}

// In the invariant order the number of ranks that share the experts changes no bit: after the change the run
// goes on as it would have without it. Saved again, the state is the same.
TEST(Checkpoint, AnotherNumberOfRanksShareTheExpertsAfterwards) {
    const Texts keys = {"moe.moe_combine_order=invariant", "training.micro_batch_size=1"};
    const struct { int64_t before, after; } changes[] = {{4, 1}, {1, 2}, {2, 4}};
    for (const auto& change : changes) {
        SCOPED_TRACE(fmt::format("{} -> {}", change.before, change.after));
        TemporaryFolder folder;
        Config before = config_of(Recipe::fp8_flow, change.before, keys);
        Config after = config_of(Recipe::fp8_flow, change.after, keys);
        before.checkpoint.save_interval = after.checkpoint.save_interval = 3;
        const TrainingRun straight = train_with_checkpoints(before, 4, {folder.path(), 5});
        const TrainingRun rest = train_with_checkpoints(resuming(after), 4, {folder.path(), 7});
        ASSERT_EQ(rest.steps.size(), 4u);
        EXPECT_EQ(rest.steps[0].step, 3);
        EXPECT_EQ(rest.steps[0].lm_loss, straight.steps[3].lm_loss);
        EXPECT_EQ(rest.steps[1].lm_loss, straight.steps[4].lm_loss);
        EXPECT_EQ(rest.steps[1].grad_norm, straight.steps[4].grad_norm);
        const TrainingRun back = train_with_checkpoints(resuming(before), 4, {folder.path(), 6});
        const TrainingRun again =
            train_with_checkpoints(resuming(after, folder.path()), 4, {folder.path(), 7});
        EXPECT_TRUE(back.steps.empty());
        expect_rest(rest, again, 3);
    }
}

// The state itself comes back for every change of the number of ranks, whatever the order of sums does
// afterwards.
TEST(Checkpoint, StateComesBackOnAnyNumberOfRanks) {
    TemporaryFolder folder;
    const Config config = config_of(Recipe::fp8_tensorwise, 2);
    const TrainingRun saved = train_with_checkpoints(config, 2, {folder.path(), 10});
    for (const int ranks : {1, 2, 4}) {
        SCOPED_TRACE(ranks);
        const Config again = resuming(config_of(Recipe::fp8_tensorwise, ranks));
        const TrainingRun loaded = train_with_checkpoints(again, ranks, {folder.path(), 10});
        EXPECT_TRUE(loaded.steps.empty());
        for (const char* kind : {"weight ", "m ", "v ", "bias "})
            expect_same_bits(saved.state, loaded.state, kind);
    }
}

// Each tensor in exactly one file; the files of the ranks about equally long.
TEST(Checkpoint, RanksShareTheWriting) {
    TemporaryFolder folder;
    train_with_checkpoints(config_of(Recipe::fp8_flow, 2), 4, {folder.path(), 10});
    const CheckpointFolder opened(std::make_shared<Disk>(), folder.path());
    const CheckpointReader reader(opened, 10);
    EXPECT_EQ(reader.manifest().step, 10);
    EXPECT_EQ(reader.manifest().consumed_samples, 80);
    EXPECT_EQ(reader.manifest().expert_parallel_size, 2);
    ASSERT_EQ(reader.manifest().files.size(), 4u);
    int64_t smallest = INT64_MAX, largest = 0;
    for (const auto& file : reader.manifest().files) {
        smallest = std::min(smallest, file.bytes);
        largest = std::max(largest, file.bytes);
    }
    EXPECT_LT(static_cast<double>(largest), 1.2 * static_cast<double>(smallest));
    for (const char* name :
         {"fp32_param.embedding.word_embeddings.weight", "exp_avg.layers.1.moe.experts.3.linear_fc1.weight",
          "exp_avg_sq.layers.1.moe.router.weight", "layers.1.moe.router.expert_bias"})
        EXPECT_TRUE(reader.tensors().contains(name)) << name;
    EXPECT_EQ(reader.tensors().at("fp32_param.layers.1.moe.experts.0.linear_fc1.weight").shape,
              (std::vector<int64_t>{256, 128}));
}

TEST(Checkpoint, KeepsTheNewestAndRemovesWhatADeadRunLeft) {
    for (const int64_t keep : {0, 2}) {
        TemporaryFolder folder;
        folder.write("step_00000007.tmp/rank_0000.safetensors", "half");
        folder.write("step_00000007.tmp.txt", "somebody's");
        folder.write("notes/step_00000007.tmp", "somebody's");
        Config config = config_of(Recipe::bf16, 1, {"checkpoint.save_interval=1"});
        config.checkpoint.most_recent_k = keep;
        train_with_checkpoints(config, 1, {folder.path(), 4});
        std::set<std::string> expected = {"notes", "step_00000007.tmp.txt"};
        for (int64_t step = keep == 0 ? 1 : 5 - keep; step <= 4; ++step)
            expected.insert(checkpoint_name(step));
        EXPECT_EQ(names_in(folder.path()), expected);
    }
}

// A run removes its own alone: not another run's in the same folder, nor those of a version without
// identities.
TEST(Checkpoint, ARunRemovesOnlyItsOwn) {
    for (const uint64_t other : {uint64_t{5}, uint64_t{0}}) {
        TemporaryFolder folder;
        Config config = config_of(Recipe::bf16, 1, {"checkpoint.save_interval=1"});
        config.checkpoint.most_recent_k = 0;
        train_with_checkpoints(config, 1, {.folder = folder.path(), .steps = 2, .run = other});
        const CheckpointFolder opened(std::make_shared<Disk>(), folder.path());
        EXPECT_EQ(opened.manifest(2).run, other);
        config.checkpoint.most_recent_k = 1;
        for (const int64_t steps : {4, 6}) {  // begun, and resumed
            train_with_checkpoints(resuming(config), 1, {.folder = folder.path(), .steps = steps, .run = 7});
            EXPECT_EQ(opened.steps(), (std::vector<int64_t>{1, 2, steps}));
            EXPECT_EQ(opened.manifest(steps).run, 7u);
        }
    }
}

TEST(Checkpoint, WritingWaitsWhereItIsAskedTo) {
    TemporaryFolder folder;
    Config config = config_of(Recipe::bf16, 1);
    config.checkpoint.async_save = false;
    on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
        CheckpointSaver saver(config, open_data(config)->fingerprint(), world, folder.path(), 1);
        trainer.run_step();
        const auto published = saver.save(trainer);
        ASSERT_TRUE(published.has_value());
        EXPECT_EQ(published->step, 1);
        EXPECT_GT(published->bytes, 1e6);
        EXPECT_LE(published->paused, published->seconds);
        EXPECT_TRUE(fs::exists(published->path + "/manifest.json"));
        EXPECT_FALSE(saver.poll().has_value());
    });
}

// The copy is that of the step, although the next ones have changed the model before it is written.
TEST(Checkpoint, StepsBehindTheCopyDoNotReachIt) {
    TemporaryFolder slow, fast;
    Config config = config_of(Recipe::fp8_flow, 1);
    const auto save_at_3 = [&](const std::string& folder, bool wait) {
        config.checkpoint.async_save = !wait;
        on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
            CheckpointSaver saver(config, open_data(config)->fingerprint(), world, folder, 1);
            for (int i = 0; i < 3; ++i) trainer.run_step();
            saver.save(trainer);
            for (int i = 0; i < 3; ++i) trainer.run_step();
            saver.finish();
        });
    };
    save_at_3(slow.path(), true);
    save_at_3(fast.path(), false);
    EXPECT_EQ(read_whole(slow.path("step_00000003/rank_0000.safetensors")),
              read_whole(fast.path("step_00000003/rank_0000.safetensors")));
}

// ---- what is refused

std::string refusal_of(const Config& config, const std::string& folder, int ranks = 1) {
    const std::string error = error_or_none(ExitCode::checkpoint, [&] {
        train_with_checkpoints(config, ranks, {folder, 11});
    });
    EXPECT_NE(error, "") << "it was resumed from";
    return error;
}

TEST(Checkpoint, OneOfAnotherRunIsRefusedWithItsReason) {
    TemporaryFolder folder;
    train_with_checkpoints(config_of(Recipe::bf16, 2), 2, {folder.path(), 10});
    const auto refusal = [&](const Texts& keys, int ranks = 1) {
        return refusal_of(resuming(config_of(Recipe::bf16, 1, keys)), folder.path(), ranks);
    };
    // Another model: all tensors that do not fit, by name, with file and both shapes.
    const std::string experts = refusal({"moe.num_experts=2"});
    expect_contains(
        experts,
        "tensor fp32_param.layers.1.moe.experts.3.linear_fc1.weight: this model has none of that name");
    expect_contains(experts, "tensor layers.1.moe.router.expert_bias is F32[4], this model has it as F32[2]");
    expect_contains(experts, "rank_0001.safetensors");
    const std::string layers = refusal({"model.num_layers=3", "model.moe_layer_freq=[0, 1, 1]"});
    expect_contains(
        layers, "tensor exp_avg.layers.2.moe.router.weight is not there, this model has it as F32[4, 128]");
    // Other data, or another place in them.
    expect_contains(refusal({"training.seed=7"}), "saved with training.seed 1234, this run has 7");
    expect_contains(refusal({"training.global_batch_size=4"}),
                    "saved with training.global_batch_size 8, this run has 4");
    expect_contains(refusal({"model.seq_length=16"}), "saved with model.seq_length 32, this run has 16");
    expect_contains(refusal({"data.synthetic_seed=7"}), "saved with other data");
    expect_contains(refusal({"data.synthetic_seed=7"}), ": data.synthetic_seed: 1 | 7; name the same data");
    // Ranks agree on the refusal.
    expect_contains(refusal({"training.seed=7"}, 2), "checkpoint.finetune=true");
    // Nothing to load.
    TemporaryFolder empty;
    const Config config = config_of(Recipe::bf16, 1);
    expect_contains(refusal_of(resuming(config, empty.path()), folder.path()), "no checkpoint in it");
    expect_contains(refusal_of(resuming(config, folder.path("step_00000011")), folder.path()),
                    "No such file");
    expect_contains(refusal_of(resuming(config, folder.path("nowhere")), folder.path()), "No such file");
    // `auto` where nothing is yet: a new run.
    EXPECT_EQ(train_with_checkpoints(resuming(config), 1, {empty.path(), 2}).steps.front().step, 0);
}

// An llm.c shard of `tokens` tokens.
std::string shard_of(int tokens, char token) {
    std::string bytes(1024, '\0');
    const int32_t header[3] = {20240520, 1, tokens};
    std::memcpy(bytes.data(), header, sizeof header);
    for (int i = 0; i < tokens; ++i) bytes += {token, '\0'};
    return bytes;
}

// Under the names and sizes that it had: refused, by the checksum of what the files hold. A checkpoint of a
// version that did not know it is compared as far as it goes, and says so.
TEST(Checkpoint, DataThatChangedUnderTheSameNamesAreOtherData) {
    TemporaryFolder folder;
    folder.write("data/x_train_0.bin", shard_of(4000, 1));
    folder.write("data/x_val_0.bin", shard_of(400, 1));
    fs::create_directory(folder.path("saved"));
    const auto config = [&](const Texts& more = {}) {
        return config_of(Recipe::bf16, 1,
                         with({"data.data_kind=shards", "data.data_path=" + folder.path("data"),
                               "training.train_iters=4", "checkpoint.save_interval=2"},
                              more));
    };
    const std::string saved = folder.path("saved");
    train_with_checkpoints(config(), 1, {saved, 2});
    const auto resumed = [&](const Config& c) {
        std::optional<Resumed> result;
        on_trainers(c, 1, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
            result = resume(trainer, c, *open_data(c), world, saved);
        });
        return result;
    };
    EXPECT_FALSE(resumed(resuming(config()))->by_size);
    folder.write("data/x_train_0.bin", shard_of(4000, 2));
    expect_contains(refusal_of(resuming(config()), saved),
                    "the keys are the same, so the files have changed; name the same data");
    folder.write("data/x_train_0.bin", shard_of(4000, 1));
    // As an older version wrote it.
    const std::string manifest = "saved/step_00000002/manifest.json";
    CheckpointManifest old = parse_manifest(read_whole(folder.path(manifest)), "m");
    old.seq_length = 0;
    old.data_fingerprint = open_data(config())->fingerprint_without_content();
    folder.write(manifest, manifest_text(old));
    EXPECT_EQ(resumed(resuming(config()))->step, 2);
    EXPECT_TRUE(resumed(resuming(config()))->by_size);
    expect_contains(refusal_of(resuming(config({"model.seq_length=16"})), saved),
                    "saved with model.seq_length 32, this run has 16");
    folder.write("data/x_train_0.bin", shard_of(4001, 1));
    expect_contains(refusal_of(resuming(config()), saved), "saved with other data");
}

TEST(Checkpoint, FinetuneTakesWeightsAloneAndBeginsAnew) {
    TemporaryFolder folder;
    const Config config = config_of(Recipe::bf16, 1);
    const TrainingRun saved = train_with_checkpoints(config, 1, {folder.path(), 10});
    Config tuned = config_of(Recipe::fp8_flow, 1,
                             {"checkpoint.save_interval=0", "training.seed=7", "data.synthetic_seed=5"});
    tuned.checkpoint.load = folder.path();
    tuned.checkpoint.finetune = true;
    const TrainingRun loaded = train_with_checkpoints(tuned, 1, {folder.path(), 0});
    expect_same_bits(saved.state, loaded.state, "weight ");
    expect_same_bits(saved.state, loaded.state, "bias ");
    for (const auto& [name, values] : loaded.state) {
        if (!name.starts_with("m ") && !name.starts_with("v ")) continue;
        for (const float value : values) ASSERT_EQ(value, 0.0f) << name;
    }
    const TrainingRun steps = train_with_checkpoints(tuned, 1, {folder.path(), 2});
    EXPECT_EQ(steps.steps.front().step, 0);
}

// Scales that a recipe keeps from step to step begin from scratch too: they are neither wanted nor in the
// way.
TEST(Checkpoint, FinetuneWantsWeightsAlone) {
    const std::pair<Recipe, Recipe> changes[] = {{Recipe::bf16, Recipe::fp8_tensorwise},
                                                 {Recipe::fp8_tensorwise, Recipe::fp8_flow}};
    for (const auto& [from, to] : changes) {
        TemporaryFolder folder;
        const TrainingRun saved = train_with_checkpoints(config_of(from, 1), 1, {folder.path(), 10});
        Config tuned = config_of(to, 1, {"checkpoint.save_interval=0"});
        tuned.checkpoint.load = folder.path();
        expect_contains(refusal_of(tuned, folder.path()), "scale");
        tuned.checkpoint.finetune = true;
        expect_same_bits(saved.state, train_with_checkpoints(tuned, 1, {folder.path(), 0}).state, "weight ");
        EXPECT_EQ(train_with_checkpoints(tuned, 1, {folder.path(), 2}).steps.size(), 2u);
    }
}

}  // namespace
}  // namespace fp8flow::test
