// SPDX-License-Identifier: MIT
// PeerExchange: the exchange between GPUs of one host over peer memory (NVLink). Dispatch pushes: a rank
// stores each row once into the memory of every rank that hosts one of the row's experts. That rank copies it
// to all of its padded, expert-sorted rows, so permute and pad are part of the exchange. Combine adds a
// rank's rows of a token in FP32 and stores one row into the owner's memory. The owner adds the rows it
// received. All sizes are read on the device, nothing is allocated, the host waits for nothing. Sources:
// FlashComm and DeepGEMM's Mega MoE (rows directly to their final places), DeepEP (fixed slots). Read next:
// group.h, then dispatch.cu and combine.cu.
//
// Protocol. A call writes (into its own or peers' memory), passes a group barrier, and reads.
//
// Group barrier. One small kernel adds 1 to the group's epoch, a word in device memory, so that a CUDA graph
// can be replayed. It stores the epoch with release order into this rank's flag line at every member, and
// polls with acquire loads until every member's flag line here has at least that epoch. Flags only rise and
// are never reset.
//
// Receive buffers. Every member has two, for even and odd epochs. Call n uses the buffers of parity n. They
// are free for call n + 2: a member writes them only after barrier n + 1, and every member arrives there
// after it has read the buffers of call n, because its kernels run in one stream order. So one barrier per
// call is enough, but all calls of an exchange must be on one stream, or in one order of streams.
//
// Dispatch signals and waits inside the kernel that moves the rows. Reads are guarded row by row: after each
// row the writer stores the epoch into the flag of that row.
//
// Combine of BF16 rows (combine_sums.cu) also has its barrier in the kernel: progress words of every member's
// CTAs replace its flag line. A token is added as soon as its rows have arrived.
//
// The expert-parallel group, the world and the replicas have their own flags, epochs and buffers. A large
// all-reduce has two barriers per chunk: its inputs are read between the two, its results between the second
// and the first of the next chunk, so neither needs a second copy. Reduce-scatter and all-gather use the same
// memory in rounds: write, barrier, read, barrier.
//
// Deadline. A wait that passes it sets the rank's `lost` word, and check_peers() reports it. What the waiting
// kernel writes is not used. Later kernels access no peer and do not signal their arrival, so no rank uses
// data that was never written.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/exchange/peer/group.h"
#include "kernels/hopper/factory.h"

#include <vector>

namespace fp8flow::hopper::peer {

// Offsets in a region. They depend on the limits and group sizes only, so they are the same on all ranks.
struct PeerLayout {
    struct Reduction {
        int64_t flags = 0, buffers = 0, chunk = 0, result = 0;
        int size = 1;
    };
    static constexpr int64_t kSmallBytes = int64_t{64} << 10;   // largest all-reduce with one barrier
    static constexpr int64_t kChunkBytes = int64_t{32} << 20;   // chunk of a larger one
    static constexpr int64_t kFlaggedRows = int64_t{32} << 10;  // least number of row flags per rank

    PeerLayout(const ExchangeLimits& limits, CombineOrder order, const Exchange::GroupRanks& group);

    int64_t words = 0, tables = 0;
    int64_t flags = 0, buffers = 0, buffer_bytes = 0;  // of the expert-parallel group
    int64_t row_flags = 0, flagged_rows = 0;           // for each of its ranks
    int64_t combine_words = 0, combine_progress = 0;
    Reduction world, replicas;
    int64_t bytes = 0;
};

class PeerExchange final : public Exchange {
public:
    // Takes PeerLayout(...).bytes of every GPU. With S tokens, G ranks, H hidden and b bytes per element the
    // largest parts are: order rank 2 * G * S * H * b (DeepSeek-V3, 4 ranks of 4096 tokens: 470 MB), order
    // invariant 2 * S * K * H * b, all-reduce 32 MiB * (1 + 1/n) + 128 KiB * n for each of world and replicas
    // (n ranks).
    PeerExchange(Ops& ops, const ExchangeGroups& groups, const ExchangeLimits& limits, CombineOrder order,
                 double deadline_seconds, std::unique_ptr<PeerMemory> memory);
    void require_capturable() const override {}
    void check_peers() override;
    // Waits for the stream of the latest call.
    WireBytes wire_bytes() const override;
    void copy_wire_counters(uint64_t* host, const Launch& launch) override;
    void reset_counts() override;

protected:
    void do_gather_routing(const Routing& routing, const Launch& launch) override;
    void do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) override;
    void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received, const Call& call) override;
    void do_combine(const Combine& args, const Call& call) override;
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) override;
    void do_reduce_scatter(const Sharded& sharded, const Launch& launch) override;
    void do_all_gather(const Sharded& sharded, const Launch& launch) override;

private:
    enum GroupIndex { kExpertParallel, kWorld, kReplicas, kNumGroups };
    static GroupIndex index_of(Ranks ranks) { return ranks == Ranks::world ? kWorld : kReplicas; }
    const PeerLayout::Reduction& area_of(Ranks ranks) const {
        return ranks == Ranks::world ? layout_.world : layout_.replicas;
    }
    // Destination of dispatch: the padded rows of the experts, or one row per received row.
    enum class RowTarget { experts, received };
    void dispatch_to(RowTarget target, const ScaledTensor& rows, const ScaledTensor& dst, const Call& call);
    GroupBarrier barrier_of(GroupIndex group, PeerOperation operation) const;
    void synchronize(GroupIndex group, PeerOperation operation, const Launch& launch);
    WireBytes wire_since_start() const;
    // Throws unless a call's data fits into a receive buffer.
    void check_fits(int64_t bytes, const char* what) const;

    ExchangeGroups groups_;
    ExchangeLimits limits_;
    PeerLayout layout_;
    double deadline_seconds_;
    std::unique_ptr<PeerMemory> memory_;
    std::vector<int> members_[kNumGroups];  // ranks of the world
    std::vector<int> job_ranks_;            // by rank of the world
    PeerGroup device_groups_[kNumGroups];   // kernel arguments
    PeerWords* words_ = nullptr;            // on the device
    LostPeers* lost_ = nullptr;             // on the host
    WireBytes at_reset_;
    Stream last_stream_;
};

}  // namespace fp8flow::hopper::peer
