// SPDX-License-Identifier: MIT
// PeerMemory: one region of GPU memory per rank, mapped by all ranks of the host, so that a kernel reads and
// writes the memory of another GPU through plain pointers (over NVLink). regions.h maps it. Read next:
// peer_exchange.h.
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
    // the current GPU of the calling thread and zeroed. As a test, every rank first writes into every region
    // and reads back its own and its peers' words. Null, with the same reason on every rank, if there are
    // more than kMaxRanks ranks, or a rank is on another host, has no memory left, cannot map a peer or reads
    // wrong bytes.
    static std::unique_ptr<PeerMemory> create(ProcessGroup& world, PeerMapping mapping, int64_t bytes,
                                              std::string& reason);

    // Collective, so that no rank frees memory that another still reads. Waits for late ranks at most until
    // the group's deadline. While an exception propagates, or after abandon(), it does not wait, and the
    // memory stays allocated until the process ends.
    ~PeerMemory();
    PeerMemory(const PeerMemory&) = delete;
    PeerMemory& operator=(const PeerMemory&) = delete;

    uint8_t* of(int rank) const { return regions_->of(rank); }
    uint8_t* own() const { return regions_->own(); }
    // kHostBytes of mapped host memory, for reports of kernels to the host.
    static constexpr std::size_t kHostBytes = 4096;
    void* host_words() const { return host_words_; }

    void abandon() { abandoned_ = true; }

private:
    PeerMemory(ProcessGroup& world, std::unique_ptr<PeerRegions> regions, int64_t bytes)
        : world_(world), regions_(std::move(regions)), bytes_(bytes) {}
    // Steps of create(). Each returns this rank's error text, or nothing.
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
