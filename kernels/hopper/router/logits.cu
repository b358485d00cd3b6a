// SPDX-License-Identifier: MIT
// The router's logits and their gradients: the choice of kernel, the general kernel (FP32 fma in blocks of
// the contraction, bit-equal to the reference), and the kernel that adds block sums in ascending order. BF16
// rows run in gemm_wgmma.cu and gemm_mma.cu, all other types and alignments here.
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/vector_io.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/router/gemm.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::router {

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;   // outputs of a CTA along m and n
constexpr int kDepth = 32;  // terms in shared memory at a time
constexpr int kPitch = kTile + 4;
constexpr int kPerThread = 4;  // outputs of a thread along m and n
constexpr int64_t kPartials = static_cast<int64_t>(HopperOps::Workspace::kPartialsBytes / sizeof(float));

// A matrix operand as rows (m or n) by terms (k). Row-contiguous in k: element (r, k) at r * pitch + k;
// otherwise at k * pitch + r.
struct Operand {
    const void* data;
    DType dtype;
    int64_t rows, pitch;
    bool vectorised;
};

struct SimtArgs {
    Operand a, b;  // a: m, b: n
    int64_t terms, block_terms, blocks;
    void* out;  // [blocks, m, n]
    DType out_dtype = DType::f32;
    const void* addend = nullptr;  // added to the finished sum, in fp32; may be out
    DType addend_dtype = DType::f32;
    int64_t tiles_m = 0, tiles_n = 0;  // set by launch_simt
};

// This thread's eight elements of a tile of kTile rows by kDepth terms; zero outside.
template <bool kAlongTerms>
__device__ __forceinline__ void load_tile(const Operand& from, int64_t first_row, int64_t first_term,
                                          int64_t terms, float (&v)[kUnit]) {
    const int thread = static_cast<int>(threadIdx.x);
    if (kAlongTerms) {  // a thread reads eight terms of one row; the threads of a warp read 32 rows
        const int64_t row = first_row + thread % kTile, term = first_term + thread / kTile * kUnit;
        load_up_to_8(from.data, from.dtype, row * from.pitch + term, row < from.rows ? terms - term : 0,
                     from.vectorised, v);
    } else {  // a thread reads eight rows of one term
        const int64_t row = first_row + thread % kUnit * kUnit, term = first_term + thread / kUnit;
        load_up_to_8(from.data, from.dtype, term * from.pitch + row, term < terms ? from.rows - row : 0,
                     from.vectorised, v);
    }
}
template <bool kAlongTerms>
__device__ __forceinline__ void store_tile(float (&tile)[kDepth][kPitch], const float (&v)[kUnit]) {
    const int thread = static_cast<int>(threadIdx.x);
    if (kAlongTerms) {
#pragma unroll
        for (int j = 0; j < kUnit; ++j) tile[thread / kTile * kUnit + j][thread % kTile] = v[j];
    } else {
        float4* to = reinterpret_cast<float4*>(&tile[thread / kUnit][thread % kUnit * kUnit]);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
}
static_assert(kTile * kDepth == kThreads * kUnit);

__device__ __forceinline__ void add_term(const float (&a)[kDepth][kPitch], const float (&b)[kDepth][kPitch],
                                         int k, int m, int n, float (&sum)[kPerThread][kPerThread]) {
    const float4 va = *reinterpret_cast<const float4*>(&a[k][m]);
    const float4 vb = *reinterpret_cast<const float4*>(&b[k][n]);
    const float x[kPerThread] = {va.x, va.y, va.z, va.w}, y[kPerThread] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) sum[i][j] = fma_float(x[i], y[j], sum[i][j]);
}

// out[block, m, n] = sum over the block's k of a(m, k) * b(n, k), k ascending. 2 m n k FLOPs in FP32; each
// operand is read once per 64 outputs of the other. One CTA per 64 x 64 tile, 4 x 4 outputs per thread. Tiles
// of 32 terms go from global memory to registers (one tile ahead) to shared memory. Two barriers per tile:
// after the writes, and before the next writes. Deterministic: one accumulator and one writer per output.
template <bool kAAlongTerms, bool kBAlongTerms>
__global__ __launch_bounds__(kThreads) void simt_kernel(const SimtArgs args) {
    __shared__ __align__(16) float a_tile[kDepth][kPitch];
    __shared__ __align__(16) float b_tile[kDepth][kPitch];
    const int thread = static_cast<int>(threadIdx.x);
    const int m = thread / 16 * kPerThread, n = thread % 16 * kPerThread;
    const int64_t tiles = args.tiles_m * args.tiles_n;
    for (int64_t item = blockIdx.x; item < tiles * args.blocks; item += gridDim.x) {
        const int64_t block = item / tiles, tile = item % tiles;
        const int64_t first_m = tile / args.tiles_n * kTile, first_n = tile % args.tiles_n * kTile;
        const int64_t begin = block * args.block_terms, end = min(args.terms, begin + args.block_terms);
        float sum[kPerThread][kPerThread] = {};
        float a[kUnit], b[kUnit];
        load_tile<kAAlongTerms>(args.a, first_m, begin, end, a);
        load_tile<kBAlongTerms>(args.b, first_n, begin, end, b);
        for (int64_t start = begin; start < end; start += kDepth) {
            store_tile<kAAlongTerms>(a_tile, a);
            store_tile<kBAlongTerms>(b_tile, b);
            __syncthreads();
            load_tile<kAAlongTerms>(args.a, first_m, start + kDepth, end, a);
            load_tile<kBAlongTerms>(args.b, first_n, start + kDepth, end, b);
            if (end - start >= kDepth) {
#pragma unroll 8
                for (int k = 0; k < kDepth; ++k) add_term(a_tile, b_tile, k, m, n, sum);
            } else {
                const int left = static_cast<int>(end - start);
#pragma unroll 1
                for (int k = 0; k < left; ++k) add_term(a_tile, b_tile, k, m, n, sum);
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
            for (int j = 0; j < kPerThread; ++j) {
                const int64_t row = first_m + m + i, column = first_n + n + j;
                if (row >= args.a.rows || column >= args.b.rows) continue;
                const int64_t at = (block * args.a.rows + row) * args.b.rows + column;
                float value = sum[i][j];
                if (args.addend != nullptr) value += load_float(args.addend, args.addend_dtype, at);
                store_float(args.out, args.out_dtype, at, value);
            }
        }
    }
}

// out[r, c] (+)= sums [blocks, rows, cols] over the blocks in ascending order. Traffic: reads the sums once
// (14.7 MB for DeepSeek-V3, from L2), writes out once. A thread takes kWidth neighbours with eight blocks in
// flight. Rows of out are out_pitch apart. Deterministic: one writer per element.
template <int kWidth>
__global__ __launch_bounds__(kThreads) void add_blocks_kernel(const float* sums, int64_t blocks, int64_t rows,
                                                              int64_t cols, int64_t out_pitch, Gradient mode,
                                                              float* out) {
    using Piece = std::conditional_t<kWidth == 4, float4, float>;
    const int64_t count = rows * cols;
    pdl_launch_dependents();
    pdl_wait();
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth; i < count;
         i += static_cast<int64_t>(gridDim.x) * kThreads * kWidth) {
        union {
            Piece whole;
            float v[kWidth];
        } sum, more;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum.v[j] = 0.0f;
        if (blocks > 0) sum.whole = *reinterpret_cast<const Piece*>(sums + i);
#pragma unroll 8
        for (int64_t block = 1; block < blocks; ++block) {
            more.whole = *reinterpret_cast<const Piece*>(sums + block * count + i);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) sum.v[j] += more.v[j];
        }
        Piece* to = reinterpret_cast<Piece*>(out + i / cols * out_pitch + i % cols);
        if (mode == Gradient::accumulate) {
            more.whole = *to;
#pragma unroll
            for (int j = 0; j < kWidth; ++j) sum.v[j] = more.v[j] + sum.v[j];
        }
        *to = sum.whole;
    }
}

struct BlockSums {
    const float* sums;
    int64_t blocks, rows, cols, out_pitch;
    Gradient mode;
    float* out;
};
void add_blocks(const BlockSums& job, const Launch& launch) {
    const bool wide = job.cols % 4 == 0 && job.out_pitch % 4 == 0 && is_aligned(job.out);
    const unsigned grid = grid_for(ceil_div(job.rows * job.cols, kThreads * (wide ? 4 : 1)), launch);
    const auto kernel = wide ? add_blocks_kernel<4> : add_blocks_kernel<1>;
    launch_pdl(kernel, grid, kThreads, launch, "router: block sums", job.sums, job.blocks, job.rows, job.cols,
               job.out_pitch, job.mode, job.out);
}

Operand along_terms(const TensorView& view) {  // [rows, terms]
    return {view.data, view.dtype, view.dim(0), view.dim(1), is_vectorisable(view.data, view.dim(1))};
}
// Columns [first, first + count) of [terms, rows].
Operand along_rows(const TensorView& view, int64_t first, int64_t count) {
    uint8_t* data = static_cast<uint8_t*>(view.data) + first * size_of(view.dtype);
    return {data, view.dtype, count, view.dim(1), is_vectorisable(data, view.dim(1))};
}
Operand along_rows(const TensorView& view) { return along_rows(view, 0, view.dim(1)); }

template <bool kAAlongTerms, bool kBAlongTerms>
void launch_simt(SimtArgs args, const Launch& launch, const char* op) {
    args.tiles_m = ceil_div(args.a.rows, kTile);
    args.tiles_n = ceil_div(args.b.rows, kTile);
    const int64_t items = args.tiles_m * args.tiles_n * args.blocks;
    if (items == 0) return;
    constexpr int kCtasPerSm = 4;
    launch_kernel(simt_kernel<kAAlongTerms, kBAlongTerms>, grid_for(items, launch, kCtasPerSm), kThreads,
                  launch, op, args);
}

// dx on CUDA cores.
void input_gradient_simt(const op::RouterLogitsBackward& args, const Launch& launch) {
    const int64_t experts = args.weight.dim(0);
    launch_simt<true, false>({.a = along_terms(args.dlogits),
                              .b = along_rows(args.weight),
                              .terms = experts,
                              .block_terms = experts,
                              .blocks = 1,
                              .out = args.dx.data,
                              .out_dtype = args.dx.dtype,
                              .addend = args.dx_in ? args.dx_in.data : nullptr,
                              .addend_dtype = args.dx_in.dtype},
                             launch, "router_logits_backward: dx");
}

// dweight on CUDA cores, in rounds of as many columns as have block sums that fit the workspace.
void weight_gradient_simt(const op::RouterLogitsBackward& args, const HopperOps::Workspace& workspace,
                          const Launch& launch) {
    const int64_t tokens = args.x.dim(0), hidden = args.x.dim(1), experts = args.weight.dim(0);
    const int64_t blocks = ceil_div(tokens, op::kRouterBlock);
    const int64_t round =
        std::max<int64_t>(kUnit, kPartials / (std::max<int64_t>(blocks, 1) * experts) / kUnit * kUnit);
    for (int64_t first = 0; first < hidden; first += round) {
        const int64_t count = std::min(round, hidden - first);
        float* sums = workspace.partials_for<float>(blocks * experts * count);
        launch_simt<false, false>({.a = along_rows(args.dlogits),
                                   .b = along_rows(args.x, first, count),
                                   .terms = tokens,
                                   .block_terms = op::kRouterBlock,
                                   .blocks = blocks,
                                   .out = sums},
                                  launch, "router_logits_backward: dweight");
        add_blocks({.sums = sums,
                    .blocks = blocks,
                    .rows = experts,
                    .cols = count,
                    .out_pitch = hidden,
                    .mode = args.dweight_mode,
                    .out = args.dweight.as<float>() + first},
                   launch);
    }
}

bool is_fast(const TensorView& view) {
    return view.dtype == DType::bf16 && is_vectorisable(view.data, view.dim(1));
}

}  // namespace

}  // namespace fp8flow::hopper::router

namespace fp8flow {

using namespace hopper;
using namespace hopper::router;

// Block sums that do not fit the workspace are computed in rounds over the tokens.
void HopperOps::do_router_logits(const op::RouterLogits& args, const Launch& launch) {
    const int64_t tokens = args.x.dim(0), hidden = args.x.dim(1), experts = args.weight.dim(0);
    const auto round_of = [&](int64_t blocks) {
        return blocks == 1 ? std::max<int64_t>(tokens, 1)
                           : std::max<int64_t>(1, kPartials / (blocks * experts));
    };
    const auto add = [&](const float* sums, int64_t blocks, const TensorView& out) {
        add_blocks({.sums = sums,
                    .blocks = blocks,
                    .rows = out.dim(0),
                    .cols = experts,
                    .out_pitch = experts,
                    .mode = Gradient::overwrite,
                    .out = out.as<float>()},
                   launch);
    };
    if (is_fast(args.x) && is_fast(args.weight)) {
        const auto gemm_of = [&](const TensorView& x, const TensorView& out) {
            return LogitsGemm{.x = x.data,
                              .weight = args.weight.data,
                              .tokens = x.dim(0),
                              .hidden = hidden,
                              .experts = experts,
                              .logits = out.as<float>()};
        };
        if (!wgmma_supports_logits(gemm_of(args.x, args.logits))) {
            launch_logits(gemm_of(args.x, args.logits), launch);
            return;
        }
        const int64_t splits = logit_splits(hidden), round = round_of(splits);
        for (int64_t first = 0; first < tokens; first += round) {
            const int64_t count = std::min(round, tokens - first);
            const TensorView out = args.logits.slice(first, count);
            float* sums = splits == 1 ? out.as<float>()
                                      : workspace(launch).partials_for<float>(splits * count * experts);
            launch_wgmma_logits(gemm_of(args.x.slice(first, count), out), sums, launch);
            if (splits > 1) add(sums, splits, out);
        }
        return;
    }
    const int64_t blocks = ceil_div(hidden, op::kRouterBlock), round = round_of(blocks);
    for (int64_t first = 0; first < tokens; first += round) {
        const int64_t count = std::min(round, tokens - first);
        const TensorView x = args.x.slice(first, count), out = args.logits.slice(first, count);
        float* sums =
            blocks == 1 ? out.as<float>() : workspace(launch).partials_for<float>(blocks * count * experts);
        launch_simt<true, true>({.a = along_terms(x),
                                 .b = along_terms(args.weight),
                                 .terms = hidden,
                                 .block_terms = op::kRouterBlock,
                                 .blocks = blocks,
                                 .out = sums},
                                launch, "router_logits");
        if (blocks > 1) add(sums, blocks, out);
    }
}

// The split dlogits stay in the workspace while both GEMMs read them; the sums of dweight get the rest of it.
// If the tokens do not fit, the GEMMs run on CUDA cores.
void HopperOps::do_router_logits_backward(const op::RouterLogitsBackward& args, const Launch& launch) {
    const int64_t tokens = args.x.dim(0), hidden = args.x.dim(1), experts = args.weight.dim(0);
    constexpr int64_t kWorkspace = Workspace::kPartialsBytes, kAlignment = 256;
    const auto aligned = [](int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; };
    uint8_t* const scratch = workspace(launch).partials_for<uint8_t>(kWorkspace);
    SplitGradient parts{.data = reinterpret_cast<uint16_t*>(scratch), .tokens = tokens, .experts = experts};
    const int64_t part_bytes =
        aligned(SplitGradient::elements(tokens, experts) * static_cast<int64_t>(sizeof(uint16_t)));
    parts.blocks = token_blocks(tokens, hidden, experts);
    parts.block_tokens = reinterpret_cast<int64_t*>(scratch + part_bytes);
    parts.block_offsets = parts.block_tokens + parts.blocks.count;
    const int64_t sums_from = part_bytes + aligned((2 * parts.blocks.count + 1) *
                                                   static_cast<int64_t>(sizeof(*parts.block_offsets)));
    const bool fits = sums_from <= kWorkspace;
    const bool fast_input =
                   fits && is_fast(args.weight) && is_fast(args.dx) && (!args.dx_in || is_fast(args.dx_in)),
               fast_weight = fits && is_fast(args.x);
    if (fast_input || fast_weight) launch_split_gradient(args.dlogits.as<float>(), parts, launch);
    if (fast_weight) {
        const WeightGradient job{.dlogits = parts,
                                 .x = args.x.data,
                                 .hidden = hidden,
                                 .mode = args.dweight_mode,
                                 .dweight = args.dweight.as<float>()};
        float* const sums = reinterpret_cast<float*>(scratch + sums_from);
        const int64_t capacity = (kWorkspace - sums_from) / static_cast<int64_t>(sizeof(float)),
                      at_once = capacity / std::max<int64_t>(1, SplitGradient::elements(hidden, experts)),
                      blocks = ceil_div(tokens, op::kRouterBlock);
        constexpr int64_t kFewTiles = 1 << 16;  // elements; more have tiles for half of the SMs
        if (at_once > 0 && wgmma_supports_weight_gradient(job)) {
            launch_wgmma_weight_gradient(job, {sums, at_once}, launch);
        } else if (blocks > 1 && experts * hidden <= kFewTiles && blocks * experts * hidden <= capacity) {
            launch_weight_gradient(job, sums, launch);
            add_blocks({.sums = sums,
                        .blocks = blocks,
                        .rows = experts,
                        .cols = hidden,
                        .out_pitch = hidden,
                        .mode = args.dweight_mode,
                        .out = job.dweight},
                       launch);
        } else {
            launch_weight_gradient(job, nullptr, launch);
        }
    }
    const InputGradient input{.dlogits = parts,
                              .weight = args.weight.data,
                              .dx_in = args.dx_in ? args.dx_in.data : nullptr,
                              .dx = args.dx.data,
                              .hidden = hidden};
    if (fast_input && wgmma_supports_input_gradient(input))
        launch_wgmma_input_gradient(input, launch);
    else if (fast_input)
        launch_input_gradient(input, launch);
    else
        input_gradient_simt(args, launch);
    if (!fast_weight) weight_gradient_simt(args, workspace(launch), launch);
}

}  // namespace fp8flow
