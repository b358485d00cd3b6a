// SPDX-License-Identifier: MIT
// One MoE layer as other programs use it: the same bits on any number of ranks and in every call, gradients
// that add up, a residual, flows by name, and what it refuses.
#include "layers/lone/lone_layer.h"

#include "kernels/comm/group_exchange.h"
#include "kernels/core/scalar_math.h"
#include "kernels/reference/reference_ops.h"
#include "layers/flows/cast_flow.h"
#include "tests/support/files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

constexpr int64_t kHidden = 128, kTokens = 64;

LoneLayerSpec small_spec(Recipe recipe) {
    LoneLayerSpec spec{.hidden_size = kHidden, .max_tokens = kTokens};
    spec.moe.num_experts = 4;
    spec.moe.moe_router_topk = 2;
    spec.moe.moe_ffn_hidden_size = 128;
    spec.moe.moe_shared_expert_intermediate_size = 128;
    spec.moe.moe_combine_order = CombineOrder::invariant;
    spec.precision.recipe = recipe;
    return spec;
}

struct Outcome {
    std::vector<Bf16> y, dx;                          // rows of all ranks
    std::map<std::string, std::vector<float>> grads;  // of whole tensors
};

bool same_bits(const std::vector<Bf16>& a, const std::vector<Bf16>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](Bf16 x, Bf16 z) { return x.bits == z.bits; });
}

// |a - b| / |a|
double difference(const std::vector<float>& a, const std::vector<float>& b) {
    EXPECT_EQ(a.size(), b.size());
    double error = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        error += std::pow(static_cast<double>(a[i]) - b.at(i), 2);
        size += std::pow(static_cast<double>(a[i]), 2);
    }
    return std::sqrt(error / size);
}

// One rank's layer with rows in host memory.
class OneRank {
public:
    OneRank(ProcessGroup& group, const LoneLayerSpec& spec)
        : exchange_(group, ops_, spec.moe.moe_combine_order), layer_(ops_, exchange_, spec) {}
    LoneLayer& layer() { return layer_; }
    TensorView rows(int64_t tokens, int64_t first, double scale = 1) {
        const TensorView view = arena_.tensor(DType::bf16, {tokens, kHidden}, "rows");
        for (int64_t i = 0; i < view.numel(); ++i)
            view.as<Bf16>()[i] = to_bf16(
                static_cast<float>(scale * std::sin(0.37 * static_cast<double>(first * kHidden + i))));
        return view;
    }
    static std::vector<Bf16> values(const TensorView& view) {
        return {view.as<Bf16>(), view.as<Bf16>() + view.numel()};
    }
    std::map<std::string, std::vector<float>> gradients() {
        std::map<std::string, std::vector<float>> all;
        for (const Parameter& parameter : layer_.parameters().all())
            all[parameter.spec.name] = {parameter.main_grad.as<float>(),
                                        parameter.main_grad.as<float>() + parameter.numel()};
        return all;
    }

private:
    ReferenceOps ops_;
    Arena arena_{ops_.device(), "rows"};
    GroupExchange exchange_;
    LoneLayer layer_;
};

// kTokens tokens in all, divided among the ranks as given.
Outcome run(const LoneLayerSpec& spec, const std::vector<int64_t>& tokens) {
    Outcome outcome;
    std::mutex mutex;
    std::map<int, Outcome> parts;
    run_thread_ranks(static_cast<int>(tokens.size()), 60, [&](ProcessGroup& group) {
        OneRank rank(group, spec);
        const auto me = static_cast<size_t>(group.rank());
        int64_t first = 0;
        for (size_t r = 0; r < me; ++r) first += tokens[r];
        const TensorView x = rank.rows(tokens[me], first), dy = rank.rows(tokens[me], first + 1000, 0.01),
                         y = rank.rows(tokens[me], 0), dx = rank.rows(tokens[me], 0);
        rank.layer().forward(x, y);
        rank.layer().backward(dy, dx);
        rank.layer().reduce_gradients();
        const std::scoped_lock lock(mutex);
        parts[group.rank()] = {OneRank::values(y), OneRank::values(dx), rank.gradients()};
    });
    for (auto& [rank, part] : parts) {
        outcome.y.insert(outcome.y.end(), part.y.begin(), part.y.end());
        outcome.dx.insert(outcome.dx.end(), part.dx.begin(), part.dx.end());
        for (auto& [name, values] : part.grads)
            if (name.find(".experts.") != std::string::npos)
                outcome.grads[name].insert(outcome.grads[name].end(), values.begin(), values.end());
    }
    return outcome;
}

TEST(LoneLayer, RowsHaveTheSameBitsOnAnyNumberOfRanks) {
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow, Recipe::fp8_blockwise}) {
        const LoneLayerSpec spec = small_spec(recipe);
        const Outcome one = run(spec, {kTokens});
        for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{32, 32}, {64, 0}, {10, 20, 30, 4}}) {
            SCOPED_TRACE(fmt::format("recipe {}, {} ranks", static_cast<int>(recipe), tokens.size()));
            const Outcome several = run(spec, tokens);
            EXPECT_TRUE(same_bits(one.y, several.y));
            EXPECT_TRUE(same_bits(one.dx, several.dx));
            // sums over other parts of the tokens, and in FP8 other blocks of rows
            for (const auto& [name, values] : one.grads)
                EXPECT_LT(difference(values, several.grads.at(name)), recipe == Recipe::bf16 ? 1e-5 : 0.05)
                    << name;
        }
        ASSERT_EQ(one.grads.size(), 2u);
    }
}

TEST(LoneLayer, CallsDoNotDependOnThoseBefore) {
    const auto groups = make_thread_groups(1, 60);
    LoneLayerSpec spec = small_spec(Recipe::fp8_flow);
    spec.norm = true;
    OneRank rank(*groups[0], spec);
    const TensorView x = rank.rows(48, 0), dy = rank.rows(48, 7, 0.01), y = rank.rows(48, 0),
                     dx = rank.rows(48, 0);
    rank.layer().forward(x, y);
    rank.layer().backward(dy, dx);
    const std::vector<Bf16> first_y = OneRank::values(y), first_dx = OneRank::values(dx);
    const auto once = rank.gradients();
    // other rows, more of them, and a forward whose backward never comes
    const TensorView more = rank.rows(kTokens, 99);
    rank.layer().forward(more, rank.rows(kTokens, 0));
    rank.layer().forward(x, y);
    rank.layer().backward(dy, dx, Gradient::accumulate);
    EXPECT_TRUE(same_bits(first_y, OneRank::values(y)));
    EXPECT_TRUE(same_bits(first_dx, OneRank::values(dx)));
    for (const auto& [name, values] : rank.gradients())
        for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], 2 * once.at(name)[i]) << name << i;
    EXPECT_EQ(once.count("layers.0.pre_mlp_layernorm.weight"), 1u);
}

// Masters and gradients in the caller's memory: the same bits, and no state except the copies.
TEST(LoneLayer, MastersCanBeTheCallers) {
    const auto groups = make_thread_groups(1, 60);
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        LoneLayerSpec spec = small_spec(recipe);
        spec.norm = true;
        OneRank own(*groups[0], spec);
        spec.masters = Masters::callers;
        OneRank other(*groups[0], spec);
        ParameterStore& store = other.layer().parameters();
        EXPECT_EQ(store.bytes().size(), 1u);
        EXPECT_GT(store.bytes()["copies"], 0);
        std::map<std::string, std::vector<float>> gradients;
        for (const Parameter& given : own.layer().parameters().all()) {
            Parameter& parameter = store.all().at(gradients.size());
            ASSERT_EQ(parameter.spec.name, given.spec.name);
            store.write_copies(parameter, given.master, {});
            std::vector<float>& gradient = gradients[given.spec.name];
            gradient.resize(static_cast<size_t>(given.numel()));
            parameter.main_grad = given.main_grad;
            parameter.main_grad.data = gradient.data();
        }
        std::vector<std::vector<Bf16>> rows;
        for (OneRank* rank : {&own, &other}) {
            const TensorView x = rank->rows(kTokens, 0), dy = rank->rows(kTokens, 7, 0.01),
                             y = rank->rows(kTokens, 0), dx = rank->rows(kTokens, 0);
            rank->layer().forward(x, y);
            rank->layer().backward(dy, dx);
            rows.push_back(OneRank::values(y));
            rows.push_back(OneRank::values(dx));
        }
        EXPECT_TRUE(same_bits(rows[0], rows[2]));
        EXPECT_TRUE(same_bits(rows[1], rows[3]));
        EXPECT_EQ(own.gradients(), gradients);
    }
}

TEST(LoneLayer, AResidualAddsItsRowsAndItsGradient) {
    LoneLayerSpec spec = small_spec(Recipe::bf16);
    const Outcome without = run(spec, {kTokens});
    spec.residual = true;
    const Outcome with = run(spec, {kTokens});
    const auto groups = make_thread_groups(1, 60);
    OneRank rank(*groups[0], spec);
    const std::vector<Bf16> dy = OneRank::values(rank.rows(kTokens, 1000, 0.01));
    bool differs = false;
    for (size_t i = 0; i < dy.size(); ++i) {
        EXPECT_EQ(with.dx[i].bits, to_bf16(to_float(without.dx[i]) + to_float(dy[i])).bits);
        differs = differs || with.y[i].bits != without.y[i].bits;
    }
    EXPECT_TRUE(differs);
}

class Own final : public CastFlow {
public:
    using CastFlow::CastFlow;
    WeightFormat weight_format() const override { return {.plain = false, .fp8_layout = ScaleLayout::row}; }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::row; }
    ScaleLayout column_layout() const override { return ScaleLayout::group_row; }
};

// The same parts as fp8_rowwise, so the same bits.
TEST(LoneLayer, AFlowIsSelectedByItsName) {
    register_flow<Own>("lone_layer_test_own", Recipe::fp8_rowwise);
    LoneLayerSpec spec = small_spec(Recipe::fp8_rowwise);
    spec.precision.flow = "lone_layer_test_own";
    const Outcome own = run(spec, {kTokens});
    EXPECT_TRUE(same_bits(own.y, run(small_spec(Recipe::fp8_rowwise), {kTokens}).y));
    EXPECT_FALSE(same_bits(own.y, run(small_spec(Recipe::bf16), {kTokens}).y));
    EXPECT_THROW(register_flow<Own>("lone_layer_test_own", Recipe::fp8_rowwise), Error);
    EXPECT_THROW(register_flow<Own>("", Recipe::fp8_rowwise), Error);
    EXPECT_THROW(register_flow<Own>("fp8_flow", Recipe::fp8_rowwise), Error);
    spec.precision.recipe = Recipe::fp8_flow;  // not the one that it was registered with
    EXPECT_THROW(run(spec, {kTokens}), Error);
    spec.precision.recipe = Recipe::fp8_rowwise;
    spec.precision.flow = "nobody";
    EXPECT_THROW(run(spec, {kTokens}), Error);
}

TEST(LoneLayer, RefusesWhatItCannotRunWithTheNameOfTheField) {
    const auto groups = make_thread_groups(1, 60);
    const auto refused = [&](const std::function<void(LoneLayerSpec&)>& change, const std::string& name) {
        LoneLayerSpec spec = small_spec(Recipe::fp8_flow);
        change(spec);
        expect_contains(error_of(ExitCode::usage, [&] { OneRank rank(*groups[0], spec); }), name);
    };
    refused([](LoneLayerSpec& s) { s.hidden_size = 100; }, "hidden_size is 100");
    refused([](LoneLayerSpec& s) { s.max_tokens = 0; }, "max_tokens is 0");
    refused([](LoneLayerSpec& s) { s.moe.moe_ffn_hidden_size = 64; }, "moe_ffn_hidden_size is 64");
    refused([](LoneLayerSpec& s) { s.moe.moe_router_topk = 5; }, "moe_router_topk is 5");
    refused([](LoneLayerSpec& s) { s.moe.num_experts = 0; }, "num_experts is 0");
    refused([](LoneLayerSpec& s) { s.moe.moe_aux_loss_coeff = {0.1}; }, "moe_aux_loss_coeff has 1");

    OneRank rank(*groups[0], small_spec(Recipe::fp8_flow));
    const TensorView x = rank.rows(8, 0), long_x = rank.rows(kTokens + 1, 0);
    const auto refused_call = [](const std::function<void()>& call, const std::string& text) {
        expect_contains(error_of(ExitCode::usage, call), text);
    };
    refused_call([&] { rank.layer().backward(x, x); }, "without a forward");
    refused_call([&] { rank.layer().forward(long_x, long_x); }, "x is bf16[65, 128]");
    refused_call([&] { rank.layer().forward(x, long_x); }, "y is");
    rank.layer().forward(x, rank.rows(8, 0));
    refused_call([&] { rank.layer().backward(long_x, x); }, "dy is");
}

}  // namespace
}  // namespace fp8flow
