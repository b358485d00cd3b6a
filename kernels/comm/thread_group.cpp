// SPDX-License-Identifier: MIT
// ProcessGroup between threads of one process: ranks publish their send buffers, synchronise, copy their
// parts, and synchronise again. For tests of communication between ranks without mpirun. One mutex and one
// condition variable per job: simple rather than fast.
#include "kernels/comm/process_group.h"
#include "kernels/core/error.h"

#include <fmt/ranges.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

namespace fp8flow {

namespace {

using Clock = std::chrono::steady_clock;

// State of all ranks. Job::mutex guards every field of Job and Team.
struct Job {
    std::mutex mutex;
    std::condition_variable changed;
    std::chrono::duration<double> deadline{};
    std::string failure;  // the first error of any rank; empty: none
    int failed_rank = -1;
    bool supervised = false;  // run_thread_ranks reports the exception that ends a rank

    void record_failure(int rank, const std::string& what) {
        if (failed_rank >= 0) return;
        failed_rank = rank;
        failure = what;
        changed.notify_all();
    }
};

// One group of the job.
struct Team {
    // What a member publishes for a transfer. Valid until all members have copied.
    struct Post {
        const char* operation = nullptr;
        const std::byte* send = nullptr;
        std::span<const ProcessGroup::Part> send_parts;
    };
    Team(std::shared_ptr<Job> its_job, std::vector<int> ranks)
        : job(std::move(its_job)),
          members(std::move(ranks)),
          posts(members.size()),
          offers(members.size()),
          here(members.size()),
          gone(members.size()) {}

    std::shared_ptr<Job> job;
    std::vector<int> members;  // ranks of the job
    std::vector<Post> posts;
    std::vector<std::shared_ptr<Team>> offers;  // teams made by split, until their members have taken them
    std::vector<bool> here, gone;               // arrived at the barrier; group object destroyed
    std::size_t num_here = 0;
    uint64_t num_barriers = 0;
};

class ThreadGroup final : public ProcessGroup {
public:
    ThreadGroup(std::shared_ptr<Team> team, int rank, std::shared_ptr<std::string> activity)
        : ProcessGroup(std::move(activity)),
          team_(std::move(team)),
          rank_(rank),
          self_(static_cast<std::size_t>(rank)) {}
    ~ThreadGroup() override {
        const std::lock_guard lock(team_->job->mutex);
        if (team_->job->supervised && std::uncaught_exceptions() > 0) return;
        team_->gone[self_] = true;
        team_->job->changed.notify_all();
    }
    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(team_->members.size()); }
    std::unique_ptr<ProcessGroup> split(int color, int key) override;
    const std::shared_ptr<Job>& job() const { return team_->job; }

protected:
    void transfer(const char* operation, const void* send, std::span<const Part> send_parts, void* recv,
                  std::span<const Part> recv_parts) override;

private:
    int job_rank() const { return team_->members[self_]; }
    void arrive();
    void await_posts(const char* operation);
    void await_copies();
    [[noreturn]] void fail_here(const char* operation, const std::string& why);

    std::shared_ptr<Team> team_;
    int rank_;
    std::size_t self_;
};

// Call with the mutex held.
void ThreadGroup::fail_here(const char* operation, const std::string& why) {
    const std::string message = fmt::format("rank {}: {} in {} ({})", job_rank(), why, operation, activity());
    job()->record_failure(job_rank(), message);
    throw Error(ExitCode::peer, message);
}

// Records the arrival of this rank, and wakes the others if it is the last. Call with the mutex held.
void ThreadGroup::arrive() {
    team_->here[self_] = true;
    if (++team_->num_here < team_->members.size()) return;
    team_->here.assign(team_->members.size(), false);
    team_->num_here = 0;
    ++team_->num_barriers;
    job()->changed.notify_all();
}

// Waits until every member has arrived; what members posted before is then visible to all.
void ThreadGroup::await_posts(const char* operation) {
    const Team& team = *team_;
    std::unique_lock lock(job()->mutex);
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(job()->deadline);
    const auto missing = [&](bool only_gone) {
        std::vector<int> ranks;
        for (std::size_t r = 0; r < team.members.size(); ++r)
            if (!team.here[r] && (team.gone[r] || !only_gone)) ranks.push_back(team.members[r]);
        return ranks;
    };
    const auto check_failure = [&] {
        if (job()->failed_rank < 0) return;
        fail_here(operation, fmt::format("stopped by the failure of another ({})", job()->failure));
    };
    check_failure();  // before arriving: a failed rank does not come back to the barrier
    const uint64_t barrier_number = team.num_barriers;
    arrive();
    while (team.num_barriers == barrier_number) {
        check_failure();
        if (const auto ranks = missing(true); !ranks.empty())
            fail_here(operation, fmt::format("rank {} left the group while awaited", fmt::join(ranks, ", ")));
        if (Clock::now() >= deadline)
            fail_here(operation, fmt::format("no answer from rank {} for {:g} s",
                                             fmt::join(missing(false), ", "), job()->deadline.count()));
        job()->changed.wait_until(lock, deadline);
    }
}

// Waits until every member has copied; without a deadline, because copies end. After a failure, too, a rank
// may not return earlier: the others still read its buffers.
void ThreadGroup::await_copies() {
    std::unique_lock lock(job()->mutex);
    const uint64_t barrier_number = team_->num_barriers;
    arrive();
    job()->changed.wait(lock, [&] { return team_->num_barriers != barrier_number; });
}

void ThreadGroup::transfer(const char* operation, const void* send, std::span<const Part> send_parts,
                           void* recv, std::span<const Part> recv_parts) {
    {
        const std::lock_guard lock(job()->mutex);
        team_->posts[self_] = {operation, static_cast<const std::byte*>(send), send_parts};
    }
    await_posts(operation);
    std::string mismatch;
    for (std::size_t r = 0; r < team_->members.size(); ++r) {
        const Team::Post& peer = team_->posts[r];
        const Part from = peer.send_parts[self_], to = recv_parts[r];
        if (std::strcmp(peer.operation, operation) != 0 || from.bytes != to.bytes) {
            mismatch = fmt::format("rank {} sends {} bytes by {}, expected {}", team_->members[r], from.bytes,
                                   peer.operation, to.bytes);
            continue;
        }
        std::byte* target = static_cast<std::byte*>(recv) + to.offset;
        if (from.bytes > 0 && target != peer.send + from.offset)
            std::memcpy(target, peer.send + from.offset, from.bytes);
    }
    await_copies();
    if (mismatch.empty()) return;
    const std::lock_guard lock(job()->mutex);
    fail_here(operation, mismatch);
}

std::unique_ptr<ProcessGroup> ThreadGroup::split(int color, int key) {
    const SplitKey own{color, key};
    std::vector<SplitKey> keys(team_->members.size());
    all_gather(&own, sizeof own, keys.data());
    const std::vector<std::size_t> ranks = members_of(color, keys);
    const std::size_t leader = ranks[0];
    std::vector<int> members;
    int rank = 0;
    for (const std::size_t r : ranks) {
        if (r == self_) rank = static_cast<int>(members.size());
        members.push_back(team_->members[r]);
    }
    if (leader == self_) {
        const std::lock_guard lock(job()->mutex);
        team_->offers[self_] = std::make_shared<Team>(team_->job, members);
    }
    barrier();
    std::shared_ptr<Team> team;
    {
        const std::lock_guard lock(job()->mutex);
        team = team_->offers[leader];
    }
    barrier();  // all members have their team
    return std::make_unique<ThreadGroup>(std::move(team), rank, shared_activity());
}

}  // namespace

std::vector<std::unique_ptr<ProcessGroup>> make_thread_groups(int size, double deadline_seconds) {
    FP8FLOW_CHECK(size >= 1 && deadline_seconds > 0, "{} ranks, deadline {} s", size, deadline_seconds);
    const auto job = std::make_shared<Job>();
    job->deadline = std::chrono::duration<double>(deadline_seconds);
    std::vector<int> members(static_cast<std::size_t>(size));
    std::iota(members.begin(), members.end(), 0);
    const auto team = std::make_shared<Team>(job, members);
    std::vector<std::unique_ptr<ProcessGroup>> groups;
    groups.reserve(members.size());
    for (int r = 0; r < size; ++r)
        groups.push_back(std::make_unique<ThreadGroup>(team, r, std::make_shared<std::string>("start-up")));
    return groups;
}

void run_thread_ranks(int size, double deadline_seconds, const std::function<void(ProcessGroup&)>& body) {
    auto groups = make_thread_groups(size, deadline_seconds);
    const std::shared_ptr<Job> job = static_cast<ThreadGroup&>(*groups[0]).job();
    job->supervised = true;
    std::vector<std::exception_ptr> errors(groups.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < groups.size(); ++r) {
        threads.emplace_back([&, r] {
            std::string what;
            try {
                body(*groups[r]);
            } catch (const std::exception& error) {
                what = error.what();
                errors[r] = std::current_exception();
            } catch (...) {
                what = "unknown exception";
                errors[r] = std::current_exception();
            }
            if (errors[r]) {
                const std::lock_guard lock(job->mutex);
                job->record_failure(static_cast<int>(r), what);
            }
            groups[r].reset();  // a rank that returns too early fails the waits of the others
        });
    }
    for (std::thread& thread : threads) thread.join();
    if (job->failed_rank >= 0 && errors[static_cast<std::size_t>(job->failed_rank)])
        std::rethrow_exception(errors[static_cast<std::size_t>(job->failed_rank)]);
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

}  // namespace fp8flow
