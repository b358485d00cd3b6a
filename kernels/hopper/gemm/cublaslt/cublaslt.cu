// SPDX-License-Identifier: MIT
// Dense GEMMs on cuBLASLt with FP32 accumulation: what it supports, descriptors, choice of algorithms.
#include "kernels/core/error.h"
#include "kernels/hopper/gemm/cublaslt/cublaslt.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr uint32_t kAlignment = 16;  // bytes, of addresses and rows: what cuBLASLt's fast kernels need

// Algorithms cached; past this number of shapes the cache is cleared. Choosing one costs some 10 us of host
// time.
constexpr std::size_t kMaxPlans = 8192;

void check_lt(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fail(ExitCode::internal, "cuBLASLt: {}: {} ({})", what, cublasLtGetStatusString(status),
             cublasLtGetStatusName(status));
}

// One matrix as it is stored: `rows` of `cols` elements, `stride` elements from row to row.
struct Matrix {
    const void* data = nullptr;
    DType dtype = DType::bf16;
    int64_t rows = 0, cols = 0, stride = 0;
    const void* scale = nullptr;  // [1] f32 on the device, of FP8 values
};

// D = op(A) op(B), or D += it; the forms of op::Gemm.
struct Gemm {
    op::GemmForm form = op::GemmForm::nt;
    Gradient mode = Gradient::overwrite;
    Matrix a, b, d;
};

Gemm gemm_of(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    const auto matrix = [&](const GemmOperand& operand, int64_t outputs, bool along) {
        return Matrix{operand.data,
                      operand.dtype,
                      along ? outputs : p.k,
                      along ? p.k : outputs,
                      along ? operand.output_stride : operand.k_stride,
                      operand.scale.scales};
    };
    return {call.form, p.mode, matrix(p.a, p.m, call.form != op::GemmForm::tn),
            matrix(p.b, p.n, call.form == op::GemmForm::nt), Matrix{p.d, p.d_dtype, p.m, p.n, p.n}};
}

// EXECUTION_FAILED alone does not distinguish a launch that failed from an earlier kernel that did; CUDA's
// last error does.
[[noreturn]] void fail_gemm(cublasStatus_t status, const Gemm& p, int sm_limit) {
    const cudaError_t cuda = cudaGetLastError();
    fail(ExitCode::internal,
         "cuBLASLt: a GEMM: {}; D {} [{}, {}]{}, A {} [{}, {}], B {} [{}, {}], form {}, {} SMs; CUDA: {}",
         cublasLtGetStatusName(status), name_of(p.d.dtype), p.d.rows, p.d.cols,
         p.mode == Gradient::accumulate ? " accumulated" : "", name_of(p.a.dtype), p.a.rows, p.a.cols,
         name_of(p.b.dtype), p.b.rows, p.b.cols, static_cast<int>(p.form), sm_limit > 0 ? sm_limit : kNumSms,
         cudaGetErrorString(cuda));
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

// The conditions that cuBLASLt states, and those it leaves to its caller: some of its kernels give wrong
// results instead of an error.
bool supports(const GemmCall& call, const Gemm& p) {
    for (const Matrix* m : {&p.a, &p.b, &p.d}) {
        if (m->rows <= 0 || m->cols <= 0) return false;
        if (!is_aligned(m->data) || m->stride * size_of(m->dtype) % kAlignment != 0) return false;
    }
    if (!is_fp8(p.a.dtype)) return p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16;
    return call.a.layout == ScaleLayout::tensor && call.b.layout == ScaleLayout::tensor &&
           p.form == op::GemmForm::nt && !(p.a.dtype == DType::e5m2 && p.b.dtype == DType::e5m2) &&
           p.a.cols % 16 == 0 && p.b.rows % 8 == 0;
}

cudaDataType_t data_type(DType dtype) {
    switch (dtype) {
        case DType::bf16: return CUDA_R_16BF;
        case DType::e4m3: return CUDA_R_8F_E4M3;
        case DType::e5m2: return CUDA_R_8F_E5M2;
        default: return CUDA_R_32F;
    }
}

// Our rows are cuBLASLt's columns.
void describe_matrix(cublasLtMatrixLayoutOpaque_t& layout, const Matrix& m) {
    check_lt(cublasLtMatrixLayoutInit(&layout, data_type(m.dtype), static_cast<uint64_t>(m.cols),
                                      static_cast<uint64_t>(m.rows), m.stride),
             "describing a matrix");
}

}  // namespace

// The row-major D[M,N] = op(A) op(B) is, read column-major, D' [N,M] = op(B)' op(A)': B comes first. A matrix
// that is stored contiguous along the contraction needs a transpose as cuBLASLt's first operand, and none as
// its second. FP8 GEMMs promote to the FP32 accumulator inside the contraction (FAST_ACCUM off), as
// kernels/ops/gemm.h requires.
struct CublasLt::Description {
    cublasLtMatmulDescOpaque_t gemm{};
    cublasLtMatrixLayoutOpaque_t first{}, second{}, d{};

    Description(const Gemm& p, int sm_limit) {
        check_lt(cublasLtMatmulDescInit(&gemm, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a GEMM");
        set(CUBLASLT_MATMUL_DESC_TRANSA, p.form == op::GemmForm::nt ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, p.form == op::GemmForm::tn ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (sm_limit > 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, int32_t{sm_limit});
        if (is_fp8(p.a.dtype)) {
            set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
            set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scale);
            set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scale);
        }
        describe_matrix(first, p.b);
        describe_matrix(second, p.a);
        describe_matrix(d, p.d);
    }

private:
    template <class T> void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        check_lt(cublasLtMatmulDescSetAttribute(&gemm, attribute, &value, sizeof value), "describing a GEMM");
    }
};

CublasLt::CublasLt(Device& device) : device_(device), workspace_(device.allocate(kWorkspaceBytes)) {
    check_lt(cublasLtCreate(&handle_), "starting");
}

CublasLt::~CublasLt() {
    device_.free(workspace_);
    cublasLtDestroy(handle_);
}

CublasLt::Plan CublasLt::choose(Description& description) {
    cublasLtMatmulPreferenceOpaque_t preference{};
    check_lt(cublasLtMatmulPreferenceInit(&preference), "preparing the choice of an algorithm");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        check_lt(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
                 "preparing the choice of an algorithm");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
    // split contractions only where the parts are summed in FP32 in the workspace, in a fixed order
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, &description.gemm, &description.first, &description.second,
                                       &description.d, &description.d, &preference, 1, &result, &found);
    // both mean that this version has no kernel for such sizes, types and scales
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return {};
    check_lt(status, "choosing an algorithm");
    return {result.algo, found > 0 && result.state == CUBLAS_STATUS_SUCCESS};
}

// Bytes: A, B and D once at least; 2*m*n*k FLOPs on tensor cores. The algorithm of a shape is chosen at its
// first call and cached, so that every call gives the same bits.
bool CublasLt::run(const GemmCall& call, const Launch& launch) {
    const Gemm p = gemm_of(call);
    if (!supports(call, p)) return false;
    const int64_t kinds = static_cast<int64_t>(p.form) | static_cast<int64_t>(p.a.dtype) << 4 |
                          static_cast<int64_t>(p.b.dtype) << 12 | static_cast<int64_t>(p.d.dtype) << 20;
    const Key key{p.a.rows, p.a.cols, p.a.stride, p.b.rows, p.b.cols, p.b.stride, kinds};
    auto found = plans_.find(key);
    if (found == plans_.end()) {
        if (plans_.size() >= kMaxPlans) plans_.clear();
        Description unlimited(p, 0);  // another algorithm would give other bits
        found = plans_.emplace(key, choose(unlimited)).first;
    }
    const Plan& plan = found->second;
    if (!plan.usable) return false;
    const float alpha = 1.0f, beta = p.mode == Gradient::accumulate ? 1.0f : 0.0f;
    void* const d = call.problem.d;
    const auto matmul = [&](int limit) {
        Description description(p, limit);
        return cublasLtMatmul(handle_, &description.gemm, &alpha, p.b.data, &description.first, p.a.data,
                              &description.second, &beta, d, &description.d, d, &description.d,
                              &plan.algorithm, workspace_, kWorkspaceBytes, stream_of(launch));
    };
    cublasStatus_t status = matmul(launch.sm_limit);
    // an algorithm chosen for all SMs may not launch on very few: it takes the SMs that it wants then
    if (status == CUBLAS_STATUS_EXECUTION_FAILED && launch.sm_limit > 0) status = matmul(0);
    if (status != CUBLAS_STATUS_SUCCESS) fail_gemm(status, p, launch.sm_limit);
    ++gemms_;
    return true;
}

}  // namespace fp8flow::hopper::gemm
