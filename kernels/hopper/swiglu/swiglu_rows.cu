// SPDX-License-Identifier: MIT
// SwiGLU on many wide BF16 rows: gate, up and da are loaded to shared memory by TMA, ahead of the work, and
// sigmoids come from a table in shared memory. Contract: kernels/ops/swiglu.h. Few rows, and all others:
// swiglu.cu.
#include "kernels/hopper/swiglu/swiglu_rows.h"

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::swiglu {

namespace {

// A lane takes two units at a time, 64 columns apart, and eight lanes a 1x128 block: the 16-byte accesses of
// eight lanes are a whole line, without bank conflicts in shared memory.
constexpr int kUnits = 2, kBlockCols = static_cast<int>(kBlock), kBlockLanes = kBlockCols / kUnit / kUnits,
              kUnitStep = kBlockCols / kUnits;
constexpr int kStep = kWarpSize * kUnits * kUnit;  // columns of a step of a warp
constexpr int kStepBlocks = kStep / kBlockCols;
constexpr int kSlots = 2;              // per warp, a step of all inputs each: in flight or in use
constexpr int kStepBytes = 2 * kStep;  // of one input
constexpr int kForwardWarps = 24, kForwardInputs = 2, kBackwardWarps = 16, kBackwardInputs = 3;
constexpr int ring_bytes(int warps, int inputs) { return warps * kSlots * inputs * kStepBytes; }

template <int kWarps, class Unit> struct Shared {
    SigmoidTable<Unit> table;
    Mbarrier full[kWarps][kSlots];
};

// An item of the queue is a segment of a row: `cols` columns; a row has 1 << shift segments.
struct RowSegments {
    int shift, cols;
};

// The prologue, while the previous kernel ends: prefetches the first step of every warp into L2 (not where h
// has a row base, which that kernel may still write), and fills the table. `rows`: row capacity.
template <int kInputs, int kWarps, class Unit>
__device__ __forceinline__ void prologue(Shared<kWarps, Unit>& shared, const Unit& unit, const RowView& h,
                                         const RowView& da, int width, const RowSegments& segments,
                                         int64_t rows) {
    pdl_launch_dependents();
    const int warp = static_cast<int>(threadIdx.y), lane = static_cast<int>(threadIdx.x);
    const int item = static_cast<int>(blockIdx.x) * kWarps + warp, row = item >> segments.shift,
              col = (item & ((1 << segments.shift) - 1)) * segments.cols,
              cols = min(min(width, col + segments.cols) - col, kStep);
    if (h.row_base == nullptr && row < rows && cols > 0 && lane < kInputs) {
        const int64_t at = int64_t{row} * width + col;
        const uint16_t* const from =
            lane == kForwardInputs ? static_cast<const uint16_t*>(da.data) + at
                                   : static_cast<const uint16_t*>(h.data) + at + int64_t{row + lane} * width;
        prefetch_to_l2(from, static_cast<uint32_t>(sizeof(uint16_t)) * static_cast<uint32_t>(cols));
    }
    shared.table.fill(unit, warp * kWarpSize + lane, kWarps * kWarpSize);
    pdl_wait();
}

// Assigns rows, pads too, in ascending order: row r belongs to warp r % kWarps of the CTA that takes it.
// The first two rounds go by the index of the CTA, all others by a ticket counter in global memory, one per
// warp index (one counter for all warps was too slow: 1.8 ns per row). A ticket is requested when the
// previous one is taken, and has arrived when it is needed. Outputs do not depend on which warp works on a
// row.
class RowQueue {
public:
    __device__ explicit RowQueue(RowTicket* tickets) : ticket_(tickets + threadIdx.y) {}
    __device__ int take() {
        const int ctas = static_cast<int>(gridDim.x);
        const int round = round_ < 2 ? round_ * ctas + static_cast<int>(blockIdx.x)
                                     : 2 * ctas + __shfl_sync(kFullMask, taken_, 0);
        if (round_ > 0 && threadIdx.x == 0) taken_ = static_cast<int>(atomicAdd(&ticket_->taken, 1u));
        ++round_;
        return round * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
    }
    // The last warp of a ticket resets it for the next launch.
    __device__ void finish() const {
        if (threadIdx.x != 0) return;
        __threadfence();
        if (atomicAdd(&ticket_->finished, 1u) + 1 != gridDim.x) return;
        ticket_->taken = ticket_->finished = 0;
    }

private:
    RowTicket* ticket_;
    int round_ = 0, taken_ = 0;
};

// A lane's part of a step: the block that its eight lanes work on, from `col` on; row < 0: none. The first
// `blocks` blocks of the step are used; 0: the warp has no more rows.
struct Step {
    int row, col;
    float prob;
    int blocks;
};

// The input pipeline of a warp, through its slots of shared memory. A step takes the next blocks of the rows
// of the warp, of two or more rows where a row ends in it, so that short rows leave no lane idle. Pads are
// cleared by `clear(row, first column, end)`.
template <int kWarps, int kInputs, class Clear> class InputPipeline {
public:
    struct Source {
        RowView h, da, prob;  // da and prob may be absent
        int width;
        RowSegments segments;
        DeviceGroups groups;
        RowTicket* tickets;
    };
    // All threads of the CTA call it.
    __device__ InputPipeline(const Source& source, uint8_t* ring, Mbarrier (&full)[kWarps][kSlots],
                             Clear clear)
        : h_(static_cast<const uint16_t*>(source.h.data) + source.h.base() * 2 * source.width),
          da_(static_cast<const uint16_t*>(source.da.data) + source.da.base() * source.width),
          prob_(source.prob ? static_cast<const float*>(source.prob.data) + source.prob.base() : nullptr),
          width_(source.width),
          segments_(source.segments),
          total_(static_cast<int>(source.groups.total())),
          slots_(ring + threadIdx.y * ring_bytes(1, kInputs)),
          full_(full[threadIdx.y]),
          clear_(clear),
          window_(source.groups),
          queue_(source.tickets) {
        if (threadIdx.x == 0) {
            for (int slot = 0; slot < kSlots; ++slot) mbarrier_init(&full_[slot], 1);
            fence_mbarrier_init();
        }
        __syncwarp();
#pragma unroll 1
        for (int slot = 0; slot < kSlots; ++slot) append(issue(slot));
#pragma unroll
        for (Step& step : steps_) step.prob = prob_of(step);
        __syncthreads();  // the table is filled
    }
    __device__ const Step& step() const { return steps_[0]; }
    // Waits for the inputs of the step. Returns the first one; the others follow kStepBytes apart.
    __device__ const uint8_t* wait_full() const {
        const int slot = static_cast<int>(count_ % kSlots);
        mbarrier_wait(&full_[slot], count_ / kSlots % 2);
        return slots_ + slot * kSlotBytes;
    }
    // The warp has read the step: issues the next loads into its slot. The probability is loaded later, since
    // it would be waited for here.
    __device__ void refill() {
        __syncwarp();
        issued_ = issue(static_cast<int>(count_ % kSlots));
    }
    __device__ void advance() {
        append(issued_);
        steps_[kSlots - 1].prob = prob_of(issued_);  // used some steps later
        ++count_;
    }
    __device__ void finish() const { queue_.finish(); }

private:
    static constexpr int kSlotBytes = kInputs * kStepBytes;

    __device__ Step issue(int slot) {
        const int place = static_cast<int>(threadIdx.x) / kBlockLanes;
        Step step = {-1, 0, 1.0f, 0};
        uint32_t bytes = 0;
#pragma unroll 1
        while (step.blocks < kStepBlocks) {
            if (col_ >= end_ && !take_row()) break;
            const int cols = min(end_ - col_, (kStepBlocks - step.blocks) * kBlockCols);
            if (threadIdx.x == 0) {
                const int64_t at = int64_t{row_} * width_ + col_;
                const uint16_t* const gate = h_ + at + int64_t{row_} * width_;
                uint8_t* const to = slots_ + slot * kSlotBytes + 2 * kBlockCols * step.blocks;
                const uint32_t length = 2 * static_cast<uint32_t>(cols);
                bulk_load(gate, &full_[slot], to, length);
                bulk_load(gate + width_, &full_[slot], to + kStepBytes, length);
                if constexpr (kInputs == kBackwardInputs)
                    bulk_load(da_ + at, &full_[slot], to + 2 * kStepBytes, length);
                bytes += kInputs * length;
            }
            if (place >= step.blocks) step.row = row_, step.col = col_ + (place - step.blocks) * kBlockCols;
            step.blocks += (cols + kBlockCols - 1) / kBlockCols;
            if (place >= step.blocks) step.row = -1;
            col_ += cols;
        }
        // bytes may arrive before they are expected: the phase also waits for this arrival
        if (threadIdx.x == 0 && step.blocks > 0) mbarrier_arrive_expect_tx(&full_[slot], bytes);
        return step;
    }
    __device__ void append(const Step& step) {
#pragma unroll
        for (int i = 0; i + 1 < kSlots; ++i) steps_[i] = steps_[i + 1];
        steps_[kSlots - 1] = step;
    }
    __device__ float prob_of(const Step& step) const {
        return step.row >= 0 && prob_ != nullptr ? prob_[step.row] : 1.0f;
    }
    // The next segment of a valid row; clears pads on the way. False after the last row.
    __device__ bool take_row() {
        while (row_ < total_) {
            const int item = queue_.take();
            row_ = item >> segments_.shift;
            col_ = (item & ((1 << segments_.shift) - 1)) * segments_.cols;
            end_ = min(width_, col_ + segments_.cols);
            if (row_ >= total_) break;
            if (!window_.is_valid(row_))
                clear_(row_, col_, end_);
            else if (col_ < end_)
                return true;
        }
        end_ = col_;
        return false;
    }

    const uint16_t *h_, *da_;
    const float* prob_;
    int width_;
    RowSegments segments_;
    int total_;
    uint8_t* slots_;
    Mbarrier* full_;
    Clear clear_;
    GroupWindow window_;
    RowQueue queue_;
    Step steps_[kSlots], issued_;
    uint32_t count_ = 0;
    int row_ = -1, col_ = 0, end_ = 0;  // what is loaded next; col_ == end_: another row
};

// Clears columns [first, end) of a row, FP8 values or plain values, and their scales if there are any.
// `first` is a multiple of a block.
__device__ __forceinline__ void clear_row(const RowView& t, int64_t row, int first, int end,
                                          const BlockScales& scales) {
    const int lane = static_cast<int>(threadIdx.x), size = scales.data != nullptr ? 1 : 2;
    uint8_t* const to = static_cast<uint8_t*>(t.data) + row * t.cols * size;
    for (int i = first * size + lane * 16; i < end * size; i += kWarpSize * 16)
        *reinterpret_cast<uint4*>(to + i) = uint4{};
    if (scales.data == nullptr) return;
    for (int col = first + lane * kBlockCols; col < end; col += kWarpSize * kBlockCols)
        *scales.at(row, col) = 0.0f;
}

// The two units of this lane of one input, the first at `in`.
__device__ __forceinline__ void load_units(const uint8_t* in, uint4 (&units)[kUnits]) {
    const uint4* const at = reinterpret_cast<const uint4*>(in);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) units[u] = at[u * (kUnitStep / kUnit)];
}

__device__ __forceinline__ float magnitude_of(const float (&v)[kUnits][kUnit]) {
    float largest = 0.0f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int i = 0; i < kUnit; ++i) largest = fmaxf(largest, fabsf(v[u][i]));  // NaN ignored
    return largest;
}
__device__ __forceinline__ float max_with(float value, int step) {
    return fmaxf(value, __shfl_xor_sync(kFullMask, value, step));
}

// Stores the units that begin before the end of the half row, `left` columns after the first.
__device__ __forceinline__ void store_values(const RowView& t, int64_t at, int left,
                                             const float (&v)[kUnits][kUnit]) {
    uint4* const out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.data) + at);
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
        if (u * kUnitStep < left)
            out[u * (kUnitStep / kUnit)] = {pack_bf16(v[u][0], v[u][1]), pack_bf16(v[u][2], v[u][3]),
                                            pack_bf16(v[u][4], v[u][5]), pack_bf16(v[u][6], v[u][7])};
}
// Stores FP8 values of whole blocks.
template <DType kFp8>
__device__ __forceinline__ void store_fp8(const RowView& t, int64_t at, const float (&v)[kUnits][kUnit],
                                          float multiplier) {
    uint2* const out = reinterpret_cast<uint2*>(static_cast<uint8_t*>(t.data) + at);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) out[u * (kUnitStep / kUnit)] = encode_unit(v[u], multiplier, kFp8);
}

// h [M, 2F] BF16 (gate, up), prob -> a [M, F] = silu(gate) * up * prob, BF16 or FP8 with 1x128 scales.
// Lower bound per row: reads 2F values, writes F values (or F FP8 values and F/128 scales): 5.03 bytes per
// column, 0.082 ms at 32768 x 2048 and 4.1 TB/s.
// One CTA per SM, 24 warps. A warp works on rows, or on segments of wide rows, in steps of four blocks, 16
// columns per lane. It has two slots of gate and up in shared memory, up to 96 KB per SM: one in use, one in
// flight. A slot is refilled as soon as its step is in registers. All SMs advance over the rows as one front
// (RowQueue); otherwise memory delivers 7 % less, and SMs end between 67 and 91 us of 92.
// Barriers: full[warp][slot], an mbarrier (TMA bytes, one arrival per phase). Warps share only the table of
// sigmoids: one __syncthreads.
// Deterministic: the maximum of a 128-column block, over eight lanes, does not depend on the order.
template <class Args, Output kOutput>
__global__ void __launch_bounds__(kForwardWarps* kWarpSize, 1)
    swiglu_rows_kernel(const Args args, RowSegments segments) {
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ Shared<kForwardWarps, UnitOf<Args>> shared;
    const auto unit = unit_of(args);
    prologue<kForwardInputs>(shared, unit, args.h, {}, args.a.cols, segments, args.groups.rows);
    const int width = args.a.cols, lane = static_cast<int>(threadIdx.x);
    const int block_col = lane % kBlockLanes * kUnit, lane_col = lane / kBlockLanes * kBlockCols + block_col;
    const int64_t a_base = args.a.base();
    const auto clear = [&](int row, int first, int end) {
        clear_row(args.a, a_base + row, first, end, args.scales);
    };
    InputPipeline<kForwardWarps, kForwardInputs, decltype(clear)> input(
        {args.h, {}, args.prob, width, segments, args.groups, args.tickets}, ring, shared.full, clear);
    for (; input.step().blocks > 0; input.advance()) {
        const Step step = input.step();
        const uint8_t* in = input.wait_full() + 2 * lane_col;
        uint4 raw_gate[kUnits], raw_up[kUnits];
        load_units(in, raw_gate);
        load_units(in + kStepBytes, raw_up);
        input.refill();
        float a[kUnits][kUnit];
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            float gate[kUnit], up[kUnit], sigmoid[kUnit];
            unpack_unit(raw_gate[u], DType::bf16, gate);
            unpack_unit(raw_up[u], DType::bf16, up);
            shared.table.sigmoids(raw_gate[u], sigmoid);
#pragma unroll
            for (int i = 0; i < kUnit; ++i)
                a[u][i] = unit.gate(gate[i]) * sigmoid[i] * unit.up(up[i]) * step.prob;
        }
        const int col = step.col + block_col, left = step.row < 0 ? 0 : width - col;
        const int64_t row = a_base + step.row, at = row * width + col;
        if constexpr (kOutput == Output::values) {
            store_values(args.a, at, left, a);
        } else {
            constexpr DType kFp8 = fp8_of(kOutput);
            const float amax = max_with(max_with(max_with(magnitude_of(a), 4), 2), 1);
            const QuantScale scale = quant_scale(amax, fp8_max(kFp8), args.scales.format);
            if (left > 0) {
                store_fp8<kFp8>(args.a, at, a, scale.multiplier);
                if (lane % kBlockLanes == 0) *args.scales.at(row, col) = scale.dequant;
            }
        }
    }
    input.finish();
}

// The sum of the 16 units of a block; a lane holds two. Neighbours first, then pairs, and so on; the same in
// all eight lanes. The lower halves of the block are added in even lanes while the upper halves are
// in odd ones.
__device__ __forceinline__ float sum_over_block(const float (&units)[kUnits]) {
    const bool odd = threadIdx.x % 2 != 0;
    float sum = odd ? units[1] : units[0];
    sum += __shfl_xor_sync(kFullMask, odd ? units[0] : units[1], 1);
    sum += __shfl_xor_sync(kFullMask, sum, 2);
    sum += __shfl_xor_sync(kFullMask, sum, 4);
    return sum + __shfl_xor_sync(kFullMask, sum, 1);
}

// da [M, F], h [M, 2F] BF16, prob -> dh [M, 2F], BF16 or FP8 with 1x128 scales, and dprob [M].
// Lower bound: 3F values in and 2F values (or FP8 values and scales) out per row: 8.06 bytes per column,
// 0.132 ms at 32768 x 2048 and 4.1 TB/s. Rows, slots and barriers as in swiglu_rows_kernel, with 16 warps: 96
// KB per SM. The maxima of gate and up are reduced together: even lanes end with the one of gate and odd
// lanes with that of up, compute its scale, and exchange multipliers. Pads: zeros. Deterministic: dprob adds
// the units of a lane, the eight lanes of the block, the blocks of the row in ascending order, all inside the
// warp: the sum does not depend on the grid.
template <class Args, Output kOutput>
__global__ void __launch_bounds__(kBackwardWarps* kWarpSize, 1) swiglu_backward_rows_kernel(const Args args) {
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ Shared<kBackwardWarps, UnitOf<Args>> shared;
    const auto unit = unit_of(args);
    const int width = args.da.cols, lane = static_cast<int>(threadIdx.x);
    const RowSegments whole_rows = {.shift = 0, .cols = width};
    prologue<kBackwardInputs>(shared, unit, args.h, args.da, width, whole_rows, args.groups.rows);
    const int block_col = lane % kBlockLanes * kUnit, lane_col = lane / kBlockLanes * kBlockCols + block_col;
    const int64_t dh_base = args.dh.base();
    float* const dprob = args.dprob ? static_cast<float*>(args.dprob.data) + args.dprob.base() : nullptr;
    const auto clear = [&](int row, int, int) {
        clear_row(args.dh, dh_base + row, 0, args.dh.cols, args.scales);
        if (dprob != nullptr && lane == 0) dprob[row] = 0.0f;
    };
    InputPipeline<kBackwardWarps, kBackwardInputs, decltype(clear)> input(
        {args.h, args.da, args.prob, width, whole_rows, args.groups, args.tickets}, ring, shared.full, clear);
    const bool odd = lane % 2 != 0;
    float sum = 0.0f;  // of the row so far
    for (; input.step().blocks > 0; input.advance()) {
        const Step step = input.step();
        const uint8_t* in = input.wait_full() + 2 * lane_col;
        uint4 raw_gate[kUnits], raw_up[kUnits], raw_da[kUnits];
        load_units(in, raw_gate);
        load_units(in + kStepBytes, raw_up);
        load_units(in + 2 * kStepBytes, raw_da);
        input.refill();
        const int col = step.col + block_col, left = step.row < 0 ? 0 : width - col;
        float dgate[kUnits][kUnit], dup[kUnits][kUnit], sums[kUnits];
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            float gate[kUnit], up[kUnit], da[kUnit], sigmoids[kUnit], unit_sum = 0.0f;
            unpack_unit(raw_gate[u], DType::bf16, gate);
            unpack_unit(raw_up[u], DType::bf16, up);
            unpack_unit(raw_da[u], DType::bf16, da);
            shared.table.sigmoids(raw_gate[u], sigmoids);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const float sigmoid = sigmoids[i], g = unit.gate(gate[i]), silu = g * sigmoid,
                            da_prob = da[i] * step.prob, linear = unit.up(up[i]);
                unit_sum = fma_float(da[i], silu * linear, unit_sum);
                dgate[u][i] = unit.dgate(
                    da_prob * linear * sigmoid * (1.0f + unit.argument(g) * (1.0f - sigmoid)), gate[i]);
                dup[u][i] = unit.dup(da_prob * silu, up[i]);
            }
            sums[u] = u * kUnitStep < left ? unit_sum : 0.0f;
        }
        const int64_t row = dh_base + step.row, at = row * 2 * width + col;
        if constexpr (kOutput == Output::values) {
            store_values(args.dh, at, left, dgate);
            store_values(args.dh, at + width, left, dup);
        } else {  // width is a multiple of 128: no block has both halves
            constexpr DType kFp8 = fp8_of(kOutput);
            const float of_gate = magnitude_of(dgate), of_up = magnitude_of(dup);
            float amax = fmaxf(odd ? of_up : of_gate, __shfl_xor_sync(kFullMask, odd ? of_gate : of_up, 1));
            amax = max_with(max_with(amax, 2), 4);
            const QuantScale scale = quant_scale(amax, fp8_max(kFp8), args.scales.format);
            const float other = __shfl_xor_sync(kFullMask, scale.multiplier, 1);
            if (left > 0) {
                store_fp8<kFp8>(args.dh, at, dgate, odd ? other : scale.multiplier);
                store_fp8<kFp8>(args.dh, at + width, dup, odd ? scale.multiplier : other);
                if (lane % kBlockLanes < 2) *args.scales.at(row, (odd ? width : 0) + col) = scale.dequant;
            }
        }
        if (dprob == nullptr) continue;
        const float block = sum_over_block(sums);
        const unsigned begins = __ballot_sync(kFullMask, step.col == 0),
                       ends = __ballot_sync(kFullMask, step.row >= 0 && step.col + kBlockCols >= width);
#pragma unroll
        for (int first = 0; first < kWarpSize; first += kBlockLanes) {
            if ((begins >> first & 1) != 0) sum = 0.0f;
            sum += __shfl_sync(kFullMask, block, first);
            if ((ends >> first & 1) != 0 && lane == first) dprob[step.row] = sum;
        }
    }
    input.finish();
}

// Segments of up to kMostSegment columns: a warp finishes one soon, so that the last rows do not leave most
// of the others idle.
constexpr int kMostSegment = 2048;
RowSegments segments_of(int width) {
    int shift = 0;
    while (width > kMostSegment << shift) ++shift;
    return {shift, static_cast<int>(round_up(ceil_div(width, 1 << shift), kBlockCols))};
}

}  // namespace

template <class Args>
void launch_swiglu_rows(const Args& args, Output output, int64_t rows, const Launch& launch) {
    const auto kernel = output == Output::values ? swiglu_rows_kernel<Args, Output::values>
                        : output == Output::e4m3 ? swiglu_rows_kernel<Args, Output::e4m3>
                                                 : swiglu_rows_kernel<Args, Output::e5m2>;
    const RowSegments segments = segments_of(args.a.cols);
    launch_pdl(kernel, grid_for(rows << segments.shift, launch, 1), dim3(kWarpSize, kForwardWarps),
               ring_bytes(kForwardWarps, kForwardInputs), launch, "swiglu", args, segments);
}

template <class Args>
void launch_swiglu_backward_rows(const Args& args, Output output, int64_t rows, const Launch& launch) {
    const auto kernel = output == Output::values ? swiglu_backward_rows_kernel<Args, Output::values>
                        : output == Output::e4m3 ? swiglu_backward_rows_kernel<Args, Output::e4m3>
                                                 : swiglu_backward_rows_kernel<Args, Output::e5m2>;
    launch_pdl(kernel, grid_for(rows, launch, 1), dim3(kWarpSize, kBackwardWarps),
               ring_bytes(kBackwardWarps, kBackwardInputs), launch, "swiglu_backward", args);
}

template void launch_swiglu_rows(const SwigluForward&, Output, int64_t, const Launch&);
template void launch_swiglu_rows(const Shaped<SwigluForward>&, Output, int64_t, const Launch&);
template void launch_swiglu_backward_rows(const SwigluGradient&, Output, int64_t, const Launch&);
template void launch_swiglu_backward_rows(const Shaped<SwigluGradient>&, Output, int64_t, const Launch&);

}  // namespace fp8flow::hopper::swiglu
