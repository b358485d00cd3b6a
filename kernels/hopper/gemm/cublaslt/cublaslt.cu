// SPDX-License-Identifier: MIT
// One GEMM on cuBLASLt with FP32 accumulation, BF16 or FP8: what it supports, descriptors, choice of
// algorithms, and what calls share: workspaces, streams, scratch memory, group sizes on the host.
#include "kernels/core/error.h"
#include "kernels/hopper/gemm/cublaslt/cublaslt.h"

#include <utility>

namespace fp8flow::hopper::gemm {

namespace {

constexpr uint32_t kAlignment = 16;  // bytes, of addresses and rows: what cuBLASLt's fast kernels need

// Algorithms cached. Group sizes change with routing, so shapes come and go; past this number the cache is
// cleared. Choosing an algorithm costs some 10 us of host time, well below the time a GPU needs for an
// expert.
constexpr std::size_t kMaxPlans = 8192;

void check_lt(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fail(ExitCode::internal, "cuBLASLt: {}: {} ({})", what, cublasLtGetStatusString(status),
             cublasLtGetStatusName(status));
}

// EXECUTION_FAILED alone does not tell a launch that failed from an earlier kernel that did; CUDA's last
// error does.
[[noreturn]] void fail_gemm(cublasStatus_t status, const CublasLtGemm& p, int sm_limit) {
    const cudaError_t cuda = cudaGetLastError();
    fail(ExitCode::internal,
         "cuBLASLt: a GEMM: {}; D {} [{}, {}]{}, A {} [{}, {}], B {} [{}, {}], form {}, {} SMs; CUDA: {}",
         cublasLtGetStatusName(status), name_of(p.d.dtype), p.d.rows, p.d.cols,
         p.mode == Gradient::accumulate ? " accumulated" : "", name_of(p.a.dtype), p.a.rows, p.a.cols,
         name_of(p.b.dtype), p.b.rows, p.b.cols, static_cast<int>(p.form), sm_limit > 0 ? sm_limit : kNumSms,
         cudaGetErrorString(cuda));
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

bool is_block_scaled(const CublasLtMatrix& m) {
    return m.mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ||
           m.mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

// The conditions that cuBLASLt states, and those it leaves to its caller: some of its kernels give wrong
// results instead of an error.
bool supports(const CublasLtGemm& p) {
    for (const CublasLtMatrix* m : {&p.a, &p.b, &p.d}) {
        if (m->rows <= 0 || m->cols <= 0) return false;
        if (!is_aligned(m->data) || m->stride * size_of(m->dtype) % kAlignment != 0) return false;
    }
    if (!is_fp8(p.a.dtype)) return p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16;
    if (p.form != op::GemmForm::nt || (p.a.dtype == DType::e5m2 && p.b.dtype == DType::e5m2)) return false;
    if (p.a.cols % 16 != 0 || p.b.rows % 8 != 0) return false;
    if (is_block_scaled(p.a) && p.a.rows % 8 != 0) return false;
    const bool both_blocks = p.a.mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F && p.b.mode == p.a.mode;
    if (both_blocks) return false;
    for (const CublasLtMatrix* m : {&p.a, &p.b})
        if (m->mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && !is_aligned(m->scales)) return false;
    return true;
}

cudaDataType_t data_type(DType dtype) {
    switch (dtype) {
        case DType::bf16: return CUDA_R_16BF;
        case DType::e4m3: return CUDA_R_8F_E4M3;
        case DType::e5m2: return CUDA_R_8F_E5M2;
        default: return CUDA_R_32F;
    }
}

// rows of ours are columns of cuBLASLt's
void describe_matrix(cublasLtMatrixLayoutOpaque_t& layout, const CublasLtMatrix& m) {
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

    Description(const CublasLtGemm& p, int sm_limit) {
        check_lt(cublasLtMatmulDescInit(&gemm, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a GEMM");
        set(CUBLASLT_MATMUL_DESC_TRANSA, p.form == op::GemmForm::nt ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, p.form == op::GemmForm::tn ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (sm_limit > 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, int32_t{sm_limit});
        if (is_fp8(p.a.dtype)) {
            set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
            set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(p.b.mode));
            set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(p.a.mode));
            set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(p.b.scales));
            set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(p.a.scales));
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

CublasLt::CublasLt(Device& device) : device_(device) {
    check_lt(cublasLtCreate(&handle_), "starting");
    workspaces_[0] = device_.allocate(kWorkspaceBytes);
}

CublasLt::~CublasLt() {
    for (int lane = 0; lane < kLanes; ++lane) {
        if (streams_[lane] != nullptr) cudaStreamDestroy(streams_[lane]);
        if (done_[lane] != nullptr) cudaEventDestroy(done_[lane]);
        if (workspaces_[lane] != nullptr) device_.free(workspaces_[lane]);
    }
    if (start_ != nullptr) cudaEventDestroy(start_);
    if (scratch_ != nullptr) device_.free(scratch_);
    if (pinned_ != nullptr) cudaFreeHost(pinned_);
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
bool CublasLt::run(const CublasLtGemm& p, cudaStream_t stream, int lane, int sm_limit) {
    if (!supports(p)) return false;
    const int64_t kinds = static_cast<int64_t>(p.form) | static_cast<int64_t>(p.a.dtype) << 4 |
                          static_cast<int64_t>(p.b.dtype) << 12 | static_cast<int64_t>(p.d.dtype) << 20 |
                          static_cast<int64_t>(p.a.mode) << 28 | static_cast<int64_t>(p.b.mode) << 36;
    const Key key{p.a.rows, p.a.cols, p.a.stride, p.b.rows, p.b.cols, p.b.stride, p.d.stride, kinds};
    auto found = plans_.find(key);
    if (found == plans_.end()) {
        if (plans_.size() >= kMaxPlans) plans_.clear();
        Description unlimited(p, 0);  // another algorithm would give other bits
        found = plans_.emplace(key, choose(unlimited)).first;
    }
    const Plan& plan = found->second;
    if (!plan.usable) return false;
    const float alpha = 1.0f, beta = p.mode == Gradient::accumulate ? 1.0f : 0.0f;
    const auto matmul = [&](int limit) {
        Description description(p, limit);
        return cublasLtMatmul(handle_, &description.gemm, &alpha, p.b.data, &description.first, p.a.data,
                              &description.second, &beta, p.d.data, &description.d, p.d.data, &description.d,
                              &plan.algorithm, workspaces_[lane], kWorkspaceBytes, stream);
    };
    cublasStatus_t status = matmul(sm_limit);
    // an algorithm chosen for all SMs may not launch on very few: it takes the SMs that it wants then
    if (status == CUBLAS_STATUS_EXECUTION_FAILED && sm_limit > 0) status = matmul(0);
    if (status != CUBLAS_STATUS_SUCCESS) fail_gemm(status, p, sm_limit);
    return true;
}

std::array<cudaStream_t, CublasLt::kLanes> CublasLt::fork(cudaStream_t caller) {
    if (start_ == nullptr) {
        check_cuda(cudaEventCreateWithFlags(&start_, cudaEventDisableTiming), "creating an event");
        for (int lane = 0; lane < kLanes; ++lane) {
            check_cuda(cudaStreamCreateWithFlags(&streams_[lane], cudaStreamNonBlocking),
                       "creating a stream");
            check_cuda(cudaEventCreateWithFlags(&done_[lane], cudaEventDisableTiming), "creating an event");
            if (workspaces_[lane] == nullptr) workspaces_[lane] = device_.allocate(kWorkspaceBytes);
        }
    }
    check_cuda(cudaEventRecord(start_, caller), "starting GEMMs in parallel");
    for (const cudaStream_t stream : streams_)
        check_cuda(cudaStreamWaitEvent(stream, start_), "starting GEMMs in parallel");
    return streams_;
}

void CublasLt::join(cudaStream_t caller) {
    for (int lane = 0; lane < kLanes; ++lane) {
        check_cuda(cudaEventRecord(done_[lane], streams_[lane]), "joining GEMMs");
        check_cuda(cudaStreamWaitEvent(caller, done_[lane]), "joining GEMMs");
    }
}

void* CublasLt::scratch(std::size_t bytes) {
    if (bytes > scratch_bytes_) {
        device_.synchronize();  // earlier GEMMs may still read the old one
        if (scratch_ != nullptr) device_.free(scratch_);
        scratch_ = nullptr;
        scratch_bytes_ = 0;
        const std::size_t wanted = bytes + bytes / 4;  // room for routing to shift
        scratch_ = device_.allocate(wanted);
        scratch_bytes_ = wanted;
    }
    return scratch_;
}

// The only host synchronisation of this backend: cuBLASLt takes sizes and addresses from the host, while
// routing leaves them on the device. Every grouped GEMM waits here for all earlier work of the stream;
// kernels that read sizes on the device need none of this.
HostGroups CublasLt::read_groups(const GemmProblem& problem, cudaStream_t stream) {
    const int64_t num_groups = problem.groups.num_groups, needed = 2 * num_groups + 4;
    if (needed > pinned_count_) {
        if (pinned_ != nullptr) check_cuda(cudaFreeHost(std::exchange(pinned_, nullptr)), "freeing memory");
        check_cuda(cudaMallocHost(reinterpret_cast<void**>(&pinned_), static_cast<std::size_t>(needed) * 8),
                   "allocating host memory");
        pinned_count_ = needed;
    }
    int64_t *counts = pinned_, *offsets = counts + num_groups, *bases = offsets + num_groups + 1;
    const auto read = [stream](int64_t* to, const int64_t* from, int64_t count) {
        check_cuda(cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof(int64_t),
                                   cudaMemcpyDeviceToHost, stream),
                   "reading group sizes");
    };
    read(counts, problem.groups.counts, num_groups);
    read(offsets, problem.groups.offsets, num_groups + 1);
    const int64_t* const sources[3] = {problem.a.row_base, problem.b.row_base, problem.d_row_base};
    for (int i = 0; i < 3; ++i) {
        bases[i] = 0;
        if (sources[i] != nullptr) read(bases + i, sources[i], 1);
    }
    check_cuda(cudaStreamSynchronize(stream), "waiting for group sizes");
    device_.count_synchronisation();
    return {num_groups, counts, offsets, bases[0], bases[1], bases[2]};
}

}  // namespace fp8flow::hopper::gemm
