// Weights under Hugging Face names: every name and orientation against files made by hand, FP8 with scales, all problems listed at once and
// before anything changes, and round trips of whole models bit by bit, over several ranks too.
#include "model/weights/export.h"
#include "model/weights/hf_config.h"
#include "model/weights/load.h"

#include "model/safetensors/writer.h"
#include "tests/support/files.h"
#include "tests/support/layer_fixture.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <set>

namespace fp8flow {
namespace {

using test::LayerCase;
using test::ModelFixture;

// ---- files made by hand ----
struct HandMade {
    TensorDeclaration tensor;
    std::function<double(int64_t row, int64_t col)> value;  // of the tensor seen as [all rows, cols]
};

std::string encoded(FileDType dtype, double value) {
    std::string bytes(static_cast<size_t>(size_of(dtype)), '\0');
    const auto f = static_cast<float>(value);
    if (dtype == FileDType::bf16) {
        const Bf16 b = to_bf16(f);
        std::memcpy(bytes.data(), &b, sizeof b);
    } else if (dtype == FileDType::e4m3) {
        bytes[0] = static_cast<char>(to_e4m3(f).bits);
    } else {
        EXPECT_EQ(dtype, FileDType::f32);
        std::memcpy(bytes.data(), &f, sizeof f);
    }
    return bytes;
}

std::string write_file(const TemporaryFolder& folder, const std::string& name,
                       const std::vector<HandMade>& tensors) {
    std::string file;
    std::vector<TensorDeclaration> declarations;
    for (const HandMade& made : tensors) declarations.push_back(made.tensor);
    SafetensorsWriter writer(declarations, {{"format", "pt"}}, [&](const void* data, size_t bytes) {
        file.append(static_cast<const char*>(data), bytes);
    });
    for (const HandMade& made : tensors) {
        const int64_t cols = made.tensor.shape.size() < 2 ? 1 : made.tensor.shape.back();
        const int64_t rows = *checked_bytes(FileDType::u8, made.tensor.shape) / cols;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < cols; ++c) {
                const std::string bytes = encoded(made.tensor.dtype, made.value(r, c));
                writer.append(made.tensor.name, bytes.data(), static_cast<int64_t>(bytes.size()));
            }
    }
    writer.finish();
    return folder.write(name, file);
}

// Small integers that differ between tensors, rows and columns, and that BF16 holds.
HandMade marked(const std::string& name, std::vector<int64_t> shape, int tag) {
    return {{name, FileDType::bf16, std::move(shape)}, [tag](int64_t r, int64_t c) {
                return static_cast<double>((tag * 37 + r * 5 + c * 3) % 251 - 125);
            }};
}
float mark(int tag, int64_t r, int64_t c) {
    return static_cast<float>((tag * 37 + r * 5 + c * 3) % 251 - 125);
}

constexpr int64_t kH = 128, kF = 128, kE = 4;

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
          layer_(store_, rank_.ops.device(), c.model, c.moe, c.precision, c.recompute, DType::bf16, 0,
                 group.rank(), group.size()) {
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
        return load_weights(set, names, targets(), {case_.model, case_.moe}, names.ffn(0), store_,
                            rank_.ops.device());
    }
    Parameter& parameter(const std::string& ending) {
        for (Parameter& p : store_.all())
            if (p.spec.name.ends_with(ending)) return p;
        throw std::runtime_error("no parameter " + ending);
    }
    TensorView bias() { return layer_.router().expert_bias(); }

private:
    LayerCase case_;
    test::RankFixture rank_;
    ParameterStore store_;
    MoeLayer layer_;
};

void on_one_rank(const std::function<void(ProcessGroup&)>& body) { run_thread_ranks(1, 60, body); }

float at(const TensorView& view, int64_t i) { return view.as<float>()[i]; }

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

// gate, up, down of all experts under the given names; {} is the expert's number.
std::vector<HandMade> experts(const std::string& gate, const std::string& up, const std::string& down) {
    std::vector<HandMade> all;
    for (int64_t e = 0; e < kE; ++e) {
        const int tag = static_cast<int>(10 * e);
        all.push_back(marked(fmt::format(fmt::runtime(gate), e), {kF, kH}, tag + 1));
        all.push_back(marked(fmt::format(fmt::runtime(up), e), {kF, kH}, tag + 2));
        all.push_back(marked(fmt::format(fmt::runtime(down), e), {kH, kF}, tag + 3));
    }
    return all;
}

TEST(HfWeights, MixtralByItsOwnNames) {
    const TemporaryFolder folder;
    const std::string p = "model.layers.7.block_sparse_moe.";
    auto tensors =
        experts(p + "experts.{}.w1.weight", p + "experts.{}.w3.weight", p + "experts.{}.w2.weight");
    tensors.push_back(marked(p + "gate.weight", {kE, kH}, 99));
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

TEST(HfWeights, Qwen3ByItsOwnNamesOnTwoRanks) {
    const TemporaryFolder folder;
    const std::string p = "model.layers.0.mlp.";
    auto tensors = experts(p + "experts.{}.gate_proj.weight", p + "experts.{}.up_proj.weight",
                           p + "experts.{}.down_proj.weight");
    tensors.push_back(marked(p + "gate.weight", {kE, kH}, 99));
    const std::string path = write_file(folder, "m.safetensors", tensors);
    run_thread_ranks(2, 60, [&](ProcessGroup& group) {
        LayerCase c = moe_case();
        c.tokens = {64, 64};
        Layer layer(group, c);
        layer.load(path, 0);
        expect_experts(layer, 2 * group.rank(), 2);
    });
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
        const std::string path = write_file(folder, "m.safetensors", fused(prefix));
        run_thread_ranks(2, 60, [&](ProcessGroup& group) {
            LayerCase c = moe_case();
            c.tokens = {64, 64};
            Layer layer(group, c);
            layer.load(path, 3);
            expect_experts(layer, 2 * group.rank(), 2);
        });
    }
}

// DeepSeek-V3: shared expert, bias, FP8 matrices with scales that are no powers of two.
LayerCase deepseek_case() {
    LayerCase c = moe_case();
    c.moe.moe_shared_expert_intermediate_size = 256;
    c.moe.moe_router_score_function = ScoreFunction::sigmoid;
    c.moe.moe_router_enable_expert_bias = true;
    return c;
}

constexpr const char* kDeepSeek = "model.layers.4.mlp.";
double scale_at(int tag, int64_t r, int64_t c) {
    return 0.0123 * (tag + 1) + 0.3 * static_cast<double>(r) + 0.07 * static_cast<double>(c);
}

std::vector<HandMade> deepseek_tensors() {
    const std::string p = kDeepSeek;
    std::vector<HandMade> all = {marked(p + "gate.weight", {kE, kH}, 99),
                                 {{p + "gate.e_score_correction_bias", FileDType::f32, {kE}},
                                  [](int64_t r, int64_t) { return 0.1 * static_cast<double>(r) - 0.2; }}};
    const auto fp8 = [&](const std::string& name, int64_t rows, int64_t cols, int tag) {
        all.push_back(marked(name, {rows, cols}, tag));
        all.back().tensor.dtype = FileDType::e4m3;
        all.push_back({{name + "_scale_inv", FileDType::f32, {(rows + 127) / 128, (cols + 127) / 128}},
                       [tag](int64_t r, int64_t c) { return scale_at(tag, r, c); }});
    };
    for (int e = 0; e < kE; ++e) {
        const std::string expert = fmt::format("{}experts.{}.", p, e);
        fp8(expert + "gate_proj.weight", kF, kH, 10 * e + 1);
        fp8(expert + "up_proj.weight", kF, kH, 10 * e + 2);
        fp8(expert + "down_proj.weight", kH, kF, 10 * e + 3);
    }
    fp8(p + "shared_experts.gate_proj.weight", 256, kH, 91);
    fp8(p + "shared_experts.up_proj.weight", 256, kH, 92);
    fp8(p + "shared_experts.down_proj.weight", kH, 256, 93);
    return all;
}
float dequantised(int tag, int64_t r, int64_t c) {
    return to_float(to_e4m3(mark(tag, r, c))) * static_cast<float>(scale_at(tag, r / 128, c / 128));
}

TEST(HfWeights, DeepSeekV3InFp8IsDequantisedIntoTheMasters) {
    const TemporaryFolder folder;
    const std::string path = write_file(folder, "m.safetensors", deepseek_tensors());
    on_one_rank([&](ProcessGroup& group) {
        Layer layer(group, deepseek_case());
        const LoadedWeights loaded = layer.load(path, 4);
        EXPECT_EQ(loaded.dequantised, 15);
        EXPECT_EQ(loaded.tensors, 2 + 2 * 15);
        const TensorView w1 = layer.parameter("moe.experts.linear_fc1.weight").master,
                         shared1 = layer.parameter("shared_experts.linear_fc1.weight").master,
                         shared2 = layer.parameter("shared_experts.linear_fc2.weight").master;
        for (int64_t r = 0; r < kF; ++r)
            for (int64_t h = 0; h < kH; ++h) {
                ASSERT_EQ(at(w1, (3 * 2 * kF + r) * kH + h), dequantised(31, r, h));
                ASSERT_EQ(at(w1, (3 * 2 * kF + kF + r) * kH + h), dequantised(32, r, h));
            }
        for (int64_t r = 0; r < 256; ++r)
            for (int64_t h = 0; h < kH; ++h) {
                ASSERT_EQ(at(shared1, r * kH + h), dequantised(91, r, h));
                ASSERT_EQ(at(shared1, (256 + r) * kH + h), dequantised(92, r, h));
                ASSERT_EQ(at(shared2, h * 256 + r), dequantised(93, h, r));
            }
        for (int64_t e = 0; e < kE; ++e)
            EXPECT_EQ(at(layer.bias(), e), static_cast<float>(0.1 * static_cast<double>(e) - 0.2));
        // the working copies follow the masters
        const Parameter& w2 = layer.parameter("moe.experts.linear_fc2.weight");
        EXPECT_NEAR(to_float(E4m3{w2.fprop.codes.bytes_ptr()[5]}) *
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
        try {
            layer.load(path, hf_layer);
            ADD_FAILURE() << "no error was thrown";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ExitCode::data);
            std::istringstream text(error.what());
            for (std::string line; std::getline(text, line);) {
                EXPECT_TRUE(line.starts_with(path + ": ")) << line;
                lines.insert(line.substr(path.size() + 2));
            }
        }
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
    const std::string p = std::string("tensor \"") + kDeepSeek;
    EXPECT_EQ(
        problems(tensors, deepseek_case(), 4),
        (std::set<std::string>{p + "experts.1.up_proj.weight\": 16384 of its values are NaN or infinite",
                               p + "gate.weight\": 3 of its values are NaN or infinite"}));
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
    expect_contains(reason({"model.layers.0.feed_forward.router.weight"}), "feed_forward");
    expect_contains(reason({"model.language_model.layers.0.mlp.gate.weight"}), "other inputs");
    expect_contains(reason({"model.layers.0.mlp.gate_proj.weight"}), "dense or in another file");
    expect_contains(
        reason({"wte.weight"}),
        "no router of layer 0 (model.layers.0.mlp.gate.weight) among 1 tensors, e.g. \"wte.weight\"");
    expect_contains(reason({}), "among 0 tensors: supported are");
}

// ---- whole models ----
LayerCase whole_model(bool qwen) {
    LayerCase c = LayerCase::of(Recipe::fp8_flow);
    c.forced_routing = false;
    c.model.attention = true;
    c.model.num_layers = 2;
    c.model.qk_layernorm = qwen;
    c.model.moe_layer_freq = qwen ? std::vector<int>{0, 1} : std::vector<int>{1, 1};
    return c;
}
Config config_of(const LayerCase& c) {
    Config config;
    config.model = c.model;
    config.moe = c.moe;
    return config;
}

// Every master, after both sides' experts are side by side.
using Masters = std::map<std::string, std::vector<float>>;
Masters masters(ModelFixture& fixture, ProcessGroup& group) {
    Masters all;
    for (const WeightTarget& target : targets_of(fixture.model())) {
        const auto count = static_cast<size_t>(target.values.numel());
        std::vector<float> mine(target.values.as<float>(), target.values.as<float>() + count);
        if (target.spec.expert) {
            std::vector<float> both(count * static_cast<size_t>(group.size()));
            group.all_gather(mine.data(), count * sizeof(float), both.data());
            mine = both;
        } else if (target.spec.name.starts_with("embedding") ||
                   target.spec.name.starts_with("output_layer")) {
            mine.resize(static_cast<size_t>(100 * kH));  // the rows of the vocabulary
        }
        all[target.spec.name] = mine;
    }
    return all;
}

struct RoundTrip {
    Masters before, after;
    std::set<std::string> names;
};

// A model with its own seed is exported from `from` ranks and loaded into another one on `to` ranks.
RoundTrip round_trip(LayerCase c, const ExportChoice& choice, int from, int to, const std::string& folder) {
    RoundTrip result;
    c.seed = 1;
    c.tokens.assign(static_cast<size_t>(from), 16);
    run_thread_ranks(from, 60, [&](ProcessGroup& group) {
        ModelFixture model(group, c);
        const Masters mine = masters(model, group);
        if (group.rank() == 0) result.before = mine;
        export_weights(OutputFolder(folder), targets_of(model.model()), {c.model, c.moe}, choice, group,
                       model.rank().ops.device());
    });
    const TensorSet set(folder);
    for (const std::string& name : set.names()) result.names.insert(name);
    c.seed = 2;
    c.tokens.assign(static_cast<size_t>(to), 16);
    run_thread_ranks(to, 60, [&](ProcessGroup& group) {
        ModelFixture model(group, c);
        load_model(folder, config_of(c), model.model(), model.rank().ops.device());
        const Masters mine = masters(model, group);
        if (group.rank() == 0) result.after = mine;
        // pads of the vocabulary are zero
        for (const WeightTarget& target : targets_of(model.model())) {
            if (!target.spec.name.starts_with("embedding")) continue;
            EXPECT_EQ(at(target.values, 127 * kH), 0.0f);
        }
    });
    return result;
}

TEST(HfWeights, WholeModelsSurviveTheRoundTripOnAnyNumberOfRanks) {
    for (const bool qwen : {true, false})
        for (const auto& [from, to] : {std::pair(1, 1), std::pair(2, 1), std::pair(1, 2), std::pair(2, 2)}) {
            SCOPED_TRACE(fmt::format("{} {} -> {}", qwen ? "qwen3" : "mixtral", from, to));
            const TemporaryFolder folder;
            const LayerCase c = whole_model(qwen);
            const RoundTrip trip =
                round_trip(c, {export_names(config_of(c)), ExportFormat::f32}, from, to, folder.path("hf"));
            EXPECT_EQ(trip.before, trip.after);
            EXPECT_TRUE(std::filesystem::exists(
                folder.path(fmt::format("hf/model-{0:05}-of-{0:05}.safetensors", from))));
        }
}

TEST(HfWeights, FilesOfAnEarlierExportAreNotMixedIn) {
    const TemporaryFolder folder;
    LayerCase c = whole_model(true);
    const ExportChoice choice{export_names(config_of(c)), ExportFormat::f32};
    round_trip(c, choice, 2, 1, folder.path("hf"));
    c.model.init_method_std = 0.2;
    const RoundTrip trip = round_trip(c, choice, 1, 1, folder.path("hf"));
    EXPECT_EQ(trip.before, trip.after);
}

TEST(HfWeights, FusedExpertsSurviveTheRoundTrip) {
    const TemporaryFolder folder;
    HfNames names;
    names.experts = ExpertNames::fused;
    const RoundTrip trip = round_trip(whole_model(true), {names, ExportFormat::f32}, 1, 2, folder.path("hf"));
    EXPECT_EQ(trip.before, trip.after);
    EXPECT_TRUE(trip.names.contains("model.layers.1.mlp.experts.gate_up_proj"));
}

TEST(HfWeights, ExportedNamesAreThoseOfTheFamilies) {
    const TemporaryFolder folder;
    const std::set<std::string> mixtral =
        round_trip(whole_model(false), {export_names(config_of(whole_model(false))), ExportFormat::bf16}, 1,
                   1, folder.path("m"))
            .names;
    std::set<std::string> wanted = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"};
    for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
        for (const char* name :
             {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight",
              "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
              "block_sparse_moe.gate.weight"})
            wanted.insert(layer + name);
        for (int e = 0; e < kE; ++e)
            for (const char* w : {"w1", "w2", "w3"})
                wanted.insert(fmt::format("{}block_sparse_moe.experts.{}.{}.weight", layer, e, w));
    }
    EXPECT_EQ(mixtral, wanted);
    const std::set<std::string> qwen =
        round_trip(whole_model(true), {export_names(config_of(whole_model(true))), ExportFormat::bf16}, 1, 1,
                   folder.path("q"))
            .names;
    for (const char* name :
         {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
          "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.gate.weight",
          "model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.0.self_attn.q_norm.weight",
          "model.layers.0.self_attn.k_norm.weight"})
        EXPECT_TRUE(qwen.contains(name)) << name;
}

// BF16 rounds once; FP8 with powers of two gives back what the flow computes with.
TEST(HfWeights, NarrowFormatsRoundOnce) {
    const TemporaryFolder folder;
    const LayerCase c = whole_model(true);
    const HfNames names = export_names(config_of(c));
    const RoundTrip bf16 = round_trip(c, {names, ExportFormat::bf16}, 2, 1, folder.path("bf16"));
    for (const auto& [name, values] : bf16.before)
        for (size_t i = 0; i < values.size(); ++i)
            ASSERT_EQ(bf16.after.at(name)[i], round_bf16(values[i])) << name;
    const RoundTrip fp8 = round_trip(c, {names, ExportFormat::fp8}, 2, 2, folder.path("fp8"));
    const std::string w2 = "layers.1.moe.experts.linear_fc2.weight";
    const auto &before = fp8.before.at(w2), &after = fp8.after.at(w2);
    for (size_t block = 0; block < before.size(); block += kH * kF) {  // one scale an expert at this size
        float amax = 0;
        for (size_t i = 0; i < kH * kF; ++i) amax = std::max(amax, std::abs(before[block + i]));
        const float step = std::exp2(std::floor(std::log2(448.0f / amax)));
        for (size_t i = block; i < block + kH * kF; ++i)
            ASSERT_EQ(after[i], to_float(to_e4m3(before[i] * step)) / step);
    }
    EXPECT_TRUE(fp8.names.contains("model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"));
    EXPECT_FALSE(fp8.names.contains("model.layers.1.mlp.gate.weight_scale_inv"));
}

TEST(HfWeights, TheExportedConfigReadsBackAsTheSameModel) {
    for (const bool qwen : {true, false}) {
        const Config config = config_of(whole_model(qwen));
        const Config back =
            parse_config("training: {train_iters: 1}", "t.yaml", {}, std::nullopt,
                         parse_hf_config(hf_config_of(config, ExportFormat::fp8), "config.json"));
        EXPECT_EQ(back.model.moe_layer_freq, config.model.moe_layer_freq);
        for (const char* key :
             {"num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
              "qk_layernorm", "rotary_base", "norm_epsilon", "vocab_size", "num_experts", "moe_router_topk",
              "moe_ffn_hidden_size", "moe_router_pre_softmax"})
            for (const std::string& line : diff_configs(config, back))
                EXPECT_EQ(line.find(std::string(".") + key + ":"), std::string::npos) << line;
    }
    Config sigmoid = config_of(whole_model(true));
    sigmoid.moe.moe_router_score_function = ScoreFunction::sigmoid;
    expect_contains(error_of(ExitCode::usage, [&] { hf_config_of(sigmoid, ExportFormat::bf16); }),
                    "neither qwen3_moe");
}

TEST(HfWeights, AModelOfAnotherFamilyBesideTheWeightsIsRefused) {
    const TemporaryFolder folder;
    const LayerCase c = whole_model(true);
    folder.write("hf/config.json", "{\"model_type\": \"gpt_oss\"}");
    on_one_rank([&](ProcessGroup& group) {
        ModelFixture model(group, c);
        const auto load = [&](const Config& config) {
            return error_of(ExitCode::usage, [&] {
                load_model(folder.path("hf"), config, model.model(), model.rank().ops.device());
            });
        };
        expect_contains(load(config_of(c)), "model_type gpt_oss is not supported");
        Config other = config_of(c);
        other.model.attention = false;
        expect_contains(load(other), "multi-latent attention is not implemented");
        other = config_of(c);
        other.model.zero_centered_gamma = true;
        expect_contains(load(other), "zero_centered_gamma: got true");
    });
}

}  // namespace
}  // namespace fp8flow
