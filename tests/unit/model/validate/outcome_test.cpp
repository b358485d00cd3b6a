// SPDX-License-Identifier: MIT
// What is said of the arms of made-up runs: pairs by seed, divergence, the ratio to the control arm, JSON.
#include "model/validate/outcome.h"

#include "model/report/page/run_pages.h"
#include "model/report/validate_report.h"
#include "model/validate/run_file.h"
#include "tests/support/report_page.h"
#include "tests/support/training.h"

namespace fp8flow {

using namespace validate;

namespace {

using Runs = std::vector<Run>;
constexpr size_t kSteps = 100;

// The loss is 2 + seed / 10 + difference everywhere.
Run run_of(const std::string& arm, int64_t seed, double difference) {
    const double loss = 2 + 0.1 * static_cast<double>(seed) + difference;
    return {.arm = arm,
            .seed = seed,
            .curve = {.loss = std::vector<double>(kSteps, loss),
                      .grad_norm = std::vector<double>(kSteps, 1.0),
                      .held_out = loss + 0.5}};
}

Run diverged(const std::string& arm, int64_t seed) {
    Run run = run_of(arm, seed, 0);
    run.diverged = true;
    run.curve.loss.resize(30);
    run.curve.grad_norm.resize(30);
    return run;
}

// flow is further from bf16 with each seed.
Runs three_seeds() {
    Runs runs;
    for (const int64_t seed : {1, 2, 3}) {
        runs.push_back(run_of("bf16", seed, 0));
        runs.push_back(run_of("flow", seed, 0.001 * static_cast<double>(seed)));
    }
    return runs;
}

// The difference of one seed, with noise from step to step.
Runs one_seed() {
    Runs runs = {run_of("bf16", 7, 0), run_of("flow", 7, 0.01)};
    for (size_t i = 0; i < kSteps; ++i) runs[1].curve.loss[i] += i % 2 == 0 ? 0.001 : -0.001;
    return runs;
}

std::vector<Arm> arms_of(const std::vector<std::string>& names) {
    std::vector<Arm> arms;
    for (const std::string& name : names)
        arms.push_back({name, test::test_config(Recipe::bf16, {"training.train_iters=100"})});
    return arms;
}

TEST(Outcome, ArmsArePairedBySeed) {
    Runs runs;
    for (const int64_t seed : {3, 1, 2}) runs.push_back(run_of("bf16", seed, 0));
    for (const int64_t seed : {1, 2, 3}) {
        runs.push_back(run_of("flow", seed, 0.001 * static_cast<double>(seed)));
        runs.push_back(run_of("off", seed, 0.003 * static_cast<double>(seed)));
        runs.push_back(run_of("steady", seed, 0.001));
        runs.push_back(run_of("apart", seed, -0.0035));
        runs.push_back(run_of(kControlArm, seed, seed == 2 ? 0.001 : -0.001));
    }
    runs.push_back(run_of("flow", 4, 9));  // no pair
    auto& first = *std::ranges::find(runs, "off", &validate::Run::arm);
    first.curve.loss[50] += 1;
    first.curve.grad_norm.assign(kSteps, 2.5);
    first.curve.held_out += 0.003;
    first.costs["seconds per step"] = 0.25;
    std::vector<Arm> arms = arms_of({"bf16", "flow", "off", "steady", "apart", kControlArm});
    arms[2].against = "flow";
    arms[2].keys = {{"a key", "2"}};
    const Outcomes all = outcomes_of(runs, arms, {});
    EXPECT_EQ(all.seeds, (std::vector<int64_t>{1, 2, 3, 4}));
    const Outcome& flow = *all.find("flow");
    EXPECT_EQ(flow.runs.size(), 4u);
    EXPECT_EQ(flow.training.pairs, 3);
    EXPECT_NEAR(flow.training.mean, 0.002, 1e-12);
    EXPECT_NEAR(flow.held_out.mean, 0.002, 1e-12);
    EXPECT_NEAR(flow.base, 2.2, 1e-12);
    EXPECT_NEAR(flow.base_held_out, 2.7, 1e-12);
    EXPECT_NEAR(flow.smoothed.max, 0.003 / 2.3, 1e-12);
    EXPECT_NEAR(flow.root_mean_square, 0.001 * std::sqrt(14.0 / 3), 1e-12);
    EXPECT_NEAR(*flow.to_control, std::sqrt(14.0 / 3), 1e-9);
    EXPECT_TRUE(flow.overlaps_control);
    EXPECT_TRUE(all.find("steady")->overlaps_control) << "it has no interval, the control arm has one";
    EXPECT_EQ(all.find("off")->against, "flow");
    EXPECT_NEAR(all.find("off")->training.mean, 0.004, 1e-12);
    EXPECT_NEAR(*all.noise, 0.001 / 2.1, 1e-12);

    const Config& config = arms.front().config;
    nlohmann::json file = shortened(report::validate_json(all, arms, config));
    EXPECT_EQ(file.at("arms")[2], nlohmann::json::parse(R"({
        "arm": "off", "name": "off", "against": "flow", "keys": {"a key": "2"}, "seeds": [1, 2, 3],
        "diverged": 0, "verdict": "inconclusive", "seeds_to_decide": 10.0, "losses": [2.103, 2.206, 2.309],
        "held_out_losses": [2.606, 2.706, 2.809], "held out": 2.707, "seconds per step": 0.25,
        "training_difference": {
            "mean_nats": 0.004, "interval_nats": [-0.0009682754, 0.008968275],
            "standard_error_nats": 0.0011547005, "mean_percent": 0.18165304, "interval_percent": [-0.043972544, 0.40727863],
            "detectable_percent": 0.28124523, "degrees_of_freedom": 2.0, "seeds": 3, "noise": "over seeds"},
        "held_out_difference": {
            "mean_nats": 0.005, "interval_nats": [0.0025158622, 0.0074841375],
            "standard_error_nats": 0.00057735026, "mean_percent": 0.18504812, "interval_percent": [0.09311111, 0.2769851],
            "detectable_percent": 0.11460067, "degrees_of_freedom": 2.0, "seeds": 3, "noise": "over seeds"},
        "ratio_to_control": 4.3204937, "overlaps_control": true, "max relative error": 0.026626902,
        "mean relative error": 0.0036996752, "raw max": 0.47691575, "signed, end": 0.0024375876,
        "grad norm ratio": 1.5})"));
    file.erase("arms");
    EXPECT_EQ(file, nlohmann::json::parse(R"({
        "verdict": "inconclusive", "bar": 0.0025, "iterations": 100, "compared_iterations": [91, 100],
        "seeds": [1, 2, 3, 4], "confidence": 0.95, "ema_decay": 0.95, "warmup_iters": 5,
        "noise floor": 0.00047619047,
        "variance_of_training": {
            "deviation_nats": 0.0012995725, "degrees_of_freedom": 10.0, "p": 0.0, "pooled": false},
        "variance_of_held_out": {
            "deviation_nats": 0.00092496246, "degrees_of_freedom": 10.0, "p": 0.0, "pooled": false}})"));
    const report::Cells cells = report::outcome_cells(all, config);
    EXPECT_EQ(cells[2][1], "3") << "seeds of the difference";
    EXPECT_EQ(cells[2][2], "2.2020") << "of the same seeds";
    EXPECT_EQ(cells[3], (std::vector<std::string>{"off (to flow)", "3", "2.2060", "+0.182 ± 0.226 %",
                                                  "+0.0040", "+0.185 ± 0.092 %", "4.3", "0.281 %", "2.663 %",
                                                  "250", "inconclusive, 10 seeds would decide"}));
    expect_contains(report::control_text(all), "overlap flow, off, steady; apart apart");
    expect_contains(report::answer_text(all, config),
                    "apart -0.159 ± 0.000 % from the loss of bf16 over 3 seeds, limit 0.25 %");
    expect_contains(report::table_heading(all, config), "mean loss of iterations 91 to 100: ");
}

TEST(Outcome, ADivergedRunIsAMissAndCounted) {
    const ValidateSpec spec{.max_relative_loss_error = 0.01};
    Runs runs;
    for (const int64_t seed : {1, 2, 3}) {
        runs.push_back(run_of("bf16", seed, 0));
        runs.push_back(run_of("good", seed, 1e-6 * static_cast<double>(seed)));
        runs.push_back(seed == 2 ? diverged("bad", seed) : run_of("bad", seed, 0.001));
    }
    const Outcomes all = outcomes_of(runs, arms_of({"bf16", "good", "bad"}), spec);
    EXPECT_EQ(all.find("good")->verdict, Verdict::pass);
    EXPECT_EQ(all.find("bad")->verdict, Verdict::miss);
    EXPECT_EQ(all.find("bad")->diverged, 1);
    EXPECT_EQ(all.find("bad")->training.pairs, 2);
    const std::vector<Arm> arms = arms_of({"bf16", "good", "bad"});
    EXPECT_EQ(report::validate_json(all, arms, arms[0].config).at("arms")[2].at("diverged"), 1);
    EXPECT_EQ(report::outcome_cells(all, arms[0].config)[3].back(), "miss, 1 diverged");
    EXPECT_EQ(all.verdict, Verdict::miss);
    EXPECT_FALSE(all.noise) << "no control arm";
    runs[1].curve.loss.back() = std::nan("");
    EXPECT_EQ(outcomes_of(runs, arms_of({"bf16", "good", "bad"}), spec).find("good")->verdict, Verdict::miss);
    // the control arm is judged by nobody
    runs[1] = run_of("good", 1, 1e-6);
    for (const int64_t seed : {1, 2, 3}) runs.push_back(diverged(kControlArm, seed));
    const Outcomes uncontrolled = outcomes_of(runs, arms_of({"bf16", "good", kControlArm}), spec);
    EXPECT_EQ(uncontrolled.verdict, Verdict::pass);
    expect_contains(report::control_text(uncontrolled), "no seed in common");
    // where the baseline diverges too, nobody is to blame
    const Runs none = {diverged("bf16", 1), diverged("flow", 1)};
    const Outcomes both = outcomes_of(none, arms_of({"bf16", "flow"}), spec);
    EXPECT_EQ(both.find("flow")->verdict, Verdict::inconclusive);
    EXPECT_EQ(report::outcome_cells(both, arms.front().config)[1].back(), "baseline, 1 diverged");
}

TEST(Outcome, WithoutAComparedArmNothingPasses) {
    for (const std::vector<std::string>& names : {std::vector<std::string>{"bf16"}, {"bf16", kControlArm}}) {
        const std::vector<Arm> arms = arms_of(names);
        Runs runs;
        for (const std::string& name : names) runs.push_back(run_of(name, 1, 0));
        const Outcomes all = outcomes_of(runs, arms, arms[0].config.validate);
        EXPECT_EQ(report::validate_json(all, arms, arms[0].config).at("verdict"), "inconclusive");
        expect_contains(report::validate_page({"test", arms[0].config, {}}, all, {}),
                        "test, inconclusive: no arm was compared with bf16 (validate.recipes, --arm)");
    }
}

TEST(Outcome, OneSeedHasTheNoiseOfOneRunAndTheFileSaysSo) {
    const std::vector<Arm> arms = arms_of({"bf16", "flow"});
    const Config& config = arms.front().config;
    const Runs runs = one_seed();  // outcomes point to them
    const Outcomes all = outcomes_of(runs, arms, config.validate);
    EXPECT_EQ(all.arms[1].training.noise, Noise::run);
    EXPECT_EQ(all.arms[1].held_out.noise, Noise::unknown);
    EXPECT_EQ(all.arms[1].verdict, Verdict::miss);
    const nlohmann::json json = nlohmann::json::parse(report::validate_json(all, arms, config).dump());
    const nlohmann::json& arm = json.at("arms")[1];
    EXPECT_EQ(json.at("seeds"), nlohmann::json::parse("[7]"));
    EXPECT_EQ(json.at("verdict"), "miss");
    EXPECT_EQ(arm.at("training_difference").at("noise"), "noise within one run only");
    EXPECT_TRUE(arm.at("held_out_difference").at("interval_nats")[0].is_null());
    EXPECT_NEAR(arm.at("losses")[0].get<double>(), 2.71, 1e-12);
    expect_contains(report::noise_text(all), "noise within one run only");
}

TEST(Outcome, AnOpenVerdictSaysHowMuchMoreWouldDecide) {
    std::vector<Arm> arms = arms_of({"bf16", "flow"});
    Config config = arms.front().config;
    const auto judged = [&](const Runs& runs, double limit) {
        config.validate.max_relative_loss_error = limit;
        const Outcomes all = outcomes_of(runs, arms, config.validate);
        EXPECT_EQ(all.arms[1].verdict, Verdict::inconclusive);
        return std::pair(all.arms[1], nlohmann::json(report::validate_json(all, arms, config).at("arms")[1]));
    };
    const auto [seeds, of_seeds] = judged(three_seeds(), 0.003 / 2.2);
    EXPECT_EQ(of_seeds.at("seeds_to_decide"), std::round(3 * seeds.growth.value()));
    const nlohmann::json& difference = of_seeds.at("training_difference");
    for (const int i : {0, 1})
        EXPECT_NEAR(difference.at("interval_percent")[i].get<double>(),
                    difference.at("interval_nats")[i].get<double>() * 100 / 2.2, 1e-12);
    const auto [one, of_one] = judged(one_seed(), 0.0101 / 2.7);
    const double tokens =
        static_cast<double>(100 * config.training.global_batch_size * config.model.seq_length);
    EXPECT_DOUBLE_EQ(of_one.at("tokens_to_decide").get<double>(), one.growth.value() * tokens);
}

// The pooled variance, which is that of seeds. Where it may not be pooled, blocks of steps.
TEST(Outcome, AnArmWithOnePairAmongSeveralSeedsSaysWhatItsNoiseIs) {
    Runs runs = three_seeds();
    runs.push_back(run_of("late", 1, 0.5));
    const std::vector<Arm> arms = arms_of({"bf16", "flow", "late"});
    const Outcomes all = outcomes_of(runs, arms, {});
    const std::string text = report::noise_text(all);
    expect_contains(text, "over 3 seeds");
    EXPECT_EQ(all.find("late")->training.noise, Noise::pooled);
    EXPECT_NEAR(all.find("late")->training.half_width(), 4.3026527 * 0.001, 1e-6);
    expect_contains(report::answer_text(all, arms.front().config), "with one seed");

    for (const int64_t seed : {1, 2, 3}) runs.push_back(run_of("wild", seed, seed == 2 ? 0.9 : 0));
    const std::string apart =
        report::noise_text(outcomes_of(runs, arms_of({"bf16", "flow", "late", "wild"}), {}));
    expect_contains(apart, "noise within one run only: late");
}

// Every figure of the table is a number.
TEST(Outcome, ATableWithHolesHasNoNan) {
    const std::vector<double> zero(kSteps, 0.0);
    Runs runs;
    for (const int64_t seed : {1, 2, 3}) {
        runs.push_back(run_of("bf16", seed, 0));
        runs.push_back(run_of("flow", seed, 0.001 * static_cast<double>(seed * seed)));
        runs.push_back(run_of("noisy", seed, 0.01 * static_cast<double>(seed)));
        runs.push_back(diverged("bad", seed));
        runs.push_back({.arm = "zero", .seed = seed, .curve = {.loss = zero, .grad_norm = zero}});
        runs.push_back({.arm = "to zero", .seed = seed, .curve = {.loss = zero, .grad_norm = zero}});
        runs.push_back(run_of(kControlArm, seed, 0));  // the bits of bf16
    }
    runs[0].curve.held_out = std::nan("");
    runs[9].curve.held_out = std::nan("");  // noisy, seed 2
    std::vector<Arm> arms = arms_of({"bf16", "flow", "noisy", "bad", "zero", "to zero", kControlArm});
    arms[5].against = "zero";
    const Config& config = arms.front().config;
    const Outcomes all = outcomes_of(runs, arms, config.validate);
    const std::string table = report::outcome_table(report::outcome_cells(all, config));
    EXPECT_EQ(table.find("nan"), std::string::npos) << table;
    EXPECT_EQ(table.find("inf"), std::string::npos) << table;
    EXPECT_EQ(all.find("flow")->held_out.pairs, 2);
    EXPECT_NEAR(all.find("flow")->base_held_out, 2.75, 1e-12) << "of the same seeds";
    EXPECT_NEAR(all.find("noisy")->base_held_out, 2.8, 1e-12) << "of the same seeds";
    EXPECT_FALSE(all.find("flow")->to_control) << "the control arm has no noise";
}

TEST(Outcome, PoolingIsSaidOnlyWhereAnIntervalHasIt) {
    const std::vector<double> noise = {0.003, -0.001, 0.002, 0.001, 0.004, -0.002, 0.003, 0.001, -0.001};
    Runs runs;
    for (const int64_t seed : {1, 2, 3})
        for (const size_t arm : {0, 1, 2})
            runs.push_back(run_of(std::vector{"a", "b", "c"}[arm], seed,
                                  noise[3 * arm + static_cast<size_t>(seed) - 1]));
    const std::string two = report::noise_text(outcomes_of(runs, arms_of({"a", "b"}), {}));
    EXPECT_EQ(two.find("pooled"), std::string::npos) << two << ": the interval of two arms is their own";
    runs.push_back(run_of("bf16", 1, 0));  // the baseline of one pair per arm
    const Outcomes all = outcomes_of(runs, arms_of({"bf16", "a", "b", "c"}), {});
    EXPECT_EQ(all.find("a")->training.noise, Noise::pooled);
    expect_contains(report::noise_text(all), "pooled");
}

TEST(Outcome, ThePageHasTheBandOfTheSeedsAndOneInterval) {
    std::vector<Arm> arms = arms_of({"bf16", "flow", "off", kControlArm});
    arms[2].against = "flow";
    const Config& config = arms.front().config;
    Runs runs = three_seeds();
    for (const int64_t seed : {1, 2, 3}) {
        runs.push_back(run_of("off", seed, 0.003));
        runs.push_back(run_of(kControlArm, seed, 0.001));
    }
    runs[3].curve.loss[95] -= 0.1;  // flow, seed 2: the same mean of the last ten
    runs[3].curve.loss[99] += 0.1;
    const Outcomes all = outcomes_of(runs, arms, config.validate);
    const Provenance provenance{.ranks = 1};
    const nlohmann::json page = expect_report_page(
        report::validate_page({"seeds", config, provenance}, all, nlohmann::json::array()));
    EXPECT_EQ(page.at("arms"), nlohmann::json(report::outcome_cells(all, config)));
    const nlohmann::json& curves = page.at("loss")[0].at("series");
    EXPECT_EQ(curves[0].at("x")[0], 1);
    EXPECT_NEAR(curves[0].at("y")[0].get<double>(), 2.2, 1e-12);
    EXPECT_EQ(curves[0].at("low").at("y")[0], 2.1);
    EXPECT_EQ(curves[0].at("high").at("y")[0], 2.3);
    for (size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(curves[i].at("name"), arms[i].name);
        EXPECT_EQ(curves[i].at("dashed"), i == 3) << "the control arm";
    }
    const nlohmann::json& differences = page.at("loss")[1];
    expect_contains(differences.at("title"), "from bf16, or from the arm named below");
    const nlohmann::json limit = {{"low", -0.25}, {"high", 0.25}, {"name", "limit"}};
    EXPECT_EQ(page.at("loss_dots").at("bands"), nlohmann::json::array({limit}));
    EXPECT_EQ(differences.at("lines")[0].at("y"), 0.25);
    EXPECT_EQ(differences.at("lines")[1].at("y"), -0.25);
    EXPECT_EQ(differences.at("bands")[0].at("low"), -100 * *all.noise);
    EXPECT_EQ(differences.at("bands")[0].at("high"), 100 * *all.noise);
    expect_contains(page.at("loss_dots_note"), "Mean loss of iterations 91 to 100.");
    const nlohmann::json& flow = differences.at("series")[0];
    EXPECT_NEAR(flow.at("low").at("y")[0].get<double>(), 100 * 0.001 / 2.1, 1e-9);
    EXPECT_NEAR(flow.at("high").at("y")[0].get<double>(), 100 * 0.003 / 2.3, 1e-9);
    EXPECT_EQ(flow.at("x")[0], config.validate.warmup_iters + 1);
    const nlohmann::json& row = page.at("loss_dots").at("rows")[0];
    ASSERT_EQ(row.at("dots").size(), 3u);
    EXPECT_NEAR(row.at("dots")[1][0].get<double>(), 100 * 0.002 / 2.2, 1e-9);
    EXPECT_TRUE(page.at("loss_dots").at("rows")[1].at("note").get<std::string>().ends_with(" % to flow"));
    EXPECT_NEAR(row.at("high").get<double>() - row.at("low").get<double>(),
                2 * 100 * all.arms[1].training.half_width() / 2.2, 1e-9);
}

}  // namespace
}  // namespace fp8flow
