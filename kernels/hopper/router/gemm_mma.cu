// SPDX-License-Identifier: MIT
// The router's GEMMs with mma.sync, for few experts and for what gemm_wgmma.cu does not support. BF16
// operands give exact products; dlogits are two BF16 parts. One kernel template for logits, dx and dweight,
// which differ in operand layout and epilogue. Contract: kernels/ops/router.h.
#include "kernels/hopper/router/gemm.h"

#include "kernels/hopper/device/mma.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/runtime/launch.h"

#include <cuda_pipeline.h>

namespace fp8flow::hopper::router {

namespace {

constexpr int kPiece =
    8;  // BF16 values of a 16-byte copy; as row padding, it keeps eight rows of a tile in different banks
constexpr int kDepthOfMma = 16;

enum class Kind { logits, weight, input };

// Tiling of a CTA: kRows x kCols outputs, kDepth terms in a stage.
template <Kind kKindOf, int kRowsOf, int kColsOf, int kWarpsDown, int kWarpsAcross, int kDepthOf,
          int kStagesOf, int kCtasOf>
struct Tiling {
    static constexpr Kind kKind = kKindOf;
    static constexpr int kRows = kRowsOf, kCols = kColsOf, kDepth = kDepthOf, kStages = kStagesOf,
                         kCtasPerSm = kCtasOf;
    static constexpr int kColWarps = kWarpsAcross, kThreads = kWarpsDown * kWarpsAcross * kWarpSize;
    static constexpr int kWarpRows = kRows / kWarpsDown, kWarpCols = kCols / kWarpsAcross;
    // An operand is contiguous along the contraction ([output][term]) or across it ([term][output]), in
    // global and in shared memory.
    static constexpr bool kAlongA = kKind != Kind::weight, kAlongB = kKind == Kind::logits;
    static constexpr int kParts = kKind == Kind::logits ? 1 : 2;  // of A
    static constexpr bool kBlocks = kKind != Kind::input;         // sums of blocks of op::kRouterBlock
    static constexpr int kStagesOfBlock = static_cast<int>(op::kRouterBlock) / kDepth;
    static constexpr int kLineA = (kAlongA ? kDepth : kRows) + kPiece,
                         kLineB = (kAlongB ? kDepth : kCols) + kPiece;
    static constexpr int kElementsA = (kAlongA ? kRows : kDepth) * kLineA,
                         kElementsB = (kAlongB ? kCols : kDepth) * kLineB;
    static constexpr int kStageElements = kParts * kElementsA + kElementsB;
    static constexpr int kOutLine = kCols + kPiece;  // floats between the rows of the finished tile
    static constexpr int kSharedBytes = kStages * kStageElements * 2;
    static_assert(kWarpRows % 16 == 0 && kWarpCols % 16 == 0 && op::kRouterBlock % kDepth == 0);
    static_assert(kRows * kDepth % (kPiece * kThreads) == 0 && kCols * kDepth % (kPiece * kThreads) == 0);
    static_assert(kRows * kCols % (kPiece * kThreads) == 0 && kStageElements % kPiece == 0);
    static_assert(kRows * kOutLine * 4 <= kSharedBytes, "the finished tile takes the place of the stages");
};

struct GemmArgs {
    const uint16_t* a;  // parts `a_part` elements apart, lines a_line apart
    int64_t a_part, a_line;
    const uint16_t* b;
    int64_t b_line;
    int64_t rows, cols, terms;
    void* out;               // [rows, cols]: f32; of input: bf16
    const uint16_t* addend;  // of input: bf16, or null
    Gradient mode;
    bool wide;                             // f32 out: rows of whole, aligned 16-byte words
    int64_t row_tiles, col_tiles, blocks;  // blocks: of terms that are written separately (weight), else 1
};

// Issues the asynchronous copy of one tile; zeros where there is nothing to read. Lines of A that hold
// experts are padded with zeros to a multiple of eight.
template <class T, bool kAlong, int kOutputs, int kLine>
__device__ __forceinline__ void start_tile(uint16_t* tile, const uint16_t* from, int64_t line_length,
                                           int64_t first_output, int64_t outputs, int64_t first_term,
                                           int64_t terms) {
    constexpr int kPerLine = (kAlong ? T::kDepth : kOutputs) / kPiece;
#pragma unroll
    for (int i = 0; i < kOutputs * T::kDepth / kPiece / T::kThreads; ++i) {
        const int piece = static_cast<int>(threadIdx.x) + i * T::kThreads;
        const int line = piece / kPerLine, at = piece % kPerLine * kPiece;
        const int64_t output = first_output + (kAlong ? line : at), term = first_term + (kAlong ? at : line);
        const bool valid = output < outputs && term < terms;
        const int64_t offset = kAlong ? output * line_length + term : term * line_length + output;
        __pipeline_memcpy_async(tile + line * kLine + at, from + (valid ? offset : 0), 2 * kPiece,
                                valid ? 0 : 2 * kPiece);
    }
}

// sum += A B over one stage: of each 16 terms the smaller part of A first, then the larger.
template <class T>
__device__ __forceinline__ void multiply_stage(const uint16_t* stage, int row0, int col0,
                                               float (&sum)[T::kWarpRows / 16][T::kWarpCols / 8][4]) {
    const uint16_t* b_tile = stage + T::kParts * T::kElementsA;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < T::kDepth; k += kDepthOfMma) {
        uint32_t b[T::kWarpCols / 16][4];  // columns 0-7 at k and k + 8, then columns 8-15
#pragma unroll
        for (int j = 0; j < T::kWarpCols / 16; ++j) {
            const int col = col0 + 16 * j + high + (T::kAlongB ? low : 0),
                      at_k = k + middle + (T::kAlongB ? 0 : low);
            ldmatrix_x4<!T::kAlongB>(b_tile + (T::kAlongB ? col * T::kLineB + at_k : at_k * T::kLineB + col),
                                     b[j]);
        }
#pragma unroll
        for (int part = T::kParts - 1; part >= 0; --part) {
            const uint16_t* a_tile = stage + part * T::kElementsA;
#pragma unroll
            for (int i = 0; i < T::kWarpRows / 16; ++i) {
                uint32_t a[4];  // rows 0-7 and 8-15 at k, then both at k + 8
                const int row = row0 + 16 * i + middle + (T::kAlongA ? low : 0),
                          at_k = k + high + (T::kAlongA ? 0 : low);
                ldmatrix_x4<!T::kAlongA>(
                    a_tile + (T::kAlongA ? row * T::kLineA + at_k : at_k * T::kLineA + row), a);
#pragma unroll
                for (int j = 0; j < T::kWarpCols / 8; ++j)
                    mma_bf16(a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], sum[i][j]);
            }
        }
    }
}

// Eight neighbouring outputs of a row; `left` > 0 columns remain in it.
__device__ __forceinline__ void write_floats(const GemmArgs& job, int64_t at, int64_t left,
                                             const float (&v)[kPiece]) {
    float* out = static_cast<float*>(job.out) + at;
#pragma unroll
    for (int j = 0; j < kPiece; j += 4) {
        if (job.wide && j < left) {
            float4 four{v[j], v[j + 1], v[j + 2], v[j + 3]};
            float4* const to = reinterpret_cast<float4*>(out + j);
            if (job.mode == Gradient::accumulate) {
                const float4 before = *to;
                four = {before.x + four.x, before.y + four.y, before.z + four.z, before.w + four.w};
            }
            *to = four;
        } else {
#pragma unroll
            for (int n = j; n < j + 4; ++n)
                if (n < left) out[n] = job.mode == Gradient::accumulate ? out[n] + v[n] : v[n];
        }
    }
}

// A tile of outputs over some stages of the contraction, and where the outputs begin in job.out.
struct OutputTile {
    int64_t first_row, first_col;
    int first_stage, stages;
    int64_t out;
};
template <class T> __device__ __forceinline__ OutputTile tile_of(const GemmArgs& job, int64_t item) {
    int first = 0, stages = static_cast<int>((job.terms + T::kDepth - 1) / T::kDepth);
    int64_t out = 0;
    if (T::kKind == Kind::weight && job.blocks > 1) {
        const int64_t tiles = job.row_tiles * job.col_tiles, block = item / tiles;
        first = static_cast<int>(block) * T::kStagesOfBlock;
        stages = min(T::kStagesOfBlock, stages - first);
        out = block * job.rows * job.cols;
        item %= tiles;
    }
    // neighbouring CTAs share the operand with the long lines: x, or the tokens of dx
    const bool down = T::kKind == Kind::weight;
    const int64_t row_tile = down ? item % job.row_tiles : item / job.col_tiles;
    const int64_t col_tile = down ? item / job.row_tiles : item % job.col_tiles;
    return {row_tile * T::kRows, col_tile * T::kCols, first, stages, out};
}

// Issues the copies of one stage of a tile.
template <class T>
__device__ __forceinline__ void start_stage(const GemmArgs& job, const OutputTile& tile, uint16_t* shared,
                                            int stage) {
    uint16_t* to = shared + stage % T::kStages * T::kStageElements;
    const int64_t term = static_cast<int64_t>(tile.first_stage + stage) * T::kDepth;
#pragma unroll
    for (int part = 0; part < T::kParts; ++part)
        start_tile<T, T::kAlongA, T::kRows, T::kLineA>(to + part * T::kElementsA, job.a + part * job.a_part,
                                                       job.a_line, tile.first_row, job.rows, term, job.terms);
    start_tile<T, T::kAlongB, T::kCols, T::kLineB>(to + T::kParts * T::kElementsA, job.b, job.b_line,
                                                   tile.first_col, job.cols, term, job.terms);
}

// The pieces of eight outputs of a thread in the epilogue, and dx_in of them.
template <class T> constexpr int kOutPieces = T::kRows* T::kCols / kPiece / T::kThreads;
template <class T> constexpr int kPerRow = T::kCols / kPiece;
template <class T>
__device__ __forceinline__ void load_addend(const GemmArgs& job, const OutputTile& tile,
                                            uint4 (&more)[kOutPieces<T>]) {
    if (job.addend == nullptr) return;
#pragma unroll
    for (int i = 0; i < kOutPieces<T>; ++i) {
        const int piece = static_cast<int>(threadIdx.x) + i * T::kThreads;
        const int64_t row = tile.first_row + piece / kPerRow<T>,
                      col = tile.first_col + piece % kPerRow<T> * kPiece;
        if (row < job.rows && col < job.cols)
            more[i] = *reinterpret_cast<const uint4*>(job.addend + row * job.cols + col);
    }
}

// The sums of a warp, in the finished tile.
template <class T>
__device__ __forceinline__ void store_sums(const float (&sum)[T::kWarpRows / 16][T::kWarpCols / 8][4],
                                           int row0, int col0, float* finished) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int i = 0; i < T::kWarpRows / 16; ++i)
#pragma unroll
        for (int j = 0; j < T::kWarpCols / 8; ++j) {
            const float(&v)[4] = sum[i][j];
            float* to = finished + (row0 + 16 * i + lane / 4) * T::kOutLine + col0 + 8 * j + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = float2{v[0], v[1]};
            *reinterpret_cast<float2*>(to + 8 * T::kOutLine) = float2{v[2], v[3]};
        }
}

// Writes the finished tile.
template <class T>
__device__ __forceinline__ void write_tile(const GemmArgs& job, const OutputTile& tile, const float* finished,
                                           const uint4 (&more)[kOutPieces<T>]) {
#pragma unroll
    for (int i = 0; i < kOutPieces<T>; ++i) {
        const int piece = static_cast<int>(threadIdx.x) + i * T::kThreads;
        const int row_in = piece / kPerRow<T>, col_in = piece % kPerRow<T> * kPiece;
        const int64_t row = tile.first_row + row_in, col = tile.first_col + col_in;
        if (row >= job.rows || col >= job.cols) continue;
        float v[kPiece];
        load_floats(finished + row_in * T::kOutLine + col_in, v);
        if (T::kKind == Kind::input) {
            if (job.addend != nullptr) {
                float add[kPiece];
                unpack_unit(more[i], DType::bf16, add);
#pragma unroll
                for (int n = 0; n < kPiece; ++n) v[n] += add[n];
            }
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(job.out) + row * job.cols + col) =
                pack_unit_bf16(v);
        } else {
            write_floats(job, tile.out + row * job.cols + col, job.cols - col, v);
        }
    }
}

// Logits, dx or dweight, by T::kKind.
//
// Lower bound at T=4096, H=7168, E=32, memory-bound: x is 58.7 MB for logits and for dweight, 14 us each;
// dx_in and dx 117 MB, 29 us. (With E=256, L2 would deliver 352 to 470 MB: see gemm_wgmma.cu.)
//
// CTA: kRows x kCols outputs over the whole contraction, or (weight) over one block of it, for enough CTAs
// with few experts. Asynchronous 16-byte copies load the operands kStages - 1 stages ahead. One barrier per
// stage: its copies have arrived for all threads, and all threads have computed the previous stage, which the
// next copies overwrite. Epilogue: the tile goes through shared memory, so that rows are written in 16-byte
// words. dx_in is loaded before the first stage.
//
// Deterministic: an output depends on its own row and column only (not on T), has one writer and a fixed
// order of instructions. Tensor cores add with a few bits more than FP32 and truncate; after a block of 256
// terms the sum is promoted to FP32 registers, with rounding.
template <class T>
__global__ __launch_bounds__(T::kThreads, T::kCtasPerSm) void mma_kernel(const GemmArgs job) {
    extern __shared__ __align__(16) uint16_t memory[];
    constexpr int kRowTiles = T::kWarpRows / 16, kColTiles = T::kWarpCols / 8;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int row0 = warp / T::kColWarps * T::kWarpRows, col0 = warp % T::kColWarps * T::kWarpCols;
    for (int64_t item = blockIdx.x; item < job.row_tiles * job.col_tiles * job.blocks; item += gridDim.x) {
        const OutputTile tile = tile_of<T>(job, item);
        const int stages = tile.stages;
#pragma unroll
        for (int stage = 0; stage < T::kStages - 1; ++stage) {
            if (stage < stages) start_stage<T>(job, tile, memory, stage);
            __pipeline_commit();
        }
        uint4 more[kOutPieces<T>] = {};  // dx_in
        if constexpr (T::kKind == Kind::input) load_addend<T>(job, tile, more);

        float sum[kRowTiles][kColTiles][4] = {}, total[kRowTiles][kColTiles][4] = {};
        for (int stage = 0; stage < stages; ++stage) {
            __pipeline_wait_prior(T::kStages - 2);
            __syncthreads();
            if (stage + T::kStages - 1 < stages) start_stage<T>(job, tile, memory, stage + T::kStages - 1);
            __pipeline_commit();
            multiply_stage<T>(memory + stage % T::kStages * T::kStageElements, row0, col0, sum);
            if (!T::kBlocks) continue;
            if ((stage + 1) % T::kStagesOfBlock != 0 && stage + 1 < stages) continue;
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int j = 0; j < kColTiles; ++j)
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        total[i][j][n] += sum[i][j][n];
                        sum[i][j][n] = 0.0f;
                    }
        }
        __pipeline_wait_prior(0);
        __syncthreads();  // all have computed the last stage

        float* const finished = reinterpret_cast<float*>(memory);
        store_sums<T>(T::kBlocks ? total : sum, row0, col0, finished);
        __syncthreads();
        write_tile<T>(job, tile, finished, more);
        __syncthreads();  // the tile has been read from shared memory
    }
}

//                                  rows cols warps depth stages CTAs
using LogitTiling = Tiling<Kind::logits, 32, 32, 2, 2, 128, 4, 2>;
using WeightTiling = Tiling<Kind::weight, 32, 64, 2, 2, 64, 4, 2>;
using InputTiling = Tiling<Kind::input, 64, 128, 2, 4, 32, 3, 2>;

template <class T> void launch(GemmArgs job, const Launch& launch, const char* op) {
    job.row_tiles = ceil_div(job.rows, T::kRows);
    job.col_tiles = ceil_div(job.cols, T::kCols);
    const int64_t items = job.row_tiles * job.col_tiles * job.blocks;
    if (items == 0) return;
    launch_kernel(mma_kernel<T>, grid_for(items, launch, T::kCtasPerSm), T::kThreads, T::kSharedBytes, launch,
                  op, job);
}

bool has_wide_rows(const float* out, int64_t cols) { return cols % 4 == 0 && is_aligned(out); }

// Traffic: reads and writes dlogits once (4.2 MB each at T=4096, E=256: 3 us). Eight experts of a token per
// thread; the first CTA also writes the offsets of the blocks of tokens.
constexpr int kSplitThreads = 256;
__global__ __launch_bounds__(kSplitThreads) void split_gradient_kernel(const float* dlogits,
                                                                       const SplitGradient parts,
                                                                       int64_t pitch, bool wide) {
    pdl_launch_dependents();
    pdl_wait();
    if (blockIdx.x == 0)
        for (int64_t b = threadIdx.x; b <= parts.blocks.count; b += kSplitThreads) {
            const int64_t first = min(b * parts.blocks.length, parts.tokens);
            parts.block_offsets[b] = first;
            if (b < parts.blocks.count)
                parts.block_tokens[b] = min(parts.blocks.length, parts.tokens - first);
        }
    const int64_t per_token = pitch / kPiece, count = parts.tokens * per_token;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSplitThreads + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * kSplitThreads) {
        const int64_t token = i / per_token, expert = i % per_token * kPiece;
        const float* from = dlogits + token * parts.experts + expert;
        float v[kPiece];
        if (wide) {
            load_floats(from, v);
        } else {
#pragma unroll
            for (int j = 0; j < kPiece; ++j) v[j] = expert + j < parts.experts ? from[j] : 0.0f;
        }
        uint32_t large[kPiece / 2], small[kPiece / 2];
#pragma unroll
        for (int j = 0; j < kPiece / 2; ++j) {
            large[j] = pack_bf16(v[2 * j], v[2 * j + 1]);
            small[j] = pack_bf16(v[2 * j] - __uint_as_float(large[j] << 16),
                                 v[2 * j + 1] - __uint_as_float(large[j] & 0xFFFF0000u));
        }
        uint4* to = reinterpret_cast<uint4*>(parts.data + token * 2 * pitch + expert);
        *to = uint4{large[0], large[1], large[2], large[3]};
        to[per_token] = uint4{small[0], small[1], small[2], small[3]};
    }
}

}  // namespace

void launch_logits(const LogitsGemm& job, const Launch& on) {
    const GemmArgs gemm{.a = static_cast<const uint16_t*>(job.x),
                        .a_part = 0,
                        .a_line = job.hidden,
                        .b = static_cast<const uint16_t*>(job.weight),
                        .b_line = job.hidden,
                        .rows = job.tokens,
                        .cols = job.experts,
                        .terms = job.hidden,
                        .out = job.logits,
                        .addend = nullptr,
                        .mode = Gradient::overwrite,
                        .wide = has_wide_rows(job.logits, job.experts),
                        .row_tiles = 0,
                        .col_tiles = 0,
                        .blocks = 1};
    launch<LogitTiling>(gemm, on, "router_logits");
}

void launch_split_gradient(const float* dlogits, const SplitGradient& parts, const Launch& on) {
    const int64_t pitch = SplitGradient::pitch_of(parts.experts), count = parts.tokens * pitch / kPiece;
    if (count == 0) return;
    const bool wide = parts.experts % kPiece == 0 && is_aligned(dlogits);
    launch_pdl(split_gradient_kernel, grid_for(ceil_div(count, kSplitThreads), on), kSplitThreads, on,
               "router_logits_backward: parts", dlogits, parts, pitch, wide);
}

void launch_weight_gradient(const WeightGradient& job, float* sums, const Launch& on) {
    float* const out = sums != nullptr ? sums : job.dweight;
    const int64_t pitch = SplitGradient::pitch_of(job.dlogits.experts);
    const GemmArgs gemm{.a = job.dlogits.data,
                        .a_part = pitch,
                        .a_line = 2 * pitch,
                        .b = static_cast<const uint16_t*>(job.x),
                        .b_line = job.hidden,
                        .rows = job.dlogits.experts,
                        .cols = job.hidden,
                        .terms = job.dlogits.tokens,
                        .out = out,
                        .addend = nullptr,
                        .mode = sums != nullptr ? Gradient::overwrite : job.mode,
                        .wide = has_wide_rows(out, job.hidden),
                        .row_tiles = 0,
                        .col_tiles = 0,
                        .blocks = sums != nullptr ? ceil_div(job.dlogits.tokens, op::kRouterBlock) : 1};
    launch<WeightTiling>(gemm, on, "router_logits_backward: dweight");
}

void launch_input_gradient(const InputGradient& job, const Launch& on) {
    const int64_t pitch = SplitGradient::pitch_of(job.dlogits.experts);
    launch<InputTiling>({.a = job.dlogits.data,
                         .a_part = pitch,
                         .a_line = 2 * pitch,
                         .b = static_cast<const uint16_t*>(job.weight),
                         .b_line = job.hidden,
                         .rows = job.dlogits.tokens,
                         .cols = job.hidden,
                         .terms = job.dlogits.experts,
                         .out = job.dx,
                         .addend = static_cast<const uint16_t*>(job.dx_in),
                         .mode = Gradient::overwrite,
                         .wide = false,
                         .row_tiles = 0,
                         .col_tiles = 0,
                         .blocks = 1},
                        on, "router_logits_backward: dx");
}

}  // namespace fp8flow::hopper::router
