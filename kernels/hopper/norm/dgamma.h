// SPDX-License-Identifier: MIT
// The gradient of gamma over narrow rows: one launch for one or two norms. Contract:
// kernels/ops/norm_order.h.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/ops/norm.h"

#include <cstdint>
#include <span>

namespace fp8flow::hopper::norm {

constexpr int kMostGammas = 2;            // of a launch
constexpr int64_t kNarrowestWide = 1024;  // columns of a row that is not narrow

struct GammaJob {
    const uint16_t *dy, *x;  // [rows, width]
    const float* rstd;       // [rows]
    int64_t rows;
    float* dgamma;                      // [width]
    const float* chunk_sums = nullptr;  // [chunks, width]: what the rows add up to, if it is known
};

// BF16 rows of an even number of columns below kNarrowestWide, addresses multiples of 4.
bool sums_narrow_gamma(const GammaJob& job, int64_t width);
// Words of `partials` and of `tickets` (zero before and after) that a launch takes.
int64_t gamma_partials(int64_t width, int64_t jobs);
int64_t gamma_tickets(int64_t width, int64_t jobs);
// dgamma (+)= the sum over rows of dy * x * rstd, for every job.
void launch_narrow_gamma(std::span<const GammaJob> jobs, int64_t width, Gradient mode, float* partials,
                         uint32_t* tickets, const Launch& launch);

}  // namespace fp8flow::hopper::norm
