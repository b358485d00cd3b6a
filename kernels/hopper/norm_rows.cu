// RMSNorm on wide BF16 rows: rows come through shared memory by the copy engine, several ahead, so that memory is busy while a row is summed
// and written. Contract: kernels/ops/norm.h. Other rows: norm.cu.
#include "kernels/hopper/norm_rows.h"

#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/packed.h"

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

// A unit of gamma, fp32 and aligned.
__device__ __forceinline__ void load_wide_gamma(const RowView& gamma, float offset, int unit,
                                                float (&g)[kUnit]) {
    const float4* in = static_cast<const float4*>(gamma.data) + 2 * unit;
    const float4 a = in[0], b = in[1];
    g[0] = a.x, g[1] = a.y, g[2] = a.z, g[3] = a.w;
    g[4] = b.x, g[5] = b.y, g[6] = b.z, g[7] = b.w;
    if (offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = offset + g[i];
}

// ---- forward ----------------------------------------------------------------------------------------------------------------------
constexpr int kSlots = 4, kCtas = 3;

// What the rows become. blocks: E4M3 with a scale every 128 columns, which are all there, and perhaps y; tensor: E4M3 by one scale, perhaps y and
// the maximum; any: whatever NormForward can ask for, decided unit by unit.
enum class Form { values, blocks, tensor, any };

// The largest magnitudes of a unit, of its even and of its odd columns. NaN gives way to a number.
__device__ __forceinline__ uint32_t largest_pair(const uint4& unit) {
    return max_bf16x2(max_bf16x2(abs_bf16x2(unit.x), abs_bf16x2(unit.y)),
                      max_bf16x2(abs_bf16x2(unit.z), abs_bf16x2(unit.w)));
}
__device__ __forceinline__ uint4 pack_unit(const float (&v)[kUnit]) {
    return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
}
__device__ __forceinline__ void normalize_unit(const uint4& raw, float rstd, const float (&g)[kUnit],
                                               float (&v)[kUnit]) {
    unpack_unit(raw, DType::bf16, v);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = v[i] * rstd * g[i];
}
__device__ __forceinline__ uint4* unit_of(const RowView& t, int64_t row, int unit) {
    return reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.data) + row * t.cols) + unit;
}
__device__ __forceinline__ uint2* codes_of(const RowView& t, int64_t row, int unit) {
    return reinterpret_cast<uint2*>(static_cast<uint8_t*>(t.data) + row * t.cols) + unit;
}

// Bytes at T=4096, H=7168: x and y 117 MB (29 us), with FP8 rows 147 MB (36 us); each once. A CTA takes every gridDim-th row; kSlots rows are
// under way or waiting in shared memory (172 KB an SM). gamma stays in registers, and so does the row once it has come: a thread owns
// kUnits units, sums its strand, and behind the row's only barrier (all have read the slot and put their sums) thread 0 starts the
// slot's next row while all threads write. The warp sums alternate between two places, so that the next row's are not
// written before this row's are read. One writer a byte, the contract's order: deterministic; amax is an integer maximum.
// FP8 blocks: an SM has 36 thread instructions a column at 4.1 TB/s. All units of a thread become BF16 pairs first, which y needs anyway; their
// maxima are taken as pairs (3/4 of an instruction a column), the four shuffles of all units travel together, and the codes are made
// from the pairs. Deciding dtype, layout and bounds for each unit instead took 70 us where memory needs 36.
template <int kUnits, Form kForm>
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
            load_wide_gamma(args.gamma, args.gamma_offset, thread + j * kThreads, g[j]);
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    uint32_t amax = 0;
    float peak = 0.0f;  // with Form::tensor
    __syncthreads();    // the barriers are there

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
        if constexpr (kForm == Form::values) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kThreads;
                if (unit >= units) continue;
                float v[kUnit];
                normalize_unit(raw[j], rstd, g[j], v);
                *unit_of(args.y, row, unit) = pack_unit(v);
            }
        } else if constexpr (kForm == Form::blocks) {
            uint32_t largest[kUnits];  // of the unit: two columns' magnitudes
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                float v[kUnit];
                normalize_unit(raw[j], rstd, g[j], v);
                raw[j] = pack_unit(v);
                if (args.y && thread + j * kThreads < units)
                    *unit_of(args.y, row, thread + j * kThreads) = raw[j];
                largest[j] = largest_pair(raw[j]);
            }
#pragma unroll
            for (int step = kBlockThreads / 2; step > 0; step /= 2)
#pragma unroll
                for (int j = 0; j < kUnits; ++j)
                    largest[j] = max_bf16x2(largest[j], __shfl_xor_sync(0xFFFFFFFFu, largest[j], step));
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kThreads;
                if (unit >= units) continue;
                const float block_max =
                    fmaxf(__uint_as_float(largest[j] << 16), __uint_as_float(largest[j] & 0xFFFF0000u));
                const QuantScale scale = quant_scale(block_max, kE4m3Max, args.rule.scale_format);
                float v[kUnit];
                unpack_unit(raw[j], DType::bf16, v);
                *codes_of(args.codes, row, unit) = encode_unit(v, scale.multiplier, DType::e4m3);
                if (unit % kBlockThreads == 0)
                    args.scales.store(row, unit / kBlockThreads,
                                      {scale.multiplier, scale.dequant, float_to_e8m0(scale.dequant)});
            }
        } else if constexpr (kForm == Form::tensor) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kThreads;
                if (unit >= units) continue;
                float v[kUnit];
                normalize_unit(raw[j], rstd, g[j], v);
                if (args.y) *unit_of(args.y, row, unit) = pack_unit(v);
                *codes_of(args.codes, row, unit) = encode_unit(v, multiplier, DType::e4m3);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) peak = fmaxf(peak, fabsf(v[i]));  // NaN ignored
            }
        } else {
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
        }
        place ^= 1;
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    if constexpr (kForm == Form::tensor) amax = __float_as_uint(peak);
    if constexpr (kForm == Form::tensor || kForm == Form::any) merge_amax(args, amax);
}

// ---- backward ---------------------------------------------------------------------------------------------------------------------
constexpr int kBackwardCtas = 2;

// Bytes at T=4096, H=7168: dy, x, dresidual in, dx out: 235 MB, and 7 MB of partial sums: 59 us. A CTA takes chunks of consecutive rows (256
// chunks there, all resident). Thread t owns the columns of strand t in every row, so that its dgamma sums stay in registers to the end
// of the chunk and every byte is read once. Two slots for dy and x, refilled two rows ahead at the row's only barrier (the row is in
// registers by then); two slots for dresidual, which is read behind the barrier and so is refilled one row ahead. Warp sums alternate as in the
// forward kernel. Thread 0 starts copies at once, without a division: two CTAs have no more than 86 KB under way each. dx may stand in the place of dy or dresidual: a row is written after it has come, and by the CTA that read it.
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
    // The CTA's rows one after the other: chunk by chunk, up to one past the end. Counted, not divided: the copies of the next rows wait for it.
    struct Place {
        int64_t row;
        int in_chunk;
    };
    const int chunk_rows = static_cast<int>(args.chunk_rows);
    const int64_t skipped = (gridDim.x - int64_t{1}) * chunk_rows;
    const auto behind = [&](Place place) {
        ++place.row;
        if (++place.in_chunk == chunk_rows) place = {place.row + skipped, 0};
        return place;
    };
    const auto start = [&](int64_t row, int slot) {
        if (row >= args.rows) return;
        barrier_arrive_expect_bytes(&full[slot], static_cast<uint32_t>(4 * width));
        start_row(args.dy, row, dy_slot(slot), &full[slot]);
        start_row(args.x, row, x_slot(slot), &full[slot]);
    };
    const auto start_residual = [&](int64_t row, int slot) {
        if (row >= args.rows || !with_residual) return;
        barrier_arrive_expect_bytes(&full_residual[slot], static_cast<uint32_t>(2 * width));
        start_row(args.dresidual, row, residual_slot(slot), &full_residual[slot]);
    };
    Place here = {static_cast<int64_t>(blockIdx.x) * chunk_rows, 0}, next = behind(here);
    if (thread == 0) {
        for (int slot = 0; slot < 2; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&full_residual[slot], 1);
        }
        fence_barrier_init();
        start(here.row, 0);
        start_residual(here.row, 0);
        start(next.row, 1);
    }
    float g[kUnits][kUnit] = {}, dgamma[kUnits][kUnit] = {};
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
        if (thread + j * kThreads < units)
            load_wide_gamma(args.gamma, args.gamma_offset, thread + j * kThreads, g[j]);
    __syncthreads();  // the barriers are there

    int64_t chunk = blockIdx.x;
    float next_rstd = here.row < args.rows ? args.rstd[here.row] : 0.0f;
    for (int n = 0; here.row < args.rows; ++n) {
        const int slot = n % 2;
        const uint32_t parity = static_cast<uint32_t>(n / 2) & 1u;
        const int64_t row = here.row;
        const Place second = behind(next);
        const float r = next_rstd;
        if (next.row < args.rows) next_rstd = args.rstd[next.row];  // on its way during this row
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
            start(second.row, slot);
            start_residual(next.row, slot ^ 1);
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
            *unit_of(args.dx, row, unit) = pack_unit(dx);
        }
        const bool in_chunk = next.row < args.rows && next.in_chunk != 0;
        here = next;
        next = second;
        if (in_chunk) continue;
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
        chunk += gridDim.x;
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

namespace {

Form form_of(const NormForward& args) {
    if (args.codes.data == nullptr)
        return args.y.data != nullptr && args.amax == nullptr ? Form::values : Form::any;
    if (args.codes.dtype != DType::e4m3 || !args.codes.vector) return Form::any;
    if (args.scales.data == nullptr) return Form::tensor;
    const bool whole_blocks = args.scales.block == kBlock && args.x.cols % kBlock == 0;
    return whole_blocks && args.amax == nullptr ? Form::blocks : Form::any;
}

using ForwardKernel = void (*)(NormForward);
template <int kUnits> ForwardKernel forward_kernel(Form form) {
    switch (form) {
        case Form::values: return norm_rows_kernel<kUnits, Form::values>;
        case Form::blocks: return norm_rows_kernel<kUnits, Form::blocks>;
        case Form::tensor: return norm_rows_kernel<kUnits, Form::tensor>;
        case Form::any: break;
    }
    return norm_rows_kernel<kUnits, Form::any>;
}

}  // namespace

bool launch_norm_rows(const NormForward& args, const Launch& launch) {
    if (!args.gamma.vector || !is_wide_bf16(args.x) || (args.y.data != nullptr && !is_wide_bf16(args.y)))
        return false;
    const int bytes = kSlots * slot_bytes(args.x.cols), units = units_a_thread(args.x.cols);
    const unsigned grid = grid_for(args.rows, launch, kCtas);
    const Form form = form_of(args);
    const ForwardKernel kernel = units == 1   ? forward_kernel<1>(form)
                                 : units == 2 ? forward_kernel<2>(form)
                                              : forward_kernel<4>(form);
    launch_kernel(kernel, args, grid, bytes, launch, "rms_norm");
    return true;
}

bool launch_norm_backward_rows(const NormBackward& args, const Launch& launch) {
    if (!args.gamma.vector || !is_wide_bf16(args.x) || !is_wide_bf16(args.dy) || !is_wide_bf16(args.dx))
        return false;
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
