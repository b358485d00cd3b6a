// SPDX-License-Identifier: MIT
// Balancing losses over ranks and micro-batches: value and gradient of each against its definition over the
// global batch, written down once more in double; and through the trainer, the same whatever the number of
// ranks and micro-batches.
#include "kernels/comm/process_group.h"
#include "kernels/reference/reference_ops.h"
#include "layers/router.h"
#include "model/train/trainer.h"

#include "tests/support/global_batch.h"
#include "tests/support/layers/layer_fixture.h"
#include "tests/support/training.h"

#include <fmt/format.h>

#include <cmath>

namespace fp8flow {
namespace {

using test::HostTensor;
using test::LayerCase;

constexpr int64_t kHidden = 128, kExperts = 8, kTopk = 2, kSequence = 8;

struct Terms {
    double aux = 0, seq = 0, global = 0, z = 0;  // coefficients
};
struct Scenario {
    std::vector<int64_t> tokens;  // of each rank in a micro-batch
    int64_t micro_batches;
    ScoreFunction score;
    Terms terms;
    GlobalLossGradient global = GlobalLossGradient::mean;

    int64_t ranks() const { return static_cast<int64_t>(tokens.size()); }
    int64_t micro_batch_tokens() const { return std::accumulate(tokens.begin(), tokens.end(), int64_t{0}); }
    // Rows of the global batch lie by micro-batch, then by rank.
    int64_t first_row(int64_t micro_batch, int64_t rank) const {
        return micro_batch * micro_batch_tokens() +
               std::accumulate(tokens.begin(), tokens.begin() + rank, int64_t{0});
    }
    std::string name() const {
        return fmt::format("{} ranks of {} tokens, {} micro-batches, {}, aux {} seq {} global {} z {}",
                           ranks(), fmt::join(tokens, "+"), micro_batches,
                           score == ScoreFunction::softmax ? "softmax" : "sigmoid", terms.aux, terms.seq,
                           terms.global, terms.z);
    }
};

struct Outcome {
    double balancing = 0, z = 0;   // summed over ranks
    std::vector<double> gradient;  // [E, H] of the router's weight, summed over ranks
};

LayerCase layer_of(const Scenario& s) {
    LayerCase c = LayerCase::of(Recipe::fp32);
    c.tokens = s.tokens;
    c.model.seq_length = kSequence;
    c.moe.num_experts = kExperts;
    c.moe.moe_router_topk = kTopk;
    c.moe.moe_router_score_function = s.score;
    const auto add = [&](BalancingLoss type, double coefficient) {
        if (coefficient == 0) return;
        c.moe.moe_router_load_balancing_type.push_back(type);
        c.moe.moe_aux_loss_coeff.push_back(coefficient);
    };
    add(BalancingLoss::aux_loss, s.terms.aux);
    add(BalancingLoss::seq_aux_loss, s.terms.seq);
    add(BalancingLoss::global_aux_loss, s.terms.global);
    c.moe.moe_z_loss_coeff = s.terms.z;
    c.moe.moe_global_aux_loss_gradient = s.global;
    return c;
}

// Tokens prefer some experts, so that the losses are far from their minimum.
double row_value(int64_t row, int64_t h) {
    constexpr int64_t kRows = 3 * 64;
    static const std::vector<double> rows = [] {
        std::vector<double> values;
        for (int64_t i = 0; i < kRows * kHidden; ++i) {
            const double shared = random_normal(5, 1, static_cast<uint64_t>(i % kHidden));
            const double own = random_normal(5, 2, static_cast<uint64_t>(i));
            values.push_back(to_float(to_bf16(static_cast<float>(0.7 * shared + own))));
        }
        return values;
    }();
    return rows.at(static_cast<size_t>(row * kHidden + h));
}

// The router alone: a step of all micro-batches without a gradient from later layers.
Outcome run(ProcessGroup& world, const Scenario& s, std::vector<double>* weight) {
    const LayerCase c = layer_of(s);
    test::RankFixture rank(world, c);
    ParameterStore store(rank.ops, c.seed);
    const Router router(store, rank.poison, c.model, c.moe, DType::f32, 0);
    store.allocate_gradients();
    const Parameter& parameter = store.all().front();
    Context ctx = rank.context();
    ctx.num_micro_batches = s.micro_batches;
    router.begin_step(ctx);
    for (int64_t m = 0; m < s.micro_batches; ++m) {
        ctx.micro_batch = m;
        ctx.grad_mode = m == 0 ? Gradient::overwrite : Gradient::accumulate;
        const HostTensor x(DType::f32, {ctx.tokens, kHidden}), dx(DType::f32, {ctx.tokens, kHidden});
        HostTensor dprobs(DType::f32, {ctx.tokens, kTopk}), none(DType::f32, {ctx.tokens, kHidden});
        dprobs.zero();
        none.zero();
        const int64_t first = s.first_row(m, world.rank());
        test::fill(x, [&](int64_t i) { return row_value(first + i / kHidden, i % kHidden); });
        ArenaScope scope(rank.saved);
        RouterSaved saved;
        router.forward(ctx, x, saved);
        router.backward(ctx, dprobs, x, saved, none, dx);
    }
    Outcome result{.balancing = test::get(router.balancing_loss(), 0), .z = test::get(router.z_loss(), 0)};
    rank.exchange.all_reduce(Reduce::sum, Ranks::world, parameter.main_grad);
    result.gradient = test::to_doubles(parameter.main_grad);
    double sums[2] = {result.balancing, result.z};
    world.all_reduce_sum(std::span<double>(sums));
    result.balancing = sums[0];
    result.z = sums[1];
    *weight = test::to_doubles(parameter.master);
    return result;
}

// ---- the definitions, per token: loss_t(logits) = sum_e share[t][e] * score_e(logits) + z_share[t] *
// logsumexp(logits)^2
std::vector<double> scores_of(const std::vector<double>& logits, ScoreFunction score) {
    std::vector<double> scores;
    double sum = 0;
    for (const double l : logits) {
        scores.push_back(score == ScoreFunction::softmax ? std::exp(l) : 1 / (1 + std::exp(-l)));
        sum += scores.back();
    }
    for (double& value : scores) value /= sum;
    return scores;
}

class Definition {
public:
    Definition(const Scenario& s, const std::vector<double>& weight) : s_(s) {
        const int64_t rows = s.micro_batches * s.micro_batch_tokens();
        for (int64_t t = 0; t < rows; ++t) {
            std::vector<double> logits(kExperts, 0.0);
            for (int64_t e = 0; e < kExperts; ++e)
                for (int64_t h = 0; h < kHidden; ++h)
                    logits[static_cast<size_t>(e)] +=
                        weight[static_cast<size_t>(e * kHidden + h)] * row_value(t, h);
            logits_.push_back(logits);
        }
        share_.assign(static_cast<size_t>(rows), std::vector<double>(kExperts, 0.0));
        z_share_.assign(static_cast<size_t>(rows), 0.0);
        for (int64_t m = 0; m < s.micro_batches; ++m) {
            for (int64_t r = 0; r < s.ranks(); ++r) add_rank(m, r);
            add_global(m);
        }
    }

    Outcome outcome() const {
        Outcome result{.gradient = std::vector<double>(static_cast<size_t>(kExperts * kHidden), 0.0)};
        for (size_t t = 0; t < logits_.size(); ++t) {
            const auto loss = [&](const std::vector<double>& logits, bool with_z) {
                const std::vector<double> scores = scores_of(logits, s_.score);
                double value = 0, exponentials = 0;
                for (size_t e = 0; e < scores.size(); ++e) {
                    value += share_[t][e] * scores[e];
                    exponentials += std::exp(logits[e]);
                }
                return value + (with_z ? z_share_[t] * std::log(exponentials) * std::log(exponentials) : 0.0);
            };
            const double balancing = loss(logits_[t], false);
            result.balancing += balancing;
            result.z += loss(logits_[t], true) - balancing;
            for (size_t e = 0; e < kExperts; ++e) {  // counts are constants
                std::vector<double> logits = logits_[t];
                const double dlogit = test::slope(logits[e], 1e-4, [&] { return loss(logits, true); });
                for (int64_t h = 0; h < kHidden; ++h)
                    result.gradient[e * kHidden + static_cast<size_t>(h)] +=
                        dlogit * row_value(static_cast<int64_t>(t), h);
            }
        }
        return result;
    }

private:
    // Tokens [first, first + count) by the experts that they choose.
    std::vector<double> counts(int64_t first, int64_t count) const {
        std::vector<double> chosen(kExperts, 0.0);
        for (int64_t t = first; t < first + count; ++t) {
            std::vector<std::pair<double, size_t>> order;
            for (size_t e = 0; e < kExperts; ++e) order.emplace_back(-logits_[static_cast<size_t>(t)][e], e);
            std::sort(order.begin(), order.end());
            for (size_t k = 0; k < kTopk; ++k) chosen[order[k].second] += 1;
        }
        return chosen;
    }
    // factor * E / (K n^2) * sum_e counts_e * (scores of the tokens): n tokens in the set that `counts` come
    // from.
    void add(int64_t first, int64_t count, const std::vector<double>& counts, double set, double factor) {
        for (int64_t t = first; t < first + count; ++t)
            for (size_t e = 0; e < kExperts; ++e)
                share_[static_cast<size_t>(t)][e] += factor * kExperts / (kTopk * set * set) * counts[e];
    }
    // Means over the tokens of a rank's micro-batch, then over ranks and micro-batches.
    void add_rank(int64_t m, int64_t r) {
        const int64_t first = s_.first_row(m, r), count = s_.tokens[static_cast<size_t>(r)];
        const double parts = static_cast<double>(s_.ranks() * s_.micro_batches);
        if (count == 0) return;
        add(first, count, counts(first, count), static_cast<double>(count), s_.terms.aux / parts);
        const int64_t sequences = count / kSequence;
        for (int64_t q = 0; q < sequences; ++q)
            add(first + q * kSequence, kSequence, counts(first + q * kSequence, kSequence), kSequence,
                s_.terms.seq / parts / static_cast<double>(sequences));
        for (int64_t t = first; t < first + count; ++t)
            z_share_[static_cast<size_t>(t)] += s_.terms.z / parts / static_cast<double>(count);
    }
    // The load of the global batch so far, as a mean over its micro-batches; the mean over micro-batches of
    // the loss. Megatron-LM: each rank has E / (K T^2) * sum_e counts_e * (its own scores), counts and T of
    // all ranks, and data parallelism takes the mean of the ranks' gradients, not their sum.
    void add_global(int64_t m) {
        const int64_t each = s_.micro_batch_tokens();
        std::vector<double> so_far = counts(0, (m + 1) * each);
        for (double& count : so_far) count /= static_cast<double>(m + 1);
        add(m * each, each, so_far, static_cast<double>(each),
            s_.terms.global / static_cast<double>(s_.micro_batches) /
                (s_.global == GlobalLossGradient::mean ? static_cast<double>(s_.ranks()) : 1.0));
    }

    Scenario s_;
    std::vector<std::vector<double>> logits_, share_;
    std::vector<double> z_share_;
};

const std::vector<std::vector<int64_t>> kRanks = {{64}, {32, 32}, {16, 16, 16, 16}, {48, 16}, {24, 8, 0, 32}};
const Terms kTerms[] = {{.aux = 0.5}, {.seq = 0.5}, {.global = 0.5}, {.z = 0.5}, {0.5, 0.25, 0.75, 0.125}};

TEST(BalancingRanks, ValueAndGradientAreThoseOfTheDefinition) {
    for (const auto& tokens : kRanks)
        for (const int64_t micro_batches : {1, 2, 3})
            for (const ScoreFunction score : {ScoreFunction::softmax, ScoreFunction::sigmoid})
                for (const Terms& terms : kTerms) {
                    const bool together = terms.aux > 0 && terms.z > 0;
                    if (!together && (micro_batches != 2 || score == ScoreFunction::sigmoid)) continue;
                    for (const GlobalLossGradient rule :
                         {GlobalLossGradient::mean, GlobalLossGradient::sum}) {
                        if (rule == GlobalLossGradient::sum && terms.global == 0) continue;
                        const Scenario s{tokens, micro_batches, score, terms, rule};
                        SCOPED_TRACE(s.name());
                        std::vector<Outcome> outcomes(tokens.size());
                        std::vector<std::vector<double>> weights(tokens.size());
                        run_thread_ranks(static_cast<int>(tokens.size()), test::kTestDeadline,
                                         [&](ProcessGroup& world) {
                                             const auto r = static_cast<size_t>(world.rank());
                                             outcomes[r] = run(world, s, &weights[r]);
                                         });
                        const Outcome want = Definition(s, weights[0]).outcome();
                        EXPECT_GT(want.balancing + want.z, 0);
                        EXPECT_NEAR(outcomes[0].balancing, want.balancing, 3e-6 * want.balancing);
                        EXPECT_NEAR(outcomes[0].z, want.z, 3e-6 * want.z);
                        EXPECT_LE(test::norm_wise_error(outcomes[0].gradient, want.gradient), 1e-5);
                        if (HasFailure()) return;
                    }
                }
}

// ---- the whole model: loss, balancing losses and the router's gradient do not see how a batch is cut, where
// the definition does not
struct Cut {
    int ranks, micro_batch_size;
};
struct Invariance {
    const char* losses;
    std::vector<Cut> cuts;  // of 8 sequences
};

TEST(BalancingRanks, TheModelsLossesAndGradientsFollowTheDefinitionOnEveryCut) {
    const std::vector<Invariance> cases = {
        // sets of 2 sequences: 4 micro-batches of one rank, 2 of two, 1 of four
        {"[aux_loss]", {{1, 2}, {2, 2}, {4, 2}}},
        // sequences: any cut
        {"[seq_aux_loss]", {{1, 8}, {1, 4}, {2, 4}, {2, 2}, {4, 2}, {4, 1}}},
        // micro-batches of 4 sequences, 2 of them; and of 8
        {"[global_aux_loss]", {{1, 4}, {2, 2}, {4, 1}}},
        {"[global_aux_loss]", {{1, 8}, {2, 4}, {4, 2}}},
    };
    for (const Invariance& c : cases) {
        const auto run_on = [&](const Cut& cut, double coefficient) {
            return test::train(
                test::test_config(
                    Recipe::fp32,
                    {"moe.moe_combine_order=invariant", "moe.moe_global_aux_loss_gradient=sum",
                     fmt::format("moe.moe_router_load_balancing_type={}", c.losses),
                     fmt::format("moe.moe_aux_loss_coeff=[{}]", coefficient),
                     fmt::format("moe.moe_z_loss_coeff={}", coefficient),
                     fmt::format("training.micro_batch_size={}", cut.micro_batch_size),
                     fmt::format("parallel.expert_model_parallel_size={}", std::min(cut.ranks, 2))}),
                cut.ranks, {.steps = 1});
        };
        const test::TrainingRun one = run_on(c.cuts[0], 0.5), without = run_on(c.cuts[0], 0.0);
        EXPECT_GT(one.steps[0].balancing_loss, 0.4);
        EXPECT_GT(one.steps[0].z_loss, 0.4);
        EXPECT_EQ(without.steps[0].z_loss, 0);
        const std::string router = "gradient layers.1.moe.router.weight";
        EXPECT_GT(test::norm_wise_error(one.state.at(router), without.state.at(router)), 0.1);
        for (const Cut& cut : c.cuts) {
            SCOPED_TRACE(
                fmt::format("{}, {} ranks, micro-batches of {}", c.losses, cut.ranks, cut.micro_batch_size));
            const test::TrainingRun run = run_on(cut, 0.5);
            EXPECT_NEAR(run.steps[0].lm_loss, one.steps[0].lm_loss, 1e-6);
            EXPECT_NEAR(run.steps[0].balancing_loss, one.steps[0].balancing_loss, 1e-6);
            EXPECT_NEAR(run.steps[0].z_loss, one.steps[0].z_loss, 1e-6);
            test::expect_close(run.state, one.state, "gradient ", 2e-5);
        }
    }
}

}  // namespace
}  // namespace fp8flow
