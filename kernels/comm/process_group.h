// ProcessGroup: what the ranks of a job say to each other: over MPI between processes, or over shared memory between threads of one
// process (tests). Host memory; every wait has a deadline. All ranks of the group call the same methods in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
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

    // Named in the message when a wait passes its deadline: "step 12, stage dispatch".
    void set_activity(std::string activity) { activity_ = std::move(activity); }
    const std::string& activity() const { return activity_; }

    virtual void barrier() = 0;
    // recv[r * bytes ...] = what rank r sent.
    virtual void all_gather(const void* send, std::size_t bytes, void* recv) = 0;
    // Bytes send_counts[r] from send + send_offsets[r] go to rank r; sizes are known on both sides (zero is legal).
    struct Part {
        std::size_t offset = 0, bytes = 0;
    };
    virtual void all_to_all(const void* send, std::span<const Part> send_parts, void* recv,
                            std::span<const Part> recv_parts) = 0;
    virtual void broadcast(void* data, std::size_t bytes, int root) = 0;
    // A new group of the ranks with the same color, ordered by rank.
    virtual std::unique_ptr<ProcessGroup> split(int color) = 0;

    // --- built on the above, the same for every transport ---
    // In place: element-wise fp32 sum in ascending rank order (shards exchanged, summed by their owner, gathered): the same bits on every
    // rank and for every transport.
    void all_reduce_sum(std::span<float> values);
    void all_reduce_sum(std::span<double> values);
    void all_reduce_sum(std::span<int64_t> values);
    void all_reduce_max(std::span<float> values);
    void all_reduce_max(std::span<int64_t> values);

private:
    std::string activity_ = "start-up";
};

// Over MPI; MPI_Init must have been called. Waits poll and throw Error(peer) after `deadline_seconds`.
std::unique_ptr<ProcessGroup> make_mpi_group(double deadline_seconds);
// `size` groups for as many threads of this process.
std::vector<std::unique_ptr<ProcessGroup>> make_thread_groups(int size, double deadline_seconds);

}  // namespace fp8flow
