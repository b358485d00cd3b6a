// SPDX-License-Identifier: MIT
// FP8 weight gradients with a scale per 128 of the contraction (gemm/sm90/fp8_wgrad.cu) against the
// reference.
#include "kernels/hopper/device/view.h"
#include "kernels/ops/gemm.h"

#include "tests/support/parity.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;
using fp8flow::name_of;

struct Formats {
    DType dy, x;
    L layout;
};

// The rows of one micro-batch and their operands, from a row base on. FP8 copies have zeros in their pads;
// rows before the first group and past the last are NaN.
struct Rows {
    GroupsFixture groups;
    HostScaled dy, x;

    Rows(const std::vector<int64_t>& counts, int64_t base, const Formats& f, int64_t n, int64_t k,
         uint64_t seed)
        : groups(counts, 128),
          dy(operand(base, f.dy, f.layout, n, seed)),
          x(operand(base, f.x, f.layout, k, seed + 2)) {}

    HostScaled operand(int64_t base, DType dtype, L layout, int64_t dim, uint64_t seed) const {
        const bool fp8 = is_fp8(dtype);
        const int64_t rows = base + round_up(groups.capacity(), 128) + 128;
        HostScaled t = fp8 ? HostScaled(dtype, {dim, rows}, layout, groups.num_groups())
                           : HostScaled(dtype, {rows, dim}, layout);
        fill(t.data, [&](int64_t i) {
            const int64_t row = (fp8 ? i % rows : i / dim) - base;
            if (row < 0 || row >= groups.total() || (!fp8 && groups.is_pad(row))) return std::nan("");
            return groups.is_pad(row) ? 0.0 : 8.0 * random_normal(seed, 0, static_cast<uint64_t>(i));
        });
        if (t.scales.view().dtype == DType::e8m0)
            fill_pow2(t.scales, seed + 1, -2, 2);
        else if (t.scales.view())
            fill_uniform(t.scales, seed + 1, 0.25, 2.0);
        if (base > 0) t.set_row_base(base);
        return t;
    }
};

struct WgradCase {
    Formats formats;
    int64_t n, k;
    std::vector<int64_t> counts, second;  // of the second micro-batch; empty: there is none
    size_t micro_batches = 2;             // with a second one; those after it have the counts of both in turn
};

std::vector<Rows> sets_of(const WgradCase& c) {
    std::vector<Rows> sets;
    for (size_t i = 0; i < (c.second.empty() ? 1 : c.micro_batches); ++i)
        sets.emplace_back(i % 2 == 0 ? c.counts : c.second, 256 * static_cast<int64_t>(i % 3), c.formats, c.n,
                          c.k, 41 + 10 * i);
    return sets;
}

op::GroupedGemmWgrad call_of(const std::vector<Rows>& sets, Gradient mode, const TensorView& dw) {
    op::GroupedGemmWgrad args{
        .dy = sets[0].dy, .x = sets[0].x, .groups = sets[0].groups, .mode = mode, .dw = dw};
    for (size_t i = 1; i < sets.size(); ++i)
        (i == 1 ? args.second : args.more[i - 2]) =
            op::WgradOperands{.dy = sets[i].dy, .x = sets[i].x, .groups = sets[i].groups};
    return args;
}

// Sums of squares [G, ceil(n/128), ceil(k/128), 4], NaN at first.
HostTensor squares_for(int64_t groups, int64_t n, int64_t k) {
    const auto [g, r, c, w] = op::squares_shape(groups, n, k);
    HostTensor squares(DType::f64, {g, r, c, w});
    fill(squares, [](int64_t) { return std::nan(""); });
    return squares;
}

// The reference's sums of squares of a gradient as it is: groups without rows add nothing to it.
HostTensor squares_of(const HostTensor& dw) {
    const int64_t groups = dw.view().dim(0), n = dw.view().dim(1), k = dw.view().dim(2);
    const GroupsFixture none(std::vector<int64_t>(static_cast<size_t>(groups)), 128);
    const HostTensor dy(DType::f32, {none.capacity(), n}), x(DType::f32, {none.capacity(), k});
    HostTensor squares = squares_for(groups, n, k);
    ReferenceOps().grouped_gemm_wgrad({.dy = {.data = dy},
                                       .x = {.data = x},
                                       .groups = none,
                                       .mode = Gradient::accumulate,
                                       .dw = dw,
                                       .squares = squares});
    return squares;
}

// The call once more, now with sums of squares: the gradient that `run` gave without, and its squares in the
// reference's order, on all SMs and on one cluster.
template <class Run>
void expect_squares(Parity& parity, const HostTensor& wanted, const HostTensor& before, Run run) {
    const int64_t groups = wanted.view().dim(0), n = wanted.view().dim(1), k = wanted.view().dim(2);
    const HostTensor wanted_squares = squares_of(wanted);
    std::deque<HostTensor> kept;  // parity knows tensors by their addresses
    for (const int sm_limit : {0, 2}) {
        SCOPED_TRACE(fmt::format("squares, {} SMs", sm_limit));
        const HostTensor& dw =
            kept.emplace_back(wanted.view().dtype, std::initializer_list<int64_t>{groups, n, k});
        std::memcpy(dw.view().data, before.view().data, static_cast<size_t>(before.view().bytes()));
        const HostTensor& squares = kept.emplace_back(squares_for(groups, n, k));
        run(dw, squares, sm_limit);
        EXPECT_TRUE(same_bytes(parity.from_gpu(dw.view()), wanted)) << "squares change the gradient";
        EXPECT_TRUE(same_bytes(parity.from_gpu(squares.view()), wanted_squares));
    }
}

// The values of the reference, and the same bits from one cluster for all tiles and from every repetition.
void run_case(const WgradCase& c, Gradient mode, GemmBackend backend = GemmBackend::native) {
    SCOPED_TRACE(fmt::format("{} {} {} x {} {} counts {} and {}, {} sets", name_of(c.formats.layout),
                             name_of(c.formats.dy), c.n, c.k,
                             mode == Gradient::accumulate ? "accumulate" : "overwrite",
                             fmt::join(c.counts, ","), fmt::join(c.second, ","), c.micro_batches));
    const std::vector<Rows> sets = sets_of(c);
    int64_t total = 0;
    for (const Rows& set : sets) total += set.groups.total();
    if (too_large_here(c.n * c.k * total / 32)) return;
    const auto G = static_cast<int64_t>(c.counts.size());
    std::vector<HostTensor> dw;
    for (int i = 0; i < 2; ++i) {
        dw.emplace_back(DType::f32, std::initializer_list<int64_t>{G, c.n, c.k});
        if (mode == Gradient::accumulate) fill_normal(dw.back(), 45, 5.0);
    }
    const auto call = [&](const HostTensor& to) { return call_of(sets, mode, to.view()); };
    Parity parity;
    parity.gpu.choose_kernels({.gemm = backend});
    const auto run = [&](const HostTensor& to, int sm_limit) {
        parity.gpu.grouped_gemm_wgrad(parity.on_gpu(call(to)), {.sm_limit = sm_limit});
    };
    run(dw[0], 0);
    run(dw[1], 2);
    const HostTensor first = parity.from_gpu(dw[0].view());
    EXPECT_TRUE(same_bytes(first, parity.from_gpu(dw[1].view()))) << "one cluster gave other bits";
    for (int repeat = 0; repeat < 8 && mode == Gradient::overwrite; ++repeat) {
        run(dw[1], repeat % 4 * 2);
        EXPECT_TRUE(same_bytes(first, parity.from_gpu(dw[1].view()))) << "repetition " << repeat;
    }
    HostTensor before(DType::f32, {G, c.n, c.k});
    if (mode == Gradient::accumulate) fill_normal(before, 45, 5.0);
    expect_squares(parity, first, before, [&](const HostTensor& to, const HostTensor& squares, int sm_limit) {
        op::GroupedGemmWgrad args = call(to);
        args.squares = squares;
        parity.gpu.grouped_gemm_wgrad(parity.on_gpu(args), {.sm_limit = sm_limit});
    });
    parity.cpu.grouped_gemm_wgrad(call(dw[0]));
    parity.expect_close(dw[0], 1e-7, "dw");
}

// dw in BF16: the bits of the kernel's own FP32 sums, to nearest, or added to the old value and rounded by
// the counters of their places.
void run_rounded(const WgradCase& c, Gradient mode, GemmBackend backend = GemmBackend::native) {
    SCOPED_TRACE(fmt::format("BF16: {} {} {} x {} {} counts {} and {}, {} sets", name_of(c.formats.layout),
                             name_of(c.formats.dy), c.n, c.k,
                             mode == Gradient::accumulate ? "accumulate" : "overwrite",
                             fmt::join(c.counts, ","), fmt::join(c.second, ","), c.micro_batches));
    const std::vector<Rows> sets = sets_of(c);
    int64_t total = 0;
    for (const Rows& set : sets) total += set.groups.total();
    if (too_large_here(c.n * c.k * total / 32)) return;
    const auto G = static_cast<int64_t>(c.counts.size());
    HostTensor sums(DType::f32, {G, c.n, c.k}), dw(DType::bf16, {G, c.n, c.k}),
        again(DType::bf16, {G, c.n, c.k});
    fill_normal(dw, 46, 5.0);
    fill_normal(again, 46, 5.0);
    HostTensor wanted(DType::bf16, {G, c.n, c.k});
    Parity parity;
    parity.gpu.choose_kernels({.gemm = backend});
    const StochasticRounding rounding{.key = 0xFEDCBA9876543210ull, .first = 5 * c.n};
    const auto run = [&](const HostTensor& to, Gradient how, int sm_limit, const TensorView& squares = {}) {
        op::GroupedGemmWgrad args = call_of(sets, how, to.view());
        args.rounding = rounding;
        args.squares = squares;
        parity.gpu.grouped_gemm_wgrad(parity.on_gpu(args), {.sm_limit = sm_limit});
    };
    run(sums, Gradient::overwrite, 0);
    const HostTensor exact = parity.from_gpu(sums.view());
    for (int64_t row = 0; row < G * c.n; ++row) {
        const uint32_t counter = rounding_row(rounding.key, rounding.first + row);
        for (int64_t col = 0; col < c.k; ++col) {
            const int64_t i = row * c.k + col;
            const float sum = exact.as<float>()[i], old = to_float(dw.as<Bf16>()[i]);
            wanted.as<Bf16>()[i] = mode == Gradient::accumulate
                                       ? round_stochastically(old + sum, rounding_bits(counter, col))
                                       : to_bf16(sum);
        }
    }
    run(dw, mode, 0);
    run(again, mode, 2);
    EXPECT_TRUE(same_bytes(parity.from_gpu(dw.view()), wanted));
    EXPECT_TRUE(same_bytes(parity.from_gpu(again.view()), wanted)) << "one cluster gave other bits";
    HostTensor before(DType::bf16, {G, c.n, c.k});
    fill_normal(before, 46, 5.0);
    expect_squares(parity, wanted, before,
                   [&](const HostTensor& to, const HostTensor& sums_of, int sm_limit) {
                       run(to, mode, sm_limit, sums_of);
                   });
}

// What is not finite shows in the norm, wherever it lies in a patch.
TEST(WgradKernels, SquaresOfWhatIsNotFinite) {
    constexpr Formats kBf16 = {DType::bf16, DType::bf16, L::none};
    for (const int64_t column : {0, 77, 130, 519}) {
        const Rows rows({0, 300, 200}, 0, kBf16, 300, 520, 41);
        set(rows.x.data.view(), (rows.groups.first(1) + 5) * 520 + column, INFINITY);
        HostTensor dw(DType::f32, {3, 300, 520}), squares = squares_for(3, 300, 520);
        const HostTensor sum = HostTensor::of<float>({0.0f});
        Parity parity;
        parity.gpu.grouped_gemm_wgrad(parity.on_gpu(op::GroupedGemmWgrad{
            .dy = rows.dy, .x = rows.x, .groups = rows.groups, .dw = dw, .squares = squares}));
        parity.gpu.add_squares(parity.on_gpu(op::AddSquares{.squares = squares, .sum = sum}));
        EXPECT_EQ(parity.from_gpu(sum.view()).as<float>()[0], INFINITY) << column;
    }
}

constexpr Gradient kModes[] = {Gradient::overwrite, Gradient::accumulate};
constexpr Formats kTilesE4m3 = {DType::e4m3, DType::e4m3, L::tile128},
                  kTilesE5m2 = {DType::e5m2, DType::e4m3, L::tile128},
                  kColumnsE4m3 = {DType::e4m3, DType::e4m3, L::vec128},
                  kColumnsE5m2 = {DType::e5m2, DType::e4m3, L::vec128};

TEST(WgradKernels, ShortAndLongContractions) {
    // contractions of 0, 1, 2, 3, 6, 10, 17 and 34 blocks of 128
    const std::vector<int64_t> mixed = {0, 1153, 1, 256, 0, 130}, uneven = {700, 0, 0, 2100}, none = {0, 0},
                               long_one = {0, 4300, 1}, short_ones = {1, 384, 0, 0, 128, 300, 257, 1, 0};
    const std::vector<WgradCase> cases = {
        {kTilesE4m3, 300, 520, mixed, {}},  // odd numbers of row and column tiles, both cut
        {kTilesE5m2,
         256,
         264,
         uneven,
         {}},                             // even numbers of tiles; no columns for one warpgroup of the last
        {kTilesE4m3, 40, 12, mixed, {}},  // less than one warpgroup's part
        {kTilesE4m3, 130, 134, uneven, {}},  // rows of D of 8 bytes: the general kernel
        {kTilesE4m3, 300, 520, none, {}},
        {kTilesE5m2, 390, 780, short_ones, {}},  // many tiles a CTA, each of one to three blocks
        {kTilesE4m3, 140, 300, long_one, {}},    // scales of more than 32 blocks
        {kTilesE4m3, 300, 520, {1153}, {}},      // one group, few outputs: fp8_wgrad_small.cu, odd steps
        {kTilesE5m2, 256, 264, {4300}, {}},      // the same, more than 32 steps
        {kTilesE4m3, 768, 1024, {256}, {}},      // 96 tiles
        {kTilesE4m3, 40, 12, {0}, {}},
        {kColumnsE4m3, 128, 256, mixed, {}},  // a second CTA past the last column
        {kColumnsE5m2, 256, 512, uneven, {}},
        {kColumnsE4m3, 256, 640, mixed, {}},  // no columns for the second warpgroup of the last tile
        {kColumnsE5m2, 384, 128, short_ones, {}},
        {kColumnsE4m3, 384, 768, none, {}},
        {kColumnsE5m2, 384, 768, short_ones, {}},
    };
    for (const WgradCase& c : cases)
        for (const Gradient mode : kModes) run_case(c, mode);
}

// Every kernel that writes weight gradients, and several sets of operands where one call takes all.
TEST(WgradKernels, Bf16IsTheFp32SumRoundedOnce) {
    const std::vector<int64_t> mixed = {0, 1153, 1, 256, 0, 130}, uneven = {700, 0, 0, 2100},
                               short_ones = {1, 384, 0, 0, 128, 300, 257, 1, 0},
                               lengths = {512, 640, 641, 768, 1, 129, 385, 4300};
    constexpr Formats kBf16 = {DType::bf16, DType::bf16, L::none},
                      kRows = {DType::e4m3, DType::e4m3, L::group_row},
                      kTensor = {DType::e5m2, DType::e4m3, L::tensor};
    const std::vector<WgradCase> cases = {
        {kTilesE4m3, 300, 520, mixed, {}},
        {kTilesE5m2, 256, 264, uneven, {}},
        {kTilesE4m3, 40, 16, mixed, {}},
        {kTilesE4m3, 130, 136, uneven, {}},
        {kTilesE5m2, 390, 776, short_ones, {}},
        {kTilesE4m3, 256, 512, lengths, {}},
        {kTilesE4m3, 300, 520, {1153}, {}},  // FP32 sums by fp8_wgrad_small.cu, BF16 by fp8_wgrad.cu
        {kTilesE5m2, 256, 264, {4300}, {}},
        {kColumnsE4m3, 128, 256, mixed, {}},
        {kColumnsE5m2, 256, 512, lengths, {}},
        {kColumnsE4m3, 256, 384, lengths, {}},
        {kBf16, 300, 520, mixed, {}},
        {kBf16, 256, 512, lengths, {}},
        {kBf16, 130, 136, short_ones, {}},
        {kRows, 300, 520, mixed, {}},
        {kTensor, 256, 512, uneven, {}},
        {kTilesE4m3, 300, 520, mixed, {0, 0, 700, 1, 128, 300}},
        {kColumnsE4m3, 256, 512, mixed, {0, 0, 700, 1, 128, 300}},
        {kTilesE4m3, 300, 520, mixed, {0, 0, 700, 1, 128, 300}, 3},
        {kColumnsE4m3, 256, 512, mixed, {0, 0, 700, 1, 128, 300}, 8},
    };
    for (const WgradCase& c : cases)
        for (const Gradient mode : kModes) run_rounded(c, mode);
    for (const Gradient mode : kModes)
        for (const GemmBackend backend : {GemmBackend::alternative, GemmBackend::simt}) {
            run_rounded({kTilesE4m3, 300, 520, mixed, {}}, mode, backend);
            run_rounded({kBf16, 130, 133, mixed, {}}, mode, backend);
        }
}

// Groups that are empty in the first, in the second and in all; the border between the two before, at and
// after the 32nd block.
TEST(WgradKernels, SeveralMicroBatches) {
    const std::vector<int64_t> mixed = {0, 1153, 1, 256, 0, 130}, other = {0, 0, 700, 1, 128, 300},
                               none = {0, 0, 0, 0, 0, 0}, short_ones = {1, 384, 0, 0, 128, 300},
                               long_one = {4300, 100, 4096, 0, 3, 2050},
                               long_other = {200, 4200, 130, 4500, 0, 2100};
    const std::vector<WgradCase> cases = {
        {kTilesE4m3, 300, 520, mixed, other},        {kTilesE5m2, 256, 264, other, mixed},
        {kTilesE4m3, 300, 520, mixed, none},         {kTilesE5m2, 300, 520, none, mixed},
        {kTilesE4m3, 300, 520, none, none},          {kTilesE5m2, 390, 780, short_ones, short_ones},
        {kTilesE4m3, 130, 134, mixed, other},  // rows of D of 8 bytes: two calls of the general kernel
        {kTilesE4m3, 40, 20, long_one, long_other},  {kColumnsE4m3, 128, 256, mixed, other},
        {kColumnsE5m2, 256, 512, other, mixed},      {kColumnsE4m3, 256, 640, mixed, other},
        {kColumnsE4m3, 384, 768, none, mixed},       {kColumnsE5m2, 384, 768, short_ones, short_ones},
        {kColumnsE4m3, 128, 256, none, none},        {kTilesE4m3, 300, 520, mixed, other, 3},
        {kTilesE5m2, 300, 520, none, mixed, 4},      {kTilesE4m3, 40, 20, long_one, long_other, 5},
        {kTilesE5m2, 390, 780, short_ones, none, 8}, {kColumnsE5m2, 256, 512, other, mixed, 3},
        {kColumnsE4m3, 256, 640, none, mixed, 8},    {kTilesE4m3, 130, 134, mixed, other, 3},
    };
    for (const WgradCase& c : cases)
        for (const Gradient mode : kModes) run_case(c, mode);
}

// Weight gradients that run as a call for each.
TEST(WgradKernels, SeveralMicroBatchesOfOtherKinds) {
    const std::vector<int64_t> counts = {0, 153, 1, 256, 0}, other = {0, 0, 300, 1, 128};
    for (const GemmBackend backend : {GemmBackend::native, GemmBackend::simt})
        for (const Formats& f :
             {Formats{DType::bf16, DType::bf16, L::none}, Formats{DType::f32, DType::f32, L::none},
              Formats{DType::e4m3, DType::e4m3, L::tile128}, Formats{DType::e5m2, DType::e4m3, L::group_row},
              Formats{DType::e4m3, DType::e4m3, L::mx32}, Formats{DType::e4m3, DType::e4m3, L::tensor}})
            for (const Gradient mode : kModes) run_case({f, 136, 72, counts, other, 3}, mode, backend);
}

}  // namespace
}  // namespace fp8flow::test
