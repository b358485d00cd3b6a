// SPDX-License-Identifier: MIT
// Which kernels of the Hopper backend compute, where there is a choice. Needs no CUDA header.
#pragma once

namespace fp8flow {

// Which kernels compute GEMMs. native: dense BF16 on cuBLASLt, all others on this project's tensor-core
// kernels, which read group sizes on the device. cublaslt: dense FP8 GEMMs with one scale per operand on
// cuBLASLt, too (the ceiling that bench and profile measure). simt: all on CUDA cores, in the reference's
// order of summation and with its bits. alternative: all on one kernel of warp-level MMA instructions
// (gemm/fallback/mma.cu), which sums the contraction of plain operands from its end to its start: another,
// equally valid order of summation.
enum class GemmBackend { native, cublaslt, simt, alternative };
// Which kernels compute attention. native: this project's kernel. cudnn: cuDNN, in builds that found it;
// shapes that it does not support run on native (attention/cudnn.h).
enum class AttentionBackend { native, cudnn };

struct KernelChoice {
    GemmBackend gemm = GemmBackend::native;
    AttentionBackend attention = AttentionBackend::native;
};

}  // namespace fp8flow
