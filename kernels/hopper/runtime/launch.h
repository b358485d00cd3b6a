// SPDX-License-Identifier: MIT
// What every launcher needs: the stream, grids, launch attributes (clusters, PDL) and the check after a
// launch.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/runtime/cuda_check.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <span>

namespace fp8flow::hopper {

inline cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
inline cudaStream_t stream_of(const Launch& launch) { return stream_of(launch.stream); }

constexpr int kNumSms = 132;  // H100 / H200 SXM

// Blocks for a grid-stride or persistent kernel: at most `per_sm` on every SM that the launch may use; at
// least one.
inline unsigned grid_for(int64_t blocks_wanted, const Launch& launch, int per_sm = 8) {
    const int64_t sms = launch.sm_limit > 0 ? std::min(launch.sm_limit, kNumSms) : kNumSms;
    return static_cast<unsigned>(std::max<int64_t>(1, std::min<int64_t>(blocks_wanted, sms * per_sm)));
}

inline void check_launch(const char* op) { check_cuda(cudaGetLastError(), op); }

#ifdef __CUDACC__
// Dynamic shared memory beyond 48 KB, static memory included, is an opt-in of the kernel.
template <class Kernel> void allow_shared_memory(Kernel kernel, std::size_t bytes, const char* op) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        op);
}

// Attributes for launch_with: a grid in clusters of `ctas`, or a programmatic dependent launch (launch_pdl).
inline cudaLaunchAttribute cluster_attribute(unsigned ctas) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {ctas, 1, 1};
    return attribute;
}
inline cudaLaunchAttribute pdl_attribute() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
}
inline cudaLaunchConfig_t launch_config(std::span<cudaLaunchAttribute> attributes, dim3 grid, dim3 threads,
                                        std::size_t shared_bytes, const Launch& launch) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_of(launch);
    config.attrs = attributes.data();
    config.numAttrs = static_cast<unsigned>(attributes.size());
    return config;
}
// A launch with attributes, and its check.
template <class... Params, class... Args>
void launch_with(std::span<cudaLaunchAttribute> attributes, void (*kernel)(Params...), dim3 grid,
                 dim3 threads, std::size_t shared_bytes, const Launch& launch, const char* op,
                 const Args&... args) {
    const cudaLaunchConfig_t config = launch_config(attributes, grid, threads, shared_bytes, launch);
    check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), op);
}
template <class... Params, class... Args>
void launch_with(cudaLaunchAttribute attribute, void (*kernel)(Params...), dim3 grid, dim3 threads,
                 std::size_t shared_bytes, const Launch& launch, const char* op, const Args&... args) {
    launch_with(std::span(&attribute, 1), kernel, grid, threads, shared_bytes, launch, op, args...);
}

// A programmatic dependent launch (PDL): the kernel's CTAs may become resident as soon as all CTAs of the
// kernel before it in the stream have exited or called pdl_launch_dependents(); without that call it
// starts 1.5 us earlier than an ordinary launch. Device side: device/pdl.h.
template <class... Params, class... Args>
void launch_pdl(void (*kernel)(Params...), dim3 grid, dim3 threads, std::size_t shared_bytes,
                const Launch& launch, const char* op, const Args&... args) {
    launch_with(pdl_attribute(), kernel, grid, threads, shared_bytes, launch, op, args...);
}
template <class... Params, class... Args>
void launch_pdl(void (*kernel)(Params...), dim3 grid, unsigned threads, const Launch& launch, const char* op,
                const Args&... args) {
    launch_pdl(kernel, grid, dim3(threads), 0, launch, op, args...);
}
#endif

}  // namespace fp8flow::hopper
