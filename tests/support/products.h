// SPDX-License-Identifier: MIT
// Matrix products by the statement of kernels/ops/gemm.h: operands looked up entry by entry, their product in
// double precision, and the same in fp32 by a plain triple loop in the stated order. And the tables of
// operands that tests of both backends run over.
#pragma once

#include "kernels/ops/gemm.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace fp8flow::test {

inline constexpr double kBf16Bound = 4e-6, kF32Bound = 1e-7;
// The error of BF16 outputs is their rounding, 2.7e-6 on average; of few elements it may reach the worst
// case, (2^-8)^2.
inline double bound_of(DType dtype, std::size_t elements) {
    if (dtype == DType::f32) return kF32Bound;
    return elements < 8192 ? 0x1.0p-16 : kBf16Bound;
}

// One operand of one product, looked up entry by entry from the layouts' descriptions: code and scale of
// (output i, contraction k).
struct Matrix {
    int64_t rows = 0, depth = 0, block = 0;  // block: contraction elements per scale, 0 where constant
    std::vector<float> fp8, scales;          // [rows, depth]
    const float* code_row(int64_t i) const { return fp8.data() + i * depth; }
    const float* scale_row(int64_t i) const { return scales.data() + i * depth; }
};

// Where the product's entries stand in the stored tensor.
struct Window {
    int64_t expert = 0;     // leading index of rank-3 FP8 values
    int64_t group = 0;      // for group_row
    int64_t first_row = 0;  // output index 0
    int64_t first_k = 0;    // contraction index 0
    int64_t rows = 0, depth = 0;
    enum { along, across } stored = along;  // along: contraction contiguous
};

inline int64_t block_of(ScaleLayout layout) {
    switch (layout) {
        case ScaleLayout::vec128:
        case ScaleLayout::vec128_wire:
        case ScaleLayout::block128:
        case ScaleLayout::tile128: return 128;
        case ScaleLayout::mx32: return 32;
        default: return 0;
    }
}

// Scale of stored entry (expert e, row r, column c).
inline double scale_at(const ScaledTensor& t, int64_t e, int64_t group, int64_t r, int64_t c) {
    const int64_t R = t.data.dim(-2), C = t.data.dim(-1);
    const int64_t blocks = (C + 127) / 128, row_blocks = (R + 127) / 128;
    switch (t.layout) {
        case ScaleLayout::none: return 1;
        case ScaleLayout::tensor: return get(t.scales, 0);
        case ScaleLayout::row: return get(t.scales, e * R + r);
        case ScaleLayout::vec128_wire: return get(t.scales, r * blocks + c / 128);
        case ScaleLayout::vec128: return get(t.scales, (c / 128) * R + r);
        case ScaleLayout::block128: {
            const int64_t padded = (blocks + 3) / 4 * 4;
            return get(t.scales, (e * row_blocks + r / 128) * padded + c / 128);
        }
        case ScaleLayout::tile128: return get(t.scales, (c / 128) * row_blocks + r / 128);
        case ScaleLayout::group_row: return get(t.scales, group * R + r);
        case ScaleLayout::mx32: return get(t.scales, (e * ((C + 31) / 32) + c / 32) * R + r);
    }
    return 0;
}

inline Matrix read(const ScaledTensor& t, const Window& w) {
    Matrix matrix{w.rows, w.depth, block_of(t.layout), {}, {}};
    const int64_t R = t.data.dim(-2), C = t.data.dim(-1);
    for (int64_t i = 0; i < w.rows; ++i) {
        for (int64_t k = 0; k < w.depth; ++k) {
            const int64_t r = w.stored == Window::along ? w.first_row + i : w.first_k + k;
            const int64_t c = w.stored == Window::along ? w.first_k + k : w.first_row + i;
            matrix.fp8.push_back(static_cast<float>(get(t.data, (w.expert * R + r) * C + c)));
            matrix.scales.push_back(static_cast<float>(scale_at(t, w.expert, w.group, r, c)));
        }
    }
    return matrix;
}

inline std::vector<double> product_double(const Matrix& a, const Matrix& b) {
    std::vector<double> d;
    for (int64_t i = 0; i < a.rows; ++i) {
        for (int64_t j = 0; j < b.rows; ++j) {
            const float *ca = a.code_row(i), *sa = a.scale_row(i), *cb = b.code_row(j), *sb = b.scale_row(j);
            double sum = 0;
            for (int64_t k = 0; k < a.depth; ++k) sum += double{ca[k]} * sa[k] * double{cb[k]} * sb[k];
            d.push_back(sum);
        }
    }
    return d;
}

// The stated order in fp32: partial sums by fma over each scale block, promoted with the product of the
// scales. `sums`: what the accumulators start from, for a contraction that goes on over further operands.
inline std::vector<float> product_exact(const Matrix& a, const Matrix& b, bool scaled,
                                        const std::vector<float>& sums = {}) {
    int64_t block = a.block == 0 ? b.block : (b.block == 0 ? a.block : std::min(a.block, b.block));
    if (block == 0) block = std::max<int64_t>(a.depth, 1);
    std::vector<float> d;
    for (int64_t i = 0; i < a.rows; ++i) {
        for (int64_t j = 0; j < b.rows; ++j) {
            const float *ca = a.code_row(i), *sa = a.scale_row(i), *cb = b.code_row(j), *sb = b.scale_row(j);
            float acc = sums.empty() ? 0 : sums[d.size()];
            for (int64_t first = 0; first < a.depth; first += block) {
                float partial = scaled ? 0 : acc;
                for (int64_t k = first; k < std::min(first + block, a.depth); ++k)
                    partial = std::fma(ca[k], cb[k], partial);
                acc = scaled ? std::fma(partial, sa[first] * sb[first], acc) : partial;
            }
            d.push_back(acc);
        }
    }
    return d;
}

// Rows [first, first + rows) of a [*, n] tensor.
inline std::vector<double> rows_of(const TensorView& view, int64_t first, int64_t rows) {
    const int64_t n = view.dim(-1);
    std::vector<double> values;
    for (int64_t i = first * n; i < (first + rows) * n; ++i) values.push_back(get(view, i));
    return values;
}

// Both comparisons of one product. `before`: what D held, for accumulate.
inline void expect_product(const std::vector<double>& actual, DType dtype, const Matrix& a, const Matrix& b,
                           bool scaled, const std::vector<double>& before = {}) {
    std::vector<double> wanted = product_double(a, b), exact;
    for (float x : product_exact(a, b, scaled)) exact.push_back(x);
    for (std::size_t i = 0; i < before.size(); ++i) {
        wanted[i] += before[i];
        exact[i] = static_cast<float>(before[i]) + static_cast<float>(exact[i]);
    }
    if (dtype == DType::bf16)
        for (double& x : exact) x = round_bf16(static_cast<float>(x));
    EXPECT_LE(nmse(actual, wanted), bound_of(dtype, wanted.size()));
    EXPECT_EQ(actual, exact) << "not the stated order";
}

// Codes and scales that make every entry matter; free (not power-of-two) fp32 scales, so that a wrong order
// of rounding shows.
inline void fill_operand(const HostScaled& t, uint64_t seed) {
    fill_normal(
        t.data, seed,
        is_fp8(t.data.view().dtype) ? 8.0 : 1.0);  // wide enough that sums of FP8 values are not exact
    if (t.scales.view().dtype == DType::e8m0)
        fill_pow2(t.scales, seed + 1, -3, 3);
    else if (t.scales.view())
        fill_uniform(t.scales, seed + 1, 0.25, 2.0);
}

// Rows by group: none, one, around a block, many.
inline const std::vector<std::vector<int64_t>> kGroupCounts = {
    {0, 1, 127, 0, 128, 129, 5}, {300}, {0, 0}, {17, 0, 0, 40}};

// Scale layouts of A and B in a dense GEMM.
inline const std::vector<std::pair<ScaleLayout, ScaleLayout>> kDenseLayouts = {
    {ScaleLayout::vec128, ScaleLayout::block128},
    {ScaleLayout::vec128_wire, ScaleLayout::block128},
    {ScaleLayout::vec128, ScaleLayout::vec128},
    {ScaleLayout::tile128, ScaleLayout::tile128},
    {ScaleLayout::row, ScaleLayout::row},
    {ScaleLayout::tensor, ScaleLayout::tensor},
    {ScaleLayout::mx32, ScaleLayout::mx32},
    {ScaleLayout::vec128, ScaleLayout::tensor},
    {ScaleLayout::group_row, ScaleLayout::group_row},
    {ScaleLayout::mx32, ScaleLayout::block128}};

struct GroupedCase {
    DType dtype;
    ScaleLayout a, b;
    op::GemmForm form;
    DType d_dtype;
    int64_t alignment;
};
inline const std::vector<GroupedCase> kGroupedCases = {
    {DType::bf16, ScaleLayout::none, ScaleLayout::none, op::GemmForm::nt, DType::bf16, 1},
    {DType::bf16, ScaleLayout::none, ScaleLayout::none, op::GemmForm::nn, DType::bf16, 16},
    {DType::f32, ScaleLayout::none, ScaleLayout::none, op::GemmForm::nt, DType::f32, 16},
    {DType::f32, ScaleLayout::none, ScaleLayout::none, op::GemmForm::nn, DType::f32, 1},
    {DType::e4m3, ScaleLayout::vec128, ScaleLayout::block128, op::GemmForm::nt, DType::bf16, 128},
    {DType::e5m2, ScaleLayout::vec128, ScaleLayout::block128, op::GemmForm::nt, DType::f32, 16},
    {DType::e4m3, ScaleLayout::row, ScaleLayout::row, op::GemmForm::nt, DType::bf16, 16},
    {DType::e4m3, ScaleLayout::tensor, ScaleLayout::tensor, op::GemmForm::nt, DType::bf16, 1},
    {DType::e4m3, ScaleLayout::mx32, ScaleLayout::mx32, op::GemmForm::nt, DType::bf16, 32},
};
inline HostScaled grouped_weights(const GroupedCase& c, int64_t experts, int64_t n, int64_t k) {
    if (c.form == op::GemmForm::nt) return {c.dtype, {experts, n, k}, c.b};
    return {c.dtype, {experts, k, n}, c.b};
}

// An operand of a weight gradient: of FP8 the transposed copy, else the rows as they are.
inline HostScaled wgrad_operand(DType dtype, int64_t width, int64_t rows, ScaleLayout layout,
                                int64_t groups) {
    if (is_fp8(dtype)) return {dtype, {width, rows}, layout, groups};
    return {dtype, {rows, width}, layout};
}
// Zeros in the pads of a transposed copy; rows begin at column `base`. Plain rows keep theirs.
inline void zero_pads(const HostScaled& t, const GroupsFixture& groups, int64_t base = 0) {
    const TensorView& fp8 = t.data.view();
    if (!is_fp8(fp8.dtype)) return;
    for (int64_t row = 0; row < groups.total(); ++row)
        for (int64_t i = 0; groups.is_pad(row) && i < fp8.dim(0); ++i)
            fp8.bytes_ptr()[i * fp8.dim(1) + base + row] = 0;
}

}  // namespace fp8flow::test
