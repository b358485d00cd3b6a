// RMSNorm backward on wide rows of BF16 or FP16: every byte is read once, and the sums for gamma stay in registers. Contract:
// kernels/ops/norm.h. Forward: norm_rows.cu. Other rows: norm.cu.
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/norm_rows.h"

namespace fp8flow::hopper {

namespace {

constexpr int kTeamSlots = 6;  // of rows: two of dy, x and dresidual or dx
constexpr int teams_of(int units) { return units == 1 ? 4 : 2; }
static_assert(op::kNarrowRow == kUnit * kNormThreads);  // of one unit a thread: as many teams as chunks

// Bytes at T=4096, H=7168: dy, x, dresidual in, dx out: 235 MB, and 4 MB of sums: 56 us. A CTA, one an SM (two for narrow rows), takes pairs of
// chunks, a chunk a team of 256 threads: neighbouring CTAs read neighbouring rows. (With a chunk of consecutive rows a CTA, 1024 places in
// memory were read or written at a time, and 256 chunks were summed afterwards from 7 MB: 72 us in all.) Thread t owns the columns
// of strand t in every row, so that its dgamma sums stay in registers to the end of the chunk. Two slots a team for dy and
// x, refilled two rows ahead at the row's only barrier (a named one of the team; the row is in registers by then); two slots for
// dresidual, which is read behind the barrier and so is refilled one row ahead. Warp sums alternate as in the forward kernel. At the end of a
// pair the second team leaves its sums in shared memory (barrier of the CTA), the first adds and writes them (barrier of the CTA, if more
// pairs follow). Rows of several segments: a cluster, as in the forward kernel; its CTAs take the same rows at the same time.
// One writer a byte, stated orders: deterministic. dx may stand in the place of dy or dresidual: a row is written after it has come,
// and by the CTA that read it.
template <int kUnits, DType kType, Rows kRows>
__global__ __launch_bounds__(teams_of(kUnits) * kNormThreads,
                             1) void norm_backward_rows_kernel(const NormBackward args) {
    constexpr int kTeams = teams_of(kUnits), kJoin = 1 + kTeams;  // a barrier a team, and one of all
    let_next_start();
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Barrier full_of[kTeams][2], full_residual_of[kTeams][2];
    __shared__ float warp_sums_of[kTeams][2][kNormWarps];
    __shared__ SegmentSums segment_sums[kTeams];
    const int thread = static_cast<int>(threadIdx.x), team = static_cast<int>(threadIdx.y);
    const RowPart part = row_part<kUnits>(args.x.cols, args.segments, args.segment_cols);
    const int units = part.units, first_unit = part.first / kUnit;
    const int slot_size = slot_bytes(args.segment_cols);
    uint8_t* const slots = memory + team * kTeamSlots * slot_size;
    float4* const joined = reinterpret_cast<float4*>(memory + kTeams * kTeamSlots * slot_size);
    Barrier *const full = full_of[team], *const full_residual = full_residual_of[team];
    const bool with_residual = static_cast<bool>(args.dresidual);
    const auto dy_slot = [&](int slot) { return slots + (2 * slot) * slot_size; };
    const auto x_slot = [&](int slot) { return slots + (2 * slot + 1) * slot_size; };
    const auto residual_slot = [&](int slot) { return slots + (4 + slot) * slot_size; };
    // The team's rows one after the other, up to one past the end (args.rows or more).
    const int parts = static_cast<int>(min(static_cast<int64_t>(args.parts), args.rows)),
              clusters = static_cast<int>(gridDim.x) / part.segments,
              cluster = static_cast<int>(blockIdx.x) / part.segments;
    struct Place {
        int64_t row;
        int sum_row;  // the part of dgamma, a row of its sums
    };
    const auto first_of = [&](int sum_row) {
        return Place{sum_row < parts ? sum_row + int64_t{team} * args.parts : args.rows, sum_row};
    };
    const auto behind = [&](Place place) {
        place.row += kTeams * args.parts;
        return place.row < args.rows ? place : first_of(place.sum_row + clusters);
    };
    const auto start = [&](int64_t row, int slot) {
        if (kRows == Rows::fetched || row >= args.rows) return;
        barrier_arrive_expect_bytes(&full[slot], static_cast<uint32_t>(4 * kUnit * units));
        start_row(args.dy, row, part, dy_slot(slot), &full[slot]);
        start_row(args.x, row, part, x_slot(slot), &full[slot]);
    };
    const auto start_residual = [&](int64_t row, int slot) {
        if (kRows == Rows::fetched || row >= args.rows || !with_residual) return;
        barrier_arrive_expect_bytes(&full_residual[slot], static_cast<uint32_t>(2 * kUnit * units));
        start_row(args.dresidual, row, part, residual_slot(slot), &full_residual[slot]);
    };
    Place here = first_of(cluster), next = behind(here);
    wait_for_kernel_before();
    float g[kUnits][kUnit] = {};
#pragma unroll
    for (int j = 0; j < kUnits;
         ++j) {  // asked for first: behind the rows of all multiprocessors it would come last
        const int unit = thread + j * kNormThreads;
        if (unit >= units) continue;
        if constexpr (kRows == Rows::fetched)
            load_gamma(args.gamma, 0.0f, (first_unit + unit) * kUnit, g[j]);
        else
            load_wide_gamma(args.gamma, 0.0f, first_unit + unit, g[j]);
    }
    if (thread == 0) {
        for (int slot = 0; slot < 2; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&full_residual[slot], 1);
        }
        prepare(segment_sums[team]);
        fence_barrier_init();
        start(here.row, 0);
        start_residual(here.row, 0);
        start(next.row, 1);
    }
    if (args.gamma_offset != 0.0f)
#pragma unroll
        for (int j = 0; j < kUnits; ++j)
#pragma unroll
            for (int i = 0; i < kUnit; ++i) g[j][i] = args.gamma_offset + g[j][i];
    // the barriers are there
    if (part.segments > 1)
        cluster_meet();
    else
        __syncthreads();

    float next_rstd = here.row < args.rows ? args.rstd[here.row] : 0.0f;
    int n = 0;
    for (int sum_row = cluster; sum_row < parts; sum_row += clusters) {
        float dgamma[kUnits][kUnit] = {};
        for (; here.sum_row == sum_row && here.row < args.rows; ++n) {
            const int slot = n % 2;
            const uint32_t parity = static_cast<uint32_t>(n / 2) & 1u;
            const int64_t row = here.row;
            const Place second = behind(next);
            const float r = next_rstd;
            if (next.row < args.rows) next_rstd = args.rstd[next.row];  // on its way during this row
            if constexpr (kRows == Rows::fetched) {
                fetch_row(args.dy, row, part, dy_slot(slot));
                fetch_row(args.x, row, part, x_slot(slot));
                if (with_residual) fetch_row(args.dresidual, row, part, residual_slot(slot));
                meet(1 + team, kNormThreads);
            } else {
                barrier_wait(&full[slot], parity);
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
            put_strand(strand, warp_sums_of[team][slot]);
            if (kRows == Rows::copied &&
                thread == 0) {  // the slot of this row's dx is free, or the one to refill
                if (with_residual)
                    copies_wait_read<0>();
                else
                    copies_wait_read<1>();
            }
            meet(1 + team, kNormThreads);
            if (thread == 0) {
                start(second.row, slot);
                start_residual(next.row, slot ^ 1);
            }
            float sum = row_sum(warp_sums_of[team][slot]);
            if (part.segments > 1) sum = sum_of_segments(segment_sums[team], n, part, sum);
            const float c = r * r * div_float(sum, static_cast<float>(args.x.cols));
            if (kRows == Rows::copied && with_residual) barrier_wait(&full_residual[slot], parity);
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
                    reinterpret_cast<uint4*>(residual_slot(slot))[unit] = pack_unit<kType>(dx);
            }
            if constexpr (kRows == Rows::copied) {
                fence_shared_for_engines();
                meet(1 + team, kNormThreads);
                if (thread == 0) {
                    bulk_store(unit_of(args.dx, row, first_unit), residual_slot(slot),
                               static_cast<uint32_t>(2 * kUnit * units));
                    copies_commit();
                }
            }
            here = next;
            next = second;
        }
        const auto joined_of = [&](int from) { return joined + (from - 1) * slot_size / 8; };
        if (team > 0) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                const float(&v)[kUnit] = dgamma[j];
                joined_of(team)[unit] = float4{v[0], v[1], v[2], v[3]};
                joined_of(team)[units + unit] = float4{v[4], v[5], v[6], v[7]};
            }
            announce(kJoin, kTeams * kNormThreads);
        } else {
            meet(kJoin, kTeams * kNormThreads);
            const RowView sums = {args.partials, nullptr, args.x.cols, DType::f32, kRows == Rows::copied};
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
#pragma unroll
                for (int from = 1; from < kTeams; ++from) {
                    const float4 a = joined_of(from)[unit], b = joined_of(from)[units + unit];
                    const float other[kUnit] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                    for (int i = 0; i < kUnit; ++i) dgamma[j][i] += other[i];
                }
                store_unit(sums, sum_row, (first_unit + unit) * kUnit, dgamma[j]);
            }
        }
        if (sum_row + clusters < parts) __syncthreads();
    }
    if (kRows == Rows::copied && thread == 0) copies_wait();
    if (part.segments > 1) cluster_meet();  // no sum is on its way any more
}

using BackwardKernel = void (*)(NormBackward);
template <DType kType> BackwardKernel kernel_of(int units) {
    return units == 1   ? norm_backward_rows_kernel<1, kType, Rows::copied>
           : units == 2 ? norm_backward_rows_kernel<2, kType, Rows::copied>
                        : norm_backward_rows_kernel<kMostUnits, kType, Rows::copied>;
}
template <DType kType> BackwardKernel fetching_kernel_of(int units) {
    return units == 1 ? norm_backward_rows_kernel<1, kType, Rows::fetched>
                      : norm_backward_rows_kernel<kMostUnits, kType, Rows::fetched>;
}

}  // namespace

bool launch_norm_backward_rows(const NormBackward& args, const Launch& launch) {
    const DType type = args.x.dtype;
    const bool f16 = type == DType::f16;
    if (!is_fetchable(args.x) || args.dy.dtype != type) return false;
    if (args.dresidual.data != nullptr && args.dresidual.dtype != type) return false;
    const bool copied = args.gamma.vector && is_wide(args.x, type) && is_wide(args.dy, type) &&
                        is_wide(args.dx, type) &&
                        (args.dresidual.data == nullptr || is_wide(args.dresidual, type));
    const int units = units_a_thread(args.segment_cols), teams = teams_of(units);
    const BackwardKernel kernel = copied
                                      ? (f16 ? kernel_of<DType::f16>(units) : kernel_of<DType::bf16>(units))
                                  : f16 ? fetching_kernel_of<DType::f16>(units)
                                        : fetching_kernel_of<DType::bf16>(units);
    const int slot = slot_bytes(args.segment_cols);
    launch_rows(kernel, args, std::min<int64_t>(args.parts, args.rows), 1, dim3(kNormThreads, teams),
                (teams * kTeamSlots + (teams - 1) * 2) * slot, launch, "rms_norm_backward", true);
    return true;
}

}  // namespace fp8flow::hopper
