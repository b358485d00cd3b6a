// SPDX-License-Identifier: MIT
// Which GEMMs the kernels of this folder support, and which of them runs.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper::gemm {

namespace {

// Operands that TMA can address; D that the epilogues can store in whole vectors.
bool addressable(const TensorView& t) {
    return t.numel() > 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
           t.cols() * size_of(t.dtype) % 16 == 0;
}
bool storable(const GemmProblem& p) {
    return reinterpret_cast<uintptr_t>(p.d) % 16 == 0 && p.n % (p.d_dtype == DType::bf16 ? 8 : 2) == 0;
}
StoredShape shape_of(const TensorView& t) { return {t.rows(), t.cols()}; }

}  // namespace

bool wgmma_supports(const GemmProblem& p, const TensorView& a, const TensorView& b, int64_t alignment) {
    return (wgmma_supports_bf16(p) || wgmma_supports_fp8(p, alignment)) && addressable(a) && addressable(b) &&
           storable(p);
}

bool launch_wgmma(const GemmProblem& p, const TensorView& a, const TensorView& b, int64_t alignment,
                  const Launch& launch) {
    if (!wgmma_supports(p, a, b, alignment)) return false;
    wgmma_supports_bf16(p) ? launch_wgmma_bf16(p, shape_of(a), shape_of(b), launch)
                           : launch_wgmma_fp8(p, shape_of(a), shape_of(b), launch);
    return true;
}

bool writes_squares(const GemmProblem& p) {
    return is_blockwise_wgrad(p) || (p.grouped == Grouped::contraction && wgmma_supports_bf16(p));
}

bool launch_wgmma_wgrad_two(const op::GroupedGemmWgrad& args, const Launch& launch) {
    for (const op::GroupedGemmWgrad& call : {first_call(args), second_call(args)}) {
        const GemmProblem p = problem_of(call);
        if (!is_blockwise_wgrad(p) || !wgmma_supports(p, call.dy.data, call.x.data, call.groups.alignment))
            return false;
    }
    launch_wgmma_fp8_wgrad_two(problem_of(args), shape_of(args.dy.data), shape_of(args.x.data),
                               shape_of(args.second.dy.data), shape_of(args.second.x.data), launch);
    return true;
}

}  // namespace fp8flow::hopper::gemm
