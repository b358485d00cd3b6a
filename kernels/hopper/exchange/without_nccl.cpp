// SPDX-License-Identifier: MIT
// Stubs for a build without NCCL. CMake passes the reason as FP8FLOW_NO_NCCL_REASON.
#include "kernels/core/error.h"
#include "kernels/hopper/exchange/peer/regions.h"
#include "kernels/hopper/factory.h"

namespace fp8flow::hopper {

bool built_with_nccl() { return false; }

std::unique_ptr<Exchange> make_nccl_exchange(Ops&, const ExchangeGroups&, CombineOrder, MessageSizes,
                                             double) {
    fail(ExitCode::usage, "this program was built without the exchange over NCCL: " FP8FLOW_NO_NCCL_REASON);
}

}  // namespace fp8flow::hopper

namespace fp8flow::hopper::peer {

std::unique_ptr<PeerRegions> make_window_regions(ProcessGroup&, std::string& reason) {
    reason = "this program was built without NCCL: " FP8FLOW_NO_NCCL_REASON;
    return nullptr;
}

}  // namespace fp8flow::hopper::peer
