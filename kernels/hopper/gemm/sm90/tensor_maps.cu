// SPDX-License-Identifier: MIT
// Warpgroup products, host side: which products they take, and how operands are described to TMA.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper {

namespace {

// `dims` from the contiguous one on, `box` likewise.
template <int kDims>
CUtensorMap encode_map(const void* data, CUtensorMapDataType type, int64_t size, const int64_t (&dims)[kDims],
                       const int (&box)[kDims]) {
    const int64_t row_bytes = box[0] * size;
    const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_32B;
    using Encode = decltype(&cuTensorMapEncodeTiled);
    // through the runtime, so that the program links without a driver
    static const Encode encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found{};
        check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found),
                   "looking for cuTensorMapEncodeTiled");
        return reinterpret_cast<Encode>(entry);
    }();
    cuuint64_t sizes[kDims], strides[kDims];  // strides: of the dimension after
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

CUtensorMap tensor_map_f32(const void* data, int64_t groups, int64_t rows, int64_t cols, int box_rows) {
    constexpr int kSize = sizeof(float);
    return encode_map<3>(data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kSize, {cols, rows, groups},
                         {kStageRowBytes / kSize, box_rows, 1});
}

namespace {

// Rows that TMA can address, and pieces of D that one access can store.
bool addressable(const TensorView& t) {
    return t.numel() > 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
           t.cols() * size_of(t.dtype) % 16 == 0;
}
bool storable(const DeviceProduct& p) {
    return reinterpret_cast<uintptr_t>(p.d) % 16 == 0 && p.n % (p.d_dtype == DType::bf16 ? 8 : 2) == 0;
}
StoredShape shape_of(const TensorView& t) { return {t.rows(), t.cols()}; }

}  // namespace

bool wgmma_takes(const DeviceProduct& p, const TensorView& a, const TensorView& b, int64_t alignment) {
    return (wgmma_takes_bf16(p) || wgmma_takes_fp8(p, alignment)) && addressable(a) && addressable(b) &&
           storable(p);
}

bool launch_wgmma(const DeviceProduct& p, const TensorView& a, const TensorView& b, int64_t alignment,
                  const Launch& launch) {
    if (!wgmma_takes(p, a, b, alignment)) return false;
    wgmma_takes_bf16(p) ? launch_wgmma_bf16(p, shape_of(a), shape_of(b), launch)
                        : launch_wgmma_fp8(p, shape_of(a), shape_of(b), launch);
    return true;
}

bool launch_wgmma_two(const op::GroupedGemmWgrad& args, const Launch& launch) {
    for (const op::GroupedGemmWgrad& call : {first_call(args), second_call(args)}) {
        const DeviceProduct p = product_of(call);
        if (!is_blockwise_wgrad(p) || !wgmma_takes(p, call.dy.data, call.x.data, call.groups.alignment))
            return false;
    }
    launch_wgmma_wgrad_two(product_of(args), shape_of(args.dy.data), shape_of(args.x.data),
                           shape_of(args.second.dy.data), shape_of(args.second.x.data), launch);
    return true;
}

}  // namespace fp8flow::hopper
