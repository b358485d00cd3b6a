// SwiGLU weighted by the routing probability, forward and backward, plain and quantised. Contract: kernels/ops/swiglu.h.
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/hopper_ops.h"

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kHalfWarps = kRowThreads / kBlockThreads;
constexpr int kLaneStride = kBlockThreads + 1;  // an odd stride keeps the eight lanes in different banks

struct SwigluForward {
    RowView h, prob, a;  // prob.data == nullptr: 1; a: values or codes
    RowScales scales;    // data == nullptr: a holds values
    DeviceGroups groups;
    QuantizeRule rule;
};

// Moves 2F values in and F values (or codes and F/128 scales) out a row. A CTA takes blockDim.y rows at a time, grid-stride; a thread
// eight columns. A 128-column block belongs to one half-warp, whose maximum does not depend on the order: deterministic.
__global__ void __launch_bounds__(kRowThreads) swiglu_kernel(const SwigluForward args) {
    const int64_t total = args.groups.total(), h_base = args.h.base(), a_base = args.a.base(),
                  prob_base = args.prob.base();
    const int width = args.a.cols, padded_width = (width + static_cast<int>(kBlock) - 1) /
                                                  static_cast<int>(kBlock) * static_cast<int>(kBlock);
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < total;
         row += stride) {
        const bool valid = args.groups.is_valid(row);
        const float prob =
            valid && args.prob ? static_cast<const float*>(args.prob.data)[prob_base + row] : 1.0f;
        for (int col = static_cast<int>(threadIdx.x) * kUnit; col < padded_width;
             col += static_cast<int>(blockDim.x) * kUnit) {
            float a[kUnit] = {};
            if (valid && col < width) {
                float up[kUnit];
                load_unit(args.h, h_base + row, col, width, a);
                load_unit(args.h, h_base + row, width + col, 2 * width, up);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) a[i] = silu_float(a[i]) * up[i] * prob;
            }
            if (args.scales.data != nullptr)
                quantize_unit(a, valid, args.a, args.scales, a_base + row, col, args.rule);
            else
                store_unit(args.a, a_base + row, col, a);
        }
    }
}

struct SwigluGradient {
    RowView da, h, prob, dh, dprob;
    RowScales scales;  // data == nullptr: dh holds values
    DeviceGroups groups;
    QuantizeRule rule;
};

// Moves 3F values in and 2F out a row. Rows and columns as in swiglu_kernel. dprob: each half-warp turns its 128 products by way of shared
// memory, eight of its threads run the lanes (16 fma each), one thread a row adds the blocks' sums in ascending order; two barriers
// a column step, which all rows of a CTA take together, so sums never depend on the grid. Pads: zeros.
__global__ void __launch_bounds__(kRowThreads) swiglu_backward_kernel(const SwigluGradient args) {
    __shared__ float lane_da[kHalfWarps][kUnit * kLaneStride], lane_weighted[kHalfWarps][kUnit * kLaneStride];
    __shared__ float block_sums[kHalfWarps];
    const int64_t total = args.groups.total(), da_base = args.da.base(), h_base = args.h.base(),
                  prob_base = args.prob.base(), dh_base = args.dh.base(), dprob_base = args.dprob.base();
    const int width = args.da.cols, step = static_cast<int>(blockDim.x) * kUnit;
    const int block = static_cast<int>(linear_thread()) / kBlockThreads,
              thread = static_cast<int>(threadIdx.x) % kBlockThreads;
    const int row_blocks = static_cast<int>(blockDim.x) / kBlockThreads,
              first_block = static_cast<int>(threadIdx.y) * row_blocks;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
    for (int64_t row0 = static_cast<int64_t>(blockIdx.x) * blockDim.y; row0 < total; row0 += stride) {
        const int64_t row = row0 + threadIdx.y;
        const bool inside = row < total, valid = inside && args.groups.is_valid(row);
        const float prob =
            valid && args.prob ? static_cast<const float*>(args.prob.data)[prob_base + row] : 1.0f;
        float sum = 0.0f;
        for (int col0 = 0; col0 < width; col0 += step) {
            const int col = col0 + static_cast<int>(threadIdx.x) * kUnit;
            float da[kUnit] = {}, gate[kUnit] = {}, up[kUnit] = {};
            if (valid && col < width) {
                load_unit(args.da, da_base + row, col, da);
                load_unit(args.h, h_base + row, col, width, gate);
                load_unit(args.h, h_base + row, width + col, 2 * width, up);
            }
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {  // gate and up become their gradients
                const float sigmoid = sigmoid_float(gate[i]), silu = gate[i] * sigmoid,
                            da_prob = da[i] * prob, up_i = up[i];
                gate[i] = da_prob * up_i * sigmoid * (1.0f + gate[i] * (1.0f - sigmoid));
                up[i] = da_prob * silu;
                lane_da[block][i * kLaneStride + thread] = da[i];
                lane_weighted[block][i * kLaneStride + thread] = silu * up_i;
            }
            if (args.scales.data != nullptr) {  // width is a multiple of 128: no block has both halves
                if (inside && col < width) {
                    quantize_unit(gate, valid, args.dh, args.scales, dh_base + row, col, args.rule);
                    quantize_unit(up, valid, args.dh, args.scales, dh_base + row, width + col, args.rule);
                }
            } else if (inside && col < width) {
                store_unit(args.dh, dh_base + row, col, width, gate);
                store_unit(args.dh, dh_base + row, width + col, 2 * width, up);
            }
            if (!args.dprob) continue;
            __syncwarp(block_mask());
            const int first_col = col - thread * kUnit, lane = thread % kUnit;
            float lane_sum = 0.0f;
            for (int i = 0; i < kBlockThreads && first_col + i * kUnit + lane < width; ++i)
                lane_sum = fma_float(lane_da[block][lane * kLaneStride + i],
                                     lane_weighted[block][lane * kLaneStride + i], lane_sum);
            lane_sum = combine_lanes(lane_sum, block_mask());
            if (thread == 0) block_sums[block] = lane_sum;
            __syncthreads();
            if (threadIdx.x == 0)
                for (int i = 0; i < row_blocks && col0 + i * static_cast<int>(kBlock) < width; ++i)
                    sum += block_sums[first_block + i];
            __syncthreads();
        }
        if (args.dprob && inside && threadIdx.x == 0)
            static_cast<float*>(args.dprob.data)[dprob_base + row] = valid ? sum : 0.0f;
    }
}

int64_t rows_of(const RowGroups& groups, const TensorView& h) {
    return groups.num_groups > 0 ? groups.row_capacity : h.dim(0);
}

// The up half begins at column `width`: wide loads need it aligned too.
RowView halves_view(const TensorView& v) {
    RowView view = row_view(v);
    view.vector = view.vector && v.cols() / 2 % kUnit == 0;
    return view;
}

void launch_forward(const SwigluForward& args, int64_t rows, const Launch& launch) {
    if (rows == 0 || args.a.cols == 0) return;
    const dim3 block = row_block(args.a.cols);
    swiglu_kernel<<<grid_for(ceil_div(rows, block.y), launch), block, 0, stream_of(launch)>>>(args);
    check_launch("swiglu");
}
void launch_backward(const SwigluGradient& args, int64_t rows, const Launch& launch) {
    if (rows == 0) return;
    const dim3 block = row_block(args.da.cols);
    swiglu_backward_kernel<<<grid_for(ceil_div(rows, block.y), launch), block, 0, stream_of(launch)>>>(args);
    check_launch("swiglu_backward");
}

}  // namespace

void HopperOps::do_swiglu(const op::Swiglu& args, const Launch& launch) {
    const int64_t rows = rows_of(args.groups, args.h);
    launch_forward({halves_view(args.h),
                    row_view(args.prob),
                    row_view(args.a),
                    {},
                    device_groups(args.groups, rows),
                    {}},
                   rows, launch);
}

void HopperOps::do_swiglu_quantize(const op::SwigluQuantize& args, const Launch& launch) {
    const int64_t rows = rows_of(args.groups, args.h);
    launch_forward({halves_view(args.h),
                    row_view(args.prob),
                    row_view(args.a.codes),
                    row_scales(args.a),
                    device_groups(args.groups, rows),
                    {.scale_format = args.scale_format}},
                   rows, launch);
}

void HopperOps::do_swiglu_backward(const op::SwigluBackward& args, const Launch& launch) {
    const int64_t rows = rows_of(args.groups, args.h);
    launch_backward({row_view(args.da),
                     halves_view(args.h),
                     row_view(args.prob),
                     halves_view(args.dh),
                     row_view(args.dprob),
                     {},
                     device_groups(args.groups, rows),
                     {}},
                    rows, launch);
}

void HopperOps::do_swiglu_backward_quantize(const op::SwigluBackwardQuantize& args, const Launch& launch) {
    const int64_t rows = rows_of(args.groups, args.h);
    launch_backward({row_view(args.da),
                     halves_view(args.h),
                     row_view(args.prob),
                     halves_view(args.dh.codes),
                     row_view(args.dprob),
                     row_scales(args.dh),
                     device_groups(args.groups, rows),
                     {.scale_format = args.scale_format}},
                    rows, launch);
}

}  // namespace fp8flow
