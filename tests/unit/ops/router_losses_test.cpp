// SPDX-License-Identifier: MIT
// The router's projection and its gradients against sums in double, and what balances experts: auxiliary
// loss, z-loss, bias update, with gradients by central differences.
#include "kernels/reference/reference_ops.h"
#include "tests/support/files.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace fp8flow::test {
namespace {

constexpr op::Score kScores[] = {op::Score::softmax, op::Score::sigmoid};
const std::pair<int64_t, int64_t> kShapes[] = {{1, 1},   {7, 2},  {16, 3},  {9, 8},  {5, 31}, {4, 32},
                                               {33, 33}, {3, 64}, {2, 257}, {2, 512}};  // tokens, experts

const std::pair<int64_t, int64_t> kBalanceShapes[] = {{1, 1}, {7, 2}, {70, 3}, {33, 33}, {2, 257}};

// ---- projection

struct Projection {
    int64_t tokens, hidden, experts;
    HostTensor x, weight;

    Projection(int64_t t, int64_t h, int64_t e, DType dtype)
        : tokens(t), hidden(h), experts(e), x(dtype, {t, h}), weight(dtype, {e, h}) {
        fill_normal(x, 1);
        fill_normal(weight, 2, 0.1);
    }
};

std::vector<Projection> projections() {
    std::vector<Projection> list;
    for (DType dtype : {DType::bf16, DType::f32})
        for (auto [t, h, e] : {std::array<int64_t, 3>{1, 1, 1},
                               {5, 7, 3},
                               {70, 130, 8},
                               {9, 64, 33},
                               {33, 257, 64},
                               {600, 12, 5},
                               {3, 700, 6},
                               {2, 32, 512}})
            list.emplace_back(t, h, e, dtype);
    return list;
}

// Blocks of 256 terms are fma chains; the chains are added in ascending order.
class BlockedChain {
public:
    void add(double a, double b) {
        if (terms_ > 0 && terms_ % 256 == 0) close();
        chain_ = std::fma(static_cast<float>(a), static_cast<float>(b), chain_);
        ++terms_;
    }
    float value() {
        close();
        return total_;
    }

private:
    void close() {
        total_ = terms_ <= 256 ? chain_ : total_ + chain_;
        chain_ = 0;
    }
    float chain_ = 0, total_ = 0;
    int64_t terms_ = 0;
};

TEST(RouterLogits, BlocksOfFmaChainsInAscendingOrder) {
    for (const Projection& p : projections()) {
        HostTensor logits(DType::f32, {p.tokens, p.experts});
        ReferenceOps().router_logits({.x = p.x, .weight = p.weight, .logits = logits});
        for (int64_t t = 0; t < p.tokens; ++t)
            for (int64_t e = 0; e < p.experts; ++e) {
                BlockedChain chain;
                double sum = 0, size = 0;
                for (int64_t h = 0; h < p.hidden; ++h) {
                    const double a = p.x(t * p.hidden + h), b = p.weight(e * p.hidden + h);
                    chain.add(a, b);
                    sum += a * b;
                    size += std::abs(a * b);
                }
                const float got = static_cast<float>(logits(t * p.experts + e));
                ASSERT_EQ(got, chain.value()) << "token " << t << " expert " << e;
                ASSERT_NEAR(got, sum, 1e-5 * size);
            }
    }
}

TEST(RouterLogitsBackward, SumsInDouble) {
    for (const Projection& p : projections())
        for (bool has_dx_in : {false, true})
            for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
                const DType dtype = p.x.view().dtype;
                HostTensor dlogits(DType::f32, {p.tokens, p.experts}), dx_in(dtype, {p.tokens, p.hidden});
                HostTensor dx(dtype, {p.tokens, p.hidden}), dweight(DType::f32, {p.experts, p.hidden});
                fill_normal(dlogits, 3);
                fill_normal(dx_in, 4);
                if (mode == Gradient::accumulate) fill_normal(dweight, 5);
                const std::vector<double> before = to_doubles(dweight);
                ReferenceOps().router_logits_backward({.dlogits = dlogits,
                                                       .x = p.x,
                                                       .weight = p.weight,
                                                       .dx_in = has_dx_in ? dx_in : TensorView{},
                                                       .dweight_mode = mode,
                                                       .dx = dx,
                                                       .dweight = dweight});
                for (int64_t t = 0; t < p.tokens; ++t)
                    for (int64_t h = 0; h < p.hidden; ++h) {
                        double sum = has_dx_in ? dx_in(t * p.hidden + h) : 0, size = std::abs(sum);
                        for (int64_t e = 0; e < p.experts; ++e) {
                            const double term = dlogits(t * p.experts + e) * p.weight(e * p.hidden + h);
                            sum += term;
                            size += std::abs(term);
                        }
                        const double rounding = dtype == DType::bf16 ? std::abs(sum) * 0x1p-8 : 0;
                        ASSERT_NEAR(dx(t * p.hidden + h), sum, rounding + 1e-6 * size);
                    }
                for (int64_t e = 0; e < p.experts; ++e)
                    for (int64_t h = 0; h < p.hidden; ++h) {
                        const int64_t i = e * p.hidden + h;
                        double sum = mode == Gradient::accumulate ? before[i] : 0, size = std::abs(sum);
                        BlockedChain chain;
                        for (int64_t t = 0; t < p.tokens; ++t) {
                            const double a = dlogits(t * p.experts + e), b = p.x(t * p.hidden + h);
                            chain.add(a, b);
                            sum += a * b;
                            size += std::abs(a * b);
                        }
                        ASSERT_NEAR(dweight(i), sum, 1e-6 * size);
                        ASSERT_TRUE(mode == Gradient::accumulate || dweight(i) == chain.value());
                    }
            }
}

TEST(RouterLogits, NoTokens) {
    const Projection p(0, 16, 4, DType::bf16);
    const HostTensor logits(DType::f32, {0, 4}), dx(DType::bf16, {0, 16}), dweight(DType::f32, {4, 16});
    ReferenceOps().router_logits({.x = p.x, .weight = p.weight, .logits = logits});
    ReferenceOps().router_logits_backward(
        {.dlogits = logits, .x = p.x, .weight = p.weight, .dx = dx, .dweight = dweight});
    for (int64_t i = 0; i < dweight.numel(); ++i) EXPECT_EQ(dweight(i), 0.0);  // written, not forgotten
}

// ---- balancing losses

std::vector<double> normalized(const double* logits, int64_t experts, op::Score score) {
    std::vector<double> values;
    for (int64_t e = 0; e < experts; ++e)
        values.push_back(score == op::Score::softmax ? std::exp(logits[e]) : 1 / (1 + std::exp(-logits[e])));
    const double sum =
        std::accumulate(values.begin(), values.end(), score == op::Score::softmax ? 0.0 : 1e-20);
    for (double& v : values) v /= sum;
    return values;
}

HostTensor some_logits(int64_t tokens, int64_t experts) {  // on a grid: near ties do not occur
    HostTensor logits(DType::f32, {tokens, experts});
    fill(logits, [&](int64_t i) { return std::round(64 * random_normal(7, experts, i)) / 64; });
    return logits;
}

// Checks got - before against the central differences of loss(logits), token by token.
template <class Loss>
void expect_gradient(const HostTensor& logits, const HostTensor& got, const std::vector<double>& before,
                     Loss loss) {
    const int64_t tokens = logits.view().dim(0), experts = logits.view().dim(1);
    std::vector<double> values = to_doubles(logits);
    double error = 0, size = 0;
    for (int64_t i = 0; i < tokens * experts; ++i) {
        const double* token = values.data() + i / experts * experts;
        const double want = before[i] + slope(values[i], 1e-4, [&] { return loss(token); });
        error += (got(i) - want) * (got(i) - want);
        size += want * want;
    }
    EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(size));
}

// router_top_k and its backward on given logits, with everything that balancing needs.
struct Balanced {
    int64_t tokens, experts, topk, sets, blocks;
    HostTensor logits, ids, probs, chosen, counts, sums, log_squares, dprobs, dlogits, losses;
    op::RouterTopK forward;
    op::RouterTopKBackward backward;

    Balanced(HostTensor some, int64_t k, op::Score score, int64_t set_tokens = 0)
        : tokens(some.view().dim(0)),
          experts(some.view().dim(1)),
          topk(k),
          sets(op::balance_sets(tokens, set_tokens)),
          blocks(op::balance_blocks(tokens, set_tokens)),
          logits(std::move(some)),
          ids(DType::i32, {tokens, topk}),
          probs(DType::f32, {tokens, topk}),
          chosen(DType::i64, {experts}),
          counts(DType::f32, {sets, experts}),
          sums(DType::f32, {blocks, experts}),
          log_squares(DType::f32, {blocks}),
          dprobs(DType::f32, {tokens, topk}),
          dlogits(DType::f32, {tokens, experts}),
          losses(DType::f32, {op::kRouterLosses}) {
        chosen.zero();
        fill_normal(dprobs, 5);
        fill(losses, [](int64_t i) { return i == 1 ? 3.0 : 2.0; });
        const op::RouterBalance balance{
            .set_tokens = set_tokens, .counts = counts, .score_sums = sums, .log_squares = log_squares};
        forward = {.logits = logits,
                   .options = {.score = score},
                   .ids = ids,
                   .probs = probs,
                   .counts = chosen,
                   .balance = balance};
        backward = {.logits = logits,
                    .ids = ids,
                    .dprobs = dprobs,
                    .options = {.score = score},
                    .balance = balance,
                    .losses = losses,
                    .dlogits = dlogits};
        ReferenceOps().router_top_k(forward);
    }
    // Runs the backward; what dlogits is then.
    std::vector<double> gradient() {
        ReferenceOps().router_top_k_backward(backward);
        return to_doubles(dlogits);
    }
    int64_t first_block(int64_t s) const {
        return sets == 1 ? 0 : s * ceil_div(forward.balance.set_tokens, op::kScoreBlock);
    }
};

constexpr int64_t kSetTokens[] = {0, 3, 40};

TEST(RouterBalance, CountsAndSumsOfSets) {
    for (auto [tokens, experts] : kBalanceShapes)
        for (op::Score score : kScores)
            for (int64_t set_tokens : kSetTokens)
                for (int64_t topk : {int64_t{1}, int64_t{2}, experts}) {
                    if (topk > experts) continue;
                    SCOPED_TRACE(fmt::format("T {} E {} K {} score {} sets of {}", tokens, experts, topk,
                                             static_cast<int>(score), set_tokens));
                    const Balanced b(some_logits(tokens, experts), topk, score, set_tokens);
                    ASSERT_EQ(b.sets, set_tokens == 0 ? 1 : (tokens + set_tokens - 1) / set_tokens);
                    const std::vector<double> values = to_doubles(b.logits);
                    for (int64_t s = 0; s < b.sets; ++s) {
                        std::vector<double> want_counts(experts, 0), want_sums(experts, 0);
                        const int64_t size = set_tokens == 0 ? tokens : set_tokens,
                                      end = std::min(tokens, (s + 1) * size);
                        for (int64_t t = s * size; t < end; ++t) {
                            const std::vector<double> scores =
                                normalized(values.data() + t * experts, experts, score);
                            std::vector<std::pair<double, int64_t>>
                                order;  // equal logits tie: lowest id first
                            for (int64_t e = 0; e < experts; ++e) {
                                want_sums[e] += scores[e];
                                order.emplace_back(-values[t * experts + e], e);
                            }
                            std::sort(order.begin(), order.end());
                            for (int64_t k = 0; k < topk; ++k) want_counts[order[k].second] += 1;
                        }
                        const int64_t last = s + 1 < b.sets ? b.first_block(s + 1) : b.blocks;
                        for (int64_t e = 0; e < experts; ++e) {
                            EXPECT_EQ(b.counts(s * experts + e), want_counts[e]);
                            double sum = 0;
                            for (int64_t i = b.first_block(s); i < last; ++i) sum += b.sums(i * experts + e);
                            EXPECT_NEAR(sum, want_sums[e], 1e-5 * want_sums[e]);
                        }
                    }
                }
}

// A token alone is its own block, so that its scores can be read off; then pieces of two tokens and blocks of
// 32 as stated, bit by bit.
TEST(RouterBalance, SumsInTheStatedOrder) {
    constexpr int64_t kTokens = 77, kExperts = 40, kSet = 43;  // blocks of 32, 11 and 32, 2 tokens
    const Balanced all(some_logits(kTokens, kExperts), 2, op::Score::softmax, kSet);
    ASSERT_EQ(all.blocks, 4);
    const int64_t starts[] = {0, 32, 43, 75, kTokens};
    for (int64_t block = 0; block < 4; ++block) {
        std::vector<float> want(kExperts, 0.0f), squares(32, 0.0f), piece;
        for (int64_t t = starts[block]; t < starts[block + 1]; ++t) {
            HostTensor one(DType::f32, {1, kExperts});
            fill(one, [&](int64_t e) { return all.logits(t * kExperts + e); });
            const Balanced alone(std::move(one), 2, op::Score::softmax);
            squares[t - starts[block]] = static_cast<float>(alone.log_squares(0));
            const bool first = (t - starts[block]) % 2 == 0;
            if (first) piece.assign(kExperts, 0.0f);
            for (int64_t e = 0; e < kExperts; ++e) piece[e] += static_cast<float>(alone.sums(e));
            if (first && t + 1 < starts[block + 1]) continue;
            for (int64_t e = 0; e < kExperts; ++e) want[e] += piece[e];
        }
        for (int64_t e = 0; e < kExperts; ++e)
            ASSERT_EQ(all.sums(block * kExperts + e), want[e]) << block << ", " << e;
        for (std::size_t distance = 16; distance > 0; distance /= 2)
            for (std::size_t i = 0; i < distance; ++i) squares[i] += squares[i + distance];
        ASSERT_EQ(all.log_squares(block), squares[0]) << block;
    }
}

TEST(RouterBalance, PlainChoiceIgnoresBiasGroupsAndForcedIds) {
    constexpr int64_t kTokens = 33, kExperts = 16;
    const Balanced plain(some_logits(kTokens, kExperts), 4, op::Score::sigmoid);
    HostTensor bias(DType::f32, {kExperts}), forced(DType::i32, {kTokens, 4});
    fill(bias, [](int64_t e) { return e < 3 ? 5.0 : 0.0; });
    for (int64_t i = 0; i < forced.numel(); ++i) forced.as<int32_t>()[i] = static_cast<int32_t>(i % 4);
    for (int variant = 0; variant < 3; ++variant) {
        Balanced other(some_logits(kTokens, kExperts), 4, op::Score::sigmoid);
        if (variant == 0) other.forward.expert_bias = bias;
        if (variant == 1) other.forward.options.num_groups = 4, other.forward.options.group_topk = 1;
        if (variant == 2) other.forward.forced_ids = forced;
        ReferenceOps().router_top_k(other.forward);
        EXPECT_FALSE(same_bytes(other.ids, plain.ids)) << variant;
        EXPECT_TRUE(same_bytes(other.counts, plain.counts)) << variant;
        EXPECT_TRUE(same_bytes(other.sums, plain.sums)) << variant;
    }
}

TEST(RouterTopKBackward, BalancingLossesByCentralDifferences) {
    for (auto [tokens, experts] : kShapes)
        for (op::Score score : kScores)
            for (int64_t set_tokens : {0, 3}) {
                SCOPED_TRACE(fmt::format("T {} E {} score {} sets of {}", tokens, experts,
                                         static_cast<int>(score), set_tokens));
                if (experts == 1) continue;  // the gradient is exactly zero: nothing to be relative to
                Balanced b(some_logits(tokens, experts), 1, score, set_tokens);
                const std::vector<double> before = b.gradient();
                HostTensor by_set(DType::f32, {b.sets, experts}), whole(DType::f32, {1, experts});
                fill(by_set, [](int64_t i) { return static_cast<double>((i * 37 + 5) % 23); });
                fill(whole, [](int64_t e) { return static_cast<double>((e * 11 + 3) % 17); });
                b.backward.terms[0] = {.counts = by_set, .weight = 3.0f};
                b.backward.terms[2] = {.counts = whole, .weight = 0.5f};
                b.gradient();
                int64_t calls = 0;  // two of every logit, in order
                expect_gradient(b.logits, b.dlogits, before, [&, n = experts](const double* token) {
                    const int64_t t = calls++ / (2 * n), set = set_tokens == 0 ? 0 : t / set_tokens;
                    const std::vector<double> scores = normalized(token, n, score);
                    double sum = 0;
                    for (int64_t e = 0; e < n; ++e)
                        sum += (3.0 * by_set(set * n + e) + 0.5 * whole(e)) * scores[e];
                    return sum;
                });
            }
}

// coeff * E / (K * n^2) * sum_e P_e c_e is coeff when load and scores are even; it is added to the loss, for
// any load as in double.
TEST(RouterTopKBackward, BalancingLossValue) {
    constexpr int64_t kTokens = 64, kExperts = 8, kTopk = 2;
    constexpr double kCoefficient = 0.5, kWeight = kCoefficient * kExperts / (kTopk * kTokens * kTokens);
    for (op::Score score : kScores) {
        HostTensor even(DType::f32, {kTokens, kExperts});
        fill(even, [](int64_t i) {  // each token prefers the next two experts
            const int64_t distance = (i % kExperts - i / kExperts % kExperts + kExperts) % kExperts;
            return distance < kTopk ? 1.0 : 0.0;
        });
        Balanced b(std::move(even), kTopk, score);
        b.backward.terms[1] = {.counts = b.counts, .weight = static_cast<float>(kWeight)};
        b.gradient();
        EXPECT_NEAR(b.losses(0), 2.0 + kCoefficient, 1e-6);
        EXPECT_EQ(b.losses(1), 3.0);
        EXPECT_NEAR(b.losses(2 + 1), 2.0 + kCoefficient, 1e-6);
        for (const int64_t other : {0, 2}) EXPECT_EQ(b.losses(2 + other), 2.0);
    }
    for (op::Score score : kScores)
        for (int64_t set_tokens : {0, 16, 40}) {
            Balanced b(some_logits(kTokens, kExperts), kTopk, score, set_tokens);
            HostTensor whole(DType::f32, {1, kExperts});
            fill(whole, [](int64_t e) { return static_cast<double>(e); });
            b.backward.terms[0] = {.counts = b.counts, .weight = static_cast<float>(kWeight)};
            b.backward.terms[1] = {.counts = whole, .weight = 0.25f};
            b.gradient();
            double want[2] = {2.0, 2.0};  // of each term
            for (int64_t block = 0; block < b.blocks; ++block) {
                int64_t s = b.sets - 1;
                while (b.first_block(s) > block) --s;
                for (int64_t e = 0; e < kExperts; ++e) {
                    want[0] += kWeight * b.counts(s * kExperts + e) * b.sums(block * kExperts + e);
                    want[1] += 0.25 * whole(e) * b.sums(block * kExperts + e);
                }
            }
            for (int64_t i = 0; i < 2; ++i) EXPECT_NEAR(b.losses(2 + i), want[i], 1e-6 * want[i]);
            const double together = want[0] + want[1] - 2.0;
            EXPECT_NEAR(b.losses(0), together, 1e-6 * together);
        }
}

TEST(RouterTopKBackward, ZLossValueAndGradient) {
    for (op::Score score : kScores)
        for (auto [tokens, experts] : kBalanceShapes) {
            SCOPED_TRACE(fmt::format("T {} E {}", tokens, experts));
            Balanced b(some_logits(tokens, experts), 1, score);
            const std::vector<double> before = b.gradient(), values = to_doubles(b.logits);
            constexpr float kWeight = 0.25f;
            const auto log_sum_squared = [&, n = experts](const double* token) {
                double sum = 0;
                for (int64_t e = 0; e < n; ++e) sum += std::exp(token[e]);
                return std::log(sum) * std::log(sum);
            };
            double want = 3.0;
            for (int64_t t = 0; t < tokens; ++t)
                want += kWeight * log_sum_squared(values.data() + t * experts);
            b.backward.z_weight = kWeight;
            b.gradient();
            EXPECT_EQ(b.losses(0), 2.0);
            EXPECT_NEAR(b.losses(1), want, 1e-6 * want);
            expect_gradient(b.logits, b.dlogits, before,
                            [&](const double* token) { return kWeight * log_sum_squared(token); });
            const std::vector<double> with_losses = to_doubles(b.dlogits);
            b.backward.losses = {};  // gradients alone
            EXPECT_EQ(b.gradient(), with_losses);
        }
}

TEST(RouterTopKBackward, LargeLogitsDoNotOverflow) {
    HostTensor logits(DType::f32, {1, 4});
    fill(logits, [](int64_t i) { return i == 2 ? 1000.0 : -1000.0; });
    Balanced b(std::move(logits), 1, op::Score::softmax);
    b.backward.z_weight = 1;
    b.gradient();
    EXPECT_EQ(b.losses(1), 3.0 + 1e6);
    for (int64_t e = 0; e < 4; ++e) EXPECT_EQ(b.dlogits(e), e == 2 ? 2000.0 : 0.0);
}

TEST(RouterBalance, NoTokens) {
    for (int64_t set_tokens : {0, 8}) {
        Balanced b(HostTensor(DType::f32, {0, 4}), 2, op::Score::softmax, set_tokens);
        ASSERT_EQ(b.sets, 1);
        ASSERT_EQ(b.blocks, 0);
        for (int64_t e = 0; e < 4; ++e) EXPECT_EQ(b.counts(e), 0.0);  // written, not forgotten
        b.backward.terms[0] = {.counts = b.counts, .weight = 1};
        b.backward.z_weight = 1;
        b.gradient();
        EXPECT_EQ(b.losses(0), 2.0);
        EXPECT_EQ(b.losses(1), 3.0);
    }
}

TEST(RouterBalance, WrongArgumentsAreNamed) {
    const auto message = [](auto run) { return error_or_none(ExitCode::internal, run); };
    Balanced b(some_logits(40, 4), 2, op::Score::softmax, 20);
    b.backward.terms[0] = {.counts = b.sums, .weight = 1};  // [2, E] as it happens
    EXPECT_EQ(message([&] { b.gradient(); }), "");
    HostTensor wrong(DType::f32, {3, 4});
    b.backward.terms[0].counts = wrong;
    expect_contains(message([&] { b.gradient(); }), "counts");
    b.backward.terms[0].counts = b.counts;
    b.backward.balance.score_sums = {};
    expect_contains(message([&] { b.gradient(); }), "losses without score_sums");
    b.forward.balance.score_sums = {};
    expect_contains(message([&] { ReferenceOps().router_top_k(b.forward); }),
                    "balance.counts without score_sums");
}

TEST(ExpertBiasUpdate, SignOfTheExactMean) {
    // mean of {3, 1, 2, 2} is 2; of {1, 1, 0} it is 2/3
    const auto update = [](std::vector<int64_t> counts, const TensorView& status) {
        const int64_t experts = static_cast<int64_t>(counts.size());
        HostTensor bias(DType::f32, {experts});
        fill(bias, [](int64_t e) { return 0.5 + static_cast<double>(e); });
        ReferenceOps().expert_bias_update(
            {.counts = HostTensor::of(counts), .rate = 0.25f, .status = status, .bias = bias});
        return to_doubles(bias);
    };
    EXPECT_EQ(update({3, 1, 2, 2}, {}), (std::vector<double>{0.25, 1.75, 2.5, 3.5}));
    EXPECT_EQ(update({1, 1, 0}, {}), (std::vector<double>{0.25, 1.25, 2.75}));
    EXPECT_EQ(update({0, 0}, {}), (std::vector<double>{0.5, 1.5}));
    // past what fp32 tells apart: counts 2^40 and 2^40 + 1
    EXPECT_EQ(update({int64_t{1} << 40, (int64_t{1} << 40) + 1}, {}), (std::vector<double>{0.75, 1.25}));
    const HostTensor fine = HostTensor::of<int32_t>({0}), failed = HostTensor::of<int32_t>({1});
    EXPECT_EQ(update({3, 1}, fine), (std::vector<double>{0.25, 1.75}));
    EXPECT_EQ(update({3, 1}, failed), (std::vector<double>{0.5, 1.5}));
}

}  // namespace
}  // namespace fp8flow::test
