// SPDX-License-Identifier: MIT
// What every backend shares of Ops: counting casts, and the fused operations composed of plain ones.
#include "kernels/ops.h"

namespace fp8flow {

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
