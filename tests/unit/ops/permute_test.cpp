// SPDX-License-Identifier: MIT
// The row movers: every byte against a gather written down row by row, the fused op against the unfused pair,
// sums in their stated order, merging probabilities and their gradient.
#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/plans.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

constexpr int64_t kAlignments[] = {1, 16, 32, 128};

void fill_random_bytes(const TensorView& view, uint64_t seed) {
    for (int64_t i = 0; i < view.bytes(); ++i)
        view.bytes_ptr()[i] = static_cast<uint8_t>(random_words(seed, 2, static_cast<uint64_t>(i))[0]);
}

// A plan, received rows, and the padded rows made of them.
struct Permuted {
    PlanFixture plan;
    HostScaled src, dst;

    Permuted(const Routing& routing, int64_t rank, int64_t alignment, DType dtype, int64_t hidden,
             ScaleLayout src_layout, DType scale_dtype = DType::e8m0, int64_t base = 0)
        : plan(routing, rank, alignment, -1, base),
          src(dtype, {routing.ranks * routing.slots, hidden}, src_layout, 0, scale_dtype),
          dst(dtype, {base + plan.groups.row_capacity, hidden},
              src_layout == ScaleLayout::none ? ScaleLayout::none : ScaleLayout::vec128) {
        fill_random_bytes(src.data, 1);
        if (src.layout != ScaleLayout::none) fill_pow2(src.scales, 2, -20, 20);
        if (base > 0) dst.set_row_base(base);
        run();
    }
    void run() {
        ReferenceOps().permute_pad(
            {.src = src, .row_source = plan.row_source, .groups = plan.groups, .dst = dst});
    }
};

// Each byte of dst: the source row in valid rows, zero in pads, untouched elsewhere.
void expect_gathered(const Permuted& p) {
    const int64_t hidden = p.dst.data.view().dim(1), rows = p.dst.data.view().dim(0);
    const int64_t width = hidden * size_of(p.dst.data.view().dtype), blocks = (hidden + 127) / 128;
    for (int64_t absolute = 0; absolute < rows; ++absolute) {
        const int64_t row = absolute - p.plan.base;
        const bool mine = row >= 0 && row < p.plan.total();
        const int64_t source = mine ? p.plan.source_of(row) : -1;
        std::vector<uint8_t> want(static_cast<std::size_t>(width), mine ? 0 : 0xFF);
        if (source >= 0) std::copy_n(p.src.data.view().bytes_ptr() + source * width, width, want.begin());
        const uint8_t* got = p.dst.data.view().bytes_ptr() + absolute * width;
        ASSERT_TRUE(std::equal(want.begin(), want.end(), got)) << "row " << row;
        if (p.dst.layout == ScaleLayout::none) continue;
        for (int64_t b = 0; b < blocks; ++b) {
            const double scale = p.dst.scales(b * rows + absolute);
            if (!mine) {
                ASSERT_TRUE(std::isnan(scale));
            } else {
                ASSERT_EQ(scale, source < 0 ? 0.0 : p.src.scales(source * blocks + b)) << "row " << row;
            }
        }
    }
}

struct Case {
    DType dtype;
    int64_t hidden;
    ScaleLayout layout;
    DType scales = DType::e8m0;
};
const Case kCases[] = {
    {DType::bf16, 24, ScaleLayout::none},
    {DType::f32, 7, ScaleLayout::none},
    {DType::e5m2, 33, ScaleLayout::none},
    {DType::e4m3, 256, ScaleLayout::vec128_wire, DType::e8m0},
    {DType::e4m3, 256, ScaleLayout::vec128_wire, DType::f32},
    {DType::e5m2, 128, ScaleLayout::vec128_wire, DType::e8m0},
};

std::vector<Routing> routings() {
    std::vector<Routing> list;
    list.push_back(Routing::random({13, 6}, 13, 2, 8, 1));
    list.push_back(Routing::random({40}, 40, 1, 4, 2));         // K = 1
    list.push_back(Routing::random({17}, 17, 1, 1, 3));         // one expert
    list.push_back(Routing::random({21, 0, 5}, 21, 6, 6, 4));   // K = E, a rank without tokens
    list.push_back(Routing::random({30, 30}, 30, 1, 8, 5, 2));  // one hot expert
    list.push_back(Routing::random({0, 0}, 5, 2, 4, 6));        // nobody
    list.push_back(Routing::random({0}, 0, 2, 4, 7));           // no slots at all
    return list;
}

TEST(PermutePad, EveryByte) {
    for (const Routing& routing : routings())
        for (const Case& c : kCases)
            for (int64_t alignment : kAlignments)
                for (int64_t rank = 0; rank < routing.ranks; ++rank)
                    for (int64_t base : {0, 128}) {
                        SCOPED_TRACE(fmt::format("{} {} alignment {} base {} ranks {} rank {}",
                                                 name_of(c.dtype), name_of(c.layout), alignment, base,
                                                 routing.ranks, rank));
                        expect_gathered(
                            Permuted(routing, rank, alignment, c.dtype, c.hidden, c.layout, c.scales, base));
                    }
}

TEST(PermutePad, NothingToPadIsTheUnpaddedResultByteForByte) {
    Routing routing(1, 64, 2, 4);  // every expert gets exactly 32 rows
    for (int64_t t = 0; t < 64; ++t)
        for (int64_t k = 0; k < 2; ++k) {
            routing.id(0, t, k) = static_cast<int32_t>((t + k) % 4);
            routing.prob(0, t, k) = 0.5f;
        }
    for (const Case& c : kCases) {
        const Permuted plain(routing, 0, 1, c.dtype, c.hidden, c.layout, c.scales);
        for (int64_t alignment : {16, 32}) {
            const Permuted padded(routing, 0, alignment, c.dtype, c.hidden, c.layout, c.scales);
            ASSERT_EQ(padded.plan.total(), plain.plan.total());
            EXPECT_TRUE(same_bytes(padded.dst.data, plain.dst.data));
            EXPECT_TRUE(c.layout == ScaleLayout::none || same_bytes(padded.dst.scales, plain.dst.scales));
        }
    }
}

TEST(PermutePad, UnfusedPairGivesTheFusedBytesAndLeavesCountsAlone) {
    for (const Routing& routing : routings())
        for (const Case& c : kCases)
            for (int64_t alignment : kAlignments)
                for (int64_t base : {0, 256}) {
                    const Permuted plain(routing, 0, 1, c.dtype, c.hidden, c.layout, c.scales, base);
                    const Permuted fused(routing, 0, alignment, c.dtype, c.hidden, c.layout, c.scales, 0);
                    HostScaled padded(c.dtype, {fused.plan.groups.row_capacity, c.hidden}, fused.dst.layout);
                    const auto counts = plain.plan.counts.bytes(), offsets = plain.plan.offsets.bytes();
                    ReferenceOps().pad_rows({.src = plain.dst,
                                             .src_groups = plain.plan.groups,
                                             .dst_groups = fused.plan.groups,
                                             .dst = padded});
                    EXPECT_TRUE(same_bytes(padded.data, fused.dst.data));
                    EXPECT_TRUE(c.layout == ScaleLayout::none || same_bytes(padded.scales, fused.dst.scales));

                    if (c.layout == ScaleLayout::none) {  // and back
                        HostTensor unpadded(c.dtype, {base + plain.plan.groups.row_capacity, c.hidden});
                        if (base > 0) unpadded.set_row_base(base);
                        ReferenceOps().unpad_rows({.src = padded.data,
                                                   .src_groups = fused.plan.groups,
                                                   .dst_groups = plain.plan.groups,
                                                   .dst = unpadded});
                        EXPECT_TRUE(same_bytes(unpadded, plain.dst.data));
                    }
                    EXPECT_EQ(plain.plan.counts.bytes(), counts);
                    EXPECT_EQ(plain.plan.offsets.bytes(), offsets);
                }
}

TEST(PermutePad, WrongArgumentsAreRefused) {
    const Routing routing = Routing::random({4}, 4, 1, 2, 1);
    Permuted p(routing, 0, 16, DType::bf16, 8, ScaleLayout::none);
    for (int64_t alignment : {0, -16}) {
        p.plan.groups.alignment = alignment;
        EXPECT_THROW(p.run(), Error) << alignment;
    }
    p.plan.groups.alignment = 16;
    EXPECT_NO_THROW(p.run());
    p.plan.groups.row_capacity += 1;  // more rows than dst has
    EXPECT_THROW(p.run(), Error);
    p.plan.groups.row_capacity -= 1;
    p.dst = HostScaled(DType::f32, {p.plan.groups.row_capacity, 8}, ScaleLayout::none);
    EXPECT_THROW(p.run(), Error);
    p.dst = HostScaled(DType::bf16, {p.plan.groups.row_capacity, 9}, ScaleLayout::none);
    EXPECT_THROW(p.run(), Error);
    Permuted fp8(routing, 0, 16, DType::e4m3, 128, ScaleLayout::vec128_wire);
    fp8.dst.layout = ScaleLayout::row;
    EXPECT_THROW(fp8.run(), Error);
}

// ---- unpermute

enum class Merging { off, on };

struct Unpermuted {
    PlanFixture plan;
    HostTensor src, dst, num_rows;

    Unpermuted(const Routing& routing, int64_t rank, int64_t alignment, DType dtype, int64_t hidden,
               Merging merging, int64_t base = 0)
        : plan(routing, rank, alignment, -1, base),
          src(dtype, {base + plan.groups.row_capacity, hidden}),
          dst(dtype, {routing.ranks * routing.slots, hidden}),
          num_rows(HostTensor::of<int64_t>({plan.received()})) {
        if (base > 0) src.set_row_base(base);
        for (int64_t row = 0; row < plan.total();
             ++row)  // pads and strangers' rows stay NaN: they must not be read
            if (plan.source_of(row) >= 0)
                for (int64_t h = 0; h < hidden; ++h)
                    set(src, (base + row) * hidden + h,
                        random_normal(3, 0, static_cast<uint64_t>(row * hidden + h)));
        ReferenceOps().unpermute_unpad({.src = src,
                                        .recv_rows = plan.recv_rows,
                                        .num_rows = num_rows,
                                        .row_prob = merging == Merging::on ? plan.row_prob : TensorView{},
                                        .dst = dst});
    }
};

TEST(UnpermuteUnpad, SumsInDoubleAndLeavesTheRest) {
    for (const Routing& routing : routings())
        for (DType dtype : {DType::f32, DType::bf16})
            for (Merging merging : {Merging::off, Merging::on})
                for (int64_t alignment : kAlignments)
                    for (int64_t base : {0, 128}) {
                        constexpr int64_t kHidden = 11;
                        const Unpermuted u(routing, routing.ranks - 1, alignment, dtype, kHidden, merging,
                                           base);
                        std::vector<double> want(static_cast<std::size_t>(u.dst.numel()), 0), size(want);
                        for (int64_t row = 0; row < u.plan.total(); ++row) {
                            if (u.plan.source_of(row) < 0) continue;
                            const double weight = merging == Merging::on ? u.plan.prob_of(row) : 1.0;
                            for (int64_t h = 0; h < kHidden; ++h) {
                                const double term = weight * u.src((base + row) * kHidden + h);
                                want[u.plan.source_of(row) * kHidden + h] += term;
                                size[u.plan.source_of(row) * kHidden + h] += std::abs(term);
                            }
                        }
                        for (int64_t i = 0; i < u.dst.numel(); ++i) {
                            if (i >= u.plan.received() * kHidden) {
                                ASSERT_TRUE(std::isnan(u.dst(i)));
                                continue;
                            }
                            const double rounding = dtype == DType::bf16 ? std::abs(want[i]) * 0x1p-8 : 0;
                            ASSERT_NEAR(u.dst(i), want[i], rounding + size[i] * 8 * 0x1p-24) << i;
                        }
                    }
}

TEST(UnpermuteUnpad, AddsInTheOrderOfRecvRows) {
    Routing routing(1, 1, 3, 3);
    for (int64_t k = 0; k < 3; ++k) {
        routing.id(0, 0, k) = static_cast<int32_t>((k + 2) % 3);  // chosen in the order 2, 0, 1
        routing.prob(0, 0, k) = 1.0f;
    }
    PlanFixture plan(routing, 0, 1);
    HostTensor src(DType::f32, {3, 1}), dst(DType::f32, {1, 1}), num_rows = HostTensor::of<int64_t>({1});
    src.as<float>()[0] = 1e8f;
    src.as<float>()[1] = -1e8f;
    src.as<float>()[2] = 1.0f;  // ascending experts: (1e8 - 1e8) + 1 = 1; the order of choice would give 0
    ReferenceOps().unpermute_unpad(
        {.src = src, .recv_rows = plan.recv_rows, .num_rows = num_rows, .dst = dst});
    EXPECT_EQ(dst(0), 1.0);
}

TEST(UnpermuteUnpad, UndoesPermuteWhenEveryTokenHasOneRow) {
    const Routing routing = Routing::random({31, 9}, 31, 1, 6, 8);
    for (int64_t rank : {0, 1})
        for (DType dtype : {DType::bf16, DType::f32}) {
            PlanFixture plan(routing, rank, 16);
            HostTensor src(dtype, {62, 5}), rows(dtype, {plan.groups.row_capacity, 5}), dst(dtype, {62, 5});
            fill_normal(src, 1);
            const HostTensor num_rows = HostTensor::of<int64_t>({plan.received()});
            ReferenceOps().permute_pad({.src = {.data = src},
                                        .row_source = plan.row_source,
                                        .groups = plan.groups,
                                        .dst = {.data = rows}});
            ReferenceOps().unpermute_unpad(
                {.src = rows, .recv_rows = plan.recv_rows, .num_rows = num_rows, .dst = dst});
            EXPECT_TRUE(
                same_bytes(dst.view().slice(0, plan.received()), src.view().slice(0, plan.received())));
        }
}

TEST(UnpermuteUnpad, RowWithoutExpertsIsZero) {
    const HostTensor src(DType::f32, {4, 3}), num_rows = HostTensor::of<int64_t>({2});
    const HostTensor recv_rows(DType::i32, {2, 2}), dst(DType::f32, {2, 3});  // all -1
    ReferenceOps().unpermute_unpad({.src = src, .recv_rows = recv_rows, .num_rows = num_rows, .dst = dst});
    for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(dst(i), 0.0);
}

// loss = sum w * y with y = merged rows: its derivative by each probability, by central differences in
// double.
TEST(UnpermuteProbsBackward, CentralDifferences) {
    constexpr int64_t kHidden = 19;
    for (const Routing& routing : routings())
        for (int64_t alignment : kAlignments)
            for (DType dtype : {DType::f32, DType::bf16})
                for (int64_t base : {0, 128}) {
                    const Unpermuted u(routing, 0, alignment, dtype, kHidden, Merging::on, base);
                    HostTensor ddst(dtype, {routing.ranks * routing.slots, kHidden});
                    fill_normal(ddst, 5);
                    HostTensor drow_prob(DType::f32, {base + u.plan.groups.row_capacity});
                    if (base > 0) drow_prob.set_row_base(base);
                    ReferenceOps().unpermute_probs_backward({.ddst = ddst,
                                                             .src = u.src,
                                                             .row_source = u.plan.row_source,
                                                             .groups = u.plan.groups,
                                                             .drow_prob = drow_prob});
                    for (int64_t row = -base; row < u.plan.groups.row_capacity; ++row) {
                        const double got = drow_prob(base + row);
                        if (row < 0 || row >= u.plan.total()) {
                            ASSERT_TRUE(std::isnan(got));
                            continue;
                        }
                        const int64_t source = u.plan.source_of(row);
                        if (source < 0) {
                            ASSERT_EQ(got, 0.0);
                            continue;
                        }
                        const auto loss = [&](double prob) {  // the terms this probability takes part in
                            double sum = 0;
                            for (int64_t h = 0; h < kHidden; ++h)
                                sum += ddst(source * kHidden + h) * prob * u.src((base + row) * kHidden + h);
                            return sum;
                        };
                        double size = 0;
                        for (int64_t h = 0; h < kHidden; ++h)
                            size += std::abs(ddst(source * kHidden + h) * u.src((base + row) * kHidden + h));
                        const double prob = u.plan.prob_of(row), step = 1e-3;
                        const double want = (loss(prob + step) - loss(prob - step)) / (2 * step);
                        ASSERT_NEAR(got, want, 1e-6 * size) << "row " << row;
                    }
                }
}

// Groups and row numbers that lie outside their tensors.
TEST(Permute, WrongNumbersAreRefused) {
    constexpr int64_t kTokens = 3, kHidden = 8;
    const GroupsFixture groups({2, 3}, 16);
    HostTensor src(DType::f32, {kTokens, kHidden}), rows(DType::f32, {32, kHidden}), probs(DType::f32, {32}),
        sums(DType::f32, {kTokens, kHidden}), row_source(DType::i32, {32}),
        recv_rows(DType::i32, {kTokens, 2}), num_rows(DType::i64, {1});
    const auto refused = [&](int which) {
        try {
            ReferenceOps ops;
            if (which == 0)
                ops.permute_pad({.src = {src}, .row_source = row_source, .groups = groups, .dst = {rows}});
            if (which == 1) ops.unpermute_unpad({rows, recv_rows, num_rows, {}, sums});
            if (which == 2)
                ops.unpermute_probs_backward({.ddst = src,
                                              .src = rows,
                                              .row_source = row_source,
                                              .groups = groups,
                                              .drow_prob = probs});
            if (which == 3) ops.pad_rows({{rows}, groups, groups, {rows}});
            if (which == 4)
                ops.quantize_rows({rows, groups, {}, {}, HostScaled(DType::e4m3, {32, 8}, ScaleLayout::row)});
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ExitCode::usage);
            return std::string(error.what());
        }
        return std::string();
    };
    src.zero(), rows.zero(), num_rows.zero();
    for (int i = 0; i < 5; ++i) EXPECT_EQ(refused(i), "") << i;  // numbers are all -1: pads
    for (const int32_t row : {3, -2}) {
        row_source.as<int32_t>()[17] = row;
        for (const int i : {0, 2})
            EXPECT_EQ(refused(i), fmt::format("row_source: number 17 is {}, want -1 to 2", row));
    }
    row_source.as<int32_t>()[17] = -1;
    recv_rows.as<int32_t>()[3] = 32;
    EXPECT_EQ(refused(1), "");  // of a token that is not there
    num_rows.as<int64_t>()[0] = 3;
    EXPECT_EQ(refused(1), "recv_rows: number 3 is 32, want -1 to 31");
    num_rows.as<int64_t>()[0] = 4;
    EXPECT_EQ(refused(1), "num_rows is 4, recv_rows i32[3, 2]");
    RowGroups inside = groups;
    inside.counts.as<int64_t>()[1] = 17;
    for (const int i : {0, 2, 3, 4})
        EXPECT_EQ(refused(i),
                  "group 1 has 17 rows from row 16 to 32, want them inside a capacity of 32, from "
                  "multiples of 16");
}

}  // namespace
}  // namespace fp8flow::test
