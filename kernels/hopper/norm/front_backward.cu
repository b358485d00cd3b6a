// SPDX-License-Identifier: MIT
// RMSNorm backward on rows of BF16 or FP16 of 2049 columns to four segments: all SMs go over the
// rows as one front. Contract: kernels/ops/norm.h. Narrower rows, and rows of more segments:
// rows_backward.cu. Other rows: norm.cu.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/norm/rows.h"

namespace fp8flow::hopper {

namespace {

constexpr int kMostSlots = 16, kLanes = 32, kMostPolls = 32;
// Rows that a CTA works on at a time, each by a team of kNormThreads threads; one warp more brings them.
constexpr int teams_of(int units) { return units == 2 ? 2 : 1; }
constexpr int threads_of(int units) { return teams_of(units) * kNormThreads + kLanes; }
// Registers for so many threads, not as many as there are: a CTA of the kernel behind finds room beside this
// one.
constexpr int bound_of(int units) { return units == 2 ? 768 : 512; }
static_assert(op::gamma_chunks(2 * kUnit * kNormThreads) == teams_of(2) &&
              op::gamma_chunks(3 * kUnit * kNormThreads) == teams_of(kMostUnits));

// What was the fastest of what was tried. Shared memory for rows, and of rows without residuals no more than
// are of use; a CTA is held where a part has many rows or a residual comes with them, to so many quarters of
// a row ahead of the mean.
constexpr int kRoom = 220 * 1024, kFewRows = 4, kFirstRows = 2, kLongPart = 48;
constexpr int hold_of(int teams, bool with_residual) {
    return teams == 2 ? (with_residual ? 4 : 8) : (with_residual ? 1 : 4);
}

template <int kTeams> struct Shared {
    Mbarrier full[kMostSlots], empty[kMostSlots], gamma_here, gamma_read;
    float warp_sums[2][kTeams * kNormWarps];
    SegmentSums segment_sums;
};

// A place in the ring of slots.
struct Place {
    int slot;
    uint32_t parity;
    __device__ void advance(int by, int depth) {
        slot += by;
        if (slot < depth) return;
        slot -= depth;
        parity ^= 1u;
    }
};

// What the CTA's first rows need, asked for in L2 while the kernel before this one ends: the SMs
// have nothing else to do. One thread.
__device__ __forceinline__ void prefetch_first(const NormBackward& args, const RowPart& part, int rows) {
    int row = static_cast<int>(blockIdx.x) / part.segments;
    prefetch_row<float>(args.gamma, 0, part);
    for (int n = 0; n < rows && row < args.rows; ++n, row += args.parts) prefetch_inputs(args, row, part);
}

// The rows of a CTA's parts, one after the other; every team takes its share. One thread.
template <int kTeams>
__device__ __forceinline__ void bring_rows(const NormBackward& args, const RowPart& part, uint8_t* memory,
                                           int slot_size, Shared<kTeams>& shared) {
    const bool with_residual = static_cast<bool>(args.dresidual);
    const int inputs = with_residual ? 3 : 2, rows = static_cast<int>(args.rows),
              clusters = static_cast<int>(gridDim.x) / part.segments;
    const uint32_t bytes = static_cast<uint32_t>(2 * kUnit * part.units);
    const auto slot_of = [&](int slot) { return memory + slot * inputs * slot_size; };
    const auto bring_gamma = [&] {
        mbarrier_arrive_expect_tx(&shared.gamma_here, 2 * bytes);
        bulk_load(static_cast<const float*>(args.gamma.data) + part.first, &shared.gamma_here,
                  slot_of(args.depth - 1), 2 * bytes);
    };
    Place place = {0, 1};
    int n = 0;
    uint32_t seen = 0;
    const bool held = args.hold >= 0 && clusters >= args.parts;  // all have as many rows
    bool patient = true;
    for (int sums = static_cast<int>(blockIdx.x) / part.segments; sums < args.parts; sums += clusters)
        for (int row = sums; row < rows; row += args.parts, ++n) {
            if (n == kTeams) bring_gamma();
            if (n == args.depth - 1) mbarrier_wait(&shared.gamma_read, 0);
            mbarrier_wait(&shared.empty[place.slot], place.parity);
            if (held) {
                const int mean = (4 * n - args.hold) * clusters / 4;
                for (int polls = 0; patient && n >= args.depth && static_cast<int>(seen) < mean; ++polls) {
                    seen = *static_cast<volatile uint32_t*>(args.asked);
                    if (static_cast<int>(seen) >= mean) break;
                    __nanosleep(64);
                    patient = polls < kMostPolls;
                }
                if (part.rank == 0) atomicAdd(args.asked, 1u);
            }
            uint8_t* const slot = slot_of(place.slot);
            Mbarrier* const full = &shared.full[place.slot];
            mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(inputs) * bytes);
            start_row(args.dy, row, part, slot, full);
            start_row(args.x, row, part, slot + slot_size, full);
            if (with_residual) start_row(args.dresidual, row, part, slot + 2 * slot_size, full);
            place.advance(1, args.depth);
        }
    if (n <= kTeams) bring_gamma();
}

// A thread's units of gamma: from the slot that they have been brought to, which is free then, or from
// memory.
template <int kUnits, bool kFetched, int kTeams>
__device__ __forceinline__ void take_gamma(const NormBackward& args, const RowPart& part, const uint8_t* slot,
                                           Shared<kTeams>& shared, float (&g)[kUnits][kUnit]) {
    const int thread = static_cast<int>(threadIdx.x) % kNormThreads;
    if constexpr (!kFetched) mbarrier_wait(&shared.gamma_here, 0);
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = thread + j * kNormThreads;
        if (unit >= part.units) continue;
        if constexpr (kFetched) {
            load_gamma(args.gamma, 0.0f, part.first + unit * kUnit, g[j]);
        } else {
            const float4* const in = reinterpret_cast<const float4*>(slot) + 2 * unit;
            const float4 a = in[0], b = in[1];
            g[j][0] = a.x, g[j][1] = a.y, g[j][2] = a.z, g[j][3] = a.w;
            g[j][4] = b.x, g[j][5] = b.y, g[j][6] = b.z, g[j][7] = b.w;
        }
    }
    if constexpr (!kFetched) {
        __syncwarp();
        if (thread % kLanes == 0) mbarrier_arrive(&shared.gamma_read);
    }
    if (args.gamma_offset == 0.0f) return;
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
#pragma unroll
        for (int i = 0; i < kUnit; ++i) g[j][i] = args.gamma_offset + g[j][i];
}

// A team's sums of dgamma to shared memory, and added from there.
template <int kUnits>
__device__ __forceinline__ void leave_sums(const float (&sums)[kUnits][kUnit], int units, float4* to) {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = static_cast<int>(threadIdx.x) % kNormThreads + j * kNormThreads;
        if (unit >= units) continue;
        to[unit] = float4{sums[j][0], sums[j][1], sums[j][2], sums[j][3]};
        to[units + unit] = float4{sums[j][4], sums[j][5], sums[j][6], sums[j][7]};
    }
}
template <int kUnits>
__device__ __forceinline__ void add_sums(const float4* from, int units, float (&sums)[kUnits][kUnit]) {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = static_cast<int>(threadIdx.x) % kNormThreads + j * kNormThreads;
        if (unit >= units) continue;
        const float4 a = from[unit], b = from[units + unit];
        const float v[kUnit] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < kUnit; ++i) sums[j][i] += v[i];
    }
}

// Bytes at T=8192, H=8192: dy and x in, dx out: 403 MB, and 4 MB of sums: 95 us. A CTA, one an SM, takes a
// part of dgamma; rows of CTAs alternate. A warp brings the rows through a ring of slots: where a thread of
// the team did it, more rows on their way made the team slower. It asks for no row far ahead of the mean of
// all CTAs: otherwise some fall behind and stay there, probably since what they ask for stands in other pages
// of memory. (SMs were active for 139 to 192 thousand cycles, now for 179 to 187.) A CTA that
// waits in vain, since others have no place yet, gives it up: that decides times only. Thread t of a team
// owns the columns of strand t in every row, so that its dgamma sums stay in registers to the end of a part.
// A row's dx is computed when the next row's sum has been started, from its slot, which is free then. Gamma
// comes behind the first rows, to the last slot. Rows of several segments: a cluster, as in the forward
// kernel; its CTAs take the same rows at the same time. One writer a byte, stated orders: deterministic. dx
// may stand in the place of dy or dresidual: a row is written after it has come, and by the CTA that read it.
// Measured as the bench does, beside a streaming kernel with the same bytes: 104 us, before 115.
template <int kUnits, DType kType, Rows kRows>
__global__ __launch_bounds__(bound_of(kUnits),
                             1) void norm_backward_front_kernel(const __grid_constant__ NormBackward args) {
    constexpr int kTeams = teams_of(kUnits), kJoin = 1 + kTeams;  // a barrier a team, and one of all
    constexpr bool kFetched = kRows == Rows::fetched;
    pdl_launch_dependents();
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared<kTeams> shared;
    const int thread = static_cast<int>(threadIdx.x) % kNormThreads,
              team = static_cast<int>(threadIdx.x) / kNormThreads, lane = thread % kLanes;
    const RowPart part = row_part<kUnits>(args.x.cols, args.segments, args.segment_cols);
    const int units = part.units, first_unit = part.first / kUnit, depth = args.depth;
    const int slot_size = slot_bytes(args.segment_cols);
    const bool with_residual = static_cast<bool>(args.dresidual);
    const int inputs = with_residual ? 3 : 2;
    const auto slot_of = [&](int slot) { return memory + slot * inputs * slot_size; };
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < depth; ++slot) {
            mbarrier_init(&shared.full[slot], 1);
            mbarrier_init(&shared.empty[slot], kNormWarps);
        }
        mbarrier_init(&shared.gamma_here, 1);
        mbarrier_init(&shared.gamma_read, kTeams * kNormWarps);
        prepare(shared.segment_sums);
        fence_mbarrier_init();
    }
    if (team == kTeams && lane == 0) prefetch_first(args, part, min(depth, kFirstRows * kTeams));
    __syncthreads();
    if (part.segments > 1) cluster_arrive();
    pdl_wait();
    if (team == kTeams) {
        if (!kFetched && lane == 0) bring_rows(args, part, memory, slot_size, shared);
        __syncwarp();
        if (part.segments > 1) {
            cluster_wait();
            cluster_sync();
        }
        return;
    }

    const int meeting = kTeams == 1 ? 1 : 1 + team;  // a constant where there is one team
    float g[kUnits][kUnit] = {};
    take_gamma<kUnits, kFetched>(args, part, slot_of(depth - 1), shared, g);
    if (part.segments > 1) cluster_wait();

    struct Turn {
        int row, slot;
        float r;
    };
    const int all_rows = static_cast<int>(args.rows), parts = min(args.parts, all_rows),
              clusters = static_cast<int>(gridDim.x) / part.segments, step = kTeams * args.parts;
    int n = 0, brought = 0;  // rows of the team, of the CTA up to this part
    Place place = {team, 0};
    for (int sums = static_cast<int>(blockIdx.x) / part.segments; sums < parts; sums += clusters) {
        float dgamma[kUnits][kUnit] = {};
        const int first = sums + team * args.parts;
        float next_rstd = first < all_rows ? args.rstd[first] : 0.0f;
        const auto take = [&](int row) {
            Turn turn = {row, place.slot, next_rstd};
            if (row + step < all_rows) next_rstd = args.rstd[row + step];  // on its way during this row
            if constexpr (kFetched) {
                turn.slot = 2 * team + n % 2;
                uint8_t* const slot = slot_of(turn.slot);
                fetch_row(args.dy, row, part, slot, thread);
                fetch_row(args.x, row, part, slot + slot_size, thread);
                if (with_residual) fetch_row(args.dresidual, row, part, slot + 2 * slot_size, thread);
                named_barrier_sync(meeting, kNormThreads);
            } else {
                mbarrier_wait(&shared.full[place.slot], place.parity);
                place.advance(kTeams, depth);
            }
            const uint8_t* const slot = slot_of(turn.slot);
            float strand = 0.0f;
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                float dy[kUnit], x[kUnit];
                unpack_unit(unit_of(slot, unit), kType, dy);
                unpack_unit(unit_of(slot + slot_size, unit), kType, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) {
                    strand = fma_float(dy[i] * g[j][i], x[i], strand);
                    dgamma[j][i] = fma_float(dy[i], x[i] * turn.r, dgamma[j][i]);
                }
            }
            put_strand(strand, shared.warp_sums[n % 2]);
            ++n;
            return turn;
        };
        const auto give = [&](const Turn& turn, float sum) {
            const uint8_t* const slot = slot_of(turn.slot);
            const float c = turn.r * turn.r * div_float(sum, static_cast<float>(args.x.cols));
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                float dx[kUnit], x[kUnit];
                unpack_unit(unit_of(slot, unit), kType, dx);
                unpack_unit(unit_of(slot + slot_size, unit), kType, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dx[i] = turn.r * (dx[i] * g[j][i] - x[i] * c);
                if (with_residual) {
                    unpack_unit(unit_of(slot + 2 * slot_size, unit), kType, x);
#pragma unroll
                    for (int i = 0; i < kUnit; ++i) dx[i] += x[i];
                }
                if constexpr (kFetched)
                    store_unit(args.dx, turn.row, (first_unit + unit) * kUnit, dx);
                else
                    *unit_of(args.dx, turn.row, first_unit + unit) = pack_unit<kType>(dx);
            }
            if constexpr (!kFetched) {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(&shared.empty[turn.slot]);
            }
        };
        if (first < all_rows) {
            Turn turn = take(first);
            for (bool more = true; more;) {
                named_barrier_sync(meeting, kNormThreads);
                const int at = n - 1;
                float sum = row_sum(shared.warp_sums[at % 2] + team * kNormWarps);
                if (part.segments > 1) send_sum(shared.segment_sums, at, part, sum, thread);
                Turn next = turn;
                more = turn.row + step < all_rows;
                if (more) next = take(turn.row + step);
                if (part.segments > 1) sum = await_sums(shared.segment_sums, at, part);
                give(turn, sum);
                turn = next;
            }
        }
        const auto left_by = [&](int team) {
            return reinterpret_cast<float4*>(slot_of(kFetched ? 2 * kTeams : depth)) + (team - 1) * 2 * units;
        };
        if (team > 0) {
            leave_sums(dgamma, units, left_by(team));
            named_barrier_arrive(kJoin, kTeams * kNormThreads);
        } else {
            if (kTeams > 1) named_barrier_sync(kJoin, kTeams * kNormThreads);
#pragma unroll
            for (int other = 1; other < kTeams; ++other) add_sums(left_by(other), units, dgamma);
            const RowView out = {args.partials, nullptr, args.x.cols, DType::f32, !kFetched};
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit < units) store_unit(out, sums, (first_unit + unit) * kUnit, dgamma[j]);
            }
        }
        if (kTeams > 1 && sums + clusters < parts) {  // what the teams left has been read
            named_barrier_sync(kJoin + 1, kTeams * kNormThreads);
            brought += (all_rows - sums + args.parts - 1) / args.parts;
            const int at = brought + team;
            place = {at % depth, static_cast<uint32_t>(at / depth) & 1u};
        }
    }
    if (part.segments > 1) cluster_sync();  // no sum is on its way any more
}

using BackwardKernel = void (*)(NormBackward);
template <DType kType, Rows kRows> BackwardKernel kernel_of(int units) {
    return units == 2 ? norm_backward_front_kernel<2, kType, kRows>
                      : norm_backward_front_kernel<kMostUnits, kType, kRows>;
}

}  // namespace

bool launch_norm_backward_front(NormBackward args, const Launch& launch) {
    const DType type = args.x.dtype;
    const bool f16 = type == DType::f16, with_residual = args.dresidual.data != nullptr;
    const int units = units_a_thread(args.segment_cols), teams = teams_of(units);
    if (units == 1 || args.chunks != teams || !is_backward_fetchable(args)) return false;
    const bool copied = is_backward_wide(args);
    const BackwardKernel kernel = copied ? (f16 ? kernel_of<DType::f16, Rows::copied>(units)
                                                : kernel_of<DType::bf16, Rows::copied>(units))
                                         : (f16 ? kernel_of<DType::f16, Rows::fetched>(units)
                                                : kernel_of<DType::bf16, Rows::fetched>(units));
    const int row_bytes = (with_residual ? 3 : 2) * slot_bytes(args.segment_cols),
              left = (teams - 1) * static_cast<int>(sizeof(float)) *
                     static_cast<int>(round_up(args.segment_cols, kUnit)),
              slots = std::min(kMostSlots, (kRoom - left) / row_bytes);
    args.depth = !copied ? 2 * teams : teams == 1 && !with_residual ? std::min(slots, kFewRows) : slots;
    args.hold = with_residual || args.rows >= kLongPart * args.parts ? hold_of(teams, with_residual) : -1;
    launch_rows(kernel, args, std::min<int64_t>(args.parts, args.rows), 1, dim3(threads_of(units)),
                args.depth * row_bytes + left, launch, "rms_norm_backward", true);
    return true;
}

}  // namespace fp8flow::hopper
