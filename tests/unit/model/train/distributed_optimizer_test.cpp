// SPDX-License-Identifier: MIT
// use_distributed_optimizer: masters and moments divided over the ranks give the bits of the undivided run,
// for every number of ranks that share the experts, and take a part of its memory.
#include "model/checkpoint/state.h"
#include "model/plan/plan.h"
#include "model/train/trainer.h"
#include "tests/support/checkpoints.h"

#include <fmt/format.h>

namespace fp8flow::test {
namespace {

constexpr const char* kSharded = "training.use_distributed_optimizer=true";
const Texts kBf16State = {"training.main_grads_dtype=bf16", "training.exp_avg_dtype=bf16",
                          "training.exp_avg_sq_dtype=bf16"};

// The divided run and the whole one; the same losses, norms, gradients, weights, moments and evaluation.
void expect_same_bits_as_whole(Recipe recipe, int expert_ranks, const Texts& keys, int ranks = 4,
                               const Texts& of_divided = {}) {
    SCOPED_TRACE(fmt::format("{}, {} of {} ranks share the experts, {}", recipe_name(recipe), expert_ranks,
                             ranks, fmt::join(keys, " ")));
    const Texts all = with(
        {"training.micro_batch_size=1", fmt::format("parallel.expert_model_parallel_size={}", expert_ranks)},
        keys);
    const RunOptions options{.steps = 3, .eval_batches = 1};
    const TrainingRun whole = train(test_config(recipe, all), ranks, options);
    const TrainingRun divided =
        train(test_config(recipe, with(with(all, {kSharded}), of_divided)), ranks, options);
    expect_same_run(divided, whole);
}

TEST(DistributedOptimizer, SameBitsAsTheWholeState) {
    for (const int expert_ranks : {1, 2, 4})
        for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow})
            for (const Texts& keys : {Texts{}, kBf16State})
                expect_same_bits_as_whole(recipe, expert_ranks, keys);
}

TEST(DistributedOptimizer, SameBitsUnderEveryRecipe) {
    for (const Recipe recipe : kRecipesAndFp32)
        expect_same_bits_as_whole(recipe, 2, {"training.clip_grad=0.1"});
}

// Three ranks: slices of other lengths, and a unit that not every rank has.
TEST(DistributedOptimizer, SameBitsOnThreeRanks) {
    expect_same_bits_as_whole(Recipe::fp8_flow, 1, {"training.global_batch_size=6"}, 3);
}

TEST(DistributedOptimizer, SameBitsUnderOtherOrdersAndSchedules) {
    for (const Texts& keys :
         {Texts{"moe.moe_combine_order=invariant"}, Texts{"schedule.overlap_grad_reduce=true"},
          Texts{"schedule.overlap_moe_expert_parallel_comm=true"}, Texts{"schedule.delay_wgrad_compute=true"},
          Texts{"model.untie_embeddings_and_output_weights=false"},
          Texts{"moe.moe_expert_rank_capacity_factor=0.01"}})
        expect_same_bits_as_whole(Recipe::fp8_flow, 2, keys);
}

// Copies of a layer gathered next to the layer before, gradients reduced next to the backward; the rest of
// what streams run, too, and steps that are redone.
TEST(DistributedOptimizer, SameBitsWithTheWireBesideTheLayers) {
    const Texts overlapped = {"schedule.overlap_param_gather=true", "schedule.overlap_grad_reduce=true"};
    for (const int ranks : {1, 2, 4})
        for (int expert_ranks = 1; expert_ranks <= ranks; expert_ranks *= 2)
            expect_same_bits_as_whole(Recipe::fp8_flow, expert_ranks, {}, ranks, overlapped);
    for (const Texts& keys :
         {Texts{"schedule.overlap_moe_expert_parallel_comm=true", "training.global_batch_size=12"},
          Texts{"schedule.moe_shared_expert_overlap=true", "schedule.delay_wgrad_compute=true"},
          Texts{"model.untie_embeddings_and_output_weights=false", "recompute.recompute_granularity=full"},
          Texts{"moe.moe_combine_order=invariant"}, Texts{"moe.moe_expert_rank_capacity_factor=0.01"}})
        expect_same_bits_as_whole(Recipe::fp8_blockwise, 2, keys, 4, overlapped);
}

// Master and moments: a half on two ranks, rounded up to the alignment of allocations; of experts that no
// other rank has, all.
TEST(DistributedOptimizer, StateIsDividedOverTheRanksThatReplicateIt) {
    const auto config_of = [](int64_t expert_ranks, bool sharded) {
        Texts keys = {fmt::format("parallel.expert_model_parallel_size={}", expert_ranks)};
        if (sharded) keys.emplace_back(kSharded);
        return test_config(Recipe::fp8_flow, keys);
    };
    for (const int64_t expert_ranks : {1, 2}) {
        std::map<std::string, int64_t> bytes[2];
        int64_t experts = 0, all = 0;
        for (const bool sharded : {false, true}) {
            const Config config = config_of(expert_ranks, sharded);
            on_trainers(config, 2, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
                if (world.rank() != 0) return;
                bytes[sharded] = trainer.parameter_bytes();
                experts = all = 0;
                for (const Parameter& p : trainer.transformer().parameters().all()) {
                    all += p.numel();
                    if (p.spec.expert) experts += p.numel();
                }
            });
        }
        const double whole = static_cast<double>(bytes[0]["master"] + bytes[0]["moments"]),
                     divided = static_cast<double>(bytes[1]["master"] + bytes[1]["moments"]);
        const double stays = expert_ranks == 2 ? static_cast<double>(experts) / static_cast<double>(all) : 0;
        EXPECT_NEAR(divided / whole, stays + (1 - stays) / 2, 0.01) << expert_ranks;
        // what `plan` says, but for the alignment of allocations
        for (const auto& item : plan::memory_items(config_of(expert_ranks, true), 2)) {
            if (item.category == "master weights (FP32)") {
                EXPECT_NEAR(item.bytes / static_cast<double>(bytes[1]["master"]), 1, 0.01);
            } else if (item.category == "gathered master") {
                EXPECT_EQ(item.bytes, static_cast<double>(bytes[1]["gathered master"]));
            }
        }
        EXPECT_EQ(bytes[0].count("gathered master"), 0u);
        EXPECT_GT(bytes[1]["gathered master"], 0);
    }
}

// Slices go into whole state and back, on other numbers of ranks that share the experts and of ranks at all.
TEST(DistributedOptimizer, CheckpointsFitEveryLayout) {
    struct Layout {
        int ranks, expert_ranks;
        bool sharded;
    };
    const auto config_of = [](const Layout& layout, const char* load) {
        Texts keys = with(kBf16State,
                          {"training.micro_batch_size=1", "moe.moe_combine_order=invariant",
                           "moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true",
                           fmt::format("parallel.expert_model_parallel_size={}", layout.expert_ranks)});
        if (layout.sharded) keys.emplace_back(kSharded);
        Config config = test_config(Recipe::fp8_flow, keys);
        config.checkpoint.load = load;
        config.checkpoint.save_interval = 2;
        return config;
    };
    for (const Layout& saved : {Layout{4, 2, true}, Layout{4, 1, true}, Layout{4, 2, false}}) {
        TemporaryFolder folder;
        const TrainingRun straight = train_with_checkpoints(config_of(saved, ""), 4, {folder.path(), 3});
        for (const Layout& next : {Layout{4, 1, true}, Layout{4, 2, true}, Layout{4, 4, true},
                                   Layout{4, 2, false}, Layout{4, 1, false}}) {
            SCOPED_TRACE(fmt::format("EP{} {} -> EP{} {}", saved.expert_ranks, saved.sharded,
                                     next.expert_ranks, next.sharded));
            Config config = config_of(next, "");
            config.checkpoint.load = folder.path(checkpoint::checkpoint_name(2));
            config.checkpoint.save_interval = 0;
            const TrainingRun rest = train_with_checkpoints(config, 4, {folder.path(), 3});
            ASSERT_EQ(rest.steps.size(), 1u);
            EXPECT_EQ(rest.steps[0].lm_loss, straight.steps[2].lm_loss);
            EXPECT_EQ(rest.steps[0].grad_norm, straight.steps[2].grad_norm);
            expect_same_bits(straight.state, rest.state);
        }
        // The state as it was saved, on fewer ranks.
        const TrainingRun at_two = train_with_checkpoints(config_of(saved, "auto"), 4, {folder.path(), 2});
        for (const Layout& next :
             {Layout{2, 1, true}, Layout{2, 2, true}, Layout{1, 1, true}, Layout{1, 1, false}}) {
            SCOPED_TRACE(fmt::format("{} ranks, EP{} {}", next.ranks, next.expert_ranks, next.sharded));
            Config config = config_of(next, "auto");
            config.checkpoint.save_interval = 0;
            const TrainingRun loaded = train_with_checkpoints(config, next.ranks, {folder.path(), 2});
            EXPECT_TRUE(loaded.steps.empty());
            for (const char* kind : {"weight ", "m ", "v ", "bias "})
                expect_same_bits(at_two.state, loaded.state, kind);
        }
    }
}

TEST(DistributedOptimizer, NamesOfSlices) {
    const checkpoint::SliceName slice{"exp_avg.layers.0.router.weight", {8, 256}, 64, 128};
    EXPECT_EQ(slice.text(), "exp_avg.layers.0.router.weight[64:128 of 8x256]");
    const auto parsed = checkpoint::parse_slice_name(slice.text());
    ASSERT_TRUE(parsed);
    EXPECT_EQ(parsed->tensor, slice.tensor);
    EXPECT_EQ(parsed->shape, slice.shape);
    EXPECT_EQ(parsed->first, 64);
    EXPECT_EQ(parsed->last, 128);
    for (const char* name :
         {"a", "a[]", "a[0:1]", "a[0:1 of ]", "a[1:1 of 2]", "a[0:3 of 2]", "a[-1:1 of 2]", "a[00:1 of 2]",
          "a[0:1 of 2x]", "a[0:1 of 2] ", "a[0:1 of -2]", "a[0:1 of 9999999999x9999999999]"})
        EXPECT_FALSE(checkpoint::parse_slice_name(name)) << name;
}

// Parameters one after the other: every element has one rank, and every block of the gradient norm too.
TEST(DistributedOptimizer, SlicesCoverEveryElementOnceAndNoBlockTwice) {
    constexpr int64_t kNormBlock = op::kNormSquaredBlock, kAlignment = 64;
    for (const int64_t size : {1, 2, 3, 4, 7}) {
        StateCut cut;
        std::map<int64_t, int64_t> ranks;  // of blocks
        std::vector<int64_t> sums(static_cast<size_t>(size));
        int64_t all = 0;
        for (const int64_t numel :
             {1, 63, 64, 8000, 65, 8192, 8193, 12345, 1000, 500'000, 1, 16384, 200'001}) {
            SCOPED_TRACE(fmt::format("{} elements from {} on, {} ranks", numel, cut.first, size));
            const Shards shards = state_shards(numel, size, cut);
            std::map<int64_t, int64_t> slices;  // first -> count
            for (size_t rank = 0; rank < shards.size(); ++rank) {
                ASSERT_EQ(shards[rank].size(), 1u);
                const Slice& slice = shards[rank].front();
                EXPECT_LE(slice.count, numel / size + 2 * kNormBlock);
                sums[rank] += slice.count;
                if (slice.count == 0) continue;
                slices[slice.first] = slice.count;
                const int64_t first = cut.first + slice.first;
                for (int64_t block = first / kNormBlock; block * kNormBlock < first + slice.count; ++block)
                    EXPECT_EQ(ranks.try_emplace(block, rank).first->second, static_cast<int64_t>(rank))
                        << "block " << block;
            }
            int64_t next = 0;
            for (const auto& [first, count] : slices) {
                EXPECT_EQ(first, next);
                next += count;
            }
            EXPECT_EQ(next, numel);
            all += numel;
            cut = next_cut(cut, numel, size, kAlignment);
            EXPECT_EQ(cut.first % kAlignment, 0);
        }
        for (const int64_t sum : sums)
            EXPECT_NEAR(static_cast<double>(sum), static_cast<double>(all / size), 3 * kNormBlock);
    }
}

// Every gradient and every working copy crosses the wire once: half of what an all-reduce moves.
TEST(DistributedOptimizer, GradientsAndCopiesCrossTheWireOnce) {
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        SCOPED_TRACE(recipe_name(recipe));
        std::map<std::string, double> sent[2];  // by all ranks, whole and divided
        double gradients = 0, copies = 0;
        for (const bool divided : {false, true}) {
            Texts keys = {"parallel.expert_model_parallel_size=1"};
            if (divided) keys.emplace_back(kSharded);
            const Config config = test_config(recipe, keys);
            after_timed_step(config, 2, [&](Trainer& trainer, ProcessGroup& world) {
                for (const StageSpan& span : trainer.timer().spans())
                    sent[divided][span.name] += span.wire_bytes;
                if (!divided || world.rank() != 0) return;
                gradients = copies = 0;
                for (const Parameter& p : trainer.transformer().parameters().all()) {
                    gradients += static_cast<double>(p.main_grad.bytes());
                    copies += static_cast<double>(p.fprop ? 4 * p.numel() : p.plain.bytes());
                }
            });
        }
        EXPECT_NEAR(sent[0]["gradient reduction"] / (2 * gradients), 1, 0.001);  // with padding
        EXPECT_NEAR(sent[1]["gradient reduction"] / gradients, 1, 0.001);
        EXPECT_EQ(sent[1]["parameter gather"], copies);
        EXPECT_EQ(sent[0].count("parameter gather"), 0u);
    }
}

}  // namespace
}  // namespace fp8flow::test
