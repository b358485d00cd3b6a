// SPDX-License-Identifier: MIT
// Dense GEMMs on cuBLASLt: BF16, and FP8 with one scale per operand. BF16 ones are those of the native
// backend; FP8 ones are the ceiling that `bench` and `profile` measure (GemmBackend::cublaslt). Read next:
// cublaslt.cu.
#pragma once

#include "kernels/hopper/gemm/problem.h"

#include <cublasLt.h>

#include <array>
#include <map>

namespace fp8flow::hopper::gemm {

// The handle, its workspace and chosen algorithms. One object serves one stream at a time.
class CublasLt {
public:
    explicit CublasLt(Device& device);
    ~CublasLt();
    CublasLt(const CublasLt&) = delete;
    CublasLt& operator=(const CublasLt&) = delete;

    // Enqueues a dense GEMM. False, and nothing done: cuBLASLt does not support it.
    bool run(const GemmCall& call, const Launch& launch);
    int64_t gemms() const { return gemms_; }  // enqueued so far

private:
    struct Plan {
        cublasLtMatmulAlgo_t algorithm{};
        bool usable = false;  // false: no algorithm for this shape
    };
    using Key = std::array<int64_t, 7>;  // shapes and strides; form and dtypes
    struct Description;
    Plan choose(Description& description);

    static constexpr std::size_t kWorkspaceBytes = std::size_t{32}
                                                   << 20;  // NVIDIA's recommendation for Hopper

    Device& device_;
    cublasLtHandle_t handle_ = nullptr;
    void* workspace_ = nullptr;
    std::map<Key, Plan> plans_;
    int64_t gemms_ = 0;
};

}  // namespace fp8flow::hopper::gemm
