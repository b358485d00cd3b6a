// SPDX-License-Identifier: MIT
// FP8 copies of weights in every layout, MXFP8 "3D column-wise" among them, byte for byte; and the way back,
// dequantize, for every layout.
#include "kernels/reference/reference_ops.h"
#include "tests/support/fp8_reference.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

using namespace test;

struct WeightCase {
    ScaleLayout layout;
    DType src = DType::f32;
    DType dst = DType::e4m3;
    ScaleFormat format = ScaleFormat::pow2;
    MxRounding rounding = MxRounding::rceil;
};

void fill_weight(const TensorView& w, uint64_t seed) {
    const int64_t cols = w.cols();
    fill(w, [&](int64_t i) -> double {
        const auto words = random_words(seed, 3, static_cast<uint64_t>(i));
        if (words[0] % 9 == 0 || (i / cols) % 50 == 7) return 0.0;
        if (words[0] % 5003 == 1) return std::nan("");
        if (words[0] % 9001 == 2) return -INFINITY;
        return std::ldexp(0.02 * random_normal(seed, 4, static_cast<uint64_t>(i)),
                          static_cast<int>(words[1] % 8) - 4);
    });
}

// Blocks of one expert [N, K]: `rows` x `cols` values each share a scale.
struct Blocking {
    int64_t rows, cols;
};

// Walks the blocks of every expert; store(expert, n, k, code) and scale(expert, block row, block col, block).
template <class StoreCode, class StoreScale>
void reference_copy(const TensorView& src, const WeightCase& c, Blocking size, StoreCode store_code,
                    StoreScale store_scale) {
    const int64_t experts = src.dim(0), n = src.dim(1), k = src.dim(2);
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t r = 0; r < n; r += size.rows)
            for (int64_t q = 0; q < k; q += size.cols) {
                std::vector<float> values;
                for (int64_t i = r; i < std::min(n, r + size.rows); ++i)
                    for (int64_t j = q; j < std::min(k, q + size.cols); ++j)
                        values.push_back(static_cast<float>(get(src, (e * n + i) * k + j)));
                const ReferenceBlock block = reference_block(values, c.dst, c.layout, c.format, c.rounding);
                std::size_t next = 0;
                for (int64_t i = r; i < std::min(n, r + size.rows); ++i)
                    for (int64_t j = q; j < std::min(k, q + size.cols); ++j)
                        store_code(e, i, j, block.data[next++]);
                store_scale(e, r / size.rows, q / size.cols, block);
            }
}

// Both copies as the contract describes them.
void expect_copies(const TensorView& src, const WeightCase& c, HostScaled& fprop, HostScaled& dgrad) {
    const int64_t n = src.dim(1), k = src.dim(2);
    uint8_t *f = fprop.data.view().bytes_ptr(), *d = dgrad.data.view().bytes_ptr();
    auto fprop_code = [&](int64_t e, int64_t i, int64_t j, uint8_t code) { f[(e * n + i) * k + j] = code; };
    auto dgrad_code = [&](int64_t e, int64_t i, int64_t j, uint8_t code) { d[(e * k + j) * n + i] = code; };
    if (c.layout == ScaleLayout::block128) {
        fprop.scales.zero();  // the entries that pad a table to 4 columns are 0
        dgrad.scales.zero();
        const int64_t nb = ceil_div(n, 128), kb = ceil_div(k, 128), nw = round_up(nb, 4),
                      kw = round_up(kb, 4);
        auto both_codes = [&](int64_t e, int64_t i, int64_t j, uint8_t code) {
            fprop_code(e, i, j, code);
            dgrad_code(e, i, j, code);
        };
        reference_copy(src, c, {128, 128}, both_codes,
                       [&](int64_t e, int64_t br, int64_t bc, const ReferenceBlock& block) {
                           fprop.scales.as<float>()[(e * nb + br) * kw + bc] = block.scale;
                           dgrad.scales.as<float>()[(e * kb + bc) * nw + br] = block.scale;
                       });
    } else if (c.layout == ScaleLayout::row) {
        reference_copy(src, c, {1, k}, fprop_code,
                       [&](int64_t e, int64_t br, int64_t, const ReferenceBlock& block) {
                           fprop.scales.as<float>()[e * n + br] = block.scale;
                       });
        reference_copy(src, c, {n, 1}, dgrad_code,
                       [&](int64_t e, int64_t, int64_t bc, const ReferenceBlock& block) {
                           dgrad.scales.as<float>()[e * k + bc] = block.scale;
                       });
    } else {  // mx32: fprop [E, K/32, N], dgrad [E, N/32, K]
        const int64_t nb = ceil_div(n, 32), kb = ceil_div(k, 32);
        reference_copy(src, c, {1, 32}, fprop_code,
                       [&](int64_t e, int64_t br, int64_t bc, const ReferenceBlock& block) {
                           fprop.scales.view().bytes_ptr()[(e * kb + bc) * n + br] = block.byte;
                       });
        reference_copy(src, c, {32, 1}, dgrad_code,
                       [&](int64_t e, int64_t br, int64_t bc, const ReferenceBlock& block) {
                           dgrad.scales.view().bytes_ptr()[(e * nb + br) * k + bc] = block.byte;
                       });
    }
}

std::vector<WeightCase> weight_cases() {
    std::vector<WeightCase> cases;
    for (DType src : {DType::f32, DType::bf16}) {
        for (ScaleLayout layout : {ScaleLayout::block128, ScaleLayout::row})
            for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32})
                cases.push_back({layout, src, DType::e4m3, format, {}});
        for (MxRounding rounding : {MxRounding::floor, MxRounding::rceil})
            for (DType dst : {DType::e4m3, DType::e5m2})
                cases.push_back({ScaleLayout::mx32, src, dst, ScaleFormat::pow2, rounding});
    }
    return cases;
}

TEST(QuantizeWeight, EveryLayoutInBothOrientations) {
    ReferenceOps ops;
    for (const WeightCase& c : weight_cases())
        for (int64_t experts : {1, 3}) {
            const int64_t n = experts == 1 ? 640 : 160,
                          k = 256;  // 640: five blocks, so that a table has pads
            HostTensor src(c.src, {experts, n, k});
            fill_weight(src, 41);
            HostScaled fprop(c.dst, {experts, n, k}, c.layout), dgrad(c.dst, {experts, k, n}, c.layout);
            HostScaled want_fprop(c.dst, {experts, n, k}, c.layout),
                want_dgrad(c.dst, {experts, k, n}, c.layout);
            expect_copies(src, c, want_fprop, want_dgrad);
            ops.quantize_weight({.src = src,
                                 .scale_format = c.format,
                                 .mx_rounding = c.rounding,
                                 .fprop = fprop,
                                 .dgrad = dgrad});
            expect_same(fprop, want_fprop);
            expect_same(dgrad, want_dgrad);
            // each copy alone
            fprop.data.poison();
            dgrad.data.poison();
            ops.quantize_weight(
                {.src = src, .scale_format = c.format, .mx_rounding = c.rounding, .fprop = fprop});
            ops.quantize_weight(
                {.src = src, .scale_format = c.format, .mx_rounding = c.rounding, .dgrad = dgrad});
            expect_same(fprop, want_fprop);
            expect_same(dgrad, want_dgrad);
        }
}

TEST(QuantizeWeight, WithoutTheExpertDimension) {
    ReferenceOps ops;
    for (ScaleLayout layout :
         {ScaleLayout::block128, ScaleLayout::row, ScaleLayout::mx32, ScaleLayout::tensor}) {
        HostTensor src(DType::f32, {1, 128, 256});
        fill_weight(src, 42);
        HostScaled flat(DType::e4m3, {128, 256}, layout), flat_t(DType::e4m3, {256, 128}, layout);
        HostScaled deep(DType::e4m3, {1, 128, 256}, layout), deep_t(DType::e4m3, {1, 256, 128}, layout);
        ops.quantize_weight({.src = src.view().reshape({128, 256}), .fprop = flat, .dgrad = flat_t});
        ops.quantize_weight({.src = src, .fprop = deep, .dgrad = deep_t});
        EXPECT_TRUE(same_bytes(flat, deep));
        EXPECT_TRUE(same_bytes(flat_t, deep_t));
    }
}

TEST(QuantizeWeight, OneScaleForAllExperts) {
    ReferenceOps ops;
    for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
        const int64_t experts = 3, n = 144, k = 200;
        HostTensor src(DType::bf16, {experts, n, k});
        fill_weight(src, 43);
        for (int64_t i = 0; i < src.numel(); ++i)
            if (!std::isfinite(src(i))) set(src, i, 0.5);
        std::vector<float> values;
        for (int64_t i = 0; i < src.numel(); ++i) values.push_back(static_cast<float>(src(i)));
        const ReferenceBlock block = reference_block(values, DType::e4m3, ScaleLayout::tensor, format, {});
        HostScaled fprop(DType::e4m3, {experts, n, k}, ScaleLayout::tensor),
            dgrad(DType::e4m3, {experts, k, n}, ScaleLayout::tensor);
        ops.quantize_weight({.src = src, .scale_format = format, .fprop = fprop, .dgrad = dgrad});
        EXPECT_EQ(fprop.scales.as<float>()[0], block.scale);
        EXPECT_EQ(dgrad.scales.as<float>()[0], block.scale);
        for (int64_t e = 0; e < experts; ++e)
            for (int64_t i = 0; i < n; ++i)
                for (int64_t j = 0; j < k; ++j) {
                    const uint8_t code = block.data[static_cast<std::size_t>((e * n + i) * k + j)];
                    ASSERT_EQ(fprop.data.view().bytes_ptr()[(e * n + i) * k + j], code);
                    ASSERT_EQ(dgrad.data.view().bytes_ptr()[(e * k + j) * n + i], code);
                }
    }
}

// ---- dequantize
// Index of the scale of (e, r, c) by the layout's definition; R x C are the FP8 values' last two dimensions.
int64_t scale_index(ScaleLayout layout, int64_t e, int64_t r, int64_t c, int64_t rows, int64_t cols) {
    switch (layout) {
        case ScaleLayout::row: return e * rows + r;
        case ScaleLayout::vec128_wire: return (e * rows + r) * ceil_div(cols, 128) + c / 128;
        case ScaleLayout::vec128: return (e * ceil_div(cols, 128) + c / 128) * rows + r;
        case ScaleLayout::block128:
            return (e * ceil_div(rows, 128) + r / 128) * round_up(ceil_div(cols, 128), 4) + c / 128;
        case ScaleLayout::tile128: return (e * ceil_div(cols, 128) + c / 128) * ceil_div(rows, 128) + r / 128;
        case ScaleLayout::mx32: return (e * ceil_div(cols, 32) + c / 32) * rows + r;
        default: return 0;
    }
}

void fill_fp8(HostScaled& t, uint64_t seed) {
    for (int64_t i = 0; i < t.data.numel(); ++i)
        t.data.view().bytes_ptr()[i] =
            static_cast<uint8_t>(random_words(seed, 5, static_cast<uint64_t>(i))[0]);
    if (t.scales.view().dtype == DType::e8m0) {
        for (int64_t i = 0; i < t.scales.numel(); ++i)
            t.scales.view().bytes_ptr()[i] = static_cast<uint8_t>(120 + i % 11);
    } else {
        fill(t.scales,
             [&](int64_t i) { return 1e-3 * (0.5 + random_uniform(seed, 6, static_cast<uint64_t>(i))); });
    }
}

void expect_value(double got, double code, double scale, DType dtype) {
    const float value = static_cast<float>(code) * static_cast<float>(scale);
    if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(got));
    } else {
        ASSERT_EQ(got, dtype == DType::f32    ? value
                       : dtype == DType::bf16 ? to_float(to_bf16(value))
                                              : to_float(to_f16(value)));
    }
}

TEST(Dequantize, EveryLayout) {
    ReferenceOps ops;
    for (ScaleLayout layout :
         {ScaleLayout::tensor, ScaleLayout::row, ScaleLayout::vec128_wire, ScaleLayout::vec128,
          ScaleLayout::block128, ScaleLayout::tile128, ScaleLayout::mx32})
        for (DType code : {DType::e4m3, DType::e5m2})
            for (DType out : {DType::f32, DType::bf16, DType::f16})
                for (int64_t experts : {0, 2}) {  // 0: no leading dimension
                    const int64_t rows = 140, cols = 300, e_count = std::max<int64_t>(experts, 1);
                    HostScaled src = experts ? HostScaled(code, {experts, rows, cols}, layout)
                                             : HostScaled(code, {rows, cols}, layout);
                    fill_fp8(src, 44);
                    HostTensor dst =
                        experts ? HostTensor(out, {experts, rows, cols}) : HostTensor(out, {rows, cols});
                    ops.dequantize({.src = src, .dst = dst});
                    for (int64_t e = 0; e < e_count; ++e)
                        for (int64_t r = 0; r < rows; ++r)
                            for (int64_t c = 0; c < cols; ++c) {
                                const int64_t i = (e * rows + r) * cols + c;
                                expect_value(dst(i), code_value(src.data.view().bytes_ptr()[i], code),
                                             src.scales(scale_index(layout, e, r, c, rows, cols)), out);
                            }
                }
}

TEST(Dequantize, RoutedRowsAndTransposedCopiesWithPads) {
    ReferenceOps ops;
    const GroupsFixture groups({3, 0, 130, 128}, 128, 128);
    const int64_t dim = 256, src_base = 128, base = 256, src_m = groups.capacity() + src_base,
                  m = groups.capacity() + base;
    HostTensor x(DType::bf16, {groups.capacity(), dim});
    fill_normal(x, 45);
    // rows
    HostScaled rows = HostScaled(DType::e4m3, {src_m, dim}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
    rows.set_row_base(src_base);
    ops.quantize_rows({.src = x, .groups = groups, .dst = rows});
    HostTensor back(DType::bf16, {m, dim}), untouched(DType::bf16, {m, dim});
    back.set_row_base(base);
    ops.dequantize({.src = rows, .groups = groups, .dst = back});
    for (int64_t row = 0; row < m; ++row)
        for (int64_t c = 0; c < dim; ++c) {
            const int64_t i = row * dim + c, own = row - base;
            if (own < 0 || own >= groups.total()) {
                ASSERT_EQ(back.as<Bf16>()[i].bits, 0xFFFF);
            } else if (groups.is_pad(own)) {
                ASSERT_EQ(back(i), 0.0);
            } else {
                ASSERT_NEAR(back(i), x(own * dim + c), 0.07 * std::fabs(x(own * dim + c)) + 0.01);
                expect_value(
                    back(i),
                    code_value(rows.data.view().bytes_ptr()[(src_base + own) * dim + c], DType::e4m3),
                    rows.scales((c / 128) * src_m + src_base + own), DType::bf16);
            }
        }
    // transposed copies: one scale a tile, one a group and column
    for (ScaleLayout layout : {ScaleLayout::tile128, ScaleLayout::group_row}) {
        HostScaled columns(DType::e4m3, {dim, src_m}, layout, groups.num_groups());
        columns.set_row_base(src_base);
        if (layout == ScaleLayout::tile128) {
            ops.transpose_fp8({.src = rows, .groups = groups, .dst = columns});
        } else {
            ops.quantize_columns({.src = x, .groups = groups, .dst = columns});
        }
        HostTensor values(DType::f32, {dim, m});
        values.set_row_base(base);
        ops.dequantize({.src = columns, .groups = groups, .dst = values});
        for (int64_t c = 0; c < dim; ++c)
            for (int64_t row = 0; row < m; ++row) {
                const int64_t own = row - base;
                if (own < 0 || own >= groups.total()) {
                    ASSERT_TRUE(std::isnan(values(c * m + row)));
                } else {
                    const double want = groups.is_pad(own) ? 0.0 : x(own * dim + c);
                    ASSERT_NEAR(values(c * m + row), want, 0.07 * std::fabs(want) + 0.02) << name_of(layout);
                }
            }
    }
}

}  // namespace
}  // namespace fp8flow
