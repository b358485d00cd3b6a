// SPDX-License-Identifier: MIT
// RMSNorm backward of wide rows: the arithmetic of a unit, and the sums of a part of dgamma. For the kernels
// in rows_backward.cu and front_backward.cu. Contract: kernels/ops/norm.h.
#pragma once

#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/norm/norm_rows.h"

namespace fp8flow::hopper::norm {

// A unit of a row with rstd r: adds the products of dy, gamma (g) and x to the thread's strand, and those of
// dy and the normalised x to its sums for gamma.
template <DType kType>
__device__ __forceinline__ void add_unit(const uint4& raw_dy, const uint4& raw_x, const float (&g)[kUnit],
                                         float r, float& strand, float (&dgamma)[kUnit]) {
    float dy[kUnit], x[kUnit];
    unpack_unit(raw_dy, kType, dy);
    unpack_unit(raw_x, kType, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
        strand = fma_float(dy[i] * g[i], x[i], strand);
        dgamma[i] = fma_float(dy[i], x[i] * r, dgamma[i]);
    }
}

// The factor of x in dx; `sum`: of the strands of the whole row.
__device__ __forceinline__ float factor_of_x(const NormBackward& args, float r, float sum) {
    return r * r * div_float(sum, static_cast<float>(args.x.cols));
}

// Writes dx of a unit of the part of a row: r (dy g - x c), plus this part of dresidual, which is in the
// slot `residual`.
template <DType kType, Rows kRows>
__device__ __forceinline__ void write_dx_unit(const NormBackward& args, int row, const RowPart& part,
                                              int unit, const uint4& raw_dy, const uint4& raw_x,
                                              const float (&g)[kUnit], float r, float c,
                                              const uint8_t* residual) {
    float dx[kUnit], x[kUnit];
    unpack_unit(raw_dy, kType, dx);
    unpack_unit(raw_x, kType, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) dx[i] = r * (dx[i] * g[i] - x[i] * c);
    if (args.dresidual) {
        unpack_unit(unit_of(residual, unit), kType, x);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) dx[i] += x[i];
    }
    if constexpr (kRows == Rows::fetched)
        store_unit(args.dx, row, (part.first / kUnit + unit) * kUnit, dx);
    else
        *unit_of(args.dx, row, part.first / kUnit + unit) = pack_unit<kType>(dx);
}

// gamma with its offset, which is added last so that no load waits for it.
template <int kUnits> __device__ __forceinline__ void add_offset(float offset, float (&g)[kUnits][kUnit]) {
    if (offset == 0.0f) return;
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
#pragma unroll
        for (int i = 0; i < kUnit; ++i) g[j][i] = offset + g[j][i];
}

// The dgamma sums of a team in shared memory: the lower halves of all units, then the upper ones. One team
// stores them, another adds them and writes the part: row `sums` of the partials. sums_of(team) is the place
// of a team; a barrier of all teams separates the two functions.
template <int kUnits>
__device__ __forceinline__ void store_sums(const float (&dgamma)[kUnits][kUnit], int units, int thread,
                                           float4* to) {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = thread + j * kNormThreads;
        if (unit >= units) continue;
        const float(&v)[kUnit] = dgamma[j];
        to[unit] = float4{v[0], v[1], v[2], v[3]};
        to[units + unit] = float4{v[4], v[5], v[6], v[7]};
    }
}
template <int kTeams, Rows kRows, int kUnits, class SumsOf>
__device__ __forceinline__ void write_part(const NormBackward& args, const RowPart& part, int sums,
                                           int thread, SumsOf sums_of, float (&dgamma)[kUnits][kUnit]) {
    const RowView out = {args.partials, nullptr, args.x.cols, DType::f32, kRows == Rows::copied};
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = thread + j * kNormThreads;
        if (unit >= part.units) continue;
#pragma unroll
        for (int other = 1; other < kTeams; ++other) {
            const float4 a = sums_of(other)[unit], b = sums_of(other)[part.units + unit];
            const float v[kUnit] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < kUnit; ++i) dgamma[j][i] += v[i];
        }
        store_unit(out, sums, (part.first / kUnit + unit) * kUnit, dgamma[j]);
    }
}

// The teams of a CTA end a part: the first one adds the sums of the others. Its named barrier is
// join_barrier(); the next one is free for the kernel.
constexpr int join_barrier(int teams) { return 1 + teams; }
template <int kTeams, Rows kRows, int kUnits, class SumsOf>
__device__ __forceinline__ void join_part(const NormBackward& args, const RowPart& part, int sums, int team,
                                          int thread, SumsOf sums_of, float (&dgamma)[kUnits][kUnit]) {
    constexpr int kJoin = join_barrier(kTeams), kThreads = kTeams * kNormThreads;
    if (team > 0) {
        store_sums(dgamma, part.units, thread, sums_of(team));
        named_barrier_arrive(kJoin, kThreads);
    } else {
        if (kTeams > 1) named_barrier_sync(kJoin, kThreads);
        write_part<kTeams, kRows>(args, part, sums, thread, sums_of, dgamma);
    }
}

}  // namespace fp8flow::hopper::norm
