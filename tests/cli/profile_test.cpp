// SPDX-License-Identifier: MIT
// `fp8flow profile`: its files, sums that agree, all recipes, the ablation, and routing as asked.
#include "tests/cli/command.h"
#include "tests/cli/provenance.h"
#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {
namespace {

using nlohmann::json;

Texts profile(const std::string& out, const Texts& more) {
    return test_run("profile", out, {"profile.profile_step_start=1", "profile.profile_step_end=3"}, more);
}

std::map<std::string, json> recipes_of(const std::string& out) {
    std::map<std::string, json> recipes;
    const json result = read_json(out + "/profile.json");
    for (const json& recipe : result.at("recipes")) recipes[recipe.at("name")] = recipe;
    return recipes;
}

double layer_sum(const json& recipe, const char* what) {
    double sum = 0;
    for (const json& row : recipe.at("rows"))
        if (row.at("part") == "moe layer")
            sum += row.at(what).is_object() ? row.at(what).at("median").get<double>()
                                            : row.at(what).get<double>();
    return sum;
}

const json* row_of(const json& recipe, const std::string& part, const std::string& stage,
                   const std::string& direction) {
    for (const json& row : recipe.at("rows"))
        if (row.at("part") == part && row.at("stage") == stage && row.at("direction") == direction)
            return &row;
    return nullptr;
}

// Complete events of a thread nest, and come in order of their beginning.
void expect_trace(const json& trace, int rank, const std::set<std::string>& threads) {
    std::set<std::string> named;
    std::map<int, std::vector<std::pair<double, double>>> open;
    std::map<int, double> last;
    std::map<int, int> events;
    for (const json& event : trace.at("traceEvents")) {
        EXPECT_EQ(event.at("pid"), rank);
        if (event.at("ph") == "M") {
            if (event.at("name") == "thread_name") named.insert(event.at("args").at("name"));
            continue;
        }
        EXPECT_EQ(event.at("ph"), "X");
        const int thread = event.at("tid");
        const double begin = event.at("ts"), end = begin + event.at("dur").get<double>();
        EXPECT_GE(end, begin);
        EXPECT_GE(begin, last[thread]);
        last[thread] = begin;
        auto& stack = open[thread];
        while (!stack.empty() && begin >= stack.back().second - 1e-9) stack.pop_back();
        if (!stack.empty()) {
            EXPECT_LE(end, stack.back().second + 1e-6) << event.dump();
        }
        stack.emplace_back(begin, end);
        ++events[thread];
    }
    EXPECT_EQ(named, threads);
    for (const auto& [thread, count] : events) EXPECT_GT(count, 30);
}

TEST(Profile, WritesItsFilesAndSumsAgree) {
    for (const int ranks : {1, 2}) {
        TemporaryFolder folder;
        const std::string out = folder.path("out");
        const CommandResult run = succeeded(fp8flow_on_ranks(
            ranks, profile(out, {"--set", "parallel.expert_model_parallel_size=" + std::to_string(ranks)})));
        EXPECT_EQ(run.err, "");
        std::set<std::string> wanted = {".lock", "config.yaml", "profile.json", "profile.log", "report.html"};
        for (int r = 0; r < ranks; ++r) wanted.insert("trace.rank" + std::to_string(r) + ".json");
        const std::string command = read_json(out + "/profile.json").at("command");
        expect_contains(command, "--set parallel.expert_model_parallel_size=" + std::to_string(ranks));
        EXPECT_EQ(names_in(out), wanted);
        const json written = read_json(out + "/profile.json");
        expect_provenance(written, "fp8flow profile ", ranks);
        EXPECT_TRUE(written.at("machine").at("device").is_string());
        EXPECT_FALSE(written.contains("noise floor"));
        const json page = expect_report_page(read_whole(out + "/report.html"));
        EXPECT_EQ(page.at("profile").at("recipes").size(), 3u);
        for (int r = 0; r < ranks; ++r)
            expect_trace(read_json(out + "/trace.rank" + std::to_string(r) + ".json"), r,
                         {"bf16", "fp8_blockwise", "fp8_flow"});

        const auto recipes = recipes_of(out);
        ASSERT_EQ(recipes.size(), 3u);
        for (const auto& [name, recipe] : recipes) {
            const double stages = layer_sum(recipe, "seconds"), step = recipe.at("step seconds");
            EXPECT_GT(stages, 0) << name;
            EXPECT_LT(recipe.at("layer seconds").at("min").get<double>(), step) << name;
            EXPECT_EQ(recipe.at("layer seconds by step").size(), 2u);
            EXPECT_TRUE(recipe.at("exposed wire seconds").is_null()) << name;
            EXPECT_GT(recipe.at("wire seconds alone").get<double>(), 0) << name;
            EXPECT_LE(recipe.at("wire seconds alone").get<double>(),
                      1.001 * recipe.at("wire seconds").get<double>())
                << name;
            EXPECT_EQ(recipe.at("layer clock hertz").at("median"), 0.0) << "the host's clock is not known";
            EXPECT_NEAR(layer_sum(recipe, "share"), 1.0, 1e-9) << name;
            EXPECT_GT(recipe.at("saved bytes used").get<int64_t>(), 0) << name;
            EXPECT_LT(recipe.at("saved bytes used"), recipe.at("saved bytes reserved")) << name;
            EXPECT_GT(recipe.at("flops per second per gpu").get<double>(), 0) << name;
            EXPECT_NEAR(recipe.at("expert load max over mean").get<double>(), 1.0, 1e-9);
            // 32 rows per rank, expert and micro-batch, in groups of 128
            EXPECT_EQ(recipe.at("padding share"), 1 - 0.25 * ranks) << name;
            EXPECT_EQ(recipe.at("wait seconds").get<double>() > 0, ranks > 1) << name;
            EXPECT_LT(recipe.at("wait seconds"), recipe.at("wire seconds")) << name;
            EXPECT_EQ(recipe.at("parts above ceiling").size(), 14u) << name;
            EXPECT_TRUE(recipe.at("passes joules per token").is_null()) << "the host does not count";
            for (const json& row : recipe.at("rows")) {
                EXPECT_LE(row.at("seconds").at("min").get<double>(),
                          row.at("seconds").at("median").get<double>());
                EXPECT_LE(row.at("seconds").at("median").get<double>(),
                          row.at("seconds").at("max").get<double>());
            }
            // 64 tokens a rank to 2 of 4 experts: 128 rows a rank; W1 [256, 128], W2 [128, 128]
            EXPECT_EQ(row_of(recipe, "moe layer", "fc1", "forward")->at("flops"), 2.0 * 128 * 256 * 128);
            EXPECT_EQ(row_of(recipe, "moe layer", "fc2 wgrad", "backward")->at("flops"),
                      2.0 * 128 * 128 * 128);
            // two heads of 64 for queries, one each for keys and values: 256 columns from 128
            for (const auto& [direction, products] : {std::pair{"forward", 1}, std::pair{"backward", 2}}) {
                EXPECT_EQ(row_of(recipe, "attention", "qkv", direction)->at("product flops"),
                          products * 2.0 * 64 * 128 * 256);
                EXPECT_EQ(row_of(recipe, "attention", "proj", direction)->at("product flops"),
                          products * 2.0 * 64 * 128 * 128);
                const json* core = row_of(recipe, "attention", "core attention", direction);
                ASSERT_NE(core, nullptr) << name;
                EXPECT_GT(core->at("flops").get<double>(), 0);
                // what lies between them is no work
                EXPECT_EQ(row_of(recipe, "attention", "attention", direction)->at("bytes"), 0.0);
            }
            EXPECT_NE(row_of(recipe, "optimizer", "optimizer", "update"), nullptr);
            EXPECT_NE(row_of(recipe, "gradient reduction", "gradient reduction", "update"), nullptr);
            // what left the ranks in a step, by stage and as a whole; 8 sequences are 4 micro-batches of 2 on
            // one rank, 2 on two
            const json& wire = recipe.at("wire bytes");
            const double total = wire.at("routing").get<double>() + wire.at("dispatch").get<double>() +
                                 wire.at("combine").get<double>();
            EXPECT_EQ(total > 0, ranks > 1);
            EXPECT_NEAR(layer_sum(recipe, "wire bytes") * (4 / ranks), total, 0.1 * total) << name;
        }
        // explicit casts of the MoE layer, its shared expert included
        EXPECT_EQ(recipes.at("bf16").at("casts"), 0.0);
        EXPECT_EQ(recipes.at("fp8_flow").at("casts"), 1.0);
        EXPECT_EQ(recipes.at("fp8_blockwise").at("casts"), 8.0);
        if (ranks > 1) {
            EXPECT_LT(recipes.at("fp8_flow").at("wire bytes").at("dispatch").get<double>(),
                      0.6 * recipes.at("bf16").at("wire bytes").at("dispatch").get<double>());
        }
        const std::string log = read_whole(out + "/profile.log");
        expect_contains(log, "recipes side by side");
        const Texts logged = lines_of(log), printed = lines_of(run.out);
        EXPECT_LE(printed.size(), 40u) << run.out;
        for (const std::string& line : printed) {
            if (line.find(out) == std::string::npos) {
                EXPECT_LE(line.size(), 120u) << line;
            }
            EXPECT_NE(std::find(logged.begin(), logged.end(), line), logged.end()) << line;
        }
        for (const char* text :
             {"| ETA ", "speed-up", "largest stages of fp8_flow", "to improve next", "what to try next"})
            expect_contains(run.out, text);
    }
}

// Four ranks taken to be two hosts: bytes by level, with one and with two levels of exchange.
TEST(Profile, WireBytesAreCountedByLevel) {
    for (const char* dispatcher : {"alltoall", "hierarchical"}) {
        TemporaryFolder folder;
        const std::string out = folder.path("out");
        succeeded(fp8flow_on_ranks(
            4, profile(out, {"--recipes", "fp8_flow", "--set", "parallel.expert_model_parallel_size=4",
                             "--set", "parallel.hosts=2x2", "--set",
                             std::string("parallel.moe_token_dispatcher_type=") + dispatcher})));
        const json recipe = recipes_of(out).at("fp8_flow");
        const json& bytes = recipe.at("wire bytes");
        EXPECT_GT(bytes.at("between hosts").get<double>(), 0);
        EXPECT_GT(bytes.at("inside hosts").get<double>(), 0);
        EXPECT_EQ(recipe.at("work seconds by rank").size(), 4u);
        EXPECT_GE(recipe.at("slowest rank").at("over median").get<double>(), 0);
        expect_contains(read_whole(out + "/profile.log"), "wire bytes between hosts");
    }
}

TEST(Profile, AblationAddsTheSwitchesOfTheFlow) {
    TemporaryFolder folder;
    succeeded(
        fp8flow_alone(profile("out", {"--recipes", "fp8_flow", "--ablate", "--steps", "1"}), folder.path()));
    const auto recipes = recipes_of(folder.path("out"));
    for (const char* name : {"fp8_flow", "no_quantize_first", "double_quant", "no_perm_pad", "no_act_fusion",
                             "no_norm_fusion", "+ moe_expert"})
        EXPECT_EQ(recipes.count(name), 1u) << name;
    EXPECT_TRUE(read_json(folder.path("out/profile.json")).at("noise floor").is_null());
    expect_contains(read_whole(folder.path("out/profile.log")), "no noise floor");
    EXPECT_GT(recipes.at("double_quant").at("casts").get<double>(),
              recipes.at("fp8_flow").at("casts").get<double>());
    EXPECT_NE(row_of(recipes.at("+ moe_expert"), "moe layer", "fc1", "backward"), nullptr);
    EXPECT_EQ(row_of(recipes.at("fp8_flow"), "moe layer", "fc1", "backward"), nullptr);
}

TEST(Profile, RoutingIsForcedAsAsked) {
    for (const auto& [routing, low, high] :
         {std::tuple{"skewed_1.25", 1.2, 1.3}, std::tuple{"skewed_2.0", 1.95, 2.05},
          std::tuple{"data", 1.0, 2.0}}) {
        TemporaryFolder folder;
        succeeded(fp8flow_alone(profile("out", {"--recipes", "bf16", "--steps", "1", "--set",
                                                std::string("profile.routing=") + routing}),
                                folder.path()));
        const double load = recipes_of(folder.path("out")).at("bf16").at("expert load max over mean");
        EXPECT_GE(load, low) << routing;
        EXPECT_LE(load, high) << routing;
    }
}

TEST(Profile, RefusesWhatItCannotMeasure) {
    TemporaryFolder folder;
    expect_contains(
        failure(2, fp8flow_alone(profile("out", {"--set", "profile.profile_step_start=3"}), folder.path())),
        "profile.profile_step_end: got 3, want more than profile_step_start = 3");
    expect_contains(failure(2, fp8flow_alone(profile("out", {"--recipes", "fp8_flw"}), folder.path())),
                    "did you mean 'fp8_flow'");
}

// Every schedule is an arm; and two results, here one and itself, are compared without a run.
TEST(Profile, SchedulesAndComparison) {
    TemporaryFolder folder;
    const std::string out = folder.path("out"), file = out + "/profile.json";
    // keys that would end it, of a run with fixed routing and limits
    const CommandResult run = succeeded(fp8flow_alone(
        profile(out, {"--recipes", "fp8_flow", "--schedules", "--steps", "1", "--set", "model.seq_length=16",
                      "--set", "output.record_routing=" + folder.path("experts"), "--set",
                      "data.routing_path=nowhere", "--set", "training.grad_norm_limit=1e-3"})));
    EXPECT_FALSE(std::filesystem::exists(folder.path("experts")));
    for (const char* key : {"output.record_routing", "data.routing_path"})
        expect_contains(run.out, std::string("warning: ") + key + " = ");
    const auto recipes = recipes_of(out);
    for (const char* name : {"fp8_flow", "fp8_flow + shared", "fp8_flow + wgrad", "fp8_flow + shared + wgrad",
                             "fp8_flow + turns", "fp8_flow + graph"}) {
        ASSERT_EQ(recipes.count(name), 1u) << name;
        EXPECT_TRUE(recipes.at(name).at("joules per step").is_null()) << "the host does not count";
        EXPECT_EQ(recipes.at(name).at("casts"), 1.0);
    }
    EXPECT_EQ(recipes.size(), 6u);

    const CommandResult same = succeeded(fp8flow_alone({"profile", "--compare", file, file}));
    for (const char* text : {"fp8_flow + shared + wgrad", "fc1 wgrad", "+0.000  not resolved", "layer",
                             "commit", "the same machine and configuration"})
        expect_contains(same.out, text);
    EXPECT_EQ(same.out.find("1.000 x"), std::string::npos);

    // Another machine and configuration, and twice the time: keys first, then the ratio.
    json other_run = read_json(file), both = other_run;
    other_run["machine"]["gpu"] = "NVIDIA H200";
    std::string config = other_run.at("config");
    config.replace(config.find("seq_length: 16"), 14, "seq_length: 32");
    other_run["config"] = config;
    for (json* side : {&both, &other_run}) {
        (*side)["steps"] = 3;
        json& recipe = (*side)["recipes"][0];
        const double layer = side == &both ? 0.5 : 1.0;
        recipe["layer seconds"] = {{"median", layer}, {"min", layer}, {"max", layer}};
        recipe.erase("step seconds by step");  // as programs before wrote it
    }
    const CommandResult differ =
        succeeded(fp8flow_alone({"profile", "--compare", folder.write("a.json", both.dump()),
                                 folder.write("b.json", other_run.dump())}));
    for (const char* text : {"the runs differ in more than the program", "gpu: not known | NVIDIA H200",
                             "model.seq_length: 16 | 32", "+500.000", "2.000 x", "spread not known"})
        expect_contains(differ.out, text);
    EXPECT_LT(differ.out.find("model.seq_length"), differ.out.find("delta ms"));
    EXPECT_LT(differ.out.find("layer  "), differ.out.find("fc1")) << "the answer first";

    // Of two folders, and drawn: the stage that differs most comes first.
    auto& rows = other_run["recipes"][0]["rows"];
    rows.back()["seconds"] = {{"median", 0.25}, {"min", 0.25}, {"max", 0.25}};
    for (const auto& [name, run] : {std::pair{"old", both}, {"new", other_run}}) {
        std::filesystem::create_directory(folder.path(name));
        folder.write(std::string(name) + "/profile.json", run.dump());
    }
    succeeded(fp8flow_alone({"profile", "--compare", "old", "new", "--out", "."}, folder.path()));
    const auto page = expect_report_page(read_whole(folder.path("compare.html")));
    const auto& shown = page.at("compare")[0].at("rows");
    EXPECT_EQ(shown[0].at("label"), "layer");
    EXPECT_TRUE(shown[0].at("resolved"));
    expect_contains(shown[2].at("label").get<std::string>(), rows.back().at("stage"));
    for (size_t i = 3; i < shown.size(); ++i)
        EXPECT_LE(std::abs(shown[i].at("delta").get<double>()),
                  std::abs(shown[i - 1].at("delta").get<double>()));
    expect_contains(failure(10, fp8flow_alone({"profile", "--compare", file, folder.path("none.json")})),
                    "none.json: No such file");
    expect_contains(
        failure(10, fp8flow_alone({"profile", "--compare", file, folder.write("other.json", "{}")})),
        "other.json is no profile.json");
    expect_contains(failure(2, fp8flow_alone({"profile"})), "--compare OLD NEW");
}

}  // namespace
}  // namespace fp8flow
