// SPDX-License-Identifier: MIT
// The suites of `bench --suite`: which operations at which shapes.
#include "kernels/core/error.h"
#include "model/bench/suite.h"
#include "model/config/fields.h"

#include <fmt/format.h>

#include <algorithm>

namespace fp8flow::bench {

namespace {

using Suite = std::vector<SuiteEntry>;

// The GEMMs of one layer's experts at one distribution of rows: forward, data gradient, and the weight
// gradient in both modes. BF16 data gradients read the weights as they are stored, FP8 ones a
// transposed copy. Unbalanced rows are measured as bursts only.
void add_expert_gemms(Suite& suite, const std::string& groups, int64_t n, int64_t k, const std::string& type,
                      const std::string& rows) {
    const auto add = [&](const char* operation, const std::string& more) {
        suite.push_back({.operation = operation,
                         .shape = fmt::format("{},type={},rows={}{}", groups, type, rows, more),
                         .regimes = rows == "balanced" ? Subject::Regimes::all : Subject::Regimes::burst});
    };
    add("grouped_gemm", fmt::format(",N={},K={}", n, k));
    add("grouped_gemm", fmt::format(",N={},K={}{}", k, n, type == "bf16" ? ",form=nn" : ""));
    for (const char* mode : {"overwrite", "accumulate"})
        for (const char* dtype : {"", ",dw=bf16"})
            add("grouped_gemm_wgrad", fmt::format(",N={},K={},mode={}{}", n, k, mode, dtype));
    if (type == "fp8" && rows == "balanced")
        for (const char* mode : {"overwrite", "accumulate"})
            add("grouped_gemm_wgrad", fmt::format(",N={},K={},mode={},micro_batches=2", n, k, mode));
}

Suite every(Size size) {
    Suite suite;
    for (const Case& known : all_cases()) suite.push_back({known.name, "", size});
    return suite;
}

Suite layer() {
    Suite suite = every(Size::layer);
    suite.push_back({"grouped_gemm", "N=7168,K=2048"});        // fc2
    suite.push_back({"grouped_gemm", "N=2048,K=7168"});        // fc2, gradient of its input
    suite.push_back({"grouped_gemm", "N=7168,K=4096"});        // fc1, gradient of its input
    suite.push_back({"grouped_gemm_wgrad", "N=7168,K=2048"});  // fc2
    suite.push_back({"grouped_gemm_wgrad", "micro_batches=2,mode=accumulate"});
    suite.push_back({"grouped_gemm_swiglu_quantize", "save_h=no"});
    suite.push_back({"permute_pad", "dtype=bf16"});
    for (const char* wire : {"wire=bf16", "wire=fp8_casts"}) suite.push_back({"dispatch", wire});
    suite.push_back({"combine", "order=invariant"});
    return suite;
}

// (groups, rows of each, N, K)
Suite gemm() {
    struct Gemm {
        int64_t groups, rows, n, k;
    };
    constexpr Gemm kGemms[] = {{32, 1024, 4096, 7168}, {32, 1024, 7168, 2048}, {8, 4096, 4096, 7168},
                               {8, 4096, 7168, 2048},  {16, 2048, 3072, 4096}, {16, 2048, 4096, 1536},
                               {4, 8192, 28672, 4096}, {64, 512, 4096, 7168}};
    Suite suite;
    for (const char* type : {"fp8", "bf16"}) {
        for (const auto& [groups, rows, n, k] : kGemms)
            for (const char* distribution : {"balanced", "ragged", "empty"})
                add_expert_gemms(suite, fmt::format("M={},G={}", groups * rows, groups), n, k, type,
                                 distribution);
        if (type == std::string_view("fp8"))  // fc1 with its activation; fc1 alone is above
            for (const char* save_h : {"yes", "no"})
                for (const char* shape : {"M=32768,G=32,F=2048,K=7168", "M=32768,G=16,F=1536,K=4096"})
                    suite.push_back(
                        {"grouped_gemm_swiglu_quantize", fmt::format("{},save_h={}", shape, save_h)});
        suite.push_back({"gemm", fmt::format("M=8192,N=8192,K=8192,type={}", type)});
        suite.push_back({"gemm", fmt::format("M=4096,N=4096,K=7168,type={}", type)});
    }
    return suite;
}

// What crosses ranks: over peer memory, over NCCL, and time against the number of SMs.
Suite exchange() {
    Suite suite;
    const auto add = [&](const char* operation, const std::string& shape) {
        suite.push_back({.operation = operation, .shape = shape, .regimes = Subject::Regimes::burst});
    };
    for (const int64_t tokens : {4096, 8192, 16384}) {
        const std::string size = fmt::format("T={}", tokens);
        for (const char* wire : {"fp8", "bf16", "fp8_casts"}) add("dispatch", size + ",wire=" + wire);
        add("combine", size);
        add("combine", size + ",part=sent");
        if (tokens == 16384) continue;
        for (const char* wire : {"fp8", "bf16"}) add("dispatch", size + ",dispatcher=alltoall,wire=" + wire);
        add("combine", size + ",dispatcher=alltoall");
    }
    for (const int64_t sms : {8, 16, 24, 32, 64, 132}) {
        add("dispatch", fmt::format("sms={}", sms));
        add("combine", fmt::format("sms={}", sms));
    }
    add("combine", "dprob=yes");
    add("gather_routing", "");
    add("all_reduce", "");
    return suite;
}

// What a whole model does outside its routed experts, forward and backward: norms, projections, heads, core
// attention, shared expert, embedding and loss.
Suite model() {
    struct Model {
        int64_t tokens, sequence, hidden, heads, kv_heads, depth, vocabulary, shared;
        bool normed;
    };
    constexpr Model kModels[] = {
        {4096, 1024, 1024, 16, 4, 64, 384, 384, true},        // configs/h200_100m.yaml
        {8192, 4096, 2048, 32, 4, 128, 151936, 0, true},      // Qwen3-30B-A3B
        {8192, 4096, 4096, 32, 8, 128, 32000, 0, false},      // Mixtral-8x7B
        {8192, 4096, 2048, 16, 16, 128, 102400, 2816, false}  // DeepSeek-V2-Lite, with plain attention
    };
    constexpr int64_t kLossTokens = 1024;  // the head takes its tokens in chunks
    Suite suite;
    const auto add = [&](const char* operation, const std::string& shape) {
        const auto same = [&](const SuiteEntry& entry) {
            return entry.operation == operation && entry.shape == shape;
        };
        if (std::none_of(suite.begin(), suite.end(), same)) suite.push_back({operation, shape});
    };
    const auto projection = [&](int64_t tokens, int64_t n, int64_t k) {
        add("gemm", fmt::format("M={},N={},K={},type=bf16", tokens, n, k));
        add("gemm", fmt::format("M={},N={},K={},type=bf16,form=nn", tokens, k, n));
        add("gemm", fmt::format("M={},N={},K={},type=bf16,form=tn,out=f32", n, k, tokens));
    };
    for (const Model& m : kModels) {
        const std::string rows = fmt::format("T={},H={}", m.tokens, m.hidden),
                          heads = fmt::format("T={},heads={},kv_heads={},D={},S={}", m.tokens, m.heads,
                                              m.kv_heads, m.depth, m.sequence),
                          norm = m.normed ? ",norm=yes" : ",norm=no";
        add("rms_norm", rows);
        add("rms_norm_backward", rows);
        projection(m.tokens, (m.heads + 2 * m.kv_heads) * m.depth, m.hidden);
        add("qkv_heads", heads + norm);
        add("attention", heads);
        add("attention_backward", heads);
        add("qkv_heads_backward", heads + norm);
        projection(m.tokens, m.hidden, m.heads * m.depth);
        if (m.shared > 0)
            add_expert_gemms(suite, fmt::format("M={},G=1", m.tokens), 2 * m.shared, m.hidden, "fp8",
                             "balanced");
        const std::string table = fmt::format("{},V={}", rows, m.vocabulary);
        add("embedding", table);
        add("embedding_backward", table);
        projection(kLossTokens, m.vocabulary, m.hidden);
        add("cross_entropy", fmt::format("T={},V={}", kLossTokens, m.vocabulary));
    }
    return suite;
}

}  // namespace

const std::vector<std::pair<std::string, std::string>>& suite_names() {
    static const std::vector<std::pair<std::string, std::string>> names = {
        {"layer", "every operation as in a DeepSeek-V3 layer with 4096 tokens on the GPU"},
        {"gemm", "the experts' GEMMs, this project's kernels next to cuBLASLt; about 3 minutes on an H200"},
        {"exchange", "dispatch and combine over peer memory and over NCCL, and against SMs (mpirun -n N)"},
        {"model", "norms, attention, projections, shared expert, embedding and loss of four models"},
        {"upstream",
         "published shapes, fused and in two passes, and the one-layer configurations; about 2 minutes"},
        {"small", "every operation once at a small shape: a quick look, also without a GPU"}};
    return names;
}

std::vector<SuiteEntry> suite(const std::string& name) {
    if (name == "layer") return layer();
    if (name == "gemm") return gemm();
    if (name == "exchange") return exchange();
    if (name == "model") return model();
    if (name == "upstream") return upstream_suite();
    if (name == "small") return every(Size::small);
    std::vector<std::string> names;
    for (const auto& [known, meaning] : suite_names()) names.push_back(known);
    const std::string near = nearest_name(name, names);
    fail(ExitCode::usage, "--suite: got '{}', want {}{}", name, fmt::join(names, ", "),
         near.empty() ? "" : fmt::format(" (did you mean '{}')", near));
}

}  // namespace fp8flow::bench
