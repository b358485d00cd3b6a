// SPDX-License-Identifier: MIT
// The job that tests of exchanges between GPUs share: the ranks, one HopperOps each (several ranks may share
// a GPU), and every exchange under test, made once.
#pragma once

#include "kernels/hopper/factory.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/device_query.h"
#include "tests/support/device_exchange.h"
#include "tests/support/exchange_oracle.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <tuple>

namespace fp8flow::test {

// nccl_fixed: messages of a fixed size. peer: memory mapped by CUDA IPC; window: by NCCL.
enum class Kind { staged, nccl, nccl_fixed, peer, window };
inline const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::staged: return "staged";
        case Kind::nccl: return "nccl";
        case Kind::nccl_fixed: return "nccl_fixed";
        case Kind::peer: return "peer";
        case Kind::window: return "window";
    }
    return "?";
}
// Limits that every case fits into.
inline constexpr ExchangeLimits kLimits{
    .tokens_per_rank = 4096, .topk = 8, .hidden = 2304, .row = DType::f32};

inline int local_rank() {
    const char* rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    return rank != nullptr ? std::atoi(rank) : 0;
}

// An exchange of expert-parallel groups of `expert_ranks` neighbouring ranks; null: not possible here, and
// why.
struct Rig {
    std::unique_ptr<ProcessGroup> world, expert_parallel, expert_replicas;
    std::unique_ptr<Exchange> exchange;
    std::unique_ptr<OnDevice> on_device;
    std::string reason;

    Rig(Kind kind, CombineOrder order, int expert_ranks, double deadline_seconds, Ops& ops)
        : world(make_mpi_group(deadline_seconds)) {
        world->set_activity("step 7, stage dispatch");
        expert_parallel = world->split(world->rank() / expert_ranks);
        expert_replicas = world->split(world->rank() % expert_ranks);
        exchange = make(kind, order, deadline_seconds, ops);
        if (exchange) on_device = std::make_unique<OnDevice>(*exchange, ops.device());
    }

private:
    std::unique_ptr<Exchange> make(Kind kind, CombineOrder order, double deadline_seconds, Ops& ops) {
        const ExchangeGroups groups{*world, *expert_parallel, *expert_replicas};
        switch (kind) {
            case Kind::staged:
                return test::make_staged_exchange(*expert_parallel, *world, *expert_replicas, ops.device(),
                                                  {.order = order});
            case Kind::nccl:
            case Kind::nccl_fixed:
                if (!hopper::built_with_nccl())
                    reason = "built without NCCL";
                else if (world->size() > hopper::device_count())
                    reason = "NCCL wants a GPU for every rank";
                else
                    return hopper::make_nccl_exchange(
                        ops, groups, order,
                        kind == Kind::nccl ? hopper::MessageSizes::own : hopper::MessageSizes::fixed,
                        deadline_seconds);
                return nullptr;
            case Kind::peer:
                return hopper::make_peer_exchange(ops, groups, kLimits, order, deadline_seconds,
                                                  PeerMapping::cuda_ipc, reason);
            case Kind::window:
                reason = "NCCL wants a GPU for every rank";
                if (world->size() > hopper::device_count()) return nullptr;
                return hopper::make_peer_exchange(ops, groups, kLimits, order, deadline_seconds,
                                                  PeerMapping::nccl_window, reason);
        }
        return nullptr;
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

}  // namespace fp8flow::test
