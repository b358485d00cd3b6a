// SPDX-License-Identifier: MIT
// Hostile and broken YAML: each input is refused with its own message, and none crashes, hangs or is half
// accepted.
#include "model/config/config.h"
#include "model/config/layer_pattern.h"
#include "tests/support/settings.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <random>

namespace fp8flow {
namespace {

std::string repeated(const std::string& text, size_t times) {
    std::string out;
    for (size_t i = 0; i < times; ++i) out += text;
    return out;
}

struct BadInput {
    std::string yaml;
    std::string error;  // the beginning of the message
};

TEST(HostileConfig, EchoedValuesAreCutAndEscaped) {
    for (const std::string& yaml : {"model: {num_layers: " + repeated("x", 5000) + "}",
                                    repeated("s", 1000) + ": {}", "model: {" + repeated("k", 1000) + ": 1}",
                                    "model: {num_layers: [" + repeated("x, ", 2000) + "x]}"}) {
        const std::string text = config_error(yaml);
        EXPECT_FALSE(text.empty());
        EXPECT_LT(text.size(), 700u) << text;
    }
    const std::string text = config_error("model: {num_layers: \"\\e[2J\\n1\"}");
    expect_contains(text, "got \\x1b[2J\\n1, want");
    EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

TEST(HostileConfig, MoreTokensThanAreCounted) {
    const std::string text = config_error("training: {train_iters: 9007199254740992}");
    expect_contains(text, "training.train_iters: got 9007199254740992, want at most");
}

TEST(HostileConfig, EachInputIsRefusedWithItsOwnMessage) {
    const std::string no_settings = "got no settings, want sections";
    const std::vector<BadInput> inputs = {
        // Size, depth, characters.
        {std::string(65537, '#'), "t.yaml: got 65537 bytes, want at most 65536"},
        {"a: " + repeated("[", 60000), "t.yaml:1:"},
        {repeated("{a: ", 15000), "t.yaml:1:"},
        {repeated("- ", 30000), "t.yaml:1:"},
        {std::string("model: {}\0", 10), "t.yaml: got control characters, want text"},
        {"output: {out: \"a\x04\"}", "t.yaml: got control characters, want text"},
        {"output: {out: \xff\xfe}", "t.yaml: got bytes that are no UTF-8, want text"},
        {"output: {out: \xc0\xaf}", "t.yaml: got bytes that are no UTF-8, want text"},
        {"output: {out: \xe2\x82", "t.yaml: got bytes that are no UTF-8, want text"},
        // What YAML has and configurations do not need.
        {"a: &a [1,1]\nb: [*a,*a,*a]", "t.yaml:1:1: a: got an unknown section"},
        {"model: &a {num_layers: [*a]}", "t.yaml:1:"},
        {"model: *a", "t.yaml:1:8: got text that is no YAML"},
        {"model: {}\n---\nmoe: {}", "t.yaml: got several YAML documents, want one"},
        {"model: {<<: {num_layers: 2}}", "t.yaml:1:9: model.<<: got an unknown key"},
        // Quotes and brackets.
        {"output: {out: \"abc}", "t.yaml:1:"},
        {"model: {num_layers: 2", "t.yaml:1:"},
        {"model: ]", "t.yaml:1:8: got text that is no YAML"},
        {"model: [num_layers}", "t.yaml:1:19: got text that is no YAML"},
        {"model: {num_layers: 2]", "t.yaml:1:22: got text that is no YAML"},
        // Structure.
        {"", "t.yaml: " + no_settings},
        {"# only a comment\n", "t.yaml: " + no_settings},
        {"- model\n- moe\n", "t.yaml:1:1: " + no_settings},
        {"just text", "t.yaml:1:1: " + no_settings},
        {"[]: 1", "t.yaml:1:1: got a key that is no text"},
        {"model: {[a]: 1}", "t.yaml:1:9: model: got a key that is no text"},
        {"model: [1, 2]", "t.yaml:1:1: model: got a list, want key: value lines below it"},
        {"model: {num_layers: {a: 1}}",
         "t.yaml:1:21: model.num_layers: got a map, want an integer in [1, 4096]"},
        {"data: {data_path: [[a], b]}", "t.yaml:1:19: data.data_path: got a list, want a list of texts"},
        {"model: {num_layers: }", "t.yaml:1:9: model.num_layers: got nothing"},
        {"model:\n  num_layers: 2\n moe:\n  num_experts: 4\n", "t.yaml:3:2: got text that is no YAML"},
        {"model: num_layers: 2", "t.yaml:1:18: got text that is no YAML"},
        // Numbers.
        {"model: {num_layers: 99999999999999999999}",
         "t.yaml:1:21: model.num_layers: got 99999999999999999999"},
        {"model: {num_layers: -1}", "t.yaml:1:21: model.num_layers: got -1, want an integer in [1, 4096]"},
        {"model: {num_layers: 0x1001}",
         "t.yaml:1:21: model.num_layers: got 0x1001, want an integer in [1, 4096]"},
        {"model: {hidden_size: 9223372036854775807}",
         "t.yaml:1:22: model.hidden_size: got 9223372036854775807, want"},
        {"training: {lr: .inf}", "t.yaml:1:16: training.lr: got .inf, want a number >= 0"},
        {"training: {lr: 1e999}", "t.yaml:1:16: training.lr: got 1e999, want a number >= 0"},
        {"training: {lr: \"\"}", "t.yaml:1:16: training.lr: got empty text, want a number >= 0"},
        {"model:\n  moe_layer_freq: ([0]*99999999)\n",
         "t.yaml:2:19: model.moe_layer_freq: got ([0]*99999999), want"},
    };
    for (const auto& [yaml, error] : inputs) {
        EXPECT_EQ(config_error(yaml).substr(0, error.size()), error) << yaml.substr(0, 80);
    }
}

TEST(HostileConfig, HarmlessFormsPass) {
    for (const char* yaml :
         {"---\nmodel: {}\n", "model:\r\n  num_layers: 2\r\n", "# it's & *fine* !here [\nmodel: {}",
          "%YAML 1.2\n---\nmodel: {}", "model:\n", "output: {out: \"a [[[[[[[[[[ & * ! b\"}",
          "output: {out: a&b*c!d}", "output: {out: 'it''s'}",
          "data:\n  data_path:\n  - /a#b\n  - \"/c # d\"\n  data_kind: text\n"}) {
        EXPECT_EQ(config_error(yaml), "") << yaml;
    }
}

// Bytes of a shipped file replaced, removed, doubled: accepted or refused, never anything else.
TEST(HostileConfig, MutatedFilesNeverCrash) {
    std::ifstream file(FP8FLOW_SOURCE_DIR "/configs/layer_deepseek_v3.yaml");
    const std::string seed_text{std::istreambuf_iterator<char>(file), {}};
    ASSERT_FALSE(seed_text.empty());
    const std::string alphabet = "[]{}:,-?&*!|>'\"#%@` \n\t0a=~<.\\\x80\xff";
    std::mt19937 random(1);
    const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
    int accepted = 0;
    for (int round = 0; round < 2000; ++round) {
        std::string text = seed_text;
        for (size_t edit = 0, edits = 1 + below(6); edit < edits; ++edit) {
            const size_t at = below(text.size());
            const size_t kind = below(4);
            if (kind == 0) text[at] = alphabet[below(alphabet.size())];
            if (kind == 1) text.insert(at, 1, alphabet[below(alphabet.size())]);
            if (kind == 2) text.erase(at, 1 + below(8));
            if (kind == 3) text.insert(at, text.substr(below(text.size()), below(40)));
        }
        accepted += config_error(text).empty() ? 1 : 0;
    }
    EXPECT_GT(accepted, 0);     // edits inside comments are harmless
    EXPECT_LT(accepted, 2000);  // others are not
}

TEST(LayerPattern, Forms) {
    using Layers = std::vector<int>;
    EXPECT_EQ(expand_layer_pattern("1", 3), (Layers{1, 1, 1}));
    EXPECT_EQ(expand_layer_pattern("2", 5), (Layers{1, 0, 1, 0, 1}));
    EXPECT_EQ(expand_layer_pattern("[0,1]", 9), (Layers{0, 1}));
    EXPECT_EQ(expand_layer_pattern(" ( [0] * 2 + [1, 0]*2 ) ", 6), (Layers{0, 0, 1, 0, 1, 0}));
    EXPECT_EQ(expand_layer_pattern("([0]*1+([1]*2)*2)", 5), (Layers{0, 1, 1, 1, 1}));
    const auto deepseek = expand_layer_pattern("([0]*3+[1]*58)", 61);
    ASSERT_TRUE(deepseek.has_value());
    EXPECT_EQ(deepseek->size(), 61u);
    EXPECT_EQ((*deepseek)[2], 0);
    EXPECT_EQ((*deepseek)[3], 1);
    for (const char* bad :
         {"", "0", "-1", "x", "[2]", "[0", "[0]]", "([0]", "[0]*", "[0]*-1", "[0]+", "[0,]", "1+1",
          "[0]*4097", "([0]*4096)*4096", "((((((((((([0])))))))))))", "[0]*99999999999999999999"}) {
        EXPECT_FALSE(expand_layer_pattern(bad, 2).has_value()) << bad;
    }
}

}  // namespace
}  // namespace fp8flow
