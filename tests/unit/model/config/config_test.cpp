// SPDX-License-Identifier: MIT
// The configuration as a user meets it: exact error lines, the round trip of the dump, overrides, and the
// shipped files.
// Long because it covers every rule of a configuration and every shipped file.
#include "model/config/config.h"

#include "model/config/changed_rules.h"
#include "tests/support/settings.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

namespace fp8flow {
namespace {

const std::string kConfigs = FP8FLOW_SOURCE_DIR "/configs/";

TEST(Config, DefaultsAreLegal) {
    const Config config = parse_config("model: {}", "t.yaml");
    EXPECT_EQ(config.model.hidden_size, 256);
    EXPECT_EQ(config.model.padded_vocab_size, 384);
    EXPECT_EQ(config.model.moe_layer_freq, (std::vector<int>{1, 1}));
    EXPECT_EQ(config.precision.recipe, Recipe::fp8_flow);
    EXPECT_NO_THROW(check_config(config, 1));
}

TEST(Config, ReadsEveryType) {
    const Config config = parse_config(
        "model:\n  num_layers: 4\n  rotary_base: 1.0e+6\n  qk_layernorm: true\n  moe_layer_freq: "
        "([0]*1+[1]*3)\n"
        "  vocab_size: 300\n"
        "moe:\n  moe_router_load_balancing_type: [aux_loss, seq_aux_loss]\n  moe_aux_loss_coeff: [0.01, "
        "1.0e-4]\n"
        "precision: {recipe: mxfp8, mx_rounding: floor}\n"
        "recompute: {recompute_granularity: selective, recompute_modules: [moe_act, core_attn]}\n"
        "data: {data_kind: text, data_path: [\"/a b/*.txt\", '/c''d'], file_extensions: .h}\n"
        "validate: {recipes: [bf16, mxfp8]}\n",
        "t.yaml");
    expect_settings(
        config,
        {"rotary_base: 1000000", "qk_layernorm: true", "moe_aux_loss_coeff: [0.01, 0.0001]",
         "moe_router_load_balancing_type: [aux_loss, seq_aux_loss]", "recipe: mxfp8", "mx_rounding: floor",
         "recompute_modules: [core_attn, moe_act]", "data_path: [\"/a b/*.txt\", \"/c'd\"]",
         "file_extensions: [\".h\"]", "recipes: [bf16, mxfp8]"});
    EXPECT_EQ(config.model.moe_layer_freq, (std::vector<int>{0, 1, 1, 1}));
    EXPECT_EQ(config.model.padded_vocab_size, 384);
}

TEST(Config, WholeNumbersMayHaveAnExponent) {
    const Config config = parse_config("training: {train_iters: 5e3, seed: 9007199254740993}\n", "t.yaml",
                                       {"log_interval=1e1"});
    expect_settings(config, {"train_iters: 5000", "log_interval: 10",
                             "seed: 9007199254740993"});  // digits are exact, of any size
}

// YAML's core schema: spellings of truth, signs, other bases, tabs between tokens.
TEST(Config, EverySpellingOfYamlsCoreSchema) {
    const Config config = parse_config(
        "\xef\xbb\xbf--- # comment\n"
        "model:\t# comment\n  qk_layernorm:\tTrue\t# comment\n  num_layers: 0x3\n  swiglu: TRUE\n"
        "\t\nmoe: {\tnum_experts: +8,\tmoe_router_topk: 0o4\t}\n"
        "training: {lr: +.5, min_lr: 1., clip_grad: 1E+1}\nprecision:\n  flow: \"a\tb\"\t\n"
        "data:\n  file_extensions:\n    -\t.h\n",
        "t.yaml", {"fp8_wgrad=False", "precision.flow=\"\"", "lr_decay_style=constant"});
    expect_settings(
        config, {"qk_layernorm: true", "fp8_wgrad: false", "num_layers: 3", "num_experts: 8",
                 "moe_router_topk: 4", "lr: 0.5", "min_lr: 1", "clip_grad: 10", "file_extensions: [\".h\"]"});
    for (const char* other : {"yes", "on", "tRUE", "1", "~"})
        EXPECT_NE(config_error("model: {}", {std::string("qk_layernorm=") + other}), "") << other;
    for (const char* other : {"0x", "0o8", "0x-3", "+-3", "++3", "1_000", "03x"})
        EXPECT_NE(config_error("model: {}", {std::string("num_layers=") + other}), "") << other;
}

TEST(Config, TextOfAnOverrideIsTakenLiterally) {
    for (const std::string text : {"exp #2", " a ", "/home/o'brien/x", "a: b", "null", "~", "{}", "&a", "*",
                                   "!x", "a]", "- a", "|", "\xc3\xa9", "a\tb\nc", "a\\b", "say \"x\"", "5"}) {
        const Config config =
            parse_config("data: {data_kind: text}", "t.yaml",
                         {"output.out=" + text, "checkpoint.load=" + text, "data_path=" + text});
        EXPECT_EQ(config.output.out, text);
        EXPECT_EQ(config.checkpoint.load, text);
        EXPECT_EQ(config.data.data_path, std::vector<std::string>{text});
        EXPECT_EQ(parse_config(dump_config(config), "dump").output.out, text);
    }
    const Config quoted =
        parse_config("data: {data_kind: text}", "t.yaml",
                     {"output.out='exp #2'", "data_path=[a, 'b #']", "tensorboard_dir=\"\""});
    EXPECT_EQ(quoted.output.out, "exp #2");
    EXPECT_EQ(quoted.data.data_path, (std::vector<std::string>{"a", "b #"}));
    EXPECT_EQ(config_error("model: {}", {"output.out="}), "--set: output.out: got nothing, want text");
    EXPECT_EQ(config_error("model: {}", {"output.out=a\xff"}),
              "--set output.out: got bytes that are no UTF-8, want text");
}

TEST(Config, NumbersThatFp32DoesNotHoldAreRefused) {
    EXPECT_EQ(config_error("training: {lr: 1e-320}"),
              "t.yaml:1:16: training.lr: got 1e-320, want a number >= 0; FP32 has no such number, the "
              "nearest is 0");
    EXPECT_EQ(config_error("training: {clip_grad: 1e39}"),
              "t.yaml:1:23: training.clip_grad: got 1e39, want a number >= 0; FP32 has no such number, the "
              "nearest is inf");
    EXPECT_EQ(config_error("training: {adam_beta2: 0.99999999999}"),
              "t.yaml:1:24: training.adam_beta2: got 0.99999999999, want a number in [0, 1); FP32 has no "
              "such number, the nearest is 1");
    EXPECT_EQ(config_error("training: {adam_eps: 1e-21}"),
              "t.yaml:1:22: training.adam_eps: got 1e-21, want a number >= 1e-20");
    EXPECT_EQ(config_error("data: {max_bytes: 9223372036854775807}"),
              "t.yaml:1:19: data.max_bytes: got 9223372036854775807, want an integer >= 1; the largest is "
              "9007199254740992");
    EXPECT_EQ(config_error("training: {eval_iters: 9007199254740992}"),
              "t.yaml:1:24: training.eval_iters: got 9007199254740992, want at most 2251799813685248: with "
              "global_batch_size 8 and seq_length 256 they have more tokens than are counted");
}

TEST(Config, AWarmUpLongerThanTheRunShrinksWithAWarning) {
    const std::vector<std::string> rule = {"lr_warmup_style=from_zero"};
    const Config config = parse_config("training: {train_iters: 5, lr_warmup_iters: 9}\n", "t.yaml", rule);
    EXPECT_EQ(config.training.lr_warmup_iters, 5);
    EXPECT_EQ(config.warnings,
              std::vector<std::string>{
                  "training.lr_warmup_iters is 9, and the run has 5 iterations: warm-up takes 5"});
    EXPECT_TRUE(
        parse_config("training: {train_iters: 9, lr_warmup_iters: 9}\n", "t.yaml", rule).warnings.empty());
    // The first 5 of 20 iterations have the learning rates of these 20.
    const Config first =
        parse_config("training: {train_iters: 5, lr_decay_iters: 20, lr_warmup_iters: 9}\n", "t.yaml", rule);
    EXPECT_EQ(first.training.lr_warmup_iters, 9);
    EXPECT_TRUE(first.warnings.empty());
}

// Files of versions that had another rule do not have the key.
TEST(Config, ARuleThatBecameMegatronsIsSaidWhereItsKeyIsNotSet) {
    const Config config = parse_config("training: {lr_warmup_iters: 9}\n", "t.yaml");
    EXPECT_EQ(config.training.lr_warmup_style, LrWarmupStyle::from_zero);
    ASSERT_EQ(config.warnings.size(), 1u);
    EXPECT_EQ(config.warnings[0].rfind("training.lr_warmup_style is not set: step 1 has learning rate 0", 0),
              0u)
        << config.warnings[0];
    EXPECT_TRUE(parse_config("training: {lr_warmup_iters: 0}\n", "t.yaml").warnings.empty());
    const auto warned = [](const Texts& overrides) {
        return parse_config("training: {lr_warmup_iters: 0}\n", "t.yaml", overrides).warnings;
    };
    EXPECT_EQ(warned({"tensor_stats_interval=5"}),
              Texts{"output.tensor_stats_interval has no effect without tensor_stats: true"});
    EXPECT_EQ(warned({"tensor_stats_interval=5", "tensor_stats=true"}), Texts{});
    const std::string global =
        "moe: {moe_router_load_balancing_type: global_aux_loss, moe_aux_loss_coeff: 0.1}\n";
    ASSERT_EQ(parse_config(global, "t.yaml").warnings.size(), 1u);
    EXPECT_EQ(
        parse_config(global, "t.yaml").warnings[0].rfind("moe.moe_global_aux_loss_gradient is not set: ", 0),
        0u);
    EXPECT_TRUE(parse_config(global, "t.yaml", {"moe_global_aux_loss_gradient=sum"}).warnings.empty());
}

TEST(Config, AResumedRunKeepsTheRuleItWasBegunWith) {
    const std::string without = "training: {lr_warmup_iters: 9}\n",
                      with_key = "lr_warmup_style=from_first_step";
    const auto kept = [&](Config saved, Config config) { return keep_old_rules(saved, config); };
    const auto parsed = [&](const std::vector<std::string>& keys) {
        return parse_config(without, "t.yaml", keys);
    };
    const std::vector<std::string> old_rule = {"training.lr_warmup_style: from_first_step"}, none;
    EXPECT_EQ(kept(parsed({}), parsed({})), old_rule);                         // saved before the key
    EXPECT_EQ(kept(parsed({with_key}), parsed({})), old_rule);                 // saved by such a run
    EXPECT_EQ(kept(parsed({"lr_warmup_style=from_zero"}), parsed({})), none);  // saved after it
    EXPECT_EQ(kept(parsed({}), parsed({"lr_warmup_style=from_zero"})), none);  // the user chooses
    EXPECT_EQ(kept(parsed({}), parsed({"lr_warmup_iters=0"})), none);          // matters to nothing
    Config saved = parsed({}), config = parsed({});
    keep_old_rules(saved, config);
    EXPECT_EQ(config.training.lr_warmup_style, LrWarmupStyle::from_first_step);
    EXPECT_EQ(saved.training.lr_warmup_style, LrWarmupStyle::from_first_step);
}

TEST(Config, OverridesWinAndLeafKeysSuffice) {
    const Config config = parse_config("model:\n  num_layers: 4\n", "t.yaml",
                                       {"model.num_layers=6", "hidden_size=512", "data.data_kind=text",
                                        "data_path=[/x, \"/y z\"]", "lr=2e-3"});
    expect_settings(config,
                    {"num_layers: 6", "hidden_size: 512", "data_path: [\"/x\", \"/y z\"]", "lr: 0.002"});
    EXPECT_EQ(config.model.moe_layer_freq.size(), 6u);
}

struct BadCase {
    const char* yaml;
    std::string error;
};
std::string no_recipe(const std::string& got, const std::string& hint) {
    return "t.yaml:1:21: precision.recipe: got " + got +
           ", want one of bf16 | fp8_tensorwise | fp8_blockwise | fp8_flow | fp8_rowwise | mxfp8" + hint;
}

// One field at a time: place, key, what was got, what is wanted.
TEST(Config, FieldErrorsAreExact) {
    const BadCase cases[] = {
        {"model:\n  hiden_size: 256\n",
         "t.yaml:2:3: model.hiden_size: got an unknown key, want one of --help-config; did you mean "
         "'model.hidden_size'"},
        {"model:\n  hidden_size: 1000\n",
         "t.yaml:2:16: model.hidden_size: got 1000, want a multiple of 128 in [128, 1048576] (nearest: 896 "
         "and 1024)"},
        {"model:\n  hidden_size: 100\n",
         "t.yaml:2:16: model.hidden_size: got 100, want a multiple of 128 in [128, 1048576] (nearest: 128)"},
        {"moe: {moe_ffn_hidden_size: 1400}\n",
         "t.yaml:1:28: moe.moe_ffn_hidden_size: got 1400, want a multiple of 128 in [128, 1048576] (nearest: "
         "1280 and 1408)"},
        {"model: {num_layers: 0}", "t.yaml:1:21: model.num_layers: got 0, want an integer in [1, 4096]"},
        {"model: {num_layers: two}", "t.yaml:1:21: model.num_layers: got two, want an integer in [1, 4096]"},
        {"model: {num_layers: 2.5}", "t.yaml:1:21: model.num_layers: got 2.5, want an integer in [1, 4096]"},
        {"model: {num_layers: [2]}", "t.yaml:1:21: model.num_layers: got [2], want an integer in [1, 4096]"},
        {"model:\n  num_layers:\n",
         "t.yaml:2:3: model.num_layers: got nothing, want an integer in [1, 4096]"},
        {"model: {embedding_init_method_std: -1}",
         "t.yaml:1:36: model.embedding_init_method_std: got -1, want a number in [0, 10]"},
        {"parallel: {moe_flex_dispatcher_backend: nvshmem}",
         "t.yaml:1:41: parallel.moe_flex_dispatcher_backend: got nvshmem, want one of nvlink | cuda_ipc | "
         "nccl_window"},
        {"parallel: {hosts: 2}",
         "t.yaml:1:19: parallel.hosts: got 2, want hosts x ranks on each, e.g. 2x4, or \"\""},
        {"parallel: {hosts: 2x0}",
         "t.yaml:1:19: parallel.hosts: got 2x0, want hosts x ranks on each, e.g. 2x4, or \"\""},
        {"model: {qk_layernorm: yes}", "t.yaml:1:23: model.qk_layernorm: got yes, want true or false"},
        {"training: {lr: nan}", "t.yaml:1:16: training.lr: got nan, want a number >= 0"},
        {"training: {adam_beta1: 1.0}", "t.yaml:1:24: training.adam_beta1: got 1.0, want a number in [0, 1)"},
        {"precision: {recipe: fp8flow}", no_recipe("fp8flow", "; did you mean 'fp8_flow'")},
        {"precision: {recipe: flow}", no_recipe("flow", "; did you mean 'fp8_flow'")},
        {"precision: {recipe: fp8}",
         no_recipe("fp8", "; did you mean 'fp8_tensorwise', 'fp8_blockwise', 'fp8_flow' or 'fp8_rowwise'")},
        {"precision: {recipe: mx}", no_recipe("mx", "; did you mean 'mxfp8'")},
        {"training: {train_iters: 1e-1}",
         "t.yaml:1:25: training.train_iters: got 1e-1, want an integer >= 1"},
        {"training: {train_iters: 1.5e0}",
         "t.yaml:1:25: training.train_iters: got 1.5e0, want an integer >= 1"},
        {"training: {train_iters: 1e16}",
         "t.yaml:1:25: training.train_iters: got 1e16, want an integer >= 1"},
        {"training: {train_iters: 10.0}",
         "t.yaml:1:25: training.train_iters: got 10.0, want an integer >= 1"},
        {"precision: {recipe: fp32}", no_recipe("fp32", "")},
        {"modle: {num_layers: 2}",
         "t.yaml:1:1: modle: got an unknown section, want one of model, moe, precision, recompute, schedule, "
         "parallel, training, data, output, validate, profile, kernels, checkpoint; did you mean 'model'"},
        {"num_layers: 2\nmodel: {}",
         "t.yaml:1:1: num_layers: got a key of another section, want model.num_layers"},
        {"moe: {hidden_size: 256}",
         "t.yaml:1:7: moe.hidden_size: got a key of another section, want model.hidden_size"},
        {"model: {num_layers: 2, num_layers: 3}",
         "t.yaml:1:24: model.num_layers: got this key twice, want it once"},
        {"model: {}\nmodel: {}", "t.yaml:2:1: model: got this section twice, want it once"},
        {"model: 5", "t.yaml:1:1: model: got 5, want key: value lines below it"},
        {"model: {qk_nope_head_dim: 128}",
         "t.yaml:1:9: model.qk_nope_head_dim: got an unknown key, want one of --help-config; did you mean "
         "'model.qk_head_dim'"},
        {"parallel: {tensor_model_parallel_size: 2}",
         "t.yaml:1:40: parallel.tensor_model_parallel_size: got 2, want 1 (only data and expert parallelism "
         "are implemented)"},
        {"model: {num_hidden_layers: 2}",
         "t.yaml:1:9: model.num_hidden_layers: got an unknown key, want one of --help-config; did you mean "
         "'model.num_layers'"},
        {"moe: {moe_router_load_balancing_type: [aux_loss, sinkhorn]}",
         "t.yaml:1:39: moe.moe_router_load_balancing_type: got [aux_loss, sinkhorn], want a list of aux_loss "
         "| seq_aux_loss | global_aux_loss"},
        {"recompute: {recompute_modules: [moe_exprt]}",
         "t.yaml:1:32: recompute.recompute_modules: got [moe_exprt], want a list of core_attn | layernorm | "
         "moe_act | moe_expert | moe | shared_experts | mla_up_proj; did you mean 'moe_expert'"},
        {"model: {moe_layer_freq: \"([0]*3+[2])\"}",
         "t.yaml:1:25: model.moe_layer_freq: got ([0]*3+[2]), want N (every N-th layer is MoE), a list of 0 "
         "and 1, or ([0]*3+[1]*58)"},
    };
    for (const auto& bad : cases) EXPECT_EQ(config_error(bad.yaml), bad.error) << bad.yaml;
}

// Rules between fields; without a world size.
TEST(Config, RuleErrorsAreExact) {
    const BadCase cases[] = {
        {"moe: {num_experts: 4, moe_router_topk: 6}",
         "t.yaml:1:40: moe.moe_router_topk: got 6, want at most num_experts = 4"},
        {"moe: {num_experts: 4}\nparallel: {expert_model_parallel_size: 3}",
         "t.yaml:2:40: parallel.expert_model_parallel_size: got 3, want a divisor of num_experts = 4; "
         "nearest 2 or 4"},
        {"model: {num_attention_heads: 6, num_query_groups: 4}",
         "t.yaml:1:51: model.num_query_groups: got 4, want a divisor of num_attention_heads = 6; nearest 3 "
         "or 6"},
        {"moe: {moe_router_topk: 1}",
         "t.yaml:1:24: moe.moe_router_pre_softmax: got false, want true with moe_router_topk = 1: a softmax "
         "over one expert is always 1 and teaches the router nothing"},
        {"moe: {moe_router_norm_topk_prob: false}",
         "t.yaml:1:34: moe.moe_router_norm_topk_prob: got false, want true with moe_router_score_function: "
         "softmax (without normalisation: moe_router_pre_softmax: true)"},
        {"moe: {moe_router_enable_expert_bias: true}",
         "t.yaml:1:38: moe.moe_router_enable_expert_bias: got true, want moe_router_score_function: sigmoid "
         "with it (or false)"},
        {"moe: {num_experts: 8, moe_router_num_groups: 3, moe_router_group_topk: 2}",
         "t.yaml:1:46: moe.moe_router_num_groups: got 3, want a divisor of num_experts = 8; nearest 2 or 4"},
        {"moe: {moe_router_num_groups: 4}",
         "t.yaml:1:30: moe.moe_router_num_groups: got 4 with moe_router_group_topk = 0, want both above 0 or "
         "both 0"},
        {"moe: {num_experts: 8, moe_router_topk: 3, moe_router_num_groups: 4, moe_router_group_topk: 1}",
         "t.yaml:1:40: moe.moe_router_topk: got 3, want at most 2: moe_router_group_topk = 1 groups of 2 "
         "experts"},
        {"moe: {moe_router_load_balancing_type: aux_loss}",
         "t.yaml:1:39: moe.moe_aux_loss_coeff: got 0 coefficients, want one for each of the 1 in "
         "moe_router_load_balancing_type"},
        {"checkpoint: {finetune: true}",
         "t.yaml:1:24: checkpoint.finetune: got true, want checkpoint.load with it: the checkpoint to take "
         "weights from"},
        {"checkpoint: {finetune: true, load: auto}",
         "t.yaml:1:24: checkpoint.finetune: got true with load: auto, want the folder of a checkpoint: auto "
         "goes on with this run's own"},
        {"moe: {moe_row_alignment: 16}",
         "t.yaml:1:26: moe.moe_row_alignment: got 16, want 128 with recipe fp8_flow"},
        {"moe: {moe_row_alignment: 16}\nprecision: {recipe: mxfp8}",
         "t.yaml:1:26: moe.moe_row_alignment: got 16, want 32 or 128 with recipe mxfp8"},
        {"moe: {moe_row_alignment: 1}\nprecision: {recipe: fp8_rowwise}",
         "t.yaml:1:26: moe.moe_row_alignment: got 1, want 16 or 32 or 128 with recipe fp8_rowwise"},
        {"moe: {moe_combine_order: invariant}\nprecision: {recipe: fp8_tensorwise}\nparallel: "
         "{expert_model_parallel_size: 2}",
         "t.yaml:1:26: moe.moe_combine_order: got invariant, want rank with recipe fp8_tensorwise and "
         "expert_model_parallel_size > 1: a scale is the maximum of the experts of a rank"},
        {"precision: {scale_format: fp32}",
         "t.yaml:1:27: precision.scale_format: got fp32, want pow2 with moe_scaling_aware_transpose: true, "
         "which shifts exponents and ignores mantissas of scales (or set moe_scaling_aware_transpose: "
         "false)"},
        {"precision: {recipe: bf16, moe_scaling_aware_transpose: false}",
         "t.yaml:1:56: precision.moe_scaling_aware_transpose: got false, want true with recipe bf16: only "
         "fp8_flow knows this option"},
        {"precision: {mx_rounding: floor}",
         "t.yaml:1:26: precision.mx_rounding: got floor, want rceil with recipe fp8_flow: only mxfp8 knows "
         "this option"},
        {"recompute: {recompute_granularity: full, recompute_modules: [moe]}",
         "t.yaml:1:61: recompute.recompute_modules: got modules, want [] with recompute_granularity: full, "
         "which re-runs whole layers"},
        {"recompute: {recompute_modules: [moe]}",
         "t.yaml:1:32: recompute.recompute_modules: got modules, want recompute_granularity: selective with "
         "them"},
        {"recompute: {recompute_granularity: selective}",
         "t.yaml:1:36: recompute.recompute_modules: got [], want at least one module with "
         "recompute_granularity: selective"},
        {"recompute: {recompute_granularity: selective, recompute_modules: [moe_expert, moe]}",
         "t.yaml:1:66: recompute.recompute_modules: got moe_expert and moe, want one: moe re-runs the "
         "experts too"},
        {"recompute: {recompute_granularity: selective, recompute_modules: [moe_expert, moe_act]}",
         "t.yaml:1:66: recompute.recompute_modules: got moe_expert and moe_act, want one: moe_expert re-runs "
         "the activation too"},
        {"recompute: {saved_rows: received}",
         "t.yaml:1:25: recompute.saved_rows: got received, want sorted unless recompute_modules has "
         "moe_expert"},
        {"precision: {recipe: bf16}\nrecompute: {recompute_granularity: selective, recompute_modules: "
         "[moe_expert], saved_rows: none}",
         "t.yaml:2:92: recompute.saved_rows: got none, want sorted with recipe bf16: only fp8_flow knows "
         "this option"},
        {"precision: {moe_permute_padding_for_fp8: false}\nrecompute: {recompute_granularity: selective, "
         "recompute_modules: [moe_expert], saved_rows: received}",
         "t.yaml:2:92: recompute.saved_rows: got received, want sorted with moe_quantize_before_dispatch: "
         "false or moe_permute_padding_for_fp8: false"},
        {"model: {attention: false}\nprecision: {fp8_attention_linears: true}",
         "t.yaml:2:36: precision.fp8_attention_linears: got true, want false with attention: false: there is "
         "nothing to project"},
        {"model: {attention: false}\nrecompute: {recompute_granularity: selective, recompute_modules: "
         "[core_attn]}",
         "t.yaml:2:66: recompute.recompute_modules: got core_attn, want it left out with attention: false"},
        {"recompute: {recompute_granularity: selective, recompute_modules: [shared_experts]}",
         "t.yaml:1:66: recompute.recompute_modules: got shared_experts, want it left out with "
         "moe_shared_expert_intermediate_size = 0"},
        {"moe: {moe_shared_expert_gate: true}",
         "t.yaml:1:31: moe.moe_shared_expert_gate: got true, want false with "
         "moe_shared_expert_intermediate_size = 0: there is no shared expert"},
        {"model: {num_layers: 3, moe_layer_freq: [0, 1]}",
         "t.yaml:1:40: model.moe_layer_freq: got 2 entries, want num_layers = 3"},
        {"training: {lr: 1.0e-4, min_lr: 1.0e-3}",
         "t.yaml:1:32: training.min_lr: got 0.001, want at most lr = 0.0001"},
        {"training: {micro_batch_size: 3, global_batch_size: 8}",
         "t.yaml:1:52: training.global_batch_size: got 8, want a multiple of micro_batch_size 3 x world size "
         "1 = 3; nearest 6 or 9"},
        {"data: {data_kind: text}",
         "t.yaml:1:19: data.data_path: got no path, want files, folders or globs, e.g. --set "
         "data.data_path=/my/texts"},
        {"model: {vocab_size: 128}\ndata: {data_kind: text, data_path: /x}",
         "t.yaml:1:21: model.vocab_size: got 128, want at least 257 for data_kind: text"},
        {"validate: {recipes: [fp8_flow]}",
         "t.yaml:1:21: validate.recipes: got a list without bf16, want bf16 in it: it is the baseline of "
         "every comparison"},
    };
    for (const auto& bad : cases) EXPECT_EQ(config_error(bad.yaml), bad.error) << bad.yaml;
}

TEST(Config, WorldSizeErrorsAreExact) {
    const std::string yaml =
        "moe: {num_experts: 8}\nparallel: {expert_model_parallel_size: 4}\n"
        "training: {global_batch_size: 12}\n";
    EXPECT_EQ(config_error(yaml), "");
    EXPECT_EQ(config_error(yaml, {}, 4), "");
    EXPECT_EQ(
        config_error(yaml, {}, 6),
        "t.yaml:2:40: parallel.expert_model_parallel_size: got 4, want a divisor of the world size 6 (world "
        "= expert parallel x data parallel); nearest expert_model_parallel_size 2, or mpirun -n 4 or 8");
    EXPECT_EQ(config_error(yaml, {}, 8),
              "t.yaml:3:31: training.global_batch_size: got 12, want a multiple of micro_batch_size 1 x "
              "world size 8 = 8; nearest 8 or 16");
}

TEST(Config, HostsHoldAllRanks) {
    const std::string yaml = "parallel: {hosts: 2x4}\n";
    EXPECT_EQ(config_error(yaml, {}, 8), "");
    EXPECT_EQ(config_error(yaml, {}, 4),
              "t.yaml:1:19: parallel.hosts: got 2x4, want as many ranks as the job has, 4");
    const Config config = parse_config(yaml, "t.yaml");
    EXPECT_EQ(config.parallel.hosts, 2);
    EXPECT_EQ(config.parallel.ranks_per_host, 4);
}

TEST(Config, TwoLevelsWantWholeHostsOrOne) {
    const auto problem = [](const char* hosts, int64_t sharing, const char* dispatcher, int64_t world) {
        return config_error(
            fmt::format(
                "parallel: {{hosts: {}, expert_model_parallel_size: {}, moe_token_dispatcher_type: {}}}\n",
                hosts, sharing, dispatcher),
            {"global_batch_size=48", "micro_batch_size=1"}, world);
    };
    EXPECT_EQ(problem("2x4", 2, "hierarchical", 8), "");
    EXPECT_EQ(problem("4x2", 8, "hierarchical", 8), "");
    EXPECT_EQ(problem("2x3", 2, "flex", 6), "");
    const std::string text = problem("2x3", 2, "hierarchical", 6);
    expect_contains(text,
                    "hierarchical with 2x3 hosts and expert_model_parallel_size 2, want ranks that share "
                    "the experts inside a host, or on whole hosts");
}

TEST(Config, AllProblemsAtOnceAndNoneTwice) {
    // num_experts has no usable value, so the rules that read it stay silent; everything else is reported.
    EXPECT_EQ(
        config_error(
            "model:\n  hidden_size: 100\n  colour: red\nmoe:\n  num_experts: many\n  moe_router_topk: 9\n"
            "  moe_row_alignment: 32\n",
            {"lr=fast"}),
        "t.yaml:2:16: model.hidden_size: got 100, want a multiple of 128 in [128, 1048576] (nearest: 128)\n"
        "t.yaml:3:3: model.colour: got an unknown key, want one of --help-config\n"
        "t.yaml:5:16: moe.num_experts: got many, want an integer in [1, 4096]\n"
        "--set: training.lr: got fast, want a number >= 0\n"
        "t.yaml:7:22: moe.moe_row_alignment: got 32, want 128 with recipe fp8_flow");
}

TEST(Config, OverrideErrorsAreExact) {
    EXPECT_EQ(config_error("model: {}", {"num_layers"}), "--set: got num_layers, want section.key=value");
    EXPECT_EQ(config_error("model: {}", {"moe.num_layers=2"}),
              "--set: moe.num_layers: got a key of another section, want model.num_layers");
    EXPECT_EQ(
        config_error("model: {}", {"top_k=2"}),
        "--set: top_k: got an unknown key, want one of --help-config; did you mean 'moe.moe_router_topk'");
    EXPECT_EQ(config_error("model: {}", {"num_layers="}),
              "--set: model.num_layers: got nothing, want an integer in [1, 4096]");
    EXPECT_TRUE(config_error("model: {}", {"num_layers=*x"})
                    .starts_with("--set model.num_layers:1:1: got text that is no YAML"));
}

TEST(Config, MissingFile) {
    const auto error = [](const std::string& path) {
        return error_of(ExitCode::usage, [&] { load_config(path); });
    };
    EXPECT_EQ(error("no/such.yaml"), "no/such.yaml: got no such file, want a configuration (see configs/)");
    EXPECT_EQ(error(kConfigs),
              kConfigs + ": got something other than a file, want a configuration (see configs/)");
}

// Every shipped file, at the number of ranks it is meant for; its dump reads back to the same configuration.
TEST(Config, ShippedFilesAreLegalAndRoundTrip) {
    struct Shipped {
        const char* file;
        std::vector<int64_t> ranks;
        std::vector<std::string> overrides;
    };
    const std::vector<Shipped> shipped = {
        {"quickstart.yaml", {2}, {}},
        {"test.yaml", {1, 2, 4}, {}},
        {"text.yaml", {2, 4}, {"data.data_path=/my/texts"}},
        {"small_4gpu.yaml", {4}, {}},
        {"small_4gpu.yaml", {1, 2, 4}, {"expert_model_parallel_size=1"}},
        {"qwen3_30b_a3b.yaml", {8, 16}, {}},
        {"mixtral_8x7b.yaml", {8, 16}, {}},
        {"deepseek_v2_lite.yaml", {2, 4}, {}},
        {"moonlight_16b_a3b.yaml", {8, 16}, {}},
        {"deepseek_v3.yaml", {1024}, {}},
        {"deepseek_small.yaml", {1, 2, 4}, {}},
        {"deepseek_small.yaml", {1}, {"model.q_lora_rank=null"}},
        {"layer_deepseek_v3.yaml", {4}, {}},
        {"layer_deepseek_v2_lite.yaml", {4}, {}},
        {"layer_qwen3_235b_a22b.yaml", {4}, {}},
        {"layer_qwen3_30b_a3b.yaml", {4}, {}},
        {"layer_mixtral_8x7b.yaml", {4}, {}},
    };
    for (const auto& [file, ranks, overrides] : shipped) {
        for (const int64_t world : ranks) {
            SCOPED_TRACE(fmt::format("{} at {} ranks", file, world));
            const Config config = load_config(kConfigs + file, overrides, world);
            const Config again = parse_config(dump_config(config), "dump", {}, world);
            EXPECT_EQ(diff_configs(config, again), std::vector<std::string>{});
            EXPECT_EQ(config.model.moe_layer_freq, again.model.moe_layer_freq);
            EXPECT_EQ(dump_config(config), dump_config(again));
        }
    }
}

TEST(Config, DumpSurvivesAwkwardText) {
    Config config = parse_config("data: {data_kind: text, data_path: [x]}", "t.yaml");
    config.data.data_path = {"a \"b\" \\ c", "# no comment", "*glob?[x]", "d: e", "null", "\xc3\xa9"};
    config.training.lr = 0.1 + 0.2;
    const Config again = parse_config(dump_config(config), "dump");
    EXPECT_EQ(again.data.data_path, config.data.data_path);
    EXPECT_EQ(again.training.lr, config.training.lr);
}

TEST(Config, DiffNamesTheKey) {
    const Config a = parse_config("model: {}", "t.yaml");
    const Config b = parse_config("model: {num_layers: 3}\ntraining: {seed: 7}", "t.yaml");
    EXPECT_EQ(diff_configs(a, b),
              (std::vector<std::string>{"model.num_layers: 2 | 3", "training.seed: 1234 | 7"}));
    EXPECT_EQ(diff_configs(a, a), std::vector<std::string>{});
}

// `validate` runs one file under several recipes: what the new recipe does not know falls back to its
// default.
TEST(Config, WithRecipeDropsForeignOptionsOnly) {
    const Config flow =
        parse_config("precision: {moe_permute_padding_for_fp8: false, fp8_format: hybrid}", "t.yaml");
    const Config blockwise = with_recipe(flow, Recipe::fp8_blockwise);
    EXPECT_NO_THROW(check_config(blockwise));
    EXPECT_EQ(diff_configs(flow, blockwise),
              (std::vector<std::string>{"precision.recipe: fp8_flow | fp8_blockwise",
                                        "precision.moe_permute_padding_for_fp8: false | true"}));
    const Config bf16 = with_recipe(flow, Recipe::bf16);
    EXPECT_NO_THROW(check_config(bf16));
    EXPECT_EQ(bf16.precision.fp8_format, Fp8Format::e4m3);
    EXPECT_EQ(diff_configs(flow, with_recipe(flow, Recipe::fp8_flow)), std::vector<std::string>{});
}

TEST(Config, TableIsConsistent) {
    std::set<std::string> keys;
    const Config defaults;
    for (const auto& field : config_fields()) {
        EXPECT_TRUE(keys.insert(field.key).second) << field.key << " is in two sections";
        EXPECT_FALSE(field.doc.empty()) << field.key;
        const auto& sections = config_sections();
        EXPECT_NE(std::find(sections.begin(), sections.end(), field.section), sections.end()) << field.key;
    }
    const std::string help = help_config();
    for (const auto& key : keys) EXPECT_NE(help.find("  " + key + ": "), std::string::npos) << key;
}

}  // namespace
}  // namespace fp8flow
