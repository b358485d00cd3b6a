// Transposed FP8 with one scale for a column of a group, where a strip of a group does not fit on chip: strips of columns that stay in L2 from
// the maxima to the codes. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/quantize_tiles.h"

namespace fp8flow::hopper {

namespace {

constexpr int kThreads = 128;  // 8 rows x 16 bytes each
constexpr int kWarps = kThreads / 32;
constexpr int kCtas = 6;  // of an SM: 96 KB on their way
constexpr int kRows = 8;
constexpr int kTileRows = static_cast<int>(kBlock), kTileCols = 64;  // a unit of work: 16 KB
constexpr int kUnits = kTileCols / kUnit;
constexpr int kPairs = kTileCols / 2;
constexpr int kPiece = 16, kPieces = kTileRows / kPiece;  // of a turned column
constexpr int kColumnWords = kTileRows / 4;
constexpr int kMostGroups = 64;
constexpr uint32_t kAll = 0xFFFFFFFFu;

// A strip is as wide as 5 MB allow. Between its maxima and its codes lie the maxima of at least kAhead units of later strips, more than all
// CTAs of the GPU have at a time: when its codes are begun, its maxima are (nearly always) complete.
constexpr int64_t kStripBytes = int64_t{5} << 20;
constexpr int kAhead = kNumSms * kCtas;

struct StripJob {
    RowView src, dst;
    DeviceGroups groups;
    int64_t extent;           // without groups: rows and pads
    int columns, strip_cols;  // both in units of 64; strip_cols of a strip, the last may have fewer
    int strips;
    float* scales;   // [group, cols]
    uint32_t* amax;  // [group, cols], 0 at the start, as are all of:
    uint32_t* next;  // the first unit that no CTA has taken
    uint32_t* done;  // [strip]: units whose maxima are in amax
    QuantizeRule rule;
};

struct Group {
    int begin, count, rows, first_tile;
};
struct Shared {
    Group groups[kMostGroups + 1];  // behind the last: first_tile is the number of all tiles
    uint4 turned_pieces[kTileCols * kPieces];
    uint4 parts[kWarps * kUnits];
    float multipliers[kTileCols];
    uint32_t taken;
};

// Tiles of 128 rows begin at multiples of 128 of the output's rows: whole tiles are whole lines.
__device__ __forceinline__ int lead_of(int64_t dst_base, int begin) {
    return static_cast<int>((dst_base + begin) % kTileRows);
}
__device__ __forceinline__ void find_groups(const StripJob& job, int64_t dst_base, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x), groups = static_cast<int>(job.groups.num_groups);
    if (thread < groups) {
        const int64_t begin = job.groups.offset(thread),
                      end = job.groups.counts != nullptr ? job.groups.offset(thread + 1) : job.extent;
        shared.groups[thread] = {static_cast<int>(begin), static_cast<int>(job.groups.count(thread)),
                                 static_cast<int>(end - begin), 0};
    }
    __syncthreads();
    if (thread == 0) {
        int tiles = 0;
        for (int g = 0; g < groups; ++g) {
            Group& group = shared.groups[g];
            group.first_tile = tiles;
            if (group.rows > 0)
                tiles += (lead_of(dst_base, group.begin) + group.rows + kTileRows - 1) / kTileRows;
        }
        shared.groups[groups].first_tile = tiles;
    }
    __syncthreads();
}

// What a CTA does next: the maxima or the codes of 128 rows x 64 columns of a strip. Of strip s the maxima come first; from then on, its codes
// alternate with the maxima of strip s + ahead.
struct Work {
    int strip, unit;  // strip < 0: nothing, as there is no such strip
    bool codes;
};
__device__ __forceinline__ Work work_of(const StripJob& job, uint32_t taken, int units, int ahead) {
    const uint32_t first = static_cast<uint32_t>(ahead) * units;
    Work work = {static_cast<int>(taken / units), static_cast<int>(taken % units), false};
    if (taken >= first) {
        const uint32_t turn = (taken - first) / 2;
        work = {static_cast<int>(turn / units), static_cast<int>(turn % units), (taken - first) % 2 != 0};
        if (!work.codes) work.strip += ahead;
    }
    if (work.strip >= job.strips) work.strip = -1;
    return work;
}

// Rows of a group without rows have no tile: their scales are 0.
__device__ __forceinline__ void clear_empty_groups(const StripJob& job, const Shared& shared) {
    for (int g = 0; g < job.groups.num_groups; ++g) {
        if (shared.groups[g].rows > 0) continue;
        float* scales = job.scales + static_cast<int64_t>(g) * job.src.cols;
        for (int c = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); c < job.src.cols;
             c += static_cast<int>(gridDim.x) * kThreads)
            scales[c] = 0.0f;
    }
}

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}
__device__ __forceinline__ int turned_index(int col, int piece) {
    return col * kColumnWords + (piece ^ (col / kUnit % kPieces)) * (kPiece / 4);
}

// The maxima of a unit, to memory. One barrier inside; integer maxima, whose order does not matter.
__device__ __forceinline__ void add_maxima(const uint4 (&words)[kRows], Shared& shared, uint32_t* amax) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    uint32_t largest[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        largest[j] = abs_bf16x2(word_of(words[0], j));
#pragma unroll
        for (int k = 1; k < kRows; ++k) largest[j] = max_bf16x2(largest[j], abs_bf16x2(word_of(words[k], j)));
#pragma unroll
        for (int step = kUnits; step < 32; step *= 2)
            largest[j] = max_bf16x2(largest[j], __shfl_xor_sync(kAll, largest[j], step));
    }
    if (thread % 32 < kUnits)
        shared.parts[warp * kUnits + thread % 32] = uint4{largest[0], largest[1], largest[2], largest[3]};
    __syncthreads();
    if (thread < kTileCols) {
        uint32_t pair = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
            pair = max_bf16x2(pair, reinterpret_cast<const uint32_t*>(shared.parts)[w * kPairs + thread / 2]);
        atomicMax(amax + thread, thread % 2 == 0 ? low_magnitude(pair) : high_magnitude(pair));
    }
}

// The codes of a unit, turned.
template <DType kCodes> __device__ __forceinline__ void turn(const uint4 (&words)[kRows], Shared& shared) {
    const int octet = static_cast<int>(threadIdx.x) / kUnits, unit = static_cast<int>(threadIdx.x) % kUnits;
    uint32_t* const turned = reinterpret_cast<uint32_t*>(shared.turned_pieces);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float2 m = reinterpret_cast<const float2*>(shared.multipliers)[unit * 4 + j];
        uint32_t low[2], high[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            float a[4], b[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint32_t pair = word_of(words[4 * q + k], j);
                a[k] = __uint_as_float(pair << 16) * m.x;
                b[k] = __uint_as_float(pair & 0xFFFF0000u) * m.y;
            }
            low[q] = pack_fp8(a[0], a[1], a[2], a[3], kCodes);
            high[q] = pack_fp8(b[0], b[1], b[2], b[3], kCodes);
        }
        uint32_t* out = turned + turned_index(unit * kUnit + 2 * j, octet / 2) + octet % 2 * 2;
        *reinterpret_cast<uint2*>(out) = uint2{low[0], low[1]};
        *reinterpret_cast<uint2*>(out + kColumnWords) = uint2{high[0], high[1]};
    }
}

// Moves 2 bytes a value in and 1 out: 256 MB, 0.062 ms at 16640 x 5120 and 4.1 TB/s (two passes over memory: 0.104 ms); besides, every value comes
// from L2 a second time, 13 to 18 MB of later maxima after its first. A CTA takes units of work in one order for all (a counter in memory), the
// next while it works on this one: maxima of strips ahead, and codes of strips whose maxima are complete. It waits for maxima only of
// units that were taken before its own, by CTAs that run: no deadlock, whatever else runs on the GPU. Six CTAs an SM, 16 KB of
// each requested at once, before it waits for maxima or a scale. Barriers, maxima: the warps' are there; they are in memory, and the next unit's
// number is there. Codes: the strip is complete; multipliers are there; the turned tile is complete, and the next number is there.
// Only maxima are reduced, integers: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kThreads, kCtas) quantize_strips_kernel(const StripJob job) {
    __shared__ Shared shared;
    const int thread = static_cast<int>(threadIdx.x), octet = thread / kUnits, unit = thread % kUnits,
              groups = static_cast<int>(job.groups.num_groups);
    const int64_t src_base = job.src.base(), dst_base = job.dst.base(), stride = job.dst.cols;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.dst.data) | static_cast<uintptr_t>(stride)) % kPiece == 0;
    if (thread == 0) shared.taken = atomicAdd(job.next, 1u);
    find_groups(job, dst_base, shared);
    clear_empty_groups(job, shared);
    const int tiles = shared.groups[groups].first_tile, units = tiles * job.strip_cols;
    if (tiles == 0) return;
    const int ahead = min(job.strips, (kAhead + units - 1) / units);
    const uint32_t all = static_cast<uint32_t>(ahead + 2 * job.strips) * units;
    for (uint32_t taken = shared.taken; taken < all; taken = shared.taken) {
        const Work work = work_of(job, taken, units, ahead);
        const int column = work.strip * job.strip_cols + work.unit % job.strip_cols;  // in units of 64
        uint32_t next = 0;
        if (thread == 0) next = atomicAdd(job.next, 1u);
        if (work.strip < 0 || column >= job.columns) {
            __syncthreads();
            if (thread == 0) shared.taken = next;
            __syncthreads();
            continue;
        }
        const int tile = work.unit / job.strip_cols, col0 = column * kTileCols;
        int g = 0;
        while (shared.groups[g + 1].first_tile <= tile) ++g;
        const Group group = shared.groups[g];
        // the group's row in the first row of the tile
        const int row0 = (tile - group.first_tile) * kTileRows - lead_of(dst_base, group.begin);
        uint4 words[kRows];
        const uint16_t* in = static_cast<const uint16_t*>(job.src.data) +
                             (src_base + group.begin + row0 + octet * kRows) * job.src.cols + col0 +
                             unit * kUnit;
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += job.src.cols) {
            words[k] = uint4{0, 0, 0, 0};
            if (static_cast<uint32_t>(row0 + octet * kRows + k) < static_cast<uint32_t>(group.count))
                words[k] = *reinterpret_cast<const uint4*>(in);
        }
        uint32_t* const amax = job.amax + static_cast<int64_t>(g) * job.src.cols + col0;
        if (!work.codes) {
            add_maxima(words, shared, amax);
            if (thread == 0) shared.taken = next;
            __syncthreads();
            if (thread == 0) {
                __threadfence();
                atomicAdd(job.done + work.strip, 1u);
            }
            continue;
        }
        if (thread == 0) {
            const uint32_t complete =
                static_cast<uint32_t>(tiles * min(job.strip_cols, job.columns - work.strip * job.strip_cols));
            while (*static_cast<volatile uint32_t*>(job.done + work.strip) < complete) __nanosleep(64);
            __threadfence();
        }
        __syncthreads();
        if (thread < kTileCols) {
            BlockScale scale = {0.0f, 0.0f, 0};
            if (group.count > 0) scale = block_scale(__ldcg(amax + thread), kCodes, false, job.rule);
            shared.multipliers[thread] = scale.multiplier;
            if (tile == group.first_tile)
                job.scales[static_cast<int64_t>(g) * job.src.cols + col0 + thread] = scale.dequant;
        }
        __syncthreads();
        turn<kCodes>(words, shared);
        if (thread == 0) shared.taken = next;
        __syncthreads();
        const int piece = thread % kPieces, first = -(row0 + piece * kPiece), last = first + group.rows;
        const uint32_t* const turned = reinterpret_cast<const uint32_t*>(shared.turned_pieces);
        int col = thread / kPieces;
        uint8_t* out = static_cast<uint8_t*>(job.dst.data) + (col0 + col) * stride + dst_base + group.begin +
                       row0 + piece * kPiece;
#pragma unroll
        for (int i = 0; i < kTileCols * kPieces / kThreads; ++i, col += kThreads / kPieces) {
            store_piece(out, *reinterpret_cast<const uint4*>(turned + turned_index(col, piece)), first, last,
                        aligned);
            out += kThreads / kPieces * stride;
        }
    }
}

}  // namespace

int64_t strip_words(const TileShape& shape) {
    return shape.groups.num_groups * shape.cols + 1 + ceil_div(shape.cols, kTileCols);
}

bool launch_quantize_strips(const TileSource& source, const TileShape& shape, const Fp8Tensor& dst,
                            const QuantizeRule& rule, uint32_t* words, const Launch& launch) {
    const int64_t groups = shape.groups.num_groups, columns = shape.cols / kTileCols,
                  tiles = ceil_div(shape.capacity, kTileRows) + 2 * groups;
    if (source.values.dtype != DType::bf16 || !source.values.vector || shape.cols % kTileCols != 0 ||
        groups > kMostGroups || shape.cols == 0 || 4 * tiles * columns + 2 * kAhead > INT32_MAX)
        return false;
    const int64_t strip_cols =
        std::clamp<int64_t>(kStripBytes / (std::max<int64_t>(shape.capacity, 1) * kTileCols * 2), 1, columns);
    check_cuda(cudaMemsetAsync(words, 0, static_cast<std::size_t>(strip_words(shape)) * sizeof(uint32_t),
                               stream_of(launch)),
               "clearing amax");
    uint32_t* const next = words + groups * shape.cols;
    const StripJob job = {.src = source.values,
                          .dst = row_view(dst.codes),
                          .groups = shape.groups,
                          .extent = shape.extent,
                          .columns = static_cast<int>(columns),
                          .strip_cols = static_cast<int>(strip_cols),
                          .strips = static_cast<int>(ceil_div(columns, strip_cols)),
                          .scales = dst.scales.as<float>(),
                          .amax = words,
                          .next = next,
                          .done = next + 1,
                          .rule = rule};
    const auto kernel = dst.codes.dtype == DType::e5m2 ? quantize_strips_kernel<DType::e5m2>
                                                       : quantize_strips_kernel<DType::e4m3>;
    kernel<<<grid_for(2 * tiles * columns, launch, kCtas), kThreads, 0, stream_of(launch)>>>(job);
    check_launch("quantize_strips");
    return true;
}

}  // namespace fp8flow::hopper
