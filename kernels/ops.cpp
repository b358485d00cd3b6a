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
                        .form = args.form,
                        .scale_format = args.scale_format,
                        .a = args.act},
                       launch);
}

namespace {

// [T, heads, D] as the rows that a gamma normalises: heads, or tokens.
TensorView rows_of(const TensorView& heads, const TensorView& gamma) {
    return heads.reshape({heads.numel() / gamma.numel(), gamma.numel()});
}

}  // namespace

void Ops::do_qkv_heads(const op::QkvHeads& args, const Launch& launch) {
    const bool normed = static_cast<bool>(args.q_gamma);
    do_split_qkv({.qkv = args.qkv,
                  .bias = args.bias,
                  .q = normed ? args.q_raw : args.q,
                  .k = normed ? args.k_raw : args.k,
                  .v = args.v},
                 launch);
    const auto norm = [&](const TensorView& raw, const TensorView& gamma, const TensorView& out,
                          const TensorView& rstd) {
        do_rms_norm({.x = rows_of(raw, gamma),
                     .gamma = gamma,
                     .eps = args.eps,
                     .y = rows_of(out, gamma),
                     .rstd = rstd},
                    launch);
    };
    if (normed) {
        norm(args.q_raw, args.q_gamma, args.q, args.q_rstd);
        norm(args.k_raw, args.k_gamma, args.k, args.k_rstd);
    }
    do_rope({.table = args.table, .x = args.q}, launch);
    do_rope({.table = args.table, .x = args.k}, launch);
}

void Ops::do_qkv_heads_backward(const op::QkvHeadsBackward& args, const Launch& launch) {
    for (const TensorView& gradient : {args.dq, args.dk})
        do_rope({.table = args.table, .direction = op::RopeDirection::backward, .x = gradient}, launch);
    const auto norm = [&](const TensorView& gradient, const TensorView& raw, const TensorView& gamma,
                          const TensorView& rstd, const TensorView& dgamma) {
        do_rms_norm_backward({.dy = rows_of(gradient, gamma),
                              .x = rows_of(raw, gamma),
                              .gamma = gamma,
                              .rstd = rstd,
                              .dgamma_mode = args.dgamma_mode,
                              .dx = rows_of(gradient, gamma),
                              .dgamma = dgamma},
                             launch);
    };
    if (args.q_gamma) {
        norm(args.dq, args.q_raw, args.q_gamma, args.q_rstd, args.dq_gamma);
        norm(args.dk, args.k_raw, args.k_gamma, args.k_rstd, args.dk_gamma);
    }
    do_merge_qkv({.q = args.dq,
                  .k = args.dk,
                  .v = args.dv,
                  .dbias_mode = args.dgamma_mode,
                  .qkv = args.dqkv,
                  .dbias = args.dbias},
                 launch);
    if (args.rows)
        do_quantize_rows({.src = args.dqkv, .scale_format = args.scale_format, .dst = args.rows}, launch);
}

void Ops::do_adamw_quantize(const op::AdamWQuantize& args, const Launch& launch) {
    do_adamw(args.adamw, launch);
    Launch after = launch;  // the step
    after.independent = false;
    TensorView master = args.adamw.master;
    if (master.rank == 2) master = master.reshape({1, master.dim(0), master.dim(1)});
    do_quantize_weight({.src = master,
                        .scale_format = args.scale_format,
                        .mx_rounding = args.mx_rounding,
                        .fprop = args.fprop,
                        .dgrad = args.dgrad},
                       after);
}

}  // namespace fp8flow
