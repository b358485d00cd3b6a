// Dense BF16 products on cuBLASLt with FP32 accumulation. What it cannot take (FP8, f32, sizes or addresses that are not multiples of
// 16 bytes, empty products) goes to the kernels of this project.
#include "kernels/hopper/gemm_device.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

namespace {

using hopper::LtKey;
using hopper::LtPlan;

void check_lt(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fail(ExitCode::internal, "cuBLASLt: {}: {} ({})", what, cublasLtGetStatusString(status),
             cublasLtGetStatusName(status));
}

constexpr uint32_t kAlignment = 16;  // bytes of an address or a row that cuBLASLt's fast kernels ask for

bool takes(const op::Gemm& args) {
    const TensorView &a = args.a.codes, &b = args.b.codes, &d = args.d;
    if (a.dtype != DType::bf16 || b.dtype != DType::bf16 || a.numel() == 0 || b.numel() == 0) return false;
    for (const TensorView* view : {&a, &b, &d}) {
        if (reinterpret_cast<uintptr_t>(view->data) % kAlignment != 0) return false;
        if (view->cols() * size_of(view->dtype) % kAlignment != 0) return false;
    }
    return true;
}

cublasLtMatrixLayout_t layout_of(const TensorView& view) {
    // rows of ours are columns of cuBLASLt's
    cublasLtMatrixLayout_t layout = nullptr;
    check_lt(cublasLtMatrixLayoutCreate(&layout, view.dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F,
                                        static_cast<uint64_t>(view.cols()),
                                        static_cast<uint64_t>(view.dim(0)), view.cols()),
             "describing a matrix");
    return layout;
}

// The row-major D[M,N] = op(A) op(B) is, read column-major, D' [N,M] = op(B)' op(A)': B comes first. A matrix that is stored
// contiguous along the contraction needs a transpose as cuBLASLt's first operand, and none as its second.
LtPlan make_plan(cublasLtHandle_t lt, const op::Gemm& args, int sm_limit) {
    LtPlan plan;
    check_lt(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
        check_lt(cublasLtMatmulDescSetAttribute(plan.product, attribute, &value, sizeof value),
                 "describing a product");
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, args.form == op::GemmForm::nt ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, args.form == op::GemmForm::tn ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (sm_limit > 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, int32_t{sm_limit});
    plan.first = layout_of(args.b.codes);
    plan.second = layout_of(args.a.codes);
    plan.d = layout_of(args.d);

    cublasLtMatmulPreference_t preference = nullptr;
    check_lt(cublasLtMatmulPreferenceCreate(&preference), "preparing the choice of an algorithm");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        check_lt(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
                 "preparing the choice of an algorithm");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{HopperOps::Workspace::kLtBytes});
    // split contractions only where the parts are summed in FP32 in the workspace, in a fixed order
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        lt, plan.product, plan.first, plan.second, plan.d, plan.d, preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check_lt(status, "choosing an algorithm");
    plan.usable = status == CUBLAS_STATUS_SUCCESS && found > 0;
    plan.algorithm = result.algo;
    return plan;
}

}  // namespace

// Bytes: A, B and D once at least; 2*m*n*k FLOPs on tensor cores. The algorithm of a shape is chosen at its first call and kept, so that
// a warm step asks for none and every call gives the same bits. Calls of one stream share the scratch memory.
void HopperOps::do_gemm(const op::Gemm& args, const Launch& launch) {
    if (kernels_.gemm == GemmBackend::simt || !takes(args)) {
        hopper::launch_product(hopper::product_of(args), kernels_.gemm, launch);
        return;
    }
    const TensorView &a = args.a.codes, &b = args.b.codes, &d = args.d;
    const LtKey key{static_cast<int64_t>(args.form), a.dim(0),       a.dim(1), b.dim(0), b.dim(1),
                    static_cast<int64_t>(d.dtype),   launch.sm_limit};
    auto found = workspace_->lt_plans.find(key);
    if (found == workspace_->lt_plans.end())
        found = workspace_->lt_plans.emplace(key, make_plan(workspace_->lt, args, launch.sm_limit)).first;
    const LtPlan& plan = found->second;
    if (!plan.usable) {
        hopper::launch_product(hopper::product_of(args), kernels_.gemm, launch);
        return;
    }
    const float alpha = 1.0f, beta = args.mode == Gradient::accumulate ? 1.0f : 0.0f;
    check_lt(cublasLtMatmul(workspace_->lt, plan.product, &alpha, b.data, plan.first, a.data, plan.second,
                            &beta, d.data, plan.d, d.data, plan.d, &plan.algorithm, workspace_->lt_scratch,
                            HopperOps::Workspace::kLtBytes, hopper::stream_of(launch)),
             "a dense product");
}

}  // namespace fp8flow
