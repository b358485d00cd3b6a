// SPDX-License-Identifier: MIT
// Warnings about the data of a run, and what a terminal shows of the log.
#include "model/report/run_report.h"

#include "tests/support/files.h"

#include <gtest/gtest.h>

namespace fp8flow {

using namespace report;

namespace {

// So many samples in each part, of 8 tokens.
class Sized : public data::TokenSource {
public:
    Sized(int64_t train, int64_t held_out, std::vector<std::string> warnings = {})
        : train_(train), held_out_(held_out), warnings_(std::move(warnings)) {}
    std::vector<std::string> warnings() const override { return warnings_; }
    int64_t vocab_size() const override { return 257; }
    int64_t seq_length() const override { return 8; }
    int64_t num_tokens(data::Split split) const override { return 8 * samples_per_epoch(split); }
    int64_t samples_per_epoch(data::Split split) const override {
        return split == data::Split::train ? train_ : held_out_;
    }
    std::string description() const override { return "sized"; }
    uint64_t fingerprint() const override { return 0; }
    void sample(data::Split, int64_t, std::span<int32_t>) const override {}

private:
    int64_t train_, held_out_;
    std::vector<std::string> warnings_;
};

TEST(RunReport, NamesARunAfterItsConfigurationOrFolder) {
    EXPECT_EQ(run_name("configs/quickstart.yaml", "models/Qwen1.5-MoE/config.json"), "quickstart");
    EXPECT_EQ(run_name("runs/lr_1e-4.5/config.yaml", ""), "lr_1e-4.5");
    EXPECT_EQ(run_name("runs/a/../b/config.yaml", ""), "b");
    EXPECT_EQ(run_name("", "models/Qwen1.5-MoE/config.json"), "Qwen1.5-MoE");
    EXPECT_EQ(run_name("config.yaml", ""), std::filesystem::current_path().filename());
    EXPECT_EQ(run_name("", ""), "a model");
}

TEST(RunReport, WarnsOfDataThatAreTooSmallForTheRun) {
    Config config;
    config.data.data_kind = DataKind::text;
    config.training.train_iters = 100;
    config.training.global_batch_size = 10;
    config.training.eval_iters = 0;
    EXPECT_TRUE(data_warnings(config, Sized(900, 100)).empty());
    EXPECT_TRUE(data_warnings(config, Sized(data::kUnlimited, data::kUnlimited)).empty());
    const auto small = data_warnings(config, Sized(50, 5));
    ASSERT_EQ(small.size(), 1u);
    expect_contains(small[0], "reads its data 20 times");
    expect_contains(small[0], "lower training.train_iters to 5");
    EXPECT_TRUE(data_warnings(config, Sized(900, 0)).empty());
    // Every kind of data that ends: an evaluation of 80 windows that reads 3 again and again.
    for (const DataKind kind : {DataKind::text, DataKind::shards, DataKind::megatron}) {
        config.data.data_kind = kind;
        config.training.eval_iters = 8;
        EXPECT_TRUE(data_warnings(config, Sized(900, 80)).empty());
        const auto again = data_warnings(config, Sized(900, 35));
        ASSERT_EQ(again.size(), 1u);
        expect_contains(again[0],
                        "an evaluation reads 80 windows and the held-out part has 35, so it reads them "
                        "2.29 times: hold more out, or lower training.eval_iters to 3");
        expect_contains(data_warnings(config, Sized(900, 3))[0],
                        "26.7 times: hold more out, or lower "
                        "training.eval_iters to 1");
        config.training.eval_iters = 1;
        EXPECT_TRUE(data_warnings(config, Sized(900, 3))[0].ends_with("3.33 times: hold more out"));
    }
}

TEST(RunReport, PassesTheWarningsOfTheDataOn) {
    Config config;
    config.training.eval_iters = 0;
    const Sized data(900, 100, {"one file is not read"});
    EXPECT_EQ(data_warnings(config, data), std::vector<std::string>{"warning: one file is not read"});
    // Text has 257 ids; a vocabulary that does not fit its padding is that of another tokeniser.
    config.data.data_kind = DataKind::text;
    for (const int64_t vocab : {257, 300, 384}) {
        config.model.vocab_size = vocab;
        EXPECT_TRUE(data_warnings(config, Sized(90000, 100)).empty()) << vocab;
    }
    config.model.vocab_size = 1000;
    const auto wide = data_warnings(config, Sized(90000, 100));
    ASSERT_EQ(wide.size(), 1u);
    expect_contains(wide[0],
                    "warning: text has ids 0 to 256 and model.vocab_size is 1000: text is read byte by "
                    "byte");
    expect_contains(wide[0], "preprocess_data.py");
}

TEST(RunReport, AQuietTerminalShowsWarningsAndResults) {
    TemporaryFolder folder;
    const OutputFolder out(folder.path("out"));
    RunLog log(0, Detail::quiet);
    testing::internal::CaptureStdout();
    log.line("a step");
    log.line("exchange: y\nwarning: x");
    log.open(out, "train.log");
    log.line("another step");
    log.result("done: 2");
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "warning: x\ndone: 2\n");
    EXPECT_EQ(read_whole(folder.path("out/train.log")),
              "a step\nexchange: y\nwarning: x\nanother step\ndone: 2\n");
}

TEST(RunReport, RedoneStepsAndTheirCapacity) {
    RedoneSteps steps;
    StepResult result{.step = 4, .seconds = 2, .redone = 2, .redo_seconds = 0.5};
    steps.add(result);
    steps.add({.seconds = 3});
    EXPECT_EQ(redone_text(steps), "1 of 2 iterations, 2 times in all: 0.5 s lost, 10.0 % of their time");
    Config config;
    config.model.seq_length = 64;
    config.moe.moe_router_topk = 2;
    expect_contains(capacity_text(config, result, {.layer = 256, .together = 512}),
                    "256 rows per layer (2.00 x an even share) and 512 for all layers");
}

TEST(RunReport, PluralsLossesAndReservedMemory) {
    Config config;
    EXPECT_EQ(evaluation_text(config, 2.0), "held-out loss 2.0000 nats, perplexity 7.389");
    config.data.data_kind = DataKind::text;
    EXPECT_EQ(evaluation_text(config, 2.0), "held-out loss 2.0000 nats = 2.8854 bits per byte");
    EXPECT_EQ(counted(1, "micro-batch"), "1 micro-batch");
    EXPECT_EQ(counted(2, "micro-batch"), "2 micro-batches");
    EXPECT_EQ(counted(2, "rank"), "2 ranks");
    MemoryUse memory;
    memory.parameters = {{"master", 1024}, {"moments", 2048}};
    memory.saved = {{"fc1", 1}, {"fc2", 2}};
    memory.saved_sums = {.reserved = 4096, .used = 1024};
    memory.workspace = {.reserved = 5120, .used = 6};
    memory.capacity = {.layer = 7, .together = 8};
    memory.most_wanted = {.layer = 9, .together = 10};
    memory.activations = 11;
    EXPECT_EQ(memory_text(memory),
              "3.00 KiB of parameters, gradients, moments; reserved: 4.00 KiB for saved "
              "activations (1.00 KiB used), 5.00 KiB of workspace");
    EXPECT_EQ(memory_json(memory), nlohmann::json::parse(R"({
        "parameters": {"master": 1024, "moments": 2048}, "parameters, sum": 3072,
        "saved for backward": {"fc1": 1, "fc2": 2}, "saved for backward, sum": 3,
        "saved for backward, reserved": 4096, "saved for backward, used": 1024,
        "workspace, reserved": 5120, "workspace, used": 6,
        "routed rows of a layer, reserved": 7, "routed rows of all layers, reserved": 8,
        "routed rows of a layer, most used": 9, "routed rows of all layers, most used": 10,
        "activations, peak": 11})"));
}

}  // namespace
}  // namespace fp8flow
