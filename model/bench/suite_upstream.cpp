// SPDX-License-Identifier: MIT
// The suite of published shapes: measured by the projects that this one builds on, with the baselines that
// their fused kernels replace, and the operations of the one-layer configurations.
#include "model/bench/suite.h"

#include <fmt/core.h>

#include <set>

namespace fp8flow::bench {

namespace {

// Memory-bound work: neither rest nor load changes its rate, so bursts only. A duplicate entry is dropped.
class Upstream {
public:
    void add(const std::string& operation, const std::string& shape) {
        const Case& what = find_case(operation);
        if (known_.insert(operation + Shape(operation, what.keys, Size::layer, shape).text()).second)
            entries_.push_back({operation, shape, Size::layer, Subject::Regimes::burst});
    }
    // Fused, and as two passes.
    void add_both(const std::string& operation, const std::string& shape) {
        add(operation, shape);
        add(operation, shape + ",fused=no");
    }
    std::vector<SuiteEntry> take() { return std::move(entries_); }

private:
    std::set<std::string> known_;
    std::vector<SuiteEntry> entries_;
};

void add_norms(Upstream& suite) {
    constexpr std::pair<int64_t, int64_t> kNorms[] = {
        {29, 17389},   {256, 65536}, {1024, 32768}, {2048, 16384}, {4096, 1024},
        {4096, 12288}, {8192, 2048}, {8192, 4096},  {8192, 8192},  {16384, 4096}};
    const char* const tensor = ",y=no,fp8=tensor,amax=yes";
    const char* const tensor_transposed = ",y=no,fp8=tensor,transposed=tensor,amax=yes";
    for (const char* dtype : {"bf16", "f16"})
        for (const auto& [rows, columns] : kNorms) {
            const std::string shape = fmt::format("T={},H={},dtype={}", rows, columns, dtype);
            suite.add("rms_norm_backward", shape + ",residual=no");
            suite.add("rms_norm", shape);
            suite.add("rms_norm_quantize", shape + tensor);
            suite.add("rms_norm_quantize", shape + tensor_transposed);
        }
    // what the flow uses: 1x128 scales, with and without the BF16 rows, 128x128 tiles for weight gradients
    for (const auto& [rows, columns] : kNorms) {
        if (columns % kBlock != 0) continue;
        const std::string shape = fmt::format("T={},H={}", rows, columns);
        suite.add("rms_norm_quantize", shape);
        suite.add("rms_norm_quantize", shape + ",y=no");
        suite.add_both("rms_norm_quantize", shape + ",y=no,fp8=vec128,transposed=tile128");
        suite.add("rms_norm_quantize", shape + tensor_transposed + ",fused=no");
        suite.add("rms_norm_backward", shape);
    }
    suite.add("rms_norm", "T=8192,H=8192,gamma=zero_centered");
    suite.add("rms_norm_backward", "T=8192,H=8192,gamma=zero_centered");
    // the shape at which others were measured on an H200
    suite.add("rms_norm", "T=4096,H=7168");
    suite.add("rms_norm_quantize", std::string("T=4096,H=7168") + tensor);
    suite.add("rms_norm_quantize", std::string("T=4096,H=7168") + tensor_transposed);
    suite.add("rms_norm_backward", "T=4096,H=7168,residual=no");
}

struct Layer {
    int64_t experts, hidden, topk, width;
};
constexpr Layer kLayers[] = {{64, 1280, 7, 1024},  {64, 2048, 6, 1408}, {160, 5120, 6, 1536},
                             {256, 7168, 8, 2048}, {384, 8192, 8, 0},   {512, 9216, 8, 0}};

void add_permutes(Upstream& suite) {
    const auto routed = [](int64_t experts, int64_t hidden, int64_t topk) {
        return fmt::format("T=4096,E={},H={},K={},rows=ragged", experts, hidden, topk);
    };
    for (const auto& [experts, hidden, topk, width] : kLayers) {
        const std::string shape = routed(experts, hidden, topk);
        for (const char* dtype : {"bf16", "e4m3"}) suite.add_both("permute_pad", shape + ",dtype=" + dtype);
        for (const char* prob : {"no", "yes"}) suite.add_both("unpermute_unpad", shape + ",prob=" + prob);
        suite.add("unpermute_probs_backward", shape);
    }
    constexpr Layer kTested[] = {{8, 1280, 2, 0}, {64, 4096, 6, 0}, {256, 7168, 6, 0}, {512, 9216, 8, 0}};
    for (const auto& [experts, hidden, topk, width] : kTested) {
        const std::string shape = routed(experts, hidden, topk);
        for (const char* dtype : {"bf16", "e4m3"}) suite.add("permute_pad", shape + ",dtype=" + dtype);
        for (const char* prob : {"no", "yes"}) suite.add("unpermute_unpad", shape + ",prob=" + prob);
    }
    // 32 experts: as others were measured on an H200
    for (const int64_t experts : {32, 256}) {
        const std::string shape = routed(experts, 7168, 8);
        for (const char* align : {"1", "128"}) {
            for (const char* dtype : {"bf16", "e4m3"})
                suite.add("permute_pad", shape + fmt::format(",align={},dtype={}", align, dtype));
            for (const char* prob : {"no", "yes"})
                suite.add("unpermute_unpad", shape + fmt::format(",align={},prob={}", align, prob));
        }
    }
    for (const char* more :
         {",align=16", ",align=32", ",dtype=f32", ",dtype=e5m2", ",dtype=e4m3,scales=no", ",K=1", ",E=1,K=1"})
        suite.add("permute_pad", "T=4096,E=32,H=7168,K=8,rows=ragged" + std::string(more));
    suite.add("plan_dispatch", "T=4096,E=32,K=8,rows=ragged");
    suite.add("plan_dispatch", "T=4096,E=256,K=8,rows=ragged");
    suite.add("plan_dispatch", "T=8192,E=256,K=8,rows=ragged");
}

void add_transposes(Upstream& suite) {
    for (const auto& [experts, hidden, topk, width] : kLayers) {
        const std::string rows = fmt::format("M={},G=32,H={}", 4096 * topk, hidden);
        suite.add("transpose_fp8", rows);
        suite.add("transpose_fp8", rows + ",rows=ragged");
        suite.add_both("transpose_requantize", rows);
    }
    suite.add("transpose_fp8", "M=32768,G=32,H=7168,rows=empty");
    suite.add("transpose_fp8", "M=32768,G=32,H=2048");
}

void add_swiglus(Upstream& suite) {
    for (const auto& [experts, hidden, topk, width] : kLayers) {
        if (width == 0) continue;
        const std::string rows = fmt::format("M={},G={},rows=ragged,F={}", 4096 * topk, experts, width);
        suite.add("swiglu", rows);
        suite.add_both("swiglu_quantize", rows);
        suite.add("swiglu_backward", rows);
        suite.add_both("swiglu_backward_quantize", rows);
    }
    for (const char* rows : {"M=32768,F=2048", "M=65536,F=1536", "M=32768,F=4096"})
        for (const char* operation : {"swiglu_quantize", "swiglu_backward_quantize"})
            suite.add(operation, rows);
}

void add_exchanges(Upstream& suite) {
    for (const auto& [experts, hidden, topk, width] : kLayers) {
        if (width == 0 || hidden == 1280) continue;
        const std::string shape = fmt::format("T=4096,E={},H={},K={}", experts, hidden, topk);
        for (const char* wire : {"bf16", "fp8", "fp8_casts"}) suite.add("dispatch", shape + ",wire=" + wire);
        suite.add("combine", shape);
    }
    for (const int64_t tokens : {8192, 16384}) {
        suite.add("dispatch", fmt::format("T={},E=256,H=7168,K=8", tokens));
        suite.add("combine", fmt::format("T={},E=256,H=7168,K=8", tokens));
    }
}

void add_quantizers(Upstream& suite) {
    for (const char* scale : {"pow2", "fp32"}) {
        for (const int64_t groups : {1, 16, 64}) {
            const std::string shape =
                fmt::format("M=16640,G={},rows=ragged,align=16,scale={}", groups, scale);
            suite.add("quantize_columns", shape + ",H=5120");
            suite.add("quantize_rows", shape + ",H=8192,layout=row");
        }
        for (const char* columns : {",H=7168", ",H=2048", ",H=4096,H2=7168"}) {
            suite.add("quantize_columns",
                      fmt::format("M=32768,G=32,rows=ragged,align=16,scale={}{}", scale, columns));
            suite.add("quantize_columns", fmt::format("M=32768,G=32,scale={}{}", scale, columns));
        }
    }
    for (const char* rows : {"M=32768,G=0,H=7168", "M=32768,G=0,H=2048", "M=4096,G=0,H=7168"})
        suite.add("quantize_rows", rows);
    const auto add_mx = [&](const std::string& weights, const char* dtype, const char* rounding) {
        suite.add("quantize_weight", fmt::format("{},dtype={},rounding={},layout=mx32,fprop=no,dgrad=yes",
                                                 weights, dtype, rounding));
    };
    for (const char* dtype : {"bf16", "f32"})
        for (const char* rounding : {"floor", "rceil"})
            for (const char* shape : {"N=8192,K=5120", "N=7168,K=2048"})
                for (const int64_t experts : {1, 2, 8, 32})
                    add_mx(fmt::format("E={},{}", experts, shape), dtype, rounding);
    for (const char* rounding : {"floor", "rceil"}) add_mx("E=32,N=4096,K=7168", "bf16", rounding);
    add_mx("E=1,N=32768,K=7168", "bf16", "floor");
}

// One GPU's part of a layer with all its experts: what a forward and a backward call besides the GEMMs.
struct OneLayer {
    int64_t tokens, hidden, experts, topk, width;
};
void add_layer(Upstream& suite, const OneLayer& layer) {
    const auto& [tokens, hidden, experts, topk, width] = layer;
    const std::string rows = fmt::format("T={},H={}", tokens, hidden);
    const std::string routed = fmt::format("T={},E={},K={}", tokens, experts, topk);
    const std::string groups = fmt::format("M={},G={}", tokens * topk, experts);
    suite.add("rms_norm_quantize", rows);
    suite.add("rms_norm_backward", rows);
    suite.add("quantize_rows", fmt::format("M={},G=0,H={},layout=vec128_wire", tokens, hidden));
    suite.add("route", routed);
    suite.add("plan_dispatch", routed);
    suite.add("dispatch", routed + fmt::format(",H={}", hidden));
    suite.add("combine", routed + fmt::format(",H={}", hidden));
    suite.add("swiglu_quantize", groups + fmt::format(",F={}", width));
    suite.add("swiglu_backward_quantize", groups + fmt::format(",F={}", width));
    for (const int64_t columns : {hidden, width, 2 * width})
        suite.add("transpose_fp8", groups + fmt::format(",H={}", columns));
}

void add_layers(Upstream& suite) {
    constexpr OneLayer kOneLayer[] = {{4096, 7168, 32, 8, 2048}, {8192, 4096, 32, 8, 1536},
                                      {4096, 2048, 64, 6, 1408}, {4096, 7168, 256, 8, 2048},
                                      {4096, 4096, 8, 2, 14336}, {4096, 4096, 128, 8, 1536},
                                      {4096, 2048, 128, 8, 768}};
    for (const OneLayer& layer : kOneLayer) add_layer(suite, layer);
    suite.add("route", "T=8192,E=256,K=8");
    for (const char* pass : {"router_top_k", "router_top_k_backward"})  // its two kernels
        suite.add(pass, "T=8192,E=256,K=8,balance=yes");
    // once a step, and the ends of the network
    for (const char* weight : {"N=4096,K=7168", "N=7168,K=2048"}) {
        suite.add("quantize_weight", std::string("E=32,") + weight);
        for (const char* state : {"", ",state=bf16"})
            suite.add("adamw_quantize", std::string("E=8,") + weight + state);
    }
    suite.add("cross_entropy", "T=1024,V=129280");
    suite.add("embedding", "T=4096,H=7168");
    suite.add("embedding_backward", "T=4096,H=7168");
    suite.add("norm_squared", "");
}

}  // namespace

std::vector<SuiteEntry> upstream_suite() {
    Upstream suite;
    add_norms(suite);
    add_permutes(suite);
    add_transposes(suite);
    add_swiglus(suite);
    add_exchanges(suite);
    add_quantizers(suite);
    add_layers(suite);
    return suite.take();
}

}  // namespace fp8flow::bench
