// SPDX-License-Identifier: MIT
// A run that is resumed with more data keeps its moments and its step, begins the order of all data, and is
// resumed from there on as any other; blends resume bit for bit.
#include "model/checkpoint/resume.h"
#include "tests/support/checkpoints.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

namespace fs = std::filesystem;

class MoreData : public testing::Test {
protected:
    MoreData() {
        for (const char* name : {"a", "b"}) {
            std::string text;
            for (int i = 0; i < 2000; ++i) text += std::string(name) + std::to_string(i * i % 97) + " ";
            folder_.write(std::string(name) + ".txt", text);
        }
    }
    std::string path(const std::string& name) const { return folder_.path(name); }
    Config config_of(const Texts& data_path, const Texts& keys = {}) const {
        const Texts base = {
            "data.data_kind=text",        "model.vocab_size=257",
            "training.train_iters=12",    "training.eval_iters=0",
            "data.held_out_fraction=0",   "checkpoint.save_interval=4",
            "training.lr_warmup_iters=0", fmt::format("data.data_path=[{}]", fmt::join(data_path, ","))};
        Config config = test_config(Recipe::bf16, with(base, keys));
        config.checkpoint.load = "auto";
        return config;
    }
    TrainingRun run(const std::string& name, const Texts& data_path, int64_t steps) const {
        fs::create_directory(path(name));
        return train_with_checkpoints(config_of(data_path), 1, {path(name), steps});
    }
    std::string refusal(const std::string& name, const Texts& data_path) const {
        return error_of(ExitCode::checkpoint, [&] { run(name, data_path, 12); });
    }

    TemporaryFolder folder_;
};

TEST_F(MoreData, KeepsMomentsAndStepAndBeginsTheNewOrder) {
    const std::string a = path("a.txt"), b = path("b.txt");
    for (const auto& [less, more] :
         std::vector<std::pair<Texts, Texts>>{{{a}, {b, a}}, {{"1", a}, {"0.5", a, "0.5", b}}}) {
        SCOPED_TRACE(fmt::format("{}", more));
        for (const char* name : {"whole", "parts", "other"}) fs::remove_all(path(name));
        const TrainingRun first = run("whole", less, 4);
        fs::copy(path("whole"), path("parts"), fs::copy_options::recursive);
        fs::copy(path("whole"), path("other"), fs::copy_options::recursive);
        const Config config = config_of(more);
        on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
            const auto resumed =
                checkpoint::resume(trainer, config, *open_data(config), world, path("other"));
            ASSERT_TRUE(resumed.has_value());
            EXPECT_EQ(resumed->step, 4);
            EXPECT_EQ(trainer.first_batch(), -4);  // step 4 trains on batch 0
            const Texts lines = checkpoint::messages_of(*resumed);
            EXPECT_TRUE(std::ranges::any_of(lines, [](const std::string& line) {
                return line.starts_with("note: data.data_path has more than when it was saved: 32 samples");
            })) << fmt::format("{}", lines);
            expect_same_bits(collect(trainer, world, 1), first.state, "m ");
        });
        const TrainingRun whole = run("whole", more, 12);
        run("parts", more, 8);
        expect_same_bits(run("parts", more, 12).state, whole.state);
    }
}

// Of two files one is held out, of which a run on it alone has trained on most.
TEST_F(MoreData, WarnsOfFilesThatAreHeldOutNow) {
    const Texts keys = {"data.held_out_fraction=0.3"};
    int64_t warned = 0;
    for (const char* name : {"a", "b"}) {
        fs::create_directory(path(name));
        train_with_checkpoints(config_of({path(name) + ".txt"}, keys), 1, {path(name), 4});
        const Config config = config_of({path("a.txt"), path("b.txt")}, keys);
        on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
            const auto resumed = checkpoint::resume(trainer, config, *open_data(config), world, path(name));
            ASSERT_TRUE(resumed.has_value());
            warned += std::ranges::count_if(checkpoint::messages_of(*resumed), [](const std::string& line) {
                return line.starts_with(
                    "warning: data.data_path: files that are held out and were trained on before: 1;");
            });
        });
    }
    EXPECT_EQ(warned, 1);
}

TEST_F(MoreData, OtherDataRemainAnError) {
    const std::string a = path("a.txt"), b = path("b.txt");
    run("run", {a}, 4);
    expect_contains(refusal("run", {b}), "name the same data, or the same and more");
    Texts texts = {"data.max_bytes=100000"};
    expect_contains(error_of(ExitCode::checkpoint,
                             [&] {
                                 train_with_checkpoints(config_of({a, b}, texts), 1, {path("run"), 12});
                             }),
                    "saved with other data");
    folder_.write("a.txt", "changed " + read_whole(a));
    expect_contains(refusal("run", {a, b}), "saved with other data");
}

TEST_F(MoreData, BlendsResumeBitForBit) {
    const Texts blend = {"0.8", path("a.txt"), "0.2", path("b.txt")};
    const TrainingRun whole = run("whole", blend, 12);
    run("parts", blend, 6);
    expect_same_bits(run("parts", blend, 12).state, whole.state);
    // 0.80002: as many samples of each in a period, in another order
    for (const auto& [a, b] : {std::pair{"0.7", "0.3"}, {"0.80002", "0.2"}})
        expect_contains(refusal("parts", {a, path("a.txt"), b, path("b.txt")}), "saved with other data");
}

}  // namespace
}  // namespace fp8flow::test
