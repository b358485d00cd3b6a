// SPDX-License-Identifier: MIT
// The self-test of the wire (parallel.wire_self_test): how many bytes a second go between each two ranks of a
// level, every rank busy with one other at a time; which pair is slowest, and which are far below the others.
// Which transport a level has: model/base/backend.cpp. Read next: kernels/comm/messages.h, kernels/probe.h.
#pragma once

#include "kernels/comm/host_layout.h"
#include "kernels/comm/messages.h"
#include "kernels/core/device.h"
#include "kernels/probe.h"

#include <memory>
#include <string>
#include <vector>

namespace fp8flow {

// Bytes between this rank and one other, both ways at once.
class PairTraffic {
public:
    virtual ~PairTraffic() = default;
    virtual int64_t bytes() const = 0;  // of one turn, each way
    virtual void start(int partner) = 0;
};
// Messages of so many bytes within the group; on GPUs between their memory. Group and messages outlive it.
std::unique_ptr<PairTraffic> make_message_traffic(Messages& messages, ProcessGroup& group, Device& device,
                                                  int64_t bytes);
// Stores into the partner's memory.
std::unique_ptr<PairTraffic> make_store_traffic(std::unique_ptr<PeerProbe> probe);

struct WirePair {
    int a = 0, b = 0;  // ranks of the job, a < b
    double bytes_per_second = 0;
};

struct WireSpeedLimits {
    double seconds = 10;           // of a level: pairs that it does not reach are left out
    double deadline_seconds = 60;  // of one pair
};
// Bytes a second from this rank to each rank of the group; 0: itself, or not reached. Collective. Throws
// Error(peer) where a partner is silent past the deadline.
std::vector<double> measure_pairs(PairTraffic& traffic, ProcessGroup& group, Device& device,
                                  const WireSpeedLimits& limits);
// Who is busy with whom in a round: each two of `ranks` once in num_rounds(ranks); -1: nobody.
int num_rounds(int ranks);
int partner_of(int rank, int round, int ranks);

// The pairs of all groups of a level, the slower direction of each. speeds: of this rank's group, in its
// order. The same on every rank of the job. Collective over `world`.
std::vector<WirePair> gather_pairs(const std::vector<double>& speeds, ProcessGroup& group,
                                   ProcessGroup& world);
// "rank 5 on host 1 (node7)", by rank of the job. Collective.
std::vector<std::string> names_of_ranks(ProcessGroup& world, const HostLayout& hosts);
// One line, and another where pairs have less than half of the median.
std::string wire_speed_text(const std::string& level, const std::vector<WirePair>& pairs,
                            const std::vector<std::string>& names);

}  // namespace fp8flow
