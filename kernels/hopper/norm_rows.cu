// RMSNorm forward on rows of BF16 or FP16, each held in registers by a warp, a CTA or a cluster. Contract: kernels/ops/norm.h. With a transposed
// copy beside: norm_bands.cu. Backward: norm_rows_backward.cu. Other rows: norm.cu.
#include "kernels/hopper/norm_forward.h"

namespace fp8flow::hopper {

namespace {

constexpr int kWarpRowWidth = 2048;  // at most: a unit a strand
constexpr int kWarpRowThreads = 128;

// Threads of a row: a warp or a CTA, which a cluster may have several of.
constexpr int threads_of(int row_threads) { return row_threads == 32 ? kWarpRowThreads : row_threads; }
// CTAs of an SM: what registers allow.
constexpr int ctas_of(int units, NormForm form, int row_threads) {
    if (row_threads == 32) return units > 4 ? 5 : 8;
    if (form == NormForm::any || units > 2) return 4;
    return units == 1 ? 8 : 6;
}

// Bytes at T=4096, H=7168: x and y 117 MB (29 us), with FP8 rows 147 MB (36 us); each once. One row in the registers of its threads, of which
// multiprocessors take new ones as soon as they have room: with rows for every CTA of a persistent grid, several on their way through
// shared memory, the slowest multiprocessor was 7 % behind (16384 x 4096: 77 us instead of 70). gamma comes from L1, where all rows of a
// multiprocessor share it. A CTA's warps put the sums of their strands together behind its only barrier; where a launch may not
// use all SMs a CTA takes several rows, and these sums alternate between two places, so that the next row's are not written before this
// row's are read. A row of several segments belongs to a cluster, a segment a CTA: behind the barrier their sums meet in all of them
// (SegmentSums). Up to 2048 columns are one warp's, without any barrier: 4096 x 1024 took 11 us by CTAs. One writer a byte, the contract's order: deterministic;
// amax is an integer maximum.
template <int kUnits, NormForm kForm, DType kType, int kRowThreadsEach>
__global__ __launch_bounds__(threads_of(kRowThreadsEach),
                             ctas_of(kUnits, kForm,
                                     kRowThreadsEach)) void norm_rows_kernel(const NormForward args) {
    constexpr bool kByWarps = kRowThreadsEach == 32;
    constexpr int kRowsOfCta = threads_of(kRowThreadsEach) / kRowThreadsEach;
    __shared__ float warp_sums[2][kNormWarps];
    __shared__ SegmentSums segment_sums;
    __shared__ uint32_t largest_of_cta;
    const int thread = static_cast<int>(threadIdx.x) % kRowThreadsEach;
    const RowPart part = row_part < kByWarps ? 1 : kUnits > (args.x.cols, args.segments, args.segment_cols);
    const int64_t step = gridDim.x / part.segments * kRowsOfCta,
                  first_row = blockIdx.x / part.segments * kRowsOfCta +
                              static_cast<int>(threadIdx.x) / kRowThreadsEach;
    int32_t seen = 0;  // of what amax's word holds: less must not be sent there
    if (threadIdx.x == 0) {
        largest_of_cta = 0;
        if (args.amax != nullptr) seen = *static_cast<volatile int32_t*>(args.amax);
        if (part.segments > 1) {
            prepare(segment_sums);
            fence_barrier_init();
        }
    }
    if (part.segments > 1) cluster_meet();
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    const auto gamma = [&](int unit, int, float(&g)[kUnit]) {
        if (kForm == NormForm::any && !args.gamma.vector)
            load_gamma(args.gamma, args.gamma_offset, unit * kUnit, g);
        else
            load_wide_gamma(args.gamma, args.gamma_offset, unit, g);
    };
    uint32_t largest = 0;
    int n = 0;
    for (int64_t row = first_row; row < args.rows; row += step, ++n) {
        uint4 raw[kUnits];
        load_row<kForm, kUnits, kRowThreadsEach>(args.x, row, part, thread, raw);
        float sum;
        if constexpr (kByWarps) {
            sum = sum_over_warp<kType>(raw, thread);
        } else {
            put_strand(strand_of<kType>(raw), warp_sums[n % 2]);
            __syncthreads();
            sum = row_sum(warp_sums[n % 2]);
            if (part.segments > 1) sum = sum_of_segments(segment_sums, n, part, sum);
        }
        const float rstd = rstd_of(sum, args);
        if (thread == 0 && part.rank == 0) args.rstd[row] = rstd;
        uint2* codes =
            reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.codes.data) + row * args.x.cols + part.first);
        write_row<kForm, kType, kUnits, kRowThreadsEach>(args, row, part, thread, rstd, multiplier, gamma,
                                                         codes, raw, largest);
    }
    if (kForm == NormForm::tensor || kForm == NormForm::any)
        merge_amax_above(args, largest, seen, &largest_of_cta);
    if (part.segments > 1) cluster_meet();  // no sum is on its way any more
}

using ForwardKernel = void (*)(NormForward);
template <int kUnits, DType kType, int kRowThreadsEach> ForwardKernel kernel_of(NormForm form) {
    switch (form) {
        case NormForm::values: return norm_rows_kernel<kUnits, NormForm::values, kType, kRowThreadsEach>;
        case NormForm::blocks: return norm_rows_kernel<kUnits, NormForm::blocks, kType, kRowThreadsEach>;
        case NormForm::tensor: return norm_rows_kernel<kUnits, NormForm::tensor, kType, kRowThreadsEach>;
        default: return norm_rows_kernel<kUnits, NormForm::any, kType, kRowThreadsEach>;
    }
}
template <DType kType> ForwardKernel kernel_of(const NormForward& args) {
    const NormForm form = form_of(args);
    if (args.x.cols <= kWarpRowWidth)
        return args.x.cols <= 1024 ? kernel_of<4, kType, 32>(form) : kernel_of<8, kType, 32>(form);
    return units_a_thread(args.segment_cols) <= 2 ? kernel_of<2, kType, kNormThreads>(form)
                                                  : kernel_of<kMostUnits, kType, kNormThreads>(form);
}

}  // namespace

bool launch_norm_rows(const NormForward& args, const Launch& launch) {
    const bool f16 = args.x.dtype == DType::f16;
    if ((!f16 && args.x.dtype != DType::bf16) || args.segments > kMostSegments) return false;
    const ForwardKernel kernel = f16 ? kernel_of<DType::f16>(args) : kernel_of<DType::bf16>(args);
    const bool by_warps = args.x.cols <= kWarpRowWidth;
    const int threads = by_warps ? kWarpRowThreads : kNormThreads;
    constexpr int kLimitedCtas = 8, kAllCtas = 1 << 20;  // of an SM: a CTA a row where no limit is set
    launch_rows(kernel, args, by_warps ? ceil_div(args.rows, kWarpRowThreads / 32) : args.rows,
                launch.sm_limit > 0 ? kLimitedCtas : kAllCtas, static_cast<unsigned>(threads), 0, launch,
                "rms_norm");
    return true;
}

}  // namespace fp8flow::hopper
