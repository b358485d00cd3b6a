// SPDX-License-Identifier: MIT
// data_path with weights: the shares hold from the first samples on and at any sample index, each source is
// read without a gap and again when it is exhausted, and lists that are no blend are refused.
#include "model/data/blend.h"

#include "model/data/text.h"
#include "model/train/trainer.h"
#include "tests/support/file_data.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace fp8flow::data {
namespace {

// Samples are their index, as the first token.
class Counted final : public TokenSource {
public:
    explicit Counted(int64_t windows) : windows_(windows) {}
    int64_t vocab_size() const override { return 64; }
    int64_t seq_length() const override { return 4; }
    int64_t num_tokens(Split split) const override { return samples_per_epoch(split) * 4 + 1; }
    int64_t samples_per_epoch(Split split) const override { return split == Split::train ? windows_ : 0; }
    std::string description() const override { return "counted"; }
    uint64_t fingerprint() const override { return static_cast<uint64_t>(windows_); }
    void sample(Split, int64_t index, std::span<int32_t> tokens) const override {
        tokens[0] = static_cast<int32_t>(windows_);
        tokens[1] = static_cast<int32_t>(index);
    }

    std::optional<double> bytes_per_token() const override {  // known of the first two
        return windows_ < 300 ? std::optional(static_cast<double>(windows_) / 100) : std::nullopt;
    }

private:
    int64_t windows_;
};

BlendedSource blend(const std::vector<double>& weights) {
    std::vector<BlendedSource::Part> parts;
    for (const double weight : weights) {
        const auto windows = static_cast<int64_t>(100 * (parts.size() + 1));
        parts.push_back({{weight, std::to_string(windows)}, std::make_shared<Counted>(windows)});
    }
    return BlendedSource(std::move(parts));
}

TEST(Blend, SharesHoldAtEverySampleAndNothingIsLeftOut) {
    const std::vector<double> weights = {7, 2.5, 0.5};
    const BlendedSource source = blend(weights);
    std::vector<int64_t> taken(3);
    for (int64_t i = 0; i < 70000; ++i) {  // past the period of the pattern
        const std::vector<int32_t> window = tokens_of(source, Split::train, i);
        int64_t& next = taken[static_cast<size_t>(window[0] / 100 - 1)];
        ASSERT_EQ(window[1], next) << "sample " << i;
        ++next;
        if (i % 1000 != 999) continue;
        for (size_t p = 0; p < 3; ++p)
            EXPECT_LT(std::abs(static_cast<double>(taken[p]) - static_cast<double>(i + 1) * weights[p] / 10),
                      3);
    }
    const auto late = tokens_of(source, Split::train, 69999);  // a sample depends on its index alone
    EXPECT_EQ(late[1], taken[static_cast<size_t>(late[0] / 100 - 1)] - 1);
}

// The first choices of Megatron-LM's build_blending_indices for these weights.
TEST(Blend, TheOrderIsMegatrons) {
    const BlendedSource source = blend({0.5, 0.3, 0.2});
    std::string order;
    for (int64_t i = 0; i < 10; ++i)
        order += static_cast<char>('a' + tokens_of(source, Split::train, i)[0] / 100 - 1);
    EXPECT_EQ(order, "abcabacaba");
}

TEST(Blend, SaysHowOftenEachSourceIsRead) {
    const BlendedSource source = blend({3, 1});
    EXPECT_EQ(source.description(),
              "blend, each source read again after its last window: 75 % 100 (counted); 25 % 200 (counted)");
    EXPECT_EQ(source.epochs_text(400), "3 epochs of 100, 0.5 epochs of 200");
    EXPECT_EQ(source.bytes_per_token(), 0.75 * 1 + 0.25 * 2);
    EXPECT_EQ(blend({1, 1, 1}).bytes_per_token(), std::nullopt);
    EXPECT_EQ(source.samples_per_epoch(Split::train), 133);  // then the first is exhausted
    EXPECT_EQ(source.samples_per_epoch(Split::held_out), 0);
    EXPECT_NE(source.fingerprint(), blend({3, 2}).fingerprint());
    EXPECT_EQ(source.fingerprint(), blend({6, 2}).fingerprint());
    // as many samples of each in a period, in another order from sample 90 on
    const BlendedSource other = blend({0.7, 0.3}), same = blend({7, 3}), third = blend({0.70001, 0.3});
    EXPECT_EQ(order_fingerprint(other), order_fingerprint(same));
    EXPECT_EQ(other.fingerprint(), third.fingerprint());
    EXPECT_NE(order_fingerprint(other), order_fingerprint(third));
}

TEST(Blend, SourcesOfOneSizeHaveOrdersOfTheirOwn) {
    TemporaryFolder folder;
    std::string text;
    for (int i = 0; i < 100; ++i) text += static_cast<char>(i + 1);
    for (const char* name : {"a", "b"}) folder.write(name, text);
    Config config = FileData{.data_path = {"1", folder.path("a"), "1", folder.path("b")},
                             .held_out_fraction = 0,
                             .vocab_size = kByteVocabulary,
                             .seq_length = 1};
    config.data.data_kind = DataKind::text;
    config.training.eval_iters = 0;
    const auto source = open_data(config);
    std::vector<int32_t> orders[2];
    for (int64_t i = 0; i < 100; ++i) orders[i % 2].push_back(tokens_of(*source, Split::train, i)[0]);
    EXPECT_NE(orders[0], orders[1]);
}

TEST(Blend, WarnsOfTextThatOneDataSetHoldsOutAndAnotherTrainsOn) {
    TemporaryFolder folder;
    for (int i = 0; i < 20; ++i)
        folder.write(fmt::format("sub/f{}.txt", i), std::string(100 + static_cast<size_t>(i), 'x'));
    const auto text = [&](const std::string& name) {
        return std::make_shared<TextSource>(
            FileData{.data_path = {folder.path(name)}, .held_out_fraction = 0.3, .seq_length = 16});
    };
    const auto warnings = [](const std::vector<std::shared_ptr<TextSource>>& sources) {
        std::vector<BlendedSource::Part> parts;
        for (const auto& source : sources) parts.push_back({{1, "name"}, source});
        std::vector<std::string> all = BlendedSource(std::move(parts)).warnings();
        std::erase_if(all,
                      [](const std::string& line) { return line.find("trains on") == std::string::npos; });
        return all;
    };
    const auto whole = text("."), part = text("sub"), one = text("sub/f3.txt");
    const auto names = [&](const TextSource& source, Split split) {
        std::set<std::string> result;
        for (const std::string& path : source.files(split)) result.insert(path.substr(path.find('f')));
        return result;
    };
    int64_t both = 0;
    for (const auto& [a, b] : {std::pair(whole, part), std::pair(part, whole)})
        for (const std::string& name : names(*a, Split::held_out))
            both += names(*b, Split::train).contains(name) ? 1 : 0;
    ASSERT_GT(both, 1);
    ASSERT_EQ(warnings({whole, part}).size(), 1u);
    expect_contains(warnings({whole, part})[0], fmt::format("trains on: {};", both));
    EXPECT_EQ(warnings({whole, one}).size(), 1u) << "a half of the file is on the other side, wherever it is";
    EXPECT_TRUE(warnings({whole, whole}).empty());
    EXPECT_TRUE(warnings({one, one}).empty());
}

TEST(Blend, ListsOfWeightsAndPaths) {
    const TemporaryFolder folder;
    EXPECT_TRUE(blend_of({"a", "b"}).empty());
    const auto parts = blend_of({"0.7", "a", "3e-1", "b"});
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_EQ(parts[0].weight, 0.7);
    EXPECT_EQ(parts[1].path, "b");
    for (const std::vector<std::string>& list : std::vector<std::vector<std::string>>{
             {"0.7", "a", "0.3"}, {"0.3"}, {"0.7", "0.3", "a", "b"}, {"a", "0.3", "b", "0.7"}, {"a", "0.5"}})
        expect_contains(error_of(ExitCode::data, [&] { blend_of(list); }),
                        "want a weight before each data set");
    for (const char* weight : {"0", "-1", "inf", "nan"})
        expect_contains(error_of(ExitCode::data, [&] { blend_of({weight, "a"}); }), "want a number above 0");
    expect_contains(error_of(ExitCode::data, [] { blend({1, 1e-9}); }), "want at least 1 / 65536");
}

}  // namespace
}  // namespace fp8flow::data
