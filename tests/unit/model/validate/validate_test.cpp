// SPDX-License-Identifier: MIT
// The curves of `validate`: averages and errors against closed forms; and that real curves of the recipes
// come out in the right order, the control arm below the flow. A planted fault: tests/cli/validate_test.cpp.
#include "model/validate/run_file.h"
#include "model/validate/statistics.h"

#include "model/train/trainer.h"
#include "tests/support/training.h"

namespace fp8flow {

using namespace validate;

namespace {

TEST(Validate, EmaIsTheCorrectedWeightedMean) {
    for (double value : ema({2.5, 2.5, 2.5, 2.5}, 0.9)) EXPECT_DOUBLE_EQ(value, 2.5);
    EXPECT_EQ(ema({}, 0.9), std::vector<double>{});
    EXPECT_EQ(ema({3, 1, 4}, 0.0), (std::vector<double>{3, 1, 4}));
    const std::vector<double> values = {5, 1, 3, 8, -2};
    const std::vector<double> smooth = ema(values, 0.7);
    for (size_t t = 0; t < values.size(); ++t) {
        double sum = 0, weight = 0;
        for (size_t i = 0; i <= t; ++i) {
            const double w = std::pow(0.7, static_cast<double>(t - i));
            sum += w * values[i];
            weight += w;
        }
        EXPECT_NEAR(smooth[t], sum / weight, 1e-14);
    }
}

TEST(Validate, ErrorsOfAScaledCurve) {
    const Curve base{.loss = {5, 4, 3, 2}, .grad_norm = {1, 1, 2, 4}};
    Curve arm{.loss = base.loss, .grad_norm = base.grad_norm};
    for (double& loss : arm.loss) loss *= 0.99;
    for (double& norm : arm.grad_norm) norm *= 1.5;
    const Comparison c = compare(arm, base, 0.5, 1);
    EXPECT_NEAR(c.max, 0.01, 1e-14);
    EXPECT_NEAR(c.mean, 0.01, 1e-14);
    EXPECT_NEAR(c.raw_max, 0.01, 1e-14);
    EXPECT_NEAR(c.signed_last, -0.01, 1e-14);
    EXPECT_NEAR(c.grad_norm_ratio, 1.5, 1e-14);
}

TEST(Validate, WarmUpIsLeftOutOfTheVerdictOnly) {
    const Curve base{.loss = {4, 2, 2, 2}, .grad_norm = {1, 1, 1, 1}};
    const Curve arm{.loss = {8, 2, 2.2, 2}, .grad_norm = {9, 1, 1, 3}};
    const Comparison all = compare(arm, base, 0.0, 0), late = compare(arm, base, 0.0, 1);
    EXPECT_DOUBLE_EQ(all.max, 1.0);
    EXPECT_NEAR(late.max, 0.1, 1e-14);
    EXPECT_NEAR(late.mean, 0.1 / 3, 1e-14);
    EXPECT_NEAR(late.grad_norm_ratio, 5.0 / 3, 1e-14);
    EXPECT_EQ(late.signed_last, 0);
    EXPECT_THROW(compare(arm, base, 0.0, 4), Error);
    EXPECT_THROW(compare({.loss = {1, 2}}, base, 0.0, 0), Error);
}

TEST(Validate, ANaNInACurveReachesTheMaximum) {
    const Curve base{.loss = {2, 2, 2}, .grad_norm = {1, 1, 1}};
    const Curve arm{.loss = {2, std::nan(""), 2}, .grad_norm = {1, 1, 1}};
    const Comparison c = compare(arm, base, 0.5, 0);
    EXPECT_TRUE(std::isnan(c.max));
    EXPECT_TRUE(std::isnan(c.raw_max));
}

Curve curve_of(const Config& config, Arithmetic arithmetic) {
    const test::TrainingRun run = test::train(config, 2, {.steps = 24, .arithmetic = arithmetic});
    Curve curve;
    curve.loss = run.losses();
    for (const StepResult& step : run.steps) curve.grad_norm.push_back(step.grad_norm);
    return curve;
}

TEST(Validate, RunsAreSortedAndThoseThatAreMissingNamed) {
    std::vector<RunFile> files;
    for (const auto& [arm, seed, number] : {std::tuple("a", 2, 1), {"a", 10, 2}, {"b", 10, 0}})
        files.push_back({{{"arm", arm}, {"seed", seed}, {"number", number}}, "run.json"});
    std::swap(files[0], files[1]);
    sort_run_files(files);
    EXPECT_EQ(files[0].arm(), "b");
    EXPECT_EQ(files[1].seed(), 2);
    EXPECT_EQ(missing_jobs(files), std::vector<std::string>{"b:2"});
}

// Runs with one seed begin alike, those of one arm are of one kind, and all read the same data.
TEST(Validate, RunsThatDoNotCompareAreRefused) {
    const nlohmann::json first = nlohmann::json::parse(R"({
        "arm": "a", "seed": 1, "commit": "1", "backend": "1", "ranks": "1", "data": "1", "routing of": "1",
        "order": "o1", "initial weights": "1", "against": "1", "validate.control_arm": "1", "plugin": "1",
        "keys": {}, "configuration": {}})");
    using Items = std::set<std::string>;
    const auto refused = [&](const char* arm, int64_t seed) {
        Items items;
        for (const auto& [item, value] : first.items()) {
            nlohmann::json other = first;
            other[item] = value.is_object() ? nlohmann::json{{"a key", "2"}} : nlohmann::json("2");
            other.update({{"arm", arm}, {"seed", seed}});
            if (seed == 2) other["order"] = "o2";  // runs that begin alike would be one
            if (!error_or_none(ExitCode::usage, [&] {
                     check_agree({{first, "x"}, {other, "y"}}, {});
                 }).empty())
                items.insert(item);
        }
        return items;
    };
    EXPECT_EQ(refused("b", 2), (Items{"backend", "commit", "configuration", "data", "ranks", "routing of"}));
    EXPECT_EQ(refused("b", 1), (Items{"backend", "commit", "configuration", "data", "initial weights",
                                      "order", "ranks", "routing of"}));
    EXPECT_EQ(refused("a", 2), (Items{"against", "backend", "commit", "configuration", "data", "keys",
                                      "plugin", "ranks", "routing of", "validate.control_arm"}));
}

TEST(Validate, ArmsOfOneFolderAreNotJoined) {
    std::vector<RunFile> files;
    for (const char* arm : {"a b", "a_b"}) files.push_back({{{"arm", arm}, {"seed", 1}}, "run.json"});
    expect_contains(error_of(ExitCode::usage, [&] { check_agree(files, {}); }), "the arms a b and a_b");
}

// With synthetic data and --weights a seed changes nothing: three such runs are one.
TEST(Validate, SeedsThatBeginAlikeAreOneRun) {
    const auto check = [](const char* order, const char* weights, int64_t seed) {
        std::vector<RunFile> files;
        for (const int64_t s : {int64_t{1}, seed})
            files.push_back({{{"arm", "a"},
                              {"seed", s},
                              {"data", "d"},
                              {"order", s == 1 ? "o" : order},
                              {"initial weights", s == 1 ? "w" : weights}},
                             fmt::format("{}.json", s)});
        check_agree(files, {});
    };
    check("other", "w", 2);
    check("o", "other", 2);
    expect_contains(error_of(ExitCode::usage, [&] { check("o", "w", 2); }),
                    "1.json and 2.json begin with the same weights and data");
    EXPECT_NO_THROW(check("d", "w", 1)) << "by an earlier version, which had no fingerprint of the order";
}

TEST(Validate, ControlArmAndFlowComeInThisOrder) {
    const std::vector<std::string> keys = {"training.train_iters=24",
                                           "parallel.expert_model_parallel_size=2"};
    const Config bf16 = test::test_config(Recipe::bf16, keys),
                 flow = test::test_config(Recipe::fp8_flow, keys);
    const Curve base = curve_of(bf16, Arithmetic::stated);
    const Comparison control = compare(curve_of(bf16, Arithmetic::alternative), base, 0.95, 5),
                     fp8 = compare(curve_of(flow, Arithmetic::stated), base, 0.95, 5);
    RecordProperty("control", fmt::format("{:.2e}", control.max));
    RecordProperty("fp8_flow", fmt::format("{:.2e}", fp8.max));
    EXPECT_GT(control.max, 0) << "the control arm computes the same bits: no control";
    EXPECT_LT(control.max, fp8.max);
    EXPECT_NEAR(fp8.grad_norm_ratio, 1.0, 0.05);
}

}  // namespace
}  // namespace fp8flow
