// SPDX-License-Identifier: MIT
// The CPU backend: plain loops with a stated order of accumulation; OpenMP over independent outputs is the
// only speed-up. It is the definition that the Hopper backend is compared with. One op family per file;
// shared row helpers in rows.h.
#pragma once

#include "kernels/ops.h"

#include <memory>

namespace fp8flow {

// Order of summation of GEMMs. sequential is the contract of kernels/ops/gemm.h; split adds the even and the
// odd chunks of the contraction separately: equally valid, used as the control arm of `validate` (the
// noise floor of the loss).
enum class SummationOrder { sequential, split };

class ReferenceOps final : public Ops {
public:
    explicit ReferenceOps(SummationOrder summation = SummationOrder::sequential);
    ~ReferenceOps() override;
    Device& device() override { return *device_; }

protected:
#define FP8FLOW_OVERRIDE(name, Args) void do_##name(const op::Args& args, const Launch& launch) override;
    FP8FLOW_FOR_EACH_OP(FP8FLOW_OVERRIDE)
#undef FP8FLOW_OVERRIDE

private:
    SummationOrder summation_;
    std::unique_ptr<Device> device_;
};

}  // namespace fp8flow
