// What every launcher needs: the stream, grids, the check after a launch, and element access by dtype on the device.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/core/stream.h"
#include "kernels/hopper/runtime/cuda_check.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <span>

namespace fp8flow::hopper {

inline cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
inline cudaStream_t stream_of(const Launch& launch) { return stream_of(launch.stream); }

constexpr int kNumSms = 132;  // H100 / H200 SXM

// Blocks for a grid-stride or persistent kernel: at most `per_sm` on every SM that the launch may use; at least one.
inline unsigned grid_for(int64_t blocks_wanted, const Launch& launch, int per_sm = 8) {
    const int64_t sms = launch.sm_limit > 0 ? std::min(launch.sm_limit, kNumSms) : kNumSms;
    return static_cast<unsigned>(std::max<int64_t>(1, std::min<int64_t>(blocks_wanted, sms * per_sm)));
}

inline void check_launch(const char* op) { check_cuda(cudaGetLastError(), op); }

#ifdef __CUDACC__
// Dynamic shared memory beyond 48 KB, static memory included, has to be asked for.
template <class Kernel> void allow_shared_memory(Kernel kernel, std::size_t bytes, const char* op) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        op);
}

// A grid in clusters of `ctas`, or a kernel that starts early (launch_behind), for launch_with.
inline cudaLaunchAttribute in_clusters(unsigned ctas) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {ctas, 1, 1};
    return attribute;
}
inline cudaLaunchAttribute starts_early() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
}
inline cudaLaunchConfig_t launch_config(std::span<cudaLaunchAttribute> attributes, unsigned grid,
                                        dim3 threads, std::size_t shared_bytes, const Launch& launch) {
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
void launch_with(std::span<cudaLaunchAttribute> attributes, void (*kernel)(Params...), unsigned grid,
                 dim3 threads, std::size_t shared_bytes, const Launch& launch, const char* op,
                 const Args&... args) {
    const cudaLaunchConfig_t config = launch_config(attributes, grid, threads, shared_bytes, launch);
    check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), op);
}
template <class... Params, class... Args>
void launch_with(cudaLaunchAttribute attribute, void (*kernel)(Params...), unsigned grid, dim3 threads,
                 std::size_t shared_bytes, const Launch& launch, const char* op, const Args&... args) {
    launch_with(std::span(&attribute, 1), kernel, grid, threads, shared_bytes, launch, op, args...);
}

// A kernel whose start does not wait until the one before it in the stream has quite ended: launched by launch_behind, it may get its places on
// multiprocessors as soon as all CTAs of the kernel before it have ended or called let_next_start(); without that call, 1.5 us earlier than
// an ordinary launch. All its threads call wait_for_kernel_before() before they touch what others write or read (prefetches to L2
// may come before): that kernel has ended then, and what it wrote is in L2 (__ldcg).
__device__ __forceinline__ void let_next_start() { cudaTriggerProgrammaticLaunchCompletion(); }
__device__ __forceinline__ void wait_for_kernel_before() { cudaGridDependencySynchronize(); }
template <class... Params, class... Args>
void launch_behind(void (*kernel)(Params...), unsigned grid, dim3 threads, std::size_t shared_bytes,
                   const Launch& launch, const char* op, const Args&... args) {
    launch_with(starts_early(), kernel, grid, threads, shared_bytes, launch, op, args...);
}
template <class... Params, class... Args>
void launch_behind(void (*kernel)(Params...), unsigned grid, unsigned threads, const Launch& launch,
                   const char* op, const Args&... args) {
    launch_behind(kernel, grid, dim3(threads), 0, launch, op, args...);
}
#endif

// A TensorView as a kernel argument: no checks, no names. base() is the first row of an M-tensor, read on the device.
struct DeviceView {
    void* data;
    DType dtype;
    int64_t dims[TensorView::kMaxRank];
    const int64_t* row_base;
    __device__ int64_t base() const { return row_base != nullptr ? *row_base : 0; }
};
inline DeviceView device_view(const TensorView& v) {
    return {v.data, v.dtype, {v.dims[0], v.dims[1], v.dims[2], v.dims[3]}, v.row_base};
}

// One element as fp32 (codes without their scale), and one rounding back. The dtype branch is uniform over the grid.
__device__ __forceinline__ float load_float(const void* data, DType dtype, int64_t i) {
    switch (dtype) {
        case DType::f32: return static_cast<const float*>(data)[i];
        case DType::bf16: return to_float(static_cast<const Bf16*>(data)[i]);
        case DType::f16: return to_float(static_cast<const Fp16*>(data)[i]);
        case DType::e4m3: return to_float(static_cast<const E4m3*>(data)[i]);
        case DType::e5m2: return to_float(static_cast<const E5m2*>(data)[i]);
        case DType::e8m0: return e8m0_to_float(static_cast<const uint8_t*>(data)[i]);
        default: return 0.0f;
    }
}
__device__ __forceinline__ void store_float(void* data, DType dtype, int64_t i, float value) {
    switch (dtype) {
        case DType::f32: static_cast<float*>(data)[i] = value; return;
        case DType::bf16: static_cast<Bf16*>(data)[i] = to_bf16(value); return;
        case DType::f16: static_cast<Fp16*>(data)[i] = to_f16(value); return;
        case DType::e4m3: static_cast<E4m3*>(data)[i] = to_e4m3(value); return;
        case DType::e5m2: static_cast<E5m2*>(data)[i] = to_e5m2(value); return;
        default: return;
    }
}

// The groups of routed rows on the device; groups.num_groups == 0 becomes one group of `rows` rows without pads.
struct DeviceGroups {
    int64_t num_groups;
    const int64_t* counts;
    const int64_t* offsets;
    int64_t rows;
    __device__ int64_t count(int64_t g) const { return counts != nullptr ? counts[g] : rows; }
    __device__ int64_t offset(int64_t g) const {
        return counts != nullptr ? offsets[g] : (g == 0 ? 0 : rows);
    }
    __device__ int64_t total() const { return counts != nullptr ? offsets[num_groups] : rows; }
    // The group of padded row r (r < total()); binary search.
    __device__ int64_t group_of(int64_t r) const {
        int64_t low = 0, high = num_groups;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (offset(middle) <= r)
                low = middle;
            else
                high = middle;
        }
        return low;
    }
    // False for pad rows.
    __device__ bool is_valid(int64_t r) const {
        const int64_t g = group_of(r);
        return r - offset(g) < count(g);
    }
};
inline DeviceGroups device_groups(const RowGroups& groups, int64_t rows) {
    if (groups.num_groups == 0) return {1, nullptr, nullptr, rows};
    return {groups.num_groups, groups.counts.as<int64_t>(), groups.offsets.as<int64_t>(), rows};
}

}  // namespace fp8flow::hopper
