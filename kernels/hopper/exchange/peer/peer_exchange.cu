// SPDX-License-Identifier: MIT
// The exchange over peer memory: construction, the group barrier, wire counters and lost peers. The calls are
// in routing.cu, dispatch.cu, combine.cu and reduce.cu.
#include "kernels/hopper/exchange/peer/peer_exchange.h"

#include "kernels/core/error.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/combine.h"
#include "kernels/hopper/runtime/launch.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace fp8flow::hopper::peer {

namespace {

constexpr int64_t kFlagBytes = PeerMemory::kMaxRanks * PeerGroup::kFlagLine;

const char* name_of(PeerOperation operation) {
    switch (operation) {
        case PeerOperation::routing: return "routing";
        case PeerOperation::dispatch: return "dispatch";
        case PeerOperation::combine: return "combine";
        case PeerOperation::all_reduce: return "all-reduce";
        case PeerOperation::reduce_scatter: return "reduce-scatter";
        case PeerOperation::all_gather: return "all-gather";
    }
    return "?";
}

// The group barrier. One warp, one thread per member: stores the new
// epoch into this rank's flag line at the member, then polls the member's line here. The fence and the
// release store make what earlier kernels of this stream wrote, here or at a member, visible to whoever
// acquires the flag. Deterministic: the flags are integers that only rise, so the order of arrival does not
// matter.
__global__ __launch_bounds__(kWarpSize) void group_barrier_kernel(const GroupBarrier barrier) {
    const PeerGroup& group = barrier.group;
    if (group.lost()) return;  // the same for all threads
    const uint64_t epoch = group.epoch() + 1;
    __syncwarp();  // all have read the old epoch
    const int member = static_cast<int>(threadIdx.x);
    if (member == 0) group.words->epochs[group.index] = epoch;
    bool late = false;
    if (member < group.size) {
        __threadfence_system();
        store_release_system(group.flag(member, group.rank), epoch);
        late = !wait_until_reached(group.flag(group.rank, member), epoch, barrier.limit);
    }
    const uint32_t late_members = __ballot_sync(kFullMask, late);
    if (late_members != 0) report_lost(barrier, late_members, epoch);
}

}  // namespace

void launch_group_barrier(const GroupBarrier& barrier, const Launch& launch) {
    launch_kernel(group_barrier_kernel, 1, kWarpSize, launch, "group barrier of peers", barrier);
}

PeerLayout::PeerLayout(const ExchangeLimits& limits, CombineOrder order, const Exchange::GroupRanks& group) {
    const auto take = [this](int64_t size) {
        const int64_t at = bytes;
        bytes += peer_aligned(size);
        return at;
    };
    const int64_t ranks = group.experts.size, slots = limits.tokens_per_rank, element = size_of(limits.row),
                  blocks = ceil_div(limits.hidden, kBlock);
    words = take(sizeof(PeerWords));
    tables = take(3 * PeerMemory::kMaxRanks * static_cast<int64_t>(sizeof(uint8_t*)));
    flags = take(kFlagBytes);
    flagged_rows = std::max(slots, kFlaggedRows);
    row_flags = take(ranks * flagged_rows * static_cast<int64_t>(sizeof(uint64_t)));
    combine_words = take(sizeof(CombineWords));
    combine_progress = take(PeerMemory::kMaxRanks * kCombineProgress);

    const int64_t routing = ranks * slots * limits.topk * 8;
    const int64_t sent = ranks * slots;
    const int64_t plain_rows = peer_aligned(sent * limits.hidden * element);
    const int64_t fp8_rows = peer_aligned(sent * limits.hidden) + sent * blocks * 4;
    const int64_t rows_of_token = order == CombineOrder::rank ? ranks : limits.topk;
    const int64_t sums =
        peer_aligned(rows_of_token * slots * limits.hidden * element) + slots * limits.topk * 4;
    buffer_bytes = peer_aligned(std::max({routing, plain_rows, fp8_rows, sums}));
    buffers = take(2 * buffer_bytes);

    world.size = group.world.size;
    replicas.size = group.replicas.size;
    for (Reduction* reduction : {&world, &replicas}) {
        if (reduction->size == 1) continue;
        reduction->flags = take(kFlagBytes);
        reduction->buffers = take(2 * reduction->size * kSmallBytes);
        reduction->chunk = take(kChunkBytes);
        reduction->result = take(round_up(ceil_div(kChunkBytes, reduction->size), kPeerVector));
    }
}

PeerExchange::PeerExchange(Ops& ops, const ExchangeGroups& groups, const ExchangeLimits& limits,
                           CombineOrder order, double deadline_seconds, std::unique_ptr<PeerMemory> memory)
    : Exchange(ops, order, groups.group_ranks()),
      groups_(groups),
      limits_(limits),
      layout_(limits, order, group_ranks()),
      deadline_seconds_(deadline_seconds),
      memory_(std::move(memory)),
      words_(reinterpret_cast<PeerWords*>(memory_->own() + layout_.words)),
      lost_(static_cast<LostPeers*>(memory_->host_words())) {
    ProcessGroup* const processes[kNumGroups] = {&groups_.expert_parallel, &groups_.world,
                                                 groups_.expert_replicas};
    const int world_rank = groups_.world.rank(), job_rank = groups_.rank_of_job();
    job_ranks_.resize(static_cast<std::size_t>(groups_.world.size()));
    groups_.world.all_gather(&job_rank, sizeof job_rank, job_ranks_.data());
    for (int g = 0; g < kNumGroups; ++g) {
        const GroupRank here = g == kExpertParallel ? group_ranks().experts
                               : g == kWorld        ? group_ranks().world
                                                    : group_ranks().replicas;
        members_[g].assign(static_cast<std::size_t>(here.size), world_rank);
        if (processes[g] != nullptr)
            processes[g]->all_gather(&world_rank, sizeof world_rank, members_[g].data());
        std::vector<uint8_t*> table;
        for (const int member : members_[g]) table.push_back(memory_->of(member));
        auto** device_table =
            reinterpret_cast<uint8_t**>(memory_->own() + layout_.tables) + g * PeerMemory::kMaxRanks;
        check_cuda(
            cudaMemcpy(device_table, table.data(), table.size() * sizeof(uint8_t*), cudaMemcpyHostToDevice),
            "copying the addresses of peer memory");
        device_groups_[g] = {.regions = device_table,
                             .words = words_,
                             .rank = here.rank,
                             .size = here.size,
                             .index = g,
                             .flags = layout_.flags,
                             .buffers = layout_.buffers,
                             .buffer_bytes = layout_.buffer_bytes};
    }
    for (const int g : {kWorld, kReplicas}) {
        const PeerLayout::Reduction& reduction = g == kWorld ? layout_.world : layout_.replicas;
        device_groups_[g].flags = reduction.flags;
        device_groups_[g].buffers = reduction.buffers;
        device_groups_[g].buffer_bytes = reduction.size * PeerLayout::kSmallBytes;
    }
}

GroupBarrier PeerExchange::barrier_of(GroupIndex group, PeerOperation operation) const {
    return {.group = device_groups_[group],
            .report = lost_,
            .limit = static_cast<uint64_t>(deadline_seconds_ * 1e9),
            .operation = operation};
}

void PeerExchange::synchronize(GroupIndex group, PeerOperation operation, const Launch& launch) {
    launch_group_barrier(barrier_of(group, operation), launch);
}

void PeerExchange::check_fits(int64_t bytes, const char* what) const {
    FP8FLOW_CHECK(
        bytes <= layout_.buffer_bytes,
        "{} needs {} bytes, but the receive buffer has {} ({} tokens per rank, top-{}, {} columns of {})",
        what, bytes, layout_.buffer_bytes, limits_.tokens_per_rank, limits_.topk, limits_.hidden,
        fp8flow::name_of(limits_.row));
}

void PeerExchange::check_peers() {
    const volatile LostPeers* report = lost_;
    if (report->valid == 0) return;
    memory_->abandon();
    const uint32_t group = report->group, members = report->members;
    const uint64_t sequence = report->sequence;
    std::vector<int> late;
    for (std::size_t r = 0; r < members_[group].size(); ++r)
        if ((members >> r & 1) != 0) late.push_back(job_ranks_[static_cast<std::size_t>(members_[group][r])]);
    fail(ExitCode::peer,
         "rank {}: no answer from rank {} for {:g} s in {} over peer memory ({}; group barrier {}); "
         "parallel.peer_deadline_seconds is the limit",
         groups_.rank_of_job(), fmt::join(late, ", "), deadline_seconds_,
         name_of(static_cast<PeerOperation>(report->operation)), groups_.world.activity(), sequence);
}

WireBytes PeerExchange::wire_since_start() const {
    uint64_t wire[3] = {};
    ops_.device().copy_out(wire, words_->wire, sizeof wire, last_stream_);
    return {.routing = static_cast<double>(wire[0]),
            .dispatch = static_cast<double>(wire[1]),
            .combine = static_cast<double>(wire[2])};
}

WireBytes PeerExchange::wire_bytes() const {
    const WireBytes now = wire_since_start();
    return {.routing = now.routing - at_reset_.routing,
            .dispatch = now.dispatch - at_reset_.dispatch,
            .combine = now.combine - at_reset_.combine};
}

void PeerExchange::copy_wire_counters(uint64_t* host, const Launch& launch) {
    ops_.device().copy_out_async(host, words_->wire, sizeof words_->wire, launch.stream);
}

void PeerExchange::reset_counts() {
    Exchange::reset_counts();
    at_reset_ = wire_since_start();
}

}  // namespace fp8flow::hopper::peer

namespace fp8flow::hopper {

std::unique_ptr<Exchange> make_peer_exchange(Ops& ops, const ExchangeGroups& groups,
                                             const ExchangeLimits& limits, CombineOrder order,
                                             double deadline_seconds, PeerMapping mapping,
                                             std::string& reason) {
    FP8FLOW_CHECK(deadline_seconds > 0, "deadline {} s", deadline_seconds);
    if (limits.topk > kWarpSize) {  // a warp holds one expert of a token per lane
        reason =
            fmt::format("moe.moe_router_topk is {}, at most {} over peer memory", limits.topk, kWarpSize);
        return nullptr;
    }
    const peer::PeerLayout layout(limits, order, groups.group_ranks());
    auto memory = peer::PeerMemory::create(groups.world, mapping, layout.bytes, reason);
    if (!memory) return nullptr;
    return std::make_unique<peer::PeerExchange>(ops, groups, limits, order, deadline_seconds,
                                                std::move(memory));
}

}  // namespace fp8flow::hopper
