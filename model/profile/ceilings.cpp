// SPDX-License-Identifier: MIT
// Ceilings by backend: large GEMMs and copies on a GPU, small ones on a host, where they are only a rough
// guide.
#include "model/profile/ceilings.h"

#include <algorithm>
#include <cmath>

namespace fp8flow::profile {

namespace {

constexpr int64_t kGpuSide = 8192, kHostSide = 256;
constexpr int64_t kGpuLargest = int64_t{4} << 30, kHostLargest = int64_t{32} << 20;
constexpr double kSmallestGrain = 65536;

bool on_gpu(const BackendChoice& backend) { return backend.kind == BackendKind::hopper; }

}  // namespace

ProfileCeilings::ProfileCeilings(const BackendChoice& backend, ProcessGroup& world)
    : ops_(make_ops(backend, Arithmetic::ceiling)),
      probe_(make_probe(backend, *ops_)),
      meter_(ops_->device(), *probe_, on_gpu(backend) ? MeasureOptions{} : MeasureOptions::for_host()),
      ceilings_(meter_, *ops_, on_gpu(backend) ? kGpuSide : kHostSide),
      largest_(on_gpu(backend) ? kGpuLargest : kHostLargest) {
    const auto peers =
        world.size() > 1 ? make_peer_probe(backend, *ops_, world, no_peers_) : std::unique_ptr<PeerProbe>();
    if (peers == nullptr) return;
    const Together together{.barrier = [&] { world.barrier(); },
                            .largest =
                                [&](double seconds) {
                                    auto longest = static_cast<float>(seconds);
                                    world.all_reduce_max(std::span<float>(&longest, 1));
                                    return static_cast<double>(longest);
                                }};
    peers_ = measure_peers(meter_, *peers, together);
}

double ProfileCeilings::traffic_seconds(const OpCost& cost) {
    if (cost.bytes <= 0) return 0;
    // Sizes that differ by less than an eighth share a measurement, and time grows with the bytes between
    // them; so it does above the largest size.
    const double size = std::min(cost.bytes, static_cast<double>(largest_)), shrink = size / cost.bytes;
    const double grain = std::max(kSmallestGrain, std::exp2(std::floor(std::log2(size)) - 3));
    const auto rounded = [&](double bytes) {
        return static_cast<int64_t>(grain * std::round(bytes * shrink / grain));
    };
    const int64_t written = rounded(cost.written), read = rounded(cost.bytes - cost.written);
    if (read + written == 0) return ceilings_.traffic_seconds(static_cast<int64_t>(kSmallestGrain), 0);
    const double seconds = ceilings_.traffic_seconds(read, written);
    // small ones are bound by launches, not bytes
    if (size < 8 * kSmallestGrain) return seconds;
    return seconds * cost.bytes / static_cast<double>(read + written);
}

double ProfileCeilings::seconds_of(const OpCall& call, double wire_bytes) {
    const OpCost& cost = call.cost;
    double arithmetic = 0;
    if (cost.unit != Unit::vector && cost.flops > 0) {
        const GemmKind kind = cost.unit == Unit::fp8_mma ? GemmKind::fp8 : GemmKind::bf16;
        arithmetic = cost.flops / ceilings_.gemm(kind).burst;
    }
    const double rate = std::max(peers_.load, peers_.store);
    return std::max({traffic_seconds(cost), arithmetic, rate > 0 ? wire_bytes / rate : 0.0});
}

MachineRates ProfileCeilings::rates() {
    const auto half = static_cast<double>(largest_ / 2);
    return {.device = probe_->device_name(),
            .bytes_per_second =
                2 * half /
                traffic_seconds({.bytes = 2 * half, .flops = 0, .unit = Unit::vector, .written = half}),
            .bf16_flops = ceilings_.gemm(GemmKind::bf16).burst,
            .fp8_flops = ceilings_.gemm(GemmKind::fp8).burst,
            .peer_load = peers_.load,
            .peer_store = peers_.store,
            .no_peers = no_peers_};
}

}  // namespace fp8flow::profile
