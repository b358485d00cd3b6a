// SPDX-License-Identifier: MIT
// Arguments of the kernels of combine over peer memory. combine_sums.cu has the kernel for BF16 rows and
// order `rank`, combine.cu the launcher and the kernels for everything else.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/exchange.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/exchange/peer/group.h"

namespace fp8flow::hopper::peer {

// Layout of a receive buffer. Order rank: rows [G, S, H]. Order invariant: rows [S, K, H], those of a token
// in ascending expert order. After the rows: dprob [S, K] f32.
struct CombineArgs {
    PeerGroup group;
    const int32_t* all_ids;
    int64_t slots, topk, local_experts;
    ReceivedRows received;
    // [G, S] and [G]: a rank returns rows in the order of the tokens sent to it
    const int32_t* send_tokens;
    const int64_t* send_counts;
    const int32_t* recv_rows;
    DeviceView src, drow_prob;
    int64_t hidden, row_bytes;
    bool vectorised;  // src and the receive buffers
    int64_t prob_offset;
    int64_t tokens, slabs;  // of the owner: a warp adds one of `slabs` parts of a token's columns
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

// A combine with its group barrier, without dprob. Order rank; src, residual and y are BF16 in whole vectors,
// on all ranks. `words` are 0 before the first call and after every call. `progress`: offset in a region of
// kCombineProgress bytes per member, which are 0 before the first call.
constexpr int kMostCombineSenders = 32;  // CTAs per rank
constexpr int64_t kCombineProgress = kMostCombineSenders * static_cast<int64_t>(sizeof(uint64_t));
struct CombineWords {
    unsigned next_to_send, next_to_add;  // work items that warps have claimed
    unsigned finished_ctas;
};
void launch_combine_sums(const CombineArgs& args, const GroupBarrier& barrier, CombineWords* words,
                         int64_t progress, const Launch& launch);

}  // namespace fp8flow::hopper::peer
