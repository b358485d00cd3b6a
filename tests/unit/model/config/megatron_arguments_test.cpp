// SPDX-License-Identifier: MIT
// A YAML without sections: the names of Megatron-LM's arguments.
#include "model/config/config.h"
#include "tests/support/settings.h"

#include <gtest/gtest.h>

#include <string>

namespace fp8flow {
namespace {

TEST(MegatronArguments, NeedNoSections) {
    const Config config = parse_config(
        "num-layers: 3\nhidden_size: 256\nnum-moe-experts: 16\nmoe_router_topk: 4\nlayernorm-epsilon: 1e-5\n"
        "expert-model-parallel-size: 2\ntensor-model-parallel-size: 1\nswiglu: true\n"
        "group-query-attention: true\nhidden_dropout: 0.0\nbf16: true\n",
        "args.yaml");
    EXPECT_EQ(config.model.num_layers, 3);
    EXPECT_EQ(config.moe.num_experts, 16);
    EXPECT_EQ(config.moe.moe_router_topk, 4);
    EXPECT_EQ(config.parallel.expert_model_parallel_size, 2);
    EXPECT_DOUBLE_EQ(config.model.norm_epsilon, 1e-5);
    EXPECT_EQ(config.precision.recipe, Recipe::bf16);
}

TEST(MegatronArguments, AnFp8RecipeCountsMoreThanBf16) {
    for (const char* text : {"bf16: true\nfp8_recipe: blockwise\nfp8: e4m3\nnum_layers: 2\n",
                             "num_layers: 2\nfp8_recipe: blockwise\nbf16: true\n"})
        EXPECT_EQ(parse_config(text, "t.yaml").precision.recipe, Recipe::fp8_blockwise);
}

TEST(MegatronArguments, OthersAreErrors) {
    EXPECT_EQ(config_error("num_layers: 2\nmoe-layer-recompute: true")
                  .find("t.yaml:2:1: moe_layer_recompute: got an "),
              0u);
    EXPECT_EQ(config_error("num_layers: 2\nnum-layers: 3"),
              "t.yaml:2:1: num_layers: got this argument twice, want it once");
    EXPECT_EQ(
        config_error("num_layers: 2\ntensor-model-parallel-size: 2"),
        "t.yaml:2:1: parallel.tensor_model_parallel_size: got 2, want 1 (only data and expert parallelism "
        "are implemented)");
    EXPECT_EQ(
        config_error("num_layers: 2\nfp8: hybrid"),
        "t.yaml:2:1: fp8: got an unknown key, want one of --help-config; did you mean 'precision.recipe'");
}

}  // namespace
}  // namespace fp8flow
