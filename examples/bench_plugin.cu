// SPDX-License-Identifier: MIT
// Your own kernel next to fp8flow's: y = a + b in BF16, on a GPU. The same on the host: bench_plugin.c.
//   nvcc -O3 -arch=sm_90a -shared -Xcompiler -fPIC -I include examples/bench_plugin.cu -o bench_plugin.so
//   fp8flow bench add --backend hopper --plugin ./bench_plugin.so
#include <cuda_bf16.h>
#include <fp8flow/plugin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// one vector of eight values a thread
__global__ void add_kernel(const uint4* a, const uint4* b, uint4* y, int64_t vectors) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    uint4 left = a[i], right = b[i];
    auto* sum = reinterpret_cast<__nv_bfloat162*>(&left);
    const auto* more = reinterpret_cast<const __nv_bfloat162*>(&right);
    for (int k = 0; k < 4; ++k) {
        const float2 x = __bfloat1622float2(sum[k]), z = __bfloat1622float2(more[k]);
        sum[k] = __floats2bfloat162_rn(x.x + z.x, x.y + z.y);
    }
    y[i] = left;
}

// NULL: the operation was not given such a tensor.
const fp8flow_plugin_tensor* tensor(const fp8flow_plugin_call* call, const char* name) {
    for (int i = 0; i < call->num_tensors; ++i) {
        if (std::strcmp(call->tensors[i].name, name) == 0) return &call->tensors[i];
    }
    return nullptr;
}

int add(const fp8flow_plugin_call* call) {
    const fp8flow_plugin_tensor *a = tensor(call, "a"), *b = tensor(call, "b"), *y = tensor(call, "y");
    int64_t values = 1;
    for (int i = 0; i < y->rank; ++i) values *= y->dims[i];
    if (!call->on_gpu || std::strcmp(y->dtype, "bf16") != 0 || values % 8 != 0) return 1;  // not for this
    const int64_t vectors = values / 8, blocks = (vectors + 255) / 256;
    add_kernel<<<static_cast<unsigned>(blocks), 256, 0, static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const uint4*>(a->data), static_cast<const uint4*>(b->data), static_cast<uint4*>(y->data),
        vectors);
    return cudaGetLastError() == cudaSuccess ? 0 : 2;
}

const fp8flow_plugin_operation operations[] = {{"add", add}};
const fp8flow_plugin_table table = {FP8FLOW_PLUGIN_VERSION, "mine", 1, operations};

}  // namespace

const fp8flow_plugin_table* fp8flow_plugin(void) { return &table; }
