// The scaling-aware FP8 transpose for weight gradients, all experts in one launch. Contract: kernels/ops/transpose.h.
#include "kernels/hopper/transpose.h"

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/transpose_tile.h"

namespace fp8flow {

using namespace hopper;

namespace hopper {

namespace {

using namespace turning;

constexpr int kCtas = 8;  // of an SM: 128 KB of codes on their way

// Moves every code in and out (and 128 scales in, one out, a tile): 2.06 bytes a code, 0.118 ms at 32768 x 7168 and 4.1 TB/s. A CTA turns
// one tile, and SMs take CTAs as these become free: rows fastest, so that CTAs under way together write long runs of every column (columns
// fastest: 4 % slower, and so was a kernel that left out all arithmetic); what the tile to the right will read comes into L2 with this one's
// requests, 256 bytes each (3 %). Eight CTAs an SM, each with all of its 16 KB requested at once, behind one round of loads that says which rows
// are pads: what it waits for is hidden by the other seven. (With four tiles a CTA, two of them on their way, behind a binary search of
// dependent loads: 3.48 TB/s. Loads that leave L1 or L2 first: 4 % slower. Columns by the copy engine: as fast, slower where a kernel is
// short.) Every warp compares all scales of the tile itself; barrier: the tile is turned. Where the launch may not use all SMs, or has more
// tiles than kMostWaves, a CTA takes every gridDim.x-th tile; barrier: the tile before has left. Only maxima are reduced: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kThreads, kCtas) transpose_kernel(const Transposer args) {
    __shared__ uint4 turned_pieces[kTile * kPieces];
    uint32_t* const turned = reinterpret_cast<uint32_t*>(turned_pieces);
    const int thread = static_cast<int>(threadIdx.x);
    wait_for_kernel_before();
    const int64_t src_base = args.src.base(), dst_base = args.dst.base();
    const int64_t end = args.groups.counts != nullptr ? args.groups.total() : args.extent;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(args.dst.data) | static_cast<uintptr_t>(dst_base | args.dst.cols)) %
            kPiece ==
        0;
    const unsigned row_tiles = row_tiles_of(end), tiles = row_tiles * static_cast<unsigned>(args.tile_cols);
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const TilePlace place = rows_fastest(tile, row_tiles);
        if (tile != blockIdx.x) __syncthreads();
        const AlignedTile rows = aligned_tile(args.groups, end, place.row);
        Held held;
        fetch<Shift::by_row>(args, src_base, place, rows.count, thread, held);
        const float target = shift_rows<kCodes>(held, thread);
        turn(held, thread, turned);
        if (thread == 0)
            args.tile_scales[(dst_base + place.row) / kTile * args.scale_stride + place.col_tile] = target;
        __syncthreads();
        store_columns(args, turned, dst_base, aligned, place, rows.rows, thread);
    }
}

}  // namespace

void launch_transpose_tiles(const Fp8Tensor& src, const RowGroups& groups, const Fp8Tensor& dst,
                            const Launch& launch) {
    const int64_t rows = src.codes.dim(0), dim = src.codes.cols(), extent = dst.codes.cols();
    const int64_t capacity = groups.num_groups > 0 ? groups.row_capacity : extent;
    if (capacity == 0 || dim == 0) return;
    const int64_t tile_cols = ceil_div(dim, kTile), tiles = tile_cols * ceil_div(capacity, kTile);
    const bool wide = dim % kPiece == 0 && reinterpret_cast<uintptr_t>(src.codes.data) % kPiece == 0;
    const auto kernel =
        src.codes.dtype == DType::e5m2 ? transpose_kernel<DType::e5m2> : transpose_kernel<DType::e4m3>;
    const Transposer job = {.src = row_view(src.codes),
                            .dst = row_view(dst.codes),
                            .scales = row_scales(src),
                            .groups = device_groups(groups, rows),
                            .extent = extent,
                            .tile_scales = dst.scales.as<float>(),
                            .tile_cols = static_cast<int>(tile_cols),
                            .scale_stride = static_cast<int>(dst.scales.cols()),
                            .wide = wide};
    constexpr int kMostWaves = 32;  // a capacity may be far above the rows there are
    const unsigned grid = grid_for(tiles, launch, launch.sm_limit > 0 ? kCtas : kMostWaves * kCtas);
    launch_behind(kernel, grid, kThreads, 0, launch, "transpose_fp8", job);
}

}  // namespace hopper

void HopperOps::do_transpose_fp8(const op::TransposeFp8& args, const Launch& launch) {
    launch_transpose_tiles(args.src, args.groups, args.dst, launch);
}

}  // namespace fp8flow
