// SPDX-License-Identifier: MIT
// Scale indices and transposes on the GPU against the reference at the widths of real models, bit by bit:
// groups with pads, row bases, scales that differ from block to block. Closed forms of the reference at these
// widths: tests/unit/ops/wide_rows_test.cpp.
#include "kernels/ops/gemm.h"

#include "tests/support/parity.h"
#include "tests/support/plans.h"
#include "tests/support/wide_rows.h"

#include <string>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;

class WideRowsParity : public testing::TestWithParam<int64_t> {
protected:
    void SetUp() override {
        if (too_large_here(WideGroups().rows * width())) GTEST_SKIP() << "small shapes only";
    }
    int64_t width() const { return GetParam(); }
    // Whole blocks, where an operation wants them.
    int64_t blocks_width() const { return round_up(GetParam(), kBlock); }
    static HostScaled based(const WideGroups& g, HostScaled tensor) {
        tensor.set_row_base(g.base);
        return tensor;
    }
    // BF16 rows whose blocks have sizes of their own.
    static HostTensor plain_rows(const WideGroups& g, int64_t width, uint64_t seed) {
        HostTensor rows(DType::bf16, {g.rows, width});
        fill(rows, [&](int64_t i) {
            return std::ldexp(random_normal(seed, 0, static_cast<uint64_t>(i)),
                              exponent_of(i / width, i % width / kBlock));
        });
        rows.set_row_base(g.base);
        return rows;
    }
};

TEST_P(WideRowsParity, QuantizeRows) {
    const WideGroups g;
    const HostTensor src = plain_rows(g, width(), 1);
    for (const L layout : {L::vec128, L::vec128_wire, L::mx32, L::row}) {
        SCOPED_TRACE(name_of(layout));
        Parity p;
        const HostScaled dst = based(g, HostScaled(DType::e4m3, {g.rows, width()}, layout));
        p.check(op::QuantizeRows{.src = src, .groups = g.groups, .dst = dst});
    }
}

TEST_P(WideRowsParity, QuantizeColumns) {
    const WideGroups g;
    const HostTensor src = plain_rows(g, width(), 2), other = plain_rows(g, 256, 3);
    for (const L layout : {L::vec128, L::mx32, L::group_row})
        for (const int sms : {0, 1}) {
            SCOPED_TRACE(name_of(layout));
            Parity p;
            const int64_t n = g.groups.num_groups();
            const HostScaled dst = based(g, HostScaled(DType::e4m3, {width(), g.rows}, layout, n)),
                             dst2 = based(g, HostScaled(DType::e4m3, {256, g.rows}, layout, n));
            p.check(
                op::QuantizeColumns{.src = src, .groups = g.groups, .dst = dst, .src2 = other, .dst2 = dst2},
                Launch{.sm_limit = sms});
        }
}

TEST_P(WideRowsParity, QuantizeDual) {
    const WideGroups g;
    const HostTensor src = plain_rows(g, width(), 4);
    for (const auto& [row_layout, column_layout] :
         {std::pair{L::vec128, L::vec128}, {L::row, L::group_row}, {L::mx32, L::mx32}}) {
        SCOPED_TRACE(name_of(column_layout));
        Parity p;
        const HostScaled rows = based(g, HostScaled(DType::e4m3, {g.rows, width()}, row_layout)),
                         columns = based(g, HostScaled(DType::e4m3, {width(), g.rows}, column_layout,
                                                       g.groups.num_groups()));
        p.check(op::QuantizeDual{.src = src, .groups = g.groups, .rows = rows, .columns = columns});
    }
}

TEST_P(WideRowsParity, Transposes) {
    const WideGroups g;
    for (const DType dtype : {DType::e4m3, DType::e5m2})
        for (const int sms : {0, 1}) {
            Parity p;
            const HostScaled src = scaled_rows(g, width(), dtype),
                             tiles = based(g, HostScaled(dtype, {width(), g.rows}, L::tile128)),
                             again = based(g, HostScaled(dtype, {width(), g.rows}, L::vec128));
            p.check(op::TransposeFp8{.src = src, .groups = g.groups, .dst = tiles}, Launch{.sm_limit = sms});
            p.check(
                op::TransposeRequantize{
                    .src = src, .groups = g.groups, .scale_format = ScaleFormat::pow2, .dst = again},
                Launch{.sm_limit = sms});
        }
}

TEST_P(WideRowsParity, Dequantize) {
    const WideGroups g;
    const HostTensor src = plain_rows(g, width(), 5);
    for (const L layout : {L::vec128, L::vec128_wire, L::mx32}) {
        SCOPED_TRACE(name_of(layout));
        Parity p;
        const HostScaled rows = based(g, HostScaled(DType::e4m3, {g.rows, width()}, layout));
        HostTensor dst(DType::f32, {g.rows, width()});
        dst.set_row_base(g.base);
        p.run(op::QuantizeRows{.src = src, .groups = g.groups, .dst = rows});
        p.check(op::Dequantize{.src = rows, .groups = g.groups, .dst = dst});
    }
    for (const L layout : {L::tile128, L::group_row}) {
        SCOPED_TRACE(name_of(layout));
        Parity p;
        const HostScaled scaled = scaled_rows(g, width());
        const HostScaled columns =
            based(g, HostScaled(DType::e4m3, {width(), g.rows}, layout, g.groups.num_groups()));
        HostTensor dst(DType::f32, {width(), g.rows});
        dst.set_row_base(g.base);
        if (layout == L::tile128)
            p.run(op::TransposeFp8{.src = scaled, .groups = g.groups, .dst = columns});
        else
            p.run(
                op::QuantizeColumns{.src = src, .groups = g.groups, .dst = columns, .src2 = {}, .dst2 = {}});
        p.check(op::Dequantize{.src = columns, .groups = g.groups, .dst = dst});
    }
}

TEST_P(WideRowsParity, WireScalesAndPermute) {
    const int64_t hidden = blocks_width(), blocks = hidden / kBlock, base = 128;
    const Routing routing = Routing::random({40, 23}, 40, 2, 4, 11);
    const PlanFixture plan(routing, 1, 128, -1, base);
    const int64_t sources = routing.ranks * routing.slots;
    Parity p;
    HostScaled src(DType::e4m3, {sources, hidden}, L::vec128_wire),
        dst(DType::e4m3, {base + plan.groups.row_capacity, hidden}, L::vec128);
    dst.set_row_base(base);
    fill(src.data, [&](int64_t i) { return fp8_to_float(code_of(i / hidden, i % hidden), DType::e4m3); });
    fill(src.scales, [&](int64_t i) { return std::ldexp(1.0, exponent_of(i / blocks, i % blocks)); });
    p.check(op::PermutePad{.src = src, .row_source = plan.row_source, .groups = plan.groups, .dst = dst});
    const HostTensor out(DType::f32, {blocks, sources});
    p.check(op::RelayoutScales{.wire = src.scales, .vec128 = out});
}

TEST_P(WideRowsParity, Swiglu) {
    const WideGroups g;
    const int64_t f = blocks_width();
    Parity p;
    const HostTensor h = plain_rows(g, 2 * f, 6), da = plain_rows(g, f, 7);
    HostTensor prob(DType::f32, {g.rows}), dprob(DType::f32, {g.rows});
    fill_uniform(prob, 8, 0.1, 1.0);
    prob.set_row_base(g.base);
    dprob.set_row_base(g.base);
    const HostScaled a = based(g, HostScaled(DType::e4m3, {g.rows, f}, L::vec128)),
                     dh = based(g, HostScaled(DType::e4m3, {g.rows, 2 * f}, L::vec128));
    p.check(op::SwigluQuantize{.h = h, .prob = prob, .groups = g.groups, .a = a});
    p.check(op::SwigluBackwardQuantize{
        .da = da, .h = h, .prob = prob, .groups = g.groups, .dh = dh, .dprob = dprob});
}

TEST_P(WideRowsParity, NormWithFp8Outputs) {
    constexpr int64_t kTokens = 131;
    for (const L layout : {L::vec128_wire, L::vec128}) {
        SCOPED_TRACE(name_of(layout));
        Parity p;
        HostTensor x(DType::bf16, {kTokens, width()}), gamma(DType::f32, {width()}),
            y(DType::bf16, {kTokens, width()}), rstd(DType::f32, {kTokens});
        fill_normal(x, 1);
        fill(gamma, [](int64_t c) { return std::ldexp(1.0, exponent_of(0, c / kBlock)); });
        const HostScaled rows(DType::e4m3, {kTokens, width()}, layout),
            tiles(DType::e4m3, {width(), 256}, L::tile128);
        p.check(op::RmsNormQuantize{
            .x = x, .gamma = gamma, .y = y, .rows = rows, .transposed = tiles, .amax = {}, .rstd = rstd});
    }
}

TEST_P(WideRowsParity, Weights) {
    constexpr int64_t kExperts = 2, kNarrow = 384;
    for (const bool wide_rows : {true, false})
        for (const L layout : {L::block128, L::row, L::mx32}) {
            SCOPED_TRACE(name_of(layout));
            const int64_t n = wide_rows ? kNarrow : blocks_width(), k = wide_rows ? blocks_width() : kNarrow;
            Parity p;
            HostTensor src(DType::f32, {kExperts, n, k});
            fill(src, [&](int64_t i) {
                return std::ldexp(random_normal(9, 0, static_cast<uint64_t>(i)),
                                  exponent_of(i / k / kBlock, i % k / kBlock));
            });
            const HostScaled fprop(DType::e4m3, {kExperts, n, k}, layout),
                dgrad(DType::e4m3, {kExperts, k, n}, layout);
            p.check(op::QuantizeWeight{.src = src, .fprop = fprop, .dgrad = dgrad});
        }
}

// Codes of one and powers of two as scales: sums that fp32 holds exactly, in any order.
TEST_P(WideRowsParity, Products) {
    const WideGroups g;
    const int64_t n = 256, k = blocks_width(), experts = g.groups.num_groups();
    Parity p;
    HostScaled a = based(g, HostScaled(DType::e4m3, {g.rows, k}, L::vec128)),
               b(DType::e4m3, {experts, n, k}, L::block128);
    a.data.fill_bytes(0x38);
    b.data.fill_bytes(0x38);
    fill(a.scales,
         [&](int64_t i) { return std::ldexp(1.0, static_cast<int>((i % g.rows * 3 + i / g.rows * 5) % 7)); });
    fill(b.scales, [&](int64_t i) { return std::ldexp(1.0, static_cast<int>(i % 5)); });
    HostTensor d(DType::f32, {g.rows, n});
    d.set_row_base(g.base);
    p.check(op::GroupedGemm{.a = a, .b = b, .groups = g.groups, .d = d});

    const HostScaled dy = based(g, HostScaled(DType::e4m3, {k, g.rows}, L::tile128)),
                     x = based(g, HostScaled(DType::e4m3, {n, g.rows}, L::tile128));
    for (const HostScaled* t : {&dy, &x}) {
        const int64_t dim = t->data.view().dim(0);
        for (int64_t i = 0; i < t->data.numel(); ++i) t->data.view().bytes_ptr()[i] = 0;
        g.for_rows([&](int64_t row, bool pad) {
            for (int64_t c = 0; c < dim; ++c) t->data.view().bytes_ptr()[c * g.rows + row] = pad ? 0 : 0x38;
        });
        fill(t->scales, [](int64_t i) { return std::ldexp(1.0, static_cast<int>(i * 3 % 7)); });
    }
    HostTensor dw(DType::f32, {experts, k, n});
    p.check(op::GroupedGemmWgrad{.dy = dy, .x = x, .groups = g.groups, .dw = dw});
}

INSTANTIATE_TEST_SUITE_P(Widths, WideRowsParity, testing::ValuesIn(kWideRows),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace
}  // namespace fp8flow::test
