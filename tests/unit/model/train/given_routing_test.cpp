// SPDX-License-Identifier: MIT
// Routing recorded and given (output.record_routing, data.routing_path): a run that gets its own routing back
// has the same bits, another recipe the same experts; files that do not fit are refused.
#include "model/data/routing_file.h"
#include "model/safetensors/writer.h"
#include "tests/support/training.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

using namespace data;
using test::test_config;
using test::TrainingRun;

// All steps of the configuration.
TrainingRun train_all(const Config& config, int ranks) {
    return test::train(config, ranks, {.steps = config.training.train_iters});
}

// Two MoE layers with losses, bias and two micro-batches of a step, and what they are computed with.
const Texts kBase = {"model.num_layers=3", "model.moe_layer_freq=[1, 0, 1]", "training.train_iters=4",
                     "moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true"};
struct Layout {
    int ranks;
    Texts keys;
};
const Layout kLayouts[] = {
    {1, {"training.micro_batch_size=4"}},
    {2, {"parallel.expert_model_parallel_size=2", "recompute.recompute_granularity=full"}},
    {2,
     {"parallel.expert_model_parallel_size=2", "training.micro_batch_size=1",
      "schedule.overlap_moe_expert_parallel_comm=true"}},
    {2, {"moe.moe_expert_rank_capacity_factor=0.6"}}};  // steps are redone

TEST(GivenRouting, OwnRoutingGivesTheSameBits) {
    for (const Layout& layout : kLayouts) {
        SCOPED_TRACE(layout.keys.back());
        const TemporaryFolder folder;
        const Texts keys = with(kBase, layout.keys), record = {"output.record_routing=" + folder.path("a")};
        const TrainingRun plain = train_all(test_config(Recipe::bf16, keys), layout.ranks);
        const TrainingRun recorded = train_all(test_config(Recipe::bf16, with(keys, record)), layout.ranks);
        test::expect_same_bits(plain.state, recorded.state);
        const TrainingRun given =
            train_all(test_config(Recipe::bf16, with(keys, {"data.routing_path=" + folder.path("a"),
                                                            "output.record_routing=" + folder.path("b")})),
                      layout.ranks);
        test::expect_same_bits(plain.state, given.state);
        for (const StepResult& step : given.steps)
            for (const LayerLoad& load : step.load) EXPECT_EQ(load.equal_choices, 1.0);
        EXPECT_EQ(read_whole(folder.path("a")), read_whole(folder.path("b")));
    }
}

// Routing in a file is that of the training data, however much is evaluated.
TEST(GivenRouting, EvaluationsHaveTheirOwnRouting) {
    const TemporaryFolder folder;
    double losses[2];
    for (const bool given : {false, true}) {
        const std::string key = given ? "data.routing_path=" : "output.record_routing=";
        const Config config = test_config(Recipe::bf16, with(kBase, {key + folder.path("a")}));
        test::on_trainers(config, 1, [&](test::ReferenceTrainer& trainer, ProcessGroup&) {
            trainer.run_step();
            losses[given] = trainer.evaluate(config.training.train_iters + 1);
        });
    }
    EXPECT_EQ(losses[0], losses[1]);
}

// One file for every number of ranks and size of micro-batches.
TEST(GivenRouting, AnotherRecipeAndLayoutHasTheSameExperts) {
    const TemporaryFolder folder;
    const TrainingRun bf16 =
        train_all(test_config(Recipe::bf16, with(kBase, {"output.record_routing=" + folder.path("a")})), 1);
    const Texts given = {"data.routing_path=" + folder.path("a"), "parallel.expert_model_parallel_size=2",
                         "training.micro_batch_size=1", "output.log_interval=2"};
    const TrainingRun fp8 = train_all(test_config(Recipe::fp8_flow, with(kBase, given)), 2);
    double least = 1;
    for (size_t i = 0; i < bf16.steps.size(); ++i)
        for (size_t layer = 0; layer < 2; ++layer) {
            const LayerLoad& load = fp8.steps[i].load[layer];
            EXPECT_EQ(load.tokens, bf16.steps[i].load[layer].tokens) << i;
            ASSERT_EQ(load.equal_choices.has_value(), i % 2 == 1);
            least = std::min(least, load.equal_choices.value_or(1));
        }
    EXPECT_LT(least, 1);  // some choices flip, and are counted
    EXPECT_GT(least, 0.8);
}

// With another seed a sample has other tokens.
TEST(GivenRouting, AnotherOrderOfTheDataIsRefused) {
    const TemporaryFolder folder;
    std::string text;
    for (int i = 0; i < 2000; ++i) text += std::to_string(i * i % 97) + " ";
    const Texts base = {"data.data_kind=text",   "data.data_path=" + folder.write("text", text),
                        "model.vocab_size=257",  "data.held_out_fraction=0",
                        "training.eval_iters=0", "training.train_iters=2"};
    const auto train = [&](const Texts& keys) { train_all(test_config(Recipe::bf16, with(base, keys)), 1); };
    const std::string given = "data.routing_path=" + folder.path("a");
    train({"output.record_routing=" + folder.path("a")});
    train({given});
    expect_contains(error_of(ExitCode::data, [&] { train({given, "training.seed=5"}); }), "training.seed");
}

// After a rollback a run reads as many samples more as it skipped: its file has them, each layer in its
// place. A run that would read more of a file than there is does not begin.
TEST(GivenRouting, ARunThatSkippedSamplesRecordsThoseThatItReads) {
    const TemporaryFolder folder;
    const Config config =
        test_config(Recipe::bf16, with(kBase, {"output.record_routing=" + folder.path("a")}));
    const auto train_from = [](const Config& own, int64_t batch) {
        return test::train(own, 1, {.steps = 4, .before_step = [&](Trainer& trainer, auto&, int64_t step) {
                                        if (step == 0) trainer.set_first_batch(batch);
                                    }});
    };
    const TrainingRun recorded_run = train_from(config, 2);
    const Config given = test_config(Recipe::bf16, with(kBase, {"data.routing_path=" + folder.path("a")}));
    test::expect_same_bits(recorded_run.state, train_from(given, 2).state);
    const std::string refusal = error_of(ExitCode::data, [&] { train_from(given, 3); });
    expect_contains(refusal, "it is resumed after a rollback");
    const SafetensorsFile file(folder.path("a"));
    const auto batch = static_cast<size_t>(config.training.global_batch_size);
    std::vector<uint8_t> recorded(6 * batch, 1);
    std::fill_n(recorded.begin(), 2 * batch, uint8_t{0});
    EXPECT_TRUE(std::ranges::equal(file.bytes(*file.find("recorded")), recorded));
    const auto ids = file.bytes(*file.find("layers.2.moe.router.ids"));
    EXPECT_TRUE(std::ranges::all_of(ids.first(ids.size() / 3), [](uint8_t byte) { return byte == 0; }));
    for (const char* key : {"output.record_routing=a", "data.routing_path=a"})
        expect_contains(error_of(ExitCode::usage,
                                 [&] {
                                     test_config(Recipe::bf16, {key, "training.on_divergence=rollback",
                                                                "checkpoint.save_interval=1"});
                                 }),
                        "want none with training.on_divergence: rollback");
}

// A file of two samples of 4 tokens, top-2 of 8 experts in layers 0 and 2.
struct Content {
    std::vector<int16_t> ids = {0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0};
    std::vector<int64_t> shape = {8, 2};
    FileDType dtype = FileDType::i16;
    std::string experts = "8", data = "000000000000002a";
    std::vector<uint8_t> recorded = {1, 1};
};
std::string bytes_of(const Content& c) {
    std::string bytes;
    SafetensorsWriter writer(
        {{"layers.0.moe.router.ids", c.dtype, c.shape},
         {"layers.2.moe.router.ids", c.dtype, c.shape},
         {"recorded", FileDType::u8, {static_cast<int64_t>(c.recorded.size())}}},
        {{"num_experts", c.experts}, {"data", c.data}},
        [&](const void* data, size_t count) { bytes.append(static_cast<const char*>(data), count); });
    for (const char* name : {"layers.0.moe.router.ids", "layers.2.moe.router.ids"})
        writer.append(name, c.ids.data(), static_cast<int64_t>(c.ids.size() * sizeof(int16_t)));
    writer.append("recorded", c.recorded.data(), static_cast<int64_t>(c.recorded.size()));
    writer.finish();
    return bytes;
}
const RoutingShape kShape{
    .layers = {0, 2}, .tokens = 8, .topk = 2, .num_experts = 8, .seq_length = 4, .data = 42};

TEST(GivenRouting, WhatDoesNotFitIsRefusedWithBothValues) {
    const TemporaryFolder folder;
    const auto refusal = [&](const std::string& bytes, const RoutingShape& shape) {
        const std::string path = folder.write("routing", bytes);
        return error_of(ExitCode::data, [&] {
            std::vector<int32_t> ids(16);
            GivenRouting(path, shape).read(1, 0, ids);
        });
    };
    const auto changed = [](auto change) {
        RoutingShape shape = kShape;
        change(shape);
        return shape;
    };
    std::vector<int32_t> ids(8);
    GivenRouting(folder.write("routing", bytes_of({})), kShape).read(1, 4, ids);
    EXPECT_EQ(ids, (std::vector<int32_t>{7, 6, 5, 4, 3, 2, 1, 0}));
    // as profile does with more steps than the run that recorded it
    expect_contains(
        error_of(ExitCode::data, [&] { GivenRouting(folder.path("routing"), kShape).read(1, 8, ids); }),
        "has 8 tokens, this run reads 12: record it with a larger training.train_iters");
    const std::string good = bytes_of({});
    refusal(good.substr(0, good.size() - 3), kShape);
    for (const auto& [shape, parts] : std::initializer_list<std::pair<RoutingShape, Texts>>{
             {changed([](auto& s) { s.topk = 3; }), {"I16[8, 2]", "I16[at least 8, 3]"}},
             {changed([](auto& s) { s.tokens = 12; }), {"I16[8, 2]", "at least 12"}},
             {changed([](auto& s) { s.tokens = 4, s.data = 0; }), {"I16[8, 2]", "I16[4, 2]"}},
             {changed([](auto& s) { s.num_experts = 16; }), {"num_experts 8", "16"}},
             {changed([](auto& s) { s.data = 43; }), {"2a", "2b"}},
             {changed([](auto& s) { s.seq_length = 2; }), {"2 samples of 4", "seq_length 2"}},
             {changed([](auto& s) {
                  s.layers = {0, 1};
              }),
              {"layers.1.moe.router.ids"}}})
        for (const std::string& part : parts) expect_contains(refusal(good, shape), part);
    expect_contains(refusal(bytes_of({.recorded = {1, 0}}), kShape), "did not come to sample 1");
    for (const int16_t wrong : {-1, 8, 5})  // 5: twice in a token
    {
        Content content;
        content.ids[4] = wrong;
        expect_contains(refusal(bytes_of(content), kShape), fmt::format("expert {} of token 2", wrong));
    }
}

TEST(GivenRouting, ARecordedFileIsNotReplacedByAnother) {
    const TemporaryFolder folder;
    const std::string path = folder.path("routing");
    RecordedRouting(path, kShape, {.recipe = "bf16"}).mark(1);
    const std::string before = read_whole(path);
    expect_contains(error_of(ExitCode::output, [&] { RecordedRouting(path, kShape, {.recipe = "bf16"}); }),
                    "exists");
    expect_contains(
        error_of(ExitCode::output,
                 [&] { RecordedRouting(path, kShape, {.continues = true, .recipe = "fp8_flow"}); }),
        "recipe");
    RecordedRouting(path, kShape, {.continues = true, .recipe = "bf16", .run = "new"});
    EXPECT_EQ(read_whole(path), before) << "of a version that does not name the run";
}

// By the same run, which was killed before its first checkpoint; what was recorded to the end stays.
TEST(GivenRouting, AFileThatARunBeganIsReplacedIfItBeginsAgain) {
    const TemporaryFolder folder;
    const std::string path = folder.path("routing");
    const auto record = [&](bool resumes, const std::string& run) {
        return std::make_unique<RecordedRouting>(
            path, kShape, RecordedRouting::Options{.resumes = resumes, .recipe = "bf16", .run = run});
    };
    const auto refuses = [&](bool resumes, const std::string& run) {
        expect_contains(error_of(ExitCode::output, [&] { record(resumes, run); }), "exists");
    };
    record(true, "a")->mark(1);
    refuses(false, "a");
    refuses(true, "b");
    refuses(true, "");
    const auto again = record(true, "a");
    expect_contains(again->note(), "left no checkpoint");
    const SafetensorsFile file(path);
    EXPECT_TRUE(std::ranges::equal(file.bytes(*file.find("recorded")), std::vector<uint8_t>{0, 0}));
    for (const int64_t sample : {0, 1}) again->mark(sample);
    refuses(true, "a");
}

}  // namespace
}  // namespace fp8flow
