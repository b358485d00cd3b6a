// SPDX-License-Identifier: MIT
// `fp8flow train` as a user sees it: what it prints, what it writes and where, and that the same command
// gives the same numbers.
#include "model/report/table.h"
#include "model/train/trainer.h"
#include "tests/cli/command.h"
#include "tests/cli/provenance.h"
#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

namespace fp8flow {
namespace {

using nlohmann::json;

Texts train(const std::string& out, const Texts& settings = {},
            const std::string& config = config_file("test")) {
    return with_settings({"train", config, "--backend", "reference", "--out", out}, settings);
}

std::set<std::string> files_below(const std::string& folder) {
    std::set<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
        if (!entry.is_directory()) files.insert(entry.path().lexically_relative(folder).string());
    return files;
}

const char* const kStepLine =
    R"( iteration +\d+/\d+ \| lm loss \d\.\d{4} \| grad norm \d+\.\d{3} \| lr \d\.\d\dE[+-]\d\d \| )"
    R"([\d.]+ m?s \| [\d.]+ k? ?tok/s, [\d.e-]+ TFLOP/s per GPU \| load \d\.\d\d( \| dead \d+)? \| ETA \d+:\d\d:\d\d)";
// Megatron-LM's line, field by field, and what we append to it.
const char* const kMegatronLine =
    R"( \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +\d+/ +\d+ \| consumed samples: +\d+ \| )"
    R"(elapsed time per iteration \(ms\): \d+\.\d \| throughput per GPU \(TFLOP/s/GPU\): [\d.e-]+ \| )"
    R"(token throughput per GPU \(tokens/s/GPU\): \d+\.\d \| learning rate: \d\.\d{6}E[+-]\d\d \| )"
    R"(global batch size: +\d+ \| lm loss: \d\.\d{6}E[+-]\d\d \| load_balancing_loss: \d\.\d{6}E[+-]\d\d \| )"
    R"(grad norm: \d+\.\d{3} \| number of skipped iterations: +\d+ \| number of nan iterations: +\d+ \| )"
    R"(load max/mean: \d\.\d\d \|( dead experts: \d+ \|)? ETA: \d+:\d\d:\d\d \|)";

void expect_metrics(const std::string& out, size_t steps, int ranks) {
    const std::vector<json> records = metrics_of(out, "step");
    for (const json& record : records) {  // one MoE layer, one balancing loss near 1, its value if balanced
        EXPECT_EQ(record.at("load_balancing_loss_by_layer"), json::array({record.at("load_balancing_loss")}));
        EXPECT_NEAR(record.at("load_balancing_loss").get<double>(), 1.0, 0.3);
        EXPECT_EQ(record.at("z_loss_by_layer"), json::array());
        EXPECT_FALSE(record.contains("seq_load_balancing_loss"));
    }
    ASSERT_EQ(records.size(), steps);
    for (size_t i = 0; i < steps; ++i) {
        const json& r = records[i];
        EXPECT_EQ(r.at("iteration"), i + 1);
        for (const char* key : {"lm_loss", "grad_norm", "learning_rate", "seconds", "tokens",
                                "activation_bytes", "tokens_per_second_per_gpu", "tflops_per_gpu"})
            EXPECT_GT(r.at(key).get<double>(), 0.0) << key;
        for (const char* rate : {"tokens_per_second", "tflops"})
            EXPECT_NEAR(r.at(rate).get<double>() / r.at(std::string(rate) + "_per_gpu").get<double>(), ranks,
                        1e-9);
        for (const char* stage : {"forward_dispatch", "forward_fc1", "forward_combine", "backward_fc2_dgrad",
                                  "backward_swiglu", "update_optimizer"})
            EXPECT_GT(r.at(std::string("stage_seconds_") + stage).get<double>(), 0.0) << stage;
        for (const char* leg : {"routing", "dispatch", "combine"})
            EXPECT_TRUE(r.contains(std::string("wire_bytes_") + leg));
        ASSERT_EQ(r.at("moe_layers").size(), 1u);  // one MoE layer
        EXPECT_GE(r.at("load_max")[0].get<double>(), 1.0);
    }
    const std::vector<json> evaluations = metrics_of(out, "evaluation");
    ASSERT_EQ(evaluations.size(), 1u);
    const double held_out = evaluations[0].at("held_out_loss");
    EXPECT_GT(held_out, 1.0);
    EXPECT_DOUBLE_EQ(evaluations[0].at("bits").get<double>(), held_out / std::log(2.0));
    const std::vector<json> runs = metrics_of(out, "run");
    ASSERT_EQ(runs.size(), 1u);
    for (const char* key : {"commit", "command", "date", "machine_cpu"})
        EXPECT_FALSE(runs[0].at(key).get<std::string>().empty()) << key;
    EXPECT_EQ(runs[0].at("machine_ranks"), ranks);
}

TEST(Train, PrintsStepsAndWritesItsFilesBelowOut) {
    for (const int ranks : {1, 2}) {
        TemporaryFolder folder;
        const Texts line = train("runs/a", {"training.train_iters=6", "output.time_stages=true",
                                            "parallel.expert_model_parallel_size=" + std::to_string(ranks)});
        const CommandResult run = succeeded(fp8flow_on_ranks(ranks, line, folder.path()));
        EXPECT_EQ(run.err, "");
        size_t steps = 0;
        for (const std::string& text : lines_of(run.out)) {
            if (text.find("lm loss") == std::string::npos) continue;
            EXPECT_TRUE(std::regex_match(text, std::regex(kStepLine))) << text;
            EXPECT_LE(text.size(), 160u);
            ++steps;
        }
        EXPECT_EQ(steps, 6u);
        for (const char* text :
             {"backend: reference", "recipe: fp8_flow (FP8 rows + scales on the wire", "floor of the loss",
              "training.train_iters: ", "validation after iteration 6: held-out loss",
              "done: 6 iterations, 1.54 k tokens", "memory  ", "casts", "compare recipes"})
            expect_contains(run.out, text);
        EXPECT_EQ(run.out.find("nan"), std::string::npos);

        const std::string out = folder.path("runs/a");
        const std::vector<json> records = metrics_of(out, "step");
        expect_contains(run.out,
                        fmt::format("casts          {} explicit per step on rank 0, in {} micro-batches",
                                    records.back().at("casts").get<int64_t>(), 4 / ranks));
        EXPECT_EQ(files_below(folder.path()),
                  (std::set<std::string>{"runs/a/.lock", "runs/a/config.yaml", "runs/a/memory.json",
                                         "runs/a/metrics.jsonl", "runs/a/report.html", "runs/a/train.log"}));
        EXPECT_EQ(lines_of(read_whole(out + "/train.log")), lines_of(run.out));
        const json page = expect_report_page(read_whole(out + "/report.html"));
        for (const char* key : {"configuration", "loss", "memory", "routing", "stage_seconds"})
            EXPECT_FALSE(page.at(key).empty()) << key;
        expect_metrics(out, 6, ranks);
        const json memory = read_json(out + "/memory.json");
        EXPECT_GT(memory.at("parameters").at("master").get<int64_t>(), 1000000);
        EXPECT_GT(memory.at("saved for backward, sum").get<int64_t>(), 100000);
        EXPECT_GT(memory.at("activations, peak"), memory.at("saved for backward, sum")) << "and workspace";
        EXPECT_EQ(memory.at("activations, peak"), records.back().at("activation_bytes"));
        EXPECT_GE(memory.at("activations, peak").get<int64_t>() - memory.at("workspace, used").get<int64_t>(),
                  memory.at("saved for backward, used").get<int64_t>());
        const json& drawn = page.at("memory")[0];
        EXPECT_EQ(drawn.at("parameters"), memory.at("parameters"));
        EXPECT_EQ(drawn.at("saved"), memory.at("saved for backward"));
        EXPECT_EQ(drawn.at("workspace"), memory.at("workspace, reserved"));
        double wire = 0;
        for (const json& record : records)
            for (const char* leg : {"routing", "dispatch", "combine"})
                wire += record.at(std::string("wire_bytes_") + leg).get<double>();
        expect_contains(run.out, fmt::format("  wire           rank 0 sends {} per step",
                                             report::format_bytes(wire / 6)));
        expect_provenance(memory, "fp8flow train ", ranks);
        const int64_t used = memory.at("saved for backward, used"),
                      reserved = memory.at("saved for backward, reserved");
        EXPECT_GT(used, 100000);
        EXPECT_LT(used, reserved);
        int64_t others = 0;
        for (const auto& [category, bytes] : memory.at("saved for backward").items())
            if (!category.starts_with("routed rows: ")) others += bytes.get<int64_t>();
        EXPECT_LT(others, used);
        // the rows that arrived, not those that the buffer holds
        EXPECT_LT(used, memory.at("saved for backward, sum").get<int64_t>());
        const std::vector<double> losses = losses_of(out);
        EXPECT_LT(losses.back(), losses.front() - 0.5);
        const double ends[] = {losses.front(), losses.back()};
        expect_contains(run.out, fmt::format("  train loss     {:.4f} -> {:.4f}\n", ends[0], ends[1]));
        expect_contains(page.at("facts").dump(),
                        fmt::format("{:.4f} to {:.4f} nats per token", ends[0], ends[1]));
        expect_contains(page.at("facts").dump(), R"(["tokens per step","256"])");
        EXPECT_EQ(metrics_of(out, "step").at(0).at("wire_bytes_dispatch").get<double>() > 0, ranks > 1);
    }
}

TEST(Train, SameCommandSameLossesAndSavedConfigurationReloads) {
    for (const int ranks : {1, 2}) {
        TemporaryFolder folder;
        const Texts settings = {"training.train_iters=5", "precision.recipe=fp8_blockwise"};
        succeeded(fp8flow_on_ranks(ranks, train(folder.path("a"), settings)));
        succeeded(fp8flow_on_ranks(ranks, train(folder.path("b"), settings)));
        succeeded(fp8flow_on_ranks(ranks, train(folder.path("c"), {}, folder.path("a/config.yaml"))));
        const std::vector<double> losses = losses_of(folder.path("a"));
        ASSERT_EQ(losses.size(), 5u);
        EXPECT_EQ(losses_of(folder.path("b")), losses);
        EXPECT_EQ(losses_of(folder.path("c")), losses);
    }
}

TEST(Train, TextFolderReportsBitsPerByte) {
    TemporaryFolder folder;
    for (int i = 0; i < 40; ++i) {
        std::string text;
        for (int j = 0; j < 100; ++j)
            text += "line " + std::to_string(i * j) + " of a text, more of the same\n";
        folder.write("texts/" + std::to_string(i) + ".txt", text);
    }
    const CommandResult run = succeeded(fp8flow_alone(
        train(folder.path("out"), {"training.train_iters=12", "data.data_kind=text", "model.vocab_size=257",
                                   "data.data_path=" + folder.path("texts")})));
    std::smatch match;
    ASSERT_TRUE(std::regex_search(
        run.out, match, std::regex(R"(held-out loss (\d\.\d{4}) nats = (\d\.\d{4}) bits per byte)")))
        << run.out;
    EXPECT_NEAR(std::stod(match[1]) / std::log(2.0), std::stod(match[2]), 2e-4);
    EXPECT_LT(std::stod(match[2]), 7.0);  // 8 bits before the first step
}

// An llm.c shard: 256 int32 of header, then uint16 tokens 0, 1, ..., 62, 0, ...
std::string shard_of(int tokens) {
    std::string bytes(1024 + static_cast<size_t>(tokens) * 2, '\0');
    const int32_t header[3] = {20240520, 1, tokens};
    std::memcpy(bytes.data(), header, sizeof header);
    for (int i = 0; i < tokens; ++i) bytes[1024 + static_cast<size_t>(i) * 2] = static_cast<char>(i % 63);
    return bytes;
}

TEST(Train, TokenShards) {
    TemporaryFolder folder;
    folder.write("shards/tiny_train.bin", shard_of(4000));
    const Texts line = train(folder.path("out"), {"training.train_iters=12", "data.data_kind=shards",
                                                  "data.data_path=" + folder.path("shards")});
    const CommandResult without = fp8flow_alone(line);
    EXPECT_EQ(without.status, 10) << "an evaluation without held-out data is refused before the first step";
    expect_contains(without.err, "training.eval_iters");
    EXPECT_EQ(without.out.find("lm loss"), std::string::npos);

    folder.write("shards/tiny_val.bin", shard_of(2000));
    const CommandResult run = succeeded(fp8flow_alone(line));
    expect_contains(run.out, "perplexity");
    const std::vector<double> losses = losses_of(folder.path("out"));
    EXPECT_LT(losses.back(), losses.front() - 1.0);  // the successor of a token is certain
}

// The windows are those of the data source, so that another program trains on the same tokens.
TEST(Train, DumpsTheTokensThatItWouldRead) {
    const TemporaryFolder folder;
    const std::string out = folder.path("tokens");
    Texts line = with(train(out), {"--dump-samples", "11"});
    const CommandResult result = succeeded(fp8flow_on_ranks(2, line));
    expect_contains(result.out, "written: " + out + "/samples.npy: 11 windows of 33 tokens, int32");
    EXPECT_EQ(files_below(out), (std::set<std::string>{".lock", "samples.npy"}));
    const std::string file = read_whole(out + "/samples.npy");
    constexpr size_t kHeader = 128, kWindow = 33;
    ASSERT_EQ(file.size(), kHeader + 11 * kWindow * sizeof(int32_t));
    EXPECT_EQ(file.substr(0, 8), std::string("\x93NUMPY\x01\x00", 8));
    EXPECT_EQ(static_cast<uint8_t>(file[8]) + 256 * static_cast<uint8_t>(file[9]), kHeader - 10);
    expect_contains(file.substr(0, kHeader), "{'descr': '<i4', 'fortran_order': False, 'shape': (11, 33), }");
    const auto source = open_data(load_config(config_file("test"), {}, 2));
    std::vector<int32_t> want(kWindow), got(kWindow);
    for (size_t i = 0; i < 11; ++i) {
        source->sample(data::Split::train, static_cast<int64_t>(i), want);
        std::memcpy(got.data(), file.data() + kHeader + i * kWindow * sizeof(int32_t),
                    kWindow * sizeof(int32_t));
        EXPECT_EQ(got, want) << i;
    }
    expect_contains(failure(2, fp8flow_alone(with(line, {"--resume", "auto"}))),
                    "--dump-samples: got checkpoint.load = auto, want none");
    line.back() = "0";
    failure(2, fp8flow_alone(line));
}

TEST(Train, TensorStatisticsOfEveryFp8Recipe) {
    for (const char* recipe : {"fp8_tensorwise", "fp8_blockwise", "fp8_flow", "fp8_rowwise", "mxfp8"}) {
        TemporaryFolder folder;
        Texts line = with(train(folder.path("out"), {"training.train_iters=2", "training.eval_iters=0",
                                                     "output.tensor_stats_interval=1",
                                                     std::string("precision.recipe=") + recipe}),
                          {"--tensor-stats"});
        const CommandResult run = succeeded(fp8flow_alone(line));
        EXPECT_TRUE(std::regex_search(run.out, std::regex("tensor +values +zero bytes +underflow +at maximum "
                                                          "+clipped +scale min +scale max +NMSE vs BF16")))
            << run.out;
        const json rows = read_json(folder.path("out/tensor_stats.json"));
        ASSERT_GE(rows.size(), 3u) << recipe;
        for (const json& row : rows) {
            const std::string name = std::string(recipe) + ": " + row.at("tensor").get<std::string>();
            const double values = row.at("values");
            EXPECT_GT(values, 1000) << name;
            expect_provenance(row, "fp8flow train ", 1);
            EXPECT_LT(row.at("underflows"), 0.3 * values) << name;
            EXPECT_LT(row.at("saturations"), 0.3 * values) << name;
            EXPECT_GT(row.at("scale min"), 0.0) << name;
            EXPECT_GE(row.at("scale max"), row.at("scale min")) << name;
            EXPECT_LT(row.value("nmse", 0.0), 3e-3) << name;  // E4M3: about 7e-4
        }
    }
}

// A line per observed iteration, layer and tensor, in two sessions, and a card of them.
TEST(Train, TensorStatisticsByLayer) {
    TemporaryFolder folder;
    const Texts settings = {"training.train_iters=6", "training.eval_iters=0", "checkpoint.save_interval=4",
                            "output.tensor_stats_interval=2", "output.tensor_stats=true"};
    succeeded(fp8flow_alone(train(folder.path("out"), settings)));
    succeeded(fp8flow_alone(
        with(train(folder.path("out"), settings), {"--resume", "auto", "--set", "training.train_iters=8"})));
    std::map<int64_t, std::map<int64_t, std::set<std::string>>> seen;
    for (const std::string& line : lines_of(read_whole(folder.path("out/tensor_stats.jsonl")))) {
        const json record = json::parse(line);
        const std::string tensor = record.at("tensor");
        EXPECT_TRUE(seen[record.at("iteration")][record.at("layer")].insert(tensor).second) << line;
        EXPECT_GT(record.at("amax"), 0.0) << line;
        EXPECT_GE(record.at("flushed_share"), 0.0) << line;
        EXPECT_EQ(record.at("clipped_share"), 0.0) << line;
        EXPECT_LT(record.at("nmse"), 2e-3) << line;
        int64_t values = 0;
        for (const int64_t count : record.at("scale_exponents")) values += count;
        EXPECT_EQ(values, record.at("values")) << line;
    }
    ASSERT_EQ(seen.size(), 4u);
    for (const auto& [iteration, layers] : seen) {
        EXPECT_EQ(iteration % 2, 0);
        EXPECT_EQ(layers, seen.begin()->second) << iteration;
    }
    for (const auto& [layer, tensors] : seen.begin()->second)
        for (const char* name :
             {"norm", "fc1 weight", "swiglu", "fc2 weight", "dY", "swiglu backward", "dh^T"})
            EXPECT_TRUE(tensors.contains(name)) << layer << " " << name;
    expect_contains(read_whole(folder.path("out/report.html")), "\"tensor_stats\":[{");
}

// One record an observed iteration; a run without statistics has the same losses and no file.
TEST(Train, TransposedCopiesOverTime) {
    TemporaryFolder folder;
    const Texts settings = {"training.train_iters=5", "training.eval_iters=0",
                            "output.tensor_stats_interval=2"};
    const CommandResult run =
        succeeded(fp8flow_alone(with(train(folder.path("out"), settings), {"--tensor-stats"})));
    expect_contains(run.out, "transposed_stats.json");
    const json stats = read_json(folder.path("out/transposed_stats.json"));
    expect_provenance(stats, "fp8flow train ", 1);
    const json& iterations = stats.at("iterations");
    ASSERT_EQ(iterations.size(), 2u);
    for (size_t i = 0; i < iterations.size(); ++i) {
        EXPECT_EQ(iterations[i].at("iteration"), 2 * (i + 1));
        std::set<std::string> tensors;
        for (const json& row : iterations[i].at("transposed")) {
            tensors.insert(row.at("tensor"));
            EXPECT_TRUE(row.at("weight").get<std::string>().starts_with("layers.")) << row;
            const int64_t values = row.at("values"), nonzero = row.at("nonzero"), flushed = row.at("flushed");
            EXPECT_GT(nonzero, 0) << row;
            EXPECT_LE(nonzero, values) << row;
            EXPECT_EQ(row.at("flushed share"), static_cast<double>(flushed) / static_cast<double>(nonzero));
            EXPECT_EQ(row.at("flushed norm share") > 0.0, flushed > 0) << row;
            EXPECT_LE(row.at("flushed norm share"), row.at("nmse")) << row;
        }
        EXPECT_EQ(tensors, (std::set<std::string>{"a^T", "dh^T", "dye^T", "xe^T"}));
    }
    succeeded(fp8flow_alone(train(folder.path("off"), settings)));
    EXPECT_EQ(losses_of(folder.path("off")), losses_of(folder.path("out")));
    EXPECT_FALSE(std::filesystem::exists(folder.path("off/transposed_stats.json")));
}

TEST(Train, StatisticsOfARecipeWithoutFp8SaySo) {
    TemporaryFolder folder;
    const Texts line = train(folder.path("out"), {"training.train_iters=2", "precision.recipe=bf16"});
    expect_contains(succeeded(fp8flow_alone(with(line, {"--tensor-stats"}))).out,
                    "no quantised tensor was observed (recipe bf16");
}

// Their bytes: tests/unit/model/report/tensorboard_test.cpp.
TEST(Train, WritesEventFilesWhereAsked) {
    TemporaryFolder folder;
    const Texts settings = {"training.train_iters=4", "output.tensorboard_dir=tb",
                            "output.tensorboard_log_interval=2"};
    succeeded(fp8flow_alone(train("run", settings), folder.path()));
    std::set<std::string> files = files_below(folder.path("run/tb"));
    ASSERT_EQ(files.size(), 1u);
    EXPECT_EQ(files.begin()->rfind("events.out.tfevents.", 0), 0u);
    const std::string bytes = read_whole(folder.path("run/tb/" + *files.begin()));
    size_t losses = 0;
    for (size_t at = 0; (at = bytes.find("\x0a\x07lm loss", at)) != std::string::npos; ++at) ++losses;
    EXPECT_EQ(losses, 2u);
    const Texts outside = train("run", {"output.tensorboard_dir=../tb"});
    expect_contains(failure(ExitCode::usage, fp8flow_alone(outside, folder.path())),
                    "output.tensorboard_dir: got ../tb");
}

}  // namespace
}  // namespace fp8flow
