// SPDX-License-Identifier: MIT
// PeerRegions: how PeerMemory gets one region of GPU memory per rank that all ranks map. Two ways:
// CUDA IPC and windows of NCCL. IPC handles travel through the ProcessGroup; between threads of one process,
// in tests, the pointers themselves do. Read next: peer_memory.h.
#pragma once

#include "kernels/comm/process_group.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fp8flow::hopper::peer {

class PeerRegions {
public:
    // Of `world`, which outlives this.
    explicit PeerRegions(ProcessGroup& world)
        : world_(world), regions_(static_cast<std::size_t>(world.size()), nullptr) {}
    virtual ~PeerRegions() = default;
    PeerRegions(const PeerRegions&) = delete;
    PeerRegions& operator=(const PeerRegions&) = delete;

    // The steps, collective, in this order: each returns the problem of this rank, or nothing. `bytes` is the
    // same on all ranks; the memory is on the calling thread's current GPU.
    virtual std::string check_reach() = 0;
    virtual std::string allocate(int64_t bytes) = 0;
    virtual std::string map() = 0;
    // Collective; after any number of the steps. unmap() on every rank comes before free() on any.
    virtual void unmap() = 0;
    virtual void free() = 0;

    uint8_t* of(int rank) const { return regions_[static_cast<std::size_t>(rank)]; }
    uint8_t* own() const { return of(world_.rank()); }

protected:
    std::size_t rank() const { return static_cast<std::size_t>(world_.rank()); }
    std::size_t size() const { return regions_.size(); }

    ProcessGroup& world_;
    std::vector<uint8_t*> regions_;  // by rank; null until allocated or mapped
};

std::unique_ptr<PeerRegions> make_ipc_regions(ProcessGroup& world);
// Null, with the reason, in programs built without NCCL or with an NCCL that has no windows.
std::unique_ptr<PeerRegions> make_window_regions(ProcessGroup& world, std::string& reason);

}  // namespace fp8flow::hopper::peer
