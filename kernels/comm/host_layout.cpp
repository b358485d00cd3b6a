// SPDX-License-Identifier: MIT
// Numbers hosts and local ranks.
#include "kernels/comm/host_layout.h"

#include <algorithm>
#include <map>

namespace fp8flow {

HostLayout::HostLayout(std::span<const int> host_of) {
    std::map<int, int> numbers;
    for (std::size_t rank = 0; rank < host_of.size(); ++rank) {
        const auto [found, first] = numbers.emplace(host_of[rank], static_cast<int>(hosts_.size()));
        if (first) hosts_.emplace_back();
        std::vector<int>& there = hosts_[static_cast<std::size_t>(found->second)];
        host_of_.push_back(found->second);
        local_ranks_.push_back(static_cast<int>(there.size()));
        there.push_back(static_cast<int>(rank));
    }
}

HostLayout HostLayout::consecutive(int first_rank, int num_ranks, int ranks_per_host) {
    std::vector<int> host_of(static_cast<std::size_t>(num_ranks));
    for (int& host : host_of) host = first_rank++ / ranks_per_host;
    return HostLayout(host_of);
}

bool HostLayout::hosts_have_equal_sizes() const {
    return std::ranges::all_of(
        hosts_, [&](const std::vector<int>& ranks) { return ranks.size() == hosts_[0].size(); });
}

}  // namespace fp8flow
