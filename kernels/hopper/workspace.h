// Memory that operations need beside their arguments, allocated once: partial sums of two-stage reductions, cuBLASLt's handle and scratch,
// cuDNN's plans.
#pragma once

#include "kernels/hopper/attention_cudnn.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/launch.h"

#include <cublasLt.h>

#include <array>
#include <map>

namespace fp8flow {

namespace hopper {

// What cuBLASLt needs to know about one dense product, prepared at the first call of its shape.
struct LtPlan {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t first = nullptr, second = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    bool usable = false;  // false: no algorithm for this shape
};
using LtKey = std::array<int64_t, 7>;  // form, shapes of A and B, dtype of D, limit of multiprocessors

}  // namespace hopper

struct HopperOps::Workspace {
    static constexpr std::size_t kPartialsBytes = std::size_t{64} << 20;
    static constexpr std::size_t kLtBytes = std::size_t{64} << 20;

    explicit Workspace(Device& owner)
        : device(owner),
          partials(owner.allocate(kPartialsBytes)),
          lt_scratch(owner.allocate(kLtBytes)),
          cudnn(owner) {
        FP8FLOW_CHECK(cublasLtCreate(&lt) == CUBLAS_STATUS_SUCCESS, "cublasLtCreate");
    }
    ~Workspace() {
        for (auto& [key, plan] : lt_plans) {
            cublasLtMatrixLayoutDestroy(plan.first);
            cublasLtMatrixLayoutDestroy(plan.second);
            cublasLtMatrixLayoutDestroy(plan.d);
            cublasLtMatmulDescDestroy(plan.product);
        }
        cublasLtDestroy(lt);
        device.free(partials);
        device.free(lt_scratch);
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    // `bytes` of scratch for one op; ops of one stream follow each other, so they may share it.
    template <class T> T* partials_for(int64_t count) const {
        FP8FLOW_CHECK(static_cast<std::size_t>(count) * sizeof(T) <= kPartialsBytes,
                      "{} partial sums of {} bytes", count, sizeof(T));
        return static_cast<T*>(partials);
    }

    Device& device;
    void* partials;
    void* lt_scratch;
    cublasLtHandle_t lt = nullptr;
    std::map<hopper::LtKey, hopper::LtPlan> lt_plans;
    hopper::CudnnAttention cudnn;
};

}  // namespace fp8flow
