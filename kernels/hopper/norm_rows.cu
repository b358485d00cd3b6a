// RMSNorm on wide BF16 rows: rows come through shared memory by the copy engine, several ahead, so that memory is busy while a row is summed
// and written. Contract: kernels/ops/norm.h. Other rows: norm.cu.
#include "kernels/hopper/norm_rows.h"

#include "kernels/hopper/device/mbarrier.h"

namespace fp8flow::hopper {

namespace {

constexpr int kThreads = static_cast<int>(op::kNormStrands);
constexpr int kWarps = kThreads / 32;
constexpr int kMinWidth = 1024, kMaxWidth = 8192;  // a CTA per row; at most four units a thread
static_assert(kThreads == kRowThreads);

__host__ __device__ constexpr int slot_bytes(int width) { return (2 * width + 127) / 128 * 128; }

__device__ __forceinline__ uint4 unit_of(const uint8_t* slot, int unit) {
    return reinterpret_cast<const uint4*>(slot)[unit];
}
// Starts the copy of a row into a slot; it completes on the barrier, which expects nothing else in this phase but `others` bytes.
__device__ __forceinline__ void start_row(const RowView& from, int64_t row, uint8_t* slot, Barrier* barrier) {
    bulk_load(static_cast<const uint16_t*>(from.data) + row * from.cols, barrier, slot,
              static_cast<uint32_t>(2 * from.cols));
}

// ---- forward ----------------------------------------------------------------------------------------------------------------------
constexpr int kSlots = 4, kCtas = 3;

// Bytes at T=4096, H=7168: x and y 117 MB (29 us), with FP8 rows 147 MB (36 us); each once. A CTA takes every gridDim-th row; kSlots rows are
// under way or waiting in shared memory (172 KB an SM). gamma stays in registers, and so does the row once it has come: a thread owns
// kUnits units, sums its strand, and behind the row's only barrier (all have read the slot and put their sums) thread 0 starts the
// slot's next row while all threads write. The warp sums alternate between two places, so that the next row's are not
// written before this row's are read. One writer a byte, the contract's order: deterministic; amax is an integer maximum.
template <int kUnits>
__global__ __launch_bounds__(kThreads, kCtas) void norm_rows_kernel(const NormForward args) {
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ Barrier full[kSlots];
    __shared__ float warp_sums[2][kWarps];
    const int thread = static_cast<int>(threadIdx.x), width = args.x.cols, units = width / kUnit;
    const int padded_units = (units + kBlockThreads - 1) / kBlockThreads * kBlockThreads;
    const int slot_size = slot_bytes(width);
    const int64_t step = gridDim.x;
    const auto start = [&](int64_t row, int slot) {
        barrier_arrive_expect_bytes(&full[slot], static_cast<uint32_t>(2 * width));
        start_row(args.x, row, slots + slot * slot_size, &full[slot]);
    };
    if (thread == 0) {
        for (int slot = 0; slot < kSlots; ++slot) barrier_init(&full[slot], 1);
        fence_barrier_init();
        for (int slot = 0; slot < kSlots; ++slot)
            if (blockIdx.x + slot * step < args.rows) start(blockIdx.x + slot * step, slot);
    }
    float g[kUnits][kUnit] = {};
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
        if (thread + j * kThreads < units)
            load_gamma(args.gamma, args.gamma_offset, (thread + j * kThreads) * kUnit, g[j]);
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    uint32_t amax = 0;
    __syncthreads();  // the barriers are there

    int slot = 0, place = 0;
    uint32_t parity = 0;
    for (int64_t row = blockIdx.x; row < args.rows; row += step) {
        barrier_wait(&full[slot], parity);
        uint4 raw[kUnits];
        float strand = 0.0f;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            raw[j] = uint4{};
            if (thread + j * kThreads >= units) continue;
            raw[j] = unit_of(slots + slot * slot_size, thread + j * kThreads);
            float v[kUnit];
            unpack_unit(raw[j], DType::bf16, v);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) strand = fma_float(v[i], v[i], strand);
        }
        put_strand(strand, warp_sums[place]);
        __syncthreads();
        if (thread == 0 && row + kSlots * step < args.rows) start(row + kSlots * step, slot);
        const float mean = div_float(row_sum(warp_sums[place]), static_cast<float>(width));
        const float rstd = div_float(1.0f, sqrt_float(mean + args.eps));
        if (thread == 0) args.rstd[row] = rstd;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kThreads;
            if (unit >= padded_units) continue;  // the same for all threads of a 1x128 block
            float v[kUnit];
            unpack_unit(raw[j], DType::bf16, v);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[i] = unit < units ? v[i] * rstd * g[j][i] : 0.0f;
            write_unit(args, row, unit * kUnit, multiplier, v, amax);
        }
        place ^= 1;
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    merge_amax(args, amax);
}

// ---- backward ---------------------------------------------------------------------------------------------------------------------
constexpr int kBackwardCtas = 2;

// Bytes at T=4096, H=7168: dy, x, dresidual in, dx out: 235 MB, and 7 MB of partial sums: 59 us. A CTA takes chunks of consecutive rows (256
// chunks there, all resident). Thread t owns the columns of strand t in every row, so that its dgamma sums stay in registers to the end
// of the chunk and every byte is read once. Two slots for dy and x, refilled two rows ahead at the row's only barrier (the row is in
// registers by then); two slots for dresidual, which is read behind the barrier and so is refilled one row ahead. Warp sums alternate as in the
// forward kernel. dx may stand in the place of dy or dresidual: a row is written after it has come, and by the CTA that read it.
template <int kUnits>
__global__ __launch_bounds__(kThreads,
                             kBackwardCtas) void norm_backward_rows_kernel(const NormBackward args) {
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ Barrier full[2], full_residual[2];
    __shared__ float warp_sums[2][kWarps];
    const int thread = static_cast<int>(threadIdx.x), width = args.x.cols, units = width / kUnit;
    const int slot_size = slot_bytes(width);
    const bool with_residual = static_cast<bool>(args.dresidual);
    const auto dy_slot = [&](int slot) { return slots + (2 * slot) * slot_size; };
    const auto x_slot = [&](int slot) { return slots + (2 * slot + 1) * slot_size; };
    const auto residual_slot = [&](int slot) { return slots + (4 + slot) * slot_size; };
    // The CTA's n-th row, or one past the end.
    const auto row_at = [&](int n) {
        const int64_t chunk = blockIdx.x + n / args.chunk_rows * static_cast<int64_t>(gridDim.x);
        return chunk < args.chunks ? chunk * args.chunk_rows + n % args.chunk_rows : args.rows;
    };
    const auto start = [&](int n) {
        const int64_t row = row_at(n);
        if (row >= args.rows) return;
        barrier_arrive_expect_bytes(&full[n % 2], static_cast<uint32_t>(4 * width));
        start_row(args.dy, row, dy_slot(n % 2), &full[n % 2]);
        start_row(args.x, row, x_slot(n % 2), &full[n % 2]);
    };
    const auto start_residual = [&](int n) {
        const int64_t row = row_at(n);
        if (row >= args.rows || !with_residual) return;
        barrier_arrive_expect_bytes(&full_residual[n % 2], static_cast<uint32_t>(2 * width));
        start_row(args.dresidual, row, residual_slot(n % 2), &full_residual[n % 2]);
    };
    if (thread == 0) {
        for (int slot = 0; slot < 2; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&full_residual[slot], 1);
        }
        fence_barrier_init();
        start(0);
        start_residual(0);
        start(1);
    }
    float g[kUnits][kUnit] = {}, dgamma[kUnits][kUnit] = {};
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
        if (thread + j * kThreads < units)
            load_gamma(args.gamma, args.gamma_offset, (thread + j * kThreads) * kUnit, g[j]);
    __syncthreads();  // the barriers are there

    int64_t row = row_at(0);
    float next_rstd = row < args.rows ? args.rstd[row] : 0.0f;
    for (int n = 0; row < args.rows; ++n) {
        const int slot = n % 2;
        const uint32_t parity = static_cast<uint32_t>(n / 2) & 1u;
        const int64_t next = row_at(n + 1);
        const float r = next_rstd;
        if (next < args.rows) next_rstd = args.rstd[next];  // on its way during this row
        barrier_wait(&full[slot], parity);
        uint4 raw_dy[kUnits], raw_x[kUnits];
        float strand = 0.0f;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kThreads;
            if (unit >= units) continue;
            raw_dy[j] = unit_of(dy_slot(slot), unit);
            raw_x[j] = unit_of(x_slot(slot), unit);
            float dy[kUnit], x[kUnit];
            unpack_unit(raw_dy[j], DType::bf16, dy);
            unpack_unit(raw_x[j], DType::bf16, x);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                strand = fma_float(dy[i] * g[j][i], x[i], strand);
                dgamma[j][i] = fma_float(dy[i], x[i] * r, dgamma[j][i]);
            }
        }
        put_strand(strand, warp_sums[slot]);
        __syncthreads();
        if (thread == 0) {
            start(n + 2);
            start_residual(n + 1);
        }
        const float c = r * r * div_float(row_sum(warp_sums[slot]), static_cast<float>(width));
        if (with_residual) barrier_wait(&full_residual[slot], parity);
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kThreads;
            if (unit >= units) continue;
            float dx[kUnit], x[kUnit];
            unpack_unit(raw_dy[j], DType::bf16, dx);
            unpack_unit(raw_x[j], DType::bf16, x);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) dx[i] = r * (dx[i] * g[j][i] - x[i] * c);
            if (with_residual) {
                unpack_unit(unit_of(residual_slot(slot), unit), DType::bf16, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dx[i] += x[i];
            }
            store_unit(args.dx, row, unit * kUnit, dx);
        }
        if (next < args.rows && next % args.chunk_rows != 0) {
            row = next;
            continue;
        }
        const int64_t chunk = row / args.chunk_rows;  // the chunk is complete
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            const int unit = thread + j * kThreads;
            if (unit >= units) continue;
            float4* to = reinterpret_cast<float4*>(args.partials + chunk * width + unit * kUnit);
            to[0] = float4{dgamma[j][0], dgamma[j][1], dgamma[j][2], dgamma[j][3]};
            to[1] = float4{dgamma[j][4], dgamma[j][5], dgamma[j][6], dgamma[j][7]};
#pragma unroll
            for (int i = 0; i < kUnit; ++i) dgamma[j][i] = 0.0f;
        }
        row = next;
    }
}

bool is_wide_bf16(const RowView& rows) {
    return rows.dtype == DType::bf16 && rows.vector && rows.cols >= kMinWidth && rows.cols <= kMaxWidth;
}

template <class Kernel, class Args>
void launch_kernel(Kernel kernel, const Args& args, unsigned grid, int bytes, const Launch& launch,
                   const char* op) {
    allow_shared_memory(kernel, bytes);
    kernel<<<grid, kThreads, static_cast<std::size_t>(bytes), stream_of(launch)>>>(args);
    check_launch(op);
}

int units_a_thread(int width) { return static_cast<int>(ceil_div(width / kUnit, kThreads)); }

}  // namespace

bool launch_norm_rows(const NormForward& args, const Launch& launch) {
    if (!is_wide_bf16(args.x) || (args.y.data != nullptr && !is_wide_bf16(args.y))) return false;
    const int bytes = kSlots * slot_bytes(args.x.cols), units = units_a_thread(args.x.cols);
    const unsigned grid = grid_for(args.rows, launch, kCtas);
    const auto kernel = units == 1   ? norm_rows_kernel<1>
                        : units == 2 ? norm_rows_kernel<2>
                                     : norm_rows_kernel<4>;
    launch_kernel(kernel, args, grid, bytes, launch, "rms_norm");
    return true;
}

bool launch_norm_backward_rows(const NormBackward& args, const Launch& launch) {
    if (!is_wide_bf16(args.x) || !is_wide_bf16(args.dy) || !is_wide_bf16(args.dx)) return false;
    if (args.dresidual.data != nullptr && !is_wide_bf16(args.dresidual)) return false;
    const int bytes = 6 * slot_bytes(args.x.cols), units = units_a_thread(args.x.cols);
    const unsigned grid = grid_for(args.chunks, launch, kBackwardCtas);
    const auto kernel = units == 1   ? norm_backward_rows_kernel<1>
                        : units == 2 ? norm_backward_rows_kernel<2>
                                     : norm_backward_rows_kernel<4>;
    launch_kernel(kernel, args, grid, bytes, launch, "rms_norm_backward");
    return true;
}

}  // namespace fp8flow::hopper
