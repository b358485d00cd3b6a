// SPDX-License-Identifier: MIT
// What must not change a bit of a grouped GEMM: repetition, the SM limit, and how many rows the other groups
// have. Kernels of this project, every kind of operand that has a kernel of its own.
#include "tests/support/parity.h"
#include "tests/support/products.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstring>
#include <tuple>
#include <vector>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;
using op::GemmForm;

struct Rows {
    const char* name;
    DType dtype;
    L a, b;
    GemmForm form;
    int64_t alignment;
};
const Rows kRows[] = {
    {"bf16", DType::bf16, L::none, L::none, GemmForm::nt, 1},
    {"bf16 nn", DType::bf16, L::none, L::none, GemmForm::nn, 16},
    {"fp8 blocks", DType::e4m3, L::vec128, L::block128, GemmForm::nt, 128},
    {"fp8 rows", DType::e4m3, L::row, L::row, GemmForm::nt, 16},
    {"fp8 tensor", DType::e5m2, L::tensor, L::tensor, GemmForm::nt, 16},
    {"mxfp8", DType::e4m3, L::mx32, L::mx32, GemmForm::nt, 32},
};
struct Columns {
    const char* name;
    DType dtype;
    L layout;
    int64_t alignment;
};
const Columns kColumns[] = {
    {"bf16", DType::bf16, L::none, 16},
    {"fp8 tiles", DType::e4m3, L::tile128, 128},
    {"fp8 columns of a block", DType::e4m3, L::vec128, 128},
    {"fp8 columns of a group", DType::e4m3, L::group_row, 16},
    {"fp8 tensor", DType::e4m3, L::tensor, 16},
    {"mxfp8", DType::e4m3, L::mx32, 32},
};
constexpr int64_t kN = 528, kK = 768;

// One grouped GEMM with its operands on the host and on the GPU.
struct RowsGemm {
    RowsGemm(const Rows& rows, const std::vector<int64_t>& counts)
        : groups(counts, rows.alignment),
          form(rows.form),
          a(rows.dtype, {round_up(groups.capacity(), 16), kK}, rows.a),
          b(rows.form == GemmForm::nt ? HostScaled(rows.dtype, {groups.num_groups(), kN, kK}, rows.b)
                                      : HostScaled(rows.dtype, {groups.num_groups(), kK, kN}, rows.b)),
          d(DType::bf16, {groups.capacity(), kN}) {
        fill_operand(a, 1);
        fill_operand(b, 2);
    }
    HostTensor run(const Launch& launch = {}) {
        const auto args =
            parity.on_gpu(op::GroupedGemm{.a = a, .b = b, .groups = groups, .form = form, .d = d});
        parity.gpu.device().fill(args.d.data, 0xFF, static_cast<std::size_t>(args.d.bytes()));
        parity.gpu.grouped_gemm(args, launch);
        return parity.from_gpu(d);
    }
    GroupsFixture groups;
    GemmForm form;
    HostScaled a, b;
    HostTensor d;
    Parity parity;
};

struct WgradGemm {
    WgradGemm(const Columns& columns, const std::vector<int64_t>& counts)
        : groups(counts, columns.alignment),
          dy(operand(columns, kN)),
          x(operand(columns, kK)),
          dw(DType::f32, {groups.num_groups(), kN, kK}) {
        fill_operand(dy, 1);
        fill_operand(x, 2);
        zero_pads(dy, groups);
        zero_pads(x, groups);
    }
    HostScaled operand(const Columns& columns, int64_t width) const {
        return wgrad_operand(columns.dtype, width, round_up(groups.capacity(), 128), columns.layout,
                             groups.num_groups());
    }
    HostTensor run(Gradient mode = Gradient::overwrite, const Launch& launch = {}) {
        const auto args =
            parity.on_gpu(op::GroupedGemmWgrad{.dy = dy, .x = x, .groups = groups, .mode = mode, .dw = dw});
        parity.gpu.device().fill(args.dw.data, mode == Gradient::overwrite ? 0xFF : 0x3F,
                                 static_cast<std::size_t>(args.dw.bytes()));
        parity.gpu.grouped_gemm_wgrad(args, launch);
        return parity.from_gpu(dw);
    }
    GroupsFixture groups;
    HostScaled dy, x;
    HostTensor dw;
    Parity parity;
};

const std::vector<int64_t> kCounts = {300, 0, 129, 3, 260};
constexpr int kLimits[] = {1, 2, 3, 5, 16, 31, 131, 132, 1000};

// Tiles divided evenly, or taken from a queue that every call leaves as it was.
TEST(GemmInvariance, SmLimitAndTileQueue) {
    for (const Rows& rows : kRows) {
        RowsGemm gemm(rows, kCounts);
        const HostTensor all = gemm.run();
        for (const int limit : kLimits)
            for (const bool shared : {false, true})
                EXPECT_TRUE(same_bytes(all, gemm.run({.sm_limit = limit, .shared_device = shared})))
                    << rows.name << ", " << limit << ", " << shared;
    }
    for (const Columns& columns : kColumns) {
        WgradGemm gemm(columns, kCounts);
        for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            const HostTensor all = gemm.run(mode);
            for (const int limit : kLimits)
                for (const bool shared : {false, true})
                    EXPECT_TRUE(same_bytes(all, gemm.run(mode, {.sm_limit = limit, .shared_device = shared})))
                        << columns.name << ", " << limit << ", " << shared;
        }
    }
}

// The kernels that run where wgmma is not supported.
TEST(GemmInvariance, SmLimitOnCudaCores) {
    RowsGemm gemm(kRows[2], {150, 0, 129, 3});
    gemm.parity.gpu.choose_kernels({.gemm = GemmBackend::simt});
    const HostTensor all = gemm.run();
    for (const int limit : {1, 2, 131}) EXPECT_TRUE(same_bytes(all, gemm.run({.sm_limit = limit}))) << limit;
}

TEST(GemmInvariance, TwoHundredRepeats) {
    constexpr int kRepeats = 200;
    for (const Rows& rows : kRows) {
        RowsGemm gemm(rows, kCounts);
        const HostTensor once = gemm.run();
        int others = 0;
        for (int i = 1; i < kRepeats; ++i) others += same_bytes(once, gemm.run()) ? 0 : 1;
        EXPECT_EQ(others, 0) << rows.name;
    }
    for (const Columns& columns : kColumns) {
        WgradGemm gemm(columns, {300, 129});
        for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            const HostTensor once = gemm.run(mode);
            int others = 0;
            for (int i = 1; i < kRepeats; ++i) others += same_bytes(once, gemm.run(mode)) ? 0 : 1;
            EXPECT_EQ(others, 0) << columns.name;
        }
    }
}

// `count` neighbouring values.
void copy_values(const TensorView& from, int64_t from_first, const TensorView& to, int64_t to_first,
                 int64_t count) {
    const int64_t size = size_of(from.dtype);
    std::memcpy(to.bytes_ptr() + to_first * size, from.bytes_ptr() + from_first * size,
                static_cast<std::size_t>(count * size));
}

// Group 1 keeps its rows, weights and scales, the others have other sizes, so that its rows are elsewhere and
// its tiles run with other ones in their cluster and at another time.
constexpr int64_t kKept = 200;
const std::vector<int64_t> kOthers[] = {{0, kKept, 0}, {1, kKept, 500}, {700, kKept, 3}, {129, kKept, 129}};

TEST(GemmInvariance, RowsDoNotDependOnOtherGroups) {
    for (const Rows& rows : kRows) {
        RowsGemm first(rows, {40, kKept, 90});
        const HostTensor wanted = first.run();
        for (const auto& counts : kOthers) {
            RowsGemm other(rows, counts);  // the same weights; rows by their place
            const int64_t from = first.groups.first(1), to = other.groups.first(1);
            copy_values(first.a.data, from * kK, other.a.data, to * kK, kKept * kK);
            if (rows.a == L::row) copy_values(first.a.scales, from, other.a.scales, to, kKept);
            if (rows.a == L::vec128 || rows.a == L::mx32)
                for (int64_t block = 0; block < first.a.scales.view().dim(0); ++block)
                    copy_values(first.a.scales, block * first.a.data.view().dim(0) + from, other.a.scales,
                                block * other.a.data.view().dim(0) + to, kKept);
            const HostTensor got = other.run();
            EXPECT_EQ(
                std::memcmp(wanted.view().bytes_ptr() + from * kN * 2, got.view().bytes_ptr() + to * kN * 2,
                            static_cast<std::size_t>(kKept * kN * 2)),
                0)
                << rows.name << " with " << counts[0] << " and " << counts[2];
        }
    }
}

TEST(GemmInvariance, WeightGradientsDoNotDependOnOtherGroups) {
    for (const Columns& columns : kColumns) {
        WgradGemm first(columns, {40, kKept, 90});
        const HostTensor wanted = first.run();
        for (const auto& counts : kOthers) {
            WgradGemm other(columns, counts);
            const int64_t from = first.groups.first(1), to = other.groups.first(1);
            for (const auto& [source, target, width] :
                 {std::tuple{&first.dy, &other.dy, kN}, std::tuple{&first.x, &other.x, kK}}) {
                const TensorView &fp8 = source->data.view(), &copy = target->data.view();
                if (columns.layout == L::none) {
                    copy_values(fp8, from * width, copy, to * width, kKept * width);
                    continue;
                }
                for (int64_t i = 0; i < width; ++i)
                    copy_values(fp8, i * fp8.dim(1) + from, copy, i * copy.dim(1) + to, kKept);
                // blocks of the contraction by their place; scales of a group and of a tensor are where they
                // were
                const int64_t block = columns.layout == L::mx32 ? kMxBlock : kBlock;
                const int64_t per_block = columns.layout == L::tile128 ? ceil_div(width, kBlock)
                                          : columns.layout == L::vec128 || columns.layout == L::mx32 ? width
                                                                                                     : 0;
                copy_values(source->scales, from / block * per_block, target->scales, to / block * per_block,
                            ceil_div(kKept, block) * per_block);
            }
            const HostTensor got = other.run();
            EXPECT_EQ(
                std::memcmp(wanted.as<float>() + kN * kK, got.as<float>() + kN * kK, kN * kK * sizeof(float)),
                0)
                << columns.name << " with " << counts[0] << " and " << counts[2];
        }
    }
}

}  // namespace
}  // namespace fp8flow::test
