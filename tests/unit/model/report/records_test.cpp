// SPDX-License-Identifier: MIT
// metrics.jsonl of an earlier run: what is kept of it, and that a hostile one neither crashes, hangs nor
// grows.
#include "model/report/records.h"
#include "model/report/run_report.h"

#include "tests/support/files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <sstream>

namespace fp8flow {

using namespace report;

namespace {

size_t kept(const std::string& text, int64_t steps = 100) {
    std::istringstream lines(text);
    return parse_records(lines, steps).size();
}

TEST(Records, AreKeptUpToTheStepWithoutWhatIsDamaged) {
    const std::string two = "{\"iteration\": 1, \"lm loss\": 2.5}\n{\"iteration\": 2}\n";
    EXPECT_EQ(kept(two), 2u);
    EXPECT_EQ(kept(two, 1), 1u);
    EXPECT_EQ(kept(two + "{\"iteration\": 2, \"held-out loss\": 2}\n{\"iteration\": 3}"), 4u);
    EXPECT_EQ(kept(two + "{\"iter\n{\"iteration\": 3}\n"), 3u);
    EXPECT_EQ(kept(two + "{\"iteration\": 7}\n{\"iteration\": 3}\n", 3), 3u);
    EXPECT_EQ(kept(two + "{\"iteration\": 1}\n"), 2u);                    // out of order
    EXPECT_EQ(kept(two + "{\"iteration\": 3, \"iteration\": 3}\n"), 2u);  // twice
    EXPECT_EQ(kept(two + "\n{\"iteration\": 3}\n"), 3u);
    std::string endless;
    for (int i = 0; i < 1000; ++i) endless += "{\"iteration\": 1}\n";
    EXPECT_EQ(kept(endless), 4u);
}

TEST(Records, IterationsWithoutAStepAreNamed) {
    const auto missing = [](const std::string& text, int64_t steps) {
        std::istringstream lines(text);
        return missing_iterations(parse_records(lines, steps), steps);
    };
    const std::string run = "{\"type\": \"run\", \"iteration\": 1}\n";
    const auto step = [](int64_t iteration) {
        return fmt::format("{{\"type\": \"step\", \"iteration\": {}}}\n", iteration);
    };
    EXPECT_EQ(missing(run + step(1) + step(2) + step(3), 3), "");
    EXPECT_EQ(missing(run + step(1) + step(3) + step(7), 9), "2, 4-6, 8-9");
    EXPECT_EQ(missing(run + step(1) + step(2).substr(0, 9) + step(3), 3), "2-3");  // two lines in one
    EXPECT_EQ(missing(step(1) + "{\"type\": \"evaluation\", \"iteration\": 2}\n", 2), "2");
    EXPECT_EQ(missing("", 4), "1-4");
    EXPECT_EQ(missing("", 0), "");
    // One that branched off another run after 100 iterations.
    EXPECT_EQ(missing("{\"type\": \"run\", \"iteration\": 101}\n" + step(101) + step(103), 103), "102");
    std::string odd;
    for (int i = 1; i < 40; i += 2) odd += step(i);
    EXPECT_EQ(missing(odd, 39), "2, 4, 6, 8, 10, 12, 14, 16, ...");
    EXPECT_EQ(missing(step(1), int64_t{1} << 62), "2-4611686018427387904");
}

TEST(Records, DeepAndLongLinesAreLeftOut) {
    const TemporaryFolder folder;
    const std::string first = "{\"iteration\": 1}\n", deep(200000, '[');
    const std::string nested = "{\"iteration\": 2, \"a\": " + deep + std::string(200000, ']') + "}\n";
    EXPECT_EQ(kept(first + nested + "{\"iteration\": 3}\n"), 2u);
    EXPECT_EQ(kept(first + "{\"iteration\": 2, \"a\": \"" + std::string(1 << 20, 'x') + "\"}\n" + first), 2u);
    folder.write("out/metrics.jsonl", first + nested);
    const OutputFolder out(folder.path("out"));
    const auto records = records_until(out, 5);
    ASSERT_EQ(records.size(), 1u);
    open_metrics(out, records);
    EXPECT_EQ(read_whole(folder.path("out/metrics.jsonl")), "{\"iteration\":1,\"type\":\"step\"}\n");
}

// A run of an earlier version that is resumed goes on with one form.
TEST(Records, OldNamesAreReadAsTodays) {
    std::istringstream lines(
        R"({"TFLOP/s per rank":0.5,"casts":8,"commit":"0deab13","grad norm":3.5,"iteration":1,"iteration-time":0.25,)"
        R"("lm loss":4.25,"load":[{"cv":0.5,"dead":1,"layer":1,"max":1.5,"min":0.5},{"layer":3,"max":2}],)"
        R"("machine":{"gpu clock hertz":null,"ranks":2},"stage seconds":{"backward/fc2 dgrad":0.125},)"
        R"("wire bytes":{"combine":1,"dispatch":2,"routing":3}})"
        "\n"
        R"({"bits":2.0,"held-out loss":1.5,"iteration":1})"
        "\n"
        R"({"iteration":2,"lm loss":4.0,"load":7,"type":"step"})");
    const auto records = parse_records(lines, 5);
    ASSERT_EQ(records.size(), 3u);
    EXPECT_EQ(
        records[0],
        nlohmann::json::parse(
            R"({"type":"step","tflops_per_gpu":0.5,"casts":8,"commit":"0deab13","grad_norm":3.5,"iteration":1,)"
            R"("seconds":0.25,"lm_loss":4.25,"moe_layers":[1,3],"load_max":[1.5,2],"load_min":[0.5,null],)"
            R"("load_cv":[0.5,null],"dead_experts":[1,null],"machine_gpu_clock_hertz":null,"machine_ranks":2,)"
            R"("stage_seconds_backward_fc2_dgrad":0.125,"wire_bytes_combine":1,"wire_bytes_dispatch":2,)"
            R"("wire_bytes_routing":3})"));
    EXPECT_EQ(records[1],
              nlohmann::json::parse(R"({"type":"evaluation","bits":2.0,"held_out_loss":1.5,"iteration":1})"));
    EXPECT_EQ(records[2], nlohmann::json::parse(R"({"iteration":2,"lm loss":4.0,"load":7,"type":"step"})"));
}

TEST(Records, SayWhereTheRoutersLossesAreThoseOfAnEarlierVersion) {
    using Records = std::vector<nlohmann::json>;
    const nlohmann::json
        old = {{"type", "step"}, {"iteration", 2}, {"load_balancing_loss", 0.02}, {"z_loss", nullptr}},
        dense = {{"type", "step"}, {"iteration", 3}, {"load_balancing_loss", 0}, {"z_loss", 0.0}},
        today = {{"type", "step"},
                 {"iteration", 4},
                 {"load_balancing_loss", 1.02},
                 {"z_loss_by_layer", nlohmann::json::array()}};
    EXPECT_EQ(note_of_old_losses(Records{dense, today}), "");
    expect_contains(note_of_old_losses(Records{old, dense, today}), "up to iteration 2 metrics.jsonl has ");
}

TEST(Records, ComeFromARegularFileOnly) {
    const TemporaryFolder folder;
    folder.write("out/x", "");
    const OutputFolder out(folder.path("out"));
    const std::string path = folder.path("out/metrics.jsonl");
    EXPECT_TRUE(records_until(out, 5).empty());
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    EXPECT_TRUE(records_until(out, 0).empty());
    expect_contains(error_of(ExitCode::output, [&] { records_until(out, 5); }),
                    path + ": not a regular file");
    ASSERT_EQ(::unlink(path.c_str()), 0);
    ASSERT_EQ(::symlink("/dev/zero", path.c_str()), 0);
    expect_contains(error_of(ExitCode::output, [&] { records_until(out, 5); }),
                    path + ": not a regular file");
}

}  // namespace
}  // namespace fp8flow
