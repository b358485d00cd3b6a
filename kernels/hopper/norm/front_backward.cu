// SPDX-License-Identifier: MIT
// RMSNorm backward on rows of BF16 or FP16 of 2049 columns to four segments: the CTAs of all SMs advance over
// the rows as one front. Contract: kernels/ops/norm.h. Narrower rows, and rows of five to eight segments:
// rows_backward.cu. Other rows: norm.cu.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/norm/backward.h"
#include "kernels/hopper/norm/norm_rows.h"

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

// Found by measurement. kSlotBytes: shared memory for all slots. kFewRows: the most slots that help one team
// without a residual. The lead of a CTA is limited (max_lead) if a part has at least kLongPart rows or a
// residual is read.
constexpr int kSlotBytes = 220 * 1024, kFewRows = 4, kFirstRows = 2, kLongPart = 48;
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
    bool waits = true;  // until kMostPolls polls were not enough
    for (int sums = static_cast<int>(blockIdx.x) / part.segments; sums < args.parts; sums += clusters)
        for (int row = sums; row < rows; row += args.parts, ++n) {
            if (n == kTeams) issue_gamma();
            if (n == args.depth - 1) mbarrier_wait(&shared.gamma_empty, 0);
            mbarrier_wait(&shared.empty[place.slot], place.parity);
            if (limited) {
                const int mean = (4 * n - args.max_lead) * clusters / 4;
                for (int polls = 0; waits && n >= args.depth && static_cast<int>(seen) < mean; ++polls) {
                    seen = *static_cast<volatile uint32_t*>(args.issued);
                    if (static_cast<int>(seen) >= mean) break;
                    __nanosleep(64);
                    waits = polls < kMostPolls;
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
__device__ __forceinline__ void take_gamma(const NormBackward& args, const RowPart& part, const uint8_t* slot,
                                           Shared<kTeams>& shared, float (&g)[kUnits][kUnit]) {
    const int thread = static_cast<int>(threadIdx.x) % kNormThreads;
    if constexpr (kFetched) {
        load_gamma_units<Rows::fetched>(args.gamma, 0.0f, part, thread, g);
    } else {
        mbarrier_wait(&shared.gamma_full, 0);
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kNormThreads;
            if (unit >= part.units) continue;
            load_floats(reinterpret_cast<const float4*>(slot) + 2 * unit, g[j]);
        }
        __syncwarp();
        if (thread % kLanes == 0) mbarrier_arrive(&shared.gamma_empty);
    }
    add_offset(args.gamma_offset, g);
}

// A row whose dot product has been summed; its dx follows after the next row's.
struct LoadedRow {
    int row, slot;
    float r;
};

// A team and the state of one of its threads.
template <int kUnits, DType kType, Rows kRows> struct Team {
    static constexpr int kTeams = teams_of(kUnits);
    const NormBackward& args;
    const RowPart& part;
    Shared<kTeams>& shared;
    uint8_t* memory;
    int slot_size, inputs;  // of a row; a slot of the ring has all inputs of one
    int all_rows, step;     // the rows of a part are every step-th
    int thread, team, barrier;
    RingPlace place;  // of the next row
    int n = 0;        // rows of the team
    float next_rstd = 0.0f;
    float g[kUnits][kUnit] = {};

    __device__ __forceinline__ uint8_t* slot_of(int slot) const { return memory + slot * inputs * slot_size; }

    // Waits for the next row, or fetches it, and starts its sum: all its warp sums are there after a barrier.
    __device__ __forceinline__ LoadedRow load(int row, float (&dgamma)[kUnits][kUnit]) {
        LoadedRow loaded = {row, place.slot, next_rstd};
        if (row + step < all_rows) next_rstd = args.rstd[row + step];  // in flight during this row
        if constexpr (kRows == Rows::fetched) {
            loaded.slot = 2 * team + n % 2;
            uint8_t* const slot = slot_of(loaded.slot);
            fetch_row(args.dy, row, part, slot, thread);
            fetch_row(args.x, row, part, slot + slot_size, thread);
            if (args.dresidual) fetch_row(args.dresidual, row, part, slot + 2 * slot_size, thread);
            named_barrier_sync(barrier, kNormThreads);
        } else {
            mbarrier_wait(&shared.full[place.slot], place.parity);
            place.advance(kTeams, args.depth);
        }
        const uint8_t* const slot = slot_of(loaded.slot);
        float strand = 0.0f;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kNormThreads;
            if (unit >= part.units) continue;
            add_unit<kType>(unit_of(slot, unit), unit_of(slot + slot_size, unit), g[j], loaded.r, strand,
                            dgamma[j]);
        }
        store_strand(strand, shared.warp_sums[n % 2]);
        ++n;
        return loaded;
    }

    // Writes dx of a row, and frees its slot.
    __device__ __forceinline__ void write_dx(const LoadedRow& loaded, float sum) const {
        const uint8_t* const slot = slot_of(loaded.slot);
        const float c = factor_of_x(args, loaded.r, sum);
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kNormThreads;
            if (unit >= part.units) continue;
            write_dx_unit<kType, kRows>(args, loaded.row, part, unit, unit_of(slot, unit),
                                        unit_of(slot + slot_size, unit), g[j], loaded.r, c,
                                        slot + 2 * slot_size);
        }
        if constexpr (kRows == Rows::copied) {
            __syncwarp();
            if (thread % kLanes == 0) mbarrier_arrive(&shared.empty[loaded.slot]);
        }
    }

    // The rows of a part from `first` on: dx of each, and their sums for gamma.
    __device__ __forceinline__ void run_part(int first, float (&dgamma)[kUnits][kUnit]) {
        next_rstd = first < all_rows ? args.rstd[first] : 0.0f;
        if (first >= all_rows) return;
        LoadedRow loaded = load(first, dgamma);
        for (bool more = true; more;) {
            named_barrier_sync(barrier, kNormThreads);
            const int at = n - 1;
            float sum = row_sum(shared.warp_sums[at % 2] + team * kNormWarps);
            if (part.segments > 1) send_sum(shared.segment_sums, at, part, sum, thread);
            LoadedRow next = loaded;
            more = loaded.row + step < all_rows;
            if (more) next = load(loaded.row + step, dgamma);
            if (part.segments > 1) sum = await_sums(shared.segment_sums, at, part);
            write_dx(loaded, sum);
            loaded = next;
        }
    }
};

// The mbarriers of the kernel. One thread.
template <int kTeams> __device__ __forceinline__ void prepare_barriers(Shared<kTeams>& shared, int depth) {
    for (int slot = 0; slot < depth; ++slot) {
        mbarrier_init(&shared.full[slot], 1);
        mbarrier_init(&shared.empty[slot], kNormWarps);
    }
    mbarrier_init(&shared.gamma_full, 1);
    mbarrier_init(&shared.gamma_empty, kTeams * kNormWarps);
    prepare(shared.segment_sums);
    fence_mbarrier_init();
}

// RMSNorm backward: dy, x [T, H] (and dresidual) -> dx [T, H] and the sums of the parts of dgamma.
//
// Lower bound at T=8192, H=8192: dy and x in, dx out, 403 MB, and 4 MB of sums: 95 us.
//
// Grid: a CTA per SM takes a part of dgamma; the rows of the CTAs interleave. One or two teams of 256 threads
// each work on a row. Thread t of a team owns the columns of strand t in every row, so that its dgamma sums
// stay in registers to the end of a part. A team starts the sum of the next row, then computes dx of this row
// from its slot. A row of several segments belongs to a cluster (norm_rows.cu). Its CTAs take the same rows
// at once.
//
// A producer warp loads the rows through a ring of slots, and gamma after the first rows into the last slot.
// With loads issued by a thread of the team, more rows in flight made the team slower. The warp issues no row
// far ahead of the mean of all CTAs. Without that limit some CTAs lag and do not catch up, probably because
// their rows are in other pages of memory. A CTA that waits in vain, because others have not started, drops
// the limit.
//
//   barrier                  use
//   full, empty              mbarriers of a slot: TMA bytes; one arrival per warp of the team
//   gamma_full, gamma_empty  mbarriers of gamma in the last slot
//   1 + team                 named: the warp sums of a row (alternating between two places) are written
//   join_barrier(), + 1      named: the teams have stored their dgamma sums; these have been added
//
// Deterministic: one writer per byte, sums in the order of the contract. dx may alias dy or dresidual: the
// CTA that read a row writes it afterwards.
// Measured: 104 us.
template <int kUnits, DType kType, Rows kRows>
__global__ __launch_bounds__(bound_of(kUnits),
                             1) void norm_backward_front_kernel(const __grid_constant__ NormBackward args) {
    constexpr int kTeams = teams_of(kUnits);
    constexpr bool kFetched = kRows == Rows::fetched;
    pdl_launch_dependents();
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared<kTeams> shared;
    const int thread = static_cast<int>(threadIdx.x) % kNormThreads,
              team = static_cast<int>(threadIdx.x) / kNormThreads, lane = thread % kLanes;
    const RowPart part = row_part<kUnits>(args.x.cols, args.segments, args.segment_cols);
    const int depth = args.depth, slot_size = slot_bytes(args.segment_cols);
    if (threadIdx.x == 0) prepare_barriers(shared, depth);
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

    const int all_rows = static_cast<int>(args.rows), parts = min(args.parts, all_rows),
              clusters = static_cast<int>(gridDim.x) / part.segments;
    Team<kUnits, kType, kRows> rows = {.args = args,
                                       .part = part,
                                       .shared = shared,
                                       .memory = memory,
                                       .slot_size = slot_size,
                                       .inputs = args.dresidual ? 3 : 2,
                                       .all_rows = all_rows,
                                       .step = kTeams * args.parts,
                                       .thread = thread,
                                       .team = team,
                                       .barrier = kTeams == 1 ? 1 : 1 + team,  // one team: a constant
                                       .place = {team, 0}};
    take_gamma<kUnits, kFetched>(args, part, rows.slot_of(depth - 1), shared, rows.g);
    if (part.segments > 1) cluster_wait();

    const auto sums_of = [&](int team) {
        return reinterpret_cast<float4*>(rows.slot_of(kFetched ? 2 * kTeams : depth)) +
               (team - 1) * 2 * part.units;
    };
    int rows_before = 0;  // rows of the CTA before this part
    for (int sums = static_cast<int>(blockIdx.x) / part.segments; sums < parts; sums += clusters) {
        float dgamma[kUnits][kUnit] = {};
        rows.run_part(sums + team * args.parts, dgamma);
        join_part<kTeams, kRows>(args, part, sums, team, thread, sums_of, dgamma);
        if (kTeams > 1 && sums + clusters < parts) {  // the sums of the other teams have been read
            named_barrier_sync(join_barrier(kTeams) + 1, kTeams * kNormThreads);
            rows_before += (all_rows - sums + args.parts - 1) / args.parts;
            const int at = rows_before + team;
            rows.place = {at % depth, static_cast<uint32_t>(at / depth) & 1u};
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
    const bool with_residual = args.dresidual.data != nullptr;
    const int units = units_a_thread(args.segment_cols), teams = teams_of(units);
    if (units == 1 || args.chunks != teams || !is_backward_fetchable(args)) return false;
    const bool copied = is_backward_wide(args);
    const BackwardKernel kernel = of_half(args.x.dtype, [&]<DType kType>() {
        return copied ? kernel_of<kType, Rows::copied>(units) : kernel_of<kType, Rows::fetched>(units);
    });
    const int row_bytes = (with_residual ? 3 : 2) * slot_bytes(args.segment_cols),
              sums = (teams - 1) * static_cast<int>(sizeof(float)) *
                     static_cast<int>(round_up(args.segment_cols, kUnit)),
              slots = std::min(kMostSlots, (kSlotBytes - sums) / row_bytes);
    args.depth = !copied ? 2 * teams : teams == 1 && !with_residual ? std::min(slots, kFewRows) : slots;
    args.max_lead =
        with_residual || args.rows >= kLongPart * args.parts ? max_lead_of(teams, with_residual) : -1;
    launch_rows(kernel, args, std::min<int64_t>(args.parts, args.rows), 1, dim3(threads_of(units)),
                args.depth * row_bytes + sums, launch, "rms_norm_backward");
    return true;
}

}  // namespace fp8flow::hopper::norm
