// SPDX-License-Identifier: MIT
// Dispatch of the GEMM operations: cuBLASLt or a kernel of this project, by KernelChoice. README.md has the
// table.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/gemm/cublaslt/cublaslt.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

namespace {

using namespace hopper::gemm;

// FP8 operands of a weight gradient are the transposed copies, contiguous along the contraction.
op::GemmForm form_of(const op::GroupedGemmWgrad& args) {
    return is_fp8(args.x.data.dtype) ? op::GemmForm::nt : op::GemmForm::tn;
}

// wgmma where it is supported, otherwise the general kernels.
void launch_native(const GemmProblem& problem, const TensorView& a, const TensorView& b, int64_t alignment,
                   GemmBackend backend, const Launch& launch) {
    if (backend == GemmBackend::native && launch_wgmma(problem, a, b, alignment, launch)) return;
    launch_fallback(problem, backend, launch);
}

// After a kernel that summed the squares of what it wrote. An overwriting one wrote all groups.
void launch_rest_of_squares(const GemmProblem& problem, const Launch& launch) {
    if (problem.squares != nullptr && problem.mode == Gradient::accumulate)
        launch_squares(problem, SquaresOf::empty_groups, launch);
}

}  // namespace

CublasLtCounts HopperOps::cublaslt_counts() const {
    CublasLtCounts sum;
    for (const auto& workspace : workspaces_) {
        if (!workspace) continue;
        sum.cublaslt += workspace->cublaslt.counts.cublaslt;
        sum.native += workspace->cublaslt.counts.native;
    }
    return sum;
}

// native: dense BF16 GEMMs on cuBLASLt; FP8 and grouped ones, f32, and what cuBLASLt does not support, on
// this project's kernels.
void HopperOps::do_gemm(const op::Gemm& args, const Launch& launch) {
    const bool fp8 = is_fp8(args.a.data.dtype);
    if (kernels_.gemm == GemmBackend::cublaslt || (kernels_.gemm == GemmBackend::native && !fp8))
        launch_cublaslt(workspace(launch).cublaslt,
                        {problem_of(args), args.form, args.a.layout, args.b.layout}, launch);
    else
        launch_native(problem_of(args), args.a.data, args.b.data, args.d.dim(0) % kBlock == 0 ? kBlock : 1,
                      kernels_.gemm, launch);
}

void HopperOps::do_grouped_gemm(const op::GroupedGemm& args, const Launch& launch) {
    if (kernels_.gemm == GemmBackend::cublaslt)
        launch_cublaslt(workspace(launch).cublaslt,
                        {problem_of(args), args.form, args.a.layout, args.b.layout}, launch);
    else
        launch_native(problem_of(args), args.a.data, args.b.data, args.groups.alignment, kernels_.gemm,
                      launch);
}

// Fused where h is not kept: after a GEMM that stores h in BF16 anyway, the parts are faster
// (docs/worklogs/gemm.md).
void HopperOps::do_grouped_gemm_swiglu_quantize(const op::GroupedGemmSwigluQuantize& args,
                                                const Launch& launch) {
    if (kernels_.gemm == GemmBackend::native && launch_wgmma_swiglu(args, launch)) return;
    Ops::do_grouped_gemm_swiglu_quantize(args, launch);
}

void HopperOps::do_grouped_gemm_wgrad(const op::GroupedGemmWgrad& args, const Launch& launch) {
    if (args.second) {
        if (kernels_.gemm == GemmBackend::native && launch_wgmma_wgrad_two(args, launch)) {
            launch_rest_of_squares(problem_of(args), launch);
            return;
        }
        do_grouped_gemm_wgrad(first_call(args), launch);
        do_grouped_gemm_wgrad(second_call(args), launch);
        return;
    }
    // cuBLASLt cannot round stochastically
    const bool library = kernels_.gemm == GemmBackend::cublaslt;
    const GemmProblem problem = problem_of(args);
    if (library && args.dw.dtype == DType::f32)
        launch_cublaslt(workspace(launch).cublaslt, {problem, form_of(args), args.dy.layout, args.x.layout},
                        launch);
    else if (!(library || kernels_.gemm == GemmBackend::native) ||
             !launch_wgmma(problem, args.dy.data, args.x.data, args.groups.alignment, launch))
        launch_fallback(problem, library ? GemmBackend::native : kernels_.gemm, launch);
    else if (writes_squares(problem)) {
        launch_rest_of_squares(problem, launch);
        return;
    }
    if (problem.squares != nullptr) launch_squares(problem, SquaresOf::all_groups, launch);
}

}  // namespace fp8flow
