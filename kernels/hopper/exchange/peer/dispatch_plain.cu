// SPDX-License-Identifier: MIT
// dispatch over peer memory with plain loads and stores: for rows that TMA cannot move (not whole 16-byte
// vectors), and for rows that the dispatch kernel deferred because a peer was late.
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/dispatch.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::peer {

namespace {

// Sends this rank's rows to the receive buffers of the ranks that need them, one warp per row. The kernels
// below receive them. One writer per byte.
__global__ __launch_bounds__(kPeerThreads) void send_plain_rows_kernel(const DispatchArgs args) {
    pdl_launch_dependents();
    const PeerGroup& group = args.group();
    if (group.lost()) return;
    const uint64_t epoch = group.epoch() + 1;
    const int64_t warp = grid_thread() / kWarpSize, warps = grid_threads() / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    send_scales(args, epoch, warp, warps);
    const int64_t items = args.sent_items();
    for (int64_t number = warp; number < items; number += warps) {
        const DispatchArgs::Item row = args.sent_item(number);
        if (!args.is_sent(row)) continue;
        copy_contiguous(args.rows.data_in(group.buffer(row.rank, epoch), group.rank, row.n),
                        args.rows.data + args.sent_token(row) * args.rows.row_bytes, args.rows.row_bytes,
                        lane, kWarpSize);
        __syncwarp();
        if (lane == 0) {
            __threadfence_system();
            store_release_system(args.row_flag(row.rank, group.rank, row.n), epoch);
        }
    }
    if (grid_thread() == 0) group.words->deferred = epoch;
    end_sending(args, epoch);
}

// One CTA polls until all ranks and all rows of the latest call have arrived. Returns at once if nothing was
// deferred.
__global__ __launch_bounds__(kPeerThreads) void wait_for_deferred_rows_kernel(const DispatchArgs args) {
    pdl_wait();
    const PeerGroup& group = args.group();
    const uint64_t epoch = group.epoch(), limit = args.barrier.limit;
    if (group.lost() || group.words->deferred != epoch) return;
    __shared__ uint32_t late_members;
    if (threadIdx.x == 0) late_members = 0;
    __syncthreads();
    const auto wait = [&](const uint64_t* flag, int from) {
        const bool here = wait_until_reached(flag, epoch, limit);
        if (!here) atomicOr(&late_members, 1u << from);
        return here;
    };
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < group.size && thread != group.rank) wait(group.flag(group.rank, thread), thread);
    for (int step = 1; step < group.size; ++step) {
        const int from = args.rank_after(step);
        const int64_t rows = args.received.offsets[from + 1] - args.received.offsets[from];
        for (int64_t n = thread; n < rows; n += kPeerThreads)
            if (!wait(args.row_flag(group.rank, from, n), from)) break;
    }
    __syncthreads();
    if (late_members != 0 && thread < kWarpSize) report_lost(args.barrier, late_members, epoch);
}

constexpr int kCopyThreads = 512, kCopyWarps = kCopyThreads / kWarpSize;
constexpr int kVectorsHeld = 14;  // 16-byte vectors per thread: a row of 7168 bytes in one pass

// Copies received row i to all its rows of dst: loads every byte once. Called by one warp.
__device__ __forceinline__ void scatter_row(const DispatchArgs& args, int64_t i, const uint8_t* row,
                                            int64_t base) {
    const int64_t row_bytes = args.rows.row_bytes;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t dst_row = args.dst_row(i, lane);
    const int copies = __popc(__ballot_sync(kFullMask, dst_row >= 0));
    uint8_t* dst = static_cast<uint8_t*>(args.dst.data);
    const auto out = [&](int k) { return dst + (base + __shfl_sync(kFullMask, dst_row, k)) * row_bytes; };
    if (args.vectorised) {
        const int count = static_cast<int>(row_bytes / kPeerVector);
        const uint4* in = reinterpret_cast<const uint4*>(row);
        for (int begin = 0; begin < count; begin += kVectorsHeld * kWarpSize) {
            const int first = begin + lane;
            uint4 piece[kVectorsHeld] = {};
#pragma unroll
            for (int j = 0; j < kVectorsHeld; ++j)
                if (first + j * kWarpSize < count) piece[j] = __ldcg(in + first + j * kWarpSize);
            for (int k = 0; k < copies; ++k) {
                uint4* to = reinterpret_cast<uint4*>(out(k));
#pragma unroll
                for (int j = 0; j < kVectorsHeld; ++j)
                    if (first + j * kWarpSize < count) to[first + j * kWarpSize] = piece[j];
            }
        }
    } else {
        for (int64_t begin = 0; begin < row_bytes; begin += kWarpSize) {
            const int64_t at = begin + lane;
            const uint8_t byte = at < row_bytes ? __ldcg(row + at) : uint8_t{0};
            for (int k = 0; k < copies; ++k) {
                uint8_t* to = out(k);
                if (at < row_bytes) to[at] = byte;
            }
        }
    }
}

// Traffic: reads every received row once, from the receive buffer or the caller's rows, and writes every row
// of dst. Returns at once if nothing was deferred. Rows that were already written get the same bytes again.
// One warp per row. Deterministic: copies only, one writer per byte.
__global__ __launch_bounds__(kCopyThreads, 1) void receive_deferred_rows_kernel(const DispatchArgs args) {
    pdl_wait();
    const PeerGroup& group = args.group();
    const uint64_t epoch = group.epoch();
    if (group.lost() || group.words->deferred != epoch) return;
    uint8_t* buffer = group.buffer(group.rank, epoch);
    const int64_t base = args.dst.base();
    args.received.for_each(group.rank, group.size, [&](int64_t i, int from, int64_t) {
        scatter_row(args, i, args.data_of(from, i, buffer), base);
    });
    write_all_scales_and_pads(args, buffer, grid_thread() / kWarpSize, grid_threads() / kWarpSize);
}

}  // namespace

void launch_send_plain_rows(const DispatchArgs& args, const Launch& launch) {
    launch_kernel(send_plain_rows_kernel, peer_grid(args.barrier.group.size * args.rows.slots, launch),
                  kPeerThreads, launch, "sending rows to peers", args);
}

void launch_deferred_rows(const DispatchArgs& args, const Launch& launch) {
    launch_pdl(wait_for_deferred_rows_kernel, 1, kPeerThreads, launch, "waiting for rows of peers", args);
    const int64_t rows = args.barrier.group.size * args.rows.slots;
    launch_pdl(receive_deferred_rows_kernel, grid_for(ceil_div(rows, kCopyWarps), launch, 1), kCopyThreads,
               launch, "receiving rows of peers", args);
}

}  // namespace fp8flow::hopper::peer
