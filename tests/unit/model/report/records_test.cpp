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

TEST(Records, AreKeptUpToTheStepAndTheFirstDamage) {
    const std::string two = "{\"iteration\": 1, \"lm loss\": 2.5}\n{\"iteration\": 2}\n";
    EXPECT_EQ(kept(two), 2u);
    EXPECT_EQ(kept(two, 1), 1u);
    EXPECT_EQ(kept(two + "{\"iteration\": 2, \"held-out loss\": 2}\n{\"iteration\": 3}"), 4u);
    EXPECT_EQ(kept(two + "{\"iter\n{\"iteration\": 3}\n"), 2u);
    EXPECT_EQ(kept(two + "{\"iteration\": 1}\n"), 2u);                    // out of order
    EXPECT_EQ(kept(two + "{\"iteration\": 3, \"iteration\": 3}\n"), 2u);  // twice
    EXPECT_EQ(kept(two + "\n{\"iteration\": 3}\n"), 2u);
    std::string endless;
    for (int i = 0; i < 1000; ++i) endless += "{\"iteration\": 1}\n";
    EXPECT_EQ(kept(endless), 4u);
}

TEST(Records, DeepAndLongLinesEndTheReading) {
    const TemporaryFolder folder;
    const std::string first = "{\"iteration\": 1}\n", deep(200000, '[');
    const std::string nested = "{\"iteration\": 2, \"a\": " + deep + std::string(200000, ']') + "}\n";
    EXPECT_EQ(kept(first + nested), 1u);
    EXPECT_EQ(kept(first + "{\"iteration\": 2, \"a\": \"" + std::string(1 << 20, 'x') + "\"}\n"), 1u);
    folder.write("out/metrics.jsonl", first + nested);
    const OutputFolder out(folder.path("out"));
    const auto records = records_until(out, 5);
    ASSERT_EQ(records.size(), 1u);
    open_metrics(out, records);
    EXPECT_EQ(read_whole(folder.path("out/metrics.jsonl")), "{\"iteration\":1}\n");
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
