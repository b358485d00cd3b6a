// The fused operations against the reference, and against their parts on the same GPU, bit by bit.
#include "tests/support/parity.h"

#include <fmt/ranges.h>

#include <vector>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;

// What the gates of a case hold: all within the range of the fast SiLU, many beyond it, or a row of infinities and NaN too.
enum class Gates { near, far, infinite };

struct Case {
    std::vector<int64_t> counts;
    int64_t width, contraction, base;  // F, K
    Gates gates = Gates::far;
    int sm_limit = 0;
    int64_t alignment = 128;  // of groups

    bool is_fused() const { return alignment == 128 && width % 128 == 0; }  // others are left to the parts
};
const std::vector<Case> kCases = {
    {{0, 1, 127, 128, 129, 0}, 256, 256, 0},
    {{0, 1, 127, 128, 129, 0}, 128, 128, 128, Gates::near},
    {{300, 2, 0}, 128, 1152, 256},
    {{0, 0}, 128, 128, 128},
    {{3, 1}, 128, 128, 0},  // small enough for the sanitizers; and two tiles for a CTA
    {{3, 1}, 128, 128, 0, Gates::far, 2},
    {{40}, 2048, 384, 0, Gates::near},
    {{129, 0, 260}, 384, 2304, 0, Gates::near},         // more steps than a warp holds scales of
    {{129, 64}, 256, 4352, 128},                        // and more than twice as many
    {{513, 0, 127, 640}, 640, 256, 0, Gates::near, 2},  // two CTAs walk over all tiles
    {{513, 0, 127, 640}, 640, 640, 256, Gates::far, 4},
    {{300, 0, 129, 1},
     384,
     128,
     0,
     Gates::near,
     2},  // products of one step, far shorter than the activation beside them
    {{40, 3, 0, 17}, 256, 256, 0, Gates::near, 0, 16},
    {{130, 7}, 192, 256, 0, Gates::near},
    {{130, 128}, 256, 256, 0, Gates::infinite},
};

void compare_fc1(const Case& c, GemmBackend backend, ScaleFormat format, op::SaveH save_h) {
    SCOPED_TRACE(fmt::format("counts {}, F {}, K {}, base {}, {}, {}, {}", fmt::join(c.counts, ","), c.width,
                             c.contraction, c.base, backend == GemmBackend::simt ? "simt" : "native",
                             format == ScaleFormat::pow2 ? "pow2" : "fp32",
                             save_h == op::SaveH::yes ? "h kept" : "h not kept"));
    const GroupsFixture groups(c.counts, c.alignment);
    const int64_t rows = c.base + groups.capacity(), G = groups.num_groups();
    if (too_large_here(rows * c.width * c.contraction / 32)) return;
    const bool with_prob = format == ScaleFormat::pow2;
    HostFp8 a(DType::e4m3, {rows, c.contraction}, L::vec128),
        b(DType::e4m3, {G, 2 * c.width, c.contraction}, L::block128),
        act(DType::e4m3, {rows, c.width}, L::vec128), act_of_parts(DType::e4m3, {rows, c.width}, L::vec128);
    HostTensor prob(DType::f32, {rows}), h(DType::bf16, {rows, 2 * c.width}),
        h_of_parts(DType::bf16, {rows, 2 * c.width});
    fill_normal(a.codes, 1, 8.0);
    fill_normal(b.codes, 3, 8.0);
    fill_uniform(prob, 5, 0.0, 1.0);
    // sums of K products of two normal values of width 8, times the scales: some tens at most, or hundreds
    const int down = c.gates == Gates::near ? 3 : 0;
    fill_pow2(a.scales, 2, -4 - down, -down);
    fill_pow2(b.scales, 4, -6 - down, -2 - down);
    if (c.gates == Gates::infinite)  // of the third row
        for (int64_t block = 0; block < c.contraction / kBlock; ++block)
            set(a.scales, block * rows + c.base + 2, 0x1.0p+127);
    if (c.base > 0) {
        for (HostFp8* t : {&a, &act, &act_of_parts}) t->set_row_base(c.base);
        for (HostTensor* t : {&prob, &h, &h_of_parts}) t->set_row_base(c.base);
    }
    const TensorView weights = with_prob ? prob.view() : TensorView{};
    const Launch launch{.sm_limit = c.sm_limit};
    Parity p;
    p.gpu.choose_kernels({.gemm = backend});
    // the parts, on the GPU alone
    const RowGroups gpu_groups = p.to_gpu(RowGroups(groups));
    p.gpu.grouped_gemm({.a = p.to_gpu(Fp8Tensor(a)),
                        .b = p.to_gpu(Fp8Tensor(b)),
                        .groups = gpu_groups,
                        .d = p.to_gpu(h_of_parts.view())});
    p.gpu.swiglu_quantize({.h = p.to_gpu(h_of_parts.view()),
                           .prob = p.to_gpu(weights),
                           .groups = gpu_groups,
                           .scale_format = format,
                           .a = p.to_gpu(Fp8Tensor(act_of_parts))});
    p.run(op::GroupedGemmSwigluQuantize{.a = a,
                                        .b = b,
                                        .groups = groups,
                                        .prob = weights,
                                        .scale_format = format,
                                        .save_h = save_h,
                                        .h = h,
                                        .act = act},
          launch);
    EXPECT_TRUE(same_bytes(p.from_gpu(act.codes), p.from_gpu(act_of_parts.codes)));
    EXPECT_TRUE(same_bytes(p.from_gpu(act.scales), p.from_gpu(act_of_parts.scales)));
    if (save_h == op::SaveH::no && c.is_fused()) {  // untouched: no part took the case
        const HostTensor poison(DType::bf16, {rows, 2 * c.width});
        EXPECT_TRUE(same_bytes(p.from_gpu(h), poison));
        return;
    }
    EXPECT_TRUE(same_bytes(p.from_gpu(h), p.from_gpu(h_of_parts)));
    if (backend == GemmBackend::simt) {
        p.expect_same_bytes(h, "h");
        p.expect_same_bytes(Fp8Tensor(act), "act");
    } else if (c.gates != Gates::infinite) {
        p.expect_close(h, 4e-6, "h");
    }
}

TEST(ComposedParity, GroupedGemmSwigluQuantize) {
    for (const Case& c : kCases)
        for (const ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
            if (c.gates != Gates::infinite) compare_fc1(c, GemmBackend::simt, format, op::SaveH::yes);
            for (const op::SaveH save_h : {op::SaveH::yes, op::SaveH::no})
                compare_fc1(c, GemmBackend::native, format, save_h);
        }
}

TEST(ComposedParity, AdamWQuantize) {
    struct Weight {
        int64_t experts, rows, cols;
        L layout;
    };
    for (const Weight& w :
         {Weight{1, 128, 128, L::block128}, Weight{3, 256, 384, L::block128}, Weight{2, 130, 72, L::row},
          Weight{1, 1, 1, L::tensor}, Weight{2, 64, 96, L::mx32}})
        for (const int32_t status_value : {0, op::kStepNonFinite}) {
            SCOPED_TRACE(fmt::format("{} x {} x {} {}, status {}", w.experts, w.rows, w.cols,
                                     name_of(w.layout), status_value));
            const auto tensor = [&](DType dtype) { return HostTensor(dtype, {w.experts, w.rows, w.cols}); };
            const HostTensor grad = tensor(DType::f32), master = tensor(DType::f32), m = tensor(DType::f32),
                             v = tensor(DType::f32), copy = tensor(DType::bf16);
            fill_normal(grad, 1, 1e-3);
            fill_normal(master, 2, 0.02);
            fill_normal(m, 3, 1e-4);
            fill_uniform(v, 4, 0, 1e-6);
            const HostTensor grad_scale = HostTensor::of<float>({0.37f}),
                             status = HostTensor::of<int32_t>({status_value});
            const HostFp8 fprop(DType::e4m3, {w.experts, w.rows, w.cols}, w.layout),
                dgrad(DType::e4m3, {w.experts, w.cols, w.rows}, w.layout);
            Parity p;
            p.run(op::AdamWQuantize{.adamw = {.grad = grad,
                                              .lr = 1e-3f,
                                              .weight_decay = 0.1f,
                                              .correction1 = 0.19f,
                                              .correction2 = 0.0975f,
                                              .grad_scale = grad_scale,
                                              .status = status,
                                              .master = master,
                                              .m = m,
                                              .v = v,
                                              .copy = copy},
                                    .fprop = fprop,
                                    .dgrad = dgrad},
                  Launch{.sm_limit = status_value == 0 ? 1 : 0});
            p.expect_same_bytes(master, "master");
            p.expect_same_bytes(m, "m");
            p.expect_same_bytes(v, "v");
            p.expect_same_bytes(copy, "copy");
            p.expect_same_bytes(Fp8Tensor(fprop), "fprop");
            p.expect_same_bytes(Fp8Tensor(dgrad), "dgrad");
        }
}

}  // namespace
}  // namespace fp8flow::test
