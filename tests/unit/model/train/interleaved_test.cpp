// SPDX-License-Identifier: MIT
// Two micro-batches in turns give the bits of one after the other, on streams that work as late as they may
// (tests/support/layers/late_stream.h) and in whole training runs; and how turns change and end.
#include "layers/schedule/interleaved.h"

#include "model/train/trainer.h"
#include "tests/support/layers/layer_fixture.h"
#include "tests/support/training.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>

namespace fp8flow::test {
namespace {

TEST(InterleavedPair, ChangeAtEveryPassUntilOneIsDone) {
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        const LayerCase c = LayerCase::of(Recipe::bf16);
        RankFixture rank(group, c);
        InterleavedPair turns(rank.ops.device());
        std::string order;
        const auto play = [&](char name, int passes) {
            return [&, name, passes](InterleavedMicroBatch& turn) {
                Context ctx = rank.context();
                for (int i = 0; i < passes; ++i) {
                    order += name;
                    ctx.timer.set_layer(name);
                    turn.yield(ctx);
                    EXPECT_EQ(ctx.timer.position().layer, name);
                }
                order += static_cast<char>(std::toupper(name));
            };
        };
        turns.run(rank.timer, play('a', 2), play('b', 4));
        EXPECT_EQ(order, "ababAbbB");
        order.clear();
        turns.run(rank.timer, play('a', 3), play('b', 0));
        EXPECT_EQ(order, "aBaaA");
    });
}

// The error of either ends both, and is the one thrown; afterwards turns can be played again.
TEST(InterleavedPair, AnErrorEndsBoth) {
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        const LayerCase c = LayerCase::of(Recipe::bf16);
        RankFixture rank(group, c);
        InterleavedPair turns(rank.ops.device());
        for (const int failing : {0, 1}) {
            bool went_on = false;
            const auto fails = [&](InterleavedMicroBatch& turn) {
                Context ctx = rank.context();
                turn.yield(ctx);
                throw std::runtime_error("lost");
            };
            const auto waits = [&](InterleavedMicroBatch& turn) {
                Context ctx = rank.context();
                for (int i = 0; i < 5; ++i) turn.yield(ctx);
                went_on = true;
            };
            EXPECT_THROW(
                failing == 0 ? turns.run(rank.timer, fails, waits) : turns.run(rank.timer, waits, fails),
                std::runtime_error);
            EXPECT_FALSE(went_on);
        }
        int played = 0;
        turns.run(
            rank.timer, [&](InterleavedMicroBatch&) { ++played; }, [&](InterleavedMicroBatch&) { ++played; });
        EXPECT_EQ(played, 2);
    });
}

// Memory of the second of two micro-batches under way.
struct OtherMemory {
    Arena saved, scratch;
    RowArena rows;
    explicit OtherMemory(RankFixture& rank)
        : saved(rank.ops.device(), "saved", !rank.c.main_is_late),
          scratch(rank.ops.device(), "scratch", !rank.c.main_is_late),
          rows(rank.poison, rank.layer_rows * rank.c.model.num_layers, rank.c.model.num_layers + 1) {}
};

constexpr int64_t kMicroBatches = 3;

// Gradients of some micro-batches, one after the other or in turns.
LayerResult train_micro_batches(ProcessGroup& group, const LayerCase& c, bool interleaved) {
    ModelFixture model(group, c);
    RankFixture& rank = model.rank();
    OtherMemory other(rank);
    WireStream wire(rank.ops.device(), {});
    InterleavedPair turns(rank.ops.device());
    HostTensor loss(DType::f32, {1});
    loss.as<float>()[0] = 0;
    Context begin = rank.context();
    model.model().begin_step(begin);
    std::vector<Transformer::MicroBatch> batches(kMicroBatches);
    const auto pass = [&](int64_t m, InterleavedMicroBatch* turn, bool forward) {
        Context ctx = m % 2 == 0 ? rank.context() : rank.context(other.saved, other.scratch, other.rows);
        ctx.num_micro_batches = kMicroBatches;
        ctx.micro_batch = m;
        ctx.grad_mode = m == 0 ? Gradient::overwrite : Gradient::accumulate;
        ctx.reduces_gradients = m == kMicroBatches - 1;
        ctx.wire = &wire;
        ctx.interleaved = turn;
        Transformer::MicroBatch& batch = batches[static_cast<std::size_t>(m)];
        if (forward) {
            batch = {.tokens = model.tokens(),
                     .labels = model.tokens(),
                     .loss_scale = 1.0f / static_cast<float>((m + 1) * ctx.global_tokens),
                     .loss_sum = loss};
            model.model().forward(ctx, batch);
        } else {
            model.model().backward(ctx, batch);
        }
    };
    if (interleaved) {
        pass(0, nullptr, true);
        for (int64_t m = 1; m < kMicroBatches; ++m)
            turns.run(
                rank.timer, [&](InterleavedMicroBatch& turn) { pass(m, &turn, true); },
                [&](InterleavedMicroBatch& turn) { pass(m - 1, &turn, false); });
        pass(kMicroBatches - 1, nullptr, false);
    } else {
        for (int64_t m = 0; m < kMicroBatches; ++m)
            for (const bool forward : {true, false}) pass(m, nullptr, forward);
    }
    wire.join(begin);
    rank.ops.device().synchronize();
    LayerResult result;
    read_rank(rank, model.parameters(), result);
    model.model().end_step(begin, rank.step_number);
    rank.ops.device().synchronize();
    for (const auto& block : model.model().blocks())
        if (block->router() != nullptr) read_router(*block->router(), result);
    result.loss = loss.as<float>()[0];
    result.in_use += other.saved.bytes_in_use() + other.scratch.bytes_in_use();
    return result;
}

void expect_same(const LayerResult& got, const LayerResult& wanted) {
    expect_same_result(got, wanted);
    EXPECT_EQ(got.casts, wanted.casts);
    for (const auto& [name, values] : wanted.gradients)
        EXPECT_GT(std::accumulate(values.begin(), values.end(), 0.0,
                                  [](double sum, double v) { return sum + std::abs(v); }),
                  0.0)
            << name;
}

void expect_turns_change_no_bit(LayerCase c) {
    const auto run = [&](bool interleaved) {
        return on_ranks(c, [&](ProcessGroup& group) { return train_micro_batches(group, c, interleaved); });
    };
    const std::vector<LayerResult> wanted = run(false);
    for (const bool main_is_late : {false, true}) {
        SCOPED_TRACE(main_is_late ? "the main stream is late" : "the other streams are late");
        c.main_is_late = main_is_late;
        const std::vector<LayerResult> got = run(true);
        for (std::size_t rank = 0; rank < wanted.size(); ++rank) expect_same(got[rank], wanted[rank]);
    }
}

LayerCase model_of(Recipe recipe) {
    LayerCase c = LayerCase::of(recipe);
    c.tokens = {32, 32};
    c.forced_routing = false;
    c.model.attention = true;
    c.model.num_layers = 3;
    c.model.moe_layer_freq = {1, 0, 1};
    c.moe.moe_shared_expert_intermediate_size = 128;
    c.moe.moe_router_load_balancing_type = {BalancingLoss::global_aux_loss};
    c.moe.moe_aux_loss_coeff = {0.01};
    c.moe.moe_z_loss_coeff = 0.001;
    return c;
}

TEST(InterleavedPair, ChangeNoBitOnLateStreams) {
    for (const Recipe recipe : kRecipes) {
        SCOPED_TRACE(recipe_name(recipe));
        expect_turns_change_no_bit(model_of(recipe));
    }
}

TEST(InterleavedPair, ChangeNoBitUnderRecomputation) {
    for (int mode = 0; mode < 6; ++mode) {
        SCOPED_TRACE(mode);
        LayerCase c = model_of(Recipe::fp8_flow);
        c.recompute.recompute_granularity =
            mode == 0 ? RecomputeGranularity::full : RecomputeGranularity::selective;
        c.recompute.moe = mode == 1;
        c.recompute.moe_expert = mode == 2 || mode > 3;
        if (mode > 3) c.recompute.saved_rows = mode == 4 ? SavedRows::received : SavedRows::none;
        c.recompute.layernorm = c.recompute.moe_act = c.recompute.shared_experts = mode == 3;
        expect_turns_change_no_bit(c);
    }
}

TEST(InterleavedPair, ChangeNoBitOfOtherModels) {
    LayerCase tied = model_of(Recipe::fp8_flow), one = tied, unpadded = tied;
    tied.model.untie_embeddings_and_output_weights = false;
    one.tokens = {48};
    unpadded.precision.moe_permute_padding_for_fp8 = false;
    for (const LayerCase& c : {tied, one, unpadded}) expect_turns_change_no_bit(c);
}

// Whole runs, one step in flight: two ranks that share the experts, and four as two such groups, where expert
// gradients are reduced too; with rows that run out, so that steps are redone.
TEST(InterleavedPair, ChangeNoBitOfTraining) {
    for (const int ranks : {2, 4})
        for (const bool tight : {false, true}) {
            SCOPED_TRACE(fmt::format("{} ranks, tight rows {}", ranks, tight));
            const Recipe recipe = tight ? Recipe::bf16 : Recipe::fp8_flow;  // bf16 needs no pads
            std::vector<std::string> keys = {"parallel.expert_model_parallel_size=2",
                                             "training.micro_batch_size=4",
                                             "training.global_batch_size=" + std::to_string(12 * ranks)};
            if (tight)
                for (const char* key : {"moe.moe_expert_rank_capacity_factor=0.5", "moe.moe_row_alignment=1"})
                    keys.emplace_back(key);
            const RunOptions options{.steps = 3, .eval_batches = 1};
            const TrainingRun serial = train(test_config(recipe, keys), ranks, options);
            for (const char* overlap : {"overlap_moe_expert_parallel_comm", "overlap_grad_reduce"})
                keys.push_back(fmt::format("schedule.{}=true", overlap));
            const TrainingRun interleaved = train(test_config(recipe, keys), ranks, options);
            expect_same_run(interleaved, serial);
            const auto redone = [](const TrainingRun& run) {
                return std::accumulate(run.steps.begin(), run.steps.end(), int64_t{0},
                                       [](int64_t sum, const StepResult& step) { return sum + step.redone; });
            };
            EXPECT_EQ(redone(interleaved), redone(serial));
            EXPECT_EQ(redone(interleaved) > 0, tight);
        }
}

}  // namespace
}  // namespace fp8flow::test
