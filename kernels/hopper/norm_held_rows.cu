// RMSNorm forward on rows of BF16 or FP16 that go straight to registers: up to 2048 columns to a warp's, up to 8192 that become values of the same
// type to a CTA's. Contract: kernels/ops/norm.h. Other rows: norm_rows.cu, norm.cu.
#include "kernels/hopper/norm_forward.h"

namespace fp8flow::hopper {

namespace {

constexpr int kWarp = 32, kWarpRowCols = 2048;  // a unit a strand
constexpr int kWarpRowThreads = 128;            // four rows

// CTAs of an SM that registers have to leave room for.
constexpr int ctas_of(int units, int row_threads) {
    if (row_threads == kWarp) return units > 4 ? 4 : 8;
    return units > 2 ? 4 : 6;
}

// Bytes at T=16384, H=4096: x and y 268 MB (68 us), each once. Multiprocessors take a row as soon as they have room for it: with rows dealt out to a
// persistent grid beforehand the slowest was 7 % behind (77 us instead of 68). gamma comes from L1, where all rows of a multiprocessor
// share it; nothing else is read twice, so loads and stores are the first to leave L2. A row's CTA puts the sums of its strands together behind
// its only barrier; they alternate between two places where a CTA takes several rows (a launch that may not use all SMs), so that the next
// row's are not written before this row's are read. Up to 2048 columns a warp has the row alone and meets nobody: 4096 x 1024 takes 7.5 us,
// with a CTA a row 10. FP8 codes from wider rows are bound by instructions, of which norm_rows_kernel needs fewer. One writer a byte, the
// contract's order: deterministic; amax is an integer maximum.
template <int kUnits, NormForm kForm, DType kType, int kRowThreadsEach, int kThreads>
__global__ __launch_bounds__(kThreads,
                             ctas_of(kUnits, kRowThreadsEach)) void held_rows_kernel(const NormForward args) {
    constexpr int kRowsOfCta = kThreads / kRowThreadsEach;
    __shared__ float warp_sums[2][kNormWarps];
    __shared__ uint32_t largest_of_cta;
    const int thread = static_cast<int>(threadIdx.x) % kRowThreadsEach;
    const RowPart part = {1, 0, 0, args.x.cols / kUnit};
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    const auto gamma = [&](int unit, int, float(&g)[kUnit]) {
        load_wide_gamma(args.gamma, args.gamma_offset, unit, g);
    };
    int32_t seen = 0;
    if (threadIdx.x == 0) {
        largest_of_cta = 0;
        if (args.amax != nullptr) seen = *static_cast<const volatile int32_t*>(args.amax);
    }
    uint32_t largest = 0;
    int n = 0;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfCta + threadIdx.x / kRowThreadsEach;
         row < args.rows; row += static_cast<int64_t>(gridDim.x) * kRowsOfCta, ++n) {
        uint4 raw[kUnits];
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kRowThreadsEach;
            raw[j] = unit < part.units ? __ldcs(unit_of(args.x, row, unit)) : uint4{};
        }
        float sum;
        if constexpr (kRowThreadsEach == kWarp) {
            sum = sum_over_warp<kType>(raw, thread);
        } else {
            put_strand(strand_of<kType>(raw), warp_sums[n % 2]);
            __syncthreads();
            sum = row_sum(warp_sums[n % 2]);
        }
        const float rstd = rstd_of(sum, args);
        if (thread == 0) args.rstd[row] = rstd;
        uint2* codes = reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.codes.data) + row * args.x.cols);
        write_row<kForm, kType, kUnits, kRowThreadsEach>(args, row, part, thread, rstd, multiplier, gamma,
                                                         codes, raw, largest);
    }
    if constexpr (kForm == NormForm::tensor || kForm == NormForm::any)
        merge_amax_above(args, largest, seen, &largest_of_cta);
}

using HeldKernel = void (*)(NormForward);
template <int kUnits, DType kType> HeldKernel warp_kernel(NormForm form) {
    switch (form) {
        case NormForm::values:
            return held_rows_kernel<kUnits, NormForm::values, kType, kWarp, kWarpRowThreads>;
        case NormForm::blocks:
            return held_rows_kernel<kUnits, NormForm::blocks, kType, kWarp, kWarpRowThreads>;
        case NormForm::tensor:
            return held_rows_kernel<kUnits, NormForm::tensor, kType, kWarp, kWarpRowThreads>;
        default: return held_rows_kernel<kUnits, NormForm::any, kType, kWarp, kWarpRowThreads>;
    }
}
template <int kUnits, DType kType> HeldKernel cta_kernel() {
    return held_rows_kernel<kUnits, NormForm::values, kType, kNormThreads, kNormThreads>;
}
template <DType kType> HeldKernel kernel_of(const NormForward& args, NormForm form) {
    const int cols = args.x.cols;
    if (cols <= kWarpRowCols)
        return cols <= kWarpRowCols / 2 ? warp_kernel<4, kType>(form) : warp_kernel<8, kType>(form);
    return units_a_thread(cols) <= 2 ? cta_kernel<2, kType>() : cta_kernel<kMostUnits, kType>();
}

}  // namespace

bool launch_norm_held_rows(const NormForward& args, const Launch& launch) {
    const NormForm form = form_of(args);
    const bool f16 = args.x.dtype == DType::f16, by_warps = args.x.cols <= kWarpRowCols;
    if (!(f16 || args.x.dtype == DType::bf16) || !has_whole_units(args, form)) return false;
    if (!by_warps && (form != NormForm::values || args.segments > 1)) return false;
    const HeldKernel kernel = f16 ? kernel_of<DType::f16>(args, form) : kernel_of<DType::bf16>(args, form);
    const int threads = by_warps ? kWarpRowThreads : kNormThreads;
    const int64_t ctas = ceil_div(args.rows, by_warps ? kWarpRowThreads / kWarp : 1);
    constexpr int kLimitedCtas = 8, kAnyNumber = 1 << 20;  // of an SM
    kernel<<<grid_for(ctas, launch, launch.sm_limit > 0 ? kLimitedCtas : kAnyNumber), threads, 0,
             stream_of(launch)>>>(args);
    check_launch("rms_norm");
    return true;
}

}  // namespace fp8flow::hopper
