// SPDX-License-Identifier: MIT
// Weights in and out of the program: a run that starts from an exported model begins where that one ended, on
// another number of ranks and with the configuration read from its config.json; and what the user is told
// when the weights do not fit.
#include "model/safetensors/tensor_set.h"

#include "tests/cli/command.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

namespace fp8flow {
namespace {

// Qwen3's layers at the size of a test; nothing moves, so that every step has the loss of the weights.
const Texts kModel = {"model.qk_layernorm=true", "moe.moe_shared_expert_intermediate_size=0",
                      "training.train_iters=2",  "training.lr=0",
                      "training.min_lr=0",       "training.eval_iters=0",
                      "precision.recipe=bf16",   "moe.moe_combine_order=invariant"};

Texts train(const std::string& out, const Texts& settings, const Texts& more = {}) {
    return test_run("train", out, settings, more);
}

double first_loss(const std::string& out) { return losses_of(out).at(0); }

TEST(Weights, ARunStartsFromAnExportedModel) {
    const TemporaryFolder folder;
    const std::string a = folder.path("a"), b = folder.path("b"), c = folder.path("c");
    Texts settings = with(kModel, {"parallel.expert_model_parallel_size=2"});
    const CommandResult exported = succeeded(fp8flow_on_ranks(2, train(a, settings, {"--export", "f32"})));
    expect_contains(exported.out, "weights: written to " + a + "/hf/");
    EXPECT_TRUE(std::filesystem::exists(a + "/hf/model-00002-of-00002.safetensors"));
    EXPECT_TRUE(std::filesystem::exists(a + "/hf/config.json"));

    settings = with(kModel, {"training.seed=99"});
    succeeded(fp8flow_alone(train(b, settings)));
    settings.back() = "training.seed=1234";  // of the data; the weights come from the file
    const CommandResult loaded =
        succeeded(fp8flow_alone(train(c, settings, {"--weights", a + "/hf", "--hf-config", a + "/hf"})));
    expect_contains(loaded.out, "weights: " + a + "/hf (");
    EXPECT_NEAR(first_loss(c), first_loss(a), 1e-6);
    EXPECT_GT(std::abs(first_loss(b) - first_loss(a)), 1e-4);

    // The run's own configuration begins with the same weights, and says what a file of keys cannot hold.
    const std::string own = read_whole(c + "/config.yaml");
    expect_contains(own, "# Written by: fp8flow train " + config_file("test") + " --backend reference");
    expect_contains(own, "pretrained_checkpoint: \"" + a + "/hf\"\n");
    const CommandResult again = succeeded(fp8flow_alone(
        {"train", c + "/config.yaml", "--backend", "reference", "--out", folder.path("again")}));
    EXPECT_EQ(losses_of(folder.path("again")), losses_of(c));
    // It names the backend, too, in the commands that come next.
    expect_contains(again.out, "profile " + c + "/config.yaml --out " + folder.path("again") +
                                   "_profile --backend reference");
    // Every arm of validate starts from it.
    const CommandResult compared =
        fp8flow_alone({"validate", c + "/config.yaml", "--out", folder.path("v"), "--set",
                       "validate.recipes=[bf16]", "--set", "validate.warmup_iters=0", "--quiet"});
    EXPECT_LE(compared.status, 1) << compared.err;
    const auto first = nlohmann::json::parse(lines_of(read_whole(folder.path("v/loss.jsonl"))).at(0));
    EXPECT_NEAR(first.at("lm_loss").get<double>(), losses_of(c).at(0), 0.01);
    // and its runs, done as they are, are not those of another start
    const CommandResult without =
        fp8flow_alone({"validate", c + "/config.yaml", "--out", folder.path("v"), "--set",
                       "validate.recipes=[bf16]", "--set", "validate.warmup_iters=0", "--set",
                       "checkpoint.pretrained_checkpoint=''", "--resume", "auto"});
    expect_contains(failure(2, without), "the runs differ in checkpoint.pretrained_checkpoint");

    // An export on fewer ranks leaves no file of this one, and neither does --overwrite without an export.
    settings = kModel;
    succeeded(fp8flow_alone(train(a, settings, {"--export", "bf16", "--overwrite"})));
    const auto models_in = [&](const std::string& out) { return names_in(out + "/hf").size(); };
    EXPECT_EQ(models_in(a), 3u);
    expect_contains(failure(2, fp8flow_alone(train(a, settings, {"--weights", a + "/hf", "--overwrite"}))),
                    "--overwrite would remove what --weights " + a + "/hf reads");
    succeeded(fp8flow_alone(train(a, settings, {"--overwrite"})));
    EXPECT_EQ(models_in(a), 0u);
}

// Both name the weights: an error on the command line, a warning if the run's own config.yaml has the
// checkpoint.
TEST(Weights, WeightsAndACheckpointAreNotBothRead) {
    const TemporaryFolder folder;
    const std::string a = folder.path("a");
    succeeded(fp8flow_alone(train(a, kModel, {"--export", "bf16", "--resume", "auto"})));
    const Texts evaluate = {"evaluate", a, "--set", "training.eval_iters=1"};
    const CommandResult run = succeeded(fp8flow_alone(with(evaluate, {"--weights", a + "/hf"})));
    expect_contains(run.out, "warning: checkpoint.load = auto (" + a + "/config.yaml:");
    expect_contains(run.out, "weights " + a + "/hf");
    for (const Texts& key : {Texts{"--weights", "W"}, {"--set", "checkpoint.pretrained_checkpoint=W"}})
        expect_contains(failure(2, fp8flow_alone(with(with(evaluate, {"--set", "checkpoint.load=L"}), key))),
                        "checkpoint.load = L and --weights (checkpoint.pretrained_checkpoint) W");
}

// What of a model no training changes: tokenizer, special tokens, how to generate.
TEST(Weights, AnExportCarriesWhatCameIn) {
    const TemporaryFolder folder;
    const std::string a = folder.path("a"), b = folder.path("b"), c = folder.path("c");
    succeeded(fp8flow_alone(train(a, kModel, {"--export", "bf16"})));
    auto json = read_json(a + "/hf/config.json");
    EXPECT_FALSE(json.contains("eos_token_id"));
    const nlohmann::json special = {{"bos_token_id", 1},
                                    {"eos_token_id", {2, 3}},
                                    {"pad_token_id", nullptr},
                                    {"output_router_logits", false}};
    json.update(special);
    std::ofstream(a + "/hf/config.json") << json.dump();
    const std::map<std::string, std::string> files = {{"tokenizer.json", "{\"model\": {}}"},
                                                      {"tokenizer_config.json", "{}"},
                                                      {"generation_config.json", "{\"do_sample\": true}"},
                                                      {"merges.txt", "a b\n"}};
    for (const auto& [name, text] : files) std::ofstream(a + "/hf/" + name) << text;
    std::ofstream(a + "/hf/README.md") << "of that model";
    const CommandResult exported = succeeded(fp8flow_alone(
        train(b, kModel, {"--weights", a + "/hf", "--hf-config", a + "/hf/config.json", "--export", "fp8"})));
    expect_contains(exported.out, "weights: written to " + b +
                                      "/hf/ with generation_config.json, merges.txt, tokenizer.json, "
                                      "tokenizer_config.json\n");
    const auto carried = read_json(b + "/hf/config.json");
    for (const auto& [key, value] : special.items()) EXPECT_EQ(carried.at(key), value) << key;
    EXPECT_TRUE(carried.contains("quantization_config"));
    for (const auto& [name, text] : files) EXPECT_EQ(read_whole(b + "/hf/" + name), text);
    EXPECT_FALSE(std::filesystem::exists(b + "/hf/README.md"));
    // A run that resumes knows the model from its configuration; an export without one leaves nothing of it.
    Texts longer = with(kModel, {"training.train_iters=3", "checkpoint.pretrained_checkpoint=" + a + "/hf"});
    succeeded(fp8flow_alone(train(c, longer, {"--export", "bf16"})));
    EXPECT_EQ(read_whole(c + "/hf/tokenizer.json"), files.at("tokenizer.json"));
    succeeded(fp8flow_alone(train(c, kModel, {"--export", "bf16", "--overwrite"})));
    EXPECT_FALSE(std::filesystem::exists(c + "/hf/tokenizer.json"));
}

TEST(Weights, AnExportOfAnEarlierIterationIsSaid) {
    const TemporaryFolder folder;
    const std::string a = folder.path("a");
    Texts settings = with(kModel, {"checkpoint.save_interval=1"});
    succeeded(fp8flow_alone(train(a, settings, {"--export", "bf16"})));
    settings.emplace_back("training.train_iters=3");
    const CommandResult resumed =
        succeeded(fp8flow_alone(train(a, settings, {"--resume", "auto", "--quiet"})));
    expect_contains(resumed.out, "warning: " + a + "/hf has the weights of an earlier iteration");
    settings.back() = "training.train_iters=4";
    const CommandResult exported =
        succeeded(fp8flow_alone(train(a, settings, {"--resume", "auto", "--quiet", "--export", "bf16"})));
    EXPECT_EQ(exported.out.find("earlier iteration"), std::string::npos);
}

// A.X-K1's attention is not ours: what is proposed is accepted.
TEST(Weights, AFamilyThatTrainDoesNotKnowIsRefusedWithWhatIsPossible) {
    const TemporaryFolder folder;
    const std::string json = folder.write(
        "config.json",
        R"({"model_type":"axk1","num_hidden_layers":2,"hidden_size":128,"vocab_size":64,"rms_norm_eps":1e-6,)"
        R"("moe_intermediate_size":128,"intermediate_size":256,"n_routed_experts":4,"num_experts_per_tok":2,)"
        R"("n_group":1,"first_k_dense_replace":1})");
    const std::string yaml = folder.write("c.yaml", "training: {global_batch_size: 1}");
    const auto run = [&](const Texts& more) {
        const Texts line = with_settings(
            {"train", yaml, "--hf-config", json, "--backend", "reference", "--out", folder.path("a")},
            {"training.train_iters=1", "model.seq_length=16", "data.synthetic_order=1",
             "training.eval_iters=0"});
        return fp8flow_alone(with(line, more));
    };
    expect_contains(run({}).err, "train does with --set model.attention=false, without attention");
    EXPECT_EQ(run({"--set", "model.attention=false"}).status, 0);
    const CommandResult weights = run({"--weights", folder.path()});
    EXPECT_EQ(weights.status, 2);
    expect_contains(weights.err, "train cannot begin with its weights, as --weights says");
    EXPECT_EQ(weights.err.find("--set"), std::string::npos) << weights.err;
}

// State divided over the ranks: the exported files are those of whole state, byte by byte, and each rank
// takes its slices of a loaded model.
TEST(Weights, DividedStateIsExportedAndLoadedAsAWhole) {
    const TemporaryFolder folder;
    for (const char* ranks_sharing : {"1", "2"}) {
        SCOPED_TRACE(ranks_sharing);
        std::string losses[2];
        for (const bool divided : {false, true}) {
            const Texts settings = with(
                kModel, {std::string("parallel.expert_model_parallel_size=") + ranks_sharing,
                         "training.lr=0.001", "precision.recipe=fp8_flow", "training.main_grads_dtype=bf16",
                         std::string("training.use_distributed_optimizer=") + (divided ? "true" : "false")});
            const std::string out = folder.path(std::string(ranks_sharing) + (divided ? "divided" : "whole"));
            succeeded(fp8flow_on_ranks(2, train(out, settings, {"--export", "f32"})));
            const std::string model = folder.path(std::string(ranks_sharing) + "whole/hf");
            succeeded(fp8flow_on_ranks(2, train(out + "_loaded", settings, {"--weights", model})));
            losses[divided] = std::to_string(first_loss(out + "_loaded"));
        }
        EXPECT_EQ(losses[0], losses[1]);
        const std::string whole = folder.path(std::string(ranks_sharing) + "whole/hf/"),
                          divided = folder.path(std::string(ranks_sharing) + "divided/hf/");
        int compared = 0;
        for (const std::string& name : names_in(whole)) {
            if (!name.ends_with(".safetensors")) continue;
            ++compared;
            EXPECT_TRUE(read_whole(whole + name) == read_whole(divided + name)) << name;
        }
        EXPECT_EQ(compared, std::stoi(ranks_sharing));
    }
}

TEST(Weights, WhatDoesNotFitIsListed) {
    const TemporaryFolder folder;
    const std::string a = folder.path("a");
    succeeded(fp8flow_alone(train(a, kModel, {"--export", "bf16"})));
    Texts settings = with(kModel, {"moe.num_experts=8", "model.ffn_hidden_size=128"});
    const std::string result =
        failure(10, fp8flow_alone(train(folder.path("b"), settings, {"--weights", a + "/hf"})));
    settings = with(kModel, {"model.rotary_base=500000"});
    const CommandResult other =
        succeeded(fp8flow_alone(train(folder.path("d"), settings, {"--weights", a + "/hf"})));
    expect_contains(other.out,
                    "hf/config.json: rope_theta: model.rotary_base is 10000 there and 500000 here");
    EXPECT_EQ(other.out.find("warning: " + a), other.out.rfind("warning: " + a));  // and nothing else
    for (const char* part :
         {"tensor \"model.layers.0.mlp.gate_proj.weight\" is BF16[256, 128], want [128, 128]",
          "tensor \"model.layers.1.mlp.gate.weight\" is BF16[4, 128], want [8, 128]",
          "tensor \"model.layers.1.mlp.experts.7.down_proj.weight\" is missing, want [128, 128]"})
        expect_contains(result, part);
    expect_contains(
        failure(10, fp8flow_alone(train(folder.path("c"), kModel, {"--weights", folder.path("none")}))),
        "none: No such file");
}

TEST(Weights, AnExportThatNobodyCouldReadIsRefusedBeforeTraining) {
    const TemporaryFolder folder;
    expect_contains(failure(2, fp8flow_alone({"train", config_file("test"), "--backend", "reference", "--out",
                                              folder.path("a"), "--export", "bf16"})),
                    "export: no family computes what this configuration says");
    failure(2, fp8flow_alone(train(folder.path("b"), kModel, {"--export", "int4"})));
    const Texts line = train(folder.path("c"), kModel, {"--hf-config", folder.path("none.json")});
    expect_contains(failure(2, fp8flow_alone(line)),
                    "--hf-config " + folder.path("none.json") + ": No such file");
}

}  // namespace
}  // namespace fp8flow
