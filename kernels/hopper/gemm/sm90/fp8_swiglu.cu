// SPDX-License-Identifier: MIT
// fc1 + SwiGLU x prob + quantisation in one kernel: the FP8 GEMM of fp8.cu with an epilogue that activates
// and quantises in registers; h [M, 2F] is not written. D: act [M, F] e4m3 and its scales. Contract:
// op::GroupedGemmSwigluQuantize (kernels/ops/gemm.h), bit-equal to its parts, which are faster where h is
// kept. Read first: fp8_mainloop.h.
//
// Floor: 2 m n k FLOPs of the GEMM; a tile stores 16 KiB of FP8 values instead of 64 KiB of BF16. The 64
// activations of a thread, about 1,000 instructions a warp and tile, overlap with the tile's last wgmma batch
// and the first two of the next tile.
//
// Grid, roles: pipeline.h. A warpgroup owns 64 rows of gate and up: what SwiGLU and a 1x128 block need of a
// row is in four lanes. Shared memory: as fp8.cu, with the sigmoid table in place of staging boxes: FP8 rows
// are staged in the rows of A that wgmma has read. Barriers: pipeline.h; a tile's last stage is released one
// step later, when TMA has read the FP8 rows; named barrier 1: the table is filled.
//
// Deterministic: as fp8.cu; an amax is a maximum over a quad of lanes.
//
// Measured (H200, burst): 1.336 ms at 32 x 1024 rows, F 2048, K 7168, where the plain GEMM takes 1.341; 0.578
// ms at 16 x 2048, 1536, 4096 (0.566).
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/gemm/sm90/fp8_mainloop.h"

namespace fp8flow::hopper::gemm {

namespace {

// SharedStorage with the sigmoid table in place of column scales.
struct SwigluStorage {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    alignas(16) float row_scales[kStages][kTileRows];
    SigmoidTable table;
    WorkTile tiles[kTileSlots];
    Mbarrier full[kStages], empty[kStages], tile_full[kTileSlots], tile_empty[kTileSlots];
};

// Inputs and outputs of the epilogue.
struct SwigluOutput {
    RowView prob, act;
    float* scales = nullptr;  // of act: [block, row], blocks `pitch` apart
    int64_t pitch = 0;
    ScaleFormat format = ScaleFormat::pow2;
};

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, 1));
    return fmaxf(value, __shfl_xor_sync(kFullMask, value, 2));
}

// Epilogue of overlapped_mainloop: a tile becomes 128 x 128 FP8 values and their scales. A thread holds gate
// (first chain) and up (second chain) of 32 columns of two rows, a quad of lanes a whole 1x128 block: only
// the amax is exchanged. All in place: gate becomes silu(gate) during the tile's last wgmma batch; up becomes
// the product and then FP8 values during the first two of the next tile. A warp stages its 16 rows in its own
// rows of A.
class SwigluEpilogue {
public:
    static constexpr Owned kOwned = Owned::rows;
    static constexpr bool kHoldsStage = true;

    __device__ SwigluEpilogue(const GemmProblem& p, const SwigluOutput& out, const CUtensorMap* map,
                              const SigmoidTable& table, int warpgroup)
        : out_(out), map_(map), table_(table), row0_(first_row<kOwned>(warpgroup)) {
        const int64_t h_base = p.d_row_base != nullptr ? *p.d_row_base : 0;
        prob_base_ = out.prob ? static_cast<const float*>(out.prob.data) + out.prob.base() - h_base : nullptr;
        act_offset_ = out.act.base() - h_base;
    }
    // The branches around tiles of padding, here and below, keep ptxas from moving the work past the wait for
    // wgmma.
    __device__ __forceinline__ void begin(const WorkTile& tile, float (&sums)[2][64]) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            prob_[r] = prob_base_ != nullptr && row0_ + 8 * r < tile.valid
                           ? prob_base_[tile.d_row + row0_ + 8 * r]
                           : 1.0f;
        if (warp_uniform(tile.valid) > 0) activate(sums[0]);
    }
    template <int kChain>
    __device__ __forceinline__ void overlap(const WorkTile& tile, float (&sums)[2][64], uint8_t* rows) {
        if (kChain == 0) {
            if (warp_uniform(tile.valid) > 0) multiply_by_up(sums[0], sums[1]);
        } else {
            quantise(tile, sums[1], rows);
        }
    }
    // TMA has read the staged rows.
    __device__ __forceinline__ void wait_read() const {
        if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
    }
    __device__ __forceinline__ void end() const {
        if (threadIdx.x % 32 == 0) bulk_wait_all();
    }

private:
    // Eight table look-ups at a time.
    __device__ __forceinline__ void activate(float (&gate)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
            const uint32_t words = pack_bf16(gate[i], gate[i + 1]);
            float low, high;
            table_.of_pair(words, low, high);
            gate[i] = bits_float(words << 16) * low;
            gate[i + 1] = bits_float(words & 0xFFFF0000u) * high;
            if (i % 8 == 6) wgmma_fence_operand(gate);
        }
    }
    // up = silu(gate) * up, and the amax of either row
    __device__ __forceinline__ void multiply_by_up(const float (&silu)[64], float (&up)[64]) {
        largest_[0] = largest_[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
            const uint32_t words = pack_bf16(up[i], up[i + 1]);
            up[i] = silu[i] * bits_float(words << 16);
            up[i + 1] = silu[i + 1] * bits_float(words & 0xFFFF0000u);
            float& largest = largest_[i / 2 % 2];
            largest = fmaxf(fmaxf(largest, fabsf(up[i])), fabsf(up[i + 1]));  // NaN ignored
        }
        wgmma_fence_operand(up);
        wgmma_fence_operand(largest_);
    }
    // Pads become zeros; their probability is 1 and every multiplier finite and positive.
    __device__ __forceinline__ void quantise(const WorkTile& tile, float (&values)[64], uint8_t* rows) {
        const int lane = static_cast<int>(threadIdx.x) % 32, quad = lane % 4;
        const int64_t col0 = tile.b_output / 2, row = tile.d_row + act_offset_ + row0_;
        const bool inside = col0 < out_.act.cols;  // the tile of the second CTA may be past the last column
        float* scale_at = out_.scales + col0 / kBlock * out_.pitch + row;
        zero_pads(tile, row0_, values);
        // 128-byte swizzle: the eight rows of a warp's store touch all banks
        uint32_t to = shared_address(rows) + lane / 4 * (kStageRowBytes + 16) + 2 * quad;
        opaque(to);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool valid = row0_ + 8 * r < tile.valid;
            const float prob = prob_[r];
            const QuantScale scale =
                quant_scale(fmaxf(quad_max(largest_[r]) * fabsf(prob), 0.0f), kE4m3Max, out_.format);
            float m = scale.multiplier;
            if (out_.format == ScaleFormat::pow2 && fabsf(prob) < 0x1p64f) {
                m *= prob;  // a power of two: exact, so the order of the two multiplications does not matter
            } else {
#pragma unroll
                for (int j = 0; j < 32; ++j) values[j / 2 * 4 + j % 2 + 2 * r] *= prob;
            }
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float* v = &values[4 * j + 2 * r];
                store_shared_u16((to ^ (16 * (j / 2))) + 8 * (j % 2) + 8 * r * kStageRowBytes,
                                 pack_e4m3(v[0] * m, v[1] * m));
            }
            if (quad == 0 && inside && row0_ + 8 * r < tile.rows)
                scale_at[8 * r] = valid ? scale.dequant : 0.0f;
        }
        fence_async_shared();
        __syncwarp();
        const int first = warp_uniform(row0_);
        if (first + kWarpRows > warp_uniform(tile.rows))
            store_partial_rows(tile, rows, first, static_cast<int>(col0));
        else if (lane == 0)
            tma_store(map_, rows, static_cast<int>(col0), static_cast<int>(row));
        if (lane == 0) bulk_commit();
    }
    __device__ __forceinline__ void store_partial_rows(const WorkTile& tile, const uint8_t* rows, int first,
                                                       int col0) const {
        if (col0 >= out_.act.cols) return;
        for_box_pieces([&](int row, int piece) {
            if (first + row < tile.rows)
                store_vector(
                    reinterpret_cast<uint4*>(static_cast<uint8_t*>(out_.act.data) +
                                             (tile.d_row + act_offset_ + first + row) * out_.act.cols + col0 +
                                             16 * piece),
                    piece_of(rows, row, piece));
        });
        __syncwarp();
    }

    const SwigluOutput& out_;
    const CUtensorMap* map_;
    const SigmoidTable& table_;
    int row0_;
    const float* prob_base_;  // nullptr: 1
    int64_t act_offset_;
    float prob_[2], largest_[2] = {0.0f, 0.0f};
};

__global__ void __launch_bounds__(kCtaThreads, 1)
    fp8_swiglu_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ CUtensorMap map_a,
                      const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_act,
                      const __grid_constant__ SwigluOutput out) {
    run_roles<SwigluStorage>(
        [&](SwigluStorage& shared) {
            produce_operands<ScaleMode::rows_tiles, Owned::rows>(problem, shared, &map_a, &map_b);
        },
        [&](SwigluStorage& shared, int warpgroup) {
            shared.table.fill(static_cast<int>(threadIdx.x) - kWarpgroup, kConsumerThreads);
            named_barrier_sync(1, kConsumerThreads);
            overlapped_mainloop<WgmmaE4m3>(problem, shared, warpgroup,
                                           SwigluEpilogue(problem, out, &map_act, shared.table, warpgroup));
        });
}

}  // namespace

bool launch_wgmma_swiglu(const op::GroupedGemmSwigluQuantize& args, const Launch& launch) {
    const GemmCall call =
        call_of(op::GroupedGemm{.a = args.a, .b = args.b, .groups = args.groups, .d = args.h});
    const GemmProblem& p = call.problem;
    const TensorView &a = args.a.data, &b = args.b.data;
    if (args.save_h == op::SaveH::yes || !wgmma_supports(call) || a.dtype != DType::e4m3 ||
        args.act.data.dtype != DType::e4m3 || p.n / 2 % kBlock != 0 ||
        reinterpret_cast<uintptr_t>(args.act.data.data) % 16 != 0 ||
        ceil_div(p.k, int64_t{kFp8StageK}) < kMinStepsHoldingStage)
        return false;
    const CUtensorMap map_a = tensor_map(a.data, a.dtype, a.rows(), a.cols(), kTileRows / 2),
                      map_b = tensor_map(b.data, b.dtype, b.rows(), b.cols(), kTileCols / 2),
                      map_act = tensor_map(args.act.data.data, DType::e4m3, INT32_MAX, p.n / 2, kWarpRows);
    const SwigluOutput out{row_view(args.prob), row_view(args.act.data), args.act.scales.as<float>(),
                           args.act.data.dim(0), args.scale_format};
    launch_persistent<SwigluStorage>(fp8_swiglu_kernel, p, launch, map_a, map_b, map_act, out);
    return true;
}

}  // namespace fp8flow::hopper::gemm
