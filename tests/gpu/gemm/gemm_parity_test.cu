// SPDX-License-Identifier: MIT
// GEMMs of the Hopper backend against the reference, over every layout, form and grouping: the CUDA-core
// kernel bit by bit, tensor cores (cuBLASLt and this project's kernels) within the bounds of rounding, and
// twice for identical bits.
#include "kernels/hopper/device/view.h"
#include "tests/support/parity.h"
#include "tests/support/products.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;
using op::GemmForm;

constexpr GemmBackend kBackends[] = {GemmBackend::native, GemmBackend::simt, GemmBackend::alternative};
const char* name_of(GemmBackend backend) {
    switch (backend) {
        case GemmBackend::native: return "native";
        case GemmBackend::cublaslt: return "cublaslt";
        case GemmBackend::simt: return "simt";
        case GemmBackend::alternative: return "alternative";
    }
    return "?";
}
using fp8flow::name_of;

// The bits of the reference on CUDA cores, elsewhere values within rounding.
void expect_result(Parity& parity, const TensorView& d, GemmBackend backend) {
    if (backend == GemmBackend::simt)
        parity.expect_same_bytes(d, "d");
    else
        parity.expect_close(d, bound_of(d.dtype, static_cast<std::size_t>(d.numel())), "d");
}
template <class Args> void compare(const Args& args, GemmBackend backend, const Launch& launch = {}) {
    Parity parity;
    parity.gpu.choose_kernels({.gemm = backend});
    parity.run(args, launch);
    expect_result(parity, args.d, backend);
}

// ---- dense
struct Dense {
    int64_t m, n, k;
};

struct DenseCase {
    DType a, b, d;
    GemmForm form = GemmForm::nt;
    L a_layout = L::none, b_layout = L::none;
    Gradient mode = Gradient::overwrite;
};

void run_dense(const DenseCase& c, const Dense& s, GemmBackend backend) {
    SCOPED_TRACE(fmt::format("{}: {} {} x {} {} -> {}, {}x{}x{}, form {}", name_of(backend), name_of(c.a),
                             name_of(c.a_layout), name_of(c.b), name_of(c.b_layout), name_of(c.d), s.m, s.n,
                             s.k, static_cast<int>(c.form)));
    const bool a_across = c.form == GemmForm::tn, b_across = c.form != GemmForm::nt;
    HostScaled a(c.a, {a_across ? s.k : s.m, a_across ? s.m : s.k}, c.a_layout, 1);
    HostScaled b(c.b, {b_across ? s.k : s.n, b_across ? s.n : s.k}, c.b_layout, 1);
    fill_operand(a, 1);
    fill_operand(b, 2);
    HostTensor d(c.d, {s.m, s.n});
    if (c.mode == Gradient::accumulate) fill_normal(d, 3, 3.0);
    compare(op::Gemm{.a = a, .b = b, .form = c.form, .mode = c.mode, .d = d}, backend);
}

const std::vector<Dense> kShapes = {{0, 16, 32},     {5, 0, 7},       {4, 6, 0},       {1, 1, 1},
                                    {1, 128, 128},   {127, 129, 130}, {128, 64, 257},  {129, 300, 64},
                                    {33, 270, 600},  {200, 31, 385},  {128, 384, 304}, {256, 256, 640},
                                    {256, 384, 640}, {128, 640, 304}};

TEST(GemmParity, PlainFormsAndShapesOnCudaCores) {
    for (const Dense& s : kShapes) {
        for (GemmForm form : {GemmForm::nt, GemmForm::nn, GemmForm::tn}) {
            run_dense({.a = DType::bf16, .b = DType::bf16, .d = DType::bf16, .form = form}, s,
                      GemmBackend::simt);
            run_dense({.a = DType::f32, .b = DType::f32, .d = DType::f32, .form = form}, s,
                      GemmBackend::simt);
            run_dense({.a = DType::bf16,
                       .b = DType::f32,
                       .d = DType::f32,
                       .form = form,
                       .mode = Gradient::accumulate},
                      s, GemmBackend::simt);
        }
    }
}

TEST(GemmParity, Fp8Layouts) {
    for (const auto& [a, b] : kDenseLayouts) {
        for (const Dense& s : kShapes) {
            DenseCase c{.a = DType::e4m3, .b = DType::e4m3, .d = DType::bf16, .a_layout = a, .b_layout = b};
            for (GemmBackend backend : kBackends) run_dense(c, s, backend);
            c.a = DType::e5m2;
            c.d = DType::f32;
            c.mode = Gradient::accumulate;
            for (GemmBackend backend : kBackends) run_dense(c, s, backend);
        }
    }
}

TEST(GemmParity, DenseOnCublasLt) {
    if (own_kernels_only()) GTEST_SKIP() << "a library's kernels";
    const std::vector<Dense> shapes = {
        {8, 8, 8}, {128, 128, 128}, {136, 264, 1032}, {256, 1024, 512}, {24, 512, 4096}};
    for (const Dense& s : shapes) {
        for (GemmForm form : {GemmForm::nt, GemmForm::nn, GemmForm::tn}) {
            DenseCase c{.a = DType::bf16, .b = DType::bf16, .d = DType::bf16, .form = form};
            run_dense(c, s, GemmBackend::native);
            c.d = DType::f32;
            run_dense(c, s, GemmBackend::native);
            c.mode = Gradient::accumulate;
            run_dense(c, s, GemmBackend::native);
        }
    }
    // rows that are no multiple of anything are fine where they are not contiguous; other odd sizes fall back
    for (const Dense& s :
         {Dense{1, 128, 64}, Dense{127, 64, 256}, Dense{129, 130, 131}, Dense{0, 64, 64}, Dense{5, 0, 8}})
        for (GemmForm form : {GemmForm::nt, GemmForm::nn, GemmForm::tn})
            run_dense({.a = DType::bf16, .b = DType::bf16, .d = DType::bf16, .form = form}, s,
                      GemmBackend::native);
    // FP8 with one scale per operand, the ceiling's; two E5M2 operands fall back
    for (const Dense& s : shapes)
        for (const DType a : {DType::e4m3, DType::e5m2})
            for (const DType d : {DType::bf16, DType::f32}) {
                DenseCase c{.a = a, .b = DType::e4m3, .d = d, .a_layout = L::tensor, .b_layout = L::tensor};
                run_dense(c, s, GemmBackend::cublaslt);
                c.b = a;
                run_dense(c, s, GemmBackend::cublaslt);
            }
}

// What DenseOnCublasLt compares is what cuBLASLt computed.
TEST(GemmParity, CublasLtTakesWhatItSupports) {
    if (own_kernels_only()) GTEST_SKIP() << "a library's kernels";
    Parity parity;
    const auto gemms = [&](DType dtype, L layout, GemmBackend backend) {
        const HostScaled a(dtype, {128, 256}, layout, 1), b(dtype, {64, 256}, layout, 1);
        const HostTensor d(DType::bf16, {128, 64});
        parity.gpu.choose_kernels({.gemm = backend});
        const int64_t before = parity.gpu.cublaslt_gemms();
        parity.gpu.gemm(parity.on_gpu(op::Gemm{.a = a, .b = b, .d = d}));
        return parity.gpu.cublaslt_gemms() - before;
    };
    EXPECT_EQ(gemms(DType::bf16, L::none, GemmBackend::native), 1);
    EXPECT_EQ(gemms(DType::bf16, L::none, GemmBackend::simt), 0);
    EXPECT_EQ(gemms(DType::e4m3, L::tensor, GemmBackend::cublaslt), 1);
    EXPECT_EQ(gemms(DType::e4m3, L::tensor, GemmBackend::native), 0);
    EXPECT_EQ(gemms(DType::e4m3, L::row, GemmBackend::cublaslt), 0);
    EXPECT_EQ(gemms(DType::e5m2, L::tensor, GemmBackend::cublaslt), 0);
}

// ---- grouped
const std::vector<std::vector<int64_t>> kCounts = {
    {0, 1, 127, 0, 128, 129, 5}, {300}, {0, 0}, {17, 0, 0, 40}, {3, 500, 0, 2}};

// More steps than a warp holds scales for, and one cluster for all tiles: what is carried from a tile to the
// next.
TEST(GroupedGemmParity, ManyStepsAndTiles) {
    const GroupsFixture groups({300, 0, 129, 3}, 128);
    const int64_t n = 320, k = 4352;
    HostScaled a(DType::e4m3, {groups.capacity(), k}, L::vec128), b(DType::e4m3, {4, n, k}, L::block128);
    fill_operand(a, 21);
    fill_operand(b, 22);
    HostTensor d(DType::bf16, {groups.capacity(), n});
    compare(op::GroupedGemm{.a = a, .b = b, .groups = groups, .d = d}, GemmBackend::native, {.sm_limit = 2});
}

void run_grouped(const GroupedCase& c, const std::vector<int64_t>& counts, int64_t a_base, int64_t d_base,
                 int64_t n, int64_t k, GemmBackend backend, int64_t weights = 0) {
    SCOPED_TRACE(fmt::format("{}: {} x {} {} align {} base {} {} n {} k {} counts {} weights {}",
                             name_of(backend), name_of(c.a), name_of(c.b), name_of(c.dtype), c.alignment,
                             a_base, d_base, n, k, fmt::join(counts, ","), weights));
    const GroupsFixture groups(counts, c.alignment, 3);
    const int64_t E = weights > 0 ? weights : groups.num_groups(), capacity = groups.capacity();
    HostScaled a(c.dtype, {round_up(a_base + capacity + 2, 16), k}, c.a);
    const HostScaled b = grouped_weights(c, E, n, k);
    fill_operand(a, 11);
    fill_operand(b, 12);
    HostTensor d(c.d_dtype, {d_base + capacity + 1, n});
    if (a_base > 0) a.set_row_base(a_base);
    if (d_base > 0) d.set_row_base(d_base);
    // pads and untouched rows included
    compare(op::GroupedGemm{.a = a, .b = b, .groups = groups, .form = c.form, .d = d}, backend);
}

TEST(GroupedGemmParity, LayoutsGroupsAndBases) {
    for (const GroupedCase& c : kGroupedCases) {
        for (const auto& counts : kCounts) {
            for (GemmBackend backend : kBackends) {
                run_grouped(c, counts, 0, 0, 48, 160, backend);
                run_grouped(c, counts, 256, 128, 160, 288, backend);
            }
        }
        for (GemmBackend backend : kBackends) {
            run_grouped(c, {3, 0, 40}, 5, 7, 131, 259, backend);                  // nothing divides anything
            run_grouped(c, {3, 140, 0, 17, 5, 129}, 0, 0, 160, 288, backend, 2);  // three groups a weight
        }
    }
}

// Several tiles and stages of scales that are constant along the contraction, in groups that end anywhere.
TEST(GroupedGemmParity, ScalesOfWholeRowsAndTensors) {
    const std::vector<GroupedCase> cases = {
        {DType::e4m3, L::row, L::row, GemmForm::nt, DType::bf16, 16},
        {DType::e5m2, L::row, L::row, GemmForm::nt, DType::f32, 1},
        {DType::e4m3, L::tensor, L::tensor, GemmForm::nt, DType::f32, 16},
        {DType::e5m2, L::tensor, L::tensor, GemmForm::nt, DType::bf16, 16},
        {DType::e4m3, L::row, L::tensor, GemmForm::nt, DType::bf16, 128},
    };
    for (const GroupedCase& c : cases)
        for (const auto& counts : kCounts) {
            run_grouped(c, counts, 0, 0, 520, 1040, GemmBackend::native);
            run_grouped(c, counts, 48, 16, 264, 144, GemmBackend::native);
        }
}

// Blocks of 32: several tiles and stages, a stage and a block that end early, groups that end inside a tile;
// experts without rows; two and more groups of a weight.
TEST(GroupedGemmParity, MxBlocks) {
    for (const DType dtype : {DType::e4m3, DType::e5m2})
        for (const int64_t alignment : {32, 128}) {
            const GroupedCase c{
                dtype,    L::mx32, L::mx32, GemmForm::nt, dtype == DType::e4m3 ? DType::bf16 : DType::f32,
                alignment};
            for (const auto& counts : kCounts) {
                run_grouped(c, counts, 0, 0, 528, 1040, GemmBackend::native);
                run_grouped(c, counts, 96, 32, 272, 176, GemmBackend::native);
            }
            run_grouped(c, {3, 140, 0, 17, 5, 129}, 32, 64, 400, 304, GemmBackend::native, 2);
        }
}

// parts: calls on the GPU, each for its share of the groups.
void run_wgrad(DType dy_dtype, DType x_dtype, L layout, int64_t alignment, const std::vector<int64_t>& counts,
               int64_t dy_base, int64_t x_base, Gradient mode, GemmBackend backend, int64_t n = 70,
               int64_t k = 140, int64_t parts = 1) {
    SCOPED_TRACE(fmt::format("{}: {} {} align {} base {} {} {}x{} {} counts {} parts {}", name_of(backend),
                             name_of(layout), name_of(dy_dtype), alignment, dy_base, x_base, n, k,
                             mode == Gradient::accumulate ? "accumulate" : "overwrite",
                             fmt::join(counts, ","), parts));
    const GroupsFixture groups(counts, alignment, 2);
    const int64_t G = groups.num_groups();
    const int64_t dy_rows = round_up(dy_base + groups.capacity(), 128),
                  x_rows = round_up(x_base + groups.capacity(), 128) + 128;
    HostScaled dy = wgrad_operand(dy_dtype, n, dy_rows, layout, G),
               x = wgrad_operand(x_dtype, k, x_rows, layout, G);
    fill_operand(dy, 21);  // plain pads too: their values must not count
    fill_operand(x, 22);
    zero_pads(dy, groups, dy_base);
    zero_pads(x, groups, x_base);
    if (dy_base > 0) dy.set_row_base(dy_base);
    if (x_base > 0) x.set_row_base(x_base);
    const HostTensor dw(DType::f32, {G, n, k}), whole(DType::f32, {G, n, k});
    if (mode == Gradient::accumulate)
        for (const HostTensor* t : {&dw, &whole}) fill_normal(*t, 23, 5.0);
    const op::GroupedGemmWgrad args{.dy = dy, .x = x, .groups = groups, .mode = mode, .dw = whole};
    ReferenceOps().grouped_gemm_wgrad(args);
    Parity parity;
    parity.gpu.choose_kernels({.gemm = backend});
    parity.to_gpu(dw.view());  // the whole first, so that its parts are in one copy
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = part * G / parts, count = (part + 1) * G / parts - first;
        op::GroupedGemmWgrad share = args;
        share.groups = args.groups.slice(first, count);
        share.dw = dw.view().slice(first, count);
        if (layout == L::group_row)
            for (ScaledTensor* operand : {&share.dy, &share.x})
                operand->scales = operand->scales.slice(first, count);
        parity.run(share);
    }
    EXPECT_TRUE(same_bytes(dw, whole)) << "the reference in parts";
    expect_result(parity, dw, backend);
}

TEST(GroupedGemmWgradParity, LayoutsGroupsAndBases) {
    for (GemmBackend backend : kBackends) {
        for (const auto& counts : kCounts) {
            for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
                run_wgrad(DType::bf16, DType::bf16, L::none, 1, counts, 0, 0, mode, backend);
                run_wgrad(DType::bf16, DType::bf16, L::none, 16, counts, 5, 33, mode, backend);
                run_wgrad(DType::f32, DType::f32, L::none, 16, counts, 0, 0, mode, backend);
                run_wgrad(DType::e4m3, DType::e4m3, L::tile128, 128, counts, 0, 0, mode, backend);
                run_wgrad(DType::e4m3, DType::e4m3, L::tile128, 128, counts, 256, 128, mode, backend);
                run_wgrad(DType::e5m2, DType::e4m3, L::vec128, 128, counts, 0, 384, mode, backend);
                run_wgrad(DType::e4m3, DType::e4m3, L::group_row, 16, counts, 0, 48, mode, backend);
                run_wgrad(DType::e4m3, DType::e4m3, L::mx32, 32, counts, 96, 32, mode, backend);
                run_wgrad(DType::e4m3, DType::e4m3, L::tensor, 1, counts, 7, 3, mode, backend);
            }
        }
    }
}

// Gradients of the groups of one source rank after the other.
TEST(GroupedGemmWgradParity, InPartsOfTheGroups) {
    const std::vector<int64_t> counts = {3, 140, 0, 17, 260, 129};
    for (GemmBackend backend : kBackends)
        for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            const auto run = [&](DType dtype, L layout, int64_t alignment, int64_t n, int64_t k) {
                run_wgrad(dtype, dtype, layout, alignment, counts, 256, 128, mode, backend, n, k, 3);
            };
            run(DType::bf16, L::none, 1, 70, 140);
            run(DType::bf16, L::none, 16, 264, 520);
            run(DType::e4m3, L::tile128, 128, 264, 520);
            run(DType::e4m3, L::vec128, 128, 264, 520);
            run(DType::e4m3, L::group_row, 16, 264, 520);
            run(DType::e4m3, L::mx32, 32, 72, 144);
            run(DType::e4m3, L::mx32, 32, 272, 528);
        }
}

// Several tiles and stages; groups end anywhere in a stage, so what follows them must not count.
TEST(GroupedGemmWgradParity, ScalesOfWholeColumnsAndTensors) {
    for (const auto& counts : kCounts) {
        for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            const auto run = [&](DType dy, L layout, int64_t alignment, int64_t dy_base, int64_t x_base) {
                run_wgrad(dy, DType::e4m3, layout, alignment, counts, dy_base, x_base, mode,
                          GemmBackend::native, 264, 520);
            };
            run(DType::e4m3, L::group_row, 16, 0, 48);
            run(DType::e5m2, L::group_row, 128, 128, 0);
            run(DType::e4m3, L::tensor, 16, 16, 32);
            run(DType::e5m2, L::tensor, 32, 0, 0);
        }
    }
}

TEST(GroupedGemmWgradParity, MxBlocks) {
    for (const auto& counts : kCounts)
        for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            run_wgrad(DType::e4m3, DType::e4m3, L::mx32, 32, counts, 96, 32, mode, GemmBackend::native, 272,
                      528);
            run_wgrad(DType::e5m2, DType::e4m3, L::mx32, 128, counts, 0, 128, mode, GemmBackend::native, 144,
                      304);
        }
}

}  // namespace
}  // namespace fp8flow::test
