// SPDX-License-Identifier: MIT
// HostLayout: which host each rank of a group is on. The local rank is the number of a rank among the ranks
// of the group on its host. Ranks with the same local rank, one per host, form a rail.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fp8flow {

class HostLayout {
public:
    // Hosts are not known: all ranks count as one host.
    HostLayout() = default;
    // host_of[r]: any number that identifies the host of rank r.
    explicit HostLayout(std::span<const int> host_of);
    // Ranks first_rank, first_rank + 1, ... of a job with ranks_per_host consecutive ranks on each host.
    static HostLayout consecutive(int first_rank, int num_ranks, int ranks_per_host);

    int num_ranks() const { return static_cast<int>(host_of_.size()); }  // 0: not known
    // Hosts are numbered by their lowest rank.
    int num_hosts() const { return hosts_.empty() ? 1 : static_cast<int>(hosts_.size()); }
    int host(int rank) const { return hosts_.empty() ? 0 : host_of_[static_cast<std::size_t>(rank)]; }
    bool same_host(int a, int b) const { return host(a) == host(b); }
    // If hosts are known: the ranks of a host, ascending, and the local rank of a rank.
    const std::vector<int>& ranks(int host) const { return hosts_[static_cast<std::size_t>(host)]; }
    int local_rank(int rank) const { return local_ranks_[static_cast<std::size_t>(rank)]; }
    bool hosts_have_equal_sizes() const;

private:
    std::vector<int> host_of_, local_ranks_;  // by rank
    std::vector<std::vector<int>> hosts_;
};

}  // namespace fp8flow
