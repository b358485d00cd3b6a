// How the program gets the Hopper backend, in builds with and without CUDA (without_cuda.cpp), so that callers need no CUDA header.
#pragma once

#include "kernels/exchange.h"
#include "kernels/ops.h"

#include <memory>

namespace fp8flow {

// Who computes matrix products. cublaslt: dense BF16 on cuBLASLt, the others on the tensor-core kernel of this project. simt: all of them
// on CUDA cores, in the reference's order of summation and with its bits.
enum class GemmBackend { cublaslt, simt };

namespace hopper {

// Operations on CUDA device `device`. Throws Error(usage) without a usable Hopper GPU.
std::unique_ptr<Ops> make_ops(int device, GemmBackend gemm_backend);
// The exchange of a job of one rank: every expert is here, so dispatch and combine are row movers on the GPU.
std::unique_ptr<Exchange> make_local_exchange(Ops& ops, CombineOrder order);

}  // namespace hopper

}  // namespace fp8flow
