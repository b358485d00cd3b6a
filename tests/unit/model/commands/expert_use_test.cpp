// SPDX-License-Identifier: MIT
// The warning on experts that no token reached lately.
#include "model/commands/train_records.h"

#include "tests/support/files.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

// Layer 0 uses all; expert 2 of layer 1 has its last token in iteration `last`.
std::string warning_of(int64_t iterations, int64_t last, int64_t tokens, int64_t first = 1) {
    ExpertUse use;
    for (int64_t i = first; i < first + iterations; ++i) {
        StepResult result{.step = i - 1};
        const std::vector<int64_t> all(4, tokens);
        std::vector<int64_t> some = all;
        if (i > last) some[2] = 0;
        result.load = {load_of(0, all), load_of(1, some)};
        use.add(result);
    }
    return use.warning();
}

TEST(ExpertUse, WarnsOfExpertsWithoutATokenInTheLastIterations) {
    EXPECT_EQ(
        warning_of(150, 50, 10),
        "warning: 1 expert of layer 1 received no token in the last 100 iterations: a balancing loss keeps "
        "experts in use (moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff)");
    EXPECT_EQ(warning_of(150, 51, 10), "");
    expect_contains(warning_of(20, 0, 10), "in the last 20 iterations");
    expect_contains(warning_of(20, 0, 10, 500), "in the last 20 iterations");  // resumed
    EXPECT_EQ(warning_of(20, 0, 1), "");                                       // by chance
    EXPECT_EQ(ExpertUse().warning(), "");
}

}  // namespace
}  // namespace fp8flow
