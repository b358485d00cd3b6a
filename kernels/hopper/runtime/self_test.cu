// SPDX-License-Identifier: MIT
// The device half of the self-test: one thread per value, no barriers. Moves 8 bytes per value; speed does
// not matter here.
#include "kernels/core/error.h"
#include "kernels/core/scalar_math.h"
#include "kernels/core/tensor.h"
#include "kernels/hopper/runtime/cuda_check.h"
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/hopper/runtime/self_test.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace fp8flow::hopper {

namespace {

constexpr int kThreads = 256;

__device__ uint32_t evaluate(DeviceFunction function, float x) {
    switch (function) {
        case DeviceFunction::bf16_hardware: return __bfloat16_as_ushort(__float2bfloat16_rn(x));
        case DeviceFunction::bf16: return to_bf16(x).bits;
        case DeviceFunction::e4m3_hardware: return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
        case DeviceFunction::e4m3: return to_e4m3(x).bits;
        case DeviceFunction::e5m2_hardware: return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
        case DeviceFunction::e5m2: return to_e5m2(x).bits;
        case DeviceFunction::exp: return float_bits(exp_float(x));
        case DeviceFunction::log: return float_bits(log_float(x));
        case DeviceFunction::silu: return float_bits(silu_float(x));
    }
    return 0;
}

__global__ void evaluate_kernel(DeviceFunction function, const float* values, uint32_t* results,
                                int64_t count) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count) results[i] = evaluate(function, values[i]);
}

// Device memory for the length of one call.
class DeviceBuffer {
public:
    explicit DeviceBuffer(size_t bytes) {
        check_cuda(cudaMalloc(&data_, bytes), "allocating the self-test's buffer");
    }
    ~DeviceBuffer() { cudaFree(data_); }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;
    template <class T> T* as() const { return static_cast<T*>(data_); }

private:
    void* data_ = nullptr;
};

}  // namespace

void evaluate_on_device(DeviceFunction function, std::span<const float> values, std::span<uint32_t> results) {
    FP8FLOW_CHECK(values.size() == results.size(), "{} values, {} results", values.size(), results.size());
    require(device_count() > 0, ExitCode::usage, "the device self-test needs a Hopper GPU: {}",
            unavailable_reason());
    if (values.empty()) return;
    const int64_t count = static_cast<int64_t>(values.size());
    const DeviceBuffer in(values.size_bytes());
    const DeviceBuffer out(results.size_bytes());
    check_cuda(cudaMemcpy(in.as<void>(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
               "copying values");
    evaluate_kernel<<<static_cast<unsigned>(ceil_div(count, kThreads)), kThreads>>>(
        function, in.as<float>(), out.as<uint32_t>(), count);
    check_cuda(cudaGetLastError(), "launching the self-test");
    check_cuda(cudaMemcpy(results.data(), out.as<void>(), results.size_bytes(), cudaMemcpyDeviceToHost),
               "copying results");
}

}  // namespace fp8flow::hopper
