// SPDX-License-Identifier: MIT
// PeerExchange: the exchange between GPUs of one host through peer memory. Rows and sums are pushed: a rank
// stores each of its rows once into the memory of every rank that hosts an expert of it, which writes it from
// there to all its padded, expert-sorted places, so that permute and pad are part of the wire. Back it adds
// its rows of a token in fp32 and stores one row into the owner's memory, and the owner adds what has come.
// All sizes are read on the device; nothing is allocated and the host waits for nothing. Sources: FlashComm
// and DeepGEMM's Mega MoE (rows straight to their final places), DeepEP (fixed slots). Read next: group.h,
// then dispatch.cu and combine.cu.
//
// Protocol. A call is: write (into own or peers' memory), meet, read. A meeting of a group is one small
// kernel: it adds 1 to the group's epoch, a word in device memory (so that a captured graph can be replayed),
// stores the epoch with release order into this rank's flag line at every member, and waits until every
// member's line here holds at least that epoch. Flags only rise and are never reset. Every member has two
// boxes, for even and odd meetings. Call n writes and reads boxes of parity n. They are free for call n + 2:
// a member writes them only after meeting n + 1, at which every member arrives after it has read the boxes of
// call n (its kernels run in one stream order). So one meeting a call is enough, but all calls of an exchange
// must be on one stream, or in one order of streams. A dispatch is a call whose meeting begins with it: a
// member says that it has come, and waits for the others, inside the kernel that moves the rows. What is read
// is guarded row by row: behind each row the writer stores the epoch into a flag of that row. The
// expert-parallel group, the world and the replicas have flags, epochs and boxes of their own; the one stream
// orders their calls. A large all-reduce meets twice a chunk: its inputs are read between the two meetings,
// its results between the second and the next first one, so neither needs a second copy. A wait that passes
// the deadline sets the rank's `lost` word: from then on its kernels touch no peer and tell no peer that they
// have arrived, so nobody uses data that was never written; check_peers() reports it.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/exchange/peer/group.h"
#include "kernels/hopper/factory.h"

#include <vector>

namespace fp8flow {

// Where things stand in every rank's region: a function of the limits and group sizes only, so equal on all
// ranks and never outgrown.
struct PeerLayout {
    struct Reduction {
        int64_t flags = 0, boxes = 0, chunk = 0, result = 0;
        int size = 1;
    };
    static constexpr int64_t kSmallBytes = int64_t{64} << 10;   // up to here an all-reduce is one meeting
    static constexpr int64_t kChunkBytes = int64_t{32} << 20;   // of larger ones
    static constexpr int64_t kFlaggedRows = int64_t{32} << 10;  // at least: narrow rows may be more

    PeerLayout(const ExchangeLimits& limits, CombineOrder order, int expert_parallel, int world,
               int replicas);

    int64_t words = 0, tables = 0;
    int64_t flags = 0, boxes = 0, box_bytes = 0;  // of the expert-parallel group
    int64_t row_flags = 0, flagged_rows = 0;      // of each of its ranks
    int64_t combine_words = 0, combine_steps = 0;
    Reduction world, replicas;
    int64_t bytes = 0;
};

class PeerExchange final : public Exchange {
public:
    // Takes PeerLayout(...).bytes of every GPU; with S tokens, G ranks, H hidden and rows of b bytes an
    // element, the most of it
    //   order rank: 2 * G * S * H * b (DeepSeek-V3's 7168 with 4 ranks of 4096 tokens: 470 MB), order
    //   invariant: 2 * S * K * H * b, all-reduce: 32 MiB * (1 + 1/n) + 128 KiB * n for each of world and
    //   replicas, n ranks.
    PeerExchange(Ops& ops, const ExchangeGroups& groups, const ExchangeLimits& limits, CombineOrder order,
                 double deadline_seconds, std::unique_ptr<hopper::PeerMemory> memory);
    int rank() const override { return groups_.expert_parallel.rank(); }
    int size() const override { return groups_.expert_parallel.size(); }
    int num_ranks(Ranks ranks) const override;
    bool holds_first_replica() const override { return groups_.expert_replicas.rank() == 0; }
    void check_peers() override;
    // Waits for the stream of the latest call.
    WireBytes wire_bytes() const override;
    void copy_wire_counters(uint64_t* host, const Launch& launch) override;
    void reset_counts() override;

protected:
    void do_gather_routing(const TensorView& ids, const TensorView& probs, const TensorView& all_ids,
                           const TensorView& all_probs, const Launch& launch) override;
    void do_dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst,
                     Arena& scratch, const Launch& launch) override;
    void do_dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& received,
                          Arena& scratch, const Launch& launch) override;
    void do_combine(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                    const Launch& launch) override;
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) override;

private:
    enum GroupIndex { kExpertParallel, kWorld, kReplicas, kNumGroups };
    // Where fanned-out rows go: M-rows with pads, or one row per received row.
    enum class RowTarget { experts, received };
    void dispatch_to(RowTarget target, const ScaledTensor& rows, const DispatchPlan& plan,
                     const ScaledTensor& dst, const Launch& launch);
    hopper::PeerMeeting meeting_of(GroupIndex group, hopper::PeerOperation operation) const;
    void synchronize(GroupIndex group, hopper::PeerOperation operation, const Launch& launch);
    WireBytes wire_since_start() const;
    // Throws unless a call's message fits into the boxes.
    void check_fits(int64_t bytes, const char* what) const;

    Ops& ops_;
    ExchangeGroups groups_;
    ExchangeLimits limits_;
    CombineOrder order_;
    PeerLayout layout_;
    double deadline_seconds_;
    std::unique_ptr<hopper::PeerMemory> memory_;
    std::vector<int> members_[kNumGroups];         // ranks of the world
    hopper::PeerGroup device_groups_[kNumGroups];  // as kernels see them
    hopper::PeerWords* words_ = nullptr;           // on the device
    hopper::LostPeers* lost_ = nullptr;            // on the host
    WireBytes at_reset_;
    Stream last_stream_;
};

}  // namespace fp8flow
