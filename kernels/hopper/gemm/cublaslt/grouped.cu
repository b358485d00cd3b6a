// SPDX-License-Identifier: MIT
// Dense and grouped GEMMs of every recipe on cuBLASLt: scales in its layouts, experts spread over streams,
// pads and empty groups written as the contract says. The selectable baseline (GemmBackend::cublaslt), and
// the dense BF16 GEMMs of the native backend.
//
//   recipe          forward, data gradient            weight gradient
//   bf16            BF16                              BF16
//   fp8_flow        VEC128 (repacked) x BLK128x128    VEC128 x VEC128 (tile scales expanded: no BLK128x128
//                                                     on both sides)
//   fp8_blockwise   VEC128 (repacked) x BLK128x128    VEC128 x VEC128 (as stored)
//   fp8_rowwise     OUTER_VEC x OUTER_VEC             OUTER_VEC x OUTER_VEC, one vector a group
//   fp8_tensorwise  SCALAR x SCALAR                   SCALAR x SCALAR
//   mxfp8           decoded to BF16                   decoded to BF16
#include "kernels/hopper/gemm/cublaslt/cublaslt.h"

namespace fp8flow::hopper::gemm {

namespace {

// How a pair of operands is scaled; both alike.
enum class Scaling { plain, tensor, outer, blocks, mx };

Scaling scaling_of(ScaleLayout layout) {
    switch (layout) {
        case ScaleLayout::none: return Scaling::plain;
        case ScaleLayout::tensor: return Scaling::tensor;
        case ScaleLayout::row:
        case ScaleLayout::group_row: return Scaling::outer;
        case ScaleLayout::mx32: return Scaling::mx;
        default: return Scaling::blocks;
    }
}

// An operand's scales as cuBLASLt reads them. VEC128 of a group starts at data + an offset from the group's
// first row or block.
struct StoredScales {
    cublasLtMatmulMatrixScale_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    const float* data = nullptr;
    bool packed = false;  // VEC128 written by launch_repack_scales: row bases are resolved, groups are stored
                          // one after the other
};

int width_of(const GemmOperand& operand) { return static_cast<int>(size_of(operand.dtype)); }

void* advance(const void* data, int64_t bytes) {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(data)) + bytes;
}

// Of a group in its stacked operand: the weights, or scales of the groups of a weight gradient.
int64_t entry_of(const GemmProblem& p, int64_t g) { return p.grouped == Grouped::rows ? p.weight_of(g) : g; }

// One group as a GEMM of its own, for the native kernel.
GemmProblem one_group(GemmProblem p, int64_t g, int64_t padded) {
    if (p.groups.counts == nullptr) return p;
    p.groups = {1, p.groups.counts + g, p.groups.offsets + g, padded};
    const int64_t entry = entry_of(p, g);
    for (GemmOperand* operand : {&p.a, &p.b}) {
        operand->data = advance(operand->data, entry * operand->group_stride * width_of(*operand));
        if (operand->scale.scales != nullptr)
            operand->scale.scales = advance(
                operand->scale.scales, entry * operand->scale.group_stride * size_of(operand->scale.dtype));
    }
    if (p.grouped == Grouped::contraction)
        p.d = advance(p.d, g * p.m * p.n * size_of(p.d_dtype));
    else
        p.m = padded;
    return p;
}

// Rows and contraction of one group; `k` is the contraction length that cuBLASLt gets.
struct Extent {
    int64_t g, entry, first, count, padded;
    int64_t m, k;
};

class CublasLtGroups {
public:
    CublasLtGroups(CublasLt& lt, const GemmCall& call, const HostGroups& sizes, const Launch& launch)
        : lt_(lt),
          call_(call),
          p_(call.problem),
          sizes_(sizes),
          launch_(launch),
          by_rows_(p_.grouped == Grouped::rows),
          scaling_(scaling_of(call.a.layout)) {}

    void run() {
        prepare();
        int64_t filled = 0;
        for (int64_t g = 0; g < sizes_.num_groups; ++g) filled += sizes_.padded(g) > 0;
        const cudaStream_t caller = stream_of(launch_);
        std::array<cudaStream_t, CublasLt::kLanes> streams{caller, caller, caller, caller};
        if (filled > 1) streams = lt_.fork(caller);
        int64_t next_lane = 0;
        for (int64_t g = 0; g < sizes_.num_groups; ++g) {
            if (by_rows_ && sizes_.padded(g) == 0) continue;  // no rows, no pads
            lane_ = static_cast<int>(filled > 1 ? next_lane++ % CublasLt::kLanes : 0);
            stream_ = streams[lane_];
            run_group(extent_of(g));
        }
        if (filled > 1) lt_.join(caller);
    }

private:
    Extent extent_of(int64_t g) const {
        Extent e{.g = g,
                 .entry = entry_of(p_, g),
                 .first = sizes_.offsets[g],
                 .count = sizes_.counts[g],
                 .padded = sizes_.padded(g)};
        e.m = by_rows_ ? e.padded : p_.m;
        // Plain gradients run over the group's rows alone. FP8 needs a contraction in multiples of 16 bytes,
        // so pads are part of it: their values are 0 by the contract of whoever wrote the copies
        // (kernels/ops/quantize.h, transpose.h). MXFP8's pads are zeroed in decoding.
        e.k = by_rows_ ? p_.k : (scaling_ == Scaling::plain ? e.count : e.padded);
        return e;
    }

    void run_group(const Extent& e) {
        uint8_t* const d = static_cast<uint8_t*>(p_.d);
        const int64_t row_bytes = p_.n * size_of(p_.d_dtype);
        const int64_t d_row = by_rows_ ? sizes_.d_base + e.first : e.g * p_.m;
        if (e.count == 0) {  // pads alone: zeros; a weight gradient of nothing: zeros, or nothing added
            if (by_rows_ || p_.mode == Gradient::overwrite) zero(d + d_row * row_bytes, e.m * row_bytes);
            return;
        }
        CublasLtGemm gemm{.form = call_.form, .mode = p_.mode};
        gemm.d = {
            .data = d + d_row * row_bytes, .dtype = p_.d_dtype, .rows = e.m, .cols = p_.n, .stride = p_.n};
        if ((scaling_ == Scaling::mx ? decode(e, gemm) : describe(e, gemm)) &&
            lt_.run(gemm, stream_, lane_, launch_.sm_limit)) {
            ++lt_.counts.cublaslt;
            // the GEMM covered the pads too, so that its shapes repeat from step to step
            if (by_rows_) zero(d + (d_row + e.count) * row_bytes, (e.padded - e.count) * row_bytes);
            return;
        }
        // sizes or addresses that are not multiples of 16 bytes, no algorithm: this group on the native
        // kernel
        ++lt_.counts.native;
        launch_fallback(one_group(p_, e.g, e.padded), GemmBackend::native,
                        {.stream = {stream_}, .sm_limit = launch_.sm_limit});
    }

    void zero(void* data, int64_t bytes) const {
        if (bytes > 0)
            check_cuda(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), stream_), "zeroing pads");
    }

    // First output and first contraction index of a group in an operand, in the operand's own buffer.
    int64_t output0(const Extent& e, bool is_a) const {
        return by_rows_ && is_a ? sizes_.a_base + e.first : 0;
    }
    int64_t k0(const Extent& e, bool is_a) const {
        return by_rows_ ? 0 : (is_a ? sizes_.a_base : sizes_.b_base) + e.first;
    }

    CublasLtMatrix matrix_of(const Extent& e, bool is_a) const {
        const GemmOperand& operand = is_a ? p_.a : p_.b;
        const int64_t outputs = is_a ? e.m : p_.n;
        const bool along = is_a ? call_.form != op::GemmForm::tn : call_.form == op::GemmForm::nt;
        const int64_t stride = along ? operand.output_stride : operand.k_stride;
        const int64_t row = along ? output0(e, is_a) : k0(e, is_a),
                      col = along ? k0(e, is_a) : output0(e, is_a);
        const int64_t element = e.entry * operand.group_stride + row * stride + col;
        return {.data = advance(operand.data, element * width_of(operand)),
                .dtype = operand.dtype,
                .rows = along ? outputs : e.k,
                .cols = along ? e.k : outputs,
                .stride = stride};
    }

    bool describe(const Extent& e, CublasLtGemm& gemm) const {
        gemm.a = matrix_of(e, true);
        gemm.b = matrix_of(e, false);
        if (scaling_ == Scaling::plain) return true;
        for (const bool is_a : {true, false}) {
            const OperandScale& scale = (is_a ? p_.a : p_.b).scale;
            const StoredScales& scales = is_a ? a_scales_ : b_scales_;
            const int64_t outputs = is_a ? e.m : p_.n;
            int64_t at = 0;
            switch (scales.mode) {
                case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:
                    at = e.entry * scale.group_stride + output0(e, is_a);
                    break;
                case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
                    if (scales.packed)
                        at = by_rows_ ? ceil_div(p_.k, kBlock) * (is_a ? e.first : 0)
                                      : e.first / kBlock * outputs;
                    else
                        at = k0(e, is_a) / kBlock * outputs;
                    break;
                case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F: at = e.entry * scale.group_stride; break;
                default: break;
            }
            CublasLtMatrix& matrix = is_a ? gemm.a : gemm.b;
            matrix.mode = scales.mode;
            matrix.scales = scales.data + at;
        }
        return true;
    }

    // Both operands of one group as BF16, in this lane's part of the scratch memory.
    bool decode(const Extent& e, CublasLtGemm& gemm) const {
        if (e.k % 16 != 0 || k0(e, true) % kMxBlock != 0 || k0(e, false) % kMxBlock != 0) return false;
        uint8_t* out = scratch_ + lane_ * lane_bytes_;
        for (const bool is_a : {true, false}) {
            const GemmOperand& operand = is_a ? p_.a : p_.b;
            CublasLtMatrix matrix = matrix_of(e, is_a);
            const int64_t scale_at = e.entry * operand.scale.group_stride + output0(e, is_a) +
                                     k0(e, is_a) / kMxBlock * operand.scale.block_stride;
            launch_decode_mx({.codes = static_cast<const uint8_t*>(matrix.data),
                              .dtype = operand.dtype,
                              .stride = matrix.stride,
                              .scales = static_cast<const uint8_t*>(operand.scale.scales) + scale_at,
                              .block_stride = operand.scale.block_stride,
                              .rows = matrix.rows,
                              .cols = matrix.cols,
                              .valid_rows = by_rows_ && is_a ? e.count : matrix.rows,
                              .valid_cols = by_rows_ ? e.k : e.count,
                              .out = reinterpret_cast<Bf16*>(out)},
                             stream_);
            matrix.data = out;
            matrix.dtype = DType::bf16;
            matrix.stride = matrix.cols;
            (is_a ? gemm.a : gemm.b) = matrix;
            out += round_up(matrix.rows * matrix.cols * size_of(DType::bf16), kScratchAlignment);
        }
        return true;
    }

    // ---- before the lanes fork: scales in cuBLASLt's layouts, scratch memory
    void prepare() {
        if (scaling_ == Scaling::mx) {
            int64_t largest = 0;
            for (int64_t g = 0; g < sizes_.num_groups; ++g) {
                const Extent e = extent_of(g);
                const int64_t row = e.k * size_of(DType::bf16);
                largest = std::max(largest, round_up(e.m * row, kScratchAlignment) +
                                                round_up(p_.n * row, kScratchAlignment));
            }
            lane_bytes_ = largest;
            const int64_t lanes = std::min<int64_t>(sizes_.num_groups, CublasLt::kLanes);
            scratch_ = static_cast<uint8_t*>(lt_.scratch(static_cast<std::size_t>(lanes * lane_bytes_)));
            return;
        }
        a_scales_.data = static_cast<const float*>(p_.a.scale.scales);
        b_scales_.data = static_cast<const float*>(p_.b.scale.scales);
        if (scaling_ == Scaling::outer)
            a_scales_.mode = b_scales_.mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        if (scaling_ != Scaling::blocks) return;
        const bool b_is_blocks = call_.b.layout == ScaleLayout::block128;
        a_scales_.mode = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
        b_scales_.mode = b_is_blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F : a_scales_.mode;
        a_scales_.packed = !is_vec128(call_.a.layout, p_.a, sizes_.num_groups == 1 ? sizes_.padded(0) : -1);
        b_scales_.packed = !b_is_blocks && !is_vec128(call_.b.layout, p_.b, p_.n);
        const int64_t a_bytes = a_scales_.packed ? packed_bytes(p_.m) : 0;
        const int64_t b_bytes = b_scales_.packed ? packed_bytes(p_.n) : 0;
        if (a_bytes + b_bytes == 0) return;
        scratch_ = static_cast<uint8_t*>(lt_.scratch(static_cast<std::size_t>(a_bytes + b_bytes)));
        if (a_scales_.packed) a_scales_.data = repack(p_.a, p_.groups, p_.m, scratch_);
        // B of a forward GEMM is repacked for dense ones only: a single group, of B's own rows
        if (b_scales_.packed)
            b_scales_.data =
                repack(p_.b, by_rows_ ? device_groups({}, p_.n) : p_.groups, p_.n, scratch_ + a_bytes);
    }

    // Whether stored scales are a VEC128 tensor of the whole operand (forward: of its only group), or of the
    // blocks of any group.
    bool is_vec128(ScaleLayout layout, const GemmOperand& operand, int64_t rows) const {
        if (layout != ScaleLayout::vec128) return false;
        return !by_rows_ || operand.scale.block_stride == rows;
    }

    int64_t packed_bytes(int64_t outputs) const {
        const int64_t total = sizes_.offsets[sizes_.num_groups];
        const int64_t words =
            by_rows_ ? ceil_div(p_.k, kBlock) * std::max(total, outputs) : ceil_div(total, kBlock) * outputs;
        return round_up(words * static_cast<int64_t>(sizeof(float)), kScratchAlignment);
    }

    const float* repack(const GemmOperand& operand, const DeviceGroups& groups, int64_t outputs,
                        uint8_t* out) const {
        launch_repack_scales(operand, groups, p_.grouped, outputs, p_.k, reinterpret_cast<float*>(out),
                             stream_of(launch_));
        return reinterpret_cast<const float*>(out);
    }

    static constexpr int64_t kScratchAlignment = 256;

    CublasLt& lt_;
    const GemmCall& call_;
    const GemmProblem& p_;
    const HostGroups& sizes_;
    const Launch& launch_;
    const bool by_rows_;
    const Scaling scaling_;
    StoredScales a_scales_, b_scales_;
    uint8_t* scratch_ = nullptr;
    int64_t lane_bytes_ = 0;
    int lane_ = 0;
    cudaStream_t stream_ = nullptr;
};

// Kinds of operands that cuBLASLt supports; what depends on sizes and addresses is decided group by group.
bool supports(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    const auto known = [](DType dtype) { return dtype == DType::bf16 || is_fp8(dtype); };
    return known(p.a.dtype) && known(p.b.dtype) && scaling_of(call.a.layout) == scaling_of(call.b.layout) &&
           p.m > 0 && p.n > 0;
}

}  // namespace

void launch_cublaslt(CublasLt& lt, const GemmCall& call, const Launch& launch) {
    const GemmProblem& p = call.problem;
    if (!supports(call)) {
        ++lt.counts.native;
        launch_fallback(p, GemmBackend::native, launch);
        return;
    }
    if (p.groups.counts == nullptr) {  // dense: the host knows the sizes
        const int64_t counts[1] = {p.m}, offsets[2] = {0, p.m};
        CublasLtGroups(lt, call, {.num_groups = 1, .counts = counts, .offsets = offsets}, launch).run();
        return;
    }
    CublasLtGroups(lt, call, lt.read_groups(p, stream_of(launch)), launch).run();
}

}  // namespace fp8flow::hopper::gemm
