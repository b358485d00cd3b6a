// SPDX-License-Identifier: MIT
// Chooses the backend, once, and makes what depends on it. Read next: trainer.h.
#pragma once

#include "kernels/backends/backends.h"
#include "kernels/comm/process_group.h"
#include "kernels/core/launch_count.h"
#include "kernels/exchange.h"
#include "kernels/ops.h"
#include "kernels/probe.h"
#include "model/config/config.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow {

// Kernels of GEMMs: stated (the contract's order of summation); alternative (another, equally valid order:
// validate's control arm); ceiling (dense FP8 GEMMs on cuBLASLt, too: what bench and profile compare with).
enum class Arithmetic { stated, alternative, ceiling };

// What `--backend` resolves to; `note` is one line that says why.
struct BackendChoice {
    BackendKind kind = BackendKind::reference;
    int device = 0;  // of this rank
    std::string note;
};
// The GPU of a rank: one rank per GPU, in the order of the ranks on a host.
struct Placement {
    int64_t num_ranks = 1, ranks_on_host = 1, rank_on_host = 0;
};
// Throws Error(usage) if the wanted backend cannot run.
BackendChoice choose_backend(BackendKind wanted, const Placement& placement = {});
// The same on every rank of a job: the reference backend everywhere if a GPU is missing anywhere.
BackendChoice choose_backend(BackendKind wanted, const Placement& placement, ProcessGroup& world);
BackendKind parse_backend(const std::string& text);

// The machine of a rank, for results.
struct MachineFacts {
    std::string gpu;             // "NVIDIA H200"; empty on the host
    double gpu_clock_hertz = 0;  // its highest; 0: not known
    int64_t gpu_memory_bytes = 0;
    std::string cpu;         // model name
    int64_t host_cores = 0;  // online, whoever may use them
};
MachineFacts machine_facts(const BackendChoice& choice);
// What runs need of a machine, and the command or setting that brings what is missing; empty: nothing is.
struct MachineCheck {
    std::string what, text, fix = {};
};
// For `doctor`: the GPUs, how they reach each other, and their libraries.
std::vector<MachineCheck> check_gpus();
// What this rank's device has used so far; nothing on the host, or where the device does not count.
std::optional<double> energy_joules(const BackendChoice& choice);

// Says that attention of this model runs on the native GPU kernels though kernels.attention_backend allows
// cuDNN, and why; empty otherwise.
std::string attention_note(const BackendChoice& choice, const Config& config);

std::unique_ptr<Ops> make_ops(const BackendChoice& choice, Arithmetic arithmetic,
                              const KernelSpec& kernels = {});
// Of the device that `ops`, made by the same choice, run on; must not outlive them.
std::unique_ptr<Probe> make_probe(const BackendChoice& choice, Ops& ops);
// Kernels, fills and copies that one call launches on the GPU; nothing on the host, or where they cannot be
// counted. Runs the call once.
std::optional<LaunchCount> count_launches(const BackendChoice& choice,
                                          const std::function<void(const Launch&)>& call);
// Collective over `world`, as is its destruction. Null on every rank where there is nothing to measure,
// and `reason` says why.
std::unique_ptr<PeerProbe> make_peer_probe(const BackendChoice& choice, Ops& ops, ProcessGroup& world,
                                           std::string& reason);

// Process groups of a job: all ranks, the expert-parallel group, and the expert replicas.
struct RankGroups {
    ProcessGroup* world = nullptr;
    std::unique_ptr<ProcessGroup> expert_parallel, expert_replicas;
};
RankGroups make_rank_groups(ProcessGroup& world, int expert_parallel_size);
// Hosts of the job, from parallel.hosts or else from the launcher. Collective: the same on every rank.
int num_hosts(ProcessGroup& world, const ParallelSpec& parallel);
// choose_exchange by the keys of the configuration. Collective: the same on every rank.
ExchangeChoice make_exchange(const BackendChoice& choice, const RankGroups& groups, Ops& ops,
                             const Config& config);

// Exits with a clear line on processors without AVX2 + FMA, for which this program is not built.
void check_processor();

}  // namespace fp8flow
