// SPDX-License-Identifier: MIT
// The row movers on the GPU against the reference: every byte, over edge shapes, dtypes, scale layouts, row
// bases and overflowing groups.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/permute/permute.h"
#include "tests/support/parity.h"
#include "tests/support/plans.h"

#include <string>

namespace fp8flow::test {
namespace {

struct Case {
    std::vector<int64_t> tokens;  // per rank
    int64_t topk, experts, alignment, hidden;
    int64_t row_base = 0;
    int64_t hot = -1;
    std::string name() const {
        std::string text = "tokens";
        for (int64_t t : tokens) text += " " + std::to_string(t);
        return text + ", K " + std::to_string(topk) + ", E " + std::to_string(experts) + ", align " +
               std::to_string(alignment) + ", H " + std::to_string(hidden) + ", base " +
               std::to_string(row_base) + ", hot " + std::to_string(hot);
    }
    bool skipped() const {
        int64_t routed = 0;
        for (int64_t t : tokens) routed += t * topk;
        return too_large_here(routed * hidden);
    }
    int64_t slots() const { return *std::max_element(tokens.begin(), tokens.end()); }
    Routing routing() const { return Routing::random(tokens, slots(), topk, experts, 7, hot); }
};

const std::vector<Case> kCases = {
    {{0}, 2, 4, 128, 256},
    {{1}, 1, 1, 128, 128},
    {{127}, 2, 8, 128, 384},
    {{128}, 2, 8, 16, 256, 256},
    {{129, 0, 33, 65}, 8, 64, 128, 256, 128},
    {{65, 17}, 8, 8, 128, 512, 0, 3},  // K = E
    {{40, 41}, 2, 16, 1, 200},         // rows that end inside a warp's iteration
    {{40, 41}, 2, 16, 32, 7, 384, 9},  // rows that are not whole vectors
    {{120, 92}, 6, 32, 128, 640, 256, 6},
    {{9, 5}, 2, 4, 128, 7168, 128},      // wide rows
    {{33}, 8, 16, 16, 8200, 128},        // the last slab is one unit
    {{30, 11}, 12, 16, 16, 256},         // more rows a token than are kept in registers
    {{600}, 8, 300, 1, 128},             // many groups, shorter than a range of walk_tiles
    {{700, 57}, 4, 40, 16, 1280, 0, 3},  // one group of many ranges
    {{9}, 2, 4, 16, 9216},               // more blocks of scales than a CTA loads at once
};

// Values of every bit pattern that are not NaN, so that bytes can be compared after arithmetic too.
void fill_tensor(const TensorView& view, uint64_t seed) {
    if (is_fp8(view.dtype))
        fill_uniform(view, seed, -400, 400);
    else
        fill_normal(view, seed);
}

// An M-tensor of one case: rows from row_base on, poison around them.
HostTensor rows_of(DType dtype, const Case& c, int64_t capacity, int64_t cols) {
    HostTensor rows = cols > 0 ? HostTensor(dtype, {c.row_base + capacity, cols})
                               : HostTensor(dtype, {c.row_base + capacity});
    if (c.row_base > 0) rows.set_row_base(c.row_base);
    return rows;
}

TEST(PermuteParity, PermutePadPlain) {
    for (const Case& c : kCases) {
        if (c.skipped()) continue;
        for (const DType dtype : {DType::bf16, DType::f32, DType::e4m3}) {
            SCOPED_TRACE(c.name() + " " + name_of(dtype));
            const Routing routing = c.routing();
            for (int64_t rank = 0; rank < routing.ranks; rank += std::max<int64_t>(1, routing.ranks - 1)) {
                Parity parity;
                PlanFixture plan(routing, rank, c.alignment, -1, c.row_base);
                HostTensor src(dtype, {routing.ranks * routing.slots, c.hidden});
                fill_tensor(src, 3);
                HostTensor dst = rows_of(dtype, c, plan.groups.row_capacity, c.hidden);
                const op::PermutePad args{.src = {.data = src, .scales = {}},
                                          .row_source = plan.row_source,
                                          .groups = plan.groups,
                                          .dst = {.data = dst, .scales = {}}};
                parity.check(args);
            }
        }
    }
}

TEST(PermuteParity, PermutePadFp8) {
    for (const Case& c : kCases) {
        if (c.skipped()) continue;
        for (const DType scale_dtype : {DType::e8m0, DType::f32}) {
            SCOPED_TRACE(c.name() + " scales " + name_of(scale_dtype));
            if (c.hidden % kBlock != 0) continue;
            Parity parity;
            const Routing routing = c.routing();
            PlanFixture plan(routing, routing.ranks - 1, c.alignment, -1, c.row_base);
            HostScaled src(DType::e4m3, {routing.ranks * routing.slots, c.hidden}, ScaleLayout::vec128_wire,
                           0, scale_dtype);
            fill_tensor(src.data, 5);
            if (src.scales.numel() > 0) fill_pow2(src.scales, 6, -10, 10);
            HostScaled dst(DType::e4m3, {c.row_base + plan.groups.row_capacity, c.hidden},
                           ScaleLayout::vec128);
            if (c.row_base > 0) dst.set_row_base(c.row_base);
            const op::PermutePad args{
                .src = src, .row_source = plan.row_source, .groups = plan.groups, .dst = dst};
            parity.check(args);
        }
    }
}

// permute_pad by token (fan_out.cu), as permute_pad and the local exchange run it: the same bytes.
TEST(PermuteParity, FanOut) {
    for (const Case& c : kCases) {
        for (const DType scale_dtype : {DType::bf16, DType::e8m0, DType::f32}) {
            const bool plain = scale_dtype == DType::bf16;
            if (c.skipped() || c.topk > 8 || c.hidden % (plain ? 8 : kBlock) != 0) continue;
            SCOPED_TRACE(c.name() + (plain ? "" : " scales ") + name_of(scale_dtype));
            Parity parity;
            const Routing routing = c.routing();
            const PlanFixture plan(routing, 0, c.alignment, -1, c.row_base);
            const int64_t slots = routing.ranks * routing.slots;
            const DType dtype = plain ? DType::bf16 : DType::e4m3;
            HostScaled src(dtype, {slots, c.hidden}, plain ? ScaleLayout::none : ScaleLayout::vec128_wire, 0,
                           plain ? DType::e8m0 : scale_dtype),
                dst(dtype, {c.row_base + plan.groups.row_capacity, c.hidden},
                    plain ? ScaleLayout::none : ScaleLayout::vec128);
            fill_tensor(src.data, 5);
            if (!plain && src.scales.numel() > 0) fill_pow2(src.scales, 6, -10, 10);
            if (c.row_base > 0) dst.set_row_base(c.row_base);
            const HostTensor num_rows = HostTensor::of<int64_t>({plan.received()});
            const op::PermutePad args{.src = src,
                                      .row_source = plan.row_source,
                                      .recv_rows = plan.recv_rows,
                                      .num_rows = num_rows,
                                      .groups = plan.groups,
                                      .dst = dst};
            ASSERT_TRUE(hopper::permute::launch_fan_out(parity.on_gpu(args), {.sm_limit = plain ? 1 : 0}));
            parity.cpu.permute_pad(args);
            parity.expect_same_bytes(args.dst, "dst");
        }
    }
}

TEST(PermuteParity, UnpermuteUnpad) {
    for (const Case& c : kCases) {
        if (c.skipped()) continue;
        for (const DType dtype : {DType::bf16, DType::f32}) {
            for (const bool with_prob : {false, true}) {
                SCOPED_TRACE(c.name() + " " + name_of(dtype) + (with_prob ? " with probabilities" : ""));
                Parity parity;
                const Routing routing = c.routing();
                PlanFixture plan(routing, 0, c.alignment, -1, c.row_base);
                HostTensor src = rows_of(dtype, c, plan.groups.row_capacity, c.hidden);
                fill_tensor(src, 11);
                // the other dtype out, so that mixed forms are covered
                HostTensor dst(with_prob ? DType::bf16 : dtype, {routing.ranks * routing.slots, c.hidden});
                const HostTensor num_rows = HostTensor::of<int64_t>({plan.received()});
                const op::UnpermuteUnpad args{.src = src,
                                              .recv_rows = plan.recv_rows,
                                              .num_rows = num_rows,
                                              .row_prob = with_prob ? plan.row_prob.view() : TensorView{},
                                              .dst = dst};
                parity.check(args);
            }
        }
    }
}

// The local exchange's sum: rounded before the residual or not, in place of the residual or elsewhere.
TEST(PermuteParity, SumsWithResidual) {
    for (const Case& c : kCases) {
        if (c.skipped() || c.hidden % 8 != 0 || c.topk > 8) continue;
        for (const auto rounding :
             {hopper::permute::SumRounding::once, hopper::permute::SumRounding::before_residual}) {
            for (const auto& [in_place, with_addend] :
                 {std::pair{false, false}, {true, false}, {false, true}}) {
                SCOPED_TRACE(c.name() + (in_place ? " in place" : "") + (with_addend ? " with addend" : ""));
                Parity parity;
                const Routing routing = c.routing();
                const PlanFixture plan(routing, 0, c.alignment, -1, c.row_base);
                const int64_t slots = routing.ranks * routing.slots, received = plan.received();
                const HostTensor src = rows_of(DType::bf16, c, plan.groups.row_capacity, c.hidden),
                                 residual(DType::bf16, {slots, c.hidden}),
                                 addend(DType::bf16, {slots, c.hidden}), both(DType::bf16, {slots, c.hidden}),
                                 dst(DType::bf16, {slots, c.hidden}),
                                 num_rows = HostTensor::of<int64_t>({received}),
                                 sum(rounding == hopper::permute::SumRounding::once ? DType::f32
                                                                                    : DType::bf16,
                                     {slots, c.hidden});
                fill_tensor(src, 31);
                fill_tensor(residual, 32);
                fill_tensor(addend, 33);
                if (with_addend) parity.cpu.add({.a = residual, .b = addend, .y = both});
                const TensorView y = in_place ? residual.view() : dst.view();
                op::UnpermuteUnpad args{
                    .src = src, .recv_rows = plan.recv_rows, .num_rows = num_rows, .row_prob = {}, .dst = y};
                ASSERT_TRUE(hopper::permute::launch_unpermute_sums(
                    parity.on_gpu(args),
                    {parity.to_gpu(residual), with_addend ? parity.to_gpu(addend) : TensorView{}, rounding},
                    {.sm_limit = in_place ? 2 : 0}));
                args.dst = sum;
                parity.cpu.unpermute_unpad(args);
                parity.cpu.add({.a = sum.view().slice(0, received),
                                .b = (with_addend ? both : residual).view().slice(0, received),
                                .y = y.slice(0, received)});
                parity.expect_same_bytes(y, "y");
            }
        }
    }
}

TEST(PermuteParity, UnpermuteProbsBackward) {
    for (const Case& c : kCases) {
        if (c.skipped()) continue;
        for (const DType dtype : {DType::bf16, DType::f32}) {
            SCOPED_TRACE(c.name() + " " + name_of(dtype));
            Parity parity;
            const Routing routing = c.routing();
            PlanFixture plan(routing, 0, c.alignment, -1, c.row_base);
            HostTensor ddst(DType::bf16, {routing.ranks * routing.slots, c.hidden});
            fill_tensor(ddst, 12);
            HostTensor src = rows_of(dtype, c, plan.groups.row_capacity, c.hidden);
            fill_tensor(src, 13);
            HostTensor drow_prob = rows_of(DType::f32, c, plan.groups.row_capacity, 0),
                       of_tokens = rows_of(DType::f32, c, plan.groups.row_capacity, 0);
            const HostTensor num_rows = HostTensor::of<int64_t>({plan.received()});
            op::UnpermuteProbsBackward args{.ddst = ddst,
                                            .src = src,
                                            .row_source = plan.row_source,
                                            .groups = plan.groups,
                                            .drow_prob = drow_prob};
            parity.check(args);
            args.recv_rows = plan.recv_rows;
            args.num_rows = num_rows;
            args.drow_prob = of_tokens;
            parity.check(args, {.sm_limit = c.row_base > 0 ? 1 : 0});
        }
    }
}

struct GroupCase {
    std::vector<int64_t> counts;
    int64_t alignment, hidden, base;
};
std::vector<int64_t> many_groups() {
    std::vector<int64_t> counts;
    for (int64_t g = 0; g < 70; ++g) counts.push_back(g * 37 % 101 - g % 3 * 40);
    for (int64_t& count : counts) count = std::max<int64_t>(0, count);
    return counts;
}
const std::vector<GroupCase> kGroupCases = {
    {{0}, 128, 128, 0},          {{1, 0, 0, 127, 128, 129}, 128, 256, 128},
    {{0, 0, 5}, 16, 512, 0},     {{1000, 3, 0, 77, 0}, 128, 1024, 256},
    {many_groups(), 32, 256, 0},
};

TEST(PermuteParity, PadAndUnpadRows) {
    for (const GroupCase& c : kGroupCases) {
        for (const bool fp8 : {false, true}) {
            SCOPED_TRACE("groups " + std::to_string(c.counts.size()) + (fp8 ? " fp8" : " bf16"));
            Parity parity;
            const GroupsFixture tight(c.counts, 1, 3), padded(c.counts, c.alignment, 5);
            const DType dtype = fp8 ? DType::e5m2 : DType::bf16;
            const ScaleLayout layout = fp8 ? ScaleLayout::vec128 : ScaleLayout::none;
            HostScaled src(dtype, {c.base + tight.capacity(), c.hidden}, layout),
                dst(dtype, {padded.capacity(), c.hidden}, layout);
            fill_tensor(src.data, 21);
            if (fp8) fill_uniform(src.scales, 22, 0.01, 3);
            if (c.base > 0) src.set_row_base(c.base);
            const op::PadRows pad{.src = src, .src_groups = tight, .dst_groups = padded, .dst = dst};
            parity.check(pad);

            HostTensor back(dtype, {c.base + tight.capacity(), c.hidden});
            if (c.base > 0) back.set_row_base(c.base);
            const op::UnpadRows unpad{
                .src = dst.data, .src_groups = padded, .dst_groups = tight, .dst = back};
            parity.check(unpad);
        }
    }
}

}  // namespace
}  // namespace fp8flow::test
