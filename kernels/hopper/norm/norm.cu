// SPDX-License-Identifier: MIT
// RMSNorm forward, forward with FP8 outputs, backward: which kernel runs; the kernels for rows of any kind;
// the sum of the parts of dgamma. Rows of BF16 and FP16: held_rows.cu, norm_rows.cu, front_backward.cu,
// rows_backward.cu. Contract: kernels/ops/norm.h.
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/norm/dgamma.h"
#include "kernels/hopper/norm/forward.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/quantize/transpose.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::norm {

namespace {

constexpr int kWaveCtas = 8;  // CTAs per SM of the kernels over rows
constexpr int kSumThreads = static_cast<int>(op::kNormStrands), kWarpSums = kSumThreads / 32;
static_assert(kSumThreads == kRowThreads && op::kNormUnit == kUnit);

// The sum over a row of term(strand, col, last): strand plus the products of the unit at `col`, counting
// columns before `last`. Two barriers per segment: the warp sums are written; they have been read. All
// threads get the sum.
template <class Term> __device__ __forceinline__ float sum_over_row(int width, float* warp_sums, Term term) {
    const int segment = static_cast<int>(op::norm_segment_cols(width));
    float sum = 0.0f;
    for (int first = 0; first < width; first += segment) {
        const int last = min(width, first + segment);
        float strand = 0.0f;
        for (int col = first + static_cast<int>(threadIdx.x) * kUnit; col < last;
             col += static_cast<int>(blockDim.x) * kUnit)
            strand = term(strand, col, last);
        store_strand(strand, warp_sums);
        __syncthreads();
        const float part = row_sum(warp_sums);
        sum = first == 0 ? part : sum + part;
        __syncthreads();
    }
    return sum;
}

// RMSNorm forward for any dtype, width and alignment. Reads a row twice (the second time from L1 or L2),
// writes y, FP8 values, scales and rstd. A CTA takes one row at a time, grid-stride. Deterministic: sums in
// the order of the contract; amax is an integer atomic maximum.
__global__ void __launch_bounds__(kSumThreads) rms_norm_kernel(const NormForward args) {
    __shared__ float warp_sums[kWarpSums];
    pdl_wait();
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x),
              width = args.x.cols;
    const int padded_units =
        (width + static_cast<int>(kBlock) - 1) / static_cast<int>(kBlock) * kBlockThreads;
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    __shared__ uint32_t largest_of_cta;
    uint32_t amax = 0;
    if (thread == 0) largest_of_cta = 0;
    if (thread < kWarpSums) warp_sums[thread] = 0.0f;
    __syncthreads();
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const float sum = sum_over_row(width, warp_sums, [&](float strand, int col, int last) {
            float v[kUnit];
            load_unit(args.x, row, col, v);
#pragma unroll
            for (int i = 0; i < kUnit; ++i)
                if (col + i < last) strand = fma_float(v[i], v[i], strand);
            return strand;
        });
        const float mean = div_float(sum, static_cast<float>(width));
        const float rstd = div_float(1.0f, sqrt_float(mean + args.eps));
        if (thread == 0) args.rstd[row] = rstd;
        for (int unit = thread; unit < padded_units; unit += threads) {
            const int col = unit * kUnit;
            float v[kUnit] = {};
            if (col < width) {
                float g[kUnit];
                load_unit(args.x, row, col, v);
                load_gamma(args.gamma, args.gamma_offset, col, g);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) v[i] = col + i < width ? v[i] * rstd * g[i] : 0.0f;
            }
            write_unit(args, row, col, multiplier, v, amax);
        }
    }
    merge_amax(args, amax, &largest_of_cta);
}

// RMSNorm backward, dx, for any dtype, width and alignment: as rms_norm_kernel, with dy*g times x for the
// sum; reads dy and x twice.
__global__ void __launch_bounds__(kSumThreads) rms_norm_dx_kernel(const NormBackward args, PdlOrder order) {
    __shared__ float warp_sums[kWarpSums];
    pdl_begin(order);
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x),
              width = args.x.cols;
    if (thread < kWarpSums) warp_sums[thread] = 0.0f;
    __syncthreads();
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const float r = args.rstd[row];
        const auto load = [&](int col, float(&dyg)[kUnit], float(&x)[kUnit]) {
            float g[kUnit];
            load_unit(args.dy, row, col, dyg);
            load_unit(args.x, row, col, x);
            load_gamma(args.gamma, args.gamma_offset, col, g);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) dyg[i] *= g[i];
        };
        float dyg[kUnit], x[kUnit];
        const float sum = sum_over_row(width, warp_sums, [&](float strand, int col, int last) {
            load(col, dyg, x);
#pragma unroll
            for (int i = 0; i < kUnit; ++i)
                if (col + i < last) strand = fma_float(dyg[i], x[i], strand);
            return strand;
        });
        const float c = r * r * div_float(sum, static_cast<float>(width));
        for (int col = thread * kUnit; col < width; col += threads * kUnit) {
            load(col, dyg, x);
#pragma unroll
            for (int i = 0; i < kUnit; ++i) dyg[i] = r * (dyg[i] - x[i] * c);
            if (args.dresidual) {
                load_unit(args.dresidual, row, col, x);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) dyg[i] += x[i];
            }
            store_unit(args.dx, row, col, dyg);
        }
    }
    pdl_end(order);
}

// The sums of the parts of dgamma for the same rows: reads dy and x once more. A thread adds one column over
// the chunks of a part, rows ascending: deterministic.
__global__ void __launch_bounds__(kRowThreads) dgamma_partial_kernel(const NormBackward args) {
    pdl_wait();
    const int width = args.x.cols;
    const int64_t col_tiles = (width + kRowThreads - 1) / kRowThreads,
                  chunks = int64_t{args.chunks} * args.parts,
                  parts = min(static_cast<int64_t>(args.parts), args.rows);
    for (int64_t work = blockIdx.x; work < parts * col_tiles; work += gridDim.x) {
        const int64_t part = work / col_tiles, col = work % col_tiles * kRowThreads + threadIdx.x;
        if (col >= width) continue;
        const auto chunk = [&](int64_t first) {
            float sum = 0.0f;
#pragma unroll 8
            for (int64_t row = first; row < args.rows; row += chunks) {
                const float dy = load_float(args.dy.data, args.dy.dtype, row * width + col);
                const float x = load_float(args.x.data, args.x.dtype, row * width + col);
                sum = fma_float(dy, x * args.rstd[row], sum);
            }
            return sum;
        };
        float sum = chunk(part);
        for (int64_t next = part + args.parts; next < chunks; next += args.parts) sum += chunk(next);
        args.partials[part * width + col] = sum;
    }
}

// dgamma [H] from the sums of its parts (4 MB of 132 parts at H=7168, from L2).
// A warp takes one group of parts, a thread kCols neighbouring columns of it, with all loads of its group in
// flight; a CTA as many column tiles of 32 threads as its warps reach, one where there are twelve groups.
// Then a warp per column tile adds the groups in ascending order: deterministic. One __syncthreads, reached
// by all. PDL: the next kernel may start early, it waits for the end of this one.
// Two columns per thread if one would need more CTAs than there are SMs: 7168 columns take 0.8 us less, 12288
// 0.5 us less, but 4096 1 us more.
constexpr int kGroupWarps = 12, kColTile = 32, kGroupParts = static_cast<int>(op::kGammaGroup);
static_assert(kGroupWarps * kGroupParts == op::kGammaParts);
int groups_of(int64_t parts) {
    return static_cast<int>(std::max<int64_t>(1, ceil_div(parts, op::kGammaGroup)));
}
template <int kCols>
__global__ void __launch_bounds__(kGroupWarps* kColTile)
    dgamma_kernel(const float* partials, int parts, int groups, int64_t width, Gradient mode, float* dgamma,
                  uint32_t* issued) {
    __shared__ float group_sums[kGroupWarps][kCols][kColTile];
    pdl_launch_dependents();
    const int warp = static_cast<int>(threadIdx.x) / kColTile,
              lane = static_cast<int>(threadIdx.x) % kColTile, tiles = kGroupWarps / groups;
    const auto column = [&](int tile) {
        return ((static_cast<int64_t>(blockIdx.x) * tiles + tile) * kColTile + lane) * kCols;
    };
    const int first = warp % groups * kGroupParts;
    const int64_t col = column(warp / groups);
    const auto load = [&](int part, float(&v)[kCols]) {
        if (part >= parts || col >= width) return;
        const float* const from = partials + part * width + col;
        if constexpr (kCols == 2) {
            const float2 pair = __ldcg(reinterpret_cast<const float2*>(from));
            v[0] = pair.x, v[1] = pair.y;
        } else {
            v[0] = __ldcg(from);
        }
    };
    pdl_wait();
    if (blockIdx.x == 0 && threadIdx.x == 0) *issued = 0;  // ready for the next call
    float values[kGroupParts][kCols] = {}, sums[kCols] = {};
#pragma unroll
    for (int i = 0; i < kGroupParts; ++i) load(first + i, values[i]);
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
        float group = 0.0f;
#pragma unroll
        for (int i = 0; i < kGroupParts; ++i) group += values[i][c];  // +0 after the last part
        group_sums[warp][c][lane] = group;
    }
    __syncthreads();
    const int64_t mine = column(warp);
    if (warp >= tiles || mine >= width) return;
    for (int i = 0; i < groups; ++i)
#pragma unroll
        for (int c = 0; c < kCols; ++c) sums[c] += group_sums[warp * groups + i][c][lane];
#pragma unroll
    for (int c = 0; c < kCols; ++c)
        dgamma[mine + c] = mode == Gradient::accumulate ? dgamma[mine + c] + sums[c] : sums[c];
}

int segment_cols(int64_t cols) { return static_cast<int>(std::min(cols, op::norm_segment_cols(cols))); }
float offset_of(op::GammaForm form) { return form == op::GammaForm::zero_centered ? 1.0f : 0.0f; }

// All threads take part in barriers, whole warps in shuffles.
int threads_for(int64_t width) {
    return static_cast<int>(std::min<int64_t>(round_up(ceil_div(width, kUnit), 32), kRowThreads));
}

// Of op::RmsNorm, and of op::RmsNormQuantize without its FP8 outputs.
template <class Args> NormForward forward_of(const Args& args) {
    return {.x = row_view(args.x),
            .gamma = row_view(args.gamma),
            .y = row_view(args.y),
            .rows = args.x.dim(0),
            .eps = args.eps,
            .gamma_offset = offset_of(args.gamma_form),
            .rstd = args.rstd.template as<float>(),
            .segments = static_cast<int>(op::norm_segments(args.x.cols())),
            .segment_cols = segment_cols(args.x.cols())};
}

void launch_norm(const NormForward& args, const Launch& launch) {
    if (args.rows == 0 || launch_norm_held_rows(args, launch) || launch_norm_rows(args, launch)) return;
    launch_pdl(rms_norm_kernel, grid_for(args.rows, launch, kWaveCtas), threads_for(args.x.cols), launch,
               "rms_norm", args);
}

}  // namespace

}  // namespace fp8flow::hopper::norm

namespace fp8flow {

using namespace hopper;
using namespace hopper::norm;
using namespace hopper::quantize;

void HopperOps::do_rms_norm(const op::RmsNorm& args, const Launch& launch) {
    launch_norm(forward_of(args), launch);
}

void HopperOps::do_rms_norm_quantize(const op::RmsNormQuantize& args, const Launch& launch) {
    const bool row_tensor = args.rows.layout == ScaleLayout::tensor;
    NormForward job = forward_of(args);
    job.fp8 = row_view(args.rows.data);
    if (row_tensor)
        job.tensor_scale = args.rows.scales.as<float>();
    else
        job.scales = row_scales(args.rows);
    job.amax = static_cast<int32_t*>(args.amax.data);
    job.rule.scale_format = args.scale_format;
    launch_norm(job, launch);
    // delayed scaling with one scale for both copies: the transposed FP8 values are those of the rows
    const bool same_fp8 = row_tensor && args.transposed.layout == ScaleLayout::tensor &&
                          args.transposed.scales.data == args.rows.scales.data &&
                          args.transposed.data.dtype == args.rows.data.dtype;
    if (same_fp8) {
        const TensorView& fp8 = args.transposed.data;
        const int64_t tiles = ceil_div(fp8.dim(0), kBlock) * ceil_div(fp8.dim(1), kBlock);
        // every tile has the scale of the rows: the table of tile scales is written, but not read
        ScaledTensor tiled = args.transposed;
        tiled.scales = make_view(workspace(launch).partials_for<float>(tiles), DType::f32,
                                 {ceil_div(fp8.dim(1), kBlock), ceil_div(fp8.dim(0), kBlock)});
        launch_transpose_tiles(args.rows, {}, tiled, launch);
    } else if (args.transposed.layout == ScaleLayout::tile128) {
        launch_transpose_tiles(args.rows, {}, args.transposed, launch);
    } else if (args.transposed.layout == ScaleLayout::tensor) {
        // the values of the rows once more, from x and rstd by the same formula
        TileOutput columns = tile_columns(args.transposed, Granularity::tensor);
        columns.multipliers = args.transposed.scales.as<float>();
        columns.multipliers_are_scales = true;
        const TileSource source = {.values = row_view(args.x),
                                   .rstd = args.rstd.as<float>(),
                                   .gamma = row_view(args.gamma),
                                   .gamma_offset = offset_of(args.gamma_form)};
        launch_quantize_tiles(source, tile_shape(args.x, {}, args.transposed.data), {}, columns, {}, launch);
    }
}

void HopperOps::do_rms_norm_backward(const op::RmsNormBackward& args, const Launch& launch) {
    const int64_t rows = args.x.dim(0), width = args.x.cols(), parts = op::gamma_parts(width),
                  sums = std::min(parts, rows);
    const NormBackward job = {.dy = row_view(args.dy),
                              .x = row_view(args.x),
                              .gamma = row_view(args.gamma),
                              .dresidual = row_view(args.dresidual),
                              .dx = row_view(args.dx),
                              .rows = rows,
                              .gamma_offset = offset_of(args.gamma_form),
                              .rstd = args.rstd.as<float>(),
                              .segments = static_cast<int>(op::norm_segments(width)),
                              .segment_cols = segment_cols(width),
                              .parts = static_cast<int>(parts),
                              .chunks = static_cast<int>(op::gamma_chunks(width)),
                              .partials = workspace(launch).partials_for<float>(sums * width),
                              .issued = workspace(launch).zeros_for<uint32_t>(1)};
    const GammaJob gamma = {.dy = static_cast<const uint16_t*>(args.dy.data),
                            .x = static_cast<const uint16_t*>(args.x.data),
                            .rstd = job.rstd,
                            .rows = rows,
                            .dgamma = args.dgamma.as<float>()};
    // after dgamma where dx may alias dy
    const auto launch_dx = [&](PdlOrder order) {
        launch_pdl(rms_norm_dx_kernel, grid_for(rows, launch, kWaveCtas), threads_for(width), launch,
                   "rms_norm_backward, dx", job, order);
    };
    if (rows > 0 && args.x.dtype == DType::bf16 && args.dy.dtype == DType::bf16 &&
        sums_narrow_gamma(gamma, width)) {
        launch_narrow_gamma({&gamma, 1}, width, args.dgamma_mode,
                            workspace(launch).partials_for<float>(gamma_partials(width, 1)),
                            workspace(launch).zeros_for<uint32_t>(gamma_tickets(width, 1)), launch);
        launch_dx(args.dx.data == args.dy.data ? PdlOrder::after : PdlOrder::parallel);
        return;
    }
    if (rows > 0 && !launch_norm_backward_front(job, launch) && !launch_norm_backward_rows(job, launch)) {
        launch_pdl(dgamma_partial_kernel, grid_for(sums * ceil_div(width, kRowThreads), launch), kRowThreads,
                   launch, "rms_norm_backward", job);
        launch_dx(PdlOrder::after);
    }
    const int groups = groups_of(sums), tiles = kGroupWarps / groups;
    const auto ctas = [&](int cols) {
        return static_cast<unsigned>(ceil_div(width, tiles * kColTile * cols));
    };
    const bool pairs = width % 2 == 0 && ctas(1) > static_cast<unsigned>(kNumSms);
    launch_pdl(pairs ? dgamma_kernel<2> : dgamma_kernel<1>, ctas(pairs ? 2 : 1), kGroupWarps * kColTile,
               launch, "rms_norm_backward, dgamma", job.partials, static_cast<int>(sums), groups, width,
               args.dgamma_mode, args.dgamma.as<float>(), job.issued);
}

}  // namespace fp8flow
