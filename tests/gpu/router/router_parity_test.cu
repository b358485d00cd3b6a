// SPDX-License-Identifier: MIT
// The router on the GPU against the reference: ids, probabilities, losses and gradients byte by byte, over
// all options and edge shapes, with ties, NaN and infinity among the logits; GEMMs on tensor cores within
// their bound, everything else byte by byte.
#include "kernels/hopper/device/view.h"
#include "tests/support/parity.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <string>

namespace fp8flow::test {
namespace {

using op::Score;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

struct Projection {
    int64_t tokens, hidden, experts;
    DType dtype;
};
const std::vector<Projection> kProjections = {
    {0, 128, 8, DType::bf16},
    {1, 1, 1, DType::bf16},
    {515, 1288, 1, DType::bf16},  // the gate of a shared expert
    {127, 200, 8, DType::bf16},
    {128, 256, 64, DType::f32},
    {129, 1024, 65, DType::bf16},
    {65, 7168, 256, DType::bf16},
    {33, 77, 130, DType::f32},
    {300, 96, 512, DType::bf16},
    {515, 1288, 32, DType::bf16},
    {700, 264, 40, DType::bf16},
    {300, 520, 7, DType::bf16},
    {600, 300, 33, DType::bf16},
    {520, 16, 3, DType::f32},
    {1200, 7168, 512, DType::bf16},  // block sums larger than the workspace: rounds
    // tensor cores: splits of the columns, ragged; two column tiles; many blocks of tokens; several row tiles
    // a CTA of dx; rounds of splits
    {260, 2056, 200, DType::bf16},
    {130, 3592, 136, DType::bf16},
    {257, 4104, 264, DType::bf16},
    {4200, 128, 64, DType::bf16},
    {17000, 264, 40, DType::bf16},
    {8200, 4096, 512, DType::bf16},
};

// Norm-wise 1e-5, squared. dx is rounded to BF16: where the sums differ in their last bits, few elements
// round to the other neighbour.
constexpr double kSumBound = 1e-10, kInputBound = 1e-6;
bool is_tensor_core_shape(const Projection& p) { return p.dtype == DType::bf16 && p.hidden % 8 == 0; }

TEST(RouterParity, Logits) {
    for (const Projection& p : kProjections) {
        if (too_large_here(p.tokens * p.hidden * p.experts / 32)) continue;
        for (const DType weight_dtype : {DType::f32, DType::bf16}) {
            SCOPED_TRACE(std::to_string(p.tokens) + " x " + std::to_string(p.hidden) + " x " +
                         std::to_string(p.experts));
            Parity parity;
            HostTensor x(p.dtype, {p.tokens, p.hidden}), weight(weight_dtype, {p.experts, p.hidden}),
                logits(DType::f32, {p.tokens, p.experts});
            fill_normal(x, 1);
            fill_normal(weight, 2, 0.02);
            const op::RouterLogits args{.x = x, .weight = weight, .logits = logits};
            parity.run(args);
            if (is_tensor_core_shape(p) && weight_dtype == DType::bf16)
                parity.expect_close(args.logits, kSumBound, "logits");
            else
                parity.expect_same_bytes(args.logits, "logits");
        }
    }
}

// Against double: the tensor cores' sums at a contraction of 7168 terms of one sign, where truncation adds
// up.
TEST(RouterParity, LogitsOfOneSignInDouble) {
    constexpr int64_t kTokens = 67, kHidden = 7168;
    for (const int64_t experts : {24, 136}) {
        SCOPED_TRACE(experts);
        Parity parity;
        HostTensor x(DType::bf16, {kTokens, kHidden}), weight(DType::bf16, {experts, kHidden}),
            logits(DType::f32, {kTokens, experts});
        fill_uniform(x, 1, 0.5, 1.0);
        fill_uniform(weight, 2, 0.5, 1.0);
        parity.gpu.router_logits({.x = parity.to_gpu(x.view()),
                                  .weight = parity.to_gpu(weight.view()),
                                  .logits = parity.to_gpu(logits.view())});
        const HostTensor got = parity.from_gpu(logits);
        for (int64_t t = 0; t < kTokens; ++t) {
            for (int64_t e = 0; e < experts; ++e) {
                double want = 0;
                for (int64_t h = 0; h < kHidden; ++h) want += x(t * kHidden + h) * weight(e * kHidden + h);
                ASSERT_NEAR(got(t * experts + e), want, 1e-5 * want) << t << ", " << e;
            }
        }
    }
}

// A token's logits do not depend on the other tokens.
TEST(RouterParity, LogitsOfATokenAlone) {
    constexpr int64_t kTokens = 100, kHidden = 1032;
    for (const int64_t experts : {20, 72, 200}) {
        SCOPED_TRACE(experts);
        Parity parity;
        HostTensor x(DType::bf16, {kTokens, kHidden}), weight(DType::bf16, {experts, kHidden}),
            all(DType::f32, {kTokens, experts}), one(DType::f32, {1, experts});
        fill_normal(x, 1);
        fill_normal(weight, 2, 0.02);
        const TensorView device_x = parity.to_gpu(x.view()), device_weight = parity.to_gpu(weight.view());
        parity.gpu.router_logits(
            {.x = device_x, .weight = device_weight, .logits = parity.to_gpu(all.view())});
        const HostTensor of_all = parity.from_gpu(all);
        for (const int64_t t : {0, 31, 32, 77, 99}) {
            parity.gpu.router_logits(
                {.x = device_x.slice(t, 1), .weight = device_weight, .logits = parity.to_gpu(one.view())});
            const HostTensor alone = parity.from_gpu(one);
            for (int64_t e = 0; e < experts; ++e)
                EXPECT_EQ(alone(e), of_all(t * experts + e)) << t << ", " << e;
        }
    }
}

TEST(RouterParity, LogitsBackward) {
    for (const Projection& p : kProjections) {
        if (too_large_here(p.tokens * p.hidden * p.experts / 32)) continue;
        for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            SCOPED_TRACE(std::to_string(p.tokens) + " x " + std::to_string(p.hidden) + " x " +
                         std::to_string(p.experts));
            const bool accumulate = mode == Gradient::accumulate;
            Parity parity;
            HostTensor x(p.dtype, {p.tokens, p.hidden}),
                weight(accumulate ? DType::bf16 : DType::f32, {p.experts, p.hidden}),
                dlogits(DType::f32, {p.tokens, p.experts}), dx_in(DType::bf16, {p.tokens, p.hidden}),
                dx(p.dtype, {p.tokens, p.hidden}), dweight(DType::f32, {p.experts, p.hidden});
            fill_normal(x, 1);
            fill_normal(weight, 2, 0.02);
            fill_normal(dlogits, 3, 1e-3);
            fill_normal(dx_in, 4, 1e-3);
            if (accumulate) fill_normal(dweight, 5);
            const op::RouterLogitsBackward args{.dlogits = dlogits,
                                                .x = x,
                                                .weight = weight,
                                                .dx_in = accumulate ? dx_in.view() : TensorView{},
                                                .dweight_mode = mode,
                                                .dx = dx,
                                                .dweight = dweight};
            parity.run(args);
            if (is_tensor_core_shape(p) && accumulate)
                parity.expect_close(args.dx, kInputBound, "dx");
            else
                parity.expect_same_bytes(args.dx, "dx");
            if (is_tensor_core_shape(p))
                parity.expect_close(args.dweight, kSumBound, "dweight");
            else
                parity.expect_same_bytes(args.dweight, "dweight");
        }
    }
}

// dx_in may be dx: the gate of a shared expert adds its part to the experts'.
TEST(RouterParity, InputGradientInPlace) {
    constexpr int64_t kTokens = 515, kHidden = 1288;
    for (const int64_t experts : {1, 72}) {
        for (const DType dtype : {DType::bf16, DType::f32}) {  // of the weight: tensor cores, CUDA cores
            SCOPED_TRACE(std::to_string(experts) + " " + name_of(dtype));
            Parity parity;
            HostTensor x(DType::bf16, {kTokens, kHidden}), weight(dtype, {experts, kHidden}),
                dlogits(DType::f32, {kTokens, experts}), dx(DType::bf16, {kTokens, kHidden}),
                dweight(DType::f32, {experts, kHidden});
            fill_normal(x, 1);
            fill_normal(weight, 2, 0.02);
            fill_normal(dlogits, 3, 1e-3);
            fill_normal(dx, 4, 1e-3);
            const op::RouterLogitsBackward args{
                .dlogits = dlogits, .x = x, .weight = weight, .dx_in = dx, .dx = dx, .dweight = dweight};
            parity.run(args);
            if (dtype == DType::bf16)
                parity.expect_close(args.dx, kInputBound, "dx");
            else
                parity.expect_same_bytes(args.dx, "dx");
        }
    }
}

// Against double, as above: dweight over parts of 4096 tokens, 24 experts x 48 columns of it.
TEST(RouterParity, WeightGradientOfOneSignInDouble) {
    constexpr int64_t kTokens = 4096, kHidden = 4608, kExperts = 256;
    if (too_large_here(kTokens * kHidden)) return;
    Parity parity;
    HostTensor dlogits(DType::f32, {kTokens, kExperts}), x(DType::bf16, {kTokens, kHidden}),
        weight(DType::bf16, {kExperts, kHidden}), dx(DType::bf16, {kTokens, kHidden}),
        dweight(DType::f32, {kExperts, kHidden});
    fill_uniform(dlogits, 1, 0.5, 1.0);
    fill_uniform(x, 2, 0.5, 1.0);
    fill_normal(weight, 3, 0.02);
    parity.gpu.router_logits_backward({.dlogits = parity.to_gpu(dlogits.view()),
                                       .x = parity.to_gpu(x.view()),
                                       .weight = parity.to_gpu(weight.view()),
                                       .dx = parity.to_gpu(dx.view()),
                                       .dweight = parity.to_gpu(dweight.view())});
    const HostTensor got = parity.from_gpu(dweight);
    for (int64_t e = 5; e < kExperts; e += 11) {
        for (int64_t h = 3; h < kHidden; h += 97) {
            double want = 0;
            for (int64_t t = 0; t < kTokens; ++t) want += dlogits(t * kExperts + e) * x(t * kHidden + h);
            ASSERT_NEAR(got(e * kHidden + h), want, 5e-5 * want) << e << ", " << h;
        }
    }
}

struct Choice {
    int64_t tokens, experts, topk;
    op::RouterOptions options;
    bool with_bias = false;
};
std::vector<Choice> choices() {
    std::vector<Choice> all;
    const op::RouterOptions post{}, pre{.pre_softmax = true},
        sigmoid{.score = Score::sigmoid, .scaling_factor = 2.5f},
        as_it_is{.score = Score::sigmoid, .normalise = false};
    for (const int64_t tokens : {0, 1, 127, 128, 129})
        for (const int64_t experts : {1, 8, 64, 256, 512})
            for (const int64_t topk : {int64_t{1}, int64_t{2}, int64_t{8}, experts}) {
                if (topk > experts || (topk == 512 && tokens > 1)) continue;
                for (const op::RouterOptions& options : {post, pre, sigmoid, as_it_is})
                    all.push_back(
                        {tokens, experts, topk, options, options.score == Score::sigmoid && topk != 2});
            }
    for (op::RouterOptions options : {post, pre, sigmoid}) {  // group-limited
        options.num_groups = 8;
        options.group_topk = 4;
        all.push_back({200, 256, 8, options, options.score == Score::sigmoid});
        options.group_topk = 1;
        all.push_back({65, 64, 6, options, false});
        options.num_groups = 3;
        options.group_topk = 2;
        all.push_back({40, 96, 5, options, options.score == Score::sigmoid});
    }
    all.push_back({5000, 64, 6, sigmoid, true});
    return all;
}

// Logits with ties (few distinct values in the second half of the tokens) and values that are not finite.
void fill_logits(const HostTensor& logits) {
    const int64_t tokens = logits.view().dim(0), experts = logits.view().dim(1);
    fill_normal(logits, 31, 2.0);
    float* values = logits.as<float>();
    for (int64_t i = tokens / 2 * experts; i < tokens * experts; ++i) values[i] = std::round(values[i]);
    if (tokens < 20) return;
    for (int64_t e = 0; e < experts; ++e) {
        values[3 * experts + e] = kNan;
        values[4 * experts + e] = -kInf;
        if (e % 3 == 1) values[5 * experts + e] = kNan;
        if (e % 5 == 2) values[6 * experts + e] = kInf;
        if (e % 2 == 0) values[7 * experts + e] = -kInf;
        values[8 * experts + e] = e % 2 == 0 ? 0.0f : -0.0f;
        values[9 * experts + e] *= 50.0f;
    }
}

std::string name_of(const Choice& c) {
    return "T " + std::to_string(c.tokens) + ", E " + std::to_string(c.experts) + ", K " +
           std::to_string(c.topk) +
           (c.options.score == Score::sigmoid ? c.options.normalise ? ", sigmoid" : ", sigmoid as it is"
            : c.options.pre_softmax           ? ", pre"
                                              : ", post") +
           (c.with_bias ? ", bias" : "") + ", groups " + std::to_string(c.options.num_groups) + "/" +
           std::to_string(c.options.group_topk);
}

// Both operations with all optional outputs, once as given and once without balancing, over sets of tokens.
struct Routing {
    Parity parity;
    HostTensor logits, bias, ids, probs, counts, plain, sums, squares, dprobs, earlier, dlogits, losses;
    op::RouterTopK forward;
    op::RouterTopKBackward backward;

    Routing(const Choice& c, int64_t set_tokens)
        : logits(DType::f32, {c.tokens, c.experts}),
          bias(DType::f32, {c.experts}),
          ids(DType::i32, {c.tokens, c.topk}),
          probs(DType::f32, {c.tokens, c.topk}),
          counts(DType::i64, {c.experts}),
          plain(DType::f32, {op::balance_sets(c.tokens, set_tokens), c.experts}),
          sums(DType::f32, {op::balance_blocks(c.tokens, set_tokens), c.experts}),
          squares(DType::f32, {op::balance_blocks(c.tokens, set_tokens)}),
          dprobs(DType::f32, {c.tokens, c.topk}),
          earlier(DType::f32, {1, c.experts}),
          dlogits(DType::f32, {c.tokens, c.experts}),
          losses(DType::f32, {op::kRouterLosses}) {
        fill_logits(logits);
        fill_uniform(bias, 32, -0.1, 0.1);
        fill(counts, [](int64_t e) { return static_cast<double>(100 * e); });
        fill_normal(dprobs, 33);
        fill(earlier, [](int64_t e) { return static_cast<double>(e * 31 % 17); });
        fill(losses, [](int64_t i) { return 0.5 + static_cast<double>(i); });
        const op::RouterBalance balance{
            .set_tokens = set_tokens, .counts = plain, .score_sums = sums, .log_squares = squares};
        forward = {.logits = logits,
                   .expert_bias = c.with_bias ? bias.view() : TensorView{},
                   .options = c.options,
                   .forced_ids = {},
                   .ids = ids,
                   .probs = probs,
                   .counts = counts,
                   .balance = balance};
        backward = {.logits = logits, .ids = ids, .dprobs = dprobs, .options = c.options, .dlogits = dlogits};
    }
    void add_losses() {
        backward.balance = forward.balance;
        backward.terms[0] = {.counts = plain, .weight = 0.013f};
        backward.terms[2] = {.counts = earlier, .weight = 0.07f};
        backward.z_weight = 0.7f;
        backward.losses = losses;
    }
};

TEST(RouterParity, TopKAndItsBackward) {
    for (const Choice& c : choices()) {
        if (too_large_here(4 * c.tokens * c.experts)) continue;
        SCOPED_TRACE(name_of(c));
        Routing routing(c, 0);
        routing.forward.balance = {};
        routing.parity.check_values(routing.forward);
        routing.parity.check_values(routing.backward);
    }
}

TEST(RouterParity, WithBalancing) {
    for (const Choice& c : choices()) {
        if (too_large_here(8 * c.tokens * c.experts)) continue;
        for (const int64_t set_tokens : {0, 40, 64}) {
            if (set_tokens > 0 && (c.tokens < 65 || c.topk == c.experts)) continue;
            SCOPED_TRACE(name_of(c) + ", sets of " + std::to_string(set_tokens));
            Routing routing(c, set_tokens);
            routing.parity.check_values(routing.forward);
            routing.add_losses();
            routing.parity.check_values(routing.backward);
            routing.backward.z_weight = 0.0f;  // each loss alone
            routing.parity.check_values(routing.backward);
            routing.backward.z_weight = 0.7f;
            routing.backward.terms = {};
            routing.backward.losses = {};
            routing.parity.check_values(routing.backward);
        }
    }
}

// Finite logits, so that the sums say something; and more sets, blocks and experts than above.
TEST(RouterParity, BalancingOfMany) {
    const op::RouterOptions post{}, sigmoid{.score = Score::sigmoid};
    const Choice shapes[] = {{3000, 256, 8, post},   {3000, 256, 8, sigmoid, true},
                             {2049, 64, 6, sigmoid}, {4096, 32, 4, post},
                             {1000, 160, 6, post},   {300, 512, 8, sigmoid, true},
                             {200, 640, 8, post},    {70, 1024, 8, sigmoid, true},
                             {130, 1000, 40, post},  {9000, 8, 2, sigmoid}};
    for (const Choice& c : shapes) {
        if (too_large_here(8 * c.tokens * c.experts)) continue;
        for (const int64_t set_tokens : {int64_t{0}, int64_t{33}, c.tokens / 2}) {
            SCOPED_TRACE(name_of(c) + ", sets of " + std::to_string(set_tokens));
            Routing routing(c, set_tokens);
            fill_normal(routing.logits, 41);
            routing.parity.check_values(routing.forward);
            routing.add_losses();
            routing.parity.check_values(routing.backward);
        }
    }
}

// Logits that differ in their last bits, or not at all, where a choice on shortened keys is not enough; all
// orders of equal ones.
TEST(RouterParity, NearTies) {
    const op::RouterOptions post{}, sigmoid{.score = Score::sigmoid};
    for (const int64_t experts : {8, 64, 160, 256, 512, 600})
        for (const int64_t topk : {int64_t{1}, int64_t{8}, std::min<int64_t>(experts, 31)}) {
            for (const op::RouterOptions& options : {post, sigmoid}) {
                const Choice c{96, experts, topk, options};
                SCOPED_TRACE(name_of(c));
                Routing routing(c, 0);
                fill_uniform(routing.logits, 61, 0.0, 1.0);
                float* values = routing.logits.as<float>();
                for (int64_t i = 0; i < routing.logits.numel(); ++i) {
                    const int64_t t = i / experts, steps = static_cast<int64_t>(values[i] * 1000.0f);
                    const float bases[] = {1.0f, -3.0f, 0.0f, 1e-30f};
                    // one to a few hundred units in the last place apart
                    const int32_t bits = std::bit_cast<int32_t>(bases[t % 4]) +
                                         static_cast<int32_t>(steps % (t % 3 == 0   ? 700
                                                                       : t % 3 == 1 ? 40
                                                                                    : 2));
                    values[i] = std::bit_cast<float>(bits);
                }
                routing.parity.check_values(routing.forward);
            }
        }
}

TEST(RouterParity, ForcedIds) {
    for (const op::RouterOptions& options : {op::RouterOptions{}, op::RouterOptions{.pre_softmax = true},
                                             op::RouterOptions{.score = Score::sigmoid}}) {
        const Choice c{70, 24, 3, options};
        SCOPED_TRACE(name_of(c));
        Routing routing(c, 0);
        HostTensor forced(DType::i32, {c.tokens, c.topk});
        fill(forced,
             [&](int64_t i) { return static_cast<double>((i / c.topk + i % c.topk * 7) % c.experts); });
        routing.forward.forced_ids = forced;
        routing.parity.check_values(routing.forward);
        routing.add_losses();
        routing.parity.check_values(routing.backward);
    }
}

TEST(RouterParity, ExpertBiasUpdate) {
    for (const int64_t experts : {1, 8, 300}) {
        for (const int32_t status_value : {0, 1}) {
            SCOPED_TRACE(experts);
            Parity parity;
            HostTensor counts(DType::i64, {experts}), bias(DType::f32, {experts});
            const HostTensor status = HostTensor::of<int32_t>({status_value});
            fill(counts, [](int64_t e) { return static_cast<double>(e * 37 % 11 + 1000); });
            fill_uniform(bias, 51, -0.1, 0.1);
            const op::ExpertBiasUpdate args{.counts = counts, .rate = 1e-3f, .status = status, .bias = bias};
            parity.check(args);
        }
    }
}

}  // namespace
}  // namespace fp8flow::test
