// SPDX-License-Identifier: MIT
// Arguments and device functions of the kernels of dispatch over peer memory: the layout of a receive buffer,
// and the destinations of each row. Read next: dispatch.cu, then dispatch_plain.cu.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/peer.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/group.h"

#include <type_traits>

namespace fp8flow::hopper::peer {

// Rows on the wire. Layout of a receive buffer: rows [G, S], then their scales [G, S]. The rows from one rank
// have no gaps and are in the order of its tokens, so row n that a rank sends is row n received from it.
struct WireRows {
    const uint8_t *data, *scales;    // of this rank's rows, in the caller's memory
    int64_t row_bytes, scale_bytes;  // of one row
    int64_t scale_offset;            // in a receive buffer
    int64_t slots;                   // S
    int64_t blocks;                  // scales per row
    DType scale_dtype;
    bool scale_words;  // the scales of a row are whole 4-byte words

    __device__ uint8_t* data_in(uint8_t* buffer, int from, int64_t n) const {
        return buffer + (from * slots + n) * row_bytes;
    }
    __device__ uint8_t* scales_in(uint8_t* buffer, int from, int64_t n) const {
        return buffer + scale_offset + (from * slots + n) * scale_bytes;
    }
};

struct DispatchArgs {
    GroupBarrier barrier;
    int64_t row_flags;        // offset in a region: one flag for each row from each rank
    int64_t row_flag_stride;  // that of the largest call, so that a word always has the same writer
    WireRows rows;
    // rows that this rank sends
    const int32_t* send_tokens;  // [G, S]
    const int64_t* send_counts;
    // received rows and their destinations
    ReceivedRows received;
    const int32_t* recv_rows;  // [., topk]; null: received row i becomes row i of dst
    int64_t topk;
    DeviceView row_source;  // with recv_rows
    DeviceGroups groups;
    DeviceView dst;
    void* dst_scales;
    DType dst_scale_dtype;
    int64_t dst_row_stride, dst_block_stride;  // elements
    bool vectorised;                           // whole vectors, aligned everywhere
    int pieces, piece_bytes;                   // of a row, on its way through shared memory
    int bundle;                                // at most so many rows to one rank are sent as one piece
    int stage_bytes;                           // holds a piece or a bundle

    __device__ const PeerGroup& group() const { return barrier.group; }
    __device__ int others() const { return group().size - 1; }
    // The `step`-th rank after this one.
    __device__ int rank_after(int step) const { return (group().rank + step) % group().size; }
    __device__ uint64_t* row_flag(int region, int from, int64_t n) const {
        return reinterpret_cast<uint64_t*>(group().regions[region] + row_flags) + from * row_flag_stride + n;
    }

    __device__ int64_t sent_rows() const {
        int64_t rows = 0;
        for (int r = 0; r < group().size; ++r)
            if (r != group().rank) rows += send_counts[r];
        return rows;
    }
    __device__ int64_t dst_rows() const {
        return recv_rows != nullptr ? groups.total() : received.offsets[group().size];
    }

    // Row n to, or from, a rank. Items are interleaved over ranks, to keep all links busy. Ranks have
    // different numbers of rows, so some items do not exist.
    struct Item {
        int rank;
        int64_t n;
    };
    __device__ Item item(int64_t number) const {
        return {rank_after(1 + static_cast<int>(number % others())), number / others()};
    }
    // To send, an item is a bundle: its first row.
    __device__ int64_t sent_items() const {
        int64_t longest = 0;
        for (int r = 0; r < group().size; ++r)
            if (r != group().rank) longest = max(longest, send_counts[r]);
        return ceil_div(longest, bundle) * others();
    }
    __device__ Item sent_item(int64_t number) const {
        const Item found = item(number);
        return {found.rank, found.n * bundle};
    }
    __device__ bool is_sent(const Item& row) const { return row.n < send_counts[row.rank]; }
    __device__ int bundled_rows(const Item& row) const {
        return static_cast<int>(min(int64_t{bundle}, send_counts[row.rank] - row.n));
    }
    // Of the k-th row of a bundle.
    __device__ int32_t sent_token(const Item& row, int k = 0) const {
        return send_tokens[row.rank * rows.slots + row.n + k];
    }
    __device__ int64_t received_items() const {
        int64_t longest = 0;
        for (int r = 0; r < group().size; ++r)
            if (r != group().rank) longest = max(longest, received.offsets[r + 1] - received.offsets[r]);
        return longest * others();
    }
    __device__ bool is_received(const Item& row) const {
        return received.offsets[row.rank] + row.n < received.offsets[row.rank + 1];
    }
    __device__ int source_rank(int64_t i) const {
        int r = 0;
        while (received.offsets[r + 1] <= i) ++r;
        return r;
    }
    // Address of received row i: in the caller's rows or in this rank's receive buffer of the call.
    __device__ const uint8_t* data_of(int from, int64_t i, uint8_t* buffer) const {
        if (from == group().rank) return rows.data + own_token(i) * rows.row_bytes;
        return rows.data_in(buffer, from, i - received.offsets[from]);
    }
    __device__ const uint8_t* scales_of(int from, int64_t i, uint8_t* buffer) const {
        if (from == group().rank) return rows.scales + own_token(i) * rows.scale_bytes;
        return rows.scales_in(buffer, from, i - received.offsets[from]);
    }
    __device__ int64_t own_token(int64_t i) const { return received.source[i] - group().rank * rows.slots; }
    // In lane k: the k-th row of dst for received row i; -1: none.
    __device__ int64_t dst_row(int64_t i, int lane) const {
        if (recv_rows == nullptr) return lane == 0 ? i : -1;
        return lane < topk ? recv_rows[i * topk + lane] : -1;
    }
};

// ---- pieces of kernels

// Stores the scales of all rows that this rank sends into the receive buffers of call `epoch`. Called by warp
// `warp` of `warps`. The last warp to finish signals all members that the scales are there and that this rank
// no longer needs the buffers of earlier calls.
template <class Unit>
__device__ __forceinline__ void send_scales_as(const DispatchArgs& args, uint64_t epoch, int64_t thread,
                                               int64_t threads) {
    const int64_t units = args.rows.scale_bytes / static_cast<int64_t>(sizeof(Unit));
    const Unit* scales = reinterpret_cast<const Unit*>(args.rows.scales);
    for (int step = 1; step < args.group().size; ++step) {
        const int to = args.rank_after(step);
        const int32_t* tokens = args.send_tokens + to * args.rows.slots;
        Unit* out = reinterpret_cast<Unit*>(
            args.rows.scales_in(args.group().buffer(to, epoch), args.group().rank, 0));
        for (int64_t at = thread; at < args.send_counts[to] * units; at += threads)
            out[at] = scales[tokens[at / units] * units + at % units];
    }
}
__device__ __forceinline__ void send_scales(const DispatchArgs& args, uint64_t epoch, int64_t warp,
                                            int64_t warps) {
    const PeerGroup& group = args.group();
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    if (args.rows.blocks > 0) {
        const int64_t thread = warp * kWarpSize + lane, threads = warps * kWarpSize;
        if (args.rows.scale_words)
            send_scales_as<uint32_t>(args, epoch, thread, threads);
        else
            send_scales_as<uint8_t>(args, epoch, thread, threads);
    }
    __syncwarp();
    if (lane == 0) {
        __threadfence_system();
        if (atomicAdd(&group.words->scale_warps, 1u) == static_cast<uint32_t>(warps) - 1) {
            group.words->scale_warps = 0;
            __threadfence_system();
            for (int step = 1; step < group.size; ++step)
                store_release_system(group.flag(args.rank_after(step), group.rank), epoch);
        }
    }
    __syncwarp();
}

// Ends a kernel that sends: the last CTA to finish sets the group's epoch. All threads of the CTA call it.
__device__ __forceinline__ void end_sending(const DispatchArgs& args, uint64_t epoch) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    PeerWords* words = args.group().words;
    __threadfence();
    if (atomicAdd(&words->finished_ctas, 1u) != gridDim.x - 1) return;
    words->finished_ctas = words->claimed_bundles = 0;
    words->epochs[args.group().index] = epoch;
    count_wire(&words->wire[1], args.sent_rows() * (args.rows.row_bytes + args.rows.scale_bytes));
}

__device__ __forceinline__ void store_scale(const DispatchArgs& args, int64_t row, int64_t block,
                                            float scale) {
    const int64_t at = row * args.dst_row_stride + block * args.dst_block_stride;
    if (args.dst_scale_dtype == DType::e8m0)
        static_cast<uint8_t*>(args.dst_scales)[at] = float_to_e8m0(scale);  // back to the byte it was
    else
        static_cast<float*>(args.dst_scales)[at] = scale;
}

// Writes zeros to a padding row. Called by one warp.
__device__ __forceinline__ void zero_row(const DispatchArgs& args, int64_t row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    uint8_t* to = static_cast<uint8_t*>(args.dst.data) + row * args.rows.row_bytes;
    if (args.vectorised) {
        for (int64_t at = lane; at < args.rows.row_bytes / kPeerVector; at += kWarpSize)
            reinterpret_cast<uint4*>(to)[at] = uint4{};
    } else {
        for (int64_t at = lane; at < args.rows.row_bytes; at += kWarpSize) to[at] = 0;
    }
}

// Writes the scales of one row of dst, kScales per Unit; `scales` null: padding. All loads of a pass are in
// flight at once, because the warp has little other work.
template <class Unit, int kScales>
__device__ __forceinline__ void write_scales_as(const DispatchArgs& args, int64_t row,
                                                const uint8_t* scales) {
    constexpr int kHeld = 16;
    const int units = static_cast<int>(args.rows.blocks) / kScales;
    for (int first = 0; first < units; first += kHeld) {
        Unit held[kHeld] = {};
#pragma unroll
        for (int j = 0; j < kHeld; ++j)
            if (scales != nullptr && first + j < units)
                held[j] = __ldcg(reinterpret_cast<const Unit*>(scales) + first + j);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
            if (first + j >= units) continue;
#pragma unroll
            for (int e = 0; e < kScales; ++e) {
                float scale = 0.0f;
                if constexpr (std::is_same_v<Unit, float>)
                    scale = held[j];
                else if (scales != nullptr)
                    scale = e8m0_to_float(static_cast<uint8_t>(held[j] >> 8 * e));
                store_scale(args, row, (first + j) * kScales + e, scale);
            }
        }
    }
}

// Writes the scales of 32 rows of dst, one row per lane, so that stores fill whole lines, and zeros padding
// rows. All scales must have arrived in the receive buffer.
__device__ __forceinline__ void write_scales_and_pads(const DispatchArgs& args, uint8_t* buffer,
                                                      int64_t first) {
    const bool listed = args.recv_rows != nullptr;
    const int64_t total = args.dst_rows(), base = args.dst.base(),
                  row = first + static_cast<int>(threadIdx.x) % kWarpSize;
    const bool exists = row < total;
    int64_t i = exists ? row : -1;
    if (listed && exists) i = static_cast<const int32_t*>(args.row_source.data)[args.row_source.base() + row];
    if (args.rows.blocks > 0 && exists) {
        const uint8_t* scales = i >= 0 ? args.scales_of(args.source_rank(i), i, buffer) : nullptr;
        if (args.rows.scale_dtype != DType::e8m0)
            write_scales_as<float, 1>(args, base + row, scales);
        else if (args.rows.scale_words)
            write_scales_as<uint32_t, 4>(args, base + row, scales);
        else
            write_scales_as<uint8_t, 1>(args, base + row, scales);
    }
    unsigned pads = __ballot_sync(kFullMask, exists && i < 0);
    for (; pads != 0; pads &= pads - 1) zero_row(args, base + first + __ffs(static_cast<int>(pads)) - 1);
}
// The same for all rows of dst. Called by warp `warp` of `warps`.
__device__ __forceinline__ void write_all_scales_and_pads(const DispatchArgs& args, uint8_t* buffer,
                                                          int64_t warp, int64_t warps) {
    const int64_t rows = args.dst_rows();
    if (args.recv_rows == nullptr && args.rows.blocks == 0) return;
    for (int64_t first = warp * kWarpSize; first < rows; first += warps * kWarpSize)
        write_scales_and_pads(args, buffer, first);
}

// Sends rows that are not whole vectors. launch_deferred_rows receives them.
void launch_send_plain_rows(const DispatchArgs& args, const Launch& launch);
// After the kernel that sends: waits, until the deadline, for the rows that it deferred, and receives them.
// Always launched, because only the device knows whether rows were deferred.
void launch_deferred_rows(const DispatchArgs& args, const Launch& launch);

}  // namespace fp8flow::hopper::peer
