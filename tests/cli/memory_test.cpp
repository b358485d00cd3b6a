// SPDX-License-Identifier: MIT
// An allocation fails, whichever it is: exit status 12 with the sizes, on every number of ranks, and no hang.
#include "tests/cli/command.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace fp8flow {
namespace {

constexpr double kSeconds = 30;

// Two steps with an evaluation and a checkpoint on `ranks` ranks, of which the last has no memory from its
// allocation `first` on.
CommandResult run(int ranks, int64_t first, const std::string& out) {
    Texts line =
        test_run("train", out,
                 {"training.train_iters=2", "checkpoint.save_interval=1", "parallel.peer_deadline_seconds=10",
                  fmt::format("parallel.expert_model_parallel_size={}", ranks)},
                 {"--overwrite"});
    line = with_faults(ranks > 1 ? mpirun_line(ranks, line) : with({FP8FLOW_EXECUTABLE}, line),
                       {"FAULT_RANK=" + (ranks > 1 ? std::to_string(ranks - 1) : ""),
                        fmt::format("FAULT_ALLOCATION={}", first)});
    return RunningCommand(line, "").wait(kSeconds);
}

TEST(Memory, EveryAllocationThatFailsIsAnErrorWithItsSize) {
    TemporaryFolder folder;
    for (const int ranks : {1, 2}) {
        const int64_t stride = ranks == 1 ? 1 : 6;  // mpirun takes a second to end a job
        int64_t first = 1;
        for (;; first += stride) {
            SCOPED_TRACE(fmt::format("allocation {} of rank {} of {}", first, ranks - 1, ranks));
            const CommandResult result = run(ranks, first, folder.path("out"));
            ASSERT_FALSE(result.timed_out) << result.err;
            if (result.status == 0) break;
            ASSERT_EQ(result.status, static_cast<int>(ExitCode::memory)) << result.err;
            const Texts errors = error_lines(result.err);
            ASSERT_EQ(errors.size(), 1u) << result.err;
            expect_contains(errors[0], "out of host memory: asked for ");
        }
        EXPECT_GT(first, 15) << "few allocations: is the library loaded?";
    }
}

// Terabytes, of which none is taken.
TEST(Memory, ARunThatWillNotFitIsRefusedBeforeItTakesAnything) {
    TemporaryFolder folder;
    for (const char* command : {"train", "validate", "profile"})
        for (const bool forced : {false, true}) {
            SCOPED_TRACE(fmt::format("{}, forced {}", command, forced));
            Texts line = with_settings({FP8FLOW_EXECUTABLE, command, config_file("test"), "--backend",
                                        "reference", "--out", folder.path("large"), "--overwrite"},
                                       {"model.hidden_size=65536", "moe.moe_ffn_hidden_size=1048576"});
            if (forced) line.emplace_back("--force");
            // one that goes on has no memory from its first allocation on
            line = with_faults(line, {"FAULT_RANK=", "FAULT_ALLOCATION=1"});
            const CommandResult result = RunningCommand(line, "").wait(kSeconds);
            ASSERT_EQ(result.status, static_cast<int>(ExitCode::memory)) << result.err;
            const Texts errors = error_lines(result.err);
            ASSERT_EQ(errors.size(), 1u) << result.err;
            expect_contains(errors[0], forced ? "out of host memory: asked for "
                                              : "this run will not fit: a rank needs ");
            if (forced)
                expect_contains(result.out, "warning: this run will not fit, and is started with --force: ");
            else
                for (const char* text : {"free within", "master weights (FP32) ",
                                         "parallel.expert_model_parallel_size (larger)", "; --force"})
                    expect_contains(errors[0], text);
        }
}

// Rows of all ranks on one: the first step is done again, and everything says so.
TEST(Memory, WhatARedoneStepLostIsReported) {
    TemporaryFolder folder;
    const Texts line = test_run(
        "train", folder.path("out"),
        {"training.train_iters=3", "parallel.expert_model_parallel_size=2", "model.seq_length=256",
         "moe.moe_router_topk=1", "moe.moe_router_pre_softmax=true", "moe.moe_router_force_biased=4"});
    const CommandResult result = succeeded(RunningCommand(mpirun_line(2, line), "").wait(kSeconds));
    expect_contains(result.out, " iteration 1 is repeated (1 time, ");
    expect_contains(result.out, "  redone         1 of 3 iterations, 1 time in all: ");
    const auto memory = read_json(folder.path("out") + "/memory.json");
    EXPECT_EQ(memory.at("redone").at("iterations observed"), 3);
    EXPECT_EQ(memory.at("redone").at("iterations redone"), 1);
    EXPECT_GT(memory.at("redone").at("seconds lost").get<double>(), 0);
    EXPECT_EQ(memory.at("routed rows of a layer, most used"), 2 * 2 * 256);
    EXPECT_GE(memory.at("routed rows of a layer, reserved"), 2 * 2 * 256);
    EXPECT_GE(memory.at("workspace, reserved"), memory.at("workspace, used"));
    const std::vector<nlohmann::json> steps = metrics_of(folder.path("out"), "step");
    EXPECT_EQ(steps.at(0).at("redone"), 1);
    EXPECT_EQ(steps.at(0).at("redo_seconds"), memory.at("redone").at("seconds lost"));
    EXPECT_EQ(steps.at(1).at("redo_seconds"), 0);
}

}  // namespace
}  // namespace fp8flow
