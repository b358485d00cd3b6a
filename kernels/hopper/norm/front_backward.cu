// SPDX-License-Identifier: MIT
// RMSNorm backward on rows of BF16 or FP16 of 2049 columns to four segments: the CTAs of all SMs advance over
// the rows as one front. Contract: kernels/ops/norm.h. Narrower rows, and rows of five to eight segments:
// rows_backward.cu. Other rows: norm.cu.
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

constexpr int kMostSlots = 16, kLanes = 32, kMostPolls = 32;
// Rows that a CTA works on at a time, one per team of kNormThreads threads; one more warp is the producer.
constexpr int teams_of(int units) { return units == 2 ? 2 : 1; }
constexpr int threads_of(int units) { return teams_of(units) * kNormThreads + kLanes; }
// Registers are bounded for so many threads, more than there are, so that a CTA of the next kernel fits next
// to this one.
constexpr int bound_of(int units) { return units == 2 ? 768 : 512; }
static_assert(op::gamma_chunks(2 * kUnit * kNormThreads) == teams_of(2) &&
              op::gamma_chunks(3 * kUnit * kNormThreads) == teams_of(kMostUnits));

// Found by measurement. kRoom: shared memory for rows; kFewRows: as many slots as are of use where one team
// has no residual. A CTA is limited (max_lead) where a part has at least kLongPart rows, or where a residual
// is read too.
constexpr int kRoom = 220 * 1024, kFewRows = 4, kFirstRows = 2, kLongPart = 48;
constexpr int max_lead_of(int teams, bool with_residual) {
    return teams == 2 ? (with_residual ? 4 : 8) : (with_residual ? 1 : 4);
}

template <int kTeams> struct Shared {
    Mbarrier full[kMostSlots], empty[kMostSlots], gamma_full, gamma_empty;
    float warp_sums[2][kTeams * kNormWarps];
    SegmentSums segment_sums;
};

// A position in the ring of slots, and the parity of its current use.
struct RingPlace {
    int slot;
    uint32_t parity;
    __device__ void advance(int by, int depth) {
        slot += by;
        if (slot < depth) return;
        slot -= depth;
        parity ^= 1u;
    }
};

// Prefetches the first rows of the CTA and gamma into L2 while the previous kernel ends. One thread.
__device__ __forceinline__ void prefetch_first_rows(const NormBackward& args, const RowPart& part, int rows) {
    int row = static_cast<int>(blockIdx.x) / part.segments;
    prefetch_row<float>(args.gamma, 0, part);
    for (int n = 0; n < rows && row < args.rows; ++n, row += args.parts) prefetch_inputs(args, row, part);
}

// The producer: loads the rows of the parts of the CTA, one after the other; the teams alternate over them.
// One thread.
template <int kTeams>
__device__ __forceinline__ void producer(const NormBackward& args, const RowPart& part, uint8_t* memory,
                                         int slot_size, Shared<kTeams>& shared) {
    const bool with_residual = static_cast<bool>(args.dresidual);
    const int inputs = with_residual ? 3 : 2, rows = static_cast<int>(args.rows),
              clusters = static_cast<int>(gridDim.x) / part.segments;
    const uint32_t bytes = static_cast<uint32_t>(2 * kUnit * part.units);
    const auto slot_of = [&](int slot) { return memory + slot * inputs * slot_size; };
    const auto issue_gamma = [&] {
        mbarrier_arrive_expect_tx(&shared.gamma_full, 2 * bytes);
        bulk_load(static_cast<const float*>(args.gamma.data) + part.first, &shared.gamma_full,
                  slot_of(args.depth - 1), 2 * bytes);
    };
    RingPlace place = {0, 1};
    int n = 0;
    uint32_t seen = 0;
    const bool limited = args.max_lead >= 0 && clusters >= args.parts;  // all CTAs have as many rows
    bool patient = true;
    for (int sums = static_cast<int>(blockIdx.x) / part.segments; sums < args.parts; sums += clusters)
        for (int row = sums; row < rows; row += args.parts, ++n) {
            if (n == kTeams) issue_gamma();
            if (n == args.depth - 1) mbarrier_wait(&shared.gamma_empty, 0);
            mbarrier_wait(&shared.empty[place.slot], place.parity);
            if (limited) {
                const int mean = (4 * n - args.max_lead) * clusters / 4;
                for (int polls = 0; patient && n >= args.depth && static_cast<int>(seen) < mean; ++polls) {
                    seen = *static_cast<volatile uint32_t*>(args.issued);
                    if (static_cast<int>(seen) >= mean) break;
                    __nanosleep(64);
                    patient = polls < kMostPolls;
                }
                if (part.rank == 0) atomicAdd(args.issued, 1u);
            }
            uint8_t* const slot = slot_of(place.slot);
            Mbarrier* const full = &shared.full[place.slot];
            mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(inputs) * bytes);
            issue_row(args.dy, row, part, slot, full);
            issue_row(args.x, row, part, slot + slot_size, full);
            if (with_residual) issue_row(args.dresidual, row, part, slot + 2 * slot_size, full);
            place.advance(1, args.depth);
        }
    if (n <= kTeams) issue_gamma();
}

// The units of gamma of a thread: from the slot that the producer filled, which is free afterwards, or from
// memory.
template <int kUnits, bool kFetched, int kTeams>
__device__ __forceinline__ void load_gamma_units(const NormBackward& args, const RowPart& part,
                                                 const uint8_t* slot, Shared<kTeams>& shared,
                                                 float (&g)[kUnits][kUnit]) {
    const int thread = static_cast<int>(threadIdx.x) % kNormThreads;
    if constexpr (!kFetched) mbarrier_wait(&shared.gamma_full, 0);
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
        if (thread % kLanes == 0) mbarrier_arrive(&shared.gamma_empty);
    }
    if (args.gamma_offset == 0.0f) return;
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
#pragma unroll
        for (int i = 0; i < kUnit; ++i) g[j][i] = args.gamma_offset + g[j][i];
}

// The dgamma sums of a team, written to shared memory by one team and added by another.
template <int kUnits>
__device__ __forceinline__ void store_sums(const float (&sums)[kUnits][kUnit], int units, float4* to) {
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

// RMSNorm backward, dy, x [T, H] (and dresidual) -> dx [T, H] and the sums of the parts of dgamma.
// Floor at T=8192, H=8192: dy and x in, dx out: 403 MB, and 4 MB of sums: 95 us.
// A CTA per SM takes a part of dgamma; the rows of CTAs interleave. One or two teams of 256 threads each work
// on a row; thread t of a team owns the columns of strand t in every row, so that its dgamma sums stay in
// registers to the end of a part. The dx of a row is computed from its slot after the sum of the next row has
// been started. A row of several segments belongs to a cluster, as in rows.cu; its CTAs take the same rows at
// the same time.
// A producer warp loads the rows through a ring of slots, gamma after the first rows, into the last slot
// (with loads issued by a thread of the team, more rows in flight made the team slower). It issues no row far
// ahead of the mean of all CTAs: without that limit some CTAs lag and do not catch up, probably since their
// rows are in other pages of memory (SMs were active for 139 to 192 thousand cycles, now for 179 to 187). A
// CTA that waits in vain, since others have not started yet, drops the limit: that affects times only.
// Barriers:
// full, empty              mbarriers of a slot: TMA bytes; one arrival per warp of the team
// gamma_full, gamma_empty  mbarriers of gamma in the last slot
// 1 + team                 named barrier: the warp sums of a row (alternating between two places) are written
// kJoin, kJoin + 1         named barriers: the teams have stored their dgamma sums; these have been added
// Deterministic: one writer a byte, sums in the order of the contract. dx may alias dy or dresidual: a row is
// written after it was read, by the CTA that read it.
// Measured in the bench, next to a streaming kernel with the same bytes: 104 us; before, 115.
template <int kUnits, DType kType, Rows kRows>
__global__ __launch_bounds__(bound_of(kUnits),
                             1) void norm_backward_front_kernel(const __grid_constant__ NormBackward args) {
    constexpr int kTeams = teams_of(kUnits),
                  kJoin = 1 + kTeams;  // a named barrier per team, then those of all teams
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
        mbarrier_init(&shared.gamma_full, 1);
        mbarrier_init(&shared.gamma_empty, kTeams * kNormWarps);
        prepare(shared.segment_sums);
        fence_mbarrier_init();
    }
    if (team == kTeams && lane == 0) prefetch_first_rows(args, part, min(depth, kFirstRows * kTeams));
    __syncthreads();
    if (part.segments > 1) cluster_arrive();
    pdl_wait();
    if (team == kTeams) {
        if (!kFetched && lane == 0) producer(args, part, memory, slot_size, shared);
        __syncwarp();
        if (part.segments > 1) {
            cluster_wait();
            cluster_sync();
        }
        return;
    }

    const int barrier = kTeams == 1 ? 1 : 1 + team;  // a constant where there is one team
    float g[kUnits][kUnit] = {};
    load_gamma_units<kUnits, kFetched>(args, part, slot_of(depth - 1), shared, g);
    if (part.segments > 1) cluster_wait();

    struct LoadedRow {
        int row, slot;
        float r;
    };
    const int all_rows = static_cast<int>(args.rows), parts = min(args.parts, all_rows),
              clusters = static_cast<int>(gridDim.x) / part.segments, step = kTeams * args.parts;
    int n = 0, rows_before = 0;  // rows of the team; rows of the CTA before this part
    RingPlace place = {team, 0};
    for (int sums = static_cast<int>(blockIdx.x) / part.segments; sums < parts; sums += clusters) {
        float dgamma[kUnits][kUnit] = {};
        const int first = sums + team * args.parts;
        float next_rstd = first < all_rows ? args.rstd[first] : 0.0f;
        const auto load = [&](int row) {
            LoadedRow loaded = {row, place.slot, next_rstd};
            if (row + step < all_rows) next_rstd = args.rstd[row + step];  // in flight during this row
            if constexpr (kFetched) {
                loaded.slot = 2 * team + n % 2;
                uint8_t* const slot = slot_of(loaded.slot);
                fetch_row(args.dy, row, part, slot, thread);
                fetch_row(args.x, row, part, slot + slot_size, thread);
                if (with_residual) fetch_row(args.dresidual, row, part, slot + 2 * slot_size, thread);
                named_barrier_sync(barrier, kNormThreads);
            } else {
                mbarrier_wait(&shared.full[place.slot], place.parity);
                place.advance(kTeams, depth);
            }
            const uint8_t* const slot = slot_of(loaded.slot);
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
                    dgamma[j][i] = fma_float(dy[i], x[i] * loaded.r, dgamma[j][i]);
                }
            }
            store_strand(strand, shared.warp_sums[n % 2]);
            ++n;
            return loaded;
        };
        const auto write_dx = [&](const LoadedRow& loaded, float sum) {
            const uint8_t* const slot = slot_of(loaded.slot);
            const float c = loaded.r * loaded.r * div_float(sum, static_cast<float>(args.x.cols));
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                float dx[kUnit], x[kUnit];
                unpack_unit(unit_of(slot, unit), kType, dx);
                unpack_unit(unit_of(slot + slot_size, unit), kType, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dx[i] = loaded.r * (dx[i] * g[j][i] - x[i] * c);
                if (with_residual) {
                    unpack_unit(unit_of(slot + 2 * slot_size, unit), kType, x);
#pragma unroll
                    for (int i = 0; i < kUnit; ++i) dx[i] += x[i];
                }
                if constexpr (kFetched)
                    store_unit(args.dx, loaded.row, (first_unit + unit) * kUnit, dx);
                else
                    *unit_of(args.dx, loaded.row, first_unit + unit) = pack_unit<kType>(dx);
            }
            if constexpr (!kFetched) {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(&shared.empty[loaded.slot]);
            }
        };
        if (first < all_rows) {
            LoadedRow loaded = load(first);
            for (bool more = true; more;) {
                named_barrier_sync(barrier, kNormThreads);
                const int at = n - 1;
                float sum = row_sum(shared.warp_sums[at % 2] + team * kNormWarps);
                if (part.segments > 1) send_sum(shared.segment_sums, at, part, sum, thread);
                LoadedRow next = loaded;
                more = loaded.row + step < all_rows;
                if (more) next = load(loaded.row + step);
                if (part.segments > 1) sum = await_sums(shared.segment_sums, at, part);
                write_dx(loaded, sum);
                loaded = next;
            }
        }
        const auto sums_of = [&](int team) {
            return reinterpret_cast<float4*>(slot_of(kFetched ? 2 * kTeams : depth)) + (team - 1) * 2 * units;
        };
        if (team > 0) {
            store_sums(dgamma, units, sums_of(team));
            named_barrier_arrive(kJoin, kTeams * kNormThreads);
        } else {
            if (kTeams > 1) named_barrier_sync(kJoin, kTeams * kNormThreads);
#pragma unroll
            for (int other = 1; other < kTeams; ++other) add_sums(sums_of(other), units, dgamma);
            const RowView out = {args.partials, nullptr, args.x.cols, DType::f32, !kFetched};
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit < units) store_unit(out, sums, (first_unit + unit) * kUnit, dgamma[j]);
            }
        }
        if (kTeams > 1 && sums + clusters < parts) {  // the sums of the other teams have been read
            named_barrier_sync(kJoin + 1, kTeams * kNormThreads);
            rows_before += (all_rows - sums + args.parts - 1) / args.parts;
            const int at = rows_before + team;
            place = {at % depth, static_cast<uint32_t>(at / depth) & 1u};
        }
    }
    if (part.segments > 1) cluster_sync();  // all sums have arrived
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
              sums = (teams - 1) * static_cast<int>(sizeof(float)) *
                     static_cast<int>(round_up(args.segment_cols, kUnit)),
              slots = std::min(kMostSlots, (kRoom - sums) / row_bytes);
    args.depth = !copied ? 2 * teams : teams == 1 && !with_residual ? std::min(slots, kFewRows) : slots;
    args.max_lead =
        with_residual || args.rows >= kLongPart * args.parts ? max_lead_of(teams, with_residual) : -1;
    launch_rows(kernel, args, std::min<int64_t>(args.parts, args.rows), 1, dim3(threads_of(units)),
                args.depth * row_bytes + sums, launch, "rms_norm_backward", true);
    return true;
}

}  // namespace fp8flow::hopper::norm
