// SPDX-License-Identifier: MIT
// Device discovery through the CUDA runtime. The runtime is linked statically and loads the driver when first
// called, so a machine without a driver answers with an error code here and not with a crash at start-up.
#include "kernels/hopper/runtime/device_query.h"

#include "kernels/hopper/runtime/cuda_check.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

namespace fp8flow::hopper {

namespace {

constexpr int kHopperMajor = 9;
constexpr int kHopperMinor = 0;
#ifdef FP8FLOW_FAST_COMPILE
constexpr bool kSlowKernels = true;
#else
constexpr bool kSlowKernels = false;
#endif

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

// Compute capability of a device as major * 10 + minor, or 0 when it cannot be read.
int capability(int device) {
    int major = 0;
    int minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return major * 10 + minor;
}

// All visible devices; `error` says why there are none.
int all_devices(cudaError_t& error) {
    int count = 0;
    error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        cudaGetLastError();  // cleared, so that the next launch check does not see it
        return 0;
    }
    return count;
}

}  // namespace

bool built_with_cuda() { return true; }

int device_count() {
    if (kSlowKernels) return 0;
    cudaError_t error = cudaSuccess;
    const int all = all_devices(error);
    int hopper = 0;
    for (int device = 0; device < all; ++device) {
        if (capability(device) == kHopperMajor * 10 + kHopperMinor) ++hopper;
    }
    return hopper;
}

std::string driver_version() {
    int version = 0;
    if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return {};
    return version_text(version);
}

std::string runtime_version() { return version_text(CUDART_VERSION); }

std::string unavailable_reason() {
    if (device_count() > 0) return {};
    if (kSlowKernels && gpu_visible())
        return "a GPU is visible, but this program's kernels were compiled fast, to be checked and not to be "
               "run "
               "(FP8FLOW_FAST_COMPILE)";
    cudaError_t error = cudaSuccess;
    const int all = all_devices(error);
    if (all > 0) {
        cudaDeviceProp properties{};
        const bool known = cudaGetDeviceProperties(&properties, 0) == cudaSuccess;
        return fmt::format("{} GPU(s) visible, none of compute capability {}.{} (the first: {}, {}.{})", all,
                           kHopperMajor, kHopperMinor, known ? properties.name : "unknown", properties.major,
                           properties.minor);
    }
    if (!gpu_visible()) return "no device";
    if (error == cudaErrorInsufficientDriver) {
        const std::string driver = driver_version();
        return fmt::format(
            "a GPU is visible, but {}; this program was built with CUDA {}",
            driver.empty() ? "no driver library was found" : "the driver supports CUDA " + driver + " only",
            runtime_version());
    }
    return fmt::format("a GPU is visible, but CUDA answers: {}", cudaGetErrorString(error));
}

std::string device_name(int device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) return properties.name;
    cudaGetLastError();
    return {};
}

double max_clock_hertz(int device) {
    int kilohertz = 0;
    if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device) == cudaSuccess)
        return 1e3 * kilohertz;
    cudaGetLastError();
    return 0;
}

std::string peer_problem() {
    const int devices = device_count();
    for (int from = 0; from < devices; ++from)
        for (int to = 0; to < devices; ++to) {
            int reaches = from == to ? 1 : 0;
            if (from != to && cudaDeviceCanAccessPeer(&reaches, from, to) != cudaSuccess) cudaGetLastError();
            if (reaches == 0) return fmt::format("GPU {} does not reach the memory of GPU {}", from, to);
        }
    return {};
}

int64_t memory_bytes(int device) {
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, device), "reading the GPU's memory size");
    return static_cast<int64_t>(properties.totalGlobalMem);
}

}  // namespace fp8flow::hopper
