// SPDX-License-Identifier: MIT
// permute + pad by token, for plans that list each token's destination rows (recv_rows): a row is read once
// and written to all its places. permute.cu runs the same operation by destination row.
#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/permute/permute.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::permute {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kCtas = 8;               // per SM
constexpr int kMostPlaces = 8;         // of a token, at most
constexpr int kInFlight = 8;           // 16-byte loads of a thread
constexpr int kScaleRows = kWarpSize;  // rows of dst: scales and pads of one item

struct FanOutArgs {
    const uint4* src;
    uint4* dst;
    const int64_t* dst_base;  // null: 0
    int pieces;               // of a row
    const int32_t* recv_rows;
    const int64_t* num_rows;
    int topk;
    const int32_t* row_source;
    const int64_t* source_base;  // null: 0
    DeviceGroups groups;
    // scales: contiguous per row of src, dst_block_stride apart in dst; blocks 0: none
    const void* src_scales;
    DType src_scale_dtype;
    float* dst_scales;
    int blocks;
    int64_t dst_block_stride;
};

// Scales of 32 rows of dst, one row per lane, so that a warp stores whole lines; zeros into the values of pad
// rows.
__device__ __forceinline__ void write_scales_and_pads(const FanOutArgs& args, int64_t tile, int64_t base,
                                                      const int32_t* row_source) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t first = tile * kScaleRows, row = first + lane;
    const bool exists = row < args.groups.total();
    const int64_t source = exists ? row_source[row] : 0;
    if (exists)
        for (int block = warp; block < args.blocks; block += kWarps)
            args.dst_scales[block * args.dst_block_stride + base + row] =
                source < 0 ? 0.0f
                           : load_float(args.src_scales, args.src_scale_dtype, source * args.blocks + block);
    unsigned pads = __ballot_sync(kFullMask, exists && source < 0);
    for (; pads != 0; pads &= pads - 1) {
        uint4* to = args.dst + (base + first + __ffs(static_cast<int>(pads)) - 1) * args.pieces;
        for (int piece = static_cast<int>(threadIdx.x); piece < args.pieces; piece += kThreads)
            to[piece] = uint4{};
    }
}

__device__ __forceinline__ void copy_to_places(const FanOutArgs& args, int64_t token, int64_t base) {
    int place[kMostPlaces];
#pragma unroll
    for (int k = 0; k < kMostPlaces; ++k)
        place[k] = k < args.topk ? args.recv_rows[token * args.topk + k] : -1;
    const uint4* const from = args.src + token * args.pieces;
    for (int first = static_cast<int>(threadIdx.x); first < args.pieces; first += kInFlight * kThreads) {
        uint4 piece[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j)
            if (first + j * kThreads < args.pieces) piece[j] = from[first + j * kThreads];
#pragma unroll
        for (int k = 0; k < kMostPlaces; ++k) {
            if (place[k] < 0) break;
            uint4* to = args.dst + (base + place[k]) * args.pieces + first;
#pragma unroll
            for (int j = 0; j < kInFlight; ++j)
                if (first + j * kThreads < args.pieces) to[j * kThreads] = piece[j];
        }
    }
}

// Copies every token's row to its rows in the expert groups, with scales; zeroes pads. FP8 or BF16 rows of
// whole 16-byte vectors, K <= 8.
//
// Lower bound: every token's row read once, every row of dst written once, 4 bytes per scale: 272 MB of FP8
// at T=4096, H=7168, K=8 (529 MB of BF16), 0.066 (0.129) ms at 4.1 TB/s; nine tenths are writes. By
// destination row (permute.cu) a token's row is read K times, far apart in time, mostly from memory.
//
// Grid: one item per CTA. The first items are 32 rows of dst each (scales and pads), the others one token
// each. A thread issues all its loads (up to kInFlight x 16 bytes) before the first store. No shared memory,
// no barriers.
//
// Deterministic: every byte has one writer, because tokens' rows and pads are different rows.
__global__ __launch_bounds__(kThreads, kCtas) void fan_out_kernel(const FanOutArgs args) {
    pdl_wait();
    const int64_t base = args.dst_base != nullptr ? *args.dst_base : 0, tokens = *args.num_rows,
                  tiles = (args.groups.total() + kScaleRows - 1) / kScaleRows;
    const int32_t* row_source = args.row_source + (args.source_base != nullptr ? *args.source_base : 0);
    for (int64_t item = blockIdx.x; item < tiles + tokens; item += gridDim.x) {
        if (item < tiles)
            write_scales_and_pads(args, item, base, row_source);
        else
            copy_to_places(args, item - tiles, base);
    }
}

}  // namespace

bool launch_fan_out(const op::PermutePad& args, const Launch& launch) {
    if (!args.recv_rows) return false;
    constexpr int64_t kPiece = sizeof(uint4);
    const TensorView& recv_rows = args.recv_rows;
    const ScaledTensor &src = args.src, &dst = args.dst;
    const int64_t row_bytes = dst.data.cols() * size_of(dst.data.dtype), tokens = recv_rows.dim(0);
    const bool plain = src.layout == ScaleLayout::none && dst.layout == ScaleLayout::none,
               wire = src.layout == ScaleLayout::vec128_wire && dst.layout == ScaleLayout::vec128;
    if (recv_rows.dim(1) > kMostPlaces || src.data.row_base != nullptr || row_bytes % kPiece != 0 ||
        !is_aligned(src.data.data) || !is_aligned(dst.data.data) || !(plain || wire))
        return false;
    const int64_t items = tokens + ceil_div(args.groups.row_capacity, kScaleRows);
    if (items == 0 || row_bytes == 0) return true;
    const FanOutArgs kernel_args{.src = static_cast<const uint4*>(src.data.data),
                                 .dst = static_cast<uint4*>(dst.data.data),
                                 .dst_base = dst.data.row_base,
                                 .pieces = static_cast<int>(row_bytes / kPiece),
                                 .recv_rows = recv_rows.as<int32_t>(),
                                 .num_rows = args.num_rows.as<int64_t>(),
                                 .topk = static_cast<int>(recv_rows.dim(1)),
                                 .row_source = args.row_source.as<int32_t>(),
                                 .source_base = args.row_source.row_base,
                                 .groups = device_groups(args.groups, args.groups.row_capacity),
                                 .src_scales = wire ? src.scales.data : nullptr,
                                 .src_scale_dtype = wire ? src.scales.dtype : DType::f32,
                                 .dst_scales = wire ? dst.scales.as<float>() : nullptr,
                                 .blocks = wire ? static_cast<int>(dst.scales.dim(0)) : 0,
                                 .dst_block_stride = wire ? dst.scales.dim(1) : 0};
    launch_pdl(fan_out_kernel, grid_of_items(items, launch, kCtas), kThreads, launch, "permute_pad",
               kernel_args);
    return true;
}

}  // namespace fp8flow::hopper::permute
