// SPDX-License-Identifier: MIT
// Any GEMM of BF16 or FP8 operands on tensor cores (mma.sync), where sm90/ does not support it. FP8 values
// are decoded to BF16 (exact) on their way into shared memory, so products are exact and only the order of
// the FP32 additions differs from simt.cu. Group sizes are read on the device.
#include "kernels/hopper/device/mma.h"
#include "kernels/hopper/gemm/problem.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;  // rows and columns of D; 8 warps as 2 x 4, each 64 x 32
constexpr int kChunk = 32;  // contraction of one stage; divides every scale block
constexpr int kStages = 2;
constexpr int kOcts =
    kTile * kChunk / 8 / kThreads;  // pieces of 8 elements that a thread moves, of each operand
// 16-bit elements between rows in shared memory: eight rows at one column fall on different banks
constexpr int kAlongLd = kChunk + 8, kAcrossLd = kTile + 8;
constexpr int kStageElements = kTile * kAlongLd;
static_assert(kChunk * kAcrossLd <= kStageElements && kBlock % kChunk == 0 && kMxBlock % kChunk == 0);

// Tiles lie in shared memory as in global memory: along the contraction ([output][k]) or across it
// ([k][output]).
template <bool kAlong> __device__ __forceinline__ int place(int output, int k) {
    return kAlong ? output * kAlongLd + k : k * kAcrossLd + output;
}

// The first element of piece `piece` of this thread, within the tile.
struct Spot {
    int output, k;
};
template <bool kAlong> __device__ __forceinline__ Spot spot_of(int piece) {
    const int q = static_cast<int>(threadIdx.x) + piece * kThreads;
    if constexpr (kAlong) return {q / (kChunk / 8), q % (kChunk / 8) * 8};
    return {q % (kTile / 8) * 8, q / (kTile / 8)};
}

// Eight neighbouring elements of `width` bytes, undecoded; zeros from `count` on. One load where aligned.
__device__ __forceinline__ uint4 load_raw(const void* data, int width, int64_t offset, int64_t count) {
    uint32_t words[4] = {};
    const uint8_t* at = static_cast<const uint8_t*>(data) + offset * width;
    if (count >= 8 && reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(8 * width) == 0) {
        if (width == 2) return *reinterpret_cast<const uint4*>(at);
        const uint2 fp8 = *reinterpret_cast<const uint2*>(at);
        return {fp8.x, fp8.y, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i >= count) continue;
        if (width == 2)
            words[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(at)[i]) << (16 * (i % 2));
        else
            words[i / 4] |= static_cast<uint32_t>(at[i]) << (8 * (i % 4));
    }
    return {words[0], words[1], words[2], words[3]};
}

// Two FP8 values as two BF16 values; every finite FP8 value of either format is a BF16 number.
__device__ __forceinline__ uint32_t decode_pair(uint32_t fp8, __nv_fp8_interpretation_t kind) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(fp8 & 0xFFFFu);
    const float2 x = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, kind)));
    return (float_bits(x.x) >> 16) | (float_bits(x.y) & 0xFFFF0000u);
}
__device__ __forceinline__ uint4 decode(const uint4& raw, DType dtype) {
    if (dtype == DType::bf16) return raw;
    const __nv_fp8_interpretation_t kind = dtype == DType::e5m2 ? __NV_E5M2 : __NV_E4M3;
    return {decode_pair(raw.x, kind), decode_pair(raw.x >> 16, kind), decode_pair(raw.y, kind),
            decode_pair(raw.y >> 16, kind)};
}

// Reads this thread's pieces of the tile that begins at `first`; zeros outside `outputs` x `depth`.
template <bool kAlong>
__device__ __forceinline__ void fetch(const GemmOperand& operand, int64_t first, int64_t outputs,
                                      int64_t depth, uint4 (&raw)[kOcts]) {
    const int width = operand.dtype == DType::bf16 ? 2 : 1;
#pragma unroll
    for (int piece = 0; piece < kOcts; ++piece) {
        const Spot spot = spot_of<kAlong>(piece);
        const int64_t left = kAlong ? (spot.output < outputs ? depth - spot.k : 0)
                                    : (spot.k < depth ? outputs - spot.output : 0);
        raw[piece] = load_raw(operand.data, width,
                              first + spot.output * operand.output_stride + spot.k * operand.k_stride, left);
    }
}
template <bool kAlong>
__device__ __forceinline__ void put(const uint4 (&raw)[kOcts], DType dtype, uint16_t* tile) {
#pragma unroll
    for (int piece = 0; piece < kOcts; ++piece) {
        const Spot spot = spot_of<kAlong>(piece);
        *reinterpret_cast<uint4*>(tile + place<kAlong>(spot.output, spot.k)) = decode(raw[piece], dtype);
    }
}

struct Shared {
    alignas(16) uint16_t a[kStages][kStageElements];
    alignas(16) uint16_t b[kStages][kStageElements];
    float scale_a[2][kTile];  // of the current and of the next scale block
    float scale_b[2][kTile];
    Tile tile;
};

// sum [4][4] tiles of 16 x 8 of this warp += A B over one stage.
template <bool kAlongA, bool kAlongB>
__device__ __forceinline__ void multiply_stage(const uint16_t* a_tile, const uint16_t* b_tile, int row0,
                                               int col0, float (&sum)[4][4][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
        uint32_t a[4][4], b[2][4];
        // matrices of A: rows 0-7 and 8-15 at k, then both at k + 8
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = row0 + 16 * i + middle + (kAlongA ? low : 0),
                      at_k = k + high + (kAlongA ? 0 : low);
            ldmatrix_x4<!kAlongA>(a_tile + place<kAlongA>(row, at_k), a[i]);
        }
        // matrices of B: columns 0-7 at k and k + 8, then columns 8-15
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int col = col0 + 16 * j + high + (kAlongB ? low : 0),
                      at_k = k + middle + (kAlongB ? 0 : low);
            ldmatrix_x4<!kAlongB>(b_tile + place<kAlongB>(col, at_k), b[j]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                mma_bf16(a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], sum[i][j]);
    }
}

// Writes, or adds, two neighbouring elements of D, or the first only; one store where aligned.
__device__ __forceinline__ void write_pair(const GemmProblem& problem, int64_t row, int64_t col,
                                           int64_t count, float x, float y) {
    if (problem.d_dtype == DType::bf16 && problem.mode == Gradient::accumulate) {
        if (count > 0) store_sum(problem, row, col, x);
        if (count > 1) store_sum(problem, row, col + 1, y);
        return;
    }
    const int64_t at = row * problem.n + col;
    const int width = problem.d_dtype == DType::bf16 ? 2 : 4;
    uint8_t* d = static_cast<uint8_t*>(problem.d) + at * width;
    const bool whole = count >= 2 && reinterpret_cast<uintptr_t>(d) % static_cast<uintptr_t>(2 * width) == 0;
    if (problem.mode == Gradient::accumulate) {
        float* sum = reinterpret_cast<float*>(d);
        if (whole) {
            const float2 before = *reinterpret_cast<const float2*>(sum);
            *reinterpret_cast<float2*>(sum) = {before.x + x, before.y + y};
            return;
        }
        if (count > 0) sum[0] += x;
        if (count > 1) sum[1] += y;
    } else if (whole && problem.d_dtype == DType::bf16) {
        *reinterpret_cast<uint32_t*>(d) = to_bf16(x).bits | static_cast<uint32_t>(to_bf16(y).bits) << 16;
    } else if (whole) {
        *reinterpret_cast<float2*>(d) = {x, y};
    } else {
        if (count > 0) store_float(problem.d, problem.d_dtype, at, x);
        if (count > 1) store_float(problem.d, problem.d_dtype, at + 1, y);
    }
}

// Order of the contraction, 32 at a time; scaled operands always ascending.
enum class ChunkOrder { ascending, descending };

// Loads the next stage of a thread: its pieces of both operands and, at the first stage of a scale block, the
// scale of row `thread` of A or of column `thread - kTile` of B.
template <bool kScaled, bool kAlongA, bool kAlongB> struct Loader {
    const GemmProblem& problem;
    const Tile& tile;
    ChunkOrder order;
    int64_t cols, depth, block;  // columns of the tile; terms; terms that share a scale, 0: all
    int64_t a_first, b_first;
    uint4 raw_a[kOcts], raw_b[kOcts];
    float scale = 0.0f;

    __device__ __forceinline__ Loader(const GemmProblem& of, const Tile& at, ChunkOrder in, int64_t block_of)
        : problem(of),
          tile(at),
          order(in),
          cols(min(of.n - at.b_output, int64_t{kTile})),
          depth(at.valid > 0 ? at.k : 0),
          block(block_of),
          a_first(of.a.at(at.group, at.a_output, at.a_k)),
          b_first(of.b.at(at.group, at.b_output, at.b_k)) {}
    __device__ __forceinline__ bool starts_block(int64_t k) const {
        return k == 0 || (block != 0 && k % block == 0);
    }
    __device__ __forceinline__ void read(int64_t k0) {
        const int64_t at =
            !kScaled && order == ChunkOrder::descending ? (depth - 1) / kChunk * kChunk - k0 : k0;
        fetch<kAlongA>(problem.a, a_first + at * problem.a.k_stride, tile.valid, depth - at, raw_a);
        fetch<kAlongB>(problem.b, b_first + at * problem.b.k_stride, cols, depth - at, raw_b);
        if (!kScaled || !starts_block(k0)) return;
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < kTile) {
            if (thread < tile.valid)
                scale = load_scale(problem.a.scale, tile.group, tile.a_output + thread, tile.a_k + k0);
        } else if (thread - kTile < cols) {
            scale = load_scale(problem.b.scale, tile.group, tile.b_output + thread - kTile, tile.b_k + k0);
        }
    }
};

// sum += partial * scale of the row * scale of the column, and partial = 0; at the end of a scale block.
__device__ __forceinline__ void promote(const float (&scale_a)[kTile], const float (&scale_b)[kTile],
                                        int row0, int col0, float (&partial)[4][4][4],
                                        float (&sum)[4][4][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float factor = scale_a[row0 + 16 * i + lane / 4 + e / 2 * 8] *
                                     scale_b[col0 + 8 * j + lane % 4 * 2 + e % 2];
                sum[i][j][e] = fma_float(partial[i][j][e], factor, sum[i][j][e]);
                partial[i][j][e] = 0.0f;
            }
        }
    }
}

// Writes this warp's part of the tile; pads get 0.
__device__ __forceinline__ void write_tile(const GemmProblem& problem, const Tile& tile, int64_t cols,
                                           int row0, int col0, const float (&sum)[4][4][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + 16 * i + lane / 4 + 8 * half;
            if (row >= tile.rows) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* result = sum[i][j] + 2 * half;
                const int col = col0 + 8 * j + lane % 4 * 2;
                const bool pad = row >= tile.valid;
                write_pair(problem, tile.d_row + row, tile.b_output + col, cols - col, pad ? 0.0f : result[0],
                           pad ? 0.0f : result[1]);
            }
        }
    }
}

// D(i, j) (+)= sum over k of A(i, k) B(j, k). Bytes: each operand tile once per tile of D across it (A n/128
// times, B m/128 times, mostly from L2), D once; 2*m*n*k FLOPs. CTA: tiles of 128 x 128 of D, one after the
// other, 8 warps of 64 x 32; the next stage of 32 is loaded into registers while tensor cores work on the
// current one. Barriers: two around the tile's description, then one per stage: after it all writes to this
// stage are visible and nobody reads the other stage, which is written next. The scales of a block are
// double-buffered in the same way. Deterministic: an output is one warp's sum over ascending k, promoted at
// every scale block, and has one writer.
template <bool kScaled, bool kAlongA, bool kAlongB>
__global__ void __launch_bounds__(kThreads, kScaled ? 1 : 2)
    mma_kernel(GemmProblem problem, int64_t num_tiles, ChunkOrder order) {
    __shared__ Shared shared;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    const int row0 = warp / 4 * 64, col0 = warp % 4 * 32;
    const int64_t block = promotion_block(problem);
    for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        __syncthreads();
        if (thread == 0) shared.tile = find_tile(problem, index, kTile, kTile);
        __syncthreads();
        const Tile tile = shared.tile;
        if (tile.past_end) return;
        if (tile.rows <= 0) continue;
        Loader<kScaled, kAlongA, kAlongB> next(problem, tile, order, block);
        float sum[4][4][4] = {}, partial[4][4][4] = {};
        int stage = 0, scales = 0;
        if (next.depth > 0) next.read(0);
        for (int64_t k0 = 0; k0 < next.depth; k0 += kChunk) {
            put<kAlongA>(next.raw_a, problem.a.dtype, shared.a[stage]);
            put<kAlongB>(next.raw_b, problem.b.dtype, shared.b[stage]);
            if (kScaled && next.starts_block(k0)) {
                scales ^= 1;
                (thread < kTile ? shared.scale_a[scales] : shared.scale_b[scales])[thread % kTile] =
                    next.scale;
            }
            __syncthreads();
            const int64_t done = k0 + kChunk;
            if (done < next.depth) next.read(done);
            multiply_stage<kAlongA, kAlongB>(shared.a[stage], shared.b[stage], row0, col0, partial);
            stage ^= 1;
            if (kScaled && (done >= next.depth || next.starts_block(done)))
                promote(shared.scale_a[scales], shared.scale_b[scales], row0, col0, partial, sum);
        }
        write_tile(problem, tile, next.cols, row0, col0, kScaled ? sum : partial);
    }
}

bool supports(DType dtype) { return dtype == DType::bf16 || is_fp8(dtype); }

}  // namespace

void launch_fallback(const GemmProblem& problem, GemmBackend backend, const Launch& launch) {
    if (backend == GemmBackend::simt || !supports(problem.a.dtype) || !supports(problem.b.dtype)) {
        launch_simt(problem, launch);
        return;
    }
    const int64_t tiles = row_tiles_bound(problem, kTile) * ceil_div(problem.n, kTile);
    if (tiles == 0) return;
    const bool scaled = problem.scaled();
    // an operand of one output or one step is contiguous either way, so the strides do not always tell the
    // form
    const bool along_a = problem.a.k_stride == 1, along_b = problem.b.k_stride == 1;
    const auto kernel = scaled               ? mma_kernel<true, true, true>
                        : along_a && along_b ? mma_kernel<false, true, true>
                        : along_a            ? mma_kernel<false, true, false>
                        : along_b            ? mma_kernel<false, false, true>
                                             : mma_kernel<false, false, false>;
    const ChunkOrder order =
        backend == GemmBackend::alternative ? ChunkOrder::descending : ChunkOrder::ascending;
    launch_kernel(kernel, grid_for(tiles, launch, scaled ? 1 : 2), kThreads, launch, "GEMM (mma)", problem,
                  tiles, order);
}

}  // namespace fp8flow::hopper::gemm
