// SPDX-License-Identifier: MIT
// What every launcher needs: the stream, grids, launch attributes (clusters, PDL) and the check after a
// launch.
#pragma once

#include "kernels/core/dtype.h"
#include "kernels/core/stream.h"
#include "kernels/hopper/runtime/cuda_check.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <span>
#include <utility>

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

// A CTA per item, so that SMs stay equally busy to the end; a limited launch: at most `per_sm` on each SM.
inline unsigned grid_of_items(int64_t items, const Launch& launch, int per_sm = 8) {
    return launch.sm_limit > 0 ? grid_for(items, launch, per_sm) : static_cast<unsigned>(items);
}

inline void clear_memory(void* data, int64_t bytes, const Launch& launch, const char* op) {
    if (bytes > 0)
        check_cuda(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), stream_of(launch)), op);
}

#ifdef __CUDACC__
// Shared memory beyond 48 KB is an opt-in of the kernel. The launch functions below call this themselves; a
// kernel needs it earlier only for a query of its occupancy. It never lowers the limit, because a captured
// graph or another thread may launch the kernel with more.
template <class Kernel> void allow_shared_memory(Kernel kernel, std::size_t dynamic_bytes, const char* op) {
    constexpr std::size_t kDefault = 16 << 10;  // no kernel has more than 32 KB of static variables
    if (dynamic_bytes <= kDefault) return;
    int device = 0;
    check_cuda(cudaGetDevice(&device), op);
    static std::mutex mutex;
    static std::map<std::pair<int, Kernel>, std::size_t> limits;  // of each device
    const std::lock_guard lock(mutex);
    std::size_t& limit = limits[{device, kernel}];
    if (dynamic_bytes <= limit) return;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(dynamic_bytes)),
               op);
    limit = dynamic_bytes;
}

// kernel_of.operator()<kFp8>() of an FP8 dtype: the kernel that has the type as a template argument.
template <class KernelOf> auto of_fp8(DType dtype, KernelOf kernel_of) {
    return dtype == DType::e5m2 ? kernel_of.template operator()<DType::e5m2>()
                                : kernel_of.template operator()<DType::e4m3>();
}

// The same of a 16-bit float type.
template <class KernelOf> auto of_half(DType dtype, KernelOf kernel_of) {
    return dtype == DType::f16 ? kernel_of.template operator()<DType::f16>()
                               : kernel_of.template operator()<DType::bf16>();
}

// An ordinary launch, and its check.
template <class... Params, class... Args>
void launch_kernel(void (*kernel)(Params...), dim3 grid, dim3 threads, std::size_t shared_bytes,
                   const Launch& launch, const char* op, const Args&... args) {
    allow_shared_memory(kernel, shared_bytes, op);
    kernel<<<grid, threads, shared_bytes, stream_of(launch)>>>(static_cast<Params>(args)...);
    check_cuda(cudaGetLastError(), op);
}
template <class... Params, class... Args>
void launch_kernel(void (*kernel)(Params...), dim3 grid, dim3 threads, const Launch& launch, const char* op,
                   const Args&... args) {
    launch_kernel(kernel, grid, threads, 0, launch, op, args...);
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
    allow_shared_memory(kernel, shared_bytes, op);
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
