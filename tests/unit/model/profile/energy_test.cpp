// SPDX-License-Identifier: MIT
// The energy of whole steps and of the passes alone, with a counter that takes 100 W.
#include "model/profile/run.h"

#include "tests/support/training.h"

#include <chrono>

namespace fp8flow {
namespace {

using namespace profile;

std::vector<ArmProfile> profile_two_ranks(const Config& config, const EnergyCounter& energy) {
    std::vector<ArmProfile> arms(2);
    const auto data = open_data(config);
    run_thread_ranks(2, test::kTestDeadline, [&](ProcessGroup& world) {
        const BackendChoice backend = choose_backend(BackendKind::reference);
        MachineCeilings ceilings(backend, world, MachineCeilings::usual_options(backend));
        arms[static_cast<size_t>(world.rank())] =
            profile_arm({.name = "flow", .config = config}, world, backend, data, ceilings, energy,
                        [](const char*, int64_t, int64_t, double) {});
    });
    return arms;
}

TEST(ProfileEnergy, IsOfStepsAndOfPassesOnAllRanks) {
    const Config config = profiled_config(
        test::test_config(Recipe::fp8_flow, {"parallel.expert_model_parallel_size=2",
                                             "profile.profile_step_start=1", "profile.energy_seconds=0.4"}),
        2);
    const auto joules = [] {
        const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
        return std::optional(100 * now.count());
    };
    for (const ArmProfile& arm : profile_two_ranks(config, joules)) {
        ASSERT_TRUE(arm.joules_per_step && arm.passes_joules_per_step);
        EXPECT_EQ(arm.step_tokens, 256);
        EXPECT_EQ(*arm.passes_joules_per_token(), *arm.passes_joules_per_step / 256);
        // the counter goes on for 0.1 seconds after a window of 0.4 or more
        EXPECT_GE(arm.passes_watts(2), 99);
        EXPECT_LE(arm.passes_watts(2), 200);
        EXPECT_GE(*arm.joules_per_step, 0);
    }
    for (const ArmProfile& arm : profile_two_ranks(config, [] { return std::optional<double>(); }))
        EXPECT_FALSE(arm.joules_per_step || arm.passes_joules_per_step);
}

}  // namespace
}  // namespace fp8flow
