// The scaling-aware FP8 transpose for weight gradients, all experts in one launch. Contract: kernels/ops/transpose.h.
#include "kernels/hopper/transpose.h"

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/turn_tile.h"

namespace fp8flow {

using namespace hopper;

namespace hopper {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kCtas = 8;  // of an SM: 128 KB of codes on their way

struct Transposer {
    CodeRows src;
    RowView dst;
    DeviceGroups groups;
    int64_t extent;
    float* tile_scales;
    int tile_cols;  // tiles side by side
    int scale_stride;
};

// Moves every code in and out (and 128 scales in, one out, a tile): 2.06 bytes a code, 0.118 ms at 32768 x 7168 and 4.1 TB/s. A CTA turns
// one tile, and SMs take CTAs as these become free: columns fastest, so that CTAs under way together read whole rows and write runs of
// lines. Eight CTAs an SM, each with all of its 16 KB requested at once, before it knows its group: what it waits for is hidden by the other
// seven. (With four tiles a CTA, two of them on their way, behind a binary search of dependent loads: 3.48 TB/s; every code took 7.4
// instructions, now about 4.) Every warp compares all scales of the tile itself; barrier: the tile is turned. Where the launch may not use
// all SMs, or has more tiles than kMostWaves, a CTA takes every gridDim.x-th tile; barrier: the tile before has left. Only maxima are
// reduced: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kTurnThreads, kCtas) transpose_kernel(const Transposer args) {
    __shared__ TurnedTile turned;
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t src_base = args.src.codes.base(), dst_base = args.dst.base();
    const int64_t end = args.groups.counts != nullptr ? args.groups.total() : args.extent;
    const bool aligned = is_piece_aligned(args.dst, dst_base);
    for (int tile = static_cast<int>(blockIdx.x);; tile += static_cast<int>(gridDim.x)) {
        const int col_tile = tile % args.tile_cols;
        const int64_t row = static_cast<int64_t>(tile / args.tile_cols) * kTile;
        if (row >= end) return;
        if (tile != static_cast<int>(blockIdx.x)) __syncthreads();
        HeldTile held;
        const int readable = readable_rows(args.groups, row);
        fetch_codes(args.src, src_base + row, col_tile, readable, thread, held);
        fetch_scales(args.src, src_base + row, col_tile, readable, thread, held);
        const AlignedTile rows = aligned_tile(args.groups, end, row);
        const float target = shift_tile<kCodes>(held, rows.count, thread);
        turn_tile(held, thread, turned);
        if (thread == 0) args.tile_scales[(dst_base + row) / kTile * args.scale_stride + col_tile] = target;
        __syncthreads();
        store_columns(args.dst, args.src.codes.cols, col_tile, dst_base + row, rows.rows, aligned, thread,
                      turned);
    }
}

}  // namespace

void launch_transpose_tiles(const Fp8Tensor& src, const RowGroups& groups, const Fp8Tensor& dst,
                            const Launch& launch) {
    const int64_t rows = src.codes.dim(0), dim = src.codes.cols(), extent = dst.codes.cols();
    const int64_t capacity = groups.num_groups > 0 ? groups.row_capacity : extent;
    if (capacity == 0 || dim == 0) return;
    const int64_t tile_cols = ceil_div(dim, kTile), tiles = tile_cols * ceil_div(capacity, kTile);
    const auto kernel =
        src.codes.dtype == DType::e5m2 ? transpose_kernel<DType::e5m2> : transpose_kernel<DType::e4m3>;
    const Transposer job = {.src = code_rows(src),
                            .dst = row_view(dst.codes),
                            .groups = device_groups(groups, rows),
                            .extent = extent,
                            .tile_scales = dst.scales.as<float>(),
                            .tile_cols = static_cast<int>(tile_cols),
                            .scale_stride = static_cast<int>(dst.scales.cols())};
    constexpr int kMostWaves = 32;  // a capacity may be far above the rows there are
    const unsigned grid = grid_for(tiles, launch, launch.sm_limit > 0 ? kCtas : kMostWaves * kCtas);
    kernel<<<grid, kTurnThreads, 0, stream_of(launch)>>>(job);
    check_launch("transpose_fp8");
}

}  // namespace hopper

void HopperOps::do_transpose_fp8(const op::TransposeFp8& args, const Launch& launch) {
    launch_transpose_tiles(args.src, args.groups, args.dst, launch);
}

}  // namespace fp8flow
