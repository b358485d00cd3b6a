// SPDX-License-Identifier: MIT
// `fp8flow evaluate`: a trained model again, on other ranks than it was trained on.
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace fp8flow {
namespace {

using Texts = std::vector<std::string>;

// Learns two texts of a period of 8 by heart.
class TrainedOnAPeriod : public ::testing::Test {
protected:
    static void SetUpTestSuite() {
        folder_ = std::make_unique<TemporaryFolder>();
        for (const char* name : {"a", "b"})
            for (int i = 0; i < 12; ++i)
                folder_->write(name + ("/" + std::to_string(i)) + ".txt", period(name[0], 500 + i));
        const CommandResult trained = fp8flow_on_ranks(
            2,
            with_settings({"train", config_file("test"), "--backend", "reference", "--out", "run"},
                          {"data.data_kind=text", "data.data_path=[a,b]", "model.vocab_size=257",
                           "data.file_extensions=[.txt]", "parallel.expert_model_parallel_size=2",
                           "training.train_iters=60", "checkpoint.save_interval=60"}),
            folder_->path());
        ASSERT_EQ(trained.status, 0) << trained.err;
    }
    static void TearDownTestSuite() { folder_.reset(); }

    // "abcdefgh", or "bcdefghi", again and again.
    static std::string period(char first, int length) {
        std::string text;
        for (int i = 0; i < length; ++i) text += static_cast<char>(first + i % 8);
        return text;
    }
    static CommandResult run(int ranks, Texts line) {
        line.insert(line.end(), {"--backend", "reference", "--set",
                                 "parallel.expert_model_parallel_size=" + std::to_string(ranks)});
        return ranks == 1 ? fp8flow_alone(line, folder_->path())
                          : fp8flow_on_ranks(ranks, line, folder_->path());
    }
    static nlohmann::json evaluation(int ranks, const Texts& more = {}) {
        Texts line = {"evaluate", "run", "--out", "evaluation" + std::to_string(++evaluations_)};
        line.insert(line.end(), more.begin(), more.end());
        const CommandResult result = run(ranks, line);
        EXPECT_EQ(result.status, 0) << result.err;
        return nlohmann::json::parse(read_whole(folder_->path(line[3] + "/evaluate.json")));
    }
    static std::unique_ptr<TemporaryFolder> folder_;
    static int evaluations_;
};
int TrainedOnAPeriod::evaluations_ = 0;
std::unique_ptr<TemporaryFolder> TrainedOnAPeriod::folder_;

TEST_F(TrainedOnAPeriod, EvaluationIsThatOfTheRunOnAnyRanks) {
    const double of_run =
        metrics_of(folder_->path("run"), "evaluation").back().at("held_out_loss").get<double>();
    for (const int ranks : {1, 2, 4}) {
        SCOPED_TRACE(ranks);
        const auto all = evaluation(ranks).at("sources").at(0);
        EXPECT_EQ(all.at("source"), "all");
        EXPECT_EQ(all.at("windows"), 16);
        EXPECT_EQ(all.at("tokens"), 16 * 32);
        EXPECT_NEAR(all.at("loss").get<double>(), of_run, ranks == 2 ? 1e-6 : 1e-3);
        EXPECT_NEAR(all.at("bits_per_byte").get<double>(), all.at("loss").get<double>() / std::log(2), 1e-9);
        EXPECT_GT(all.at("next_token_accuracy").get<double>(), 0.9);
    }
    const CommandResult in_run = run(2, {"evaluate", "run", "--quiet"});
    EXPECT_EQ(in_run.status, 0) << in_run.err;
    expect_contains(in_run.out, "weights " + folder_->path("run/checkpoints/"));
    expect_contains(in_run.out, "written: " + folder_->path("run/evaluate.json"));
    EXPECT_TRUE(std::filesystem::exists(folder_->path("run/config.yaml")));
}

// All held-out windows once, in micro-batches of which the last is not full.
TEST_F(TrainedOnAPeriod, SourcesAddUpToAll) {
    const auto sources = evaluation(2, {"--windows", "1e6"}).at("sources");
    ASSERT_EQ(sources.size(), 3u);
    EXPECT_EQ(sources[1].at("source"), "a");
    double loss = 0, tokens = 0;
    for (const int i : {1, 2}) {
        tokens += sources[i].at("tokens").get<double>();
        loss += sources[i].at("loss").get<double>() * sources[i].at("tokens").get<double>();
    }
    EXPECT_GE(sources[0].at("tokens").get<double>(), tokens);  // a window crosses from a to b
    EXPECT_LE(sources[0].at("tokens").get<double>(), tokens + 32);
    EXPECT_NEAR(sources[0].at("loss").get<double>(), loss / tokens, 0.1);
    EXPECT_NE(sources[1].at("loss"), sources[2].at("loss"));
}

TEST_F(TrainedOnAPeriod, WhatIsMissingIsSaid) {
    const auto error = [](const Texts& line) { return run(1, line).err; };
    expect_contains(error({"evaluate"}), "want a run's folder, a configuration");
    expect_contains(error({"evaluate", "run", "--set", "training.eval_iters=0"}), "with --windows");
    const CommandResult fresh = run(1, {"evaluate", config_file("test"), "--out", "fresh"});
    EXPECT_EQ(fresh.status, 0) << fresh.err;
    expect_contains(fresh.out, "warning: the weights are as initialised");
    expect_contains(fresh.out, "unknown");  // bits per byte
}

}  // namespace
}  // namespace fp8flow
