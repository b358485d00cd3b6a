// RMSNorm forward on wide rows of BF16 or FP16: rows come through shared memory by the copy engine, several ahead, so that memory is busy
// while a row is summed and written. Contract: kernels/ops/norm.h. Backward: norm_rows_backward.cu. Other rows: norm.cu.
#include "kernels/hopper/norm_rows.h"

#include "kernels/hopper/device/packed.h"

namespace fp8flow::hopper {

namespace {

constexpr int kSlots = 4;

// What the rows become. values: y of the same type. blocks: E4M3 with a scale every 128 columns, which are all there, and perhaps y; tensor: E4M3
// by one scale, perhaps y and the maximum; any: whatever NormForward can ask for, decided unit by unit. Where there are codes, y is BF16.
// odd: the same as any, of rows that are fetched element by element.
enum class Form { values, blocks, tensor, any, odd };

// CTAs of an SM: what registers allow; narrow rows need many, since a row takes about a microsecond from its arrival to its last store.
constexpr int ctas_of(int units, Form form) {
    if (form == Form::any || form == Form::odd || units > 2) return 3;
    return units == 1 ? 6 : 4;
}

// The largest magnitudes of a unit, of its even and of its odd columns. NaN gives way to a number.
__device__ __forceinline__ uint32_t largest_pair(const uint4& unit) {
    return max_bf16x2(max_bf16x2(abs_bf16x2(unit.x), abs_bf16x2(unit.y)),
                      max_bf16x2(abs_bf16x2(unit.z), abs_bf16x2(unit.w)));
}
template <DType kType>
__device__ __forceinline__ void normalize_unit(const uint4& raw, float rstd, const float (&g)[kUnit],
                                               float (&v)[kUnit]) {
    unpack_unit(raw, kType, v);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = v[i] * rstd * g[i];
}
__device__ __forceinline__ uint2* codes_of(const RowView& t, int64_t row, int unit) {
    return reinterpret_cast<uint2*>(static_cast<uint8_t*>(t.data) + row * t.cols) + unit;
}

// Bytes at T=4096, H=7168: x and y 117 MB (29 us), with FP8 rows 147 MB (36 us); each once. A CTA takes every gridDim-th row; kSlots rows are
// under way or waiting in shared memory (172 KB an SM). gamma stays in registers, and so does the row once it has come: a thread owns
// kUnits units, sums its strand, and behind the row's only barrier (all have read the slot and put their sums) thread 0 starts the
// slot's next row while all threads write. The warp sums alternate between two places, so that the next row's are not
// written before this row's are read. One writer a byte, the contract's order: deterministic; amax is an integer maximum.
// A row of several segments belongs to a cluster, a segment a CTA: behind the barrier their sums meet in all of them (SegmentSums).
// FP8 blocks: an SM has 36 thread instructions a column at 4.1 TB/s. All units of a thread become BF16 pairs first, which y needs anyway; their
// maxima are taken as pairs (3/4 of an instruction a column), the four shuffles of all units travel together, and the codes are made
// from the pairs. Deciding dtype, layout and bounds for each unit instead took 70 us where memory needs 36.
template <int kUnits, Form kForm, DType kType>
__global__ __launch_bounds__(kNormThreads,
                             ctas_of(kUnits, kForm)) void norm_rows_kernel(const NormForward args) {
    constexpr bool kFetched = kForm == Form::odd;
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ Barrier full[kSlots];
    __shared__ float warp_sums[2][kNormWarps];
    __shared__ SegmentSums segment_sums;
    __shared__ uint32_t largest_of_cta;
    const int thread = static_cast<int>(threadIdx.x);
    const RowPart part = row_part<kUnits>(args.x.cols, args.segments, args.segment_cols);
    const int units = part.units, first_unit = part.first / kUnit;
    const int padded_units = (units + kBlockThreads - 1) / kBlockThreads * kBlockThreads;
    const int slot_size = slot_bytes(args.segment_cols);
    const int64_t first_row = blockIdx.x / part.segments, step = gridDim.x / part.segments;
    const auto start = [&](int64_t row, int slot) {
        barrier_arrive_expect_bytes(&full[slot], static_cast<uint32_t>(2 * kUnit * units));
        start_row(args.x, row, part, slots + slot * slot_size, &full[slot]);
    };
    if (thread == 0) {
        for (int slot = 0; slot < kSlots; ++slot) barrier_init(&full[slot], 1);
        prepare(segment_sums);
        largest_of_cta = 0;
        fence_barrier_init();
        for (int slot = 0; slot < kSlots; ++slot)
            if (!kFetched && first_row + slot * step < args.rows) start(first_row + slot * step, slot);
    }
    float g[kUnits][kUnit] = {};
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = thread + j * kNormThreads;
        if (unit >= units) continue;
        if constexpr (kFetched)
            load_gamma(args.gamma, args.gamma_offset, (first_unit + unit) * kUnit, g[j]);
        else
            load_wide_gamma(args.gamma, args.gamma_offset, first_unit + unit, g[j]);
    }
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    uint32_t amax = 0;
    float peak = 0.0f;  // with Form::tensor
    // the barriers are there
    if (part.segments > 1)
        cluster_meet();
    else
        __syncthreads();

    int slot = 0, n = 0;
    uint32_t parity = 0;
    for (int64_t row = first_row; row < args.rows; row += step, ++n) {
        if constexpr (kFetched) {
            fetch_row(args.x, row, part, slots + slot * slot_size);
            __syncthreads();
        } else {
            barrier_wait(&full[slot], parity);
        }
        uint4 raw[kUnits];
        float strand = 0.0f;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            raw[j] = uint4{};
            if (thread + j * kNormThreads >= units) continue;
            raw[j] = unit_of(slots + slot * slot_size, thread + j * kNormThreads);
            float v[kUnit];
            unpack_unit(raw[j], kType, v);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) strand = fma_float(v[i], v[i], strand);
        }
        put_strand(strand, warp_sums[n % 2]);
        __syncthreads();
        if (!kFetched && thread == 0 && row + kSlots * step < args.rows) start(row + kSlots * step, slot);
        float sum = row_sum(warp_sums[n % 2]);
        if (part.segments > 1) sum = sum_of_segments(segment_sums, n, part, sum);
        const float mean = div_float(sum, static_cast<float>(args.x.cols));
        const float rstd = div_float(1.0f, sqrt_float(mean + args.eps));
        if (thread == 0 && part.rank == 0) args.rstd[row] = rstd;
        if constexpr (kForm == Form::values) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                float v[kUnit];
                normalize_unit<kType>(raw[j], rstd, g[j], v);
                *unit_of(args.y, row, first_unit + unit) = pack_unit<kType>(v);
            }
        } else if constexpr (kForm == Form::blocks) {
            uint32_t largest[kUnits];  // of the unit: two columns' magnitudes
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                float v[kUnit];
                normalize_unit<kType>(raw[j], rstd, g[j], v);
                raw[j] = pack_unit<DType::bf16>(v);
                if (args.y && unit < units) *unit_of(args.y, row, first_unit + unit) = raw[j];
                largest[j] = largest_pair(raw[j]);
            }
            constexpr int kPairs = (kUnits + 1) / 2;
            uint32_t pairs[kPairs];  // the maxima of two units, side by side
#pragma unroll
            for (int p = 0; p < kPairs; ++p) {
                const uint32_t a = largest[2 * p], b = largest[2 * p + (kUnits > 1)];
                pairs[p] = max_bf16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
            }
#pragma unroll
            for (int step = kBlockThreads / 2; step > 0; step /= 2)
#pragma unroll
                for (int p = 0; p < kPairs; ++p)
                    pairs[p] = max_bf16x2(pairs[p], __shfl_xor_sync(0xFFFFFFFFu, pairs[p], step));
            QuantScale mine = {};  // of unit `lane`, which this thread stores
            const int lane = thread % kBlockThreads;
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                const uint32_t bits = j % 2 == 0 ? pairs[j / 2] << 16 : pairs[j / 2] & 0xFFFF0000u;
                const QuantScale scale = quant_scale(__uint_as_float(bits), kE4m3Max, args.rule.scale_format);
                if (lane == j) mine = scale;
                if (unit >= units) continue;
                float v[kUnit];
                unpack_unit(raw[j], DType::bf16, v);
                *codes_of(args.codes, row, first_unit + unit) = encode_unit(v, scale.multiplier, DType::e4m3);
            }
            const int block = thread / kBlockThreads + lane * (kNormThreads / kBlockThreads);
            if (lane < kUnits && block < units / kBlockThreads)
                args.scales.store(row, first_unit / kBlockThreads + block,
                                  {mine.multiplier, mine.dequant, float_to_e8m0(mine.dequant)});
        } else if constexpr (kForm == Form::tensor) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= units) continue;
                float v[kUnit];
                normalize_unit<kType>(raw[j], rstd, g[j], v);
                if (args.y) *unit_of(args.y, row, first_unit + unit) = pack_unit<DType::bf16>(v);
                *codes_of(args.codes, row, first_unit + unit) = encode_unit(v, multiplier, DType::e4m3);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) peak = fmaxf(peak, fabsf(v[i]));  // NaN ignored
            }
        } else {
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const int unit = thread + j * kNormThreads;
                if (unit >= padded_units) continue;  // the same for all threads of a 1x128 block
                float v[kUnit];
                unpack_unit(raw[j], kType, v);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) v[i] = unit < units ? v[i] * rstd * g[j][i] : 0.0f;
                write_unit(args, row, (first_unit + unit) * kUnit, multiplier, v, amax);
            }
        }
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    if constexpr (kForm == Form::tensor) amax = __float_as_uint(peak);
    if constexpr (kForm == Form::tensor || kForm == Form::any || kForm == Form::odd)
        merge_amax(args, amax, &largest_of_cta);
    if (part.segments > 1) cluster_meet();  // no sum is on its way any more
}

Form form_of(const NormForward& args) {
    if (args.codes.data == nullptr)
        return args.y.data != nullptr && args.y.dtype == args.x.dtype && args.amax == nullptr ? Form::values
                                                                                              : Form::any;
    if (args.codes.dtype != DType::e4m3 || !args.codes.vector) return Form::any;
    if (args.scales.data == nullptr) return Form::tensor;
    const bool whole_blocks = args.scales.block == kBlock && args.x.cols % kBlock == 0;
    return whole_blocks && args.amax == nullptr ? Form::blocks : Form::any;
}

using ForwardKernel = void (*)(NormForward);
template <int kUnits> ForwardKernel bf16_kernel(Form form) {
    switch (form) {
        case Form::values: return norm_rows_kernel<kUnits, Form::values, DType::bf16>;
        case Form::blocks: return norm_rows_kernel<kUnits, Form::blocks, DType::bf16>;
        case Form::tensor: return norm_rows_kernel<kUnits, Form::tensor, DType::bf16>;
        default: return norm_rows_kernel<kUnits, Form::any, DType::bf16>;
    }
}
template <int kUnits> ForwardKernel f16_kernel(Form form) {
    switch (form) {
        case Form::values: return norm_rows_kernel<kUnits, Form::values, DType::f16>;
        case Form::tensor: return norm_rows_kernel<kUnits, Form::tensor, DType::f16>;
        default: return nullptr;
    }
}
template <int kUnits> ForwardKernel kernel_of(const NormForward& args) {
    const Form form = form_of(args);
    return args.x.dtype == DType::f16 ? f16_kernel<kUnits>(form) : bf16_kernel<kUnits>(form);
}

ForwardKernel copied_kernel(const NormForward& args) {
    if (!args.gamma.vector || !(is_wide(args.x, DType::bf16) || is_wide(args.x, DType::f16))) return nullptr;
    const DType y_type = form_of(args) == Form::values ? args.x.dtype : DType::bf16;
    if (args.y.data != nullptr && !is_wide(args.y, y_type)) return nullptr;
    const int units = units_a_thread(args.segment_cols);
    return units == 1 ? kernel_of<1>(args) : units == 2 ? kernel_of<2>(args) : kernel_of<kMostUnits>(args);
}

}  // namespace

bool launch_norm_rows(const NormForward& args, const Launch& launch) {
    ForwardKernel kernel = copied_kernel(args);
    int ctas = ctas_of(units_a_thread(args.segment_cols), form_of(args));
    if (kernel == nullptr) {
        if (!is_fetchable(args.x)) return false;
        kernel = args.x.dtype == DType::f16 ? norm_rows_kernel<kMostUnits, Form::odd, DType::f16>
                                            : norm_rows_kernel<kMostUnits, Form::odd, DType::bf16>;
        ctas = ctas_of(kMostUnits, Form::odd);
    }
    launch_rows(kernel, args, args.rows, ctas, kNormThreads, kSlots * slot_bytes(args.segment_cols), launch,
                "rms_norm");
    return true;
}

}  // namespace fp8flow::hopper
