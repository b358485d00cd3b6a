// SPDX-License-Identifier: MIT
// Libraries of --plugin. Kernels for bench: the example's is found equal and timed; wrong results are
// reported; the rows stand in JSON, CSV and Markdown. Recipes: docs/usage/new_recipe.md as a reader follows
// it, its commands in their order, in a folder as a clone has it. What cannot be loaded is refused with the
// reason.
#include "tests/cli/command.h"

#include <gtest/gtest.h>

#include <fmt/ranges.h>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

namespace fp8flow {
namespace {

using nlohmann::json;

std::string library(const std::string& name) {
    return std::string(FP8FLOW_BINARY_DIR "/tests/lib") + name + ".so";
}

CommandResult bench(const Texts& more) {
    return fp8flow_alone(with({"bench", "--backend", "reference", "--samples", "3"}, more));
}

json row_of(const std::string& operation, const std::string& plugin, const std::string& shape) {
    TemporaryFolder folder;
    Texts line = {operation, "--plugin", library(plugin), "--out", folder.path("out")};
    if (!shape.empty()) line.insert(line.end(), {"--shape", shape});
    const CommandResult result = succeeded(bench(line));
    json row = read_json(folder.path("out/bench.json")).at(0);
    expect_contains(result.out, row.at("peer_result").get<std::string>());
    return row;
}

TEST(BenchPlugin, ExampleIsEqualAndTimed) {
    const json row = row_of("add", "bench_plugin", "dtype=f32");
    EXPECT_EQ(row.at("peer"), "mine");
    EXPECT_EQ(row.at("peer_result"), "equal");
    EXPECT_GT(row.at("peer_us").get<double>(), 0.0);
}

TEST(BenchPlugin, DescribeNamesWhatAPluginGets) {
    const CommandResult reported =
        succeeded(bench({"swiglu_quantize", "--describe", "--shape", "M=256,G=2,F=128,rows=balanced"}));
    for (const char* line :
         {"h +bf16 +\\[256, 256\\]", "a +e4m3 +\\[256, 128\\]", "a.scales +f32 +\\[1, 256\\] +vec128",
          "groups.counts +i64 +\\[2\\]", "other arguments: groups.num_groups 2"})
        EXPECT_TRUE(std::regex_search(reported.out, std::regex(line))) << line << '\n' << reported.out;
    expect_contains(failure(2, bench({"swiglu_quantize", "--describe", "--shape", "fused=no"})),
                    "several calls or an exchange");
}

TEST(BenchPlugin, WrongResultsAreTold) {
    const json one = row_of("add", "wrong_plugin", "dtype=f32,T=8,H=128");
    expect_contains(one.at("peer_result").get<std::string>(), "y: nmse ");
    expect_contains(one.at("peer_result").get<std::string>(), "(1 of 1024 values)");
    const json none = row_of("swiglu", "wrong_plugin", "");
    expect_contains(none.at("peer_result").get<std::string>(), "a: ");
}

TEST(BenchPlugin, ArgumentsAreNamed) {
    const json row = row_of("quantize_rows", "wrong_plugin", "H=256");
    EXPECT_EQ(row.at("peer_result"), "left out: returned 1");
    EXPECT_TRUE(row.at("peer_us").is_null());
}

TEST(BenchPlugin, WhatCannotBeUsedIsRefused) {
    const auto refused = [](const Texts& line, const std::string& reason) {
        expect_contains(failure(ExitCode::usage, bench(line)), reason);
    };
    refused({"add", "--plugin", "/nowhere/plugin.so"}, "/nowhere/plugin.so");
    refused({"add", "--plugin", library("fp8flow_faults")}, "exports no fp8flow_plugin");
    refused({"cast", "--plugin", library("wrong_plugin")}, "it has add, quantize_rows, swiglu");
}

// ---- recipes

namespace fs = std::filesystem;

const std::string kSources = FP8FLOW_SOURCE_DIR;

// The blocks of the page that begin with this fence, without the blanks that a list puts in front of them.
Texts blocks_of(const std::string& page, const std::string& fence) {
    Texts blocks;
    bool inside = false, wanted = false;
    for (const std::string& line : lines_of(page)) {
        const size_t indent = std::min(line.find_first_not_of(' '), line.size());
        if (line.substr(indent).starts_with("```")) {
            inside = !inside;
            wanted = inside && line.substr(indent) == fence;
            if (wanted) blocks.emplace_back();
        } else if (inside && wanted) {
            blocks.back() += line.substr(std::min<size_t>(indent, 3)) + "\n";
        }
    }
    return blocks;
}

class NewRecipe : public testing::Test {
protected:
    void SetUp() override {
        for (const char* name : {"configs", "docs", "examples", "include", "kernels", "layers"})
            fs::create_symlink(fs::path(kSources) / name, folder_.path(name));
        fs::create_directories(folder_.path("build/cpu"));
        fs::create_directories(folder_.path("runs"));
        fs::create_symlink(FP8FLOW_EXECUTABLE, folder_.path("build/cpu/fp8flow"));
    }
    CommandResult shell(const std::string& line) {
        return RunningCommand({"bash", "-c", line}, folder_.path()).wait(240);
    }
    // runs/NAME.so of a source.
    void build(const std::string& name, const std::string& source) {
        folder_.write("runs/" + name + ".cpp", source);
        succeeded(shell("g++ -std=c++20 -shared -fPIC -I include -I . runs/" + name + ".cpp -o runs/" + name +
                        ".so"));
    }
    TemporaryFolder folder_;
};

TEST_F(NewRecipe, ThePageIsFollowed) {
    const std::string page = read_whole(kSources + "/docs/usage/new_recipe.md");
    const std::string example = read_whole(kSources + "/examples/custom_recipe.cpp");
    const Texts code = blocks_of(page, "```cpp");
    ASSERT_EQ(code.size(), 2u);
    EXPECT_NE(example.find(code[0]), std::string::npos) << code[0];

    std::map<std::string, int> ran;
    for (const std::string& block : blocks_of(page, "```")) {
        std::string line = block.substr(0, block.find('\n'));
        const std::string program = line.substr(0, line.find(' '));
        if (program != "mkdir" && program != "g++" && program != "mpirun") continue;  // output
        // As printed, but short.
        if (program == "mpirun")
            line +=
                " --set training.train_iters=3 --set training.eval_iters=1 --set validate.warmup_iters=0 "
                "--set model.seq_length=32 --set training.micro_batch_size=4 --set "
                "training.global_batch_size=8 "
                "--set moe.num_experts=2 --set moe.moe_router_topk=2 "
                "--set profile.profile_step_start=1";
        const CommandResult result = shell(line);
        const bool missed = line.find(" validate ") != std::string::npos && result.status == 1;
        ASSERT_TRUE(result.status == 0 || missed) << line << "\n" << result.out << result.err;
        ++ran[program];
    }
    EXPECT_EQ(ran, (std::map<std::string, int>{{"g++", 1}, {"mkdir", 1}, {"mpirun", 4}}));

    const std::string log = read_whole(folder_.path("runs/mine/train.log"));
    expect_contains(log, "recipe: e5m2_dy (");
    expect_contains(read_whole(folder_.path("runs/mine_stats/tensor_stats.json")), "swiglu");

    // Its forward is fp8_flow's, so the first loss is; dY rounds otherwise.
    std::map<std::string, json> first;
    for (const std::string& line : lines_of(read_whole(folder_.path("runs/mine_validate/loss.jsonl")))) {
        const json record = json::parse(line);
        if (record.at("iteration") == 1) first[record.at("arm")] = record;
    }
    const json own = first.at("e5m2_dy"), flow = first.at("fp8_flow"), bf16 = first.at("bf16");
    EXPECT_EQ(own.at("lm_loss"), flow.at("lm_loss"));
    EXPECT_NE(own.at("lm_loss"), bf16.at("lm_loss"));
    EXPECT_NE(own.at("grad_norm"), flow.at("grad_norm"));
    const double norm = bf16.at("grad_norm");
    EXPECT_NEAR(own.at("grad_norm").get<double>(), norm, 0.02 * norm);

    const CommandResult joined =  // without the library
        shell("build/cpu/fp8flow validate --join runs/mine_validate --out runs/mine_joined");
    EXPECT_LE(joined.status, 1) << joined.err;
    expect_contains(joined.out, "e5m2_dy");

    const auto profile = read_json(folder_.path("runs/mine_profile/profile.json"));
    expect_contains(profile.dump(), "\"e5m2_dy\"");
}

// Step 7: each line in the place of the example's.
TEST_F(NewRecipe, ARuleIsReplaced) {
    const Texts code = blocks_of(read_whole(kSources + "/docs/usage/new_recipe.md"), "```cpp");
    ASSERT_EQ(code.size(), 2u);
    const std::string source = read_whole(kSources + "/examples/custom_recipe.cpp");
    const size_t at = source.find("        if (tensor == Quantized::dy)");
    ASSERT_NE(at, std::string::npos);
    std::set<std::string> losses;
    for (const std::string& rule : lines_of(code[1])) {
        build("own", std::string(source).replace(at, source.find('\n', at) - at, rule));
        succeeded(shell(
            "build/cpu/fp8flow train configs/test.yaml --plugin runs/own.so --set training.train_iters=2 "
            "--set precision.moe_scaling_aware_transpose=true --out runs/rule --overwrite"));
        losses.insert(fmt::format("{}", fmt::join(losses_of(folder_.path("runs/rule")), " ")));
    }
    EXPECT_EQ(losses.size(), 3u);
}

TEST_F(NewRecipe, ACommandThatIsPrintedHasThePlugin) {
    build("own", read_whole(kSources + "/examples/custom_recipe.cpp"));
    const std::string few = " --set training.train_iters=3 --set training.eval_iters=1";
    const CommandResult run =
        succeeded(shell("build/cpu/fp8flow train configs/test.yaml --plugin runs/own.so --out runs/t" + few));
    size_t printed = 0;
    const std::regex command(R"(\S*/fp8flow (validate|profile) .*)");
    for (const std::string& line : lines_of(run.out)) {
        std::smatch found;
        if (!std::regex_search(line, found, command)) continue;
        const CommandResult next = shell(found.str() + " --set validate.recipes=[bf16]");
        EXPECT_TRUE(next.status == 0 || next.status == 1) << line << "\n" << next.err;
        expect_contains(next.out, "e5m2_dy");
        ++printed;
    }
    EXPECT_EQ(printed, 2u) << run.out;
    // The run's own configuration names the flow: without its library it says what is missing.
    expect_contains(failure(2, shell("build/cpu/fp8flow plan runs/t/config.yaml")),
                    "precision.flow: got e5m2_dy, want the name of a flow that the library of");
}

TEST_F(NewRecipe, WhatCannotBeUsedIsRefused) {
    const std::string start =
        "#include <fp8flow/recipe.h>\n"
        "using namespace fp8flow;\n"
        "struct A final : CastFlow { using CastFlow::CastFlow;\n"
        "  WeightFormat weight_format() const override { return {.plain = false, .fp8_layout = "
        "ScaleLayout::row}; }\n"
        "  ScaleLayout row_layout() const override { return ScaleLayout::row; }\n"
        "  ScaleLayout column_layout() const override { return ScaleLayout::group_row; } };\n";
    const auto refused = [&](const std::string& arguments, const std::string& reason) {
        expect_contains(failure(2, shell("build/cpu/fp8flow plan configs/test.yaml " + arguments)), reason);
    };
    build("two", start +
                     "FP8FLOW_RECIPES(register_flow<A>(\"a\", Recipe::fp8_rowwise), "
                     "register_flow<A>(\"b\", Recipe::fp8_rowwise))\n");
    refused("--plugin runs/two.so", "--plugin: got a, b, want one of them in --set precision.flow=NAME");
    refused("--plugin runs/two.so --set precision.flow=c", "registers: a, b");
    const CommandResult chosen = succeeded(
        shell("build/cpu/fp8flow plan configs/test.yaml --plugin runs/two.so --set precision.flow=b "
              "--set moe.moe_row_alignment=32"));
    expect_contains(chosen.out, "Plan: recipe b");
    expect_contains(chosen.out,
                    "warning: precision.flow is b, so precision.recipe is fp8_rowwise and not fp8_flow");
    refused("--plugin runs/two.so --set precision.flow=b --set moe.moe_row_alignment=1",
            "moe.moe_row_alignment: got 1, want 16 or 32 or 128 with recipe b");
    build("taken", start + "FP8FLOW_RECIPES(register_flow<A>(\"mxfp8\", Recipe::fp8_rowwise))\n");
    refused("--plugin runs/taken.so", "\"mxfp8\" is the name of a recipe");
    build("other", start + "extern \"C\" const RecipePlugin fp8flow_recipes{kRecipeHeaders + 1, [] {}};\n");
    refused("--plugin runs/other.so", "built with the headers of another fp8flow");
    build("throws",
          "#include <fp8flow/recipe.h>\n"
          "using namespace fp8flow;\n"
          "struct T final : Fp8Flow { using Fp8Flow::Fp8Flow; Rule rule_of(Quantized) const override { throw "
          "5; } };\n"
          "FP8FLOW_RECIPES(register_flow<T>(\"t\", Recipe::fp8_flow))\n");
    expect_contains(failure(70, shell("build/cpu/fp8flow plan configs/test.yaml --plugin runs/throws.so")),
                    "an exception of unknown type");
    refused("--plugin " + library("bench_plugin"), "exports no fp8flow_recipes");
    refused("--plugin runs/nowhere.so", "runs/nowhere.so");
}

}  // namespace
}  // namespace fp8flow
