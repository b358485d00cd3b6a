// SPDX-License-Identifier: MIT
// gather_routing over peer memory: every rank stores its ids and probabilities into every member's receive
// buffer; after one group barrier each member copies them to the caller's tensors. permute/plan.cu then
// computes all offsets on the device, the same on all ranks.
#include "kernels/hopper/exchange/peer/peer_exchange.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::peer {

namespace {

// Layout of a receive buffer: ids [G, S, K], then probs [G, S, K].
struct RoutingArgs {
    PeerGroup group;
    const int32_t* ids;
    const float* probs;
    int64_t present, values;  // of this rank: T * K, and S * K
    int32_t* all_ids;
    float* all_probs;
};

// Traffic: writes 8 bytes per (token, k) to every rank. One value per thread; values of absent tokens are -1
// and 0. No barriers, one writer per word.
__global__ __launch_bounds__(kPeerThreads) void push_routing_kernel(const RoutingArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    for (int step = 1; step <= group.size; ++step) {
        const int member = (group.rank + step) % group.size;
        int32_t* ids = reinterpret_cast<int32_t*>(group.next_buffer(member)) + group.rank * args.values;
        float* probs =
            reinterpret_cast<float*>(group.next_buffer(member)) + (group.size + group.rank) * args.values;
        for (int64_t i = grid_thread(); i < args.values; i += grid_threads()) {
            ids[i] = i < args.present ? args.ids[i] : -1;
            probs[i] = i < args.present ? args.probs[i] : 0.0f;
        }
    }
    if (grid_thread() == 0) count_wire(&group.words->wire[0], (group.size - 1) * args.values * 8);
}

// Traffic: reads and writes 8 bytes per (rank, token, k) in local memory. If a peer was lost, all tokens
// count as absent, so that the plan is valid.
__global__ __launch_bounds__(kPeerThreads) void copy_routing_kernel(const RoutingArgs args) {
    const PeerGroup& group = args.group;
    const bool lost = group.lost();
    const int64_t all = group.size * args.values;
    const int32_t* ids = reinterpret_cast<const int32_t*>(group.current_buffer(group.rank));
    const float* probs = reinterpret_cast<const float*>(ids) + all;
    for (int64_t i = grid_thread(); i < all; i += grid_threads()) {
        args.all_ids[i] = lost ? -1 : ids[i];
        args.all_probs[i] = lost ? 0.0f : probs[i];
    }
}

}  // namespace

void PeerExchange::do_gather_routing(const Routing& routing, const Launch& launch) {
    const auto& [ids, probs, all_ids, all_probs] = routing;
    last_stream_ = launch.stream;
    const int64_t values = all_ids.dim(1) * all_ids.dim(2);
    check_fits(size() * values * 8, "the routing");
    const RoutingArgs args{.group = device_groups_[kExpertParallel],
                           .ids = ids.as<int32_t>(),
                           .probs = probs.as<float>(),
                           .present = ids.numel(),
                           .values = values,
                           .all_ids = all_ids.as<int32_t>(),
                           .all_probs = all_probs.as<float>()};
    launch_kernel(push_routing_kernel, peer_grid(ceil_div(values, kWarpSize), launch), kPeerThreads, launch,
                  "sending the routing", args);
    synchronize(kExpertParallel, PeerOperation::routing, launch);
    launch_kernel(copy_routing_kernel, peer_grid(ceil_div(size() * values, kWarpSize), launch), kPeerThreads,
                  launch, "copying the routing", args);
}

}  // namespace fp8flow::hopper::peer
