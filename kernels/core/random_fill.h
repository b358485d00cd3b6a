// SPDX-License-Identifier: MIT
// Random tensors on a device, for benchmarks and probes: real data switch more transistors than zeros, and a
// GPU at its power limit then runs slower. Drawn on the host once and repeated with a period that no row
// length divides.
#pragma once

#include "kernels/core/device.h"
#include "kernels/core/tensor.h"

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

namespace fp8flow {

// What is drawn. normal: mean 0, standard deviation `spread` (FP8: a third of the largest value, clipped
// there, so that every exponent occurs, as after quantisation). pow2: 2^e, e uniform in [-spread, spread].
// integers: uniform in [0, spread).
enum class Distribution : uint8_t { normal, pow2, integers };

struct RandomFill {
    Distribution distribution = Distribution::normal;
    double spread = 1.0;
    uint64_t seed = 1;
};

// Fills `view` on `device`; element i depends on the seed, the kind of draw and i modulo the period alone.
void fill_random(Device& device, const TensorView& view, const RandomFill& fill = {});

// The same for many tensors: a period is drawn once and kept on the host.
class RandomFiller {
public:
    void fill(Device& device, const TensorView& view, const RandomFill& fill = {});

private:
    using Kind = std::tuple<DType, Distribution, double, uint64_t>;
    std::map<Kind, std::vector<uint8_t>> drawn_;
};

}  // namespace fp8flow
