// SPDX-License-Identifier: MIT
// Unpermute + unpad on the GPU, optionally with a residual, and the gradient of its merging weights. Sums
// keep the reference's order, so all of it is bit-equal to the reference.
#include "kernels/hopper/permute/permute.h"

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/vector_io.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/permute/tile_walk.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::permute {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;

// ---- sums of BF16 rows in whole vectors
constexpr int kMostRows = 8;      // of a token, at most
constexpr int kFewRows = 2;       // up to here a thread has four column slots in flight
constexpr int kSumThreads = 128;  // of a CTA, at most
constexpr int sum_ctas(bool addend) { return addend ? 5 : 6; }  // per SM

enum class Weights { none, probs };
struct SumArgs {
    const uint16_t* src;
    const int64_t* src_base;  // null: 0
    const float* prob;        // with Weights::probs
    const int64_t* prob_base;
    const int32_t* recv_rows;
    const int64_t* num_rows;
    int topk, units;  // units of a row
    unsigned slabs;   // of a row
    int slab_units;
    const uint16_t *residual, *addend;  // optional; an addend comes with a residual
    uint16_t* dst;
    SumRounding rounding;
};

__device__ __forceinline__ void add_unit(const uint4& unit, float (&sum)[kUnit]) {
    float v[kUnit];
    unpack_unit(unit, DType::bf16, v);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) sum[i] += v[i];
}
__device__ __forceinline__ void round_unit(float (&v)[kUnit]) {
    unpack_unit(pack_unit_bf16(v), DType::bf16, v);
}

// dst[t] = sum of up to 8 routed rows in fp32 in the order of recv_rows, optionally weighted, plus the
// residual, or the BF16 sum of residual and addend; BF16.
//
// Lower bound: every routed row read once, every token's row written once (and its residual read): 529 (587)
// MB at T=4096, H=7168, K=8: 0.129 (0.143) ms at 4.1 TB/s.
//
// CTA: a slab of a token's row, two iterations of up to 1024 columns. Each warp loads the K row numbers once
// (lane k the k-th, with its weight). A thread then has eight columns of all K rows in flight, or, with one
// or two rows per token, those of four iterations: 12 KB per CTA at K=6, 16 KB at K=8 and K=2, up to 96 KB
// per SM.
// CTAs are short and many, so that SMs stay equally busy to the end. No shared memory, no barriers. The
// residual may alias dst: a thread reads the units that it writes.
//
// Deterministic: fixed order of summation, one writer per byte.
template <Weights kWeights, int kRows, bool kAddend>
__global__ __launch_bounds__(kSumThreads, sum_ctas(kAddend)) void unpermute_sums_kernel(const SumArgs args) {
    constexpr int kAtOnce = kMostRows / kRows;  // iterations in flight
    pdl_wait();
    const int64_t items = *args.num_rows * args.slabs;
    // row numbers are 32-bit integers, as in plans
    const int base = static_cast<int>(args.src_base != nullptr ? *args.src_base : 0);
    const int64_t prob_base = args.prob_base != nullptr ? *args.prob_base : 0;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t row = static_cast<unsigned>(item) / args.slabs;  // items are fewer than 2^31
        const int slab = static_cast<int>(static_cast<unsigned>(item) % args.slabs);
        // one load per warp: lane k has the k-th row number and its weight
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize, step = static_cast<int>(blockDim.x);
        const int32_t own = lane < args.topk ? args.recv_rows[row * args.topk + lane] : -1;
        float own_weight = 0.0f;
        if constexpr (kWeights == Weights::probs)
            if (own >= 0) own_weight = args.prob[prob_base + own];
        const int count = __ffs(static_cast<int>(~__ballot_sync(kFullMask, own >= 0))) - 1;
        const uint4* from[kRows];
#pragma unroll
        for (int k = 0; k < kRows; ++k)
            from[k] = reinterpret_cast<const uint4*>(args.src) +
                      static_cast<int64_t>(base + __shfl_sync(kFullMask, own, k)) * args.units;
        const int first = slab * args.slab_units + static_cast<int>(threadIdx.x),
                  end = min(args.units, (slab + 1) * args.slab_units);
        for (int unit = first; unit - lane < end; unit += kAtOnce * step) {  // by whole warps
            uint4 raw[kAtOnce][kRows], raw_residual[kAtOnce], raw_addend[kAtOnce];
#pragma unroll
            for (int t = 0; t < kAtOnce; ++t) {
                if (unit + t * step >= end) continue;
#pragma unroll
                for (int k = 0; k < kRows; ++k)
                    if (k < count) raw[t][k] = from[k][unit + t * step];
                const int64_t at = row * args.units + unit + t * step;
                if (args.residual != nullptr)
                    raw_residual[t] = reinterpret_cast<const uint4*>(args.residual)[at];
                if constexpr (kAddend) raw_addend[t] = reinterpret_cast<const uint4*>(args.addend)[at];
            }
            float weight[kRows];
#pragma unroll
            for (int k = 0; k < kRows; ++k)
                if constexpr (kWeights == Weights::probs) weight[k] = __shfl_sync(kFullMask, own_weight, k);
#pragma unroll
            for (int t = 0; t < kAtOnce; ++t) {
                if (unit + t * step >= end) continue;
                float sum[kUnit] = {};
#pragma unroll
                for (int k = 0; k < kRows; ++k) {
                    if (k >= count) continue;
                    float v[kUnit];
                    unpack_unit(raw[t][k], DType::bf16, v);
#pragma unroll
                    for (int i = 0; i < kUnit; ++i) {
                        if constexpr (kWeights == Weights::probs)
                            sum[i] = fma_float(weight[k], v[i], sum[i]);
                        else
                            sum[i] += v[i];
                    }
                }
                if (args.residual != nullptr) {
                    if (args.rounding == SumRounding::before_residual) round_unit(sum);
                    if constexpr (kAddend) {
                        float both[kUnit];
                        unpack_unit(raw_residual[t], DType::bf16, both);
                        add_unit(raw_addend[t], both);
                        raw_residual[t] = pack_unit_bf16(both);
                    }
                    add_unit(raw_residual[t], sum);
                }
                reinterpret_cast<uint4*>(args.dst)[row * args.units + unit + t * step] = pack_unit_bf16(sum);
            }
        }
    }
}

template <int kRows> auto sums_kernel(bool weighted, bool addend) {
    return weighted ? unpermute_sums_kernel<Weights::probs, kRows, false>
           : addend ? unpermute_sums_kernel<Weights::none, kRows, true>
                    : unpermute_sums_kernel<Weights::none, kRows, false>;
}

// ---- sums, any dtype and alignment
struct UnpermuteArgs {
    DeviceView src, dst, row_prob;
    const int32_t* recv_rows;
    const int64_t* num_rows;
    int64_t topk, hidden;
    bool vectorised;
};

// The same for any dtype, width and K. Bytes: every received row's source rows read once, every destination
// row written once. One warp per destination row; a thread adds eight columns at a time over the source rows
// in the order of recv_rows, in registers, and rounds once. No barriers. Deterministic: fixed order, one
// writer per byte.
__global__ __launch_bounds__(kThreads) void unpermute_kernel(const UnpermuteArgs args) {
    const int64_t received = *args.num_rows, base = args.src.base(), prob_base = args.row_prob.base();
    const float* prob = static_cast<const float*>(args.row_prob.data);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < received;
         row += static_cast<int64_t>(gridDim.x) * kWarps) {
        const int32_t* sources = args.recv_rows + row * args.topk;
        int count = 0;
        while (count < args.topk && sources[count] >= 0) ++count;
        for (int64_t column = lane * kUnit; column < args.hidden; column += kWarpSize * kUnit) {
            const int64_t width = args.hidden - column;
            float sum[kUnit] = {};
#pragma unroll 4
            for (int k = 0; k < count; ++k) {
                const int64_t source = sources[k];
                float values[kUnit];
                load_up_to_8(args.src.data, args.src.dtype, (base + source) * args.hidden + column, width,
                             args.vectorised, values);
                const float weight = prob != nullptr ? prob[prob_base + source] : 1.0f;
#pragma unroll
                for (int j = 0; j < kUnit; ++j)
                    sum[j] = prob != nullptr ? fma_float(weight, values[j], sum[j]) : sum[j] + values[j];
            }
            store_up_to_8(args.dst.data, args.dst.dtype, row * args.hidden + column, width, args.vectorised,
                          sum);
        }
    }
}

// ---- gradient of the merging weights
struct ProbsBackwardArgs {
    DeviceView ddst, src, row_source, drow_prob;
    DeviceGroups groups;
    int64_t hidden;
    bool vectorised;
    // the plan by token, for token_probs_backward_kernel
    const int32_t* recv_rows;
    const int64_t* num_rows;
    int topk;
};

// Dot product of two BF16 rows in the order of op::UnpermuteProbsBackward: a lane's strand is every 32nd
// unit, with eight loads in flight; warp_sum adds the strands. Called by whole warps.
__device__ __forceinline__ float strand_dot(const uint4* gradients, const uint4* values, int units) {
    constexpr int kInFlight = 4;  // of each operand
    float strand = 0.0f;
    for (int first = static_cast<int>(threadIdx.x) % kWarpSize; first < units;
         first += kInFlight * kWarpSize) {
        uint4 raw_gradient[kInFlight], raw_value[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            const int unit = first + j * kWarpSize;
            if (unit >= units) continue;
            raw_gradient[j] = gradients[unit];
            raw_value[j] = __ldcs(&values[unit]);
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            if (first + j * kWarpSize >= units) continue;
            float gradient[kUnit], value[kUnit];
            unpack_unit(raw_gradient[j], DType::bf16, gradient);
            unpack_unit(raw_value[j], DType::bf16, value);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) strand = fma_float(gradient[i], value[i], strand);
        }
    }
    return strand;
}

// drow_prob[r] = <gradient row of r's token, row r>, by token: BF16 in whole vectors, K <= 8.
//
// Lower bound: every routed row read once, every token's gradient row once, 4 bytes written per row: 529 MB
// at T=4096, H=7168, K=8, 0.129 ms at 4.1 TB/s. By routed row every gradient row is read K times from L2 (940
// MB), and L2 bandwidth is the limit.
//
// CTA: one token, one warp for each of its rows: the gradient row comes from L2 for one warp and from L1 for
// the others. Eight loads per lane in flight, half of them from memory (64 KB per SM). The first CTAs search
// kPadRows rows each for pads and clear them. No shared memory, no barriers.
//
// Deterministic: one writer per word, because tokens' rows and pads are different rows.
constexpr int kPadRows = 256;
__global__ __launch_bounds__(kThreads, 4) void token_probs_backward_kernel(const ProbsBackwardArgs args) {
    pdl_wait();
    const int64_t base = args.src.base(), rows = args.groups.total(),
                  tiles = (rows + kPadRows - 1) / kPadRows, items = tiles + *args.num_rows;
    const int32_t* row_source = static_cast<const int32_t*>(args.row_source.data) + args.row_source.base();
    float* drow_prob = static_cast<float*>(args.drow_prob.data) + args.drow_prob.base();
    const int units = static_cast<int>(args.hidden / kUnit), threads = static_cast<int>(blockDim.x);
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        if (item < tiles) {
            const int64_t first = item * kPadRows, end = min(rows, first + kPadRows);
            for (int64_t row = first + static_cast<int>(threadIdx.x); row < end; row += threads)
                if (row_source[row] < 0) drow_prob[row] = 0.0f;
            continue;
        }
        const int64_t token = item - tiles;
        const int place = args.recv_rows[token * args.topk + static_cast<int>(threadIdx.x) / kWarpSize];
        if (place < 0) continue;  // the same in a whole warp
        const float dot =
            warp_sum(strand_dot(static_cast<const uint4*>(args.ddst.data) + token * units,
                                static_cast<const uint4*>(args.src.data) + (base + place) * units, units));
        if (threadIdx.x % kWarpSize == 0) drow_prob[place] = dot;
    }
}

// The same by routed row, for any dtype, alignment and K. CTA: tiles of walk_tiles, one warp per row, a
// lane's strand every 32nd unit. No barriers; row numbers are uniform in a warp. Deterministic: fixed order,
// one writer per word.
__global__ __launch_bounds__(kThreads, 3) void unpermute_probs_backward_kernel(const ProbsBackwardArgs args) {
    static_assert(kTileRows == kWarps && op::kProbStrands == kWarpSize && op::kProbUnit == kUnit);
    const int64_t base = args.src.base();
    const int32_t* row_source = static_cast<const int32_t*>(args.row_source.data) + args.row_source.base();
    float* drow_prob = static_cast<float*>(args.drow_prob.data) + args.drow_prob.base();
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              lane = static_cast<int>(threadIdx.x) % kWarpSize;
    walk_tiles(args.groups, [&](int, int, int first_row, int end_row) {
        const int64_t row = first_row + warp;
        if (row >= end_row) return;
        const int64_t source = row_source[row];
        float strand = 0.0f;
        for (int64_t column = lane * kUnit; source >= 0 && column < args.hidden;
             column += kWarpSize * kUnit) {
            const int64_t width = args.hidden - column;
            float gradient[kUnit], value[kUnit];
            load_up_to_8(args.ddst.data, args.ddst.dtype, source * args.hidden + column, width,
                         args.vectorised, gradient);
            load_up_to_8(args.src.data, args.src.dtype, (base + row) * args.hidden + column, width,
                         args.vectorised, value);
#pragma unroll
            for (int i = 0; i < kUnit; ++i)
                if (i < width) strand = fma_float(gradient[i], value[i], strand);
        }
        strand = warp_sum(strand);
        if (lane == 0) drow_prob[row] = strand;
    });
}

}  // namespace

bool launch_unpermute_sums(const op::UnpermuteUnpad& args, const SumResidual& residual,
                           const Launch& launch) {
    const int64_t hidden = args.dst.cols(), capacity = args.recv_rows.dim(0), topk = args.recv_rows.dim(1);
    const auto fits = [&](const TensorView& rows) {
        return !rows || (rows.dtype == DType::bf16 && is_vectorisable(rows.data, hidden));
    };
    const bool weighted = static_cast<bool>(args.row_prob), addend = static_cast<bool>(residual.addend);
    if (addend && (weighted || !residual.rows)) return false;
    if (topk > kMostRows || !fits(args.src) || !fits(args.dst) || !fits(residual.rows) ||
        !fits(residual.addend))
        return false;
    const int64_t units = hidden / kUnit;
    // iterations of a CTA over a row: two; with few rows four, all in flight
    const bool few = topk <= kFewRows;
    const int64_t iterations = few ? kMostRows / kFewRows : 2;
    const int threads = static_cast<int>(
        std::min<int64_t>(kSumThreads, round_up(ceil_div(units, iterations), int64_t{kWarpSize})));
    const int64_t slab_units = iterations * threads, slabs = ceil_div(units, slab_units),
                  items = capacity * slabs;
    if (items >= int64_t{1} << 31) return false;
    if (items == 0) return true;
    const SumArgs kernel_args{.src = static_cast<const uint16_t*>(args.src.data),
                              .src_base = args.src.row_base,
                              .prob = args.row_prob ? args.row_prob.as<float>() : nullptr,
                              .prob_base = args.row_prob.row_base,
                              .recv_rows = args.recv_rows.as<int32_t>(),
                              .num_rows = args.num_rows.as<int64_t>(),
                              .topk = static_cast<int>(topk),
                              .units = static_cast<int>(units),
                              .slabs = static_cast<unsigned>(slabs),
                              .slab_units = static_cast<int>(slab_units),
                              .residual = static_cast<const uint16_t*>(residual.rows.data),
                              .addend = static_cast<const uint16_t*>(residual.addend.data),
                              .dst = static_cast<uint16_t*>(args.dst.data),
                              .rounding = residual.rounding};
    const unsigned grid = grid_of_items(items, launch, sum_ctas(addend));
    const auto kernel =
        few ? sums_kernel<kFewRows>(weighted, addend) : sums_kernel<kMostRows>(weighted, addend);
    launch_pdl(kernel, grid, static_cast<unsigned>(threads), launch, "unpermute_unpad", kernel_args);
    return true;
}

}  // namespace fp8flow::hopper::permute

namespace fp8flow {

using namespace hopper;
using namespace hopper::permute;

void HopperOps::do_unpermute_unpad(const op::UnpermuteUnpad& args, const Launch& launch) {
    const int64_t hidden = args.dst.cols(), capacity = args.recv_rows.dim(0);
    if (hidden == 0 || capacity == 0) return;
    if (launch_unpermute_sums(args, {}, launch)) return;
    const bool vectorised = is_vectorisable(args.src.data, hidden) && is_vectorisable(args.dst.data, hidden);
    const UnpermuteArgs kernel_args{.src = device_view(args.src),
                                    .dst = device_view(args.dst),
                                    .row_prob = device_view(args.row_prob),
                                    .recv_rows = args.recv_rows.as<int32_t>(),
                                    .num_rows = args.num_rows.as<int64_t>(),
                                    .topk = args.recv_rows.dim(1),
                                    .hidden = hidden,
                                    .vectorised = vectorised};
    launch_kernel(unpermute_kernel, grid_for(ceil_div(capacity, kWarps), launch), kThreads, launch,
                  "unpermute_unpad", kernel_args);
}

void HopperOps::do_unpermute_probs_backward(const op::UnpermuteProbsBackward& args, const Launch& launch) {
    const int64_t hidden = args.src.cols(), capacity = args.groups.row_capacity;
    if (capacity == 0) return;
    const bool vectorised = is_vectorisable(args.src.data, hidden) && is_vectorisable(args.ddst.data, hidden);
    const ProbsBackwardArgs kernel_args{.ddst = device_view(args.ddst),
                                        .src = device_view(args.src),
                                        .row_source = device_view(args.row_source),
                                        .drow_prob = device_view(args.drow_prob),
                                        .groups = device_groups(args.groups, capacity),
                                        .hidden = hidden,
                                        .vectorised = vectorised,
                                        .recv_rows = args.recv_rows ? args.recv_rows.as<int32_t>() : nullptr,
                                        .num_rows = args.num_rows ? args.num_rows.as<int64_t>() : nullptr,
                                        .topk = args.recv_rows ? static_cast<int>(args.recv_rows.dim(1)) : 0};
    const bool wide = vectorised && args.src.dtype == DType::bf16 && args.ddst.dtype == DType::bf16;
    if (wide && args.recv_rows && kernel_args.topk > 0 && kernel_args.topk <= kWarps) {
        const int64_t items = args.recv_rows.dim(0) + ceil_div(capacity, int64_t{kPadRows});
        launch_pdl(token_probs_backward_kernel, grid_of_items(items, launch),
                   static_cast<unsigned>(kernel_args.topk * kWarpSize), launch, "unpermute_probs_backward",
                   kernel_args);
        return;
    }
    launch_kernel(unpermute_probs_backward_kernel, walk_grid(capacity, launch), kThreads, launch,
                  "unpermute_probs_backward", kernel_args);
}

}  // namespace fp8flow
