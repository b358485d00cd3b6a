// RMSNorm forward, forward with FP8 outputs, backward. Contract: kernels/ops/norm.h.
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/quantize_tiles.h"
#include "kernels/hopper/transpose.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kLanes = 8;
constexpr int kChunk = 8192;      // columns of a row that stand in shared memory at once
constexpr int kRowsPerSum = 256;  // rows per partial sum of dgamma
constexpr int kWaveCtas = 8;      // CTAs of row kernels per multiprocessor

// Lanes stand one behind another in shared memory, element i of a chunk at (i % 8) * stride + i / 8: a unit is written without bank
// conflicts, and eight threads read four steps of their lanes at once, for which the stride is an odd multiple of 4.
inline int lane_stride(int64_t cols) {
    return static_cast<int>(round_up(ceil_div(std::min<int64_t>(cols, kChunk), kLanes), 8)) + 4;
}
__device__ __forceinline__ void put_unit(float* lanes, int stride, int unit, const float (&v)[kUnit]) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) lanes[i * stride + unit] = v[i];
}
__device__ __forceinline__ void get_unit(const float* lanes, int stride, int unit, float (&v)[kUnit]) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = lanes[i * stride + unit];
}
// Continues the sum of a[i] * b[i] of one lane over the chunk's `count` columns, ascending.
__device__ __forceinline__ float add_lane(const float* a, const float* b, int stride, int lane, int count,
                                          float sum) {
    const float *a_lane = a + lane * stride, *b_lane = b + lane * stride;
    const int steps = (count - lane + kLanes - 1) / kLanes, whole = steps > 0 ? steps / 4 : 0;
#pragma unroll 4
    for (int i = 0; i < whole; ++i) {
        const float4 x = reinterpret_cast<const float4*>(a_lane)[i],
                     y = reinterpret_cast<const float4*>(b_lane)[i];
        sum = fma_float(x.x, y.x, sum);
        sum = fma_float(x.y, y.y, sum);
        sum = fma_float(x.z, y.z, sum);
        sum = fma_float(x.w, y.w, sum);
    }
    for (int i = 4 * whole; i < steps; ++i) sum = fma_float(a_lane[i], b_lane[i], sum);
    return sum;
}

__device__ __forceinline__ void load_gamma(const RowView& gamma, float offset, int col, float (&g)[kUnit]) {
    load_unit(gamma, 0, col, g);
    if (offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = offset + g[i];
}

struct NormForward {
    RowView x, gamma, y;  // y optional
    int64_t rows;
    float eps, gamma_offset;
    float* rstd;
    RowView codes;              // optional
    RowScales scales;           // data == nullptr: per-tensor codes
    const float* tensor_scale;  // of per-tensor codes
    uint32_t* amax;             // optional
    QuantizeRule rule;
    int stride;  // lane_stride
};

// Reads a row once (rows wider than a chunk: twice, the second time from L2), writes y, codes, scales and rstd. A CTA takes one row at a
// time, grid-stride: all threads put the row into shared memory (barrier), eight threads run the eight lanes of the sum of squares
// and one thread finishes rstd (barrier), all threads write the outputs (barrier). The order of every sum is fixed by the contract;
// amax is an integer atomic maximum.
__global__ void __launch_bounds__(kRowThreads) rms_norm_kernel(const NormForward args) {
    extern __shared__ __align__(16) float lanes[];
    __shared__ float row_rstd;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x),
              width = args.x.cols;
    const int padded_units =
        (width + static_cast<int>(kBlock) - 1) / static_cast<int>(kBlock) * kBlockThreads;
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    uint32_t amax = 0;
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        float sum = 0.0f;
        for (int col0 = 0; col0 < width; col0 += kChunk) {
            const int count = min(kChunk, width - col0);
            if (col0 > 0) __syncthreads();
            for (int unit = thread; unit * kUnit < count; unit += threads) {
                float v[kUnit];
                load_unit(args.x, row, col0 + unit * kUnit, v);
                put_unit(lanes, args.stride, unit, v);
            }
            __syncthreads();
            if (thread < kLanes) sum = add_lane(lanes, lanes, args.stride, thread, count, sum);
        }
        if (thread < kLanes) {
            const float mean = div_float(combine_lanes(sum, 0xFFu), static_cast<float>(width));
            const float rstd = div_float(1.0f, sqrt_float(mean + args.eps));
            if (thread == 0) {
                row_rstd = rstd;
                args.rstd[row] = rstd;
            }
        }
        __syncthreads();
        const float rstd = row_rstd;
        for (int unit = thread; unit < padded_units; unit += threads) {
            const int col = unit * kUnit;
            float v[kUnit] = {};
            if (col < width) {
                float g[kUnit];
                if (width <= kChunk)
                    get_unit(lanes, args.stride, unit, v);
                else
                    load_unit(args.x, row, col, v);
                load_gamma(args.gamma, args.gamma_offset, col, g);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) v[i] = col + i < width ? v[i] * rstd * g[i] : 0.0f;
            }
            if (args.amax != nullptr) amax = max(amax, unit_magnitude(v));
            if (args.y && col < width) store_unit(args.y, row, col, v);
            if (!args.codes) continue;
            if (args.scales.data == nullptr) {
                if (col < width)
                    store_codes(args.codes, row, col, encode_unit(v, multiplier, args.codes.dtype));
                continue;
            }
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[i] = round_bf16(v[i]);
            quantize_unit(v, true, args.codes, args.scales, row, col, args.rule);
        }
        __syncthreads();
    }
    if (args.amax == nullptr) return;
    for (int step = 16; step > 0; step /= 2) amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    if (thread % 32 == 0) atomicMax(args.amax, amax);
}

__global__ void merge_amax_kernel(const uint32_t* amax, float* out) {
    *out = max_ignore_nan(*out, __uint_as_float(*amax));
}

struct NormBackward {
    RowView dy, x, gamma, dresidual, dx;  // dresidual optional
    int64_t rows;
    float gamma_offset;
    const float* rstd;
    int stride;
};

// Reads dy, x and dresidual once and writes dx. As rms_norm_kernel, with dy*g and x in shared memory for the sum of their products.
__global__ void __launch_bounds__(kRowThreads) rms_norm_dx_kernel(const NormBackward args) {
    extern __shared__ __align__(16) float lanes[];
    __shared__ float row_c;
    float *dyg_lanes = lanes, *x_lanes = lanes + kLanes * args.stride;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x),
              width = args.x.cols;
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const float r = args.rstd[row];
        float sum = 0.0f;
        for (int col0 = 0; col0 < width; col0 += kChunk) {
            const int count = min(kChunk, width - col0);
            if (col0 > 0) __syncthreads();
            for (int unit = thread; unit * kUnit < count; unit += threads) {
                float dy[kUnit], x[kUnit], g[kUnit];
                load_unit(args.dy, row, col0 + unit * kUnit, dy);
                load_unit(args.x, row, col0 + unit * kUnit, x);
                load_gamma(args.gamma, args.gamma_offset, col0 + unit * kUnit, g);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dy[i] *= g[i];
                put_unit(dyg_lanes, args.stride, unit, dy);
                put_unit(x_lanes, args.stride, unit, x);
            }
            __syncthreads();
            if (thread < kLanes) sum = add_lane(dyg_lanes, x_lanes, args.stride, thread, count, sum);
        }
        if (thread < kLanes) {
            const float mean = div_float(combine_lanes(sum, 0xFFu), static_cast<float>(width));
            if (thread == 0) row_c = r * r * mean;
        }
        __syncthreads();
        const float c = row_c;
        for (int unit = thread; unit * kUnit < width; unit += threads) {
            const int col = unit * kUnit;
            float dyg[kUnit], x[kUnit];
            if (width <= kChunk) {
                get_unit(dyg_lanes, args.stride, unit, dyg);
                get_unit(x_lanes, args.stride, unit, x);
            } else {
                float g[kUnit];
                load_unit(args.dy, row, col, dyg);
                load_unit(args.x, row, col, x);
                load_gamma(args.gamma, args.gamma_offset, col, g);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dyg[i] *= g[i];
            }
#pragma unroll
            for (int i = 0; i < kUnit; ++i) dyg[i] = r * (dyg[i] - x[i] * c);
            if (args.dresidual) {
                load_unit(args.dresidual, row, col, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dyg[i] += x[i];
            }
            store_unit(args.dx, row, col, dyg);
        }
        __syncthreads();
    }
}

// Stage 1 of dgamma: reads dy and x once more; a thread adds one column over 256 rows in ascending order.
__global__ void __launch_bounds__(kRowThreads)
    dgamma_partial_kernel(const NormBackward args, float* partials) {
    const int width = args.x.cols;
    const int64_t chunks = (args.rows + kRowsPerSum - 1) / kRowsPerSum,
                  panels = (width + kRowThreads - 1) / kRowThreads;
    for (int64_t work = blockIdx.x; work < chunks * panels; work += gridDim.x) {
        const int64_t chunk = work / panels, first = chunk * kRowsPerSum,
                      end = min(args.rows, first + kRowsPerSum);
        const int64_t col = work % panels * kRowThreads + threadIdx.x;
        if (col >= width) continue;
        float sum = 0.0f;
#pragma unroll 8
        for (int64_t row = first; row < end; ++row) {
            const float dy = load_float(args.dy.data, args.dy.dtype, row * width + col);
            const float x = load_float(args.x.data, args.x.dtype, row * width + col);
            sum = fma_float(dy, x * args.rstd[row], sum);
        }
        partials[chunk * width + col] = sum;
    }
}

// Stage 2: a thread adds one column's partial sums in ascending order.
__global__ void __launch_bounds__(kRowThreads)
    dgamma_kernel(const float* partials, int64_t chunks, int64_t width, Gradient mode, float* dgamma) {
    const int64_t col = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
    if (col >= width) return;
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partials[chunk * width + col];
    dgamma[col] = mode == Gradient::accumulate ? dgamma[col] + sum : sum;
}

float offset_of(op::GammaForm form) { return form == op::GammaForm::zero_centered ? 1.0f : 0.0f; }

// Shared memory beyond the default 48 KiB has to be asked for.
template <class Kernel> void allow_shared_memory(Kernel kernel, int bytes) {
    if (bytes > 48 * 1024)
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   "shared memory of rms_norm");
}

// All threads take part in barriers, whole warps in shuffles.
int threads_for(int64_t width) {
    return static_cast<int>(std::min<int64_t>(round_up(ceil_div(width, kUnit), 32), kRowThreads));
}

void launch_norm(const NormForward& args, const Launch& launch) {
    if (args.rows == 0) return;
    const int bytes = kLanes * args.stride * static_cast<int>(sizeof(float));
    rms_norm_kernel<<<grid_for(args.rows, launch, kWaveCtas), threads_for(args.x.cols),
                      static_cast<std::size_t>(bytes), stream_of(launch)>>>(args);
    check_launch("rms_norm");
}

}  // namespace

void HopperOps::do_rms_norm(const op::RmsNorm& args, const Launch& launch) {
    launch_norm({.x = row_view(args.x),
                 .gamma = row_view(args.gamma),
                 .y = row_view(args.y),
                 .rows = args.x.dim(0),
                 .eps = args.eps,
                 .gamma_offset = offset_of(args.gamma_form),
                 .rstd = args.rstd.as<float>(),
                 .codes = {},
                 .scales = {},
                 .tensor_scale = nullptr,
                 .amax = nullptr,
                 .rule = {},
                 .stride = lane_stride(args.x.cols())},
                launch);
}

void HopperOps::do_rms_norm_quantize(const op::RmsNormQuantize& args, const Launch& launch) {
    const bool row_tensor = args.rows.layout == ScaleLayout::tensor;
    uint32_t* amax = args.amax ? workspace_->partials_for<uint32_t>(1) : nullptr;
    if (amax != nullptr)
        check_cuda(cudaMemsetAsync(amax, 0, sizeof(uint32_t), stream_of(launch)), "clearing amax");
    launch_norm({.x = row_view(args.x),
                 .gamma = row_view(args.gamma),
                 .y = row_view(args.y),
                 .rows = args.x.dim(0),
                 .eps = args.eps,
                 .gamma_offset = offset_of(args.gamma_form),
                 .rstd = args.rstd.as<float>(),
                 .codes = row_view(args.rows.codes),
                 .scales = row_tensor ? RowScales{} : row_scales(args.rows),
                 .tensor_scale = row_tensor ? args.rows.scales.as<float>() : nullptr,
                 .amax = amax,
                 .rule = {.scale_format = args.scale_format},
                 .stride = lane_stride(args.x.cols())},
                launch);
    if (amax != nullptr) {
        merge_amax_kernel<<<1, 1, 0, stream_of(launch)>>>(amax, args.amax.as<float>());
        check_launch("amax of rms_norm");
    }
    if (args.transposed.layout == ScaleLayout::tile128)
        launch_transpose_tiles(args.rows, {}, args.transposed, launch);
    if (args.transposed.layout == ScaleLayout::tensor) {
        // the rows' values once more, from x and rstd by the same formula
        TileOutput columns = tile_columns(args.transposed, Share::word);
        columns.multipliers = args.transposed.scales.as<float>();
        columns.multipliers_are_scales = true;
        const TileSource source = {.values = row_view(args.x),
                                   .rstd = args.rstd.as<float>(),
                                   .gamma = row_view(args.gamma),
                                   .gamma_offset = offset_of(args.gamma_form)};
        launch_quantize_tiles(source, tile_shape(args.x, {}, args.transposed.codes), {}, columns, {}, launch);
    }
}

void HopperOps::do_rms_norm_backward(const op::RmsNormBackward& args, const Launch& launch) {
    const int64_t rows = args.x.dim(0), width = args.x.cols(), chunks = ceil_div(rows, kRowsPerSum);
    const cudaStream_t stream = stream_of(launch);
    const NormBackward job = {.dy = row_view(args.dy),
                              .x = row_view(args.x),
                              .gamma = row_view(args.gamma),
                              .dresidual = row_view(args.dresidual),
                              .dx = row_view(args.dx),
                              .rows = rows,
                              .gamma_offset = offset_of(args.gamma_form),
                              .rstd = args.rstd.as<float>(),
                              .stride = lane_stride(width)};
    float* partials = workspace_->partials_for<float>(chunks * width);
    if (rows > 0) {
        // dgamma first: dx may stand in the place of dy
        dgamma_partial_kernel<<<grid_for(chunks * ceil_div(width, kRowThreads), launch), kRowThreads, 0,
                                stream>>>(job, partials);
        check_launch("rms_norm_backward, sums of dgamma");
        const int bytes = 2 * kLanes * job.stride * static_cast<int>(sizeof(float));
        allow_shared_memory(rms_norm_dx_kernel, bytes);
        rms_norm_dx_kernel<<<grid_for(rows, launch, kWaveCtas), threads_for(width),
                             static_cast<std::size_t>(bytes), stream>>>(job);
        check_launch("rms_norm_backward");
    }
    dgamma_kernel<<<static_cast<unsigned>(ceil_div(width, kRowThreads)), kRowThreads, 0, stream>>>(
        partials, chunks, width, args.dgamma_mode, args.dgamma.as<float>());
    check_launch("rms_norm_backward, dgamma");
}

}  // namespace fp8flow
