// SPDX-License-Identifier: MIT
// Native attention on CUDA cores, tiled through shared memory, in the reference's order of summation and with
// its bits. Scores are not kept: the backward recomputes them from the saved log-sum-exp. Dispatch to cuDNN
// is at the end of this file (do_attention); rotary embedding and the packed projection: layout.cu.
#include "kernels/core/error.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

#include <algorithm>

namespace fp8flow::hopper::attention {

namespace {

// 16 x 16: thread (y, x) owns kRows x kRows scores of a tile and kRows x kCols elements of an output tile
constexpr int kThreads = 256;
constexpr int kLanes = 8;  // partial sums of a row sum, as in the reference

// Queries, or keys, per tile, for heads of at most kDepth columns. Wider heads have smaller tiles, so that
// four tiles of operands fit into shared memory.
template <int kTileRows, int kDepth> struct Tiles {
    static constexpr int kTile = kTileRows, kMaxDepth = kDepth;
    static constexpr int kTileLd = kMaxDepth + 4;  // row stride: 16 rows at one column: different banks
    static constexpr int kScoreLd = kTile + 4;
    static constexpr int kRows = kTile / 16;      // rows of a tile per thread
    static constexpr int kCols = kMaxDepth / 16;  // columns of an output tile per thread
    static constexpr int kSumRows = kThreads / kLanes, kSums = kTile / kSumRows;  // row sums per thread

    using RowTile = float[kTile][kTileLd];     // [row, D], zeros past the sequence's end and past D
    using ScoreTile = float[kTile][kScoreLd];  // [query, key]
    using Scores = float[kRows][kRows];
    using Outputs = float[kRows][kCols];
};
using Narrow = Tiles<64, 128>;
using Wide = Tiles<32, 256>;

struct Shape {
    int64_t length;  // of a sequence
    int64_t heads, kv_heads;
    int depth, value_depth;  // of q and k; of v and o
    float scale;
    DType dtype;
    int64_t sequences;
    int64_t tiles;  // of a sequence
};

// Element (row, d) of head `head` is at index (row * heads + head) * depth + d.
struct HeadRows {
    void* data;
    int64_t heads, head;
    int depth;
};

// Loads rows [first, first + kTile) of a sequence that starts at row `start` of the tensor, as fp32. No
// barrier.
template <class T>
__device__ void load_rows(const Shape& shape, const HeadRows& from, int64_t start, int64_t first,
                          typename T::RowTile& tile) {
    for (int i = static_cast<int>(threadIdx.x); i < T::kTile * T::kMaxDepth; i += kThreads) {
        const int row = i / T::kMaxDepth, d = i % T::kMaxDepth;
        const bool inside = first + row < shape.length && d < from.depth;
        const int64_t at = ((start + first + row) * from.heads + from.head) * from.depth + d;
        tile[row][d] = inside ? load_float(from.data, shape.dtype, at) : 0.0f;
    }
}

struct Position {
    int y, x;
};
__device__ __forceinline__ Position position() {
    return {static_cast<int>(threadIdx.x) / 16, static_cast<int>(threadIdx.x) % 16};
}
// Ownership of thread (y, x): rows kRows*y+i (i < kRows) of scores and outputs, keys x+16j (j < kRows) of
// scores, columns 4x+64(c/4)+c%4 (c < kCols) of outputs.
template <class T> __device__ __forceinline__ int row_of(Position at, int i) { return T::kRows * at.y + i; }
__device__ __forceinline__ int key_of(Position at, int j) { return at.x + 16 * j; }
__device__ __forceinline__ int col_of(Position at, int c) { return 4 * at.x + 64 * (c / 4) + c % 4; }

// s[i][j] = sum over ascending d of a[row][d] * b[key][d].
template <class T>
__device__ void dot_tiles(const typename T::RowTile& a, const typename T::RowTile& b, int depth,
                          typename T::Scores& s) {
    const Position at = position();
#pragma unroll
    for (int i = 0; i < T::kRows; ++i)
#pragma unroll
        for (int j = 0; j < T::kRows; ++j) s[i][j] = 0.0f;
    for (int d = 0; d < depth; d += 4) {
        float4 left[T::kRows], right[T::kRows];
#pragma unroll
        for (int i = 0; i < T::kRows; ++i)
            left[i] = *reinterpret_cast<const float4*>(&a[row_of<T>(at, i)][d]);
#pragma unroll
        for (int j = 0; j < T::kRows; ++j) right[j] = *reinterpret_cast<const float4*>(&b[key_of(at, j)][d]);
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
            for (int j = 0; j < T::kRows; ++j) {
                s[i][j] = fma_float(left[i].x, right[j].x, s[i][j]);
                s[i][j] = fma_float(left[i].y, right[j].y, s[i][j]);
                s[i][j] = fma_float(left[i].z, right[j].z, s[i][j]);
                s[i][j] = fma_float(left[i].w, right[j].w, s[i][j]);
            }
        }
    }
}

// sum[i][c] += weight(row, k) * values[k][c] over ascending k in [0, count). Terms with used(row, k) false
// are skipped, so that even a NaN at a later position cannot reach an earlier one.
template <class T, class Weight, class Used>
__device__ void add_product(const typename T::RowTile& values, int count, Weight weight, Used used,
                            typename T::Outputs& sum) {
    const Position at = position();
    for (int k = 0; k < count; ++k) {
        float v[T::kCols];
#pragma unroll
        for (int half = 0; half < T::kCols / 4; ++half)
            *reinterpret_cast<float4*>(v + 4 * half) =
                *reinterpret_cast<const float4*>(&values[k][4 * at.x + 64 * half]);
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
            const int row = row_of<T>(at, i);
            if (!used(row, k)) continue;
            const float w = weight(row, k);
#pragma unroll
            for (int c = 0; c < T::kCols; ++c) sum[i][c] = fma_float(w, v[c], sum[i][c]);
        }
    }
}

template <class T>
__device__ void store_rows(const Shape& shape, const HeadRows& to, int64_t start, int64_t first,
                           const typename T::Outputs& values) {
    const Position at = position();
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
        const int64_t row = first + row_of<T>(at, i);
        if (row >= shape.length) continue;
#pragma unroll
        for (int c = 0; c < T::kCols; ++c)
            if (col_of(at, c) < to.depth)
                store_float(to.data, shape.dtype,
                            ((start + row) * to.heads + to.head) * to.depth + col_of(at, c), values[i][c]);
    }
}

struct ForwardArgs {
    Shape shape;
    void *q, *k, *v, *o;
    float* lse;
};
template <class T> struct ForwardShared {
    typename T::RowTile q, k, v;
    typename T::ScoreTile p;
    float row_max[T::kTile];
    float row_sum[T::kTile];
};

// A tile of queries of one head. Keys and values are those of the head's group.
template <class T> struct QueryTile {
    int64_t tile, head, start, first;  // start: of the sequence; first: query, within the sequence
    HeadRows keys, values;

    __device__ __forceinline__ QueryTile(const ForwardArgs& args, int64_t task) {
        const Shape& shape = args.shape;
        tile = shape.tiles - 1 - task / (shape.sequences * shape.heads);  // the longest tiles first
        head = task % shape.heads, start = task / shape.heads % shape.sequences * shape.length;
        first = tile * T::kTile;
        const int64_t group = shape.heads / shape.kv_heads;
        keys = {args.k, shape.kv_heads, head / group, shape.depth};
        values = {args.v, shape.kv_heads, head / group, shape.value_depth};
    }
};

// The first pass: loads the queries, and finds the largest score of every row, for the threads that have the
// row and in row_max.
template <class T>
__device__ __forceinline__ void find_row_max(const ForwardArgs& args, const QueryTile<T>& queries,
                                             ForwardShared<T>& shared, float (&largest)[T::kRows]) {
    const Shape& shape = args.shape;
    const Position at = position();
    typename T::Scores s;
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) largest[i] = -INFINITY;
    for (int64_t tile = 0; tile <= queries.tile; ++tile) {
        __syncthreads();
        if (tile == 0)
            load_rows<T>(shape, {args.q, shape.heads, queries.head, shape.depth}, queries.start,
                         queries.first, shared.q);
        load_rows<T>(shape, queries.keys, queries.start, tile * T::kTile, shared.k);
        __syncthreads();
        dot_tiles<T>(shared.q, shared.k, shape.depth, s);
#pragma unroll
        for (int i = 0; i < T::kRows; ++i)
#pragma unroll
            for (int j = 0; j < T::kRows; ++j)
                if (tile < queries.tile || key_of(at, j) <= row_of<T>(at, i)) {
                    const float score = s[i][j] * shape.scale;
                    largest[i] = score > largest[i] ? score : largest[i];
                }
    }
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
        for (int step = 8; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(kFullMask, largest[i], step);
            largest[i] = other > largest[i] ? other : largest[i];
        }
        if (at.x == 0) shared.row_max[row_of<T>(at, i)] = largest[i];
    }
}

// The second pass: o before the division, and the row sums in row_sum. No barrier after these.
template <class T>
__device__ __forceinline__ void add_values(const ForwardArgs& args, const QueryTile<T>& queries,
                                           const float (&largest)[T::kRows], ForwardShared<T>& shared,
                                           typename T::Outputs& o) {
    const Shape& shape = args.shape;
    const Position at = position();
    // partial sum `thread % 8` of rows thread / 8 and, in tiles of 64, 32 + thread / 8
    const int lane = static_cast<int>(threadIdx.x) % kLanes,
              lane_row = static_cast<int>(threadIdx.x) / kLanes;
    float lane_sum[T::kSums] = {};
    typename T::Scores s;
    for (int64_t tile = 0; tile <= queries.tile; ++tile) {
        const bool diagonal = tile == queries.tile;
        const int num_keys = static_cast<int>(min(shape.length - tile * T::kTile, int64_t{T::kTile}));
        __syncthreads();
        load_rows<T>(shape, queries.keys, queries.start, tile * T::kTile, shared.k);
        load_rows<T>(shape, queries.values, queries.start, tile * T::kTile, shared.v);
        __syncthreads();
        dot_tiles<T>(shared.q, shared.k, shape.depth, s);
#pragma unroll
        for (int i = 0; i < T::kRows; ++i)
#pragma unroll
            for (int j = 0; j < T::kRows; ++j)
                shared.p[row_of<T>(at, i)][key_of(at, j)] = exp_float(s[i][j] * shape.scale - largest[i]);
        __syncthreads();
#pragma unroll
        for (int half = 0; half < T::kSums; ++half) {
            const int row = lane_row + T::kSumRows * half;
            for (int key = lane; key < num_keys; key += kLanes)
                if (!diagonal || key <= row) lane_sum[half] += shared.p[row][key];
        }
        add_product<T>(
            shared.v, num_keys, [&](int row, int key) { return shared.p[row][key]; },
            [&](int row, int key) { return !diagonal || key <= row; }, o);
    }
#pragma unroll
    for (int half = 0; half < T::kSums; ++half) {
        const float sum = combine_lanes(lane_sum[half]);
        if (lane == 0) shared.row_sum[lane_row + T::kSumRows * half] = sum;
    }
}

// o = softmax(scale q k^T, causal) v, and lse; one pass for the maximum, one for sums and output.
//
// Lower bound: q, o, lse once; k twice and v once for every tile of queries that attends to them (from
// L2). 3 causal matrix products of T*S*D/2 multiply-adds per head: scores are computed twice, so that sums
// run as in the reference.
//
// CTA: tiles of queries of one head, longest first. Shared memory: tiles of q, k, v and of the
// probabilities. Barriers: before and after every load of a tile, and between writing the probabilities and
// reading those of other threads.
//
// Deterministic: each output is one thread's sum over ascending keys.
template <class T>
__global__ void __launch_bounds__(kThreads) attention_kernel(ForwardArgs args, int64_t num_tasks) {
    extern __shared__ __align__(16) uint8_t memory[];
    ForwardShared<T>& shared = *reinterpret_cast<ForwardShared<T>*>(memory);
    const Shape& shape = args.shape;
    const Position at = position();
    for (int64_t task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const QueryTile<T> queries(args, task);
        float largest[T::kRows];
        typename T::Outputs o = {};
        find_row_max(args, queries, shared, largest);
        add_values(args, queries, largest, shared, o);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < T::kRows; ++i)
#pragma unroll
            for (int c = 0; c < T::kCols; ++c) o[i][c] = div_float(o[i][c], shared.row_sum[row_of<T>(at, i)]);
        store_rows<T>(shape, {args.o, shape.heads, queries.head, shape.value_depth}, queries.start,
                      queries.first, o);
        const int row = static_cast<int>(threadIdx.x);
        if (row < T::kTile && queries.first + row < shape.length)
            args.lse[(queries.start + queries.first + row) * shape.heads + queries.head] =
                shared.row_max[row] + log_float(shared.row_sum[row]);
    }
}

struct BackwardArgs {
    Shape shape;
    void *dout, *q, *k, *v, *o;
    const float* lse;
    float* delta;  // [T, heads]
    void *dq, *dk, *dv;
};

// delta[t, head] = dot(dout, o) over Dv, in 8 partial sums. Bytes: 2*T*heads*Dv elements. 8 threads per row,
// no barriers; deterministic: fixed order.
__global__ void __launch_bounds__(kThreads) delta_kernel(BackwardArgs args, int64_t rows) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kLanes);
    // whole warps stay in the loop, because combine_lanes shuffles
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes); first < rows;
         first += step) {
        const int64_t row = first + static_cast<int>(threadIdx.x) / kLanes;
        float sum = 0.0f;
        if (row < rows)
            for (int d = lane; d < args.shape.value_depth; d += kLanes)
                sum = fma_float(load_float(args.dout, args.shape.dtype, row * args.shape.value_depth + d),
                                load_float(args.o, args.shape.dtype, row * args.shape.value_depth + d), sum);
        sum = combine_lanes(sum);
        if (lane == 0 && row < rows) args.delta[row] = sum;
    }
}

template <class T> struct BackwardShared {
    typename T::RowTile q, dout, k, v;
    typename T::ScoreTile p, ds;
    float lse[T::kTile];
    float delta[T::kTile];
};

// lse and delta of a tile of queries; zeros past the end of the sequence.
template <class T>
__device__ void load_row_sums(const BackwardArgs& args, int64_t start, int64_t first, int64_t head,
                              BackwardShared<T>& shared) {
    const int row = static_cast<int>(threadIdx.x);
    if (row >= T::kTile) return;
    const bool inside = first + row < args.shape.length;
    const int64_t at = (start + first + row) * args.shape.heads + head;
    shared.lse[row] = inside ? args.lse[at] : 0.0f;
    shared.delta[row] = inside ? args.delta[at] : 0.0f;
}

// p and ds of a tile of queries by a tile of keys, from the operands in shared memory. No barrier.
template <class T> __device__ void score_gradients(const Shape& shape, BackwardShared<T>& shared) {
    const Position at = position();
    typename T::Scores s, dp;
    dot_tiles<T>(shared.q, shared.k, shape.depth, s);
    dot_tiles<T>(shared.dout, shared.v, shape.value_depth, dp);
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
        const int row = row_of<T>(at, i);
#pragma unroll
        for (int j = 0; j < T::kRows; ++j) {
            const float p = exp_float(s[i][j] * shape.scale - shared.lse[row]);
            shared.p[row][key_of(at, j)] = p;
            shared.ds[row][key_of(at, j)] = p * (dp[i][j] - shared.delta[row]) * shape.scale;
        }
    }
}

// dq. Lower bound: q, dout, lse, delta, dq once; k, v for every tile of queries (from L2). 3 causal matrix
// products per query head.
//
// CTA: tiles of queries of one head, over the tiles of keys up to the diagonal. Barriers: before tiles in
// shared memory are overwritten, after they are loaded, and after ds is written. Deterministic: each dq is
// one thread's sum over ascending keys.
template <class T>
__global__ void __launch_bounds__(kThreads) attention_dq_kernel(BackwardArgs args, int64_t num_tasks) {
    extern __shared__ __align__(16) uint8_t memory[];
    BackwardShared<T>& shared = *reinterpret_cast<BackwardShared<T>*>(memory);
    const Shape& shape = args.shape;
    const int64_t group = shape.heads / shape.kv_heads;
    for (int64_t task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int64_t query_tile =
            shape.tiles - 1 - task / (shape.sequences * shape.heads);  // the longest first
        const int64_t head = task % shape.heads, start = task / shape.heads % shape.sequences * shape.length;
        const int64_t first = query_tile * T::kTile;
        typename T::Outputs dq = {};
        for (int64_t tile = 0; tile <= query_tile; ++tile) {
            const bool diagonal = tile == query_tile;
            const int num_keys = static_cast<int>(min(shape.length - tile * T::kTile, int64_t{T::kTile}));
            __syncthreads();
            if (tile == 0) {
                load_rows<T>(shape, {args.q, shape.heads, head, shape.depth}, start, first, shared.q);
                load_rows<T>(shape, {args.dout, shape.heads, head, shape.value_depth}, start, first,
                             shared.dout);
                load_row_sums<T>(args, start, first, head, shared);
            }
            load_rows<T>(shape, {args.k, shape.kv_heads, head / group, shape.depth}, start, tile * T::kTile,
                         shared.k);
            load_rows<T>(shape, {args.v, shape.kv_heads, head / group, shape.value_depth}, start,
                         tile * T::kTile, shared.v);
            __syncthreads();
            score_gradients<T>(shape, shared);
            __syncthreads();
            add_product<T>(
                shared.k, num_keys, [&](int row, int key) { return shared.ds[row][key]; },
                [&](int row, int key) { return !diagonal || key <= row; }, dq);
        }
        store_rows<T>(shape, {args.dq, shape.heads, head, shape.depth}, start, first, dq);
    }
}

// dk, dv. Lower bound: k, v, dk, dv once; q, dout, lse, delta for every tile of keys (from L2). 4 causal
// matrix products per query head.
//
// CTA: tiles of keys of one kv head, over its query heads and, for each, the tiles of queries from the
// diagonal on. Barriers as in attention_dq_kernel. Deterministic: each dk, dv is one thread's sum over
// ascending heads and queries.
template <class T>
__global__ void __launch_bounds__(kThreads) attention_dkv_kernel(BackwardArgs args, int64_t num_tasks) {
    extern __shared__ __align__(16) uint8_t memory[];
    BackwardShared<T>& shared = *reinterpret_cast<BackwardShared<T>*>(memory);
    const Shape& shape = args.shape;
    const int64_t group = shape.heads / shape.kv_heads;
    for (int64_t task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int64_t key_tile = task / (shape.sequences * shape.kv_heads);  // the longest first
        const int64_t kv_head = task % shape.kv_heads,
                      start = task / shape.kv_heads % shape.sequences * shape.length;
        const int64_t first = key_tile * T::kTile;
        typename T::Outputs dk = {}, dv = {};
        __syncthreads();
        load_rows<T>(shape, {args.k, shape.kv_heads, kv_head, shape.depth}, start, first, shared.k);
        load_rows<T>(shape, {args.v, shape.kv_heads, kv_head, shape.value_depth}, start, first, shared.v);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            for (int64_t tile = key_tile; tile < shape.tiles; ++tile) {
                const bool diagonal = tile == key_tile;
                const int num_queries =
                    static_cast<int>(min(shape.length - tile * T::kTile, int64_t{T::kTile}));
                __syncthreads();
                load_rows<T>(shape, {args.q, shape.heads, head, shape.depth}, start, tile * T::kTile,
                             shared.q);
                load_rows<T>(shape, {args.dout, shape.heads, head, shape.value_depth}, start, tile * T::kTile,
                             shared.dout);
                load_row_sums<T>(args, start, tile * T::kTile, head, shared);
                __syncthreads();
                score_gradients<T>(shape, shared);
                __syncthreads();
                const auto used = [&](int key, int query) { return !diagonal || key <= query; };
                add_product<T>(
                    shared.dout, num_queries, [&](int key, int query) { return shared.p[query][key]; }, used,
                    dv);
                add_product<T>(
                    shared.q, num_queries, [&](int key, int query) { return shared.ds[query][key]; }, used,
                    dk);
            }
        }
        store_rows<T>(shape, {args.dk, shape.kv_heads, kv_head, shape.depth}, start, first, dk);
        store_rows<T>(shape, {args.dv, shape.kv_heads, kv_head, shape.value_depth}, start, first, dv);
    }
}

template <class T, class Args> Shape shape_of(const Args& args) {
    return {.length = args.seq_length,
            .heads = args.q.dim(1),
            .kv_heads = args.k.dim(1),
            .depth = static_cast<int>(args.q.dim(2)),
            .value_depth = static_cast<int>(args.v.dim(2)),
            .scale = args.scale,
            .dtype = args.q.dtype,
            .sequences = args.q.dim(0) / args.seq_length,
            .tiles = ceil_div(args.seq_length, T::kTile)};
}

template <class T> void launch_forward(const op::Attention& args, const Launch& launch) {
    const Shape shape = shape_of<T>(args);
    const ForwardArgs forward{.shape = shape,
                              .q = args.q.data,
                              .k = args.k.data,
                              .v = args.v.data,
                              .o = args.o.data,
                              .lse = args.lse.as<float>()};
    const int64_t tasks = shape.sequences * shape.heads * shape.tiles;
    launch_kernel(attention_kernel<T>, grid_for(tasks, launch, 1), kThreads, sizeof(ForwardShared<T>), launch,
                  "attention", forward, tasks);
}

// delta: [T, heads]
template <class T>
void launch_backward(const op::AttentionBackward& args, float* delta, const Launch& launch) {
    const Shape shape = shape_of<T>(args);
    const int64_t rows = args.lse.numel();
    const BackwardArgs backward{.shape = shape,
                                .dout = args.dout.data,
                                .q = args.q.data,
                                .k = args.k.data,
                                .v = args.v.data,
                                .o = args.o.data,
                                .lse = args.lse.as<float>(),
                                .delta = delta,
                                .dq = args.dq.data,
                                .dk = args.dk.data,
                                .dv = args.dv.data};
    launch_kernel(delta_kernel, grid_for(ceil_div(rows, kThreads / kLanes), launch), kThreads, launch,
                  "attention backward: delta", backward, rows);
    const auto start = [&](auto kernel, int64_t heads, const char* name) {
        const int64_t tasks = shape.sequences * heads * shape.tiles;
        launch_kernel(kernel, grid_for(tasks, launch, 1), kThreads, sizeof(BackwardShared<T>), launch, name,
                      backward, tasks);
    };
    start(attention_dkv_kernel<T>, shape.kv_heads, "attention backward: dk, dv");
    start(attention_dq_kernel<T>, shape.heads, "attention backward: dq");
}

// Whether these heads run in tiles of 64 rows.
template <class Args> bool is_narrow(const Args& args) {
    const int64_t widest = std::max(args.q.dim(2), args.v.dim(2));
    require(widest <= Wide::kMaxDepth, ExitCode::usage,
            "attention on the GPU takes heads of at most {} elements, not {} (kv_channels, or qk_head_dim + "
            "qk_pos_emb_head_dim and v_head_dim)",
            Wide::kMaxDepth, widest);
    return widest <= Narrow::kMaxDepth;
}

// Whether cuDNN computes this call.
template <class Args> bool runs_on_cudnn(const Args& args, AttentionBackend backend) {
    require(!args.documents, ExitCode::usage,
            "attention on the GPU takes whole sequences of {} tokens, not {} documents (seq_length)",
            args.seq_length, args.documents.numel() - 1);
    return backend == AttentionBackend::cudnn &&
           CudnnAttention::takes(args.q, args.k, args.v, args.seq_length);
}

}  // namespace

}  // namespace fp8flow::hopper::attention

namespace fp8flow {

using namespace hopper;
using namespace hopper::attention;

void HopperOps::do_attention(const op::Attention& args, const Launch& launch) {
    const bool cudnn = runs_on_cudnn(args, kernels_.attention);
    if (args.q.numel() == 0) return;
    if (cudnn) return workspace(launch).cudnn.forward(args, launch);
    is_narrow(args) ? launch_forward<Narrow>(args, launch) : launch_forward<Wide>(args, launch);
}

void HopperOps::do_attention_backward(const op::AttentionBackward& args, const Launch& launch) {
    const bool cudnn = runs_on_cudnn(args, kernels_.attention);
    if (args.q.numel() == 0) return;
    if (cudnn) return workspace(launch).cudnn.backward(args, launch);
    float* const delta = workspace(launch).partials_for<float>(args.lse.numel());
    is_narrow(args) ? launch_backward<Narrow>(args, delta, launch)
                    : launch_backward<Wide>(args, delta, launch);
}

}  // namespace fp8flow
