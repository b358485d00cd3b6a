// Grouped FP8 products with one scale per 128 elements of the contraction, on Hopper's warpgroup instructions: forward and data gradient
// (rows grouped), and the weight gradient from transposed copies (contraction grouped). Group sizes are read on the device.
// Read next: gemm_device.h (what a product is), device/wgmma.h, device/mbarrier.h.
//
// Floor: 2 m n k FLOPs at the tensor cores' FP8 rate; every operand read once and D written once (and read once, if accumulated).
// One CTA: a loading warp and two computing warpgroups, on every multiprocessor, walking tiles of 128 x 256 of D in a fixed order. The
// loader owns the walk over the groups: it puts a description of each tile into a ring of two and streams the tile's operands, 128 of
// the contraction at a time, through a ring of four stages. Each warpgroup multiplies all 128 rows by its own 128 columns, 64 rows at a
// time: tensor cores sum 128 products, then CUDA cores scale that sum and add it to the FP32 result in registers. While one
// warpgroup adds, the other keeps the tensor cores busy.
//
// Shared memory: 4 stages of [128 rows of A | 256 rows of B] x 128 bytes, 128-byte swizzled; then barriers and the ring of tiles.
// Barriers: full[s] one arrival + 48 KiB of copies, waited for by the computing warps; empty[s] one arrival a computing warp after
// its last product from the stage; tile_full[r] one arrival of the loader, tile_empty[r] one a computing warp that has read it.
// Deterministic: an element of D is one thread's sum over ascending k, whatever the other groups hold.
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm_device.h"

#include <cuda.h>
#include <cuda_bf16.h>

namespace fp8flow::hopper {

namespace {

constexpr int kTileRows = 128, kTileCols = 256, kDepth = 128;  // of D, and of the contraction in one stage
constexpr int kWarpgroup = 128, kMathWarpgroups = 2, kMathWarps = kMathWarpgroups * 4;
constexpr int kThreads = (1 + kMathWarpgroups) * kWarpgroup;
constexpr int kStages = 4, kRing = 2;
constexpr int kBand =
    16;  // row tiles that are walked together: a wave of CTAs covers a square of D, so operands are read from L2
constexpr uint32_t kStageBytes = (kTileRows + kTileCols) * kDepth;
constexpr int kLoaderRegisters = 56, kMathRegisters = 224;

// What the computing warps need to know of a tile.
struct MathTile {
    int64_t group;
    int64_t a_output, b_output;  // first row in A's scales, first column in B's
    int64_t a_k, b_k;            // first contraction index in A's and B's scales
    int64_t d_row;               // first row of D
    int32_t steps;               // stages of the contraction
    int32_t rows, valid;  // rows of D to write, of which the first `valid` hold products and the others zeros
    int32_t past_end;
};

struct Shared {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    MathTile tiles[kRing];
    Barrier full[kStages], empty[kStages], tile_full[kRing], tile_empty[kRing];
};
constexpr size_t kSharedBytes = sizeof(Shared) + 1024;  // the stages are aligned inside

// A position in a ring and the parity of its current use.
template <int kSize> struct RingPosition {
    int index = 0;
    uint32_t parity = 0;
    __device__ void advance() {
        if (++index == kSize) {
            index = 0;
            parity ^= 1;
        }
    }
};

// The tiles of all groups in order; asked for ascending indices.
class TileWalk {
public:
    __device__ explicit TileWalk(const DeviceProduct& product)
        : p_(product), col_tiles_((product.n + kTileCols - 1) / kTileCols) {
        enter_group();
    }
    // False past the last tile.
    __device__ bool find(int64_t index, MathTile& tile) {
        while (index >= first_ + row_tiles_ * col_tiles_) {
            first_ += row_tiles_ * col_tiles_;
            if (++group_ >= p_.groups.num_groups) return false;
            enter_group();
        }
        const int64_t local = index - first_, band = local / (kBand * col_tiles_),
                      in_band = local % (kBand * col_tiles_),
                      height = min(int64_t{kBand}, row_tiles_ - band * kBand);
        const int64_t row = (band * kBand + in_band % height) * kTileRows;
        tile.group = group_;
        tile.b_output = in_band / height * kTileCols;
        tile.rows = static_cast<int32_t>(min(rows_ - row, int64_t{kTileRows}));
        if (p_.grouped == Grouped::contraction) {
            tile.a_output = row;
            tile.a_k = p_.a.base() + offset_;
            tile.b_k = p_.b.base() + offset_;
            tile.d_row = group_ * p_.m + row;
            tile.valid = tile.rows;
            tile.steps = static_cast<int32_t>((count_ + kDepth - 1) / kDepth);
        } else {
            tile.a_output = p_.a.base() + offset_ + row;
            tile.a_k = tile.b_k = 0;
            tile.d_row = (p_.d_row_base != nullptr ? *p_.d_row_base : 0) + offset_ + row;
            tile.valid = static_cast<int32_t>(max(min(count_ - row, int64_t{tile.rows}), int64_t{0}));
            tile.steps = static_cast<int32_t>((p_.k + kDepth - 1) / kDepth);
        }
        return true;
    }

private:
    __device__ void enter_group() {
        count_ = p_.groups.count(group_);
        offset_ = p_.groups.offset(group_);
        if (p_.grouped == Grouped::contraction)  // a group without rows adds nothing
            rows_ = count_ == 0 && p_.mode == Gradient::accumulate ? 0 : p_.m;
        else
            rows_ = p_.groups.offset(group_ + 1) - offset_;
        row_tiles_ = (rows_ + kTileRows - 1) / kTileRows;
    }

    const DeviceProduct& p_;
    int64_t col_tiles_;
    int64_t group_ = 0, first_ = 0;  // first tile of the group
    int64_t count_ = 0, offset_ = 0, rows_ = 0, row_tiles_ = 0;
};

// ---- loading: one thread --------------------------------------------------------------------------------------------------------------
__device__ void load_tiles(const DeviceProduct& p, const CUtensorMap* map_a, const CUtensorMap* map_b,
                           Shared& shared) {
    prefetch_tensor_map(map_a);
    prefetch_tensor_map(map_b);
    TileWalk walk(p);
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;
    for (int64_t index = blockIdx.x;; index += gridDim.x) {
        MathTile tile{};
        tile.past_end = !walk.find(index, tile);
        barrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        barrier_arrive(&shared.tile_full[ring.index]);
        if (tile.past_end) return;
        ring.advance();
        const int a_row = static_cast<int>(tile.a_output);
        const int b_row =
            static_cast<int>((p.grouped == Grouped::rows ? tile.group * p.n : 0) + tile.b_output);
        for (int step = 0; step < tile.steps; ++step) {
            barrier_wait(&shared.empty[stage.index], stage.parity ^ 1);
            uint8_t* a = shared.stages[stage.index];
            barrier_arrive_expect_bytes(&shared.full[stage.index], kStageBytes);
            tensor_load(map_a, &shared.full[stage.index], a, static_cast<int>(tile.a_k) + step * kDepth,
                        a_row);
            tensor_load(map_b, &shared.full[stage.index], a + kTileRows * kDepth,
                        static_cast<int>(tile.b_k) + step * kDepth, b_row);
            stage.advance();
        }
    }
}

// ---- storing: from registers, 16 bytes (BF16) or 8 bytes (FP32) a thread and access ---------------------------------------------------
// A quad of lanes holds 4 chunks of 8 columns, each lane 2 columns of every chunk; afterwards lane q holds all of chunk q.
__device__ __forceinline__ uint4 gather_chunk(uint32_t (&w)[4]) {
    const unsigned lane = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
        const bool odd = lane & 1;
        const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[c] : w[c + 1], 1);
        if (odd)
            w[c] = received;
        else
            w[c + 1] = received;
    }
    const bool high = lane & 2;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, high ? w[c] : w[c + 2], 2);
        if (high)
            w[c] = received;
        else
            w[c + 2] = received;
    }
    return {w[0], w[1], w[2], w[3]};
}

__device__ __forceinline__ uint32_t pack_bf16(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);  // one instruction; to_bf16's rounding
    return *reinterpret_cast<const uint32_t*>(&pair);
}

enum class RowUse { none, zero, product };
using First = std::integral_constant<int, 0>;
using Second = std::integral_constant<int, 1>;

// One of the two rows that a thread holds of 64 x 128 sums: `values` is the first, d[4 * j] and d[4 * j + 1] its columns 8 * j + 2 * quad.
template <int kPair>
__device__ __forceinline__ void store_row(const DeviceProduct& p, int64_t row, int64_t col0,
                                          const float (&sum)[64], RowUse use) {
    const int quad = static_cast<int>(threadIdx.x % 4);
    if (p.d_dtype == DType::bf16) {
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int at = 4 * (j + c) + 2 * kPair;
                words[c] = use == RowUse::product ? pack_bf16(sum[at], sum[at + 1]) : 0;
            }
            const uint4 chunk = gather_chunk(words);
            const int64_t col = col0 + 8 * (j + quad);
            if (use != RowUse::none && col < p.n)
                *reinterpret_cast<uint4*>(static_cast<Bf16*>(p.d) + row * p.n + col) = chunk;
        }
        return;
    }
    if (use == RowUse::none) return;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const int64_t col = col0 + 8 * j + 2 * quad;
        if (col >= p.n) continue;
        const int at = 4 * j + 2 * kPair;
        float2* d = reinterpret_cast<float2*>(static_cast<float*>(p.d) + row * p.n + col);
        float2 value = use == RowUse::product ? float2{sum[at], sum[at + 1]} : float2{0.0f, 0.0f};
        if (p.mode == Gradient::accumulate) {
            const float2 before = *d;
            value = {before.x + value.x, before.y + value.y};
        }
        *d = value;
    }
}

// ---- computing: one warpgroup -----------------------------------------------------------------------------------------------------------
// kRowScales: A has a scale per row, otherwise one per 128 rows; B one per 128 columns.
template <class Wgmma, bool kRowScales>
__device__ void multiply_tiles(const DeviceProduct& p, Shared& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * 16 + lane / 4;  // this thread's rows: row0 + {0, 8} of each 64
    const float* scales_a = static_cast<const float*>(p.a.scale.scales);
    const float* scales_b = static_cast<const float*>(p.b.scale.scales);
    constexpr int kRows = kRowScales ? 4 : 1;
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;
    for (;;) {
        barrier_wait(&shared.tile_full[ring.index], ring.parity);
        const MathTile tile = shared.tiles[ring.index];
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.tile_empty[ring.index]);
        if (tile.past_end) return;
        ring.advance();

        const int64_t col0 = tile.b_output + warpgroup * kTileRows;
        const float* at_a = scales_a + tile.group * p.a.scale.group_stride +
                            (tile.a_output + (kRowScales ? row0 : 0)) / p.a.scale.outputs_per_scale *
                                p.a.scale.output_stride +
                            tile.a_k / kDepth * p.a.scale.block_stride;
        const float* at_b = scales_b + tile.group * p.b.scale.group_stride +
                            min(col0, p.n - 1) / p.b.scale.outputs_per_scale * p.b.scale.output_stride +
                            tile.b_k / kDepth * p.b.scale.block_stride;
        float scale_a[kRows] = {}, scale_b = 0.0f;
        const auto read_scales = [&] {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                scale_a[i] = at_a[64 * (i / 2) + 8 * (i % 2)];  // rows lie side by side
            scale_b = *at_b;
            at_a += p.a.scale.block_stride;
            at_b += p.b.scale.block_stride;
        };
        float sum[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i)
            sum[0][i] = sum[1][i] = 0.0f;  // a loop that stays one would put them in local memory
        if (tile.steps > 0) read_scales();
        for (int step = 0; step < tile.steps; ++step) {
            float factor[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) factor[i] = scale_a[i] * scale_b;
            barrier_wait(&shared.full[stage.index], stage.parity);
            const uint8_t* a = shared.stages[stage.index];
            const uint64_t b = swizzled_rows(a + (kTileRows + warpgroup * kTileRows) * kDepth);
            // 64 rows: sums of 128 products, scaled and added. `meanwhile` runs while tensor cores work, `read` once they have the operands.
            const auto multiply = [&](const uint8_t* rows, float(&result)[64], float above, float below,
                                      auto meanwhile, auto read) {
                float partial[64];
                const uint64_t a = swizzled_rows(rows);
                wgmma_fence();
                keep_in_place(partial);
#pragma unroll
                for (int k = 0; k < kDepth / 32; ++k) Wgmma::multiply(partial, a + 2 * k, b + 2 * k, k > 0);
                wgmma_commit();
                meanwhile();
                wgmma_wait<0>();
                keep_in_place(partial);
                read();
#pragma unroll
                for (int i = 0; i < 64; ++i)
                    result[i] = fma_float(partial[i], i / 2 % 2 == 0 ? above : below, result[i]);
            };
            multiply(
                a, sum[0], factor[0], factor[kRows > 1 ? 1 : 0],
                [&] {
                    if (step + 1 < tile.steps) read_scales();
                },
                [] {});
            multiply(
                a + 64 * kDepth, sum[1], factor[kRows / 2], factor[kRows - 1], [] {},
                [&] {
                    if (lane == 0) barrier_arrive(&shared.empty[stage.index]);
                });
            stage.advance();
        }
        const auto store = [&](int row, auto pair, const float(&values)[64]) {
            store_row<pair.value>(p, tile.d_row + row, col0, values,
                                  row >= tile.rows    ? RowUse::none
                                  : row >= tile.valid ? RowUse::zero
                                                      : RowUse::product);
        };
        store(row0, First{}, sum[0]);
        store(row0 + 8, Second{}, sum[0]);
        store(row0 + 64, First{}, sum[1]);
        store(row0 + 72, Second{}, sum[1]);
    }
}

template <class Wgmma, bool kRowScales>
__global__ void __launch_bounds__(kThreads, 1)
    wgmma_kernel(const __grid_constant__ DeviceProduct product, const __grid_constant__ CUtensorMap map_a,
                 const __grid_constant__ CUtensorMap map_b) {
    extern __shared__ uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(&shared.full[s], 1);
            barrier_init(&shared.empty[s], kMathWarps);
        }
        for (int r = 0; r < kRing; ++r) {
            barrier_init(&shared.tile_full[r], 1);
            barrier_init(&shared.tile_empty[r], kMathWarps);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int role = static_cast<int>(threadIdx.x) / kWarpgroup;
    if (role == 0) {
        give_registers<kLoaderRegisters>();
        if (threadIdx.x == 0) load_tiles(product, &map_a, &map_b, shared);
    } else {
        take_registers<kMathRegisters>();
        multiply_tiles<Wgmma, kRowScales>(product, shared, role - 1);
    }
}

// A tensor of FP8 codes, read in boxes of `box_rows` rows x 128 codes.
CUtensorMap map_of(const DeviceOperand& operand, int64_t rows, int64_t cols, int box_rows) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found{};
        check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found),
                   "looking for cuTensorMapEncodeTiled");
        return reinterpret_cast<Encode>(entry);
    }();
    CUtensorMap map{};
    const cuuint64_t dims[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(operand.output_stride)};
    const cuuint32_t box[2] = {kDepth, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
    const CUresult result =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(operand.codes), dims, strides, box,
               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    FP8FLOW_CHECK(result == CUDA_SUCCESS, "describing a {} x {} operand to the copy engine: error {}", rows,
                  cols, static_cast<int>(result));
    return map;
}

bool aligned16(const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 16 == 0;
}

}  // namespace

bool wgmma_takes(const DeviceProduct& p, int64_t alignment) {
    const auto scaled_by_128 = [](const DeviceScale& s) {
        return s.scales != nullptr && s.dtype == DType::f32 && s.block == kDepth;
    };
    const auto codes = [](const DeviceOperand& o) {
        return is_fp8(o.dtype) && o.k_stride == 1 && aligned16(o.codes, o.output_stride);
    };
    return codes(p.a) && codes(p.b) && p.b.dtype == DType::e4m3 && scaled_by_128(p.a.scale) &&
           scaled_by_128(p.b.scale) &&
           (p.a.scale.outputs_per_scale == 1 || p.a.scale.outputs_per_scale == kDepth) &&
           p.b.scale.outputs_per_scale == kDepth && alignment % kTileRows == 0 &&
           p.n % (p.d_dtype == DType::bf16 ? 8 : 2) == 0 && reinterpret_cast<uintptr_t>(p.d) % 16 == 0 &&
           (p.grouped == Grouped::rows || p.a.scale.outputs_per_scale == kDepth);
}

void launch_wgmma(const DeviceProduct& p, int64_t a_rows, int64_t b_rows, int64_t a_cols, int64_t b_cols,
                  const Launch& launch) {
    const int64_t tiles = row_tiles_bound(p, kTileRows) * ceil_div(p.n, kTileCols);
    if (tiles == 0 || a_cols == 0 || b_cols == 0) return;
    const CUtensorMap map_a = map_of(p.a, a_rows, a_cols, kTileRows),
                      map_b = map_of(p.b, b_rows, b_cols, kTileCols);
    const bool row_scales = p.a.scale.outputs_per_scale == 1, e5m2 = p.a.dtype == DType::e5m2;
    const auto kernel = row_scales ? (e5m2 ? wgmma_kernel<WgmmaE5m2, true> : wgmma_kernel<WgmmaE4m3, true>)
                                   : (e5m2 ? wgmma_kernel<WgmmaE5m2, false> : wgmma_kernel<WgmmaE4m3, false>);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
               "shared memory of a product");
    kernel<<<grid_for(tiles, launch, 1), kThreads, kSharedBytes, stream_of(launch)>>>(p, map_a, map_b);
    check_launch("product (wgmma)");
}

}  // namespace fp8flow::hopper
