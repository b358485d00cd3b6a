// SPDX-License-Identifier: MIT
// docs/usage/new_recipe.md as a reader follows it: its commands in their order, in a folder as a clone has
// it; what a recipe of one's own computes; and what is refused.
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

namespace fp8flow {
namespace {

namespace fs = std::filesystem;
using Texts = std::vector<std::string>;

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
        const CommandResult built = shell("g++ -std=c++20 -shared -fPIC -I include -I . runs/" + name +
                                          ".cpp -o runs/" + name + ".so");
        ASSERT_EQ(built.status, 0) << built.err;
    }
    TemporaryFolder folder_;
};

TEST_F(NewRecipe, ThePageIsFollowed) {
    const std::string page = read_whole(kSources + "/docs/usage/new_recipe.md");
    const std::string example = read_whole(kSources + "/examples/custom_recipe.cpp");
    const Texts code = blocks_of(page, "```cpp");
    ASSERT_EQ(code.size(), 1u);
    EXPECT_NE(example.find(code[0]), std::string::npos) << code[0];

    std::map<std::string, int> ran;
    for (const std::string& block : blocks_of(page, "```")) {
        std::string line = block.substr(0, block.find('\n'));
        const std::string program = line.substr(0, line.find(' '));
        if (program != "mkdir" && program != "g++" && program != "build/cpu/fp8flow") continue;  // output
        if (program == "build/cpu/fp8flow")  // as printed, but short
            line +=
                " --set training.train_iters=4 --set training.eval_iters=1 --set validate.warmup_iters=0 "
                "--set model.seq_length=32";
        const CommandResult result = shell(line);
        const bool missed = line.find(" validate ") != std::string::npos && result.status == 1;
        ASSERT_TRUE(result.status == 0 || missed) << line << "\n" << result.out << result.err;
        ++ran[program];
    }
    EXPECT_EQ(ran, (std::map<std::string, int>{{"build/cpu/fp8flow", 4}, {"g++", 1}, {"mkdir", 1}}));

    const std::string log = read_whole(folder_.path("runs/mine/train.log"));
    EXPECT_NE(log.find("recipe: rows_of_128 (BF16 rows on the wire"), std::string::npos) << log;
    EXPECT_NE(read_whole(folder_.path("runs/mine_stats/tensor_stats.json")).find("swiglu"),
              std::string::npos);

    // Its forward is fp8_blockwise's, so the first loss is; its weight gradients are its own.
    std::map<std::string, std::vector<double>> losses;
    for (const std::string& line : lines_of(read_whole(folder_.path("runs/mine_validate/loss.jsonl")))) {
        const auto record = nlohmann::json::parse(line);
        losses[record.at("arm")].push_back(record.at("lm_loss"));
    }
    ASSERT_EQ(losses.count("rows_of_128") * losses["rows_of_128"].size(), 4u);
    EXPECT_EQ(losses["rows_of_128"][0], losses["fp8_blockwise"][0]);
    EXPECT_NE(losses["rows_of_128"][3], losses["fp8_blockwise"][3]);
    EXPECT_NE(losses["rows_of_128"][0], losses["bf16"][0]);
    EXPECT_NEAR(losses["rows_of_128"][3], losses["bf16"][3], 0.01);

    const auto profile = nlohmann::json::parse(read_whole(folder_.path("runs/mine_profile/profile.json")));
    EXPECT_NE(profile.dump().find("\"rows_of_128\""), std::string::npos);
}

TEST_F(NewRecipe, ACommandThatIsPrintedHasThePlugin) {
    ASSERT_EQ(shell("cp examples/custom_recipe.cpp runs/own.cpp").status, 0);
    build("own", read_whole(kSources + "/examples/custom_recipe.cpp"));
    const std::string few = " --set training.train_iters=3 --set training.eval_iters=1";
    const CommandResult run =
        shell("build/cpu/fp8flow train configs/test.yaml --plugin runs/own.so --out runs/t" + few);
    ASSERT_EQ(run.status, 0) << run.err;
    size_t printed = 0;
    for (const std::string& line : lines_of(run.out)) {
        const size_t at = line.find("build/cpu/fp8flow ");
        if (at == std::string::npos) continue;
        const CommandResult next = shell(line.substr(at) + " --set validate.recipes=[bf16]");
        EXPECT_TRUE(next.status == 0 || next.status == 1) << line << "\n" << next.err;
        expect_contains(next.out, "rows_of_128");
        ++printed;
    }
    EXPECT_EQ(printed, 2u) << run.out;
    // The run's own configuration names the flow: without its library it says what is missing.
    const CommandResult alone = shell("build/cpu/fp8flow plan runs/t/config.yaml");
    EXPECT_EQ(alone.status, 2);
    expect_contains(alone.err,
                    "precision.flow: got rows_of_128, want the name of a flow that the library of");
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
        const CommandResult result = shell("build/cpu/fp8flow plan configs/test.yaml " + arguments);
        EXPECT_EQ(result.status, 2) << arguments << result.out << result.err;
        expect_contains(result.err, reason);
    };
    build("two", start +
                     "FP8FLOW_RECIPES(register_flow<A>(\"a\", Recipe::fp8_rowwise), "
                     "register_flow<A>(\"b\", Recipe::fp8_rowwise))\n");
    refused("--plugin runs/two.so", "--plugin: got a, b, want one of them in --set precision.flow=NAME");
    refused("--plugin runs/two.so --set precision.flow=c", "registers: a, b");
    const CommandResult chosen = shell(
        "build/cpu/fp8flow plan configs/test.yaml --plugin runs/two.so --set precision.flow=b "
        "--set moe.moe_row_alignment=32");
    EXPECT_EQ(chosen.status, 0) << chosen.err;
    expect_contains(chosen.out, "Plan: recipe b");
    expect_contains(chosen.out,
                    "note: precision.flow is b, so precision.recipe is fp8_rowwise and not fp8_flow");
    refused("--plugin runs/two.so --set precision.flow=b --set moe.moe_row_alignment=1",
            "moe.moe_row_alignment: got 1, want 16 or 32 or 128 with recipe b");
    build("taken", start + "FP8FLOW_RECIPES(register_flow<A>(\"mxfp8\", Recipe::fp8_rowwise))\n");
    refused("--plugin runs/taken.so", "\"mxfp8\" is the name of a recipe");
    build("other", start + "extern \"C\" const RecipePlugin fp8flow_recipes{kRecipeHeaders + 1, [] {}};\n");
    refused("--plugin runs/other.so", "built with the headers of another fp8flow");
    build("none", "int nothing;\n");
    refused("--plugin runs/none.so", "exports no fp8flow_recipes");
    refused("--plugin runs/nowhere.so", "runs/nowhere.so");
}

}  // namespace
}  // namespace fp8flow
