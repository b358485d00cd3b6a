// SPDX-License-Identifier: MIT
// Attention on cuDNN at sizes where its backward runs in parts, against the native kernels on the same GPU.
#include "kernels/hopper/attention/cudnn.h"
#include "kernels/hopper/factory.h"
#include "tests/support/parity.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>

namespace fp8flow::test {
namespace {

struct Shape {
    int64_t sequences, length, heads, kv_heads, depth;
};

double nmse(const HostTensor& got, const HostTensor& want) {
    double error = 0, energy = 0;
    for (int64_t i = 0; i < want.numel(); ++i) {
        error += (got(i) - want(i)) * (got(i) - want(i));
        energy += want(i) * want(i);
    }
    return error / energy;
}

void compare(const Shape& s) {
    SCOPED_TRACE(fmt::format("{} sequences of {}, heads {}/{}", s.sequences, s.length, s.heads, s.kv_heads));
    const int64_t tokens = s.sequences * s.length;
    HostTensor q(DType::bf16, {tokens, s.heads, s.depth}), k(DType::bf16, {tokens, s.kv_heads, s.depth}),
        v(DType::bf16, {tokens, s.kv_heads, s.depth}), dout(DType::bf16, {tokens, s.heads, s.depth});
    fill_uniform(q, 1, -3.0, 3.0);
    fill_uniform(k, 2, -3.0, 3.0);
    fill_uniform(v, 3, -2.0, 2.0);
    fill_uniform(dout, 4, -2.0, 2.0);
    ASSERT_TRUE(hopper::CudnnAttention::takes(q, k, v, s.length));
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.depth)));

    struct Outputs {
        HostTensor o, lse, dq, dk, dv;
    };
    const auto poisoned = [&] {
        return Outputs{.o = HostTensor(DType::bf16, {tokens, s.heads, s.depth}),
                       .lse = HostTensor(DType::f32, {tokens, s.heads}),
                       .dq = HostTensor(DType::bf16, {tokens, s.heads, s.depth}),
                       .dk = HostTensor(DType::bf16, {tokens, s.kv_heads, s.depth}),
                       .dv = HostTensor(DType::bf16, {tokens, s.kv_heads, s.depth})};
    };
    // all alive at once: Parity knows a tensor by its address
    Outputs got = poisoned(), again = poisoned(), want = poisoned();
    Parity parity;
    const auto run = [&](AttentionBackend backend, Outputs& out) {
        parity.gpu.choose_kernels({.attention = backend});
        parity.gpu.attention({.q = parity.to_gpu(q),
                              .k = parity.to_gpu(k),
                              .v = parity.to_gpu(v),
                              .seq_length = s.length,
                              .scale = scale,
                              .o = parity.to_gpu(out.o.view()),
                              .lse = parity.to_gpu(out.lse.view())});
        parity.gpu.attention_backward({.dout = parity.to_gpu(dout),
                                       .q = parity.to_gpu(q),
                                       .k = parity.to_gpu(k),
                                       .v = parity.to_gpu(v),
                                       .o = parity.to_gpu(out.o.view()),
                                       .lse = parity.to_gpu(out.lse.view()),
                                       .seq_length = s.length,
                                       .scale = scale,
                                       .dq = parity.to_gpu(out.dq.view()),
                                       .dk = parity.to_gpu(out.dk.view()),
                                       .dv = parity.to_gpu(out.dv.view())});
    };
    run(AttentionBackend::cudnn, got);
    run(AttentionBackend::cudnn, again);
    run(AttentionBackend::native, want);
    using Which = HostTensor Outputs::*;
    for (const Which which : {&Outputs::dq, &Outputs::dk, &Outputs::dv}) {
        const HostTensor first = parity.from_gpu((got.*which).view());
        const char* what = which == &Outputs::dq ? "dq" : which == &Outputs::dk ? "dk" : "dv";
        EXPECT_LE(nmse(first, parity.from_gpu((want.*which).view())), 1e-4) << what;
        EXPECT_EQ(first.bytes(), parity.from_gpu((again.*which).view()).bytes()) << what << " twice";
    }
}

// 1 GiB of workspace a sequence: one part each.
TEST(AttentionOnCudnnInParts, BySequence) {
    if (const std::string problem = hopper::cudnn_problem(); !problem.empty()) GTEST_SKIP() << problem;
    compare({2, 4096, 32, 4, 64});
}
// 2 GiB a sequence: two parts of four key heads.
TEST(AttentionOnCudnnInParts, ByHeads) {
    if (const std::string problem = hopper::cudnn_problem(); !problem.empty()) GTEST_SKIP() << problem;
    compare({1, 4096, 64, 8, 64});
}

}  // namespace
}  // namespace fp8flow::test
