// SPDX-License-Identifier: MIT
// The only file that names a concrete backend: chooses it, and makes its operations, exchanges and process
// groups.
#include "model/job/backend.h"

#include "kernels/core/error.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/count_launches.h"
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/reference/host_device.h"
#include "kernels/reference/reference_ops.h"

#include <unistd.h>

namespace fp8flow {

namespace {

AttentionBackend attention_of(AttentionBackendKey key) {
    if (key == AttentionBackendKey::native) return AttentionBackend::native;
    const std::string problem = hopper::cudnn_problem();
    require(problem.empty() || key == AttentionBackendKey::automatic, ExitCode::usage,
            "kernels.attention_backend: cudnn is requested, but {}", problem);
    return problem.empty() ? AttentionBackend::cudnn : AttentionBackend::native;
}

HostLayout hosts_of_job(ProcessGroup& world, const ParallelSpec& parallel) {
    if (parallel.hosts > 0)
        return HostLayout::consecutive(0, world.size(), static_cast<int>(parallel.ranks_per_host));
    return HostLayout(world.hosts());
}

}  // namespace

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
    const bool on_gpu = own.kind == BackendKind::hopper;
    if (world.all_true(on_gpu) || !on_gpu) return own;
    require(wanted != BackendKind::hopper, ExitCode::usage,
            "--backend hopper: another rank has no GPU of its own");
    return {.note = "warning: backend: reference (another rank has no GPU of its own)"};
}

MachineFacts machine_facts(const BackendChoice& choice) {
    MachineFacts facts{.cpu = HostProbe().device_name(), .host_cores = ::sysconf(_SC_NPROCESSORS_ONLN)};
    if (choice.kind == BackendKind::hopper) {
        facts.gpu = hopper::device_name(choice.device);
        facts.gpu_clock_hertz = hopper::max_clock_hertz(choice.device);
        facts.gpu_memory_bytes = hopper::memory_bytes(choice.device);
    }
    return facts;
}

std::vector<MachineCheck> check_gpus() {
    const int devices = hopper::device_count();
    if (devices == 0) {
        const std::string reason = hopper::unavailable_reason();
        if (!hopper::gpu_visible()) return {{"GPU", reason + ": runs use the reference backend, on CPUs"}};
        return {
            {"GPU", reason,
             hopper::built_with_cuda()
                 ? "a Hopper GPU, its driver, and a program of cmake --preset cuda-release"
                 : "cmake --preset cuda-release && cmake --build build/cuda-release (nvcc 12.9 or later)"}};
    }
    const std::string name = hopper::device_name(0);
    const double clock = hopper::max_clock_hertz(0);
    std::vector<MachineCheck> found = {
        {"GPU", fmt::format("{} x {}, {:.1f} GiB, up to {:.0f} MHz (under load: nvidia-smi -q -d CLOCK)",
                            devices, name, f64(hopper::memory_bytes(0)) / 0x1p30, clock * 1e-6)},
        {"CUDA", fmt::format("built with {}, the driver supports {}", hopper::runtime_version(),
                             hopper::driver_version())}};
    for (int device = 1; device < devices; ++device)
        if (hopper::device_name(device) != name || hopper::max_clock_hertz(device) != clock)
            found.push_back({"clock",
                             fmt::format("GPUs 0 and {} differ: all wait for the slower one", device),
                             fmt::format("CUDA_VISIBLE_DEVICES without {}", device)});
    const std::string peers = hopper::peer_problem(), cudnn = hopper::cudnn_problem();
    found.push_back(peers.empty()
                        ? MachineCheck{"peer access", "every GPU reaches the memory of all others"}
                        : MachineCheck{"peer access", peers, "parallel.moe_token_dispatcher_type: alltoall"});
    found.push_back(hopper::built_with_nccl()
                        ? MachineCheck{"NCCL", "in this program"}
                        : MachineCheck{"NCCL", "not in this program: no exchange between hosts",
                                       "apt-get install libnccl2 libnccl-dev, and build again"});
    found.push_back(
        {"cuDNN", cudnn.empty() ? "attention uses it" : "attention uses this project's kernels: " + cudnn});
    return found;
}

std::string attention_note(const BackendChoice& choice, const Config& config) {
    const ModelSpec& model = config.model;
    if (choice.kind != BackendKind::hopper || !model.attention ||
        config.kernels.attention_backend == AttentionBackendKey::native)
        return {};
    const std::string problem = hopper::cudnn_problem(model.qk_dim(), model.v_dim());
    if (problem.empty()) return {};
    return fmt::format(
        "note: attention runs on this project's kernels, which take hundreds of times as long as cuDNN's in "
        "long sequences: {}",
        problem);
}

std::unique_ptr<Ops> make_ops(const BackendChoice& choice, Arithmetic arithmetic, const KernelSpec& kernels) {
    const bool alternative = arithmetic == Arithmetic::alternative;
    if (choice.kind == BackendKind::hopper) {
        const KernelChoice chosen{.gemm = alternative                         ? GemmBackend::alternative
                                          : arithmetic == Arithmetic::ceiling ? GemmBackend::cublaslt
                                                                              : GemmBackend::native,
                                  .attention = attention_of(kernels.attention_backend)};
        return hopper::make_ops(choice.device, chosen);
    }
    return std::make_unique<ReferenceOps>(alternative ? SummationOrder::split : SummationOrder::sequential);
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
    return groups;
}

int num_hosts(ProcessGroup& world, const ParallelSpec& parallel) {
    return hosts_of_job(world, parallel).num_hosts();
}

ExchangeChoice make_exchange(const BackendChoice& choice, const RankGroups& groups, Ops& ops,
                             const Config& config) {
    const ParallelSpec& parallel = config.parallel;
    const bool fixed = config.schedule.cuda_graph_impl == CudaGraphImpl::full_iteration ||
                       parallel.moe_message_sizes == MessageSizesKey::fixed;
    return choose_exchange(
        choice.kind, ops, {*groups.world, *groups.expert_parallel, *groups.expert_replicas},
        {.limits = {.tokens_per_rank = config.training.micro_batch_size * config.model.seq_length,
                    .topk = config.moe.moe_router_topk,
                    .hidden = config.model.hidden_size,
                    .row = config.precision.recipe == Recipe::fp32 ? DType::f32 : DType::bf16},
         .order = config.moe.moe_combine_order,
         .dispatcher = parallel.moe_token_dispatcher_type,
         .mapping = parallel.moe_flex_dispatcher_backend,
         .message_sizes = fixed ? hopper::MessageSizes::fixed : hopper::MessageSizes::own,
         .hosts = hosts_of_job(*groups.world, parallel),
         .deadline_seconds = parallel.peer_deadline_seconds});
}

void check_processor() {
    require(
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), ExitCode::usage,
        "this processor has no AVX2 and FMA instructions; fp8flow is built for x86-64-v3 (2013 and later)");
}

}  // namespace fp8flow
