// SPDX-License-Identifier: MIT
// With moe_combine_order: invariant a run's bits do not depend on how many of the ranks share the experts,
// nor on the hosts that the ranks are on: losses, gradient norms, gradients, weights and moments.
#include "model/train/trainer.h"

#include "tests/support/training.h"

#include <fmt/ranges.h>

namespace fp8flow {
namespace {

using namespace test;

Config invariant_config(Recipe recipe, int expert_ranks, const Texts& keys) {
    return test_config(recipe,
                       with(keys, {"moe.moe_combine_order=invariant",
                                   fmt::format("parallel.expert_model_parallel_size={}", expert_ranks)}));
}

// Whether 1, 2, 4 or all of the ranks share the experts.
void expect_same_bits_on(int ranks, Recipe recipe, const Texts& keys, int64_t steps) {
    const TrainingRun apart = train(invariant_config(recipe, 1, keys), ranks, {.steps = steps});
    for (int expert_ranks = 2; expert_ranks <= ranks; expert_ranks *= 2) {
        SCOPED_TRACE(fmt::format("{}, {}, {} of {} ranks share the experts", recipe_name(recipe),
                                 fmt::join(keys, " "), expert_ranks, ranks));
        expect_same_run(train(invariant_config(recipe, expert_ranks, keys), ranks, {.steps = steps}), apart);
    }
}

// Two micro-batches a step, balancing losses, an expert bias, clipping.
TEST(InvariantOrder, TrainsToTheSameBits) {
    const Texts keys = {
        "training.micro_batch_size=1", "moe.moe_router_load_balancing_type=[aux_loss,global_aux_loss]",
        "moe.moe_aux_loss_coeff=[0.01,0.02]", "moe.moe_z_loss_coeff=0.001",
        "moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true",
        // most of the gradient norm is then that of experts, so that the order of its sum shows
        "moe.moe_router_topk_scaling_factor=16", "training.clip_grad=0.1"};
    for (Recipe recipe : kInvariantRecipes) expect_same_bits_on(4, recipe, keys, 4);
}

TEST(InvariantOrder, TrainsToTheSameBitsForFiftySteps) {
    const Texts keys = {"training.micro_batch_size=1", "training.train_iters=50"};
    for (Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) expect_same_bits_on(4, recipe, keys, 50);
}

// Choices that benchmarks force depend on the token, not on the rank that has it.
TEST(InvariantOrder, WithForcedChoices) {
    for (const char* forced :
         {"moe.moe_router_force_biased=1.75", "moe.moe_router_force_load_balancing=true"})
        expect_same_bits_on(4, Recipe::fp8_flow, {"training.micro_batch_size=1", forced}, 2);
}

// More than one replica of more than one source, in every mixture.
TEST(InvariantOrder, OnEightRanks) {
    const Texts keys = {"training.micro_batch_size=1", "training.global_batch_size=16", "moe.num_experts=8"};
    expect_same_bits_on(8, Recipe::fp8_flow, keys, 3);
}

// What else touches weight gradients: gradients in BF16, BF16 operands, two micro-batches in one GEMM,
// parallel streams, narrow pads, rows that do not fit at first.
TEST(InvariantOrder, WithOtherGradientsAndSchedules) {
    const Texts small = {"training.micro_batch_size=1"};
    struct Variant {
        Recipe recipe;
        Texts keys;
    };
    const std::vector<Variant> variants = {
        {Recipe::fp8_flow, {"training.main_grads_dtype=bf16", "training.exp_avg_dtype=bf16"}},
        {Recipe::bf16, {"training.main_grads_dtype=bf16", "schedule.overlap_grad_reduce=true"}},
        {Recipe::fp8_flow, {"precision.fp8_wgrad=false"}},
        {Recipe::fp8_flow, {"precision.moe_permute_padding_for_fp8=false"}},
        {Recipe::fp8_flow, {"precision.moe_wgrad_micro_batches=2", "schedule.delay_wgrad_compute=true"}},
        {Recipe::fp8_blockwise, {"precision.moe_wgrad_micro_batches=2", "training.main_grads_dtype=bf16"}},
        {Recipe::fp8_flow,
         {"schedule.overlap_moe_expert_parallel_comm=true", "schedule.overlap_grad_reduce=true"}},
        {Recipe::fp8_rowwise, {"schedule.moe_shared_expert_overlap=true", "moe.moe_row_alignment=16"}},
        {Recipe::mxfp8, {"moe.moe_row_alignment=32", "precision.moe_apply_probs_in=combine"}},
        {Recipe::bf16, {"precision.moe_apply_probs_in=combine"}},
        {Recipe::fp8_flow, {"precision.moe_apply_probs_in=combine"}},
        {Recipe::fp8_flow, {"recompute.recompute_granularity=full"}},
        {Recipe::fp8_flow, {"moe.moe_expert_rank_capacity_factor=0.01"}},
    };
    for (const Variant& variant : variants)
        expect_same_bits_on(4, variant.recipe, with(small, variant.keys), 2);
}

// Ranks on several hosts: rows inside the groups that share the experts, sums over all ranks. Where a group
// is on two hosts nothing is split.
TEST(InvariantOrder, HostsChangeNoBit) {
    struct Hosts {
        const char* text;
        int ranks, expert_ranks;
    };
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow})
        for (const Hosts& hosts : {Hosts{"2x1", 2, 1},
                                   {"2x1", 2, 2},
                                   {"2x2", 4, 2},
                                   {"2x2", 4, 1},
                                   {"4x1", 4, 1},
                                   {"2x2", 4, 4},
                                   {"2x4", 8, 4},
                                   {"4x2", 8, 2}}) {
            SCOPED_TRACE(fmt::format("{}, {} hosts, {} of {} ranks share the experts", recipe_name(recipe),
                                     hosts.text, hosts.expert_ranks, hosts.ranks));
            Texts keys = {"training.micro_batch_size=1",
                          fmt::format("parallel.expert_model_parallel_size={}", hosts.expert_ranks)};
            const TrainingRun one = train(test_config(recipe, keys), hosts.ranks, {.steps = 3});
            keys.push_back(fmt::format("parallel.hosts={}", hosts.text));
            expect_same_run(train(test_config(recipe, keys), hosts.ranks, {.steps = 3}), one);
        }
}

}  // namespace
}  // namespace fp8flow
