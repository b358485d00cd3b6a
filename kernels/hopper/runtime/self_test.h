// SPDX-License-Identifier: MIT
// A small kernel that checks that this GPU and the host round equally: the premise of comparing two backends
// bit by bit. Read next: kernels/core/scalar_math.h, tests/gpu/runtime/device_test.cpp.
#pragma once

#include <cstdint>
#include <span>

namespace fp8flow::hopper {

// A function of one float: the hardware's own conversion, or the one of kernels/core/scalar_math.h compiled
// for the device.
enum class DeviceFunction { bf16_hardware, bf16, e4m3_hardware, e4m3, e5m2_hardware, e5m2, exp, log, silu };

// results[i] = bits of function(values[i]), evaluated on device 0. A value narrower than 32 bits is in the
// low bits. Both spans have the same length. Throws Error (usage) where no Hopper GPU can be used.
void evaluate_on_device(DeviceFunction function, std::span<const float> values, std::span<uint32_t> results);

}  // namespace fp8flow::hopper
