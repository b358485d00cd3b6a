// SPDX-License-Identifier: MIT
// Factory functions of the Hopper backend, in builds with and without CUDA (runtime/without_cuda.cpp).
// Callers need no CUDA header.
#pragma once

#include "kernels/comm/exchange_groups.h"
#include "kernels/comm/levels/level_plans.h"
#include "kernels/hopper/kernel_choice.h"
#include "kernels/ops.h"
#include "kernels/probe.h"

#include <memory>
#include <string>

namespace fp8flow {

// How ranks of one host reach each other's GPU memory.
enum class PeerMapping { cuda_ipc, nccl_window };
constexpr const char* name_of(PeerMapping mapping) {
    return mapping == PeerMapping::cuda_ipc ? "CUDA IPC" : "NCCL window";
}

// The largest call of an exchange between GPUs, from which its buffers are sized; equal on all ranks.
struct ExchangeLimits {
    int64_t tokens_per_rank = 0;  // S
    int64_t topk = 0;
    int64_t hidden = 0;
    DType row = DType::bf16;  // dtype of combined rows; dispatched rows are at most as wide
};
namespace hopper {

// Operations on CUDA device `device`. Throws Error(usage) without a usable Hopper GPU.
std::unique_ptr<Ops> make_ops(int device, const KernelChoice& kernels = {});
// Why attention cannot run on cuDNN in this program; empty where it can.
std::string cudnn_problem();
// The same for heads of `depth` columns of queries and keys and `value_depth` columns of values.
std::string cudnn_problem(int64_t depth, int64_t value_depth);
// Probe of the GPU that `ops` run on; must not outlive them.
std::unique_ptr<Probe> make_probe(Ops& ops);
// Collective over `world`, as is its destruction; null on every rank, with the same `reason`, where GPUs
// cannot reach each other's memory. region_bytes: of each rank, divided by the ranks that store there.
std::unique_ptr<PeerProbe> make_peer_probe(Ops& ops, ProcessGroup& world, PeerMapping mapping,
                                           int64_t region_bytes, std::string& reason);
// The exchange of a job of one rank: it hosts every expert, so dispatch and combine are kernels that move
// rows on its GPU.
std::unique_ptr<Exchange> make_local_exchange(Ops& ops, CombineOrder order);
// The exchange between GPUs of one host through memory that all of them have mapped (NVLink), for up to 32
// experts a token. The world may be a part of the job: see HierarchicalExchange. Collective over the world;
// null on every rank alike where it cannot be made, and `reason` says why. Waits on another rank end after
// `deadline_seconds` with an error (Exchange::check_peers). `ops` and the groups outlive the exchange.
std::unique_ptr<Exchange> make_peer_exchange(Ops& ops, const ExchangeGroups& groups,
                                             const ExchangeLimits& limits, CombineOrder order,
                                             double deadline_seconds, PeerMapping mapping,
                                             std::string& reason);

// The exchange between GPUs of any hosts over NCCL's sends and receives. Collective over the world; deadline
// as above. Throws Error(usage) in a program built without NCCL. Messages of their own size hold the rows
// that routing asks for, and the host waits twice in each call that moves rows; those of a fixed size hold a
// row of every token, or of every choice where the combine order is invariant, and the host waits for
// nothing, nor looks at the deadline: calls can be captured.
enum class MessageSizes { own, fixed };
bool built_with_nccl();
std::unique_ptr<Exchange> make_nccl_exchange(Ops& ops, const ExchangeGroups& groups, CombineOrder order,
                                             MessageSizes sizes, double deadline_seconds);
// The plans of two levels of exchange (kernels/comm/levels), on the GPU, without a wait of the host.
DeriveLevelPlans derive_level_plans;

}  // namespace hopper

}  // namespace fp8flow
