// SPDX-License-Identifier: MIT
// Argument checks and costs of RMSNorm.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

void check_rows(const TensorView& view, const char* what, const TensorView& x) {
    FP8FLOW_CHECK(view.rank == 2 && (is_bf16_or_f32(view.dtype) || view.dtype == DType::f16) &&
                      has_shape(view, {x.dim(0), x.dim(1)}),
                  "{} is {}, x is {}", what, describe(view), describe(x));
    check_own_rows(view, what);
}

void check_input(const TensorView& x, const TensorView& gamma, const TensorView& rstd) {
    FP8FLOW_CHECK(x.rank == 2 && x.dim(1) >= 1, "x is {}", describe(x));
    check_rows(x, "x", x);
    check_tensor(gamma, "gamma", DType::f32, {x.dim(1)});
    check_tensor(rstd, "rstd", DType::f32, {x.dim(0)});
}

double elements(const TensorView& view) { return static_cast<double>(view.numel()); }

}  // namespace

void check(const op::RmsNorm& args) {
    check_input(args.x, args.gamma, args.rstd);
    check_rows(args.y, "y", args.x);
}
OpCost cost(const op::RmsNorm& args) {
    return with_writes({bytes_of({args.x, args.gamma, args.y, args.rstd}), 4 * elements(args.x)},
                       bytes_of({args.y, args.rstd}));
}

void check(const op::RmsNormQuantize& args) {
    check_input(args.x, args.gamma, args.rstd);
    const int64_t tokens = args.x.dim(0), width = args.x.dim(1);
    if (args.y) check_tensor(args.y, "y", DType::bf16, {tokens, width});
    const bool blocks =
        args.rows.layout == ScaleLayout::vec128 || args.rows.layout == ScaleLayout::vec128_wire;
    if (args.rows) {
        FP8FLOW_CHECK(blocks || args.rows.layout == ScaleLayout::tensor, "rows have scales {}",
                      name_of(args.rows.layout));
        check_fp8(args.rows, "rows");
        check_tensor(args.rows.data, "rows", args.rows.data.dtype, {tokens, width});
        if (blocks) check_written(args.rows, "rows", args.scale_format);
    }
    if (args.transposed) {
        const TensorView& values = args.transposed.data;
        check_fp8(args.transposed, "transposed");
        FP8FLOW_CHECK(values.rank == 2 && values.dim(0) == width && values.dim(1) >= tokens,
                      "transposed is {}, x is {}", describe(values), describe(args.x));
        const bool tiles = args.transposed.layout == ScaleLayout::tile128 && blocks &&
                           args.scale_format == ScaleFormat::pow2 && values.dtype == args.rows.data.dtype;
        FP8FLOW_CHECK(tiles || args.transposed.layout == ScaleLayout::tensor,
                      "transposed has scales {}, rows {} {}: tile128 needs rows of the same type in 1x128 "
                      "blocks with power-of-two scales",
                      name_of(args.transposed.layout), describe(args.rows.data), name_of(args.rows.layout));
    }
    if (args.transposed.layout == ScaleLayout::tile128)
        check_written(args.transposed, "transposed", args.scale_format);
    if (args.amax) check_tensor(args.amax, "amax", DType::f32, {1});
}
OpCost cost(const op::RmsNormQuantize& args) {
    return with_writes({bytes_of({args.x, args.gamma, args.y, args.rstd, args.rows.data, args.rows.scales,
                                  args.transposed.data, args.transposed.scales}),
                        6 * elements(args.x)},
                       bytes_of({args.y, args.rstd, args.rows.data, args.rows.scales, args.transposed.data,
                                 args.transposed.scales}));
}

void check(const op::RmsNormBackward& args) {
    check_input(args.x, args.gamma, args.rstd);
    check_rows(args.dy, "dy", args.x);
    if (args.dresidual) check_rows(args.dresidual, "dresidual", args.x);
    check_rows(args.dx, "dx", args.x);
    check_tensor(args.dgamma, "dgamma", DType::f32, {args.x.dim(1)});
}
OpCost cost(const op::RmsNormBackward& args) {
    return with_writes({bytes_of({args.dy, args.x, args.gamma, args.rstd, args.dresidual, args.dx,
                                  args.dgamma, args.dgamma}),
                        10 * elements(args.x)},
                       bytes_of({args.dx, args.dgamma}));
}

}  // namespace fp8flow
