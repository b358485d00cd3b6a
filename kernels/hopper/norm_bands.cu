// RMSNorm forward with FP8 rows and their transposed copy from one kernel. Contract: kernels/ops/norm.h. The rows alone: norm_rows.cu.
#include "kernels/hopper/norm_bands.h"

#include "kernels/hopper/device/progress.h"
#include "kernels/hopper/device/wgmma.h"

namespace fp8flow::hopper {

namespace {

constexpr int kBandRows = static_cast<int>(kBlock);
constexpr int kControlThreads = 32;
constexpr int kBandThreads = kNormThreads + kTurnThreads + kControlThreads;
constexpr int kCtas = 2, kMostSlots = 8;
constexpr int kSlotBytes = 96 * 1024;             // of a CTA, beside a turned tile and what is small
constexpr int kRowBarrier = 1, kTurnBarrier = 2;  // named
constexpr uint32_t kItem = 1u << 16;              // a counter: rows below, finished tiles above

// One thread: brings rows in, takes codes out, and counts a row for its band once its codes are in memory.
__device__ __forceinline__ void move_rows(const NormBands& args, const RowPart& part, int64_t first_row,
                                          int64_t step, uint8_t* slot_rows, Barrier* full, Barrier* stored) {
    const NormForward& norm = args;
    const int slot_size = slot_bytes(norm.segment_cols);
    const auto start = [&](int64_t row, int slot) {
        barrier_arrive_expect_bytes(&full[slot], static_cast<uint32_t>(2 * kUnit * part.units));
        start_row(norm.x, row, part, slot_rows + slot * slot_size, &full[slot]);
    };
    for (int slot = 0; slot < args.slots && first_row + slot * step < norm.rows; ++slot)
        start(first_row + slot * step, slot);
    int slot = 0;
    uint32_t parity = 0;
    int64_t before = -1;
    const auto count = [&](int64_t row) { add_release(args.progress + row / kBandRows, 1); };
    for (int64_t row = first_row; row < norm.rows; row += step) {
        barrier_wait(&stored[slot], parity);
        bulk_store(static_cast<uint8_t*>(norm.codes.data) + row * norm.x.cols + part.first,
                   slot_rows + slot * slot_size, static_cast<uint32_t>(kUnit * part.units));
        copies_commit();
        copies_wait_read<0>();
        if (row + args.slots * step < norm.rows) start(row + args.slots * step, slot);
        copies_wait_but<1>();
        if (before >= 0) count(before);
        before = row;
        if (++slot == args.slots) slot = 0, parity ^= 1;
    }
    copies_wait();
    if (before >= 0) count(before);
}

// Turns tiles of bands whose rows are all there, in ascending order: bands are finished in this order as well, so that nobody waits for a row that
// waits for him.
__device__ __forceinline__ void turn_bands(const NormBands& args, int thread, TurnedTile& turned) {
    const NormForward& norm = args;
    const int width = norm.x.cols, tile_cols = (width + kBandRows - 1) / kBandRows;
    const int64_t bands = (args.transposed.cols + kBandRows - 1) / kBandRows;
    const bool aligned = is_piece_aligned(args.transposed, 0);
    for (int64_t item = blockIdx.x; item < bands * tile_cols; item += gridDim.x) {
        const int64_t band = item / tile_cols, first = band * kBandRows;
        const int col_tile = static_cast<int>(item - band * tile_cols);
        const int count = static_cast<int>(max(int64_t{0}, min(int64_t{kBandRows}, norm.rows - first)));
        uint32_t* progress = args.progress + band;
        if (thread == 0)
            while ((load_acquire(progress) & (kItem - 1)) < static_cast<uint32_t>(count * norm.segments))
                __nanosleep(100);
        meet(kTurnBarrier, kTurnThreads);
        HeldTile held;
        fetch_codes(args.row_codes, first, col_tile, count, thread, held);
        if (args.tile_scales != nullptr) {
            fetch_scales(args.row_codes, first, col_tile, count, thread, held);
            const float target = shift_tile<DType::e4m3>(held, count, thread);
            if (thread == 0) args.tile_scales[band * args.scale_stride + col_tile] = target;
        }
        turn_tile(held, thread, turned);
        meet(kTurnBarrier, kTurnThreads);
        const int rows = static_cast<int>(min(int64_t{kBandRows}, args.transposed.cols - first));
        store_columns(args.transposed, width, col_tile, first, rows, aligned, thread, turned);
        if (thread == 0 && atomicAdd(progress, kItem) / kItem == static_cast<uint32_t>(tile_cols - 1))
            *progress = 0;
    }
}

// Bytes: 4 a value, each once; 8192 x 8192: 268 MB, 68 us. Three kinds of warps in a CTA. Eight take rows as norm_rows_kernel does, each row from a slot of
// shared memory, and put its codes in the place of its values. One thread fills slots, sends codes away by the copy engine, and counts a
// row for its band of 128 rows once its codes are in memory. Four warps turn tiles of bands that are complete, whose codes are still in L2, so that
// device memory sees every byte once. All CTAs find room at once and take rows and tiles in ascending order. Who turns the last tile of a band
// puts its counter back to 0 for the next call. One writer a byte: deterministic.
template <int kUnits, NormForm kForm, DType kType>
__global__ __launch_bounds__(kBandThreads, kCtas) void norm_bands_kernel(const NormBands args) {
    extern __shared__ __align__(128) uint8_t slot_rows[];
    __shared__ TurnedTile turned;
    __shared__ Barrier full[kMostSlots], stored[kMostSlots];
    __shared__ float warp_sums[2][kNormWarps];
    __shared__ SegmentSums segment_sums;
    __shared__ uint32_t largest_of_cta;
    const NormForward& norm = args;
    const int thread = static_cast<int>(threadIdx.x);
    const RowPart part = row_part<kUnits>(norm.x.cols, norm.segments, norm.segment_cols);
    const int64_t first_row = blockIdx.x / part.segments, step = gridDim.x / part.segments;
    if (thread == 0) {
        for (int slot = 0; slot < args.slots; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&stored[slot], kNormWarps);
        }
        prepare(segment_sums);
        largest_of_cta = 0;
        fence_barrier_init();
    }
    if (part.segments > 1)
        cluster_meet();
    else
        __syncthreads();
    if (thread >= kNormThreads + kTurnThreads) {
        if (thread == kNormThreads + kTurnThreads)
            move_rows(args, part, first_row, step, slot_rows, full, stored);
        return;
    }
    if (thread >= kNormThreads) return turn_bands(args, thread - kNormThreads, turned);
    const int slot_size = slot_bytes(norm.segment_cols);
    float kept[kUnits][kUnit];
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
        if (thread + j * kNormThreads < part.units)
            load_wide_gamma(norm.gamma, norm.gamma_offset, part.first / kUnit + thread + j * kNormThreads,
                            kept[j]);
    const auto gamma = [&](int, int j, float(&g)[kUnit]) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) g[i] = kept[j][i];
    };
    const float multiplier = norm.tensor_scale != nullptr ? div_float(1.0f, *norm.tensor_scale) : 0.0f;
    uint32_t largest = 0, parity = 0;
    int slot = 0, n = 0;
    for (int64_t row = first_row; row < norm.rows; row += step, ++n) {
        uint8_t* here = slot_rows + slot * slot_size;
        barrier_wait(&full[slot], parity);
        uint4 raw[kUnits];
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kNormThreads;
            raw[j] = unit < part.units ? unit_of(here, unit) : uint4{};
        }
        put_strand(strand_of<kType>(raw), warp_sums[n % 2]);
        meet(kRowBarrier, kNormThreads);
        float sum = row_sum(warp_sums[n % 2]);
        if (part.segments > 1) sum = sum_of_segments(segment_sums, n, part, sum);
        const float rstd = rstd_of(sum, norm);
        if (thread == 0 && part.rank == 0) norm.rstd[row] = rstd;
        write_row<kForm, kType, kUnits, kNormThreads>(norm, row, part, thread, rstd, multiplier, gamma,
                                                      reinterpret_cast<uint2*>(here), raw, largest);
        fence_shared_for_engines();
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(&stored[slot]);
        if (++slot == args.slots) slot = 0, parity ^= 1;
    }
    if (kForm == NormForm::tensor && norm.amax != nullptr) {
        largest = __reduce_max_sync(0xFFFFFFFFu, largest);
        if (thread % 32 == 0) atomicMax(&largest_of_cta, largest);
        meet(kRowBarrier, kNormThreads);
        if (thread == 0) atomicMax(norm.amax, static_cast<int32_t>(largest_of_cta));
    }
    if (part.segments > 1)
        cluster_meet();  // no sum is on its way any more; the other warps have left or will
}

using BandKernel = void (*)(NormBands);
template <int kUnits, DType kType> BandKernel kernel_of(NormForm form) {
    return form == NormForm::blocks ? norm_bands_kernel<kUnits, NormForm::blocks, kType>
                                    : norm_bands_kernel<kUnits, NormForm::tensor, kType>;
}
template <DType kType> BandKernel kernel_of(int units, NormForm form) {
    return units == 1   ? kernel_of<1, kType>(form)
           : units == 2 ? kernel_of<2, kType>(form)
                        : kernel_of<kMostUnits, kType>(form);
}

}  // namespace

bool launch_norm_bands(const NormForward& norm, const Fp8Tensor& rows, const Fp8Tensor& transposed,
                       uint32_t* progress, int64_t most_bands, const Launch& launch) {
    const NormForm form = form_of(norm);
    const bool tiles = transposed.layout == ScaleLayout::tile128;
    if (form != (tiles ? NormForm::blocks : NormForm::tensor) ||
        !(is_wide(norm.x, DType::bf16) || is_wide(norm.x, DType::f16)))
        return false;
    const CodeRows codes = code_rows(rows);
    const int64_t bands = ceil_div(transposed.codes.cols(), kBlock);
    if (!codes.wide || bands > most_bands || norm.rows == 0) return false;
    const int units = units_a_thread(norm.segment_cols);
    const BandKernel kernel =
        norm.x.dtype == DType::f16 ? kernel_of<DType::f16>(units, form) : kernel_of<DType::bf16>(units, form);
    NormBands job{norm};
    job.row_codes = codes;
    job.transposed = row_view(transposed.codes);
    job.tile_scales = tiles ? transposed.scales.as<float>() : nullptr;
    job.scale_stride = tiles ? static_cast<int>(transposed.scales.cols()) : 0;
    job.progress = progress;
    job.slots = std::min(kMostSlots, kSlotBytes / slot_bytes(norm.segment_cols));
    launch_rows(kernel, job, norm.rows, kCtas, kBandThreads, job.slots * slot_bytes(norm.segment_cols),
                launch, "rms_norm_quantize");
    return true;
}

}  // namespace fp8flow::hopper
