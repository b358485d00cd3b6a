// Mapping the regions of all ranks of a host, and the proof at start-up that stores and loads between them work.
#include "kernels/hopper/peer_memory.h"

#include "kernels/core/error.h"
#include "kernels/hopper/device/peer.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <fstream>
#include <random>

namespace fp8flow::hopper {

namespace {

// IPC maps whole allocations; a multiple of this size shares its pages with nobody else's data.
constexpr int64_t kPageBytes = int64_t{2} << 20;
constexpr int64_t kLineWords = 128 / sizeof(uint64_t);  // one inbox a line

std::string problem(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return {};
    cudaGetLastError();  // it is reported here, not at the next launch
    return fmt::format("{}: {}", what, cudaGetErrorString(status));
}

// False on every rank alike if any rank has a problem; `reason` is then that of the first of them. Nobody returns before all have come.
bool all_well(ProcessGroup& world, const std::string& own_problem, std::string& reason) {
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

std::string host_name() {
    char name[64] = {};
    gethostname(name, sizeof name - 1);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return fmt::format("{}/{}", name, boot);
}

uint64_t process_number() {
    static const uint64_t number = [] {
        std::random_device random;
        return static_cast<uint64_t>(random()) << 32 | random();
    }();
    return number;
}

// The region's first lines serve as inboxes of the test: line r of a region is what rank r wrote there.
struct Regions {
    uint64_t* of[PeerMemory::kMaxRanks];
    int rank, size;
};
__device__ __forceinline__ uint64_t pattern(int from, int to) {
    return 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(from * PeerMemory::kMaxRanks + to + 1);
}

// One warp, one thread a peer; 8 bytes each.
__global__ void write_patterns_kernel(const Regions regions) {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < regions.size)
        store_release_system(regions.of[peer] + regions.rank * kLineWords, pattern(regions.rank, peer));
}
// One warp, one thread a peer: what the peer wrote here, what this rank wrote there, and what the peer wrote to itself. Bit r of
// *wrong: rank r.
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
    const uint32_t peers = __ballot_sync(0xFFFFFFFFu, bad);
    if (threadIdx.x == 0) *wrong = peers;
    __threadfence_system();
}

Regions test_regions(const std::vector<uint8_t*>& mapped, int rank) {
    Regions regions{.of = {}, .rank = rank, .size = static_cast<int>(mapped.size())};
    for (std::size_t r = 0; r < mapped.size(); ++r) regions.of[r] = reinterpret_cast<uint64_t*>(mapped[r]);
    return regions;
}

// The number under which this process sees a GPU, or -1.
int device_of(const cudaUUID_t& gpu) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) return -1;
    for (int device = 0; device < count; ++device) {
        cudaDeviceProp properties{};
        if (cudaGetDeviceProperties(&properties, device) == cudaSuccess &&
            std::memcmp(&properties.uuid, &gpu, sizeof gpu) == 0)
            return device;
    }
    return -1;
}

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::create(ProcessGroup& world, int64_t bytes, std::string& reason) {
    if (world.size() > kMaxRanks) {
        reason = fmt::format("{} ranks, at most {} share memory", world.size(), kMaxRanks);
        return nullptr;
    }
    std::unique_ptr<PeerMemory> memory(
        new PeerMemory(world, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes));
    using Step = std::string (PeerMemory::*)();
    for (const Step step : {&PeerMemory::look_around, &PeerMemory::allocate, &PeerMemory::map_peers,
                            &PeerMemory::write_patterns, &PeerMemory::check_patterns, &PeerMemory::clear})
        if (!all_well(world, (memory.get()->*step)(), reason)) return nullptr;
    return memory;
}

std::string PeerMemory::look_around() {
    Identity own{};
    host_name().copy(own.host, sizeof own.host - 1);
    own.process = process_number();
    own.bytes = bytes_;
    int device = 0;
    cudaDeviceProp properties{};
    std::string wrong = problem(cudaGetDevice(&device), "asking for the current GPU");
    if (wrong.empty())
        wrong = problem(cudaGetDeviceProperties(&properties, device), "asking for the GPU's name");
    own.gpu = properties.uuid;
    identities_.resize(size());
    world_.all_gather(&own, sizeof own, identities_.data());
    if (!wrong.empty()) return wrong;

    for (std::size_t r = 0; r < size(); ++r) {
        const Identity& peer = identities_[r];
        FP8FLOW_CHECK(peer.bytes == bytes_, "rank {} shares {} bytes, rank {} {}", r, peer.bytes, rank(),
                      bytes_);
        if (std::strcmp(peer.host, own.host) != 0) return fmt::format("rank {} is on another host", r);
        reach_.push_back(r == rank()                   ? Reach::self
                         : peer.process == own.process ? Reach::same_process
                                                       : Reach::other_process);
        // A GPU that this process does not see may still be reached: mapping it will tell.
        const int other = device_of(peer.gpu);
        if (other < 0 || other == device) continue;
        int possible = 0;
        wrong = problem(cudaDeviceCanAccessPeer(&possible, device, other), "asking for peer access");
        if (wrong.empty() && possible == 0)
            wrong = fmt::format("GPU {} cannot access GPU {} of rank {}", device, other, r);
        if (!wrong.empty()) return wrong;
    }
    return {};
}

std::string PeerMemory::allocate() {
    regions_.assign(size(), nullptr);
    void* data = nullptr;
    const auto bytes = static_cast<std::size_t>(bytes_);
    std::string wrong = problem(cudaMalloc(&data, bytes), "allocating memory for peers");
    if (!wrong.empty()) return fmt::format("{} ({:.1f} MiB)", wrong, static_cast<double>(bytes) / 1048576.0);
    own_ = static_cast<uint8_t*>(data);
    regions_[rank()] = own_;
    wrong = problem(cudaHostAlloc(&host_words_, kHostBytes, cudaHostAllocMapped | cudaHostAllocPortable),
                    "allocating host memory for the GPU");
    if (!wrong.empty()) return wrong;
    std::memset(host_words_, 0, kHostBytes);
    return clear();
}

std::string PeerMemory::clear() {
    const std::string wrong =
        problem(cudaMemset(own_, 0, static_cast<std::size_t>(bytes_)), "clearing memory for peers");
    return wrong.empty() ? problem(cudaDeviceSynchronize(), "clearing memory for peers") : wrong;
}

std::string PeerMemory::map_peers() {
    Identity own = identities_[rank()];
    own.region = own_;
    std::string wrong;
    if (std::find(reach_.begin(), reach_.end(), Reach::other_process) != reach_.end())
        wrong = problem(cudaIpcGetMemHandle(&own.handle, own_), "making a handle of memory for peers");
    world_.all_gather(&own, sizeof own, identities_.data());
    if (!wrong.empty()) return wrong;

    int device = 0;
    wrong = problem(cudaGetDevice(&device), "asking for the current GPU");
    for (std::size_t r = 0; r < size() && wrong.empty(); ++r) {
        const Identity& peer = identities_[r];
        if (reach_[r] == Reach::same_process) {
            const int other = device_of(peer.gpu);
            if (other != device) {
                const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
                if (status == cudaErrorPeerAccessAlreadyEnabled)
                    cudaGetLastError();
                else
                    wrong = problem(status, "enabling peer access");
            }
            if (wrong.empty()) regions_[r] = peer.region;
        } else if (reach_[r] == Reach::other_process) {
            void* data = nullptr;
            wrong = problem(cudaIpcOpenMemHandle(&data, peer.handle, cudaIpcMemLazyEnablePeerAccess),
                            "mapping a peer's memory");
            if (wrong.empty())
                regions_[r] = static_cast<uint8_t*>(data);
            else
                wrong += fmt::format(" (rank {})", r);
        }
    }
    return wrong;
}

std::string PeerMemory::write_patterns() {
    write_patterns_kernel<<<1, kMaxRanks>>>(test_regions(regions_, world_.rank()));
    const std::string wrong = problem(cudaGetLastError(), "writing to peers");
    return wrong.empty() ? problem(cudaDeviceSynchronize(), "writing to peers") : wrong;
}

std::string PeerMemory::check_patterns() {
    volatile uint32_t* wrong_peers = static_cast<uint32_t*>(host_words_);
    check_patterns_kernel<<<1, kMaxRanks>>>(test_regions(regions_, world_.rank()), wrong_peers);
    std::string wrong = problem(cudaGetLastError(), "reading from peers");
    if (wrong.empty()) wrong = problem(cudaDeviceSynchronize(), "reading from peers");
    if (wrong.empty() && *wrong_peers != 0)
        wrong = fmt::format("stores to or loads from ranks with bits {:#x} give wrong bytes",
                            uint32_t{*wrong_peers});
    *wrong_peers = 0;
    return wrong;
}

void PeerMemory::release() noexcept {
    // Errors have no reader any more: the next use of the GPU reports what is still wrong with it.
    try {
        cudaDeviceSynchronize();  // this rank's kernels no longer read its peers
        world_.barrier();         // nor theirs this rank
        for (std::size_t r = 0; r < regions_.size(); ++r)
            if (reach_[r] == Reach::other_process && regions_[r] != nullptr)
                cudaIpcCloseMemHandle(regions_[r]);
        world_.barrier();  // an owner frees what nobody maps
        cudaFree(own_);
        cudaFreeHost(host_words_);
    } catch (const std::exception&) {
        // A peer is gone or late. Freeing now could fault a live one, so the memory is left to the end of the process.
    }
    cudaGetLastError();
}

PeerMemory::~PeerMemory() {
    if (!abandoned_ && std::uncaught_exceptions() == 0) release();
}

}  // namespace fp8flow::hopper
