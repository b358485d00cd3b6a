// SPDX-License-Identifier: MIT
// PeerExchange: the exchange between GPUs of one host through peer memory (NVLink). Dispatch pushes: a rank
// stores each of its rows once into the memory of every rank that hosts one of the row's experts, and that
// rank copies it to all its padded, expert-sorted places, so that permute and pad are part of the exchange.
// Combine adds a rank's rows of a token in FP32 and stores one row into the owner's memory; the owner adds
// the rows it received. All sizes are read on the device, nothing is allocated, the host waits for nothing.
// Sources: FlashComm and DeepGEMM's Mega MoE (rows straight to their final places), DeepEP (fixed slots).
// Read next: group.h, then dispatch.cu and combine.cu.
//
// Protocol.
//
// A call is: write (into own or peers' memory), group barrier, read.
//
// Group barrier. One small kernel adds 1 to the group's epoch, a word in device memory (so that a captured
// graph can be replayed), stores the epoch with release order into this rank's flag line at every member, and
// waits with acquire loads until every member's flag line here holds at least that epoch. Flags only rise and
// are never reset.
//
// Receive buffers. Every member has two, for even and odd epochs. Call n writes and reads the buffers of
// parity n. They are free for call n + 2: a member writes them only after barrier n + 1, at which every
// member arrives after it has read the buffers of call n (its kernels run in one stream order). So one
// barrier a call is enough, but all calls of an exchange must be on one stream, or in one order of streams.
//
// Dispatch starts with its barrier instead: inside the kernel that moves the rows, a member signals its
// arrival and waits for the arrival of the others. What is read is guarded row by row: after each row the
// writer stores the epoch into a flag of that row.
//
// Combine of BF16 rows (combine_sums.cu) has its barrier in the kernel, too: words of progress of every
// member's CTAs instead of its flag line. A token is added as soon as they say that its rows are here.
//
// The expert-parallel group, the world and the replicas have flags, epochs and buffers of their own; the one
// stream orders their calls. A large all-reduce has two barriers a chunk: its inputs are read between the
// two, its results between the second and the next chunk's first, so neither needs a second copy. A
// reduce-scatter and an all-gather use the same memory, a round of shares at a time: written, barrier, read,
// barrier.
//
// Deadline. A wait that passes it sets the rank's `lost` word, and check_peers() reports it. What the kernel
// that waited writes is not to be used. Kernels that start afterwards access no peer and do not signal their
// arrival, so nobody else uses data that was never written.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/exchange/peer/group.h"
#include "kernels/hopper/factory.h"

#include <vector>

namespace fp8flow::hopper::peer {

// Offsets in every rank's region: a function of the limits and group sizes only, so equal on all ranks and
// never outgrown.
struct PeerLayout {
    struct Reduction {
        int64_t flags = 0, buffers = 0, chunk = 0, result = 0;
        int size = 1;
    };
    static constexpr int64_t kSmallBytes = int64_t{64} << 10;   // up to here an all-reduce has one barrier
    static constexpr int64_t kChunkBytes = int64_t{32} << 20;   // chunk of larger ones
    static constexpr int64_t kFlaggedRows = int64_t{32} << 10;  // at least: narrow rows may be more

    PeerLayout(const ExchangeLimits& limits, CombineOrder order, const Exchange::Places& places);

    int64_t words = 0, tables = 0;
    int64_t flags = 0, buffers = 0, buffer_bytes = 0;  // of the expert-parallel group
    int64_t row_flags = 0, flagged_rows = 0;           // of each of its ranks
    int64_t combine_words = 0, combine_progress = 0;
    Reduction world, replicas;
    int64_t bytes = 0;
};

class PeerExchange final : public Exchange {
public:
    // Takes PeerLayout(...).bytes of every GPU; with S tokens, G ranks, H hidden and rows of b bytes an
    // element, the largest parts are
    //   order rank: 2 * G * S * H * b (DeepSeek-V3's 7168 with 4 ranks of 4096 tokens: 470 MB), order
    //   invariant: 2 * S * K * H * b, all-reduce: 32 MiB * (1 + 1/n) + 128 KiB * n for each of world and
    //   replicas, n ranks.
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
    void do_reduce_scatter(const Shared& shared, const Launch& launch) override;
    void do_all_gather(const Shared& shared, const Launch& launch) override;

private:
    enum GroupIndex { kExpertParallel, kWorld, kReplicas, kNumGroups };
    static GroupIndex index_of(Ranks ranks) { return ranks == Ranks::world ? kWorld : kReplicas; }
    const PeerLayout::Reduction& area_of(Ranks ranks) const {
        return ranks == Ranks::world ? layout_.world : layout_.replicas;
    }
    // Where fanned-out rows go: M-rows with pads, or one row per received row.
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
    std::vector<int> names_;                // ranks of the job, by rank of the world
    PeerGroup device_groups_[kNumGroups];   // as kernels see them
    PeerWords* words_ = nullptr;            // on the device
    LostPeers* lost_ = nullptr;             // on the host
    WireBytes at_reset_;
    Stream last_stream_;
};

}  // namespace fp8flow::hopper::peer
