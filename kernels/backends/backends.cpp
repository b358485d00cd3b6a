// SPDX-License-Identifier: MIT
// A backend by name, and the exchange of programs that link the library.
#include "kernels/backends/backends.h"

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
    return choose_exchange(backend.kind, *backend.ops, groups,
                           {.limits = limits, .order = order, .deadline_seconds = deadline_seconds})
        .exchange;
}

}  // namespace fp8flow
