// SPDX-License-Identifier: MIT
// Tensor maps are encoded by the driver; its entry point comes through the runtime (cudaGetDriverEntryPoint).
#include "kernels/hopper/runtime/tensor_map.h"

#include "kernels/core/error.h"
#include "kernels/hopper/runtime/cuda_check.h"

#include <cuda_runtime.h>
#include <fmt/ranges.h>

namespace fp8flow::hopper {

namespace {

constexpr int kSwizzleBytes = 128;  // the widest row of a swizzled box

// `dims` and `box`: the contiguous dimension first.
template <int kDims>
CUtensorMap encode_map(const void* data, CUtensorMapDataType type, int64_t size, const int64_t (&dims)[kDims],
                       const int (&box)[kDims]) {
    const int64_t row_bytes = box[0] * size;
    const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_32B;
    using Encode = decltype(&cuTensorMapEncodeTiled);
    // through the runtime, so that the program links and starts without a driver
    static const Encode encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found{};
        check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found),
                   "looking for cuTensorMapEncodeTiled");
        return reinterpret_cast<Encode>(entry);
    }();
    cuuint64_t sizes[kDims], strides[kDims];  // strides[i]: of dimension i + 1
    cuuint32_t boxes[kDims], steps[kDims];
    for (int i = 0; i < kDims; ++i) {
        sizes[i] = static_cast<cuuint64_t>(dims[i]);
        strides[i] = (i == 0 ? static_cast<cuuint64_t>(size) : strides[i - 1]) * sizes[i];
        boxes[i] = static_cast<cuuint32_t>(box[i]);
        steps[i] = 1;
    }
    CUtensorMap map{};
    const CUresult result = encode(&map, type, kDims, const_cast<void*>(data), sizes, strides, boxes, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    FP8FLOW_CHECK(result == CUDA_SUCCESS, "tensor map of {}: error {}", fmt::join(dims, " x "),
                  static_cast<int>(result));
    return map;
}

}  // namespace

CUtensorMap tensor_map(const void* data, DType dtype, int64_t rows, int64_t cols, int box_rows,
                       int box_row_bytes) {
    const int64_t size = size_of(dtype);
    return encode_map<2>(data, size == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                         size, {cols, rows}, {static_cast<int>(box_row_bytes / size), box_rows});
}

CUtensorMap tensor_map_of_groups(const void* data, DType dtype, int64_t groups, int64_t rows, int64_t cols,
                                 int box_rows) {
    const int size = static_cast<int>(size_of(dtype));
    return encode_map<3>(data, size == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                         size, {cols, rows, groups}, {kSwizzleBytes / size, box_rows, 1});
}

}  // namespace fp8flow::hopper
