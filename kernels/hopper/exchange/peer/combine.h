// SPDX-License-Identifier: MIT
// What the kernels of combine over peer memory share. combine.cu has the launcher and the
// kernels for every row dtype and combine order. combine_sums.cu has the kernel for BF16 rows and order
// `rank`.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/exchange.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/exchange/peer/group.h"

namespace fp8flow::hopper::peer {

// A receive buffer, order rank: rows [G, S, H]; order invariant: rows [S, K, H], a token's in ascending
// expert order. Then dprob [S, K] f32.
struct CombineArgs {
    PeerGroup group;
    const int32_t* all_ids;
    int64_t slots, topk, local_experts;
    ReceivedRows received;
    // [G, S] and [G]: the n-th row that a rank returns is that of the n-th token sent to it.
    const int32_t* send_tokens;
    const int64_t* send_counts;
    const int32_t* recv_rows;
    DeviceView src, drow_prob;
    int64_t hidden, row_bytes;
    bool vectorised;  // src and the receive buffers
    int64_t prob_offset;
    // the owner's side: a warp adds a slab of a token's columns
    int64_t tokens, slabs;
    CombineOrder order;
    DeviceView residual, y;
    bool vectorised_y;
    float* dprob;

    __device__ TokenChoices choices(int rank, int64_t token) const {
        return {all_ids + (rank * slots + token) * topk, topk, group.size * local_experts, local_experts};
    }
    __device__ float* buffer_probs(uint8_t* buffer) const {
        return reinterpret_cast<float*>(buffer + prob_offset);
    }
};

// Counts the wire bytes of the sums of this rank's received rows. Called by one thread.
__device__ __forceinline__ void count_sums(const CombineArgs& args) {
    int64_t sent = 0;
    for (int r = 0; r < args.group.size; ++r)
        if (r != args.group.rank) sent += args.received.offsets[r + 1] - args.received.offsets[r];
    count_wire(&args.group.words->wire[2], sent * args.row_bytes);
}

// The whole of a combine except dprob, its group barrier included. Order rank; src, residual and y BF16 in
// whole vectors, on all ranks alike. `words`: zeros before the first call and after every call. `progress`:
// offset in a region of kCombineProgress bytes per member, zeros before the first call.
constexpr int kMostCombineSenders = 32;  // CTAs of a rank
constexpr int64_t kCombineProgress = kMostCombineSenders * static_cast<int64_t>(sizeof(uint64_t));
struct CombineWords {
    unsigned next_sent, next_own, ended;  // work items claimed to send, claimed to add; CTAs finished
};
void launch_combine_sums(const CombineArgs& args, const GroupBarrier& barrier, CombineWords* words,
                         int64_t progress, const Launch& launch);

}  // namespace fp8flow::hopper::peer
