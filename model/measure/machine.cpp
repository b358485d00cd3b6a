// SPDX-License-Identifier: MIT
// Ceilings by backend.
#include "model/measure/machine.h"

#include <cmath>

namespace fp8flow {

namespace {

constexpr int64_t kGpuSide = 8192, kHostSide = 256;  // of GEMMs
constexpr int64_t kGpuLargest = int64_t{4} << 30, kHostLargest = int64_t{32} << 20;
constexpr double kSmallestGrain = 65536;

bool on_gpu(const BackendChoice& backend) { return backend.kind == BackendKind::hopper; }

}  // namespace

MeasureOptions MachineCeilings::usual_options(const BackendChoice& backend) {
    // a host works while the caller waits: no regimes to distinguish, and long calls
    return on_gpu(backend) ? MeasureOptions{} : MeasureOptions{1, 3, 1, 0.0, 0.0};
}

MachineCeilings::MachineCeilings(const BackendChoice& backend, ProcessGroup& world,
                                 const MeasureOptions& options)
    : ops_(make_ops(backend, Arithmetic::ceiling)),
      probe_(make_probe(backend, *ops_)),
      meter_(ops_->device(), *probe_, options),
      ceilings_(meter_, *ops_, on_gpu(backend) ? kGpuSide : kHostSide),
      together_{.barrier = [&world] { world.barrier(); },
                .largest =
                    [&world](double seconds) {
                        auto picoseconds = static_cast<int64_t>(seconds * 1e12);
                        world.all_reduce_max(std::span<int64_t>(&picoseconds, 1));
                        return f64(picoseconds) * 1e-12;
                    }},
      largest_(on_gpu(backend) ? kGpuLargest : kHostLargest) {
    const auto peers =
        world.size() > 1 ? make_peer_probe(backend, *ops_, world, no_peers_) : std::unique_ptr<PeerProbe>();
    if (peers != nullptr) peers_ = measure_peers(meter_, *peers, together_);
}

double MachineCeilings::traffic_seconds(const OpCost& cost) {
    if (cost.bytes <= 0) return 0;
    // Sizes that differ by less than an eighth share a measurement, and time grows with the bytes between
    // them; so it does above the largest size.
    const double size = std::min(cost.bytes, f64(largest_)), shrink = size / cost.bytes;
    const double grain = std::max(kSmallestGrain, std::exp2(std::floor(std::log2(size)) - 3));
    const auto rounded = [&](double bytes) {
        return static_cast<int64_t>(grain * std::round(bytes * shrink / grain));
    };
    const int64_t written = rounded(cost.written), read = rounded(cost.bytes - cost.written);
    if (read + written == 0) return ceilings_.traffic_seconds(static_cast<int64_t>(kSmallestGrain), 0);
    const double seconds = ceilings_.traffic_seconds(read, written);
    // small ones are bound by launches, not bytes
    if (size < 8 * kSmallestGrain) return seconds;
    return seconds * cost.bytes / f64(read + written);
}

LowerBound MachineCeilings::bound_of(const OpCost& cost, double wire_bytes) {
    LowerBound bound{.traffic = traffic_seconds(cost)};
    if (cost.unit != Unit::vector && cost.flops > 0)
        bound.gemms =
            cost.flops / ceilings_.gemm(cost.unit == Unit::fp8_mma ? GemmKind::fp8 : GemmKind::bf16);
    if (const double rate = std::max(peers_.load, peers_.store); rate > 0) bound.wire = wire_bytes / rate;
    return bound;
}

MachineRates MachineCeilings::rates() {
    const auto half = f64(largest_) / 2;
    return {.device = probe_->device_name(),
            .bytes_per_second = 2 * half / traffic_seconds({.bytes = 2 * half, .written = half}),
            .bf16_flops = ceilings_.gemm(GemmKind::bf16),
            .fp8_flops = ceilings_.gemm(GemmKind::fp8),
            .peer_load = peers_.load,
            .peer_store = peers_.store,
            .no_peers = no_peers_};
}

}  // namespace fp8flow
