// SPDX-License-Identifier: MIT
// `fp8flow bench`: every operation of the list runs once at a small shape, its rows are whole and count the
// bytes that the shape moves; exchanges on two ranks; wrong command lines are refused with the nearest name.
#include "kernels/ops/list.h"
#include "tests/cli/command.h"
#include "tests/cli/provenance.h"
#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {
namespace {

using nlohmann::json;

json rows_of(const std::string& folder) { return read_json(folder + "/bench.json"); }

Texts bench(const Texts& more) { return with({"bench", "--backend", "reference"}, more); }

// One row for each shape of an operation.
json rows_at(const std::string& operation, const Texts& shapes) {
    TemporaryFolder folder;
    Texts line = bench({operation, "--out", folder.path("out"), "--samples", "1"});
    for (const std::string& shape : shapes) line.insert(line.end(), {"--shape", shape});
    const CommandResult result = succeeded(fp8flow_alone(line));
    if (result.status != 0) return json::array();
    const json rows = rows_of(folder.path("out"));
    EXPECT_EQ(rows.size(), shapes.size());
    return rows;
}

void expect_whole(const json& row) {
    const std::string name = row.at("op").get<std::string>();
    for (const char* key : {"us", "us_min", "us_p90"})
        EXPECT_GT(row.at(key).get<double>(), 0.0) << name << " " << key;
    EXPECT_LE(row.at("us_min").get<double>(), row.at("us").get<double>()) << name;
    EXPECT_GE(row.at("us_p90").get<double>(), row.at("us").get<double>()) << name;
    EXPECT_TRUE(row.at("us_sustained").is_null()) << name;  // a regime of GPUs
    EXPECT_GE(row.at("flops").get<double>(), 0.0) << name;
    EXPECT_TRUE(row.at("peer").is_null() && row.at("peer_us").is_null()) << name;
    EXPECT_EQ(row.at("gpus"), 0) << name;
    EXPECT_EQ(row.at("gpu"), "") << name;
    EXPECT_EQ(row.at("date").get<std::string>().size(), 10u) << name;
    EXPECT_FALSE(row.at("commit").get<std::string>().empty()) << name;
    expect_provenance(row, "fp8flow bench ", row.at("machine").at("ranks"));
    EXPECT_EQ(row.at("regime"), "host") << name;
    EXPECT_TRUE(row.at("shape").is_string()) << name;
}

std::set<std::string> local_operations() {
    std::set<std::string> names;
#define FP8FLOW_NAME(name, Args) names.insert(#name);
    FP8FLOW_FOR_EACH_OP(FP8FLOW_NAME)
    FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_NAME)
#undef FP8FLOW_NAME
    return names;
}
const std::set<std::string> kExchanges = {"gather_routing", "dispatch", "dispatch_rows", "combine",
                                          "all_reduce"};

TEST(Bench, EveryOperationRunsOnce) {
    TemporaryFolder folder;
    const CommandResult result =
        succeeded(fp8flow_alone(bench({"--suite", "small", "--out", folder.path("out"), "--samples", "2"})));
    std::set<std::string> measured;
    for (const json& row : rows_of(folder.path("out"))) {
        expect_whole(row);
        EXPECT_GT(row.at("bytes").get<double>(), 0.0) << row;
        EXPECT_GT(row.at("ceiling_share").get<double>(), 0.0) << row;
        EXPECT_EQ(row.at("command"), "fp8flow bench --backend reference --suite small --out " +
                                         folder.path("out") + " --samples 2");
        const std::string name = row.at("op").get<std::string>();
        EXPECT_TRUE(measured.insert(name).second) << name << " twice";
        EXPECT_NE(result.out.find("\n" + name), std::string::npos) << name << " has no table";
        EXPECT_NE(result.err.find("] " + name), std::string::npos) << name << " has no progress line";
    }
    std::set<std::string> wanted = local_operations();
    wanted.insert(kExchanges.begin(), kExchanges.end());
    wanted.insert("route");  // several operations together
    EXPECT_EQ(measured, wanted);
}

TEST(Bench, CaptureCallsEveryRowAndTimesNothing) {
    const CommandResult result = succeeded(fp8flow_alone(bench({"--suite", "small", "--capture"})));
    for (const std::string& name : local_operations())
        EXPECT_NE(result.out.find("captured 0 kernels of " + name + " "), std::string::npos) << name;

    TemporaryFolder folder;
    failure(2, fp8flow_alone(bench({"rms_norm", "--capture", "--out", folder.path("out")})));
    const std::string many = failure(2, fp8flow_on_ranks(2, bench({"rms_norm", "--capture"})));
    expect_contains(many, "--capture");
}

TEST(Bench, ExchangesOfTwoRanks) {
    TemporaryFolder folder;
    Texts line = bench({"--suite", "small", "--out", folder.path("out"), "--samples", "2"});
    line.insert(line.begin() + 1, kExchanges.begin(), kExchanges.end());
    succeeded(fp8flow_on_ranks(2, line));
    std::map<std::string, json> rows;
    for (const json& row : rows_of(folder.path("out"))) {
        expect_whole(row);
        EXPECT_TRUE(row.at("ceiling_share").is_null()) << row;
        EXPECT_TRUE(row.at("command").get<std::string>().starts_with("mpirun -n 2 fp8flow bench ")) << row;
        rows[row.at("op").get<std::string>()] = row;
    }
    EXPECT_EQ(rows.size(), kExchanges.size());
    // T = 24, K = 2: ids and probabilities go to one other rank
    EXPECT_EQ(rows.at("gather_routing").at("wire_bytes"), 24 * 2 * 8);
    // N = 1000 values: half of them are summed by the other rank, and half come back
    EXPECT_EQ(rows.at("all_reduce").at("wire_bytes"), 1000 * 4);
    // rows of H = 256 FP8 values and two scales, at most one per token to the other rank
    const double rows_sent = rows.at("dispatch").at("wire_bytes").get<double>() / 258.0;
    EXPECT_EQ(rows_sent, std::floor(rows_sent));
    EXPECT_GT(rows_sent, 0);
    EXPECT_LE(rows_sent, 24);
    EXPECT_EQ(rows.at("dispatch_rows").at("wire_bytes"), rows.at("dispatch").at("wire_bytes"));
}

TEST(Bench, ExchangesOverMessagesAndOnFewSms) {
    TemporaryFolder folder;
    Texts line = bench({"dispatch", "combine", "--out", folder.path("out"), "--samples", "2"});
    for (const char* shape : {"dispatcher=alltoall", "sms=8", "dispatcher=alltoall,E=4,K=3,rows=skewed"})
        line.insert(line.end(), {"--shape", shape});
    succeeded(fp8flow_on_ranks(2, line));
    EXPECT_EQ(rows_of(folder.path("out")).size(), 6u);

    // without the owners' sums: as many bytes on the wire, fewer in memory
    Texts sent = bench({"combine", "--out", folder.path("sent"), "--samples", "2"});
    for (const char* shape : {"part=whole", "part=sent"}) sent.insert(sent.end(), {"--shape", shape});
    succeeded(fp8flow_on_ranks(2, sent));
    const json parts = rows_of(folder.path("sent"));
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_GT(parts[1].at("bytes").get<double>(), 0.0);
    EXPECT_LT(parts[1].at("bytes").get<double>(), parts[0].at("bytes").get<double>());
    // part=whole also returns 4 bytes of gradients per (token, expert)
    EXPECT_GT(parts[1].at("wire_bytes").get<double>(), 0.0);
    EXPECT_LT(parts[1].at("wire_bytes").get<double>(), parts[0].at("wire_bytes").get<double>());
}

struct Counted {
    const char* operation;
    const char* shape;
    double bytes, flops;
};

TEST(Bench, CountsTheBytesOfTheShape) {
    constexpr double kRows = 100, kWide = 512;
    const Counted counted[] = {
        // x and y in BF16, gamma and rstd in FP32
        {"rms_norm", "T=100,H=512", kRows * kWide * 4 + kWide * 4 + kRows * 4, 4 * kRows * kWide},
        // BF16 in; FP8 values, four scales per row, BF16 and rstd out
        {"rms_norm_quantize", "T=100,H=512", kRows * (kWide * 2 + kWide + 4 + kWide * 2 + 4) + kWide * 4,
         6 * kRows * kWide},
        // two groups of 50 rows, padded to 128: valid rows in, and out with four FP32 scales
        {"quantize_rows", "M=100,G=2,rows=balanced,H=512", kRows * (kWide * 2 + kWide + 16),
         2 * kRows * kWide},
        {"quantize_rows", "M=100,G=0,H=512", kRows * (kWide * 2 + kWide + 16), 2 * kRows * kWide},
        // transposed: one scale for each column and block of 128 rows
        {"quantize_columns", "M=100,G=2,rows=balanced,H=512,layout=vec128",
         kRows * (kWide * 2 + kWide + kWide * 4 / 128), 2 * kRows * kWide},
        // one of two groups is empty; a tile's scale is shared by 128 rows
        {"transpose_fp8", "M=100,G=2,rows=empty,H=512", kRows * (kWide + 16 + kWide + 16.0 / 128), 0},
        // 100 tokens with 2 of 4 experts are read once
        {"permute_pad", "T=100,E=4,K=2,rows=balanced,H=512",
         kRows * (kWide + 4) + 2 * kRows * (kWide + 16 + 4), 0},
        {"permute_pad", "T=100,E=4,K=2,rows=balanced,H=512,dtype=bf16,align=1",
         kRows * kWide * 2 + 2 * kRows * (kWide * 2 + 4), 0},
        {"unpermute_unpad", "T=100,E=4,K=2,rows=balanced,H=512,prob=no",
         2 * kRows * (kWide * 2 + 4) + kRows * kWide * 2, 2 * kRows * kWide},
        {"gemm", "M=64,N=128,K=256,type=bf16", 2.0 * (64 * 256 + 128 * 256 + 64 * 128), 2.0 * 64 * 128 * 256},
        // FP32 that is added to is read and written
        {"gemm", "M=64,N=128,K=256,type=bf16,out=f32,mode=accumulate",
         2.0 * (64 * 256 + 128 * 256) + 2.0 * 4 * 64 * 128, 2.0 * 64 * 128 * 256},
        // weights of two experts with a table of 1 x 4 (two used) scales each
        {"grouped_gemm", "M=100,G=2,rows=balanced,N=128,K=256",
         100 * (256 + 2 * 4) + 2 * (128 * 256 + 16) + 100 * 128 * 2, 2.0 * 100 * 128 * 256},
        {"swiglu", "M=100,G=0,F=256", 100 * (4 * 256 + 4 + 2 * 256), 6 * 100 * 256},
        {"adamw", "E=1,N=16,K=16", 256 * (4 * 4 + 3 * 4 + 2), 15 * 256},
        {"cross_entropy", "T=10,V=100,gradient=no", 10 * 100 * 4 + 10 * 4 + 10 * 4, 5 * 10 * 100},
        {"zero", "T=10,H=100,dtype=f32", 4000, 0},
        {"attention", "T=32,S=16,heads=4,kv_heads=2,D=64", 32 * 64 * 2 * (4 + 2 + 2 + 4) + 32 * 4 * 4,
         2 * 2.0 * (2 * 16 * 17 / 2) * 4 * 64},
    };
    std::map<std::string, std::vector<Counted>> by_operation;  // one run of the program for each
    for (const Counted& want : counted) by_operation[want.operation].push_back(want);
    for (const auto& [operation, wanted] : by_operation) {
        Texts shapes;
        for (const Counted& want : wanted) shapes.emplace_back(want.shape);
        const json rows = rows_at(operation, shapes);
        ASSERT_EQ(rows.size(), wanted.size()) << operation;
        for (size_t i = 0; i < wanted.size(); ++i) {
            EXPECT_EQ(rows[i].at("bytes").get<double>(), wanted[i].bytes)
                << operation << " " << wanted[i].shape;
            EXPECT_EQ(rows[i].at("flops").get<double>(), wanted[i].flops)
                << operation << " " << wanted[i].shape;
        }
    }
}

TEST(Bench, OptionsOfTheOperations) {
    const std::pair<const char*, Texts> cases[] = {
        {"rms_norm", {"T=0,H=17", "dtype=f16,H=33,gamma=zero_centered"}},
        {"rms_norm_quantize",
         {"y=no,fp8=tensor,transposed=tensor,amax=yes,H=33", "transposed=tile128,fp8=vec128",
          "scale=fp32,codes=e5m2"}},
        {"router_top_k", {"score=sigmoid,bias=yes,num_groups=4,group_topk=2,K=4"}},
        {"quantize_rows", {"layout=mx32,rounding=floor", "layout=vec128_wire,scale=fp32,dtype=f32"}},
        {"quantize_columns",
         {"layout=group_row,H2=128,align=16,rows=skewed", "layout=mx32,align=32,rows=empty"}},
        {"quantize_dual", {"layout=row,columns=group_row"}},
        {"quantize_weight", {"layout=mx32,fprop=no,dtype=bf16"}},
        {"dequantize", {"layout=tile128,rows=balanced"}},
        {"transpose_fp8", {"rows=skewed", "G=0,M=70"}},
        {"permute_pad",
         {"dtype=e5m2,scales=no,rows=skewed", "dtype=f32,align=16,rows=empty", "T=0", "E=1,K=1"}},
        {"plan_dispatch", {"ranks=4,rows=skewed"}},
        {"gemm", {"type=fp8_row", "type=mx", "type=f32,form=tn"}},
        {"grouped_gemm", {"type=fp8_tensor,rows=empty", "type=bf16,form=nn,out=f32", "M=512,rows=ragged128"}},
        {"grouped_gemm_wgrad",
         {"type=fp8,tiles=no,mode=accumulate", "type=fp8_row,align=16", "type=bf16,rows=skewed"}},
        {"grouped_gemm_swiglu_quantize", {"prob=no,save_h=no"}},
        {"swiglu_backward_quantize", {"prob=no,dprob=no,dtype=f32"}},
        {"embedding_backward", {"mode=overwrite"}},
        {"adamw", {"copy=no"}},
        {"adamw_quantize", {"layout=mx32"}},
        {"dispatch", {"wire=fp8_casts", "wire=bf16,rows=skewed"}},
        {"combine", {"order=invariant,residual=no"}},
    };
    for (const auto& [operation, shapes] : cases) EXPECT_EQ(rows_at(operation, shapes).size(), shapes.size());
}

TEST(Bench, UpstreamWritesItsTable) {
    TemporaryFolder folder;
    const CommandResult result = succeeded(fp8flow_alone(
        bench({"--suite", "upstream", "--match", "T=29 ", "--samples", "1", "--out", folder.path("out")})));
    const json rows = rows_of(folder.path("out"));
    ASSERT_EQ(rows.size(), 8u);
    for (const json& row : rows) EXPECT_TRUE(row.at("launches").is_null()) << row;  // the host has none
    expect_contains(result.out, read_whole(folder.path("out") + "/bench.txt"));
    EXPECT_EQ(expect_report_page(read_whole(folder.path("out") + "/report.html")).at("bench").size(), 8u);
}

// A fused form and the two passes that it replaces: the same bytes to move, more memory.
TEST(Bench, UnfusedFormsMoveTheSameAndHoldMore) {
    const std::pair<const char*, const char*> forms[] = {
        {"permute_pad", "dtype=bf16"},
        {"permute_pad", "dtype=e4m3,rows=skewed"},
        {"unpermute_unpad", "prob=yes"},
        {"swiglu_quantize", ""},
        {"swiglu_backward_quantize", ""},
        {"transpose_requantize", "rows=balanced"},
        {"rms_norm_quantize", "y=no,fp8=vec128,transposed=tile128"},
        {"rms_norm_quantize", "y=no,fp8=tensor,transposed=tensor,amax=yes"},
    };
    for (const auto& [operation, shape] : forms) {
        const std::string given = shape, comma = given.empty() ? "" : ",";
        const json rows = rows_at(operation, {given + comma + "fused=yes", given + comma + "fused=no"});
        ASSERT_EQ(rows.size(), 2u) << operation << " " << shape;
        EXPECT_EQ(rows[0].at("bytes"), rows[1].at("bytes")) << operation << " " << shape;
        // what RMSNorm transposes in its second pass are rows that stay
        const double more = std::string(operation) == "rms_norm_quantize" ? 0 : 1;
        EXPECT_GE(rows[1].at("tensor_bytes"), rows[0].at("tensor_bytes").get<double>() + more)
            << operation << " " << shape;
    }
}

TEST(Bench, MatchKeepsAPartOfASuite) {
    TemporaryFolder folder;
    succeeded(fp8flow_alone(bench({"--suite", "small", "--match", "^(swiglu|rms_norm) .*=bf16", "--samples",
                                   "1", "--out", folder.path("out")})));
    EXPECT_EQ(rows_of(folder.path("out")).size(), 2u);
}

TEST(Bench, ListNamesOperationsKeysAndSuites) {
    const CommandResult result = succeeded(fp8flow_alone({"bench", "--list"}));
    for (const std::string& name : local_operations()) expect_contains(result.out, "\n" + name + "  ");
    for (const std::string& name : kExchanges) expect_contains(result.out, "\n" + name + "  ");
    for (const char* part :
         {"wire        fp8", "rows of the groups: balanced | ragged | skewed | empty", "upstream", "small"})
        expect_contains(result.out, part);
}

struct Wrong {
    Texts line;
    const char* part;
};

TEST(Bench, WrongCommandLinesAreRefused) {
    TemporaryFolder folder;
    const Wrong wrongs[] = {
        {{"bench", "--suite", folder.write("own.txt", "rms_norm T=40\nrms_nrom T=40\n")},
         "own.txt: bench: unknown operation 'rms_nrom', did you mean 'rms_norm'"},
        {{"bench"}, "name an operation or a --suite"},
        {{"bench", "rms_nrom"},
         "unknown operation 'rms_nrom', did you mean 'rms_norm'; see fp8flow bench --list"},
        {{"bench", "rms_norm", "--shape", "dytpe=bf16"},
         "bench rms_norm: unknown key 'dytpe', did you mean 'dtype'; it has T, H"},
        {{"bench", "rms_norm", "--shape", "T=40,H"}, "got 'H', want key=value"},
        {{"bench", "rms_norm", "--shape", "T=-1"}, "T: got '-1', want a whole number from 0"},
        {{"bench", "rms_norm", "--shape", "H=0"}, "H: got '0', want at least 1"},
        {{"bench", "rms_norm", "--shape", "dtype=fp8"}, "dtype: got 'fp8', want bf16 | f16 | f32"},
        {{"bench", "swiglu_backward_quantize", "--shape", "F=100"},
         "this shape is refused: gate and up of 100 columns"},
        {{"bench", "grouped_gemm_wgrad", "--shape", "align=16"},
         "so groups must start at multiples of 128, not 16"},
        {{"bench", "permute_pad", "--shape", "E=2,K=3"}, "K: got 3, want at most E = 2"},
        {{"bench", "plan_dispatch", "--shape", "ranks=3"}, "ranks: got 3, want a divisor of E = 8"},
        {{"bench", "--suite", "laier"},
         "--suite: got 'laier', want exchange, gemm, layer, model, small, upstream or a file (did you mean "
         "'layer')"},
        {{"bench", "rms_norm", "--suite", "gemm"}, "suite gemm has none of the named operations"},
        {{"bench", "rms_norm", "--suite", "small", "--shape", "T=1"},
         "--shape and --suite exclude each other"},
        {{"bench", "rms_norm", "--samples", "0"}, "--samples"},
        {{"bench", "rms_norm_quantize", "--shape", "fused=no"},
         "fused=no wants FP8 rows that can be transposed"},
        {{"bench", "--suite", "small", "--match", "N=("}, "--match: got 'N=(', want a regular expression"},
        {{"bench", "--suite", "small", "--match", "no_such"}, "no selected row matches 'no_such'"},
    };
    for (const Wrong& wrong : wrongs) {
        const std::string result = failure(2, fp8flow_alone(with(wrong.line, {"--backend", "reference"})));
        const Texts errors = error_lines(result);
        ASSERT_EQ(errors.size(), 1u) << wrong.part << "\n" << result;
        expect_contains(errors[0], wrong.part);
    }
}

}  // namespace
}  // namespace fp8flow
