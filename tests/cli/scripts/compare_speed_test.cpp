// SPDX-License-Identifier: MIT
// scripts/compare_builds.py speed with two pretended programs. Their bench reports given times.
#include "tests/cli/command.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

// Writes a program. Each call of its bench writes one row with the next of these times.
std::string program(const TemporaryFolder& folder, const std::string& name,
                    const std::vector<double>& times) {
    const std::string path = folder.path(name);
    std::string text = "#!/bin/bash\ncase $(cat " + path + ".calls 2> /dev/null | wc -l) in\n";
    for (size_t i = 0; i < times.size(); ++i) text += fmt::format("{}) us={} ;;\n", i, times[i]);
    text += "*) echo 'error: no more times' >&2; exit 3 ;;\nesac\necho >> " + path + R"sh(.calls
while [[ $1 != --out ]]; do shift; done
cat > "$2/bench.json" <<END
[{"op": "add", "shape": "T=1", "us": $us, "us_sustained": null, "commit": "1234567", "gpu": "", "gpus": 0, "machine": {"cpu": "one"}}]
END
)sh";
    folder.write(name, text);
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
}

CommandResult compare(const TemporaryFolder& folder, const std::vector<double>& before,
                      const std::vector<double>& after) {
    return RunningCommand({"python3", FP8FLOW_SOURCE_DIR "/scripts/compare_builds.py", "speed",
                           program(folder, "old", before), program(folder, "new", after), "--json",
                           folder.path("report.json"), "--", "--suite", "small"},
                          folder.path())
        .wait(60);
}

TEST(CompareSpeed, SlowerBeyondTheBarAndTheSpreadOfOldIsSaid) {
    const TemporaryFolder folder;
    const CommandResult result = compare(folder, {100, 101}, {103, 104});
    EXPECT_EQ(result.status, 1) << result.err;
    expect_contains(result.out, "SLOWER");
    const auto report = read_json(folder.path("report.json"));
    ASSERT_EQ(report["runs"].size(), 4u);
    EXPECT_EQ(report["runs"][1]["program"], "new");
    EXPECT_EQ(report["runs"][1]["rows"]["add T=1"]["burst"], 103);
    EXPECT_EQ(report["runs"][3]["commit"], "1234567");
}

TEST(CompareSpeed, WithinTheSpreadOfOldIsNotSlower) {
    const TemporaryFolder folder;
    EXPECT_EQ(compare(folder, {100, 104}, {103, 104}).status, 0);
}

TEST(CompareSpeed, ATurnThatFailsEndsItAndKeepsWhatWasMeasured) {
    const TemporaryFolder folder;
    expect_contains(failure(3, compare(folder, {100, 100}, {100})), "no more times");
    EXPECT_EQ(read_json(folder.path("report.json"))["runs"].size(), 3u);
}

}  // namespace
}  // namespace fp8flow
