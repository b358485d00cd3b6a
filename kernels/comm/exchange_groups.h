// SPDX-License-Identifier: MIT
// ExchangeGroups: the process groups of an exchange, and the hosts of their ranks. The groups outlive the
// exchange.
#pragma once

#include "kernels/comm/host_layout.h"
#include "kernels/comm/process_group.h"
#include "kernels/exchange.h"

#include <utility>

namespace fp8flow {

struct ExchangeGroups {
    ExchangeGroups(ProcessGroup& all, ProcessGroup& expert_parallel_group, ProcessGroup& replicas,
                   int rank_in_job = -1, HostLayout hosts_of_group = {})
        : world(all),
          expert_parallel(expert_parallel_group),
          expert_replicas(&replicas),
          job_rank(rank_in_job),
          hosts(std::move(hosts_of_group)) {}
    // One expert-parallel group of all ranks, without replicas. Implicit: callers with one group pass it.
    // NOLINTNEXTLINE(google-explicit-constructor)
    ExchangeGroups(ProcessGroup& all, int rank_in_job = -1, HostLayout hosts_of_group = {})
        : world(all), expert_parallel(all), job_rank(rank_in_job), hosts(std::move(hosts_of_group)) {}

    ProcessGroup& world;
    ProcessGroup& expert_parallel;
    ProcessGroup* expert_replicas = nullptr;  // the ranks with the same experts; null: this rank alone
    int job_rank;                             // names this rank in messages; -1: its rank in `world`
    HostLayout hosts;  // of expert_parallel, to count the bytes between hosts; default: one host

    int rank_of_job() const { return job_rank < 0 ? world.rank() : job_rank; }
    // Call it for groups of more than one rank.
    ProcessGroup& among(Ranks ranks) const { return ranks == Ranks::world ? world : *expert_replicas; }
    Exchange::GroupRanks group_ranks() const {
        const auto rank_in = [](const ProcessGroup& group) {
            return Exchange::GroupRank{group.rank(), group.size()};
        };
        return {rank_in(expert_parallel), rank_in(world),
                expert_replicas != nullptr ? rank_in(*expert_replicas) : Exchange::GroupRank{}};
    }
};

}  // namespace fp8flow
