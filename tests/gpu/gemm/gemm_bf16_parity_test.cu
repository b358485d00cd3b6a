// SPDX-License-Identifier: MIT
// Grouped BF16 GEMMs on wgmma against the reference: tiles cut on every side, groups of no, one and many
// rows, contractions of one stage and of many, partial stages, several tiles a cluster. Pads and rows past
// the last group are NaN. Every call is made twice from the same memory and must give the same bits, with two
// SMs as with all.
#include "tests/support/parity.h"
#include "tests/support/products.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>

namespace fp8flow::test {
namespace {

using op::GemmForm;

const std::vector<std::vector<int64_t>> kCounts = {
    {300, 0, 129, 3, 1}, {0, 640, 64, 65}, {1, 127, 0, 257}, {128, 256}, {0, 0}};

// Normal values in the rows of the groups, NaN elsewhere.
void fill_rows(const HostTensor& t, const GroupsFixture& groups, int64_t base, uint64_t seed) {
    const int64_t width = t.view().dim(1);
    fill(t, [&](int64_t i) {
        const int64_t row = i / width - base;
        if (row < 0 || row >= groups.total() || groups.is_pad(row)) return std::nan("");
        return double{random_normal(seed, 0, static_cast<uint64_t>(i))};
    });
}

// `call` with all SMs and with one cluster: what it writes to d is close to the reference, and the same bits.
template <class Args> void expect_close_and_equal(const Args& args, const TensorView& d, double bound) {
    std::vector<HostTensor> results;
    const HostTensor before = [&] {
        HostTensor copy(d.dtype, d.dims, d.rank);
        std::memcpy(copy.view().data, d.data, static_cast<std::size_t>(d.bytes()));
        return copy;
    }();
    for (const int sm_limit : {0, 2}) {
        std::memcpy(d.data, before.view().data, static_cast<std::size_t>(d.bytes()));
        Parity parity;
        parity.gpu.choose_kernels({.gemm = GemmBackend::native});
        if (sm_limit == 0) {
            parity.run(args);
            parity.expect_close(d, bound, "d");
        } else {
            call(parity.gpu, parity.on_gpu(args), {.sm_limit = sm_limit});
        }
        results.push_back(parity.from_gpu(d));
    }
    EXPECT_TRUE(same_bytes(results[0], results[1])) << "one cluster gave other bits";
}

void run_rows(const std::vector<int64_t>& counts, int64_t alignment, GemmForm form, int64_t n, int64_t k,
              DType dtype) {
    SCOPED_TRACE(fmt::format("rows, form {}, align {}, {} x {} -> {}, counts {}", static_cast<int>(form),
                             alignment, n, k, name_of(dtype), fmt::join(counts, ",")));
    const GroupsFixture groups(counts, alignment, 5);
    if (too_large_here(groups.total() * n * k / 32)) return;
    const int64_t G = groups.num_groups(), base = 7;
    HostScaled a(DType::bf16, {base + groups.capacity(), k}, ScaleLayout::none);
    HostScaled b = form == GemmForm::nt ? HostScaled(DType::bf16, {G, n, k}, ScaleLayout::none)
                                        : HostScaled(DType::bf16, {G, k, n}, ScaleLayout::none);
    fill_rows(a.data, groups, base, 51);
    fill_normal(b.data, 52, 1.0);
    a.set_row_base(base);
    HostTensor d(dtype, {groups.capacity(), n});
    expect_close_and_equal(op::GroupedGemm{.a = a, .b = b, .groups = groups, .form = form, .d = d}, d,
                           bound_of(dtype, static_cast<std::size_t>(d.numel())));
}

TEST(GroupedBf16, ForwardAndDataGradient) {
    for (const auto& counts : kCounts) {
        for (const DType dtype : {DType::bf16, DType::f32}) {
            run_rows(counts, 16, GemmForm::nt, 520, 328, dtype);  // six stages, the last one cut
            run_rows(counts, 1, GemmForm::nt, 264, 64, dtype);    // every stage a tile's first and last
            run_rows(counts, 128, GemmForm::nn, 520, 128, dtype);
            run_rows(counts, 16, GemmForm::nn, 296, 256, dtype);
            run_rows(counts, 16, GemmForm::nn, 40, 192, dtype);  // less than half a tile's columns
        }
    }
}

void run_wgrad(const std::vector<int64_t>& counts, int64_t alignment, int64_t n, int64_t k, Gradient mode) {
    SCOPED_TRACE(fmt::format("weight gradient, align {}, {} x {} {}, counts {}", alignment, n, k,
                             mode == Gradient::accumulate ? "accumulate" : "overwrite",
                             fmt::join(counts, ",")));
    const GroupsFixture groups(counts, alignment, 5);
    if (too_large_here(groups.total() * n * k / 32)) return;
    const int64_t dy_base = 3, x_base = 70;
    HostScaled dy(DType::bf16, {dy_base + groups.capacity(), n}, ScaleLayout::none),
        x(DType::bf16, {x_base + groups.capacity() + 9, k}, ScaleLayout::none);
    fill_rows(dy.data, groups, dy_base, 61);
    fill_rows(x.data, groups, x_base, 62);
    dy.set_row_base(dy_base);
    x.set_row_base(x_base);
    HostTensor dw(DType::f32, {groups.num_groups(), n, k});
    if (mode == Gradient::accumulate) fill_normal(dw, 63, 20.0);
    expect_close_and_equal(op::GroupedGemmWgrad{.dy = dy, .x = x, .groups = groups, .mode = mode, .dw = dw},
                           dw, 1e-7);
}

TEST(GroupedBf16, WeightGradients) {
    for (const auto& counts : kCounts) {
        for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            run_wgrad(counts, 16, 296, 520, mode);  // odd numbers of row and column tiles, both cut
            run_wgrad(counts, 1, 256, 264,
                      mode);  // even numbers of tiles; no columns for one warpgroup of the last
            run_wgrad(counts, 64, 128, 512, mode);
            run_wgrad(counts, 16, 40, 8, mode);  // less than one warpgroup's part
        }
    }
    // as many stages as the rings hold, and some more than twice as many
    for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate})
        run_wgrad({512, 1153, 0, 511}, 16, 264, 136, mode);
}

}  // namespace
}  // namespace fp8flow::test
