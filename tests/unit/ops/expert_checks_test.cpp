// SPDX-License-Identifier: MIT
// Argument checks and costs of the expert operations (matrix products, SwiGLU): what is refused, in which
// words, and known counts.
#include "kernels/reference/reference_ops.h"
#include "tests/support/files.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;

#define EXPECT_REFUSED(call, text) expect_contains(error_of(ExitCode::internal, [&] { call; }), text)

struct Fixture {
    ReferenceOps ops;
    GroupsFixture groups{{100, 28}, 128};
    int64_t rows = groups.capacity();
    HostScaled a{DType::e4m3, {rows, 256}, L::vec128}, b{DType::e4m3, {2, 128, 256}, L::block128};
    HostScaled dy{DType::e4m3, {128, rows}, L::tile128}, x{DType::e4m3, {256, rows}, L::tile128};
    HostTensor d{DType::bf16, {rows, 128}}, dw{DType::f32, {2, 128, 256}};
    HostTensor h{DType::bf16, {rows, 256}}, prob{DType::f32, {rows}}, plain{DType::bf16, {rows, 256}};
    HostScaled act{DType::e4m3, {rows, 128}, L::vec128};
};

ScaledTensor as_plain(const HostTensor& tensor) { return {.data = tensor}; }

TEST(ExpertChecks, Gemm) {
    Fixture f;
    HostScaled row(DType::e4m3, {128, 256}, L::vec128);
    HostTensor bf16(DType::bf16, {128, 256}), d(DType::bf16, {128, 128}), d32(DType::f32, {128, 128}),
        wide(DType::f32, {128, 127});
    EXPECT_REFUSED(f.ops.gemm({.a = row, .b = as_plain(bf16), .d = d}), "both must be FP8, or neither");
    EXPECT_REFUSED(f.ops.gemm({.a = row, .b = row, .form = op::GemmForm::nn, .d = d}), "need the form nt");
    EXPECT_REFUSED(f.ops.gemm({.a = as_plain(bf16), .b = as_plain(d), .d = d}), "contraction");
    EXPECT_REFUSED(f.ops.gemm({.a = row, .b = row, .d = wide}), "must be f32[128, 128]");
    EXPECT_REFUSED(f.ops.gemm({.a = row, .b = row, .mode = Gradient::accumulate, .d = d}),
                   "only f32 can be accumulated into");
    ScaledTensor short_scales = row;
    short_scales.scales = make_view(row.scales.view().data, DType::f32, {1, 128});
    EXPECT_REFUSED(f.ops.gemm({.a = short_scales, .b = row, .d = d}), "does not fit scales");
    HostTensor based(DType::f32, {128, 128});
    based.set_row_base(0);
    EXPECT_REFUSED(f.ops.gemm({.a = row, .b = row, .d = based}), "row arena");
}

TEST(ExpertChecks, GroupedGemm) {
    Fixture f;
    EXPECT_REFUSED(f.ops.grouped_gemm({.a = f.a, .b = f.b, .groups = GroupsFixture({1, 2, 3}, 16), .d = f.d}),
                   "3 groups of rows for 2 weights");
    EXPECT_REFUSED(
        f.ops.grouped_gemm({.a = f.a, .b = f.b, .groups = f.groups, .form = op::GemmForm::nn, .d = f.d}),
        "nn with plain operands");
    HostTensor short_d(DType::bf16, {f.rows - 1, 128});
    EXPECT_REFUSED(f.ops.grouped_gemm({.a = f.a, .b = f.b, .groups = f.groups, .d = short_d}),
                   "too few rows for a row capacity of 256");
    EXPECT_REFUSED(f.ops.grouped_gemm({.a = f.dy, .b = f.b, .groups = f.groups, .d = f.d}),
                   "a has scales tile128, must be none or tensor");
}

TEST(ExpertChecks, GroupedGemmWgrad) {
    Fixture f;
    const GroupsFixture narrow({100, 28}, 64);
    EXPECT_REFUSED(f.ops.grouped_gemm_wgrad({.dy = f.dy, .x = f.x, .groups = narrow, .dw = f.dw}),
                   "moe_row_alignment");
    HostTensor f16(DType::f16, {2, 128, 256});
    EXPECT_REFUSED(f.ops.grouped_gemm_wgrad({.dy = f.dy, .x = f.x, .groups = f.groups, .dw = f16}),
                   "must be bf16 or f32");
    EXPECT_REFUSED(f.ops.grouped_gemm_wgrad({.dy = f.x, .x = f.dy, .groups = f.groups, .dw = f.dw}), "dy is");
    op::GroupedGemmWgrad two{.dy = f.dy, .x = f.x, .groups = f.groups, .dw = f.dw};
    two.second = {f.x, f.dy, f.groups};
    EXPECT_REFUSED(f.ops.grouped_gemm_wgrad(two), "the second dy is");
    two.second = {f.dy, f.x, narrow};
    EXPECT_REFUSED(f.ops.grouped_gemm_wgrad(two), "moe_row_alignment");
    two.second = {f.dy, f.x, GroupsFixture({100}, 128)};
    EXPECT_REFUSED(f.ops.grouped_gemm_wgrad(two), "1 groups of rows for 2 weight gradients");
    const HostScaled columns(DType::e4m3, {128, f.rows}, L::vec128);
    two.second = {columns, f.x, f.groups};
    EXPECT_REFUSED(f.ops.grouped_gemm_wgrad(two), "one dtype and layout");
}

TEST(ExpertChecks, Swiglu) {
    Fixture f;
    HostTensor wrong(DType::bf16, {f.rows, 127}), prob64(DType::i64, {f.rows}), a(DType::bf16, {f.rows, 128});
    EXPECT_REFUSED(f.ops.swiglu({.h = f.h, .groups = f.groups, .a = wrong}), "h is");
    EXPECT_REFUSED(f.ops.swiglu({.h = f.h, .prob = prob64, .groups = f.groups, .a = a}), "prob is i64");
    HostTensor more(DType::bf16, {f.rows + 1, 128});
    EXPECT_REFUSED(f.ops.swiglu({.h = f.h, .a = more}), "but h is");
    HostScaled row(DType::e4m3, {f.rows, 128}, L::row);
    EXPECT_REFUSED(f.ops.swiglu_quantize({.h = f.h, .groups = f.groups, .a = row}), "must be vec128");
    HostTensor da(DType::bf16, {f.rows, 64}), h(DType::bf16, {f.rows, 128});
    EXPECT_REFUSED(f.ops.swiglu_backward_quantize({.da = da, .h = h, .groups = f.groups, .dh = f.act}),
                   "moe_ffn_hidden_size");
    EXPECT_REFUSED(f.ops.grouped_gemm_swiglu_quantize(
                       {.a = as_plain(f.plain), .b = f.b, .groups = f.groups, .h = f.d, .act = f.act}),
                   "a has scales none, must be vec128");
}

TEST(ExpertCosts, KnownCounts) {
    Fixture f;
    const double rows = 256;
    const OpCost grouped = cost(op::GroupedGemm{.a = f.a, .b = f.b, .groups = f.groups, .d = f.d});
    EXPECT_EQ(grouped.flops, 2 * rows * 128 * 256);
    EXPECT_EQ(grouped.bytes, rows * 256 + 2 * rows * 4 + 2 * 128 * 256 + 2 * 4 * 4 + rows * 128 * 2);
    const op::GroupedGemmWgrad wgrad{
        .dy = f.dy, .x = f.x, .groups = f.groups, .mode = Gradient::accumulate, .dw = f.dw};
    EXPECT_EQ(cost(wgrad).flops, 2 * rows * 128 * 256);
    EXPECT_EQ(cost(wgrad).bytes, 128 * rows + 2 * 4 + 256 * rows + 2 * 2 * 4 + 2 * (2 * 128 * 256 * 4));
    op::GroupedGemmWgrad two = wgrad;  // dw is read and written once for both
    two.second = {f.dy, f.x, f.groups};
    EXPECT_EQ(cost(two).flops, 2 * cost(wgrad).flops);
    EXPECT_EQ(cost(two).bytes, 2 * cost(wgrad).bytes - 2 * (2 * 128 * 256 * 4));
    const OpCost swiglu = cost(op::SwigluQuantize{.h = f.h, .prob = f.prob, .groups = f.groups, .a = f.act});
    EXPECT_EQ(swiglu.bytes, rows * (256 * 2 + 4 + 128 + 4));

    // A view into a buffer of several layers costs what one layer's rows cost.
    HostScaled shared(DType::e4m3, {4 * f.rows, 256}, L::vec128);
    EXPECT_EQ(cost(op::GroupedGemm{.a = shared, .b = f.b, .groups = f.groups, .d = f.d}).bytes,
              grouped.bytes);

    // Fused: h is not read back, and not written where the caller does not keep it.
    HostScaled w(DType::e4m3, {2, 256, 256}, L::block128);
    op::GroupedGemmSwigluQuantize fused{.a = f.a, .b = w, .groups = f.groups, .h = f.h, .act = f.act};
    const double kept = cost(fused).bytes;
    EXPECT_EQ(kept, rows * 256 + 2 * rows * 4 + 2 * 256 * 256 + 2 * 2 * 4 * 4 + rows * (256 * 2 + 128 + 4));
    EXPECT_EQ(cost(fused).flops, 2 * rows * 256 * 256);  // those of the product's unit
    fused.save_h = op::SaveH::no;
    EXPECT_EQ(kept - cost(fused).bytes, rows * 256 * 2);
}

}  // namespace
}  // namespace fp8flow::test
