// SPDX-License-Identifier: MIT
// Argument checks and costs of RMSNorm.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

using L = ScaleLayout;

void check_rows(const TensorView& view, const char* what, const TensorView& x) {
    FP8FLOW_CHECK(is_float(view.dtype) && has_shape(view, {x.dim(0), x.dim(1)}), "{} is {}, x is {}", what,
                  describe(view), describe(x));
    check_own_rows(view, what);
}

void check_input(const TensorView& x, const TensorView& gamma, const TensorView& rstd) {
    FP8FLOW_CHECK(x.rank == 2 && x.dim(1) >= 1, "x is {}", describe(x));
    check_rows(x, "x", x);
    check_tensor(gamma, "gamma", DType::f32, {x.dim(1)});
    check_tensor(rstd, "rstd", DType::f32, {x.dim(0)});
}

}  // namespace

void check(const op::RmsNorm& args) {
    check_input(args.x, args.gamma, args.rstd);
    check_rows(args.y, "y", args.x);
}
OpCost cost(const op::RmsNorm& args) {
    return moves({args.x, args.gamma}, {args.y, args.rstd}, 4 * count_of(args.x));
}

void check(const op::RmsNormQuantize& args) {
    check_input(args.x, args.gamma, args.rstd);
    const int64_t tokens = args.x.dim(0), width = args.x.dim(1);
    check_optional(args.y, "y", DType::bf16, {tokens, width});
    check_optional(args.amax, "amax", DType::f32, {1});
    const bool blocks = args.rows.layout == L::vec128 || args.rows.layout == L::vec128_wire;
    if (args.rows) {
        check_layout(args.rows, "rows", {L::vec128, L::vec128_wire, L::tensor});
        check_fp8(args.rows, "rows");
        check_tensor(args.rows.data, "rows", args.rows.data.dtype, {tokens, width});
        if (blocks) check_written(args.rows, "rows", args.scale_format);
    }
    if (!args.transposed) return;
    const TensorView& values = args.transposed.data;
    check_fp8(args.transposed, "transposed");
    FP8FLOW_CHECK(values.rank == 2 && values.dim(0) == width && values.dim(1) >= tokens,
                  "transposed is {}, x is {}", describe(values), describe(args.x));
    const bool tiles = args.transposed.layout == L::tile128;
    FP8FLOW_CHECK(
        args.transposed.layout == L::tensor || (tiles && blocks && args.scale_format == ScaleFormat::pow2 &&
                                                values.dtype == args.rows.data.dtype),
        "transposed has scales {}, rows {} {}: tile128 needs rows of the same type in 1x128 "
        "blocks with power-of-two scales",
        name_of(args.transposed.layout), describe(args.rows.data), name_of(args.rows.layout));
    if (tiles) check_written(args.transposed, "transposed", args.scale_format);
}
OpCost cost(const op::RmsNormQuantize& args) {
    return moves(
        {args.x, args.gamma},
        {args.y, args.rstd, args.rows.data, args.rows.scales, args.transposed.data, args.transposed.scales},
        6 * count_of(args.x));
}

void check(const op::RmsNormBackward& args) {
    check_input(args.x, args.gamma, args.rstd);
    check_rows(args.dy, "dy", args.x);
    if (args.dresidual) check_rows(args.dresidual, "dresidual", args.x);
    check_rows(args.dx, "dx", args.x);
    check_tensor(args.dgamma, "dgamma", DType::f32, {args.x.dim(1)});
}
OpCost cost(const op::RmsNormBackward& args) {
    return moves({args.dy, args.x, args.gamma, args.rstd, args.dresidual, args.dgamma},
                 {args.dx, args.dgamma}, 10 * count_of(args.x));
}

}  // namespace fp8flow
