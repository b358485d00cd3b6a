// SPDX-License-Identifier: MIT
// Which GEMMs the kernels of this folder support, and which of them runs.
#include "kernels/hopper/gemm/sm90/fp8_wgrad_small.h"

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
// FP8 weight gradients with scales per 128 of the contraction and rows of D that are multiples of 16 bytes:
// fp8_wgrad.cu.
bool is_blockwise_wgrad(const GemmProblem& p) {
    return p.grouped == Grouped::contraction && p.a.scale.block == kBlock && p.b.scale.block == kBlock &&
           p.n * size_of(p.d_dtype) % 16 == 0;
}
bool is_mx(const GemmProblem& p) { return p.a.scale.block == kMxBlock; }
StoredShape shape_of(const ScaledTensor& t) { return {t.data.rows(), t.data.cols()}; }

}  // namespace

bool wgmma_supports(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    return (wgmma_supports_bf16(p) || wgmma_supports_fp8(p, call.group_alignment) ||
            wgmma_supports_mx(p, call.group_alignment)) &&
           addressable(call.a.data) && addressable(call.b.data) && storable(p);
}

bool launch_wgmma(const GemmCall& call, const Launch& launch) {
    if (!wgmma_supports(call)) return false;
    const GemmProblem& p = call.problem;
    const auto run = wgmma_supports_bf16(p)
                         ? (p.grouped == Grouped::contraction ? launch_wgmma_bf16_wgrad : launch_wgmma_bf16)
                     : is_mx(p)               ? launch_wgmma_mx
                     : !is_blockwise_wgrad(p) ? launch_wgmma_fp8
                     : is_small_wgrad(p)      ? launch_wgmma_fp8_wgrad_small
                                              : launch_wgmma_fp8_wgrad;
    run(p, shape_of(call.a), shape_of(call.b), launch);
    return true;
}

bool writes_squares(const GemmProblem& p) {
    return (is_blockwise_wgrad(p) && !is_small_wgrad(p)) ||
           (p.grouped == Grouped::contraction && wgmma_supports_bf16(p));
}

bool launch_wgmma_wgrad_sets(const op::GroupedGemmWgrad& args, const GemmProblem& problem,
                             const Launch& launch) {
    std::vector<StoredSet> sets;
    for (int i = 0; i < num_sets(args); ++i) {
        const GemmCall call = call_of(call_of_set(args, i));
        const GemmProblem& p = call.problem;
        if (!is_blockwise_wgrad(p) || !wgmma_supports(call)) return false;
        sets.push_back({{p.groups, p.a, p.b}, shape_of(call.a), shape_of(call.b)});
    }
    launch_wgmma_fp8_wgrad_sets(problem, sets, launch);
    return true;
}

}  // namespace fp8flow::hopper::gemm
