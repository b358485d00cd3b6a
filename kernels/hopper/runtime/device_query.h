// SPDX-License-Identifier: MIT
// Which GPUs of this process the CUDA backend can use, and one line for the user when it can use none. The
// same header serves builds without CUDA (without_cuda.cpp), so callers do not depend on the build. Read
// next: model/job/backend.cpp.
#pragma once

#include <optional>
#include <string>

namespace fp8flow::hopper {

// True when this build contains the CUDA backend.
bool built_with_cuda();

// Number of visible GPUs of compute capability 9.0; 0 without a driver, without a GPU, or in a build without
// CUDA.
int device_count();

// Versions as "13.0"; empty when there is no driver or no CUDA in this build.
std::string driver_version();   // newest CUDA version the installed driver supports
std::string runtime_version();  // CUDA version this program was built with

// Why device_count() is 0, in one line without a final period; empty when it is not 0. A machine without any
// GPU yields "no device"; every other text names the obstacle (driver, toolkit at build time, kind of GPU).
std::string unavailable_reason();

// Properties of one device; empty or 0 if the CUDA runtime does not report them.
std::string device_name(int device);  // "NVIDIA H200"
double max_clock_hertz(int device);   // highest SM clock
int64_t memory_bytes(int device);     // all of it, used or not

// One line that names two GPUs if one does not reach the memory of the other; empty if all do.
std::string peer_problem();

// Energy that the device has used since the driver was loaded; absent if it has no counter. The counter is
// updated about ten times per second.
std::optional<double> energy_joules(int device);

// True when the operating system shows an NVIDIA GPU to this process, whether or not a driver or CUDA can use
// it.
bool gpu_visible();

}  // namespace fp8flow::hopper
