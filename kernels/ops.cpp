// SPDX-License-Identifier: MIT
// What every backend shares of Ops: checks and counts around each call, counting casts, and the fused
// operations composed of plain ones.
#include "kernels/ops.h"

namespace fp8flow {

template <class Args> void Ops::begin(const char* name, const Args& args) {
    check(args);
    const OpCost c = cost(args);
    OpCount& count = counts_[name];
    ++count.calls;
    count.bytes += c.bytes;
    count.flops += c.flops;
    if (observer_ != nullptr) observer_->op_called({.op = name, .cost = c, .cast = is_cast(name)});
}

// An operation of the list without its declaration in ops.h does not compile here.
#define FP8FLOW_DEFINE(name, Args)                               \
    void Ops::name(const op::Args& args, const Launch& launch) { \
        begin(#name, args);                                      \
        do_##name(args, launch);                                 \
    }
FP8FLOW_FOR_EACH_OP(FP8FLOW_DEFINE)
FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_DEFINE)
#undef FP8FLOW_DEFINE

bool is_cast(std::string_view op) {
    for (const std::string_view cast : {"quantize_rows", "quantize_columns", "quantize_dual",
                                        "quantize_tensor", "dequantize", "transpose_requantize"})
        if (op == cast) return true;
    return false;
}

int64_t Ops::num_casts() const {
    int64_t casts = 0;
    for (const auto& [name, count] : counts_)
        if (is_cast(name)) casts += count.calls;
    return casts;
}

void Ops::do_grouped_gemm_swiglu_quantize(const op::GroupedGemmSwigluQuantize& args, const Launch& launch) {
    do_grouped_gemm({.a = args.a, .b = args.b, .groups = args.groups, .d = args.h}, launch);
    do_swiglu_quantize({.h = args.h,
                        .prob = args.prob,
                        .groups = args.groups,
                        .scale_format = args.scale_format,
                        .a = args.act},
                       launch);
}

void Ops::do_adamw_quantize(const op::AdamWQuantize& args, const Launch& launch) {
    do_adamw(args.adamw, launch);
    TensorView master = args.adamw.master;
    if (master.rank == 2) master = master.reshape({1, master.dim(0), master.dim(1)});
    do_quantize_weight({.src = master,
                        .scale_format = args.scale_format,
                        .mx_rounding = args.mx_rounding,
                        .fprop = args.fprop,
                        .dgrad = args.dgrad},
                       launch);
}

}  // namespace fp8flow
