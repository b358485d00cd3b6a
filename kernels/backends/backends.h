// SPDX-License-Identifier: MIT
// The choice of backend and exchange. Programs that link the library call make_backend and make_exchange.
// fp8flow itself calls choose_exchange with its configuration (model/job/backend.h).
#pragma once

#include "kernels/backends/dispatcher.h"
#include "kernels/hopper/factory.h"

#include <memory>
#include <string>

namespace fp8flow {

enum class BackendKind { automatic, reference, hopper };

struct Backend {
    BackendKind kind = BackendKind::reference;  // never automatic
    std::unique_ptr<Ops> ops;
};
// automatic: GPU `device` if it is usable, otherwise the host. Throws Error(usage) if the wanted backend
// cannot run.
Backend make_backend(BackendKind wanted = BackendKind::automatic, int device = 0);

struct ExchangeSpec {
    ExchangeLimits limits;
    CombineOrder order = CombineOrder::rank;
    TokenDispatcher dispatcher = TokenDispatcher::flex;
    FlexBackend mapping = FlexBackend::nvlink;
    hopper::MessageSizes message_sizes = hopper::MessageSizes::fixed;
    HostLayout hosts = {};  // of groups.world; default: one host
    double deadline_seconds = 300;
};
// An exchange, and one line that says why it was chosen (empty for one rank).
struct ExchangeChoice {
    std::unique_ptr<Exchange> exchange;
    std::string note;
};
// The exchange of the groups' ranks, with tensors in the memory of `ops`. groups.expert_parallel:
// neighbouring ranks of groups.world, as many in every group. Collective over the world: the same choice on
// every rank. Throws Error(usage) if GPUs have neither peer memory nor NCCL. `ops` and the groups outlive the
// exchange.
//
// - reference backend: messages between ranks (GroupExchange), over two levels if asked for
// - one GPU: local
// - flex, all ranks on one host: peer memory, otherwise NCCL
// - flex, every expert-parallel group on one host: peer memory for rows, NCCL for reductions; otherwise NCCL
// - hierarchical, a group on several hosts: NCCL between hosts; inside a host peer memory, otherwise NCCL
// - all others: NCCL
ExchangeChoice choose_exchange(BackendKind backend, Ops& ops, const ExchangeGroups& groups,
                               const ExchangeSpec& spec);
// Whether any expert-parallel group of `ranks` neighbouring ranks is on several hosts.
bool any_group_spans_hosts(const HostLayout& hosts, int64_t ranks);

// choose_exchange on one host with its defaults.
std::unique_ptr<Exchange> make_exchange(const Backend& backend, const ExchangeGroups& groups,
                                        const ExchangeLimits& limits, CombineOrder order = CombineOrder::rank,
                                        double deadline_seconds = 300);

// make(mapping, reason) by the first mapping of peer memory that works. Null if none does; `why` collects the
// reasons.
template <class Make>
auto by_first_mapping(FlexBackend wanted, std::string& why, Make make) -> decltype(make(PeerMapping{}, why)) {
    for (const PeerMapping mapping : {PeerMapping::cuda_ipc, PeerMapping::nccl_window}) {
        const FlexBackend key =
            mapping == PeerMapping::cuda_ipc ? FlexBackend::cuda_ipc : FlexBackend::nccl_window;
        if (wanted != FlexBackend::nvlink && wanted != key) continue;
        std::string reason;
        if (auto made = make(mapping, reason)) return made;
        why += (why.empty() ? "" : "; ") + std::string(name_of(mapping)) + ": " + reason;
    }
    return nullptr;
}

}  // namespace fp8flow
