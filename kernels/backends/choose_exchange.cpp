// SPDX-License-Identifier: MIT
// Which exchange a job gets (the table in backends.h), made from the exchanges of one level.
#include "kernels/backends/backends.h"
#include "kernels/comm/group_exchange.h"
#include "kernels/comm/levels/hierarchical_exchange.h"
#include "kernels/core/error.h"

#include <fmt/format.h>

#include <utility>

namespace fp8flow {

namespace {

// Of the ranks that share the experts with `rank`.
HostLayout hosts_that_share(const HostLayout& job, int64_t group_size, int rank) {
    const int ranks = static_cast<int>(group_size), first = rank / ranks * ranks;
    std::vector<int> hosts;
    for (int r = first; r < first + ranks; ++r) hosts.push_back(job.host(r));
    return HostLayout(hosts);
}

class Chooser {
public:
    Chooser(BackendKind backend, Ops& ops, const ExchangeGroups& groups, const ExchangeSpec& spec)
        : ops_(ops),
          spec_(spec),
          world_(groups.world),
          sharing_(groups.expert_parallel),
          on_gpu_(backend == BackendKind::hopper),
          whole_(groups) {
        whole_.job_rank = groups.rank_of_job();
        whole_.hosts = hosts_that_share(spec.hosts, sharing_.size(), world_.rank());
    }

    ExchangeChoice choose() {
        const bool spanned = any_group_spans_hosts(spec_.hosts, sharing_.size());
        if (spanned && spec_.dispatcher == TokenDispatcher::hierarchical)
            return on_gpu_ ? two_levels_of_gpus() : two_levels_of_processes();
        if (!on_gpu_) return messages_of_processes(spanned);
        if (world_.size() == 1) return {hopper::make_local_exchange(ops_, spec_.order), ""};
        std::string why, way;
        if (spec_.dispatcher == TokenDispatcher::alltoall) {
            why = "parallel.moe_token_dispatcher_type is alltoall";
        } else if (spec_.hosts.num_hosts() == 1) {
            if (auto exchange = peer_memory(whole_, spec_.limits, spec_.order, way, why))
                return {std::move(exchange),
                        fmt::format("exchange: peer memory ({}, all ranks on one host)", way)};
        } else if (spanned) {
            why = "ranks on several hosts share the experts";
        } else {
            if (ExchangeChoice inside = rows_inside_hosts(why); inside.exchange) return inside;
            why = "ranks on several hosts" + (why.empty() ? "" : ": " + why);
        }
        return {nccl(whole_, spec_.order, why), fmt::format("exchange: {} ({})", nccl_name(), why)};
    }

private:
    // For an exchange that reduces over all ranks and moves no rows.
    ExchangeGroups reducing() const { return {world_, world_, *whole_.expert_replicas, whole_.job_rank}; }
    // Some of the ranks that share the experts; reductions stay among them.
    ExchangeGroups part(ProcessGroup& group, HostLayout hosts = {}) const {
        return {group, whole_.job_rank, std::move(hosts)};
    }

    std::unique_ptr<Exchange> peer_memory(const ExchangeGroups& ranks, const ExchangeLimits& limits,
                                          CombineOrder order, std::string& way, std::string& why) {
        return by_first_mapping(spec_.mapping, why, [&](PeerMapping mapping, std::string& reason) {
            way = name_of(mapping);
            return hopper::make_peer_exchange(ops_, ranks, limits, order, spec_.deadline_seconds, mapping,
                                              reason);
        });
    }
    // `why`: the reason why peer memory does not serve.
    std::unique_ptr<Exchange> nccl(const ExchangeGroups& ranks, CombineOrder order, const std::string& why) {
        require(hopper::built_with_nccl(), ExitCode::usage,
                "the exchange between GPUs needs NCCL here ({}), and this program was built without it; "
                "install libnccl-dev (2.18 or later) and build again, or use --backend reference",
                why);
        return hopper::make_nccl_exchange(ops_, ranks, order, spec_.message_sizes, spec_.deadline_seconds);
    }
    const char* nccl_name() const {
        return spec_.message_sizes == hopper::MessageSizes::fixed
                   ? "NCCL send and receive, messages of a fixed size"
                   : "NCCL send and receive";
    }
    std::unique_ptr<Exchange> levels(HierarchicalExchange::Parts parts, const HostLayout& hosts) {
        return std::make_unique<HierarchicalExchange>(
            ops_, spec_.order, hosts, std::move(parts),
            on_gpu_ ? hopper::derive_level_plans : derive_level_plans);
    }
    std::string two_levels_note(const std::string& between = "", const std::string& inside = "") const {
        const auto ranks = whole_.hosts.ranks(0).size();
        return fmt::format(
            "rows once per (token, host) between {} hosts of {} rank{}{}, fanned out inside{}; {}",
            whole_.hosts.num_hosts(), ranks, ranks == 1 ? "" : "s", between, inside,
            spec_.order == CombineOrder::rank ? "sums inside a host first, then one row per (token, host)"
                                              : "for sums one row per (token, expert), directly to its owner "
                                                "(moe.moe_combine_order is invariant)");
    }

    // Rows inside each group that shares the experts, reductions over all ranks.
    std::unique_ptr<Exchange> with_rows_inside(HierarchicalExchange::Parts parts) {
        return levels(std::move(parts), HostLayout::consecutive(0, sharing_.size(), sharing_.size()));
    }
    // Peer memory inside each group that shares the experts, NCCL for reductions. Nothing, on every rank, if
    // one of the groups has no peer memory.
    ExchangeChoice rows_inside_hosts(std::string& why) {
        HierarchicalExchange::Parts parts;
        std::string way;
        parts.inside = sharing_.size() == 1
                           ? hopper::make_local_exchange(ops_, spec_.order)
                           : peer_memory(part(sharing_), spec_.limits, spec_.order, way, why);
        if (!world_.all_true(parts.inside != nullptr)) return {};
        parts.flat = nccl(reducing(), spec_.order, "reductions cross hosts");
        const std::string rows =
            sharing_.size() == 1
                ? "on each GPU"
                : fmt::format("over peer memory ({}) in each group of {} ranks", way, sharing_.size());
        return {with_rows_inside(std::move(parts)), fmt::format("exchange: rows {}, sums over {} hosts by {}",
                                                                rows, spec_.hosts.num_hosts(), nccl_name())};
    }

    ExchangeChoice two_levels_of_gpus() {
        HierarchicalExchange::Parts parts{make_level_groups(sharing_, whole_.hosts), {}, {}, {}};
        ProcessGroup &rail = *parts.groups.rail, &inside = *parts.groups.inside;
        parts.rail = nccl(part(rail, HostLayout::consecutive(0, whole_.hosts.num_hosts(), 1)),
                          CombineOrder::rank, "rows cross hosts");
        ExchangeLimits limits = spec_.limits;
        limits.tokens_per_rank *= whole_.hosts.num_hosts();
        std::string way, why, note;
        parts.inside = inside.size() == 1 ? hopper::make_local_exchange(ops_, CombineOrder::rank)
                                          : peer_memory(part(inside), limits, CombineOrder::rank, way, why);
        // Every rank is asked, because other groups of the job may be spread over their hosts differently.
        const bool mapped = world_.all_true(parts.inside != nullptr);
        if (inside.size() > 1 && mapped) note = fmt::format(" over peer memory ({})", way);
        if (inside.size() > 1 && !mapped) {
            if (why.empty()) why = "no peer memory on another host";
            parts.inside = nccl(part(inside), CombineOrder::rank, why);
            note = fmt::format(" by {} ({})", nccl_name(), why);
        }
        parts.flat = nccl(whole_, spec_.order, "rows cross hosts");
        return {levels(std::move(parts), whole_.hosts),
                fmt::format("exchange: {}", two_levels_note(fmt::format(" by {}", nccl_name()), note))};
    }

    ExchangeChoice two_levels_of_processes() {
        return {make_host_levels(whole_, ops_, spec_.order),
                fmt::format("exchange: messages between processes (the reference backend): {}",
                            two_levels_note())};
    }
    ExchangeChoice messages_of_processes(bool spanned) {
        std::string note =
            world_.size() > 1 ? "exchange: messages between processes (the reference backend)" : "";
        auto exchange = std::make_unique<GroupExchange>(whole_, ops_, spec_.order);
        if (spec_.hosts.num_hosts() == 1 || spanned) return {std::move(exchange), note};
        HierarchicalExchange::Parts parts;
        parts.inside = std::move(exchange);
        parts.flat = std::make_unique<GroupExchange>(reducing(), ops_, spec_.order);
        return {with_rows_inside(std::move(parts)), note + ", reductions apart"};
    }

    Ops& ops_;
    const ExchangeSpec& spec_;
    ProcessGroup &world_, &sharing_;
    bool on_gpu_;
    ExchangeGroups whole_;
};

}  // namespace

bool any_group_spans_hosts(const HostLayout& hosts, int64_t ranks) {
    for (int r = 0; r < hosts.num_ranks(); r += static_cast<int>(ranks))
        if (hosts_that_share(hosts, ranks, r).num_hosts() > 1) return true;
    return false;
}

ExchangeChoice choose_exchange(BackendKind backend, Ops& ops, const ExchangeGroups& groups,
                               const ExchangeSpec& spec) {
    return Chooser(backend, ops, groups, spec).choose();
}

}  // namespace fp8flow
