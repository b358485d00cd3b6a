// SPDX-License-Identifier: MIT
// Measuring what a machine can do at most.
#include "model/measure/ceilings.h"

#include "kernels/core/arena.h"

#include <vector>

namespace fp8flow {

PeerRates measure_peers(Meter& meter, PeerProbe& peers, const Together& together) {
    const auto rate = [&](const std::function<void(int64_t)>& call) {
        const double seconds = meter.time_burst({.call = call, .together = &together}).median;
        return static_cast<double>(peers.bytes()) / together.largest(seconds);
    };
    return {.load = rate([&](int64_t) { peers.load(); }), .store = rate([&](int64_t) { peers.store(); })};
}

Ceilings::Ceilings(Meter& meter, Ops& dense, int64_t side) : meter_(meter), dense_(dense), side_(side) {}

double Ceilings::traffic_seconds(int64_t bytes_read, int64_t bytes_written) {
    const int64_t reads = round_up(bytes_read, 16), writes = round_up(bytes_written, 16);
    if (reads + writes == 0) return 0;
    const auto [found, unknown] = traffic_.try_emplace({reads, writes}, 0.0);
    if (!unknown) return found->second;

    Arena arena(meter_.device(), "ceilings");
    const int64_t sets = meter_.sets_for(reads + writes);
    std::vector<TensorView> from, to;
    for (int64_t i = 0; i < sets; ++i) {
        from.push_back(arena.tensor(DType::f32, {reads / 4}, "from"));
        to.push_back(arena.tensor(DType::f32, {writes / 4}, "to"));
        if (i == 0)
            filler_.fill(meter_.device(), from[0]);
        else
            meter_.device().copy(from.back().data, from[0].data, static_cast<std::size_t>(reads));
    }
    double best = 0;
    for (const int depth : {2, 4, 8}) {
        const Subject subject{.call =
                                  [&](int64_t set) {
                                      const auto at = static_cast<std::size_t>(set);
                                      meter_.probe().stream_traffic({.from = from[at].data,
                                                                     .bytes_read = reads,
                                                                     .to = to[at].data,
                                                                     .bytes_written = writes,
                                                                     .depth = depth});
                                  },
                              .num_sets = sets,
                              .cache = meter_.cache_of(reads + writes, sets)};
        const double seconds = meter_.time_burst(subject).median;
        if (best == 0 || seconds < best) best = seconds;
    }
    return found->second = best;
}

double Ceilings::gemm(GemmKind kind) {
    const auto [found, unknown] = gemms_.try_emplace(kind);
    if (!unknown) return found->second;
    Device& device = meter_.device();
    Arena arena(device, "ceilings");
    const auto operand = [&](uint64_t seed) {
        if (kind == GemmKind::bf16) {
            const TensorView values = arena.tensor(DType::bf16, {side_, side_}, "operand");
            fill_random(device, values, {.seed = seed});
            return ScaledTensor{values, {}, ScaleLayout::none};
        }
        const ScaledTensor tensor = arena.fp8(DType::e4m3, {side_, side_}, ScaleLayout::tensor, "operand");
        fill_random(device, tensor.data, {.seed = seed});
        fill_random(device, tensor.scales, {.distribution = Distribution::pow2, .spread = 0, .seed = seed});
        return tensor;
    };
    const ScaledTensor a = operand(1), b = operand(2);
    const TensorView d = arena.tensor(DType::bf16, {side_, side_}, "product");
    const double seconds = meter_
                               .time({.call = [&](int64_t) { dense_.gemm({.a = a, .b = b, .d = d}); },
                                      .regimes = Subject::Regimes::burst})
                               .median;
    const double flops =
        2.0 * static_cast<double>(side_) * static_cast<double>(side_) * static_cast<double>(side_);
    return found->second = flops / seconds;
}

}  // namespace fp8flow
