// SPDX-License-Identifier: MIT
// `fp8flow plan` for every shipped configuration, at the number of GPUs it is meant for.
#include "tests/cli/command.h"
#include "tests/cli/provenance.h"
#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <map>
#include <sstream>

namespace fp8flow {
namespace {

struct Shipped {
    const char* name;
    int gpus;
};
// text.yaml names no data and is planned with a path.
constexpr Shipped kShipped[] = {{"quickstart", 2},
                                {"test", 1},
                                {"text", 2},
                                {"small_4gpu", 4},
                                {"h200_100m", 4},
                                {"evidence", 1},
                                {"qwen3_30b_a3b", 8},
                                {"mixtral_8x7b", 8},
                                {"deepseek_small", 1},
                                {"deepseek_v2_lite", 2},
                                {"deepseek_v3", 256},
                                {"moonlight_16b_a3b", 8},
                                {"layer_deepseek_v3", 4},
                                {"layer_deepseek_v3_1gpu", 1},
                                {"block_deepseek_v3_1gpu", 1},
                                {"layer_qwen3_1gpu", 1},
                                {"layer_deepseek_v2_lite", 4},
                                {"layer_qwen3_30b_a3b", 4},
                                {"layer_qwen3_235b_a22b", 4},
                                {"layer_mixtral_8x7b", 4}};

Texts plan_of(const std::string& name) {
    Texts line = {"plan", config_file(name)};
    if (name == "text") line.insert(line.end(), {"--set", "data.data_path=texts"});
    return line;
}

TEST(Plan, EveryShippedConfiguration) {
    size_t configs = 0;
    for (const auto& entry : std::filesystem::directory_iterator(FP8FLOW_SOURCE_DIR "/configs"))
        configs += entry.path().extension() == ".yaml";
    EXPECT_EQ(configs, std::size(kShipped)) << "a configuration is missing in this test";
    for (const Shipped& shipped : kShipped) {
        auto line = plan_of(shipped.name);
        line.insert(line.end(), {"--gpus", std::to_string(shipped.gpus)});
        const CommandResult plan = succeeded(fp8flow_alone(line));
        for (const char* part : {"Parameters", "FLOPs per token", "Memory per GPU", "Recompute"})
            expect_contains(plan.out, part);
        if (shipped.gpus > 1) expect_contains(plan.out, "Wire per rank and MoE layer");
        // Without --gpus: as many as share the experts.
        const CommandResult shorter = succeeded(fp8flow_alone(plan_of(shipped.name)));
        EXPECT_EQ(shorter.out, plan.out) << shipped.name;
    }
}

TEST(Plan, JsonGoesBelowOutAndNothingElseIsWritten) {
    TemporaryFolder folder;
    auto line = plan_of("test");
    succeeded(fp8flow_alone(line, folder.path()));
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    line.insert(line.end(), {"--out", "plans", "--json", "plan.json"});
    const CommandResult plan = succeeded(fp8flow_alone(line, folder.path()));
    const auto json = read_json(folder.path("plans/plan.json"));
    expect_provenance(json, "fp8flow plan ", 1);
    EXPECT_LT(json.at("memory_bytes").at("saved_used"), json.at("memory_bytes").at("saved_reserved"));
    line.back() = "../plan.json";
    failure(15, fp8flow_alone(line, folder.path()));
    EXPECT_FALSE(std::filesystem::exists(folder.path("plan.json")));
    line = with(plan_of("test"), {"--out", "page"});
    expect_contains(succeeded(fp8flow_alone(line, folder.path())).out, "page/report.html");
    line = with(line, {"--set", "precision.recipe=mxfp8"});
    expect_contains(succeeded(fp8flow_alone(line, folder.path())).out, "no report.html");
}

TEST(Plan, ABatchThatTheRanksDoNotShareIsPlannedLarger) {
    const CommandResult plan =
        succeeded(fp8flow_alone({"plan", config_file("layer_deepseek_v3"), "--gpus", "8"}));
    expect_contains(plan.out,
                    "training.global_batch_size is 4, and 8 GPUs take multiples of 8: planned with 8");
    expect_contains(plan.out, "8 GPUs (EP 4 x DP 2)");
    const CommandResult fits = fp8flow_alone({"plan", config_file("layer_deepseek_v3"), "--gpus", "4"});
    EXPECT_EQ(fits.out.find("planned with"), std::string::npos);
    const CommandResult table =
        succeeded(fp8flow_alone({"plan", config_file("layer_deepseek_v3"), "--gpus", "4,8,16"}));
    expect_contains(table.out,
                    "training.global_batch_size is 4, rounded up to multiples of micro-batch x GPUs: planned "
                    "with 8 on 8 GPUs, 16 on 16 GPUs\n");
}

TEST(Plan, OneRunIsPredictedBelowItsTables) {
    TemporaryFolder folder;
    const CommandResult plan =
        succeeded(fp8flow_alone({"plan", config_file("layer_deepseek_v3"), "--gpus", "4", "--out", "plans",
                                 "--json", "plan.json", "--picture", "four"},
                                folder.path()));
    for (const char* part :
         {"A prediction for the H200, calibrated 2026-11-27 from profile_deepseek_v3_4gpu_recipes.json",
          "Mean error on 38 runs on one host, of unseen models", "EP of parallel.expert_model_parallel_size,",
          "11.32 B", "one MoE layer and micro-batch", "Memory: fits, 51.1 GiB"})
        expect_contains(plan.out, part);
    expect_contains(succeeded(fp8flow_alone(plan_of("deepseek_v3"))).out, ",\n  moe layer ");
    const auto json = read_json(folder.path("plans/plan.json"));
    for (const char* key : {"recipe", "gpus", "expert_model_parallel_size", "tokens_per_rank", "parameters",
                            "flops_per_token", "memory_bytes", "recompute", "wire_bytes_per_layer"})
        EXPECT_TRUE(json.contains(key)) << key;
    const auto& prediction = json.at("prediction");
    EXPECT_EQ(prediction.at("memory_bytes"), json.at("memory_bytes").at("total"));
    EXPECT_EQ(prediction.at("basis"), "checked range");
    EXPECT_GT(prediction.at("step_seconds"), prediction.at("layer_seconds"));
    const std::string html = read_whole(folder.path("plans/report.html"));
    EXPECT_EQ(html, read_whole(folder.path("plans/four.html")));
    const auto page = expect_report_page(html);
    expect_contains(page.at("title"), "layer_deepseek_v3, predicted for the H200");
    EXPECT_EQ(page.at("plan").at("choices").size(), 1u);
}

TEST(Plan, ARecipeWithoutSharesIsPlannedAndNotPredicted) {
    const CommandResult plan = succeeded(
        fp8flow_alone({"plan", config_file("layer_deepseek_v3"), "--set", "precision.recipe=mxfp8"}));
    expect_contains(plan.out, "No prediction of time");
}

TEST(Plan, SeveralNumbersOfGpusAreATable) {
    TemporaryFolder folder;
    const CommandResult plan =
        succeeded(fp8flow_alone({"plan", config_file("qwen3_30b_a3b"), "--gpus", "8,64,2048", "--ep", "8,16",
                                 "--recipes", "bf16,fp8_flow", "--out", "plans", "--json", "table.json"},
                                folder.path()));
    expect_contains(plan.out, "extrapolation");
    for (const char* part : {"one row for each (token, host)", "EP: --ep; DP = GPUs / EP",
                             "micro-batch: training.micro_batch_size (", "networks of 90 to 22\nGB/s"})
        expect_contains(plan.out, part);
    const CommandResult slow = fp8flow_alone(
        {"plan", config_file("qwen3_30b_a3b"), "--gpus", "64", "--recipes", "fp8_flow", "--network", "10"});
    expect_contains(slow.out, "networks of 20 to 5\nGB/s");
    const auto json = read_json(folder.path("plans/table.json"));
    // 16 ranks of experts are more than 8 GPUs
    ASSERT_EQ(json.at("choices").size(), 2u + 4u + 4u);
    for (const auto& choice : json.at("choices"))
        EXPECT_EQ(choice.at("step_seconds_per_host").is_null(), choice.at("expert_model_parallel_size") == 8);
}

TEST(Plan, AHuggingFaceModelNeedsNoConfiguration) {
    TemporaryFolder folder;
    folder.write(
        "config.json",
        R"({"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
                   "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                   "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                   "max_position_embeddings": 32768, "tie_word_embeddings": false, "hidden_act": "silu"})");
    const CommandResult plan = succeeded(fp8flow_alone({"plan", "--hf-config", "config.json", "--gpus", "16",
                                                        "--gpu", "h800", "--set", "model.seq_length=4096"},
                                                       folder.path()));
    for (const char* part : {"uncalibrated: datasheet of the H800", "Does not fit", "Largest:",
                             "sequences of 4096 tokens (model.seq_length; the model takes up to 32768)"})
        expect_contains(plan.out, part);
    const CommandResult silent =
        fp8flow_alone({"plan", "--hf-config", "config.json", "--gpus", "16"}, folder.path());
    expect_contains(silent.out,
                    "sequences of 256 tokens (model.seq_length, by default; the model takes up to 32768)");
    const CommandResult profile = succeeded(
        fp8flow_alone({"profile", "--hf-config", "config.json", "--steps", "1", "--set", "num_layers=1",
                       "--set", "hidden_size=128", "--set", "moe_ffn_hidden_size=128", "--set",
                       "seq_length=16", "--set", "num_attention_heads=2", "--set", "num_query_groups=2"},
                      folder.path()));
    expect_contains(profile.out, "layer");
    expect_contains(failure(2, fp8flow_alone({"plan", "--gpus", "16"})),
                    "want a configuration, or --hf-config");
}

// What `plan --check` of earlier programs did. The profiles are one that gave the calibration, one of an
// earlier program, one with a part that the formulas leave out, and two that count.
TEST(Plan, TheCheckCountsRunsAndListsOthersApart) {
    TemporaryFolder folder;
    const auto check = [&](const Texts& options) {
        Texts line = {"python3", FP8FLOW_SOURCE_DIR "/scripts/calibrate.py", "--program", FP8FLOW_EXECUTABLE,
                      "--check"};
        for (const char* name :
             {"profile_deepseek_v3_4gpu_recipes", "profile_qwen3_1gpu",
              "profile_100m_4gpu_state_divided_overlapped", "exposed_mixtral_2gpu", "exposed_100m_4gpu",
              "profile_deepseek_v3_4gpu_hosts_across", "profile_deepseek_v3_4gpu_hosts_inside",
              "profile_deepseek_v3_8gpu_hosts_across"})
            line.push_back(fmt::format("{}/tests/data/profiles/{}.json", FP8FLOW_SOURCE_DIR, name));
        return RunningCommand(with(line, options), folder.path()).wait(60);
    };
    const CommandResult done =
        succeeded(check({"--max-error", "10", "--max-mean-error", "5", "--json", "check.json"}));
    expect_contains(done.out, "not counted, of earlier programs");
    const auto json = read_json(folder.path("check.json"));
    EXPECT_EQ(json.at("runs"), 6 + 6) << "graphs count, too";
    EXPECT_EQ(json.at("other models").at("runs"), 6 + 6);
    const std::map<std::string, std::string> apart = {
        {"profile_deepseek_v3_4gpu_recipes.json", "gave the calibration"},
        {"profile_qwen3_1gpu.json", "of a program before the calibration"},
        {"profile_100m_4gpu_state_divided_overlapped.json",
         "what a gather takes from the layer that runs meanwhile (overlap_param_gather)"},
        {"profile_deepseek_v3_4gpu_hosts_across.json", "on hosts that parallel.hosts makes of one machine"},
        {"profile_deepseek_v3_4gpu_hosts_inside.json", "on hosts that parallel.hosts makes of one machine"},
        {"profile_deepseek_v3_8gpu_hosts_across.json", "on hosts that parallel.hosts makes of one machine"}};
    EXPECT_EQ(json.at("hosts").at("runs"), 3);
    for (const auto& row : json.at("rows")) {
        EXPECT_TRUE(row.at("hosts") == "" || row.at("inside") == true) << row.at("file");
        const auto found = apart.find(row.at("file"));
        EXPECT_EQ(row.at("apart"), found == apart.end() ? "" : found->second);
        EXPECT_EQ(row.at("other model"),
                  !row.at("file").get<std::string>().starts_with("profile_deepseek_v3"));
    }
    expect_contains(failure(1, check({"--max-error", "1"})), "worse than allowed");
    expect_contains(failure(1, check({"--gpu", "h20"})), "no profile of H20 that can be compared");
}

class ShippedShares : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Kinds, ShippedShares, testing::Values("h200", "h100"));

// Within 0.1 %: the files have four digits, and their profiles were rounded since.
void expect_near(const nlohmann::json& made, const nlohmann::json& shipped, const std::string& at) {
    ASSERT_EQ(made.type_name(), std::string(shipped.type_name())) << at;
    ASSERT_EQ(made.size(), shipped.size()) << at;
    if (shipped.is_number())
        EXPECT_NEAR(made.get<double>(), shipped.get<double>(), 1e-3 * shipped.get<double>()) << at;
    else if (!shipped.is_structured())
        EXPECT_EQ(made, shipped) << at;
    else
        for (const auto& [key, value] : shipped.items())
            expect_near(shipped.is_array() ? made.at(std::stoul(key)) : made.at(key), value, at + "/" + key);
}

TEST_P(ShippedShares, AreThoseOfTheCalibrationScript) {
    const std::string root = FP8FLOW_SOURCE_DIR, results = root + "/tests/data/profiles",
                      file = root + "/configs/gpus/" + GetParam() + ".json";
    const auto shipped = read_json(file);
    const auto source = [&](const char* key) {
        return results + "/" + shipped.at("calibration").at(key).get<std::string>();
    };
    const CommandResult made = succeeded(
        RunningCommand({"python3", root + "/scripts/calibrate.py", source("source"), "--launches",
                        source("launches from"), "--attention", source("attention from"), "--datasheet", file,
                        "--check", results, root + "/docs/results", "--program", FP8FLOW_EXECUTABLE},
                       root)
            .wait(120));
    const auto json = nlohmann::json::parse(made.out);
    expect_near(json, shipped, GetParam());
    if (GetParam() != std::string("h200")) return;  // the H100's runs are of small models, which hosts bound
    const auto& error = json.at("calibration").at("check");
    for (const char* what : {"layer", "step"}) {
        EXPECT_LE(error.at(fmt::format("worst {} error", what)), 0.15);
        EXPECT_LE(error.at(fmt::format("mean {} error", what)), 0.05);
        EXPECT_LE(error.at("other models").at(fmt::format("mean {} error", what)), 0.08);
    }
    EXPECT_GE(error.at("other models").at("runs"), 12);
}

TEST(Plan, RankCountThatDoesNotFit) {
    expect_contains(failure(2, fp8flow_alone({"plan", config_file("quickstart"), "--gpus", "3"})),
                    "parallel.expert_model_parallel_size: got 2, want a divisor of the world size 3");
}

TEST(Program, DoctorAnswersFirstAndFitsAScreen) {
    TemporaryFolder folder;
    const CommandResult doctor = fp8flow_alone({"doctor"}, folder.path());
    EXPECT_EQ(doctor.err, "");
    EXPECT_EQ(doctor.status, doctor.out.find("fix: ") == std::string::npos ? 0 : 1) << doctor.out;
    for (const char* part : {"MPI", "processor", "disk", "shared memory", "GPU"})
        expect_contains(doctor.out, part);
    EXPECT_EQ(doctor.out.find("Runs use") == std::string::npos, doctor.status == 0);
    std::istringstream lines(doctor.out);
    int count = 0;
    for (std::string line; std::getline(lines, line); ++count) EXPECT_LE(line.size(), 120u) << line;
    EXPECT_LE(count, 40);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "a check leaves nothing";
    const CommandResult nowhere = fp8flow_alone({"doctor", "--out", "/proc/none"}, folder.path());
    EXPECT_EQ(nowhere.status, 1) << nowhere.out;
    expect_contains(nowhere.out, "fix: --out DIR");
}

TEST(Program, VersionAndHelp) {
    const CommandResult version = succeeded(fp8flow_alone({"--version"}));
    EXPECT_EQ(version.out.rfind("fp8flow 0.", 0), 0u) << version.out;
    const CommandResult keys = succeeded(fp8flow_alone({"--help-config"}));
    for (const char* key : {"hidden_size", "moe_router_topk", "recompute_modules", "max_relative_loss_error"})
        expect_contains(keys.out, key);
    for (const char* command : {"train", "validate", "plan"}) succeeded(fp8flow_alone({command, "--help"}));
}

}  // namespace
}  // namespace fp8flow
