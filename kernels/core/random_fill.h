// Random tensors on a device, for benchmarks and probes: real data switch more transistors than zeros, and a GPU at its power limit
// then runs slower. Drawn on the host once and repeated with a period that no row length divides.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/core/tensor.h"

#include <cstdint>

namespace fp8flow {

// What is drawn. normal: mean 0, standard deviation `spread` (FP8 codes: a third of the largest code, clipped there, so that
// every exponent occurs, as after quantisation). pow2: 2^e, e uniform in [-spread, spread]. integers: uniform in [0, spread).
enum class Distribution : uint8_t { normal, pow2, integers };

struct RandomFill {
    Distribution distribution = Distribution::normal;
    double spread = 1.0;
    uint64_t seed = 1;
};

// Fills `view` on `device`; element i depends on the seed, the kind of draw and i modulo the period alone.
void fill_random(Device& device, const TensorView& view, const RandomFill& fill = {});

}  // namespace fp8flow
