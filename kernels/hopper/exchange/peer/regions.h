// SPDX-License-Identifier: MIT
// PeerRegions: one region of GPU memory per rank, mapped by all ranks, for PeerMemory. Two implementations:
// CUDA IPC and NCCL windows. The ProcessGroup exchanges IPC handles; between threads of one process, in
// tests, it exchanges pointers. Read next: peer_memory.h.
#pragma once

#include "kernels/comm/process_group.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fp8flow::hopper::peer {

class PeerRegions {
public:
    // `world` outlives this.
    explicit PeerRegions(ProcessGroup& world)
        : world_(world), regions_(static_cast<std::size_t>(world.size()), nullptr) {}
    virtual ~PeerRegions() = default;
    PeerRegions(const PeerRegions&) = delete;
    PeerRegions& operator=(const PeerRegions&) = delete;

    // Set-up steps, collective, in this order. Each returns this rank's error text, or nothing. `bytes` is
    // the same on all ranks. The memory is on the current GPU of the calling thread.
    virtual std::string check_reach() = 0;
    virtual std::string allocate(int64_t bytes) = 0;
    virtual std::string map() = 0;
    // Collective; after any number of set-up steps. All ranks call unmap() before any rank calls free().
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
// Null, with the reason, in a build without NCCL or with an NCCL that has no windows.
std::unique_ptr<PeerRegions> make_window_regions(ProcessGroup& world, std::string& reason);

}  // namespace fp8flow::hopper::peer
