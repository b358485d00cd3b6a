// SPDX-License-Identifier: MIT
// Schedules change no bit: a MoE layer with work on the side stream, which runs as late as it may
// (tests/support/layers/late_stream.h), against the same layer on one stream; every recipe, recompute mode
// and schedule.
#include "layers/schedule/side_stream.h"

#include "model/config/config.h"
#include "tests/support/layers/layer_fixture.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

const ScheduleSpec kSchedules[] = {{.moe_shared_expert_overlap = true},
                                   {.delay_wgrad_compute = true},
                                   {.moe_shared_expert_overlap = true, .delay_wgrad_compute = true}};

std::vector<RecomputeSpec> recompute_modes() {
    std::vector<RecomputeSpec> modes(6);
    for (RecomputeSpec& mode : modes) mode.recompute_granularity = RecomputeGranularity::selective;
    modes[0] = {};
    modes[1].shared_experts = true;
    modes[2].moe_expert = true;
    modes[3].moe = true;
    modes[4].layernorm = modes[4].moe_act = modes[4].shared_experts = true;
    modes[5] = {.recompute_granularity = RecomputeGranularity::full};
    return modes;
}

LayerCase case_of(Recipe recipe) {
    LayerCase c = LayerCase::of(recipe);
    c.moe.moe_shared_expert_intermediate_size = 128;
    c.moe.moe_shared_expert_gate = true;
    c.forced_routing = false;
    return c;
}

void expect_equal(const std::vector<LayerResult>& got, const std::vector<LayerResult>& wanted) {
    expect_same_results(got, wanted);
    for (std::size_t rank = 0; rank < wanted.size(); ++rank) EXPECT_EQ(got[rank].casts, wanted[rank].casts);
}

TEST(SideStream, SchedulesChangeNoBit) {
    for (const Recipe recipe : kRecipes)
        for (const RecomputeSpec& recompute : recompute_modes()) {
            LayerCase c = case_of(recipe);
            c.recompute = recompute;
            const std::vector<LayerResult> wanted = run_block(c);
            for (const ScheduleSpec& schedule : kSchedules) {
                SCOPED_TRACE(fmt::format(
                    "{}: moe {}, moe_expert {}, shared_experts {}, full {}; shared {}, wgrad {}",
                    recipe_name(recipe), recompute.moe, recompute.moe_expert, recompute.shared_experts,
                    recompute.recompute_granularity == RecomputeGranularity::full,
                    schedule.moe_shared_expert_overlap, schedule.delay_wgrad_compute));
                c.schedule = schedule;
                for (const bool main_is_late : {false, true}) {
                    c.main_is_late = main_is_late;
                    expect_equal(run_block(c), wanted);
                }
            }
        }
}

TEST(SideStream, SchedulesChangeNoBitOnTwoRanks) {
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        LayerCase c = case_of(recipe);
        c.tokens = {48, 64};
        const std::vector<LayerResult> wanted = run_block(c);
        c.schedule = kSchedules[2];
        for (const bool main_is_late : {false, true}) {
            c.main_is_late = main_is_late;
            expect_equal(run_block(c), wanted);
        }
    }
}

// A layer without a shared expert, and merging weights, whose backward makes SwiGLU's output again.
TEST(SideStream, SchedulesChangeNoBitOfOtherLayers) {
    for (const Recipe recipe : kRecipes) {
        LayerCase alone = case_of(recipe), merging = case_of(recipe);
        alone.moe.moe_shared_expert_intermediate_size = 0;
        merging.precision.moe_apply_probs_in = ProbsIn::combine;
        for (LayerCase& c : {std::ref(alone), std::ref(merging)}) {
            const std::vector<LayerResult> wanted = run_block(c);
            c.schedule = kSchedules[2];
            expect_equal(run_block(c), wanted);
        }
    }
}

// What the two tests above rely on: without a wait the main stream reads memory that nobody has written.
TEST(SideStream, WorksWhenTheMainStreamWaits) {
    LateOps ops;
    SideStream side(ops.device(), kSchedules[2]);
    LayerCase c = case_of(Recipe::bf16);
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        RankFixture rank(group, c);
        const Context main = rank.context();
        HostTensor word(DType::f32, {1});
        word.as<float>()[0] = 1;
        Context side_ctx = side.begin(main);
        EXPECT_EQ(side_ctx.launch.role, StreamRole::side);
        EXPECT_EQ(side_ctx.side, nullptr);
        ops.zero({.y = word}, side_ctx.launch);
        const Event mark = side.mark();
        ops.zero({.y = word}, side_ctx.launch);
        EXPECT_EQ(ops.late_device().waiting(), 2);
        EXPECT_EQ(word.as<float>()[0], 1);
        side.await(main, mark);
        EXPECT_EQ(ops.late_device().waiting(), 1);
        EXPECT_EQ(word.as<float>()[0], 0);
        side.join(main);
        EXPECT_EQ(ops.late_device().waiting(), 0);
    });
}

// Calls of the exchange are on the wire stream only while the side stream may be at work.
TEST(SideStream, TheWireHasAStreamNextToWork) {
    LayerCase c = case_of(Recipe::bf16);
    c.schedule = {.delay_wgrad_compute = true};
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        RankFixture rank(group, c);
        SideStream& side = *rank.side;
        Context main = rank.context();
        const auto role = [&] {
            const StreamRole used = begin_wire(main).role;
            end_wire(main);
            return used;
        };
        EXPECT_EQ(role(), StreamRole::main);
        side.begin(main);
        EXPECT_EQ(role(), StreamRole::wire);
        const Event mark = side.mark();
        side.await(main, mark);
        EXPECT_EQ(role(), StreamRole::main);
        side.begin(main);
        side.await(main, mark);
        EXPECT_EQ(role(), StreamRole::wire) << "work was given after the mark";
        side.join(main);
        EXPECT_EQ(role(), StreamRole::main);
    });
}

// In parallel with another micro-batch it leaves SMs, where there is a wire.
TEST(SideStream, TheWireIsNarrowInTurns) {
    for (const int ranks : {1, 2}) {
        LayerCase c = case_of(Recipe::bf16);
        c.tokens.assign(static_cast<std::size_t>(ranks), 64);
        c.schedule = {.overlap_moe_expert_parallel_comm = true, .wire_sms = 24};
        run_thread_ranks(ranks, 60, [&](ProcessGroup& group) {
            RankFixture rank(group, c);
            const Context main = rank.context();
            EXPECT_EQ(rank.wire->begin(main, WireStream::Width::narrow).sm_limit, ranks == 1 ? 0 : 24);
            EXPECT_EQ(rank.wire->begin(main, WireStream::Width::all).sm_limit, 0);
        });
    }
}

}  // namespace
}  // namespace fp8flow::test
