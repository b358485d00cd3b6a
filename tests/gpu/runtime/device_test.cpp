// SPDX-License-Identifier: MIT
// The GPU rounds as the host does: conversions in hardware and in scalar_math.h, and the elementary
// functions, bit by bit.
#include "kernels/core/scalar_math.h"
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/hopper/runtime/self_test.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace fp8flow::hopper {
namespace {

// Every exponent and sign with mantissas that visit all ties of the narrow formats and their neighbours, and
// all bit patterns by an odd stride, so that low mantissa bits vary.
std::vector<float> test_values() {
    std::vector<float> values;
    for (uint32_t top = 0; top < 0x10000; top += 8) {  // all BF16 patterns with 4 mantissa bits
        for (const uint32_t low :
             {0x0u, 0x1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu, 0x7FFFFu, 0x40000u, 0x3FFFFu}) {
            values.push_back(bits_float((top << 16) + low));
        }
    }
    constexpr uint32_t kStride = 1021;
    for (uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += kStride)
        values.push_back(bits_float(static_cast<uint32_t>(bits)));
    return values;
}

// Compares `function` on the device with `expected` on the host; NaN equals NaN.
void compare(DeviceFunction function, const std::function<uint32_t(float)>& expected,
             const std::function<bool(uint32_t)>& is_nan) {
    const std::vector<float> values = test_values();
    std::vector<uint32_t> results(values.size(), 0xFFFFFFFFu);
    evaluate_on_device(function, values, results);
    int64_t differences = 0;
    for (size_t i = 0; i < values.size(); ++i) {
        const uint32_t want = expected(values[i]);
        if (results[i] == want || (is_nan(results[i]) && is_nan(want))) continue;
        if (++differences <= 5) {
            ADD_FAILURE() << "input " << std::hex << float_bits(values[i]) << ": device " << results[i]
                          << ", host " << want;
        }
    }
    EXPECT_EQ(differences, 0) << "of " << values.size();
}

bool is_nan_bf16(uint32_t code) { return (code & 0x7FFFu) > 0x7F80u; }
bool is_nan_e4m3(uint32_t code) { return (code & 0x7Fu) == 0x7Fu; }
bool is_nan_e5m2(uint32_t code) { return (code & 0x7Fu) > 0x7Cu; }

TEST(Device, Bf16ConversionMatchesTheHost) {
    const auto host = [](float x) -> uint32_t { return to_bf16(x).bits; };
    compare(DeviceFunction::bf16_hardware, host, is_nan_bf16);
    compare(DeviceFunction::bf16, host, is_nan_bf16);
}

TEST(Device, E4m3ConversionMatchesTheHost) {
    const auto host = [](float x) -> uint32_t { return to_e4m3(x).bits; };
    compare(DeviceFunction::e4m3_hardware, host, is_nan_e4m3);
    compare(DeviceFunction::e4m3, host, is_nan_e4m3);
}

TEST(Device, E5m2ConversionMatchesTheHost) {
    const auto host = [](float x) -> uint32_t { return to_e5m2(x).bits; };
    compare(DeviceFunction::e5m2_hardware, host, is_nan_e5m2);
    compare(DeviceFunction::e5m2, host, is_nan_e5m2);
}

TEST(Device, ElementaryFunctionsMatchTheHost) {
    compare(
        DeviceFunction::exp, [](float x) { return float_bits(exp_float(x)); }, is_nan_bits);
    compare(
        DeviceFunction::log, [](float x) { return float_bits(log_float(x)); }, is_nan_bits);
    compare(
        DeviceFunction::silu, [](float x) { return float_bits(silu_float(x)); }, is_nan_bits);
}

TEST(Device, IsDescribed) {
    EXPECT_TRUE(built_with_cuda());
    EXPECT_TRUE(gpu_visible());
    EXPECT_EQ(unavailable_reason(), "");
    EXPECT_NE(driver_version(), "");
    EXPECT_NE(runtime_version(), "");
}

}  // namespace
}  // namespace fp8flow::hopper
