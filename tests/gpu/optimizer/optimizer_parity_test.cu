// SPDX-License-Identifier: MIT
// AdamW and the gradient norm on the GPU against the reference: every byte.
#include "tests/support/parity.h"

#include <limits>
#include <string>
#include <utility>

namespace fp8flow::test {
namespace {

TEST(OptimizerParity, NormSquared) {
    // around the ends of a piece loaded by TMA, of a block, of a CTA's blocks, and of the strands of block
    // sums
    for (const int64_t count : {0, 1, 127, 1023, 1024, 1025, 8191, 8192, 8193, 8 * 8192 - 1, 8 * 8192 + 1,
                                300 * 4096 + 77, 1024 * 8192 + 1, 2112 * 8192 + 5000}) {
        SCOPED_TRACE(count);
        if (too_large_here(count / 16)) continue;
        Parity parity;
        HostTensor x(DType::f32, {count});
        float* values = x.as<float>();
        for (int64_t i = 0; i < count;
             ++i)  // magnitudes that differ, so that the order of the additions shows
            values[i] = static_cast<float>((i * 2654435761 % 2001 - 1000) * (i % 97 == 0 ? 1e6 : 1e-3));
        double about = 0;  // taken away first, so that the last bits of the sum show in a float
        for (int64_t i = 0; i < count; ++i) about += static_cast<double>(values[i]) * values[i];
        const HostTensor sum = HostTensor::of<float>({-static_cast<float>(about)});
        const op::NormSquared args{.x = x, .sum = sum};
        parity.run(args);
        parity.expect_same_bytes(args.sum, "sum");
        // the two halves of the same
        HostTensor blocks(DType::f64, {ceil_div(count, op::kNormSquaredBlock)});
        Parity first, second;
        first.run(op::NormSquared{.x = x, .block_sums = blocks});
        first.expect_same_bytes(blocks, "block sums");
        ReferenceOps().norm_squared({.x = x, .block_sums = blocks});
        second.run(op::NormSquared{.block_sums = blocks, .sum = sum});
        second.expect_same_bytes(sum, "sum of blocks");
    }
}

// Around the ends of a block, of a CTA's blocks, and of the strands of block sums.
TEST(OptimizerParity, AddSquares) {
    for (const int64_t count :
         {0, 1, 31, 33, 1023, 1024, 1025, 8 * 1024 + 1, 300 * 1024 + 77, 1024 * 1024 + 1}) {
        SCOPED_TRACE(count);
        if (too_large_here(count / 16)) continue;
        Parity parity;
        HostTensor squares(DType::f64, {count});
        double about = 0;  // taken away first, so that the last bits of the sum show in a float
        for (int64_t i = 0; i < count; ++i) {
            squares.as<double>()[i] = static_cast<double>(i * 2654435761 % 2001) * (i % 97 == 0 ? 1e6 : 1e-3);
            about += squares.as<double>()[i];
        }
        const HostTensor sum = HostTensor::of<float>({-static_cast<float>(about)});
        parity.run(op::AddSquares{.squares = squares, .sum = sum});
        parity.expect_same_bytes(sum, "sum");
    }
}

// A view that begins `skip` elements into a tensor: pointers not aligned to 16 bytes.
TensorView tail_of(const TensorView& view, int64_t skip) { return view.slice(skip, view.dim(0) - skip); }

// Several blocks a warp, and pointers not aligned to 16 bytes.
TEST(OptimizerParity, NormSquaredOnOneSm) {
    for (const int64_t skip : {0, 1})
        for (const int64_t count : {80 * 8192, 300 * 4096 + 77}) {
            SCOPED_TRACE(std::to_string(count) + ", skip " + std::to_string(skip));
            Parity parity;
            HostTensor x(DType::f32, {count + skip});
            fill_normal(x, 5, 1e-3);
            const HostTensor sum = HostTensor::of<float>({0.5f});
            const op::NormSquared args{.x = tail_of(x, skip), .sum = sum};
            parity.run(args, Launch{.sm_limit = 1});
            parity.expect_same_bytes(args.sum, "sum");
        }
}

TEST(OptimizerParity, AdamW) {
    for (const int64_t count : {0, 1, 3, 127, 129, 5000, 300001}) {
        for (const DType copy_dtype : {DType::bf16, DType::f32}) {
            for (const int32_t status_value : {0, op::kStepNonFinite}) {
                for (const int64_t skip : {0, 1}) {
                    SCOPED_TRACE(std::to_string(count) + " " + name_of(copy_dtype) + ", status " +
                                 std::to_string(status_value) + ", skip " + std::to_string(skip));
                    Parity parity;
                    HostTensor grad(DType::f32, {count + skip}), master(DType::f32, {count + skip}),
                        m(DType::f32, {count + skip}), v(DType::f32, {count + skip}),
                        copy(copy_dtype, {count + skip});
                    fill_normal(grad, 1, 1e-3);
                    fill_normal(master, 2, 0.02);
                    fill_normal(m, 3, 1e-4);
                    fill_uniform(v, 4, 0, 1e-6);
                    const HostTensor schedule = HostTensor::of<float>({1e-3f, 0.19f, 0.0975f}),
                                     grad_scale = HostTensor::of<float>({0.37f}),
                                     status = HostTensor::of<int32_t>({status_value});
                    op::AdamW args{.grad = grad,
                                   .schedule = schedule,
                                   .weight_decay = 0.1f,
                                   .grad_scale = grad_scale,
                                   .status = status,
                                   .master = master,
                                   .m = m,
                                   .v = v,
                                   .copy = copy};
                    for (auto member : {&op::AdamW::grad, &op::AdamW::master, &op::AdamW::m, &op::AdamW::v,
                                        &op::AdamW::copy}) {
                        parity.to_gpu(
                            args.*member);  // the whole first, so that its tail has the same place in both
                        args.*member = tail_of(args.*member, skip);
                    }
                    parity.run(args);
                    parity.expect_same_bytes(master, "master");
                    parity.expect_same_bytes(m, "m");
                    parity.expect_same_bytes(v, "v");
                    parity.expect_same_bytes(copy, "copy");
                }
            }
        }
    }
}

// Gradient and moments in BF16, each by itself, aligned and not; elements counted from within a row of
// counters.
TEST(OptimizerParity, AdamWOfBf16) {
    const DType dtypes[] = {DType::f32, DType::bf16};
    for (const int64_t count : {1, 129, 300001})
        for (int which = 1; which < 8; ++which)
            for (const auto& [skip, first] :
                 {std::pair<int64_t, int64_t>{0, 0}, {0, 8188}, {0, 5}, {1, 1 << 20}}) {
                SCOPED_TRACE(std::to_string(count) + " dtypes " + std::to_string(which) + ", skip " +
                             std::to_string(skip) + ", first " + std::to_string(first));
                Parity parity;
                HostTensor grad(dtypes[which & 1], {count + skip}), master(DType::f32, {count + skip}),
                    m(dtypes[which >> 1 & 1], {count + skip}), v(dtypes[which >> 2], {count + skip});
                fill_normal(grad, 1, 1e-3);
                fill_normal(master, 2, 0.02);
                fill_normal(m, 3, 1e-4);
                fill_uniform(v, 4, 0, 1e-6);
                const HostTensor schedule = HostTensor::of<float>({1e-3f, 0.19f, 0.0975f}),
                                 grad_scale = HostTensor::of<float>({0.37f}),
                                 rounding_step = HostTensor::of<int64_t>({0x0F1E2D3C4B5A6978});
                op::AdamW args{.grad = grad,
                               .schedule = schedule,
                               .weight_decay = 0.1f,
                               .grad_scale = grad_scale,
                               .status = {},
                               .master = master,
                               .m = m,
                               .v = v,
                               .m_key = 0x0123456789ABCDEFull,
                               .v_key = 77,
                               .rounding_step = rounding_step,
                               .first_element = first,
                               .copy = {}};
                for (auto member : {&op::AdamW::grad, &op::AdamW::master, &op::AdamW::m, &op::AdamW::v}) {
                    parity.to_gpu(args.*member);
                    args.*member = tail_of(args.*member, skip);
                }
                parity.run(args);
                parity.expect_same_bytes(master, "master");
                parity.expect_same_bytes(m, "m");
                parity.expect_same_bytes(v, "v");
            }
}

// The step with both FP8 copies: experts in whole tiles, which one kernel takes.
TEST(OptimizerParity, AdamWQuantizeOfBf16) {
    const DType dtypes[] = {DType::f32, DType::bf16};
    for (int which = 0; which < 8; ++which) {
        SCOPED_TRACE(which);
        Parity parity;
        constexpr int64_t kExperts = 2, kRows = 256, kCols = 384;
        HostTensor grad(dtypes[which & 1], {kExperts, kRows, kCols}),
            master(DType::f32, {kExperts, kRows, kCols}), m(dtypes[which >> 1 & 1], {kExperts, kRows, kCols}),
            v(dtypes[which >> 2], {kExperts, kRows, kCols});
        HostScaled fprop(DType::e4m3, {kExperts, kRows, kCols}, ScaleLayout::block128),
            dgrad(DType::e4m3, {kExperts, kCols, kRows}, ScaleLayout::block128);
        fill_normal(grad, 1, 1e-3);
        fill_normal(master, 2, 0.02);
        fill_normal(m, 3, 1e-4);
        fill_uniform(v, 4, 0, 1e-6);
        const HostTensor schedule = HostTensor::of<float>({1e-3f, 0.19f, 0.0975f}),
                         grad_scale = HostTensor::of<float>({0.37f}),
                         rounding_step = HostTensor::of<int64_t>({0x0F1E2D3C4B5A6978});
        const op::AdamWQuantize args{.adamw = {.grad = grad,
                                               .schedule = schedule,
                                               .grad_scale = grad_scale,
                                               .status = {},
                                               .master = master,
                                               .m = m,
                                               .v = v,
                                               .m_key = 5,
                                               .v_key = 6,
                                               .rounding_step = rounding_step,
                                               .first_element = 3 * kRows * kCols,
                                               .copy = {}},
                                     .fprop = fprop,
                                     .dgrad = dgrad};
        parity.run(args);
        parity.expect_same_bytes(master, "master");
        parity.expect_same_bytes(m, "m");
        parity.expect_same_bytes(v, "v");
        parity.expect_same_bytes(fprop.data, "fprop codes");
        parity.expect_same_bytes(dgrad.data, "dgrad codes");
    }
}

TEST(OptimizerParity, NormSquaredOfBf16) {
    for (const int64_t skip : {0, 1})
        for (const int64_t count : {1, 1025, 8193, 300 * 4096 + 77}) {
            SCOPED_TRACE(std::to_string(count) + ", skip " + std::to_string(skip));
            Parity parity;
            HostTensor x(DType::bf16, {count + skip});
            fill_normal(x, 5, 1e-3);
            const HostTensor sum = HostTensor::of<float>({0.5f});
            const op::NormSquared args{.x = tail_of(x, skip), .sum = sum};
            parity.run(args);
            parity.expect_same_bytes(args.sum, "sum");
        }
}

TEST(OptimizerParity, AdamWWithoutCopyAndStatus) {
    Parity parity;
    constexpr int64_t kCount = 4099;
    HostTensor grad(DType::f32, {kCount}), master(DType::f32, {kCount}), m(DType::f32, {kCount}),
        v(DType::f32, {kCount});
    fill_normal(grad, 1);
    fill_normal(master, 2);
    m.zero();
    v.zero();
    const HostTensor schedule = HostTensor::of<float>({3e-4f, 0.1f, 0.05f}),
                     grad_scale = HostTensor::of<float>({1.0f});
    const op::AdamW args{.grad = grad,
                         .schedule = schedule,
                         .grad_scale = grad_scale,
                         .status = {},
                         .master = master,
                         .m = m,
                         .v = v,
                         .copy = {}};
    parity.run(args);
    parity.expect_same_bytes(args.master, "master");
    parity.expect_same_bytes(args.m, "m");
    parity.expect_same_bytes(args.v, "v");
}

TEST(OptimizerParity, ClipFactor) {
    for (const float squared : {0.0f, 0.3f, 123.0f, std::numeric_limits<float>::infinity()})
        for (const auto& [clip, limit] :
             {std::pair{0.0f, 0.0f}, {1.0f, 0.0f}, {1.0f, 11.0f}, {1.0f, 12.0f}}) {
            Parity p;
            const HostTensor limits = HostTensor::of(std::vector<float>{limit}),
                             norm_squared = HostTensor::of(std::vector<float>{squared}),
                             status = HostTensor::of(std::vector<int32_t>{0}), norm(DType::f32, {1}),
                             factor(DType::f32, {1});
            p.run(op::ClipFactor{.norm_squared = norm_squared,
                                 .clip = clip,
                                 .limit = limits,
                                 .status = status,
                                 .norm = norm,
                                 .factor = factor});
            p.expect_same_bytes(status, "status");
            p.expect_same_bytes(norm, "norm");
            p.expect_same_bytes(factor, "factor");
        }
}

}  // namespace
}  // namespace fp8flow::test
