// SPDX-License-Identifier: MIT
// Every operation is reached: trains the small model for a step under every recipe, recompute mode and
// switch, evaluates it, replays its MoE layer, and collects which operations of kernels/ops/list.h were
// called. A configuration reaches each of them, or kUnreached has the reason.
#include "kernels/comm/process_group.h"
#include "kernels/core/scalar_math.h"
#include "model/replay/layer.h"
#include "tests/support/training.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

using namespace test;
using namespace replay;

const Texts kOperations = {
#define FP8FLOW_NAME(name, Args) #name,
    FP8FLOW_FOR_EACH_OP(FP8FLOW_NAME) FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_NAME)
#undef FP8FLOW_NAME
};

// Operations that no configuration calls, and why they are there. `fp8flow bench` times them.
const std::map<std::string, std::string> kUnreached = {
    {"quantize_columns",
     "stand-alone form of quantize_dual's columns, for comparison with torchao's quantiser of "
     "weight-gradient "
     "operands; recipes cast both orientations in one call"},
    {"rope", "a step of qkv_heads and its backward, which compose it where a backend has no fused kernel"},
    {"clip_fp8", "a step of a flow with a rule that clips, which plugins have (rules_test)"},
    {"unpermute_probs_backward",
     "kept for comparison with the published kernel; with moe_apply_probs_in: combine SwiGLU's backward "
     "gives "
     "the same gradient without fc2's output"},
};

using Reached = std::map<std::string, std::string>;  // operation -> the first run that called it

void collect(const Ops& ops, const std::string& run, Reached& reached) {
    for (const auto& [name, count] : ops.counts())
        if (count.calls > 0) reached.emplace(name, run);
}

// One step and an evaluation on each of `ranks`, their calls from the weights' first values on.
void train_once(const Config& config, const std::string& run, int ranks, Reached& reached) {
    const auto data = open_data(config);
    std::vector<Reached> of_rank(static_cast<size_t>(ranks));
    run_thread_ranks(ranks, kTestDeadline, [&](ProcessGroup& world) {
        Reached& mine = of_rank[static_cast<size_t>(world.rank())];
        ReferenceTrainer trainer(config, world, data);
        collect(trainer.ops(), run, mine);
        TensorStats stats;
        if (config.output.tensor_stats) trainer.set_tensor_stats(&stats);
        trainer.run_step();
        trainer.set_tensor_stats(nullptr);
        collect(trainer.ops(), run, mine);
        trainer.evaluate(1);
        collect(trainer.ops(), run, mine);
    });
    for (const Reached& mine : of_rank) reached.insert(mine.begin(), mine.end());
}

// A weight that is not a number: the step is refused, and the trainer looks for the culprit.
void train_nan(const Config& config, Reached& reached) {
    on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup&) {
        const Parameter& parameter = trainer.transformer().parameters().all().front();
        const float nan = std::numeric_limits<float>::quiet_NaN();
        trainer.ops().device().copy_in(parameter.master.data, &nan, sizeof nan);
        trainer.resume_at(0, 0);  // the working copies follow
        EXPECT_THROW(trainer.run_step(), Error);
        collect(trainer.ops(), "a weight that is NaN", reached);
    });
}

void replay_once(Config config, const std::string& run, Reached& reached) {
    config.model.num_layers = 1;
    config.model.moe_layer_freq = {1};
    config.model.attention = false;
    config.moe.moe_router_load_balancing_type.clear();
    config.moe.moe_aux_loss_coeff.clear();
    config.moe.moe_z_loss_coeff = 0;
    config.training.micro_batch_size = config.training.global_batch_size = 1;
    run_thread_ranks(1, kTestDeadline, [&](ProcessGroup& world) {
        const int64_t tokens = config.model.seq_length;
        ReplayLayer layer(config, world, choose_backend(BackendKind::reference), ReplayNorm::apply,
                          ReplayRecord::intermediates, tokens, tokens);
        for (Parameter& parameter : layer.parameters().all()) {
            layer.device().fill(parameter.master.data, 0, static_cast<size_t>(parameter.master.bytes()));
            layer.parameters().write_copies(parameter);
        }
        const std::vector<Bf16> rows(static_cast<size_t>(tokens * config.model.hidden_size), to_bf16(1.0f));
        layer.forward(rows);
        layer.backward(rows);
        collect(layer.ops(), run, reached);
    });
}

// Short, so that a run takes a tenth of a second.
const Texts kSmall = {"model.seq_length=16", "training.micro_batch_size=1", "training.global_batch_size=2"};

const std::vector<Texts> kRecompute = {
    {},
    {"recompute.recompute_granularity=full"},
    {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[core_attn]"},
    {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[layernorm]"},
    {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[moe_act]"},
    {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[moe_expert]"},
    {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[moe_expert]",
     "recompute.saved_rows=received"},
    {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[moe]"},
    {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[shared_experts]"},
};

// The switches of precision, and the options of router, model and exchange.
const std::vector<Texts> kSwitches = {
    {"output.tensor_stats=true"},
    {"precision.fp8_format=hybrid"},
    {"precision.fp8_wgrad=false"},
    {"precision.fp8_attention_linears=true"},
    {"precision.moe_wgrad_micro_batches=2"},
    {"precision.moe_quantize_before_dispatch=false"},
    {"precision.moe_scaling_aware_transpose=false"},
    {"precision.moe_scaling_aware_transpose=false", "precision.scale_format=fp32"},
    {"precision.moe_permute_padding_for_fp8=false"},
    {"precision.moe_act_quantize_fusion=false"},
    {"precision.moe_norm_quantize_fusion=false"},
    {"precision.moe_apply_probs_in=combine"},
    {"moe.moe_combine_order=invariant"},
    {"moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true"},
    {"moe.moe_router_force_load_balancing=true"},
    {"moe.moe_z_loss_coeff=0.001"},
    {"moe.moe_shared_expert_intermediate_size=0"},
    {"moe.moe_shared_expert_gate=true"},
    {"moe.moe_router_dtype=fp32"},
    {"model.activation_func_clamp_value=7", "model.quick_geglu=true", "model.glu_linear_offset=1"},
    {"model.qk_layernorm=true"},
    {"model.multi_latent_attention=true", "model.q_lora_rank=0"},
    {"model.add_qkv_bias=true", "model.qk_layernorm=true", "model.qk_layernorm_type=per_layer"},
    {"model.untie_embeddings_and_output_weights=false"},
};

std::string text_of(Recipe recipe, const Texts& overrides) {
    std::string text(recipe_name(recipe));
    for (const std::string& one : overrides) text += " " + one;
    return text;
}

// The configuration, or nothing where the recipe refuses these keys.
std::optional<Config> config_of(Recipe recipe, const Texts& overrides) {
    try {
        return test_config(recipe, with(kSmall, overrides));
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
        return std::nullopt;
    }
}

TEST(Reach, EveryOperationIsCalledByAConfiguration) {
    Reached reached;
    std::map<Recipe, int> runs;
    std::map<std::string, int> switches;
    for (const Recipe recipe : kRecipes) {
        for (const Texts& mode : kRecompute)
            if (const auto config = config_of(recipe, mode)) {
                train_once(*config, text_of(recipe, mode), 1, reached);
                ++runs[recipe];
            }
        const Texts shared = {"parallel.expert_model_parallel_size=2"};
        if (const auto config = config_of(recipe, shared))
            train_once(*config, text_of(recipe, shared), 2, reached);
        if (const auto config = config_of(recipe, {}))
            replay_once(*config, "replay " + text_of(recipe, {}), reached);
    }
    for (const Texts& one : kSwitches)
        if (const auto config = config_of(Recipe::fp8_flow, one)) {
            train_once(*config, text_of(Recipe::fp8_flow, one), 1, reached);
            ++switches[one.front()];
        }
    train_nan(*config_of(Recipe::fp8_flow, {}), reached);

    // what was refused was not all of it
    for (const Recipe recipe : kRecipes) EXPECT_GE(runs[recipe], 6) << recipe_name(recipe);
    for (const Texts& one : kSwitches) EXPECT_GT(switches[one.front()], 0) << one.front() << " runs nowhere";

    const std::set<std::string> listed(kOperations.begin(), kOperations.end());
    for (const auto& [name, why] : kUnreached) {
        EXPECT_TRUE(listed.contains(name)) << name << " is no operation";
        EXPECT_FALSE(reached.contains(name)) << name << " is called by " << reached[name] << ": strike it";
        EXPECT_FALSE(why.empty());
    }
    for (const std::string& name : kOperations)
        EXPECT_TRUE(reached.contains(name) || kUnreached.contains(name))
            << name << ": no configuration calls it; make one reach it, delete it, or say why it is there";
}

}  // namespace
}  // namespace fp8flow
