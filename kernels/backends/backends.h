// SPDX-License-Identifier: MIT
// The two backends by name, for programs that link the library: operations of one device, and an exchange
// between ranks that share the experts. (The program chooses in model/base/backend.h, by configuration.)
#pragma once

#include "kernels/hopper/factory.h"

#include <memory>

namespace fp8flow {

enum class BackendKind { automatic, reference, hopper };

struct Backend {
    BackendKind kind = BackendKind::reference;  // never automatic
    std::unique_ptr<Ops> ops;
};
// automatic: GPU `device` where it can be used, otherwise the host. Throws Error(usage) where the wanted
// backend cannot run.
Backend make_backend(BackendKind wanted = BackendKind::automatic, int device = 0);

// All ranks of groups.world share the experts where groups.expert_parallel is as large; otherwise each
// expert-parallel group holds all of them. Collective over the world. On GPUs of one host through peer memory
// where that can be, else over NCCL. `backend` and the groups outlive the exchange.
std::unique_ptr<Exchange> make_exchange(const Backend& backend, const ExchangeGroups& groups,
                                        const ExchangeLimits& limits, CombineOrder order = CombineOrder::rank,
                                        double deadline_seconds = 300);

}  // namespace fp8flow
