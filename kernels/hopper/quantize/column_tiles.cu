// SPDX-License-Identifier: MIT
// Quantises BF16 rows to transposed FP8 with one scale per column of a group, with one read, for few or large
// groups. Tiles stay in shared memory until the maxima of their columns are known. CTAs exchange maxima
// through L2. Many groups that fit into a CTA: group_columns.cu. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/quantize/column_tiles.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/runtime/tensor_map.h"

#include <cuda/atomic>

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kSlots = 13;    // tiles in shared memory: 208 KB
constexpr int kTogether = 2;  // tiles of a run that are loaded in one step

// Warp roles of a CTA, in this order; the producer is the last.
constexpr int kEncoderSets = 1, kAmaxWarps = kUnits, kPublishers = 4, kSubscribers = 8;
constexpr int kEncoders = kEncoderSets * kUnits;
constexpr int kFirstAmaxWarp = kEncoders, kFirstPublisher = kFirstAmaxWarp + kAmaxWarps,
              kFirstSubscriber = kFirstPublisher + kPublishers, kProducer = kFirstSubscriber + kSubscribers;
constexpr int kThreads = 32 * (kProducer + 1);
// The most warps of a role that alternate over the tiles of a CTA.
constexpr int kMostAlternating = std::max({kPublishers, kSubscribers, kEncoderSets});
static_assert(kMostAlternating <= kSlots && kPairs == 32);

using Counter = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

// Maxima of 64 columns of a group as fp32 bits, of even and of odd columns; how many tiles have published
// theirs, and how many have read the result. Zero between launches: the last reader clears it.
struct alignas(32) ColumnMaxima {
    uint32_t even[kPairs], odd[kPairs];
    uint32_t arrived, read;
};
struct ColumnTilesJob {
    RowView src, dst;
    DeviceGroups groups;
    int64_t extent;     // without groups: rows with padding
    int column_blocks;  // per group
    float* scales;      // [group, cols]
    QuantizeRule rule;
    ColumnMaxima* maxima;  // [group, column block]
};
struct ColumnMaps {
    CUtensorMap tile, piece;
};

struct Shared {
    Mbarrier full[kSlots], amax_ready[kSlots], scale_ready[kSlots], empty[kSlots];
    TileTask tasks[kSlots];
    uint32_t maxima[kSlots][kPairs];  // two columns each
    float2 multipliers[kSlots][kPairs];
};

// The tiles of a warp that takes every kWarps-th tile of its CTA.
template <int kWarps> using TileCursor = SlotCursor<kSlots, kWarps>;

// The producer warp loads the rows of the CTA's runs: a whole tile by one TMA load, or 16 rows per lane.
class Producer {
public:
    __device__ Producer(const ColumnTilesJob& job, const ColumnMaps& maps, Shared& shared, uint8_t* slots)
        : job_(job),
          maps_(maps),
          shared_(shared),
          slots_(slots),
          lane_(static_cast<int>(threadIdx.x) % 32),
          src_base_(static_cast<int>(job.src.base())),
          dst_base_(static_cast<int>(job.dst.base())) {}

    __device__ void run() {
        // half of the slots of all CTAs, because a run that waits blocks the tiles after it
        const int ctas = static_cast<int>(gridDim.x), most_tiles = ctas * kSlots / (2 * kRun);
        RunScheduler scheduler(job_.groups, job_.extent, dst_base_, job_.column_blocks, most_tiles);
        TileTask task = {};
        for (int run = static_cast<int>(blockIdx.x); scheduler.find(run, task); run += ctas) {
            const int tiles = min(kRun, job_.column_blocks - task.col / kTileColumns);
            for (int i = 0; i < tiles; i += kTogether) load(task, i, min(kTogether, tiles - i));
        }
        task = {};
        for (int i = 0; i < kMostAlternating; ++i) load(task, 0, 1);  // one end task per warp
    }

private:
    // Tiles [first, first + tiles) of a run, at most kTogether: 8 lanes each.
    __device__ void load(TileTask task, int first, int tiles) {
        const int tile = lane_ / kPieces, piece = lane_ % kPieces;
        int slot = next_ + tile, round = round_;
        if (slot >= kSlots) {
            slot -= kSlots;
            ++round;
        }
        const int first_piece = task.begin / kPiece,
                  last_piece = task.valid_end > task.begin ? (task.valid_end - 1) / kPiece + 1 : first_piece;
        const int row = src_base_ + task.row;
        task.item += first + tile;
        task.col += (first + tile) * kTileColumns;
        task.row += dst_base_;
        Mbarrier* full = &shared_.full[slot];
        if (tile < tiles && piece == 0) {
            if (round > 0) mbarrier_wait(&shared_.empty[slot], static_cast<uint32_t>(round - 1) & 1);
            shared_.tasks[slot] = task;
            mbarrier_arrive_expect_tx(full, static_cast<uint32_t>((last_piece - first_piece) * kPieceBytes));
        }
        __syncwarp();
        if (tile < tiles) {
            uint8_t* to = slots_ + slot * kTileBytes;
            if (first_piece == 0 && last_piece == kPieces) {
                if (piece == 0) tma_load(&maps_.tile, full, to, task.col, row);
            } else if (piece >= first_piece && piece < last_piece) {
                tma_load(&maps_.piece, full, to + piece * kPieceBytes, task.col, row + piece * kPiece);
            }
        }
        __syncwarp();
        next_ += tiles;
        if (next_ >= kSlots) {
            next_ -= kSlots;
            ++round_;
        }
    }

    const ColumnTilesJob& job_;
    const ColumnMaps& maps_;
    Shared& shared_;
    uint8_t* const slots_;
    const int lane_, src_base_, dst_base_;
    int next_ = 0, round_ = 0;  // next slot; how often the ring has been filled
};

// Amax warp: column maxima of one unit of every tile. Rows outside the group are set to zero.
__device__ __forceinline__ void amax_warp(Shared& shared, uint8_t* slots, int unit) {
    constexpr int kSteps = kRows / 32, kStep = 32 * kRowBytes;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (TileCursor<1> cursor(0);; cursor.advance()) {
        const TileTask task = cursor.wait_full(shared);
        if (task.tiles == 0) return;
        uint8_t* column = slots + cursor.index * kTileBytes + unit_offset(lane, unit, kWidestShift);
        uint32_t largest[4] = {};
        if (task.begin == 0 && task.valid_end == kRows) {
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
                update_maxima(largest, *reinterpret_cast<const uint4*>(column + i * kStep));
        } else {
            for (int i = 0; i < kSteps; ++i) {
                uint4& words = *reinterpret_cast<uint4*>(column + i * kStep);
                const int here = i * 32 + lane;
                if (here >= task.begin && here < task.valid_end)
                    update_maxima(largest, words);
                else
                    words = uint4{0, 0, 0, 0};
            }
            fence_async_shared();  // TMA refills the slot
        }
        const uint32_t pair = reduce_maxima(largest, lane);
        if (holds_word(lane)) shared.maxima[cursor.index][unit * kUnitPairs + word_of_lane(lane)] = pair;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.amax_ready[cursor.index]);
    }
}

// Publisher warp: merges the maxima of a tile, two columns per lane, into those of its column block in L2. It
// waits for its own CTA only.
__device__ __forceinline__ void publisher_warp(const ColumnTilesJob& job, Shared& shared, int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (TileCursor<kPublishers> cursor(warp);; cursor.advance()) {
        const TileTask task = cursor.wait_full(shared);
        if (task.tiles == 0) return;
        mbarrier_wait(&shared.amax_ready[cursor.index], cursor.parity);
        if (task.publishes) {
            ColumnMaxima& maxima = job.maxima[task.item];
            const uint32_t pair = shared.maxima[cursor.index][lane];
            atomicMax(&maxima.even[lane], low_magnitude(pair));
            atomicMax(&maxima.odd[lane], high_magnitude(pair));
            __syncwarp();
            if (lane == 0) Counter(maxima.arrived).fetch_add(1, cuda::memory_order_release);
        }
        if (lane == 0) mbarrier_arrive(&shared.scale_ready[cursor.index]);
    }
}

// Subscriber warp: waits until all tiles of the column block have published, then computes the multipliers of
// two columns per lane.
template <DType kFp8>
__device__ __forceinline__ void subscriber_warp(const ColumnTilesJob& job, Shared& shared, int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (TileCursor<kSubscribers> cursor(warp);; cursor.advance()) {
        const TileTask task = cursor.wait_full(shared);
        if (task.tiles == 0) return;
        if (!task.encodes) {
            if (lane == 0) mbarrier_arrive(&shared.scale_ready[cursor.index]);
            continue;
        }
        ColumnMaxima& maxima = job.maxima[task.item];
        const auto tiles = static_cast<uint32_t>(task.tiles);
        while (Counter(maxima.arrived).load(cuda::memory_order_acquire) != tiles) {
        }
        const uint32_t even = __ldcg(&maxima.even[lane]), odd = __ldcg(&maxima.odd[lane]);
        const int group = task.item / job.column_blocks, col = task.col + 2 * lane;
        BlockScale low = {0.0f, 0.0f, 0}, high = {0.0f, 0.0f, 0};
        if (job.groups.count(group) > 0) {
            low = block_scale(even, kFp8, false, job.rule);
            high = block_scale(odd, kFp8, false, job.rule);
        }
        shared.multipliers[cursor.index][lane] = float2{low.multiplier, high.multiplier};
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.scale_ready[cursor.index]);
        if (task.stores_scales && col < job.src.cols) {
            float* scales = job.scales + static_cast<int64_t>(group) * job.src.cols + col;
            scales[0] = low.dequant;
            scales[1] = high.dequant;
        }
        uint32_t readers = 0;
        if (lane == 0) readers = Counter(maxima.read).fetch_add(1, cuda::memory_order_acq_rel) + 1;
        if (__shfl_sync(kFullMask, readers, 0) != tiles) continue;
        maxima.even[lane] = maxima.odd[lane] = 0;
        if (lane == 0) maxima.arrived = maxima.read = 0;
    }
}

// Encoder warp: transposes 8 columns of a tile. A thread has 16 rows of two columns, so 8 threads store a
// line.
template <DType kFp8>
__device__ __forceinline__ void encoder_warp(const ColumnTilesJob& job, Shared& shared, const uint8_t* slots,
                                             int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32, unit = warp % kUnits, word = lane / kPieces,
              piece = lane % kPieces;
    const int64_t stride = job.dst.cols;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.dst.data) | static_cast<uintptr_t>(stride)) % kPiece == 0;
    int offsets[kPieces];  // of row i ^ piece
    const PieceEncoder encoder(piece);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
        offsets[i] = unit_offset(piece * kPiece + (i ^ piece), unit, kWidestShift) + word * 4;
    for (TileCursor<kEncoderSets> cursor(warp / kUnits);; cursor.advance()) {
        const TileTask task = cursor.wait_full(shared);
        if (task.tiles == 0) return;
        mbarrier_wait(&shared.scale_ready[cursor.index], cursor.parity);
        const uint8_t* tile = slots + cursor.index * kTileBytes;
        uint32_t words[kPiece];
#pragma unroll
        for (int i = 0; i < kPiece; ++i)
            words[i] = *reinterpret_cast<const uint32_t*>(tile + offsets[i % kPieces] +
                                                          i / kPieces * kPieces * kRowBytes);
        const float2 m = shared.multipliers[cursor.index][unit * kUnitPairs + word];
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.empty[cursor.index]);
        const int col = task.col + unit * kUnit + 2 * word;
        if (!task.encodes || col >= job.src.cols) continue;
        uint8_t* out = static_cast<uint8_t*>(job.dst.data) + col * stride + task.row + piece * kPiece;
        const int begin = task.begin - piece * kPiece, end = task.end - piece * kPiece;
        store_piece(out, encoder.encode<kFp8, false>(words, m.x), begin, end, aligned);
        store_piece(out + stride, encoder.encode<kFp8, true>(words, m.y), begin, end, aligned);
    }
}

// BF16 rows -> transposed FP8 [columns, rows], one FP32 scale per column of a group.
// Lower bound: reads 2 bytes and writes 1 byte per value: 706 MB, 0.172 ms at 32768 x 7168 and 4.1 TB/s
// (with two passes 1.18 GB, 0.29 ms).
// Grid: one persistent CTA per SM, all resident (cooperative launch). CTAs take runs of tiles round robin,
// in ascending order. A tile begins at a multiple of 32 rows of the output, so that all stores are whole
// sectors except at the ends of a group.
// The shared memory of all SMs holds about 1700 tiles. A tile stays in its slot until the maxima of its
// columns over all tiles of the group are known. CTAs publish maxima in L2: atomic maxima, then a counter
// with release and acquire.
// No deadlock: tiles that wait for each other fill at most half of the slots of any CTA, and the tiles
// before them can complete, so every tile gets a slot. (RunScheduler: larger groups publish first and are
// read again, mostly from L2.)
// Mbarriers of a slot:
// full         TMA has written the tile
// amax_ready   the amax warps arrive: maxima of all columns are in shared memory, rows of other groups are 0
// scale_ready  a publisher and a subscriber arrive: maxima are published, multipliers are in shared memory
// empty        the encoder warps arrive: all values are in registers
// Deterministic: only maxima are reduced.
template <DType kFp8>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_column_tiles_kernel(const __grid_constant__ ColumnTilesJob job,
                                 const __grid_constant__ ColumnMaps maps) {
    extern __shared__ __align__(1024) uint8_t slots[];
    __shared__ Shared shared;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kSlots; ++s) {
            mbarrier_init(&shared.full[s], 1);
            mbarrier_init(&shared.amax_ready[s], kAmaxWarps);
            mbarrier_init(&shared.scale_ready[s], 2);
            mbarrier_init(&shared.empty[s], kUnits);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kFirstAmaxWarp)
        encoder_warp<kFp8>(job, shared, slots, warp);
    else if (warp < kFirstPublisher)
        amax_warp(shared, slots, warp - kFirstAmaxWarp);
    else if (warp < kFirstSubscriber)
        publisher_warp(job, shared, warp - kFirstPublisher);
    else if (warp < kProducer)
        subscriber_warp<kFp8>(job, shared, warp - kFirstSubscriber);
    else
        Producer(job, maps, shared, slots).run();
}

}  // namespace

std::size_t column_tiles_zeros(const TileShape& shape) {
    const int64_t items = shape.groups.num_groups * ceil_div(shape.cols, kTileColumns);
    return static_cast<std::size_t>(items) * sizeof(ColumnMaxima);
}

bool launch_quantize_column_tiles(const GroupColumns& args, const Launch& launch) {
    const TensorView& src = args.src;
    const TileShape& shape = args.shape;
    const RowView values = row_view(src);
    const int64_t blocks = ceil_div(shape.cols, kTileColumns);
    const int64_t most_runs =
        2 * (shape.capacity / kRows + 2 * shape.groups.num_groups) * ceil_div(blocks, kRun);
    if (values.dtype != DType::bf16 || !values.vector || src.numel() == 0 || most_runs > INT32_MAX / 2 ||
        src.dim(0) > INT32_MAX / 2)
        return false;
    const ColumnTilesJob job = {.src = values,
                                .dst = row_view(args.dst.data),
                                .groups = shape.groups,
                                .extent = shape.extent,
                                .column_blocks = static_cast<int>(blocks),
                                .scales = args.dst.scales.as<float>(),
                                .rule = args.rule,
                                .maxima = static_cast<ColumnMaxima*>(args.zeros)};
    const auto map = [&src](int rows) {
        return tensor_map(src.data, src.dtype, src.dim(0), src.cols(), rows);
    };
    const ColumnMaps maps = {map(kRows), map(kPiece)};
    constexpr const char* kWhat = "quantize_column_tiles";
    constexpr int kBytes = kSlots * kTileBytes;
    const auto kernel =
        of_fp8(args.dst.data.dtype, [&]<DType kFp8>() { return quantize_column_tiles_kernel<kFp8>; });
    cudaLaunchAttribute together{};  // all CTAs are resident, or the launch fails
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    launch_with(together, kernel, grid_for(most_runs, launch, 1), dim3(kThreads), kBytes, launch, kWhat, job,
                maps);
    return true;
}

}  // namespace fp8flow::hopper::quantize
