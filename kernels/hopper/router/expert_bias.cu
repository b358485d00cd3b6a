// SPDX-License-Identifier: MIT
// Updates the expert bias (aux-loss-free balancing).
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::router {

namespace {

// Traffic: 16 bytes per expert. Every thread adds all counts itself: a few hundred integers, from L1.
constexpr int kBiasThreads = 256;
__global__ __launch_bounds__(kBiasThreads) void expert_bias_kernel(const int64_t* counts, int64_t experts,
                                                                   float rate, const int32_t* status,
                                                                   float* bias) {
    if (status != nullptr && *status != 0) return;
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) total += counts[e];
    for (int64_t e = threadIdx.x; e < experts; e += kBiasThreads) {
        const int64_t surplus = counts[e] * experts - total;  // E times (count - mean), exact
        if (surplus < 0) bias[e] += rate;
        if (surplus > 0) bias[e] -= rate;
    }
}

}  // namespace

}  // namespace fp8flow::hopper::router

namespace fp8flow {

using namespace hopper;
using namespace hopper::router;

void HopperOps::do_expert_bias_update(const op::ExpertBiasUpdate& args, const Launch& launch) {
    const int64_t experts = args.counts.dim(0);
    if (experts == 0) return;
    launch_kernel(expert_bias_kernel, 1, kBiasThreads, launch, "expert_bias_update",
                  args.counts.as<int64_t>(), experts, args.rate,
                  args.status ? args.status.as<int32_t>() : nullptr, args.bias.as<float>());
}

}  // namespace fp8flow
