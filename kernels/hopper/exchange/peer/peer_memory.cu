// SPDX-License-Identifier: MIT
// Maps the regions of all ranks of a host, and tests at start-up that stores and loads between them work.
#include "kernels/hopper/exchange/peer/peer_memory.h"

#include "kernels/core/error.h"
#include "kernels/hopper/device/peer.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/runtime/cuda_check.h"

#include <cstring>
#include <exception>

namespace fp8flow::hopper::peer {

namespace {

// IPC maps whole allocations; a multiple of this size shares no page with other data.
constexpr int64_t kPageBytes = int64_t{2} << 20;
constexpr int64_t kLineWords = 128 / sizeof(uint64_t);  // one line per writer

// False on every rank if any rank has a problem; `reason` is that of the lowest such rank. Collective: no
// rank returns before all have entered.
bool all_succeeded(ProcessGroup& world, const std::string& own_problem, std::string& reason) {
    constexpr std::size_t kText = 256;
    char own[kText] = {};
    own_problem.copy(own, kText - 1);
    std::vector<char> all(kText * static_cast<std::size_t>(world.size()));
    world.all_gather(own, kText, all.data());
    for (std::size_t r = 0; r < static_cast<std::size_t>(world.size()); ++r) {
        const char* text = all.data() + r * kText;
        if (text[0] == '\0') continue;
        reason = fmt::format("rank {}: {}", r, text);
        return false;
    }
    return true;
}

// The test uses the first lines of each region: line r of a region is written by rank r.
struct Regions {
    uint64_t* of[PeerMemory::kMaxRanks];
    int rank, size;
};
__device__ __forceinline__ uint64_t pattern(int from, int to) {
    return 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(from * PeerMemory::kMaxRanks + to + 1);
}

// One warp, one thread per peer, 8 bytes each.
__global__ void write_patterns_kernel(const Regions regions) {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < regions.size)
        store_release_system(regions.of[peer] + regions.rank * kLineWords, pattern(regions.rank, peer));
}
// One warp, one thread per rank. Checks what that rank wrote here, what this rank wrote there, and what that
// rank wrote to itself. Bit r of *wrong: rank r.
__global__ void check_patterns_kernel(const Regions regions, volatile uint32_t* wrong) {
    const int peer = static_cast<int>(threadIdx.x), self = regions.rank;
    bool bad = false;
    if (peer < regions.size) {
        const auto word = [&](int region, int writer) {
            return load_acquire_system(regions.of[region] + writer * kLineWords);
        };
        bad = word(self, peer) != pattern(peer, self) || word(peer, self) != pattern(self, peer) ||
              word(peer, peer) != pattern(peer, peer);
    }
    const uint32_t peers = __ballot_sync(kFullMask, bad);
    if (threadIdx.x == 0) *wrong = peers;
    __threadfence_system();
}

Regions test_regions(const PeerMemory& memory, const ProcessGroup& world) {
    Regions regions{.of = {}, .rank = world.rank(), .size = world.size()};
    for (int r = 0; r < world.size(); ++r) regions.of[r] = reinterpret_cast<uint64_t*>(memory.of(r));
    return regions;
}

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::create(ProcessGroup& world, PeerMapping mapping, int64_t bytes,
                                               std::string& reason) {
    if (world.size() > kMaxRanks) {
        reason = fmt::format("{} ranks, peer memory supports at most {}", world.size(), kMaxRanks);
        return nullptr;
    }
    auto regions =
        mapping == PeerMapping::cuda_ipc ? make_ipc_regions(world) : make_window_regions(world, reason);
    if (!regions) return nullptr;
    std::unique_ptr<PeerMemory> memory(
        new PeerMemory(world, std::move(regions), (bytes + kPageBytes - 1) / kPageBytes * kPageBytes));
    using Step = std::string (PeerMemory::*)();
    for (const Step step : {&PeerMemory::check_reach, &PeerMemory::allocate, &PeerMemory::map_peers,
                            &PeerMemory::write_patterns, &PeerMemory::check_patterns, &PeerMemory::clear})
        if (!all_succeeded(world, (memory.get()->*step)(), reason)) return nullptr;
    return memory;
}

std::string PeerMemory::check_reach() {
    std::vector<int64_t> all(static_cast<std::size_t>(world_.size()));
    world_.all_gather(&bytes_, sizeof bytes_, all.data());
    for (std::size_t r = 0; r < all.size(); ++r)
        FP8FLOW_CHECK(all[r] == bytes_, "rank {} has a region of {} bytes, rank {} of {}", r, all[r],
                      world_.rank(), bytes_);
    return regions_->check_reach();
}

std::string PeerMemory::allocate() {
    std::string wrong = regions_->allocate(bytes_);
    if (!wrong.empty()) return fmt::format("{} ({:.1f} MiB)", wrong, static_cast<double>(bytes_) / 1048576.0);
    wrong = cuda_problem(cudaHostAlloc(&host_words_, kHostBytes, cudaHostAllocMapped | cudaHostAllocPortable),
                         "allocating host memory for the GPU");
    if (!wrong.empty()) return wrong;
    std::memset(host_words_, 0, kHostBytes);
    return clear();
}

std::string PeerMemory::map_peers() { return regions_->map(); }

std::string PeerMemory::clear() {
    const std::string wrong =
        cuda_problem(cudaMemset(own(), 0, static_cast<std::size_t>(bytes_)), "clearing memory for peers");
    return wrong.empty() ? cuda_problem(cudaDeviceSynchronize(), "clearing memory for peers") : wrong;
}

std::string PeerMemory::write_patterns() {
    write_patterns_kernel<<<1, kMaxRanks>>>(test_regions(*this, world_));
    const std::string wrong = cuda_problem(cudaGetLastError(), "writing to peers");
    return wrong.empty() ? cuda_problem(cudaDeviceSynchronize(), "writing to peers") : wrong;
}

std::string PeerMemory::check_patterns() {
    volatile uint32_t* wrong_peers = static_cast<uint32_t*>(host_words_);
    check_patterns_kernel<<<1, kMaxRanks>>>(test_regions(*this, world_), wrong_peers);
    std::string wrong = cuda_problem(cudaGetLastError(), "reading from peers");
    if (wrong.empty()) wrong = cuda_problem(cudaDeviceSynchronize(), "reading from peers");
    if (wrong.empty() && *wrong_peers != 0)
        wrong = fmt::format("stores to or loads from ranks with bits {:#x} give wrong bytes",
                            uint32_t{*wrong_peers});
    *wrong_peers = 0;
    return wrong;
}

void PeerMemory::release() noexcept {
    // Errors are not reported from here: the next use of the GPU reports what is still wrong with it.
    try {
        cudaDeviceSynchronize();  // this rank's kernels no longer read its peers
        world_.barrier();         // and theirs no longer read this rank
        regions_->unmap();
        world_.barrier();  // an owner frees memory only when no rank maps it
        regions_->free();
        cudaFreeHost(host_words_);
    } catch (const std::exception&) {
        // A peer is gone or late. A live peer may still read the memory, so it stays allocated until the
        // process ends.
    }
    cudaGetLastError();
}

PeerMemory::~PeerMemory() {
    if (!abandoned_ && std::uncaught_exceptions() == 0) release();
}

}  // namespace fp8flow::hopper::peer
