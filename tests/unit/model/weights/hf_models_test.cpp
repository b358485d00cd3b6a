// SPDX-License-Identifier: MIT
// Whole models under Hugging Face names: attention, embedding and dense layers by hand, round trips bit by
// bit over several ranks, the narrow formats, config.json, and what is refused.
#include "model/config/hf_config.h"
#include "model/weights/export.h"
#include "model/weights/load.h"

#include "tests/support/hf_models.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace fp8flow {

using namespace weights;

namespace {

using namespace test;

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

// Every tensor of whole_model(true), made by hand.
std::vector<HandMade> qwen_tensors(const LayerCase& c) {
    const int64_t ffn = c.model.ffn_hidden_size, query = 4 * 32, key = 2 * 32;
    std::vector<HandMade> tensors = {marked("model.embed_tokens.weight", {100, kH}, 1),
                                     marked("lm_head.weight", {100, kH}, 2),
                                     marked("model.norm.weight", {kH}, 3)};
    for (int layer = 0; layer < 2; ++layer) {
        const std::string p = fmt::format("model.layers.{}.", layer);
        const int tag = 10 + 20 * layer;
        tensors.push_back(marked(p + "input_layernorm.weight", {kH}, tag));
        tensors.push_back(marked(p + "post_attention_layernorm.weight", {kH}, tag + 1));
        tensors.push_back(marked(p + "self_attn.q_proj.weight", {query, kH}, tag + 2));
        tensors.push_back(marked(p + "self_attn.k_proj.weight", {key, kH}, tag + 3));
        tensors.push_back(marked(p + "self_attn.v_proj.weight", {key, kH}, tag + 4));
        tensors.push_back(marked(p + "self_attn.o_proj.weight", {kH, query}, tag + 5));
        tensors.push_back(marked(p + "self_attn.q_norm.weight", {32}, tag + 6));
        tensors.push_back(marked(p + "self_attn.k_norm.weight", {32}, tag + 7));
    }
    tensors.push_back(marked("model.layers.0.mlp.gate_proj.weight", {ffn, kH}, 51));
    tensors.push_back(marked("model.layers.0.mlp.up_proj.weight", {ffn, kH}, 52));
    tensors.push_back(marked("model.layers.0.mlp.down_proj.weight", {kH, ffn}, 53));
    tensors.push_back(marked("model.layers.1.mlp.gate.weight", {kE, kH}, 99));
    const std::string p = "model.layers.1.mlp.experts.{}.";
    for (HandMade& expert : experts(p + "gate_proj.weight", p + "up_proj.weight", p + "down_proj.weight"))
        tensors.push_back(std::move(expert));
    return tensors;
}

// Everything that is no MoE block, by hand: queries, keys and values in this order, gate above up, and the
// vocabulary without its padding.
TEST(HfModels, AttentionEmbeddingAndDenseLayersByTheirNames) {
    const TemporaryFolder folder;
    LayerCase c = whole_model(true);
    c.tokens = {16};
    const int64_t ffn = c.model.ffn_hidden_size, query = 4 * 32, key = 2 * 32;
    write_file(folder, "model.safetensors", qwen_tensors(c));
    on_one_rank([&](ProcessGroup& group) {
        ModelFixture model(group, c);
        load_model(folder.path(), config_of(c), model.model(), model.rank().ops.device());
        const auto rows_are = [&](const std::string& name, int64_t first, int64_t rows, int64_t cols,
                                  int tag) {
            const TensorView master = parameter_of(model.parameters(), name).master;
            int64_t wrong = 0;
            for (int64_t i = 0; i < rows * cols; ++i)
                wrong += at(master, first * cols + i) != mark(tag, i / cols, i % cols);
            EXPECT_EQ(wrong, 0) << name << " from row " << first;
        };
        rows_are("embedding.word_embeddings.weight", 0, 100, kH, 1);
        rows_are("output_layer.weight", 0, 100, kH, 2);
        rows_are("final_layernorm.weight", 0, kH, 1, 3);
        for (int layer = 0; layer < 2; ++layer) {
            const std::string ours = fmt::format("layers.{}.", layer);
            const int tag = 10 + 20 * layer;
            rows_are(ours + "input_layernorm.weight", 0, kH, 1, tag);
            rows_are(ours + "pre_mlp_layernorm.weight", 0, kH, 1, tag + 1);
            rows_are(ours + "self_attention.linear_qkv.weight", 0, query, kH, tag + 2);
            rows_are(ours + "self_attention.linear_qkv.weight", query, key, kH, tag + 3);
            rows_are(ours + "self_attention.linear_qkv.weight", query + key, key, kH, tag + 4);
            rows_are(ours + "self_attention.linear_proj.weight", 0, kH, query, tag + 5);
            rows_are(ours + "self_attention.q_layernorm.weight", 0, 32, 1, tag + 6);
            rows_are(ours + "self_attention.k_layernorm.weight", 0, 32, 1, tag + 7);
        }
        rows_are("layers.0.mlp.linear_fc1.weight", 0, ffn, kH, 51);
        rows_are("layers.0.mlp.linear_fc1.weight", ffn, ffn, kH, 52);
        rows_are("layers.0.mlp.linear_fc2.weight", 0, kH, ffn, 53);
        rows_are("layers.1.moe.router.weight", 0, kE, kH, 99);
        rows_are("layers.1.moe.experts.linear_fc1.weight", 6 * kF, kF, kH, 31);
        rows_are("layers.1.moe.experts.linear_fc2.weight", 3 * kH, kH, kF, 33);
    });
}

TEST(HfModels, AnExportReplacesTheOneBefore) {
    const TemporaryFolder folder;
    LayerCase c = whole_model(false);
    ExportChoice choice{.names = export_names(config_of(c)),
                        .format = ExportFormat::f32,
                        .config_json = hf_config_of(config_of(c), ExportFormat::f32)};
    const std::string hf = folder.path("hf");
    round_trip(c, choice, 2, 1, hf);
    EXPECT_EQ(names_in(hf),
              (std::set<std::string>{"config.json", "model-00001-of-00002.safetensors",
                                     "model-00002-of-00002.safetensors", "model.safetensors.index.json"}));
    folder.write("hf/tokenizer.json", "{}");  // the user's
    folder.write("hf/.model-00002-of-00002.safetensors.tmp.1", "of a process that died");
    choice.config_json.clear();
    c.model.init_method_std = 0.2;  // other values than those of the first export
    const RoundTrip trip = round_trip(c, choice, 1, 1, hf);
    EXPECT_EQ(trip.before, trip.after);
    EXPECT_EQ(names_in(hf), (std::set<std::string>{"model-00001-of-00001.safetensors",
                                                   "model.safetensors.index.json", "tokenizer.json"}));
    const TensorSet set(hf);
    size_t bytes = 0;
    for (const std::string& name : set.names()) bytes += set.find(name).bytes().size();
    const auto index = nlohmann::json::parse(read_whole(hf + "/model.safetensors.index.json"));
    EXPECT_EQ(index.at("metadata").at("total_size"), bytes);
}

// Each multiplier of a model is a factor of its own tensors and of no others.
TEST(HfModels, EachMultiplierIsInItsTensors) {
    LayerCase c = whole_model(true);  // layer 0 is dense
    c.tokens = {16};
    c.moe.moe_shared_expert_intermediate_size = 128;
    HfNames names;
    names.storage = hf_family("deepseek_v3")->storage;
    names.folds = {.embedding = 2, .final_norm = 3, .query = 5, .residual = 7, .mlp_output = 11};
    const std::map<std::string, std::vector<double>> scaled = {
        {"embedding.word_embeddings.weight", {2}},
        {"final_layernorm.weight", {3}},
        {"self_attention.linear_qkv.weight", {5, 1, 1}},
        {"self_attention.linear_proj.weight", {7}},
        {"mlp.linear_fc2.weight", {7}},
        {"moe.experts.linear_fc2.weight", {7 * 11}},
        {"moe.shared_experts.linear_fc2.weight", {7 * 11}}};
    on_one_rank([&](ProcessGroup& group) {
        ModelFixture model(group, c);
        std::set<std::string> found;
        for (const WeightTarget& target : targets_of(model.model())) {
            std::string name = target.spec.name;
            if (name.starts_with("layers.")) name = name.substr(std::string("layers.0.").size());
            const auto at = scaled.find(name);
            if (at != scaled.end()) found.insert(name);
            const std::vector<double> want = at == scaled.end() ? std::vector<double>{1} : at->second;
            const auto pieces = pieces_of(target.spec, c.model, c.moe, names);
            for (size_t i = 0; i < pieces.size(); ++i)
                EXPECT_EQ(pieces[i].scale, want[std::min(i, want.size() - 1)]) << name << " " << i;
        }
        EXPECT_EQ(found.size(), scaled.size());
    });
}

// Or it follows from the configuration: a head that is tied to the embedding, tables of the rotary embedding.
TEST(HfModels, EveryTensorOfTheFilesIsUsedOrRefused) {
    const TemporaryFolder folder;
    LayerCase c = whole_model(true);
    c.tokens = {16};
    std::vector<HandMade> tensors = qwen_tensors(c);
    const auto load = [&](const std::string& left_out_of_the_index = "") {
        write_file(folder, "m.safetensors", tensors);
        nlohmann::json map;
        for (const HandMade& made : tensors)
            if (made.tensor.name != left_out_of_the_index) map[made.tensor.name] = "m.safetensors";
        folder.write("model.safetensors.index.json", nlohmann::json({{"weight_map", map}}).dump());
        std::vector<std::string> lines;
        on_one_rank([&](ProcessGroup& group) {
            ModelFixture model(group, c);
            lines = load_model(folder.path(), config_of(c), model.model(), model.rank().ops.device());
        });
        return lines;
    };
    ASSERT_EQ(tensors[1].tensor.name, "lm_head.weight");
    EXPECT_NO_THROW(load());
    c.model.untie_embeddings_and_output_weights = false;
    expect_contains(
        error_of(ExitCode::data, load),
        "tensor \"lm_head.weight\" differs from \"model.embed_tokens.weight\", and tied weights have "
        "one of them; set model.untie_embeddings_and_output_weights: true to use both");
    tensors[1] = marked("lm_head.weight", {101, kH}, 1);
    expect_contains(error_of(ExitCode::data, load),
                    "tensor \"lm_head.weight\" is BF16[101, 128], want [100, 128]");
    tensors[1] = marked("lm_head.weight", {100, kH}, 1);
    EXPECT_EQ(load().size(), 1u);

    const std::string table = "model.layers.0.self_attn.rotary_emb.inv_freq";
    tensors.push_back(marked(table, {16}, 5));
    EXPECT_NO_THROW(load());
    EXPECT_NO_THROW(load(table));
    tensors.back() = marked("model.layers.0.self_attn.q_proj.bias", {128}, 5);
    expect_contains(error_of(ExitCode::data, load), "q_proj.bias\" is extra: the configuration has no place");
    expect_contains(
        error_of(ExitCode::data, [&] { load("model.layers.0.self_attn.q_proj.bias"); }),
        "m.safetensors: holds tensor \"model.layers.0.self_attn.q_proj.bias\", which the index does "
        "not name");
    tensors.pop_back();
    write_file(folder, "adapter_model.safetensors", {marked("lora", {1}, 1)});
    expect_contains(load().front(),
                    "warning: " + folder.path() +
                        ": not read, for they are no part of the model: adapter_model.safetensors");
}

TEST(HfModels, ANarrowerDenseLayerIsExportedIfTheRestIsZero) {
    const TemporaryFolder folder;
    LayerCase c = whole_model(true);
    c.tokens = {16};
    ExportChoice choice{export_names(config_of(c)), ExportFormat::f32};
    choice.names.dense_width = 200;
    on_one_rank([&](ProcessGroup& group) {
        ModelFixture model(group, c);
        const auto values = [&](const std::string& name) {
            return parameter_of(model.parameters(), name).master.as<float>();
        };
        float *fc1 = values("layers.0.mlp.linear_fc1.weight"),
              *fc2 = values("layers.0.mlp.linear_fc2.weight");
        for (float* extra : {fc1 + 200 * kH, fc1 + 456 * kH}) std::fill_n(extra, 56 * kH, 0.0f);
        for (int64_t r = 0; r < kH; ++r) std::fill_n(fc2 + r * 256 + 200, 56, 0.0f);
        const auto exported = [&] {
            export_weights(OutputFolder(folder.path("hf")), targets_of(model.model()), {c.model, c.moe},
                           choice, group, model.rank().ops.device());
        };
        exported();
        const TensorSet set(folder.path("hf"));
        EXPECT_EQ(set.find("model.layers.0.mlp.up_proj.weight").entry->shape,
                  (std::vector<int64_t>{200, kH}));
        const std::pair<float*, const char*> places[] = {
            {fc1 + 200 * kH, "gate_proj"}, {fc1 + 512 * kH - 1, "up_proj"}, {fc2 + 200, "down_proj"}};
        for (const auto& [place, name] : places) {
            *place = 1e-30f;
            const std::string error = error_of(ExitCode::usage, exported);
            expect_contains(error, fmt::format("export: tensor \"model.layers.0.mlp.{}.weight\" is [", name));
            expect_contains(error, "and 1 values past that are not zero; leave the key out");
            *place = 0;
        }
        // without whole blocks it stays BF16
        choice.format = ExportFormat::fp8;
        exported();
        const TensorSet fp8(folder.path("hf"));
        EXPECT_EQ(fp8.find("model.layers.0.mlp.up_proj.weight").entry->dtype, FileDType::bf16);
        EXPECT_EQ(fp8.find("model.layers.1.mlp.experts.0.up_proj.weight").entry->dtype, FileDType::e4m3);
        const std::string json = hf_config_of(config_of(c), ExportFormat::fp8, 200);
        const auto plain = nlohmann::json::parse(json)["quantization_config"]["modules_to_not_convert"];
        EXPECT_NE(std::find(plain.begin(), plain.end(), "model.layers.0.mlp.up_proj"), plain.end());
    });
}

TEST(HfModels, WholeModelsSurviveTheRoundTripOnAnyNumberOfRanks) {
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

TEST(HfModels, FusedExpertsSurviveTheRoundTrip) {
    const TemporaryFolder folder;
    HfNames names;
    names.storage.experts = ExpertNames::fused;
    const RoundTrip trip = round_trip(whole_model(true), {names, ExportFormat::f32}, 1, 2, folder.path("hf"));
    EXPECT_EQ(trip.before, trip.after);
    EXPECT_TRUE(trip.names.contains("model.layers.1.mlp.experts.gate_up_proj"));
}

TEST(HfModels, ExportedNamesAreThoseOfTheFamilies) {
    const TemporaryFolder folder;
    const auto exported = [&](const LayerCase& c, const char* name) {
        return round_trip(c, {export_names(config_of(c)), ExportFormat::bf16}, 1, 1, folder.path(name)).names;
    };
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
    EXPECT_EQ(exported(whole_model(false), "m"), wanted);
    const std::set<std::string> qwen = exported(whole_model(true), "q");
    for (const char* name :
         {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
          "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.gate.weight",
          "model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.0.self_attn.q_norm.weight",
          "model.layers.0.self_attn.k_norm.weight"})
        EXPECT_TRUE(qwen.contains(name)) << name;
}

// BF16 rounds once; FP8 with powers of two gives back what the flow computes with.
TEST(HfModels, NarrowFormatsRoundOnce) {
    const TemporaryFolder folder;
    LayerCase c = whole_model(true);
    const HfNames names = export_names(config_of(c));
    for (const RouterDtype router : {RouterDtype::bf16, RouterDtype::fp32}) {  // FP32 stays as it is
        c.moe.moe_router_dtype = router;
        const RoundTrip bf16 = round_trip(c, {names, ExportFormat::bf16}, 2, 1, folder.path("bf16"));
        for (const auto& [name, values] : bf16.before) {
            const bool exact = router == RouterDtype::fp32 && name == "layers.1.moe.router.weight";
            for (size_t i = 0; i < values.size(); ++i)
                ASSERT_EQ(bf16.after.at(name)[i], exact ? values[i] : round_bf16(values[i])) << name;
            EXPECT_EQ(bf16.after.at(name) == values, exact || name.find("norm") != std::string::npos) << name;
        }
    }
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

TEST(HfModels, TheExportedConfigReadsBackAsTheSameModel) {
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
    Config longer = config_of(whole_model(true));
    const auto positions = [](const Config& config) {
        return nlohmann::json::parse(hf_config_of(config, ExportFormat::bf16))["max_position_embeddings"]
            .get<int64_t>();
    };
    EXPECT_EQ(positions(longer), longer.model.seq_length);
    longer.model.max_position_embeddings = 40960;  // of the model that it was imported from
    EXPECT_EQ(positions(longer), 40960);
    longer.model.rope.rope_type = RopeType::ntk;  // no class that is exported has it
    expect_contains(error_of(ExitCode::usage, [&] { hf_config_of(longer, ExportFormat::bf16); }),
                    "model.rope_type");
    Config granite = config_of(whole_model(false));
    granite.family = "granitemoe";
    granite.output.export_format = ExportFormat::bf16;
    EXPECT_NO_THROW(export_plan(granite, ""));
    granite.output.export_format = ExportFormat::fp8;
    expect_contains(error_of(ExitCode::usage, [&] { export_plan(granite, ""); }),
                    "output.export_format: got fp8, want bf16 or f32");
    Config sigmoid = config_of(whole_model(true));
    sigmoid.moe.moe_router_score_function = ScoreFunction::sigmoid;
    expect_contains(error_of(ExitCode::usage, [&] { hf_config_of(sigmoid, ExportFormat::bf16); }),
                    "export: no family computes what this configuration says; ");
}

TEST(HfModels, AModelOfAnotherFamilyBesideTheWeightsIsRefused) {
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
        expect_contains(load(other), "with model.attention: true only");
        other = config_of(c);
        other.model.zero_centered_gamma = true;
        expect_contains(load(other), "zero_centered_gamma: got true");
    });
}

// Multipliers are in config.json alone, and a model without them computes something else.
TEST(HfModels, WeightsOfGraniteNeedAConfigJson) {
    const TemporaryFolder folder;
    const LayerCase c = whole_model(false);
    ExportChoice choice{.format = ExportFormat::bf16};
    choice.names.storage = hf_family("granitemoe")->storage;
    on_one_rank([&](ProcessGroup& group) {
        ModelFixture model(group, c);
        Device& device = model.rank().ops.device();
        export_weights(OutputFolder(folder.path("hf")), targets_of(model.model()), {c.model, c.moe}, choice,
                       group, device);
        Config config = config_of(c);
        expect_contains(
            error_of(ExitCode::usage, [&] { load_model(folder.path("hf"), config, model.model(), device); }),
            "hf: no config.json next to it, and these are tensors of Granite");
        config.imported = "elsewhere/config.json: model_type granitemoe";
        config.folds.embedding = 2;
        const float before = at(targets_of(model.model())[0].values, 0);
        load_model(folder.path("hf"), config, model.model(), device);
        EXPECT_EQ(at(targets_of(model.model())[0].values, 0), 2 * round_bf16(before));
        // as all other settings, those of --hf-config come before those next to the weights
        config.family = "granitemoe";
        auto json = nlohmann::json::parse(hf_config_of(config, ExportFormat::bf16));
        json["rope_parameters"] = {
            {"rope_type", "dynamic"}, {"rope_theta", config.model.rotary_base}, {"factor", 2.0}};
        json["max_position_embeddings"] = config.model.seq_length - 1;
        folder.write("hf/config.json", json.dump());
        std::string lines;
        for (const std::string& line : load_model(folder.path("hf"), config, model.model(), device))
            lines += line + "\n";
        expect_contains(lines, "multipliers are those of elsewhere");
        expect_contains(lines, "rope_type dynamic changes frequencies of more");
        EXPECT_EQ(at(targets_of(model.model())[0].values, 0), 2 * round_bf16(before));
    });
}

}  // namespace
}  // namespace fp8flow
