// SPDX-License-Identifier: MIT
// Operands in cuBLASLt's layouts: block scales as its VEC128, MXFP8 (which Hopper's tensor cores do not
// support) as BF16. This work is part of every GEMM of that backend and timed with it.
#include "kernels/hopper/gemm/cublaslt/cublaslt.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerGroup = 32;

// Block scales as VEC128. Bytes: scales read once (tile scales from cache), 4 bytes written per 128 FP8
// values: 1/32 of their bytes. blockIdx.y is the group; its CTAs share its scales, one a thread and
// iteration, neighbours next to each other. No barrier; one writer a word.
__global__ void __launch_bounds__(kThreads)
    repack_kernel(GemmOperand operand, DeviceGroups groups, Grouped grouped, int64_t outputs, int64_t k,
                  float* out) {
    const int64_t g = blockIdx.y, first = groups.offset(g), padded = groups.offset(g + 1) - first;
    const int64_t start = operand.base() + first;
    const bool by_rows = grouped == Grouped::rows;
    const int64_t width = by_rows ? padded : outputs;
    const int64_t blocks = ((by_rows ? k : padded) + kBlock - 1) / kBlock;
    const int64_t valid = by_rows ? groups.count(g) : outputs;
    float* to = out + (by_rows ? blocks * first : first / kBlock * outputs);
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < blocks * width;
         i += int64_t{kThreads} * gridDim.x) {
        const int64_t block = i / width, output = i % width;
        float scale = 0.0f;
        if (output < valid)
            scale = by_rows ? load_scale(operand.scale, g, start + output, block * kBlock)
                            : load_scale(operand.scale, g, output, start + block * kBlock);
        to[i] = scale;
    }
}

// MXFP8 to BF16. Bytes: FP8 values read once, twice as many bytes written. A CTA takes whole rows, a thread
// four neighbouring values an iteration. No barrier; one writer a word.
//
// Exact: an FP8 value has at most 4 significant bits and BF16 keeps 8, so a power of two moves the exponent
// only. BF16's exponents are FP32's; below 2^-126 BF16 still has all multiples of 2^-133, so a scaled E4M3
// value (a multiple of 2^-9) is inexact only with a scale below 2^-124, that is where a whole block of 32 is
// below 2^-115 (E5M2, multiples of 2^-16: a scale below 2^-117, a block below 2^-101).
__global__ void __launch_bounds__(kThreads) decode_mx_kernel(MxDecode args) {
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t valid = row < args.valid_rows ? args.valid_cols : 0;
        uint16_t* to = reinterpret_cast<uint16_t*>(args.out) + row * args.cols;
        for (int64_t k = threadIdx.x * 4; k < args.cols; k += kThreads * 4) {
            float4 x = load_quad(args.codes, args.dtype, row * args.stride + k, valid - k);
            const float scale =
                k < valid ? e8m0_to_float(args.scales[k / kMxBlock * args.block_stride + row]) : 1.0f;
            const uint32_t low = to_bf16(x.x * scale).bits | static_cast<uint32_t>(to_bf16(x.y * scale).bits)
                                                                 << 16;
            const uint32_t high = to_bf16(x.z * scale).bits | static_cast<uint32_t>(to_bf16(x.w * scale).bits)
                                                                  << 16;
            *reinterpret_cast<uint2*>(to + k) = {low, high};
        }
    }
}

}  // namespace

void launch_repack_scales(const GemmOperand& operand, const DeviceGroups& groups, Grouped grouped,
                          int64_t outputs, int64_t k, float* out, cudaStream_t stream) {
    const dim3 grid(kBlocksPerGroup, static_cast<unsigned>(groups.num_groups));
    repack_kernel<<<grid, kThreads, 0, stream>>>(operand, groups, grouped, outputs, k, out);
    check_launch("repacking scales");
}

void launch_decode_mx(const MxDecode& args, cudaStream_t stream) {
    constexpr int64_t kMaxBlocks = 8 * kNumSms;
    const auto blocks = static_cast<unsigned>(std::min(args.rows, kMaxBlocks));
    decode_mx_kernel<<<blocks, kThreads, 0, stream>>>(args);
    check_launch("decoding MXFP8");
}

}  // namespace fp8flow::hopper::gemm
