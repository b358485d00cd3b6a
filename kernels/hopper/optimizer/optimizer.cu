// SPDX-License-Identifier: MIT
// The optimizer on the GPU: sums of squares for the gradient norm, the clipping factor, and AdamW on FP32
// masters. All bit-equal to the reference.
#include "kernels/hopper/device/adamw.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/quantize/weight_tiles.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::optimizer {

namespace {

constexpr int kFour = 4;

// out[b] = sum of the squares of block b, in the order of kernels/ops/optimizer.h.
//
// Lower bound: the values once (1.07 GB, 0.23 ms, at 2^28 values and 4.6 TB/s).
//
// Warp: a block, four strands per lane; one access of the warp is a row of 128 elements. TMA loads pieces of
// 4 KB into a ring of kSlots per warp; two to three pieces of each of an SM's 16 warps are in flight (128 to
// 192 KB), and no register waits for memory. Pieces that are not whole (at the end, or all where the pointer
// is not aligned) are read by ordinary loads; they come last, so that the ring advances without gaps.
//
// Barriers: warps are independent. `full`, one per slot: the bytes of a piece. A __syncwarp between the last
// read of a piece and the load of the next into its slot.
//
// Deterministic: one writer per sum, fixed order. A square is exact in double, so that an fma adds what a
// multiplication and an addition would; + 0 after the last value changes no bit.
constexpr int kWarps = 8, kSumThreads = kWarps * kWarpSize, kSumCtas = 2;
constexpr int kStrands = static_cast<int>(op::kNormSquaredStrands), kRows = 8, kPiece = kRows * kStrands,
              kPieces = static_cast<int>(op::kNormSquaredBlock) / kPiece, kSlots = 3;
static_assert(kStrands == kFour * kWarpSize && kPieces * kPiece == op::kNormSquaredBlock);

// Pieces: of FP32 as said, of BF16 half the bytes.
template <class T> constexpr int kSumBytes = kWarps* kSlots* kPiece* static_cast<int>(sizeof(T));

__device__ __forceinline__ void add_squares(const float4& x, double (&sums)[kFour]) {
    sums[0] = __fma_rn(static_cast<double>(x.x), static_cast<double>(x.x), sums[0]);
    sums[1] = __fma_rn(static_cast<double>(x.y), static_cast<double>(x.y), sums[1]);
    sums[2] = __fma_rn(static_cast<double>(x.z), static_cast<double>(x.z), sums[2]);
    sums[3] = __fma_rn(static_cast<double>(x.w), static_cast<double>(x.w), sums[3]);
}

template <class T>
__global__ __launch_bounds__(kSumThreads, kSumCtas) void block_sums_kernel(const T* values, int64_t count,
                                                                           bool vectorised, double* out) {
    extern __shared__ __align__(128) uint8_t slot_memory[];
    __shared__ Mbarrier barriers[kWarps][kSlots];
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              lane = static_cast<int>(threadIdx.x) % kWarpSize;
    Four<T>* const slots = reinterpret_cast<Four<T>*>(slot_memory) + warp * kSlots * (kPiece / kFour);
    Mbarrier* const full = barriers[warp];
    const int64_t blocks = (count + op::kNormSquaredBlock - 1) / op::kNormSquaredBlock,
                  step = static_cast<int64_t>(gridDim.x) * kWarps,
                  begin = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
    const int64_t whole = vectorised ? count / kPiece : 0;  // pieces loaded by TMA
    int64_t ahead = begin * kPieces;                        // the piece that is loaded next
    const auto load = [&](int slot) {
        if (lane == 0 && ahead < whole) {
            constexpr uint32_t kBytes = kPiece * sizeof(T);
            mbarrier_arrive_expect_tx(&full[slot], kBytes);
            bulk_load(values + ahead * kPiece, &full[slot], slots + slot * (kPiece / kFour), kBytes);
        }
        if (++ahead % kPieces == 0) ahead += (step - 1) * kPieces;
    };
    if (lane == 0) {
        for (int slot = 0; slot < kSlots; ++slot) mbarrier_init(&full[slot], 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    pdl_begin(PdlOrder::after);
    for (int slot = 0; slot < kSlots; ++slot) load(slot);

    int slot = 0;
    uint32_t parity = 0;
    for (int64_t block = begin; block < blocks; block += step) {
        double sums[kFour] = {};
#pragma unroll 1
        for (int64_t piece = block * kPieces; piece < (block + 1) * kPieces; ++piece) {
            if (piece < whole) {
                mbarrier_wait(&full[slot], parity);
                const Four<T>* from = slots + slot * (kPiece / kFour) + lane;
#pragma unroll
                for (int i = 0; i < kRows; ++i) add_squares(values_of(from[i * kWarpSize]), sums);
            } else {
                const int64_t first = piece * kPiece + lane * kFour;
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    const int64_t at = first + i * kStrands;
                    const auto value = [&](int64_t place) {
                        return place < count ? widened(values[place]) : 0.0f;
                    };
                    add_squares({value(at), value(at + 1), value(at + 2), value(at + 3)}, sums);
                }
            }
            __syncwarp();
            load(slot);
            if (++slot == kSlots) slot = 0, parity ^= 1;
        }
        const double sum = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        if (lane == 0) out[block] = sum;
    }
}

// out[b] = sum of the entries of block b, in the order of kernels/ops/squares.h.
//
// Lower bound: the entries once (5.5 MB at 2.8e9 gradients, 3 us, mostly of latency). Warp: a block, all its
// loads in flight. No barrier. Deterministic: one writer per sum, fixed order; + 0 past the last entry
// changes no bit.
constexpr int kEntries = static_cast<int>(op::kAddSquaresBlock) / kWarpSize;
static_assert(op::kAddSquaresStrands == kWarpSize);
__global__ __launch_bounds__(kSumThreads) void add_squares_kernel(const double* squares, int64_t count,
                                                                  double* out) {
    pdl_begin(PdlOrder::after);
    const int64_t block = (static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x) / kWarpSize;
    if (block * op::kAddSquaresBlock >= count) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    double entries[kEntries], sum = 0.0;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
        const int64_t at = block * op::kAddSquaresBlock + i * kWarpSize + lane;
        entries[i] = at < count ? squares[at] : 0.0;
    }
#pragma unroll
    for (int i = 0; i < kEntries; ++i) sum += entries[i];
    sum = warp_sum(sum);
    if (lane == 0) out[block] = sum;
}

// *result += the sums of the blocks (256 KB at 2^28 values, from L2: about 3 us), rounded once. One CTA; a
// thread adds its strand, kAhead loads in flight; its warp and then the first warp add the strands by
// butterfly shuffles. One barrier. Deterministic: fixed order.
constexpr int kFinishThreads = static_cast<int>(op::kNormSquaredBlockStrands), kAhead = 16;
static_assert(kFinishThreads == kWarpSize * kWarpSize);
__global__ __launch_bounds__(kFinishThreads) void finish_sum_kernel(const double* sums, int64_t count,
                                                                    float* result) {
    __shared__ double warp_sums[kWarpSize];
    pdl_begin(PdlOrder::after);
    const int thread = static_cast<int>(threadIdx.x);
    const double before =
        thread == 0 ? static_cast<double>(*result) : 0.0;  // in flight together with the first sums
    double sum = 0;
    for (int64_t first = thread; first < count; first += kAhead * kFinishThreads) {
        double terms[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            terms[i] = first + i * kFinishThreads < count ? __ldcg(sums + first + i * kFinishThreads) : 0.0;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) sum += terms[i];
    }
    sum = warp_sum(sum);
    if (thread % kWarpSize == 0) warp_sums[thread / kWarpSize] = sum;
    __syncthreads();
    if (thread >= kWarpSize) return;
    sum = warp_sum(warp_sums[thread]);
    if (thread == 0) *result = static_cast<float>(before + sum);
}

// One AdamW step. Bytes: 28 per parameter (18 with gradient and moments in BF16), and the working copy (2 or
// 4). A thread takes four parameters at a time by 16-byte accesses (8-byte ones of BF16). Element-wise, so
// deterministic; compiled without contraction, so that every operation rounds as in the reference. Does
// nothing when *status != 0. PDL: order, as pdl_begin says; small tensors run in parallel.
constexpr int kAdamWThreads = 256;
template <class Types>
__device__ __forceinline__ void step_parameters(const AdamWArgs& args, bool vectorised) {
    if (args.status != nullptr && *args.status != 0) return;
    const AdamWStep its = adamw_step(args);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kAdamWThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kAdamWThreads;
    const int64_t vectors = vectorised ? args.count / 4 : 0;
    for (int64_t i = thread; i < vectors; i += threads)
        step_four<Types>(args, its, load_four<Types>(args, true, 4 * i), 4 * i);
    for (int64_t i = vectors * 4 + thread; i < args.count; i += threads) {
        const float master = step_one<Types>(args, its, i);
        if (args.copy != nullptr) store_float(args.copy, args.copy_dtype, i, master);
    }
}
template <class Types>
__global__ __launch_bounds__(kAdamWThreads) void adamw_kernel(const AdamWArgs args, bool vectorised,
                                                              PdlOrder order) {
    pdl_begin(order);
    step_parameters<Types>(args, vectorised);
    pdl_end(order);
}

// One thread: five words.
__global__ void clip_factor_kernel(const float* norm_squared, float clip, const float* limit, int32_t* status,
                                   float* norm_out, float* factor_out) {
    pdl_begin(PdlOrder::after);
    const float norm = sqrt_float(*norm_squared);
    if (!(norm < bits_float(0x7F800000u)) && *status == 0) *status = op::kStepNonFinite;
    if (limit != nullptr && *limit > 0.0f && norm > *limit && *status == 0) *status = op::kStepDiverged;
    const float factor = div_float(clip, norm + 1e-6f);
    *norm_out = norm;
    *factor_out = clip > 0.0f && factor < 1.0f ? factor : 1.0f;
}

}  // namespace

}  // namespace fp8flow::hopper::optimizer

namespace fp8flow {

using namespace hopper;
using namespace hopper::optimizer;

void HopperOps::do_norm_squared(const op::NormSquared& args, const Launch& launch) {
    const int64_t count = args.x ? args.x.numel() : 0,
                  blocks = args.x ? ceil_div(count, op::kNormSquaredBlock) : args.block_sums.numel();
    if (blocks == 0) return;
    double* const sums =
        args.block_sums ? args.block_sums.as<double>() : workspace(launch).partials_for<double>(blocks);
    const bool vectorised = is_aligned(args.x.data);
    const auto sum_blocks = [&]<class T>() {
        launch_pdl(block_sums_kernel<T>, grid_for(ceil_div(blocks, kWarps), launch, kSumCtas), kSumThreads,
                   kSumBytes<T>, launch, "norm_squared", args.x.as<T>(), count, vectorised, sums);
    };
    if (args.x) args.x.dtype == DType::f32 ? sum_blocks.operator()<float>() : sum_blocks.operator()<Bf16>();
    if (!args.sum) return;
    launch_pdl(finish_sum_kernel, 1, kFinishThreads, launch, "norm_squared, end", sums, blocks,
               args.sum.as<float>());
}

void HopperOps::do_add_squares(const op::AddSquares& args, const Launch& launch) {
    const int64_t count = args.squares.numel();
    if (count == 0) return;
    const int64_t blocks = ceil_div(count, op::kAddSquaresBlock);
    double* sums = workspace(launch).partials_for<double>(blocks);
    launch_pdl(add_squares_kernel, static_cast<unsigned>(ceil_div(blocks, kWarps)), kSumThreads, launch,
               "add_squares", args.squares.as<double>(), count, sums);
    launch_pdl(finish_sum_kernel, 1, kFinishThreads, launch, "add_squares, end", sums, blocks,
               args.sum.as<float>());
}

void HopperOps::do_clip_factor(const op::ClipFactor& args, const Launch& launch) {
    launch_pdl(clip_factor_kernel, 1, 1, launch, "clip_factor", args.norm_squared.as<float>(), args.clip,
               args.limit ? args.limit.as<float>() : nullptr, args.status.as<int32_t>(),
               args.norm.as<float>(), args.factor.as<float>());
}

void HopperOps::do_adamw(const op::AdamW& args, const Launch& launch) {
    const int64_t count = args.master.numel();
    if (count == 0) return;
    const AdamWArgs kernel_args = adamw_args(args);
    bool vectorised = args.first_element % 4 == 0;
    for (const TensorView* view : {&args.grad, &args.master, &args.m, &args.v, &args.copy})
        vectorised = vectorised && is_aligned(view->data);
    with_types(args, [&]<class Types>() {
        launch_pdl(adamw_kernel<Types>, grid_for(ceil_div(count, 4 * kAdamWThreads), launch), kAdamWThreads,
                   launch, "adamw", kernel_args, vectorised, pdl_order(launch));
    });
}

// Weights in whole 128x128 blocks: the step and both FP8 copies in one kernel (quantize/weight_tiles.cu).
// Others: one after the other.
void HopperOps::do_adamw_quantize(const op::AdamWQuantize& args, const Launch& launch) {
    if (!hopper::quantize::launch_weight_tiles(args.adamw.master, &args.adamw,
                                               {args.scale_format, args.mx_rounding}, args.fprop, args.dgrad,
                                               launch))
        Ops::do_adamw_quantize(args, launch);
}

}  // namespace fp8flow
