// SPDX-License-Identifier: MIT
// Scale indices and transposes at the widths of real models (640 to 7168: 5 to 56 blocks): every byte against
// closed forms. Each block of 128 has a power of two of its own, so a scale that is in, or is taken from,
// another block's place shows. The same widths on GPUs: tests/gpu/wide_rows_parity_test.cu.
#include "kernels/ops/gemm.h"

#include "kernels/reference/reference_ops.h"
#include "tests/support/fp8_reference.h"
#include "tests/support/plans.h"
#include "tests/support/tensors.h"
#include "tests/support/wide_rows.h"

#include <gtest/gtest.h>

#include <string>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;

class WideRows : public testing::TestWithParam<int64_t> {
protected:
    int64_t width() const { return GetParam(); }
    ReferenceOps ops;
};

// ---- rows: code * 2^exponent, so that the quantiser must find exactly these FP8 values and scales

TEST_P(WideRows, QuantizeRows) {
    const WideGroups g;
    for (const L layout : {L::vec128, L::vec128_wire, L::mx32}) {
        const int64_t block = layout == L::mx32 ? 32 : 128, blocks = ceil_div(width(), block);
        HostTensor src(DType::bf16, {g.rows, width()});
        src.set_row_base(g.base);
        HostScaled dst(DType::e4m3, {g.rows, width()}, layout), want(DType::e4m3, {g.rows, width()}, layout);
        dst.set_row_base(g.base);
        g.for_rows([&](int64_t row, bool pad) {
            for (int64_t c = 0; c < width(); ++c) {
                const int exponent = exponent_of(row, c / block);
                const uint8_t code = c % block == row % block ? kLargest : code_of(row, c);
                set(src, row * width() + c, std::ldexp(code_value(code, DType::e4m3), exponent));
                want.data.view().bytes_ptr()[row * width() + c] = pad ? 0 : code;
            }
            for (int64_t b = 0; b < blocks; ++b) {
                const double scale = pad ? 0.0 : std::ldexp(1.0, exponent_of(row, b));
                const int64_t at = layout == L::vec128_wire ? row * blocks + b : b * g.rows + row;
                if (want.scales.view().dtype == DType::e8m0)
                    want.scales.view().bytes_ptr()[at] =
                        pad ? 0 : static_cast<uint8_t>(exponent_of(row, b) + 127);
                else
                    set(want.scales, at, scale);
            }
        });
        ops.quantize_rows({.src = src, .groups = g.groups, .dst = dst});
        EXPECT_TRUE(same_bytes(dst, want)) << name_of(layout);
    }
}

// A scale for 128 rows (32 in mx32, all rows of the group in group_row) and one column.
TEST_P(WideRows, QuantizeColumns) {
    const WideGroups g;
    for (const L layout : {L::vec128, L::mx32, L::group_row}) {
        HostTensor src(DType::bf16, {g.rows, width()});
        src.set_row_base(g.base);
        const int64_t num_groups = g.groups.num_groups();
        HostScaled dst(DType::e4m3, {width(), g.rows}, layout, num_groups),
            want(DType::e4m3, {width(), g.rows}, layout, num_groups);
        dst.set_row_base(g.base);
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t first = g.base + g.groups.first(group), count = g.groups.count(group),
                          end = g.base + g.groups.end(group);
            const int64_t length = layout == L::mx32 ? 32 : layout == L::vec128 ? 128 : end - first;
            const auto put_scale = [&](int64_t scale_row, int64_t c, bool empty) {
                const int exponent = exponent_of(scale_row, c);
                const int64_t at = scale_row * width() + c;
                if (layout == L::mx32)
                    want.scales.view().bytes_ptr()[at] = empty ? 0 : static_cast<uint8_t>(exponent + 127);
                else
                    set(want.scales, at, empty ? 0.0 : std::ldexp(1.0, exponent));
            };
            if (layout == L::group_row && count == 0)
                for (int64_t c = 0; c < width(); ++c) put_scale(group, c, true);
            for (int64_t block = first; block < end; block += length) {
                const int64_t scale_row = layout == L::group_row ? group : block / length;
                for (int64_t c = 0; c < width(); ++c) {
                    for (int64_t row = block; row < block + length; ++row) {
                        const bool pad = row >= first + count;
                        const uint8_t code = row == block ? kLargest : code_of(row, c);
                        set(src, row * width() + c,
                            std::ldexp(code_value(code, DType::e4m3), exponent_of(scale_row, c)));
                        want.data.view().bytes_ptr()[c * g.rows + row] = pad ? 0 : code;
                    }
                    put_scale(scale_row, c, block >= first + count);
                }
            }
        }
        ops.quantize_columns({.src = src, .groups = g.groups, .dst = dst});
        EXPECT_TRUE(same_bytes(dst, want)) << name_of(layout);
    }
}

// Both at once are each of them alone.
TEST_P(WideRows, QuantizeDual) {
    const WideGroups g;
    HostTensor src(DType::bf16, {g.rows, width()});
    src.set_row_base(g.base);
    fill_normal(src, 3);
    for (const auto& [row_layout, column_layout] :
         {std::pair{L::vec128, L::vec128}, {L::row, L::group_row}, {L::mx32, L::mx32}}) {
        const int64_t n = g.groups.num_groups();
        HostScaled rows(DType::e4m3, {g.rows, width()}, row_layout),
            want_rows(DType::e4m3, {g.rows, width()}, row_layout);
        HostScaled columns(DType::e4m3, {width(), g.rows}, column_layout, n),
            want_columns(DType::e4m3, {width(), g.rows}, column_layout, n);
        for (HostScaled* t : {&rows, &want_rows, &columns, &want_columns}) t->set_row_base(g.base);
        ops.quantize_dual({.src = src, .groups = g.groups, .rows = rows, .columns = columns});
        ops.quantize_rows({.src = src, .groups = g.groups, .dst = want_rows});
        ops.quantize_columns({.src = src, .groups = g.groups, .dst = want_columns});
        for (const auto& [got, want] : {std::pair{&rows, &want_rows}, {&columns, &want_columns}}) {
            EXPECT_TRUE(same_bytes(got->data, want->data)) << name_of(row_layout);
            EXPECT_TRUE(same_bytes(got->scales, want->scales)) << name_of(row_layout);
        }
    }
}

// ---- transposes: FP8 values of exponent field 15 lose k <= 12 of it, exactly

TEST_P(WideRows, ScalingAwareTranspose) {
    const WideGroups g;
    const HostScaled src = scaled_rows(g, width());
    HostScaled dst(DType::e4m3, {width(), g.rows}, L::tile128),
        want(DType::e4m3, {width(), g.rows}, L::tile128);
    dst.set_row_base(g.base);
    for (int64_t group = 0; group < g.groups.num_groups(); ++group)
        for (int64_t tile = g.base + g.groups.first(group); tile < g.base + g.groups.end(group);
             tile += 128) {
            const int64_t valid =
                std::min<int64_t>(128, g.base + g.groups.first(group) + g.groups.count(group) - tile);
            for (int64_t b = 0; b < ceil_div(width(), 128); ++b) {
                int target = -100;
                for (int64_t row = tile; row < tile + valid; ++row)
                    target = std::max(target, exponent_of(row, b));
                set(want.scales, tile / 128 * ceil_div(width(), 128) + b, std::ldexp(1.0, target));
                for (int64_t row = tile; row < tile + 128; ++row)
                    for (int64_t c = b * 128; c < std::min(width(), (b + 1) * 128); ++c)
                        want.data.view().bytes_ptr()[c * g.rows + row] =
                            row < tile + valid
                                ? static_cast<uint8_t>(code_of(row, c) - 8 * (target - exponent_of(row, b)))
                                : 0;
            }
        }
    ops.transpose_fp8({.src = src, .groups = g.groups, .dst = dst});
    EXPECT_TRUE(same_bytes(dst, want));
}

// All FP8 values are +-448, so that a column's largest value is 448 times its largest scale.
TEST_P(WideRows, TransposeByRequantising) {
    const WideGroups g;
    HostScaled src = scaled_rows(g, width());
    for (int64_t i = 0; i < src.data.numel(); ++i) {
        uint8_t& code = src.data.view().bytes_ptr()[i];
        code = static_cast<uint8_t>((code & 0x80) | kLargest);
    }
    HostScaled dst(DType::e4m3, {width(), g.rows}, L::vec128),
        want(DType::e4m3, {width(), g.rows}, L::vec128);
    dst.set_row_base(g.base);
    for (int64_t group = 0; group < g.groups.num_groups(); ++group)
        for (int64_t tile = g.base + g.groups.first(group); tile < g.base + g.groups.end(group);
             tile += 128) {
            const int64_t valid =
                std::min<int64_t>(128, g.base + g.groups.first(group) + g.groups.count(group) - tile);
            for (int64_t c = 0; c < width(); ++c) {
                int largest = -100;
                for (int64_t row = tile; row < tile + valid; ++row)
                    largest = std::max(largest, exponent_of(row, c / 128));
                set(want.scales, tile / 128 * width() + c, std::ldexp(1.0, largest));
                for (int64_t row = tile; row < tile + 128; ++row)
                    want.data.view().bytes_ptr()[c * g.rows + row] =
                        row < tile + valid
                            ? static_cast<uint8_t>(src.data.view().bytes_ptr()[row * width() + c] -
                                                   8 * (largest - exponent_of(row, c / 128)))
                            : 0;
            }
        }
    ops.transpose_requantize({.src = src, .groups = g.groups, .scale_format = ScaleFormat::pow2, .dst = dst});
    EXPECT_TRUE(same_bytes(dst, want));
}

// ---- readers of scales

TEST_P(WideRows, DequantizeByEveryLayout) {
    const WideGroups g;
    for (const L layout : {L::vec128, L::vec128_wire, L::mx32, L::tile128, L::group_row}) {
        const bool transposed = layout == L::tile128 || layout == L::group_row;
        const int64_t n = g.groups.num_groups();
        HostScaled src = transposed ? HostScaled(DType::e4m3, {width(), g.rows}, layout, n)
                                    : HostScaled(DType::e4m3, {g.rows, width()}, layout);
        HostTensor dst = transposed ? HostTensor(DType::f32, {width(), g.rows})
                                    : HostTensor(DType::f32, {g.rows, width()});
        src.set_row_base(g.base);
        dst.set_row_base(g.base);
        // scale number s is 2^exponent_of(0, s): what the index must find
        const auto exponent_at = [](int64_t s) { return exponent_of(s / 61, s); };
        for (int64_t s = 0; s < src.scales.numel(); ++s) {
            if (src.scales.view().dtype == DType::e8m0)
                src.scales.view().bytes_ptr()[s] = static_cast<uint8_t>(exponent_at(s) + 127);
            else
                set(src.scales, s, std::ldexp(1.0, exponent_at(s)));
        }
        for (int64_t i = 0; i < src.data.numel(); ++i)
            src.data.view().bytes_ptr()[i] = code_of(i / width(), i % width());
        ops.dequantize({.src = src, .groups = g.groups, .dst = dst});
        int64_t wrong = 0;
        for (int64_t group = 0; group < n; ++group)
            for (int64_t row = g.base + g.groups.first(group); row < g.base + g.groups.end(group); ++row)
                for (int64_t c = 0; c < width(); ++c) {
                    const int64_t blocks = ceil_div(width(), 128);
                    int64_t s = c / 128 * g.rows + row;  // vec128
                    if (layout == L::vec128_wire) s = row * blocks + c / 128;
                    if (layout == L::mx32) s = c / 32 * g.rows + row;
                    if (layout == L::tile128) s = row / 128 * blocks + c / 128;
                    if (layout == L::group_row) s = group * width() + c;
                    const int64_t i = transposed ? c * g.rows + row : row * width() + c;
                    const double code = code_value(src.data.view().bytes_ptr()[i], DType::e4m3);
                    wrong += dst(i) != std::ldexp(code, exponent_at(s));
                }
        EXPECT_EQ(wrong, 0) << name_of(layout);
    }
}

TEST_P(WideRows, WireScalesToTheGemmsLayout) {
    constexpr int64_t kTokens = 37;
    const int64_t blocks = ceil_div(width(), 128);
    HostTensor wire(DType::e8m0, {kTokens, blocks}), out(DType::f32, {blocks, kTokens});
    for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t b = 0; b < blocks; ++b)
            wire.view().bytes_ptr()[t * blocks + b] = static_cast<uint8_t>(127 + exponent_of(t, b));
    ops.relayout_scales({.wire = wire, .vec128 = out});
    for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t b = 0; b < blocks; ++b)
            ASSERT_EQ(out(b * kTokens + t), std::ldexp(1.0, exponent_of(t, b))) << t << ", " << b;
}

// Row r of an expert is the row of its token, with its scales: [T, C/128] on the wire, [C/128, M] for the
// product.
TEST_P(WideRows, PermuteAndPad) {
    const int64_t blocks = ceil_div(width(), 128), hidden = blocks * 128, base = 128;
    const Routing routing = Routing::random({40, 23}, 40, 2, 4, 11);
    const PlanFixture plan(routing, 1, 128, -1, base);
    const int64_t rows = base + plan.groups.row_capacity, sources = routing.ranks * routing.slots;
    HostScaled src(DType::e4m3, {sources, hidden}, L::vec128_wire),
        dst(DType::e4m3, {rows, hidden}, L::vec128);
    dst.set_row_base(base);
    for (int64_t i = 0; i < src.data.numel(); ++i)
        src.data.view().bytes_ptr()[i] = code_of(i / hidden, i % hidden);
    for (int64_t i = 0; i < src.scales.numel(); ++i)
        src.scales.view().bytes_ptr()[i] = static_cast<uint8_t>(127 + exponent_of(i / blocks, i % blocks));
    ops.permute_pad({.src = src, .row_source = plan.row_source, .groups = plan.groups, .dst = dst});
    int64_t wrong = 0, valid = 0;
    for (int64_t row = 0; row < plan.total(); ++row) {
        const int64_t source = plan.source_of(row);
        valid += source >= 0;
        for (int64_t c = 0; c < hidden; ++c)
            wrong += dst.data.view().bytes_ptr()[(base + row) * hidden + c] !=
                     (source < 0 ? 0 : code_of(source, c));
        for (int64_t b = 0; b < blocks; ++b)
            wrong += dst.scales(b * rows + base + row) !=
                     (source < 0 ? 0.0 : std::ldexp(1.0, exponent_of(source, b)));
    }
    EXPECT_GT(valid, 30);
    EXPECT_EQ(wrong, 0);
}

// The unfused ablation: groups without pads, then padded; scales [C/128, M] on both sides.
TEST_P(WideRows, PadApart) {
    const WideGroups g;
    const int64_t hidden = ceil_div(width(), 128) * 128, blocks = hidden / 128;
    const GroupsFixture packed({0, 130, 1, 0, 128}, 1);
    const int64_t rows = packed.capacity();
    HostScaled src(DType::e4m3, {rows, hidden}, L::vec128), dst(DType::e4m3, {g.rows, hidden}, L::vec128);
    dst.set_row_base(g.base);
    for (int64_t i = 0; i < src.data.numel(); ++i)
        src.data.view().bytes_ptr()[i] = code_of(i / hidden, i % hidden);
    for (int64_t i = 0; i < src.scales.numel(); ++i)
        set(src.scales, i, std::ldexp(1.0, exponent_of(i % rows, i / rows)));
    ops.pad_rows({.src = src, .src_groups = packed, .dst_groups = g.groups, .dst = dst});
    int64_t wrong = 0;
    g.for_rows([&](int64_t row, bool pad) {
        const int64_t group = g.groups.group_of(row - g.base);
        const int64_t source = packed.first(group) + row - g.base - g.groups.first(group);
        for (int64_t c = 0; c < hidden; ++c)
            wrong += dst.data.view().bytes_ptr()[row * hidden + c] != (pad ? 0 : code_of(source, c));
        for (int64_t b = 0; b < blocks; ++b)
            wrong += dst.scales(b * g.rows + row) != (pad ? 0.0 : std::ldexp(1.0, exponent_of(source, b)));
    });
    EXPECT_EQ(wrong, 0);
}

// ---- fused writers are the composed operations

TEST_P(WideRows, FusedQuantisersAreTheComposedOnes) {
    const WideGroups g;
    const int64_t f = ceil_div(width(), 128) * 128;
    HostTensor h(DType::f32, {g.rows, 2 * f}), da(DType::f32, {g.rows, f}), a(DType::f32, {g.rows, f}),
        dh(DType::f32, {g.rows, 2 * f}), prob(DType::f32, {g.rows}), dprob(DType::f32, {g.rows});
    fill_normal(h, 1);
    fill_normal(da, 2);
    fill_uniform(prob, 3, 0.1, 1.0);
    for (HostTensor* t : {&h, &da, &a, &dh, &prob, &dprob}) t->set_row_base(g.base);
    HostScaled act(DType::e4m3, {g.rows, f}, L::vec128), want_act(DType::e4m3, {g.rows, f}, L::vec128),
        dcodes(DType::e4m3, {g.rows, 2 * f}, L::vec128), want_dcodes(DType::e4m3, {g.rows, 2 * f}, L::vec128);
    for (HostScaled* t : {&act, &want_act, &dcodes, &want_dcodes}) t->set_row_base(g.base);
    ops.swiglu_quantize({.h = h, .prob = prob, .groups = g.groups, .a = act});
    ops.swiglu({.h = h, .prob = prob, .groups = g.groups, .a = a});
    ops.quantize_rows({.src = a, .groups = g.groups, .dst = want_act});
    EXPECT_TRUE(same_bytes(act, want_act));
    ops.swiglu_backward_quantize(
        {.da = da, .h = h, .prob = prob, .groups = g.groups, .dh = dcodes, .dprob = dprob});
    ops.swiglu_backward({.da = da, .h = h, .prob = prob, .groups = g.groups, .dh = dh, .dprob = dprob});
    ops.quantize_rows({.src = dh, .groups = g.groups, .dst = want_dcodes});
    EXPECT_TRUE(same_bytes(dcodes, want_dcodes));
}

TEST_P(WideRows, NormWithFp8Rows) {
    constexpr int64_t kTokens = 131;
    HostTensor x(DType::bf16, {kTokens, width()}), gamma(DType::f32, {width()}),
        y(DType::bf16, {kTokens, width()}), rstd(DType::f32, {kTokens});
    fill_normal(x, 1);
    // columns of sizes of their own, so that blocks have scales of their own
    fill(gamma, [](int64_t c) {
        return std::ldexp(1.0 + 0.001 * static_cast<double>(c % 97), exponent_of(0, c / 128));
    });
    for (const L layout : {L::vec128_wire, L::vec128}) {
        HostScaled rows(DType::e4m3, {kTokens, width()}, layout),
            want(DType::e4m3, {kTokens, width()}, layout);
        ops.rms_norm_quantize({.x = x, .gamma = gamma, .y = y, .rows = rows, .rstd = rstd});
        ops.quantize_rows({.src = y, .dst = want});
        EXPECT_TRUE(same_bytes(rows, want)) << name_of(layout);
    }
}

// ---- weights and products

// 128x128 blocks with a power of two each, wide along either dimension.
TEST_P(WideRows, WeightsInBlocks) {
    constexpr int64_t kExperts = 2, kNarrow = 160;
    for (const bool wide_rows : {true, false}) {
        const int64_t n = wide_rows ? kNarrow : width(), k = wide_rows ? width() : kNarrow;
        const int64_t n_blocks = ceil_div(n, 128), k_blocks = ceil_div(k, 128);
        const auto exponent = [&](int64_t e, int64_t nb, int64_t kb) { return exponent_of(3 * e + nb, kb); };
        HostTensor src(DType::bf16, {kExperts, n, k});
        HostScaled fprop(DType::e4m3, {kExperts, n, k}, L::block128),
            dgrad(DType::e4m3, {kExperts, k, n}, L::block128);
        const auto code = [&](int64_t row, int64_t col) {
            return row % 128 == 0 && col % 128 == 0 ? kLargest : code_of(row, col);
        };
        for (int64_t e = 0; e < kExperts; ++e)
            for (int64_t row = 0; row < n; ++row)
                for (int64_t col = 0; col < k; ++col)
                    set(src, (e * n + row) * k + col,
                        std::ldexp(code_value(code(row, col), DType::e4m3),
                                   exponent(e, row / 128, col / 128)));
        ops.quantize_weight({.src = src, .fprop = fprop, .dgrad = dgrad});
        int64_t wrong = 0;
        for (int64_t e = 0; e < kExperts; ++e) {
            for (int64_t row = 0; row < n; ++row)
                for (int64_t col = 0; col < k; ++col) {
                    wrong += fprop.data.view().bytes_ptr()[(e * n + row) * k + col] != code(row, col);
                    wrong += dgrad.data.view().bytes_ptr()[(e * k + col) * n + row] != code(row, col);
                }
            const int64_t fprop_stride = round_up(k_blocks, 4), dgrad_stride = round_up(n_blocks, 4);
            for (int64_t nb = 0; nb < n_blocks; ++nb)
                for (int64_t kb = 0; kb < k_blocks; ++kb) {
                    const double want = std::ldexp(1.0, exponent(e, nb, kb));
                    wrong += fprop.scales((e * n_blocks + nb) * fprop_stride + kb) != want;
                    wrong += dgrad.scales((e * k_blocks + kb) * dgrad_stride + nb) != want;
                }
        }
        EXPECT_EQ(wrong, 0) << n << " x " << k;
    }
}

// Products of ones and scales alone: sums of powers of two that fp32 holds exactly.
TEST_P(WideRows, ProductsTakeTheScalesOfTheirBlocks) {
    const GroupsFixture groups({3, 0, 2}, 128);
    const int64_t m = groups.capacity(), n = 136, k = ceil_div(width(), 128) * 128,
                  experts = groups.num_groups();
    const auto a_exponent = [](int64_t row, int64_t b) { return static_cast<int>((row * 3 + b * 5) % 7); };
    const auto b_exponent = [](int64_t e, int64_t nb, int64_t kb) {
        return static_cast<int>((e * 2 + nb + kb * 3) % 5);
    };
    HostScaled a(DType::e4m3, {m, k}, L::vec128), b(DType::e4m3, {experts, n, k}, L::block128);
    a.data.fill_bytes(0x38);  // 1.0
    b.data.fill_bytes(0x38);
    for (int64_t row = 0; row < m; ++row)
        for (int64_t block = 0; block < k / 128; ++block)
            set(a.scales, block * m + row, std::ldexp(1.0, a_exponent(row, block)));
    const int64_t stride = round_up(k / 128, 4), n_blocks = ceil_div(n, 128);
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t nb = 0; nb < n_blocks; ++nb)
            for (int64_t kb = 0; kb < stride; ++kb)
                set(b.scales, (e * n_blocks + nb) * stride + kb,
                    kb < k / 128 ? std::ldexp(1.0, b_exponent(e, nb, kb)) : 0.0);
    HostTensor d(DType::f32, {m, n});
    ops.grouped_gemm({.a = a, .b = b, .groups = groups, .d = d});
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t row = groups.first(e); row < groups.first(e) + groups.count(e); ++row)
            for (int64_t col = 0; col < n; ++col) {
                double want = 0;
                for (int64_t kb = 0; kb < k / 128; ++kb)
                    want += 128 * std::ldexp(1.0, a_exponent(row, kb) + b_exponent(e, col / 128, kb));
                ASSERT_EQ(d(row * n + col), want) << row << ", " << col;
            }
}

// dW [N, K] from transposed copies: one scale a tile of rows and 128 columns, wide on either side.
TEST_P(WideRows, WeightGradientsTakeTheScalesOfTheirTiles) {
    const GroupsFixture groups({200, 0, 30}, 128);
    const int64_t m = groups.capacity(), narrow = 8, experts = groups.num_groups();
    for (const bool wide_n : {true, false}) {
        const int64_t n = wide_n ? width() : narrow, k = wide_n ? narrow : width();
        HostScaled dy(DType::e4m3, {n, m}, L::tile128), x(DType::e4m3, {k, m}, L::tile128);
        const auto exponent = [](int64_t tile, int64_t b, int64_t factor) {
            return static_cast<int>((tile * factor + b * 5) % 7);
        };
        for (HostScaled* t : {&dy, &x}) {
            const int64_t dim = t->data.view().dim(0), blocks = ceil_div(dim, 128);
            for (int64_t e = 0; e < experts; ++e)
                for (int64_t row = groups.first(e); row < groups.end(e); ++row)
                    for (int64_t c = 0; c < dim; ++c)
                        t->data.view().bytes_ptr()[c * m + row] =
                            row < groups.first(e) + groups.count(e) ? 0x38 : 0;
            for (int64_t tile = 0; tile < m / 128; ++tile)
                for (int64_t b = 0; b < blocks; ++b)
                    set(t->scales, tile * blocks + b, std::ldexp(1.0, exponent(tile, b, t == &dy ? 3 : 2)));
        }
        HostTensor dw(DType::f32, {experts, n, k});
        ops.grouped_gemm_wgrad({.dy = dy, .x = x, .groups = groups, .dw = dw});
        int64_t wrong = 0;
        for (int64_t e = 0; e < experts; ++e)
            for (int64_t i = 0; i < n; ++i)
                for (int64_t j = 0; j < k; ++j) {
                    double want = 0;
                    for (int64_t row = groups.first(e); row < groups.first(e) + groups.count(e); ++row)
                        want += std::ldexp(1.0,
                                           exponent(row / 128, i / 128, 3) + exponent(row / 128, j / 128, 2));
                    wrong += dw((e * n + i) * k + j) != want;
                }
        EXPECT_EQ(wrong, 0) << n << " x " << k;
    }
}

INSTANTIATE_TEST_SUITE_P(Widths, WideRows, testing::ValuesIn(kWideRows),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace
}  // namespace fp8flow::test
