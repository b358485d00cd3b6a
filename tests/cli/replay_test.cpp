// SPDX-License-Identifier: MIT
// `fp8flow replay`: against numpy in float64 where python3 and numpy are here (scripts/compare_layer.py); and
// everywhere against closed forms, bit by bit over ranks, with the files it writes and what it says about
// input that does not fit.
#include "model/data/routing_file.h"
#include "model/safetensors/tensor_set.h"
#include "model/safetensors/writer.h"

#include "kernels/core/random.h"
#include "kernels/core/scalar_math.h"
#include "tests/cli/command.h"
#include "tests/cli/provenance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>

namespace fp8flow {
namespace {

using Tensors = std::map<std::string, std::pair<std::vector<int64_t>, std::vector<float>>>;

constexpr int64_t kH = 128, kF = 128, kE = 4;

const Texts kLayer = {"model.hidden_size=128", "moe.num_experts=4",
                      "moe.moe_router_topk=2", "moe.moe_ffn_hidden_size=128",
                      "precision.recipe=bf16", "moe.moe_combine_order=invariant"};

void save(const std::string& path, const Tensors& tensors) {
    std::ofstream file(path, std::ios::binary);
    std::vector<TensorDeclaration> declarations;
    for (const auto& [name, tensor] : tensors) declarations.push_back({name, FileDType::f32, tensor.first});
    SafetensorsWriter writer(declarations, {}, [&](const void* data, size_t bytes) {
        file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    });
    for (const auto& [name, tensor] : tensors)
        writer.append(name, tensor.second.data(), static_cast<int64_t>(tensor.second.size() * sizeof(float)));
    writer.finish();
}

std::vector<float> floats(const TensorSet& set, const std::string& name) {
    const TensorSet::Item item = set.find(name);
    EXPECT_TRUE(static_cast<bool>(item)) << name;
    std::vector<float> values(static_cast<size_t>(item.entry->numel()));
    read_floats(*item.entry, item.bytes(), 0, values);
    return values;
}

// BF16 numbers, so that nothing is rounded on the way in.
std::vector<float> normal(int64_t count, uint64_t seed, double deviation) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i)
        values[i] = round_bf16(static_cast<float>(deviation * random_normal(seed, 0, i)));
    return values;
}

Tensors layer_of(int64_t tokens) {
    Tensors all;
    all["hidden_states"] = {{tokens, kH}, normal(tokens * kH, 1, 1)};
    all["grad_output"] = {{tokens, kH}, normal(tokens * kH, 2, 1)};
    all["mlp.gate.weight"] = {{kE, kH}, normal(kE * kH, 3, 0.1)};
    for (int64_t e = 0; e < kE; ++e) {
        const auto seed = static_cast<uint64_t>(10 + 3 * e);
        const std::string prefix = fmt::format("mlp.experts.{}.", e);
        all[prefix + "gate_proj.weight"] = {{kF, kH}, normal(kF * kH, seed, 0.1)};
        all[prefix + "up_proj.weight"] = {{kF, kH}, normal(kF * kH, seed + 1, 0.1)};
        all[prefix + "down_proj.weight"] = {{kH, kF}, normal(kH * kF, seed + 2, 0.1)};
    }
    return all;
}

Texts replay(const std::string& input, const std::string& out, const Texts& settings = kLayer,
             const Texts& more = {}) {
    return with(with_settings({"replay", "--backend", "reference", "--input", input, "--out", out}, settings),
                more);
}

// 1 token leaves ranks without any.
TEST(Replay, RanksShareTokensAndExperts) {
    for (const int64_t tokens : {int64_t{1}, int64_t{11}}) {
        SCOPED_TRACE(tokens);
        const TemporaryFolder folder;
        const std::string input = folder.path("in.safetensors"), one = folder.path("one"),
                          four = folder.path("four");
        save(input, layer_of(tokens));
        succeeded(fp8flow_alone(replay(input, one)));
        // 2 ranks share the experts, twice
        succeeded(fp8flow_on_ranks(
            4, replay(input, four, with(kLayer, {"parallel.expert_model_parallel_size=2"}))));
        expect_provenance(read_json(one + "/replay.json"), "fp8flow replay ", 1);
        expect_provenance(read_json(four + "/replay.json"), "fp8flow replay ", 4);
        const TensorSet a(one + "/replay.safetensors"), b(four + "/replay.safetensors");
        for (const char* name : {"output", "router_logits", "topk_weights", "grad_hidden_states"})
            EXPECT_EQ(floats(a, name), floats(b, name)) << name;
        const auto ids_a = a.find("topk_ids").bytes(), ids_b = b.find("topk_ids").bytes();
        EXPECT_TRUE(std::equal(ids_a.begin(), ids_a.end(), ids_b.begin(), ids_b.end()));
        const TensorSet gradients_a(one + "/gradients"), gradients_b(four + "/gradients");
        ASSERT_EQ(gradients_a.names(), gradients_b.names());
        EXPECT_EQ(gradients_a.names().size(), 13u);
        for (const std::string& name : gradients_a.names()) {
            const auto x = floats(gradients_a, name), y = floats(gradients_b, name);
            double error = 0, power = 1e-30;
            for (size_t i = 0; i < x.size(); ++i) {
                error += std::pow(x[i] - y[i], 2);
                power += std::pow(x[i], 2);
            }
            EXPECT_LT(error / power, 1e-10) << name;  // sums over tokens in another order
        }
    }
}

TEST(Replay, WithoutAGradientItGoesForwardOnly) {
    const TemporaryFolder folder;
    Tensors layer = layer_of(5);
    layer.erase("grad_output");
    save(folder.path("in.safetensors"), layer);
    const CommandResult result =
        succeeded(fp8flow_alone(replay(folder.path("in.safetensors"), folder.path("out"),
                                       with(kLayer, {"precision.recipe=fp8_flow"}), {"--intermediates"})));
    expect_contains(result.out, "no grad_output in the input, so no backward");
    EXPECT_FALSE(std::filesystem::exists(folder.path("out/gradients")));
    EXPECT_FALSE(TensorSet(folder.path("out/replay.safetensors")).contains("grad_hidden_states"));
    const TensorSet stages(folder.path("out/intermediates.rank0.safetensors"));
    EXPECT_EQ(stages.names(), (Texts{"dispatch", "fc1", "fc2", "plan.first_row_of_expert", "plan.row_weight",
                                     "plan.rows_of_expert", "plan.token_of_row", "swiglu"}));
    const std::vector<int64_t> rows = stages.find("fc1").entry->shape;
    EXPECT_EQ(rows[0] % 128, 0);
    EXPECT_EQ(rows[1], 2 * kF);
    // 5 tokens, each twice; every received row is a token's, but for FP8
    int32_t counts[kE];
    std::memcpy(counts, stages.find("plan.rows_of_expert").bytes().data(), sizeof counts);
    EXPECT_EQ(counts[0] + counts[1] + counts[2] + counts[3], 10);
    const std::vector<float> received = floats(stages, "dispatch");
    const auto& x = layer.at("hidden_states").second;
    int32_t offsets[kE + 1];
    std::memcpy(offsets, stages.find("plan.first_row_of_expert").bytes().data(), sizeof offsets);
    for (int64_t e = 0; e < kE; ++e)
        for (int64_t r = offsets[e]; r < offsets[e] + counts[e]; ++r) {
            double nearest = 1e30;
            for (int64_t t = 0; t < 5; ++t) {
                double distance = 0;
                for (int64_t h = 0; h < kH; ++h)
                    distance += std::pow(
                        received[static_cast<size_t>(r * kH + h)] - x[static_cast<size_t>(t * kH + h)], 2);
                nearest = std::min(nearest, distance / kH);
            }
            EXPECT_LT(nearest, 0.002);
        }
}

// ||got - want|| / ||want||, the values given pair by pair.
size_t cell(int64_t row, int64_t column, int64_t columns) {
    return static_cast<size_t>(row * columns + column);
}

class Distance {
public:
    void add(double got, double want) {
        error_ += (got - want) * (got - want);
        power_ += want * want;
    }
    double relative() const { return std::sqrt(error_ / power_); }

private:
    double error_ = 0, power_ = 0;
};

// Every stage of every recipe follows from the stages before it: rows are the tokens that the plan says, fc1
// and fc2 are GEMMs with the weights, SwiGLU and its gradient are the closed forms, and the rows of a
// token add up to its output. Four ranks, two of which share the experts.
TEST(Replay, IntermediatesFollowFromOneAnother) {
    const TemporaryFolder folder;
    const int64_t tokens = 22;
    const Tensors layer = layer_of(tokens);
    save(folder.path("in.safetensors"), layer);
    const auto weight = [&](int64_t e, const char* which, int64_t row, int64_t column, int64_t columns) {
        return layer.at(fmt::format("mlp.experts.{}.{}_proj.weight", e, which))
            .second[cell(row, column, columns)];
    };
    for (const char* recipe :
         {"bf16", "fp8_flow", "fp8_blockwise", "fp8_tensorwise", "fp8_rowwise", "mxfp8"}) {
        SCOPED_TRACE(recipe);
        const bool invariant = std::string(recipe) != "fp8_tensorwise";  // which is refused with it
        const std::string out = folder.path(recipe);
        succeeded(fp8flow_on_ranks(
            4, replay(folder.path("in.safetensors"), out,
                      with(kLayer, {"parallel.expert_model_parallel_size=2",
                                    fmt::format("moe.moe_combine_order={}", invariant ? "invariant" : "rank"),
                                    fmt::format("precision.recipe={}", recipe)}),
                      {"--intermediates"})));
        const TensorSet results(out + "/replay.safetensors");
        EXPECT_EQ(results.names(),
                  (Texts{"grad_hidden_states", "output", "router_logits", "topk_ids", "topk_weights"}));
        const std::vector<float> output = floats(results, "output"),
                                 logits = floats(results, "router_logits"),
                                 weights = floats(results, "topk_weights");
        for (int64_t t = 0; t < tokens; ++t) {
            EXPECT_NEAR(weights[static_cast<size_t>(2 * t)] + weights[static_cast<size_t>(2 * t + 1)], 1,
                        1e-6);
            for (int64_t e = 0; e < kE; ++e) {
                double logit = 0;
                for (int64_t c = 0; c < kH; ++c)
                    logit += static_cast<double>(layer.at("mlp.gate.weight").second[cell(e, c, kH)]) *
                             layer.at("hidden_states").second[cell(t, c, kH)];
                EXPECT_NEAR(logits[cell(t, e, kE)], logit, 1e-5);
            }
        }
        std::vector<double> summed(output.size());
        std::map<std::string, Distance> off;
        std::vector<int32_t> seen(static_cast<size_t>(tokens));
        for (int rank = 0; rank < 4; ++rank) {
            const TensorSet set(fmt::format("{}/intermediates.rank{}.safetensors", out, rank));
            const auto at = [&](const char* name) { return floats(set, name); };
            const auto integers = [&](const char* name) {
                const auto bytes = set.find(name).bytes();
                std::vector<int32_t> values(bytes.size() / sizeof(int32_t));
                std::memcpy(values.data(), bytes.data(), bytes.size());
                return values;
            };
            const auto x = at("dispatch"), h = at("fc1"), a = at("swiglu"), y = at("fc2"),
                       dy = at("grad_fc2"), da = at("grad_swiglu"), dh = at("grad_fc1"),
                       dx = at("grad_dispatch"), p = at("plan.row_weight");
            const auto token_of_row = integers("plan.token_of_row"), counts = integers("plan.rows_of_expert"),
                       offsets = integers("plan.first_row_of_expert");
            EXPECT_EQ(floats(set, "grad_topk_weights").size(), rank < 3 ? 12u : 8u);  // 6, 6, 6, 4 tokens
            // order invariant: a group of each source rank and local expert, sources first
            ASSERT_EQ(counts.size(), invariant ? 4u : 2u);
            for (size_t group = 0; group < counts.size(); ++group) {
                const auto e = static_cast<int64_t>(2 * (rank % 2) + group % 2);
                for (int64_t r = offsets[group]; r < offsets[group + 1]; ++r) {
                    const int64_t t = token_of_row[static_cast<size_t>(r)];
                    if (r >= offsets[group] + counts[group]) {
                        EXPECT_EQ(t, -1);
                        continue;
                    }
                    ASSERT_TRUE(t >= 0 && t < tokens);
                    ++seen[static_cast<size_t>(t)];
                    for (int64_t c = 0; c < kH; ++c) {
                        off["dispatch"].add(x[cell(r, c, kH)],
                                            layer.at("hidden_states").second[cell(t, c, kH)]);
                        off["grad_fc2"].add(dy[cell(r, c, kH)],
                                            layer.at("grad_output").second[cell(t, c, kH)]);
                        summed[cell(t, c, kH)] += y[cell(r, c, kH)];
                        double fc2 = 0, back = 0;
                        for (int64_t f = 0; f < kF; ++f) {
                            fc2 += static_cast<double>(a[cell(r, f, kF)]) * weight(e, "down", c, f, kF);
                            back +=
                                static_cast<double>(dh[cell(r, f, 2 * kF)]) * weight(e, "gate", f, c, kH) +
                                static_cast<double>(dh[cell(r, kF + f, 2 * kF)]) * weight(e, "up", f, c, kH);
                        }
                        off["fc2"].add(y[cell(r, c, kH)], fc2);
                        off["grad_dispatch"].add(dx[cell(r, c, kH)], back);
                    }
                    const double prob = p[static_cast<size_t>(r)];
                    for (int64_t f = 0; f < kF; ++f) {
                        double gate = 0, up = 0, back = 0;
                        for (int64_t c = 0; c < kH; ++c) {
                            gate += static_cast<double>(x[cell(r, c, kH)]) * weight(e, "gate", f, c, kH);
                            up += static_cast<double>(x[cell(r, c, kH)]) * weight(e, "up", f, c, kH);
                            back += static_cast<double>(dy[cell(r, c, kH)]) * weight(e, "down", c, f, kF);
                        }
                        const double g = h[cell(r, f, 2 * kF)], u = h[cell(r, kF + f, 2 * kF)],
                                     d = da[cell(r, f, kF)], s = 1 / (1 + std::exp(-g));
                        off["fc1"].add(g, gate);
                        off["fc1"].add(u, up);
                        off["grad_swiglu"].add(d, back);
                        off["swiglu"].add(a[cell(r, f, kF)], prob * g * s * u);
                        off["grad_fc1"].add(dh[cell(r, f, 2 * kF)], prob * d * u * s * (1 + g * (1 - s)));
                        off["grad_fc1"].add(dh[cell(r, kF + f, 2 * kF)], prob * d * g * s);
                    }
                }
            }
        }
        EXPECT_EQ(seen, std::vector<int32_t>(static_cast<size_t>(tokens), 2));
        for (size_t i = 0; i < output.size(); ++i) off["output"].add(output[i], summed[i]);
        const bool plain = std::string(recipe) == "bf16";
        // a rounding to BF16 or to E4M3 in each step; weights are E4M3 too
        for (const auto& [stage, distance] : off)
            EXPECT_LT(distance.relative(), plain || stage == "output" ? 3e-3 : 3.5e-2) << stage;
        EXPECT_EQ(off.size(), 9u);
    }
}

// Ranks take their part; the router's logits stay, the weights are of the given experts.
TEST(Replay, GivenRouting) {
    const TemporaryFolder folder;
    const std::string input = folder.path("in.safetensors"), routing = folder.path("routing");
    constexpr int64_t kTokens = 11;
    save(input, layer_of(kTokens));
    std::vector<int32_t> ids;
    for (int32_t t = 0; t < kTokens; ++t) ids.insert(ids.end(), {t % 4, (t + 1) % 4});
    data::RecordedRouting(
        routing, {.layers = {0}, .tokens = kTokens, .topk = 2, .num_experts = kE, .seq_length = kTokens}, {})
        .write(0, 0, ids);
    for (const int ranks : {1, 2}) {
        succeeded(fp8flow_on_ranks(
            ranks, replay(input, folder.path("out"), kLayer, {"--routing", routing, "--overwrite"})));
        const TensorSet set(folder.path("out/replay.safetensors"));
        const auto bytes = set.find("topk_ids").bytes();
        EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), reinterpret_cast<const uint8_t*>(ids.data())));
        const std::vector<float> logits = floats(set, "router_logits"), weights = floats(set, "topk_weights");
        for (size_t t = 0; t < kTokens; ++t)
            EXPECT_NEAR(weights[2 * t],
                        1 / (1 + std::exp(logits[t * kE + static_cast<size_t>(ids[2 * t + 1])] -
                                          logits[t * kE + static_cast<size_t>(ids[2 * t])])),
                        1e-6);
    }
    save(input, layer_of(kTokens - 1));
    expect_contains(failure(10, fp8flow_alone(replay(input, folder.path("out"), kLayer,
                                                     {"--routing", routing, "--overwrite"}))),
                    "is I16[11, 2], this run wants I16[10, 2]");
}

TEST(Replay, WhatDoesNotFitIsRefusedByName) {
    const TemporaryFolder folder;
    const auto refused = [&](const std::function<void(Tensors&)>& change, const Texts& more = {}) {
        Tensors layer = layer_of(4);
        change(layer);
        save(folder.path("in.safetensors"), layer);
        return failure(
            10, fp8flow_alone(replay(folder.path("in.safetensors"), folder.path("out"), kLayer, more)));
    };
    expect_contains(refused([](Tensors& t) { t.erase("hidden_states"); }),
                    "has no tensor \"hidden_states\" [tokens, hidden_size]");
    expect_contains(refused([](Tensors& t) {
                        t["hidden_states"].first = {2, 2 * kH};
                    }),
                    "\"hidden_states\" is F32[2, 256], want");
    expect_contains(refused([](Tensors& t) {
                        t["grad_output"] = {{1, kH}, normal(kH, 1, 1)};
                    }),
                    "\"grad_output\" has 1 tokens");
    expect_contains(refused([](Tensors& t) { t["hidden_states"].second[3] = std::nanf(""); }),
                    "1 of its values are NaN");
    expect_contains(refused([](Tensors& t) { t.erase("mlp.experts.2.up_proj.weight"); }),
                    "mlp.experts.2.up_proj.weight\" is missing");
    expect_contains(refused([](Tensors& t) { t.erase("mlp.gate.weight"); }), "no router of layer 0");
    expect_contains(refused([](Tensors&) {}, {"--weights", folder.path("none.safetensors")}),
                    "none.safetensors: No such file");
    expect_contains(refused([](Tensors&) {}, {"--norm"}), "post_attention_layernorm.weight\" is missing");
}

TEST(Replay, AgreesWithNumpyInFloat64) {
    const std::string script = FP8FLOW_SOURCE_DIR "/scripts/compare_layer.py";
    for (const Texts& options :
         {Texts{"--ranks", "1"}, Texts{"--ranks", "1", "--norm"},
          Texts{"--ranks", "2", "--recipes", "bf16,fp8_flow", "--stages"},
          Texts{"--recipes", "fp8_tensorwise,fp8_rowwise,mxfp8", "--families", "deepseek_v3"}}) {
        const Texts line =
            with({"python3", script, "--fp8flow", FP8FLOW_EXECUTABLE, "--backend", "reference"}, options);
        const CommandResult result = RunningCommand(line, "").wait(280);
        if (result.status == 77 || result.status == 127) GTEST_SKIP() << "python3 with numpy is not here";
        EXPECT_EQ(result.status, 0) << result.out << result.err;
        expect_contains(result.out, "all within their bounds");
    }
}

// Gradients of three experts: of one that are equal, of one without tokens, and of one that this program got
// wrong. The largest error must be NaN for a NaN, and infinite where a gradient is expected to be zero.
TEST(Replay, TheComparisonHidesNoWrongGradient) {
    const std::string program = R"(import sys
sys.path.insert(0, sys.argv[1])
try:
    import numpy as np
except ImportError:
    sys.exit(77)
import compare_torch
layer = {"output": np.ones(2), "grad_hidden_states": np.ones(2)}
for last, want in ((1, 1), (float("nan"), 1), (1, 0)):
    got = {"mlp.experts": np.array([[[1.0]], [[0.0]], [[last]]])}
    wanted = {"mlp.experts": np.array([[[1.0]], [[0.0]], [[want]]])}
    print(compare_torch.block_errors(layer, got, layer, wanted)["d experts"])
)";
    const CommandResult result =
        RunningCommand({"python3", "-c", program, FP8FLOW_SOURCE_DIR "/scripts"}, "").wait(60);
    if (result.status == 77 || result.status == 127) GTEST_SKIP() << "python3 with numpy is not here";
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.out, "0.0\nnan\ninf\n");
}

}  // namespace
}  // namespace fp8flow
