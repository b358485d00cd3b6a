// The row movers on the GPU: permute + pad, unpermute + unpad and the gradient of its merging weights, and the unfused pair pad / unpad.
// Copies are bytes and sums keep the reference's order, so every op of this file is bit-equal to the reference.
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/vector_io.h"

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRowsPerBlock = kWarps;  // one warp a row; eight rows of scales make one 32-byte sector
constexpr int64_t kCopyVector = 16;    // bytes

// Which row of src becomes row r of dst: by list (permute), or by the place inside its group (pad, unpad). -1: a pad.
struct RowMap {
    const int32_t* row_source;  // null: by groups
    const int64_t* source_base;
    const int64_t* counts;
    const int64_t* src_offsets;
    DeviceGroups dst;
    __device__ int64_t source(int64_t row) const {
        if (row_source != nullptr) return row_source[(source_base != nullptr ? *source_base : 0) + row];
        const int64_t group = dst.group_of(row), place = row - dst.offset(group);
        return place < counts[group] ? src_offsets[group] + place : -1;
    }
};

struct MoveArgs {
    DeviceView src, dst;
    RowMap map;
    int64_t row_bytes;
    bool vectorised;
    // scales; scale_blocks 0: none
    const void* src_scales;
    DType src_scale_dtype;
    int64_t src_row_stride, src_block_stride;  // elements from row to row and from block to block
    float* dst_scales;
    int64_t scale_blocks, dst_block_stride;
};

// Moves: every destination row once (row_bytes + 4 bytes a scale), every valid source row once per copy. Ceiling: copy bandwidth.
// A CTA takes eight consecutive rows at a time: one warp copies the codes of a row in 16-byte pieces (four in flight a thread), then all
// threads write the scales with rows innermost, because dst has one row of scales per block. No barriers, nothing shared; every byte has
// one writer, so it is deterministic. Source row numbers and the number of rows are read on the device.
__global__ __launch_bounds__(kThreads) void move_rows_kernel(const MoveArgs args) {
    const int64_t rows = args.map.dst.total(), src_base = args.src.base(), dst_base = args.dst.base();
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock; first < rows;
         first += static_cast<int64_t>(gridDim.x) * kRowsPerBlock) {
        if (const int64_t row = first + warp; row < rows) {
            const int64_t source = args.map.source(row);
            uint8_t* to = static_cast<uint8_t*>(args.dst.data) + (dst_base + row) * args.row_bytes;
            const uint8_t* from = static_cast<const uint8_t*>(args.src.data) +
                                  (src_base + (source < 0 ? 0 : source)) * args.row_bytes;
            if (args.vectorised) {
                const uint4* from_vectors = reinterpret_cast<const uint4*>(from);
                uint4* to_vectors = reinterpret_cast<uint4*>(to);
                const int count = static_cast<int>(args.row_bytes / kCopyVector);
                if (source < 0) {
                    for (int i = lane; i < count; i += kWarpSize) to_vectors[i] = make_uint4(0, 0, 0, 0);
                } else {
                    constexpr int kInFlight = 4;
                    int i = lane;
                    for (; i + (kInFlight - 1) * kWarpSize < count; i += kInFlight * kWarpSize) {
                        uint4 piece[kInFlight];
#pragma unroll
                        for (int j = 0; j < kInFlight; ++j) piece[j] = from_vectors[i + j * kWarpSize];
#pragma unroll
                        for (int j = 0; j < kInFlight; ++j) to_vectors[i + j * kWarpSize] = piece[j];
                    }
                    for (; i < count; i += kWarpSize) to_vectors[i] = from_vectors[i];
                }
            } else {
                for (int64_t i = lane; i < args.row_bytes; i += kWarpSize)
                    to[i] = source < 0 ? uint8_t{0} : from[i];
            }
        }
        for (int64_t i = threadIdx.x; i < args.scale_blocks * kRowsPerBlock; i += kThreads) {
            const int64_t row = first + i % kRowsPerBlock, block = i / kRowsPerBlock;
            if (row >= rows) continue;
            const int64_t source = args.map.source(row);
            const int64_t at = (src_base + source) * args.src_row_stride + block * args.src_block_stride;
            args.dst_scales[block * args.dst_block_stride + dst_base + row] =
                source < 0 ? 0.0f : load_float(args.src_scales, args.src_scale_dtype, at);
        }
    }
}

void move_rows(const Fp8Tensor& src, const Fp8Tensor& dst, const RowMap& map, int64_t row_capacity,
               const Launch& launch, const char* op) {
    const int64_t row_bytes = dst.codes.cols() * size_of(dst.codes.dtype);
    if (row_capacity == 0 || row_bytes == 0) return;
    const auto is_aligned = [](const void* data) {
        return reinterpret_cast<uintptr_t>(data) % kCopyVector == 0;
    };
    MoveArgs args{.src = device_view(src.codes),
                  .dst = device_view(dst.codes),
                  .map = map,
                  .row_bytes = row_bytes,
                  .vectorised = row_bytes % kCopyVector == 0 && is_aligned(src.codes.data) &&
                                is_aligned(dst.codes.data),
                  .src_scales = nullptr,
                  .src_scale_dtype = DType::f32,
                  .src_row_stride = 0,
                  .src_block_stride = 0,
                  .dst_scales = nullptr,
                  .scale_blocks = 0,
                  .dst_block_stride = 0};
    if (dst.layout != ScaleLayout::none) {
        args.src_scales = src.scales.data;
        args.src_scale_dtype = src.scales.dtype;
        args.scale_blocks = dst.scales.dim(0);
        args.src_row_stride = src.layout == ScaleLayout::vec128 ? 1 : args.scale_blocks;
        args.src_block_stride = src.layout == ScaleLayout::vec128 ? src.scales.dim(1) : 1;
        args.dst_scales = dst.scales.as<float>();
        args.dst_block_stride = dst.scales.dim(1);
    }
    move_rows_kernel<<<grid_for(ceil_div(row_capacity, kRowsPerBlock), launch), kThreads, 0,
                       stream_of(launch)>>>(args);
    check_launch(op);
}

struct UnpermuteArgs {
    DeviceView src, dst, row_prob;
    const int32_t* recv_rows;
    const int64_t* num_rows;
    int64_t topk, hidden;
    bool vectorised;
};

// Moves: every received row's source rows once, every destination row once. A warp takes one destination row; a thread eight columns at a
// time, adding the source rows in the order of recv_rows in registers and rounding once. No barriers; one writer a byte.
__global__ __launch_bounds__(kThreads) void unpermute_kernel(const UnpermuteArgs args) {
    const int64_t received = *args.num_rows, base = args.src.base(), prob_base = args.row_prob.base();
    const float* prob = static_cast<const float*>(args.row_prob.data);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < received;
         row += static_cast<int64_t>(gridDim.x) * kWarps) {
        const int32_t* sources = args.recv_rows + row * args.topk;
        int count = 0;
        while (count < args.topk && sources[count] >= 0) ++count;
        for (int64_t column = lane * kVector; column < args.hidden; column += kWarpSize * kVector) {
            const int64_t width = args.hidden - column;
            float sum[kVector] = {};
#pragma unroll 4
            for (int k = 0; k < count; ++k) {
                const int64_t source = sources[k];
                float values[kVector];
                load_up_to_8(args.src.data, args.src.dtype, (base + source) * args.hidden + column, width,
                             args.vectorised, values);
                const float weight = prob != nullptr ? prob[prob_base + source] : 1.0f;
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    sum[j] = prob != nullptr ? fma_float(weight, values[j], sum[j]) : sum[j] + values[j];
            }
            store_up_to_8(args.dst.data, args.dst.dtype, row * args.hidden + column, width, args.vectorised,
                          sum);
        }
    }
}

struct ProbsBackwardArgs {
    DeviceView ddst, src, row_source, drow_prob;
    DeviceGroups groups;
    int64_t hidden;
    bool vectorised;
};

// Eight neighbouring threads hold eight values each; afterwards thread j of them holds value j of every thread, in the threads' order.
__device__ __forceinline__ void transpose_8x8(float (&v)[kVector]) {
    const int place = threadIdx.x % kLaneCount;
#pragma unroll
    for (int mask = 1; mask < kLaneCount; mask *= 2) {
        const bool upper = (place & mask) != 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            if ((i & mask) != 0) continue;
            const float received = __shfl_xor_sync(0xFFFFFFFFu, upper ? v[i] : v[i | mask], mask);
            if (upper)
                v[i] = received;
            else
                v[i | mask] = received;
        }
    }
}

// Moves: the rows of src and, for each, its gradient row; 4 bytes out a row. Eight threads take one row and read 64 columns at a time as
// vectors; an 8x8 transposition in registers gives each thread its lane of the reduction order, so the bits are the reference's. Only
// shuffles synchronise, and all threads of a warp make the same number of turns.
__global__ __launch_bounds__(kThreads) void unpermute_probs_backward_kernel(const ProbsBackwardArgs args) {
    constexpr int kRows = kThreads / kLaneCount;
    const int64_t rows = args.groups.total(), base = args.src.base(), prob_base = args.drow_prob.base();
    const int32_t* row_source = static_cast<const int32_t*>(args.row_source.data) + args.row_source.base();
    float* drow_prob = static_cast<float*>(args.drow_prob.data) + prob_base;
    const int place = threadIdx.x % kLaneCount;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < rows;
         first += static_cast<int64_t>(gridDim.x) * kRows) {
        const int64_t row = first + threadIdx.x / kLaneCount;
        const int64_t source = row < rows ? row_source[row] : -1;
        float lane = 0.0f;
        for (int64_t start = 0; start < args.hidden; start += kLaneCount * kVector) {
            const int64_t column = start + place * kVector;
            const int64_t width = source < 0 ? 0 : args.hidden - column;
            float gradient[kVector], value[kVector];
            load_up_to_8(args.ddst.data, args.ddst.dtype, source * args.hidden + column, width,
                         args.vectorised, gradient);
            load_up_to_8(args.src.data, args.src.dtype, (base + row) * args.hidden + column, width,
                         args.vectorised, value);
            transpose_8x8(gradient);
            transpose_8x8(value);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                if (start + i * kLaneCount + place < args.hidden)
                    lane = fma_float(gradient[i], value[i], lane);
        }
        lane = combine_lanes(lane);
        if (place == 0 && row < rows) drow_prob[row] = source < 0 ? 0.0f : lane;
    }
}

}  // namespace

void HopperOps::do_permute_pad(const op::PermutePad& args, const Launch& launch) {
    const RowMap map{args.row_source.as<int32_t>(), args.row_source.row_base, nullptr, nullptr,
                     device_groups(args.groups, args.groups.row_capacity)};
    move_rows(args.src, args.dst, map, args.groups.row_capacity, launch, "permute_pad");
}

void HopperOps::do_pad_rows(const op::PadRows& args, const Launch& launch) {
    const RowMap map{nullptr, nullptr, args.src_groups.counts.as<int64_t>(),
                     args.src_groups.offsets.as<int64_t>(),
                     device_groups(args.dst_groups, args.dst_groups.row_capacity)};
    move_rows(args.src, args.dst, map, args.dst_groups.row_capacity, launch, "pad_rows");
}

void HopperOps::do_unpad_rows(const op::UnpadRows& args, const Launch& launch) {
    const RowMap map{nullptr, nullptr, args.src_groups.counts.as<int64_t>(),
                     args.src_groups.offsets.as<int64_t>(),
                     device_groups(args.dst_groups, args.dst_groups.row_capacity)};
    move_rows({.codes = args.src, .scales = {}}, {.codes = args.dst, .scales = {}}, map,
              args.dst_groups.row_capacity, launch, "unpad_rows");
}

void HopperOps::do_unpermute_unpad(const op::UnpermuteUnpad& args, const Launch& launch) {
    const int64_t hidden = args.dst.cols(), capacity = args.recv_rows.dim(0);
    if (hidden == 0 || capacity == 0) return;
    const bool vectorised = is_vectorisable(args.src.data, hidden) && is_vectorisable(args.dst.data, hidden);
    const UnpermuteArgs kernel_args{.src = device_view(args.src),
                                    .dst = device_view(args.dst),
                                    .row_prob = device_view(args.row_prob),
                                    .recv_rows = args.recv_rows.as<int32_t>(),
                                    .num_rows = args.num_rows.as<int64_t>(),
                                    .topk = args.recv_rows.dim(1),
                                    .hidden = hidden,
                                    .vectorised = vectorised};
    unpermute_kernel<<<grid_for(ceil_div(capacity, kWarps), launch), kThreads, 0, stream_of(launch)>>>(
        kernel_args);
    check_launch("unpermute_unpad");
}

void HopperOps::do_unpermute_probs_backward(const op::UnpermuteProbsBackward& args, const Launch& launch) {
    const int64_t hidden = args.src.cols(), capacity = args.groups.row_capacity;
    if (capacity == 0) return;
    const bool vectorised = is_vectorisable(args.src.data, hidden) && is_vectorisable(args.ddst.data, hidden);
    const ProbsBackwardArgs kernel_args{.ddst = device_view(args.ddst),
                                        .src = device_view(args.src),
                                        .row_source = device_view(args.row_source),
                                        .drow_prob = device_view(args.drow_prob),
                                        .groups = device_groups(args.groups, capacity),
                                        .hidden = hidden,
                                        .vectorised = vectorised};
    const int64_t blocks = ceil_div(capacity, kThreads / kLaneCount);
    unpermute_probs_backward_kernel<<<grid_for(blocks, launch), kThreads, 0, stream_of(launch)>>>(
        kernel_args);
    check_launch("unpermute_probs_backward");
}

}  // namespace fp8flow
