// Transposed FP8 with one scale for a column of a group from one read, for groups of a few hundred rows: a strip of a group stays on chip, several CTAs
// a multiprocessor. Larger groups: quantize_group_columns.cu. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/column_codes.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/gemm_wgmma.h"
#include "kernels/hopper/quantize_tiles.h"

namespace fp8flow::hopper {

namespace {

constexpr int kThreads = 192, kWarps = kThreads / 32;
constexpr int kUnits = 1 << kWidestTile;  // of a row of a strip: 128 bytes
constexpr int kStripCols = kUnits * kUnit, kPairs = kStripCols / 2, kRowBytes = 2 * kStripCols;
constexpr int kStepRows = kThreads / kUnits;  // rows that all threads look at together
constexpr int kPiece = 16;                    // rows of a column that a thread stores at once
constexpr int kSector = 32, kPieces = kSector / kPiece;
// Rows of a request: of a large one, and of what is left.
constexpr int kBoxRows = 64, kLastRows = 16;

constexpr int kCtas = 4, kRows = 432;  // CTAs of an SM, and the rows that one has on chip
static_assert(kRows % kLastRows == 0 && kStepRows % kUnits == 0);

struct StripsJob {
    RowView src, dst;
    DeviceGroups groups;
    int64_t extent;  // without groups: rows and pads
    int items, strips;
    float* scales;  // [group, cols]
    QuantizeRule rule;
};
struct StripMaps {
    CUtensorMap box, last;
};

// 64 columns of a group. Row 0 is at the start of a sector of the output: `lead` rows before the group's first.
struct Strip {
    int group, col, row0;  // its first column; row 0, counted from the row base
    int lead, count, rows;
    __device__ Strip(const StripsJob& job, int item, int64_t dst_base)
        : group(item / job.strips), col((item - group * job.strips) * kStripCols) {
        const int64_t offset = job.groups.offset(group),
                      next = job.groups.counts != nullptr ? job.groups.offset(group + 1) : job.extent;
        count = static_cast<int>(job.groups.count(group));
        rows = static_cast<int>(next - offset);
        lead = static_cast<int>((dst_base + offset) % kSector);
        row0 = static_cast<int>(offset) - lead;
    }
    // Rows of the group and its pads end here; 0 without any.
    __device__ int end() const { return rows > 0 ? lead + rows : 0; }
};
// Rows of a strip that are on chip together.
struct Chunk {
    const uint8_t* values;
    int first, rows;
};

// One thread asks for a chunk; what its last request has too many of are rows of neighbours.
__device__ __forceinline__ void request(const StripMaps& maps, const Strip& strip, const Chunk& chunk,
                                        int src_base, uint8_t* to, Barrier* landed) {
    const int row = src_base + strip.row0 + chunk.first,
              rows = (chunk.rows + kLastRows - 1) / kLastRows * kLastRows;
    barrier_arrive_expect_bytes(landed, static_cast<uint32_t>(rows * kRowBytes));
    int r = 0;
    for (; r + kBoxRows <= rows; r += kBoxRows)
        tensor_load(&maps.box, landed, to + r * kRowBytes, strip.col, row + r);
    for (; r < rows; r += kLastRows) tensor_load(&maps.last, landed, to + r * kRowBytes, strip.col, row + r);
}

// A thread looks at one unit of every kStepRows-th valid row.
__device__ __forceinline__ void look(const Strip& strip, const Chunk& chunk, uint32_t (&largest)[4]) {
    const int unit = static_cast<int>(threadIdx.x) % kUnits, begin = strip.lead - chunk.first,
              end = min(chunk.rows, begin + strip.count);
    int row = static_cast<int>(threadIdx.x) / kUnits;
    if (row < begin) row += (begin - row + kStepRows - 1) / kStepRows * kStepRows;
    const uint8_t* at = chunk.values + unit_place(row, unit, kWidestTile);
#pragma unroll 4
    for (; row < end; row += kStepRows, at += kStepRows * kRowBytes)
        take_maxima(largest, *reinterpret_cast<const uint4*>(at));
}

// The maxima of the four lanes that look at the same unit: each has them for two columns then, those of word lane / 8 of the unit.
__device__ __forceinline__ uint32_t maxima_of_unit(const uint32_t (&largest)[4], int lane) {
    const bool high = (lane & 16) != 0, odd = (lane & 8) != 0;
    uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        half[i] = max_abs_bf16x2(high ? largest[2 + i] : largest[i],
                                 __shfl_xor_sync(kWholeWarp, high ? largest[i] : largest[2 + i], 16));
    return abs_bf16x2(
        max_abs_bf16x2(odd ? half[1] : half[0], __shfl_xor_sync(kWholeWarp, odd ? half[0] : half[1], 8)));
}

// Scales of two columns of a strip by a lane, column `lane` and the one 32 behind: all warps compute all of them, the first ones store them.
template <DType kCodes>
__device__ __forceinline__ void take_scales(const StripsJob& job, const Strip& strip,
                                            const uint32_t (&maxima)[kWarps][kPairs],
                                            float (&multipliers)[2]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t pair = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) pair = max_bf16x2(pair, maxima[w][16 * i + lane / 2]);
        BlockScale scale = {0.0f, 0.0f, 0};
        if (strip.count > 0)
            scale = block_scale(lane % 2 != 0 ? high_magnitude(pair) : low_magnitude(pair), kCodes, false,
                                job.rule);
        multipliers[i] = scale.multiplier;
        if (warp == i)
            job.scales[static_cast<int64_t>(strip.group) * job.src.cols + strip.col + 32 * i + lane] =
                scale.dequant;
    }
}

// A thread turns 16 rows of four columns. The sectors that there are of each unit stand in one sequence, so that few threads have nothing to do:
// a warp takes eight of them, a lane one of two pieces of one of two halves of a unit. `out`: where row 0 of the strip's first column goes.
template <DType kCodes>
__device__ __forceinline__ void encode(const StripsJob& job, const Strip& strip, const Chunk& chunk,
                                       const float (&multipliers)[2], uint8_t* out, bool aligned) {
    constexpr int kOwn = 4, kSectorsOfWarp = 8;
    const int lane = static_cast<int>(threadIdx.x) % 32, turn = lane % 8, half = lane / 8 % 2;
    const int64_t stride = job.dst.cols;
    const PieceOrder order(turn);
    const int sectors = (chunk.rows + kSector - 1) / kSector, all = kUnits * sectors;
    for (int first = static_cast<int>(threadIdx.x) / 32 * kSectorsOfWarp; first < all;
         first += kWarps * kSectorsOfWarp) {
        const int sector = first + lane / 16 * (kSectorsOfWarp / 2) + turn / kPieces;
        const int unit = min(sector / sectors, kUnits - 1),
                  row = (sector - unit * sectors) * kSector + turn % kPieces * kPiece,
                  column = (unit * 2 + half) * kOwn;
        float own[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const float lower = __shfl_sync(kWholeWarp, multipliers[0], (column + i) % 32),
                        upper = __shfl_sync(kWholeWarp, multipliers[1], (column + i) % 32);
            own[i] = column < 32 ? lower : upper;
        }
        if (sector >= all) continue;
        // of row `row + turn`; the eight rows around it stand where both the row and the unit differ from its own by i
        const int place = unit_place(row + turn, unit, kWidestTile) + half * kOwn * 2;
        uint32_t words[2][kPiece];
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            const uint2 both = *reinterpret_cast<const uint2*>(
                chunk.values + (place ^ i % 8 * (kRowBytes + 16)) + i / 8 * 8 * kRowBytes);
            words[0][i] = both.x;
            words[1][i] = both.y;
        }
        const int begin = strip.lead - chunk.first - row, valid_end = begin + strip.count,
                  end = begin + strip.rows;
        if (valid_end < min(end, kPiece)) {
#pragma unroll
            for (int i = 0; i < kPiece; ++i)
                if ((i % 8 ^ turn) + i / 8 * 8 >= valid_end) words[0][i] = words[1][i] = 0;
        }
        uint8_t* to = out + column * stride + chunk.first + row;
#pragma unroll
        for (int i = 0; i < 2; ++i, to += 2 * stride) {
            store_piece(to, order.encode<kCodes, false>(words[i], own[2 * i]), begin, end, aligned);
            store_piece(to + stride, order.encode<kCodes, true>(words[i], own[2 * i + 1]), begin, end,
                        aligned);
        }
    }
}

// Moves 2 bytes a value in and 1 out: 256 MB, 62.5 us at 16640 x 5120 (64 groups; by way of quantize_group_columns.cu 90).
// A CTA takes 64 columns of a group: all of its rows are requested at once, by the copy engine, and stay on chip, maxima
// are taken over them, and codes made from them. Of a group of more than kRows rows the last chunk stays, the others are read again, the
// latest first, mostly from L2. Rows are counted from a multiple of 32 in the output, so that all but a group's ends are whole sectors.
// Barrier: the warps' maxima are there, from which each warp computes all scales. Barriers around all that takes the place of
// rows, and behind the last. Only maxima are reduced: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kThreads, kCtas)
    quantize_group_strips_kernel(const __grid_constant__ StripsJob job,
                                 const __grid_constant__ StripMaps maps) {
    extern __shared__ __align__(1024) uint8_t values[];
    __shared__ Barrier landed;
    __shared__ uint32_t maxima[kWarps][kPairs];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    if (thread == 0) {
        barrier_init(&landed, 1);
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_kernel_before();
    const int64_t src_base = job.src.base(), dst_base = job.dst.base();
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.dst.data) | static_cast<uintptr_t>(job.dst.cols)) % kPiece == 0;
    uint32_t parity = 0;
    for (int item = static_cast<int>(blockIdx.x); item < job.items; item += static_cast<int>(gridDim.x)) {
        const Strip strip(job, item, dst_base);
        const int chunks = (strip.end() + kRows - 1) / kRows;
        const auto chunk_of = [&](int c) {
            return Chunk{values, c * kRows, min(kRows, strip.end() - c * kRows)};
        };
        const auto bring = [&](const Chunk& chunk) {
            if (thread == 0) request(maps, strip, chunk, static_cast<int>(src_base), values, &landed);
            barrier_wait(&landed, parity);
            parity ^= 1;
        };
        uint32_t largest[4] = {};
        for (int c = 0; c < chunks; ++c) {
            const Chunk chunk = chunk_of(c);
            if (c > 0) __syncthreads();
            bring(chunk);
            look(strip, chunk, largest);
        }
        maxima[thread / 32][lane % kUnits * 4 + lane / kUnits] = maxima_of_unit(largest, lane);
        __syncthreads();
        float multipliers[2];
        take_scales<kCodes>(job, strip, maxima, multipliers);
        uint8_t* out = static_cast<uint8_t*>(job.dst.data) + strip.col * static_cast<int64_t>(job.dst.cols) +
                       dst_base + strip.row0;
        for (int c = chunks - 1; c >= 0; --c) {
            const Chunk chunk = chunk_of(c);
            if (c < chunks - 1) {
                __syncthreads();
                bring(chunk);
            }
            encode<kCodes>(job, strip, chunk, multipliers, out, aligned);
        }
        __syncthreads();
    }
}

template <DType kCodes> void launch(const StripsJob& job, const StripMaps& maps, const Launch& launch) {
    constexpr int kBytes = kRows * kRowBytes;
    constexpr const char* kWhat = "quantize_group_strips";
    const auto kernel = quantize_group_strips_kernel<kCodes>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), kWhat);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               kWhat);
    // unlimited: a CTA an item, since groups differ in size
    const unsigned ctas =
        launch.sm_limit > 0 ? grid_for(job.items, launch, kCtas) : static_cast<unsigned>(job.items);
    launch_behind(kernel, ctas, dim3(kThreads), kBytes, launch, kWhat, job, maps);
}

}  // namespace

bool launch_quantize_group_strips(const GroupColumns& args, const Launch& launch_args) {
    const TensorView& src = args.src;
    const TileShape& shape = args.shape;
    const RowView values = row_view(src);
    const int64_t strips = shape.cols / kStripCols, items = shape.groups.num_groups * strips,
                  mean_rows = shape.capacity / std::max<int64_t>(1, shape.groups.num_groups);
    // groups differ: nearly all of them should fit on chip
    constexpr int64_t kMostRows = 320;
    if (shape.cols % kStripCols != 0 || mean_rows > kMostRows || values.dtype != DType::bf16 ||
        !values.vector || src.numel() == 0 || items > INT32_MAX / kThreads || src.dim(0) > INT32_MAX / 2 ||
        shape.capacity > INT32_MAX / 2)
        return false;
    const StripsJob job = {.src = values,
                           .dst = row_view(args.dst.codes),
                           .groups = shape.groups,
                           .extent = shape.extent,
                           .items = static_cast<int>(items),
                           .strips = static_cast<int>(strips),
                           .scales = args.dst.scales.as<float>(),
                           .rule = args.rule};
    const auto map = [&src](int rows) {
        return tensor_map(src.data, src.dtype, src.dim(0), src.cols(), rows, kRowBytes);
    };
    const StripMaps maps = {map(kBoxRows), map(kLastRows)};
    if (args.dst.codes.dtype == DType::e5m2)
        launch<DType::e5m2>(job, maps, launch_args);
    else
        launch<DType::e4m3>(job, maps, launch_args);
    return true;
}

}  // namespace fp8flow::hopper
