// SPDX-License-Identifier: MIT
// The backward of the whole model against central differences of its loss, in the internal fp32 recipe
// (identity quantisers), for one rank and for two ranks that share the experts: every parameter tensor along
// random directions, and all tensors together.
#include "model/train/transformer.h"
#include "tests/support/layers/layer_fixture.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fp8flow {
namespace {

using namespace test;

constexpr double kBound = 1e-3;  // of the gradient's norm

// The objective over all ranks, and its gradient, at the model's present weights.
class Objective {
public:
    Objective(ProcessGroup& group, const LayerCase& c) : group_(group), model_(group, c) {
        for (int64_t count : c.tokens) global_tokens_ += static_cast<double>(count);
        for (const auto& block : model_.model().blocks()) {
            if (block->router() == nullptr || !block->router()->expert_bias()) continue;
            const TensorView bias = block->router()->expert_bias();
            fill(bias, [](int64_t i) { return 0.1 * static_cast<double>((i * 5) % 7) - 0.3; });
        }
        for (Parameter& p : model_.parameters().all())
            origin_.push_back({p.master.as<float>(), p.master.as<float>() + p.numel()});
        const LayerResult result = model_.step();
        offset_ = -static_cast<float>(result.loss);
        EXPECT_EQ(result.in_use, 0);
        for (Parameter& p : model_.parameters().all()) {
            std::vector<double> gradient = result.gradients.at(p.spec.name);
            if (!p.spec.expert) group_.all_reduce_sum(std::span<double>(gradient));
            gradients_.push_back(std::move(gradient));
        }
    }

    std::deque<Parameter>& parameters() { return model_.parameters().all(); }

    // |gradient| of the chosen tensors over all ranks.
    double norm(const std::vector<size_t>& chosen) {
        double squares = 0;
        for (size_t i : chosen) {
            double own = 0;
            for (double g : gradients_[i]) own += g * g;
            squares += sum_if_expert(i, own);
        }
        return std::sqrt(squares);
    }

    // <gradient, direction>, and the loss after weights += step * direction. Directions are standard normal,
    // equal on all ranks for dense tensors.
    double derivative(const std::vector<size_t>& chosen, uint64_t draw) {
        double sum = 0;
        for (size_t i : chosen) {
            double own = 0;
            for (size_t j = 0; j < gradients_[i].size(); ++j) own += gradients_[i][j] * direction(i, j, draw);
            sum += sum_if_expert(i, own);
        }
        return sum;
    }
    double loss_at(const std::vector<size_t>& chosen, uint64_t draw, double step) {
        move(chosen, draw, step);
        const LayerResult result = model_.step(offset_);
        move(chosen, draw, 0);
        double value = result.loss / global_tokens_ + result.balancing_loss + result.z_loss;
        group_.all_reduce_sum(std::span<double>(&value, 1));
        return value;
    }

private:
    double sum_if_expert(size_t i, double own) {
        if (parameters()[i].spec.expert) group_.all_reduce_sum(std::span<double>(&own, 1));
        return own;
    }
    double direction(size_t i, size_t j, uint64_t draw) {
        const uint64_t rank = parameters()[i].spec.expert ? static_cast<uint64_t>(group_.rank()) : 0;
        return random_normal(draw * 8 + rank, i, j);
    }
    void move(const std::vector<size_t>& chosen, uint64_t draw, double step) {
        for (size_t i : chosen) {
            float* weights = parameters()[i].master.as<float>();
            for (size_t j = 0; j < origin_[i].size(); ++j)
                weights[j] =
                    static_cast<float>(origin_[i][j] + step * (step == 0 ? 0 : direction(i, j, draw)));
        }
    }

    ProcessGroup& group_;
    ModelFixture model_;
    double global_tokens_ = 0;
    float offset_ = 0;
    std::vector<std::vector<float>> origin_;
    std::vector<std::vector<double>> gradients_;
};

// Richardson's extrapolation of two central differences. Where the two disagree, a choice of experts flipped
// in between (the loss has a jump there) and another direction is drawn; a wrong gradient does not make them
// disagree.
void check_direction(Objective& objective, const std::vector<size_t>& chosen, double step,
                     const std::string& what) {
    const double norm = objective.norm(chosen);
    ASSERT_GT(norm, 0) << what;
    for (uint64_t draw = 1; draw <= 12; ++draw) {
        auto difference = [&](double h) {
            return (objective.loss_at(chosen, draw, h) - objective.loss_at(chosen, draw, -h)) / (2 * h);
        };
        const double near = difference(step), far = difference(2 * step);
        if (std::abs(near - far) > 2 * kBound * norm) continue;
        const double wanted = near + (near - far) / 3;
        EXPECT_LE(std::abs(objective.derivative(chosen, draw) - wanted), kBound * norm)
            << what << ": gradient " << objective.derivative(chosen, draw) << ", difference " << wanted
            << ", |gradient| " << norm;
        return;
    }
    ADD_FAILURE() << what << ": no direction without a jump";
}

void check_gradients(const LayerCase& c) {
    run_thread_ranks(c.ranks(), 60, [&](ProcessGroup& group) {
        Objective objective(group, c);
        std::vector<size_t> all;
        for (size_t i = 0; i < objective.parameters().size(); ++i) {
            const Parameter& p = objective.parameters()[i];
            // half a percent of the initial spread; weights of norms begin at 0 or 1
            check_direction(objective, {i}, p.spec.init == Init::normal ? 0.005 * p.spec.init_std : 0.005,
                            p.spec.name);
            all.push_back(i);
        }
        check_direction(objective, all, 1e-4, "all tensors");
    });
}

LayerCase moe_case(std::vector<int64_t> tokens = {32}) {
    LayerCase c = LayerCase::of(Recipe::fp32);
    c.tokens = std::move(tokens);
    return c;
}

LayerCase everything(std::vector<int64_t> tokens) {
    LayerCase c = moe_case(std::move(tokens));
    c.model.attention = true;
    c.model.qk_layernorm = true;
    c.model.num_layers = 2;
    c.model.moe_layer_freq = {0, 1};
    c.moe.moe_shared_expert_intermediate_size = 128;
    c.moe.moe_z_loss_coeff = 0.01;
    c.moe.moe_router_load_balancing_type = {BalancingLoss::aux_loss, BalancingLoss::seq_aux_loss};
    c.moe.moe_aux_loss_coeff = {0.05, 0.02};
    return c;
}

TEST(ModelGradient, EverythingOnOneRank) { check_gradients(everything({32})); }
TEST(ModelGradient, EverythingOnTwoRanks) { check_gradients(everything({16, 32})); }
TEST(ModelGradient, RankWithoutTokens) { check_gradients(everything({0, 32})); }

// Grouped queries with biases, and a norm over all heads of a token or none. Without balancing losses: they
// count the experts that the router would have chosen, a number that jumps with the weights.
TEST(ModelGradient, BiasesAndANormOverAllHeads) {
    for (const bool norm : {true, false}) {
        LayerCase c = everything({16, 32});
        c.moe.moe_router_load_balancing_type = {};
        c.moe.moe_aux_loss_coeff = {};
        c.model.num_query_groups = c.model.num_attention_heads / 2;
        c.model.add_qkv_bias = true;
        c.model.qk_layernorm = norm;
        c.model.qk_layernorm_type = QkLayernormType::per_layer;
        check_gradients(c);
    }
}

TEST(ModelGradient, TwoMoeLayersInvariantOrderTiedEmbeddings) {
    LayerCase c = moe_case({16, 16});
    c.model.num_layers = 2;
    c.model.moe_layer_freq = {1, 1};
    c.model.untie_embeddings_and_output_weights = false;
    c.model.zero_centered_gamma = true;
    c.moe.moe_combine_order = CombineOrder::invariant;
    check_gradients(c);
}

// The probability multiplies in combine: the gradients of its own forward, in both orders.
TEST(ModelGradient, MergingWeights) {
    for (const CombineOrder order : {CombineOrder::rank, CombineOrder::invariant}) {
        LayerCase c = everything({16, 32});
        c.precision.moe_apply_probs_in = ProbsIn::combine;
        c.moe.moe_combine_order = order;
        check_gradients(c);
    }
}

TEST(ModelGradient, GatedSharedExpert) {
    LayerCase c = everything({16, 32});
    c.moe.moe_shared_expert_gate = true;
    check_gradients(c);
}

// In dense FFN, shared expert and routed experts. Without a clamp, for the loss has kinks there
// (swiglu_test).
TEST(ModelGradient, AnotherGatedUnit) {
    LayerCase c = everything({16, 32});
    c.model.glu = {.quick_geglu = true, .glu_linear_offset = 1};
    check_gradients(c);
}

TEST(ModelGradient, GlobalAuxLoss) {
    LayerCase c = moe_case({16, 32});
    c.moe.moe_router_load_balancing_type = {BalancingLoss::global_aux_loss};
    c.moe.moe_aux_loss_coeff = {0.1};
    check_gradients(c);
}

TEST(ModelGradient, SigmoidWithExpertBiasAndGroups) {
    LayerCase c = moe_case({32});
    c.forced_routing = false;
    c.moe.num_experts = 8;
    c.moe.moe_router_score_function = ScoreFunction::sigmoid;
    c.moe.moe_router_enable_expert_bias = true;
    c.moe.moe_router_bias_update_rate = 0;
    c.moe.moe_router_num_groups = 4;
    c.moe.moe_router_group_topk = 2;
    c.moe.moe_router_topk_scaling_factor = 2.5;
    c.moe.moe_router_load_balancing_type = {BalancingLoss::seq_aux_loss};
    c.moe.moe_aux_loss_coeff = {0.05};
    check_gradients(c);
}

TEST(ModelGradient, PreSoftmaxNaturalRouting) {
    LayerCase c = moe_case({16, 16});
    c.forced_routing = false;
    c.moe.moe_router_pre_softmax = true;
    c.moe.moe_router_topk_scaling_factor = 1.5;
    check_gradients(c);
}

TEST(ModelGradient, SigmoidScoresAsTheyAre) {
    LayerCase c = moe_case({16, 16});
    c.forced_routing = false;
    c.moe.moe_router_score_function = ScoreFunction::sigmoid;
    c.moe.moe_router_norm_topk_prob = false;
    check_gradients(c);
}

TEST(ModelGradient, EveryExpertChosen) {
    LayerCase c = moe_case({16});
    c.forced_routing = false;
    c.moe.moe_router_topk = 4;
    c.moe.moe_row_alignment = 1;
    check_gradients(c);
}

}  // namespace
}  // namespace fp8flow
