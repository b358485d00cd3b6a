// SPDX-License-Identifier: MIT
// Every key of the table of fields with extreme values: each is refused where it is read, or a plan and a
// training run with it end with finite numbers or with an error of the run. None ends the process.
#include "kernels/core/error.h"
#include "model/config/fields.h"
#include "model/plan/plan.h"
#include "tests/support/training.h"

#include <set>
#include <sstream>

namespace fp8flow::test {
namespace {

// In ascending order of the numbers that they are.
const char* const kExtremes =
    "-inf -9223372036854775808 -1e308 -1 -1e-320 -0 0 1e-320 1e-45 1.17e-38 1.18e-38 1e-20 1e-8 0.01 "
    "0.5 0.99999999 0.9999999999 1 1.0000000001 2 3 16 64 127 128 4096 65536 1048576 16777216 "
    "2147483647 2147483648 4294967296 9007199254740992 9007199254740993 4611686018427387904 "
    "9223372036854775807 9223372036854775808 18446744073709551616 1e30 3.4e38 3.5e38 1e308 1e309 inf "
    "nan";

// The configuration, or nothing where it is refused.
std::optional<Config> read(const std::string& setting) {
    try {
        return test_config(Recipe::fp8_flow, {setting});
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
        return std::nullopt;
    }
}

// What a plan says that the run would take; nothing where plan refuses to count it.
std::optional<double> planned_bytes(const Config& config) {
    try {
        const plan::RunPlan plan = plan::make_plan(config, 1);
        EXPECT_TRUE(std::isfinite(plan.total_bytes()) && plan.total_bytes() >= 0);
        return plan.total_bytes() + plan.host.bytes;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
        return std::nullopt;
    }
}

void expect_finite_or_an_error(const Config& config) {
    const int64_t batches = config.training.eval_iters;
    try {
        const TrainingRun run = train(config, 1, {.steps = 2, .eval_batches = batches <= 4 ? batches : 0});
        EXPECT_EQ(run.steps.size(), 2u);
        for (const StepResult& step : run.steps) EXPECT_TRUE(std::isfinite(step.lm_loss));
        for (const auto& [name, values] : run.state)
            for (const float value : values) ASSERT_TRUE(std::isfinite(value)) << name;
    } catch (const Error& error) {
        const std::set<ExitCode> of_a_run = {ExitCode::usage, ExitCode::data, ExitCode::numeric};
        EXPECT_TRUE(of_a_run.contains(error.code())) << error.what();
    }
}

TEST(ExtremeValues, OfEveryKeyAreRefusedOrWork) {
    constexpr double kMostBytes = 64 << 20, kMostTokens = 4096;
    int refused = 0, trained = 0;
    for (const ConfigField& field : config_fields()) {
        std::vector<Config> small;  // that can be trained here
        std::istringstream extremes(kExtremes);
        for (std::string value; extremes >> value;) {
            SCOPED_TRACE(field.name() + "=" + value);
            const auto config = read(field.name() + "=" + value);
            refused += config ? 0 : 1;
            if (!config) continue;
            EXPECT_EQ(diff_configs(*config, parse_config(dump_config(*config), "dump")), Texts{});
            const auto bytes = planned_bytes(*config);
            const double tokens =
                static_cast<double>(config->training.global_batch_size * config->model.seq_length);
            if (bytes && *bytes <= kMostBytes && tokens <= kMostTokens) small.push_back(*config);
        }
        if (small.empty() || field.type.find("text") != std::string::npos) continue;
        for (const Config* config : {&small.front(), &small.back()}) {
            SCOPED_TRACE(field.name() + ": " + field.get(*config));
            expect_finite_or_an_error(*config);
            ++trained;
        }
    }
    EXPECT_GT(refused, 1000);
    EXPECT_GT(trained, 100);
}

TEST(ExtremeValues, TextUpToTheLargestNumberOfBytesIsReadWhole) {
    const TemporaryFolder folder;
    folder.write("text/a.txt", std::string(4000, 'a'));
    const Config config =
        test_config(Recipe::bf16, {"data_kind=text", "vocab_size=257", "data_path=" + folder.path("text"),
                                   "eval_iters=0", "held_out_fraction=0", "data.max_bytes=9007199254740992"});
    EXPECT_EQ(open_data(config)->num_tokens(data::Split::train), 4001);
}

}  // namespace
}  // namespace fp8flow::test
