// SPDX-License-Identifier: MIT
// `fp8flow validate`: verdicts and exit status, its files, and a planted fault that has to turn the verdict.
#include "tests/cli/command.h"
#include "tests/cli/provenance.h"
#include "tests/support/files.h"
#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {
namespace {

using nlohmann::json;
using Texts = std::vector<std::string>;

// A limit between the interval of the sound flow and that of the faulted one.
Texts validate(const std::string& out, const Texts& settings) {
    Texts line = {"validate", config_file("test"), "--backend", "reference", "--out", out};
    for (const char* setting : {"training.train_iters=40", "validate.recipes=[bf16, fp8_flow]",
                                "validate.max_relative_loss_error=0.02"}) {
        line.push_back("--set");
        line.push_back(setting);
    }
    for (const std::string& setting : settings) {
        line.push_back("--set");
        line.push_back(setting);
    }
    return line;
}

struct Outcome {
    CommandResult run;
    std::map<std::string, json> arms;  // of validate.json
};

Outcome outcome_of(int ranks, const std::string& out, const Texts& settings) {
    Outcome outcome;
    outcome.run = ranks == 1 ? fp8flow_alone(validate(out, settings))
                             : fp8flow_on_ranks(ranks, validate(out, settings));
    EXPECT_EQ(outcome.run.err, "");
    const json result = json::parse(read_whole(out + "/validate.json"));
    EXPECT_EQ(result.at("bar"), 0.02);
    expect_provenance(result, "fp8flow validate ", ranks);
    EXPECT_GT(result.at("noise floor").get<double>(), 0.0);
    for (const json& arm : result.at("arms"))
        EXPECT_LT(arm.at("saved bytes used"), arm.at("saved bytes reserved")) << arm;
    for (const json& arm : result.at("arms")) outcome.arms[arm.at("arm").get<std::string>()] = arm;
    return outcome;
}

std::string last_line(const std::string& text) {
    const Texts lines = lines_of(text);
    return lines.empty() ? "" : lines.back();
}

TEST(Validate, SoundFlowPassesAndPlantedFaultMisses) {
    for (const int ranks : {1, 2}) {
        TemporaryFolder folder;
        const Outcome sound = outcome_of(ranks, folder.path("sound"), {});
        EXPECT_EQ(sound.run.status, 0) << sound.run.out;
        EXPECT_EQ(last_line(sound.run.out), "verdict: pass");
        EXPECT_EQ(sound.arms.at("fp8_flow").at("verdict"), "pass");
        EXPECT_LT(sound.arms.at("bf16 control").at("max relative error"), 0.01);
        EXPECT_GT(sound.arms.at("bf16 control").at("max relative error"), 0.0);

        ::setenv("FP8FLOW_FAULT", "wrong_scale_index", 1);
        const Outcome faulted = outcome_of(ranks, folder.path("faulted"), {});
        ::unsetenv("FP8FLOW_FAULT");
        EXPECT_EQ(faulted.run.status, 1) << faulted.run.out;
        EXPECT_EQ(last_line(faulted.run.out), "verdict: miss");
        EXPECT_EQ(faulted.arms.at("fp8_flow").at("verdict"), "miss");
        const auto difference = [](const Outcome& outcome) {
            return outcome.arms.at("fp8_flow").at("training_difference").at("mean_percent").get<double>();
        };
        EXPECT_GT(difference(faulted), 2 * difference(sound));
    }
}

TEST(Validate, AnUnknownFaultIsRefused) {
    TemporaryFolder folder;
    ::setenv("FP8FLOW_FAULT", "wrong_scale", 1);
    const CommandResult run = fp8flow_alone(validate(folder.path("out"), {}));
    ::unsetenv("FP8FLOW_FAULT");
    EXPECT_EQ(run.status, 2);
    expect_contains(run.err, "FP8FLOW_FAULT: got 'wrong_scale', the only known fault is wrong_scale_index");
}

TEST(Validate, AnIntervalOverTheLimitIsInconclusiveAndSaysWhatWouldDecide) {
    TemporaryFolder folder;
    const CommandResult run = fp8flow_alone(
        validate(folder.path("out"), {"training.train_iters=8", "validate.max_relative_loss_error=2e-3"}));
    EXPECT_EQ(run.status, 1);
    EXPECT_EQ(last_line(run.out), "verdict: inconclusive");
    expect_contains(run.out, "tokens would decide");
    expect_contains(run.out, "noise within one run only");
}

TEST(Validate, WithoutAControlArmThereIsNoNoiseFloor) {
    TemporaryFolder folder;
    Texts line = validate(folder.path("out"), {"training.train_iters=6", "validate.control_arm=false",
                                               "validate.warmup_iters=2", "validate.recipes=[bf16]"});
    line.push_back("--ablate");
    const CommandResult run = fp8flow_alone(line);
    EXPECT_LE(run.status, 1) << run.err;
    expect_contains(run.out, "no noise floor: no control arm ran");
    const json result = json::parse(read_whole(folder.path("out/validate.json")));
    EXPECT_TRUE(result.at("noise floor").is_null()) << result.at("noise floor");
    EXPECT_EQ(result.at("arms").size(), 8u);  // bf16 and seven switches
    // the typed line, ready for a shell
    expect_contains(result.at("command").get<std::string>(), "--set 'validate.recipes=[bf16]'");
}

TEST(Validate, WritesCurvesPictureAndCompactProgress) {
    TemporaryFolder folder;
    const CommandResult run =
        fp8flow_alone(validate("out", {"training.train_iters=7", "validate.recipes=[bf16, fp8_flow, mxfp8]"}),
                      folder.path());
    EXPECT_LE(run.status, 1) << run.err;
    std::set<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path("out")))
        files.insert(entry.path().filename());
    EXPECT_EQ(files, (std::set<std::string>{".lock", "config.yaml", "loss.jsonl", "report.html",
                                            "validate.json", "validate.log"}));
    const json page = expect_report_page(read_whole(folder.path("out/report.html")));
    EXPECT_EQ(page.at("loss").size(), 2u);
    EXPECT_EQ(page.at("loss_dots").at("rows").size(), 3u);
    EXPECT_EQ(page.at("routing").size(), 4u) << "with the control arm";
    EXPECT_EQ(lines_of(read_whole(folder.path("out/validate.log"))), lines_of(run.out));
    std::map<std::string, int> steps;
    for (const std::string& line : lines_of(read_whole(folder.path("out/loss.jsonl")))) {
        const json record = json::parse(line);
        EXPECT_GT(record.at("lm_loss").get<double>(), 0.0);
        ++steps[record.at("arm")];
    }
    EXPECT_EQ(steps,
              (std::map<std::string, int>{{"bf16", 7}, {"bf16 control", 7}, {"fp8_flow", 7}, {"mxfp8", 7}}));
    for (const std::string& line : lines_of(run.out))
        if (line.find("| iteration") != std::string::npos) {
            EXPECT_LE(line.size(), 110u) << line;
            expect_contains(line, "ETA");
        }
    expect_contains(run.out, " mxfp8          | iteration 7/7 | lm loss");
}

}  // namespace
}  // namespace fp8flow
