// SPDX-License-Identifier: MIT
// ProcessGroup over MPI: non-blocking point-to-point messages, polled until all are done or the deadline
// passes, so that a dead or stalled peer is reported. A group is a list of ranks with its own tag on one
// communicator. Only hosts() uses a blocking MPI call.
#include "kernels/comm/process_group.h"
#include "kernels/comm/progress.h"
#include "kernels/core/error.h"

#include <fmt/ranges.h>
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <set>
#include <thread>

namespace fp8flow {

namespace {

using Clock = std::chrono::steady_clock;

// Messages are sent in pieces: MPI counts are int, and each piece that arrives is progress.
constexpr std::size_t kPieceBytes = std::size_t{64} << 20;
// Polling yields the core at first; after this long without progress it sleeps between polls, to leave the
// cores to the late peer.
constexpr std::chrono::milliseconds kYieldFor{100};
constexpr std::chrono::microseconds kPollInterval{50};

std::string text_of(int code) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return text;
}

// A pending piece of a message.
struct Piece {
    int peer;
    int bytes;  // -1: a send
};

// State shared by all groups of this process.
struct World {
    MPI_Comm comm = MPI_COMM_NULL;
    double deadline_seconds = 0;
    int next_tag = 1;

    ~World() {
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (!finalized && comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
    }
};

class MpiGroup final : public ProcessGroup {
public:
    MpiGroup(std::shared_ptr<World> world, std::vector<int> members, int rank, int tag,
             std::shared_ptr<std::string> activity)
        : ProcessGroup(std::move(activity)),
          world_(std::move(world)),
          members_(std::move(members)),
          rank_(rank),
          tag_(tag) {}
    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(members_.size()); }
    std::unique_ptr<ProcessGroup> split(int color, int key) override;
    std::vector<int> hosts() override;

    void duplicate_world();

protected:
    void transfer(const char* operation, const void* send, std::span<const Part> send_parts, void* recv,
                  std::span<const Part> recv_parts) override;

private:
    void check(int code, const char* operation, int peer);
    void wait(const char* operation);
    [[noreturn]] void fail_late(const char* operation);

    std::shared_ptr<World> world_;
    std::vector<int> members_;  // ranks of the world
    int rank_;
    int tag_;
    std::vector<MPI_Request> requests_;
    std::vector<Piece> pieces_;  // of requests_
    std::vector<int> done_;
    std::vector<MPI_Status> statuses_;
};

void MpiGroup::check(int code, const char* operation, int peer) {
    require(code == MPI_SUCCESS, ExitCode::peer, "rank {}: message from or to rank {} failed in {} ({}): {}",
            members_[static_cast<std::size_t>(rank_)], peer, operation, activity(), text_of(code));
}

void MpiGroup::fail_late(const char* operation) {
    std::set<int> peers;
    for (std::size_t i = 0; i < requests_.size(); ++i)
        if (requests_[i] != MPI_REQUEST_NULL) peers.insert(pieces_[i].peer);
    for (std::size_t i = 0; i < requests_.size(); ++i)
        if (requests_[i] != MPI_REQUEST_NULL && pieces_[i].bytes >= 0) MPI_Cancel(&requests_[i]);
    fail(ExitCode::peer,
         "rank {}: no answer from rank {} for {:g} s in {} ({}); parallel.peer_deadline_seconds is the limit",
         members_[static_cast<std::size_t>(rank_)], fmt::join(peers, ", "), world_->deadline_seconds,
         operation, activity());
}

void MpiGroup::wait(const char* operation) {
    const int count = static_cast<int>(requests_.size());
    done_.resize(requests_.size());
    statuses_.resize(requests_.size());
    const std::chrono::duration<double> deadline(world_->deadline_seconds);
    // While another rank of this host makes progress, this rank keeps waiting. The watchdog uses the same
    // clock.
    const auto host_progress = [] { return Clock::time_point(std::chrono::nanoseconds(newest_progress())); };
    const Waiting waiting;
    auto last_progress = Clock::now();
    while (true) {
        int num_done = 0;
        const int code = MPI_Testsome(count, requests_.data(), &num_done, done_.data(), statuses_.data());
        if (num_done == MPI_UNDEFINED) return;
        if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check(code, operation, -1);
        for (int i = 0; i < num_done; ++i) {
            const MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
            const Piece piece = pieces_[static_cast<std::size_t>(done_[static_cast<std::size_t>(i)])];
            if (code == MPI_ERR_IN_STATUS) check(status.MPI_ERROR, operation, piece.peer);
            if (piece.bytes < 0) continue;
            int received = 0;
            MPI_Get_count(&status, MPI_BYTE, &received);
            require(received == piece.bytes, ExitCode::peer,
                    "rank {}: rank {} sends {} bytes, expected {} in {} ({})",
                    members_[static_cast<std::size_t>(rank_)], piece.peer, received, piece.bytes, operation,
                    activity());
        }
        const auto now = Clock::now();
        if (num_done > 0) {
            last_progress = now;
        } else if (members_.size() > 1 && now - last_progress > deadline &&
                   now - host_progress() > deadline) {
            fail_late(operation);
        } else if (now - last_progress > kYieldFor) {
            std::this_thread::sleep_for(kPollInterval);
        } else {
            sched_yield();
        }
    }
}

void MpiGroup::transfer(const char* operation, const void* send, std::span<const Part> send_parts, void* recv,
                        std::span<const Part> recv_parts) {
    requests_.clear();
    pieces_.clear();
    const auto ranks = members_.size(), self = static_cast<std::size_t>(rank_);
    const auto begin = [&](std::size_t peer, Part part, bool is_send) {
        for (std::size_t at = 0; at < part.bytes; at += kPieceBytes) {
            const int bytes = static_cast<int>(std::min(kPieceBytes, part.bytes - at));
            const std::size_t offset = part.offset + at;
            MPI_Request request = MPI_REQUEST_NULL;
            const int code = is_send ? MPI_Isend(static_cast<const std::byte*>(send) + offset, bytes,
                                                 MPI_BYTE, members_[peer], tag_, world_->comm, &request)
                                     : MPI_Irecv(static_cast<std::byte*>(recv) + offset, bytes, MPI_BYTE,
                                                 members_[peer], tag_, world_->comm, &request);
            check(code, operation, members_[peer]);
            requests_.push_back(request);
            pieces_.push_back({members_[peer], is_send ? -1 : bytes});
        }
    };
    // Each rank starts with its successor, so that not all ranks send to rank 0 first.
    for (std::size_t i = 1; i < ranks; ++i)
        begin((self + ranks - i) % ranks, recv_parts[(self + ranks - i) % ranks], false);
    for (std::size_t i = 1; i < ranks; ++i) begin((self + i) % ranks, send_parts[(self + i) % ranks], true);
    if (send_parts[self].bytes > 0) {
        const std::byte* from = static_cast<const std::byte*>(send) + send_parts[self].offset;
        std::byte* to = static_cast<std::byte*>(recv) + recv_parts[self].offset;
        if (from != to) std::memcpy(to, from, send_parts[self].bytes);
    }
    wait(operation);
}

std::unique_ptr<ProcessGroup> MpiGroup::split(int color, int key) {
    struct Proposal {
        SplitKey key;
        int next_tag;
    };
    const Proposal mine{{color, key}, world_->next_tag};
    std::vector<Proposal> proposals(members_.size());
    all_gather(&mine, sizeof mine, proposals.data());
    std::vector<SplitKey> keys;
    int tag = 0;  // not used by any member; disjoint groups of one split may have the same
    for (const Proposal& proposal : proposals) {
        keys.push_back(proposal.key);
        tag = std::max(tag, proposal.next_tag);
    }
    std::vector<int> members;
    int rank = 0;
    for (const std::size_t r : members_of(color, keys)) {
        if (r == static_cast<std::size_t>(rank_)) rank = static_cast<int>(members.size());
        members.push_back(members_[r]);
    }
    world_->next_tag = tag + 1;
    return std::make_unique<MpiGroup>(world_, std::move(members), rank, tag, shared_activity());
}

// A host's number is its lowest rank in the job.
std::vector<int> MpiGroup::hosts() {
    int lowest = 0;
    {
        const Waiting waiting;
        MPI_Comm host = MPI_COMM_NULL;
        check(MPI_Comm_split_type(world_->comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host),
              "MPI_Comm_split_type", 0);
        MPI_Group there = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
        MPI_Comm_group(host, &there);
        MPI_Comm_group(world_->comm, &all);
        const int first = 0;
        MPI_Group_translate_ranks(there, 1, &first, all, &lowest);
        MPI_Group_free(&there);
        MPI_Group_free(&all);
        MPI_Comm_free(&host);
    }
    std::vector<int> hosts(members_.size());
    all_gather(&lowest, sizeof lowest, hosts.data());
    return hosts;
}

// A communicator of its own, so that messages of other libraries cannot match.
void MpiGroup::duplicate_world() {
    requests_.resize(1);
    pieces_.assign(1, {0, -1});
    check(MPI_Comm_idup(MPI_COMM_WORLD, &world_->comm, &requests_[0]), "MPI_Comm_idup", 0);
    wait("MPI_Comm_idup");
    check(MPI_Comm_set_errhandler(world_->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", 0);
}

}  // namespace

std::unique_ptr<ProcessGroup> make_mpi_group(double deadline_seconds) {
    FP8FLOW_CHECK(deadline_seconds > 0, "deadline {} s", deadline_seconds);
    int initialized = 0, rank = 0, size = 0;
    MPI_Initialized(&initialized);
    FP8FLOW_CHECK(initialized != 0, "call MPI_Init first");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    auto world = std::make_shared<World>();
    world->deadline_seconds = deadline_seconds;
    std::vector<int> members(static_cast<std::size_t>(size));
    std::iota(members.begin(), members.end(), 0);
    auto group = std::make_unique<MpiGroup>(std::move(world), std::move(members), rank, 0,
                                            std::make_shared<std::string>("start-up"));
    group->duplicate_world();
    return group;
}

}  // namespace fp8flow
