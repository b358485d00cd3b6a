// SPDX-License-Identifier: MIT
// Packs and unpacks messages for the NCCL exchange. All kernels are deterministic: positions are prefix sums
// of integers, every row has one writer, sums have a fixed order, and there are no atomics. All are
// memory-bound.
#include "kernels/hopper/exchange/nccl/kernels.h"

#include "kernels/core/error.h"
#include "kernels/hopper/device/vector_io.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/widened.h"
#include "kernels/hopper/runtime/launch.h"

#include <type_traits>

namespace fp8flow::hopper::nccl {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kScanThreads = 1024;

// ---- positions

// Two counts below 2^32, scanned as one number: choices and rows.
using Pair = unsigned long long;
__device__ __forceinline__ Pair make_pair_of(int choices) {
    return static_cast<Pair>(choices) | static_cast<Pair>(choices > 0) << 32;
}
__device__ __forceinline__ int32_t choices_of(Pair pair) { return static_cast<int32_t>(pair & 0xFFFFFFFFu); }
__device__ __forceinline__ int32_t rows_of(Pair pair) { return static_cast<int32_t>(pair >> 32); }

// Sum over the threads before this one; total: over all threads. All 1024 threads call it. Two barriers: the
// first one protects the shared words of the previous call.
__device__ Pair scan(Pair value, Pair& total, Pair* shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
              warp = static_cast<int>(threadIdx.x) / kWarpSize;
    Pair sum = value;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
        const Pair other = __shfl_up_sync(kFullMask, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == kWarpSize - 1) shared[warp] = sum;
    __syncthreads();
    Pair before = 0;
    total = 0;
    for (int w = 0; w < kScanThreads / kWarpSize; ++w) {
        if (w < warp) before += shared[w];
        total += shared[w];
    }
    return before + sum - value;
}

struct PositionsArgs {
    const int32_t* ids;          // [G, S, K]
    const int32_t* recv_source;  // [G * S]
    const int64_t *recv_offsets, *send_counts;
    int ranks, slots, topk, local_experts, rank, tokens;
    int32_t *choice_starts, *row_starts, *first_choice;
    int64_t* counts;

    __device__ int count_on(int64_t token, int host) const {  // token: source rank * S + token
        int count = 0;
        for (int k = 0; k < topk; ++k) {
            const int32_t id = ids[token * topk + k];
            count += id >= 0 && id / local_experts == host;
        }
        return count;
    }
};

// Traffic: reads the ids of own tokens once per rank and those of received rows once, writes two words per
// token and rank. CTA g < G scans own tokens for rank g, the last CTA the received rows, 1024 items per
// iteration. Barriers: those of the scan.
__global__ __launch_bounds__(kScanThreads) void positions_kernel(const PositionsArgs args) {
    __shared__ Pair shared[kScanThreads / kWarpSize];
    const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    const bool own = block < args.ranks;
    const int64_t items = own ? args.tokens : args.recv_offsets[args.ranks];
    int32_t* choice_starts =
        own ? args.choice_starts + static_cast<int64_t>(block) * (args.slots + 1) : args.first_choice;
    int32_t* row_starts = own ? args.row_starts + static_cast<int64_t>(block) * (args.slots + 1) : nullptr;
    Pair before = 0;  // of all earlier iterations
    for (int64_t first = 0; first < items; first += kScanThreads) {
        const int64_t item = first + thread;
        int count = 0;
        if (item < items)
            count = own ? args.count_on(static_cast<int64_t>(args.rank) * args.slots + item, block)
                        : args.count_on(args.recv_source[item], args.rank);
        Pair total = 0;
        const Pair start = before + scan(make_pair_of(count), total, shared);
        if (item < items) {
            choice_starts[item] = choices_of(start);
            if (own) row_starts[item] = rows_of(start);
        }
        before += total;
    }
    if (thread == 0) {
        choice_starts[items] = choices_of(before);
        if (own) {
            row_starts[items] = rows_of(before);
            args.counts[block] = args.send_counts[block];
            args.counts[2 * args.ranks + block] = choices_of(before);
        }
    }
    if (own) return;
    __syncthreads();  // first_choice is read by other threads of this CTA than those that wrote it
    for (int r = thread; r < args.ranks; r += kScanThreads) {
        const int64_t begin = args.recv_offsets[r], end = args.recv_offsets[r + 1];
        args.counts[args.ranks + r] = end - begin;
        args.counts[3 * args.ranks + r] = args.first_choice[end] - args.first_choice[begin];
    }
}

// ---- packing

// One warp copies a row; from == nullptr: zeros.
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes, bool vectorised,
                                         int lane) {
    if (vectorised) {
        const uint4* source = reinterpret_cast<const uint4*>(from);
        uint4* target = reinterpret_cast<uint4*>(to);
        const int64_t count = bytes / static_cast<int64_t>(sizeof(uint4));
#pragma unroll 4
        for (int64_t i = lane; i < count; i += kWarpSize)
            target[i] = from != nullptr ? source[i] : make_uint4(0, 0, 0, 0);
    } else {
        for (int64_t i = lane; i < bytes; i += kWarpSize) to[i] = from != nullptr ? from[i] : uint8_t{0};
    }
}
bool is_aligned(const void* data, int64_t row_bytes) {
    return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0 &&
           row_bytes % static_cast<int64_t>(sizeof(uint4)) == 0;
}

// The source rank of received row i.
__device__ __forceinline__ int source_of(const int64_t* recv_offsets, int ranks, int64_t i) {
    int source = 0;
    while (source < ranks - 1 && i >= recv_offsets[source + 1]) ++source;
    return source;
}

struct PackArgs {
    const uint8_t *rows, *scales;
    uint8_t *sent_rows, *sent_scales;  // in messages
    uint8_t *own_rows, *own_scales;    // among the received rows
    int64_t row_bytes, scale_bytes, num_rows;
    bool vectorised;
    const int32_t* send_tokens;  // [G, S]
    const int64_t* send_counts;  // [G]
    const int64_t* recv_offsets;
    int ranks, slots, rank;
    int64_t stride;
};

// Traffic: reads and writes every sent row once. One warp per row: finds the row's rank from the counts or
// the stride, then copies values and scales.
__global__ __launch_bounds__(kThreads) void pack_rows_kernel(const PackArgs args) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              lane = static_cast<int>(threadIdx.x) % kWarpSize;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < args.num_rows;
         row += static_cast<int64_t>(gridDim.x) * kWarps) {
        int to_rank = 0;
        int64_t place = row;
        if (args.stride > 0) {
            to_rank = static_cast<int>(row / args.stride);
            place = row % args.stride;
            if (place >= args.send_counts[to_rank]) continue;
        } else {
            while (to_rank < args.ranks - 1 && place >= args.send_counts[to_rank])
                place -= args.send_counts[to_rank++];
        }
        const int64_t token = args.send_tokens[static_cast<int64_t>(to_rank) * args.slots + place];
        const bool self = to_rank == args.rank;
        const int64_t to = self ? args.recv_offsets[args.rank] + place : row;
        copy_row((self ? args.own_rows : args.sent_rows) + to * args.row_bytes,
                 args.rows + token * args.row_bytes, args.row_bytes, args.vectorised, lane);
        if (args.scale_bytes > 0)
            copy_row((self ? args.own_scales : args.sent_scales) + to * args.scale_bytes,
                     args.scales + token * args.scale_bytes, args.scale_bytes, false, lane);
    }
}

struct MoveArgs {
    uint8_t *packed, *strided;
    int64_t row_bytes, stride;
    bool vectorised;
    const int64_t* recv_offsets;
    int ranks, skipped;  // rows of rank `skipped` are not copied; -1: none
};

// Traffic: reads and writes every received row once. One warp per row.
template <Repack kDirection>
__global__ __launch_bounds__(kThreads) void move_rows_kernel(const MoveArgs args) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t received = args.recv_offsets[args.ranks];
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + warp; i < received;
         i += static_cast<int64_t>(gridDim.x) * kWarps) {
        const int source = source_of(args.recv_offsets, args.ranks, i);
        if (source == args.skipped) continue;
        uint8_t* packed = args.packed + i * args.row_bytes;
        uint8_t* strided =
            args.strided + (source * args.stride + i - args.recv_offsets[source]) * args.row_bytes;
        copy_row(kDirection == Repack::to_packed ? packed : strided,
                 kDirection == Repack::to_packed ? strided : packed, args.row_bytes, args.vectorised, lane);
    }
}

struct ChoiceArgs {
    DeviceView src;
    uint8_t* out;
    const int32_t* recv_rows;     // [G * S, K]
    const int32_t* first_choice;  // [G * S + 1]
    const int64_t* recv_offsets;  // [G + 1]
    int ranks, topk;
    int64_t row_bytes;
    bool vectorised;
    int64_t stride;

    __device__ int64_t num_received() const { return recv_offsets[ranks]; }
    // Where the choices of received row i begin in `out`.
    __device__ int64_t begin_of(int64_t i) const {
        if (stride == 0) return first_choice[i];
        const int source = source_of(recv_offsets, ranks, i);
        return source * stride + first_choice[i] - first_choice[recv_offsets[source]];
    }
};

// Traffic: reads and writes the row of every choice on this rank once. One warp per received row.
__global__ __launch_bounds__(kThreads) void pack_choices_kernel(const ChoiceArgs args) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t received = args.num_received(), base = args.src.base();
    const uint8_t* src = static_cast<const uint8_t*>(args.src.data);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + warp; i < received;
         i += static_cast<int64_t>(gridDim.x) * kWarps) {
        const int64_t to = args.begin_of(i);
        const int count = args.first_choice[i + 1] - args.first_choice[i];
        for (int j = 0; j < count; ++j) {
            const int64_t row = args.recv_rows[i * args.topk + j];
            copy_row(args.out + (to + j) * args.row_bytes,
                     row >= 0 ? src + (base + row) * args.row_bytes : nullptr, args.row_bytes,
                     args.vectorised, lane);
        }
    }
}

// Traffic: reads and writes 4 bytes per choice. One thread per received row.
__global__ __launch_bounds__(kThreads) void pack_values_kernel(const ChoiceArgs args) {
    const int64_t received = args.num_received(), base = args.src.base();
    const float* src = static_cast<const float*>(args.src.data);
    float* out = reinterpret_cast<float*>(args.out);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < received;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        const int64_t to = args.begin_of(i);
        const int count = args.first_choice[i + 1] - args.first_choice[i];
        for (int j = 0; j < count; ++j) {
            const int64_t row = args.recv_rows[i * args.topk + j];
            out[to + j] = row >= 0 ? src[base + row] : 0.0f;
        }
    }
}

ChoiceArgs choice_args(const TensorView& src, const TensorView& rows, const DispatchPlan& plan,
                       const Positions& positions, const TensorView& out, int64_t row_bytes, int64_t stride) {
    return {.src = device_view(src),
            .out = out.bytes_ptr(),
            .recv_rows = rows.as<int32_t>(),
            .first_choice = positions.first_choice.as<int32_t>(),
            .recv_offsets = plan.recv_offsets.as<int64_t>(),
            .ranks = static_cast<int>(plan.all_ids.dim(0)),
            .topk = static_cast<int>(plan.topk),
            .row_bytes = row_bytes,
            .vectorised = is_aligned(src.data, row_bytes) && is_aligned(out.data, row_bytes),
            .stride = stride};
}

// ---- sums on the owner

struct AddArgs {
    DeviceView returned, residual, y;
    const int32_t* starts;  // [G, S + 1]
    int ranks, slots;
    int64_t tokens, hidden, stride;
    bool vectorised;
};
struct WeightedAddArgs : AddArgs {
    const float* weights;  // [T, K]
    int64_t topk;
};

// Traffic: reads every returned row and the residual once, writes y. One warp per token, eight columns per
// thread. Adds the token's rows in registers, in the order of the messages, and rounds once. With weights,
// row n of a token is multiplied by its weight n in the fma that adds it.
template <class Args> __global__ __launch_bounds__(kThreads) void add_returned_kernel(const Args args) {
    constexpr bool kWeighted = std::is_same_v<Args, WeightedAddArgs>;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              lane = static_cast<int>(threadIdx.x) % kWarpSize;
    for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + warp; token < args.tokens;
         token += static_cast<int64_t>(gridDim.x) * kWarps) {
        for (int64_t column = lane * kUnit; column < args.hidden; column += kWarpSize * kUnit) {
            const int64_t width = args.hidden - column;
            float sum[kUnit] = {}, values[kUnit];
            int64_t message = 0;  // first row of rank g's message
            [[maybe_unused]] const float* weight = nullptr;
            if constexpr (kWeighted) weight = args.weights + token * args.topk;
            for (int g = 0; g < args.ranks; ++g) {
                const int32_t* starts = args.starts + static_cast<int64_t>(g) * (args.slots + 1);
                for (int64_t row = message + starts[token]; row < message + starts[token + 1]; ++row) {
                    load_up_to_8(args.returned.data, args.returned.dtype, row * args.hidden + column, width,
                                 args.vectorised, values);
                    if constexpr (kWeighted) {
#pragma unroll
                        for (int j = 0; j < kUnit; ++j) sum[j] = fma_float(*weight, values[j], sum[j]);
                        ++weight;
                    } else {
#pragma unroll
                        for (int j = 0; j < kUnit; ++j) sum[j] += values[j];
                    }
                }
                message += args.stride > 0 ? args.stride : starts[args.tokens];
            }
            if (args.residual.data != nullptr) {
                load_up_to_8(args.residual.data, args.residual.dtype, token * args.hidden + column, width,
                             args.vectorised, values);
#pragma unroll
                for (int j = 0; j < kUnit; ++j) sum[j] += values[j];
            }
            store_up_to_8(args.y.data, args.y.dtype, token * args.hidden + column, width, args.vectorised,
                          sum);
        }
    }
}

// Traffic: reads and writes 4 bytes per choice, reads the ids of its token. One thread per choice: its
// position among the choices that one rank returns for a token is the number of smaller expert ids.
__global__ __launch_bounds__(kThreads) void place_values_kernel(const float* returned, const int32_t* ids,
                                                                const int32_t* choice_starts, float* dprob,
                                                                int64_t tokens, int topk, int slots,
                                                                int local_experts, int64_t stride) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < tokens * topk;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        const int64_t token = i / topk;
        const int32_t id = ids[i];
        if (id < 0) {
            dprob[i] = 0.0f;
            continue;
        }
        const int host = id / local_experts;
        int64_t at = choice_starts[static_cast<int64_t>(host) * (slots + 1) + token];
        if (stride > 0)
            at += host * stride;
        else
            for (int g = 0; g < host; ++g)
                at += choice_starts[static_cast<int64_t>(g) * (slots + 1) + tokens];
        for (int k = 0; k < topk; ++k) {
            const int32_t other = ids[token * topk + k];
            at += other >= 0 && other < id && other / local_experts == host;
        }
        dprob[i] = returned[at];
    }
}

// ---- reductions

struct Add {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct MaxIgnoringNan {
    __device__ float operator()(float a, float b) const { return max_ignore_nan(a, b); }
};
struct Max {
    __device__ int32_t operator()(int32_t a, int32_t b) const { return b > a ? b : a; }
};

// Traffic: reads every row once, writes the result. One thread per element.
template <class T, class Combine>
__global__ __launch_bounds__(kThreads) void reduce_rows_kernel(const T* rows, int64_t num_rows, int64_t count,
                                                               T* result, Combine combine) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        auto value = widened(rows[i]);
        for (int64_t r = 1; r < num_rows; ++r) value = combine(value, widened(rows[r * count + i]));
        result[i] = narrowed<T>(value);
    }
}
template <class T, class Combine>
void launch_reduce(const void* rows, int64_t num_rows, int64_t count, void* result, Combine combine,
                   const Launch& launch) {
    launch_kernel(reduce_rows_kernel<T, Combine>, grid_for(ceil_div(count, kThreads), launch), kThreads,
                  launch, "adding the ranks' values", static_cast<const T*>(rows), num_rows, count,
                  static_cast<T*>(result), combine);
}

}  // namespace

Positions make_positions(const DispatchPlan& plan, Arena& scratch) {
    const int64_t ranks = plan.all_ids.dim(0), slots = plan.all_ids.dim(1);
    return {.choice_starts = scratch.tensor(DType::i32, {ranks, slots + 1}, "exchange"),
            .row_starts = scratch.tensor(DType::i32, {ranks, slots + 1}, "exchange"),
            .first_choice = scratch.tensor(DType::i32, {ranks * slots + 1}, "exchange"),
            .counts = scratch.tensor(DType::i64, {4, ranks}, "exchange")};
}

void find_positions(const DispatchPlan& plan, int64_t rank, const Positions& positions,
                    const Launch& launch) {
    const PositionsArgs args{.ids = plan.all_ids.as<int32_t>(),
                             .recv_source = plan.recv_source.as<int32_t>(),
                             .recv_offsets = plan.recv_offsets.as<int64_t>(),
                             .send_counts = plan.send_counts.as<int64_t>(),
                             .ranks = static_cast<int>(plan.all_ids.dim(0)),
                             .slots = static_cast<int>(plan.all_ids.dim(1)),
                             .topk = static_cast<int>(plan.topk),
                             .local_experts = static_cast<int>(plan.num_local_experts),
                             .rank = static_cast<int>(rank),
                             .tokens = static_cast<int>(plan.num_tokens),
                             .choice_starts = positions.choice_starts.as<int32_t>(),
                             .row_starts = positions.row_starts.as<int32_t>(),
                             .first_choice = positions.first_choice.as<int32_t>(),
                             .counts = positions.counts.as<int64_t>()};
    launch_kernel(positions_kernel, static_cast<unsigned>(args.ranks + 1), kScanThreads, launch,
                  "finding positions in messages", args);
}

void pack_rows(const PackRows& args, const DispatchPlan& plan, const Positions& positions, int64_t rank,
               const Launch& launch) {
    if (args.num_rows == 0) return;
    const int64_t row_bytes = args.rows.data.cols() * size_of(args.rows.data.dtype);
    const bool scaled = static_cast<bool>(args.rows.scales);
    const PackArgs kernel_args{
        .rows = args.rows.data.bytes_ptr(),
        .scales = args.rows.scales.bytes_ptr(),
        .sent_rows = args.sent_rows.bytes_ptr(),
        .sent_scales = args.sent_scales.bytes_ptr(),
        .own_rows = args.received.data.bytes_ptr(),
        .own_scales = args.received.scales.bytes_ptr(),
        .row_bytes = row_bytes,
        .scale_bytes = scaled ? args.rows.scales.cols() * size_of(args.rows.scales.dtype) : 0,
        .num_rows = args.num_rows,
        .vectorised = is_aligned(args.rows.data.data, row_bytes) &&
                      is_aligned(args.sent_rows.data, row_bytes) &&
                      is_aligned(args.received.data.data, row_bytes),
        .send_tokens = plan.send_tokens.as<int32_t>(),
        .send_counts = positions.counts.as<int64_t>(),
        .recv_offsets = plan.recv_offsets.as<int64_t>(),
        .ranks = static_cast<int>(plan.all_ids.dim(0)),
        .slots = static_cast<int>(plan.all_ids.dim(1)),
        .rank = static_cast<int>(rank),
        .stride = args.stride};
    launch_kernel(pack_rows_kernel, grid_for(ceil_div(args.num_rows, kWarps), launch), kThreads, launch,
                  "packing rows", kernel_args);
}

void move_rows(const MoveRows& args, const DispatchPlan& plan, int64_t rank, const Launch& launch) {
    const int64_t row_bytes = args.packed.cols() * size_of(args.packed.dtype);
    const MoveArgs kernel_args{
        .packed = args.packed.bytes_ptr(),
        .strided = args.strided.bytes_ptr(),
        .row_bytes = row_bytes,
        .stride = args.stride,
        .vectorised = is_aligned(args.packed.data, row_bytes) && is_aligned(args.strided.data, row_bytes),
        .recv_offsets = plan.recv_offsets.as<int64_t>(),
        .ranks = static_cast<int>(plan.all_ids.dim(0)),
        .skipped = args.skip_own ? static_cast<int>(rank) : -1};
    const auto kernel = args.direction == Repack::to_packed ? move_rows_kernel<Repack::to_packed>
                                                            : move_rows_kernel<Repack::to_strided>;
    launch_kernel(kernel, grid_for(ceil_div(plan.recv_rows.dim(0), kWarps), launch), kThreads, launch,
                  "moving rows to or from messages", kernel_args);
}

void pack_choices(const TensorView& src, const DispatchPlan& plan, const Positions& positions,
                  const TensorView& out, int64_t stride, const Launch& launch) {
    const int64_t row_bytes = src.cols() * size_of(src.dtype);
    const ChoiceArgs args = choice_args(src, plan.recv_rows, plan, positions, out, row_bytes, stride);
    launch_kernel(pack_choices_kernel, grid_for(ceil_div(plan.recv_rows.dim(0), kWarps), launch), kThreads,
                  launch, "packing the rows of choices", args);
}

void pack_choice_values(const TensorView& values, const DispatchPlan& plan, const Positions& positions,
                        const TensorView& out, int64_t stride, const Launch& launch) {
    const ChoiceArgs args = choice_args(values, plan.rows_of_probs(), plan, positions, out,
                                        static_cast<int64_t>(sizeof(float)), stride);
    launch_kernel(pack_values_kernel, grid_for(ceil_div(plan.recv_rows.dim(0), kThreads), launch), kThreads,
                  launch, "packing the values of choices", args);
}

void add_returned(const AddReturned& args, const Launch& launch) {
    const int64_t tokens = args.y.dim(0), hidden = args.y.dim(1);
    if (tokens == 0 || hidden == 0) return;
    const AddArgs kernel_args{.returned = device_view(args.returned),
                              .residual = device_view(args.residual),
                              .y = device_view(args.y),
                              .starts = args.starts.as<int32_t>(),
                              .ranks = static_cast<int>(args.starts.dim(0)),
                              .slots = static_cast<int>(args.starts.dim(1)) - 1,
                              .tokens = tokens,
                              .hidden = hidden,
                              .stride = args.stride,
                              .vectorised = is_vectorisable(args.returned.data, hidden) &&
                                            is_vectorisable(args.residual.data, hidden) &&
                                            is_vectorisable(args.y.data, hidden)};
    const unsigned grid = grid_for(ceil_div(tokens, kWarps), launch);
    const auto start = [&](const auto& own) {
        launch_kernel(add_returned_kernel<std::decay_t<decltype(own)>>, grid, kThreads, launch,
                      "adding returned rows", own);
    };
    if (args.weights)
        start(WeightedAddArgs{kernel_args, args.weights.as<float>(), args.weights.dim(1)});
    else
        start(kernel_args);
}

void place_choice_values(const TensorView& returned, const DispatchPlan& plan, const Positions& positions,
                         int64_t rank, int64_t stride, const TensorView& dprob, const Launch& launch) {
    const int64_t values = dprob.numel(), slots = plan.all_ids.dim(1);
    if (values == 0) return;
    launch_kernel(place_values_kernel, grid_for(ceil_div(values, kThreads), launch), kThreads, launch,
                  "returning the gradients of the probabilities", returned.as<float>(),
                  plan.all_ids.as<int32_t>() + rank * slots * plan.topk,
                  positions.choice_starts.as<int32_t>(), dprob.as<float>(), plan.num_tokens, plan.topk, slots,
                  plan.num_local_experts, stride);
}

void reduce_rows(Reduce reduce, DType dtype, const void* rows, int64_t num_rows, int64_t count, void* result,
                 const Launch& launch) {
    if (count == 0) return;
    if (dtype == DType::f32 && reduce == Reduce::sum)
        launch_reduce<float>(rows, num_rows, count, result, Add{}, launch);
    else if (dtype == DType::f32)
        launch_reduce<float>(rows, num_rows, count, result, MaxIgnoringNan{}, launch);
    else if (dtype == DType::bf16 && reduce == Reduce::sum)
        launch_reduce<Bf16>(rows, num_rows, count, result, Add{}, launch);
    else if (dtype == DType::i64 && reduce == Reduce::sum)
        launch_reduce<int64_t>(rows, num_rows, count, result, Add{}, launch);
    else if (dtype == DType::i32 && reduce == Reduce::max)
        launch_reduce<int32_t>(rows, num_rows, count, result, Max{}, launch);
    else
        FP8FLOW_CHECK(false, "no {} of {}", reduce == Reduce::sum ? "sum" : "maximum", name_of(dtype));
}

}  // namespace fp8flow::hopper::nccl
