// SPDX-License-Identifier: MIT
// Weights under Hugging Face names into one MoE layer: every name and orientation against files made by hand,
// FP8 with scales, all problems listed at once and before anything changes.
#include "model/weights/load.h"

#include "tests/support/hf_models.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <sstream>

namespace fp8flow {

using namespace weights;

namespace {

using namespace test;

LayerCase moe_case() {
    LayerCase c = LayerCase::of(Recipe::fp8_flow);
    c.forced_routing = false;
    return c;
}

// One MoE layer's parameters with poisoned masters.
class Layer {
public:
    Layer(ProcessGroup& group, const LayerCase& c)
        : case_(c),
          rank_(group, c),
          store_(rank_.ops, 1),
          layer_(store_, rank_.ops.device(),
                 {.model = c.model,
                  .moe = c.moe,
                  .precision = c.precision,
                  .recompute = c.recompute,
                  .expert_parallel_rank = group.rank(),
                  .expert_parallel_size = group.size()}) {
        for (Parameter& p : store_.all()) rank_.ops.device().fill(p.master.data, 0xFF, p.master.bytes());
        store_.allocate_gradients();
    }
    std::vector<WeightTarget> targets() {
        std::vector<WeightTarget> all;
        for (Parameter& p : store_.all()) all.push_back(target_of(p));
        if (layer_.router().expert_bias()) all.push_back(bias_target(0, layer_.router().expert_bias()));
        return all;
    }
    LoadedWeights load(const std::string& path, int64_t hf_layer) {
        const TensorSet set(path);
        const HfNames names = find_names(set, hf_layer);
        return load_weights(set, names, targets(), {case_.model, case_.moe}, names.scopes(), store_,
                            rank_.ops.device());
    }
    Parameter& parameter(const std::string& ending) { return parameter_of(store_, ending); }
    TensorView bias() { return layer_.router().expert_bias(); }

private:
    LayerCase case_;
    RankFixture rank_;
    ParameterStore store_;
    MoeLayer layer_;
};

// What the experts must hold: gate rows, then up rows; tags by expert.
void expect_experts(Layer& layer, int64_t first, int64_t count) {
    const TensorView w1 = layer.parameter(".experts.linear_fc1.weight").master,
                     w2 = layer.parameter(".experts.linear_fc2.weight").master;
    int64_t wrong = 0;
    for (int64_t e = 0; e < count; ++e) {
        const int tag = static_cast<int>(10 * (first + e));
        for (int64_t r = 0; r < kF; ++r)
            for (int64_t h = 0; h < kH; ++h) {
                wrong += at(w1, (e * 2 * kF + r) * kH + h) != mark(tag + 1, r, h);
                wrong += at(w1, (e * 2 * kF + kF + r) * kH + h) != mark(tag + 2, r, h);
                wrong += at(w2, (e * kH + h) * kF + r) != mark(tag + 3, h, r);
            }
    }
    EXPECT_EQ(wrong, 0);
}

constexpr const char* kMixtral = "model.layers.7.block_sparse_moe.";
std::vector<HandMade> mixtral_tensors() {
    const std::string p = kMixtral;
    auto tensors =
        experts(p + "experts.{}.w1.weight", p + "experts.{}.w3.weight", p + "experts.{}.w2.weight");
    tensors.push_back(marked(p + "gate.weight", {kE, kH}, 99));
    return tensors;
}

// Of the router of sigmoid scores.
HandMade expert_bias(const std::string& name) {
    return {{name, FileDType::f32, {kE}},
            [](int64_t r, int64_t) { return 0.1 * static_cast<double>(r) - 0.2; }};
}
void expect_expert_bias(Layer& layer) {
    for (int64_t e = 0; e < kE; ++e)
        EXPECT_EQ(at(layer.bias(), e), static_cast<float>(0.1 * static_cast<double>(e) - 0.2));
}

TEST(HfWeights, MixtralByItsOwnNames) {
    const TemporaryFolder folder;
    auto tensors = mixtral_tensors();
    tensors.push_back(
        marked("model.layers.6.block_sparse_moe.gate.weight", {9, 9}, 1));  // another layer's business
    const std::string path = write_file(folder, "m.safetensors", tensors);
    on_one_rank([&](ProcessGroup& group) {
        Layer layer(group, moe_case());
        EXPECT_EQ(layer.load(path, 7).tensors, 13);
        expect_experts(layer, 0, kE);
        const TensorView router = layer.parameter("router.weight").master;
        for (int64_t i = 0; i < kE * kH; ++i) ASSERT_EQ(at(router, i), mark(99, i / kH, i % kH));
    });
}

// The name of the bias is next to the gate, not below it (gate.NAME).
TEST(HfWeights, MiniMaxM2ByItsOwnNames) {
    const TemporaryFolder folder;
    auto tensors = mixtral_tensors();
    tensors.push_back(expert_bias(std::string(kMixtral) + "e_score_correction_bias"));
    const std::string path = write_file(folder, "m.safetensors", tensors);
    on_one_rank([&](ProcessGroup& group) {
        LayerCase c = moe_case();
        c.moe.moe_router_score_function = ScoreFunction::sigmoid;
        c.moe.moe_router_enable_expert_bias = true;
        Layer layer(group, c);
        EXPECT_EQ(layer.load(path, 7).tensors, 14);
        expect_experts(layer, 0, kE);
        expect_expert_bias(layer);
    });
}

void expect_experts_on_two_ranks(const std::string& path, int64_t hf_layer) {
    run_thread_ranks(2, 60, [&](ProcessGroup& group) {
        LayerCase c = moe_case();
        c.tokens = {64, 64};
        Layer layer(group, c);
        layer.load(path, hf_layer);
        expect_experts(layer, 2 * group.rank(), 2);
    });
}

TEST(HfWeights, Qwen3ByItsOwnNamesOnTwoRanks) {
    const TemporaryFolder folder;
    const std::string p = "model.layers.0.mlp.";
    auto tensors = experts(p + "experts.{}.gate_proj.weight", p + "experts.{}.up_proj.weight",
                           p + "experts.{}.down_proj.weight");
    tensors.push_back(marked(p + "gate.weight", {kE, kH}, 99));
    expect_experts_on_two_ranks(write_file(folder, "m.safetensors", tensors), 0);
}

TEST(HfWeights, FusedExpertsAndNamesWithoutPrefix) {
    const TemporaryFolder folder;
    const auto fused = [](const std::string& p) {
        return std::vector<HandMade>{
            {{p + "experts.gate_up_proj", FileDType::bf16, {kE, 2 * kF, kH}},
             [](int64_t row, int64_t c) {
                 const int64_t e = row / (2 * kF), r = row % (2 * kF);
                 return mark(static_cast<int>(10 * e) + (r < kF ? 1 : 2), r % kF, c);
             }},
            {{p + "experts.down_proj", FileDType::bf16, {kE, kH, kF}},
             [](int64_t row, int64_t c) { return mark(static_cast<int>(10 * (row / kH)) + 3, row % kH, c); }},
            marked(p + "gate.weight", {kE, kH}, 99)};
    };
    for (const char* prefix : {"model.layers.3.mlp.", "layers.3.mlp.", "mlp.", ""}) {
        SCOPED_TRACE(prefix);
        expect_experts_on_two_ranks(write_file(folder, "m.safetensors", fused(prefix)), 3);
    }
}

// DeepSeek-V3: shared expert, bias, FP8 matrices with scales that are no powers of two.
LayerCase deepseek_case(int64_t hidden = kH) {
    LayerCase c = moe_case();
    c.moe.moe_shared_expert_intermediate_size = 256;
    c.moe.moe_router_score_function = ScoreFunction::sigmoid;
    c.moe.moe_router_enable_expert_bias = true;
    c.model.hidden_size = hidden;
    return c;
}

constexpr const char* kDeepSeek = "model.layers.4.mlp.";
double scale_at(int tag, int64_t r, int64_t c) {
    return 0.0123 * (tag + 1) + 0.3 * static_cast<double>(r) + 0.07 * static_cast<double>(c);
}

std::vector<HandMade> deepseek_tensors(int64_t hidden = kH) {
    const std::string p = kDeepSeek;
    std::vector<HandMade> all = {marked(p + "gate.weight", {kE, hidden}, 99),
                                 expert_bias(p + "gate.e_score_correction_bias")};
    const auto fp8 = [&](const std::string& name, int64_t rows, int64_t cols, int tag) {
        all.push_back(marked(name, {rows, cols}, tag));
        all.back().tensor.dtype = FileDType::e4m3;
        all.push_back({{name + "_scale_inv", FileDType::f32, {(rows + 127) / 128, (cols + 127) / 128}},
                       [tag](int64_t r, int64_t c) { return scale_at(tag, r, c); }});
    };
    for (int e = 0; e < kE; ++e) {
        const std::string expert = fmt::format("{}experts.{}.", p, e);
        fp8(expert + "gate_proj.weight", kF, hidden, 10 * e + 1);
        fp8(expert + "up_proj.weight", kF, hidden, 10 * e + 2);
        fp8(expert + "down_proj.weight", hidden, kF, 10 * e + 3);
    }
    fp8(p + "shared_experts.gate_proj.weight", 256, hidden, 91);
    fp8(p + "shared_experts.up_proj.weight", 256, hidden, 92);
    fp8(p + "shared_experts.down_proj.weight", hidden, 256, 93);
    return all;
}
float dequantised(int tag, int64_t r, int64_t c) {
    return to_float(to_e4m3(mark(tag, r, c))) * static_cast<float>(scale_at(tag, r / 128, c / 128));
}

TEST(HfWeights, DeepSeekV3InFp8IsDequantisedIntoTheMasters) {
    constexpr int64_t kWide = 256;  // two blocks of scales both ways
    const TemporaryFolder folder;
    const std::string path = write_file(folder, "m.safetensors", deepseek_tensors(kWide));
    on_one_rank([&](ProcessGroup& group) {
        Layer layer(group, deepseek_case(kWide));
        const LoadedWeights loaded = layer.load(path, 4);
        EXPECT_EQ(loaded.dequantised, 15);
        EXPECT_EQ(loaded.tensors, 2 + 2 * 15);
        const TensorView w1 = layer.parameter("moe.experts.linear_fc1.weight").master,
                         shared1 = layer.parameter("shared_experts.linear_fc1.weight").master,
                         shared2 = layer.parameter("shared_experts.linear_fc2.weight").master;
        for (int64_t r = 0; r < kF; ++r)
            for (int64_t h = 0; h < kWide; ++h) {
                ASSERT_EQ(at(w1, (3 * 2 * kF + r) * kWide + h), dequantised(31, r, h));
                ASSERT_EQ(at(w1, (3 * 2 * kF + kF + r) * kWide + h), dequantised(32, r, h));
            }
        for (int64_t r = 0; r < 256; ++r)
            for (int64_t h = 0; h < kWide; ++h) {
                ASSERT_EQ(at(shared1, r * kWide + h), dequantised(91, r, h));
                ASSERT_EQ(at(shared1, (256 + r) * kWide + h), dequantised(92, r, h));
                ASSERT_EQ(at(shared2, h * 256 + r), dequantised(93, h, r));
            }
        expect_expert_bias(layer);
        // the working copies follow the masters
        const Parameter& w2 = layer.parameter("moe.experts.linear_fc2.weight");
        EXPECT_NEAR(to_float(E4m3{w2.fprop.data.bytes_ptr()[5]}) *
                        static_cast<double>(w2.fprop.scales.as<float>()[0]),
                    at(w2.master, 5), 0.07 * std::abs(at(w2.master, 5)));
    });
}

// Every line of the error of a load that must fail; the masters keep their poison.
std::set<std::string> problems(const std::vector<HandMade>& tensors, const LayerCase& c, int64_t hf_layer) {
    const TemporaryFolder folder;
    const std::string path = write_file(folder, "m.safetensors", tensors);
    std::set<std::string> lines;
    on_one_rank([&](ProcessGroup& group) {
        Layer layer(group, c);
        std::istringstream text(error_or_none(ExitCode::data, [&] { layer.load(path, hf_layer); }));
        for (std::string line; std::getline(text, line);) {
            EXPECT_TRUE(line.starts_with(path + ": ")) << line;
            lines.insert(line.substr(path.size() + 2));
        }
        EXPECT_FALSE(lines.empty()) << "no error was thrown";
        if (!lines.empty() && lines.begin()->find("NaN") == std::string::npos)
            for (const WeightTarget& target : layer.targets()) {
                if (target.parameter == nullptr) continue;
                EXPECT_TRUE(std::isnan(at(target.values, 0))) << target.spec.name;
            }
    });
    return lines;
}

HandMade& named(std::vector<HandMade>& tensors, const std::string& name) {
    for (HandMade& made : tensors)
        if (made.tensor.name == kDeepSeek + name) return made;
    throw std::runtime_error("no tensor " + name);
}
void remove(std::vector<HandMade>& tensors, const std::string& name) {
    std::erase_if(tensors, [&](const HandMade& made) { return made.tensor.name == kDeepSeek + name; });
}

TEST(HfWeights, EverythingWrongIsListedAtOnceAndNothingIsChanged) {
    auto tensors = deepseek_tensors();
    remove(tensors, "experts.1.up_proj.weight");
    remove(tensors, "experts.1.up_proj.weight_scale_inv");
    remove(tensors, "experts.2.down_proj.weight_scale_inv");
    remove(tensors, "gate.e_score_correction_bias");
    named(tensors, "experts.3.gate_proj.weight").tensor.shape = {kH / 2, kF * 2};
    named(tensors, "experts.0.up_proj.weight_scale_inv").tensor.shape = {1, 2};
    named(tensors, "shared_experts.up_proj.weight").tensor.shape = {256, 64};
    tensors.push_back(marked(std::string(kDeepSeek) + "experts.4.gate_proj.weight", {kF, kH}, 1));
    tensors.push_back(marked(std::string(kDeepSeek) + "shared_expert_gate.weight", {1, kH}, 1));
    const std::string p = std::string("tensor \"") + kDeepSeek;
    const std::set<std::string> expected = {
        p + "experts.1.up_proj.weight\" is missing, want [128, 128]",
        p + "experts.2.down_proj.weight_scale_inv\" is missing: \"" + kDeepSeek +
            "experts.2.down_proj.weight\" is F8_E4M3 and means nothing without its scales [1, 1]",
        p + "gate.e_score_correction_bias\" is missing, want [4]",
        p + "experts.3.gate_proj.weight\" is F8_E4M3[64, 256], want [128, 128]",
        p + "experts.3.gate_proj.weight_scale_inv\" is extra: the configuration has no place for it",
        p + "experts.0.up_proj.weight_scale_inv\" is F32[1, 2], want F32, BF16 or F8_E8M0 [1, 1]: one scale "
            "for each "
            "block of 128 x 128",
        p + "shared_experts.up_proj.weight\" is F8_E4M3[256, 64], want [256, 128]",
        p + "shared_experts.up_proj.weight_scale_inv\" is extra: the configuration has no place for it",
        p + "experts.4.gate_proj.weight\" is extra: the configuration has no place for it",
        p + "shared_expert_gate.weight\" is extra: the configuration has no place for it"};
    EXPECT_EQ(problems(tensors, deepseek_case(), 4), expected);
}

TEST(HfWeights, ValuesThatAreNoNumbersAreCounted) {
    auto tensors = deepseek_tensors();
    named(tensors, "experts.1.up_proj.weight_scale_inv").value = [](int64_t, int64_t) {
        return std::nan("");
    };
    named(tensors, "gate.weight").value = [](int64_t r, int64_t c) {
        return r == 2 && c < 3 ? std::numeric_limits<double>::infinity() : 1.0;
    };
    HandMade& wide = named(tensors, "experts.2.down_proj.weight");  // 3.39e38 is BF16's largest
    wide.tensor.dtype = FileDType::f32;
    wide.value = [](int64_t r, int64_t c) { return r == 1 && c < 5 ? c < 2 ? 3.4e38 : 3.38e38 : 1.0; };
    remove(tensors, "experts.2.down_proj.weight_scale_inv");
    const std::string p = std::string("tensor \"") + kDeepSeek;
    EXPECT_EQ(
        problems(tensors, deepseek_case(), 4),
        (std::set<std::string>{
            p + "experts.1.up_proj.weight\": 16384 of its values are NaN, infinite or too large for BF16",
            p + "experts.2.down_proj.weight\": 2 of its values are NaN, infinite or too large for BF16",
            p + "gate.weight\": 3 of its values are NaN, infinite or too large for BF16"}));
}

TEST(HfWeights, UnknownLayoutsAreRefusedWithAReason) {
    const TemporaryFolder folder;
    const auto reason = [&](const std::vector<std::string>& names) {
        std::vector<HandMade> tensors;
        for (const std::string& name : names) tensors.push_back(marked(name, {1}, 1));
        const TensorSet set(write_file(folder, "m.safetensors", tensors));
        return error_of(ExitCode::data, [&] { find_names(set, 0); });
    };
    expect_contains(reason({"model.layers.0.mlp.experts.gate_up_proj_blocks",
                            "model.layers.0.mlp.experts.gate_up_proj_scales"}),
                    "MXFP4");
    expect_contains(reason({"model.layers.0.mlp.router.weight"}), "gpt-oss");
    expect_contains(reason({"model.layers.0.feed_forward.shared_expert.up_proj.weight"}), "feed_forward");
    expect_contains(reason({"model.language_model.layers.0.ffn.gate.weight"}), "other inputs");
    expect_contains(reason({"model.layers.0.mlp.gate_proj.weight"}), "dense or in another file");
    expect_contains(
        reason({"wte.weight"}),
        "no router of layer 0 (model.layers.0.mlp.gate.weight) among 1 tensors, e.g. \"wte.weight\"");
    expect_contains(reason({}), "among 0 tensors: supported are");
}

}  // namespace
}  // namespace fp8flow
