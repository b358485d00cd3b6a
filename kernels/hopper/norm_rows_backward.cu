// RMSNorm backward on wide rows of BF16 or FP16: every byte is read once, and the sums for gamma stay in registers. Contract:
// kernels/ops/norm.h. Forward: norm_rows.cu. Other rows: norm.cu.
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/norm_rows.h"

namespace fp8flow::hopper {

namespace {

constexpr int kMostSlots = 8, kLanes = 32, kMostPolls = 32;
// A CTA works on as many rows at a time, each by a team: kNormThreads threads, and a warp that brings its rows.
constexpr int teams_of(int units) { return units == 1 ? 3 : units == 2 ? 2 : 1; }
constexpr int threads_of(int units) { return teams_of(units) * (kNormThreads + kLanes); }
// So many rows later the rest is done with a row after its sum has been asked for. (The sums of segments take their time.)
constexpr int lag_of(int units) { return units < kMostUnits ? 1 : 2; }
// Registers for so many threads, not as many as there are: a CTA of the kernel behind finds room beside this one.
constexpr int bound_of(int units) { return units == 1 ? 1024 : units == 2 ? 768 : 512; }
static_assert(op::gamma_chunks(kUnit * kNormThreads) == teams_of(1) &&
              op::gamma_chunks(2 * kUnit * kNormThreads) == teams_of(2) &&
              op::gamma_chunks(3 * kUnit * kNormThreads) == teams_of(3));

struct Ring {
    Barrier full[kMostSlots], empty[kMostSlots], gamma_here, gamma_read;
};
template <int kTeams> struct Shared {
    Ring rings[kTeams];
    float warp_sums[2][kTeams * kNormWarps];
    SegmentSums segment_sums;
};

// A place in a ring.
struct Place {
    int slot = 0;
    uint32_t parity = 0;
    __device__ void advance(int depth) {
        if (++slot < depth) return;
        slot = 0;
        parity ^= 1u;
    }
};

// The team's rows of all parts of the CTA, one after the other. One thread.
template <int kTeams>
__device__ __forceinline__ void bring_rows(const NormBackward& args, const RowPart& part, int team,
                                           uint8_t* slots, int row_size, Ring& ring) {
    const bool with_residual = static_cast<bool>(args.dresidual);
    const int rows = static_cast<int>(args.rows), step = kTeams * args.parts,
              clusters = static_cast<int>(gridDim.x) / part.segments,
              slot_size = slot_bytes(args.segment_cols);
    const uint32_t bytes = static_cast<uint32_t>(2 * kUnit * part.units);
    const bool held = args.hold >= 0 && clusters >= args.parts;  // all have as many rows
    const auto bring_gamma = [&] {
        barrier_arrive_expect_bytes(&ring.gamma_here, 2 * bytes);
        bulk_load(static_cast<const float*>(args.gamma.data) + part.first, &ring.gamma_here,
                  slots + (args.depth - 1) * row_size, 2 * bytes);
    };
    Place place;
    int n = 0;
    uint32_t asked = 0;
    bool patient = true;
    for (int sums = static_cast<int>(blockIdx.x) / part.segments; sums < args.parts; sums += clusters)
        for (int row = sums + team * args.parts; row < rows; row += step, ++n) {
            if (n == 1) bring_gamma();
            if (n == args.depth - 1) barrier_wait(&ring.gamma_read, 0);
            barrier_wait(&ring.empty[place.slot], place.parity ^ 1u);
            if (held && n >= args.depth) {
                const int mean = (4 * n - args.hold) * clusters * kTeams / 4;
                for (int polls = 0; patient && static_cast<int>(asked) < mean; ++polls) {
                    asked = *static_cast<volatile uint32_t*>(args.asked);
                    patient = polls < kMostPolls;
                }
            }
            uint8_t* const slot = slots + place.slot * row_size;
            Barrier* const full = &ring.full[place.slot];
            barrier_arrive_expect_bytes(full, (with_residual ? 3 : 2) * bytes);
            start_row(args.dy, row, part, slot, full);
            start_row(args.x, row, part, slot + slot_size, full);
            if (with_residual) start_row(args.dresidual, row, part, slot + 2 * slot_size, full);
            place.advance(args.depth);
            if (held) {
                if (part.rank == 0) atomicAdd(args.asked, 1u);
                asked = *static_cast<volatile uint32_t*>(args.asked);  // on its way until the next row
            }
        }
    if (n <= 1) bring_gamma();
}

// A worker's units of gamma, whole as rows are: from the slot that it has been brought to, which is free then, or from memory.
template <int kUnits, bool kFetched>
__device__ __forceinline__ void take_gamma(const NormBackward& args, const RowPart& part, const uint8_t* slot,
                                           Ring& ring, float (&g)[kUnits][kUnit]) {
    const int thread = static_cast<int>(threadIdx.x) % kNormThreads;
    if constexpr (!kFetched) barrier_wait(&ring.gamma_here, 0);
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
        if (thread % kLanes == 0) barrier_arrive(&ring.gamma_read);
    }
    if (args.gamma_offset == 0.0f) return;
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
#pragma unroll
        for (int i = 0; i < kUnit; ++i) g[j][i] = args.gamma_offset + g[j][i];
}

// A team's sums of dgamma in shared memory, and added from there.
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

template <int kUnits, DType kType, Rows kRows>
__global__ __launch_bounds__(bound_of(kUnits),
                             1) void norm_backward_rows_kernel(const __grid_constant__ NormBackward args) {
    constexpr int kTeams = teams_of(kUnits), kLag = lag_of(kUnits);
    constexpr int kWorkers = kTeams * kNormThreads, kJoin = 1 + kTeams;  // a barrier a team, and two of all
    constexpr bool kFetched = kRows == Rows::fetched;
    let_next_start();
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Shared<kTeams> shared;
    const int thread = static_cast<int>(threadIdx.x) % kNormThreads, lane = thread % kLanes;
    const bool brings = threadIdx.x >= kWorkers;
    const int team = kTeams == 1 ? 0
                     : brings    ? thread / kLanes
                                 : static_cast<int>(threadIdx.x) / kNormThreads;
    const RowPart part = row_part<kUnits>(args.x.cols, args.segments, args.segment_cols);
    const int units = part.units, first_unit = part.first / kUnit, depth = args.depth;
    const int slot_size = slot_bytes(args.segment_cols);
    const bool with_residual = static_cast<bool>(args.dresidual);
    const int row_size = (with_residual ? 3 : 2) * slot_size;
    uint8_t* const slots = memory + team * depth * row_size;
    Ring& ring = shared.rings[team];
    if (brings && lane == 0) {
        for (int slot = 0; slot < depth; ++slot) {
            barrier_init(&ring.full[slot], 1);
            barrier_init(&ring.empty[slot], kNormWarps);
        }
        barrier_init(&ring.gamma_here, 1);
        barrier_init(&ring.gamma_read, kNormWarps);
        if (team == 0) prepare(shared.segment_sums);
        fence_barrier_init();
    }
    __syncthreads();
    if (part.segments > 1) cluster_announce();
    wait_for_kernel_before();
    if (brings) {
        if (!kFetched && lane == 0) bring_rows<kTeams>(args, part, team, slots, row_size, ring);
        if (part.segments > 1) {
            cluster_await();
            cluster_meet();
        }
        return;
    }

    float g[kUnits][kUnit] = {};
    take_gamma<kUnits, kFetched>(args, part, slots + (depth - 1) * row_size, ring, g);
    if (part.segments > 1) cluster_await();

    const int all_rows = static_cast<int>(args.rows), parts = min(args.parts, all_rows),
              clusters = static_cast<int>(gridDim.x) / part.segments, step = kTeams * args.parts;
    int taken = 0, given = 0;  // rows of the team
    Place to_take, to_give;
    for (int sums = static_cast<int>(blockIdx.x) / part.segments; sums < parts; sums += clusters) {
        float dgamma[kUnits][kUnit] = {};
        const int first = sums + team * args.parts;
        const int rows = first < all_rows ? (all_rows - first + step - 1) / step : 0;
        float next_rstd = first < all_rows ? args.rstd[first] : 0.0f;
        // The row's part of dgamma, and of its sum; its rstd.
        const auto take = [&](int row) {
            const float r = next_rstd;
            if (row + step < all_rows) next_rstd = args.rstd[row + step];  // on its way during this row
            uint8_t* const slot = slots + to_take.slot * row_size;
            if constexpr (kFetched) {
                fetch_row(args.dy, row, part, slot, thread);
                fetch_row(args.x, row, part, slot + slot_size, thread);
                if (with_residual) fetch_row(args.dresidual, row, part, slot + 2 * slot_size, thread);
                meet(1 + team, kNormThreads);
            } else {
                barrier_wait(&ring.full[to_take.slot], to_take.parity);
            }
            to_take.advance(depth);
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
                    dgamma[j][i] = fma_float(dy[i], x[i] * r, dgamma[j][i]);
                }
            }
            put_strand(strand, shared.warp_sums[taken % 2]);
            ++taken;
            return r;
        };
        const auto give = [&](int row, float r, float sum) {
            const uint8_t* const slot = slots + to_give.slot * row_size;
            if (part.segments > 1) sum = await_sums(shared.segment_sums, given, part);
            const float c = r * r * div_float(sum, static_cast<float>(args.x.cols));
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                float dx[kUnit], x[kUnit];
                unpack_unit(unit_of(slot, unit), kType, dx);
                unpack_unit(unit_of(slot + slot_size, unit), kType, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dx[i] = r * (dx[i] * g[j][i] - x[i] * c);
                if (with_residual) {
                    unpack_unit(unit_of(slot + 2 * slot_size, unit), kType, x);
#pragma unroll
                    for (int i = 0; i < kUnit; ++i) dx[i] += x[i];
                }
                if constexpr (kFetched)
                    store_unit(args.dx, row, (first_unit + unit) * kUnit, dx);
                else
                    *unit_of(args.dx, row, first_unit + unit) = pack_unit<kType>(dx);
            }
            if constexpr (!kFetched) {
                __syncwarp();
                if (lane == 0) barrier_arrive(&ring.empty[to_give.slot]);
            }
            to_give.advance(depth);
            ++given;
        };
        float r[kLag + 1] = {}, sum[kLag + 1] = {};  // of the rows n, n - 1, ...
#pragma unroll 1
        for (int n = 0; n < rows + kLag; ++n) {
#pragma unroll
            for (int i = kLag; i > 0; --i) r[i] = r[i - 1], sum[i] = sum[i - 1];
            if (n > 0 && n <= rows) {
                meet(1 + team, kNormThreads);
                sum[1] = row_sum(shared.warp_sums[(taken - 1) % 2] + team * kNormWarps);
                if (part.segments > 1) send_sum(shared.segment_sums, taken - 1, part, sum[1], thread);
            }
            if (n < rows) r[0] = take(first + n * step);
            if (n >= kLag) give(first + (n - kLag) * step, r[kLag], sum[kLag]);
        }
        const auto left_by = [&](int team) {
            return reinterpret_cast<float4*>(memory + kTeams * depth * row_size) + (team - 1) * 2 * units;
        };
        if (team > 0) {
            leave_sums(dgamma, units, left_by(team));
            announce(kJoin, kWorkers);
        } else {
            if (kTeams > 1) meet(kJoin, kWorkers);
#pragma unroll
            for (int other = 1; other < kTeams; ++other) add_sums(left_by(other), units, dgamma);
            const RowView out = {args.partials, nullptr, args.x.cols, DType::f32, !kFetched};
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit < units) store_unit(out, sums, (first_unit + unit) * kUnit, dgamma[j]);
            }
        }
        if (kTeams > 1 && sums + clusters < parts) meet(kJoin + 1, kWorkers);  // what they left has been read
    }
    if (part.segments > 1) cluster_meet();  // no sum is on its way any more
}

using BackwardKernel = void (*)(NormBackward);
template <DType kType, Rows kRows> BackwardKernel kernel_of(int units) {
    return units == 1   ? norm_backward_rows_kernel<1, kType, kRows>
           : units == 2 ? norm_backward_rows_kernel<2, kType, kRows>
                        : norm_backward_rows_kernel<kMostUnits, kType, kRows>;
}

}  // namespace

bool launch_norm_backward_rows(NormBackward args, const Launch& launch) {
    const DType type = args.x.dtype;
    const bool f16 = type == DType::f16, with_residual = args.dresidual.data != nullptr;
    if (!is_fetchable(args.x) || args.dy.dtype != type) return false;
    if (with_residual && args.dresidual.dtype != type) return false;
    const bool copied = args.gamma.vector && is_wide(args.x, type) && is_wide(args.dy, type) &&
                        is_wide(args.dx, type) && (!with_residual || is_wide(args.dresidual, type));
    const int units = units_a_thread(args.segment_cols), teams = teams_of(units);
    const BackwardKernel kernel = copied ? (f16 ? kernel_of<DType::f16, Rows::copied>(units)
                                                : kernel_of<DType::bf16, Rows::copied>(units))
                                         : (f16 ? kernel_of<DType::f16, Rows::fetched>(units)
                                                : kernel_of<DType::bf16, Rows::fetched>(units));
    constexpr int kRoom = 220 * 1024;
    const int row_bytes = (with_residual ? 3 : 2) * slot_bytes(args.segment_cols),
              left = (teams - 1) * static_cast<int>(sizeof(float)) *
                     static_cast<int>(round_up(args.segment_cols, kUnit)),
              slots = std::min(kMostSlots, (kRoom - left) / (teams * row_bytes));
    args.depth = copied ? (args.depth > 0 ? std::min(args.depth, slots) : slots) : lag_of(units) + 1;
    launch_rows(kernel, args, std::min<int64_t>(args.parts, args.rows), 1, dim3(threads_of(units)),
                teams * args.depth * row_bytes + left, launch, "rms_norm_backward", true);
    return true;
}

}  // namespace fp8flow::hopper
