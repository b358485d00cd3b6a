// SPDX-License-Identifier: MIT
// Dense, grouped and weight-gradient GEMMs of the reference backend: the operand entries, scales and rows of
// D of each GemmProblem of the shared kernel (gemm_kernel.h).
#include "kernels/core/error.h"
#include "kernels/reference/gemm_kernel.h"
#include "kernels/reference/rows.h"

#include <cstring>

namespace fp8flow {

namespace {

using namespace reference;

// Stored [rows, contraction].
Operand along_contraction(const ScaledTensor& tensor) {
    return {.data = tensor.data,
            .output_stride = tensor.data.dim(-1),
            .k_stride = 1,
            .scale = {.scales = tensor.scales, .place = scale_place(tensor.layout, tensor.data)}};
}

// Stored [contraction, rows]; plain tensors only.
Operand across_contraction(const ScaledTensor& tensor) {
    return {.data = tensor.data, .output_stride = 1, .k_stride = tensor.data.dim(-1)};
}

// The operand with its outputs counted from stored row `row`.
Operand from_row(Operand operand, int64_t row) {
    operand.offset += row * operand.output_stride;
    operand.scale.offset += operand.scale.place.of(row, 0);
    return operand;
}

// The operand with its contraction counted from element `k`, the first of group `group`.
Operand from_contraction(Operand operand, const ScaledTensor& tensor, int64_t k, int64_t group) {
    OperandScale& scale = operand.scale;
    const int64_t block = scale.place.block;
    FP8FLOW_CHECK(block == 0 || k % block == 0, "group {} starts at row {}, inside a {} block of {}", group,
                  k, name_of(tensor.layout), block);
    operand.offset += k * operand.k_stride;
    scale.offset += scale.place.of(0, k);
    if (tensor.layout == ScaleLayout::group_row) scale.offset += group * tensor.data.dim(0);
    return operand;
}

// Entry `index` of stacked weights.
Operand entry_of(Operand operand, const ScaledTensor& tensor, int64_t index) {
    operand.offset += index * tensor.data.dim(1) * tensor.data.dim(2);
    if (tensor.scales && tensor.layout != ScaleLayout::tensor)
        operand.scale.offset += index * (tensor.scales.numel() / tensor.data.dim(0));
    return operand;
}

// dw (+)= sums of the groups with rows, in any set; a group without any gets zeros, or keeps its values.
void store_gradient(const op::GroupedGemmWgrad& args, const std::vector<float>& sums) {
    const bool adds = args.mode == Gradient::accumulate;
    const int64_t rows = args.dw.dim(1), columns = args.dw.dim(2);
    std::vector<int64_t> counts(static_cast<std::size_t>(args.dw.dim(0)));
    for (int i = 0; i < num_sets(args); ++i)
        for (const GroupRange& range : group_ranges(set_of(args, i).groups, 0))
            counts[static_cast<std::size_t>(range.group)] += range.count;
#pragma omp parallel for
    for (int64_t row = 0; row < args.dw.dim(0) * rows; ++row) {
        if (adds && counts[static_cast<std::size_t>(row / rows)] == 0) continue;
        const uint32_t counter = rounding_row(args.rounding.step_key(), args.rounding.first + row);
        for (int64_t column = 0; column < columns; ++column) {
            const int64_t i = row * columns + column;
            const float sum = sums[static_cast<std::size_t>(i)];
            if (args.dw.dtype == DType::f32) {
                float& to = args.dw.as<float>()[i];
                to = adds ? to + sum : sum;
                continue;
            }
            Bf16& to = args.dw.as<Bf16>()[i];
            to = adds ? round_stochastically(to_float(to) + sum, rounding_bits(counter, column))
                      : to_bf16(sum);
        }
    }
}

// One patch of a gradient [N, K] from element `first` on, in the order of kernels/ops/squares.h.
double patch_of_squares(const TensorView& dw, int64_t first, int64_t row0, int64_t column0) {
    const int64_t rows = dw.dim(1), columns = dw.dim(2);
    constexpr int kLanes = op::kSquaresLanes, kHalf = static_cast<int>(op::kSquaresTile) / 2;
    float quarters[kLanes] = {};
    for (const int64_t quarter : {0, 1, 2, 3}) {
        op::SquareStrands strands[kLanes];
        for (int64_t column = 0; column < kHalf; column += 2)
            for (int64_t row = 0; row < op::kSquaresRows; ++row) {
                const int64_t i = row0 + quarter / 2 * kHalf + row,
                              j = column0 + quarter % 2 * kHalf + column;
                float pair[2] = {};
                if (i < rows && j < columns)
                    load_floats(dw, first + i * columns + j, std::min<int64_t>(2, columns - j), pair);
                strands[row % 8 * 4 + column / 2 % 4].add(static_cast<int>(column / 16 % 2), pair[0],
                                                          pair[1]);
            }
        for (int lane = 0; lane < kLanes; ++lane) quarters[lane] += strands[lane].sum();
    }
    double lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = op::lane_of_squares(quarters[lane]);
    return sum_in_halves<kLanes>(lanes);
}

void sum_squares(const TensorView& dw, const TensorView& squares) {
    const int64_t matrix = dw.dim(1) * dw.dim(2), columns = squares.dim(2), patches = squares[0].numel();
    double* out = squares.as<double>();
#pragma omp parallel for
    for (int64_t entry = 0; entry < squares.numel(); ++entry) {
        const int64_t of_group = entry % patches, tile = of_group / op::kSquaresPatches;
        out[entry] = patch_of_squares(
            dw, entry / patches * matrix,
            tile / columns * op::kSquaresTile + of_group % op::kSquaresPatches * op::kSquaresRows,
            tile % columns * op::kSquaresTile);
    }
}

// The weight gradient of each group that has something to write or to add.
std::vector<GemmProblem> gradients(const op::WgradOperands& set, const TensorView& dw, Gradient mode,
                                   Start start) {
    const int64_t n = dw.dim(1), k = dw.dim(2);
    const bool transposed = is_fp8(set.dy.data.dtype);  // FP8 operands are the transposed copies
    const Operand dy = transposed ? along_contraction(set.dy) : across_contraction(set.dy);
    const Operand x = transposed ? along_contraction(set.x) : across_contraction(set.x);
    const int64_t dy_base = base_of(set.dy.data), x_base = base_of(set.x.data);
    std::vector<GemmProblem> problems;
    for (const GroupRange& range : group_ranges(set.groups, 0)) {
        if (range.count == 0 && (mode == Gradient::accumulate || start == Start::d)) continue;
        problems.push_back({.m = n,
                            .n = k,
                            .k = range.count,
                            .a = from_contraction(dy, set.dy, dy_base + range.first, range.group),
                            .b = from_contraction(x, set.x, x_base + range.first, range.group),
                            .mode = mode,
                            .d = dw,
                            .d_offset = range.group * n * k,
                            .start = start});
    }
    return problems;
}

void write_gradient(const op::GroupedGemmWgrad& args, SummationOrder order) {
    const bool f32 = args.dw.dtype == DType::f32;
    if (!args.second && f32) {
        run_gemms(gradients({args.dy, args.x, args.groups}, args.dw, args.mode, Start::zero), order);
        return;
    }
    // all GEMMs into one sum; with accumulate, or for BF16, in memory of its own
    const bool apart = args.mode == Gradient::accumulate || !f32;
    std::vector<float> sums(apart ? static_cast<std::size_t>(args.dw.numel()) : 0);
    TensorView dw = args.dw;
    dw.dtype = DType::f32;
    if (apart) dw.data = sums.data();
    run_gemms(gradients({args.dy, args.x, args.groups}, dw, Gradient::overwrite, Start::zero), order);
    for (int i = 1; i < num_sets(args); ++i)
        run_gemms(gradients(set_of(args, i), dw, Gradient::overwrite, Start::d), order);
    if (apart) store_gradient(args, sums);
}

}  // namespace

void ReferenceOps::do_gemm(const op::Gemm& args, const Launch&) {
    const bool a_across = args.form == op::GemmForm::tn, b_across = args.form != op::GemmForm::nt;
    const Operand a = a_across ? across_contraction(args.a) : along_contraction(args.a);
    const Operand b = b_across ? across_contraction(args.b) : along_contraction(args.b);
    run_gemms({{.m = args.d.dim(0),
                .n = args.d.dim(1),
                .k = args.a.data.dim(a_across ? 0 : 1),
                .a = a,
                .b = b,
                .mode = args.mode,
                .d = args.d}},
              summation_);
}

void ReferenceOps::do_grouped_gemm(const op::GroupedGemm& args, const Launch&) {
    const int64_t n = args.d.dim(1), k = args.a.data.dim(1);
    const Operand a = along_contraction(args.a);
    const Operand b = args.form == op::GemmForm::nt ? along_contraction(args.b) : across_contraction(args.b);
    const int64_t a_base = base_of(args.a.data), d_base = base_of(args.d);
    std::vector<GemmProblem> problems;
    for (const GroupRange& range : group_ranges(args.groups, args.d.dim(0))) {
        problems.push_back({.m = range.count,
                            .n = n,
                            .k = k,
                            .a = from_row(a, a_base + range.first),
                            .b = entry_of(b, args.b, range.group % args.b.data.dim(0)),
                            .d = args.d,
                            .d_offset = (d_base + range.first) * n});
        const int64_t row_bytes = n * size_of(args.d.dtype), first_pad = range.first + range.count;
        std::memset(args.d.bytes_ptr() + (d_base + first_pad) * row_bytes, 0,
                    static_cast<std::size_t>((range.end - first_pad) * row_bytes));
    }
    run_gemms(problems, summation_);
}

void ReferenceOps::do_grouped_gemm_wgrad(const op::GroupedGemmWgrad& args, const Launch&) {
    write_gradient(args, summation_);
    if (args.squares) sum_squares(args.dw, args.squares);
}

}  // namespace fp8flow
