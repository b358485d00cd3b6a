// SPDX-License-Identifier: MIT
// The job that tests of exchanges between GPUs share: the ranks, one HopperOps each (several ranks may share
// a GPU), and every exchange under test, made once.
#pragma once

#include "kernels/hopper/factory.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/device_query.h"
#include "tests/gpu_mpi/ranks_on_gpus.h"
#include "tests/support/device_exchange.h"
#include "tests/support/exchange_oracle.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fp8flow::test {

// nccl_fixed: messages of a fixed size. peer: memory mapped by CUDA IPC; window: by NCCL. levels: two levels,
// peer memory inside a host, and NCCL between hosts, or peer memory if ranks share a GPU. levels_fixed: with
// messages of a fixed size.
enum class Kind { nccl, nccl_fixed, peer, window, levels, levels_fixed };
inline bool has_two_levels(Kind kind) { return kind == Kind::levels || kind == Kind::levels_fixed; }
inline bool has_fixed_messages(Kind kind) { return kind == Kind::nccl_fixed || kind == Kind::levels_fixed; }
inline const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::nccl: return "nccl";
        case Kind::nccl_fixed: return "nccl_fixed";
        case Kind::peer: return "peer";
        case Kind::window: return "window";
        case Kind::levels: return "levels";
        case Kind::levels_fixed: return "levels_fixed";
    }
    return "?";
}
// Limits that every case fits into.
inline constexpr ExchangeLimits kLimits{
    .tokens_per_rank = 4096, .topk = 8, .hidden = 2304, .row = DType::f32};
// Inside a host of two levels: the tokens of a rail of two, of narrow rows where they are many.
inline constexpr ExchangeLimits kLimitsInside{
    .tokens_per_rank = 33'000, .topk = 8, .hidden = 640, .row = DType::f32};

// Of a group with two levels: each half of its ranks is a host.
inline std::vector<int> two_hosts(int ranks) {
    std::vector<int> host_of;
    for (int r = 0; r < ranks; ++r) host_of.push_back(r * 2 / std::max(ranks, 2));
    return host_of;
}
// An exchange of expert-parallel groups of `expert_ranks` neighbouring ranks; null: not possible here, and
// why.
struct Rig {
    Kind kind;
    std::unique_ptr<ProcessGroup> world, expert_parallel, expert_replicas;
    std::unique_ptr<Exchange> exchange;
    std::unique_ptr<OnDevice> on_device;
    std::string reason;

    Rig(Kind of_kind, CombineOrder order, int expert_ranks, double deadline_seconds, Ops& ops)
        : kind(of_kind), world(make_mpi_group(deadline_seconds)) {
        world->set_activity("step 7, stage dispatch");
        expert_parallel = world->split(world->rank() / expert_ranks);
        expert_replicas = world->split(world->rank() % expert_ranks);
        exchange = make(order, deadline_seconds, ops);
        if (exchange) on_device = std::make_unique<OnDevice>(*exchange, ops.device());
    }

private:
    std::unique_ptr<Exchange> make(CombineOrder order, double deadline_seconds, Ops& ops) {
        const ExchangeGroups groups{*world, *expert_parallel, *expert_replicas};
        const auto sizes = has_fixed_messages(kind) ? hopper::MessageSizes::fixed : hopper::MessageSizes::own;
        switch (kind) {
            case Kind::nccl:
            case Kind::nccl_fixed:
                if (!hopper::built_with_nccl())
                    reason = "built without NCCL";
                else if (!has_own_gpu(*world))
                    reason = "NCCL wants a GPU for every rank";
                else
                    return hopper::make_nccl_exchange(ops, groups, order, sizes, deadline_seconds);
                return nullptr;
            case Kind::peer:
                return hopper::make_peer_exchange(ops, groups, kLimits, order, deadline_seconds,
                                                  PeerMapping::cuda_ipc, reason);
            case Kind::window:
                reason = "NCCL wants a GPU for every rank";
                if (!has_own_gpu(*world)) return nullptr;
                return hopper::make_peer_exchange(ops, groups, kLimits, order, deadline_seconds,
                                                  PeerMapping::nccl_window, reason);
            case Kind::levels:
            case Kind::levels_fixed: return make_levels(sizes, order, deadline_seconds, ops);
        }
        return nullptr;
    }
    std::unique_ptr<Exchange> make_levels(hopper::MessageSizes sizes, CombineOrder order,
                                          double deadline_seconds, Ops& ops) {
        const bool over_nccl = hopper::built_with_nccl() && has_own_gpu(*world);
        if (sizes == hopper::MessageSizes::fixed && !over_nccl) {
            reason = "NCCL, and a GPU for every rank";
            return nullptr;
        }
        const HostLayout hosts(two_hosts(expert_parallel->size()));
        const auto between = [&](const ExchangeGroups& groups, CombineOrder of) -> std::unique_ptr<Exchange> {
            if (over_nccl) return hopper::make_nccl_exchange(ops, groups, of, sizes, deadline_seconds);
            return hopper::make_peer_exchange(ops, groups, kLimits, of, deadline_seconds,
                                              PeerMapping::cuda_ipc, reason);
        };
        HierarchicalExchange::Parts parts{make_level_groups(*expert_parallel, hosts), {}, {}, {}};
        ProcessGroup &rail = *parts.groups.rail, &inside = *parts.groups.inside;
        parts.flat = between({*world, *expert_parallel, *expert_replicas, world->rank(), hosts}, order);
        parts.rail = between({rail, world->rank(), HostLayout::consecutive(0, hosts.num_hosts(), 1)},
                             CombineOrder::rank);
        parts.inside =
            inside.size() == 1
                ? hopper::make_local_exchange(ops, CombineOrder::rank)
                : hopper::make_peer_exchange(ops, {inside, world->rank()}, kLimitsInside, CombineOrder::rank,
                                             deadline_seconds, PeerMapping::cuda_ipc, reason);
        if (!parts.flat || !parts.rail || !parts.inside) return nullptr;
        return std::make_unique<HierarchicalExchange>(ops, order, hosts, std::move(parts),
                                                      hopper::derive_level_plans);
    }
};

// Lives from the first test to the end of the last one, because MPI does.
class GpuJob : public testing::Environment {
public:
    static constexpr double kDeadline = 60;

    void SetUp() override {
        current_ = this;
        world_ = make_mpi_group(kDeadline);
        ops_ = std::make_unique<HopperOps>(local_rank() % hopper::device_count());
    }
    void TearDown() override {
        world_->barrier();
        rigs_.clear();
        ops_.reset();
        world_.reset();
    }

    static GpuJob& current() { return *current_; }
    ProcessGroup& world() { return *world_; }
    Ops& ops() { return *ops_; }
    Rig& rig(Kind kind, CombineOrder order, int expert_ranks) {
        auto& rig = rigs_[{kind, order, expert_ranks}];
        if (!rig) rig = std::make_unique<Rig>(kind, order, expert_ranks, kDeadline, *ops_);
        return *rig;
    }

private:
    static inline GpuJob* current_ = nullptr;
    std::unique_ptr<ProcessGroup> world_;
    std::unique_ptr<Ops> ops_;
    std::map<std::tuple<Kind, CombineOrder, int>, std::unique_ptr<Rig>> rigs_;
};

// A case with what the oracle and the reference need to know of the exchange.
inline ExchangeCase of_kind(Kind kind, ExchangeCase c) {
    c.fixed_messages = has_fixed_messages(kind);
    if (!has_two_levels(kind)) return c;
    c.levels = Levels::two;
    c.host_of = two_hosts(static_cast<int>(c.ranks()));
    c.hosts_counted = has_own_gpu(GpuJob::current().world());  // peer memory counts no hosts
    return c;
}

}  // namespace fp8flow::test
