// SPDX-License-Identifier: MIT
// `fp8flow validate`: verdicts and exit status, its files, and a planted fault that has to turn the verdict.
#include "model/report/table.h"
#include "tests/cli/command.h"
#include "tests/cli/provenance.h"
#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <thread>

namespace fp8flow {
namespace {

using nlohmann::json;

// A limit between the interval of the sound flow and that of the faulted one.
Texts validate(const std::string& out, const Texts& settings) {
    const Texts all = {"training.train_iters=40", "validate.recipes=[bf16, fp8_flow]",
                       "validate.max_relative_loss_error=0.02"};
    return test_run("validate", out, with(all, settings));
}

struct Outcome {
    CommandResult run;
    std::map<std::string, json> arms;  // of validate.json
};

Outcome outcome_of(int ranks, const std::string& out, const Texts& more) {
    Outcome outcome;
    const Texts line = with(validate(out, {}), more);
    outcome.run = ranks == 1 ? fp8flow_alone(line) : fp8flow_on_ranks(ranks, line);
    EXPECT_EQ(outcome.run.err, "");
    const json result = read_json(out + "/validate.json");
    EXPECT_EQ(result.at("bar"), 0.02);
    expect_provenance(result, "fp8flow validate ", ranks);
    EXPECT_GT(result.at("noise floor").get<double>(), 0.0);
    for (const json& arm : result.at("arms"))
        EXPECT_LT(arm.at("saved bytes used"), arm.at("saved bytes reserved")) << arm;
    for (const json& arm : result.at("arms")) outcome.arms[arm.at("arm").get<std::string>()] = arm;
    const std::vector<json> steps = metrics_of(out + "/runs/fp8_flow-1234", "step");
    const json &arm = outcome.arms.at("fp8_flow"), &last = steps.back();
    EXPECT_EQ(arm.at("casts per step"), last.at("casts"));
    EXPECT_EQ(arm.at("wire bytes per step"), last.at("wire_bytes_routing").get<double>() +
                                                 last.at("wire_bytes_dispatch").get<double>() +
                                                 last.at("wire_bytes_combine").get<double>());
    std::vector<double> seconds;
    for (const json& step : steps) seconds.push_back(step.at("seconds"));
    EXPECT_EQ(arm.at("seconds per step"), report::spread_of(seconds).median);
    return outcome;
}

std::string last_line(const std::string& text) {
    const Texts lines = lines_of(text);
    return lines.empty() ? "" : lines.back();
}

// The faulted run is on two ranks, which share the experts, and has the sound arm of the other.
TEST(Validate, SoundFlowPassesAndPlantedFaultMisses) {
    TemporaryFolder folder;
    const Outcome sound = outcome_of(1, folder.path("sound"), {});
    EXPECT_EQ(sound.run.status, 0) << sound.run.out;
    EXPECT_EQ(last_line(sound.run.out), "verdict: pass");
    const Outcome faulted = outcome_of(
        2, folder.path("faulted"),
        {"--set", "parallel.expert_model_parallel_size=2", "--plugin",
         FP8FLOW_BINARY_DIR "/tests/libplanted_faults.so", "--arm", "wrong_scales@fp8_flow:flow=wrong_scales",
         "--arm", "half_range@fp8_flow:flow=half_range"});
    EXPECT_EQ(faulted.run.status, 1) << faulted.run.out;
    EXPECT_EQ(last_line(faulted.run.out), "verdict: miss");
    for (const Outcome* outcome : {&sound, &faulted}) {
        EXPECT_EQ(outcome->arms.at("fp8_flow").at("verdict"), "pass");
        EXPECT_LT(outcome->arms.at("bf16 control").at("max relative error"), 0.01);
        EXPECT_GT(outcome->arms.at("bf16 control").at("max relative error"), 0.0);
    }
    const json& fault = faulted.arms.at("wrong_scales");
    EXPECT_EQ(fault.at("verdict"), "miss");
    const json& difference = fault.at("training_difference");
    EXPECT_GT(difference.at("interval_percent").at(0), difference.at("detectable_percent"));
    EXPECT_NE(faulted.arms.at("half_range").at("losses"), faulted.arms.at("fp8_flow").at("losses"));
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
    const CommandResult run = fp8flow_alone(
        with(validate(folder.path("out"),
                      {"training.train_iters=6", "validate.control_arm=false", "validate.warmup_iters=2",
                       "validate.recipes=[bf16]", "output.record_routing=" + folder.path("experts")}),
             {"--ablate"}));
    EXPECT_LE(run.status, 1) << run.err;
    EXPECT_FALSE(std::filesystem::exists(folder.path("experts"))) << "a file is of one run, here are eight";
    expect_contains(run.out, "No noise floor: no control arm ran");
    const json result = read_json(folder.path("out/validate.json"));
    EXPECT_TRUE(result.at("noise floor").is_null()) << result.at("noise floor");
    EXPECT_EQ(result.at("arms").size(), 8u);  // bf16 and seven switches
    // the typed line, ready for a shell
    expect_contains(result.at("command").get<std::string>(), "--set 'validate.recipes=[bf16]'");
}

TEST(Validate, WithoutAComparedArmTheVerdictIsInconclusive) {
    TemporaryFolder folder;
    const CommandResult run = fp8flow_alone(validate(
        folder.path("out"), {"training.train_iters=1", "validate.recipes=[bf16]", "validate.control_arm=none",
                             "validate.warmup_iters=0", "checkpoint.load=nowhere"}));
    EXPECT_EQ(run.status, 1) << run.err;
    EXPECT_EQ(last_line(run.out),
              "verdict: inconclusive: no arm was compared with bf16 (validate.recipes, --arm)");
    expect_contains(run.out, "fp8flow profile ");  // not --ablate
    expect_contains(run.out, "warning: checkpoint.load = \"nowhere\" has no effect");
}

TEST(Validate, AHeldOutLossThatIsNotFiniteIsADivergedRun) {
    TemporaryFolder folder;
    const CommandResult run = fp8flow_alone(
        validate(folder.path("out"),
                 {"training.train_iters=1", "training.lr=1e12", "training.min_lr=1e12",
                  "training.clip_grad=0", "training.lr_warmup_iters=0", "validate.warmup_iters=0"}));
    EXPECT_EQ(run.status, 1) << run.err;
    expect_contains(run.out, "the held-out loss after step 1 is not finite");
    expect_contains(run.out, "inconclusive, 1 diverged");
}

TEST(Validate, WritesCurvesPictureAndCompactProgress) {
    TemporaryFolder folder;
    const CommandResult run =
        fp8flow_alone(validate("out", {"training.train_iters=7", "validate.recipes=[bf16, fp8_flow, mxfp8]"}),
                      folder.path());
    EXPECT_LE(run.status, 1) << run.err;
    EXPECT_EQ(names_in(folder.path("out")),
              (std::set<std::string>{".lock", "config.yaml", "loss.jsonl", "report.html", "runs",
                                     "validate.json", "validate.log"}));
    const json page = expect_report_page(read_whole(folder.path("out/report.html")));
    EXPECT_EQ(page.at("arms").size(), 5u) << "headers, and with the control arm";
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

// ---- arms and seeds as jobs

constexpr const char* kArm =
    "flow:recipe=fp8_flow,recompute_granularity=selective,recompute_modules=[moe_expert]";

// Two arms with three seeds.
Texts six_jobs(const std::string& out, const Texts& more = {}, const std::string& seeds = "3,1,2") {
    return test_run("validate", out,
                    {"training.train_iters=6", "training.eval_iters=1", "validate.warmup_iters=1",
                     "validate.control_arm=none"},
                    with({"--seeds", seeds, "--arm", kArm}, more));
}

json run_file(const std::string& out, const std::string& job) {
    json file = read_json(out + "/runs/" + job + "/run.json");
    EXPECT_GT(file.at("measured").at("seconds per step").get<double>(), 0.0);
    file.erase("measured");
    return file;
}

// The report but for what was measured.
json statement(const std::string& out) {
    json result = read_json(out + "/validate.json");
    for (const char* key : {"date", "command"}) result.erase(key);
    for (json& arm : result.at("arms"))
        for (const char* key :
             {"seconds per step", "saved bytes", "saved bytes reserved", "saved bytes used"})
            arm.erase(key);
    return result;
}

CommandResult join(const std::string& jobs, const std::string& out) {
    return fp8flow_alone({"validate", "--join", jobs, "--out", out});
}

TEST(ValidateJobs, SixProcessesJoinedEqualOne) {
    TemporaryFolder folder;
    const CommandResult one = fp8flow_alone(six_jobs(folder.path("one")));
    ASSERT_LE(one.status, 1) << one.err;
    expect_contains(one.out, "seeds: 1, 2, 3");
    expect_contains(one.out, "flow seed 2");
    for (const char* seed : {"2", "3", "1"})
        for (const char* arm : {"flow", "bf16"}) {
            const std::string job = std::string(arm) + ":" + seed;
            succeeded(fp8flow_alone(six_jobs(folder.path("jobs"), {"--only", job})));
            EXPECT_FALSE(std::filesystem::exists(folder.path("jobs/validate.json")));
        }
    const CommandResult joined = join(folder.path("jobs"), folder.path("joined"));
    EXPECT_EQ(joined.status, one.status) << joined.err;
    for (const char* job : {"bf16-1", "bf16-2", "bf16-3", "flow-1", "flow-2", "flow-3"})
        EXPECT_EQ(run_file(folder.path("one"), job), run_file(folder.path("joined"), job)) << job;
    EXPECT_EQ(statement(folder.path("one")), statement(folder.path("joined")));
    const std::string losses = read_whole(folder.path("one/loss.jsonl"));
    EXPECT_EQ(losses, read_whole(folder.path("joined/loss.jsonl")));
    const json last = json::parse(lines_of(losses).back());
    for (const auto& [key, value] :
         {std::pair<const char*, json>{"arm", "flow"}, {"seed", 3}, {"iteration", 6}})
        EXPECT_EQ(last.at(key), value);
    EXPECT_EQ(expect_report_page(read_whole(folder.path("one/report.html"))).at("routing").size(), 2u)
        << "of the first seed";
    const json flow = run_file(folder.path("joined"), "flow-2");
    EXPECT_NE(flow.at("keys").dump().find("recompute.recompute_modules"), std::string::npos)
        << flow.at("keys");
    EXPECT_EQ(flow.at("held out"), statement(folder.path("joined")).at("arms")[1].at("held_out_losses")[1]);
    EXPECT_NE(flow.at("lm_loss"), run_file(folder.path("joined"), "flow-1").at("lm_loss"));
    // few digits, the same FP32 values
    std::vector<float> steps;
    for (const std::string& line : lines_of(read_whole(folder.path("one/runs/flow-2/metrics.jsonl"))))
        if (const json step = json::parse(line); step.at("type") == "step")
            steps.push_back(step.at("lm_loss"));
    EXPECT_EQ(flow.at("lm_loss").get<std::vector<float>>(), steps);
    for (const json& loss : flow.at("lm_loss")) EXPECT_LE(loss.dump().size(), 10u) << loss;
    EXPECT_EQ(flow.at("initial weights"), run_file(folder.path("joined"), "bf16-2").at("initial weights"));
    expect_contains(joined.out, last_line(one.out));
    // under the launcher of the jobs
    const CommandResult again =
        fp8flow_on_ranks(2, {"validate", "--join", folder.path("jobs"), "--out", folder.path("again")});
    EXPECT_EQ(again.status, one.status) << again.err;
    EXPECT_EQ(statement(folder.path("again")), statement(folder.path("one")));
}

bool has_checkpoint(const std::string& folder) {
    std::error_code none;  // no folder yet
    for (const auto& entry : std::filesystem::directory_iterator(folder, none))
        if (entry.path().filename().string().starts_with("step_") && !entry.path().has_extension())
            return true;  // whole: what is being written ends in .tmp
    return false;
}

// Its second job has three steps on record, and a checkpoint.
void end_in_the_middle(const Texts& line, const std::string& out, int signal, int status) {
    RunningCommand run(with({FP8FLOW_EXECUTABLE}, line), "");
    const std::string job = out + "/runs/flow-1";
    while (
        (lines_of(read_whole(job + "/metrics.jsonl")).size() < 4 || !has_checkpoint(job + "/checkpoints")) &&
        read_whole(job + "/run.json").find("measured") == std::string::npos)
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    ::kill(run.pid(), signal);
    EXPECT_EQ(run.wait(60).status, status);
    EXPECT_FALSE(std::filesystem::exists(out + "/validate.json"));
}

TEST(ValidateJobs, AnInterruptedValidationResumesToTheSameReport) {
    TemporaryFolder folder;
    const Texts longer = {"--set", "training.train_iters=60", "--set", "checkpoint.save_interval=2"};
    const Texts whole = six_jobs(folder.path("whole"), longer, "1");
    ASSERT_LE(fp8flow_alone(whole).status, 1);
    for (const auto& [signal, status] : std::map<int, int>{{SIGTERM, 16}, {SIGKILL, 128 + SIGKILL}}) {
        const std::string out = folder.path("ended" + std::to_string(signal));
        const Texts line = six_jobs(out, longer, "1");
        end_in_the_middle(line, out, signal, status);
        const CommandResult resumed = fp8flow_alone(with(line, {"--resume", "auto"}));
        ASSERT_LE(resumed.status, 1) << resumed.err;
        expect_contains(resumed.out, "bf16: read from " + out + "/runs/bf16-1");
        EXPECT_TRUE(
            std::regex_search(resumed.out, std::regex("resumed from .*flow-1.*, \\d+ iterations done")))
            << resumed.out;
        EXPECT_EQ(run_file(out, "flow-1"), run_file(folder.path("whole"), "flow-1"));
        EXPECT_EQ(statement(out), statement(folder.path("whole")));
        EXPECT_FALSE(std::filesystem::exists(out + "/runs/flow-1/checkpoints"));
    }
    // The recording goes on with the arm that is recorded, the first job.
    const Texts recorded = with(longer, {"--routing-of", "flow"});
    ASSERT_LE(fp8flow_alone(six_jobs(folder.path("given"), recorded, "1")).status, 1);
    const Texts line = six_jobs(folder.path("given_ended"), recorded, "1");
    end_in_the_middle(line, folder.path("given_ended"), SIGKILL, 128 + SIGKILL);
    ASSERT_LE(fp8flow_alone(with(line, {"--resume", "auto"})).status, 1);
    EXPECT_EQ(statement(folder.path("given_ended")), statement(folder.path("given")));
    // Another configuration is not mixed in.
    Texts other =
        with(six_jobs(folder.path("whole"), longer, "1"), {"--resume", "auto", "--set", "training.lr=0.1"});
    expect_contains(failure(2, fp8flow_alone(other)), "the runs differ in training.lr");
}

// The copy of the arm that is recorded gets its routing, and so its bits.
TEST(ValidateJobs, TheOthersTakeTheRoutingOfAnArm) {
    TemporaryFolder folder;
    const Texts more = {"--arm", "copy@flow:recipe=fp8_flow", "--routing-of", "flow",
                        "--set", "output.log_interval=2"};
    ASSERT_LE(fp8flow_alone(six_jobs(folder.path("one"), more, "1")).status, 1);
    std::map<std::string, json> arms;
    const json result = statement(folder.path("one"));
    for (const json& arm : result.at("arms")) arms[arm.at("arm")] = arm;
    const size_t layers = 1;
    EXPECT_EQ(arms.at("flow").at("equal_choices"), json::array());
    EXPECT_EQ(arms.at("copy").at("equal_choices"), json(std::vector<double>(layers, 1.0)));
    EXPECT_EQ(arms.at("copy").at("against"), "flow");
    EXPECT_EQ(arms.at("copy").at("training_difference").at("mean_nats"), 0.0);
    ASSERT_EQ(arms.at("bf16").at("equal_choices").size(), layers);
    for (const json& share : arms.at("bf16").at("equal_choices")) {
        EXPECT_LT(share, 1.0);
        EXPECT_GT(share, 0.5);
    }
    expect_contains(read_whole(folder.path("one/report.html")), "top-k choices equal to the given ones");

    const auto only = [&](const std::string& job) {
        return fp8flow_alone(with(six_jobs(folder.path("jobs"), more, "1"), {"--only", job}));
    };
    expect_contains(failure(10, only("bf16:1")), "run flow:1 first");
    for (const char* job : {"flow:1", "bf16:1", "copy:1"}) EXPECT_EQ(only(job).status, 0) << job;
    ASSERT_LE(join(folder.path("jobs"), folder.path("joined")).status, 1);
    EXPECT_EQ(statement(folder.path("one")), statement(folder.path("joined")));

    const CommandResult diverged = fp8flow_alone(
        six_jobs(folder.path("diverged"), with(more, {"--set", "training.grad_norm_limit=1e-6"}), "1"));
    expect_contains(diverged.out, "copy: left out, because flow-1 has diverged");
    expect_contains(failure(13, diverged), "no run of bf16");

    std::filesystem::remove_all(folder.path("jobs/runs/bf16-1"));  // an ablation needs its own baseline alone
    succeeded(join(folder.path("jobs"), folder.path("ablation")));
    const json rest = read_json(folder.path("ablation/validate.json")).at("arms");
    ASSERT_EQ(rest.size(), 2u);
    EXPECT_EQ(rest[0].at("verdict"), "baseline");
    EXPECT_EQ(rest[1].at("against"), "flow");
    EXPECT_EQ(rest[1].at("training_difference").at("mean_nats"), 0.0);
}

TEST(ValidateJobs, WhatCannotBeJoinedIsNamed) {
    TemporaryFolder folder;
    const auto train = [&](const std::string& out, const std::string& only, const Texts& more = {}) {
        succeeded(fp8flow_alone(
            with(six_jobs(folder.path(out), {"--only", only, "--set", "training.train_iters=2"}), more)));
    };
    const auto refused = [&](const Texts& folders, const std::string& reason) {
        Texts line = {"validate", "--out", folder.path("joined"), "--join"};
        for (const std::string& name : folders) line.push_back(folder.path(name));
        const CommandResult run = fp8flow_alone(line);
        EXPECT_NE(run.status, 0);
        expect_contains(run.err, reason);
        EXPECT_FALSE(std::filesystem::exists(folder.path("joined")));
    };
    train("bf16", "bf16:1");
    train("data", "flow:1", {"--set", "data.synthetic_noise=0.3"});
    train("lr", "flow:1", {"--set", "training.lr=0.01"});
    train("flow", "flow:1");
    refused({"bf16", "lr"}, "the runs differ in training.lr");
    refused({"bf16", "data"}, "the runs differ in data: ");
    refused({"bf16", "bf16"}, "are the same arm and seed");
    refused({"bf16", "nowhere"}, "no run of validate");
    refused({"flow"}, "no run of the baseline among them");
    const std::string path = "flow/runs/flow-1/run.json", text = read_whole(folder.path(path));
    for (const char* item : {"commit", "initial weights", "order", "ranks"}) {
        json changed = json::parse(text);
        changed[item] = "other";
        folder.write(path, changed.dump());
        refused({"bf16", "flow"}, std::string("the runs differ in ") + item);
        if (item != std::string("commit")) continue;
        changed["configuration"].erase("model.add_qkv_bias");  // by a program without this key
        folder.write(path, changed.dump());
        // what the message says, and the report of both
        const std::string commits = json::parse(text).at("commit").get<std::string>() + ",other";
        refused({"bf16", "flow"}, "add --equal-commits " + commits);
        const CommandResult equal =
            fp8flow_alone({"validate", "--out", folder.path("equal"), "--equal-commits", commits, "--join",
                           folder.path("bf16"), folder.path("flow")});
        EXPECT_LE(equal.status, 1) << equal.err;
        EXPECT_EQ(read_json(folder.path("equal/validate.json")).at("equal_commits").size(), 2u);
        // the report is of the program and the machine that trained
        json first = read_json(folder.path("bf16/runs/bf16-1/run.json"));
        const std::string own = first.dump();
        first["commit"] = "other";
        first["measured"]["machine"].update({{"cpu", "another"}, {"ranks", 3}});
        folder.write("bf16/runs/bf16-1/run.json", first.dump());
        EXPECT_LE(fp8flow_alone({"validate", "--out", folder.path("trained"), "--join", folder.path("bf16"),
                                 folder.path("flow")})
                      .status,
                  1);
        const json trained = read_json(folder.path("trained/validate.json"));
        EXPECT_EQ(trained.at("commit"), "other");
        EXPECT_EQ(trained.at("machine").at("cpu"), "another");
        EXPECT_EQ(trained.at("ranks"), 3);
        folder.write("bf16/runs/bf16-1/run.json", own);
    }
    const auto edited = [&](const std::string& reason, const auto& edit) {
        json changed = json::parse(text);
        edit(changed);
        folder.write(path, changed.dump());
        refused({"bf16", "flow"}, reason);
    };
    edited("runs/flow-1/run.json: 1 losses and 2 gradient norms of 2 iterations",
           [](json& run) { run["lm_loss"].erase(1); });
    edited("a loss is not a number", [](json& run) {
        run["lm_loss"][1] = nullptr;
        run.erase("checksum");
    });
    edited("its losses are not those of the training", [](json& run) { run["lm_loss"][1] = 1.5; });
    edited("its losses are not those of the training", [](json& run) { run["held out"] = 1.5; });
    edited("key 'order' not found", [](json& run) { run.erase("order"); });
    edited("key 'gpu clock hertz' not found",
           [](json& run) { run["measured"]["machine"].erase("gpu clock hertz"); });
    edited("type must be string, but is null", [](json& run) { run["against"] = nullptr; });
    for (const char* entry : {"/seed", "/commit", "/keys/training.lr", "/configuration/training.lr"})
        edited("not the file of a run of validate",
               [&](json& run) { run[json::json_pointer(entry)] = json::array(); });
    edited("the runs differ in training.new_key: " + folder.path("bf16/runs/bf16-1/run.json") +
               " has nothing, " + folder.path(path) + " has 1; ",
           [](json& run) { run["configuration"]["training.new_key"] = "1"; });
    edited("is compared with the arm nobody, and no run of it", [](json& run) { run["against"] = "nobody"; });
    folder.write(path, text);
    const CommandResult other =
        fp8flow_alone({"validate", "--out", folder.path("joined"), "--set", "training.lr=0.01", "--join",
                       folder.path("bf16"), folder.path("flow")});
    expect_contains(failure(2, other), "the runs differ in training.lr");
    const CommandResult late =
        fp8flow_alone({"validate", "--out", folder.path("joined"), "--set", "validate.warmup_iters=2",
                       "--join", folder.path("bf16"), folder.path("flow")});
    expect_contains(failure(2, late), "no step is left to compare");
    folder.write("trained/train.log", "");
    expect_contains(failure(15, fp8flow_alone(six_jobs(folder.path("trained"), {"--only", "flow:1"}))),
                    "holds a run of train");
    expect_contains(failure(2, fp8flow_alone(six_jobs(folder.path("none"), {"--only", "flow:4"}))),
                    "--only: got flow:4, want one of bf16:1, flow:1, bf16:2");
}

// Arms, what they are compared with and their order are those of the command that continues.
TEST(ValidateJobs, MoreArmsAndSeedsLaterEqualAllAtOnce) {
    TemporaryFolder folder;
    const std::string keys = ":recipe=fp8_flow,fp8_wgrad=false";
    const auto run = [&](const std::string& out, const std::string& seeds, const Texts& more) {
        const Texts short_run = {"--set", "training.train_iters=2", "--set", "validate.control_arm=ulp"};
        const CommandResult result = fp8flow_alone(six_jobs(folder.path(out), with(short_run, more), seeds));
        ASSERT_LE(result.status, 1) << result.err;
    };
    const Texts all = {"--arm", "late:recipe=mxfp8", "--arm", "own" + keys};
    run("grown", "1", {"--arm", "own@flow" + keys});
    run("grown", "1,2", with(all, {"--resume", "auto"}));
    run("whole", "1,2", all);
    EXPECT_EQ(statement(folder.path("grown")), statement(folder.path("whole")));
    ASSERT_LE(join(folder.path("grown"), folder.path("joined")).status, 1);
    EXPECT_EQ(statement(folder.path("joined")), statement(folder.path("whole")));
}

TEST(ValidateJobs, RunsOfAnotherPluginOrControlArmAreNotMixedIn) {
    TemporaryFolder folder;
    const std::string library = folder.path("recipes.so");
    std::filesystem::copy_file(FP8FLOW_BINARY_DIR "/tests/libplanted_faults.so", library);
    const auto run = [&](const std::string& control, const Texts& more) {
        const Texts line = {"--set",    "training.train_iters=2",
                            "--set",    "validate.control_arm=" + control,
                            "--plugin", library,
                            "--arm",    "own:flow=half_range"};
        return fp8flow_alone(six_jobs(folder.path("out"), with(line, more), "1"));
    };
    ASSERT_LE(run("ulp", {}).status, 1);
    expect_contains(failure(2, run("exact", {"--resume", "auto"})),
                    "the runs differ in validate.control_arm");
    ASSERT_LE(run("ulp", {"--resume", "auto"}).status, 1);
    const std::string before = run_file(folder.path("out"), "own-1").at("plugin");
    std::ofstream(library, std::ios::app) << "built again";
    const std::string error = failure(2, run("ulp", {"--resume", "auto"}));
    expect_contains(error, "the runs differ in plugin");
    const size_t at = error.find(before + ",");
    ASSERT_NE(at, std::string::npos) << error;
    const std::string both = error.substr(at, 2 * before.size() + 1);
    ASSERT_LE(run("ulp", {"--resume", "auto", "--equal-commits", both}).status, 1);
}

TEST(ValidateJobs, ArmsThatAreWrongAreRefused) {
    TemporaryFolder folder;
    for (const auto& [arm, reason] :
         std::map<std::string, std::string>{{"flow", "want NAME:key=value,key=value"},
                                            {"flow:recipe=fp9", "--arm flow: "},
                                            {"flow:hidden_size=256", "arms must differ in the recipe only"},
                                            {"bf16_control:recipe=mxfp8", "the name of the control arm"},
                                            {"bf16:recipe=mxfp8", "two arms have this name"}}) {
        expect_contains(
            failure(2, fp8flow_alone(test_run("validate", folder.path("out"), {}, {"--arm", arm}))), reason);
    }
}

}  // namespace
}  // namespace fp8flow
