// SPDX-License-Identifier: MIT
// Reductions over peer memory, in ascending rank order, with the bits of ProcessGroup's reductions.
//
// all_reduce of small tensors: every rank stores its values into every member's receive buffer, and adds all
// of them after one barrier. Large tensors, chunk by chunk: every rank copies the chunk into its region,
// reduces its shard over all members, and copies the results of the other shards. Two barriers per chunk.
//
// reduce_scatter and all_gather, in rounds: every rank packs its slices into its region, then reduces its
// packed shard over all members, or copies the shards of the others. Two barriers per round.
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
    int64_t chunk, result;  // offsets in a region
    int64_t shard_bytes;    // a multiple of 16; the last members' shards may be short or empty
};

// Traffic: writes the tensor to every member. No barriers, one writer per byte.
__global__ __launch_bounds__(kPeerThreads) void push_values_kernel(const ReduceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    for (int step = 1; step <= group.size; ++step)
        copy_contiguous(
            group.next_buffer((group.rank + step) % group.size) + group.rank * PeerLayout::kSmallBytes,
            args.values, args.bytes, grid_thread(), grid_threads());
}
// Traffic: reads every member's tensor, writes one, all in local memory. One element per thread, members in
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

// Traffic: reads and writes the chunk once, in local memory.
__global__ __launch_bounds__(kPeerThreads) void stage_chunk_kernel(const ReduceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    copy_contiguous(group.regions[group.rank] + args.chunk, args.values, args.bytes, grid_thread(),
                    grid_threads());
}
// Traffic: reads one shard of every member over NVLink, writes one. A thread takes 16 bytes at two places and
// adds members in ascending order, with independent loads. Bytes past the end of the chunk are reduced too,
// but never read. No barriers, one writer per byte.
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
// Traffic: reads every other member's shard over NVLink, beginning with the successor's. No barriers, one
// writer per byte.
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

// Slices of a tensor and their offsets in an area of the regions, in bytes; a kernel argument.
constexpr int kMaxPieces = 96;
struct Piece {
    int64_t tensor, packed, bytes;
    int member;  // owner of the region
};
struct PieceArgs {
    PeerGroup group;
    uint8_t* values;
    int64_t area;  // in a region
    int count;
    Piece pieces[kMaxPieces];
};
static_assert(sizeof(PieceArgs) <= 4096);  // limit of kernel arguments

// Traffic: reads and writes the slices once, in local memory. No barriers, one writer per byte.
__global__ __launch_bounds__(kPeerThreads) void pack_pieces_kernel(const PieceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    for (int i = 0; i < args.count; ++i)
        copy_contiguous(group.regions[group.rank] + args.area + args.pieces[i].packed,
                        args.values + args.pieces[i].tensor, args.pieces[i].bytes, grid_thread(),
                        grid_threads());
}
// Traffic: reads the slices from their members' regions, those of other ranks over NVLink. No barriers, one
// writer per byte.
__global__ __launch_bounds__(kPeerThreads) void unpack_pieces_kernel(const PieceArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    for (int i = 0; i < args.count; ++i)
        copy_contiguous(args.values + args.pieces[i].tensor,
                        group.regions[args.pieces[i].member] + args.area + args.pieces[i].packed,
                        args.pieces[i].bytes, grid_thread(), grid_threads());
}

// Packs the slices of `member` into the area from `begin` on, each aligned to a vector. Returns their end.
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

PieceArgs no_pieces(const PeerGroup& group, const TensorView& values, int64_t area) {
    return {.group = group, .values = values.bytes_ptr(), .area = area, .count = 0, .pieces = {}};
}

// Rounds in which a packed shard has at most `bytes`, and all shards together at most kMaxPieces slices.
RoundLimits limits_of(int64_t bytes, int64_t element, int ranks) {
    const int64_t slices = kMaxPieces / ranks;
    return {.elements = (bytes - slices * kPeerVector) / element / kPeerVector * kPeerVector,
            .slices = slices};
}

template <class Args>
void launch_over(int64_t bytes, void (*kernel)(Args), const Launch& launch, const char* what,
                 const Args& args) {
    launch_kernel(kernel, peer_grid(ceil_div(bytes, kPeerVector * kWarpSize), launch), kPeerThreads, launch,
                  what, args);
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
    fail(ExitCode::internal, "all_reduce has no {} of {}", sum ? "sum" : "maximum", describe(values));
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

void PeerExchange::do_reduce_scatter(const Sharded& sharded, const Launch& launch) {
    const auto& [ranks, values, shards] = sharded;
    last_stream_ = launch.stream;
    const GroupIndex group = index_of(ranks);
    const PeerLayout::Reduction& area = area_of(ranks);
    const Kernel reduce_shard = choose(Reduce::sum, values).shard;
    const int64_t element = size_of(values.dtype), shard_space = PeerLayout::kChunkBytes / area.size;
    const int own = device_groups_[group].rank;
    for (const Shards& round : rounds_of(shards, limits_of(shard_space, element, area.size))) {
        int64_t shard_bytes = 0;  // equal space for each rank's shard
        for (const auto& shard : round) shard_bytes = std::max(shard_bytes, packed_bytes(shard, element));
        const std::vector<Slice>& here = round[static_cast<std::size_t>(own)];
        const int64_t own_bytes = packed_bytes(here, element);
        PieceArgs all = no_pieces(device_groups_[group], values, area.chunk);
        for (int r = 0; r < area.size; ++r)
            add_pieces(all, round[static_cast<std::size_t>(r)], element, own, r * shard_bytes);
        launch_over(area.size * shard_bytes, pack_pieces_kernel, launch, "staging shards for peers", all);
        synchronize(group, PeerOperation::reduce_scatter, launch);
        if (own_bytes > 0) {
            const ReduceArgs args{.group = device_groups_[group],
                                  .values = values.bytes_ptr(),
                                  .bytes = own * shard_bytes + own_bytes,
                                  .chunk = area.chunk,
                                  .result = area.result,
                                  .shard_bytes = shard_bytes};
            launch_over(own_bytes, reduce_shard, launch, "reducing a shard", args);
            PieceArgs mine = no_pieces(device_groups_[group], values, area.result);
            add_pieces(mine, here, element, own, 0);
            launch_over(own_bytes, unpack_pieces_kernel, launch, "placing a shard", mine);
        }
        synchronize(group, PeerOperation::reduce_scatter, launch);
    }
}

void PeerExchange::do_all_gather(const Sharded& sharded, const Launch& launch) {
    const auto& [ranks, values, shards] = sharded;
    last_stream_ = launch.stream;
    const GroupIndex group = index_of(ranks);
    const PeerLayout::Reduction& area = area_of(ranks);
    const int64_t element = size_of(values.dtype);
    const int own = device_groups_[group].rank;
    for (const Shards& round : rounds_of(shards, limits_of(PeerLayout::kChunkBytes, element, area.size))) {
        PieceArgs mine = no_pieces(device_groups_[group], values, area.chunk);
        PieceArgs others = mine;
        const int64_t own_bytes = add_pieces(mine, round[static_cast<std::size_t>(own)], element, own, 0);
        int64_t other_bytes = 0;
        for (int step = 1; step < area.size; ++step) {  // beginning with the successor's
            const int member = (own + step) % area.size;
            other_bytes += add_pieces(others, round[static_cast<std::size_t>(member)], element, member, 0);
        }
        if (own_bytes > 0)
            launch_over(own_bytes, pack_pieces_kernel, launch, "staging a shard for peers", mine);
        synchronize(group, PeerOperation::all_gather, launch);
        if (other_bytes > 0)
            launch_over(other_bytes, unpack_pieces_kernel, launch, "fetching shards", others);
        synchronize(group, PeerOperation::all_gather, launch);
    }
}

}  // namespace fp8flow::hopper::peer
