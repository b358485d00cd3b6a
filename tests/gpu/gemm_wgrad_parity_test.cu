// FP8 weight gradients with a scale per 128 of the contraction, which have a kernel of their own on Hopper, against the reference.
#include "kernels/ops/gemm.h"

#include "tests/support/parity.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;
using fp8flow::name_of;

// The values of the reference, and the same bits from one pair of CTAs that walks all tiles and from every repetition. What lies past the last
// group is NaN.
struct WgradCase {
    DType dy;
    L layout;
    int64_t n, k;
    std::vector<int64_t> counts;
};

void run_case(const WgradCase& c, Gradient mode) {
    SCOPED_TRACE(fmt::format("{} {} {} x {} {} counts {}", name_of(c.layout), name_of(c.dy), c.n, c.k,
                             mode == Gradient::accumulate ? "accumulate" : "overwrite",
                             fmt::join(c.counts, ",")));
    const GroupsFixture groups(c.counts, 128);
    if (too_large_here(c.n * c.k * groups.total() / 32)) return;
    const int64_t G = groups.num_groups(), rows = round_up(groups.capacity(), 128) + 128;
    const auto operand = [&](DType dtype, int64_t dim, uint64_t seed) {
        HostFp8 t(dtype, {dim, rows}, c.layout, G);
        fill(t.codes, [&](int64_t i) {
            const int64_t row = i % rows;
            if (row >= groups.total()) return std::nan("");
            return groups.is_pad(row) ? 0.0 : 8.0 * random_normal(seed, 0, static_cast<uint64_t>(i));
        });
        fill_uniform(t.scales, seed + 1, 0.25, 2.0);
        return t;
    };
    const HostFp8 dy = operand(c.dy, c.n, 41), x = operand(DType::e4m3, c.k, 43);
    std::vector<HostTensor> dw;
    for (int i = 0; i < 2; ++i) {
        dw.emplace_back(DType::f32, std::initializer_list<int64_t>{G, c.n, c.k});
        if (mode == Gradient::accumulate) fill_normal(dw.back(), 45, 5.0);
    }
    Parity parity;
    parity.gpu.choose_kernels({.gemm = GemmBackend::native});
    const auto run = [&](const HostTensor& to, int sm_limit) {
        parity.gpu.grouped_gemm_wgrad({.dy = parity.to_gpu(dy),
                                       .x = parity.to_gpu(x),
                                       .groups = parity.to_gpu(RowGroups(groups)),
                                       .mode = mode,
                                       .dw = parity.to_gpu(to.view())},
                                      {.sm_limit = sm_limit});
    };
    run(dw[0], 0);
    run(dw[1], 2);
    const HostTensor first = parity.from_gpu(dw[0].view());
    EXPECT_TRUE(same_bytes(first, parity.from_gpu(dw[1].view()))) << "one pair gave other bits";
    for (int repeat = 0; repeat < 8 && mode == Gradient::overwrite; ++repeat) {
        run(dw[1], repeat % 4 * 2);
        EXPECT_TRUE(same_bytes(first, parity.from_gpu(dw[1].view()))) << "repetition " << repeat;
    }
    parity.cpu.grouped_gemm_wgrad({.dy = dy, .x = x, .groups = groups, .mode = mode, .dw = dw[0]});
    parity.expect_close(dw[0], 1e-7, "dw");
}

TEST(WgradKernels, ShortAndLongContractions) {
    // contractions of 0, 1, 2, 3, 6, 10, 17 and 34 blocks of 128
    const std::vector<int64_t> mixed = {0, 1153, 1, 256, 0, 130}, uneven = {700, 0, 0, 2100}, none = {0, 0},
                               long_one = {0, 4300, 1}, short_ones = {1, 384, 0, 0, 128, 300, 257, 1, 0};
    const std::vector<WgradCase> cases = {
        {DType::e4m3, L::tile128, 300, 520, mixed},   // odd numbers of row and column tiles, both cut
        {DType::e5m2, L::tile128, 256, 264, uneven},  // whole pairs; no columns for a warpgroup of the last
        {DType::e4m3, L::tile128, 40, 12, mixed},     // less than one warpgroup's part
        {DType::e4m3, L::tile128, 130, 134, uneven},  // rows of D of 8 bytes: the common kernel
        {DType::e4m3, L::tile128, 300, 520, none},
        {DType::e5m2, L::tile128, 390, 780, short_ones},  // many tiles a CTA, each of one to three blocks
        {DType::e4m3, L::tile128, 140, 300, long_one},    // scales of more than 32 blocks
        {DType::e4m3, L::vec128, 128, 256, mixed},        // a second CTA past the last column
        {DType::e5m2, L::vec128, 256, 512, uneven},
        {DType::e4m3, L::vec128, 384, 768, none},
        {DType::e5m2, L::vec128, 384, 768, short_ones},
    };
    for (const WgradCase& c : cases)
        for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate}) run_case(c, mode);
}

}  // namespace
}  // namespace fp8flow::test
