// SPDX-License-Identifier: MIT
// PeerRegions with CUDA IPC. The ProcessGroup exchanges IPC handles, or pointers within one process.
#include "kernels/hopper/exchange/peer/regions.h"

#include "kernels/core/error.h"
#include "kernels/hopper/runtime/cuda_check.h"
#include "kernels/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>

namespace fp8flow::hopper::peer {

namespace {

std::string host_and_boot() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return fmt::format("{}/{}", host_name().text, boot);
}

uint64_t process_number() {
    static const uint64_t number = [] {
        std::random_device random;
        return static_cast<uint64_t>(random()) << 32 | random();
    }();
    return number;
}

// The device number of a GPU in this process, or -1.
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

class IpcRegions final : public PeerRegions {
public:
    using PeerRegions::PeerRegions;

    std::string check_reach() override {
        Identity own{};
        host_and_boot().copy(own.host, sizeof own.host - 1);
        own.process = process_number();
        int device = 0;
        cudaDeviceProp properties{};
        std::string wrong = cuda_problem(cudaGetDevice(&device), "reading the current GPU");
        if (wrong.empty())
            wrong =
                cuda_problem(cudaGetDeviceProperties(&properties, device), "reading the GPU's properties");
        own.gpu = properties.uuid;
        identities_.resize(size());
        world_.all_gather(&own, sizeof own, identities_.data());
        if (!wrong.empty()) return wrong;

        for (std::size_t r = 0; r < size(); ++r) {
            const Identity& peer = identities_[r];
            if (std::strcmp(peer.host, own.host) != 0) return fmt::format("rank {} is on another host", r);
            reach_.push_back(r == rank()                   ? Reach::self
                             : peer.process == own.process ? Reach::same_process
                                                           : Reach::other_process);
            // a GPU that this process does not see may still be reachable; map() tries
            const int other = device_of(peer.gpu);
            if (other < 0 || other == device) continue;
            int possible = 0;
            wrong = cuda_problem(cudaDeviceCanAccessPeer(&possible, device, other), "querying peer access");
            if (wrong.empty() && possible == 0)
                wrong = fmt::format("GPU {} cannot access GPU {} of rank {}", device, other, r);
            if (!wrong.empty()) return wrong;
        }
        return {};
    }

    std::string allocate(int64_t bytes) override {
        void* data = nullptr;
        const std::string wrong =
            cuda_problem(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "allocating memory for peers");
        regions_[rank()] = static_cast<uint8_t*>(data);
        return wrong;
    }

    std::string map() override {
        Identity own = identities_[rank()];
        own.region = this->own();
        std::string wrong;
        if (std::find(reach_.begin(), reach_.end(), Reach::other_process) != reach_.end())
            wrong = cuda_problem(cudaIpcGetMemHandle(&own.handle, this->own()), "making an IPC handle");
        world_.all_gather(&own, sizeof own, identities_.data());
        if (!wrong.empty()) return wrong;

        int device = 0;
        wrong = cuda_problem(cudaGetDevice(&device), "reading the current GPU");
        for (std::size_t r = 0; r < size() && wrong.empty(); ++r) {
            const Identity& peer = identities_[r];
            if (reach_[r] == Reach::same_process) {
                const int other = device_of(peer.gpu);
                if (other != device) {
                    const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
                    if (status == cudaErrorPeerAccessAlreadyEnabled)
                        cudaGetLastError();
                    else
                        wrong = cuda_problem(status, "enabling peer access");
                }
                if (wrong.empty()) regions_[r] = peer.region;
            } else if (reach_[r] == Reach::other_process) {
                void* data = nullptr;
                wrong = cuda_problem(cudaIpcOpenMemHandle(&data, peer.handle, cudaIpcMemLazyEnablePeerAccess),
                                     "mapping a peer's memory");
                if (wrong.empty())
                    regions_[r] = static_cast<uint8_t*>(data);
                else
                    wrong += fmt::format(" (rank {})", r);
            }
        }
        return wrong;
    }

    void unmap() override {
        for (std::size_t r = 0; r < reach_.size(); ++r)
            if (reach_[r] == Reach::other_process && regions_[r] != nullptr)
                cudaIpcCloseMemHandle(regions_[r]);
    }
    void free() override { cudaFree(own()); }

private:
    // How rank `r` is reached.
    enum class Reach { self, same_process, other_process };
    struct Identity {
        char host[128];
        uint64_t process;  // random: process ids repeat across containers
        cudaUUID_t gpu;
        uint8_t* region;  // set by map()
        cudaIpcMemHandle_t handle;
    };
    std::vector<Identity> identities_;  // by rank
    std::vector<Reach> reach_;
};

}  // namespace

std::unique_ptr<PeerRegions> make_ipc_regions(ProcessGroup& world) {
    return std::make_unique<IpcRegions>(world);
}

}  // namespace fp8flow::hopper::peer
