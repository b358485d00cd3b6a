// The scaling-aware FP8 transpose for weight gradients, all experts in one launch. Contract: kernels/ops/transpose.h.
#include "kernels/hopper/transpose.h"

#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/shift.h"
#include "kernels/hopper/hopper_ops.h"

namespace fp8flow {

using namespace hopper;

namespace hopper {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kThreads = 256;  // 8 threads a row, 16 columns and 4 rows a thread
constexpr int kCtas = 4;       // of an SM: 128 KB of codes on their way
constexpr int kRowsOfCta = 4;  // tiles
constexpr int kRows = 4;
constexpr int kPiece = 16;  // codes of one load or store
constexpr int kPieceWords = kPiece / 4;
constexpr int kPieces = kTile / kPiece;
constexpr int kColumnWords = kTile / 4;

struct Transposer {
    RowView src, dst;
    RowScales scales;
    DeviceGroups groups;
    int64_t extent;
    float* tile_scales;
    int tile_cols;  // tiles side by side
    int scale_stride;
    int step_rows, step_cols;  // from a tile of a CTA to its next
    int skip_rows;             // besides, behind every kRowsOfCta rows of tiles
    int first_rows;            // rows of tiles from a CTA's first to that of the CTA below
    bool wide;                 // 16-byte loads
};

// A tile of 128 columns x 128 rows. Rows are relative to the row base; `count` of them are valid, the other `rows` are pads.
struct Place {
    int row_tile, col_tile;
    int count, rows;  // rows == 0: behind the last tile
    __device__ int64_t row() const { return static_cast<int64_t>(row_tile) * kTile; }
    __device__ int first_col() const { return col_tile * kTile; }
};

// The tiles of a CTA: a few one below the other, or every gridDim.x-th, columns fastest. Their rows rise, so that, after a search for the
// first, a walk over the groups finds each one's: one step in a few tiles. Groups are aligned to 128, so no tile has rows of two.
class Tiles {
public:
    __device__ explicit Tiles(const Transposer& args) : args_(args) {
        const bool grouped = args.groups.counts != nullptr;
        row_tile_ = static_cast<int>(blockIdx.x) / args.tile_cols * args.first_rows;
        col_tile_ = static_cast<int>(blockIdx.x) % args.tile_cols;
        const int64_t first = static_cast<int64_t>(row_tile_) * kTile;
        end_ = grouped ? args.groups.total() : args.extent;
        group_end_ = end_;
        valid_end_ = args.groups.rows;
        if (grouped && first < end_) {
            group_ = static_cast<int>(args.groups.group_of(first));
            group_end_ = args.groups.offsets[group_];  // its start: next() goes on from here
        }
    }
    __device__ __forceinline__ Place next() {
        Place place{row_tile_, col_tile_, 0, 0};
        const int64_t row = place.row();
        if (row >= end_) return place;
        while (row >= group_end_) {  // ends: the last group ends at end_
            const int64_t count = args_.groups.counts[group_];
            valid_end_ = group_end_ + count;
            group_end_ = args_.groups.offsets[++group_];
        }
        place.rows = static_cast<int>(min(int64_t{kTile}, group_end_ - row));
        place.count = static_cast<int>(max(int64_t{0}, min(int64_t{place.rows}, valid_end_ - row)));
        row_tile_ += args_.step_rows;
        col_tile_ += args_.step_cols;
        if (col_tile_ >= args_.tile_cols) {
            col_tile_ -= args_.tile_cols;
            ++row_tile_;
        }
        if (row_tile_ % kRowsOfCta == 0) row_tile_ += args_.skip_rows;
        return place;
    }

private:
    const Transposer& args_;
    int64_t end_, group_end_, valid_end_;
    int group_ = 0, row_tile_, col_tile_;
};

// What a thread holds of a tile on its way: 16 columns of 4 rows, and the scale of row threadIdx.x (the first 128 threads).
struct Held {
    uint32_t words[kRows][kPieceWords];
    float scale;
};
__device__ __forceinline__ void fetch(const Transposer& args, int64_t src_base, const Place& place,
                                      Held& held) {
    const int thread = static_cast<int>(threadIdx.x), first = thread / kPieces * kRows,
              col = place.first_col() + thread % kPieces * kPiece, dim = args.src.cols;
    const uint8_t* in =
        static_cast<const uint8_t*>(args.src.data) + (src_base + place.row() + first) * dim + col;
    if (args.wide && col + kPiece <= dim) {
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += dim) {
            uint4 codes = {0, 0, 0, 0};
            if (first + k < place.count) codes = *reinterpret_cast<const uint4*>(in);
            held.words[k][0] = codes.x, held.words[k][1] = codes.y;
            held.words[k][2] = codes.z, held.words[k][3] = codes.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += dim) {
            uint32_t(&words)[kPieceWords] = held.words[k];
#pragma unroll 1
            for (int i = kPiece - 1; i >= 0; --i) {  // one code after the other enters at the low end
                const uint32_t code = first + k < place.count && col + i < dim ? in[i] : 0;
#pragma unroll
                for (int w = kPieceWords - 1; w > 0; --w)
                    words[w] = __funnelshift_l(words[w - 1], words[w], 8);
                words[0] = words[0] << 8 | code;
            }
        }
    }
    held.scale =
        thread < place.count ? args.scales.load(src_base + place.row() + thread, place.col_tile) : 0.0f;
}

// Where the word of rows 4 * quad .. 4 * quad + 3 of a column stands: pieces of 16 rows change places by the column's own piece, so that
// 32 neighbouring words of one row and the 8 pieces of one column both lie in different banks.
__device__ __forceinline__ int turned_index(int col, int piece) {
    return col * kColumnWords + (piece ^ (col / kPiece)) * kPieceWords;
}

// Columns leave shared memory in pieces of 16 rows, 8 threads a column: whole lines of 128 bytes. `aligned`: so is every column's start.
__device__ __forceinline__ void store_columns(const Transposer& args, const uint32_t* turned,
                                              int64_t dst_base, bool aligned, const Place& place) {
    const int piece = static_cast<int>(threadIdx.x) % kPieces, first = piece * kPiece,
              cols = min(kTile, args.src.cols - place.first_col());
    const int64_t stride = args.dst.cols;
    int col = static_cast<int>(threadIdx.x) / kPieces;
    uint8_t* out = static_cast<uint8_t*>(args.dst.data) + (place.first_col() + col) * stride + dst_base +
                   place.row() + first;
    if (aligned && place.rows == kTile && cols == kTile) {
#pragma unroll
        for (int i = 0; i < kTile * kPieces / kThreads; ++i, col += kThreads / kPieces) {
            *reinterpret_cast<uint4*>(out) =
                *reinterpret_cast<const uint4*>(turned + turned_index(col, piece));
            out += kThreads / kPieces * stride;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kTile * kPieces / kThreads; ++i) {
        if (col < cols) {
            const uint4 codes = *reinterpret_cast<const uint4*>(turned + turned_index(col, piece));
            if (first + kPiece <= place.rows && aligned) {
                *reinterpret_cast<uint4*>(out) = codes;
            } else {
                const uint32_t words[kPieceWords] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
                for (int r = 0; r < kPiece; ++r)
                    if (first + r < place.rows) out[r] = static_cast<uint8_t>(words[r / 4] >> (8 * (r % 4)));
            }
        }
        col += kThreads / kPieces;
        out += kThreads / kPieces * stride;
    }
}

// What the threads of a CTA share of the tile they turn.
struct Shared {
    uint4 warp_max, scales_of_rows[kTile / kRows], turned_pieces[kTile * kPieces];
};

// From the registers of all threads to `turned_pieces`, and the tile's scale to memory. One barrier inside.
template <DType kCodes>
__device__ __forceinline__ void turn(const Transposer& args, int64_t dst_base, const Place& place, Held& held,
                                     Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x), part = thread % kPieces, quad = thread / kPieces;
    if (thread < kTile) {
        reinterpret_cast<float*>(shared.scales_of_rows)[thread] = held.scale;
        const uint32_t largest =
            __reduce_max_sync(0xFFFFFFFFu, held.scale > 0.0f ? __float_as_uint(held.scale) : 0u);
        if (thread % 32 == 0) reinterpret_cast<uint32_t*>(&shared.warp_max)[thread / 32] = largest;
    }
    __syncthreads();
    const uint4 largest = shared.warp_max;
    const float target = __uint_as_float(max(max(largest.x, largest.y), max(largest.z, largest.w)));
    const uint4 four = shared.scales_of_rows[quad];
    const uint32_t scales[kRows] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
        const RowShift shift = row_shift<kCodes>(target, __uint_as_float(scales[k]));
#pragma unroll
        for (int i = 0; i < kPieceWords; ++i) held.words[k][i] = shift_four<kCodes>(held.words[k][i], shift);
    }
    uint32_t* const turned = reinterpret_cast<uint32_t*>(shared.turned_pieces);
#pragma unroll
    for (int i = 0; i < kPieceWords; ++i) {  // bytes of 4 columns x 4 rows
        const uint32_t low01 = __byte_perm(held.words[0][i], held.words[1][i], 0x5140),
                       high01 = __byte_perm(held.words[0][i], held.words[1][i], 0x7362);
        const uint32_t low23 = __byte_perm(held.words[2][i], held.words[3][i], 0x5140),
                       high23 = __byte_perm(held.words[2][i], held.words[3][i], 0x7362);
        uint32_t* out = turned + turned_index(part * kPiece, quad / kPieceWords) + quad % kPieceWords +
                        i * 4 * kColumnWords;
        out[0 * kColumnWords] = __byte_perm(low01, low23, 0x5410);
        out[1 * kColumnWords] = __byte_perm(low01, low23, 0x7632);
        out[2 * kColumnWords] = __byte_perm(high01, high23, 0x5410);
        out[3 * kColumnWords] = __byte_perm(high01, high23, 0x7632);
    }
    if (thread == 0)
        args.tile_scales[(dst_base + place.row()) / kTile * args.scale_stride + place.col_tile] = target;
}

// Moves every code in and out (and 128 scales in, one out, a tile): 2.06 bytes a code, 0.118 ms at 32768 x 7168 and 4.1 TB/s. A CTA turns
// four tiles one below the other, so that neighbouring CTAs read whole rows and each writes runs of 4 lines a column; CTAs are handed to
// SMs as these become free. (In equal shares, fixed beforehand, a seventh of the warps had nothing left to do, on average
// over the kernel: 3.15 TB/s.) Where the launch may not use all SMs, shares are fixed: grid-stride, columns fastest. Two tiles of a
// CTA are on their way, each in registers of its own: one is requested as soon as the tile two before it has left its registers for
// shared memory, so that a whole turn of the loop, and not only the stores, covers the way to memory: 32 KB a CTA and four
// CTAs an SM. (With one tile ahead and five CTAs an iteration took 7.2 us, of which the SM issued instructions for
// half: loads were awaited.) Barrier 1: the tile's scales are in shared memory, and the tile before has left it; every thread finds
// the target among four maxima, shifts 4 rows x 16 codes four at a time and turns 4x4 squares of bytes in registers. Barrier
// 2: the tile is turned. Only maxima are reduced: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kThreads, kCtas) transpose_kernel(const Transposer args) {
    __shared__ Shared shared;
    const uint32_t* const turned = reinterpret_cast<const uint32_t*>(shared.turned_pieces);
    const int64_t src_base = args.src.base(), dst_base = args.dst.base();
    const bool aligned =
        (reinterpret_cast<uintptr_t>(args.dst.data) | static_cast<uintptr_t>(dst_base | args.dst.cols)) %
            kPiece ==
        0;
    Tiles tiles(args);
    Held held[2];
    Place places[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        places[i] = tiles.next();
        if (places[i].rows > 0) fetch(args, src_base, places[i], held[i]);
    }
    while (true) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (places[i].rows == 0) return;  // so is every place behind it
            turn<kCodes>(args, dst_base, places[i], held[i], shared);
            const Place leaving = places[i];
            places[i] = tiles.next();
            if (places[i].rows > 0) fetch(args, src_base, places[i], held[i]);
            __syncthreads();
            store_columns(args, turned, dst_base, aligned, leaving);
        }
    }
}

}  // namespace

void launch_transpose_tiles(const Fp8Tensor& src, const RowGroups& groups, const Fp8Tensor& dst,
                            const Launch& launch) {
    const int64_t rows = src.codes.dim(0), dim = src.codes.cols(), extent = dst.codes.cols();
    const int64_t capacity = groups.num_groups > 0 ? groups.row_capacity : extent;
    if (capacity == 0 || dim == 0) return;
    const int64_t tile_cols = ceil_div(dim, kTile), row_tiles = ceil_div(capacity, kTile);
    const bool wide = dim % kPiece == 0 && reinterpret_cast<uintptr_t>(src.codes.data) % kPiece == 0;
    const auto kernel =
        src.codes.dtype == DType::e5m2 ? transpose_kernel<DType::e5m2> : transpose_kernel<DType::e4m3>;
    Transposer job = {.src = row_view(src.codes),
                      .dst = row_view(dst.codes),
                      .scales = row_scales(src),
                      .groups = device_groups(groups, rows),
                      .extent = extent,
                      .tile_scales = dst.scales.as<float>(),
                      .tile_cols = static_cast<int>(tile_cols),
                      .scale_stride = static_cast<int>(dst.scales.cols()),
                      .step_rows = 1,
                      .step_cols = 0,
                      .skip_rows = 0,
                      .first_rows = kRowsOfCta,
                      .wide = wide};
    unsigned grid;
    if (launch.sm_limit > 0) {  // shares fixed beforehand
        grid = grid_for(row_tiles * tile_cols, launch, kCtas);
        job.step_rows = static_cast<int>(grid / tile_cols);
        job.step_cols = static_cast<int>(grid % tile_cols);
        job.first_rows = 1;
    } else {  // no more than kMostWaves, since a capacity may be far above the rows there are
        constexpr int64_t kMostWaves = 16;
        const int64_t bands =
            std::clamp<int64_t>(kMostWaves * kCtas * kNumSms / tile_cols, 1, ceil_div(row_tiles, kRowsOfCta));
        grid = static_cast<unsigned>(bands * tile_cols);
        job.skip_rows = static_cast<int>(bands - 1) * kRowsOfCta;
    }
    kernel<<<grid, kThreads, 0, stream_of(launch)>>>(job);
    check_launch("transpose_fp8");
}

}  // namespace hopper

void HopperOps::do_transpose_fp8(const op::TransposeFp8& args, const Launch& launch) {
    launch_transpose_tiles(args.src, args.groups, args.dst, launch);
}

}  // namespace fp8flow
