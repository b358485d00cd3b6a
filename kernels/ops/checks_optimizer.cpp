// SPDX-License-Identifier: MIT
// Argument checks and costs of the optimizer's ops.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

void check_state(const TensorView& view, const char* what, const TensorView& master) {
    FP8FLOW_CHECK(view.numel() == master.numel() && is_bf16_or_f32(view.dtype), "{} is {}, the master is {}",
                  what, describe(view), describe(master));
    check_own_rows(view, what);
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
    return {bytes_of({args.x, args.block_sums, args.sum}),
            2 * static_cast<double>(args.x ? args.x.numel() : 0)};
}

void check(const op::AddSquares& args) {
    FP8FLOW_CHECK(args.squares && args.squares.dtype == DType::f64, "squares is {}", describe(args.squares));
    check_own_rows(args.squares, "squares");
    check_tensor(args.sum, "sum", DType::f32, {1});
}
OpCost cost(const op::AddSquares& args) {
    return {bytes_of({args.squares, args.sum}), static_cast<double>(args.squares.numel())};
}

void check(const op::AdamW& args) {
    FP8FLOW_CHECK(static_cast<bool>(args.master), "no master weights");
    FP8FLOW_CHECK(args.master.dtype == DType::f32, "master is {}", describe(args.master));
    check_own_rows(args.master, "master");
    check_state(args.grad, "grad", args.master);
    check_state(args.m, "m", args.master);
    check_state(args.v, "v", args.master);
    check_tensor(args.schedule, "schedule", DType::f32, {3});
    check_tensor(args.grad_scale, "grad_scale", DType::f32, {1});
    if (args.status) check_tensor(args.status, "status", DType::i32, {1});
    if (args.rounding_step) check_tensor(args.rounding_step, "rounding_step", DType::i64, {1});
    if (!args.copy) return;
    FP8FLOW_CHECK(args.copy.numel() == args.master.numel() && is_bf16_or_f32(args.copy.dtype),
                  "copy is {}, the master is {}", describe(args.copy), describe(args.master));
    check_own_rows(args.copy, "copy");
}
OpCost cost(const op::AdamW& args) {
    return with_writes({bytes_of({args.grad, args.copy}) + 2 * bytes_of({args.master, args.m, args.v}),
                        15 * static_cast<double>(args.master.numel())},
                       bytes_of({args.copy, args.master, args.m, args.v}));
}

void check(const op::AdamWQuantize& args) {
    check(args.adamw);
    TensorView weight = args.adamw.master;
    FP8FLOW_CHECK(weight.rank == 2 || weight.rank == 3, "master is {}, must be [N, K] or [E, N, K]",
                  describe(weight));
    if (weight.rank == 2) weight = weight.reshape({1, weight.dim(0), weight.dim(1)});
    const int64_t experts = weight.dim(0), rows = weight.dim(1), columns = weight.dim(2);
    if (args.fprop) {
        check_fp8(args.fprop, "fprop copy");
        check_written(args.fprop, "fprop copy", args.scale_format);
        check_tensor(args.fprop.data, "fprop values", args.fprop.data.dtype, {experts, rows, columns});
    }
    if (args.dgrad) {
        check_fp8(args.dgrad, "dgrad copy");
        check_written(args.dgrad, "dgrad copy", args.scale_format);
        check_tensor(args.dgrad.data, "dgrad values", args.dgrad.data.dtype, {experts, columns, rows});
    }
}
OpCost cost(const op::AdamWQuantize& args) {
    OpCost total = cost(args.adamw);
    const double copies = bytes_of({args.fprop.data, args.fprop.scales, args.dgrad.data, args.dgrad.scales});
    total.bytes += copies;
    total.written += copies;
    return total;
}

void check(const op::ClipFactor& args) {
    FP8FLOW_CHECK(args.norm_squared.numel() == 1 && args.status.numel() == 1 && args.norm.numel() == 1 &&
                      args.factor.numel() == 1,
                  "norm_squared {} status {} norm {} factor {}", describe(args.norm_squared),
                  describe(args.status), describe(args.norm), describe(args.factor));
    if (args.limit) check_tensor(args.limit, "limit", DType::f32, {1});
}

OpCost cost(const op::ClipFactor&) { return {}; }

}  // namespace fp8flow
