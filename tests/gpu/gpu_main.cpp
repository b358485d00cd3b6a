// SPDX-License-Identifier: MIT
// main of every GPU test: without a Hopper GPU it says so and exits with the code that ctest shows as
// skipped.
#include "kernels/hopper/runtime/device_query.h"

#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    if (fp8flow::hopper::device_count() == 0) {
        const std::string reason = fp8flow::hopper::unavailable_reason();
        std::printf("skipped: no device%s%s\n", reason == "no device" ? "" : ": ",
                    reason == "no device" ? "" : reason.c_str());
        return FP8FLOW_SKIPPED_CODE;
    }
    return RUN_ALL_TESTS();
}
