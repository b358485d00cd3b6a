// SPDX-License-Identifier: MIT
// Weight gradients of the reference backend, of one and of two sets of operands: against a double-precision
// product, and bit by bit against the order that kernels/ops/gemm.h states.
#include "kernels/ops/gemm.h"

#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

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
    HostScaled dy = wgrad_operand(dy_dtype, n, dy_rows, layout, G),
               x = wgrad_operand(x_dtype, k, x_rows, layout, G);
    fill_operand(dy, 21);  // pads too: what is there must not count
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
}

// Several sets of operands. Their groups have other sizes, and their rows begin elsewhere. One sum over all,
// then one addition.
void run_sets(size_t sets, DType dy_dtype, DType x_dtype, ScaleLayout layout, int64_t alignment,
              Gradient mode) {
    SCOPED_TRACE(fmt::format("{} sets, {} {} {}", sets, name_of(layout), name_of(dy_dtype),
                             mode == Gradient::accumulate ? "accumulate" : "overwrite"));
    const std::vector<int64_t> counts[3] = {{300, 0, 129, 0, 3}, {5, 140, 260, 0, 0}, {0, 0, 1, 0, 200}};
    const int64_t G = 5, n = 30, k = 140, bases[3] = {0, 384, 128};
    const bool fp8 = is_fp8(x_dtype);
    std::vector<GroupsFixture> groups;
    std::vector<HostScaled> dy, x;
    for (size_t i = 0; i < sets; ++i) {
        const GroupsFixture& g = groups.emplace_back(counts[i], alignment, 2 + static_cast<int64_t>(i));
        const int64_t rows = round_up(bases[i] + g.capacity(), 128);
        dy.push_back(wgrad_operand(dy_dtype, n, rows, layout, G));
        x.push_back(wgrad_operand(x_dtype, k, rows, layout, G));
        for (HostScaled* operand : {&dy.back(), &x.back()}) {
            fill_operand(*operand, 51 + static_cast<uint64_t>(2 * i) + (operand == &x.back() ? 1 : 0));
            if (bases[i] > 0) operand->set_row_base(bases[i]);
        }
    }
    HostTensor dw(DType::f32, {G, n, k});
    if (mode == Gradient::accumulate) fill_normal(dw, 23, 5.0);
    const std::vector<double> before = to_doubles(dw);
    op::GroupedGemmWgrad args{.dy = dy[0],
                              .x = x[0],
                              .groups = groups[0],
                              .mode = mode,
                              .dw = dw,
                              .second = {dy[1], x[1], groups[1]}};
    if (sets > 2) args.more[0] = {dy[2], x[2], groups[2]};
    ReferenceOps().grouped_gemm_wgrad(args);
    for (int64_t g = 0; g < G; ++g) {
        SCOPED_TRACE(fmt::format("group {}", g));
        std::vector<double> wanted(static_cast<size_t>(n * k)), exact;
        std::vector<float> sums;
        for (size_t i = 0; i < sets; ++i) {
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
}

// The patches that kernels/ops/squares.h names, of the gradient as it is after the call: groups without rows
// too, whose old values stay where the call accumulates.
TEST(GroupedGemmWgrad, LeavesTheSquaresOfItsPatches) {
    for (const DType dtype : {DType::f32, DType::bf16})
        for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate})
            for (const bool two : {false, true}) {
                const int64_t G = 3, n = 150, k = 261;
                const GroupsFixture groups({40, 0, 7}, 16), others({0, 0, 30}, 16);
                HostTensor dy(DType::f32, {groups.capacity(), n}), x(DType::f32, {groups.capacity(), k}),
                    other_dy(DType::f32, {others.capacity(), n}), other_x(DType::f32, {others.capacity(), k});
                uint64_t seed = 60;
                for (HostTensor* t : {&dy, &x, &other_dy, &other_x}) fill_normal(*t, ++seed, 1.0);
                HostTensor dw(dtype, {G, n, k}), plain(dtype, {G, n, k}), squares(DType::f64, {G, 2, 3, 4});
                fill_normal(dw, 71, 5.0);
                fill_normal(plain, 71, 5.0);
                fill(squares, [](int64_t) { return std::nan(""); });
                op::GroupedGemmWgrad args{
                    .dy = {.data = dy}, .x = {.data = x}, .groups = groups, .mode = mode, .dw = plain};
                if (two) args.second = {{.data = other_dy}, {.data = other_x}, others};
                ReferenceOps ops;
                ops.grouped_gemm_wgrad(args);
                args.dw = dw;
                args.squares = squares;
                ops.grouped_gemm_wgrad(args);
                EXPECT_TRUE(same_bytes(dw, plain));
                std::vector<double> wanted(static_cast<size_t>(squares.numel()));
                for (int64_t i = 0; i < dw.numel(); ++i) {
                    const int64_t g = i / (n * k), row = i / k % n, column = i % k;
                    const int64_t patch = ((g * 2 + row / 128) * 3 + column / 128) * 4 + row % 64 / 16;
                    wanted[static_cast<size_t>(patch)] += dw(i) * dw(i);
                }
                for (int64_t i = 0; i < squares.numel(); ++i)
                    EXPECT_NEAR(squares(i), wanted[static_cast<size_t>(i)],
                                1e-6 * wanted[static_cast<size_t>(i)])
                        << i;
                const bool empty = mode == Gradient::overwrite;  // the second group, of zeros
                EXPECT_EQ(squares(24) == 0.0, empty);
            }
}

TEST(GroupedGemmWgrad, SquaresShowWhatIsNotFinite) {
    const GroupsFixture groups({5}, 16);
    for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
        HostTensor dy(DType::f32, {groups.capacity(), 20}), x(DType::f32, {groups.capacity(), 30});
        fill_normal(dy, 1, 1.0);
        fill_normal(x, 2, 1.0);
        set(dy, 2 * 20 + 3, bad);
        const HostTensor dw(DType::f32, {1, 20, 30}), squares(DType::f64, {1, 1, 1, 4}),
            sum = HostTensor::of<float>({0.0f}), short_one(DType::f64, {1, 1, 2, 4});
        op::GroupedGemmWgrad args{
            .dy = {.data = dy}, .x = {.data = x}, .groups = groups, .dw = dw, .squares = squares};
        ReferenceOps ops;
        ops.grouped_gemm_wgrad(args);
        ops.add_squares({.squares = squares, .sum = sum});
        EXPECT_FALSE(std::isfinite(sum(0)));
        args.squares = short_one;
        EXPECT_THROW(ops.grouped_gemm_wgrad(args), Error);
    }
}

// Bits of the sums: quarters, strands and lanes in the order of kernels/ops/squares.h, written out.
TEST(GroupedGemmWgrad, SquaresFollowTheStatedOrder) {
    const int64_t n = 128, k = 128;
    const GroupsFixture none({0}, 16);
    const HostTensor dy(DType::f32, {16, n}), x(DType::f32, {16, k}), squares(DType::f64, {1, 1, 1, 4});
    HostTensor dw(DType::f32, {1, n, k});
    for (int64_t i = 0; i < n * k; ++i)
        dw.as<float>()[i] = static_cast<float>((i * 2654435761 % 2001 - 1000) * (i % 97 == 0 ? 1e6 : 1e-3));
    ReferenceOps().grouped_gemm_wgrad({.dy = {.data = dy},
                                       .x = {.data = x},
                                       .groups = none,
                                       .mode = Gradient::accumulate,
                                       .dw = dw,
                                       .squares = squares});
    for (int64_t w = 0; w < 4; ++w) {
        double lanes[32] = {};
        for (int64_t lane = 0; lane < 32; ++lane) {
            float quarters = 0.0f;
            for (int64_t b = 0; b < 2; ++b)
                for (int64_t h = 0; h < 2; ++h) {
                    float s[2][2] = {};
                    for (int64_t j = 0; j < 8; ++j)
                        for (const int64_t below : {0, 8})
                            for (int64_t e = 0; e < 2; ++e) {
                                const int64_t row = 64 * b + 16 * w + lane / 4 + below;
                                const float value =
                                    dw.as<float>()[row * k + 64 * h + 8 * j + 2 * (lane % 4) + e];
                                s[j / 2 % 2][e] = std::fma(value, value, s[j / 2 % 2][e]);
                            }
                    quarters += (s[0][0] + s[0][1]) + (s[1][0] + s[1][1]);
                }
            lanes[lane] = quarters;
        }
        for (int64_t step = 16; step > 0; step /= 2)
            for (int64_t lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
        EXPECT_EQ(squares(w), lanes[0]) << w;
    }
}

TEST(GroupedGemmWgrad, SeveralMicroBatches) {
    using L = ScaleLayout;
    for (const size_t sets : {2, 3})
        for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            run_sets(sets, DType::bf16, DType::bf16, L::none, 1, mode);
            run_sets(sets, DType::f32, DType::f32, L::none, 16, mode);
            run_sets(sets, DType::e4m3, DType::e4m3, L::tile128, 128, mode);
            run_sets(sets, DType::e5m2, DType::e4m3, L::vec128, 128, mode);
            run_sets(sets, DType::e4m3, DType::e4m3, L::group_row, 16, mode);
            run_sets(sets, DType::e4m3, DType::e4m3, L::mx32, 32, mode);
            run_sets(sets, DType::e4m3, DType::e4m3, L::tensor, 1, mode);
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
    const auto filled = [&](int64_t width, uint64_t seed) {
        HostScaled t = wgrad_operand(dtype, width, rows, layout, G);
        fill_operand(t, seed);
        return t;
    };
    const HostScaled dy = filled(n, 61), x = filled(k, 62), dy2 = filled(n, 63), x2 = filled(k, 64);
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
