// SPDX-License-Identifier: MIT
// ProcessGroup: collectives between the ranks of a job, over MPI between processes or over shared memory
// between threads of one process (tests). Host memory; every wait has a deadline. All ranks of the group call
// the same methods in the same order.
#pragma once

#include "kernels/core/dtype.h"
#include "kernels/core/shards.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fp8flow {

class ProcessGroup {
public:
    virtual ~ProcessGroup() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;

    // Named in the message when a wait passes its deadline: "step 12, stage dispatch". Groups made by split
    // share it.
    void set_activity(std::string activity) { *activity_ = std::move(activity); }
    const std::string& activity() const { return *activity_; }

    void barrier();
    // Rank r's bytes go to recv + r * bytes. `send` may be this rank's part of `recv`.
    void all_gather(const void* send, std::size_t bytes, void* recv);
    // Bytes send_parts[r] of `send` go to rank r; sizes are known on both sides (zero is legal).
    // send_parts[rank] is copied locally.
    struct Part {
        std::size_t offset = 0, bytes = 0;
    };
    void all_to_all(const void* send, std::span<const Part> send_parts, void* recv,
                    std::span<const Part> recv_parts);
    void broadcast(void* data, std::size_t bytes, int root);
    void broadcast(std::string& text, int root);  // of any length
    // A new group of the ranks with the same color, ordered by key, then by rank (as MPI_Comm_split).
    virtual std::unique_ptr<ProcessGroup> split(int color, int key) = 0;
    std::unique_ptr<ProcessGroup> split(int color) { return split(color, 0); }

    // A number that identifies the host of each rank; for set-up. Collective over all ranks of the job.
    virtual std::vector<int> hosts() { return std::vector<int>(static_cast<std::size_t>(size()), 0); }

    // In place: element-wise FP32 sum in ascending rank order, as a reduce-scatter and an all-gather. The
    // same bits on every rank and with every transport.
    void all_reduce_sum(std::span<float> values);
    void all_reduce_sum(std::span<Bf16> values);  // in FP32, rounded to nearest even at the end
    void all_reduce_sum(std::span<double> values);
    void all_reduce_sum(std::span<int64_t> values);
    void all_reduce_max(std::span<float> values);  // NaN only where every rank has NaN
    void all_reduce_max(std::span<int64_t> values);
    bool all_true(bool here);  // on every rank of the group
    // This rank's shard becomes the sum over the ranks, with the bits of all_reduce_sum. The rest is not
    // changed. T: float, Bf16 or int64_t.
    template <class T> void reduce_scatter_sum(std::span<T> values, const Shards& shards);
    // Every rank receives every shard of `data`. Elements have `element_bytes`.
    void all_gather_shards(void* data, std::size_t element_bytes, const Shards& shards);

protected:
    explicit ProcessGroup(std::shared_ptr<std::string> activity) : activity_(std::move(activity)) {}
    const std::shared_ptr<std::string>& shared_activity() const { return activity_; }

    // For split: the arguments of every rank, and the ranks of a color in their new order.
    struct SplitKey {
        int color = 0, key = 0;
    };
    static std::vector<std::size_t> members_of(int color, std::span<const SplitKey> keys);

    // The one operation of a transport: an all_to_all. `operation` names the collective in errors. Returns
    // when everything has arrived and `send` may be reused. Throws Error(peer) past the deadline, or if a
    // peer sends other sizes than this rank expects.
    virtual void transfer(const char* operation, const void* send, std::span<const Part> send_parts,
                          void* recv, std::span<const Part> recv_parts) = 0;

private:
    template <class T, class Reduce>
    void all_reduce(const char* operation, std::span<T> values, Reduce reduce);
    std::byte* scratch(std::size_t bytes);

    std::shared_ptr<std::string> activity_;
    std::vector<std::byte> scratch_;  // of reductions and gathers
};

// Over MPI; MPI_Init must have been called. Waits poll and throw Error(peer) after `deadline_seconds` without
// progress; pending messages may still write into the caller's buffers then, so the process must end.
std::unique_ptr<ProcessGroup> make_mpi_group(double deadline_seconds);
// `size` groups for as many threads of this process. An error in one rank's collective, or a group destroyed
// while others wait for it, fails the waits of all others at once.
std::vector<std::unique_ptr<ProcessGroup>> make_thread_groups(int size, double deadline_seconds);
// Runs `body` as `size` ranks on as many threads. A rank that throws, or returns while others wait for it,
// fails their waits at once; the exception of the rank that failed first is rethrown here.
void run_thread_ranks(int size, double deadline_seconds, const std::function<void(ProcessGroup&)>& body);

}  // namespace fp8flow
