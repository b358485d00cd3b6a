// SPDX-License-Identifier: MIT
// What `bench` says of its rows: the suite of published shapes has all of them, targets are where they
// belong, peers are read and chosen, verdicts, the table and the picture follow from the rows.
#include "kernels/core/error.h"
#include "model/bench/report.h"
#include "model/bench/suite.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow::bench {
namespace {

Shape shape_of(const std::string& operation, const std::string& given) {
    return Shape(operation, find_case(operation).keys, Size::layer, given);
}

std::set<std::string> upstream_rows() {
    std::set<std::string> rows;
    for (const SuiteEntry& entry : suite("upstream"))
        rows.insert(entry.operation + " " + shape_of(entry.operation, entry.shape).text());
    return rows;
}

TEST(BenchUpstream, HasEveryPublishedShape) {
    const std::set<std::string> rows = upstream_rows();
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

TEST(BenchUpstream, EveryPeerOfOursIsMet) {
    const std::set<std::string> rows = upstream_rows();
    const Peers peers;
    for (const PeerFigure& figure : peers.all())
        EXPECT_TRUE(rows.contains(figure.operation + " " + figure.shape))
            << figure.operation << " " << figure.shape;
    EXPECT_GE(peers.all().size(), 100u);
}

Work bytes(double count) { return Work{}.reads(count); }

TEST(BenchBars, StandWhereTheyBelong) {
    const struct {
        const char *operation, *shape;
        double share;
    } targets[] = {{"rms_norm", "", 0.92},
                   {"rms_norm_quantize", "", 0.88},
                   {"rms_norm_quantize", "y=no", 0.90},
                   {"rms_norm_quantize", "y=no,fp8=tensor", 0.90},
                   {"rms_norm_quantize", "y=no,fp8=vec128,transposed=tile128", 0.80},
                   {"rms_norm_backward", "", 0.88},
                   {"quantize_rows", "", 0.92},
                   {"quantize_rows", "layout=row", 0.85},
                   {"quantize_columns", "", 0.85},
                   {"quantize_columns", "G=1", 0.70},
                   {"quantize_weight", "", 0.90},
                   {"quantize_weight", "layout=mx32,fprop=no", 0.85},
                   {"adamw_quantize", "", 0.90},
                   {"transpose_fp8", "", 0.88},
                   {"swiglu_quantize", "", 0.90},
                   {"swiglu_backward_quantize", "", 0.88},
                   {"permute_pad", "", 0.88},
                   {"unpermute_unpad", "", 0.88},
                   {"dispatch", "", 0.88},
                   {"combine", "", 0.88},
                   {"cross_entropy", "", 0.85},
                   {"embedding", "", 0.85},
                   {"norm_squared", "", 0.85}};
    for (const auto& [operation, shape, share] : targets) {
        const Shape at = shape_of(operation, shape);
        const auto target = target_of(at, bytes(64e6), 1);
        ASSERT_TRUE(target.has_value()) << operation << " " << shape;
        EXPECT_DOUBLE_EQ(target->share, share) << operation << " " << shape;
        EXPECT_FALSE(target->name.empty() || target->text().empty());
        const bool any_size = at.has("layout") && at.word("layout") == "mx32";
        const auto small = target_of(at, bytes(63e6), 1);
        EXPECT_EQ(small.has_value() && small->share > 0, any_size) << operation << " " << shape;
    }
    EXPECT_EQ(target_of(shape_of("transpose_fp8", "M=32768,H=7168"), bytes(1e9), 1)->seconds, 0.13e-3);
    EXPECT_FALSE(target_of(shape_of("transpose_fp8", "M=32768,H=2048"), bytes(1e9), 1)->seconds.has_value());
    for (const char* operation : {"route", "plan_dispatch"}) {
        const auto target = target_of(shape_of(operation, "T=8192,E=256"), bytes(1e6), 1);
        EXPECT_EQ(target->seconds, 25e-6);
        EXPECT_EQ(target->launches, 2);
        EXPECT_FALSE(target_of(shape_of(operation, "T=4096,E=256"), bytes(1e6), 1).has_value());
    }
    EXPECT_DOUBLE_EQ(target_of(shape_of("dispatch", ""), bytes(1e9), 2)->share, 0.85);
    EXPECT_DOUBLE_EQ(target_of(shape_of("dispatch", ""), bytes(1e9), 4)->share, 0.90);
    EXPECT_DOUBLE_EQ(target_of(shape_of("dispatch", ""), bytes(1e9), 4)->peer, 1.35);
    EXPECT_NEAR(target_of(shape_of("combine", ""), bytes(1e9), 4)->share, 0.784, 1e-3);
    // baselines, casts around the wire, and operations without a target
    for (const auto& [operation, shape] : std::vector<std::pair<const char*, const char*>>{
             {"permute_pad", "fused=no"},
             {"unpermute_unpad", "fused=no"},
             {"swiglu_quantize", "fused=no"},
             {"rms_norm_quantize", "y=no,fp8=vec128,transposed=tile128,fused=no"},
             {"dispatch", "wire=fp8_casts"},
             {"transpose_requantize", ""},
             {"quantize_columns", "layout=vec128"},
             {"swiglu", ""},
             {"gemm", ""}})
        EXPECT_FALSE(target_of(shape_of(operation, shape), bytes(1e9), 1).has_value()) << operation << shape;
}

TEST(BenchPeers, LinesAreRead) {
    const auto figures = parse_peers(
        "# a remark\n\n"
        "{\"operation\":\"rms_norm\",\"shape\":\"T=8192,H=8192\",\"us\":104}\n"
        "{\"operation\":\"dispatch\",\"shape\":\"\",\"us\":1.5,\"peer\":\"A\",\"gpu\":\"B\",\"gpus\":4,"
        "\"source\":\"C\"}",
        "test");
    ASSERT_EQ(figures.size(), 2u);
    EXPECT_EQ(figures[0].shape, "T=8192 H=8192 dtype=bf16 gamma=plain");
    EXPECT_DOUBLE_EQ(figures[0].seconds, 104e-6);
    EXPECT_EQ(figures[0].gpus, 1);
    EXPECT_EQ(figures[1].peer + figures[1].gpu + figures[1].source, "ABC");
    EXPECT_EQ(figures[1].gpus, 4);
    const std::pair<const char*, const char*> wrongs[] = {
        {"{\"operation\":", "test line 1: want a JSON object"},
        {"{\"shape\":\"T=1\",\"us\":1}", "test line 1: 'operation': want text"},
        {"\n{\"operation\":\"rms_norm\",\"shape\":\"T=1\"}", "test line 2: 'us': want a positive number"},
        {"{\"operation\":\"rms_norm\",\"shape\":\"T=1\",\"us\":0}", "'us': want a positive number"},
        {"{\"operation\":\"rms_norm\",\"shape\":7,\"us\":1}", "'shape': want text"},
        {"{\"operation\":\"rms_norm\",\"shape\":\"T=1\",\"us\":1,\"gpus\":\"x\"}", "'gpus'"},
        {"{\"operation\":\"rms_nrom\",\"shape\":\"\",\"us\":1}", "did you mean 'rms_norm'"},
        {"{\"operation\":\"rms_norm\",\"shape\":\"W=1\",\"us\":1}", "unknown key 'W'"}};
    for (const auto& [lines, part] : wrongs) {
        try {
            parse_peers(lines, "test");
            ADD_FAILURE() << lines;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ExitCode::usage);
            EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
        }
    }
}

TEST(BenchPeers, TheFastestOnSuchAGpuIsChosen) {
    const Peers peers;
    const std::string shape = shape_of("rms_norm", "T=8192,H=8192").text();
    const PeerFigure* here = peers.best("rms_norm", shape, "NVIDIA H200", 1);
    ASSERT_NE(here, nullptr);  // slower than what was published of another GPU, but of this one
    EXPECT_EQ(here->peer, "torch F.rms_norm");
    EXPECT_TRUE(comparable(*here, "NVIDIA H200"));
    const PeerFigure* elsewhere = peers.best("rms_norm", shape, "NVIDIA B200", 1);
    ASSERT_NE(elsewhere, nullptr);
    EXPECT_EQ(elsewhere->peer, "authors");
    EXPECT_FALSE(comparable(*elsewhere, "NVIDIA B200"));
    EXPECT_FALSE(comparable(*elsewhere, ""));
    EXPECT_EQ(peers.best("rms_norm", shape, "NVIDIA H200", 4), nullptr);
    EXPECT_EQ(peers.best("swiglu", shape, "NVIDIA H200", 1), nullptr);
}

// `share` of a ceiling of 100 us.
Row row_of(const std::string& operation, const std::string& shape, double share) {
    const Shape at = shape_of(operation, shape);
    Row row{.operation = operation, .shape = at.text(), .short_shape = at.short_text()};
    row.timing.median = row.timing.min = row.timing.p90 = 100e-6 / share;
    row.timing.samples = 3;
    row.ceiling_seconds = 100e-6;
    row.work = bytes(400e6);
    if (const auto family = family_of(at, 1)) row.family = family->name;
    row.target = target_of(at, row.work, 1);
    return row;
}
Row with_peer(Row row, double seconds, bool comparable) {
    row.peer = "other";
    row.peer_seconds = seconds;
    row.peer_comparable = comparable;
    return row;
}

TEST(BenchVerdicts, FollowFromBarsPeersAndBaselines) {
    const std::string transposed = "T=8192,H=8192,y=no,fp8=vec128,transposed=tile128";
    std::vector<Row> rows = {
        row_of("rms_norm", "", 0.93),
        row_of("rms_norm", "T=1", 0.91),
        with_peer(row_of("rms_norm", "T=2", 0.95), 95e-6, true),
        with_peer(row_of("rms_norm", "T=3", 0.95), 95e-6, false),
        with_peer(row_of("rms_norm", "T=4", 0.90), 120e-6, true),
        row_of("swiglu", "", 0.10),
        row_of("rms_norm_quantize", transposed, 0.50),                 // 200 us
        row_of("rms_norm_quantize", transposed + ",fused=no", 0.333),  // 300.3 us: 1.5 times as long
        row_of("rms_norm_quantize", "T=9," + transposed.substr(7), 0.50),
    };
    rows.push_back(row_of("route", "T=8192,E=256", 1.0));
    rows.back().timing.median = 24e-6;
    rows.back().launches = 3;
    rows.push_back(row_of("route", "T=8192,E=256,K=4", 1.0));
    rows.back().timing.median = 26e-6;
    for (int round = 0; round < 2; ++round) judge(rows);  // again after each row of a suite
    const std::vector<std::pair<std::optional<bool>, std::string>> wanted = {
        {true, ""}, {false, "share"}, {false, "peer"},  {true, ""},          {false, "share"}, {{}, ""},
        {true, ""}, {{}, ""},         {false, "share"}, {false, "launches"}, {false, "time"}};
    ASSERT_EQ(rows.size(), wanted.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        EXPECT_EQ(rows[i].meets_target, wanted[i].first) << i;
        EXPECT_EQ(rows[i].missed, wanted[i].second) << i;
    }
    EXPECT_EQ(baseline_of(rows[6], rows), &rows[7]);
    EXPECT_EQ(baseline_of(rows[7], rows), nullptr);
    EXPECT_EQ(baseline_of(rows[8], rows), nullptr);

    const std::string table = suite_table(rows);
    const auto expect = [&](const std::string& part) {
        EXPECT_NE(table.find(part), std::string::npos) << part << "\n" << table;
    };
    expect("11 rows, 9 with a target: 3 met, 6 missed (launches 1, peer 1, share 3, time 1)");
    expect("; 1 of 2 as fast as the fastest peer on such a GPU, or faster");
    expect("missed: launches");
    expect(">= 92 %");
    expect("<= 25 us, <= 2 launches");
    expect(">= 80 % or 1.5x");
    expect("two passes, us");
    expect("1.50x");
}

TEST(BenchVerdicts, GainsAndRatiosWithinTheSpreadAreNotResolved) {
    const std::string shape = "T=8192,H=8192,y=no,fp8=vec128,transposed=tile128";
    std::vector<Row> rows = {with_peer(row_of("rms_norm_quantize", shape, 0.50), 210e-6, true),
                             row_of("rms_norm_quantize", shape + ",fused=no", 0.333)};
    rows[0].timing.p90 = 305e-6;  // 105 us wide: more than the gain of 100
    const std::string table = suite_table(rows), markdown = rows_markdown(rows);
    for (const char* noise : {"1.05x", "1.50x"}) {
        EXPECT_EQ(table.find(noise), std::string::npos) << table;
        EXPECT_EQ(markdown.find(noise), std::string::npos) << markdown;
    }
    EXPECT_NE(markdown.find("not resolved other"), std::string::npos) << markdown;
    EXPECT_NE(table.find("not resolved: two medians"), std::string::npos) << table;
    rows[0].timing.p90 = rows[0].timing.median;
    EXPECT_NE(suite_table(rows).find("1.05x"), std::string::npos);
    rows[0].peer_timing =
        Timing{.median = 210e-6, .min = 150e-6, .p90 = 215e-6, .sustained = {}, .samples = 3};
    EXPECT_EQ(suite_table(rows).find("1.05x"), std::string::npos) << "the peer's own spread";
}

TEST(BenchVerdicts, APeerOfTheSameRunIsComparable) {
    Row measured = with_peer(row_of("rms_norm", "T=2", 0.95), 95e-6, true);
    measured.peer_source = "same run";
    add_peer(measured, Peers(), "NVIDIA H200", 4);
    EXPECT_EQ(measured.peer, "other");
    EXPECT_EQ(measured.peer_gpu, "NVIDIA H200");
    std::vector<Row> rows = {measured};
    judge(rows);
    EXPECT_EQ(rows[0].missed, "peer");
    const std::string table = suite_table(rows);
    EXPECT_NE(table.find("other (same run)"), std::string::npos) << table;
}

TEST(BenchPicture, ADotForEachRowAndAMarkForEachBar) {
    std::vector<Row> rows = {row_of("rms_norm", "", 0.93), row_of("rms_norm", "T=1", 0.91),
                             row_of("transpose_fp8", "H=2048", 0.9), row_of("swiglu", "", 0.5)};
    rows.push_back(row_of("rms_norm", "T=2", 0.3));
    rows.back().target.reset();  // a small shape
    judge(rows);
    const std::string svg = suite_picture(
        rows, {.commit = "abc", .date = "2026-11-21T08:00:00Z", .machine = {.gpu = "NVIDIA H200"}});
    const auto count = [&](const std::string& part) {
        size_t found = 0;
        for (size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) ++found;
        return found;
    };
    EXPECT_EQ(count("<circle "), 4u);                      // swiglu has no target of its own
    EXPECT_EQ(count("stroke-width=\"2.4\""), 2u);          // marks
    EXPECT_EQ(count(">1 of 2<") + count(">1 of 1<"), 2u);  // per line
    EXPECT_EQ(count(">FP8 transpose<"), 1u);
    EXPECT_EQ(count("NVIDIA H200, 2026-11-21, commit abc"), 1u);
    EXPECT_NE(suite_picture({}, {}).find("</svg>"), std::string::npos);
}

TEST(BenchRows, SayWhatTheyAreHeldTo) {
    Row row = with_peer(row_of("rms_norm", "", 0.91), 90e-6, true);
    row.launches = 1;
    row.tensor_bytes = 1000;
    std::vector<Row> rows = {row};
    judge(rows);
    const auto json = to_json(rows[0], {.machine = {.gpu = "NVIDIA H200"}, .gpus = 1});
    EXPECT_EQ(json.at("launches"), 1);
    EXPECT_EQ(json.at("tensor_bytes"), 1000);
    EXPECT_EQ(json.at("bar"), ">= 92 %");
    EXPECT_EQ(json.at("holds_bar"), false);
    EXPECT_EQ(json.at("missed"), "share, peer");
    EXPECT_EQ(json.at("peer"), "other");
    EXPECT_TRUE(json.at("peer_source").is_null());
}

}  // namespace
}  // namespace fp8flow::bench
