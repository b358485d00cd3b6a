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
        parity.check(op::NormSquared{.x = x, .sum = sum});
        // the two halves of the same
        HostTensor blocks(DType::f64, {ceil_div(count, op::kNormSquaredBlock)});
        Parity first, second;
        first.check(op::NormSquared{.x = x, .block_sums = blocks});
        second.check(op::NormSquared{.block_sums = blocks, .sum = sum});
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
        parity.check(op::AddSquares{.squares = squares, .sum = sum});
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
            parity.check(op::NormSquared{.x = tail_of(x, skip), .sum = sum}, Launch{.sm_limit = 1});
        }
}

// Gradient, master and moments; bit 0 of `narrow`: the gradient is BF16, bit 1: m, bit 2: v.
struct State {
    HostTensor grad, master, m, v, copy;
    const HostTensor schedule = HostTensor::of<float>({1e-3f, 0.19f, 0.0975f}),
                     grad_scale = HostTensor::of<float>({0.37f}),
                     rounding_step = HostTensor::of<int64_t>({0x0F1E2D3C4B5A6978});

    State(std::initializer_list<int64_t> shape, int narrow, DType copy_dtype = DType::bf16)
        : grad(dtype_of_bit(narrow, 0), shape),
          master(DType::f32, shape),
          m(dtype_of_bit(narrow, 1), shape),
          v(dtype_of_bit(narrow, 2), shape),
          copy(copy_dtype, shape) {
        fill_normal(grad, 1, 1e-3);
        fill_normal(master, 2, 0.02);
        fill_normal(m, 3, 1e-4);
        fill_uniform(v, 4, 0, 1e-6);
    }
    // Without status and copy.
    op::AdamW args(int64_t first_element = 0) const {
        return {.grad = grad,
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
                .first_element = first_element,
                .copy = {}};
    }

private:
    static DType dtype_of_bit(int narrow, int bit) {
        return (narrow >> bit & 1) != 0 ? DType::bf16 : DType::f32;
    }
};

// The step on all but the first `skip` elements. The first ones are compared too.
void check_tail(const State& state, op::AdamW args, int64_t skip) {
    Parity parity;
    for (auto member :
         {&op::AdamW::grad, &op::AdamW::master, &op::AdamW::m, &op::AdamW::v, &op::AdamW::copy}) {
        if (!(args.*member)) continue;
        parity.to_gpu(args.*member);  // the whole first, so that its tail has the same place in both
        args.*member = tail_of(args.*member, skip);
    }
    parity.run(args);
    for (const HostTensor* tensor : {&state.master, &state.m, &state.v})
        parity.expect_same_bytes(*tensor, "master, m, v");
    if (args.copy) parity.expect_same_bytes(state.copy, "copy");
}

TEST(OptimizerParity, AdamW) {
    for (const int64_t count : {0, 1, 3, 127, 129, 5000, 300001})
        for (const DType copy_dtype : {DType::bf16, DType::f32})
            for (const int32_t status_value : {0, op::kStepNonFinite})
                for (const int64_t skip : {0, 1}) {
                    SCOPED_TRACE(std::to_string(count) + " " + name_of(copy_dtype) + ", status " +
                                 std::to_string(status_value) + ", skip " + std::to_string(skip));
                    const State state({count + skip}, 0, copy_dtype);
                    const HostTensor status = HostTensor::of<int32_t>({status_value});
                    op::AdamW args = state.args();
                    args.status = status;
                    args.copy = state.copy;
                    check_tail(state, args, skip);
                }
}

// Gradient and moments in BF16, each by itself, aligned and not; elements counted from within a row of
// counters.
TEST(OptimizerParity, AdamWOfBf16) {
    for (const int64_t count : {1, 129, 300001})
        for (int narrow = 1; narrow < 8; ++narrow)
            for (const auto& [skip, first] :
                 {std::pair<int64_t, int64_t>{0, 0}, {0, 8188}, {0, 5}, {1, 1 << 20}}) {
                SCOPED_TRACE(std::to_string(count) + " dtypes " + std::to_string(narrow) + ", skip " +
                             std::to_string(skip) + ", first " + std::to_string(first));
                const State state({count + skip}, narrow);
                check_tail(state, state.args(first), skip);
            }
}

// The step with both FP8 copies: experts in whole tiles, which one kernel takes.
TEST(OptimizerParity, AdamWQuantizeOfBf16) {
    for (int narrow = 0; narrow < 8; ++narrow) {
        SCOPED_TRACE(narrow);
        constexpr int64_t kExperts = 2, kRows = 256, kCols = 384;
        const State state({kExperts, kRows, kCols}, narrow);
        const HostScaled fprop(DType::e4m3, {kExperts, kRows, kCols}, ScaleLayout::block128),
            dgrad(DType::e4m3, {kExperts, kCols, kRows}, ScaleLayout::block128);
        Parity().check(
            op::AdamWQuantize{.adamw = state.args(3 * kRows * kCols), .fprop = fprop, .dgrad = dgrad});
    }
}

// Every layout; copies 1: fprop alone, 2: dgrad alone, 3: both.
TEST(OptimizerParity, AdamWQuantize) {
    using L = ScaleLayout;
    struct Weight {
        int64_t experts, rows, cols;
        L layout;
    };
    for (const Weight& w :
         {Weight{1, 128, 128, L::block128}, Weight{3, 256, 384, L::block128}, Weight{2, 130, 72, L::row},
          Weight{1, 1, 1, L::tensor}, Weight{2, 64, 96, L::mx32}})
        for (const auto& [status_value, copies] :
             {std::pair{0, 3}, {op::kStepNonFinite, 3}, {0, 1}, {0, 2}}) {
            SCOPED_TRACE(std::to_string(w.experts) + " x " + std::to_string(w.rows) + " x " +
                         std::to_string(w.cols) + " " + name_of(w.layout) + ", status " +
                         std::to_string(status_value) + ", copies " + std::to_string(copies));
            const State state({w.experts, w.rows, w.cols}, 0);
            const HostTensor status = HostTensor::of<int32_t>({status_value});
            const HostScaled fprop(DType::e4m3, {w.experts, w.rows, w.cols}, w.layout),
                dgrad(DType::e4m3, {w.experts, w.cols, w.rows}, w.layout);
            op::AdamWQuantize args{.adamw = state.args(),
                                   .fprop = copies & 1 ? ScaledTensor(fprop) : ScaledTensor{},
                                   .dgrad = copies & 2 ? ScaledTensor(dgrad) : ScaledTensor{}};
            args.adamw.status = status;
            args.adamw.copy = state.copy;
            Parity().check(args, Launch{.sm_limit = status_value == 0 ? 1 : 0});
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
            parity.check(op::NormSquared{.x = tail_of(x, skip), .sum = sum});
        }
}

TEST(OptimizerParity, AdamWWithoutCopyAndStatus) {
    const State state({4099}, 0);
    op::AdamW args = state.args();
    args.weight_decay = 0;
    args.rounding_step = {};
    Parity().check(args);
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
            p.check(op::ClipFactor{.norm_squared = norm_squared,
                                   .clip = clip,
                                   .limit = limits,
                                   .status = status,
                                   .norm = norm,
                                   .factor = factor});
        }
}

}  // namespace
}  // namespace fp8flow::test
