// SPDX-License-Identifier: MIT
// dispatch over peer memory by plain loads and stores: what TMA cannot move (rows that are no
// whole vectors), and what it left because a peer was late.
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/dispatch.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper {

namespace {

// Moves: this rank's rows to the boxes of the ranks that need them, a warp a row. Everything is left to be
// taken later. One writer a byte.
__global__ __launch_bounds__(kPeerThreads) void send_plain_rows_kernel(const DispatchArgs args) {
    pdl_launch_dependents();
    const PeerGroup& group = args.group();
    if (group.lost()) return;
    const uint64_t epoch = group.epoch() + 1;
    const int64_t warp = grid_thread() / kPeerWarp, warps = grid_threads() / kPeerWarp;
    const int lane = static_cast<int>(threadIdx.x) % kPeerWarp;
    send_scales(args, epoch, warp, warps);
    const int64_t items = args.sent_items();
    for (int64_t number = warp; number < items; number += warps) {
        const DispatchArgs::Item row = args.item(number);
        if (!args.is_sent(row)) continue;
        copy_contiguous(args.rows.data_in(group.box(row.rank, epoch), group.rank, row.n),
                        args.rows.data + args.sent_token(row) * args.rows.row_bytes, args.rows.row_bytes,
                        lane, kPeerWarp);
        __syncwarp();
        if (lane == 0) {
            __threadfence_system();
            store_release_system(args.row_flag(row.rank, group.rank, row.n), epoch);
        }
    }
    if (grid_thread() == 0) group.words->left = epoch;
    end_sending(args, epoch);
}

// Moves: nothing; one CTA polls until all rows and all ranks of the latest call are here. Returns at once
// where nothing was left.
__global__ __launch_bounds__(kPeerThreads) void wait_for_left_rows_kernel(const DispatchArgs args) {
    pdl_wait();
    const PeerGroup& group = args.group();
    const uint64_t epoch = group.epoch(), limit = args.meeting.limit;
    if (group.lost() || group.words->left != epoch) return;
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
        const int from = args.rank_behind(step);
        const int64_t rows = args.received.offsets[from + 1] - args.received.offsets[from];
        for (int64_t n = thread; n < rows; n += kPeerThreads)
            if (!wait(args.row_flag(group.rank, from, n), from)) break;
    }
    __syncthreads();
    if (late_members != 0 && thread < kPeerWarp) give_up(args.meeting, late_members, epoch);
}

constexpr int kTakeThreads = 512, kTakeWarps = kTakeThreads / kPeerWarp;
constexpr int kPiecesHeld = 14;  // 16 bytes each, of a thread: a row of 7168 bytes in one go

// Received row i to all its places: one load of every byte, as many stores as there are places. By one warp.
__device__ __forceinline__ void take_row(const DispatchArgs& args, int64_t i, const uint8_t* codes,
                                         int64_t base) {
    const int64_t row_bytes = args.rows.row_bytes;
    const int lane = static_cast<int>(threadIdx.x) % kPeerWarp;
    const int64_t place = args.place(i, lane);
    const int places = __popc(__ballot_sync(kFullMask, place >= 0));
    uint8_t* dst = static_cast<uint8_t*>(args.dst.data);
    const auto out = [&](int k) { return dst + (base + __shfl_sync(kFullMask, place, k)) * row_bytes; };
    if (args.vectorised) {
        const int count = static_cast<int>(row_bytes / kPeerVector);
        const uint4* in = reinterpret_cast<const uint4*>(codes);
        for (int begin = 0; begin < count; begin += kPiecesHeld * kPeerWarp) {
            const int first = begin + lane;
            uint4 piece[kPiecesHeld] = {};
#pragma unroll
            for (int j = 0; j < kPiecesHeld; ++j)
                if (first + j * kPeerWarp < count) piece[j] = __ldcg(in + first + j * kPeerWarp);
            for (int k = 0; k < places; ++k) {
                uint4* to = reinterpret_cast<uint4*>(out(k));
#pragma unroll
                for (int j = 0; j < kPiecesHeld; ++j)
                    if (first + j * kPeerWarp < count) to[first + j * kPeerWarp] = piece[j];
            }
        }
    } else {
        for (int64_t begin = 0; begin < row_bytes; begin += kPeerWarp) {
            const int64_t at = begin + lane;
            const uint8_t byte = at < row_bytes ? __ldcg(codes + at) : uint8_t{0};
            for (int k = 0; k < places; ++k) {
                uint8_t* to = out(k);
                if (at < row_bytes) to[at] = byte;
            }
        }
    }
}

// Moves: every received row once, out of the box or the caller's rows, and every row of dst out. Returns at
// once where nothing was left; rows that were taken are written again with the same bytes. A warp takes a
// row. Copies only, one writer a byte.
__global__ __launch_bounds__(kTakeThreads, 1) void take_left_rows_kernel(const DispatchArgs args) {
    pdl_wait();
    const PeerGroup& group = args.group();
    const uint64_t epoch = group.epoch();
    if (group.lost() || group.words->left != epoch) return;
    uint8_t* box = group.box(group.rank, epoch);
    const int64_t base = args.dst.base();
    args.received.deal(group.rank, group.size, [&](int64_t i, int from, int64_t) {
        take_row(args, i, args.codes_of(from, i, box), base);
    });
    write_all_scales_and_pads(args, box, grid_thread() / kPeerWarp, grid_threads() / kPeerWarp);
}

}  // namespace

void launch_send_plain_rows(const DispatchArgs& args, const Launch& launch) {
    send_plain_rows_kernel<<<peer_grid(args.meeting.group.size * args.rows.slots, launch), kPeerThreads, 0,
                             stream_of(launch)>>>(args);
    check_launch("sending rows to peers");
}

void launch_take_left_rows(const DispatchArgs& args, const Launch& launch) {
    launch_pdl(wait_for_left_rows_kernel, 1, kPeerThreads, launch, "waiting for rows of peers", args);
    const int64_t rows = args.meeting.group.size * args.rows.slots;
    launch_pdl(take_left_rows_kernel, grid_for(ceil_div(rows, kTakeWarps), launch, 1), kTakeThreads, launch,
               "taking rows of peers", args);
}

}  // namespace fp8flow::hopper
