// SPDX-License-Identifier: MIT
// NcclComm: one NCCL communicator with deadlines. Calls queue transfers on a stream; wait() returns when they
// are complete, or throws. NCCL does not report which rank is late, so the error names all others. A
// communicator that failed is aborted: NCCL's kernels end, and every later call throws. Only sends, receives
// and all-gathers are used, so that the order of sums does not depend on NCCL.
#pragma once

#include "kernels/comm/process_group.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fp8flow::hopper::nccl {

class NcclComm {
public:
    struct Message {
        void* data = nullptr;
        int64_t bytes = 0;
        int peer = 0;
    };
    // Messages of one operation, without those to this rank (`own`) and without empty ones.
    struct Messages {
        int own = 0;
        std::vector<Message> sends = {}, receives = {};
        void send(void* data, int64_t bytes, int to) {
            if (to != own && bytes > 0) sends.push_back({data, bytes, to});
        }
        void receive(void* data, int64_t bytes, int from) {
            if (from != own && bytes > 0) receives.push_back({data, bytes, from});
        }
    };

    // Collective over `group`, which outlives this; `world_rank` names this rank in messages.
    NcclComm(ProcessGroup& group, int world_rank, double deadline_seconds);
    ~NcclComm();
    NcclComm(const NcclComm&) = delete;
    NcclComm& operator=(const NcclComm&) = delete;

    int rank() const { return group_.rank(); }
    int size() const { return group_.size(); }

    // All messages in one NCCL group. Two ranks must list the messages between them in the same order.
    void send_receive(const char* operation, const Messages& messages, cudaStream_t stream);
    // In place: rank r contributes the bytes at data + r * bytes.
    void all_gather(const char* operation, void* data, int64_t bytes, cudaStream_t stream);
    // For calls without a wrapper here: the communicator, and the wait until NCCL's asynchronous part of the
    // call on the host is complete.
    ncclComm_t handle() const { return comm_; }
    void finish(ncclResult_t status, const char* operation);
    // Waits on the host for the stream. Throws Error(peer) past the deadline.
    void wait(const char* operation, cudaStream_t stream);

private:
    using Clock = std::chrono::steady_clock;
    void start(double deadline_seconds);
    void check_alive(const char* operation) const;
    void wait_for_host(ncclResult_t status, const char* operation, double deadline_seconds,
                       cudaStream_t stream);
    ncclResult_t state() const;
    void abandon(cudaStream_t stream);
    [[noreturn]] void fail_late(const char* operation, double seconds, cudaStream_t stream);
    [[noreturn]] void fail_broken(const char* operation, ncclResult_t status, cudaStream_t stream);
    int own_world_rank() const { return world_ranks_[static_cast<std::size_t>(rank())]; }
    std::string others() const;

    ProcessGroup& group_;
    double deadline_seconds_;
    std::vector<int> world_ranks_;  // of the group's ranks
    ncclComm_t comm_ = nullptr;     // null once aborted
    cudaEvent_t done_ = nullptr;
};

}  // namespace fp8flow::hopper::nccl
