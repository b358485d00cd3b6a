// PeerMemory: one region of GPU memory per rank of the job, mapped by all ranks of the host, so that a kernel reads and writes another
// GPU's memory through plain pointers (NVLink, or the same GPU). Between processes by CUDA IPC, whose handles travel through the
// ProcessGroup; between threads of one process (tests) by the pointers themselves. Read next: peer_exchange.h.
#pragma once

#include "kernels/comm/process_group.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fp8flow::hopper {

class PeerMemory {
public:
    static constexpr int kMaxRanks = 32;

    // Collective over `world`, which outlives the result; `bytes` is the same on all ranks. The region is on the calling thread's current
    // GPU and zeroed. Before anything else uses it, every rank writes into every other's region, and all read back what they wrote and
    // what they got. Null, with the same reason on every rank, where there are more than kMaxRanks, or one of them is on another
    // host, has no memory left, cannot map a peer or reads wrong bytes.
    static std::unique_ptr<PeerMemory> create(ProcessGroup& world, int64_t bytes, std::string& reason);

    // Collective as well: nobody frees what another may still read. It waits for late ranks at most as long as the group does; while an
    // exception is under way, or after abandon(), it waits for nobody and leaves the memory to the end of the process.
    ~PeerMemory();
    PeerMemory(const PeerMemory&) = delete;
    PeerMemory& operator=(const PeerMemory&) = delete;

    uint8_t* of(int rank) const { return regions_[static_cast<std::size_t>(rank)]; }
    uint8_t* own() const { return own_; }
    // kHostBytes of host memory that kernels write through the same address: what they have to tell the host.
    static constexpr std::size_t kHostBytes = 4096;
    void* host_words() const { return host_words_; }

    void abandon() { abandoned_ = true; }

private:
    // How rank `r` is reached.
    enum class Reach { self, same_process, other_process };
    struct Identity {
        char host[128];
        uint64_t process;  // differs between processes, and between containers that number them alike
        cudaUUID_t gpu;
        int64_t bytes;
        uint8_t* region;  // set by allocate()
        cudaIpcMemHandle_t handle;
    };

    PeerMemory(ProcessGroup& world, int64_t bytes) : world_(world), bytes_(bytes) {}
    // The steps of create(): each returns what is wrong on this rank, or nothing.
    std::string look_around();
    std::string allocate();
    std::string map_peers();
    std::string write_patterns();
    std::string check_patterns();
    std::string clear();
    void release() noexcept;
    std::size_t rank() const { return static_cast<std::size_t>(world_.rank()); }
    std::size_t size() const { return static_cast<std::size_t>(world_.size()); }

    ProcessGroup& world_;
    int64_t bytes_;
    bool abandoned_ = false;
    uint8_t* own_ = nullptr;
    void* host_words_ = nullptr;
    std::vector<Identity> identities_;  // by rank
    std::vector<Reach> reach_;
    std::vector<uint8_t*> regions_;  // null until mapped
};

}  // namespace fp8flow::hopper
