// SPDX-License-Identifier: MIT
// SwiGLU on the GPU against the reference, bit by bit: values, FP8 values, scales, dprob; groups with pads,
// empty groups and row bases.
#include "kernels/hopper/device/view.h"
#include "tests/support/parity.h"

namespace fp8flow::test {
namespace {

struct Case {
    std::vector<int64_t> counts;  // empty: no groups, `rows` rows
    int64_t rows, width;
    DType dtype;
    int64_t base;
    bool with_prob;
};

const std::vector<Case>& cases() {
    static const std::vector<Case> all = {
        {{}, 0, 128, DType::bf16, 0, true},
        {{}, 1, 128, DType::bf16, 0, true},
        {{}, 127, 384, DType::f32, 0, false},
        {{}, 129, 2048, DType::bf16, 0, true},
        {{}, 3, 8192, DType::bf16, 0, true},
        {{}, 5, 2304, DType::f32, 0, true},
        {{0, 1, 0, 127, 128, 129, 0}, 0, 256, DType::bf16, 0, true},
        {{300, 2, 0}, 0, 768, DType::bf16, 256, true},
        {{0, 0}, 0, 128, DType::bf16, 128, true},
        {{17, 40}, 0, 128, DType::f32, 128, false},
        {{}, 700, 1408, DType::bf16, 0, true},  // several rows per warp on few SMs; 2.75 steps a row
        {std::vector<int64_t>(70, 3), 0, 256, DType::bf16, 128, true},  // more groups than lanes
        // enough outputs for swiglu_rows.cu: rows of several and of many steps
        {{}, 770, 1408, DType::bf16, 0, true},
        {{}, 521, 2304, DType::bf16, 0, false},
        {{}, 37, 28672, DType::bf16, 0, true},
        {{1030, 0, 5, 200}, 0, 1024, DType::bf16, 256, true},
    };
    return all;
}
// widths that are no multiples of a block, of a unit, or of 4: plain ops only
const std::vector<Case>& ragged_cases() {
    static const std::vector<Case> all = {
        {{}, 33, 1, DType::bf16, 0, true},
        {{}, 7, 100, DType::bf16, 0, true},
        {{}, 7, 130, DType::f32, 0, true},
        {{5, 0, 140}, 0, 2052, DType::bf16, 128, true},
        {{}, 9, 200, DType::bf16, 0, false},
        {{40, 90}, 0, 528, DType::bf16, 0, true},
        {{700, 0, 1200}, 0, 528, DType::bf16, 0, true},
        {{}, 65600, 16, DType::bf16, 0, true},
    };
    return all;
}

struct Tensors {
    GroupsFixture groups;
    RowGroups row_groups;
    HostTensor h, da, prob;

    explicit Tensors(const Case& c) : groups(c.counts, 128, 5) {
        const int64_t rows = c.counts.empty() ? c.rows : c.base + groups.capacity() + 3;
        if (!c.counts.empty()) row_groups = groups;
        h = HostTensor(c.dtype, {rows, 2 * c.width});
        da = HostTensor(c.dtype, {rows, c.width});
        prob = HostTensor(DType::f32, {rows});
        fill_normal(h, 1, 3.0);
        // gates whose sigmoid is 1, small, subnormal or 0
        const double far[] = {81.0, -81.0, -87.5, -88.5, -90.0, 1e5, -1e5};
        for (int64_t i = 5; i < h.numel(); i += 331) set(h, i, far[i % 7]);
        fill_normal(da, 2, 0.01);
        fill_uniform(prob, 3, 0.0, 1.0);
        for (HostTensor* t : {&h, &da, &prob}) based(*t, c);
    }
    HostTensor like(const Case& c, int64_t cols) const {
        HostTensor t(c.dtype, {h.view().dim(0), cols});
        based(t, c);
        return t;
    }
    HostScaled fp8_like(const Case& c, DType dtype, int64_t cols) const {
        HostScaled t(dtype, {h.view().dim(0), cols}, ScaleLayout::vec128);
        if (!c.counts.empty()) t.set_row_base(c.base);
        return t;
    }
    static void based(HostTensor& t, const Case& c) {
        if (!c.counts.empty()) t.set_row_base(c.base);
    }
    TensorView prob_of(const Case& c) const { return c.with_prob ? prob.view() : TensorView{}; }
};

std::string name_of_case(const Case& c) {
    return std::to_string(c.rows) + " rows or " + std::to_string(c.counts.size()) + " groups, width " +
           std::to_string(c.width) + " " + name_of(c.dtype);
}

const op::GluForm kForms[] = {{}, {.limit = 2.0f}, {.alpha = 1.702f, .offset = 1.0f, .limit = 7.0f}};

void compare_plain(const Case& c, const op::GluForm& form = {}, const Launch& launch = {}) {
    SCOPED_TRACE(name_of_case(c));
    if (too_large_here(c.rows * c.width)) return;
    Parity p;
    const Tensors t(c);
    const HostTensor a = t.like(c, c.width), dh = t.like(c, 2 * c.width);
    HostTensor dprob(DType::f32, {t.h.view().dim(0)});
    Tensors::based(dprob, c);
    const TensorView prob = t.prob_of(c);
    const op::Swiglu forward{.h = t.h, .prob = prob, .groups = t.row_groups, .form = form, .a = a};
    p.check(forward, launch);
    const op::SwigluBackward backward{
        .da = t.da, .h = t.h, .prob = prob, .groups = t.row_groups, .form = form, .dh = dh, .dprob = dprob};
    p.check(backward, launch);
}

TEST(SwigluParity, Plain) {
    for (const op::GluForm& form : kForms) {
        for (const Case& c : cases()) compare_plain(c, form);
        for (const Case& c : ragged_cases()) compare_plain(c, form);
    }
}
// A warp has many rows then, and loads the next one while it works on a row.
TEST(SwigluParity, PlainOnOneSm) {
    for (const Case& c : cases()) compare_plain(c, {}, Launch{.sm_limit = 1});
    for (const Case& c : ragged_cases()) compare_plain(c, {}, Launch{.sm_limit = 1});
}

// Every BF16 value as a gate, 16 times. Gates that are not finite give NaN or zero in the same places.
TEST(SwigluParity, EveryGate) {
    constexpr int64_t kRows = 1024, kWidth = 1024;
    if (too_large_here(kRows * kWidth)) return;
    Parity p;
    HostTensor h(DType::bf16, {kRows, 2 * kWidth}), da(DType::bf16, {kRows, kWidth}),
        a(DType::bf16, {kRows, kWidth}), dh(DType::bf16, {kRows, 2 * kWidth}), dprob(DType::f32, {kRows}),
        prob(DType::f32, {kRows});
    fill_normal(h, 1, 3.0);
    uint16_t* const words = static_cast<uint16_t*>(h.view().data);
    for (int64_t row = 0; row < kRows; ++row)
        for (int64_t col = 0; col < kWidth; ++col)
            words[row * 2 * kWidth + col] = static_cast<uint16_t>(row * kWidth + col);
    fill_normal(da, 2, 0.01);
    fill_uniform(prob, 3, 0.0, 1.0);
    for (const op::GluForm& form : kForms) {
        p.check_values(op::Swiglu{.h = h, .prob = prob, .groups = {}, .form = form, .a = a});
        p.check_values(op::SwigluBackward{
            .da = da, .h = h, .prob = prob, .groups = {}, .form = form, .dh = dh, .dprob = dprob});
    }
}

TEST(SwigluParity, Quantized) {
    for (const Case& c : cases())
        for (const DType dtype : {DType::e4m3, DType::e5m2})
            for (const ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
                SCOPED_TRACE(name_of_case(c));
                const Launch launch{.sm_limit = dtype == DType::e4m3 ? 1 : 0};
                const op::GluForm& form = kForms[format == ScaleFormat::pow2 ? 0
                                                 : dtype == DType::e4m3      ? 1
                                                                             : 2];
                if (too_large_here(c.rows * c.width)) continue;
                Parity p;
                const Tensors t(c);
                const HostScaled a = t.fp8_like(c, dtype, c.width), dh = t.fp8_like(c, dtype, 2 * c.width);
                HostTensor dprob(DType::f32, {t.h.view().dim(0)});
                Tensors::based(dprob, c);
                const TensorView prob = t.prob_of(c);
                const TensorView dprob_or_absent = format == ScaleFormat::pow2 ? dprob.view() : TensorView{};
                p.check(op::SwigluQuantize{.h = t.h,
                                           .prob = prob,
                                           .groups = t.row_groups,
                                           .form = form,
                                           .scale_format = format,
                                           .a = a},
                        launch);
                p.check(op::SwigluBackwardQuantize{.da = t.da,
                                                   .h = t.h,
                                                   .prob = prob,
                                                   .groups = t.row_groups,
                                                   .form = form,
                                                   .scale_format = format,
                                                   .dh = dh,
                                                   .dprob = dprob_or_absent},
                        launch);
            }
}

}  // namespace
}  // namespace fp8flow::test
