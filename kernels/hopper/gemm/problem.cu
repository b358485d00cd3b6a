// SPDX-License-Identifier: MIT
// Operations as GEMM problems: strides of operands and scales by form and scale layout.
#include "kernels/hopper/gemm/problem.h"

#include "kernels/core/scale_place.h"

namespace fp8flow::hopper::gemm {

namespace {

// Scales of FP8 values stored [rows, contraction], counted from the first stored row and contraction element.
OperandScale scale_of(const ScaledTensor& tensor) {
    if (tensor.layout == ScaleLayout::none) return {};
    const ScalePlace place = scale_place(tensor.layout, tensor.data);
    return {.scales = tensor.scales.data,
            .dtype = tensor.scales.dtype,
            .outputs_per_scale = static_cast<int>(place.rows_per_scale),
            .block = static_cast<int>(place.block),
            .output_stride = place.row_stride,
            .block_stride = place.block_stride};
}

// Stored [rows, contraction].
GemmOperand along_contraction(const ScaledTensor& tensor) {
    return {.data = tensor.data.data,
            .dtype = tensor.data.dtype,
            .output_stride = tensor.data.dim(-1),
            .k_stride = 1,
            .row_base = tensor.data.row_base,
            .scale = scale_of(tensor)};
}

// Stored [contraction, rows]; plain tensors only. Equal strides of 1 (one column) read as contiguous along
// the contraction.
GemmOperand across_contraction(const ScaledTensor& tensor) {
    return {.data = tensor.data.data,
            .dtype = tensor.data.dtype,
            .output_stride = 1,
            .k_stride = tensor.data.dim(-1),
            .row_base = tensor.data.row_base};
}

}  // namespace

GemmCall call_of(const op::Gemm& args) {
    const bool a_across = args.form == op::GemmForm::tn, b_across = args.form != op::GemmForm::nt;
    const int64_t rows = args.d.dim(0);
    return {.problem = {.groups = device_groups({}, rows),
                        .m = rows,
                        .n = args.d.dim(1),
                        .k = args.a.data.dim(a_across ? 0 : 1),
                        .a = a_across ? across_contraction(args.a) : along_contraction(args.a),
                        .b = b_across ? across_contraction(args.b) : along_contraction(args.b),
                        .mode = args.mode,
                        .d = args.d.data,
                        .d_dtype = args.d.dtype},
            .form = args.form,
            .a = args.a,
            .b = args.b,
            .group_alignment = rows % kBlock == 0 ? kBlock : 1};
}

GemmCall call_of(const op::GroupedGemm& args) {
    GemmOperand b = args.form == op::GemmForm::nt ? along_contraction(args.b) : across_contraction(args.b);
    b.group_stride = args.b.data.dim(1) * args.b.data.dim(2);
    if (args.b.scales && args.b.layout != ScaleLayout::tensor)
        b.scale.group_stride = args.b.scales.numel() / args.b.data.dim(0);
    return {.problem = {.groups = device_groups(args.groups, args.d.dim(0)),
                        .num_weights = args.b.data.dim(0),
                        .m = args.groups.row_capacity,
                        .n = args.d.dim(1),
                        .k = args.a.data.dim(1),
                        .a = along_contraction(args.a),
                        .b = b,
                        .d = args.d.data,
                        .d_dtype = args.d.dtype,
                        .d_row_base = args.d.row_base},
            .form = args.form,
            .a = args.a,
            .b = args.b,
            .group_alignment = args.groups.alignment};
}

GemmCall call_of(const op::GroupedGemmSwigluQuantize& args) {
    return call_of(op::GroupedGemm{.a = args.a, .b = args.b, .groups = args.groups, .d = args.h});
}

GemmCall call_of(const op::GroupedGemmWgrad& args) {
    const auto operand = [](const ScaledTensor& tensor) {
        GemmOperand result =
            is_fp8(tensor.data.dtype) ? along_contraction(tensor) : across_contraction(tensor);
        if (tensor.layout == ScaleLayout::group_row) result.scale.group_stride = tensor.data.dim(0);
        return result;
    };
    GemmCall call{.problem = {.grouped = Grouped::contraction,
                              .groups = device_groups(args.groups, 0),
                              .m = args.dw.dim(1),
                              .n = args.dw.dim(2),
                              .k = args.groups.row_capacity,
                              .a = operand(args.dy),
                              .b = operand(args.x),
                              .mode = args.mode,
                              .d = args.dw.data,
                              .d_dtype = args.dw.dtype,
                              .rounding = args.rounding,
                              .squares = args.squares ? args.squares.as<double>() : nullptr},
                  .form = is_fp8(args.x.data.dtype) ? op::GemmForm::nt : op::GemmForm::tn,
                  .a = args.dy,
                  .b = args.x,
                  .group_alignment = args.groups.alignment};
    if (args.second)
        call.problem.second = {device_groups(args.second.groups, 0), operand(args.second.dy),
                               operand(args.second.x)};
    return call;
}

}  // namespace fp8flow::hopper::gemm
