// SPDX-License-Identifier: MIT
// How the program gets the Hopper backend, in builds with and without CUDA (without_cuda.cpp), so that
// callers need no CUDA header.
#pragma once

#include "kernels/comm/messages.h"
#include "kernels/comm/process_group.h"
#include "kernels/exchange.h"
#include "kernels/hopper/device/view.h"
#include "kernels/ops.h"
#include "kernels/probe.h"

#include <memory>
#include <string>

namespace fp8flow {

// Who computes matrix products. native: dense BF16 on cuBLASLt, all others on this project's tensor-core
// kernel, which reads group sizes on the device. cublaslt: all of them on cuBLASLt, experts one by one with
// sizes read by the host (the baseline). simt: all on CUDA cores, in the reference's order of summation and
// with its bits. alternative: all of them by one kernel on the tensor cores' older instructions, plain
// operands from the end of the contraction to its start: another, equally valid order of summation.
enum class GemmBackend { native, cublaslt, simt, alternative };
// Who computes attention. native: this project's kernel. cudnn: cuDNN, in builds that found it; shapes that
// it does not take run on native (attention/cudnn.h).
enum class AttentionBackend { native, cudnn };

struct KernelChoice {
    GemmBackend gemm = GemmBackend::native;
    AttentionBackend attention = AttentionBackend::native;
};

// How ranks of one host reach each other's GPU memory.
enum class PeerMapping { cuda_ipc, nccl_window };
constexpr const char* name_of(PeerMapping mapping) {
    return mapping == PeerMapping::cuda_ipc ? "CUDA IPC" : "NCCL window";
}

// What an exchange between GPUs must have room for; equal on all ranks.
struct ExchangeLimits {
    int64_t tokens_per_rank = 0;  // S
    int64_t topk = 0;
    int64_t hidden = 0;
    DType row = DType::bf16;  // dtype of combined rows; dispatched rows are at most as wide
};
struct ExchangeGroups {
    ProcessGroup& world;
    ProcessGroup& expert_parallel;
    ProcessGroup& expert_replicas;
};

namespace hopper {

// Operations on CUDA device `device`. Throws Error(usage) without a usable Hopper GPU.
std::unique_ptr<Ops> make_ops(int device, const KernelChoice& kernels = {});
// Why attention cannot run on cuDNN in this program; empty where it can.
std::string cudnn_problem();
// Of the GPU that `ops` run on; must not outlive them.
std::unique_ptr<Probe> make_probe(Ops& ops);
// Collective over `world`, as is the end of its life; null on every rank, with the same `reason`, where GPUs
// cannot reach each other's memory.
std::unique_ptr<PeerProbe> make_peer_probe(Ops& ops, ProcessGroup& world, PeerMapping mapping,
                                           std::string& reason);
// The exchange of a job of one rank: every expert is here, so dispatch and combine are row movers on the GPU.
std::unique_ptr<Exchange> make_local_exchange(Ops& ops, CombineOrder order);
// The exchange between GPUs of one host through memory that all of them have mapped (NVLink), for up to 32
// experts a token. Collective over the world; null on every rank alike where it cannot be had, and `reason`
// says why. Waits on another rank give up after `deadline_seconds` (Exchange::check_peers). `ops` and the
// groups outlive the exchange.
std::unique_ptr<Exchange> make_peer_exchange(Ops& ops, const ExchangeGroups& groups,
                                             const ExchangeLimits& limits, CombineOrder order,
                                             double deadline_seconds, PeerMapping mapping,
                                             std::string& reason);

// The exchange between GPUs of any hosts over NCCL's sends and receives. Collective over the world; deadline
// as above. Throws Error(usage) in a program built without NCCL.
bool built_with_nccl();
std::unique_ptr<Exchange> make_nccl_exchange(Ops& ops, const ExchangeGroups& groups, CombineOrder order,
                                             double deadline_seconds);
// Plain messages between the ranks' GPUs over NCCL. Collective, deadline and throws as above; `ops` and the
// world outlive them.
std::unique_ptr<Messages> make_nccl_messages(Ops& ops, ProcessGroup& world, double deadline_seconds);

}  // namespace hopper

}  // namespace fp8flow
