// SPDX-License-Identifier: MIT
// Attention, rotary embedding, the packed projection and the heads of it on the Hopper backend against the
// reference, bit by bit: both sum in the order of kernels/ops/attention.h. Attention on cuDNN against the
// reference within bounds.
#include "kernels/core/error.h"
#include "kernels/hopper/attention/cudnn.h"
#include "kernels/hopper/factory.h"
#include "tests/support/parity.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace fp8flow::test {
namespace {

struct Shape {
    int64_t sequences, length, heads, kv_heads, depth, value_depth = 0;  // value_depth 0: depth
    int64_t values() const { return value_depth > 0 ? value_depth : depth; }
    int64_t tokens() const { return sequences * length; }
    float scale() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(depth))); }
};

// lengths around the tiles of 64, odd depths, grouped queries, one and several sequences, no rows at all
const std::vector<Shape> kShapes = {{0, 16, 2, 1, 32},   {1, 1, 1, 1, 2},    {3, 7, 4, 2, 12},
                                    {2, 63, 2, 2, 64},   {2, 64, 4, 1, 64},  {2, 65, 3, 3, 33},
                                    {1, 127, 8, 2, 128}, {1, 129, 2, 1, 96}, {1, 300, 4, 2, 128}};
// values narrower and wider than keys; heads of more than 128 columns, lengths around their tiles of 32
const std::vector<Shape> kUnequalShapes = {{2, 65, 4, 2, 64, 32},    {1, 33, 2, 1, 13, 100},
                                           {1, 130, 4, 4, 192, 128}, {3, 31, 3, 3, 160, 256},
                                           {1, 97, 2, 1, 256, 256},  {2, 32, 2, 2, 129, 7}};

std::string describe(const Shape& s, DType dtype) {
    return fmt::format("{}: {} sequences of {}, heads {}/{}, depth {}, {}", name_of(dtype), s.sequences,
                       s.length, s.heads, s.kv_heads, s.depth, s.values());
}

struct Inputs {
    explicit Inputs(const Shape& s, DType dtype = DType::bf16)
        : q(dtype, {s.tokens(), s.heads, s.depth}),
          k(dtype, {s.tokens(), s.kv_heads, s.depth}),
          v(dtype, {s.tokens(), s.kv_heads, s.values()}),
          dout(dtype, {s.tokens(), s.heads, s.values()}) {
        fill_normal(q, 1, 2.0);
        fill_normal(k, 2, 2.0);
        fill_normal(v, 3);
        fill_normal(dout, 4);
    }
    HostTensor q, k, v, dout;
};
struct Outputs {
    explicit Outputs(const Shape& s, DType dtype = DType::bf16)
        : o(dtype, {s.tokens(), s.heads, s.values()}),
          lse(DType::f32, {s.tokens(), s.heads}),
          dq(dtype, {s.tokens(), s.heads, s.depth}),
          dk(dtype, {s.tokens(), s.kv_heads, s.depth}),
          dv(dtype, {s.tokens(), s.kv_heads, s.values()}) {}
    HostTensor o, lse, dq, dk, dv;
};
op::Attention forward_of(const Shape& s, const Inputs& in, const Outputs& out) {
    return {.q = in.q,
            .k = in.k,
            .v = in.v,
            .seq_length = s.length,
            .scale = s.scale(),
            .documents = {},
            .o = out.o,
            .lse = out.lse};
}
op::AttentionBackward backward_of(const Shape& s, const Inputs& in, const Outputs& out) {
    return {.dout = in.dout,
            .q = in.q,
            .k = in.k,
            .v = in.v,
            .o = out.o,
            .lse = out.lse,
            .seq_length = s.length,
            .scale = s.scale(),
            .documents = {},
            .dq = out.dq,
            .dk = out.dk,
            .dv = out.dv};
}

void run_attention(const Shape& s, DType dtype, AttentionBackend backend = AttentionBackend::native) {
    SCOPED_TRACE(describe(s, dtype));
    const Inputs in(s, dtype);
    const Outputs out(s, dtype);
    Parity parity;
    parity.gpu.choose_kernels({.attention = backend});
    parity.check(forward_of(s, in, out));
    parity.check(backward_of(s, in, out));
}

TEST(AttentionParity, ForwardAndBackward) {
    for (const auto& shapes : {kShapes, kUnequalShapes})
        for (const Shape& s : shapes)
            for (DType dtype : {DType::bf16, DType::f32}) run_attention(s, dtype);
}

// Neither the native kernels nor cuDNN's calls take them yet.
TEST(AttentionParity, RefusesWiderHeadsAndDocuments) {
    HostTensor q(DType::bf16, {128, 2, 64}), wide(DType::bf16, {128, 2, 257}), lse(DType::f32, {128, 2});
    const HostTensor documents = HostTensor::of<int64_t>({0, 40, 128});
    for (const AttentionBackend backend : {AttentionBackend::native, AttentionBackend::cudnn}) {
        Parity parity;
        parity.gpu.choose_kernels({.attention = backend});
        op::Attention args{.q = parity.to_gpu(q),
                           .k = parity.to_gpu(q),
                           .v = parity.to_gpu(wide),
                           .seq_length = 128,
                           .o = parity.to_gpu(wide.view()),
                           .lse = parity.to_gpu(lse.view())};
        EXPECT_THROW(parity.gpu.attention(args), Error);
        args.v = args.q;
        args.o = parity.to_gpu(q.view());
        args.documents = parity.to_gpu(documents);
        EXPECT_THROW(parity.gpu.attention(args), Error);
    }
}

// Probabilities and score gradients are rounded to bf16 before the second GEMM, so the bounds are those of a
// block (NMSE 1e-4) and a fifth of it for the output. Where a gradient is zero except for rounding, 1e-5 an
// element is allowed.
void expect_near(const HostTensor& got, const HostTensor& want, double bound, const char* what) {
    double error = 0, energy = 0;
    for (int64_t i = 0; i < want.numel(); ++i) {
        ASSERT_TRUE(std::isfinite(got(i))) << what << "[" << i << "]";
        error += (got(i) - want(i)) * (got(i) - want(i));
        energy += want(i) * want(i);
    }
    EXPECT_LE(error, bound * energy + 1e-10 * static_cast<double>(want.numel()))
        << what << ": NMSE " << error / energy;
}

// head sizes 64 and 128; one query head a key head, and groups of 2, 4 and 8; whole and partial tiles;
// several sequences
const std::vector<Shape> kCudnnShapes = {{2, 17, 8, 2, 64},   {3, 17, 4, 1, 128},  {2, 128, 4, 4, 128},
                                         {3, 128, 8, 4, 64},  {2, 129, 8, 2, 128}, {1, 129, 8, 1, 64},
                                         {1, 1024, 4, 2, 64}, {2, 1024, 8, 1, 128}};
// of multi-latent attention: a head has keys and values of its own; what older versions of cuDNN do not take
const std::vector<Shape> kLatentCudnnShapes = {
    {2, 128, 4, 4, 192, 128}, {1, 132, 3, 3, 192, 128}, {1, 256, 2, 2, 192, 192}, {2, 64, 2, 2, 256, 256}};

TEST(AttentionOnCudnn, WithinBoundsOfTheReferenceAndTheSameBitsTwice) {
    if (own_kernels_only()) GTEST_SKIP() << "a library's kernels";
    if (const std::string problem = hopper::cudnn_problem(); !problem.empty()) GTEST_SKIP() << problem;
    std::vector<Shape> shapes = kCudnnShapes;
    for (const Shape& s : kLatentCudnnShapes) {
        const Inputs in(s);
        if (hopper::CudnnAttention::takes(in.q, in.k, in.v, s.length)) shapes.push_back(s);
    }
    for (const Shape& s : shapes) {
        SCOPED_TRACE(describe(s, DType::bf16));
        const Inputs in(s);
        ASSERT_TRUE(hopper::CudnnAttention::takes(in.q, in.k, in.v, s.length));
        const Outputs first(s), second(s), want(s);
        Parity parity;
        parity.gpu.choose_kernels({.attention = AttentionBackend::cudnn});
        for (const Outputs* out : {&first, &second}) {
            parity.gpu.attention(parity.on_gpu(forward_of(s, in, *out)));
            parity.gpu.attention_backward(parity.on_gpu(backward_of(s, in, *out)));
        }
        parity.cpu.attention(forward_of(s, in, want));
        parity.cpu.attention_backward(backward_of(s, in, want));

        using Which = HostTensor Outputs::*;
        const auto check = [&](Which which, double bound, const char* what) {
            const HostTensor got = parity.from_gpu((first.*which).view());
            EXPECT_EQ(got.bytes(), parity.from_gpu((second.*which).view()).bytes()) << what << " twice";
            expect_near(got, want.*which, bound, what);
        };
        check(&Outputs::o, 2e-5, "o");
        check(&Outputs::dq, 1e-4, "dq");
        check(&Outputs::dk, 1e-4, "dk");
        check(&Outputs::dv, 1e-4, "dv");
        const HostTensor lse = parity.from_gpu(first.lse.view());
        EXPECT_EQ(lse.bytes(), parity.from_gpu(second.lse.view()).bytes()) << "lse twice";
        for (int64_t i = 0; i < lse.numel(); ++i)
            ASSERT_NEAR(lse(i), want.lse(i), 1e-4) << "lse[" << i << "]: natural log of the scaled scores";
    }
}

// One token, f32, other head sizes, an odd row: the native kernel takes them, with the reference's bits.
TEST(AttentionOnCudnn, OtherShapesRunOnTheNativeKernel) {
    if (own_kernels_only()) GTEST_SKIP() << "a library's kernels";
    const Shape one{4, 1, 8, 2, 128}, depth{1, 65, 4, 2, 96}, odd{1, 129, 3, 3, 64},
        unequal{1, 64, 2, 2, 128, 64};
    for (const Shape& s : {one, depth, odd, unequal}) {
        const Inputs in(s);
        EXPECT_FALSE(hopper::CudnnAttention::takes(in.q, in.k, in.v, s.length));
        run_attention(s, DType::bf16, AttentionBackend::cudnn);
    }
    run_attention({1, 128, 4, 2, 64}, DType::f32, AttentionBackend::cudnn);
}

// A NaN at a later position must not reach an earlier one, inside a tile or across tiles.
TEST(AttentionParity, NoRowReadsTheFuture) {
    const Shape s{1, 100, 2, 1, 64};
    Inputs in(s);
    const Outputs out(s);
    for (int64_t i = 50 * s.kv_heads * s.depth; i < in.k.numel(); ++i) {
        set(in.k, i, std::numeric_limits<double>::quiet_NaN());
        set(in.v, i, std::numeric_limits<double>::quiet_NaN());
    }
    Parity parity;
    parity.gpu.attention(parity.on_gpu(forward_of(s, in, out)));
    const HostTensor got = parity.from_gpu(out.o);
    for (int64_t i = 0; i < got.numel(); ++i)
        ASSERT_EQ(std::isnan(got(i)), i >= 50 * s.heads * s.depth) << "element " << i;
}

TEST(RopeParity, BothDirections) {
    std::vector<Shape> shapes = kShapes;
    shapes.push_back({2, 33, 6, 1, 16});  // heads that do not fill the last group of four
    shapes.push_back({3, 70, 13, 1, 128});
    for (const Shape& s : shapes) {
        for (DType dtype : {DType::bf16, DType::f32}) {
            if (s.depth % 2 != 0) continue;
            HostTensor table(DType::f32, {s.length, s.depth / 2, 2}),
                x(dtype, {s.tokens(), s.heads, s.depth});
            fill_uniform(table, 1, -1.0, 1.0);
            fill_normal(x, 2);
            for (op::RopeDirection direction : {op::RopeDirection::forward, op::RopeDirection::backward}) {
                Parity().check(op::Rope{.table = table, .direction = direction, .x = x});
            }
        }
    }
}

TEST(PackedProjectionParity, SplitAndMerge) {
    for (const Shape& s : kShapes) {
        for (DType dtype : {DType::bf16, DType::f32}) {
            const int64_t columns = (s.heads + 2 * s.kv_heads) * s.depth;
            HostTensor qkv(dtype, {s.tokens(), columns}), merged(dtype, {s.tokens(), columns});
            HostTensor q(dtype, {s.tokens(), s.heads, s.depth}), k(dtype, {s.tokens(), s.kv_heads, s.depth}),
                v(dtype, {s.tokens(), s.kv_heads, s.depth});
            HostTensor bias(DType::f32, {columns}), dbias(DType::f32, {columns});
            fill_normal(qkv, 5);
            fill_normal(bias, 6);
            fill_normal(dbias, 7);
            Parity parity;
            parity.check(op::SplitQkv{.qkv = qkv, .bias = {}, .q = q, .k = k, .v = v});
            parity.check(op::MergeQkv{.q = q, .k = k, .v = v, .qkv = merged, .dbias = {}});
            parity.check(op::SplitQkv{.qkv = qkv, .bias = bias, .q = q, .k = k, .v = v});
            parity.check(op::MergeQkv{
                .q = q, .k = k, .v = v, .dbias_mode = Gradient::accumulate, .qkv = merged, .dbias = dbias});
        }
    }
}

// Heads of multi-latent attention: whole units and single columns, values narrower and wider than keys; a
// latent and the columns that rotate, out of one projection and back.
TEST(LatentHeadsParity, ForwardAndBackward) {
    struct {
        int64_t tokens, heads, nope, rope, value, length;
    } const sizes[] = {{0, 2, 8, 16, 8, 4},       {1, 1, 0, 2, 1, 1},         {37, 3, 5, 6, 3, 8},
                       {70, 4, 128, 64, 128, 33}, {33, 16, 192, 64, 256, 64}, {9, 5, 64, 48, 24, 4},
                       {600, 2, 16, 240, 8, 100}, {21, 3, 32, 8, 32, 7}};
    for (const auto& s : sizes)
        for (const DType dtype : {DType::bf16, DType::f32})
            for (const int sms : {0, 1}) {
                SCOPED_TRACE(fmt::format("{}: {} tokens, {} heads, {} + {}, {}", name_of(dtype), s.tokens,
                                         s.heads, s.nope, s.rope, s.value));
                HostTensor kv(dtype, {s.tokens, s.heads, s.nope + s.value}),
                    k_rope(dtype, {s.tokens, s.rope}), table(DType::f32, {s.length, s.rope / 2, 2}),
                    q(dtype, {s.tokens, s.heads, s.nope + s.rope}),
                    k(dtype, {s.tokens, s.heads, s.nope + s.rope}), v(dtype, {s.tokens, s.heads, s.value});
                fill_normal(kv, 1);
                fill_normal(k_rope, 2);
                fill_uniform(table, 3, -1.0, 1.0);
                fill_normal(q, 4);
                Parity p;
                p.check(op::LatentHeads{.kv = kv, .k_rope = k_rope, .table = table, .q = q, .k = k, .v = v},
                        {.sm_limit = sms});
                Parity back;
                back.check(
                    op::LatentHeadsBackward{
                        .dk = k, .dv = v, .table = table, .dq = q, .dkv = kv, .dk_rope = k_rope},
                    {.sm_limit = sms});
            }
}

TEST(PackedProjectionParity, SplitAndMergeWithoutValues) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
        HostTensor both(dtype, {37, 512 + 64}), latent(dtype, {37, 8, 64}), rope(dtype, {37, 1, 64}),
            merged(dtype, {37, 512 + 64});
        fill_normal(both, 1);
        Parity split, merge;
        split.check(op::SplitQkv{.qkv = both, .q = latent, .k = rope});
        merge.check(op::MergeQkv{.q = latent, .k = rope, .qkv = merged});
    }
}

// The fused pass each way, with and without the norm of heads, and what composes it: heads of 2 to 32 units,
// of odd sizes, and f32. Rows by token and head are more and fewer than the parts of dgamma.
const std::vector<Shape> kHeadShapes = {
    {0, 16, 2, 1, 64},     {1, 1, 1, 1, 16},   {3, 7, 4, 2, 32},    {2, 63, 2, 2, 64},  {1, 133, 16, 4, 64},
    {2, 65, 3, 3, 80},     {1, 129, 5, 1, 96}, {1, 70, 13, 2, 128}, {3, 33, 9, 3, 256}, {2, 9, 3, 1, 48},
    {1, 40, 2, 1, 33 * 2}, {1, 300, 6, 2, 40}, {2, 37, 8, 4, 32},   {1, 29, 16, 8, 16}, {1, 600, 8, 2, 128}};

enum class Norm { none, per_head, per_layer };
struct HeadTensors {
    HostTensor qkv, bias, dbias, table, q_gamma, k_gamma, q, k, v, q_raw, k_raw, q_rstd, k_rstd, dq_gamma,
        dk_gamma;
    HeadTensors(const Shape& s, DType dtype, Norm norm)
        : HeadTensors(s, dtype, norm == Norm::per_layer ? s.heads : 1,
                      norm == Norm::per_layer ? s.kv_heads : 1) {}
    // Heads of q and of k in a row of the norm.
    HeadTensors(const Shape& s, DType dtype, int64_t of_q, int64_t of_k)
        : qkv(dtype, {s.tokens(), (s.heads + 2 * s.kv_heads) * s.depth}),
          bias(DType::f32, {(s.heads + 2 * s.kv_heads) * s.depth}),
          dbias(DType::f32, {(s.heads + 2 * s.kv_heads) * s.depth}),
          table(DType::f32, {s.length, s.depth / 2, 2}),
          q_gamma(DType::f32, {of_q * s.depth}),
          k_gamma(DType::f32, {of_k * s.depth}),
          q(dtype, {s.tokens(), s.heads, s.depth}),
          k(dtype, {s.tokens(), s.kv_heads, s.depth}),
          v(dtype, {s.tokens(), s.kv_heads, s.depth}),
          q_raw(dtype, {s.tokens(), s.heads, s.depth}),
          k_raw(dtype, {s.tokens(), s.kv_heads, s.depth}),
          q_rstd(DType::f32, {s.tokens() * s.heads / of_q}),
          k_rstd(DType::f32, {s.tokens() * s.kv_heads / of_k}),
          dq_gamma(DType::f32, {of_q * s.depth}),
          dk_gamma(DType::f32, {of_k * s.depth}) {
        fill_normal(bias, 10);
        fill_uniform(table, 1, -1.0, 1.0);
        fill_uniform(q_gamma, 2, 0.5, 1.5);
        fill_uniform(k_gamma, 3, 0.5, 1.5);
    }
};

TEST(QkvHeadsParity, ForwardAndBackward) {
    for (const Shape& s : kHeadShapes)
        for (const DType dtype : {DType::bf16, DType::f32})
            for (const auto& [norm, biased] :
                 {std::pair(Norm::none, false), std::pair(Norm::per_head, false), std::pair(Norm::none, true),
                  std::pair(Norm::per_head, true), std::pair(Norm::per_layer, false),
                  std::pair(Norm::per_layer, true)}) {
                const bool normed = norm != Norm::none;
                SCOPED_TRACE(describe(s, dtype) + ", norm " + std::to_string(static_cast<int>(norm)) +
                             (biased ? ", biased" : ""));
                HeadTensors t(s, dtype, norm);
                const TensorView bias = biased ? t.bias.view() : TensorView{},
                                 dbias = biased ? t.dbias.view() : TensorView{};
                fill_normal(t.qkv, 4);
                const auto with = [&](const HostTensor& tensor) {
                    return normed ? tensor.view() : TensorView{};
                };
                Parity p;
                const op::QkvHeads forward{.qkv = t.qkv,
                                           .bias = bias,
                                           .table = t.table,
                                           .q_gamma = with(t.q_gamma),
                                           .k_gamma = with(t.k_gamma),
                                           .q = t.q,
                                           .k = t.k,
                                           .v = t.v,
                                           .q_raw = with(t.q_raw),
                                           .k_raw = with(t.k_raw),
                                           .q_rstd = with(t.q_rstd),
                                           .k_rstd = with(t.k_rstd)};
                p.check(forward, {.sm_limit = s.depth == 96 ? 1 : 0});
                for (const auto& [mode, format] : {std::pair(Gradient::overwrite, ScaleFormat::undeclared),
                                                   std::pair(Gradient::accumulate, ScaleFormat::undeclared),
                                                   std::pair(Gradient::overwrite, ScaleFormat::pow2),
                                                   std::pair(Gradient::accumulate, ScaleFormat::fp32)}) {
                    const bool quantised = format != ScaleFormat::undeclared;
                    const int64_t width = (s.heads + 2 * s.kv_heads) * s.depth;
                    HostScaled rows(mode == Gradient::overwrite ? DType::e4m3 : DType::e5m2,
                                    {s.tokens(), width}, ScaleLayout::vec128);
                    HostTensor dq(dtype, {s.tokens(), s.heads, s.depth}),
                        dk(dtype, {s.tokens(), s.kv_heads, s.depth}),
                        dv(dtype, {s.tokens(), s.kv_heads, s.depth}), dqkv(dtype, {s.tokens(), width});
                    fill_normal(dq, 5);
                    fill_normal(dk, 6);
                    fill_normal(dv, 7);
                    fill_normal(t.dq_gamma, 8);
                    fill_normal(t.dk_gamma, 9);
                    fill_normal(t.dbias, 11);
                    Parity back;
                    back.run(op::QkvHeadsBackward{.dq = dq,
                                                  .dk = dk,
                                                  .dv = dv,
                                                  .table = t.table,
                                                  .q_raw = with(t.q_raw),
                                                  .k_raw = with(t.k_raw),
                                                  .q_gamma = with(t.q_gamma),
                                                  .k_gamma = with(t.k_gamma),
                                                  .q_rstd = with(t.q_rstd),
                                                  .k_rstd = with(t.k_rstd),
                                                  .dgamma_mode = mode,
                                                  .scale_format = quantised ? format : ScaleFormat::pow2,
                                                  .dqkv = dqkv,
                                                  .rows = quantised ? ScaledTensor(rows) : ScaledTensor{},
                                                  .dq_gamma = with(t.dq_gamma),
                                                  .dk_gamma = with(t.dk_gamma),
                                                  .dbias = dbias},
                             {.sm_limit = s.depth == 96 ? 1 : 0});
                    if (quantised) {
                        back.expect_same_bytes(rows.data.view(), "FP8 rows");
                        back.expect_same_bytes(rows.scales.view(), "their scales");
                    } else {
                        back.expect_same_bytes(dqkv.view(), "dqkv");
                    }
                    if (biased) back.expect_same_bytes(t.dbias.view(), "dbias");
                    if (!normed) continue;
                    back.expect_same_bytes(t.dq_gamma.view(), "dq_gamma");
                    back.expect_same_bytes(t.dk_gamma.view(), "dk_gamma");
                }
            }
}

}  // namespace
}  // namespace fp8flow::test
