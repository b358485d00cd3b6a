// SPDX-License-Identifier: MIT
// Argument checks and costs of the optimizer's ops.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

// As many values as the master.
void check_state(const TensorView& view, const char* what, const TensorView& master) {
    FP8FLOW_CHECK(view.numel() == master.numel() && is_bf16_or_f32(view.dtype), "{} is {}, the master is {}",
                  what, describe(view), describe(master));
    check_own_rows(view, what);
}

void check_copy(const ScaledTensor& copy, const char* what, ScaleFormat format, Shape shape) {
    if (!copy) return;
    check_fp8(copy, what);
    check_written(copy, what, format);
    check_tensor(copy.data, what, copy.data.dtype, shape);
}

}  // namespace

void check(const op::NormSquared& args) {
    FP8FLOW_CHECK(args.x || args.block_sums, "neither x nor block_sums");
    FP8FLOW_CHECK(!args.x || is_bf16_or_f32(args.x.dtype), "x is {}", describe(args.x));
    check_own_rows(args.x, "x");
    if (args.block_sums) {
        FP8FLOW_CHECK(static_cast<bool>(args.x) != static_cast<bool>(args.sum),
                      "block_sums with x {} and sum {}: one of them", describe(args.x), describe(args.sum));
        const int64_t blocks =
            args.x ? ceil_div(args.x.numel(), op::kNormSquaredBlock) : args.block_sums.numel();
        check_tensor(args.block_sums, "block_sums", DType::f64, {blocks});
        if (args.x) return;
    }
    check_tensor(args.sum, "sum", DType::f32, {1});
}
OpCost cost(const op::NormSquared& args) {
    return moves({args.x, args.block_sums, args.sum}, {}, 2 * count_of(args.x));
}

void check(const op::AddSquares& args) {
    FP8FLOW_CHECK(args.squares && args.squares.dtype == DType::f64, "squares is {}", describe(args.squares));
    check_own_rows(args.squares, "squares");
    check_tensor(args.sum, "sum", DType::f32, {1});
}
OpCost cost(const op::AddSquares& args) {
    return moves({args.squares, args.sum}, {}, count_of(args.squares));
}

void check(const op::AdamW& args) {
    FP8FLOW_CHECK(args.master && args.master.dtype == DType::f32, "master is {}", describe(args.master));
    check_own_rows(args.master, "master");
    check_state(args.grad, "grad", args.master);
    check_state(args.m, "m", args.master);
    check_state(args.v, "v", args.master);
    check_tensor(args.schedule, "schedule", DType::f32, {3});
    check_tensor(args.grad_scale, "grad_scale", DType::f32, {1});
    check_optional(args.status, "status", DType::i32, {1});
    check_optional(args.rounding_step, "rounding_step", DType::i64, {1});
    if (args.copy) check_state(args.copy, "copy", args.master);
}
OpCost cost(const op::AdamW& args) {
    return moves({args.grad, args.master, args.m, args.v}, {args.copy, args.master, args.m, args.v},
                 15 * count_of(args.master));
}

void check(const op::AdamWQuantize& args) {
    check(args.adamw);
    const TensorView& weight = args.adamw.master;
    FP8FLOW_CHECK(weight.rank == 2 || weight.rank == 3, "master is {}, must be [N, K] or [E, N, K]",
                  describe(weight));
    const int64_t experts = weight.rank == 2 ? 1 : weight.dim(0), rows = weight.dim(-2),
                  columns = weight.dim(-1);
    check_copy(args.fprop, "fprop copy", args.scale_format, {experts, rows, columns});
    check_copy(args.dgrad, "dgrad copy", args.scale_format, {experts, columns, rows});
}
OpCost cost(const op::AdamWQuantize& args) {
    OpCost total = cost(args.adamw);
    const double copies = bytes_of_scaled(args.fprop) + bytes_of_scaled(args.dgrad);
    total.bytes += copies;
    total.written += copies;
    return total;
}

void check(const op::ClipFactor& args) {
    FP8FLOW_CHECK(args.norm_squared.numel() == 1 && args.status.numel() == 1 && args.norm.numel() == 1 &&
                      args.factor.numel() == 1,
                  "norm_squared {} status {} norm {} factor {}", describe(args.norm_squared),
                  describe(args.status), describe(args.norm), describe(args.factor));
    check_optional(args.limit, "limit", DType::f32, {1});
}
OpCost cost(const op::ClipFactor& args) {
    return moves({args.norm_squared, args.status}, {args.norm, args.factor});
}

}  // namespace fp8flow
