// SPDX-License-Identifier: MIT
// PeerMemory: one region of GPU memory per rank of the job, mapped by all ranks of the host, so that a kernel
// reads and writes another GPU's memory through plain pointers (NVLink, or the same GPU); how it is mapped:
// regions.h. Read next: peer_exchange.h.
#pragma once

#include "kernels/hopper/exchange/peer/regions.h"
#include "kernels/hopper/factory.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fp8flow::hopper::peer {

class PeerMemory {
public:
    static constexpr int kMaxRanks = 32;

    // Collective over `world`, which outlives the result; `bytes` is the same on all ranks. The region is on
    // the calling thread's current GPU and zeroed. Before anything else uses it, every rank writes into every
    // other's region, and all read back what they wrote and what they got. Null, with the same reason on
    // every rank, where there are more than kMaxRanks, or one of them is on another host, has no memory left,
    // cannot map a peer or reads wrong bytes.
    static std::unique_ptr<PeerMemory> create(ProcessGroup& world, PeerMapping mapping, int64_t bytes,
                                              std::string& reason);

    // Collective as well: nobody frees what another may still read. It waits for late ranks at most as long
    // as the group does; while an exception propagates, or after abandon(), it does not wait and leaves the
    // memory to the end of the process.
    ~PeerMemory();
    PeerMemory(const PeerMemory&) = delete;
    PeerMemory& operator=(const PeerMemory&) = delete;

    uint8_t* of(int rank) const { return regions_->of(rank); }
    uint8_t* own() const { return regions_->own(); }
    // kHostBytes of host memory that kernels write through the same address: reports to the host.
    static constexpr std::size_t kHostBytes = 4096;
    void* host_words() const { return host_words_; }

    void abandon() { abandoned_ = true; }

private:
    PeerMemory(ProcessGroup& world, std::unique_ptr<PeerRegions> regions, int64_t bytes)
        : world_(world), regions_(std::move(regions)), bytes_(bytes) {}
    // The steps of create(): each returns the problem of this rank, or nothing.
    std::string check_reach();
    std::string allocate();
    std::string map_peers();
    std::string write_patterns();
    std::string check_patterns();
    std::string clear();
    void release() noexcept;

    ProcessGroup& world_;
    std::unique_ptr<PeerRegions> regions_;
    int64_t bytes_;
    bool abandoned_ = false;
    void* host_words_ = nullptr;
};

}  // namespace fp8flow::hopper::peer
