// SPDX-License-Identifier: MIT
// Multi-latent attention: forward and gradients against the formulas in double, with and without a latent of
// the queries and with YaRN; FP8 projections against BF16 ones; recomputation; and training.
#include "layers/attention/latent_attention.h"

#include "layers/rope.h"
#include "tests/support/checkpoints.h"
#include "tests/support/layers/layer_fixture.h"
#include "tests/support/settings.h"
#include "tests/support/training.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace fp8flow::test {
namespace {

using Values = std::vector<double>;

// ---- the formulas

ModelSpec small_model(int64_t q_lora_rank) {
    ModelSpec m;
    m.hidden_size = 24;
    m.num_attention_heads = 3;
    m.multi_latent_attention = true;
    m.q_lora_rank = q_lora_rank;
    m.kv_lora_rank = 12;
    m.qk_head_dim = 6;
    m.qk_pos_emb_head_dim = 4;
    m.v_head_dim = 5;
    m.seq_length = 5;
    m.norm_epsilon = 0.3;  // not that of the latents
    m.rope = {.rope_type = RopeType::yarn,
              .rotary_scaling_factor = 4,
              .original_max_position_embeddings = 64,
              .mscale = 0.9,
              .mscale_all_dim = 0.7};
    return m;
}

// The layer in double. Weights by the last part of their parameter's name but one.
class Formulas {
public:
    Formulas(const ModelSpec& m, std::map<std::string, Values> weights) : m_(m), w_(std::move(weights)) {
        for (const float value : rope_table(m)) table_.push_back(value);
    }

    std::map<std::string, Values>& weights() { return w_; }

    // x [T, H] -> attention's output [T, H].
    Values operator()(const Values& x, int64_t tokens) const {
        const int64_t heads = m_.num_attention_heads, nope = m_.qk_head_dim, rope = m_.qk_pos_emb_head_dim,
                      dim = nope + rope, dv = m_.v_head_dim, rank = m_.kv_lora_rank;
        const Values q_in =
            m_.q_lora_rank > 0 ? normed(times("linear_q_down_proj", x, tokens), "q_layernorm", m_.q_lora_rank)
                               : x;
        Values q = times(m_.q_lora_rank > 0 ? "linear_q_up_proj" : "linear_q_proj", q_in, tokens);
        const Values down = times("linear_kv_down_proj", x, tokens);
        Values c, k_rope;
        for (int64_t t = 0; t < tokens; ++t) {
            const auto row = down.begin() + t * (rank + rope);
            c.insert(c.end(), row, row + rank);
            k_rope.insert(k_rope.end(), row + rank, row + rank + rope);
            rotate(k_rope, t * rope, t);
        }
        const Values kv = times("linear_kv_up_proj", normed(c, "kv_layernorm", rank), tokens);
        for (int64_t row = 0; row < tokens * heads; ++row) rotate(q, row * dim + nope, row / heads);
        const double m = 0.1 * m_.rope.mscale_all_dim * std::log(m_.rope.rotary_scaling_factor) + 1;
        const double scale = m * m / std::sqrt(static_cast<double>(dim));
        Values o(at(tokens * heads * dv));
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t h = 0; h < heads; ++h) {
                Values p;
                const int64_t first = t / m_.seq_length * m_.seq_length;
                for (int64_t s = first; s <= t; ++s) {
                    double score = 0;
                    for (int64_t d = 0; d < dim; ++d)
                        score += q[at((t * heads + h) * dim + d)] *
                                 (d < nope ? kv[at((s * heads + h) * (nope + dv) + d)]
                                           : k_rope[at(s * rope + d - nope)]);
                    p.push_back(std::exp(score * scale));
                }
                const double sum = std::accumulate(p.begin(), p.end(), 0.0);
                for (int64_t s = first; s <= t; ++s)
                    for (int64_t d = 0; d < dv; ++d)
                        o[at((t * heads + h) * dv + d)] +=
                            p[at(s - first)] / sum * kv[at((s * heads + h) * (nope + dv) + nope + d)];
            }
        return times("linear_proj", o, tokens);
    }

private:
    static size_t at(int64_t i) { return static_cast<size_t>(i); }

    Values times(const std::string& name, const Values& x, int64_t tokens) const {
        const Values& w = w_.at(name);
        const int64_t k = static_cast<int64_t>(x.size()) / tokens, n = static_cast<int64_t>(w.size()) / k;
        Values y(at(tokens * n));
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t i = 0; i < n; ++i)
                for (int64_t j = 0; j < k; ++j) y[at(t * n + i)] += x[at(t * k + j)] * w[at(i * k + j)];
        return y;
    }
    Values normed(Values x, const std::string& name, int64_t rank) const {
        const Values& gamma = w_.at(name);
        for (auto row = x.begin(); row != x.end(); row += rank) {
            const double mean = std::inner_product(row, row + rank, row, 0.0) / static_cast<double>(rank);
            for (int64_t i = 0; i < rank; ++i) row[i] *= gamma[at(i)] / std::sqrt(mean + 1e-6);
        }
        return x;
    }
    void rotate(Values& x, int64_t first, int64_t token) const {
        const int64_t half = m_.qk_pos_emb_head_dim / 2;
        for (int64_t i = 0; i < half; ++i) {
            const int64_t entry = 2 * (token % m_.seq_length * half + i);
            double &low = x[at(first + i)], &high = x[at(first + half + i)];
            const double a = low, b = high, c = table_[at(entry)], s = table_[at(entry + 1)];
            low = a * c - b * s;
            high = b * c + a * s;
        }
    }

    const ModelSpec& m_;
    std::map<std::string, Values> w_;
    Values table_;
};

// What the layer gives in FP32 with a residual of zeros.
struct Layer {
    std::map<std::string, Values> weights, gradients;
    Values x, dy, y, dx;
};
Layer run_layer(const LayerCase& c) {
    Layer layer;
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        RankFixture rank(group, c);
        ParameterStore store(rank.ops, 7);
        LatentAttention attention(store, rank.poison, c.block_spec(0, 1), nullptr, "a");
        store.allocate_gradients();
        const std::vector<float> angles = rope_table(c.model);
        const TensorView table =
            rank.state.tensor(DType::f32, {c.model.seq_length, rope_dims(c.model) / 2, 2}, "rope");
        rank.ops.device().copy_in(table.data, angles.data(), angles.size() * sizeof(float), {});
        attention.set_rope_table(table);
        const int64_t tokens = rank.tokens(), hidden = c.model.hidden_size;
        HostTensor x(DType::f32, {tokens, hidden}), dy(DType::f32, {tokens, hidden}),
            zeros(DType::f32, {tokens, hidden}), y(DType::f32, {tokens, hidden}),
            dx(DType::f32, {tokens, hidden});
        fill_normal(x, 1);
        fill_normal(dy, 2);
        fill(zeros, [](int64_t) { return 0.0; });
        const auto key = [](const Parameter& p) {
            const std::string name = p.spec.name.substr(2);  // "a." and ".weight"
            return name.substr(0, name.find('.'));
        };
        for (Parameter& p : store.all()) {
            fill_bf16_normal(p.master, p.stream, p.spec.rank == 1 ? 0.5 : 0.3);
            store.write_copies(p);
            layer.weights[key(p)] = to_doubles(p.master);
        }
        Context ctx = rank.context();
        AttentionSaved saved;
        attention.forward(ctx, {.plain = x}, zeros, saved, y);
        EXPECT_EQ(static_cast<bool>(saved.q), !c.recompute.mla_up_proj);
        attention.backward(ctx, dy, {.plain = x}, saved, dx);
        for (const Parameter& p : store.all()) layer.gradients[key(p)] = to_doubles(p.main_grad);
        layer.x = to_doubles(x);
        layer.dy = to_doubles(dy);
        layer.y = to_doubles(y);
        layer.dx = to_doubles(dx);
    });
    return layer;
}

LayerCase small_case(int64_t q_lora_rank) {
    LayerCase c = LayerCase::of(Recipe::fp32);
    c.model.attention = true;
    c.model = small_model(q_lora_rank);
    c.model.moe_layer_freq = {1, 1};
    c.tokens = {10};
    return c;
}

// Gradients by central differences of the formulas, of every weight and input.
TEST(LatentAttention, MatchesTheFormulasInDouble) {
    for (const int64_t q_lora_rank : {int64_t{8}, int64_t{0}}) {
        SCOPED_TRACE(q_lora_rank);
        const LayerCase c = small_case(q_lora_rank);
        const Layer got = run_layer(c);
        EXPECT_EQ(got.weights.size(), q_lora_rank > 0 ? 7u : 5u);
        Formulas formulas(c.model, got.weights);
        EXPECT_LE(nmse(got.y, formulas(got.x, c.tokens[0])), 1e-12);
        Values x = got.x;
        const auto loss = [&] {
            const Values y = formulas(x, c.tokens[0]);
            return std::inner_product(y.begin(), y.end(), got.dy.begin(), 0.0);
        };
        const auto differences = [&](Values& of) {
            Values gradient;
            for (double& value : of) gradient.push_back(slope(value, 1e-4, loss));
            return gradient;
        };
        EXPECT_LE(nmse(got.dx, differences(x)), 1e-9);
        for (auto& [name, values] : formulas.weights())
            EXPECT_LE(nmse(got.gradients.at(name), differences(values)), 1e-9) << name;
    }
}

TEST(LatentAttention, RecomputeKeepsEveryBit) {
    for (const int64_t q_lora_rank : {int64_t{8}, int64_t{0}}) {
        LayerCase c = small_case(q_lora_rank);
        const Layer plain = run_layer(c);
        for (const bool core : {false, true}) {
            c.recompute = {.recompute_granularity = RecomputeGranularity::selective,
                           .core_attn = core,
                           .mla_up_proj = true};
            const Layer again = run_layer(c);
            EXPECT_EQ(again.y, plain.y);
            EXPECT_EQ(again.dx, plain.dx);
            EXPECT_EQ(again.gradients, plain.gradients);
        }
    }
}

// ---- a block under every recipe

LayerCase block_case(Recipe recipe, bool linears, int64_t q_lora_rank = 128) {
    LayerCase c = LayerCase::of(recipe);
    c.model.attention = true;
    c.model.multi_latent_attention = true;
    c.model.q_lora_rank = q_lora_rank;
    c.model.kv_lora_rank = 128;
    c.model.qk_head_dim = 32;
    c.model.qk_pos_emb_head_dim = 32;
    c.model.v_head_dim = 32;
    c.precision.fp8_attention_linears = linears;
    return c;
}

// Two projections more than projection_test.cpp's block: E4M3's rounding error once more.
TEST(LatentAttention, Fp8ProjectionsAreCloseToBf16) {
    for (const Recipe recipe : kRecipes) {
        if (recipe == Recipe::bf16) continue;
        SCOPED_TRACE(recipe_name(recipe));
        const LayerResult got = run_block(block_case(recipe, true))[0],
                          wanted = run_block(block_case(recipe, false))[0];
        EXPECT_LE(nmse(got.y, wanted.y), 0.015);
        EXPECT_LE(nmse(got.dx, wanted.dx), 0.03);
        EXPECT_NE(got.y, wanted.y);
        EXPECT_EQ(wanted.calls("gemm"), 15);
        EXPECT_EQ(got.calls("gemm"), 3) << "linear_kv_down_proj stays BF16";
        if (recipe == Recipe::fp8_flow) {
            EXPECT_EQ(got.casts - wanted.casts, 5);
        }
    }
}

// Every combination of what the attention drops: the same bits, and memory is freed.
TEST(LatentAttention, RecomputationInABlockKeepsEveryBit) {
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow, Recipe::fp8_tensorwise})
        for (const int64_t q_lora_rank : {int64_t{128}, int64_t{0}}) {
            LayerCase c = block_case(recipe, recipe != Recipe::bf16, q_lora_rank);
            const LayerResult plain = run_block(c)[0];
            for (int mode = q_lora_rank > 0 ? 1 : 4; mode < 8; ++mode) {
                SCOPED_TRACE(fmt::format("{}, rank {}, {}", recipe_name(recipe), q_lora_rank, mode));
                c.recompute = {.recompute_granularity = RecomputeGranularity::selective,
                               .core_attn = (mode & 1) != 0,
                               .layernorm = (mode & 2) != 0,
                               .mla_up_proj = (mode & 4) != 0};
                const LayerResult got = run_block(c)[0];
                expect_same_result(got, plain);
                EXPECT_LT(got.saved_bytes, plain.saved_bytes);
            }
        }
}

// ---- training

const Texts kLatent = {"model.multi_latent_attention=true",
                       "model.q_lora_rank=128",
                       "model.kv_lora_rank=128",
                       "model.qk_head_dim=64",
                       "model.qk_pos_emb_head_dim=64",
                       "model.v_head_dim=64"};
Config config_of(Recipe recipe, const Texts& keys) { return test_config(recipe, with(kLatent, keys)); }

TEST(LatentAttention, ConfigurationErrorsAreExact) {
    const std::pair<std::string, std::string> cases[] = {
        {"model: {multi_latent_attention: true, q_lora_rank: none}",
         "t.yaml:1:52: model.q_lora_rank: got none, want an integer in [0, 65536]"},
        {"model: {multi_latent_attention: true, qk_head_dim: 200}",
         "t.yaml:1:52: model.qk_head_dim: got 200, want at most 256 together with qk_pos_emb_head_dim"},
        {"model: {multi_latent_attention: true, qk_pos_emb_head_dim: 3}",
         "t.yaml:1:60: model.qk_pos_emb_head_dim: got 3, want a multiple of 2 in [2, 256] (nearest: 2 and "
         "4)"},
        {"model: {multi_latent_attention: true, kv_lora_rank: 96}\nprecision: {fp8_attention_linears: true}",
         "t.yaml:2:36: precision.fp8_attention_linears: got true, want q_lora_rank and kv_lora_rank "
         "multiples "
         "of 128 with it"},
        {"model: {multi_latent_attention: true, num_attention_heads: 3, num_query_groups: 2, qk_head_dim: "
         "64}\n"
         "precision: {fp8_attention_linears: true}",
         "t.yaml:2:36: precision.fp8_attention_linears: got true, want heads x (qk_head_dim + "
         "qk_pos_emb_head_dim), heads x qk_head_dim and heads x v_head_dim multiples of 128 with it"},
        {"recompute: {recompute_granularity: selective, recompute_modules: [mla_up_proj]}",
         "t.yaml:1:66: recompute.recompute_modules: got mla_up_proj, want it left out without "
         "multi_latent_attention: true"},
    };
    for (const auto& [yaml, wanted] : cases) EXPECT_EQ(config_error(yaml), wanted) << yaml;
    EXPECT_EQ(parse_config("model: {multi_latent_attention: true, q_lora_rank: null}", "t").model.q_lora_rank,
              0);
}

TEST(LatentAttention, TrainsAndResumes) {
    for (const Texts& more :
         {Texts{}, Texts{"precision.fp8_attention_linears=true", "model.q_lora_rank=0"}}) {
        const TrainingRun run = train(config_of(Recipe::fp8_flow, more), 1, {.steps = 30});
        EXPECT_LT(run.steps.back().lm_loss, run.steps.front().lm_loss - 0.3);
        const auto [whole, rest] = whole_and_resumed(config_of(Recipe::fp8_flow, more));
        expect_same_bits(rest.state, whole.state);
    }
}

TEST(LatentAttention, SchedulesRanksAndRecomputeChangeNoBit) {
    const Texts base = {"training.micro_batch_size=1", "parallel.expert_model_parallel_size=2"};
    const TrainingRun plain = train(config_of(Recipe::fp8_flow, base), 2, {.steps = 2});
    const Texts runs[] = {
        {"schedule.overlap_moe_expert_parallel_comm=true", "schedule.overlap_grad_reduce=true"},
        {"training.use_distributed_optimizer=true", "schedule.cuda_graph_impl=full_iteration"},
        {"recompute.recompute_granularity=selective",
         "recompute.recompute_modules=[mla_up_proj, core_attn]"}};
    for (const Texts& more : runs) {
        SCOPED_TRACE(more.front());
        const TrainingRun run = train(config_of(Recipe::fp8_flow, with(base, more)), 2, {.steps = 2});
        expect_same_run(run, plain);
    }
}

}  // namespace
}  // namespace fp8flow::test
