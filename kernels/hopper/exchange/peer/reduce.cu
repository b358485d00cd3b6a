// SPDX-License-Identifier: MIT
// all_reduce over peer memory, element by element in ascending rank order, so with the bits of
// ProcessGroup's. Small tensors: every rank stores its values into every member's receive buffer, and reduces
// all of them after one barrier. Large ones, a chunk at a time: every rank stages the chunk in its region,
// reduces its shard of all members' chunks, and fetches the other shards' results; two barriers a chunk.
//
// reduce_scatter and all_gather, a round of shares at a time: slices are packed into the region, every rank
// reduces its packed share of all members', or fetches the shares of the others; two barriers a round.
#include "kernels/core/error.h"
#include "kernels/core/scalar_math.h"
#include "kernels/hopper/device/widened.h"
#include "kernels/hopper/exchange/peer/peer_exchange.h"
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

// Slices of a tensor and their places in an area of the regions, in bytes; passed to kernels by value.
constexpr int kMaxPieces = 96;
struct Piece {
    int64_t tensor, packed, bytes;
    int member;  // whose region
};
struct PieceArgs {
    PeerGroup group;
    uint8_t* values;
    int64_t area;  // in a region
    int count;
    Piece pieces[kMaxPieces];
};
static_assert(sizeof(PieceArgs) <= 4096);  // of all arguments of a kernel

// Moves: the slices in and out once, all of it local. No barriers, one writer a byte.
__global__ __launch_bounds__(kPeerThreads) void pack_pieces_kernel(const PieceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    for (int i = 0; i < args.count; ++i)
        copy_contiguous(group.regions[group.rank] + args.area + args.pieces[i].packed,
                        args.values + args.pieces[i].tensor, args.pieces[i].bytes, grid_thread(),
                        grid_threads());
}
// Moves: the slices out of their members' regions, over NVLink where it is another rank's. No barriers, one
// writer a byte.
__global__ __launch_bounds__(kPeerThreads) void unpack_pieces_kernel(const PieceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    for (int i = 0; i < args.count; ++i)
        copy_contiguous(args.values + args.pieces[i].tensor,
                        group.regions[args.pieces[i].member] + args.area + args.pieces[i].packed,
                        args.pieces[i].bytes, grid_thread(), grid_threads());
}

// The slices of `member` are packed from `begin` of the area on, each at a whole vector. Returns their end.
int64_t add_pieces(PieceArgs& args, const std::vector<Slice>& slices, int64_t element, int member,
                   int64_t begin) {
    for (const Slice& slice : slices) {
        const int64_t bytes = slice.count * element;
        args.pieces[args.count++] = {slice.first * element, begin, bytes, member};
        begin += round_up(bytes, kPeerVector);
    }
    return begin;
}
int64_t packed_bytes(const std::vector<Slice>& slices, int64_t element) {
    int64_t bytes = 0;
    for (const Slice& slice : slices) bytes += round_up(slice.count * element, kPeerVector);
    return bytes;
}

// Before its pieces are added.
PieceArgs no_pieces(const PeerGroup& group, const TensorView& values, int64_t area) {
    return {.group = group, .values = values.bytes_ptr(), .area = area, .count = 0, .pieces = {}};
}

// Shares of which each takes at most `bytes` of an area, packed, and all together at most kMaxPieces.
RoundLimits limits_of(int64_t bytes, int64_t element, int ranks) {
    const int64_t slices = kMaxPieces / ranks;
    return {.elements = (bytes - slices * kPeerVector) / element / kPeerVector * kPeerVector,
            .slices = slices};
}

template <class Args>
void launch_over(int64_t bytes, void (*kernel)(Args), const Launch& launch, const char* what,
                 const Args& args) {
    kernel<<<peer_grid(ceil_div(bytes, kPeerVector * kWarpSize), launch), kPeerThreads, 0,
             stream_of(launch)>>>(args);
    check_launch(what);
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
    last_stream_ = launch.stream;
    const GroupIndex group = index_of(ranks);
    const PeerLayout::Reduction& area = area_of(ranks);
    const ReduceKernels kernels = choose(reduce, values);
    ReduceArgs args{.group = device_groups_[group],
                    .values = values.bytes_ptr(),
                    .bytes = values.bytes(),
                    .chunk = area.chunk,
                    .result = area.result,
                    .shard_bytes = 0};
    if (args.bytes <= PeerLayout::kSmallBytes) {
        launch_over(args.bytes, push_values_kernel, launch, "sending values", args);
        synchronize(group, PeerOperation::all_reduce, launch);
        launch_over(args.bytes * 4, kernels.small, launch, "reducing values", args);
        return;
    }
    for (int64_t at = 0; at < values.bytes(); at += PeerLayout::kChunkBytes) {
        args.values = values.bytes_ptr() + at;
        args.bytes = std::min(PeerLayout::kChunkBytes, values.bytes() - at);
        args.shard_bytes = round_up(ceil_div(args.bytes, area.size), kPeerVector);
        launch_over(args.bytes, stage_chunk_kernel, launch, "staging values for peers", args);
        synchronize(group, PeerOperation::all_reduce, launch);
        launch_over(args.shard_bytes, kernels.shard, launch, "reducing a shard", args);
        synchronize(group, PeerOperation::all_reduce, launch);
        launch_over(args.bytes, fetch_shards_kernel, launch, "fetching shards", args);
    }
}

void PeerExchange::do_reduce_scatter(const Shared& shared, const Launch& launch) {
    const auto& [ranks, values, shares] = shared;
    last_stream_ = launch.stream;
    const GroupIndex group = index_of(ranks);
    const PeerLayout::Reduction& area = area_of(ranks);
    const Kernel reduce_shard = choose(Reduce::sum, values).shard;
    const int64_t element = size_of(values.dtype), room = PeerLayout::kChunkBytes / area.size;
    const int own = device_groups_[group].rank;
    for (const Shares& round : rounds_of(shares, limits_of(room, element, area.size))) {
        int64_t shard_bytes = 0;  // a place of equal size for each rank's share
        for (const auto& share : round) shard_bytes = std::max(shard_bytes, packed_bytes(share, element));
        const std::vector<Slice>& here = round[static_cast<std::size_t>(own)];
        const int64_t own_bytes = packed_bytes(here, element);
        PieceArgs all = no_pieces(device_groups_[group], values, area.chunk);
        for (int r = 0; r < area.size; ++r)
            add_pieces(all, round[static_cast<std::size_t>(r)], element, own, r * shard_bytes);
        launch_over(area.size * shard_bytes, pack_pieces_kernel, launch, "staging shares for peers", all);
        synchronize(group, PeerOperation::reduce_scatter, launch);
        if (own_bytes > 0) {
            const ReduceArgs args{.group = device_groups_[group],
                                  .values = values.bytes_ptr(),
                                  .bytes = own * shard_bytes + own_bytes,
                                  .chunk = area.chunk,
                                  .result = area.result,
                                  .shard_bytes = shard_bytes};
            launch_over(own_bytes, reduce_shard, launch, "reducing a share", args);
            PieceArgs mine = no_pieces(device_groups_[group], values, area.result);
            add_pieces(mine, here, element, own, 0);
            launch_over(own_bytes, unpack_pieces_kernel, launch, "placing a share", mine);
        }
        synchronize(group, PeerOperation::reduce_scatter, launch);
    }
}

void PeerExchange::do_all_gather(const Shared& shared, const Launch& launch) {
    const auto& [ranks, values, shares] = shared;
    last_stream_ = launch.stream;
    const GroupIndex group = index_of(ranks);
    const PeerLayout::Reduction& area = area_of(ranks);
    const int64_t element = size_of(values.dtype);
    const int own = device_groups_[group].rank;
    for (const Shares& round : rounds_of(shares, limits_of(PeerLayout::kChunkBytes, element, area.size))) {
        PieceArgs mine = no_pieces(device_groups_[group], values, area.chunk);
        PieceArgs others = mine;
        const int64_t own_bytes = add_pieces(mine, round[static_cast<std::size_t>(own)], element, own, 0);
        int64_t other_bytes = 0;
        for (int step = 1; step < area.size; ++step) {  // beginning with the successor's
            const int member = (own + step) % area.size;
            other_bytes += add_pieces(others, round[static_cast<std::size_t>(member)], element, member, 0);
        }
        if (own_bytes > 0)
            launch_over(own_bytes, pack_pieces_kernel, launch, "staging a share for peers", mine);
        synchronize(group, PeerOperation::all_gather, launch);
        if (other_bytes > 0)
            launch_over(other_bytes, unpack_pieces_kernel, launch, "fetching shares", others);
        synchronize(group, PeerOperation::all_gather, launch);
    }
}

}  // namespace fp8flow::hopper::peer
