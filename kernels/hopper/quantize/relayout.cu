// SPDX-License-Identifier: MIT
// Transposes scales from the wire layout to the layout of the GEMM; and updates the delayed scale between
// steps. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kSide = 32, kSideRows = 8;

// Scales [T, B] (FP32 or E8M0) -> [B, T] FP32. A CTA transposes 32 x 32 scales in shared memory (odd row
// stride), grid-stride. __syncthreads before and after the transposed reads. Deterministic: a copy.
__global__ void __launch_bounds__(kSide* kSideRows)
    relayout_kernel(const void* wire, DType dtype, int64_t tokens, int64_t blocks, float* out) {
    __shared__ float tile[kSide][kSide + 1];
    const int64_t block_tiles = (blocks + kSide - 1) / kSide,
                  tiles = block_tiles * ((tokens + kSide - 1) / kSide);
    for (int64_t at = blockIdx.x; at < tiles; at += gridDim.x) {
        const int64_t token0 = at / block_tiles * kSide, block0 = at % block_tiles * kSide;
        for (int i = static_cast<int>(threadIdx.y); i < kSide; i += kSideRows) {
            const int64_t token = token0 + i, block = block0 + threadIdx.x;
            if (token < tokens && block < blocks)
                tile[i][threadIdx.x] = load_float(wire, dtype, token * blocks + block);
        }
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.y); i < kSide; i += kSideRows) {
            const int64_t token = token0 + threadIdx.x, block = block0 + i;
            if (token < tokens && block < blocks) out[block * tokens + token] = tile[threadIdx.x][i];
        }
        __syncthreads();
    }
}

// One thread: a history has a few dozen entries.
__global__ void delayed_scale_kernel(const int64_t* position, ScaleFormat format, const int32_t* status,
                                     float* amax, float* history, int64_t length, float* scale) {
    if (status != nullptr && *status != 0) return;
    history[*position % length] = *amax;
    float largest = 0.0f;
    for (int64_t i = 0; i < length; ++i) largest = max_ignore_nan(largest, history[i]);
    *scale = quant_scale(largest, kE4m3Max, format).dequant;
    *amax = 0.0f;
}

}  // namespace

}  // namespace fp8flow::hopper::quantize

namespace fp8flow {

using namespace hopper;
using namespace hopper::quantize;

void HopperOps::do_relayout_scales(const op::RelayoutScales& args, const Launch& launch) {
    const int64_t tokens = args.wire.dim(0), blocks = args.wire.dim(1);
    if (tokens == 0 || blocks == 0) return;
    launch_kernel(relayout_kernel, grid_for(ceil_div(tokens, kSide) * ceil_div(blocks, kSide), launch),
                  dim3(kSide, kSideRows), launch, "relayout_scales", args.wire.data, args.wire.dtype, tokens,
                  blocks, args.vec128.as<float>());
}

void HopperOps::do_delayed_scale_update(const op::DelayedScaleUpdate& args, const Launch& launch) {
    launch_kernel(delayed_scale_kernel, 1, 1, launch, "delayed_scale_update", args.position.as<int64_t>(),
                  args.scale_format, args.status ? args.status.as<int32_t>() : nullptr, args.amax.as<float>(),
                  args.history.as<float>(), args.history.numel(), args.scale.as<float>());
}

}  // namespace fp8flow
