// SPDX-License-Identifier: MIT
// A run is refused exactly where its plan exceeds what is free, on all ranks together, and says what takes
// it.
#include "model/predict/require_fit.h"

#include "model/predict/fit.h"
#include "tests/support/settings.h"

#include <gtest/gtest.h>

#include <limits>

namespace fp8flow::predict {
namespace {

TEST(RequireFit, TheLastByteCounts) {
    const Config config = shipped("qwen3_30b_a3b");
    const Fit fit = fit_of(config, 8, std::numeric_limits<double>::infinity());
    EXPECT_EQ(shortage_text(config, 8, fit.needed, "GPU memory", 0), "");
    const std::string text = shortage_text(config, 8, fit.needed - 1, "GPU memory", 3);
    expect_contains(text,
                    fmt::format("a rank needs {:.2f} GiB and rank 3 has {:.2f} GiB free within GPU memory",
                                fit.needed / 0x1p30, fit.needed / 0x1p30));
    ASSERT_EQ(fit.largest.size(), 5u);
    for (const Consumer& consumer : fit.largest)
        expect_contains(text, fmt::format("{} {:.2f} GiB ({})", consumer.item.category,
                                          consumer.item.bytes / 0x1p30, consumer.key));
    expect_contains(text, "it fits with ");
    EXPECT_EQ(text.find('\n'), std::string::npos);
    expect_contains(shortage_text(config, 8, 1, "GPU memory", 0), "no key alone makes it fit");
    // The cheapest key first: what `auto` chose.
    Config joined = config;
    joined.precision.moe_wgrad_micro_batches = 2;
    const double most = fit_of(joined, 8, std::numeric_limits<double>::infinity()).needed;
    expect_contains(shortage_text(joined, 8, most - 1, "GPU memory", 0),
                    "it fits with precision.moe_wgrad_micro_batches=1");
}

// Of several runs, one after the other, the one that needs most counts; every rank gets the same message.
TEST(RequireFit, RefusesOnAllRanksOrWarns) {
    const Config small = shipped("test");
    const Config large = shipped("test", {"model.hidden_size=65536", "moe.moe_ffn_hidden_size=1048576"});
    const BackendChoice backend = choose_backend(BackendKind::reference);
    std::vector<std::string> messages(2);
    run_thread_ranks(2, 60, [&](ProcessGroup& world) {
        report::RunLog log(1, {});  // silent
        require_fit(log, {small, small}, backend, world, 2, WhereShort::refuse);
        require_fit(log, {small, large}, backend, world, 2, WhereShort::warn);
        messages[static_cast<size_t>(world.rank())] = error_of(ExitCode::memory, [&] {
            require_fit(log, {small, large}, backend, world, 2, WhereShort::refuse);
        });
        // the rank that has least counts, here one that shares its host with very many
        const std::string shared = error_of(ExitCode::memory, [&] {
            require_fit(log, {small}, backend, world, world.rank() == 1 ? 1 << 30 : 1, WhereShort::refuse);
        });
        expect_contains(shared, " and rank 1 has 0.00 GiB free within ");
        expect_contains(shared, ", shared by 1073741824 ranks; ");
    });
    EXPECT_EQ(messages[0], messages[1]);
    expect_contains(messages[0], "this run will not fit: a rank needs ");
    expect_contains(messages[0], "--force starts it all the same");
}

// Two steps of 8 sequences in micro-batches of 2: each of 64 tokens has 256 bytes of tokens, of labels, and
// of counts. Of 16 M long sequences they are more than any host has, though the model is small.
TEST(RequireFit, TokensOfTheStepsInFlightCount) {
    EXPECT_EQ(plan::step_tokens(shipped("test"), 1).bytes, 2 * 4 * 768);
    EXPECT_EQ(plan::step_tokens(shipped("test"), 4).bytes, 2 * 768);
    EXPECT_EQ(plan::step_tokens(shipped("test", {"overlap_moe_expert_parallel_comm=true"}), 1).bytes,
              4 * 4 * 768);
    const Config many = shipped("test", {"training.global_batch_size=16777216", "model.seq_length=4096"});
    EXPECT_EQ(plan::step_tokens(many, 1).bytes, 2.0 * (1 << 23) * (256 + 2 * 4 * 8192));
    const double tokens = plan::step_tokens(many, 1).bytes;
    EXPECT_GT(fit_of(many, 1, 1, Where::host).needed, tokens);
    EXPECT_LT(fit_of(many, 1, 1, Where::gpu).needed, tokens);
    run_thread_ranks(1, 60, [&](ProcessGroup& world) {
        report::RunLog log(1, {});
        const std::string message = error_of(ExitCode::memory, [&] {
            require_fit(log, {many}, choose_backend(BackendKind::reference), world, 1, WhereShort::refuse);
        });
        expect_contains(message, "tokens of steps (host) 1028.00 GiB (training.global_batch_size)");
    });
}

}  // namespace
}  // namespace fp8flow::predict
