// SPDX-License-Identifier: MIT
// The manifest's text: there and back, and nothing that differs from it in a bit.
#include "model/base/crc32c.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/manifest.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

namespace fp8flow {

using namespace checkpoint;

namespace {

CheckpointManifest sample() {
    return {.step = 20,
            .applied_steps = 18,
            .consumed_samples = 160,
            .expert_parallel_size = 2,
            .global_batch_size = 8,
            .seed = 18446744073709551615ull,
            .seq_length = 32,
            .data_fingerprint = 0x0123456789abcdefull,
            .commit = "aacced7-dirty",
            .config = "model:\n  num_layers: 2\ndata:\n  data_path: [\"/a \\\"b\\\"\"]\n",
            .files = {{5724400, 0x1ef2c125}, {8, 0xffffffff}}};
}

// A body under its right checksum.
std::string signed_text(const std::string& body) {
    return fmt::format("{{\"crc32c\": \"{:08x}\",\n", crc32c(body)) + body;
}
std::string body_of(const CheckpointManifest& manifest) {
    const std::string text = manifest_text(manifest);
    return text.substr(text.find('\n') + 1);
}
std::string refusal(const std::string& text) {
    return error_of(ExitCode::checkpoint, [&] { parse_manifest(text, "c/manifest.json"); });
}
std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
}

TEST(CheckpointManifest, ThereAndBack) {
    EXPECT_EQ(parse_manifest(manifest_text(sample()), "m"), sample());
    CheckpointManifest other = sample();
    other.step = other.consumed_samples = 0;
    other.config.clear();
    other.applied_steps.reset();  // saved before skipped steps were counted
    EXPECT_EQ(parse_manifest(manifest_text(other), "m"), other);
    EXPECT_EQ(manifest_text(other).find("\"run\""), std::string::npos);  // as before runs had an identity
    other.run = 0x00000000000000abull;
    EXPECT_EQ(parse_manifest(manifest_text(other), "m"), other);
    expect_contains(manifest_text(other), "\"run\": \"00000000000000ab\"");
    other.seq_length = 0;  // older versions did not write it
    EXPECT_EQ(manifest_text(other).find("seq_length"), std::string::npos);
    EXPECT_EQ(parse_manifest(manifest_text(other), "m"), other);
    const std::string text = manifest_text(sample());
    EXPECT_EQ(text.substr(0, 12), "{\"crc32c\": \"");
    EXPECT_EQ(text.find(".safetensors"), std::string::npos);  // names follow from the rank
}

TEST(CheckpointManifest, AKeyThatAppearsTwiceIsRefused) {
    const std::string body = replaced(body_of(sample()), "\"seed\":", "\"seed\": 1,\n \"seed\":");
    expect_contains(refusal(signed_text(body)), "not in the form that this program writes");
}

TEST(CheckpointManifest, EveryFlippedBitAndEveryCutIsRefused) {
    const std::string text = manifest_text(sample());
    for (size_t i = 0; i < text.size(); ++i) {
        for (int bit = 0; bit < 8; ++bit) {
            std::string bad = text;
            bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
            EXPECT_THROW(parse_manifest(bad, "m"), Error) << i << " " << bit;
        }
        EXPECT_THROW(parse_manifest(text.substr(0, i), "m"), Error) << i;
    }
    EXPECT_THROW(parse_manifest(text + " ", "m"), Error);
    EXPECT_THROW(parse_manifest(std::string(text.size(), '\0'), "m"), Error);
}

// Made by hand, with a checksum that fits: each refused with its own reason.
TEST(CheckpointManifest, HandMadeOnes) {
    const std::string body = body_of(sample());
    EXPECT_NO_THROW(parse_manifest(signed_text(body), "m"));
    expect_contains(refusal(""), "does not begin with a checksum");
    expect_contains(refusal("{\"step\": 1}"), "does not begin with a checksum");
    expect_contains(refusal(manifest_text(sample()) + "x"), "the checksum does not fit");
    expect_contains(refusal(signed_text("")), "not in the form");
    expect_contains(refusal(signed_text("\"step\": 20}")), "not in the form");
    expect_contains(refusal(signed_text(std::string(100000, '['))), "not in the form");
    struct Case {
        std::string from, to, reason = "not in the form";
    };
    std::vector<Case> cases = {
        {"fp8flow checkpoint", "another program", "not a manifest of this program"},
        {R"("version": 1)", R"("version": 2)", "version 2, this program reads 1"},
        {R"("step": 20)", R"("step": -1)", "step is -1"},
        {R"(applied_steps": 18)", R"(applied_steps": -1)", "applied_steps is -1"},
        {R"(applied_steps": 18)", R"(applied_steps": 21)", "applied_steps is 21"},
        {R"("step": 20)", R"("step": 20.5)"},
        {R"("step": 20)", R"("step": 20, "step": 20)"},
        {R"("step": 20)", R"("step": 99999999999999999999)"},
        {R"("step": 20)", R"("step": 9223372036854775807)", "consumed_samples"},
        {R"("consumed_samples": 160)", R"("consumed_samples": 161)", "consumed_samples is 161"},
        {R"("global_batch_size": 8)", R"("global_batch_size": 0)", "global_batch_size is 0"},
        {R"("seq_length": 32)", R"("seq_length": -1)", "seq_length is -1"},
        {R"(parallel_size": 2)", R"(parallel_size": 4)", "2 files for expert_model_parallel_size 4"},
        {R"("bytes": 8,)", R"("bytes": -8,)", "the size of a file"},
        {"ffffffff", "fffffffff"},
        {"0123456789abcdef", "0123456789ABCDEF"},
        {"18446744073709551615", "18446744073709551616"},  // read as a fraction; found by fuzzing
        {"18446744073709551615", "-1"},
        {R"( "seed")", R"( "sead")"},
    };
    for (const char* bad : {"0", "32.0", "\"32\"", "99999999999999999999"})
        cases.push_back({R"("seq_length": 32)", fmt::format(R"("seq_length": {})", bad)});
    for (const char* run : {"\"0000000000000000\"", "\"00000000000000AB\"", "\"ab\"", "171", "null"})
        cases.push_back({R"( "commit")", fmt::format(" \"run\": {},\n \"commit\"", run)});
    for (const auto& [from, to, reason] : cases)
        expect_contains(refusal(signed_text(replaced(body, from, to))), reason);
    expect_contains(refusal(std::string(static_cast<size_t>(kMaxManifestBytes) + 1, 'x')),
                    "larger than any manifest");
    expect_contains(refusal("x"), "c/manifest.json");
}

TEST(CheckpointManifest, NamesOfCheckpoints) {
    EXPECT_EQ(checkpoint_name(20), "step_00000020");
    EXPECT_EQ(checkpoint_name(1234567890), "step_1234567890");
    for (const int64_t step : {int64_t{0}, int64_t{20}, int64_t{99999999}, int64_t{123456789012}})
        EXPECT_EQ(step_of_name(checkpoint_name(step)), step);
    for (const char* name :
         {"", "step_", "step_20", "step_000000020", "step_00000020.tmp", "step_-0000020", "step_+0000020",
          "step_0000002x", "Step_00000020", " step_00000020", "step_99999999999999999999", "step_00000020/"})
        EXPECT_EQ(step_of_name(name), std::nullopt) << name;
}

}  // namespace
}  // namespace fp8flow
