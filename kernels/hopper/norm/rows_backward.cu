// SPDX-License-Identifier: MIT
// RMSNorm backward on rows of BF16 or FP16 of 1024 to 2048 columns or of five to eight segments: every byte
// is read once, and the sums for gamma stay in registers. Contract: kernels/ops/norm.h. Rows between these:
// front_backward.cu. Forward: held_rows.cu, norm_rows.cu. Other rows: norm.cu.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/norm/backward.h"
#include "kernels/hopper/norm/norm_rows.h"

namespace fp8flow::hopper::norm {

namespace {

constexpr int kTeamSlots = 6;  // slots of a team: two each of dy, x and dresidual
constexpr int kFirstRows = 2;  // of a team, prefetched into L2 while the previous kernel ends
constexpr int row_teams_of(int units) { return units == 1 ? 4 : 2; }
static_assert(op::gamma_chunks(kUnit * kNormThreads) == row_teams_of(1) &&
              op::gamma_chunks(5 * op::kNormSegment) == row_teams_of(kMostUnits));

// The rows of a team: their slots in shared memory and their loads, which one thread issues.
template <int kUnits, DType kType, Rows kRows> struct TeamRows {
    const NormBackward& args;
    const RowPart& part;
    uint8_t* slots;
    Mbarrier *full, *full_residual;
    int slot_size, all_rows, thread, barrier;  // barrier: the named barrier of the team

    __device__ __forceinline__ uint8_t* dy(int slot) const { return slots + (2 * slot) * slot_size; }
    __device__ __forceinline__ uint8_t* x(int slot) const { return slots + (2 * slot + 1) * slot_size; }
    __device__ __forceinline__ uint8_t* residual(int slot) const { return slots + (4 + slot) * slot_size; }

    // The first rows from `row` on, into L2.
    __device__ __forceinline__ void prefetch(int row, int step) const {
        for (int n = 0; n < kFirstRows && row + n * step < all_rows; ++n)
            prefetch_inputs(args, row + n * step, part);
    }
    __device__ __forceinline__ void prepare_barriers() const {
        for (int slot = 0; slot < 2; ++slot) {
            mbarrier_init(&full[slot], 1);
            mbarrier_init(&full_residual[slot], 1);
        }
    }
    __device__ __forceinline__ void issue(int row, int slot) const {
        if (kRows == Rows::fetched || row >= all_rows) return;
        mbarrier_arrive_expect_tx(&full[slot], static_cast<uint32_t>(4 * kUnit * part.units));
        issue_row(args.dy, row, part, dy(slot), &full[slot]);
        issue_row(args.x, row, part, x(slot), &full[slot]);
    }
    __device__ __forceinline__ void issue_residual(int row, int slot) const {
        if (kRows == Rows::fetched || row >= all_rows || !args.dresidual) return;
        mbarrier_arrive_expect_tx(&full_residual[slot], static_cast<uint32_t>(2 * kUnit * part.units));
        issue_row(args.dresidual, row, part, residual(slot), &full_residual[slot]);
    }
    // All threads: dy and x of a row are in the slot afterwards; fetched rows have their dresidual there too.
    __device__ __forceinline__ void await(int row, int slot, uint32_t parity) const {
        if constexpr (kRows == Rows::fetched) {
            fetch_row(args.dy, row, part, dy(slot), thread);
            fetch_row(args.x, row, part, x(slot), thread);
            if (args.dresidual) fetch_row(args.dresidual, row, part, residual(slot), thread);
            named_barrier_sync(barrier, kNormThreads);
        } else {
            mbarrier_wait(&full[slot], parity);
        }
    }
    __device__ __forceinline__ void await_residual(int slot, uint32_t parity) const {
        if (kRows == Rows::copied && args.dresidual) mbarrier_wait(&full_residual[slot], parity);
    }

    // Takes the thread's units of a row out of its slot; returns their strand.
    __device__ __forceinline__ float take(int slot, const float (&g)[kUnits][kUnit], float r,
                                          uint4 (&raw_dy)[kUnits], uint4 (&raw_x)[kUnits],
                                          float (&dgamma)[kUnits][kUnit]) const {
        float strand = 0.0f;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kNormThreads;
            if (unit >= part.units) continue;
            raw_dy[j] = unit_of(dy(slot), unit);
            raw_x[j] = unit_of(x(slot), unit);
            add_unit<kType>(raw_dy[j], raw_x[j], g[j], r, strand, dgamma[j]);
        }
        return strand;
    }
    __device__ __forceinline__ void write_dx(int row, int slot, const uint4 (&raw_dy)[kUnits],
                                             const uint4 (&raw_x)[kUnits], const float (&g)[kUnits][kUnit],
                                             float r, float c) const {
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kNormThreads;
            if (unit >= part.units) continue;
            write_dx_unit<kType, kRows>(args, row, part, unit, raw_dy[j], raw_x[j], g[j], r, c,
                                        residual(slot));
        }
    }
};

// RMSNorm backward: dy, x [T, H] (and dresidual) -> dx [T, H] and the sums of the parts of dgamma.
//
// Lower bound at T=4096, H=7168: dy, x, dresidual in, dx out, 235 MB, and 4 MB of sums: 56 us.
//
// Grid: a CTA per SM takes a part of dgamma, a chunk per team of 256 threads: neighbouring CTAs read
// neighbouring rows. Thread t owns the columns of strand t in every row, so that its dgamma sums stay in
// registers to the end of the chunk. At the end of a part the other teams store their sums in shared memory
// and continue; the first team adds and writes them. A row of several segments belongs to a cluster
// (norm_rows.cu). Its CTAs take the same rows at once.
//
// Shared memory: each team has two slots for dy and x, refilled two rows ahead, and two for dresidual, which
// is read after the barrier and so is refilled one row ahead. A kernel starts with one row per team in
// flight, so that gamma does not queue after two.
//
//   barrier                 use
//   full, full_residual     mbarriers of the slots (TMA bytes)
//   named, one per team     the row is in registers; the warp sums (alternating places) are written
//   join_barrier()          named: the teams have stored their dgamma sums
//
// Deterministic: one writer per byte, sums in the order of the contract. dx may alias dy or dresidual: the
// CTA that read a row writes it afterwards.
template <int kUnits, DType kType, Rows kRows>
__global__ __launch_bounds__(row_teams_of(kUnits) * kNormThreads,
                             1) void norm_backward_rows_kernel(const NormBackward args) {
    constexpr int kTeams = row_teams_of(kUnits);
    pdl_launch_dependents();
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Mbarrier full_of[kTeams][2], full_residual_of[kTeams][2];
    __shared__ float warp_sums_of[kTeams][2][kNormWarps];
    __shared__ SegmentSums segment_sums[kTeams];
    const int thread = static_cast<int>(threadIdx.x), team = static_cast<int>(threadIdx.y);
    const RowPart part = row_part<kUnits>(args.x.cols, args.segments, args.segment_cols);
    const int slot_size = slot_bytes(args.segment_cols), all_rows = static_cast<int>(args.rows);
    const auto slots_of = [&](int team) { return memory + team * kTeamSlots * slot_size; };
    const TeamRows<kUnits, kType, kRows> rows = {
        args,      part,     slots_of(team), full_of[team], full_residual_of[team],
        slot_size, all_rows, thread,         1 + team};
    const int parts = min(args.parts, all_rows), clusters = static_cast<int>(gridDim.x) / part.segments;
    int sums = static_cast<int>(blockIdx.x) / part.segments;  // the part of dgamma: a row of `partials`
    const int step = kTeams * args.parts;
    const auto first_row = [&] { return sums + team * args.parts; };
    if (thread == 0) rows.prefetch(first_row(), step);
    pdl_wait();
    if (thread == 0) {
        rows.prepare_barriers();
        prepare(segment_sums[team]);
        fence_mbarrier_init();
        rows.issue(first_row(), 0);
    }
    float g[kUnits][kUnit] = {};
    load_gamma_units<kRows>(args.gamma, 0.0f, part, thread, g);
    // the mbarriers are initialised
    if (part.segments > 1)
        cluster_sync();
    else
        __syncthreads();
    add_offset(args.gamma_offset, g);

    int n = 0;  // rows of the team
    for (; sums < parts; sums += clusters) {
        const int first = first_row();
        if (thread == 0) {
            if (sums >= clusters) rows.issue(first, n % 2);  // that of the first part has been issued
            rows.issue_residual(first, n % 2);
            rows.issue(first + step, (n + 1) % 2);
        }
        float next_rstd = first < all_rows ? args.rstd[first] : 0.0f;
        float dgamma[kUnits][kUnit] = {};
        for (int row = first; row < all_rows; row += step, ++n) {
            const int slot = n % 2, next = row + step;
            const uint32_t parity = static_cast<uint32_t>(n / 2) & 1u;
            const float r = next_rstd;
            if (next < all_rows) next_rstd = args.rstd[next];  // in flight during this row
            rows.await(row, slot, parity);
            uint4 raw_dy[kUnits], raw_x[kUnits];
            store_strand(rows.take(slot, g, r, raw_dy, raw_x, dgamma), warp_sums_of[team][slot]);
            named_barrier_sync(1 + team, kNormThreads);
            if (thread == 0) {
                rows.issue(next + step, slot);
                rows.issue_residual(next, slot ^ 1);
            }
            float sum = row_sum(warp_sums_of[team][slot]);
            if (part.segments > 1) {
                send_sum(segment_sums[team], n, part, sum, thread);
                sum = await_sums(segment_sums[team], n, part);
            }
            const float c = factor_of_x(args, r, sum);
            rows.await_residual(slot, parity);
            rows.write_dx(row, slot, raw_dy, raw_x, g, r, c);
        }
        // The sums of a team take the place of its first slot: no load to it is in flight, and its rows are
        // in registers.
        const auto sums_of = [&](int team) { return reinterpret_cast<float4*>(slots_of(team)); };
        join_part<kTeams, kRows>(args, part, sums, team, thread, sums_of, dgamma);
        if (sums + clusters < parts) {  // the slots are free again, for TMA too
            fence_async_shared();
            __syncthreads();
        }
    }
    if (part.segments > 1) cluster_sync();  // all sums have arrived
}

using BackwardKernel = void (*)(NormBackward);
template <DType kType, Rows kRows> BackwardKernel rows_kernel_of(int units) {
    return units == 1 ? norm_backward_rows_kernel<1, kType, kRows>
                      : norm_backward_rows_kernel<kMostUnits, kType, kRows>;
}

}  // namespace

bool launch_norm_backward_rows(const NormBackward& args, const Launch& launch) {
    if (!is_backward_fetchable(args)) return false;
    const int units = units_a_thread(args.segment_cols), teams = row_teams_of(units),
              slot = slot_bytes(args.segment_cols);
    const BackwardKernel kernel = of_half(args.x.dtype, [&]<DType kType>() {
        return is_backward_wide(args) ? rows_kernel_of<kType, Rows::copied>(units)
                                      : rows_kernel_of<kType, Rows::fetched>(units);
    });
    launch_rows(kernel, args, std::min<int64_t>(args.parts, args.rows), 1, dim3(kNormThreads, teams),
                teams * kTeamSlots * slot, launch, "rms_norm_backward");
    return true;
}

}  // namespace fp8flow::hopper::norm
