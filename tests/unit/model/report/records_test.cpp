// SPDX-License-Identifier: MIT
// metrics.jsonl of an earlier run: what is kept of it, and that a hostile one neither crashes nor
// hangs.
#include "model/report/records.h"

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

std::string step(int64_t iteration) {
    return fmt::format("{{\"type\": \"step\", \"iteration\": {}}}\n", iteration);
}

TEST(Records, AreKeptUpToTheStepWithoutWhatIsDamaged) {
    const std::string two = step(1) + step(2);
    EXPECT_EQ(kept(two), 2u);
    EXPECT_EQ(kept(two, 1), 1u);
    EXPECT_EQ(kept(two + "{\"type\": \"evaluation\", \"iteration\": 2}\n" + step(3)), 4u);
    EXPECT_EQ(kept(two + "{\"iter\n" + step(3)), 3u);
    EXPECT_EQ(kept(two + "{\"iteration\": 2, \"lm loss\": 2.5}\n"), 2u);  // of version 0.2
    EXPECT_EQ(kept(two + step(7) + step(3), 3), 3u);
    EXPECT_EQ(kept(two + step(1)), 2u);                                                       // out of order
    EXPECT_EQ(kept(two + "{\"type\": \"step\", \"iteration\": 3, \"iteration\": 3}\n"), 2u);  // twice
    EXPECT_EQ(kept(two + "\n" + step(3)), 3u);
}

TEST(Records, IterationsWithoutAStepAreCounted) {
    const auto missing = [](const std::string& text, int64_t steps) {
        std::istringstream lines(text);
        return missing_iterations(parse_records(lines, steps), steps);
    };
    const std::string run = "{\"type\": \"run\", \"iteration\": 1}\n";
    EXPECT_EQ(missing(run + step(1) + step(2) + step(3), 3), 0);
    EXPECT_EQ(missing(run + step(1) + step(3) + step(7), 9), 6);
    EXPECT_EQ(missing(run + step(1) + step(2).substr(0, 9) + step(3), 3), 2);  // two lines in one
    EXPECT_EQ(missing(step(1) + "{\"type\": \"evaluation\", \"iteration\": 2}\n", 2), 1);
    EXPECT_EQ(missing("", 4), 4);
    EXPECT_EQ(missing("", 0), 0);
    // One that branched off another run after 100 iterations.
    EXPECT_EQ(missing("{\"type\": \"run\", \"iteration\": 101}\n" + step(101) + step(103), 103), 1);
}

TEST(Records, DeepLinesAreLeftOut) {
    const std::string deep(200000, '[');
    const std::string nested =
        "{\"type\": \"step\", \"iteration\": 2, \"a\": " + deep + std::string(200000, ']') + "}\n";
    EXPECT_EQ(kept(step(1) + nested + step(3)), 2u);
}

TEST(Records, NamesAreFlat) {
    EXPECT_EQ(flat(nlohmann::json::parse(
                  R"({"iteration":1,"machine":{"gpu clock hertz":null},"stage_seconds":{"forward/fc1":2}})")),
              nlohmann::json::parse(
                  R"({"iteration":1,"machine_gpu_clock_hertz":null,"stage_seconds_forward_fc1":2})"));
}

TEST(Records, ComeFromARegularFileOnly) {
    const TemporaryFolder folder;
    folder.write("out/x", "");
    const std::string path = folder.path("out/metrics.jsonl");
    EXPECT_TRUE(read_records(path, 5).empty());
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    EXPECT_TRUE(read_records(path, 0).empty());
    expect_contains(error_of(ExitCode::output, [&] { read_records(path, 5); }),
                    path + ": not a regular file");
    ASSERT_EQ(::unlink(path.c_str()), 0);
    ASSERT_EQ(::symlink("/dev/zero", path.c_str()), 0);
    expect_contains(error_of(ExitCode::output, [&] { read_records(path, 5); }),
                    path + ": not a regular file");
}

}  // namespace
}  // namespace fp8flow
