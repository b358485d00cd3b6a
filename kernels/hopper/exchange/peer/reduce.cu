// SPDX-License-Identifier: MIT
// all_reduce over peer memory, element by element in ascending rank order, so with the bits of
// ProcessGroup's. Small tensors: every rank stores its values into every member's receive buffer, and reduces
// all of them after one barrier. Large ones, a chunk at a time: every rank stages the chunk in its region,
// reduces its shard of all members' chunks, and fetches the other shards' results; two barriers a chunk.
#include "kernels/core/scalar_math.h"
#include "kernels/hopper/device/widened.h"
#include "kernels/hopper/exchange/peer/exchange.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::peer {

namespace {

struct Sum {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
    __device__ __forceinline__ float operator()(float a, float b) const { return max_ignore_nan(a, b); }
    __device__ __forceinline__ int32_t operator()(int32_t a, int32_t b) const { return max(a, b); }
};

struct ReduceArgs {
    PeerGroup group;
    uint8_t* values;
    int64_t bytes;          // of the tensor, or of this chunk of it
    int64_t chunk, result;  // in a region
    int64_t shard_bytes;    // a multiple of 16; the last members' shards may be short or empty
};

// Moves: the tensor to every member. No barriers, one writer a byte.
__global__ __launch_bounds__(kPeerThreads) void push_values_kernel(const ReduceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    for (int step = 1; step <= group.size; ++step)
        copy_contiguous(
            group.next_buffer((group.rank + step) % group.size) + group.rank * PeerLayout::kSmallBytes,
            args.values, args.bytes, grid_thread(), grid_threads());
}
// Moves: every member's tensor in, one out, all of it local. A thread takes one element at a time, members in
// ascending order.
template <class T, class Reduce>
__global__ __launch_bounds__(kPeerThreads) void reduce_values_kernel(const ReduceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    const uint8_t* buffer = group.current_buffer(group.rank);
    for (int64_t i = grid_thread(); i < args.bytes / static_cast<int64_t>(sizeof(T)); i += grid_threads()) {
        auto total = widened(reinterpret_cast<const T*>(buffer)[i]);
        for (int r = 1; r < group.size; ++r)
            total =
                Reduce()(total, widened(reinterpret_cast<const T*>(buffer + r * PeerLayout::kSmallBytes)[i]));
        reinterpret_cast<T*>(args.values)[i] = narrowed<T>(total);
    }
}

// Moves: the chunk in and out once, all of it local.
__global__ __launch_bounds__(kPeerThreads) void stage_chunk_kernel(const ReduceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    copy_contiguous(group.regions[group.rank] + args.chunk, args.values, args.bytes, grid_thread(),
                    grid_threads());
}
// Moves: one shard from every member over NVLink, one out. A thread takes 16 bytes of two places at a time
// and adds members in ascending order; their loads do not depend on each other. Bytes past the chunk's end
// are reduced too, and never fetched. No barriers, one writer a byte.
template <class T, class Reduce>
__global__ __launch_bounds__(kPeerThreads) void reduce_shard_kernel(const ReduceArgs args) {
    constexpr int kElements = static_cast<int>(kPeerVector / sizeof(T)), kPlaces = 2;
    struct alignas(kPeerVector) Vector {
        T element[kElements];
    };
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    const int64_t first_byte = group.rank * args.shard_bytes;
    const int64_t bytes = max(int64_t{0}, min(args.shard_bytes, args.bytes - first_byte));
    const int64_t vectors = (bytes + kPeerVector - 1) / kPeerVector, threads = grid_threads();
    Vector* result = reinterpret_cast<Vector*>(group.regions[group.rank] + args.result);
    for (int64_t first = grid_thread(); first < vectors; first += kPlaces * threads) {
        decltype(widened(T())) total[kPlaces][kElements] = {};
#pragma unroll 4
        for (int r = 0; r < group.size; ++r) {
            const Vector* shard = reinterpret_cast<const Vector*>(group.regions[r] + args.chunk + first_byte);
#pragma unroll
            for (int j = 0; j < kPlaces; ++j) {
                if (first + j * threads >= vectors) continue;
                const Vector value = shard[first + j * threads];
#pragma unroll
                for (int e = 0; e < kElements; ++e)
                    total[j][e] =
                        r == 0 ? widened(value.element[e]) : Reduce()(total[j][e], widened(value.element[e]));
            }
        }
#pragma unroll
        for (int j = 0; j < kPlaces; ++j) {
            if (first + j * threads >= vectors) continue;
            Vector reduced;
#pragma unroll
            for (int e = 0; e < kElements; ++e) reduced.element[e] = narrowed<T>(total[j][e]);
            result[first + j * threads] = reduced;
        }
    }
}
// Moves: every other member's shard over NVLink into the tensor, beginning with the successor's. No barriers,
// one writer a byte.
__global__ __launch_bounds__(kPeerThreads) void fetch_shards_kernel(const ReduceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    for (int step = 1; step <= group.size; ++step) {
        const int member = (group.rank + step) % group.size;
        const int64_t first_byte = member * args.shard_bytes;
        const int64_t bytes = min(args.shard_bytes, args.bytes - first_byte);
        if (bytes > 0)
            copy_contiguous(args.values + first_byte, group.regions[member] + args.result, bytes,
                            grid_thread(), grid_threads());
    }
}

using Kernel = void (*)(ReduceArgs);
struct ReduceKernels {
    Kernel small, shard;
};
template <class T, class Reduce> ReduceKernels kernels_of() {
    return {reduce_values_kernel<T, Reduce>, reduce_shard_kernel<T, Reduce>};
}

ReduceKernels choose(Reduce reduce, const TensorView& values) {
    const bool sum = reduce == Reduce::sum;
    if (values.dtype == DType::f32) return sum ? kernels_of<float, Sum>() : kernels_of<float, Max>();
    if (values.dtype == DType::bf16 && sum) return kernels_of<Bf16, Sum>();
    if (values.dtype == DType::i64 && sum) return kernels_of<int64_t, Sum>();
    if (values.dtype == DType::i32 && !sum) return kernels_of<int32_t, Max>();
    fail(ExitCode::internal, "all_reduce: no {} of {}", sum ? "sum" : "maximum", describe(values));
}

}  // namespace

void PeerExchange::do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) {
    if (num_ranks(ranks) == 1 || values.numel() == 0) return;
    last_stream_ = launch.stream;
    const GroupIndex group = ranks == Ranks::world ? kWorld : kReplicas;
    const PeerLayout::Reduction& area = ranks == Ranks::world ? layout_.world : layout_.replicas;
    const ReduceKernels kernels = choose(reduce, values);
    const cudaStream_t stream = stream_of(launch);
    ReduceArgs args{.group = device_groups_[group],
                    .values = values.bytes_ptr(),
                    .bytes = values.bytes(),
                    .chunk = area.chunk,
                    .result = area.result,
                    .shard_bytes = 0};
    const auto grid_of = [&](int64_t bytes) {
        return peer_grid(ceil_div(bytes, kPeerVector * kWarpSize), launch);
    };
    if (args.bytes <= PeerLayout::kSmallBytes) {
        push_values_kernel<<<grid_of(args.bytes), kPeerThreads, 0, stream>>>(args);
        check_launch("sending values");
        synchronize(group, PeerOperation::all_reduce, launch);
        kernels.small<<<grid_of(args.bytes * 4), kPeerThreads, 0, stream>>>(args);
        check_launch("reducing values");
        return;
    }
    for (int64_t at = 0; at < values.bytes(); at += PeerLayout::kChunkBytes) {
        args.values = values.bytes_ptr() + at;
        args.bytes = std::min(PeerLayout::kChunkBytes, values.bytes() - at);
        args.shard_bytes = round_up(ceil_div(args.bytes, area.size), kPeerVector);
        stage_chunk_kernel<<<grid_of(args.bytes), kPeerThreads, 0, stream>>>(args);
        check_launch("staging values for peers");
        synchronize(group, PeerOperation::all_reduce, launch);
        kernels.shard<<<grid_of(args.shard_bytes), kPeerThreads, 0, stream>>>(args);
        check_launch("reducing a shard");
        synchronize(group, PeerOperation::all_reduce, launch);
        fetch_shards_kernel<<<grid_of(args.bytes), kPeerThreads, 0, stream>>>(args);
        check_launch("fetching shards");
    }
}

}  // namespace fp8flow::hopper::peer
