// SPDX-License-Identifier: MIT
// Row movers on the GPU: permute + pad by destination row, and the unfused pair pad / unpad. They copy bytes,
// so every operation is bit-equal to the reference. Permute + pad by token, the default for plans that have
// recv_rows: fan_out.cu. Sums of rows: unpermute.cu.
#include "kernels/hopper/permute/permute.h"

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/permute/tile_walk.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::permute {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
static_assert(kTileRows == kWarps);  // one warp per row
constexpr int64_t kCopyVector = 16;  // bytes

// The source row of a row of dst: from a list (permute), or from its position in its group (pad, unpad). -1:
// a pad.
struct RowMap {
    const int32_t* row_source = nullptr;  // null: by position in the group
    const int64_t* source_base = nullptr;
    const int64_t* counts = nullptr;
    const int64_t* src_offsets = nullptr;
    DeviceGroups dst;
    // `list` is row_source from its base; `start` is the first row of the group.
    __device__ int source(const int32_t* list, int group, int start, int row) const {
        if (list != nullptr) return list[row];
        return row - start < static_cast<int>(counts[group])
                   ? static_cast<int>(src_offsets[group]) + (row - start)
                   : -1;
    }
};

struct MoveArgs {
    DeviceView src, dst;
    RowMap map;
    int64_t row_bytes;
    bool vectorised;
    // scales; scale_blocks 0: none
    const void* src_scales = nullptr;
    DType src_scale_dtype = DType::f32;
    int64_t src_row_stride = 0, src_block_stride = 0;  // elements from row to row and from block to block
    float* dst_scales = nullptr;
    int scale_blocks = 0;
    int64_t dst_block_stride = 0;
};

// Copies rows and their scales to the destination rows of all groups; pads become zeros.
//
// Lower bound: every destination row written once (row_bytes + 4 bytes per scale), every valid source row
// read once:
// 272 MB of FP8 at T=4096, H=7168, K=8 (529 MB of BF16), 0.066 (0.129) ms at 4.1 TB/s; nine tenths are
// writes.
//
// CTA: tiles of eight rows from walk_tiles. One warp copies the values of a row by 16-byte vectors, kInFlight
// loads per thread outstanding: seven for long rows (112 KB per SM), four and more warps for short ones. In
// parallel every thread has its own scales outstanding, rows innermost, because dst has one row of scales per
// block. No shared memory, no barriers. Source row numbers and the number of rows are read on the device.
//
// Deterministic: every byte has one writer.
template <int kInFlight, int kCtasPerSm>
__global__ __launch_bounds__(kThreads, kCtasPerSm) void move_rows_kernel(const MoveArgs args) {
    constexpr int kScales = kInFlight / 4 + 1, kScaleThreads = kThreads / kTileRows;
    const int64_t src_base = args.src.base(), dst_base = args.dst.base();
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize, lane = thread % kWarpSize;
    const int32_t* const list =
        args.map.row_source == nullptr
            ? nullptr
            : args.map.row_source + (args.map.source_base != nullptr ? *args.map.source_base : 0);
    walk_tiles(args.map.dst, [&](int group, int start, int first, int end) {
        const int row = first + warp, scale_row = first + thread % kTileRows;
        const bool scaled = args.scale_blocks > 0 && scale_row < end;
        const int source = row < end ? args.map.source(list, group, start, row) : -1,
                  scale_source = scaled ? args.map.source(list, group, start, scale_row) : -1;
        const auto scale_of = [&](int block) {
            if (scale_source < 0 || block >= args.scale_blocks) return 0.0f;
            return load_float(
                args.src_scales, args.src_scale_dtype,
                (src_base + scale_source) * args.src_row_stride + block * args.src_block_stride);
        };
        const auto store_scale = [&](int block, float scale) {
            if (block < args.scale_blocks)
                args.dst_scales[block * args.dst_block_stride + dst_base + scale_row] = scale;
        };
        float scales[kScales];
#pragma unroll
        for (int j = 0; j < kScales; ++j) scales[j] = scale_of(thread / kTileRows + j * kScaleThreads);
        if (row < end) {
            uint8_t* to = static_cast<uint8_t*>(args.dst.data) + (dst_base + row) * args.row_bytes;
            const uint8_t* from = static_cast<const uint8_t*>(args.src.data) +
                                  (src_base + (source < 0 ? 0 : source)) * args.row_bytes;
            if (args.vectorised) {
                const uint4* const from_vectors = reinterpret_cast<const uint4*>(from);
                uint4* const to_vectors = reinterpret_cast<uint4*>(to);
                const int count = static_cast<int>(args.row_bytes / kCopyVector);
                if (source < 0) {
                    for (int i = lane; i < count; i += kWarpSize) to_vectors[i] = make_uint4(0, 0, 0, 0);
                } else {
                    for (int i = lane; i < count; i += kInFlight * kWarpSize) {
                        uint4 piece[kInFlight];
#pragma unroll
                        for (int j = 0; j < kInFlight; ++j)
                            if (i + j * kWarpSize < count) piece[j] = from_vectors[i + j * kWarpSize];
#pragma unroll
                        for (int j = 0; j < kInFlight; ++j)
                            if (i + j * kWarpSize < count) __stcs(&to_vectors[i + j * kWarpSize], piece[j]);
                    }
                }
            } else {
                for (int64_t i = lane; i < args.row_bytes; i += kWarpSize)
                    to[i] = source < 0 ? uint8_t{0} : from[i];
            }
        }
        if (!scaled) return;
#pragma unroll
        for (int j = 0; j < kScales; ++j) store_scale(thread / kTileRows + j * kScaleThreads, scales[j]);
        for (int block = thread / kTileRows + kScales * kScaleThreads; block < args.scale_blocks;
             block += kScaleThreads)
            store_scale(block, scale_of(block));
    });
}

void move_rows(const ScaledTensor& src, const ScaledTensor& dst, const RowMap& map, int64_t row_capacity,
               const Launch& launch, const char* op) {
    const int64_t row_bytes = dst.data.cols() * size_of(dst.data.dtype);
    if (row_capacity == 0 || row_bytes == 0) return;
    MoveArgs args{
        .src = device_view(src.data),
        .dst = device_view(dst.data),
        .map = map,
        .row_bytes = row_bytes,
        .vectorised = row_bytes % kCopyVector == 0 && is_aligned(src.data.data) && is_aligned(dst.data.data)};
    if (dst.layout != ScaleLayout::none) {
        args.src_scales = src.scales.data;
        args.src_scale_dtype = src.scales.dtype;
        args.scale_blocks = static_cast<int>(dst.scales.dim(0));
        args.src_row_stride = src.layout == ScaleLayout::vec128 ? 1 : args.scale_blocks;
        args.src_block_stride = src.layout == ScaleLayout::vec128 ? src.scales.dim(1) : 1;
        args.dst_scales = dst.scales.as<float>();
        args.dst_block_stride = dst.scales.dim(1);
    }
    constexpr int64_t kShortRow = 4096;
    const auto kernel = row_bytes < kShortRow ? move_rows_kernel<4, 5> : move_rows_kernel<7, 4>;
    launch_kernel(kernel, walk_grid(row_capacity, launch), kThreads, launch, op, args);
}

// The rows of a group keep their order, with or without pads.
void regroup(const ScaledTensor& src, const RowGroups& from, const RowGroups& to, const ScaledTensor& dst,
             const Launch& launch, const char* op) {
    const RowMap map{.counts = from.counts.as<int64_t>(),
                     .src_offsets = from.offsets.as<int64_t>(),
                     .dst = device_groups(to, to.row_capacity)};
    move_rows(src, dst, map, to.row_capacity, launch, op);
}

}  // namespace

}  // namespace fp8flow::hopper::permute

namespace fp8flow {

using namespace hopper;
using namespace hopper::permute;

void HopperOps::do_permute_pad(const op::PermutePad& args, const Launch& launch) {
    if (launch_fan_out(args, launch)) return;
    const RowMap map{.row_source = args.row_source.as<int32_t>(),
                     .source_base = args.row_source.row_base,
                     .dst = device_groups(args.groups, args.groups.row_capacity)};
    move_rows(args.src, args.dst, map, args.groups.row_capacity, launch, "permute_pad");
}

void HopperOps::do_pad_rows(const op::PadRows& args, const Launch& launch) {
    regroup(args.src, args.src_groups, args.dst_groups, args.dst, launch, "pad_rows");
}

void HopperOps::do_unpad_rows(const op::UnpadRows& args, const Launch& launch) {
    regroup({.data = args.src, .scales = {}}, args.src_groups, args.dst_groups,
            {.data = args.dst, .scales = {}}, launch, "unpad_rows");
}

}  // namespace fp8flow
