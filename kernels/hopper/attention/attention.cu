// SPDX-License-Identifier: MIT
// Native attention on CUDA cores, tiled through shared memory, in the reference's order of summation and with
// its bits. Scores are not kept: the backward recomputes them from the saved log-sum-exp. Dispatch to cuDNN
// is at the end of this file (do_attention); rotary embedding and the packed projection: layout.cu.
#include "kernels/core/error.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::attention {

namespace {

// 16 x 16: thread (y, x) owns 4x4 scores of a tile and 4x8 elements of an output tile
constexpr int kThreads = 256;
constexpr int kTile = 64;  // queries, or keys, per tile
constexpr int kMaxDepth = 128;
constexpr int kTileLd = kMaxDepth + 4;  // row stride: 16 rows at one column fall into different banks
constexpr int kScoreLd = kTile + 4;
constexpr int kLanes = 8;              // partial sums of a row sum, as in the reference
constexpr int kCols = kMaxDepth / 16;  // columns of an output tile per thread

using RowTile = float[kTile][kTileLd];     // [row, D], zeros past the sequence's end and past D
using ScoreTile = float[kTile][kScoreLd];  // [query, key]

struct Shape {
    int64_t length;  // of a sequence
    int64_t heads, kv_heads;
    int depth;
    float scale;
    DType dtype;
    int64_t sequences;
    int64_t tiles;  // of a sequence
};

// Element (row, d) of head `head` is at index (row * heads + head) * D + d.
struct HeadRows {
    const void* data;
    int64_t heads, head;
};

// Loads rows [first, first + kTile) of a sequence that starts at row `start` of the tensor, as fp32. No
// barrier.
__device__ void load_rows(const Shape& shape, const HeadRows& from, int64_t start, int64_t first,
                          RowTile& tile) {
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kMaxDepth; i += kThreads) {
        const int row = i / kMaxDepth, d = i % kMaxDepth;
        const bool inside = first + row < shape.length && d < shape.depth;
        const int64_t at = ((start + first + row) * from.heads + from.head) * shape.depth + d;
        tile[row][d] = inside ? load_float(from.data, shape.dtype, at) : 0.0f;
    }
}

struct Position {
    int y, x;
};
__device__ __forceinline__ Position position() {
    return {static_cast<int>(threadIdx.x) / 16, static_cast<int>(threadIdx.x) % 16};
}
// Ownership of thread (y, x): rows 4y+i (i < 4) of scores and outputs, keys x+16j (j < 4) of scores, columns
// 4x+64(c/4)+c%4 (c < 8) of outputs.
__device__ __forceinline__ int row_of(Position at, int i) { return 4 * at.y + i; }
__device__ __forceinline__ int key_of(Position at, int j) { return at.x + 16 * j; }
__device__ __forceinline__ int col_of(Position at, int c) { return 4 * at.x + 64 * (c / 4) + c % 4; }

// s[i][j] = sum over ascending d of a[row][d] * b[key][d].
__device__ void dot_tiles(const RowTile& a, const RowTile& b, int depth, float (&s)[4][4]) {
    const Position at = position();
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] = 0.0f;
    for (int d = 0; d < depth; d += 4) {
        float4 left[4], right[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) left[i] = *reinterpret_cast<const float4*>(&a[row_of(at, i)][d]);
#pragma unroll
        for (int j = 0; j < 4; ++j) right[j] = *reinterpret_cast<const float4*>(&b[key_of(at, j)][d]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
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
template <class Weight, class Used>
__device__ void add_product(const RowTile& values, int count, Weight weight, Used used,
                            float (&sum)[4][kCols]) {
    const Position at = position();
    for (int k = 0; k < count; ++k) {
        float v[kCols];
#pragma unroll
        for (int half = 0; half < kCols / 4; ++half)
            *reinterpret_cast<float4*>(v + 4 * half) =
                *reinterpret_cast<const float4*>(&values[k][4 * at.x + 64 * half]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = row_of(at, i);
            if (!used(row, k)) continue;
            const float w = weight(row, k);
#pragma unroll
            for (int c = 0; c < kCols; ++c) sum[i][c] = fma_float(w, v[c], sum[i][c]);
        }
    }
}

__device__ void store_rows(const Shape& shape, void* to, int64_t heads, int64_t head, int64_t start,
                           int64_t first, const float (&values)[4][kCols]) {
    const Position at = position();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int64_t row = first + row_of(at, i);
        if (row >= shape.length) continue;
#pragma unroll
        for (int c = 0; c < kCols; ++c)
            if (col_of(at, c) < shape.depth)
                store_float(to, shape.dtype, ((start + row) * heads + head) * shape.depth + col_of(at, c),
                            values[i][c]);
    }
}

// Sum of the eight partial sums of eight consecutive threads: ((0+4)+(2+6)) + ((1+5)+(3+7)).
__device__ __forceinline__ float sum_lanes(float x) {
    x += __shfl_xor_sync(kFullMask, x, 4);
    x += __shfl_xor_sync(kFullMask, x, 2);
    x += __shfl_xor_sync(kFullMask, x, 1);
    return x;
}

struct ForwardArgs {
    Shape shape;
    const void *q, *k, *v;
    void* o;
    float* lse;
};
struct ForwardShared {
    RowTile q, k, v;
    ScoreTile p;
    float row_max[kTile];
    float row_sum[kTile];
};

// A tile of queries of one head. Keys and values are those of the head's group.
struct QueryTile {
    int64_t tile, head, start, first;  // start: of the sequence; first: query, within the sequence
    HeadRows keys, values;

    __device__ __forceinline__ QueryTile(const ForwardArgs& args, int64_t task) {
        const Shape& shape = args.shape;
        tile = shape.tiles - 1 - task / (shape.sequences * shape.heads);  // the longest tiles first
        head = task % shape.heads, start = task / shape.heads % shape.sequences * shape.length;
        first = tile * kTile;
        const int64_t group = shape.heads / shape.kv_heads;
        keys = {args.k, shape.kv_heads, head / group};
        values = {args.v, shape.kv_heads, head / group};
    }
};

// The first pass: loads the queries, and finds the largest score of every row, for the threads that have the
// row and in row_max.
__device__ __forceinline__ void find_row_max(const ForwardArgs& args, const QueryTile& queries,
                                             ForwardShared& shared, float (&largest)[4]) {
    const Shape& shape = args.shape;
    const Position at = position();
    float s[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = -INFINITY;
    for (int64_t tile = 0; tile <= queries.tile; ++tile) {
        __syncthreads();
        if (tile == 0)
            load_rows(shape, {args.q, shape.heads, queries.head}, queries.start, queries.first, shared.q);
        load_rows(shape, queries.keys, queries.start, tile * kTile, shared.k);
        __syncthreads();
        dot_tiles(shared.q, shared.k, shape.depth, s);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (tile < queries.tile || key_of(at, j) <= row_of(at, i)) {
                    const float score = s[i][j] * shape.scale;
                    largest[i] = score > largest[i] ? score : largest[i];
                }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int step = 8; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(kFullMask, largest[i], step);
            largest[i] = other > largest[i] ? other : largest[i];
        }
        if (at.x == 0) shared.row_max[row_of(at, i)] = largest[i];
    }
}

// The second pass: o before the division, and the row sums in row_sum. No barrier after these.
__device__ __forceinline__ void add_values(const ForwardArgs& args, const QueryTile& queries,
                                           const float (&largest)[4], ForwardShared& shared,
                                           float (&o)[4][kCols]) {
    const Shape& shape = args.shape;
    const Position at = position();
    // partial sum `thread % 8` of rows thread / 8 and 32 + thread / 8
    const int lane = static_cast<int>(threadIdx.x) % kLanes,
              lane_row = static_cast<int>(threadIdx.x) / kLanes;
    float lane_sum[2] = {0.0f, 0.0f};
    float s[4][4];
    for (int64_t tile = 0; tile <= queries.tile; ++tile) {
        const bool diagonal = tile == queries.tile;
        const int num_keys = static_cast<int>(min(shape.length - tile * kTile, int64_t{kTile}));
        __syncthreads();
        load_rows(shape, queries.keys, queries.start, tile * kTile, shared.k);
        load_rows(shape, queries.values, queries.start, tile * kTile, shared.v);
        __syncthreads();
        dot_tiles(shared.q, shared.k, shape.depth, s);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                shared.p[row_of(at, i)][key_of(at, j)] = exp_float(s[i][j] * shape.scale - largest[i]);
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane_row + 32 * half;
            for (int key = lane; key < num_keys; key += kLanes)
                if (!diagonal || key <= row) lane_sum[half] += shared.p[row][key];
        }
        add_product(
            shared.v, num_keys, [&](int row, int key) { return shared.p[row][key]; },
            [&](int row, int key) { return !diagonal || key <= row; }, o);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sum_lanes(lane_sum[half]);
        if (lane == 0) shared.row_sum[lane_row + 32 * half] = sum;
    }
}

// o = softmax(scale q k^T, causal) v, and lse; one pass for the maximum, one for sums and output.
//
// Lower bound: q, o, lse once; k twice and v once for every tile of 64 queries that attends to them (from
// L2). 3 causal matrix products of T*S*D/2 multiply-adds per head: scores are computed twice, so that sums
// run as in the reference.
//
// CTA: tiles of 64 queries of one head, longest first. Shared memory: tiles of q, k, v and of the
// probabilities. Barriers: before and after every load of a tile, and between writing the probabilities and
// reading those of other threads.
//
// Deterministic: each output is one thread's sum over ascending keys.
//
// Where to look next: no tensor cores are used; cuDNN (cudnn.cpp) is the fast path.
__global__ void __launch_bounds__(kThreads) attention_kernel(ForwardArgs args, int64_t num_tasks) {
    extern __shared__ __align__(16) uint8_t memory[];
    ForwardShared& shared = *reinterpret_cast<ForwardShared*>(memory);
    const Shape& shape = args.shape;
    const Position at = position();
    for (int64_t task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const QueryTile queries(args, task);
        float largest[4], o[4][kCols] = {};
        find_row_max(args, queries, shared, largest);
        add_values(args, queries, largest, shared, o);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < kCols; ++c) o[i][c] = div_float(o[i][c], shared.row_sum[row_of(at, i)]);
        store_rows(shape, args.o, shape.heads, queries.head, queries.start, queries.first, o);
        const int row = static_cast<int>(threadIdx.x);
        if (row < kTile && queries.first + row < shape.length)
            args.lse[(queries.start + queries.first + row) * shape.heads + queries.head] =
                shared.row_max[row] + log_float(shared.row_sum[row]);
    }
}

struct BackwardArgs {
    Shape shape;
    const void *dout, *q, *k, *v, *o;
    const float* lse;
    float* delta;  // [T, heads]
    void *dq, *dk, *dv;
};

// delta[t, head] = dot(dout, o) over D, in 8 partial sums. Bytes: 2*T*heads*D elements. 8 threads per row, no
// barriers; deterministic: fixed order.
__global__ void __launch_bounds__(kThreads) delta_kernel(BackwardArgs args, int64_t rows) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kLanes);
    // whole warps stay in the loop, because sum_lanes shuffles
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes); first < rows;
         first += step) {
        const int64_t row = first + static_cast<int>(threadIdx.x) / kLanes;
        float sum = 0.0f;
        if (row < rows)
            for (int d = lane; d < args.shape.depth; d += kLanes)
                sum = fma_float(load_float(args.dout, args.shape.dtype, row * args.shape.depth + d),
                                load_float(args.o, args.shape.dtype, row * args.shape.depth + d), sum);
        sum = sum_lanes(sum);
        if (lane == 0 && row < rows) args.delta[row] = sum;
    }
}

struct BackwardShared {
    RowTile q, dout, k, v;
    ScoreTile p, ds;
    float lse[kTile];
    float delta[kTile];
};

// lse and delta of a tile of queries; zeros past the end of the sequence.
__device__ void load_row_sums(const BackwardArgs& args, int64_t start, int64_t first, int64_t head,
                              BackwardShared& shared) {
    const int row = static_cast<int>(threadIdx.x);
    if (row >= kTile) return;
    const bool inside = first + row < args.shape.length;
    const int64_t at = (start + first + row) * args.shape.heads + head;
    shared.lse[row] = inside ? args.lse[at] : 0.0f;
    shared.delta[row] = inside ? args.delta[at] : 0.0f;
}

// p and ds of a tile of queries by a tile of keys, from the operands in shared memory. No barrier.
__device__ void score_gradients(const Shape& shape, BackwardShared& shared) {
    const Position at = position();
    float s[4][4], dp[4][4];
    dot_tiles(shared.q, shared.k, shape.depth, s);
    dot_tiles(shared.dout, shared.v, shape.depth, dp);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = row_of(at, i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float p = exp_float(s[i][j] * shape.scale - shared.lse[row]);
            shared.p[row][key_of(at, j)] = p;
            shared.ds[row][key_of(at, j)] = p * (dp[i][j] - shared.delta[row]) * shape.scale;
        }
    }
}

// dq. Lower bound: q, dout, lse, delta, dq once; k, v for every tile of 64 queries (from L2). 3 causal matrix
// products per query head.
//
// CTA: tiles of 64 queries of one head, over the tiles of keys up to the diagonal. Barriers: before tiles in
// shared memory are overwritten, after they are loaded, and after ds is written. Deterministic: each dq is
// one thread's sum over ascending keys.
__global__ void __launch_bounds__(kThreads) attention_dq_kernel(BackwardArgs args, int64_t num_tasks) {
    extern __shared__ __align__(16) uint8_t memory[];
    BackwardShared& shared = *reinterpret_cast<BackwardShared*>(memory);
    const Shape& shape = args.shape;
    const int64_t group = shape.heads / shape.kv_heads;
    for (int64_t task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int64_t query_tile =
            shape.tiles - 1 - task / (shape.sequences * shape.heads);  // the longest first
        const int64_t head = task % shape.heads, start = task / shape.heads % shape.sequences * shape.length;
        const int64_t first = query_tile * kTile;
        float dq[4][kCols] = {};
        for (int64_t tile = 0; tile <= query_tile; ++tile) {
            const bool diagonal = tile == query_tile;
            const int num_keys = static_cast<int>(min(shape.length - tile * kTile, int64_t{kTile}));
            __syncthreads();
            if (tile == 0) {
                load_rows(shape, {args.q, shape.heads, head}, start, first, shared.q);
                load_rows(shape, {args.dout, shape.heads, head}, start, first, shared.dout);
                load_row_sums(args, start, first, head, shared);
            }
            load_rows(shape, {args.k, shape.kv_heads, head / group}, start, tile * kTile, shared.k);
            load_rows(shape, {args.v, shape.kv_heads, head / group}, start, tile * kTile, shared.v);
            __syncthreads();
            score_gradients(shape, shared);
            __syncthreads();
            add_product(
                shared.k, num_keys, [&](int row, int key) { return shared.ds[row][key]; },
                [&](int row, int key) { return !diagonal || key <= row; }, dq);
        }
        store_rows(shape, args.dq, shape.heads, head, start, first, dq);
    }
}

// dk, dv. Lower bound: k, v, dk, dv once; q, dout, lse, delta for every tile of 64 keys (from L2). 4 causal
// matrix products per query head.
//
// CTA: tiles of 64 keys of one kv head, over its query heads and, for each, the tiles of queries from the
// diagonal on. Barriers as in attention_dq_kernel. Deterministic: each dk, dv is one thread's sum over
// ascending heads and queries.
__global__ void __launch_bounds__(kThreads) attention_dkv_kernel(BackwardArgs args, int64_t num_tasks) {
    extern __shared__ __align__(16) uint8_t memory[];
    BackwardShared& shared = *reinterpret_cast<BackwardShared*>(memory);
    const Shape& shape = args.shape;
    const int64_t group = shape.heads / shape.kv_heads;
    for (int64_t task = blockIdx.x; task < num_tasks; task += gridDim.x) {
        const int64_t key_tile = task / (shape.sequences * shape.kv_heads);  // the longest first
        const int64_t kv_head = task % shape.kv_heads,
                      start = task / shape.kv_heads % shape.sequences * shape.length;
        const int64_t first = key_tile * kTile;
        float dk[4][kCols] = {}, dv[4][kCols] = {};
        __syncthreads();
        load_rows(shape, {args.k, shape.kv_heads, kv_head}, start, first, shared.k);
        load_rows(shape, {args.v, shape.kv_heads, kv_head}, start, first, shared.v);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            for (int64_t tile = key_tile; tile < shape.tiles; ++tile) {
                const bool diagonal = tile == key_tile;
                const int num_queries = static_cast<int>(min(shape.length - tile * kTile, int64_t{kTile}));
                __syncthreads();
                load_rows(shape, {args.q, shape.heads, head}, start, tile * kTile, shared.q);
                load_rows(shape, {args.dout, shape.heads, head}, start, tile * kTile, shared.dout);
                load_row_sums(args, start, tile * kTile, head, shared);
                __syncthreads();
                score_gradients(shape, shared);
                __syncthreads();
                const auto used = [&](int key, int query) { return !diagonal || key <= query; };
                add_product(
                    shared.dout, num_queries, [&](int key, int query) { return shared.p[query][key]; }, used,
                    dv);
                add_product(
                    shared.q, num_queries, [&](int key, int query) { return shared.ds[query][key]; }, used,
                    dk);
            }
        }
        store_rows(shape, args.dk, shape.kv_heads, kv_head, start, first, dk);
        store_rows(shape, args.dv, shape.kv_heads, kv_head, start, first, dv);
    }
}

// What neither these kernels nor cuDNN's calls support yet.
template <class Args> void require_supported(const Args& args) {
    require(args.v.dim(2) == args.q.dim(2), ExitCode::usage,
            "attention on the GPU takes values of the queries' head size {}, not {} (kv_channels)",
            args.q.dim(2), args.v.dim(2));
    require(!args.documents, ExitCode::usage,
            "attention on the GPU takes whole sequences of {} tokens, not {} documents (seq_length)",
            args.seq_length, args.documents.numel() - 1);
}

Shape shape_of(const TensorView& q, const TensorView& k, int64_t seq_length, float scale) {
    require(q.dim(2) <= kMaxDepth, ExitCode::usage,
            "attention on the GPU takes heads of at most {} elements, not {} (kv_channels)", kMaxDepth,
            q.dim(2));
    return {.length = seq_length,
            .heads = q.dim(1),
            .kv_heads = k.dim(1),
            .depth = static_cast<int>(q.dim(2)),
            .scale = scale,
            .dtype = q.dtype,
            .sequences = q.dim(0) / seq_length,
            .tiles = ceil_div(seq_length, kTile)};
}

// Launches a kernel that needs more shared memory than the default limit.
template <class Args>
void launch_tiles(void (*kernel)(Args, int64_t), const Args& args, int64_t num_tasks,
                  std::size_t shared_bytes, int per_sm, const Launch& launch, const char* name) {
    allow_shared_memory(kernel, shared_bytes, name);
    kernel<<<grid_for(num_tasks, launch, per_sm), kThreads, shared_bytes, stream_of(launch)>>>(args,
                                                                                               num_tasks);
    check_launch(name);
}

}  // namespace

}  // namespace fp8flow::hopper::attention

namespace fp8flow {

using namespace hopper;
using namespace hopper::attention;

void HopperOps::do_attention(const op::Attention& args, const Launch& launch) {
    require_supported(args);
    if (args.q.numel() == 0) return;
    if (kernels_.attention == AttentionBackend::cudnn &&
        CudnnAttention::takes(args.q, args.k, args.seq_length))
        return workspace(launch).cudnn.forward(args, launch);
    const Shape shape = shape_of(args.q, args.k, args.seq_length, args.scale);
    const ForwardArgs forward{.shape = shape,
                              .q = args.q.data,
                              .k = args.k.data,
                              .v = args.v.data,
                              .o = args.o.data,
                              .lse = args.lse.as<float>()};
    launch_tiles(attention_kernel, forward, shape.sequences * shape.heads * shape.tiles,
                 sizeof(ForwardShared), 1, launch, "attention");
}

void HopperOps::do_attention_backward(const op::AttentionBackward& args, const Launch& launch) {
    require_supported(args);
    if (args.q.numel() == 0) return;
    if (kernels_.attention == AttentionBackend::cudnn &&
        CudnnAttention::takes(args.q, args.k, args.seq_length))
        return workspace(launch).cudnn.backward(args, launch);
    const Shape shape = shape_of(args.q, args.k, args.seq_length, args.scale);
    const int64_t rows = args.lse.numel();
    const BackwardArgs backward{.shape = shape,
                                .dout = args.dout.data,
                                .q = args.q.data,
                                .k = args.k.data,
                                .v = args.v.data,
                                .o = args.o.data,
                                .lse = args.lse.as<float>(),
                                .delta = workspace(launch).partials_for<float>(rows),
                                .dq = args.dq.data,
                                .dk = args.dk.data,
                                .dv = args.dv.data};
    delta_kernel<<<grid_for(ceil_div(rows, kThreads / kLanes), launch), kThreads, 0, stream_of(launch)>>>(
        backward, rows);
    check_launch("attention backward: delta");
    const int64_t kv_tasks = shape.sequences * shape.kv_heads * shape.tiles;
    launch_tiles(attention_dkv_kernel, backward, kv_tasks, sizeof(BackwardShared), 1, launch,
                 "attention backward: dk, dv");
    launch_tiles(attention_dq_kernel, backward, shape.sequences * shape.heads * shape.tiles,
                 sizeof(BackwardShared), 1, launch, "attention backward: dq");
}

}  // namespace fp8flow
