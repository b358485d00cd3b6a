// Matrix products of the reference backend: against a double-precision product of the same codes and scales, and bit by bit against
// a plain triple loop in the order that kernels/ops/gemm.h states.
#include "kernels/ops/gemm.h"

#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <functional>
#include <thread>

namespace fp8flow::test {
namespace {

constexpr double kBf16Bound = 4e-6, kF32Bound = 1e-7;
// The error of BF16 outputs is their rounding, 2.7e-6 on average; of few elements it may reach the worst case, (2^-8)^2.
double bound_of(DType dtype, std::size_t elements) {
    if (dtype == DType::f32) return kF32Bound;
    return elements < 8192 ? 0x1.0p-16 : kBf16Bound;
}

// One operand of one product, looked up entry by entry from the layouts' descriptions: code and scale of (output i, contraction k).
struct Matrix {
    int64_t rows = 0, depth = 0, block = 0;  // block: contraction elements per scale, 0 where constant
    std::vector<float> codes, scales;        // [rows, depth]
    const float* code_row(int64_t i) const { return codes.data() + i * depth; }
    const float* scale_row(int64_t i) const { return scales.data() + i * depth; }
};

// Where the product's entries stand in the stored tensor.
struct Window {
    int64_t expert = 0;     // leading index of rank-3 codes
    int64_t group = 0;      // for group_row
    int64_t first_row = 0;  // output index 0
    int64_t first_k = 0;    // contraction index 0
    int64_t rows = 0, depth = 0;
    enum { along, across } stored = along;  // along: contraction contiguous
};

int64_t block_of(ScaleLayout layout) {
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
double scale_at(const Fp8Tensor& t, int64_t e, int64_t group, int64_t r, int64_t c) {
    const int64_t R = t.codes.dim(-2), C = t.codes.dim(-1);
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

Matrix read(const Fp8Tensor& t, const Window& w) {
    Matrix matrix{w.rows, w.depth, block_of(t.layout), {}, {}};
    const int64_t R = t.codes.dim(-2), C = t.codes.dim(-1);
    for (int64_t i = 0; i < w.rows; ++i) {
        for (int64_t k = 0; k < w.depth; ++k) {
            const int64_t r = w.stored == Window::along ? w.first_row + i : w.first_k + k;
            const int64_t c = w.stored == Window::along ? w.first_k + k : w.first_row + i;
            matrix.codes.push_back(static_cast<float>(get(t.codes, (w.expert * R + r) * C + c)));
            matrix.scales.push_back(static_cast<float>(scale_at(t, w.expert, w.group, r, c)));
        }
    }
    return matrix;
}

std::vector<double> product_double(const Matrix& a, const Matrix& b) {
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

// The stated order in fp32: partial sums by fma over each scale block, promoted with the product of the scales. `sums`: what the
// accumulators start from, for a contraction that goes on over further operands.
std::vector<float> product_exact(const Matrix& a, const Matrix& b, bool scaled,
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
std::vector<double> rows_of(const TensorView& view, int64_t first, int64_t rows) {
    const int64_t n = view.dim(-1);
    std::vector<double> values;
    for (int64_t i = first * n; i < (first + rows) * n; ++i) values.push_back(get(view, i));
    return values;
}

// Both comparisons of one product. `before`: what D held, for accumulate.
void expect_product(const std::vector<double>& actual, DType dtype, const Matrix& a, const Matrix& b,
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

// Codes and scales that make every entry matter; free (not power-of-two) fp32 scales, so that a wrong order of rounding shows.
void fill_operand(const HostFp8& t, uint64_t seed) {
    fill_normal(t.codes, seed,
                is_fp8(t.codes.view().dtype) ? 8.0 : 1.0);  // wide enough that sums of codes are not exact
    if (t.scales.view().dtype == DType::e8m0)
        fill_pow2(t.scales, seed + 1, -3, 3);
    else if (t.scales.view())
        fill_uniform(t.scales, seed + 1, 0.25, 2.0);
}

// ---- dense ----------------------------------------------------------------------------------------------------------------------
struct Shape {
    int64_t m, n, k;
};
const std::vector<Shape> kShapes = {{0, 16, 32},    {5, 0, 7},       {4, 6, 0},      {1, 1, 1},
                                    {1, 128, 128},  {127, 129, 130}, {128, 64, 257}, {129, 300, 64},
                                    {33, 270, 600}, {200, 31, 385},  {7, 17, 1025}};

HostFp8 plain(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed) {
    HostFp8 tensor(dtype, shape, ScaleLayout::none);
    fill_operand(tensor, seed);
    return tensor;
}

void run_dense(const HostFp8& a, const HostFp8& b, op::GemmForm form, DType d_dtype, Gradient mode,
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
    EXPECT_TRUE(d.guards_intact());
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
    using L = ScaleLayout;
    const std::vector<std::pair<L, L>> layouts = {{L::vec128, L::block128},
                                                  {L::vec128_wire, L::block128},
                                                  {L::vec128, L::vec128},
                                                  {L::tile128, L::tile128},
                                                  {L::row, L::row},
                                                  {L::tensor, L::tensor},
                                                  {L::mx32, L::mx32},
                                                  {L::vec128, L::tensor},
                                                  {L::group_row, L::group_row},
                                                  {L::mx32, L::block128}};
    for (const auto& [la, lb] : layouts) {
        for (const Shape& s : kShapes) {
            SCOPED_TRACE(fmt::format("{} {} {}x{}x{}", name_of(la), name_of(lb), s.m, s.n, s.k));
            HostFp8 a(DType::e4m3, {s.m, s.k}, la, 1), b(DType::e4m3, {s.n, s.k}, lb, 1);
            fill_operand(a, 3);
            fill_operand(b, 4);
            run_dense(a, b, op::GemmForm::nt, DType::bf16, Gradient::overwrite, s);
            run_dense(a, b, op::GemmForm::nt, DType::f32, Gradient::accumulate, s);
        }
    }
    const Shape s{40, 50, 300};  // hybrid: gradients in E5M2
    HostFp8 a(DType::e5m2, {s.m, s.k}, L::vec128), b(DType::e4m3, {s.n, s.k}, L::block128);
    fill_operand(a, 5);
    fill_operand(b, 6);
    run_dense(a, b, op::GemmForm::nt, DType::f32, Gradient::overwrite, s);
}

// ---- grouped --------------------------------------------------------------------------------------------------------------------
const std::vector<std::vector<int64_t>> kCounts = {
    {0, 1, 127, 0, 128, 129, 5}, {300}, {0, 0}, {17, 0, 0, 40}};

struct GroupedCase {
    DType dtype;
    ScaleLayout a, b;
    op::GemmForm form;
    DType d_dtype;
    int64_t alignment;
};

void run_grouped(const GroupedCase& c, const std::vector<int64_t>& counts, int64_t a_base, int64_t d_base,
                 int64_t n, int64_t k) {
    SCOPED_TRACE(fmt::format("{} x {} {} align {} base {} n {} k {}", name_of(c.a), name_of(c.b),
                             name_of(c.dtype), c.alignment, a_base, n, k));
    ReferenceOps ops;
    const GroupsFixture groups(counts, c.alignment, 3);
    const int64_t G = groups.num_groups(), capacity = groups.capacity();
    HostFp8 a(c.dtype, {a_base + capacity + 2, k}, c.a);
    HostFp8 b =
        c.form == op::GemmForm::nt ? HostFp8(c.dtype, {G, n, k}, c.b) : HostFp8(c.dtype, {G, k, n}, c.b);
    fill_operand(a, 11);
    fill_operand(b, 12);
    HostTensor d(c.d_dtype, {d_base + capacity + 1, n});
    if (a_base > 0) a.set_row_base(a_base);
    if (d_base > 0) d.set_row_base(d_base);
    ops.grouped_gemm({.a = a, .b = b, .groups = groups, .form = c.form, .d = d});

    for (int64_t g = 0; g < G; ++g) {
        SCOPED_TRACE(fmt::format("group {}", g));
        const Window rows{.first_row = a_base + groups.first(g), .rows = groups.count(g), .depth = k};
        const Window weight{.expert = g,
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
    EXPECT_TRUE(d.guards_intact() && a.guards_intact() && b.guards_intact());
}

TEST(GroupedGemm, LayoutsGroupsAndBases) {
    using L = ScaleLayout;
    const std::vector<GroupedCase> cases = {
        {DType::bf16, L::none, L::none, op::GemmForm::nt, DType::bf16, 1},
        {DType::bf16, L::none, L::none, op::GemmForm::nn, DType::bf16, 16},
        {DType::f32, L::none, L::none, op::GemmForm::nt, DType::f32, 16},
        {DType::f32, L::none, L::none, op::GemmForm::nn, DType::f32, 1},
        {DType::e4m3, L::vec128, L::block128, op::GemmForm::nt, DType::bf16, 128},
        {DType::e5m2, L::vec128, L::block128, op::GemmForm::nt, DType::f32, 16},
        {DType::e4m3, L::row, L::row, op::GemmForm::nt, DType::bf16, 16},
        {DType::e4m3, L::tensor, L::tensor, op::GemmForm::nt, DType::bf16, 1},
        {DType::e4m3, L::mx32, L::mx32, op::GemmForm::nt, DType::bf16, 32},
    };
    for (const GroupedCase& c : cases) {
        for (const auto& counts : kCounts) {
            run_grouped(c, counts, 0, 0, 48, 160);
            run_grouped(c, counts, 256, 128, 48, 160);
        }
        run_grouped(c, {3, 0, 40}, 5, 7, 130, 259);  // nothing divides anything
    }
}

// ---- weight gradients -------------------------------------------------------------------------------------------------------------
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
    HostFp8 dy = fp8 ? HostFp8(dy_dtype, {n, dy_rows}, layout, G) : HostFp8(dy_dtype, {dy_rows, n}, layout);
    HostFp8 x = fp8 ? HostFp8(x_dtype, {k, x_rows}, layout, G) : HostFp8(x_dtype, {x_rows, k}, layout);
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

// Two sets of operands, whose groups have other sizes and whose rows begin elsewhere: one sum over both, then one addition.
void run_two_wgrads(DType dy_dtype, DType x_dtype, ScaleLayout layout, int64_t alignment, Gradient mode) {
    SCOPED_TRACE(fmt::format("{} {} {}", name_of(layout), name_of(dy_dtype),
                             mode == Gradient::accumulate ? "accumulate" : "overwrite"));
    const std::vector<int64_t> counts[2] = {{300, 0, 129, 0, 3}, {5, 140, 260, 0, 0}};
    const int64_t G = 5, n = 30, k = 140, bases[2] = {0, 384};
    const bool fp8 = is_fp8(x_dtype);
    std::vector<GroupsFixture> groups;
    std::vector<HostFp8> dy, x;
    for (int i = 0; i < 2; ++i) {
        const GroupsFixture& g = groups.emplace_back(counts[i], alignment, 2 + i);
        const int64_t rows = round_up(bases[i] + g.capacity(), 128);
        dy.push_back(fp8 ? HostFp8(dy_dtype, {n, rows}, layout, G) : HostFp8(dy_dtype, {rows, n}, layout));
        x.push_back(fp8 ? HostFp8(x_dtype, {k, rows}, layout, G) : HostFp8(x_dtype, {rows, k}, layout));
        for (HostFp8* operand : {&dy.back(), &x.back()}) {
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

TEST(GroupedGemmWgrad, LayoutsGroupsAndBases) {
    using L = ScaleLayout;
    for (const auto& counts : kCounts) {
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

// ---- order, threads, faults ---------------------------------------------------------------------------------------------------------
struct Flow {  // one fp8 grouped product large enough for several tasks
    GroupsFixture groups{{150, 0, 129, 3}, 128};
    HostFp8 a{DType::e4m3, {groups.capacity(), 640}, ScaleLayout::vec128};
    HostFp8 b{DType::e4m3, {4, 320, 640}, ScaleLayout::block128};
    Flow() {
        fill_operand(a, 31);
        fill_operand(b, 32);
    }
    HostTensor run(SummationOrder order, DType dtype = DType::f32) const {
        ReferenceOps ops({.summation = order});
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
        HostFp8 a(dtype, {50, 200}, layout), b(dtype, {60, 200}, layout);
        fill_operand(a, 41);
        fill_operand(b, 42);
        HostTensor d[2] = {HostTensor(DType::f32, {50, 60}), HostTensor(DType::f32, {50, 60})};
        for (int i = 0; i < 2; ++i)
            ReferenceOps({.summation = i ? SummationOrder::split : SummationOrder::sequential})
                .gemm({.a = a, .b = b, .d = d[i]});
        EXPECT_FALSE(same_bytes(d[0], d[1]));
        EXPECT_LE(nmse(d[1], product_double(read(a, {.rows = 50, .depth = 200}),
                                            read(b, {.rows = 60, .depth = 200}))),
                  kF32Bound);
    }
}

// The bounds catch a wrong scale, a neighbour's scale and a dropped block: each fault in the operands, the wanted product without it.
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
                                 std::memset(f.a.codes.view().bytes_ptr() + r * 640 + 608, 0, 32);
                         }),
              10 * kBf16Bound);
}

TEST(GemmSpecialValues, NanStaysInItsRowAndColumn) {
    HostFp8 a = plain(DType::bf16, {9, 40}, 1), b = plain(DType::bf16, {20, 40}, 2);
    set(a.codes, 3 * 40 + 7, std::nan(""));
    HostTensor d(DType::bf16, {9, 20});
    ReferenceOps().gemm({.a = a, .b = b, .d = d});
    for (int64_t i = 0; i < d.numel(); ++i) EXPECT_EQ(std::isnan(d(i)), i / 20 == 3) << i;
}

}  // namespace
}  // namespace fp8flow::test
