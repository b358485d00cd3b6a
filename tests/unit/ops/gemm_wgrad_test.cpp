// SPDX-License-Identifier: MIT
// Weight gradients of the reference backend, of one and of two sets of operands: against a double-precision
// product, and bit by bit against the order that kernels/ops/gemm.h states.
#include "kernels/ops/gemm.h"

#include "kernels/reference/reference_ops.h"
#include "tests/support/products.h"

#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

void run_wgrad(DType dy_dtype, DType x_dtype, ScaleLayout layout, int64_t alignment,
               const std::vector<int64_t>& counts, int64_t dy_base, int64_t x_base, Gradient mode) {
    SCOPED_TRACE(fmt::format("{} {} align {} base {} {}", name_of(layout), name_of(dy_dtype), alignment,
                             dy_base, mode == Gradient::accumulate ? "accumulate" : "overwrite"));
    ReferenceOps ops;
    const GroupsFixture groups(counts, alignment, 2);
    const int64_t G = groups.num_groups(), n = 30, k = 140;
    const bool fp8 = is_fp8(x_dtype);
    const int64_t dy_rows = round_up(dy_base + groups.capacity(), 128),
                  x_rows = round_up(x_base + groups.capacity(), 128) + 128;
    HostScaled dy =
        fp8 ? HostScaled(dy_dtype, {n, dy_rows}, layout, G) : HostScaled(dy_dtype, {dy_rows, n}, layout);
    HostScaled x =
        fp8 ? HostScaled(x_dtype, {k, x_rows}, layout, G) : HostScaled(x_dtype, {x_rows, k}, layout);
    fill_operand(dy, 21);  // pads too: what stands there must not count
    fill_operand(x, 22);
    if (dy_base > 0) dy.set_row_base(dy_base);
    if (x_base > 0) x.set_row_base(x_base);
    HostTensor dw(DType::f32, {G, n, k});
    if (mode == Gradient::accumulate) fill_normal(dw, 23, 5.0);
    const std::vector<double> before = to_doubles(dw);
    ops.grouped_gemm_wgrad({.dy = dy, .x = x, .groups = groups, .mode = mode, .dw = dw});
    for (int64_t g = 0; g < G; ++g) {
        SCOPED_TRACE(fmt::format("group {}", g));
        const auto stored = fp8 ? Window::along : Window::across;
        const Window wy{.group = g,
                        .first_k = dy_base + groups.first(g),
                        .rows = n,
                        .depth = groups.count(g),
                        .stored = stored};
        const Window wx{.group = g,
                        .first_k = x_base + groups.first(g),
                        .rows = k,
                        .depth = groups.count(g),
                        .stored = stored};
        std::vector<double> had;
        if (mode == Gradient::accumulate)
            had.assign(before.begin() + g * n * k, before.begin() + (g + 1) * n * k);
        expect_product(rows_of(dw.view().reshape({G * n, k}), g * n, n), DType::f32, read(dy, wy),
                       read(x, wx), fp8, had);
    }
    EXPECT_TRUE(dw.guards_intact());
}

// Two sets of operands, whose groups have other sizes and whose rows begin elsewhere: one sum over both, then
// one addition.
void run_two_wgrads(DType dy_dtype, DType x_dtype, ScaleLayout layout, int64_t alignment, Gradient mode) {
    SCOPED_TRACE(fmt::format("{} {} {}", name_of(layout), name_of(dy_dtype),
                             mode == Gradient::accumulate ? "accumulate" : "overwrite"));
    const std::vector<int64_t> counts[2] = {{300, 0, 129, 0, 3}, {5, 140, 260, 0, 0}};
    const int64_t G = 5, n = 30, k = 140, bases[2] = {0, 384};
    const bool fp8 = is_fp8(x_dtype);
    std::vector<GroupsFixture> groups;
    std::vector<HostScaled> dy, x;
    for (int i = 0; i < 2; ++i) {
        const GroupsFixture& g = groups.emplace_back(counts[i], alignment, 2 + i);
        const int64_t rows = round_up(bases[i] + g.capacity(), 128);
        dy.push_back(fp8 ? HostScaled(dy_dtype, {n, rows}, layout, G)
                         : HostScaled(dy_dtype, {rows, n}, layout));
        x.push_back(fp8 ? HostScaled(x_dtype, {k, rows}, layout, G) : HostScaled(x_dtype, {rows, k}, layout));
        for (HostScaled* operand : {&dy.back(), &x.back()}) {
            fill_operand(*operand, 51 + static_cast<uint64_t>(2 * i) + (operand == &x.back() ? 1 : 0));
            if (bases[i] > 0) operand->set_row_base(bases[i]);
        }
    }
    HostTensor dw(DType::f32, {G, n, k});
    if (mode == Gradient::accumulate) fill_normal(dw, 23, 5.0);
    const std::vector<double> before = to_doubles(dw);
    ReferenceOps().grouped_gemm_wgrad({.dy = dy[0],
                                       .x = x[0],
                                       .groups = groups[0],
                                       .mode = mode,
                                       .dw = dw,
                                       .second = {dy[1], x[1], groups[1]}});
    for (int64_t g = 0; g < G; ++g) {
        SCOPED_TRACE(fmt::format("group {}", g));
        std::vector<double> wanted(static_cast<size_t>(n * k)), exact;
        std::vector<float> sums;
        for (size_t i = 0; i < 2; ++i) {
            Window window{.group = g,
                          .first_k = bases[i] + groups[i].first(g),
                          .rows = n,
                          .depth = groups[i].count(g),
                          .stored = fp8 ? Window::along : Window::across};
            const Matrix a = read(dy[i], window);
            window.rows = k;
            const Matrix b = read(x[i], window);
            sums = product_exact(a, b, fp8, sums);
            const std::vector<double> part = product_double(a, b);
            for (size_t j = 0; j < part.size(); ++j) wanted[j] += part[j];
        }
        for (size_t j = 0; j < sums.size(); ++j) {
            const double had = mode == Gradient::accumulate ? before[static_cast<size_t>(g * n * k) + j] : 0;
            wanted[j] += had;
            exact.push_back(mode == Gradient::accumulate ? static_cast<float>(had) + sums[j] : sums[j]);
        }
        const std::vector<double> actual = rows_of(dw.view().reshape({G * n, k}), g * n, n);
        EXPECT_LE(nmse(actual, wanted), kF32Bound);
        EXPECT_EQ(actual, exact) << "not the stated order";
    }
    EXPECT_TRUE(dw.guards_intact());
}

TEST(GroupedGemmWgrad, TwoMicroBatches) {
    using L = ScaleLayout;
    for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
        run_two_wgrads(DType::bf16, DType::bf16, L::none, 1, mode);
        run_two_wgrads(DType::f32, DType::f32, L::none, 16, mode);
        run_two_wgrads(DType::e4m3, DType::e4m3, L::tile128, 128, mode);
        run_two_wgrads(DType::e5m2, DType::e4m3, L::vec128, 128, mode);
        run_two_wgrads(DType::e4m3, DType::e4m3, L::group_row, 16, mode);
        run_two_wgrads(DType::e4m3, DType::e4m3, L::mx32, 32, mode);
        run_two_wgrads(DType::e4m3, DType::e4m3, L::tensor, 1, mode);
    }
}

// In BF16: the sums in FP32, to nearest, or added to the old value and rounded by the counters of their
// places.
void run_rounded(DType dtype, ScaleLayout layout, int64_t alignment, Gradient mode, bool two) {
    SCOPED_TRACE(fmt::format("{} {} {}{}", name_of(layout), name_of(dtype),
                             mode == Gradient::accumulate ? "accumulate" : "overwrite", two ? ", two" : ""));
    const GroupsFixture groups({300, 0, 129, 0, 3}, alignment, 2), others({5, 0, 260, 1, 0}, alignment, 2);
    const int64_t G = groups.num_groups(), n = 30, k = 141;
    const int64_t rows = round_up(std::max(groups.capacity(), others.capacity()), 128);
    const bool fp8 = is_fp8(dtype);
    const auto operand = [&](int64_t width, uint64_t seed) {
        HostScaled t =
            fp8 ? HostScaled(dtype, {width, rows}, layout, G) : HostScaled(dtype, {rows, width}, layout);
        fill_operand(t, seed);
        return t;
    };
    const HostScaled dy = operand(n, 61), x = operand(k, 62), dy2 = operand(n, 63), x2 = operand(k, 64);
    HostTensor sums(DType::f32, {G, n, k}), dw(DType::bf16, {G, n, k});
    fill_normal(dw, 65, 5.0);
    const std::vector<double> before = to_doubles(dw);
    op::GroupedGemmWgrad args{.dy = dy, .x = x, .groups = groups, .dw = sums};
    if (two) args.second = {dy2, x2, others};
    ReferenceOps().grouped_gemm_wgrad(args);
    args.mode = mode;
    args.dw = dw;
    args.rounding = {.key = 0x123456789ABCDEFull, .first = 7 * n};
    ReferenceOps().grouped_gemm_wgrad(args);
    for (int64_t g = 0; g < G; ++g) {
        const bool empty = groups.count(g) + (two ? others.count(g) : 0) == 0;
        for (int64_t i = g * n * k; i < (g + 1) * n * k; ++i) {
            const float had = static_cast<float>(before[static_cast<size_t>(i)]), sum = sums.as<float>()[i];
            const uint32_t bits = rounding_bits(rounding_row(args.rounding.key, 7 * n + i / k), i % k);
            const bool adds = mode == Gradient::accumulate;
            const float wanted = !adds   ? round_bf16(sum)
                                 : empty ? had
                                         : to_float(round_stochastically(had + sum, bits));
            ASSERT_EQ(static_cast<float>(dw(i)), wanted) << "group " << g << ", element " << i - g * n * k;
        }
    }
    EXPECT_TRUE(dw.guards_intact());
}

TEST(GroupedGemmWgrad, InBf16IsTheFp32SumRoundedOnce) {
    using L = ScaleLayout;
    for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate})
        for (const bool two : {false, true}) {
            run_rounded(DType::bf16, L::none, 1, mode, two);
            run_rounded(DType::e4m3, L::tile128, 128, mode, two);
            run_rounded(DType::e4m3, L::group_row, 16, mode, two);
        }
}

TEST(GroupedGemmWgrad, LayoutsGroupsAndBases) {
    using L = ScaleLayout;
    for (const auto& counts : kGroupCounts) {
        for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            run_wgrad(DType::bf16, DType::bf16, L::none, 1, counts, 0, 0, mode);
            run_wgrad(DType::bf16, DType::bf16, L::none, 16, counts, 5, 33, mode);
            run_wgrad(DType::f32, DType::f32, L::none, 16, counts, 0, 0, mode);
            run_wgrad(DType::e4m3, DType::e4m3, L::tile128, 128, counts, 0, 0, mode);
            run_wgrad(DType::e4m3, DType::e4m3, L::tile128, 128, counts, 256, 128, mode);
            run_wgrad(DType::e5m2, DType::e4m3, L::vec128, 128, counts, 0, 384, mode);
            run_wgrad(DType::e4m3, DType::e4m3, L::group_row, 16, counts, 0, 48, mode);
            run_wgrad(DType::e4m3, DType::e4m3, L::mx32, 32, counts, 96, 32, mode);
            run_wgrad(DType::e4m3, DType::e4m3, L::tensor, 1, counts, 7, 3, mode);
        }
    }
}

}  // namespace
}  // namespace fp8flow::test
