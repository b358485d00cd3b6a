// SPDX-License-Identifier: MIT
// The suite of published shapes has all of them; tables and JSON follow from the rows.
#include "model/bench/report.h"
#include "model/bench/suite.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow::bench {
namespace {

Shape shape_of(const std::string& operation, const std::string& given) {
    return Shape(operation, find_case(operation).keys, Size::layer, given);
}

TEST(BenchUpstream, HasEveryPublishedShape) {
    std::set<std::string> rows;
    for (const SuiteEntry& entry : suite("upstream"))
        rows.insert(entry.operation + " " + shape_of(entry.operation, entry.shape).text());
    const auto has = [&](const std::string& operation, const std::string& shape) {
        EXPECT_TRUE(rows.contains(operation + " " + shape_of(operation, shape).text()))
            << operation << " " << shape;
    };
    int norms = 0;
    for (const auto& [t, h] : std::vector<std::pair<int, int>>{{29, 17389},
                                                               {256, 65536},
                                                               {1024, 32768},
                                                               {2048, 16384},
                                                               {4096, 1024},
                                                               {4096, 12288},
                                                               {8192, 2048},
                                                               {8192, 4096},
                                                               {8192, 8192},
                                                               {16384, 4096}})
        for (const char* dtype : {"bf16", "f16"}) {
            const std::string at = fmt::format("T={},H={},dtype={}", t, h, dtype);
            has("rms_norm_backward", at + ",residual=no");
            has("rms_norm", at);
            has("rms_norm_quantize", at + ",y=no,fp8=tensor,amax=yes");
            has("rms_norm_quantize", at + ",y=no,fp8=tensor,transposed=tensor,amax=yes");
            norms += 4;
        }
    EXPECT_EQ(norms, 80);
    for (const auto& [e, h, k] : std::vector<std::tuple<int, int, int>>{
             {64, 1280, 7}, {64, 2048, 6}, {160, 5120, 6}, {256, 7168, 8}, {384, 8192, 8}, {512, 9216, 8}}) {
        const std::string at = fmt::format("T=4096,E={},H={},K={},rows=ragged", e, h, k);
        for (const char* fused : {",fused=yes", ",fused=no"}) {
            for (const char* dtype : {",dtype=bf16", ",dtype=e4m3"}) has("permute_pad", at + dtype + fused);
            for (const char* prob : {",prob=no", ",prob=yes"}) has("unpermute_unpad", at + prob + fused);
        }
        has("unpermute_probs_backward", at);
        const std::string groups = fmt::format("M={},G=32,H={}", 4096 * k, h);
        has("transpose_fp8", groups);
        has("transpose_fp8", groups + ",rows=ragged");
        has("transpose_requantize", groups);
        has("transpose_requantize", groups + ",fused=no");
    }
    for (const auto& [e, h, k] :
         std::vector<std::tuple<int, int, int>>{{8, 1280, 2}, {64, 4096, 6}, {256, 7168, 6}, {512, 9216, 8}})
        for (const char* prob : {",prob=no", ",prob=yes"})
            has("unpermute_unpad", fmt::format("T=4096,E={},H={},K={},rows=ragged{}", e, h, k, prob));
    for (const auto& [e, k, f] :
         std::vector<std::tuple<int, int, int>>{{64, 7, 1024}, {64, 6, 1408}, {160, 6, 1536}, {256, 8, 2048}})
        for (const char* operation : {"swiglu_quantize", "swiglu_backward_quantize"})
            for (const char* fused : {"yes", "no"})
                has(operation, fmt::format("M={},G={},rows=ragged,F={},fused={}", 4096 * k, e, f, fused));
    for (const auto& [e, h, k] :
         std::vector<std::tuple<int, int, int>>{{64, 2048, 6}, {160, 5120, 6}, {256, 7168, 8}})
        for (const char* wire : {"bf16", "fp8", "fp8_casts"})
            has("dispatch", fmt::format("T=4096,E={},H={},K={},wire={}", e, h, k, wire));
    for (const char* scale : {"pow2", "fp32"}) {
        for (const int groups : {1, 16, 64}) {
            const std::string at = fmt::format("M=16640,G={},rows=ragged,align=16,scale={}", groups, scale);
            has("quantize_columns", at + ",H=5120");
            has("quantize_rows", at + ",H=8192,layout=row");
        }
        for (const char* columns : {"H=7168", "H=2048", "H=4096,H2=7168"})
            has("quantize_columns",
                fmt::format("M=32768,G=32,rows=ragged,align=16,scale={},{}", scale, columns));
    }
    for (const char* weights : {"N=8192,K=5120", "N=7168,K=2048"})
        for (const int experts : {1, 2, 8, 32})
            for (const char* dtype : {"bf16", "f32"})
                for (const char* rounding : {"floor", "rceil"})
                    has("quantize_weight", fmt::format("E={},{},dtype={},rounding={},layout=mx32,fprop=no",
                                                       experts, weights, dtype, rounding));
    has("route", "T=8192,E=256,K=8");
    has("plan_dispatch", "T=8192,E=256,K=8,rows=ragged");
}

// `share` of a ceiling of 100 us.
Row row_of(const std::string& operation, const std::string& shape, double share) {
    const Shape at = shape_of(operation, shape);
    Row row{.operation = operation, .shape = at.text(), .short_shape = at.short_text()};
    row.timing = {.median = 100e-6 / share,
                  .min = 100e-6 / share,
                  .p90 = 100e-6 / share,
                  .sustained = {},
                  .samples = 3};
    row.ceiling_seconds = 100e-6;
    row.work = {{.bytes = 400e6}};
    return row;
}
Row with_baseline(Row row, double seconds) {
    row.baseline = "mine";
    row.baseline_timing =
        Timing{.median = seconds, .min = seconds, .p90 = seconds, .sustained = {}, .samples = 3};
    row.baseline_result = "equal";
    return row;
}

TEST(BenchTables, BaselinesAreCompared) {
    std::vector<Row> rows = {with_baseline(row_of("rms_norm", "T=2", 0.5), 300e-6),
                             with_baseline(row_of("rms_norm", "T=3", 0.5), 100e-6)};
    const std::string table = tables(rows);
    for (const char* part :
         {"mine 1.50 x slower than ours (equal)", "mine 2.00 x faster than ours (equal)", "50.0 %"})
        expect_contains(table, part);
    EXPECT_EQ(table.find("not resolved"), std::string::npos) << table;
    rows[0].baseline_timing->min = 150e-6;  // 150 us wide: more than the difference of 100
    const std::string scattered = tables(rows);
    for (const char* part : {"mine not resolved (equal)", "not resolved: two medians"})
        expect_contains(scattered, part);
    EXPECT_EQ(scattered.find("1.50 x"), std::string::npos) << scattered;
}

TEST(BenchRows, SayWhatWasMeasured) {
    Row row = with_baseline(row_of("rms_norm", "", 0.91), 90e-6);
    row.launches = 1;
    row.tensor_bytes = 1000;
    const auto json =
        to_json(row, {.date = "2026-11-20T08:00:00Z", .machine = {.gpu = "NVIDIA H200"}, .gpus = 1});
    EXPECT_EQ(json.at("launches"), 1);
    EXPECT_EQ(json.at("tensor_bytes"), 1000);
    EXPECT_DOUBLE_EQ(json.at("ceiling_share"), 0.91);
    EXPECT_EQ(json.at("peer"), "mine");
    EXPECT_DOUBLE_EQ(json.at("peer_us"), 90);
    EXPECT_EQ(json.at("date"), "2026-11-20");
}

}  // namespace
}  // namespace fp8flow::bench
