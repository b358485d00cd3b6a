// SPDX-License-Identifier: MIT
// Which pairs of tiles a cluster computes. Alone on the device: every gridDim.x-th. Next to kernels of other
// streams (Launch::shared_device): the next ones that no cluster has taken, because clusters then start at
// different times and run at different speeds. The results are the same, whichever cluster computes a tile.
//
//   barrier    arrivals of a phase                            waited for by
//   full[s]    1 reader + the bytes of the pair               the reader of this CTA
//   empty[s]   1 per reader of both CTAs, at CTA 0            the thread that takes pairs, in CTA 0
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/gemm/problem.h"

namespace fp8flow::hopper::gemm {

constexpr int kClusterCtas = 2;  // neighbouring tiles; one operand is common to both

// One pair is read while the next is taken.
constexpr int kQueueSlots = 2;
struct SharedQueue {
    int32_t pairs[kQueueSlots];
    Mbarrier full[kQueueSlots], empty[kQueueSlots];
};

// One thread of CTA 0 of a cluster: takes pairs and sends them to both CTAs, up to the first for which
// exists(pair) is false. The last cluster sets the queue back to its start.
template <class Exists> __device__ void take_pairs(TileQueue& queue, SharedQueue& shared, Exists exists) {
    RingPosition<kQueueSlots> slot;
    bool more = true;
    while (more) {
        mbarrier_wait(&shared.empty[slot.index], slot.parity ^ 1);
        const int pair = static_cast<int>(atomicAdd(&queue.next, 1u));
        more = exists(pair);
#pragma unroll
        for (uint32_t cta = 0; cta < kClusterCtas; ++cta)
            store_remote(cluster_address(&shared.pairs[slot.index], cta), __int_as_float(pair),
                         cluster_address(&shared.full[slot.index], cta));
        slot.advance();
    }
    __threadfence();
    const unsigned last = gridDim.x / kClusterCtas - 1;
    if (atomicInc(&queue.ended, last) == last) queue.next = 0;
}

// The pairs of this cluster, one after the other, for one thread of each CTA.
class PairReader {
public:
    __device__ PairReader(const TileQueue* queue, SharedQueue& shared) : queue_(queue), shared_(shared) {}
    __device__ __forceinline__ int64_t next() {
        if (queue_ == nullptr) {
            pair_ += gridDim.x / kClusterCtas;
            return pair_;
        }
        Mbarrier* const full = &shared_.full[slot_.index];
        mbarrier_arrive_expect_tx(full, sizeof(int32_t));
        mbarrier_wait_cluster(full, slot_.parity);
        const int32_t pair = *const_cast<volatile int32_t*>(&shared_.pairs[slot_.index]);
        mbarrier_arrive_cta(&shared_.empty[slot_.index], 0);
        slot_.advance();
        return pair;
    }

private:
    const TileQueue* queue_;
    SharedQueue& shared_;
    RingPosition<kQueueSlots> slot_;
    int64_t pair_ = static_cast<int64_t>(blockIdx.x / kClusterCtas) - gridDim.x / kClusterCtas;
};

}  // namespace fp8flow::hopper::gemm
