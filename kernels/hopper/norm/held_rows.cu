// SPDX-License-Identifier: MIT
// RMSNorm forward on aligned rows of BF16 or FP16 that are loaded straight to registers: up to 2048 columns
// by one warp, wider ones by a CTA. Contract: kernels/ops/norm.h. Other rows: norm_rows.cu, norm.cu.
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/norm/forward.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::norm {

namespace {

constexpr int kWarpRowCols = 2048;    // at most a unit per strand
constexpr int kWarpRowThreads = 128;  // four rows per CTA
constexpr int kTeam = 4;              // warps of a segment of up to 8192 columns, eight units per thread
constexpr int kTeamUnits = static_cast<int>(op::kNormSegment) / (kUnit * kWarpSize * kTeam);
constexpr int kMostTeams = 4;  // segments of a row

// CTAs per SM that registers have to allow.
constexpr int ctas_of(int units, int team) {
    if (team == 1) return units > 4 ? 4 : 8;
    if (team == kTeam) return 2;  // with kMostTeams teams
    return units > 2 ? 4 : 6;
}

// The sum over a row; segment s has eight sums from 8 * s on. All lanes of a warp call it.
__device__ __forceinline__ float sum_of_teams(const float* sums, int segments) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    if (segments == 1) return row_sum(sums);
    const float sum = combine_lanes(sums[lane]);
    float total = __shfl_sync(kFullMask, sum, 0);
    for (int s = 1; s < segments; ++s) total += __shfl_sync(kFullMask, sum, s * kNormWarps);
    return total;
}

// RMSNorm forward, x [T, H] -> y, FP8 values and scales, rstd, amax, as NormForward asks.
// Lower bound at T=16384, H=4096: x and y 268 MB, 68 us; each byte once.
// Three shapes: a warp per row of up to 2048 columns; a CTA of eight warps per row of one segment with y
// alone; four warps per segment otherwise, up to four segments in a CTA, so that what a thread does once per
// row is shared by 64 values. The hardware schedules a row as soon as an SM has space. Gamma is read from L1,
// where the rows of an SM share it.
// Barriers: none for a warp per row. Otherwise one __syncthreads per row, after which the strand sums are
// combined; they alternate between two places where a CTA takes several rows (a limited launch), so that
// those of the next row are not written before this row's are read.
// PDL: launching is a tenth of the time of a kernel, so it overlaps the end of the previous one; a CTA that
// starts early prefetches its first row into L2 before pdl_wait().
// Deterministic: one writer per byte, sums in the order of the contract; amax is an integer maximum.
// Measured: 68 us.
template <int kUnits, NormForm kForm, DType kType, int kTeamWarps, int kThreads>
__global__ __launch_bounds__(kThreads,
                             ctas_of(kUnits, kTeamWarps)) void held_rows_kernel(const NormForward args) {
    constexpr int kStride = kTeamWarps * kWarpSize, kRowsOfCta = kTeamWarps == 1 ? kThreads / kWarpSize : 1;
    __shared__ float warp_sums[2][kMostTeams * kNormWarps];
    __shared__ uint32_t largest_of_cta;
    pdl_launch_dependents();
    const int thread = static_cast<int>(threadIdx.x) % kStride,
              team = static_cast<int>(threadIdx.x) / kStride, lane = thread % kWarpSize,
              first = kTeamWarps == kTeam ? team * args.segment_cols : 0;
    const RowPart part = {args.segments, kTeamWarps == kTeam ? team : 0, first,
                          min(args.segment_cols, args.x.cols - first) / kUnit};
    const auto gamma = [&](int unit, int, float(&g)[kUnit]) {
        load_wide_gamma(args.gamma, args.gamma_offset, unit, g);
    };
    const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRowsOfCta + (kTeamWarps == 1 ? team : 0);
    if (thread == 0 && first_row < args.rows) prefetch_row(args.x, first_row, part);
    pdl_wait();
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    int32_t seen = 0;
    if (threadIdx.x == 0) {
        largest_of_cta = 0;
        if (args.amax != nullptr) seen = *static_cast<const volatile int32_t*>(args.amax);
    }
    uint32_t largest = 0;
    int n = 0;
    for (int64_t row = first_row; row < args.rows; row += static_cast<int64_t>(gridDim.x) * kRowsOfCta, ++n) {
        uint4 raw[kUnits];
        const uint4* x = unit_of(args.x, row, first / kUnit + thread);
#pragma unroll
        for (int j = 0; j < kUnits; ++j)
            raw[j] = thread + j * kStride < part.units ? x[j * kStride] : uint4{};
        float sum = sum_of_neighbours<kType, kTeamWarps>(raw, lane);
        if constexpr (kTeamWarps == 1) {
#pragma unroll
            for (const int step : {16, 8, 4}) sum += __shfl_xor_sync(kFullMask, sum, step);
        } else {
            float* sums = warp_sums[n % 2];
            if (lane % (kTeamWarps * kWarpSize / kNormWarps) == 0)
                sums[part.rank * kNormWarps + sum_of_lane<kTeamWarps>(thread / kWarpSize, lane)] = sum;
            __syncthreads();
            sum = sum_of_teams(sums, part.segments);
        }
        const float rstd = rstd_of(sum, args);
        if (thread == 0 && part.rank == 0) args.rstd[row] = rstd;
        write_row<kForm, kType, kUnits, kStride>(args, row, part, thread, rstd, multiplier, gamma, raw,
                                                 largest);
    }
    if constexpr (kForm == NormForm::tensor || kForm == NormForm::any)
        merge_amax_above(args, largest, seen, &largest_of_cta);
}

using HeldKernel = void (*)(NormForward);
template <int kUnits, DType kType> HeldKernel warp_kernel(NormForm form) {
    switch (form) {
        case NormForm::values: return held_rows_kernel<kUnits, NormForm::values, kType, 1, kWarpRowThreads>;
        case NormForm::blocks: return held_rows_kernel<kUnits, NormForm::blocks, kType, 1, kWarpRowThreads>;
        case NormForm::tensor: return held_rows_kernel<kUnits, NormForm::tensor, kType, 1, kWarpRowThreads>;
        default: return held_rows_kernel<kUnits, NormForm::any, kType, 1, kWarpRowThreads>;
    }
}
template <int kUnits, DType kType> HeldKernel values_kernel() {
    return held_rows_kernel<kUnits, NormForm::values, kType, kNormWarps, kNormThreads>;
}
template <DType kType> HeldKernel team_kernel(NormForm form) {
    constexpr int kThreads = kMostTeams * kTeam * kWarpSize;
    switch (form) {
        case NormForm::values: return held_rows_kernel<kTeamUnits, NormForm::values, kType, kTeam, kThreads>;
        case NormForm::blocks: return held_rows_kernel<kTeamUnits, NormForm::blocks, kType, kTeam, kThreads>;
        case NormForm::tensor: return held_rows_kernel<kTeamUnits, NormForm::tensor, kType, kTeam, kThreads>;
        default: return nullptr;
    }
}

struct HeldLaunch {
    HeldKernel kernel = nullptr;  // nullptr: these rows need another kernel
    int threads = 0, rows = 1;    // per CTA
};
template <DType kType> HeldLaunch held_launch(const NormForward& args, NormForm form) {
    const int cols = args.x.cols;
    if (cols <= kWarpRowCols)
        return {cols <= kWarpRowCols / 2 ? warp_kernel<4, kType>(form) : warp_kernel<8, kType>(form),
                kWarpRowThreads, kWarpRowThreads / kWarpSize};
    if (form == NormForm::values && args.segments == 1)
        return {units_a_thread(cols) <= 2 ? values_kernel<2, kType>() : values_kernel<kMostUnits, kType>(),
                kNormThreads};
    constexpr int kNarrow = 4096;  // FP8 alone: up to here the prefetched rows of norm_rows.cu are faster
    if (args.segments > kMostTeams || (cols <= kNarrow && args.y.data == nullptr)) return {};
    return {team_kernel<kType>(form), args.segments * kTeam * kWarpSize};
}

}  // namespace

bool launch_norm_held_rows(const NormForward& args, const Launch& launch) {
    const NormForm form = form_of(args);
    if (!is_half(args.x.dtype) || !has_whole_units(args, form)) return false;
    const HeldLaunch held =
        of_half(args.x.dtype, [&]<DType kType>() { return held_launch<kType>(args, form); });
    if (held.kernel == nullptr) return false;
    constexpr int kLimitedThreads = 1024, kAnyNumber = 1 << 20;  // per SM
    const int ctas = launch.sm_limit > 0 ? kLimitedThreads / held.threads : kAnyNumber;
    launch_pdl(held.kernel, grid_for(ceil_div(args.rows, held.rows), launch, ctas),
               static_cast<unsigned>(held.threads), launch, "rms_norm", args);
    return true;
}

}  // namespace fp8flow::hopper::norm
