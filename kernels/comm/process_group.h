// SPDX-License-Identifier: MIT
// ProcessGroup: collectives between the ranks of a job, over MPI between processes or over shared memory
// between threads of one process (tests). Host memory; every wait has a deadline. All ranks of the group call
// the same methods in the same order.
#pragma once

#include "kernels/core/dtype.h"
#include "kernels/core/shares.h"

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
    // recv[r * bytes ...] = what rank r sent. `send` may be this rank's part of `recv`.
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
    // A new group of the ranks with the same color, in ascending order of `order`, equal ones by rank.
    virtual std::unique_ptr<ProcessGroup> split(int color, int order) = 0;
    std::unique_ptr<ProcessGroup> split(int color) { return split(color, 0); }

    // The host of every rank, by any number; for set-up. Collective over all ranks of the job.
    virtual std::vector<int> hosts() { return std::vector<int>(static_cast<std::size_t>(size()), 0); }

    // In place: element-wise fp32 sum in ascending rank order (shards exchanged, summed by their owner,
    // gathered): the same bits on every rank and for every transport.
    void all_reduce_sum(std::span<float> values);
    void all_reduce_sum(std::span<Bf16> values);  // in FP32, rounded to nearest even at the end
    void all_reduce_sum(std::span<double> values);
    void all_reduce_sum(std::span<int64_t> values);
    void all_reduce_max(std::span<float> values);  // NaN only where every rank has NaN
    void all_reduce_max(std::span<int64_t> values);
    bool all_true(bool here);  // on every rank of the group
    // This rank's share becomes the sum over the ranks, with the bits of all_reduce_sum; the rest stays.
    // T: float, Bf16 or int64_t.
    template <class T> void reduce_scatter_sum(std::span<T> values, const Shares& shares);
    // Every rank's share of `data`, elements of so many bytes, comes to all.
    void all_gather_shares(void* data, std::size_t element_bytes, const Shares& shares);

protected:
    explicit ProcessGroup(std::shared_ptr<std::string> activity) : activity_(std::move(activity)) {}
    const std::shared_ptr<std::string>& shared_activity() const { return activity_; }

    // For split: what every rank of a group says, and the ranks of a color in their new order.
    struct Seat {
        int color = 0, order = 0;
    };
    static std::vector<std::size_t> members_of(int color, std::span<const Seat> seats);

    // The one operation of a transport: all_to_all under the name of the collective it is part of. Returns
    // when everything has arrived and `send` may be reused; throws Error(peer) past the deadline, and where a
    // peer's sizes differ from those that this rank expects.
    virtual void transfer(const char* operation, const void* send, std::span<const Part> send_parts,
                          void* recv, std::span<const Part> recv_parts) = 0;

private:
    template <class T, class Reduce>
    void all_reduce(const char* operation, std::span<T> values, Reduce reduce);
    std::byte* scratch(std::size_t bytes);

    std::shared_ptr<std::string> activity_;
    std::vector<std::byte> scratch_;  // of reductions and gathers of shares; grows once
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
