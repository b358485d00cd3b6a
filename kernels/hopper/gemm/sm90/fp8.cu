// SPDX-License-Identifier: MIT
// FP8 GEMMs with grouped rows (forward, data gradient): D = A B^T. A is e4m3 or e5m2, B e4m3, D BF16 or FP32.
// launch_wgmma_swiglu fuses fc1 with SwiGLU x prob and quantisation: D is act [M, F] e4m3 and its scales, and
// h [M, 2F] is not written (op::GroupedGemmSwigluQuantize, bit-equal to its parts). Three kernels:
//
//   fp8_overlapped_kernel   row scales of A per 128, tile scales of B, D in BF16: the default
//   fp8_swiglu_kernel       the same mainloop with the SwiGLU epilogue, or that of another gated unit
//   fp8_kernel              alternating mainloop (fp8_mainloop.h): FP32 D, tile scales of A, column scales of
//                           B, scales that are constant along the contraction. With constant scales it also
//                           computes weight gradients.
//
// Terms (chain, step, slot, staging, pads): ../README.md.
//
// Lower bound: 2 m n k FLOPs at the FP8 rate of the tensor cores. Each operand is read once, D is written
// once.
//
// Grid, roles, barriers full, empty, tile_full, tile_empty: pipeline.h. A stage has 128 contraction elements.
// Tensor cores keep about 14 bits of a running sum, so they sum 128 elements only. FP32 FMAs on CUDA cores
// then scale each partial sum and add it to the result in registers (promotion). Scales that are constant
// along the contraction are applied once, at the end.
//
//   shared memory                    size                                      kernel
//   stages                           4 x [128 rows of A | 256 rows of B] x 128 bytes, 128-byte swizzled
//   row scales, column scales        4 x 512 bytes, 4 x 1024 bytes             column scales: fp8_kernel
//   staging boxes of D               8 warps x 2 x 2 KiB                       fp8_overlapped_kernel
//   sigmoid table                    (FP8 rows are staged in A's last stage)   fp8_swiglu_kernel
//   named barriers                   1: the table is filled                    fp8_swiglu_kernel
//                                    1 to 7: fp8_mainloop.h                    fp8_kernel
//
// Deterministic: one thread computes an element of D as a sum over ascending k, whatever the other groups
// hold. An amax is a maximum over a quad of lanes.
//
// Measured (H200, burst), fc1 (N = 2F) of 32 groups x 1024 rows, F 2048, K 7168: 1.341 ms (1435 TFLOP/s)
// plain, 1.336 ms with SwiGLU. 16 groups x 2048 rows, F 1536, K 4096: 0.566 ms (1457 TFLOP/s) and 0.578 ms.
// Ideas that did not help: docs/design_notes.md.
#include "kernels/hopper/device/mma.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/gemm/sm90/fp8_mainloop.h"

namespace fp8flow::hopper::gemm {

namespace {

// ---- overlapped mainloop
//
// One consumer warpgroup. A step is two wgmma batches, one per chain. During the first, the warpgroup
// releases the previous stage and computes this step's factors. During the second, it waits for the next
// stage and reads its scales. The next tile is fetched one step before its start. The epilogue of a tile
// overlaps with the tile's last batch and with the first two batches of the next tile. Between two batches
// only the 64 promotions of a thread remain, so the two warpgroups need no offset (the alternating mainloop
// does).
//
// A tile's slot in the tile ring is released after its epilogue, which is in the first step of the next tile.
// The very last stage is never released, because no producer waits for it. There is no deadlock: the producer
// publishes a tile after it has issued all stages of the previous tile. The ring has a second slot, which the
// consumers release in the first step of that previous tile. The contraction is not empty (launch_wgmma).
//
// Epilogue: kOwned, and
//   begin(tile, sums)              during the last batch of a tile: the first chain is final
//   overlap<i>(tile, sums, rows)   during batch i of the next tile, before it overwrites the sums;
//                                  or after the last tile
//   end()                          after everything
// A thread's rows are row0 and row0 + 8. kOwned: whether a warpgroup owns 64 rows or 128 columns of the tile.
// kHoldsStage: `rows` are this warp's rows of A in the tile's last stage. They are staging memory for TMA
// stores. Nobody else reads them: a warp of a wgmma reads its own 16
// rows of A. That stage is released one step later, after wait_read(), so a contraction has at least
// kMinStepsHoldingStage steps.
constexpr int kMinStepsHoldingStage = 3;
template <class Wgmma, class Shared, class Epilogue> struct OverlappedMainloop {
    static constexpr bool kRowsOwned = Epilogue::kOwned == Owned::rows, kHoldsStage = Epilogue::kHoldsStage;
    Shared& shared;
    Epilogue epilogue;
    int row0, steps;  // steps: the same for every tile
    uint32_t other_empty;
    uint64_t a, b;  // descriptors of the current stage, so that the next batch can be issued at once
    RingPosition<kStages> stage;
    RingPosition<kTileSlots> ring;  // slot of the next tile
    int tile = 0, done = 0;         // slots: of the current tile, of the one before it
    bool first = true, more = true;

    __device__ __forceinline__ OverlappedMainloop(const GemmProblem& p, Shared& of, int warpgroup,
                                                  const Epilogue& by)
        : shared(of),
          epilogue(by),
          row0(first_row<Epilogue::kOwned>(warpgroup)),
          steps(static_cast<int>((p.k + kFp8StageK - 1) / kFp8StageK)),
          other_empty(cluster_address(of.empty, cluster_rank() ^ 1)),
          a(k_major_descriptor(of.stages[0] + (kRowsOwned ? warpgroup * 64 : 0) * kFp8StageK)),
          b(k_major_descriptor(of.stages[0] +
                               (kTileRows + (kRowsOwned ? 0 : warpgroup * kWarpgroupCols)) * kFp8StageK)) {}

    __device__ __forceinline__ bool wait_for_tile() const {
        mbarrier_wait(&shared.tile_full[ring.index], ring.parity);
        __syncwarp();  // wgmma is issued by whole warps
        return warp_uniform(shared.tiles[ring.index].past_end) == 0;
    }
    __device__ __forceinline__ void next_stage() {
        stage.advance();
        const int bytes = static_cast<int>(kStageBytes) * (stage.index == 0 ? 1 - kStages : 1);
        a = advance_descriptor(a, bytes);
        b = advance_descriptor(b, bytes);
    }
    static __device__ __forceinline__ int before(int index) { return (index == 0 ? kStages : index) - 1; }
    __device__ __forceinline__ void release(int index) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.empty[index]);
        if (lane == 1) mbarrier_arrive_remote(other_empty + index * sizeof(Mbarrier));
    }
    __device__ __forceinline__ uint8_t* last_rows() const {
        return kHoldsStage ? shared.stages[before(stage.index)] + warp_uniform(row0) * kStageRowBytes
                           : nullptr;
    }
    template <class Scales> __device__ __forceinline__ void prefetch_next_tile(Scales& scales) {
        more = wait_for_tile();
        if (more) scales.prefetch(shared.tiles[ring.index]);
    }
    template <class Scales> __device__ __forceinline__ void read_step(Scales& scales, int step) const {
        scales.read_step(step, shared.row_scales[stage.index], row0);
    }

    template <Step kStep, class Scales>
    __device__ __forceinline__ void run_step(int step, Scales& scales, float (&sum)[2][64]) {
        constexpr bool kFirst = kStep == Step::first || kStep == Step::only,
                       kLast = kStep == Step::last || kStep == Step::only;
        float partial[64], factor[4];
        uint8_t* rows = nullptr;
        start_mma<Wgmma>(partial, a, b);
        if (kStep == Step::second && !first) {
            epilogue.wait_read();
            release(before(before(stage.index)));
        }
        if (!kFirst || (!kHoldsStage && !first)) release(before(stage.index));
        if (kFirst && !first) {
            rows = last_rows();
            epilogue.template overlap<0>(shared.tiles[done], sum, rows);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) factor[i] = scales.factor(i);
        wait_mma(partial);
        promote<kFirst>(partial, sum[0], factor[0], factor[1]);

        start_mma<Wgmma>(partial, advance_descriptor(a, kRowsOwned ? 0 : 64 * kFp8StageK),
                         advance_descriptor(b, kRowsOwned ? kWarpgroupCols * kFp8StageK : 0));
        if (kFirst && !first) {
            epilogue.template overlap<1>(shared.tiles[done], sum, rows);
            mbarrier_arrive(&shared.tile_empty[done]);
        }
        if (kStep == Step::only) prefetch_next_tile(scales);
        if (kLast) epilogue.begin(shared.tiles[tile], sum);
        next_stage();
        if (!kLast || more) mbarrier_wait(&shared.full[stage.index], stage.parity);
        if (!kLast) {
            scales.end_step(step);
            read_step(scales, step + 1);
        } else if (more) {
            scales.start_next_tile();
            read_step(scales, 0);
        }
        wait_mma(partial);
        promote<kFirst>(partial, sum[1], factor[2], factor[3]);
    }

    template <class Scales> __device__ __forceinline__ void run_tile(Scales& scales, float (&sum)[2][64]) {
        if (!kHoldsStage && steps == 1) {
            run_step<Step::only>(0, scales, sum);
            return;
        }
        run_step<Step::first>(0, scales, sum);
        if constexpr (kHoldsStage) run_step<Step::second>(1, scales, sum);
        for (int step = kHoldsStage ? 2 : 1; step + 1 < steps; ++step)
            run_step<Step::between>(step, scales, sum);
        prefetch_next_tile(scales);
        run_step<Step::last>(steps - 1, scales, sum);
    }
};

template <class Wgmma, class Shared, class Epilogue>
__device__ void overlapped_mainloop(const GemmProblem& p, Shared& shared, int warpgroup, Epilogue epilogue) {
    OverlappedMainloop<Wgmma, Shared, Epilogue> loop(p, shared, warpgroup, epilogue);
    if (!loop.wait_for_tile()) return;
    loop.ring.advance();
    StepScales<Epilogue::kOwned> scales(p, warpgroup, loop.steps, shared.tiles[loop.tile]);
    float sum[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.0f;
    mbarrier_wait(&shared.full[loop.stage.index], loop.stage.parity);
    loop.read_step(scales, 0);
    while (loop.more) {
        loop.run_tile(scales, sum);
        loop.first = false;
        loop.done = loop.tile;
        loop.tile = loop.ring.index;
        loop.ring.advance();
    }
    loop.epilogue.template overlap<0>(shared.tiles[loop.done], sum, loop.last_rows());
    loop.epilogue.template overlap<1>(shared.tiles[loop.done], sum, loop.last_rows());
    loop.epilogue.end();
}

// ---- epilogue: BF16 rows of D
//
// Stores BF16 rows of D through shared memory and TMA: no warp waits for global memory, and other memory
// accesses of the SM do not queue after 64 KiB of stores.
//
// Staging memory of a warp's part of a chain: 16 rows of 128 columns.
struct Bf16Staging {
    alignas(1024) uint8_t boxes[kBf16Boxes][kBoxBytes];
};
CUtensorMap staging_map(const GemmProblem& p) {
    // D's base is known on the device only; rows past a group are never stored
    constexpr int64_t kAnyRows = INT32_MAX;
    return tensor_map(p.d, DType::bf16, kAnyRows, p.n, kWarpRows);
}

// A warpgroup owns all rows of its own 128 columns. The first chain is stored during the tile's last wgmma
// batch, the second chain during the second batch of the next tile. The copies of the staging boxes have two
// batches to complete.
struct StoreEpilogue {
    static constexpr Owned kOwned = Owned::columns;
    static constexpr bool kHoldsStage = false;
    const GemmProblem& p;
    const CUtensorMap* map;
    Bf16Staging& staging;  // of this warp
    int warpgroup;

    __device__ __forceinline__ void begin(const WorkTile& tile, float (&sums)[2][64]) const {
        store_block<0>(tile, sums[0]);
    }
    template <int kChain>
    __device__ __forceinline__ void overlap(const WorkTile& tile, float (&sums)[2][64], uint8_t*) const {
        if (kChain == 1) store_block<1>(tile, sums[1]);
    }
    __device__ __forceinline__ void wait_read() const {}
    // Stores in flight read this CTA's shared memory.
    __device__ __forceinline__ void end() const {
        if (threadIdx.x % 32 == 0) bulk_wait<0>();
    }

private:
    template <int kChain>
    __device__ __forceinline__ void store_block(const WorkTile& tile, float (&sum)[64]) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
        const int first = 64 * kChain + kWarpRows * warp;  // row of the tile
        zero_pads(tile, first + lane / 4, sum);
        // stmatrix: address of this lane's row of the first four matrices, upper and lower rows alternating
        const int matrix = lane / 8, row = lane % 8;
        uint32_t to = shared_address(staging.boxes) + (8 * (matrix % 2) + row) * kStageRowBytes +
                      ((matrix / 2) ^ row) * 16;
        opaque(to);
#pragma unroll
        for (int box = 0; box < kBf16Boxes; ++box) {
            if (lane == 0) bulk_wait_read<kBf16Boxes - 1>();  // this box's store, of the previous chain
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                uint32_t words[4];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int at = 4 * (8 * box + j + c / 2) + 2 * (c % 2);
                    words[c] = pack_bf16(sum[at], sum[at + 1]);
                }
                stmatrix_x4((to ^ (16 * j)) + box * kBoxBytes, words);
            }
            fence_async_shared();
            __syncwarp();
            const int column =
                static_cast<int>(tile.b_output) + warpgroup * kWarpgroupCols + box * kBf16BoxCols;
            if (first + kWarpRows > warp_uniform(tile.rows))
                store_partial_rows(tile, staging.boxes[box], first, column);
            else if (lane == 0)
                tma_store(map, staging.boxes[box], column, static_cast<int>(tile.d_row) + first);
            if (lane == 0) bulk_commit();
        }
    }
    __device__ __forceinline__ void store_partial_rows(const WorkTile& tile, const uint8_t* box, int first,
                                                       int column) const {
        for_box_pieces([&](int row, int piece) {
            const int col = column + 8 * piece;
            if (first + row < tile.rows && col < p.n)
                store_vector(reinterpret_cast<uint4*>(static_cast<Bf16*>(p.d) +
                                                      (tile.d_row + first + row) * p.n + col),
                             piece_of(box, row, piece));
        });
    }
};

// ---- epilogue: SwiGLU and quantisation
//
// A tile stores 16 KiB of FP8 values instead of 64 KiB of BF16. The 64 activations of a thread, about 1,000
// instructions per warp and tile, overlap with the tile's last wgmma batch and the first two of the next
// tile.
//
// SharedStorage with the sigmoid table in place of column scales.
template <class Unit> struct SwigluStorage {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    alignas(16) float row_scales[kStages][kTileRows];
    SigmoidTable<Unit> table;
    WorkTile tiles[kTileSlots];
    Mbarrier full[kStages], empty[kStages], tile_full[kTileSlots], tile_empty[kTileSlots];
    SharedQueue queue;
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

// A tile becomes 128 x 128 FP8 values and their scales. A warpgroup owns 64 rows of gate and up. A thread
// holds gate (first chain) and up (second chain) of 32 columns of two rows; a quad of lanes holds a whole
// 1x128 block, so it exchanges only the amax. All is in place: gate becomes silu(gate) during the tile's last
// wgmma batch. up becomes the product, and then FP8 values, during the first two batches of the next tile. A
// warp stages its 16 rows in its own rows of A.
template <class Output> class SwigluEpilogue {
public:
    using Unit = UnitOf<Output>;
    static constexpr Owned kOwned = Owned::rows;
    static constexpr bool kHoldsStage = true;

    __device__ SwigluEpilogue(const GemmProblem& p, const Output& out, const CUtensorMap* map,
                              const SigmoidTable<Unit>& table, int warpgroup)
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
        if (threadIdx.x % 32 == 0) bulk_wait<0>();
    }

private:
    // Eight table look-ups at a time.
    __device__ __forceinline__ void activate(float (&gate)[64]) const {
        const Unit unit = unit_of(out_);
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
            const uint32_t words = pack_bf16(gate[i], gate[i + 1]);
            float low, high;
            table_.of_pair(words, low, high);
            gate[i] = unit.gate(bits_float(words << 16)) * low;
            gate[i + 1] = unit.gate(bits_float(words & 0xFFFF0000u)) * high;
            if (i % 8 == 6) wgmma_fence_operand(gate);
        }
    }
    // up = silu(gate) * up, and the amax of either row
    __device__ __forceinline__ void multiply_by_up(const float (&silu)[64], float (&up)[64]) {
        const Unit unit = unit_of(out_);
        largest_[0] = largest_[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
            const uint32_t words = pack_bf16(up[i], up[i + 1]);
            up[i] = silu[i] * unit.up(bits_float(words << 16));
            up[i + 1] = silu[i + 1] * unit.up(bits_float(words & 0xFFFF0000u));
            float& largest = largest_[i / 2 % 2];
            largest = fmaxf(fmaxf(largest, fabsf(up[i])), fabsf(up[i + 1]));  // NaN ignored
        }
        wgmma_fence_operand(up);
        wgmma_fence_operand(largest_);
    }
    // Padding rows become zeros: zero_pads() clears their values, begin() has set their probability to 1, and
    // every multiplier is finite and positive.
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

    const Output& out_;
    const CUtensorMap* map_;
    const SigmoidTable<Unit>& table_;
    int row0_;
    const float* prob_base_;  // nullptr: 1
    int64_t act_offset_;
    float prob_[2], largest_[2] = {0.0f, 0.0f};
};

template <class Output>
__global__ void __launch_bounds__(kCtaThreads, 1)
    fp8_swiglu_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ CUtensorMap map_a,
                      const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_act,
                      const __grid_constant__ Output out) {
    using Storage = SwigluStorage<UnitOf<Output>>;
    run_roles<Storage>(
        [&](Storage& shared) {
            produce_operands<ScaleMode::rows_tiles, Owned::rows>(problem, shared, &map_a, &map_b);
        },
        [&](Storage& shared, int warpgroup) {
            shared.table.fill(unit_of(out), static_cast<int>(threadIdx.x) - kWarpgroup, kConsumerThreads);
            named_barrier_sync(1, kConsumerThreads);
            overlapped_mainloop<WgmmaE4m3>(
                problem, shared, warpgroup,
                SwigluEpilogue<Output>(problem, out, &map_act, shared.table, warpgroup));
        },
        [&](auto& shared) { fill_queue<TileScheduler<kFp8StageK>>(problem, shared.queue); });
}

// ---- kernels
template <class Wgmma, ScaleMode kScaleMode>
__global__ void __launch_bounds__(kCtaThreads, 1)
    fp8_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ CUtensorMap map_a,
               const __grid_constant__ CUtensorMap map_b) {
    run_roles([&](SharedStorage& shared) { produce_operands<kScaleMode>(problem, shared, &map_a, &map_b); },
              [&](SharedStorage& shared, int warpgroup) {
                  alternating_mainloop<Wgmma, kScaleMode>(problem, shared, warpgroup);
              },
              [&](auto& shared) { fill_queue<TileScheduler<kFp8StageK>>(problem, shared.queue); });
}

// SharedStorage with staging boxes of D in place of column scales.
struct OverlappedStorage {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    Bf16Staging staging[kConsumerWarps];
    alignas(16) float row_scales[kStages][kTileRows];
    WorkTile tiles[kTileSlots];
    Mbarrier full[kStages], empty[kStages], tile_full[kTileSlots], tile_empty[kTileSlots];
    SharedQueue queue;
};

template <class Wgmma>
__global__ void __launch_bounds__(kCtaThreads, 1)
    fp8_overlapped_kernel(const __grid_constant__ GemmProblem problem,
                          const __grid_constant__ CUtensorMap map_a,
                          const __grid_constant__ CUtensorMap map_b,
                          const __grid_constant__ CUtensorMap map_d) {
    run_roles<OverlappedStorage>(
        [&](OverlappedStorage& shared) {
            produce_operands<ScaleMode::rows_tiles>(problem, shared, &map_a, &map_b);
        },
        [&](OverlappedStorage& shared, int warpgroup) {
            Bf16Staging& staging = shared.staging[threadIdx.x / 32 - kWarpgroup / 32];
            overlapped_mainloop<Wgmma>(problem, shared, warpgroup,
                                       StoreEpilogue{problem, &map_d, staging, warpgroup});
        },
        [&](auto& shared) { fill_queue<TileScheduler<kFp8StageK>>(problem, shared.queue); });
}

// Scales constant along the contraction.
bool scales_constant_along_k(const GemmProblem& p) {
    const auto constant = [](const OperandScale& s) {
        return s.scales != nullptr && s.dtype == DType::f32 && s.block == 0 && s.outputs_per_scale == 1;
    };
    return constant(p.a.scale) && constant(p.b.scale);
}

}  // namespace

bool wgmma_supports_fp8(const GemmProblem& p, int64_t alignment) {
    if (!is_fp8(p.a.dtype) || p.b.dtype != DType::e4m3 || p.a.k_stride != 1 || p.b.k_stride != 1)
        return false;
    if (scales_constant_along_k(p)) return p.grouped == Grouped::rows || alignment % 16 == 0;
    const auto scaled_by_128 = [](const OperandScale& s) {
        return s.scales != nullptr && s.dtype == DType::f32 && s.block == kFp8StageK &&
               (s.outputs_per_scale == kFp8StageK || s.outputs_per_scale == 1);
    };
    const bool a_rows = p.a.scale.outputs_per_scale == 1, b_columns = p.b.scale.outputs_per_scale == 1;
    // scales of rows and of columns are bulk copies, of a tile's rows and of a warpgroup's columns
    return scaled_by_128(p.a.scale) && scaled_by_128(p.b.scale) && alignment % kTileRows == 0 &&
           (!a_rows || p.a.scale.block_stride % 4 == 0) &&
           (!a_rows || p.grouped == Grouped::rows || (b_columns && p.m % kTileRows == 0)) &&
           (!b_columns || (a_rows && p.n % kWarpgroupCols == 0 && p.b.scale.block_stride % 4 == 0 &&
                           (p.grouped == Grouped::contraction || p.groups.num_groups == 1)));
}

namespace {

template <class Wgmma>
void launch(const GemmProblem& p, const CUtensorMap& map_a, const CUtensorMap& map_b, const Launch& launch) {
    const bool a_rows = p.a.scale.outputs_per_scale == 1, b_columns = p.b.scale.outputs_per_scale == 1,
               whole = scales_constant_along_k(p);
    if (!whole && a_rows && !b_columns && p.d_dtype == DType::bf16) {
        launch_persistent<OverlappedStorage>(fp8_overlapped_kernel<Wgmma>, p, launch, map_a, map_b,
                                             staging_map(p));
        return;
    }
    const auto kernel = whole       ? fp8_kernel<Wgmma, ScaleMode::outputs>
                        : b_columns ? fp8_kernel<Wgmma, ScaleMode::rows_columns>
                        : a_rows    ? fp8_kernel<Wgmma, ScaleMode::rows_tiles>
                                    : fp8_kernel<Wgmma, ScaleMode::tiles>;
    launch_persistent<SharedStorage>(kernel, p, launch, map_a, map_b);
}

}  // namespace

void launch_wgmma_fp8(const GemmProblem& p, const StoredShape& a, const StoredShape& b, const Launch& how) {
    const CUtensorMap map_a = operand_map(p.a, a, kTileRows / 2), map_b = operand_map(p.b, b, kTileCols / 2);
    p.a.dtype == DType::e5m2 ? launch<WgmmaE5m2>(p, map_a, map_b, how)
                             : launch<WgmmaE4m3>(p, map_a, map_b, how);
}

bool launch_wgmma_swiglu(const op::GroupedGemmSwigluQuantize& args, const GemmCall& call,
                         const Launch& launch) {
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
    with_unit(args.form, out, [&](const auto& of) {
        using Output = std::decay_t<decltype(of)>;
        launch_persistent<SwigluStorage<UnitOf<Output>>>(fp8_swiglu_kernel<Output>, p, launch, map_a, map_b,
                                                         map_act, of);
    });
    return true;
}

}  // namespace fp8flow::hopper::gemm
