// Who computes a matrix product: cuBLASLt or a kernel of this project, as KernelChoice says.
#include "kernels/hopper/gemm_lt.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

namespace {

using hopper::product_of;

// FP8 operands of a weight gradient are the transposed copies, contiguous along the contraction.
op::GemmForm form_of(const op::GroupedGemmWgrad& args) {
    return is_fp8(args.x.codes.dtype) ? op::GemmForm::nt : op::GemmForm::tn;
}

}  // namespace

LtCounts HopperOps::lt_counts() const { return workspace_->lt.counts; }

// native: dense BF16 products on cuBLASLt; FP8 and grouped ones, f32, and what cuBLASLt does not take, on this project's kernels.
void HopperOps::do_gemm(const op::Gemm& args, const Launch& launch) {
    const bool fp8 = is_fp8(args.a.codes.dtype);
    if (kernels_.gemm == GemmBackend::cublaslt || (kernels_.gemm == GemmBackend::native && !fp8))
        hopper::launch_lt(workspace_->lt, {product_of(args), args.form, args.a.layout, args.b.layout},
                          launch);
    else
        hopper::launch_product(product_of(args), kernels_.gemm, launch);
}

void HopperOps::do_grouped_gemm(const op::GroupedGemm& args, const Launch& launch) {
    if (kernels_.gemm == GemmBackend::cublaslt)
        hopper::launch_lt(workspace_->lt, {product_of(args), args.form, args.a.layout, args.b.layout},
                          launch);
    else
        hopper::launch_product(product_of(args), kernels_.gemm, launch);
}

void HopperOps::do_grouped_gemm_wgrad(const op::GroupedGemmWgrad& args, const Launch& launch) {
    if (kernels_.gemm == GemmBackend::cublaslt)
        hopper::launch_lt(workspace_->lt, {product_of(args), form_of(args), args.dy.layout, args.x.layout},
                          launch);
    else
        hopper::launch_product(product_of(args), kernels_.gemm, launch);
}

}  // namespace fp8flow
