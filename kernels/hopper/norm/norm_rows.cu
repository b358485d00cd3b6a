// SPDX-License-Identifier: MIT
// RMSNorm forward on rows of BF16 or FP16 of at least 1024 columns that held_rows.cu does not take: FP8
// values alone of 2049 to 4096 columns, five to eight segments, outputs of form `any` above 2048 columns,
// unaligned rows. Rows are loaded to shared memory by TMA, several ahead, so that memory is busy while a row
// is summed and written. Contract: kernels/ops/norm.h. Backward: front_backward.cu, rows_backward.cu. Other
// rows: norm.cu.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/norm/forward.h"

namespace fp8flow::hopper::norm {

namespace {

constexpr int kSlots = 4;

// CTAs per SM that registers allow. Narrow rows need many, since a row takes about a microsecond from its
// arrival to its last store.
constexpr int ctas_of(int units, NormForm form) { return is_any(form) || units > 2 ? 3 : 4; }

// RMSNorm forward, x [T, H] -> y, FP8 values and scales, rstd, amax, as NormForward asks.
// Lower bound at T=8192, H=4096: x and FP8 values 101 MB, 26 us.
// A CTA takes every gridDim-th row; kSlots rows are in flight or waiting in shared memory (172 KB per SM).
// Gamma stays in registers, and so does a row once it has landed: a thread owns kUnits units and sums its
// strand. A row of several segments belongs to a cluster, a segment per CTA, which exchange their sums after
// the barrier (SegmentSums).
// Barriers: full[slot], an mbarrier (TMA bytes). One __syncthreads per row: all threads have read the slot
// and written their sums; thread 0 then issues the next load of the slot while all threads write the row. The
// warp sums alternate between two places, so that those of the next row are not written before this row's are
// read.
// FP8 blocks: an SM has 36 thread instructions per column at 4.1 TB/s. All units of a thread become BF16
// pairs first, which y needs anyway; their maxima are taken as pairs (3/4 of an instruction per column), the
// four shuffles of all units share words, and FP8 values are made from the pairs.
// Deterministic: one writer per byte, sums in the order of the contract; amax is an integer maximum.
// Measured: 27.7 us with one scale, 31.1 with block scales.
template <int kUnits, NormForm kForm, DType kType>
__global__ __launch_bounds__(kNormThreads,
                             ctas_of(kUnits, kForm)) void norm_rows_kernel(const NormForward args) {
    constexpr bool kFetched = kForm == NormForm::odd;
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ Mbarrier full[kSlots];
    __shared__ float warp_sums[2][kNormWarps];
    __shared__ SegmentSums segment_sums;
    __shared__ uint32_t largest_of_cta;
    const int thread = static_cast<int>(threadIdx.x);
    const RowPart part = row_part<kUnits>(args.x.cols, args.segments, args.segment_cols);
    const int units = part.units, slot_size = slot_bytes(args.segment_cols);
    const int64_t first_row = blockIdx.x / part.segments, step = gridDim.x / part.segments;
    const auto issue = [&](int64_t row, int slot) {
        mbarrier_arrive_expect_tx(&full[slot], static_cast<uint32_t>(2 * kUnit * units));
        issue_row(args.x, row, part, slots + slot * slot_size, &full[slot]);
    };
    pdl_launch_dependents();
    if (thread == 0) {
        for (int slot = 0; slot < kSlots; ++slot) mbarrier_init(&full[slot], 1);
        prepare(segment_sums);
        largest_of_cta = 0;
        fence_mbarrier_init();
        for (int slot = 0; slot < kSlots; ++slot)
            if (!kFetched && first_row + slot * step < args.rows)
                prefetch_row(args.x, first_row + slot * step, part);
    }
    pdl_wait();
    if (thread == 0) {
        for (int slot = 0; slot < kSlots; ++slot)
            if (!kFetched && first_row + slot * step < args.rows) issue(first_row + slot * step, slot);
    }
    float g[kUnits][kUnit] = {};
    load_gamma_units<kFetched ? Rows::fetched : Rows::copied>(args.gamma, args.gamma_offset, part, thread, g);
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    uint32_t amax = 0;
    const auto gamma = [&](int, int j, float(&out)[kUnit]) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) out[i] = g[j][i];
    };
    // the mbarriers are initialised
    if (part.segments > 1)
        cluster_sync();
    else
        __syncthreads();

    int slot = 0, n = 0;
    uint32_t parity = 0;
    for (int64_t row = first_row; row < args.rows; row += step, ++n) {
        if constexpr (kFetched) {
            fetch_row(args.x, row, part, slots + slot * slot_size, thread);
            __syncthreads();
        } else {
            mbarrier_wait(&full[slot], parity);
        }
        uint4 raw[kUnits];
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kNormThreads;
            raw[j] = unit < units ? unit_of(slots + slot * slot_size, unit) : uint4{};
        }
        const float part_sum = sum_of_neighbours<kType, kNormWarps>(raw, thread % 32);
        if (thread % 32 == 0) warp_sums[n % 2][thread / 32] = part_sum;
        __syncthreads();
        if (!kFetched && thread == 0 && row + kSlots * step < args.rows) issue(row + kSlots * step, slot);
        float sum = row_sum(warp_sums[n % 2]);
        if (part.segments > 1) {
            send_sum(segment_sums, n, part, sum, thread);
            sum = await_sums(segment_sums, n, part);
        }
        const float rstd = rstd_of(sum, args);
        if (thread == 0 && part.rank == 0) args.rstd[row] = rstd;
        write_row<kForm, kType, kUnits, kNormThreads>(args, row, part, thread, rstd, multiplier, gamma, raw,
                                                      amax);
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    if constexpr (kForm == NormForm::tensor || is_any(kForm)) merge_amax(args, amax, &largest_of_cta);
    if (part.segments > 1) cluster_sync();  // all sums have arrived
}

using ForwardKernel = void (*)(NormForward);
template <int kUnits, DType kType> ForwardKernel kernel_of(NormForm form) {
    switch (form) {
        case NormForm::blocks: return norm_rows_kernel<kUnits, NormForm::blocks, kType>;
        case NormForm::tensor: return norm_rows_kernel<kUnits, NormForm::tensor, kType>;
        default: return norm_rows_kernel<kUnits, NormForm::any, kType>;
    }
}
template <DType kType> ForwardKernel copied_kernel(const NormForward& args) {
    const NormForm form = form_of(args);
    if (!is_wide(args.x, kType) || !has_whole_units(args, form)) return nullptr;
    if (form == NormForm::values)  // one segment runs in held_rows.cu
        return norm_rows_kernel<kMostUnits, NormForm::values, kType>;
    return units_a_thread(args.segment_cols) <= 2 ? kernel_of<2, kType>(form)
                                                  : kernel_of<kMostUnits, kType>(form);
}

}  // namespace

bool launch_norm_rows(const NormForward& args, const Launch& launch) {
    ForwardKernel kernel = of_half(args.x.dtype, [&]<DType kType>() { return copied_kernel<kType>(args); });
    int ctas = ctas_of(units_a_thread(args.segment_cols), form_of(args));
    if (kernel == nullptr) {
        if (!is_fetchable(args.x)) return false;
        kernel = of_half(args.x.dtype, [&]<DType kType>() -> ForwardKernel {
            return norm_rows_kernel<kMostUnits, NormForm::odd, kType>;
        });
        ctas = ctas_of(kMostUnits, NormForm::odd);
    }
    launch_rows(kernel, args, args.rows, ctas, kNormThreads, kSlots * slot_bytes(args.segment_cols), launch,
                "rms_norm");
    return true;
}

}  // namespace fp8flow::hopper::norm
