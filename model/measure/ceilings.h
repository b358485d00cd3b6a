// SPDX-License-Identifier: MIT
// Ceilings: the rates that this very machine reaches on the simplest work of a kind, measured when first
// requested: memory traffic with the same bytes and mix of reads and writes, and a large dense GEMM. An
// operation's time is compared with these.
#pragma once

#include "kernels/core/random_fill.h"
#include "kernels/ops.h"
#include "model/measure/measure.h"

#include <map>
#include <utility>

namespace fp8flow {

enum class GemmKind : uint8_t { bf16, fp8 };  // fp8: E4M3 with one scale per operand

// Bytes per second between one rank and all others, all ranks active; of the slowest rank.
struct PeerRates {
    double load = 0;
    double store = 0;
};
// Collective.
PeerRates measure_peers(Meter& meter, PeerProbe& peers, const Together& together);

class Ceilings {
public:
    // `dense` computes the GEMMs (on a GPU: cuBLASLt), [side, side] by [side, side]. Both outlive the
    // ceilings.
    Ceilings(Meter& meter, Ops& dense, int64_t side);

    // Seconds that moving so many bytes takes, cache cold. Known counts are not measured again.
    double traffic_seconds(int64_t bytes_read, int64_t bytes_written);
    double gemm(GemmKind kind);  // FLOP/s of a burst

private:
    Meter& meter_;
    Ops& dense_;
    int64_t side_;
    RandomFiller filler_;
    std::map<std::pair<int64_t, int64_t>, double> traffic_;
    std::map<GemmKind, double> gemms_;
};

}  // namespace fp8flow
