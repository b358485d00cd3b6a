// SPDX-License-Identifier: MIT
// The one place below model/ that names a concrete backend.
#include "kernels/backends/backends.h"

#include "kernels/comm/group_exchange.h"
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/reference/reference_ops.h"

namespace fp8flow {

Backend make_backend(BackendKind wanted, int device) {
    const bool usable = device < hopper::device_count();
    if (wanted == BackendKind::hopper || (wanted == BackendKind::automatic && usable))
        return {BackendKind::hopper, hopper::make_ops(device)};
    return {BackendKind::reference, std::make_unique<ReferenceOps>()};
}

std::unique_ptr<Exchange> make_exchange(const Backend& backend, const ExchangeGroups& groups,
                                        const ExchangeLimits& limits, CombineOrder order,
                                        double deadline_seconds) {
    if (backend.kind == BackendKind::reference) {
        auto exchange = std::make_unique<GroupExchange>(groups.expert_parallel, *backend.ops, order);
        exchange->set_groups(groups.world, groups.expert_replicas);
        return exchange;
    }
    if (groups.world.size() == 1) return hopper::make_local_exchange(*backend.ops, order);
    std::string reason;
    auto exchange = hopper::make_peer_exchange(*backend.ops, groups, limits, order, deadline_seconds,
                                               PeerMapping::cuda_ipc, reason);
    if (exchange) return exchange;
    return hopper::make_nccl_exchange(*backend.ops, groups, order, hopper::MessageSizes::fixed,
                                      deadline_seconds);
}

}  // namespace fp8flow
