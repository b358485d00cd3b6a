// SPDX-License-Identifier: MIT
// The optimizer's calls that may run in parallel (Launch::independent), run in another order than they
// were made in, as far as that is allowed (tests/support/layers/late_stream.h): the bits of their own order.
#include "model/train/optimizer.h"
#include "tests/support/layers/layer_fixture.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace fp8flow::test {
namespace {

using Bytes = std::vector<uint8_t>;

struct UpdatedRank {
    std::vector<Bytes> state;  // masters and moments that the rank holds, by parameter
    bool holds_first = false;  // anything of the first parameter
};

UpdatedRank update_once(ProcessGroup& group, const LayerCase& c) {
    ModelFixture model(group, c);
    model.step();
    RankFixture& rank = model.rank();
    TrainingSpec training;
    training.use_distributed_optimizer = c.divided_state;
    training.lr_warmup_iters = 0;
    training.clip_grad = 1e-3;  // so that every update depends on the norm of all gradients
    Optimizer optimizer(training, CombineOrder::rank, rank.ops.device());
    StepInputs inputs(rank.ops.device(), 1);
    inputs.write(0, {.schedule = adamw_schedule(training, 0), .sums = {4.0f, 0.0f}});
    inputs.load(0, {});
    Context ctx = rank.context();
    optimizer.step(ctx, model.parameters(), inputs);
    rank.ops.device().synchronize();
    EXPECT_EQ(*ctx.step_status.as<int32_t>(), 0);
    UpdatedRank result;
    for (const Parameter& p : model.parameters().all())
        for (const TensorView& view : {p.master, p.m, p.v})
            result.state.emplace_back(view.bytes_ptr(), view.bytes_ptr() + view.bytes());
    result.holds_first = !result.state.front().empty();
    return result;
}

std::vector<UpdatedRank> update_ranks(const LayerCase& c) {
    return on_ranks(c, [&](ProcessGroup& group) { return update_once(group, c); });
}

// With divided state some ranks hold nothing of the first parameter.
TEST(OptimizerOrder, IndependentCallsChangeNoBit) {
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow})
        for (const bool divided : {false, true}) {
            SCOPED_TRACE(fmt::format("{}, divided {}", recipe_name(recipe), divided));
            LayerCase c = LayerCase::of(recipe);
            c.tokens = {32, 32, 32, 32};
            c.divided_state = divided;
            const std::vector<UpdatedRank> wanted = update_ranks(c);
            c.main_is_late = true;
            const std::vector<UpdatedRank> got = update_ranks(c);
            for (std::size_t rank = 0; rank < wanted.size(); ++rank)
                EXPECT_EQ(got[rank].state, wanted[rank].state) << "rank " << rank;
            EXPECT_EQ(std::all_of(wanted.begin(), wanted.end(),
                                  [](const UpdatedRank& rank) { return rank.holds_first; }),
                      !divided);
        }
}

}  // namespace
}  // namespace fp8flow::test
