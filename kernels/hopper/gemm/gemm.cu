// SPDX-License-Identifier: MIT
// Who computes a matrix product: cuBLASLt or a kernel of this project, as KernelChoice says.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/gemm/cublaslt/cublaslt.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

namespace {

using hopper::product_of;

// FP8 operands of a weight gradient are the transposed copies, contiguous along the contraction.
op::GemmForm form_of(const op::GroupedGemmWgrad& args) {
    return is_fp8(args.x.data.dtype) ? op::GemmForm::nt : op::GemmForm::tn;
}

// On warpgroup instructions where they take the product, otherwise on the general kernels.
void launch_own(const hopper::DeviceProduct& product, const TensorView& a, const TensorView& b,
                int64_t alignment, GemmBackend backend, const Launch& launch) {
    if (backend == GemmBackend::native && hopper::launch_wgmma(product, a, b, alignment, launch)) return;
    hopper::launch_product(product, backend, launch);
}

}  // namespace

LtCounts HopperOps::lt_counts() const { return workspace_->lt.counts; }

// native: dense BF16 products on cuBLASLt; FP8 and grouped ones, f32, and what cuBLASLt does not take, on
// this project's kernels.
void HopperOps::do_gemm(const op::Gemm& args, const Launch& launch) {
    const bool fp8 = is_fp8(args.a.data.dtype);
    if (kernels_.gemm == GemmBackend::cublaslt || (kernels_.gemm == GemmBackend::native && !fp8))
        hopper::launch_lt(workspace_->lt, {product_of(args), args.form, args.a.layout, args.b.layout},
                          launch);
    else
        launch_own(product_of(args), args.a.data, args.b.data, args.d.dim(0) % kBlock == 0 ? kBlock : 1,
                   kernels_.gemm, launch);
}

void HopperOps::do_grouped_gemm(const op::GroupedGemm& args, const Launch& launch) {
    if (kernels_.gemm == GemmBackend::cublaslt)
        hopper::launch_lt(workspace_->lt, {product_of(args), args.form, args.a.layout, args.b.layout},
                          launch);
    else
        launch_own(product_of(args), args.a.data, args.b.data, args.groups.alignment, kernels_.gemm, launch);
}

// In one kernel where h is not kept: behind a tile that leaves in BF16 anyway, the parts are faster
// (docs/worklogs/gemm.md).
void HopperOps::do_grouped_gemm_swiglu_quantize(const op::GroupedGemmSwigluQuantize& args,
                                                const Launch& launch) {
    if (kernels_.gemm == GemmBackend::native && hopper::launch_wgmma_swiglu(args, launch)) return;
    Ops::do_grouped_gemm_swiglu_quantize(args, launch);
}

void HopperOps::do_grouped_gemm_wgrad(const op::GroupedGemmWgrad& args, const Launch& launch) {
    if (args.second) {
        if (kernels_.gemm == GemmBackend::native && hopper::launch_wgmma_two(args, launch)) return;
        do_grouped_gemm_wgrad(first_call(args), launch);
        do_grouped_gemm_wgrad(second_call(args), launch);
        return;
    }
    if (kernels_.gemm == GemmBackend::cublaslt)
        hopper::launch_lt(workspace_->lt, {product_of(args), form_of(args), args.dy.layout, args.x.layout},
                          launch);
    else
        launch_own(product_of(args), args.dy.data, args.x.data, args.groups.alignment, kernels_.gemm, launch);
}

}  // namespace fp8flow
