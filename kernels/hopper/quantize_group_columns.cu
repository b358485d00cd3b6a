// Transposed FP8 with one scale for a column of a group, where a strip of a group fits on chip: one read. Elsewhere: the maxima of its
// columns, for the tiles of a second read. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/quantize_tiles.h"

namespace fp8flow::hopper {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kStripCols = 32;              // of an item: 64 bytes of a row
constexpr int kUnits = kStripCols / kUnit;  // 16 bytes each
constexpr int kPairs = kStripCols / 2;
constexpr int kTileRows = kThreads / kUnits;     // a copy a thread
constexpr int kTilePieces = kTileRows * kUnits;  // of 16 bytes: 8 KB
constexpr int kPiece = 16;                       // rows of a column that a thread stores at once
constexpr int kMostGroups = 512;
constexpr uint32_t kAll = 0xFFFFFFFFu;
static_assert(kTileRows == kBlock && kStripCols <= kThreads && kMostGroups <= kThreads);

// The ring of an SM: all of its shared memory for one CTA, or half of it for each of two, where items are so small that one CTA would
// mostly wait for its own barriers.
constexpr int kMostStages = 26, kStagesOfTwo = 12;

struct GroupColumnsJob {
    RowView src, dst;
    DeviceGroups groups;
    int64_t extent;  // without groups: rows and pads
    int strips, items, stages;
    float* scales;  // [group, cols]
    QuantizeRule rule;
};

// A group's rows: `count` valid ones from `begin` on, `rows` with its pads.
struct Group {
    int index, begin, count, rows;
};

struct Shared {
    Barrier full[kMostStages];
    Group groups[kMostGroups];  // those with most rows first
    int sizes[kMostGroups];
    uint4 parts[kWarps * kUnits];
    float multipliers[kStripCols];
};

// Groups in the order of their sizes: every thread counts those before its own.
__device__ __forceinline__ void sort_groups(const GroupColumnsJob& job, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x), groups = static_cast<int>(job.groups.num_groups);
    Group own = {thread, 0, 0, 0};
    if (thread < groups) {
        const int64_t begin = job.groups.offset(thread),
                      end = job.groups.counts != nullptr ? job.groups.offset(thread + 1) : job.extent;
        own.begin = static_cast<int>(begin);
        own.rows = static_cast<int>(end - begin);
        own.count = static_cast<int>(job.groups.count(thread));
        shared.sizes[thread] = own.rows;
    }
    __syncthreads();
    if (thread < groups) {
        int rank = 0;
        for (int g = 0; g < groups; ++g) {
            const int rows = shared.sizes[g];
            rank += rows > own.rows || (rows == own.rows && g < thread) ? 1 : 0;
        }
        shared.groups[rank] = own;
    }
    __syncthreads();
}

// A strip of a group. Its tiles begin at multiples of 128 of the output's rows, so that whole tiles are whole lines: `lead` rows of the first
// lie before the group. tiles < 0: behind the last item.
struct Item {
    Group group;
    int col, lead, tiles;
};
// Items are dealt in turns, every other turn backwards; since sizes fall, all CTAs get nearly equal shares.
__device__ __forceinline__ Item item_of(const GroupColumnsJob& job, const Shared& shared, int64_t dst_base,
                                        int turn) {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x),
              index = turn * ctas + (turn % 2 != 0 ? ctas - 1 - cta : cta);
    Item item = {{0, 0, 0, 0}, 0, 0, -1};
    if (index >= job.items) return item;
    item.group = shared.groups[index / job.strips];
    item.col = index % job.strips * kStripCols;
    item.lead = static_cast<int>((dst_base + item.group.begin) % kTileRows);
    item.tiles = item.group.rows > 0 ? (item.lead + item.group.rows + kTileRows - 1) / kTileRows : 0;
    return item;
}

// Where 16 bytes of a row stand in a tile, in units of 16 bytes: lines of 128 bytes and the units within them change places by the piece of
// 16 rows, so that the same row of 8 pieces lies in different banks.
__device__ __forceinline__ int slot(int row, int unit) {
    return (row ^ (row >> 4 & 1)) * kUnits + (unit ^ (row >> 5 & 3));
}

// A place in the ring.
struct Stage {
    int index = 0;
    uint32_t parity = 0;
    __device__ void advance(int by, int stages) {  // by <= stages
        index += by;
        if (index >= stages) {
            index -= stages;
            parity ^= 1;
        }
    }
};

// Requests tiles in the order in which they are used; those of an item that does not fit into the ring come twice.
class Loader {
public:
    __device__ __forceinline__ Loader(const GroupColumnsJob& job, Shared& shared, uint4* ring,
                                      int64_t dst_base)
        : job_(job),
          shared_(shared),
          dst_base_(dst_base),
          src_base_(job.src.base()),
          row_(static_cast<int>(threadIdx.x) / kUnits),
          unit_(static_cast<int>(threadIdx.x) % kUnits),
          place_(ring + slot(row_, unit_)) {
        start(0);
    }
    // Until `limit` tiles in all have been requested. All threads, behind a barrier since the places were read.
    __device__ __forceinline__ void refill(int limit) {
        while (requested_ < limit && item_.tiles >= 0) {
            const int tiles = min(limit - requested_, item_.tiles - tile_);
#pragma unroll 1
            for (int t = 0; t < tiles; ++t) {
                // of a row before or behind the group's nothing is read
                copy_async_16(
                    place_ + stage_ * kTilePieces, from_,
                    static_cast<uint32_t>(row_of_group_) < static_cast<uint32_t>(item_.group.count) ? 16 : 0);
                barrier_arrive_after_copies(&shared_.full[stage_]);
                from_ += static_cast<int64_t>(kTileRows) * job_.src.cols;
                row_of_group_ += kTileRows;
                if (++stage_ == job_.stages) stage_ = 0;
            }
            requested_ += tiles;
            tile_ += tiles;
            if (tile_ < item_.tiles) continue;
            again_ = item_.tiles > job_.stages && !again_;
            start(again_ ? turn_ : turn_ + 1);
        }
    }

private:
    __device__ __forceinline__ void start(int turn) {
        turn_ = turn;
        tile_ = 0;
        item_ = item_of(job_, shared_, dst_base_, turn);
        row_of_group_ = row_ - item_.lead;
        from_ = static_cast<const uint16_t*>(job_.src.data) +
                (src_base_ + item_.group.begin + row_of_group_) * job_.src.cols + item_.col + unit_ * kUnit;
    }

    const GroupColumnsJob& job_;
    Shared& shared_;
    const int64_t dst_base_, src_base_;
    const int row_, unit_;
    uint4* const place_;  // of this thread in the first tile of the ring
    Item item_;
    const uint16_t* from_;
    int turn_, tile_, row_of_group_;
    int stage_ = 0, requested_ = 0;
    bool again_ = false;
};

// 16 rows of two neighbouring columns; `swap`: 1 where odd rows stand before even ones.
template <DType kCodes>
__device__ __forceinline__ void encode_piece(const uint32_t* words, int swap, float2 m, uint4& low,
                                             uint4& high) {
    const uint32_t* const of_parity[2] = {words + swap * kPairs, words - swap * kPairs};
    uint32_t first[4], second[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        float a[4], b[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t pair = of_parity[k % 2][(4 * q + k) * kPairs];
            a[k] = __uint_as_float(pair << 16) * m.x;
            b[k] = __uint_as_float(pair & 0xFFFF0000u) * m.y;
        }
        first[q] = pack_fp8(a[0], a[1], a[2], a[3], kCodes);
        second[q] = pack_fp8(b[0], b[1], b[2], b[3], kCodes);
    }
    low = uint4{first[0], first[1], first[2], first[3]};
    high = uint4{second[0], second[1], second[2], second[3]};
}

// The codes of tiles [tile, tile + tiles) of an item, which stand in the ring from `stage` on. A warp turns 128 rows x 8 columns at a time: 16
// rows of two columns a thread, so that a store fills lines of 128 bytes.
template <DType kCodes>
__device__ __forceinline__ void encode_tiles(const GroupColumnsJob& job, const Shared& shared,
                                             const uint4* ring, int64_t dst_base, const Item& item, int tile,
                                             int tiles, const Stage& stage) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int word = lane % 4, piece = lane / 4;
    const int64_t stride = job.dst.cols, column = dst_base + item.group.begin - item.lead;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.dst.data) | static_cast<uintptr_t>(stride)) % kPiece == 0;
    for (int task = warp; task < tiles * kUnits; task += kWarps) {
        const int unit = task % kUnits;
        Stage at = stage;
        at.advance(task / kUnits, job.stages);
        const uint32_t* words = reinterpret_cast<const uint32_t*>(ring + at.index * kTilePieces) +
                                piece * kPiece * kPairs + (unit ^ (piece >> 1)) * 4 + word;
        const float2 m = reinterpret_cast<const float2*>(shared.multipliers)[unit * 4 + word];
        uint4 low, high;
        encode_piece<kCodes>(words, piece & 1, m, low, high);
        const int row = (tile + task / kUnits) * kTileRows + piece * kPiece;  // of the item's tiles
        uint8_t* out = static_cast<uint8_t*>(job.dst.data) + (item.col + unit * kUnit + word * 2) * stride +
                       column + row;
        const int first = item.lead - row, last = first + item.group.rows;
        store_piece(out, low, first, last, aligned);
        store_piece(out + stride, high, first, last, aligned);
    }
}

// What this thread copied of `tiles` tiles from `stage` on, once all of them have landed.
__device__ __forceinline__ void take_maxima(const GroupColumnsJob& job, Shared& shared, const uint4* ring,
                                            Stage stage, int tiles, uint32_t (&largest)[4]) {
    const int row = static_cast<int>(threadIdx.x) / kUnits, unit = static_cast<int>(threadIdx.x) % kUnits;
    for (int t = 0; t < tiles; ++t) {
        barrier_wait(&shared.full[stage.index], stage.parity);
        const uint4 words = ring[stage.index * kTilePieces + slot(row, unit)];
        largest[0] = max_bf16x2(largest[0], abs_bf16x2(words.x));
        largest[1] = max_bf16x2(largest[1], abs_bf16x2(words.y));
        largest[2] = max_bf16x2(largest[2], abs_bf16x2(words.z));
        largest[3] = max_bf16x2(largest[3], abs_bf16x2(words.w));
        stage.advance(1, job.stages);
    }
}

// Multipliers of the item's columns in shared memory, scales in memory. Two barriers, the second behind the multipliers.
template <DType kCodes>
__device__ __forceinline__ void find_scales(const GroupColumnsJob& job, Shared& shared, const Item& item,
                                            uint32_t (&largest)[4]) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int step = 16; step >= kUnits; step /= 2)
            largest[j] = max_bf16x2(largest[j], __shfl_xor_sync(kAll, largest[j], step));
    if (lane < kUnits)
        shared.parts[warp * kUnits + lane] = uint4{largest[0], largest[1], largest[2], largest[3]};
    __syncthreads();
    if (thread < kStripCols) {
        uint32_t pair = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
            pair = max_bf16x2(pair, reinterpret_cast<const uint32_t*>(shared.parts)[w * kPairs + thread / 2]);
        BlockScale scale = {0.0f, 0.0f, 0};
        if (item.group.count > 0)
            scale = block_scale(thread % 2 == 0 ? low_magnitude(pair) : high_magnitude(pair), kCodes, false,
                                job.rule);
        shared.multipliers[thread] = scale.multiplier;
        job.scales[static_cast<int64_t>(item.group.index) * job.src.cols + item.col + thread] = scale.dequant;
    }
    __syncthreads();
}

// Moves 2 bytes a value in and 1 out: 706 MB, 0.172 ms at 32768 x 7168 and 4.1 TB/s (two passes: 1.18 GB, 0.29 ms).
// A CTA takes 32 columns of a group at a time: all of its rows stay on chip until their maxima are known and codes are made from them.
// Shared memory is a ring of tiles of 128 rows, copied by all threads, each into its own place; as soon as an item has left, tiles of
// the next ones are requested in its place, so that 100 to 200 KB an SM are always on their way, whatever a group's size. (A CTA an item, three an
// SM: loads stood still while an item was stored, at 3 x 16 KB for groups of 260 rows; 58 to 68 % of a copy.) Groups with more rows than
// the ring has (3328, or 1536 for each of two CTAs) are read twice. Tiles are counted from multiples of 128 in the output, so
// that all but a group's ends are whole lines. A tile's barrier counts its 512 copies. Every thread looks at what it copied itself; barrier:
// the warps' maxima are there; barrier: multipliers are there; barrier: the item has left, its places may be filled. Only maxima are
// reduced: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kThreads, 2) quantize_group_columns_kernel(const GroupColumnsJob job) {
    extern __shared__ uint4 ring[];
    __shared__ Shared shared;
    if (threadIdx.x == 0)
        for (int s = 0; s < job.stages; ++s) barrier_init(&shared.full[s], kThreads);
    sort_groups(job, shared);
    const int64_t dst_base = job.dst.base();
    Loader loader(job, shared, ring, dst_base);
    loader.refill(job.stages);
    Stage stage;
    int used = 0;  // tiles that have left
    const auto leave = [&](int tiles) {
        __syncthreads();
        used += tiles;
        stage.advance(tiles, job.stages);
        loader.refill(used + job.stages);
    };
    for (int turn = 0;; ++turn) {
        const Item item = item_of(job, shared, dst_base, turn);
        if (item.tiles < 0) return;
        uint32_t largest[4] = {};
        if (item.tiles <= job.stages) {
            take_maxima(job, shared, ring, stage, item.tiles, largest);
            find_scales<kCodes>(job, shared, item, largest);
            encode_tiles<kCodes>(job, shared, ring, dst_base, item, 0, item.tiles, stage);
            leave(item.tiles);
            continue;
        }
        const int step = job.stages / 2;
        for (int tile = 0; tile < item.tiles; tile += step) {
            const int tiles = min(step, item.tiles - tile);
            take_maxima(job, shared, ring, stage, tiles, largest);
            leave(tiles);
        }
        find_scales<kCodes>(job, shared, item, largest);
        for (int tile = 0; tile < item.tiles; tile += step) {
            const int tiles = min(step, item.tiles - tile);
            uint32_t ignored[4] = {};
            take_maxima(job, shared, ring, stage, tiles, ignored);
            encode_tiles<kCodes>(job, shared, ring, dst_base, item, tile, tiles, stage);
            leave(tiles);
        }
    }
}

constexpr int kAmaxThreads = 256, kAmaxWarps = kAmaxThreads / 32;
constexpr int kAmaxCols = 32 * kUnit;  // of a CTA
constexpr int kAmaxRows = kTileRows / kAmaxWarps;
constexpr int kAmaxLoads = 8;  // of a thread, under way at once
constexpr int kAmaxCtas = 5;   // of an SM: 160 KB

// The first of two passes, where a strip does not fit: 2 bytes a value in. A CTA takes 128 rows x 256 columns, a warp 16 rows, a thread 8
// columns. Barrier: the warps' maxima are there; barrier: they were read. Integer atomic maxima, whose order does not matter.
__global__ void __launch_bounds__(kAmaxThreads, kAmaxCtas)
    column_amax_kernel(const RowView src, const DeviceGroups groups, int64_t extent, int chunks,
                       uint32_t* amax) {
    __shared__ uint4 parts[kAmaxWarps * 32];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, cols = src.cols;
    const int64_t src_base = src.base();
    TileWalker walker(groups, extent, 1);
    RowTile tile;
    for (int work = static_cast<int>(blockIdx.x); walker.seek(work / chunks, tile);
         work += static_cast<int>(gridDim.x)) {
        const int col0 = work % chunks * kAmaxCols, col = col0 + lane * kUnit, first = warp * kAmaxRows;
        const uint16_t* in =
            static_cast<const uint16_t*>(src.data) + (src_base + tile.row + first) * cols + col;
        uint32_t largest[4] = {};
        for (int r = 0; r < kAmaxRows; r += kAmaxLoads) {
            uint4 words[kAmaxLoads];
#pragma unroll
            for (int i = 0; i < kAmaxLoads; ++i) {
                words[i] = uint4{0, 0, 0, 0};
                if (col < cols && first + r + i < tile.count)
                    words[i] = *reinterpret_cast<const uint4*>(in + static_cast<int64_t>(r + i) * cols);
            }
#pragma unroll
            for (int i = 0; i < kAmaxLoads; ++i) {
                largest[0] = max_bf16x2(largest[0], abs_bf16x2(words[i].x));
                largest[1] = max_bf16x2(largest[1], abs_bf16x2(words[i].y));
                largest[2] = max_bf16x2(largest[2], abs_bf16x2(words[i].z));
                largest[3] = max_bf16x2(largest[3], abs_bf16x2(words[i].w));
            }
        }
        parts[thread] = uint4{largest[0], largest[1], largest[2], largest[3]};
        __syncthreads();
        if (thread < kAmaxCols / 2 && col0 + 2 * thread < cols) {
            uint32_t pair = 0;
#pragma unroll
            for (int w = 0; w < kAmaxWarps; ++w)
                pair =
                    max_bf16x2(pair, reinterpret_cast<const uint32_t*>(parts)[w * (kAmaxCols / 2) + thread]);
            uint32_t* to = amax + tile.group * cols + col0 + 2 * thread;
            atomicMax(to, low_magnitude(pair));
            atomicMax(to + 1, high_magnitude(pair));
        }
        __syncthreads();
    }
}

template <DType kCodes> void launch(GroupColumnsJob job, int64_t mean_rows, const Launch& launch) {
    constexpr int64_t kRowsForOne = 5 * kTileRows;  // of a group, from which on one CTA keeps an SM busy
    const int ctas = mean_rows < kRowsForOne ? 2 : 1;
    job.stages = ctas == 2 ? kStagesOfTwo : kMostStages;
    const auto kernel = quantize_group_columns_kernel<kCodes>;
    const int bytes = job.stages * kTilePieces * int{sizeof(uint4)};
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kMostStages * kTilePieces * int{sizeof(uint4)}),
               "shared memory of quantize_group_columns");
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               "shared memory of quantize_group_columns");
    kernel<<<grid_for(job.items, launch, ctas), kThreads, static_cast<std::size_t>(bytes),
             stream_of(launch)>>>(job);
    check_launch("quantize_group_columns");
}

}  // namespace

bool launch_quantize_group_columns(const TileSource& source, const TileShape& shape, const Fp8Tensor& dst,
                                   const QuantizeRule& rule, const Launch& launch_args) {
    constexpr int64_t kLeastItems =
        int64_t{2} * kNumSms;  // fewer leave SMs idle: strips by way of L2 are faster
    const int64_t strips = shape.cols / kStripCols, groups = shape.groups.num_groups, items = groups * strips,
                  mean_rows = shape.capacity / groups;
    if (source.values.dtype != DType::bf16 || !source.values.vector || shape.cols % kStripCols != 0 ||
        items < kLeastItems || items > INT32_MAX / 2 || shape.capacity > INT32_MAX / 2 ||
        groups > kMostGroups || mean_rows > kMostStages * kTileRows / 2)
        return false;
    const GroupColumnsJob job = {.src = source.values,
                                 .dst = row_view(dst.codes),
                                 .groups = shape.groups,
                                 .extent = shape.extent,
                                 .strips = static_cast<int>(strips),
                                 .items = static_cast<int>(items),
                                 .stages = 0,
                                 .scales = dst.scales.as<float>(),
                                 .rule = rule};
    if (dst.codes.dtype == DType::e5m2)
        launch<DType::e5m2>(job, mean_rows, launch_args);
    else
        launch<DType::e4m3>(job, mean_rows, launch_args);
    return true;
}

bool launch_column_amax(const TileSource& source, const TileShape& shape, uint32_t* amax,
                        const Launch& launch) {
    if (source.values.dtype != DType::bf16 || !source.values.vector || shape.batches != 1 ||
        source.block_scales != nullptr || source.rstd != nullptr)
        return false;
    const int64_t chunks = ceil_div(shape.cols, kAmaxCols),
                  row_tiles = ceil_div(shape.capacity, kTileRows) + shape.groups.num_groups;
    column_amax_kernel<<<grid_for(row_tiles * chunks, launch, kAmaxCtas), kAmaxThreads, 0,
                         stream_of(launch)>>>(source.values, shape.groups, shape.extent,
                                              static_cast<int>(chunks), amax);
    check_launch("column_amax");
    return true;
}

}  // namespace fp8flow::hopper
