// The only place that names a concrete backend: choosing it, and making its operations, exchanges and rank
// groups.
#include "model/backend.h"

#include "kernels/comm/group_exchange.h"
#include "kernels/comm/staged_exchange.h"
#include "kernels/hopper/device_query.h"
#include "kernels/hopper/factory.h"
#include "kernels/reference/host_probe.h"
#include "kernels/reference/reference_ops.h"

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
        const char* exchange =
            placement.num_ranks > 1 ? "; rows between ranks are staged through host memory" : "";
        return {.kind = BackendKind::hopper,
                .device = static_cast<int>(placement.rank_on_host),
                .note = fmt::format("backend: hopper, one GPU per rank{}", exchange)};
    }
    const std::string reason = devices > 0
                                   ? fmt::format("{} ranks on this host, {} Hopper GPU{}",
                                                 placement.ranks_on_host, devices, devices == 1 ? "" : "s")
                                   : hopper::unavailable_reason();
    require(wanted != BackendKind::hopper, ExitCode::usage,
            "--backend hopper: {}; use --backend auto or reference", reason);
    return {.note = fmt::format("backend: reference ({})", reason)};
}

BackendChoice choose_backend(BackendKind wanted, const Placement& placement, ProcessGroup& world) {
    const BackendChoice own = choose_backend(wanted, placement);
    int64_t without = own.kind == BackendKind::hopper ? 0 : 1;
    world.all_reduce_max(std::span<int64_t>(&without, 1));
    if (without == 0 || own.kind != BackendKind::hopper) return own;
    require(wanted != BackendKind::hopper, ExitCode::usage,
            "--backend hopper: another rank has no GPU of its own");
    return {.note = "backend: reference (another rank has no GPU of its own)"};
}

namespace {

AttentionBackend attention_of(AttentionBackendKey key) {
    switch (key) {
        case AttentionBackendKey::automatic: return AttentionBackend::native;
        case AttentionBackendKey::native: return AttentionBackend::native;
        case AttentionBackendKey::cudnn: break;
    }
    const std::string problem = hopper::cudnn_problem();
    require(problem.empty(), ExitCode::usage, "kernels.attention_backend: cudnn is asked for, but {}",
            problem);
    return AttentionBackend::cudnn;
}

}  // namespace

std::unique_ptr<Ops> make_ops(const BackendChoice& choice, Arithmetic arithmetic, const KernelSpec& kernels) {
    const bool stated = arithmetic == Arithmetic::stated;
    if (choice.kind == BackendKind::hopper) {
        const bool cublaslt = kernels.gemm_backend == GemmBackendKey::cublaslt;
        const KernelChoice chosen{.gemm = !stated    ? GemmBackend::simt
                                          : cublaslt ? GemmBackend::cublaslt
                                                     : GemmBackend::native,
                                  .attention = attention_of(kernels.attention_backend)};
        return hopper::make_ops(choice.device, chosen);
    }
    ReferenceOptions options;
    options.summation = stated ? SummationOrder::sequential : SummationOrder::split;
    return std::make_unique<ReferenceOps>(options);
}

std::unique_ptr<Probe> make_probe(const BackendChoice& choice, Ops& ops) {
    if (choice.kind == BackendKind::hopper) return hopper::make_probe(ops);
    return std::make_unique<HostProbe>();
}

RankGroups make_rank_groups(ProcessGroup& world, int expert_parallel_size) {
    RankGroups groups;
    groups.world = &world;
    groups.expert_parallel = world.split(world.rank() / expert_parallel_size);
    groups.expert_replicas = world.split(world.rank() % expert_parallel_size);
    return groups;
}

std::unique_ptr<Exchange> make_exchange(const BackendChoice& choice, const RankGroups& groups, Ops& ops,
                                        const Config& config) {
    const CombineOrder order = config.moe.moe_combine_order;
    if (choice.kind == BackendKind::hopper && groups.world->size() == 1)
        return hopper::make_local_exchange(ops, order);
    if (choice.kind == BackendKind::hopper)
        return std::make_unique<StagedExchange>(*groups.expert_parallel, *groups.world,
                                                *groups.expert_replicas, ops.device(),
                                                std::make_unique<ReferenceOps>(), order);
    auto exchange = std::make_unique<GroupExchange>(*groups.expert_parallel, ops, order);
    exchange->set_groups(*groups.world, *groups.expert_replicas);
    return exchange;
}

void check_processor() {
    require(
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), ExitCode::usage,
        "this processor has no AVX2 and FMA instructions; fp8flow is built for x86-64-v3 (2013 and later)");
}

}  // namespace fp8flow
