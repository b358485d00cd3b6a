// SPDX-License-Identifier: MIT
// Matrix products of the reference backend: against a double-precision product of the same FP8 values and
// scales, and bit by bit against a plain triple loop in the order that kernels/ops/gemm.h states. Weight
// gradients: gemm_wgrad_test.cpp.
#include "kernels/ops/gemm.h"

#include "kernels/reference/reference_ops.h"
#include "tests/support/products.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <functional>
#include <thread>

namespace fp8flow::test {
namespace {

// ---- dense
struct Shape {
    int64_t m, n, k;
};
const std::vector<Shape> kShapes = {{0, 16, 32},    {5, 0, 7},       {4, 6, 0},      {1, 1, 1},
                                    {1, 128, 128},  {127, 129, 130}, {128, 64, 257}, {129, 300, 64},
                                    {33, 270, 600}, {200, 31, 385},  {7, 17, 1025}};

HostScaled plain(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed) {
    HostScaled tensor(dtype, shape, ScaleLayout::none);
    fill_operand(tensor, seed);
    return tensor;
}

void run_dense(const HostScaled& a, const HostScaled& b, op::GemmForm form, DType d_dtype, Gradient mode,
               const Shape& s) {
    ReferenceOps ops;
    HostTensor d(d_dtype, {s.m, s.n});
    std::vector<double> before;
    if (mode == Gradient::accumulate) {
        fill_normal(d, 77, 3.0);
        before = to_doubles(d);
    }
    ops.gemm({.a = a, .b = b, .form = form, .mode = mode, .d = d});
    const bool a_across = form == op::GemmForm::tn, b_across = form != op::GemmForm::nt;
    const Matrix ma =
        read(a, {.rows = s.m, .depth = s.k, .stored = a_across ? Window::across : Window::along});
    const Matrix mb =
        read(b, {.rows = s.n, .depth = s.k, .stored = b_across ? Window::across : Window::along});
    expect_product(to_doubles(d), d_dtype, ma, mb, a.layout != ScaleLayout::none, before);
}

TEST(Gemm, PlainFormsAndShapes) {
    for (const Shape& s : kShapes) {
        for (DType dtype : {DType::bf16, DType::f32}) {
            SCOPED_TRACE(fmt::format("{} {}x{}x{}", name_of(dtype), s.m, s.n, s.k));
            run_dense(plain(dtype, {s.m, s.k}, 1), plain(dtype, {s.n, s.k}, 2), op::GemmForm::nt, dtype,
                      Gradient::overwrite, s);
            run_dense(plain(dtype, {s.m, s.k}, 1), plain(dtype, {s.k, s.n}, 2), op::GemmForm::nn, dtype,
                      Gradient::overwrite, s);
            run_dense(plain(dtype, {s.k, s.m}, 1), plain(dtype, {s.k, s.n}, 2), op::GemmForm::tn, dtype,
                      Gradient::overwrite, s);
            run_dense(plain(dtype, {s.k, s.m}, 1), plain(dtype, {s.k, s.n}, 2), op::GemmForm::tn, DType::f32,
                      Gradient::accumulate, s);
        }
    }
}

// So long a contraction that tiles of A and blocks of B shrink to fit their buffers.
TEST(Gemm, LongContraction) {
    const Shape s{61, 130, 9000};
    run_dense(plain(DType::bf16, {s.m, s.k}, 1), plain(DType::bf16, {s.n, s.k}, 2), op::GemmForm::nt,
              DType::f32, Gradient::overwrite, s);
}

TEST(Gemm, MixedPlainDtypes) {
    const Shape s{30, 40, 50};
    run_dense(plain(DType::bf16, {30, 50}, 1), plain(DType::f32, {40, 50}, 2), op::GemmForm::nt, DType::bf16,
              Gradient::overwrite, s);
}

TEST(Gemm, Fp8Layouts) {
    for (const auto& [la, lb] : kDenseLayouts) {
        for (const Shape& s : kShapes) {
            SCOPED_TRACE(fmt::format("{} {} {}x{}x{}", name_of(la), name_of(lb), s.m, s.n, s.k));
            HostScaled a(DType::e4m3, {s.m, s.k}, la, 1), b(DType::e4m3, {s.n, s.k}, lb, 1);
            fill_operand(a, 3);
            fill_operand(b, 4);
            run_dense(a, b, op::GemmForm::nt, DType::bf16, Gradient::overwrite, s);
            run_dense(a, b, op::GemmForm::nt, DType::f32, Gradient::accumulate, s);
        }
    }
    const Shape s{40, 50, 300};  // hybrid: gradients in E5M2
    HostScaled a(DType::e5m2, {s.m, s.k}, ScaleLayout::vec128),
        b(DType::e4m3, {s.n, s.k}, ScaleLayout::block128);
    fill_operand(a, 5);
    fill_operand(b, 6);
    run_dense(a, b, op::GemmForm::nt, DType::f32, Gradient::overwrite, s);
}

// ---- grouped
void run_grouped(const GroupedCase& c, const std::vector<int64_t>& counts, int64_t a_base, int64_t d_base,
                 int64_t n, int64_t k, int64_t weights = 0) {
    SCOPED_TRACE(fmt::format("{} x {} {} align {} base {} n {} k {} weights {}", name_of(c.a), name_of(c.b),
                             name_of(c.dtype), c.alignment, a_base, n, k, weights));
    ReferenceOps ops;
    const GroupsFixture groups(counts, c.alignment, 3);
    const int64_t G = groups.num_groups(), E = weights > 0 ? weights : G, capacity = groups.capacity();
    HostScaled a(c.dtype, {a_base + capacity + 2, k}, c.a);
    const HostScaled b = grouped_weights(c, E, n, k);
    fill_operand(a, 11);
    fill_operand(b, 12);
    HostTensor d(c.d_dtype, {d_base + capacity + 1, n});
    if (a_base > 0) a.set_row_base(a_base);
    if (d_base > 0) d.set_row_base(d_base);
    ops.grouped_gemm({.a = a, .b = b, .groups = groups, .form = c.form, .d = d});

    for (int64_t g = 0; g < G; ++g) {
        SCOPED_TRACE(fmt::format("group {}", g));
        const Window rows{.first_row = a_base + groups.first(g), .rows = groups.count(g), .depth = k};
        const Window weight{.expert = g % E,
                            .rows = n,
                            .depth = k,
                            .stored = c.form == op::GemmForm::nt ? Window::along : Window::across};
        expect_product(rows_of(d, d_base + groups.first(g), groups.count(g)), c.d_dtype, read(a, rows),
                       read(b, weight), c.a != ScaleLayout::none);
        for (double x : rows_of(d, d_base + groups.first(g) + groups.count(g),
                                groups.end(g) - groups.first(g) - groups.count(g)))
            ASSERT_TRUE(x == 0 && !std::signbit(x)) << "pad rows are zeros";
    }
    const std::vector<uint8_t> bytes = d.bytes();
    const int64_t row_bytes = n * size_of(c.d_dtype);
    for (int64_t row = 0; row < d.view().dim(0); ++row) {
        if (row >= d_base && row < d_base + groups.total()) continue;
        for (int64_t i = row * row_bytes; i < (row + 1) * row_bytes; ++i)
            ASSERT_EQ(bytes[static_cast<std::size_t>(i)], 0xFF) << "row " << row << " is not this op's";
    }
}

TEST(GroupedGemm, LayoutsGroupsAndBases) {
    for (const GroupedCase& c : kGroupedCases) {
        for (const auto& counts : kGroupCounts) {
            run_grouped(c, counts, 0, 0, 48, 160);
            run_grouped(c, counts, 256, 128, 48, 160);
        }
        run_grouped(c, {3, 0, 40}, 5, 7, 130, 259);                // nothing divides anything
        run_grouped(c, {3, 40, 0, 17, 5, 129}, 0, 0, 48, 160, 2);  // three groups a weight
    }
}

// ---- order, threads, faults
struct Flow {  // one fp8 grouped product large enough for several tasks
    GroupsFixture groups{{150, 0, 129, 3}, 128};
    HostScaled a{DType::e4m3, {groups.capacity(), 640}, ScaleLayout::vec128};
    HostScaled b{DType::e4m3, {4, 320, 640}, ScaleLayout::block128};
    Flow() {
        fill_operand(a, 31);
        fill_operand(b, 32);
    }
    HostTensor run(SummationOrder order, DType dtype = DType::f32) const {
        ReferenceOps ops(order);
        HostTensor d(dtype, {groups.capacity(), 320});
        ops.grouped_gemm({.a = a, .b = b, .groups = groups, .d = d});
        return d;
    }
    std::vector<double> wanted() const {
        std::vector<double> all;
        for (int64_t g = 0; g < groups.num_groups(); ++g) {
            const Matrix ma = read(a, {.first_row = groups.first(g), .rows = groups.count(g), .depth = 640});
            const std::vector<double> d =
                product_double(ma, read(b, {.expert = g, .rows = 320, .depth = 640}));
            all.insert(all.end(), d.begin(), d.end());
            all.resize(static_cast<std::size_t>(groups.end(g) * 320), 0.0);
        }
        return all;
    }
};

TEST(GemmOrder, ThreadsDoNotChangeBits) {
    const Flow flow;
    const int threads = omp_get_max_threads();
    for (SummationOrder order : {SummationOrder::sequential, SummationOrder::split}) {
        omp_set_num_threads(1);
        const HostTensor one = flow.run(order);
        omp_set_num_threads(3);
        const HostTensor three = flow.run(order);
        EXPECT_TRUE(same_bytes(one, three));
    }
    omp_set_num_threads(threads);
}

TEST(GemmOrder, CallsFromSeveralThreads) {
    const Flow flow;
    const HostTensor alone = flow.run(SummationOrder::sequential);
    std::vector<HostTensor> results(3);
    std::vector<std::thread> threads;
    for (HostTensor& result : results)
        threads.emplace_back([&flow, &result] { result = flow.run(SummationOrder::sequential); });
    for (std::thread& thread : threads) thread.join();
    for (const HostTensor& result : results) EXPECT_TRUE(same_bytes(result, alone));
}

TEST(GemmOrder, SplitIsAnotherValidOrder) {
    const Flow flow;
    const HostTensor sequential = flow.run(SummationOrder::sequential),
                     split = flow.run(SummationOrder::split);
    EXPECT_FALSE(same_bytes(sequential, split));
    EXPECT_LE(nmse(split, flow.wanted()), kF32Bound);

    for (auto layout : {ScaleLayout::none, ScaleLayout::row}) {
        const DType dtype = layout == ScaleLayout::none ? DType::f32 : DType::e4m3;
        HostScaled a(dtype, {50, 200}, layout), b(dtype, {60, 200}, layout);
        fill_operand(a, 41);
        fill_operand(b, 42);
        HostTensor d[2] = {HostTensor(DType::f32, {50, 60}), HostTensor(DType::f32, {50, 60})};
        for (int i = 0; i < 2; ++i)
            ReferenceOps(i ? SummationOrder::split : SummationOrder::sequential)
                .gemm({.a = a, .b = b, .d = d[i]});
        EXPECT_FALSE(same_bytes(d[0], d[1]));
        EXPECT_LE(nmse(d[1], product_double(read(a, {.rows = 50, .depth = 200}),
                                            read(b, {.rows = 60, .depth = 200}))),
                  kF32Bound);
    }
}

// The bounds catch a wrong scale, a neighbour's scale and a dropped block: each fault in the operands, the
// wanted product without it.
TEST(GemmBounds, CatchPlantedFaults) {
    const auto error_with = [](DType dtype, const std::function<void(Flow&)>& fault) {
        Flow flow;
        const std::vector<double> wanted = flow.wanted();
        fault(flow);
        return nmse(flow.run(SummationOrder::sequential, dtype), wanted);
    };
    EXPECT_LE(error_with(DType::bf16, [](Flow&) {}), kBf16Bound);
    EXPECT_GT(error_with(DType::bf16,
                         [](Flow& f) {  // one K block of one group's weights 6% wrong
                             for (int64_t j = 0; j < 3; ++j) f.b.scales.as<float>()[j * 8 + 2] *= 1.06f;
                         }),
              10 * kBf16Bound);
    EXPECT_GT(error_with(DType::bf16,
                         [](Flow& f) {  // the scale index of A off by one row
                             float* s = f.a.scales.as<float>();
                             std::memmove(s, s + 1,
                                          static_cast<std::size_t>(f.a.scales.numel() - 1) * sizeof(float));
                         }),
              10 * kBf16Bound);
    EXPECT_GT(error_with(DType::bf16,
                         [](Flow& f) {  // the last block of 32 dropped
                             for (int64_t r = 0; r < f.groups.capacity(); ++r)
                                 std::memset(f.a.data.view().bytes_ptr() + r * 640 + 608, 0, 32);
                         }),
              10 * kBf16Bound);
}

TEST(GemmSpecialValues, NanStaysInItsRowAndColumn) {
    HostScaled a = plain(DType::bf16, {9, 40}, 1), b = plain(DType::bf16, {20, 40}, 2);
    set(a.data, 3 * 40 + 7, std::nan(""));
    HostTensor d(DType::bf16, {9, 20});
    ReferenceOps().gemm({.a = a, .b = b, .d = d});
    for (int64_t i = 0; i < d.numel(); ++i) EXPECT_EQ(std::isnan(d(i)), i / 20 == 3) << i;
}

}  // namespace
}  // namespace fp8flow::test
