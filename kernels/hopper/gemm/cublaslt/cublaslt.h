// SPDX-License-Identifier: MIT
// GEMMs on cuBLASLt: one GEMM in row-major terms (CublasLtGemm), the library with its workspaces, streams and
// chosen algorithms (CublasLt), and whole operations as GEMMs of their groups (launch_cublaslt). Read next:
// grouped.cu.
#pragma once

#include "kernels/hopper/gemm/problem.h"

#include <cublasLt.h>

#include <array>
#include <map>

namespace fp8flow::hopper::gemm {

// One matrix as it is stored: `rows` of `cols` elements, `stride` elements from row to row. Scales of FP8
// values [R, C], C the contraction, on the device, 16-byte aligned (scalar: 4), by `mode`:
//
//   SCALAR_32F      [1]
//   OUTER_VEC_32F   [R]; only together with the other operand's
//   VEC128_32F      [ceil(C/128), R], without a stride: the scales of an expert's slice must be contiguous
//   BLK128x128_32F  [ceil(R/128), pad4(ceil(C/128))]; of one operand at most
struct CublasLtMatrix {
    void* data = nullptr;
    DType dtype = DType::bf16;
    int64_t rows = 0, cols = 0, stride = 0;
    cublasLtMatmulMatrixScale_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    const float* scales = nullptr;  // null: a plain matrix
};

// D = op(A) op(B), or D += it; the forms of op::Gemm.
struct CublasLtGemm {
    op::GemmForm form = op::GemmForm::nt;
    Gradient mode = Gradient::overwrite;
    CublasLtMatrix a, b, d;
};

// Group sizes and first rows of the M-tensors, on the host.
struct HostGroups {
    int64_t num_groups = 0;
    const int64_t* counts = nullptr;   // [num_groups]
    const int64_t* offsets = nullptr;  // [num_groups + 1]
    int64_t a_base = 0, b_base = 0, d_base = 0;

    int64_t padded(int64_t g) const { return offsets[g + 1] - offsets[g]; }
};

// The handle, and what its calls need. Calls on one stream share workspaces and scratch memory, so one object
// serves one stream at a time.
class CublasLt {
public:
    static constexpr int kLanes = 4;  // streams that experts are spread over, as in Transformer Engine
    static constexpr std::size_t kWorkspaceBytes = std::size_t{32}
                                                   << 20;  // what NVIDIA recommends for Hopper

    explicit CublasLt(Device& device);
    ~CublasLt();
    CublasLt(const CublasLt&) = delete;
    CublasLt& operator=(const CublasLt&) = delete;

    // Enqueues the GEMM on `stream`, with the workspace of `lane`. False, and nothing done: cuBLASLt does not
    // support it.
    bool run(const CublasLtGemm& gemm, cudaStream_t stream, int lane, int sm_limit);

    // Lane streams that start after everything on `caller` so far; join lets `caller` wait for all of them.
    std::array<cudaStream_t, kLanes> fork(cudaStream_t caller);
    void join(cudaStream_t caller);

    // Scratch memory for one op, 256-byte aligned; grows at the first op that needs more (a synchronisation,
    // in warm-up).
    void* scratch(std::size_t bytes);

    // Group sizes to the host; valid until the next call.
    HostGroups read_groups(const GemmProblem& problem, cudaStream_t stream);

    CublasLtCounts counts;

private:
    struct Plan {
        cublasLtMatmulAlgo_t algorithm{};
        bool usable = false;  // false: no algorithm for this shape
    };
    using Key = std::array<int64_t, 8>;  // shapes and strides; form, dtypes and scale modes
    struct Description;
    Plan choose(Description& description);

    Device& device_;
    cublasLtHandle_t handle_ = nullptr;
    std::array<void*, kLanes> workspaces_{};
    std::array<cudaStream_t, kLanes> streams_{};
    std::array<cudaEvent_t, kLanes> done_{};
    cudaEvent_t start_ = nullptr;
    void* scratch_ = nullptr;
    std::size_t scratch_bytes_ = 0;
    int64_t* pinned_ = nullptr;  // host memory that the GPU writes group sizes to
    int64_t pinned_count_ = 0;
    std::map<Key, Plan> plans_;
};

// A dense or grouped operation on cuBLASLt, group by group; a group that cuBLASLt does not support runs on
// the native kernel.
void launch_cublaslt(CublasLt& lt, const GemmCall& call, const Launch& launch);

// ---- what cuBLASLt needs in another layout than this project stores it (repack.cu)

// Any block scales as VEC128, all groups in one launch. Grouped::rows: group g [blocks, padded rows of g]
// from out + blocks * offsets[g], blocks = ceil(k/128), pads 0. Grouped::contraction: [ceil(padded/128),
// outputs] from out + offsets[g]/128 * outputs.
void launch_repack_scales(const GemmOperand& operand, const DeviceGroups& groups, Grouped grouped,
                          int64_t outputs, int64_t k, float* out, cudaStream_t stream);

// MXFP8 values [rows, cols] with E8M0 scales at scales[k/32 * block_stride + row] -> BF16 [rows, cols]; zeros
// outside valid_rows x valid_cols.
struct MxDecode {
    const uint8_t* codes = nullptr;
    DType dtype = DType::e4m3;
    int64_t stride = 0;  // elements from row to row
    const uint8_t* scales = nullptr;
    int64_t block_stride = 0;
    int64_t rows = 0, cols = 0, valid_rows = 0, valid_cols = 0;
    Bf16* out = nullptr;
};
void launch_decode_mx(const MxDecode& args, cudaStream_t stream);

}  // namespace fp8flow::hopper::gemm
