// SPDX-License-Identifier: MIT
// The CUDA seam on any machine: asking for devices never fails, and the answers agree with one another.
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/hopper/runtime/self_test.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <array>

namespace fp8flow::hopper {
namespace {

TEST(DeviceQuery, ReasonIsGivenExactlyWhenThereIsNoDevice) {
    const std::string reason = unavailable_reason();
    EXPECT_EQ(device_count() == 0, !reason.empty()) << reason;
    EXPECT_EQ(reason.find('\n'), std::string::npos) << reason;
    EXPECT_EQ(!gpu_visible() && device_count() == 0, reason == "no device") << reason;
    if (gpu_visible() && !built_with_cuda()) {
        expect_contains(reason, "built without CUDA: ");
    }
}

TEST(DeviceQuery, RuntimeVersionIsKnownExactlyInCudaBuilds) {
    EXPECT_EQ(runtime_version().empty(), !built_with_cuda());
    if (!built_with_cuda()) {
        EXPECT_EQ(driver_version(), "");
    }
}

TEST(DeviceQuery, SelfTestWithoutDeviceIsAUsageError) {
    if (device_count() > 0) GTEST_SKIP() << "this machine has a device";
    const std::array<float, 1> values{1.0f};
    std::array<uint32_t, 1> results{7u};
    expect_contains(
        error_of(ExitCode::usage, [&] { evaluate_on_device(DeviceFunction::e4m3, values, results); }),
        unavailable_reason());
    EXPECT_EQ(results[0], 7u);
}

}  // namespace
}  // namespace fp8flow::hopper
