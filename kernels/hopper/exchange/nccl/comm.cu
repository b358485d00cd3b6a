// SPDX-License-Identifier: MIT
// Communicators in NCCL's non-blocking mode: every call is polled until it is complete or the deadline has
// passed.
#include "kernels/hopper/exchange/nccl/comm.h"

#include "kernels/core/error.h"
#include "kernels/hopper/runtime/cuda_check.h"

#include <fmt/ranges.h>
#include <sched.h>

#include <algorithm>
#include <thread>

namespace fp8flow::hopper::nccl {

namespace {

// Connecting to peers takes long in large jobs, so its deadline is at least this long.
constexpr double kStartSeconds = 60;
// Longest wait for a communicator to finalise, and for the kernels of an aborted one to end.
constexpr std::chrono::seconds kFinaliseLimit{5};
// Polling yields the core at first; then it sleeps between polls.
constexpr std::chrono::milliseconds kYieldFor{2};
constexpr std::chrono::microseconds kPollInterval{20};

void pause(std::chrono::steady_clock::time_point since) {
    if (std::chrono::steady_clock::now() - since > kYieldFor)
        std::this_thread::sleep_for(kPollInterval);
    else
        sched_yield();
}

bool is_done(cudaEvent_t event) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) {
        cudaGetLastError();  // clears it for the next launch
        return false;
    }
    check_cuda(status, "waiting for NCCL");
    return true;
}

bool is_past(std::chrono::steady_clock::time_point since, double seconds) {
    return std::chrono::steady_clock::now() - since > std::chrono::duration<double>(seconds);
}

}  // namespace

NcclComm::NcclComm(ProcessGroup& group, int world_rank, double deadline_seconds)
    : group_(group),
      deadline_seconds_(deadline_seconds),
      world_ranks_(static_cast<std::size_t>(group.size())) {
    group.all_gather(&world_rank, sizeof world_rank, world_ranks_.data());
    check_cuda(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "making an event");
    try {
        start(std::max(deadline_seconds, kStartSeconds));
    } catch (...) {
        cudaEventDestroy(done_);
        throw;
    }
}

void NcclComm::start(double deadline_seconds) {
    struct Bootstrap {
        ncclUniqueId id{};
        int32_t status = ncclSuccess;  // of the rank that makes the id; sent to all ranks
    } bootstrap;
    if (rank() == 0) bootstrap.status = ncclGetUniqueId(&bootstrap.id);
    group_.broadcast(&bootstrap, sizeof bootstrap, 0);
    require(bootstrap.status == ncclSuccess, ExitCode::peer, "NCCL cannot start on rank {}: {}",
            world_ranks_[0], ncclGetErrorString(static_cast<ncclResult_t>(bootstrap.status)));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    wait_for_host(ncclCommInitRankConfig(&comm_, size(), bootstrap.id, rank(), &config), "starting NCCL",
                  deadline_seconds, nullptr);
}

NcclComm::~NcclComm() {
    if (comm_ != nullptr) {
        const auto start = Clock::now();
        ncclResult_t status = ncclCommFinalize(comm_);
        while (status == ncclInProgress && Clock::now() - start < kFinaliseLimit) {
            pause(start);
            status = state();
        }
        if (status == ncclSuccess)
            ncclCommDestroy(comm_);
        else
            ncclCommAbort(comm_);
    }
    cudaEventDestroy(done_);
}

std::string NcclComm::others() const {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r)
        if (r != rank()) ranks.push_back(world_ranks_[static_cast<std::size_t>(r)]);
    return fmt::format("{}", fmt::join(ranks, " or "));
}

void NcclComm::check_alive(const char* operation) const {
    require(comm_ != nullptr, ExitCode::peer, "rank {}: {} ({}) after another rank was lost",
            own_world_rank(), operation, group_.activity());
}

// Ends NCCL's kernels, so that the device can become idle.
void NcclComm::abandon(cudaStream_t stream) {
    if (comm_ != nullptr) ncclCommAbort(comm_);
    comm_ = nullptr;
    const auto start = Clock::now();
    while (cudaStreamQuery(stream) == cudaErrorNotReady && Clock::now() - start < kFinaliseLimit)
        pause(start);
    cudaGetLastError();
}

void NcclComm::fail_late(const char* operation, double seconds, cudaStream_t stream) {
    abandon(stream);
    fail(ExitCode::peer,
         "rank {}: no answer from rank {} for {:g} s in {} ({}); parallel.peer_deadline_seconds is the limit",
         own_world_rank(), others(), seconds, operation, group_.activity());
}

void NcclComm::fail_broken(const char* operation, ncclResult_t status, cudaStream_t stream) {
    abandon(stream);
    fail(ExitCode::peer, "rank {}: NCCL between this rank and rank {} failed in {} ({}): {}",
         own_world_rank(), others(), operation, group_.activity(), ncclGetErrorString(status));
}

// Waits until the call is complete on the host: NCCL connects to peers in the background.
void NcclComm::wait_for_host(ncclResult_t status, const char* operation, double deadline_seconds,
                             cudaStream_t stream) {
    const auto start = Clock::now();
    while (status == ncclInProgress) {
        if (is_past(start, deadline_seconds)) fail_late(operation, deadline_seconds, stream);
        pause(start);
        status = state();
    }
    if (status != ncclSuccess) fail_broken(operation, status, stream);
}

ncclResult_t NcclComm::state() const {
    ncclResult_t status = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &status);
    return asked != ncclSuccess ? asked : status;
}

void NcclComm::send_receive(const char* operation, const Messages& messages, cudaStream_t stream) {
    check_alive(operation);
    ncclResult_t status = ncclGroupStart();
    const auto check = [&](ncclResult_t result) {
        if (result != ncclSuccess && result != ncclInProgress) status = result;
    };
    for (const auto& [data, bytes, peer] : messages.sends)
        check(ncclSend(data, static_cast<std::size_t>(bytes), ncclUint8, peer, comm_, stream));
    for (const auto& [data, bytes, peer] : messages.receives)
        check(ncclRecv(data, static_cast<std::size_t>(bytes), ncclUint8, peer, comm_, stream));
    const ncclResult_t end = ncclGroupEnd();
    wait_for_host(status == ncclSuccess ? end : status, operation, deadline_seconds_, stream);
}

void NcclComm::all_gather(const char* operation, void* data, int64_t bytes, cudaStream_t stream) {
    check_alive(operation);
    if (bytes == 0) return;
    wait_for_host(ncclAllGather(static_cast<const uint8_t*>(data) + rank() * bytes, data,
                                static_cast<std::size_t>(bytes), ncclUint8, comm_, stream),
                  operation, deadline_seconds_, stream);
}

void NcclComm::finish(ncclResult_t status, const char* operation) {
    wait_for_host(status, operation, deadline_seconds_, nullptr);
}

void NcclComm::wait(const char* operation, cudaStream_t stream) {
    check_alive(operation);
    check_cuda(cudaEventRecord(done_, stream), "recording an event");
    const auto start = Clock::now();
    while (!is_done(done_)) {
        if (is_past(start, deadline_seconds_)) fail_late(operation, deadline_seconds_, stream);
        const ncclResult_t status = state();
        if (status != ncclSuccess && status != ncclInProgress) fail_broken(operation, status, stream);
        pause(start);
    }
}

}  // namespace fp8flow::hopper::nccl
