// The scaling-aware FP8 transpose for weight gradients, all experts in one launch. Contract: kernels/ops/transpose.h.
#include "kernels/hopper/transpose.h"

#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/hopper_ops.h"

namespace fp8flow {

using namespace hopper;

namespace hopper {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kThreads = 256;  // 8 threads a row, 16 columns and 4 rows a thread
constexpr int kRows = 4;
constexpr int kPiece = 16;  // codes of one load
constexpr int kRowParts = kTile / kPiece;
constexpr int kZeroRow = 256;  // shift of rows that become code 0

struct Transposer {
    RowView src, dst;
    RowScales scales;
    DeviceGroups groups;
    int64_t extent;
    float* tile_scales;
    int64_t tile_cols;
    bool wide;  // 16-byte loads
};

__device__ __forceinline__ uint32_t shift_word(uint32_t codes, int k, DType dtype) {
    if (k == 0) return codes;
    if (k == kZeroRow) return 0;
    uint32_t shifted = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        shifted |= static_cast<uint32_t>(fp8_shift_down(static_cast<uint8_t>(codes >> (8 * i)), k, dtype))
                   << (8 * i);
    return shifted;
}

// Moves a tile of codes in and out, 128 scales in and one out. A CTA walks over the tiles of all groups, grid-stride, columns fastest.
// 128 threads find the largest scale (shuffles, shared memory, barrier 1) and leave each row's shift (barrier 2); every thread
// shifts 4 rows x 16 codes, turns 4x4 squares of bytes in registers and puts words of 4 rows into shared memory (barrier 3), whence columns leave
// in 16-byte pieces (barrier 4). Only maxima are reduced: deterministic.
__global__ void __launch_bounds__(kThreads) transpose_kernel(const Transposer args) {
    __shared__ float warp_max[kTile / 32];
    __shared__ int shifts[kTile];
    __shared__ uint32_t turned[kTile * kTurnedStride];
    const int thread = static_cast<int>(threadIdx.x), part = thread % kRowParts, group = thread / kRowParts,
              dim = args.src.cols;
    const int64_t col_tiles = (dim + kTile - 1) / kTile, src_base = args.src.base(),
                  dst_base = args.dst.base();
    const DType dtype = args.src.dtype;
    TileWalker walker(args.groups, args.extent, 1);
    RowTile tile;
    for (int64_t work = blockIdx.x; walker.seek(work / col_tiles, tile); work += gridDim.x) {
        const int64_t col_tile = work % col_tiles;
        const int col = static_cast<int>(col_tile) * kTile + part * kPiece,
                  cols = min(kTile, dim - static_cast<int>(col_tile) * kTile);

        uint32_t words[kRows][kPiece / 4];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const int r = group * kRows + k;
            const uint8_t* in =
                static_cast<const uint8_t*>(args.src.data) + (src_base + tile.row + r) * dim + col;
            uint4 loaded = {0, 0, 0, 0};
            if (r < tile.count && args.wide && col + kPiece <= dim)
                loaded = *reinterpret_cast<const uint4*>(in);
            words[k][0] = loaded.x, words[k][1] = loaded.y, words[k][2] = loaded.z, words[k][3] = loaded.w;
            if (r < tile.count && !(args.wide && col + kPiece <= dim)) {
#pragma unroll
                for (int i = 0; i < kPiece; ++i)
                    if (col + i < dim) words[k][i / 4] |= static_cast<uint32_t>(in[i]) << (8 * (i % 4));
            }
        }

        float scale = 0.0f;
        if (thread < kTile) {
            if (thread < tile.count) scale = args.scales.load(src_base + tile.row + thread, col_tile);
            float largest = max_ignore_nan(0.0f, scale);
            for (int step = 16; step > 0; step /= 2)
                largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
            if (thread % 32 == 0) warp_max[thread / 32] = largest;
        }
        __syncthreads();
        const float target = fmaxf(fmaxf(warp_max[0], warp_max[1]), fmaxf(warp_max[2], warp_max[3]));
        if (thread < kTile) {
            // past 63 binary places every finite code has become 0, and a larger shift could not be applied
            const int k =
                static_cast<int>(float_bits(target) >> 23) - static_cast<int>(float_bits(scale) >> 23);
            shifts[thread] = scale > 0.0f ? min(k, 63) : kZeroRow;
        }
        if (thread == 0) args.tile_scales[(dst_base + tile.row) / kTile * args.tile_cols + col_tile] = target;
        __syncthreads();

#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const int shift = shifts[group * kRows + k];
#pragma unroll
            for (int i = 0; i < kPiece / 4; ++i) words[k][i] = shift_word(words[k][i], shift, dtype);
        }
#pragma unroll
        for (int i = 0; i < kPiece / 4; ++i) {  // bytes of 4 columns x 4 rows
            const uint32_t low01 = __byte_perm(words[0][i], words[1][i], 0x5140),
                           high01 = __byte_perm(words[0][i], words[1][i], 0x7362);
            const uint32_t low23 = __byte_perm(words[2][i], words[3][i], 0x5140),
                           high23 = __byte_perm(words[2][i], words[3][i], 0x7362);
            uint32_t* out = turned + (part * kPiece + i * 4) * kTurnedStride + group;
            out[0 * kTurnedStride] = __byte_perm(low01, low23, 0x5410);
            out[1 * kTurnedStride] = __byte_perm(low01, low23, 0x7632);
            out[2 * kTurnedStride] = __byte_perm(high01, high23, 0x5410);
            out[3 * kTurnedStride] = __byte_perm(high01, high23, 0x7632);
        }
        __syncthreads();
        uint8_t* out =
            static_cast<uint8_t*>(args.dst.data) + col_tile * kTile * args.dst.cols + dst_base + tile.row;
        store_turned<kThreads>(turned, out, args.dst.cols, cols, tile.rows);
        __syncthreads();
    }
}

}  // namespace

void launch_transpose_tiles(const Fp8Tensor& src, const RowGroups& groups, const Fp8Tensor& dst,
                            const Launch& launch) {
    const int64_t rows = src.codes.dim(0), dim = src.codes.cols(), extent = dst.codes.cols();
    const int64_t capacity = groups.num_groups > 0 ? groups.row_capacity : extent;
    if (capacity == 0 || dim == 0) return;
    const int64_t tiles = (ceil_div(capacity, kTile) + groups.num_groups) * ceil_div(dim, kTile);
    const bool wide = dim % kPiece == 0 && reinterpret_cast<uintptr_t>(src.codes.data) % kPiece == 0;
    transpose_kernel<<<grid_for(tiles, launch, 4), kThreads, 0, stream_of(launch)>>>(
        {row_view(src.codes), row_view(dst.codes), row_scales(src), device_groups(groups, rows), extent,
         dst.scales.as<float>(), dst.scales.cols(), wide});
    check_launch("transpose_fp8");
}

}  // namespace hopper

void HopperOps::do_transpose_fp8(const op::TransposeFp8& args, const Launch& launch) {
    launch_transpose_tiles(args.src, args.groups, args.dst, launch);
}

}  // namespace fp8flow
