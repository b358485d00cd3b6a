// SPDX-License-Identifier: MIT
// Argument checks and costs of the GEMMs. Checks look at shapes only: counts, offsets and row bases
// are device data.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

#include <tuple>

namespace fp8flow {

namespace {

using L = ScaleLayout;

void check_operand(const ScaledTensor& operand, const char* what, int rank, std::initializer_list<L> layouts,
                   int64_t groups = 0) {
    const TensorView& values = operand.data;
    FP8FLOW_CHECK(values.rank == rank, "{} is {}, must have rank {}", what, describe(values), rank);
    if (!is_fp8(values.dtype)) {
        FP8FLOW_CHECK(is_bf16_or_f32(values.dtype) && operand.layout == L::none, "{} is {} with scales {}",
                      what, describe(values), name_of(operand.layout));
        return;
    }
    check_layout(operand, what, layouts);
    check_fp8(operand, what, groups);
}

void check_same_kind(const ScaledTensor& a, const ScaledTensor& b) {
    FP8FLOW_CHECK(is_fp8(a.data.dtype) == is_fp8(b.data.dtype),
                  "operands {} and {}: both must be FP8, or neither", describe(a.data), describe(b.data));
}

void check_output(const TensorView& d, const char* what, Gradient mode) {
    FP8FLOW_CHECK(is_bf16_or_f32(d.dtype), "{} is {}, must be bf16 or f32", what, describe(d));
    FP8FLOW_CHECK(mode == Gradient::overwrite || d.dtype == DType::f32,
                  "{} is {}: only f32 can be accumulated into", what, describe(d));
}

double gemm_flops(int64_t m, int64_t n, int64_t k) {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

// MX scales are applied on CUDA cores for every 32 of the contraction: at most the rate of BF16.
Unit unit_of(const ScaledTensor& operand) {
    return is_fp8(operand.data.dtype) && operand.layout != L::mx32 ? Unit::fp8_mma : Unit::bf16_mma;
}

// Of an operand with one row (or column) per routed token copy: the share of this op's rows in a buffer of
// many layers.
double operand_bytes(const ScaledTensor& operand, const RowGroups& groups, int64_t stored_rows) {
    if (stored_rows == 0) return 0;
    return bytes_of_scaled(operand) * static_cast<double>(groups.cost_rows()) /
           static_cast<double>(stored_rows);
}

// Operands of a weight gradient; dy, x: what messages call them.
void check_wgrad_operands(const op::WgradOperands& set, const TensorView& dw, const char* dy, const char* x) {
    const auto layouts = {L::tile128, L::vec128, L::group_row, L::mx32, L::tensor};
    check_operand(set.dy, dy, 2, layouts, set.groups.num_groups);
    check_operand(set.x, x, 2, layouts, set.groups.num_groups);
    check_same_kind(set.dy, set.x);
    FP8FLOW_CHECK(set.groups.num_groups == dw.dim(0), "{} groups of rows for {} weight gradients",
                  set.groups.num_groups, dw.dim(0));
    check_groups(set.groups);
    const bool fp8 = is_fp8(set.dy.data.dtype);
    for (const auto& [operand, what, dim] :
         {std::tuple{&set.dy, dy, dw.dim(1)}, std::tuple{&set.x, x, dw.dim(2)}}) {
        const TensorView& values = operand->data;
        FP8FLOW_CHECK(values.dim(fp8 ? 0 : 1) == dim && values.dim(fp8 ? 1 : 0) >= set.groups.row_capacity,
                      "{} is {} for dw {} and a row capacity of {}", what, describe(values), describe(dw),
                      set.groups.row_capacity);
        check_alignment(set.groups, what, operand->layout);
    }
}

void check_alike(const ScaledTensor& first, const ScaledTensor& second, const char* what) {
    FP8FLOW_CHECK(
        first.data.dtype == second.data.dtype && first.layout == second.layout,
        "{} is {} with scales {}, the second one {} with scales {}: both must have one dtype and layout",
        what, describe(first.data), name_of(first.layout), describe(second.data), name_of(second.layout));
}

}  // namespace

void check(const op::Gemm& args) {
    const auto layouts = {L::none,     L::tensor,  L::row,       L::vec128_wire, L::vec128,
                          L::block128, L::tile128, L::group_row, L::mx32};
    check_operand(args.a, "a", 2, layouts, 1);
    check_operand(args.b, "b", 2, layouts, 1);
    check_same_kind(args.a, args.b);
    const TensorView &a = args.a.data, &b = args.b.data;
    FP8FLOW_CHECK(args.form == op::GemmForm::nt || !is_fp8(a.dtype),
                  "FP8 operands {} and {} need the form nt", describe(a), describe(b));
    const bool a_across = args.form == op::GemmForm::tn, b_across = args.form != op::GemmForm::nt;
    FP8FLOW_CHECK(a.dim(a_across ? 0 : 1) == b.dim(b_across ? 0 : 1), "contraction of {} with {}",
                  describe(a), describe(b));
    check_output(args.d, "d", args.mode);
    check_tensor(args.d, "d", args.d.dtype, {a.dim(a_across ? 1 : 0), b.dim(b_across ? 1 : 0)});
    for (const TensorView& view : {a, b, args.d}) check_own_rows(view, "an operand of a dense product");
}
OpCost cost(const op::Gemm& args) {
    const int64_t k = args.a.data.dim(args.form == op::GemmForm::tn ? 0 : 1);
    const double reads_d = args.mode == Gradient::accumulate ? 1 : 0;
    return moves(bytes_of_scaled(args.a) + bytes_of_scaled(args.b) + reads_d * bytes_of({args.d}),
                 bytes_of({args.d}), gemm_flops(args.d.dim(0), args.d.dim(1), k), unit_of(args.a));
}

void check(const op::GroupedGemm& args) {
    check_operand(args.a, "a", 2, {L::none, L::tensor, L::row, L::vec128, L::mx32});
    check_operand(args.b, "b", 3, {L::none, L::tensor, L::row, L::block128, L::mx32});
    check_same_kind(args.a, args.b);
    const TensorView &a = args.a.data, &b = args.b.data;
    FP8FLOW_CHECK(args.form == op::GemmForm::nt || (args.form == op::GemmForm::nn && !is_fp8(a.dtype)),
                  "a grouped product is nt, or nn with plain operands; here {} by {}", describe(a),
                  describe(b));
    const int64_t n = b.dim(args.form == op::GemmForm::nt ? 1 : 2),
                  k = b.dim(args.form == op::GemmForm::nt ? 2 : 1);
    check_groups(args.groups);
    FP8FLOW_CHECK(b.dim(0) >= 1 && args.groups.num_groups % b.dim(0) == 0, "{} groups of rows for {} weights",
                  args.groups.num_groups, b.dim(0));
    check_tensor(a, "a", a.dtype, {kAny, k});
    check_plain(args.d, "d", {kAny, n});
    check_capacity(a, "a", args.groups);
    check_capacity(args.d, "d", args.groups);
}
OpCost cost(const op::GroupedGemm& args) {
    const double rows = static_cast<double>(args.groups.cost_rows());
    return moves(operand_bytes(args.a, args.groups, args.a.data.dim(0)) + bytes_of_scaled(args.b),
                 rows * row_bytes(args.d),
                 gemm_flops(args.groups.cost_rows(), args.d.dim(1), args.a.data.dim(1)), unit_of(args.a));
}

void check(const op::GroupedGemmWgrad& args) {
    check_plain(args.dw, "dw", {kAny, kAny, kAny});
    check_wgrad_operands({args.dy, args.x, args.groups}, args.dw, "dy", "x");
    if (args.squares) {
        const auto [g, r, c, w] = op::squares_shape(args.dw.dim(0), args.dw.dim(1), args.dw.dim(2));
        check_tensor(args.squares, "squares", DType::f64, {g, r, c, w});
    }
    for (int i = 1; i < num_sets(args); ++i) {
        const op::WgradOperands set = set_of(args, i);
        check_wgrad_operands(set, args.dw, i == 1 ? "the second dy" : "a later dy",
                             i == 1 ? "the second x" : "a later x");
        check_alike(args.dy, set.dy, "dy");
        check_alike(args.x, set.x, "x");
    }
}
OpCost cost(const op::GroupedGemmWgrad& args) {
    const int rows_dim = is_fp8(args.dy.data.dtype) ? 1 : 0;
    const double reads_dw = args.mode == Gradient::accumulate ? 1 : 0;
    double operands = 0, flops = 0;
    for (int i = 0; i < num_sets(args); ++i) {
        const op::WgradOperands set = set_of(args, i);
        operands += operand_bytes(set.dy, set.groups, set.dy.data.dim(rows_dim)) +
                    operand_bytes(set.x, set.groups, set.x.data.dim(rows_dim));
        flops += gemm_flops(set.groups.cost_rows(), args.dw.dim(1), args.dw.dim(2));
    }
    return moves(operands + reads_dw * bytes_of({args.dw}), bytes_of({args.dw, args.squares}), flops,
                 unit_of(args.dy));
}

// The operations it is composed of.
static op::GroupedGemm gemm_of(const op::GroupedGemmSwigluQuantize& args) {
    return {.a = args.a, .b = args.b, .groups = args.groups, .d = args.h};
}
static op::SwigluQuantize activation_of(const op::GroupedGemmSwigluQuantize& args) {
    return {.h = args.h,
            .prob = args.prob,
            .groups = args.groups,
            .form = args.form,
            .scale_format = args.scale_format,
            .a = args.act};
}
void check(const op::GroupedGemmSwigluQuantize& args) {
    check_layout(args.a, "a", {L::vec128});
    check_layout(args.b, "b", {L::block128});
    FP8FLOW_CHECK(args.h.dtype == DType::bf16, "h is {}, must be bf16", describe(args.h));
    check(gemm_of(args));
    check(activation_of(args));
}
OpCost cost(const op::GroupedGemmSwigluQuantize& args) {
    const OpCost gemm = cost(gemm_of(args)), activation = cost(activation_of(args));
    const double h_bytes = static_cast<double>(args.groups.cost_rows()) * row_bytes(args.h);
    const double h_moves = args.save_h == op::SaveH::yes ? 1 : 0;  // the parts write it once and read it once
    // FLOPs: the GEMM's, which its unit does; the activation's are not counted
    return {gemm.bytes + activation.bytes - (2 - h_moves) * h_bytes, gemm.flops, gemm.unit,
            gemm.written + activation.written - (1 - h_moves) * h_bytes};
}

}  // namespace fp8flow
