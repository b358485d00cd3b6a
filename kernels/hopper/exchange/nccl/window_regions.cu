// SPDX-License-Identifier: MIT
// PeerRegions with an NCCL window (NCCL 2.28 and later), for systems without CUDA IPC.
#include "kernels/hopper/exchange/peer/regions.h"

#include <nccl.h>

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)

#include "kernels/core/error.h"
#include "kernels/hopper/exchange/nccl/comm.h"
#include "kernels/hopper/runtime/cuda_check.h"

#include <nccl_device.h>

#include <optional>

namespace fp8flow::hopper::nccl {

namespace {

// Longest wait for the other ranks in a collective call.
constexpr double kDeadlineSeconds = 60;

// One thread per rank: the address at which this GPU sees the rank's region.
__global__ void window_addresses_kernel(ncclWindow_t window, int ranks, uint8_t** addresses) {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < ranks) addresses[peer] = static_cast<uint8_t*>(ncclGetPeerPointer(window, 0, peer));
}

class WindowRegions final : public peer::PeerRegions {
public:
    using PeerRegions::PeerRegions;

    std::string check_reach() override {
        const std::string wrong = guarded([&] { comm_.emplace(world_, world_.rank(), kDeadlineSeconds); });
        if (!wrong.empty()) return wrong;
        const int reached = ncclTeamLsa(comm_->handle()).nRanks;
        if (reached != world_.size())
            return fmt::format("NCCL can access the memory of {} of {} ranks only", reached, world_.size());
        return {};
    }

    std::string allocate(int64_t bytes) override {
        bytes_ = bytes;
        void* data = nullptr;
        const ncclResult_t status = ncclMemAlloc(&data, static_cast<std::size_t>(bytes));
        if (status != ncclSuccess) {
            cudaGetLastError();
            return fmt::format("allocating memory for peers: {}", ncclGetErrorString(status));
        }
        regions_[rank()] = static_cast<uint8_t*>(data);
        return {};
    }

    std::string map() override {
        const std::string wrong = guarded([&] {
            const ncclResult_t status = ncclCommWindowRegister(
                comm_->handle(), own(), static_cast<std::size_t>(bytes_), &window_, NCCL_WIN_COLL_SYMMETRIC);
            // NCCL 2.28 returns success while its own thread still registers the window: poll until it is
            // done
            comm_->finish(status == ncclSuccess ? ncclInProgress : status,
                          "making a window of memory for peers");
        });
        // NCCL makes no window for one rank
        if (!wrong.empty() || world_.size() == 1) return wrong;
        if (window_ == nullptr)
            return "NCCL cannot register a window of this GPU's memory (NCCL_DEBUG=INFO prints the reason)";
        return read_addresses();
    }

    void unmap() override {
        if (window_ != nullptr)
            comm_->finish(ncclCommWindowDeregister(comm_->handle(), window_), "closing a window");
        window_ = nullptr;
    }
    void free() override {
        if (own() != nullptr) ncclMemFree(own());
        comm_.reset();
    }

private:
    // Returns an error of NCCL as text: it is a reason to use another exchange, not to end the job.
    template <class Call> static std::string guarded(Call call) {
        try {
            call();
        } catch (const Error& error) {
            return error.what();
        }
        return {};
    }

    std::string read_addresses() {
        std::vector<uint8_t*> found(size());
        const std::size_t bytes = size() * sizeof(uint8_t*);
        void* addresses = nullptr;
        std::string wrong = cuda_problem(cudaMalloc(&addresses, bytes), "allocating addresses");
        if (!wrong.empty()) return wrong;
        window_addresses_kernel<<<1, 32>>>(window_, world_.size(), static_cast<uint8_t**>(addresses));
        wrong = cuda_problem(cudaGetLastError(), "reading addresses");
        if (wrong.empty())
            wrong = cuda_problem(cudaMemcpy(found.data(), addresses, bytes, cudaMemcpyDeviceToHost),
                                 "reading addresses");
        cudaFree(addresses);
        for (std::size_t r = 0; r < size(); ++r)
            if (r != rank()) regions_[r] = found[r];
        return wrong;
    }

    int64_t bytes_ = 0;
    std::optional<NcclComm> comm_;
    ncclWindow_t window_ = nullptr;
};

}  // namespace

}  // namespace fp8flow::hopper::nccl

namespace fp8flow::hopper::peer {

std::unique_ptr<PeerRegions> make_window_regions(ProcessGroup& world, std::string&) {
    return std::make_unique<nccl::WindowRegions>(world);
}

}  // namespace fp8flow::hopper::peer

#else

namespace fp8flow::hopper::peer {

std::unique_ptr<PeerRegions> make_window_regions(ProcessGroup&, std::string& reason) {
    reason = "windows need NCCL 2.28 or later";
    return nullptr;
}

}  // namespace fp8flow::hopper::peer

#endif
