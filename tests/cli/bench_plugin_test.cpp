// SPDX-License-Identifier: MIT
// `bench --plugin`: the example's kernel is found equal and timed; wrong results and refusals are told; the
// rows stand in JSON, CSV and Markdown; what cannot be loaded is refused with the reason.
#include "kernels/core/error.h"
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace fp8flow {
namespace {

using nlohmann::json;

std::string library(const std::string& name) {
    return std::string(FP8FLOW_BINARY_DIR) + "/tests/lib" + name + ".so";
}

CommandResult bench(const std::vector<std::string>& more) {
    std::vector<std::string> line = {"bench", "--backend", "reference", "--samples", "3"};
    line.insert(line.end(), more.begin(), more.end());
    return fp8flow_alone(line);
}

json row_of(const std::string& operation, const std::string& plugin, const std::string& shape) {
    TemporaryFolder folder;
    const CommandResult result =
        bench({operation, "--plugin", library(plugin), "--shape", shape, "--out", folder.path("out")});
    EXPECT_EQ(result.status, 0) << result.err;
    json row = json::parse(read_whole(folder.path("out/bench.json"))).at(0);
    const std::vector<std::string> csv = lines_of(read_whole(folder.path("out/bench.csv")));
    EXPECT_EQ(csv.size(), 2u);
    expect_contains(csv[0], "op,shape,us,");
    expect_contains(csv[1], operation + ",");
    expect_contains(read_whole(folder.path("out/bench.md")), "| " + operation + " |");
    expect_contains(result.out, row.at("peer_result").get<std::string>());
    return row;
}

TEST(BenchPlugin, ExampleIsEqualAndTimed) {
    const json row = row_of("add", "bench_plugin", "dtype=f32");
    EXPECT_EQ(row.at("peer"), "mine");
    EXPECT_EQ(row.at("peer_result"), "equal");
    EXPECT_GT(row.at("peer_us").get<double>(), 0.0);
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
    const auto refused = [](const std::vector<std::string>& line, const std::string& reason) {
        const CommandResult result = bench(line);
        EXPECT_EQ(result.status, static_cast<int>(ExitCode::usage)) << result.err;
        expect_contains(result.err, reason);
    };
    refused({"add", "--plugin", "/nowhere/plugin.so"}, "/nowhere/plugin.so");
    refused({"add", "--plugin", library("fp8flow_faults")}, "exports no fp8flow_plugin");
    refused({"cast", "--plugin", library("wrong_plugin")}, "it has add, quantize_rows, swiglu");
    refused({"add", "--plugin", library("wrong_plugin"), "--gemm-backend", "both"}, "--gemm-backend");
}

}  // namespace
}  // namespace fp8flow
