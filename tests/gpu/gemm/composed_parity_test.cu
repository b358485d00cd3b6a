// SPDX-License-Identifier: MIT
// The fused operations against the reference, and against their parts on the same GPU, bit by bit.
#include "kernels/hopper/device/view.h"
#include "tests/support/parity.h"

#include <fmt/ranges.h>
#include <algorithm>

#include <cmath>
#include <vector>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;

struct Case {
    std::vector<int64_t> counts;
    int64_t width, contraction, base;  // F, K
};
const std::vector<Case> kCases = {
    {{0, 1, 127, 128, 129, 0}, 256, 256, 0},  // two steps: never in one kernel
    {{0, 1, 127, 128, 129, 0}, 256, 384, 0},  // three: the fewest of the kernel
    {{700, 0, 256, 1}, 384, 2432, 0},         // more steps than a warp holds scales for
    {{300, 2, 0}, 128, 1152, 256},           {{0, 0}, 128, 128, 128}, {{40}, 2048, 384, 0},
};

// extreme: rows that are infinite, NaN, or overflow after SwiGLU, and tiny ones; compared with the parts
// only.
void expect_fused_gemm(const Case& c, GemmBackend backend, ScaleFormat format, op::SaveH save_h,
                       bool extreme = false, const op::GluForm& form = {}) {
    SCOPED_TRACE(fmt::format("counts {}, F {}, K {}, {}, h {}", fmt::join(c.counts, ","), c.width,
                             c.contraction, backend == GemmBackend::simt ? "simt" : "native",
                             save_h == op::SaveH::yes ? "kept" : "not kept"));
    const GroupsFixture groups(c.counts, 128, 132);  // rows past the groups stay as they are
    const int64_t rows = c.base + groups.capacity(), G = groups.num_groups();
    if (too_large_here(rows * c.width * c.contraction / 32)) return;
    const bool with_prob = format == ScaleFormat::pow2;
    HostScaled a(DType::e4m3, {rows, c.contraction}, L::vec128),
        b(DType::e4m3, {G, 2 * c.width, c.contraction}, L::block128),
        act(DType::e4m3, {rows, c.width}, L::vec128), act_of_parts(DType::e4m3, {rows, c.width}, L::vec128);
    HostTensor prob(DType::f32, {rows}), h(DType::bf16, {rows, 2 * c.width}),
        h_of_parts(DType::bf16, {rows, 2 * c.width});
    fill_normal(a.data, 1, 8.0);
    fill_pow2(a.scales, 2, -4, 0);
    fill_normal(b.data, 3, 8.0);
    fill_pow2(b.scales, 4, -6, -2);
    fill_uniform(prob, 5, 0.0, 1.0);
    if (extreme)
        for (const auto& [row, scale] : {std::pair{1, HUGE_VAL}, {2, 1e30}, {9, 1e-30}, {70, std::nan("")}})
            set(a.scales, c.base + row, scale);
    if (c.base > 0) {
        for (HostScaled* t : {&a, &act, &act_of_parts}) t->set_row_base(c.base);
        for (HostTensor* t : {&prob, &h, &h_of_parts}) t->set_row_base(c.base);
    }
    const TensorView weights = with_prob ? prob.view() : TensorView{};
    Parity p;
    p.gpu.choose_kernels({.gemm = backend});
    // the parts, on the GPU alone
    const RowGroups gpu_groups = p.to_gpu(RowGroups(groups));
    p.gpu.grouped_gemm({.a = p.to_gpu(ScaledTensor(a)),
                        .b = p.to_gpu(ScaledTensor(b)),
                        .groups = gpu_groups,
                        .d = p.to_gpu(h_of_parts.view())});
    p.gpu.swiglu_quantize({.h = p.to_gpu(h_of_parts.view()),
                           .prob = p.to_gpu(weights),
                           .groups = gpu_groups,
                           .form = form,
                           .scale_format = format,
                           .a = p.to_gpu(ScaledTensor(act_of_parts))});
    p.run(op::GroupedGemmSwigluQuantize{.a = a,
                                        .b = b,
                                        .groups = groups,
                                        .prob = weights,
                                        .form = form,
                                        .scale_format = format,
                                        .save_h = save_h,
                                        .h = h,
                                        .act = act},
          Launch{.sm_limit =
                     format == ScaleFormat::fp32 ? 2 : 0});  // 2: one cluster, all tiles one after another
    EXPECT_TRUE(same_bytes(p.from_gpu(act.data), p.from_gpu(act_of_parts.data)));
    EXPECT_TRUE(same_bytes(p.from_gpu(act.scales), p.from_gpu(act_of_parts.scales)));
    if (backend == GemmBackend::simt) p.expect_same_bytes(ScaledTensor(act), "act");
    if (save_h == op::SaveH::no) {  // the parts write it, the fused kernel does not
        const bool one_kernel = backend == GemmBackend::native && c.contraction >= 384,
                   rows_at_all = *std::max_element(c.counts.begin(), c.counts.end()) > 0;
        EXPECT_EQ(same_bytes(p.from_gpu(h), HostTensor(DType::bf16, {rows, 2 * c.width})),
                  one_kernel || !rows_at_all);
        return;
    }
    EXPECT_TRUE(same_bytes(p.from_gpu(h), p.from_gpu(h_of_parts)));
    if (extreme) return;
    if (backend == GemmBackend::simt)
        p.expect_same_bytes(h, "h");
    else
        p.expect_close(h, 4e-6, "h");
}

TEST(ComposedParity, GroupedGemmSwigluQuantize) {
    for (const Case& c : kCases)
        for (const GemmBackend backend : {GemmBackend::simt, GemmBackend::native})
            for (const ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32})
                for (const op::SaveH save_h : {op::SaveH::yes, op::SaveH::no})
                    for (const op::GluForm& form : {op::GluForm{}, {.limit = 1.0f}, {1.702f, 1.0f, 7.0f}})
                        expect_fused_gemm(c, backend, format, save_h, false, form);
    for (const ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32})
        expect_fused_gemm({{100, 3}, 256, 384, 128}, GemmBackend::native, format, op::SaveH::no, true);
}

}  // namespace
}  // namespace fp8flow::test
