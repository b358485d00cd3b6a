// SPDX-License-Identifier: MIT
// The only place that names a concrete backend: choosing it, and making its operations, exchanges and rank
// groups.
#include "model/base/backend.h"

#include "kernels/comm/group_exchange.h"
#include "kernels/comm/levels/hierarchical_exchange.h"
#include "kernels/core/error.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/count_launches.h"
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/reference/host_probe.h"
#include "kernels/reference/reference_ops.h"

#include <unistd.h>

namespace fp8flow {

BackendKind parse_backend(const std::string& text) {
    if (text == "auto") return BackendKind::automatic;
    if (text == "reference") return BackendKind::reference;
    if (text == "hopper") return BackendKind::hopper;
    fail(ExitCode::usage, "--backend: got '{}', want auto, reference or hopper", text);
}

BackendChoice choose_backend(BackendKind wanted, const Placement& placement) {
    if (wanted == BackendKind::reference) return {.note = "backend: reference (as asked)"};
    const int devices = hopper::device_count();
    if (devices > 0 && placement.ranks_on_host <= devices) {
        return {.kind = BackendKind::hopper,
                .device = static_cast<int>(placement.rank_on_host),
                .one_host = placement.ranks_on_host == placement.num_ranks,
                .note = "backend: hopper, one GPU per rank"};
    }
    const std::string reason = devices > 0
                                   ? fmt::format("{} ranks on this host, {} Hopper GPU{}",
                                                 placement.ranks_on_host, devices, devices == 1 ? "" : "s")
                                   : hopper::unavailable_reason();
    require(wanted != BackendKind::hopper, ExitCode::usage,
            "--backend hopper: {}; use --backend auto or reference", reason);
    return {.note = fmt::format("{}backend: reference ({})", devices > 0 ? "warning: " : "", reason)};
}

BackendChoice choose_backend(BackendKind wanted, const Placement& placement, ProcessGroup& world) {
    const BackendChoice own = choose_backend(wanted, placement);
    int64_t without = own.kind == BackendKind::hopper ? 0 : 1;
    world.all_reduce_max(std::span<int64_t>(&without, 1));
    if (without == 0 || own.kind != BackendKind::hopper) return own;
    require(wanted != BackendKind::hopper, ExitCode::usage,
            "--backend hopper: another rank has no GPU of its own");
    return {.note = "warning: backend: reference (another rank has no GPU of its own)"};
}

MachineFacts machine_facts(const BackendChoice& choice) {
    MachineFacts facts{.cpu = HostProbe().device_name(), .host_cores = ::sysconf(_SC_NPROCESSORS_ONLN)};
    if (choice.kind == BackendKind::hopper) {
        facts.gpu = hopper::device_name(choice.device);
        facts.gpu_clock_hertz = hopper::max_clock_hertz(choice.device);
    }
    return facts;
}

namespace {

AttentionBackend attention_of(AttentionBackendKey key) {
    if (key == AttentionBackendKey::native) return AttentionBackend::native;
    const std::string problem = hopper::cudnn_problem();
    require(problem.empty() || key == AttentionBackendKey::automatic, ExitCode::usage,
            "kernels.attention_backend: cudnn is requested, but {}", problem);
    return problem.empty() ? AttentionBackend::cudnn : AttentionBackend::native;
}

}  // namespace

bool has_gpu_backend() { return hopper::built_with_cuda(); }

std::unique_ptr<Ops> make_ops(const BackendChoice& choice, Arithmetic arithmetic, const KernelSpec& kernels) {
    const bool alternative = arithmetic == Arithmetic::alternative;
    if (choice.kind == BackendKind::hopper) {
        const KernelChoice chosen{.gemm = alternative                         ? GemmBackend::alternative
                                          : arithmetic == Arithmetic::ceiling ? GemmBackend::cublaslt
                                                                              : GemmBackend::native,
                                  .attention = attention_of(kernels.attention_backend)};
        return hopper::make_ops(choice.device, chosen);
    }
    ReferenceOptions options;
    options.summation = alternative ? SummationOrder::split : SummationOrder::sequential;
    return std::make_unique<ReferenceOps>(options);
}

std::optional<LaunchCount> count_launches(const BackendChoice& choice,
                                          const std::function<void(const Launch&)>& call) {
    if (choice.kind == BackendKind::hopper) return hopper::count_launches(call);
    return {};
}

std::optional<double> energy_joules(const BackendChoice& choice) {
    if (choice.kind == BackendKind::hopper) return hopper::energy_joules(choice.device);
    return {};
}

std::unique_ptr<Probe> make_probe(const BackendChoice& choice, Ops& ops) {
    if (choice.kind == BackendKind::hopper) return hopper::make_probe(ops);
    return std::make_unique<HostProbe>();
}

namespace {

// make(mapping, reason) by the first of the wanted ways that works; null, and `why` says why
// each of them failed.
template <class Make>
auto by_first_mapping(FlexBackend wanted, std::string& why, Make make) -> decltype(make(PeerMapping{}, why)) {
    constexpr std::pair<PeerMapping, FlexBackend> kWays[] = {
        {PeerMapping::cuda_ipc, FlexBackend::cuda_ipc}, {PeerMapping::nccl_window, FlexBackend::nccl_window}};
    for (const auto& [mapping, key] : kWays) {
        if (wanted != FlexBackend::nvlink && wanted != key) continue;
        std::string reason;
        if (auto made = make(mapping, reason)) return made;
        why += fmt::format("{}{}: {}", why.empty() ? "" : "; ", name_of(mapping), reason);
    }
    return nullptr;
}

}  // namespace

std::unique_ptr<PeerProbe> make_peer_probe(const BackendChoice& choice, Ops& ops, ProcessGroup& world,
                                           std::string& reason) {
    constexpr int64_t kRegionBytes = int64_t{256} << 20;  // far larger than L2
    if (choice.kind == BackendKind::hopper)
        return by_first_mapping(FlexBackend::nvlink, reason, [&](PeerMapping mapping, std::string& why) {
            return hopper::make_peer_probe(ops, world, mapping, kRegionBytes, why);
        });
    reason = "no GPUs";
    return nullptr;
}

RankGroups make_rank_groups(ProcessGroup& world, int expert_parallel_size) {
    RankGroups groups;
    groups.world = &world;
    groups.expert_parallel = world.split(world.rank() / expert_parallel_size);
    groups.expert_replicas = world.split(world.rank() % expert_parallel_size);
    groups.alone = world.split(world.rank());
    return groups;
}

namespace {

ExchangeLimits exchange_limits(const Config& config) {
    return {.tokens_per_rank = config.training.micro_batch_size * config.model.seq_length,
            .topk = config.moe.moe_router_topk,
            .hidden = config.model.hidden_size,
            .row = config.precision.recipe == Recipe::fp32 ? DType::f32 : DType::bf16};
}

// Whether all ranks are on one host, and whether all that share experts are, as far as the configuration and
// the launcher know; mapping peers' memory shows the rest.
bool on_one_host(const BackendChoice& choice, const ParallelSpec& parallel) {
    return choice.one_host && parallel.hosts <= 1;
}
bool shares_within_hosts(const ParallelSpec& parallel) {
    return parallel.hosts == 0 || parallel.ranks_per_host % parallel.expert_model_parallel_size == 0;
}

// Of all ranks of the job.
HostLayout hosts_of_job(ProcessGroup& world, const ParallelSpec& parallel) {
    if (parallel.hosts > 0)
        return HostLayout::consecutive(0, world.size(), static_cast<int>(parallel.ranks_per_host));
    return HostLayout(world.hosts());
}

// Of the ranks that share the experts with `rank`.
HostLayout hosts_that_share(const HostLayout& job, const ParallelSpec& parallel, int rank) {
    const int ranks = static_cast<int>(parallel.expert_model_parallel_size), first = rank / ranks * ranks;
    std::vector<int> hosts;
    for (int r = first; r < first + ranks; ++r) hosts.push_back(job.host(r));
    return HostLayout(hosts);
}

// Whether any group of ranks that share the experts is on several hosts.
bool any_group_spans_hosts(const HostLayout& job, const ParallelSpec& parallel) {
    for (int r = 0; r < job.num_ranks(); r += static_cast<int>(parallel.expert_model_parallel_size))
        if (hosts_that_share(job, parallel, r).num_hosts() > 1) return true;
    return false;
}

std::unique_ptr<GroupExchange> make_group_exchange(const ExchangeGroups& ranks, Ops& ops,
                                                   CombineOrder order) {
    auto exchange = std::make_unique<GroupExchange>(ranks.expert_parallel, ops, order);
    exchange->set_groups(ranks.world, ranks.expert_replicas);
    exchange->set_hosts(ranks.hosts);
    return exchange;
}

// Which way rows and sums take over two levels; how they travel between hosts and inside, where that is said.
std::string two_levels_note(const Config& config, const HostLayout& hosts, const std::string& between = "",
                            const std::string& inside = "") {
    return fmt::format("rows once per (token, host) between {} hosts of {} rank{}{}, fanned out inside{}; {}",
                       hosts.num_hosts(), hosts.ranks(0).size(), hosts.ranks(0).size() == 1 ? "" : "s",
                       between, inside,
                       config.moe.moe_combine_order == CombineOrder::rank
                           ? "sums inside a host first, then one row per (token, host)"
                           : "for sums one row per (token, expert), directly to its owner "
                             "(moe.moe_combine_order is invariant)");
}

std::unique_ptr<Exchange> make_peer_exchange(const ExchangeGroups& ranks, const ExchangeLimits& limits,
                                             CombineOrder order, Ops& ops, const Config& config,
                                             std::string& way, std::string& why) {
    return by_first_mapping(
        config.parallel.moe_flex_dispatcher_backend, why, [&](PeerMapping mapping, std::string& reason) {
            way = name_of(mapping);
            return hopper::make_peer_exchange(ops, ranks, limits, order,
                                              config.parallel.peer_deadline_seconds, mapping, reason);
        });
}

// NCCL. `why`: the reason why peer memory does not serve.
ExchangeChoice make_message_exchange(const ExchangeGroups& ranks, CombineOrder order, Ops& ops,
                                     const Config& config, const std::string& why) {
    require(hopper::built_with_nccl(), ExitCode::usage,
            "the exchange between GPUs needs NCCL here ({}), and this program was built without it; install "
            "libnccl-dev (2.18 or later) and build again, or use --backend reference",
            why);
    const bool captured = config.schedule.cuda_graph_impl == CudaGraphImpl::full_iteration,
               fixed = captured || config.parallel.moe_message_sizes == MessageSizesKey::fixed;
    const auto sizes = fixed ? hopper::MessageSizes::fixed : hopper::MessageSizes::own;
    return {hopper::make_nccl_exchange(ops, ranks, order, sizes, config.parallel.peer_deadline_seconds),
            captured ? "NCCL send and receive, messages of a fixed size for the CUDA graph"
            : fixed  ? "NCCL send and receive, messages of a fixed size"
                     : "NCCL send and receive"};
}

// Rows inside each group that shares the experts, reductions over all ranks.
std::unique_ptr<Exchange> with_rows_inside(std::unique_ptr<Exchange> rows, std::unique_ptr<Exchange> sums,
                                           Ops& ops, CombineOrder order, DeriveLevelPlans& derive) {
    const HostLayout one_host = HostLayout::consecutive(0, rows->size(), rows->size());
    return std::make_unique<HierarchicalExchange>(
        ops, order, one_host,
        HierarchicalExchange::Parts{
            .groups = {}, .flat = std::move(sums), .rail = nullptr, .inside = std::move(rows)},
        derive);
}

// True if it is true on every rank.
bool on_all_ranks(ProcessGroup& world, bool here) {
    int64_t without = here ? 0 : 1;
    world.all_reduce_max(std::span<int64_t>(&without, 1));
    return without == 0;
}

// Peer memory inside each group of ranks that share the experts, messages for the sums over all. Nothing, on
// every rank alike, where one of the groups has no peer memory.
ExchangeChoice make_split_exchange(const RankGroups& groups, Ops& ops, const Config& config,
                                   std::string& why) {
    ProcessGroup& sharing = *groups.expert_parallel;
    const CombineOrder order = config.moe.moe_combine_order;
    std::string way = "on each GPU";
    std::unique_ptr<Exchange> rows =
        sharing.size() == 1 ? hopper::make_local_exchange(ops, order)
                            : make_peer_exchange({sharing, sharing, *groups.alone, groups.world->rank()},
                                                 exchange_limits(config), order, ops, config, way, why);
    if (!on_all_ranks(*groups.world, rows != nullptr)) return {};
    ExchangeChoice sums = make_message_exchange({*groups.world, *groups.alone, *groups.expert_replicas},
                                                order, ops, config, "reductions cross hosts");
    return {
        with_rows_inside(std::move(rows), std::move(sums.exchange), ops, order, hopper::derive_level_plans),
        fmt::format("exchange: rows {}, sums over {} hosts by {}",
                    sharing.size() == 1
                        ? way
                        : fmt::format("over peer memory ({}) in each group of {} ranks", way, sharing.size()),
                    config.parallel.hosts > 0 ? std::to_string(config.parallel.hosts) : "several",
                    sums.note)};
}

// Peer memory, at least in each group of ranks that share the experts, else messages; `why` collects the
// reasons.
ExchangeChoice make_gpu_exchange(const BackendChoice& choice, const RankGroups& groups, Ops& ops,
                                 const Config& config, const HostLayout& hosts) {
    const ExchangeGroups ranks{*groups.world, *groups.expert_parallel, *groups.expert_replicas,
                               groups.world->rank(), hosts};
    const CombineOrder order = config.moe.moe_combine_order;
    std::string why, way;
    if (config.parallel.moe_token_dispatcher_type == TokenDispatcher::alltoall) {
        why = "parallel.moe_token_dispatcher_type is alltoall";
    } else if (on_one_host(choice, config.parallel)) {
        if (auto exchange = make_peer_exchange(ranks, exchange_limits(config), order, ops, config, way, why))
            return {std::move(exchange),
                    fmt::format("exchange: peer memory ({}, all ranks on one host)", way)};
    } else if (!shares_within_hosts(config.parallel)) {
        why = "ranks on several hosts share the experts";
    } else {
        if (ExchangeChoice split = make_split_exchange(groups, ops, config, why); split.exchange)
            return split;
        why = "ranks on several hosts" + (why.empty() ? "" : ": " + why);
    }
    ExchangeChoice messages = make_message_exchange(ranks, order, ops, config, why);
    messages.note = fmt::format("exchange: {} ({})", messages.note, why);
    return messages;
}

// Messages over the rails, and inside each host peer memory, or messages where one of the hosts has none.
ExchangeChoice make_gpu_levels(const RankGroups& groups, Ops& ops, const Config& config,
                               const HostLayout& hosts) {
    const CombineOrder order = config.moe.moe_combine_order;
    ProcessGroup& sharing = *groups.expert_parallel;
    const int job_rank = groups.world->rank();
    HierarchicalExchange::Parts parts{make_level_groups(sharing, hosts), {}, {}, {}};
    ProcessGroup &rail = *parts.groups.rail, &inside = *parts.groups.inside;

    ExchangeChoice between = make_message_exchange(
        {rail, rail, *groups.alone, job_rank, HostLayout::consecutive(0, hosts.num_hosts(), 1)},
        CombineOrder::rank, ops, config, "rows cross hosts");
    parts.rail = std::move(between.exchange);

    const ExchangeGroups on_host{inside, inside, *groups.alone, job_rank};
    ExchangeLimits limits = exchange_limits(config);
    limits.tokens_per_rank *= hosts.num_hosts();
    std::string way, why, inside_note;
    parts.inside = inside.size() == 1
                       ? hopper::make_local_exchange(ops, CombineOrder::rank)
                       : make_peer_exchange(on_host, limits, CombineOrder::rank, ops, config, way, why);
    // asked of every rank: other groups of the job may be spread over their hosts otherwise
    const bool mapped = on_all_ranks(*groups.world, parts.inside != nullptr);
    if (inside.size() > 1 && mapped) inside_note = fmt::format(" over peer memory ({})", way);
    if (inside.size() > 1 && !mapped) {
        ExchangeChoice messages = make_message_exchange(on_host, CombineOrder::rank, ops, config, why);
        parts.inside = std::move(messages.exchange);
        inside_note =
            fmt::format(" by {} ({})", messages.note, why.empty() ? "no peer memory on another host" : why);
    }
    parts.flat = make_message_exchange({*groups.world, sharing, *groups.expert_replicas, job_rank, hosts},
                                       order, ops, config, "rows cross hosts")
                     .exchange;
    return {std::make_unique<HierarchicalExchange>(ops, order, hosts, std::move(parts),
                                                   hopper::derive_level_plans),
            fmt::format("exchange: {}",
                        two_levels_note(config, hosts, fmt::format(" by {}", between.note), inside_note))};
}

ExchangeChoice choose_exchange(const BackendChoice& choice, const RankGroups& groups, Ops& ops,
                               const Config& config, const HostLayout& job) {
    if (choice.kind == BackendKind::hopper && groups.world->size() == 1)
        return {hopper::make_local_exchange(ops, config.moe.moe_combine_order), ""};
    const ParallelSpec& parallel = config.parallel;
    const HostLayout hosts = hosts_that_share(job, parallel, groups.world->rank());
    const bool spanned = any_group_spans_hosts(job, parallel);
    const bool two_levels = spanned && parallel.moe_token_dispatcher_type == TokenDispatcher::hierarchical;
    if (choice.kind == BackendKind::hopper)
        return two_levels ? make_gpu_levels(groups, ops, config, hosts)
                          : make_gpu_exchange(choice, groups, ops, config, hosts);
    const CombineOrder order = config.moe.moe_combine_order;
    if (two_levels)
        return {make_host_levels(*groups.expert_parallel, *groups.world, *groups.expert_replicas, ops, order,
                                 hosts),
                fmt::format("exchange: messages between processes (the reference backend): {}",
                            two_levels_note(config, hosts))};
    auto exchange = make_group_exchange(
        {*groups.world, *groups.expert_parallel, *groups.expert_replicas, -1, hosts}, ops, order);
    if (parallel.hosts > 1 && shares_within_hosts(parallel))
        return {with_rows_inside(
                    std::move(exchange),
                    make_group_exchange({*groups.world, *groups.alone, *groups.expert_replicas}, ops, order),
                    ops, order, derive_level_plans),
                "exchange: messages between processes (the reference backend), sums apart"};
    return {std::move(exchange),
            groups.world->size() > 1 ? "exchange: messages between processes (the reference backend)" : ""};
}

}  // namespace

int num_hosts(ProcessGroup& world, const ParallelSpec& parallel) {
    return hosts_of_job(world, parallel).num_hosts();
}

ExchangeChoice make_exchange(const BackendChoice& choice, const RankGroups& groups, Ops& ops,
                             const Config& config) {
    return choose_exchange(choice, groups, ops, config, hosts_of_job(*groups.world, config.parallel));
}

std::unique_ptr<Messages> make_messages(const BackendChoice& choice, Ops& ops, ProcessGroup& world,
                                        std::string& reason) {
    if (choice.kind != BackendKind::hopper) return make_host_messages(world);
    if (world.size() > 1 && hopper::built_with_nccl())
        return hopper::make_nccl_messages(ops, world, ParallelSpec{}.peer_deadline_seconds);
    reason = world.size() > 1 ? "this program was built without NCCL" : "one rank";
    return nullptr;
}

void check_processor() {
    require(
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), ExitCode::usage,
        "this processor has no AVX2 and FMA instructions; fp8flow is built for x86-64-v3 (2013 and later)");
}

}  // namespace fp8flow
