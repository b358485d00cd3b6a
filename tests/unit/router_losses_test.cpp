// The router's projection and its gradients against sums in double, and what balances experts: auxiliary loss, z-loss, bias update,
// with gradients by central differences.
#include "kernels/reference/reference_ops.h"
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

// ---- projection -------------------------------------------------------------------------------------------------------------------

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
        ASSERT_TRUE(logits.guards_intact());
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
                ASSERT_TRUE(dx.guards_intact() && dweight.guards_intact());
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
        {.dlogits = logits, .x = p.x, .weight = p.weight, .dx_in = {}, .dx = dx, .dweight = dweight});
    for (int64_t i = 0; i < dweight.numel(); ++i) EXPECT_EQ(dweight(i), 0.0);  // written, not forgotten
}

// ---- balancing losses -----------------------------------------------------------------------------------------------------------

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
        constexpr double kStep = 1e-4;
        const double* token = values.data() + i / experts * experts;
        const double at = values[i];
        values[i] = at + kStep;
        const double above = loss(token);
        values[i] = at - kStep;
        const double below = loss(token);
        values[i] = at;
        const double want = before[i] + (above - below) / (2 * kStep);
        error += (got(i) - want) * (got(i) - want);
        size += want * want;
    }
    EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(size));
}

TEST(RouterScoreSums, CountsAndSums) {
    for (auto [tokens, experts] : kShapes)
        for (op::Score score : kScores)
            for (int64_t topk : {int64_t{1}, int64_t{2}, experts}) {
                if (topk > experts) continue;
                SCOPED_TRACE(
                    fmt::format("T {} E {} K {} score {}", tokens, experts, topk, static_cast<int>(score)));
                const HostTensor logits = some_logits(tokens, experts);
                HostTensor counts(DType::f32, {experts}), sums(DType::f32, {experts});
                ReferenceOps().router_score_sums(
                    {.logits = logits, .score = score, .topk = topk, .counts = counts, .score_sums = sums});
                ASSERT_TRUE(counts.guards_intact() && sums.guards_intact());
                std::vector<double> want_counts(experts, 0), want_sums(experts, 0);
                const std::vector<double> values = to_doubles(logits);
                for (int64_t t = 0; t < tokens; ++t) {
                    const std::vector<double> scores =
                        normalized(values.data() + t * experts, experts, score);
                    std::vector<std::pair<double, int64_t>> order;  // equal logits tie: lowest id first
                    for (int64_t e = 0; e < experts; ++e) {
                        want_sums[e] += scores[e];
                        order.emplace_back(-values[t * experts + e], e);
                    }
                    std::sort(order.begin(), order.end());
                    for (int64_t k = 0; k < topk; ++k) want_counts[order[k].second] += 1;
                }
                EXPECT_EQ(to_doubles(counts), want_counts);
                for (int64_t e = 0; e < experts; ++e) EXPECT_NEAR(sums(e), want_sums[e], 1e-5 * want_sums[e]);
                EXPECT_NEAR(std::accumulate(want_counts.begin(), want_counts.end(), 0.0), tokens * topk, 0);
            }
}

TEST(RouterAuxLossBackward, CentralDifferencesAddedToWhatWasThere) {
    for (auto [tokens, experts] : kShapes)
        for (op::Score score : kScores)
            for (float weight : {0.01f, 3.0f}) {
                SCOPED_TRACE(fmt::format("T {} E {} score {}", tokens, experts, static_cast<int>(score)));
                const HostTensor logits = some_logits(tokens, experts);
                HostTensor counts(DType::f32, {experts}), dlogits(DType::f32, {tokens, experts});
                fill(counts, [](int64_t e) { return static_cast<double>((e * 37 + 5) % 23); });
                for (double earlier : {0.0, 1.0}) {
                    if (earlier == 0.0 && experts == 1)
                        continue;  // the gradient is exactly zero: nothing to be relative to
                    fill_normal(dlogits, 3, earlier);
                    const std::vector<double> before = to_doubles(dlogits);
                    ReferenceOps().router_aux_loss_backward({.logits = logits,
                                                             .counts = counts,
                                                             .score = score,
                                                             .weight = weight,
                                                             .dlogits = dlogits});
                    ASSERT_TRUE(dlogits.guards_intact());
                    expect_gradient(logits, dlogits, before, [&, n = experts](const double* token) {
                        const std::vector<double> scores = normalized(token, n, score);
                        double sum = 0;
                        for (int64_t e = 0; e < n; ++e) sum += counts(e) * scores[e];
                        return static_cast<double>(weight) * sum;
                    });
                }
            }
}

// coeff * E / (K n^2) * sum_e P_e c_e is coeff when load and scores are even; it is added to the loss, for any load as in double.
TEST(RouterAuxLossBackward, LossValue) {
    constexpr int64_t kTokens = 64, kExperts = 8, kTopk = 2;
    constexpr double kCoefficient = 0.5, kWeight = kCoefficient * kExperts / (kTopk * kTokens * kTokens);
    HostTensor logits(DType::f32, {kTokens, kExperts}), dlogits(DType::f32, {kTokens, kExperts});
    HostTensor counts(DType::f32, {kExperts}), sums(DType::f32, {kExperts}), loss(DType::f32, {1});
    const auto loss_of = [&](op::Score score, const HostTensor& with) {
        set(loss, 0, 2.0);
        dlogits.zero();
        ReferenceOps().router_score_sums(
            {.logits = with, .score = score, .topk = kTopk, .counts = counts, .score_sums = sums});
        ReferenceOps().router_aux_loss_backward({.logits = with,
                                                 .counts = counts,
                                                 .score = score,
                                                 .weight = static_cast<float>(kWeight),
                                                 .score_sums = sums,
                                                 .loss = loss,
                                                 .dlogits = dlogits});
        return loss(0);
    };
    fill(logits, [](int64_t i) {  // each token prefers the next two experts
        const int64_t distance = (i % kExperts - i / kExperts % kExperts + kExperts) % kExperts;
        return distance < kTopk ? 1.0 : 0.0;
    });
    for (op::Score score : kScores) EXPECT_NEAR(loss_of(score, logits), 2.0 + kCoefficient, 1e-6);
    const HostTensor uneven = some_logits(kTokens, kExperts);
    for (op::Score score : kScores) {
        const double got = loss_of(score, uneven);
        double want = 2.0;
        for (int64_t e = 0; e < kExperts; ++e) want += kWeight * counts(e) * sums(e);
        EXPECT_NEAR(got, want, 1e-6);
        EXPECT_GT(std::abs(want - 2.0 - kCoefficient), 1e-4);
    }
}

TEST(RouterZLoss, ValueAndGradient) {
    for (auto [tokens, experts] : kShapes) {
        SCOPED_TRACE(fmt::format("T {} E {}", tokens, experts));
        const HostTensor logits = some_logits(tokens, experts);
        const std::vector<double> values = to_doubles(logits);
        constexpr float kWeight = 0.25f, kGradWeight = 0.5f;
        const auto log_sum_squared = [&, n = experts](const double* token) {
            double sum = 0;
            for (int64_t e = 0; e < n; ++e) sum += std::exp(token[e]);
            return std::log(sum) * std::log(sum);
        };
        double want = 2.0;
        for (int64_t t = 0; t < tokens; ++t) want += kWeight * log_sum_squared(values.data() + t * experts);

        HostTensor loss = HostTensor::of<float>({2.0f}), dlogits(DType::f32, {tokens, experts});
        fill_normal(dlogits, 3);
        const std::vector<double> before = to_doubles(dlogits);
        ReferenceOps().router_z_loss({.logits = logits,
                                      .weight = kWeight,
                                      .grad_weight = kGradWeight,
                                      .loss = loss,
                                      .dlogits = dlogits});
        ASSERT_TRUE(dlogits.guards_intact() && loss.guards_intact());
        EXPECT_NEAR(loss(0), want, 1e-6 * want);
        expect_gradient(logits, dlogits, before,
                        [&](const double* token) { return kGradWeight * log_sum_squared(token); });

        HostTensor again = HostTensor::of<float>({2.0f});  // forward only, and backward only
        ReferenceOps().router_z_loss({.logits = logits, .weight = kWeight, .loss = again, .dlogits = {}});
        EXPECT_EQ(again(0), loss(0));
        HostTensor alone(DType::f32, {tokens, experts});
        fill(alone, [&](int64_t i) { return before[i]; });
        ReferenceOps().router_z_loss(
            {.logits = logits, .weight = kWeight, .grad_weight = kGradWeight, .loss = {}, .dlogits = alone});
        EXPECT_TRUE(same_bytes(alone, dlogits));
    }
}

TEST(RouterZLoss, LargeLogitsDoNotOverflow) {
    HostTensor logits(DType::f32, {1, 4}), loss = HostTensor::of<float>({0.0f}), dlogits(DType::f32, {1, 4});
    fill(logits, [](int64_t i) { return i == 2 ? 1000.0 : -1000.0; });
    dlogits.zero();
    ReferenceOps().router_z_loss(
        {.logits = logits, .weight = 1, .grad_weight = 1, .loss = loss, .dlogits = dlogits});
    EXPECT_EQ(loss(0), 1e6);
    for (int64_t e = 0; e < 4; ++e) EXPECT_EQ(dlogits(e), e == 2 ? 2000.0 : 0.0);
}

TEST(RouterLosses, NoTokens) {
    const HostTensor logits(DType::f32, {0, 4}), counts(DType::f32, {4}), sums(DType::f32, {4});
    const HostTensor loss = HostTensor::of<float>({3.0f});
    ReferenceOps ops;
    ops.router_score_sums({.logits = logits, .topk = 2, .counts = counts, .score_sums = sums});
    for (int64_t e = 0; e < 4; ++e) {
        EXPECT_EQ(counts(e), 0.0);
        EXPECT_EQ(sums(e), 0.0);
    }
    ops.router_aux_loss_backward({.logits = logits, .counts = counts, .weight = 1, .dlogits = logits});
    ops.router_z_loss({.logits = logits, .weight = 1, .grad_weight = 1, .loss = loss, .dlogits = logits});
    EXPECT_EQ(loss(0), 3.0);
}

TEST(ExpertBiasUpdate, SignOfTheExactMean) {
    // mean of {3, 1, 2, 2} is 2; of {1, 1, 0} it is 2/3
    const auto update = [](std::vector<int64_t> counts, const TensorView& status) {
        const int64_t experts = static_cast<int64_t>(counts.size());
        HostTensor bias(DType::f32, {experts});
        fill(bias, [](int64_t e) { return 0.5 + static_cast<double>(e); });
        ReferenceOps().expert_bias_update(
            {.counts = HostTensor::of(counts), .rate = 0.25f, .status = status, .bias = bias});
        EXPECT_TRUE(bias.guards_intact());
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
