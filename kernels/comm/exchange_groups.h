// SPDX-License-Identifier: MIT
// ExchangeGroups: the groups of ranks that an exchange works among, and where they are. The groups outlive
// the exchange.
#pragma once

#include "kernels/comm/host_layout.h"
#include "kernels/comm/process_group.h"
#include "kernels/exchange.h"

#include <utility>

namespace fp8flow {

struct ExchangeGroups {
    ExchangeGroups(ProcessGroup& all, ProcessGroup& sharing_experts, ProcessGroup& with_same_experts,
                   int rank_in_messages = -1, HostLayout hosts_of_sharing = {})
        : world(all),
          expert_parallel(sharing_experts),
          expert_replicas(&with_same_experts),
          job_rank(rank_in_messages),
          hosts(std::move(hosts_of_sharing)) {}
    // All ranks share the experts, and experts have no replicas. Implicit: callers with one group pass it.
    // NOLINTNEXTLINE(google-explicit-constructor)
    ExchangeGroups(ProcessGroup& all, int rank_in_messages = -1, HostLayout its_hosts = {})
        : world(all), expert_parallel(all), job_rank(rank_in_messages), hosts(std::move(its_hosts)) {}

    ProcessGroup& world;
    ProcessGroup& expert_parallel;            // the ranks that share the experts
    ProcessGroup* expert_replicas = nullptr;  // the ranks with the same experts; null: this rank alone
    int job_rank;                             // names this rank in messages; -1: its rank in `world`
    HostLayout hosts;  // of expert_parallel, to count what crosses them; default: one host

    int rank_of_job() const { return job_rank < 0 ? world.rank() : job_rank; }
    // Of more than one rank.
    ProcessGroup& among(Ranks ranks) const { return ranks == Ranks::world ? world : *expert_replicas; }
    Exchange::Places places() const {
        const auto place = [](const ProcessGroup& group) {
            return Exchange::Place{group.rank(), group.size()};
        };
        return {place(expert_parallel), place(world),
                expert_replicas != nullptr ? place(*expert_replicas) : Exchange::Place{}};
    }
};

}  // namespace fp8flow
