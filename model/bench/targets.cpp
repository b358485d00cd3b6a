// SPDX-License-Identifier: MIT
// The table of targets.
#include "model/bench/targets.h"

#include "model/report/table.h"

#include <fmt/core.h>

namespace fp8flow::bench {

using namespace report;

namespace {

std::optional<Target> at_least(const char* name, double share) {
    return Target{.name = name, .share = share};
}

std::optional<Target> norm_target(const Shape& shape) {
    const bool transposed = shape.word("transposed") != "no", tensor = shape.word("fp8") == "tensor";
    if (transposed) return Target{.name = "RMSNorm -> FP8 + transposed FP8", .share = 0.80, .gain = 1.5};
    if (shape.yes("y")) return at_least("RMSNorm -> FP8 + BF16", 0.88);
    return at_least(tensor ? "RMSNorm -> FP8, one scale" : "RMSNorm -> FP8, 1x128", 0.90);
}

std::optional<Target> transpose_target(const Shape& shape) {
    Target target{.name = "FP8 transpose", .share = 0.88};
    if (shape.number("M") == 32768 && shape.number("H") == 7168) target.seconds = 0.13e-3;
    return target;
}

std::optional<Target> columns_target(const Shape& shape) {
    if (shape.word("layout") != "group_row") return {};
    if (shape.number("G") == 1) return at_least("columns, one group (one pass)", 0.70);
    return at_least(shape.number("H2") > 0 ? "columns per group, two operands" : "columns per group", 0.85);
}

std::optional<Target> rows_target(const Shape& shape) {
    if (shape.word("layout") == "row") return at_least("rows per group", 0.85);
    if (shape.word("layout").starts_with("vec128")) return at_least("quantise rows 1x128", 0.92);
    return {};
}

std::optional<Target> weight_target(const Shape& shape) {
    if (shape.word("layout") == "mx32" && !shape.yes("fprop")) return at_least("MXFP8 3-D columns", 0.85);
    if (shape.word("layout") == "block128" && shape.yes("dgrad"))
        return at_least("weights 128x128 + transposed", 0.90);
    return {};
}

std::optional<Target> routing_target(const char* name, const Shape& shape) {
    if (shape.number("T") != 8192 || shape.number("E") != 256) return {};
    return Target{.name = name, .seconds = 25e-6, .launches = 2};
}

// Between GPUs the ceiling is the larger of wire and memory. combine: 1.02 times the wire part at 88 % of its
// ceiling, plus 10 %. Times apply to T=4096 in a DeepSeek-V3 layer on four GPUs. Calls limited to a part of
// the SMs have no target.
std::optional<Target> exchange_target(const std::string& operation, const Shape& shape, int64_t ranks) {
    if (shape.number("sms") > 0) return {};
    const bool stated = ranks == 4 && shape.number("T") == 4096 && shape.number("E") == 256 &&
                        shape.number("K") == 8 && shape.number("H") == 7168;
    if (operation == "dispatch") {
        if (shape.word("wire") == "fp8_casts") return {};
        if (ranks == 1) return at_least("dispatch, one GPU", 0.88);
        Target target{.name = "dispatch", .share = ranks == 2 ? 0.85 : 0.90, .peer = 1.35};
        if (stated && shape.word("wire") == "fp8") target.seconds = 275e-6;
        return target;
    }
    if (ranks > 1 && shape.word("part") == "sent") return at_least("combine, the wire alone", 0.88);
    if (ranks == 1) return at_least("combine, one GPU", 0.88);
    Target target{.name = "combine", .share = 0.88 / (1.02 * 1.10), .peer = 1.15};
    if (stated) target.seconds = 520e-6;
    return target;
}

}  // namespace

std::string Target::text() const {
    std::string text;
    const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
    if (share > 0)
        add(fmt::format(">= {}{}", format_percent(share, 0), gain ? fmt::format(" or {}x", *gain) : ""));
    if (seconds) add(fmt::format("<= {:g} us", *seconds * 1e6));
    if (launches) add(fmt::format("<= {} launches", *launches));
    return text;
}

std::optional<Target> family_of(const Shape& shape, int64_t ranks) {
    const std::string& operation = shape.operation();
    if (shape.has("fused") && !shape.yes("fused")) return {};  // the baseline of a fused form
    if (operation == "rms_norm") return at_least("RMSNorm", 0.92);
    if (operation == "rms_norm_quantize") return norm_target(shape);
    if (operation == "rms_norm_backward") return at_least("RMSNorm backward", 0.88);
    if (operation == "quantize_rows") return rows_target(shape);
    if (operation == "quantize_columns") return columns_target(shape);
    if (operation == "quantize_weight") return weight_target(shape);
    if (operation == "adamw_quantize") return at_least("AdamW + both FP8 copies", 0.90);
    if (operation == "transpose_fp8") return transpose_target(shape);
    if (operation == "swiglu_quantize") return at_least("SwiGLU x prob -> FP8", 0.90);
    if (operation == "swiglu_backward_quantize") return at_least("SwiGLU backward -> FP8", 0.88);
    if (operation == "permute_pad")
        return at_least(shape.word("dtype") == "e4m3" || shape.word("dtype") == "e5m2"
                            ? "permute + pad, FP8"
                            : "permute + pad, BF16",
                        0.88);
    if (operation == "unpermute_unpad") return at_least("unpermute + unpad", 0.88);
    if (operation == "route") return routing_target("router from logits", shape);
    if (operation == "plan_dispatch") return routing_target("dispatch plan", shape);
    if (operation == "dispatch" || operation == "combine") return exchange_target(operation, shape, ranks);
    if (operation == "cross_entropy") return at_least("cross-entropy", 0.85);
    if (operation == "embedding" || operation == "embedding_backward") return at_least("embedding", 0.85);
    if (operation == "norm_squared") return at_least("gradient norm", 0.85);
    return {};
}

std::optional<Target> target_of(const Shape& shape, const Work& work, int64_t ranks) {
    std::optional<Target> target = family_of(shape, ranks);
    if (!target) return {};
    const bool any_size = target->name == "MXFP8 3-D columns";  // one expert must be as fast as many
    if (work.bytes() < kLargeEnough && !any_size) {
        target->share = 0;
        target->gain.reset();
        if (!target->seconds && !target->launches) return {};
    }
    return target;
}

}  // namespace fp8flow::bench
