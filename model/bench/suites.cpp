// The suites of `bench --suite`: which operations at which shapes.
#include "model/bench/case.h"
#include "model/config_fields.h"

namespace fp8flow::bench {

namespace {

using Suite = std::vector<SuiteEntry>;

// The products of one layer's experts at one distribution of rows: forward, data gradient, and the weight gradient in both modes. Data
// gradients of BF16 read the weights as they are stored, those of FP8 a transposed copy. Other rows than balanced ones: bursts only.
void add_expert_products(Suite& suite, const std::string& groups, int64_t n, int64_t k,
                         const std::string& type, const std::string& rows) {
    const auto add = [&](const char* operation, const std::string& more) {
        suite.push_back({.operation = operation,
                         .shape = fmt::format("{},type={},rows={}{}", groups, type, rows, more),
                         .regimes = rows == "balanced" ? Subject::Regimes::all : Subject::Regimes::burst});
    };
    add("grouped_gemm", fmt::format(",N={},K={}", n, k));
    add("grouped_gemm", fmt::format(",N={},K={}{}", k, n, type == "bf16" ? ",form=nn" : ""));
    for (const char* mode : {"overwrite", "accumulate"})
        add("grouped_gemm_wgrad", fmt::format(",N={},K={},mode={}", n, k, mode));
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
    suite.push_back({"permute_pad", "dtype=bf16"});
    for (const char* wire : {"wire=bf16", "wire=fp8_casts"}) suite.push_back({"dispatch", wire});
    suite.push_back({"combine", "order=invariant"});
    return suite;
}

// (groups, rows of each, N, K)
Suite gemm() {
    struct Product {
        int64_t groups, rows, n, k;
    };
    constexpr Product kProducts[] = {{32, 1024, 4096, 7168}, {32, 1024, 7168, 2048}, {8, 4096, 4096, 7168},
                                     {8, 4096, 7168, 2048},  {16, 2048, 3072, 4096}, {16, 2048, 4096, 1536},
                                     {4, 8192, 28672, 4096}, {64, 512, 4096, 7168}};
    Suite suite;
    for (const char* type : {"fp8", "bf16"}) {
        for (const auto& [groups, rows, n, k] : kProducts)
            for (const char* distribution : {"balanced", "ragged", "empty"})
                add_expert_products(suite, fmt::format("M={},G={}", groups * rows, groups), n, k, type,
                                    distribution);
        suite.push_back({"gemm", fmt::format("M=8192,N=8192,K=8192,type={}", type)});
        suite.push_back({"gemm", fmt::format("M=4096,N=4096,K=7168,type={}", type)});
    }
    return suite;
}

// The shapes that the projects published which this one grew from.
Suite upstream() {
    Suite suite;
    constexpr std::pair<int64_t, int64_t> kNorms[] = {
        {29, 17389},   {256, 65536}, {1024, 32768}, {2048, 16384}, {4096, 1024},
        {4096, 12288}, {8192, 2048}, {8192, 4096},  {8192, 8192},  {16384, 4096}};
    for (const char* dtype : {"bf16", "f16"}) {
        for (const auto& [rows, columns] : kNorms) {
            const std::string shape = fmt::format("T={},H={},dtype={}", rows, columns, dtype);
            suite.push_back({"rms_norm_backward", shape + ",residual=no"});
            suite.push_back({"rms_norm", shape});
            suite.push_back({"rms_norm_quantize", shape + ",y=no,fp8=tensor,amax=yes"});
            suite.push_back({"rms_norm_quantize", shape + ",y=no,fp8=tensor,transposed=tensor,amax=yes"});
        }
    }
    struct Layer {
        int64_t experts, hidden, topk, width;
    };
    constexpr Layer kLayers[] = {{64, 1280, 7, 1024},  {64, 2048, 6, 1408}, {160, 5120, 6, 1536},
                                 {256, 7168, 8, 2048}, {384, 8192, 8, 0},   {512, 9216, 8, 0}};
    for (const auto& [experts, hidden, topk, width] : kLayers) {
        const std::string routed = fmt::format("T=4096,E={},H={},K={},rows=ragged", experts, hidden, topk);
        const std::string groups = fmt::format("M={},G={},rows=ragged", 4096 * topk, experts);
        for (const char* dtype : {"bf16", "e4m3"}) {
            suite.push_back({"permute_pad", routed + ",dtype=" + dtype});
            // the unfused pair
            suite.push_back({"permute_pad", routed + ",align=1,dtype=" + dtype});
            suite.push_back({"pad_rows", groups + fmt::format(",H={},dtype={}", hidden, dtype)});
        }
        suite.push_back({"unpermute_unpad", routed});
        suite.push_back({"unpermute_unpad", routed + ",prob=yes"});
        const std::string rows = fmt::format("M={},G=32,H={}", 4096 * topk, hidden);
        suite.push_back({"transpose_fp8", rows});
        suite.push_back({"transpose_fp8", rows + ",rows=ragged"});
        suite.push_back({"transpose_requantize", rows});
        if (width == 0) continue;
        for (const char* operation :
             {"swiglu", "swiglu_quantize", "swiglu_backward", "swiglu_backward_quantize"})
            suite.push_back({operation, groups + fmt::format(",F={}", width)});
        for (const int64_t columns : {width, 2 * width})  // what the unfused forms add
            suite.push_back({"quantize_rows", groups + fmt::format(",H={}", columns)});
        if (experts == 64 && hidden == 1280) continue;
        for (const char* wire : {"bf16", "fp8", "fp8_casts"})
            suite.push_back(
                {"dispatch", fmt::format("T=4096,E={},H={},K={},wire={}", experts, hidden, topk, wire)});
    }
    for (const char* scale : {"pow2", "fp32"}) {
        for (const int64_t groups : {1, 16, 64}) {
            const std::string shape =
                fmt::format("M=16640,G={},rows=ragged,align=16,scale={}", groups, scale);
            suite.push_back({"quantize_columns", shape + ",H=5120"});
            suite.push_back({"quantize_rows", shape + ",H=8192,layout=row"});
        }
        const std::string shape = fmt::format("M=32768,G=32,rows=ragged,align=16,scale={}", scale);
        for (const char* columns : {",H=7168", ",H=2048", ",H=4096,H2=7168"})
            suite.push_back({"quantize_columns", shape + columns});
    }
    for (const char* dtype : {"bf16", "f32"})
        for (const char* rounding : {"floor", "rceil"})
            for (const char* shape : {"N=8192,K=5120", "N=7168,K=2048"})
                for (const int64_t experts : {1, 2, 8, 32})
                    suite.push_back(
                        {"quantize_weight",
                         fmt::format("E={},{},dtype={},rounding={},layout=mx32,fprop=no,dgrad=yes", experts,
                                     shape, dtype, rounding)});
    return suite;
}

}  // namespace

const std::vector<std::pair<std::string, std::string>>& suite_names() {
    static const std::vector<std::pair<std::string, std::string>> names = {
        {"layer", "every operation as in a DeepSeek-V3 layer with 4096 tokens on the GPU"},
        {"gemm",
         "the experts' matrix products, this project's kernels beside cuBLASLt; about 3 minutes on an H200"},
        {"upstream", "the shapes published by the projects that this one grew from"},
        {"small", "every operation once at a small shape: a quick look, also without a GPU"}};
    return names;
}

std::vector<SuiteEntry> suite(const std::string& name) {
    if (name == "layer") return layer();
    if (name == "gemm") return gemm();
    if (name == "upstream") return upstream();
    if (name == "small") return every(Size::small);
    std::vector<std::string> names;
    for (const auto& [known, meaning] : suite_names()) names.push_back(known);
    const std::string near = nearest_name(name, names);
    fail(ExitCode::usage, "--suite: got '{}', want {}{}", name, fmt::join(names, ", "),
         near.empty() ? "" : fmt::format(" (did you mean '{}')", near));
}

}  // namespace fp8flow::bench
