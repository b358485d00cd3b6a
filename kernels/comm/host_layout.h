// SPDX-License-Identifier: MIT
// HostLayout: which host each rank of a group is on. A rank's place is its number among those of the group on
// its host; the ranks with one place, of every host one, are a rail.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fp8flow {

class HostLayout {
public:
    // Hosts are not known: all ranks count as ranks of one host.
    HostLayout() = default;
    // host_of[r]: any number of rank r's host.
    explicit HostLayout(std::span<const int> host_of);
    // Ranks first_rank, first_rank + 1, ... of a job with ranks_per_host consecutive ranks on each host.
    static HostLayout consecutive(int first_rank, int num_ranks, int ranks_per_host);

    int num_ranks() const { return static_cast<int>(host_of_.size()); }  // 0: not known
    // Hosts are numbered by their lowest rank.
    int num_hosts() const { return hosts_.empty() ? 1 : static_cast<int>(hosts_.size()); }
    int host(int rank) const { return hosts_.empty() ? 0 : host_of_[static_cast<std::size_t>(rank)]; }
    bool same_host(int a, int b) const { return host(a) == host(b); }
    // If hosts are known: the ranks of a host, ascending, and a rank's number among them.
    const std::vector<int>& ranks(int host) const { return hosts_[static_cast<std::size_t>(host)]; }
    int place(int rank) const { return place_of_[static_cast<std::size_t>(rank)]; }
    // Whether every host has equally many ranks of the group.
    bool even() const;

private:
    std::vector<int> host_of_, place_of_;  // by rank
    std::vector<std::vector<int>> hosts_;
};

}  // namespace fp8flow
