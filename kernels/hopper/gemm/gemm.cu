// SPDX-License-Identifier: MIT
// Dispatch of the GEMM operations by KernelChoice: a kernel of this project, or cuBLASLt for dense ones.
// README.md has the table.
#include "kernels/hopper/gemm/cublaslt/cublaslt.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

namespace {

using namespace hopper::gemm;

// Launches a wgmma kernel if one supports the call (returns true), otherwise a general kernel.
bool launch_native(const GemmCall& call, GemmBackend backend, const Launch& launch) {
    if (backend == GemmBackend::cublaslt) backend = GemmBackend::native;
    if (backend == GemmBackend::native && launch_wgmma(call, launch)) return true;
    launch_fallback(call.problem, backend, launch);
    return false;
}

// The GEMM of an operation. Where kernels of other streams take SMs meanwhile, it takes its tiles from a
// queue. Calls that run in parallel cannot share the queue's counters.
template <class Args, class Workspace>
GemmCall queued_call(const Args& args, const Workspace& workspace, const Launch& launch) {
    GemmCall call = call_of(args);
    if (launch.shared_device && !launch.independent)
        call.problem.queue = workspace.template zeros_for<TileQueue>(1);
    return call;
}

// After a kernel that summed the squares of what it wrote. An overwriting one wrote all groups.
void launch_rest_of_squares(const GemmProblem& problem, const Launch& launch) {
    if (problem.squares != nullptr && problem.mode == Gradient::accumulate)
        launch_squares(problem, SquaresOf::empty_groups, launch);
}

}  // namespace

int64_t HopperOps::cublaslt_gemms() const {
    int64_t sum = 0;
    for (const auto& workspace : workspaces_)
        if (workspace) sum += workspace->cublaslt.gemms();
    return sum;
}

// Dense BF16 GEMMs run on cuBLASLt. What it does not support, FP8, FP32 and grouped GEMMs run on this
// project's kernels.
void HopperOps::do_gemm(const op::Gemm& args, const Launch& launch) {
    const GemmCall call = queued_call(args, workspace(launch), launch);
    const bool fp8 = is_fp8(args.a.data.dtype), library = kernels_.gemm == GemmBackend::cublaslt ||
                                                          (kernels_.gemm == GemmBackend::native && !fp8);
    if (library && workspace(launch).cublaslt.run(call, launch)) return;
    if (library && !fp8)
        launch_fallback(call.problem, GemmBackend::native, launch);
    else
        launch_native(call, kernels_.gemm, launch);
}

void HopperOps::do_grouped_gemm(const op::GroupedGemm& args, const Launch& launch) {
    launch_native(queued_call(args, workspace(launch), launch), kernels_.gemm, launch);
}

// Fused where h is not kept: after a GEMM that stores h in BF16 anyway, the parts are faster
// (docs/design_notes.md).
void HopperOps::do_grouped_gemm_swiglu_quantize(const op::GroupedGemmSwigluQuantize& args,
                                                const Launch& launch) {
    if (kernels_.gemm == GemmBackend::native &&
        launch_wgmma_swiglu(args, queued_call(args, workspace(launch), launch), launch))
        return;
    Ops::do_grouped_gemm_swiglu_quantize(args, launch);
}

void HopperOps::do_grouped_gemm_wgrad(const op::GroupedGemmWgrad& args, const Launch& launch) {
    const GemmCall call = queued_call(args, workspace(launch), launch);
    if (args.second) {
        if (kernels_.gemm == GemmBackend::native && launch_wgmma_wgrad_sets(args, call.problem, launch)) {
            launch_rest_of_squares(call.problem, launch);
            return;
        }
        for (int i = 0; i < num_sets(args); ++i) do_grouped_gemm_wgrad(call_of_set(args, i), launch);
        return;
    }
    if (launch_native(call, kernels_.gemm, launch) && writes_squares(call.problem)) {
        launch_rest_of_squares(call.problem, launch);
        return;
    }
    if (args.squares) launch_squares(call.problem, SquaresOf::all_groups, launch);
}

}  // namespace fp8flow
