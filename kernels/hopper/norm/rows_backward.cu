// SPDX-License-Identifier: MIT
// RMSNorm backward on rows of BF16 or FP16 of 1024 to 2048 columns or of five to eight segments: every byte
// is read once, and the sums for gamma stay in registers. Contract: kernels/ops/norm.h. Rows between these:
// front_backward.cu. Forward: held_rows.cu, rows.cu. Other rows: norm.cu.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/norm/rows.h"

namespace fp8flow::hopper::norm {

namespace {

constexpr int kTeamSlots = 6;  // slots of a team: two each of dy, x and dresidual
constexpr int kFirstRows = 2;  // of a team, prefetched into L2 while the previous kernel ends
constexpr int teams_of(int units) { return units == 1 ? 4 : 2; }
static_assert(op::gamma_chunks(kUnit * kNormThreads) == teams_of(1) &&
              op::gamma_chunks(5 * op::kNormSegment) == teams_of(kMostUnits));

// RMSNorm backward, dy, x [T, H] (and dresidual) -> dx [T, H] and the sums of the parts of dgamma.
// Floor at T=4096, H=7168: dy, x, dresidual in, dx out: 235 MB, and 4 MB of sums: 56 us.
// A CTA per SM takes a part of dgamma, a chunk per team of 256 threads: neighbouring CTAs read neighbouring
// rows. Thread t owns the columns of strand t in every row, so that its dgamma sums stay in registers to the
// end of the chunk. At the end of a part the other teams store their sums in shared memory and continue; the
// first team adds and writes them. A row of several segments belongs to a cluster, as in rows.cu; its CTAs
// take the same rows at the same time.
// Two slots a team for dy and x, refilled two rows ahead; two for dresidual, which is read after the barrier
// and so is refilled one row ahead. A kernel starts with one row a team in flight, so that gamma does not
// queue after two.
// Barriers: full and full_residual, mbarriers of the slots (TMA bytes). One named barrier of the team a row:
// the row is in registers, the warp sums (alternating between two places) are written. kJoin: the teams have
// stored their dgamma sums.
// Deterministic: one writer a byte, sums in the order of the contract. dx may alias dy or dresidual: a row is
// written after it was read, by the CTA that read it.
// Tried: a chunk of consecutive rows per CTA. 1024 places in memory were read or written at a time, and 256
// chunks summed afterwards from 7 MB: 72 us in all.
template <int kUnits, DType kType, Rows kRows>
__global__ __launch_bounds__(teams_of(kUnits) * kNormThreads,
                             1) void norm_backward_rows_kernel(const NormBackward args) {
    constexpr int kTeams = teams_of(kUnits),
                  kJoin = 1 + kTeams;  // a named barrier per team, then one of all teams
    pdl_launch_dependents();
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Mbarrier full_of[kTeams][2], full_residual_of[kTeams][2];
    __shared__ float warp_sums_of[kTeams][2][kNormWarps];
    __shared__ SegmentSums segment_sums[kTeams];
    const int thread = static_cast<int>(threadIdx.x), team = static_cast<int>(threadIdx.y);
    const RowPart part = row_part<kUnits>(args.x.cols, args.segments, args.segment_cols);
    const int units = part.units, first_unit = part.first / kUnit;
    const int slot_size = slot_bytes(args.segment_cols);
    const auto slots_of = [&](int team) { return memory + team * kTeamSlots * slot_size; };
    uint8_t* const slots = slots_of(team);
    Mbarrier *const full = full_of[team], *const full_residual = full_residual_of[team];
    const bool with_residual = static_cast<bool>(args.dresidual);
    const auto dy_slot = [&](int slot) { return slots + (2 * slot) * slot_size; };
    const auto x_slot = [&](int slot) { return slots + (2 * slot + 1) * slot_size; };
    const auto residual_slot = [&](int slot) { return slots + (4 + slot) * slot_size; };
    const int all_rows = static_cast<int>(args.rows);
    const auto issue = [&](int row, int slot) {
        if (kRows == Rows::fetched || row >= all_rows) return;
        mbarrier_arrive_expect_tx(&full[slot], static_cast<uint32_t>(4 * kUnit * units));
        issue_row(args.dy, row, part, dy_slot(slot), &full[slot]);
        issue_row(args.x, row, part, x_slot(slot), &full[slot]);
    };
    const auto issue_residual = [&](int row, int slot) {
        if (kRows == Rows::fetched || row >= all_rows || !with_residual) return;
        mbarrier_arrive_expect_tx(&full_residual[slot], static_cast<uint32_t>(2 * kUnit * units));
        issue_row(args.dresidual, row, part, residual_slot(slot), &full_residual[slot]);
    };
    const int parts = min(args.parts, all_rows), clusters = static_cast<int>(gridDim.x) / part.segments;
    int sums = static_cast<int>(blockIdx.x) / part.segments;  // the part of dgamma: a row of `partials`
    const int step = kTeams * args.parts;
    const auto first_row = [&] { return sums + team * args.parts; };
    if (thread == 0)
        for (int n = 0; n < kFirstRows && first_row() + n * step < all_rows; ++n)
            prefetch_inputs(args, first_row() + n * step, part);
    pdl_wait();
    if (thread == 0) {
        for (int slot = 0; slot < 2; ++slot) {
            mbarrier_init(&full[slot], 1);
            mbarrier_init(&full_residual[slot], 1);
        }
        prepare(segment_sums[team]);
        fence_mbarrier_init();
        issue(first_row(), 0);
    }
    float g[kUnits][kUnit] = {};
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = thread + j * kNormThreads;
        if (unit >= units) continue;
        if constexpr (kRows == Rows::fetched)
            load_gamma(args.gamma, 0.0f, (first_unit + unit) * kUnit, g[j]);
        else
            load_wide_gamma(args.gamma, 0.0f, first_unit + unit, g[j]);
    }
    // the mbarriers are initialised
    if (part.segments > 1)
        cluster_sync();
    else
        __syncthreads();
    if (args.gamma_offset != 0.0f)
#pragma unroll
        for (int j = 0; j < kUnits; ++j)
#pragma unroll
            for (int i = 0; i < kUnit; ++i) g[j][i] = args.gamma_offset + g[j][i];

    int n = 0;  // rows of the team
    for (; sums < parts; sums += clusters) {
        const int first = first_row();
        if (thread == 0) {
            if (sums >= clusters) issue(first, n % 2);  // that of the first part has been issued
            issue_residual(first, n % 2);
            issue(first + step, (n + 1) % 2);
        }
        float next_rstd = first < all_rows ? args.rstd[first] : 0.0f;
        float dgamma[kUnits][kUnit] = {};
        for (int row = first; row < all_rows; row += step, ++n) {
            const int slot = n % 2;
            const uint32_t parity = static_cast<uint32_t>(n / 2) & 1u;
            const int next = row + step;
            const float r = next_rstd;
            if (next < all_rows) next_rstd = args.rstd[next];  // in flight during this row
            if constexpr (kRows == Rows::fetched) {
                fetch_row(args.dy, row, part, dy_slot(slot), thread);
                fetch_row(args.x, row, part, x_slot(slot), thread);
                if (with_residual) fetch_row(args.dresidual, row, part, residual_slot(slot), thread);
                named_barrier_sync(1 + team, kNormThreads);
            } else {
                mbarrier_wait(&full[slot], parity);
            }
            uint4 raw_dy[kUnits], raw_x[kUnits];
            float strand = 0.0f;
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                raw_dy[j] = unit_of(dy_slot(slot), unit);
                raw_x[j] = unit_of(x_slot(slot), unit);
                float dy[kUnit], x[kUnit];
                unpack_unit(raw_dy[j], kType, dy);
                unpack_unit(raw_x[j], kType, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) {
                    strand = fma_float(dy[i] * g[j][i], x[i], strand);
                    dgamma[j][i] = fma_float(dy[i], x[i] * r, dgamma[j][i]);
                }
            }
            store_strand(strand, warp_sums_of[team][slot]);
            named_barrier_sync(1 + team, kNormThreads);
            if (thread == 0) {
                issue(next + step, slot);
                issue_residual(next, slot ^ 1);
            }
            float sum = row_sum(warp_sums_of[team][slot]);
            if (part.segments > 1) {
                send_sum(segment_sums[team], n, part, sum, thread);
                sum = await_sums(segment_sums[team], n, part);
            }
            const float c = r * r * div_float(sum, static_cast<float>(args.x.cols));
            if (kRows == Rows::copied && with_residual) mbarrier_wait(&full_residual[slot], parity);
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                float dx[kUnit], x[kUnit];
                unpack_unit(raw_dy[j], kType, dx);
                unpack_unit(raw_x[j], kType, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dx[i] = r * (dx[i] * g[j][i] - x[i] * c);
                if (with_residual) {
                    unpack_unit(unit_of(residual_slot(slot), unit), kType, x);
#pragma unroll
                    for (int i = 0; i < kUnit; ++i) dx[i] += x[i];
                }
                if constexpr (kRows == Rows::fetched)
                    store_unit(args.dx, row, (first_unit + unit) * kUnit, dx);
                else
                    *unit_of(args.dx, row, first_unit + unit) = pack_unit<kType>(dx);
            }
        }
        // The sums of a team take the place of its first slot: no load to it is in flight, and its rows are
        // in registers.
        const auto sums_of = [&](int team) { return reinterpret_cast<float4*>(slots_of(team)); };
        if (team > 0) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                const float(&v)[kUnit] = dgamma[j];
                sums_of(team)[unit] = float4{v[0], v[1], v[2], v[3]};
                sums_of(team)[units + unit] = float4{v[4], v[5], v[6], v[7]};
            }
            named_barrier_arrive(kJoin, kTeams * kNormThreads);
        } else {
            named_barrier_sync(kJoin, kTeams * kNormThreads);
            const RowView out = {args.partials, nullptr, args.x.cols, DType::f32, kRows == Rows::copied};
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
#pragma unroll
                for (int other = 1; other < kTeams; ++other) {
                    const float4 a = sums_of(other)[unit], b = sums_of(other)[units + unit];
                    const float v[kUnit] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                    for (int i = 0; i < kUnit; ++i) dgamma[j][i] += v[i];
                }
                store_unit(out, sums, (first_unit + unit) * kUnit, dgamma[j]);
            }
        }
        if (sums + clusters < parts) {  // the slots are free again, for TMA too
            fence_async_shared();
            __syncthreads();
        }
    }
    if (part.segments > 1) cluster_sync();  // all sums have arrived
}

using BackwardKernel = void (*)(NormBackward);
template <DType kType> BackwardKernel kernel_of(int units) {
    return units == 1 ? norm_backward_rows_kernel<1, kType, Rows::copied>
                      : norm_backward_rows_kernel<kMostUnits, kType, Rows::copied>;
}
template <DType kType> BackwardKernel fetching_kernel_of(int units) {
    return units == 1 ? norm_backward_rows_kernel<1, kType, Rows::fetched>
                      : norm_backward_rows_kernel<kMostUnits, kType, Rows::fetched>;
}

}  // namespace

bool launch_norm_backward_rows(const NormBackward& args, const Launch& launch) {
    const bool f16 = args.x.dtype == DType::f16;
    if (!is_backward_fetchable(args)) return false;
    const bool copied = is_backward_wide(args);
    const int units = units_a_thread(args.segment_cols), teams = teams_of(units);
    const BackwardKernel kernel = copied
                                      ? (f16 ? kernel_of<DType::f16>(units) : kernel_of<DType::bf16>(units))
                                  : f16 ? fetching_kernel_of<DType::f16>(units)
                                        : fetching_kernel_of<DType::bf16>(units);
    const int slot = slot_bytes(args.segment_cols);
    launch_rows(kernel, args, std::min<int64_t>(args.parts, args.rows), 1, dim3(kNormThreads, teams),
                teams * kTeamSlots * slot, launch, "rms_norm_backward", true);
    return true;
}

}  // namespace fp8flow::hopper::norm
