// SPDX-License-Identifier: MIT
// What a user can get wrong: each mistake is one clear line on stderr, with the exit status of its class.
#include "tests/cli/command.h"

#include <gtest/gtest.h>

#include <sstream>

namespace fp8flow {
namespace {

// Standard error holds one report and nothing else; it holds all of `parts`.
void expect_report(const CommandResult& result, ExitCode code, const Texts& parts) {
    EXPECT_EQ(result.status, static_cast<int>(code)) << result.err;
    EXPECT_EQ(error_lines(result.err).size(), 1u) << result.err;
    EXPECT_EQ(lines_of(result.err).size(), 1u) << result.err;
    for (const std::string& part : parts) expect_contains(result.err, part);
}

Texts train_with(const std::string& setting) { return {"train", config_file("test"), "--set", setting}; }

TEST(UsageError, CommandLine) {
    const ExitCode usage = ExitCode::usage;
    expect_report(fp8flow_alone({"dance"}), usage, {"dance", "--help"});
    expect_report(fp8flow_alone({"trian", config_file("test")}), usage,
                  {"unknown command 'trian'; did you mean 'train'"});
    expect_report(fp8flow_alone({"train"}), usage, {"config is required"});
    expect_report(fp8flow_alone({"train", config_file("test"), "--bogus"}), usage, {"--bogus"});
    expect_report(fp8flow_alone({"train", config_file("test"), "--backend", "cuda"}), usage,
                  {"--backend: got 'cuda', want auto, reference or hopper"});
    expect_report(fp8flow_alone({"plan", config_file("test"), "--gpus", "0"}), usage,
                  {"--gpus: got 0, want an integer in [1, 1048576]"});
    expect_report(fp8flow_alone({"plan", config_file("test"), "--ep", "0"}), usage,
                  {"--ep: got 0, want an integer in [1, 4096]"});
    expect_report(fp8flow_alone({"plan", config_file("test"), "--micro-batch", "1,4611686018427387904"}),
                  usage, {"--micro-batch: got 4611686018427387904, want an integer in [1, 1048576]"});
    expect_report(fp8flow_alone({"plan", config_file("test"), "--gpus", "99999999999999999999"}), usage,
                  {"--gpus"});
    expect_report(fp8flow_alone({"plan", config_file("test"), "--gpus", "many"}), usage, {"--gpus", "many"});
    expect_report(
        fp8flow_alone({"plan", config_file("test"), "--recipes", "flow"}), usage,
        {"--recipes: got flow, want one of bf16, fp8_blockwise, fp8_flow; did you mean 'fp8_flow'"});
    expect_report(fp8flow_alone({"profile"}), usage, {"want a configuration", "--hf-config", "--compare"});
    expect_report(fp8flow_alone(train_with("train_iters")), usage,
                  {"--set: got train_iters, want section.key=value"});
}

// The options of a command that take a value, as its help lists them: "--out TEXT", "--ep INT:...".
Texts options_of(const std::string& command, bool numbers) {
    Texts options;
    std::istringstream help(fp8flow_alone({command, "--help"}).out);
    for (std::string line; std::getline(help, line);) {
        std::istringstream words(line);
        std::string name, type;
        words >> name >> type;
        const bool number = type.starts_with("INT") || type.starts_with("FLOAT") || type.starts_with("UINT");
        if (name.starts_with("--") && (number || (!numbers && type.starts_with("TEXT"))))
            options.push_back(name);
    }
    return options;
}

const Texts kCommands = {"train", "validate", "profile", "plan", "replay", "bench"};

// As an unset variable of a shell leaves it: "" and --weights=$none.
TEST(UsageError, AnEmptyValueIsNoValueOfAnyOption) {
    size_t tried = 0;
    for (const std::string& command : kCommands)
        for (const std::string& option : options_of(command, false)) {
            for (const Texts& given : {Texts{option, ""}, Texts{option + "="}}) {
                const Texts line = with({command, config_file("test")}, given);
                expect_report(fp8flow_alone(line), ExitCode::usage, {option + ": got an empty value"});
            }
            ++tried;
        }
    EXPECT_GT(tried, 50u);
    expect_report(fp8flow_alone({"train", ""}), ExitCode::usage, {"argument 2: got an empty value"});
}

TEST(UsageError, NumbersOfOptionsAreCheckedAsThoseOfKeys) {
    size_t tried = 0;
    for (const std::string& command : kCommands)
        for (const std::string& option : options_of(command, true)) {
            for (const char* value : {"nan", "-nan", "inf", "-1", "1e400", "0x", "x", "1;"})
                expect_report(fp8flow_alone({command, config_file("test"), option + "=" + value}),
                              ExitCode::usage, {option + ": got " + value + ", want "});
            ++tried;
        }
    EXPECT_GT(tried, 10u);
    succeeded(fp8flow_alone({"plan", config_file("test"), "--gpus", "1e0", "--micro-batch", "2e0"}));
}

TEST(UsageError, NoCommandPrintsHelp) {
    const CommandResult result = fp8flow_alone({});
    EXPECT_EQ(result.status, 2);
    for (const char* text : {"train", "validate", "plan", "--help-config", "Exit status"})
        expect_contains(result.out, text);
}

TEST(UsageError, ConfigurationFile) {
    TemporaryFolder folder;
    expect_report(fp8flow_alone({"train", folder.path("none.yaml")}), ExitCode::usage,
                  {folder.path("none.yaml") + ": got no such file, want a configuration"});
    expect_report(fp8flow_alone({"train", folder.path()}), ExitCode::usage, {"something other than a file"});
    const std::string unknown =
        folder.write("unknown.yaml", "training:\n  learning_rat: 1\n  train_itres: 3\n");
    const std::string two = failure(2, fp8flow_alone({"train", unknown}));
    ASSERT_EQ(lines_of(two).size(), 3u) << two;
    EXPECT_EQ(lines_of(two)[0], "fp8flow: error: 2 problems");
    expect_contains(lines_of(two)[1], unknown + ":2:3: training.learning_rat: got an unknown key");
    expect_contains(lines_of(two)[2], "unknown.yaml:3:3: training.train_itres: got an unknown key");
    expect_contains(lines_of(two)[2], "did you mean 'training.train_iters'");
    const std::string broken = folder.write("broken.yaml", "training:\n  lr: [1\n");
    expect_report(fp8flow_alone({"train", broken}), ExitCode::usage, {"broken.yaml:"});
}

TEST(UsageError, ValuesThatDoNotFit) {
    const ExitCode usage = ExitCode::usage;
    expect_report(fp8flow_alone(train_with("training.trian_iters=3")), usage,
                  {"did you mean 'training.train_iters'"});
    expect_report(fp8flow_alone(train_with("moe.moe_router_topk=5")), usage,
                  {"moe.moe_router_topk: got 5, want at most num_experts = 4"});
    expect_report(fp8flow_alone(train_with("model.hidden_size=200")), usage,
                  {"model.hidden_size: got 200", "multiple of 128", "nearest: 128 and 256"});
    expect_report(
        fp8flow_alone(train_with("parallel.expert_model_parallel_size=2")), usage,
        {"parallel.expert_model_parallel_size: got 2, want a divisor of the world size 1", "mpirun -n 2"});
    expect_report(
        fp8flow_alone({"plan", config_file("test"), "--gpus", "3", "--set", "training.global_batch_size=6",
                       "--set", "parallel.expert_model_parallel_size=3"}),
        usage, {"got 3, want a divisor of num_experts = 4; nearest 2 or 4"});
    expect_report(fp8flow_alone(train_with("training.global_batch_size=7")), usage,
                  {"training.global_batch_size: got 7", "nearest 6 or 8"});
    expect_report(fp8flow_alone({"validate", config_file("test"), "--set", "validate.warmup_iters=20"}),
                  usage, {"validate.warmup_iters is 20", "train_iters 20"});
}

TEST(UsageError, HopperBackendWithoutADevice) {
    if (std::filesystem::exists("/dev/nvidia0")) GTEST_SKIP() << "a GPU is visible";
    expect_report(fp8flow_alone({"train", config_file("test"), "--backend", "hopper"}), ExitCode::usage,
                  {"--backend hopper:", "use --backend auto or reference"});
}

TEST(DataError, NamesThePath) {
    TemporaryFolder folder;
    std::filesystem::create_directories(folder.path("empty"));
    const auto train_on = [&](const std::string& path) {
        return fp8flow_alone({"train", config_file("test"), "--out", folder.path("out"), "--set",
                              "data.data_kind=text", "--set", "model.vocab_size=257", "--set",
                              "data.data_path=" + path});
    };
    expect_report(train_on(folder.path("none")), ExitCode::data,
                  {"data.data_path: " + folder.path("none") + ": No such file or directory"});
    expect_report(train_on(folder.path("empty")), ExitCode::data, {"data.data_path", folder.path("empty")});
    expect_report(train_on(folder.path("*.txt")), ExitCode::data, {"*.txt: no file matches"});
}

TEST(DataError, NamesTheKeyOfAPathWithNothing) {
    TemporaryFolder folder;
    const std::string none = folder.path("none");
    for (const char* key : {"checkpoint.pretrained_checkpoint", "data.routing_path", "checkpoint.load"})
        expect_report(fp8flow_alone({"train", config_file("test"), "--out", folder.path("out"), "--set",
                                     key + ("=" + none)}),
                      key == std::string("checkpoint.load") ? ExitCode::checkpoint : ExitCode::data,
                      {key + (" " + none) + ": No such file"});
    expect_report(fp8flow_alone({"replay", config_file("test"), "--input", none}), ExitCode::data,
                  {"--input " + none + ": No such file"});
    expect_report(fp8flow_alone({"train", config_file("test"), "--out", folder.path("out"), "--set",
                                 "checkpoint.save_interval=1", "--set",
                                 "checkpoint.save=" + folder.write("file", "x")}),
                  ExitCode::output, {"checkpoint.save " + folder.path("file") + ": cannot create"});
}

TEST(DataError, CorruptShard) {
    TemporaryFolder folder;
    const std::string shard = folder.write("tiny_train.bin", std::string(2000, 'x'));
    expect_report(fp8flow_alone({"train", config_file("test"), "--out", folder.path("out"), "--set",
                                 "data.data_kind=shards", "--set", "data.data_path=" + shard}),
                  ExitCode::data, {shard});
}

TEST(OutputError, FolderThatCannotBeWritten) {
    TemporaryFolder folder;
    const std::string file = folder.write("file", "x");
    for (const std::string& out : {file, file + "/below"}) {
        const CommandResult result = fp8flow_alone({"train", config_file("test"), "--out", out});
        expect_report(result, ExitCode::output, {out});
        EXPECT_EQ(result.out, "");
    }
    EXPECT_EQ(read_whole(file), "x");
}

// The limit would end the process by SIGXFSZ.
TEST(OutputError, FileSizeLimit) {
    TemporaryFolder folder;
    RunningCommand command(
        {"/bin/sh", "-c", "ulimit -f 1; exec \"$0\" plan \"$1\" --out \"$2\" --json plan.json > /dev/null",
         FP8FLOW_EXECUTABLE, config_file("test"), folder.path("out")},
        folder.path());
    expect_report(command.wait(60), ExitCode::output, {"plan.json: cannot write", "File too large"});
}

TEST(UsageError, ControlCharactersAreEscaped) {
    const std::string result = failure(2, fp8flow_alone({"train", "a\x1b[2J.yaml"}));
    EXPECT_EQ(result.find('\x1b'), std::string::npos);
    expect_contains(result, "a\\x1b[2J.yaml: got no such file");
    EXPECT_LT(fp8flow_alone({"train", std::string(50000, 'x')}).err.size(), 5000u);
}

TEST(NumericError, DivergenceStopsBeforeTheUpdate) {
    TemporaryFolder folder;
    for (const char* recipe : {"bf16", "fp8_flow"}) {
        const CommandResult result =
            fp8flow_alone({"train", config_file("test"), "--out", folder.path("out"), "--set",
                           "training.lr=1e30", "--set", std::string("precision.recipe=") + recipe});
        expect_report(result, ExitCode::numeric, {"step 2:", "not finite", "the step was not applied"});
    }
}

}  // namespace
}  // namespace fp8flow
