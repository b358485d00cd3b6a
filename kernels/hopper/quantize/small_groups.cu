// SPDX-License-Identifier: MIT
// Quantises BF16 rows to transposed FP8 with one scale per column of a group, with one read, for groups of a
// few hundred rows: a CTA keeps a column block of a group in shared memory, with many CTAs per SM. Larger
// groups: group_columns.cu. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/quantize/column_fp8.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/runtime/launch.h"

#include <cuda_pipeline.h>

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlockCols = 32;              // of a column block: 64 bytes of a row
constexpr int kUnits = kBlockCols / kUnit;  // of 16 bytes each
constexpr int kPairs = kBlockCols / 2;
constexpr int kStepRows = kThreads / kUnits;  // rows of a load step, 16 bytes per thread
constexpr int kTileRows = static_cast<int>(kBlock);
constexpr int kPiece = 16, kPieces = kTileRows / kPiece;  // rows of a column that a thread stores at once

constexpr int kCtas = 6, kRows = 4 * kTileRows;  // CTAs per SM; rows in shared memory per CTA

struct SmallGroupsJob {
    RowView src, dst;
    DeviceGroups groups;
    int64_t extent;            // without groups: rows with padding
    int items, column_blocks;  // all; per group
    float* scales;             // [group, cols]
    QuantizeRule rule;
};

// 32 columns of a group. Row 0 is at the start of a sector of the output, `lead` rows before the first row of
// the group.
struct ColumnBlock {
    const uint16_t* in;  // address of row 0, which need not be readable
    int cols, lead, count, rows;
    // The end of the rows of the group and its pads; 0 without any.
    __device__ int end() const { return rows > 0 ? lead + rows : 0; }
    __device__ bool has(int row) const {
        return static_cast<uint32_t>(row - lead) < static_cast<uint32_t>(count);
    }
    __device__ const uint16_t* at(int row, int unit) const {
        return in + static_cast<int64_t>(row) * cols + unit * kUnit;
    }
};

// Index of a unit in the chunk, in units of 16 bytes. Lines of 128 bytes and the units in them are permuted
// by the piece of 16 rows, so that the same row of 8 pieces lies in different banks.
__device__ __forceinline__ int unit_index(int row, int unit) {
    return (row ^ (row >> 4 & 1)) * kUnits + (unit ^ (row >> 5 & 3));
}

__device__ __forceinline__ int whole_tiles(int rows) {
    return (rows + kTileRows - 1) / kTileRows * kTileRows;
}
// Issues the loads of rows [first, first + rows) of a column block; missing rows become zeros. A thread sees
// its own slots after __pipeline_wait_prior, those of others after a barrier as well.
__device__ __forceinline__ void load_rows(const ColumnBlock& block, int first, int rows, uint4* chunk) {
    const int unit = static_cast<int>(threadIdx.x) % kUnits;
    for (int r = static_cast<int>(threadIdx.x) / kUnits; r < rows; r += kStepRows) {
        if (block.has(first + r))
            __pipeline_memcpy_async(chunk + unit_index(r, unit), block.at(first + r, unit), 16);
        else
            chunk[unit_index(r, unit)] = uint4{0, 0, 0, 0};
    }
    __pipeline_commit();
}

// 16 rows of two neighbouring columns; `swap`: 1 where odd rows are stored before even ones.
template <DType kFp8>
__device__ __forceinline__ void encode_piece(const uint32_t* words, int swap, float2 m, uint4& low,
                                             uint4& high) {
    uint32_t first[4], second[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        float a[4], b[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t pair = words[((4 * q + k) ^ swap) * kPairs];
            a[k] = __uint_as_float(pair << 16) * m.x;
            b[k] = __uint_as_float(pair & 0xFFFF0000u) * m.y;
        }
        first[q] = pack_fp8(a[0], a[1], a[2], a[3], kFp8);
        second[q] = pack_fp8(b[0], b[1], b[2], b[3], kFp8);
    }
    low = uint4{first[0], first[1], first[2], first[3]};
    high = uint4{second[0], second[1], second[2], second[3]};
}

// BF16 rows -> transposed FP8 [columns, rows], one fp32 scale per column of a group.
// Lower bound: reads 2 bytes and writes 1 byte per value: 256 MB, 62.5 us at 16640 x 5120.
// Grid: one CTA per column block of 32 columns, six CTAs per SM, because each has few bytes in flight. A CTA
// issues the loads of all its rows (up to 512) at once, finds the maxima, and encodes from shared memory.
// For a larger group the last chunk of 512 rows stays, and the others are read again in descending order,
// mostly from L2. Rows are counted from a multiple of 32 rows of the output, so that all stores are whole
// sectors except at the ends of a group. A warp transposes 128 rows x 8 columns at a time, 16 rows of two
// columns per thread, so that 8 neighbouring threads store 128 bytes of a column.
// Barriers (__syncthreads): the maxima of the warps are in shared memory; the multipliers are in shared
// memory; before and after every load that replaces rows; after the last column is stored. A thread finds
// maxima of rows that it loaded itself, which needs none.
// Deterministic: only maxima are reduced.
// Measured, 16640 x 5120 in 64 groups: 79 us; group_columns.cu takes 92 us.
template <DType kFp8>
__global__ void __launch_bounds__(kThreads, kCtas) quantize_small_groups_kernel(const SmallGroupsJob job) {
    extern __shared__ uint4 chunk[];
    __shared__ uint4 parts[kWarps * kUnits];
    __shared__ float2 multipliers[kPairs];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
              unit_read = thread % kUnits, row_read = thread / kUnits;
    const int64_t src_base = job.src.base(), dst_base = job.dst.base(), stride = job.dst.cols;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.dst.data) | static_cast<uintptr_t>(stride)) % kPiece == 0;
    for (int item = static_cast<int>(blockIdx.x); item < job.items; item += static_cast<int>(gridDim.x)) {
        const int group = item / job.column_blocks, col0 = item % job.column_blocks * kBlockCols;
        const int64_t offset = job.groups.offset(group),
                      end = job.groups.counts != nullptr ? job.groups.offset(group + 1) : job.extent;
        const int count = static_cast<int>(job.groups.count(group));
        ColumnBlock block = {nullptr, job.src.cols, static_cast<int>((dst_base + offset) % kSectorRows),
                             count, static_cast<int>(end - offset)};
        const int64_t row0 = offset - block.lead;
        block.in = static_cast<const uint16_t*>(job.src.data) + (src_base + row0) * job.src.cols + col0;
        const int rows = block.end();
        const int chunks = (rows + kRows - 1) / kRows;
        uint32_t largest[4] = {};
        for (int c = 0; c < chunks; ++c) {
            const int here = min(kRows, whole_tiles(rows - c * kRows));
            if (c > 0) __syncthreads();
            load_rows(block, c * kRows, here, chunk);
            __pipeline_wait_prior(0);
#pragma unroll 4
            for (int r = row_read; r < here; r += kStepRows)
                update_magnitudes(largest, chunk[unit_index(r, unit_read)]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int step = 16; step >= kUnits; step /= 2)
                largest[j] = max_bf16x2(largest[j], __shfl_xor_sync(kFullMask, largest[j], step));
        if (lane < kUnits)
            parts[warp * kUnits + lane] = uint4{largest[0], largest[1], largest[2], largest[3]};
        __syncthreads();
        uint32_t pair = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
            pair = max_bf16x2(pair, reinterpret_cast<const uint32_t*>(parts)[w * kPairs + thread % kPairs]);
        if (thread < kPairs) {
            BlockScale low = {0.0f, 0.0f, 0}, high = {0.0f, 0.0f, 0};
            if (count > 0) {
                low = block_scale(low_magnitude(pair), kFp8, false, job.rule);
                high = block_scale(high_magnitude(pair), kFp8, false, job.rule);
            }
            multipliers[thread] = float2{low.multiplier, high.multiplier};
            float* scales = job.scales + static_cast<int64_t>(group) * job.src.cols + col0 + 2 * thread;
            scales[0] = low.dequant;
            scales[1] = high.dequant;
        }
        __syncthreads();
        for (int c = chunks - 1; c >= 0; --c) {
            const int first = c * kRows, here = min(kRows, whole_tiles(rows - first));
            if (c < chunks - 1) {
                __syncthreads();
                load_rows(block, first, here, chunk);
                __pipeline_wait_prior(0);
                __syncthreads();
            }
            const int word = lane / kPieces, piece = lane % kPieces;
            for (int task = warp; task < here / kTileRows * kUnits; task += kWarps) {
                const int unit = task % kUnits, row = task / kUnits * kTileRows + piece * kPiece;
                const uint32_t* words = reinterpret_cast<const uint32_t*>(chunk) + row * kPairs +
                                        (unit ^ (piece >> 1)) * 4 + word;
                uint4 low, high;
                encode_piece<kFp8>(words, piece & 1, multipliers[unit * 4 + word], low, high);
                const int begin = block.lead - first - row;
                uint8_t* out = static_cast<uint8_t*>(job.dst.data) +
                               (col0 + unit * kUnit + word * 2) * stride + dst_base + row0 + first + row;
                store_piece(out, low, begin, begin + block.rows, aligned);
                store_piece(out + stride, high, begin, begin + block.rows, aligned);
            }
        }
        __syncthreads();
    }
}

}  // namespace

bool launch_quantize_small_groups(const GroupColumns& args, const Launch& launch) {
    const TileShape& shape = args.shape;
    const RowView values = row_view(args.src);
    const int64_t blocks = shape.cols / kBlockCols, items = shape.groups.num_groups * blocks,
                  mean_rows = shape.capacity / std::max<int64_t>(1, shape.groups.num_groups);
    // groups differ in size: nearly all of them should fit into shared memory
    constexpr int64_t kMostRows = kRows * 5 / 8;
    if (shape.cols % kBlockCols != 0 || mean_rows > kMostRows || values.dtype != DType::bf16 ||
        !values.vector || items > INT32_MAX / kThreads || shape.capacity > INT32_MAX / 2)
        return false;
    const SmallGroupsJob job = {.src = values,
                                .dst = row_view(args.dst.data),
                                .groups = shape.groups,
                                .extent = shape.extent,
                                .items = static_cast<int>(items),
                                .column_blocks = static_cast<int>(blocks),
                                .scales = args.dst.scales.as<float>(),
                                .rule = args.rule};
    constexpr int kBytes = kRows * kBlockCols * 2;
    constexpr const char* kWhat = "quantize_small_groups";
    const auto kernel =
        of_fp8(args.dst.data.dtype, [&]<DType kFp8>() { return quantize_small_groups_kernel<kFp8>; });
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               kWhat);
    launch_kernel(kernel, grid_of_items(items, launch, kCtas), kThreads, kBytes, launch, kWhat, job);
    return true;
}

}  // namespace fp8flow::hopper::quantize
