// SPDX-License-Identifier: MIT
// Transposed FP8 with one scale for a column of a group from one read, for few or large groups: tiles stay on
// chip until the maxima of their columns are known, wherever the other tiles are. Many groups that fit into a
// CTA: group_columns.cu. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/quantize/column_tiles.h"
#include "kernels/hopper/quantize/tiles.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/runtime/tensor_map.h"

#include <cuda/atomic>

namespace fp8flow::hopper {

namespace {

constexpr int kSlots = 13;    // tiles on chip: 208 KB
constexpr int kTogether = 2;  // tiles of a run that are asked for at once

// Warps of a CTA, in this order; the loader is the last.
constexpr int kEncoderSets = 1, kLookers = kUnits, kSenders = 4, kReceivers = 8;
constexpr int kEncoders = kEncoderSets * kUnits;
constexpr int kFirstLooker = kEncoders, kFirstSender = kFirstLooker + kLookers,
              kFirstReceiver = kFirstSender + kSenders, kLoader = kFirstReceiver + kReceivers;
constexpr int kThreads = 32 * (kLoader + 1);
// Warps that take a CTA's tiles in turn.
constexpr int kMostInTurn = std::max({kSenders, kReceivers, kEncoderSets});
static_assert(kMostInTurn <= kSlots && kPairs == 32);

using Counter = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

// 64 columns of a group: maxima as fp32 bits, of even and of odd columns; how many tiles have sent theirs,
// and how many have read all. Zero between launches: the last reader sees to it.
struct alignas(32) ColumnMaxima {
    uint32_t even[kPairs], odd[kPairs];
    uint32_t arrived, left;
};
struct ColumnTilesJob {
    RowView src, dst;
    DeviceGroups groups;
    int64_t extent;  // without groups: rows and pads
    int panels;      // tiles side by side
    float* scales;   // [group, cols]
    QuantizeRule rule;
    ColumnMaxima* maxima;  // [group, panel]
};
struct ColumnMaps {
    CUtensorMap tile, piece;
};

struct Shared {
    Mbarrier full[kSlots], seen[kSlots], known[kSlots], free[kSlots];
    TileTask tasks[kSlots];
    uint32_t maxima[kSlots][kPairs];  // of two columns each
    float2 multipliers[kSlots][kPairs];
};

// The tiles of a warp that takes every kWarps-th of its CTA's.
template <int kWarps> using TileTurn = RingTurn<kSlots, kWarps>;

// One warp asks for the rows of the CTA's runs: a whole tile at once, or 16 rows a lane.
class Loader {
public:
    __device__ Loader(const ColumnTilesJob& job, const ColumnMaps& maps, Shared& shared, uint8_t* slots)
        : job_(job),
          maps_(maps),
          shared_(shared),
          slots_(slots),
          lane_(static_cast<int>(threadIdx.x) % 32),
          src_base_(static_cast<int>(job.src.base())),
          dst_base_(static_cast<int>(job.dst.base())) {}

    __device__ void run() {
        // half of what is on chip: a run holds up the tiles behind it
        const int ctas = static_cast<int>(gridDim.x), most_tiles = ctas * kSlots / (2 * kRun);
        RunFinder finder(job_.groups, job_.extent, dst_base_, job_.panels, most_tiles);
        TileTask task = {};
        for (int run = static_cast<int>(blockIdx.x); finder.find(run, task); run += ctas) {
            const int tiles = min(kRun, job_.panels - task.col / kTileColumns);
            for (int i = 0; i < tiles; i += kTogether) request(task, i, min(kTogether, tiles - i));
        }
        task = {};
        for (int i = 0; i < kMostInTurn; ++i) request(task, 0, 1);  // every warp finds an end
    }

private:
    // Tiles [first, first + tiles) of a run, at most kTogether: 8 lanes each.
    __device__ void request(TileTask task, int first, int tiles) {
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
            if (round > 0) mbarrier_wait(&shared_.free[slot], static_cast<uint32_t>(round - 1) & 1);
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
    int next_ = 0, round_ = 0;  // slot; how often all have been used
};

// A warp sees the columns of one unit. Rows that are not the group's become zeros.
__device__ __forceinline__ void look_at_tiles(Shared& shared, uint8_t* slots, int unit) {
    constexpr int kSteps = kRows / 32, kStep = 32 * kRowBytes;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (TileTurn<1> turn(0);; turn.advance()) {
        const TileTask task = turn.landed(shared);
        if (task.tiles == 0) return;
        uint8_t* column = slots + turn.index * kTileBytes + unit_place(lane, unit, kWidestTile);
        uint32_t largest[4] = {};
        if (task.begin == 0 && task.valid_end == kRows) {
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
                take_maxima(largest, *reinterpret_cast<const uint4*>(column + i * kStep));
        } else {
            for (int i = 0; i < kSteps; ++i) {
                uint4& words = *reinterpret_cast<uint4*>(column + i * kStep);
                const int here = i * 32 + lane;
                if (here >= task.begin && here < task.valid_end)
                    take_maxima(largest, words);
                else
                    words = uint4{0, 0, 0, 0};
            }
            fence_async_shared();  // TMA fills the slot again
        }
        const uint32_t pair = maxima_over_lanes(largest, lane);
        if (has_word(lane)) shared.maxima[turn.index][unit * kUnitPairs + word_of_lane(lane)] = pair;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.seen[turn.index]);
    }
}

// A warp sends a tile's maxima, of two columns a lane. It waits for its own CTA only.
__device__ __forceinline__ void send_maxima(const ColumnTilesJob& job, Shared& shared, int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (TileTurn<kSenders> turn(warp);; turn.advance()) {
        const TileTask task = turn.landed(shared);
        if (task.tiles == 0) return;
        mbarrier_wait(&shared.seen[turn.index], turn.parity);
        if (task.sends) {
            ColumnMaxima& maxima = job.maxima[task.item];
            const uint32_t pair = shared.maxima[turn.index][lane];
            atomicMax(&maxima.even[lane], low_magnitude(pair));
            atomicMax(&maxima.odd[lane], high_magnitude(pair));
            __syncwarp();
            if (lane == 0) Counter(maxima.arrived).fetch_add(1, cuda::memory_order_release);
        }
        if (lane == 0) mbarrier_arrive(&shared.known[turn.index]);
    }
}

// A warp waits until all tiles have sent theirs, and makes multipliers of two columns a lane.
template <DType kCodes>
__device__ __forceinline__ void receive_maxima(const ColumnTilesJob& job, Shared& shared, int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (TileTurn<kReceivers> turn(warp);; turn.advance()) {
        const TileTask task = turn.landed(shared);
        if (task.tiles == 0) return;
        if (!task.encodes) {
            if (lane == 0) mbarrier_arrive(&shared.known[turn.index]);
            continue;
        }
        ColumnMaxima& maxima = job.maxima[task.item];
        const auto tiles = static_cast<uint32_t>(task.tiles);
        while (Counter(maxima.arrived).load(cuda::memory_order_acquire) != tiles) {
        }
        const uint32_t even = __ldcg(&maxima.even[lane]), odd = __ldcg(&maxima.odd[lane]);
        const int group = task.item / job.panels, col = task.col + 2 * lane;
        BlockScale low = {0.0f, 0.0f, 0}, high = {0.0f, 0.0f, 0};
        if (job.groups.count(group) > 0) {
            low = block_scale(even, kCodes, false, job.rule);
            high = block_scale(odd, kCodes, false, job.rule);
        }
        shared.multipliers[turn.index][lane] = float2{low.multiplier, high.multiplier};
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.known[turn.index]);
        if (task.stores_scales && col < job.src.cols) {
            float* scales = job.scales + static_cast<int64_t>(group) * job.src.cols + col;
            scales[0] = low.dequant;
            scales[1] = high.dequant;
        }
        uint32_t left = 0;
        if (lane == 0) left = Counter(maxima.left).fetch_add(1, cuda::memory_order_acq_rel) + 1;
        if (__shfl_sync(kFullMask, left, 0) != tiles) continue;
        maxima.even[lane] = maxima.odd[lane] = 0;
        if (lane == 0) maxima.arrived = maxima.left = 0;
    }
}

// A warp turns 8 columns, a thread 16 rows of two, so that 8 threads store a line.
template <DType kCodes>
__device__ __forceinline__ void encode_tiles(const ColumnTilesJob& job, Shared& shared, const uint8_t* slots,
                                             int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32, unit = warp % kUnits, word = lane / kPieces,
              piece = lane % kPieces;
    const int64_t stride = job.dst.cols;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.dst.data) | static_cast<uintptr_t>(stride)) % kPiece == 0;
    int places[kPieces];  // of row i ^ piece
    const PieceOrder order(piece);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
        places[i] = unit_place(piece * kPiece + (i ^ piece), unit, kWidestTile) + word * 4;
    for (TileTurn<kEncoderSets> turn(warp / kUnits);; turn.advance()) {
        const TileTask task = turn.landed(shared);
        if (task.tiles == 0) return;
        mbarrier_wait(&shared.known[turn.index], turn.parity);
        const uint8_t* tile = slots + turn.index * kTileBytes;
        uint32_t words[kPiece];
#pragma unroll
        for (int i = 0; i < kPiece; ++i)
            words[i] = *reinterpret_cast<const uint32_t*>(tile + places[i % kPieces] +
                                                          i / kPieces * kPieces * kRowBytes);
        const float2 m = shared.multipliers[turn.index][unit * kUnitPairs + word];
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.free[turn.index]);
        const int col = task.col + unit * kUnit + 2 * word;
        if (!task.encodes || col >= job.src.cols) continue;
        uint8_t* out = static_cast<uint8_t*>(job.dst.data) + col * stride + task.row + piece * kPiece;
        const int begin = task.begin - piece * kPiece, end = task.end - piece * kPiece;
        store_piece(out, order.encode<kCodes, false>(words, m.x), begin, end, aligned);
        store_piece(out + stride, order.encode<kCodes, true>(words, m.y), begin, end, aligned);
    }
}

// Moves 2 bytes a value in and 1 out: 706 MB, 0.172 ms at 32768 x 7168 and 4.1 TB/s (two passes: 1.18 GB,
// 0.29 ms). The shared memory of all SMs holds some 1700 tiles, and a tile stays there until the
// maxima of its columns are known: those of all tiles of a group's 64 columns, which CTAs send each other
// through L2 (atomic maxima, then a count: release; acquire). Runs of tiles are dealt to the CTAs in turn,
// and each works on its own in ascending order. A group's tiles fill at most half of the slots of any CTA
// (RunFinder: larger groups send first and are read again, mostly from L2), those before them can leave; so a
// tile always finds a place: all CTAs are there at once (a cooperative launch). Tiles are counted from
// multiples of 32 rows of the output, so that all but a group's ends are whole sectors. A slot passes from
// the loader (full: rows landed) to the lookers (seen: maxima of all columns, no rows of others), to a sender
// and a receiver (known: sent, and multipliers are there), to the encoders (free: all words are in
// registers). Only maxima are reduced: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_column_tiles_kernel(const __grid_constant__ ColumnTilesJob job,
                                 const __grid_constant__ ColumnMaps maps) {
    extern __shared__ __align__(1024) uint8_t slots[];
    __shared__ Shared shared;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kSlots; ++s) {
            mbarrier_init(&shared.full[s], 1);
            mbarrier_init(&shared.seen[s], kLookers);
            mbarrier_init(&shared.known[s], 2);
            mbarrier_init(&shared.free[s], kUnits);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kFirstLooker)
        encode_tiles<kCodes>(job, shared, slots, warp);
    else if (warp < kFirstSender)
        look_at_tiles(shared, slots, warp - kFirstLooker);
    else if (warp < kFirstReceiver)
        send_maxima(job, shared, warp - kFirstSender);
    else if (warp < kLoader)
        receive_maxima<kCodes>(job, shared, warp - kFirstReceiver);
    else
        Loader(job, maps, shared, slots).run();
}

template <DType kCodes>
void launch(const ColumnTilesJob& job, const ColumnMaps& maps, unsigned ctas, const Launch& launch) {
    constexpr const char* kWhat = "quantize_column_tiles";
    constexpr int kBytes = kSlots * kTileBytes;
    const auto kernel = quantize_column_tiles_kernel<kCodes>;
    allow_shared_memory(kernel, kBytes, kWhat);
    cudaLaunchAttribute together{};  // or not at all
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    launch_with(together, kernel, ctas, dim3(kThreads), kBytes, launch, kWhat, job, maps);
}

}  // namespace

std::size_t column_tiles_zeros(const TileShape& shape) {
    const int64_t items = shape.groups.num_groups * ceil_div(shape.cols, kTileColumns);
    return static_cast<std::size_t>(items) * sizeof(ColumnMaxima);
}

bool launch_quantize_column_tiles(const GroupColumns& args, const Launch& launch_args) {
    const TensorView& src = args.src;
    const TileShape& shape = args.shape;
    const RowView values = row_view(src);
    const int64_t panels = ceil_div(shape.cols, kTileColumns);
    const int64_t most_runs =
        2 * (shape.capacity / kRows + 2 * shape.groups.num_groups) * ceil_div(panels, kRun);
    if (values.dtype != DType::bf16 || !values.vector || src.numel() == 0 || most_runs > INT32_MAX / 2 ||
        src.dim(0) > INT32_MAX / 2)
        return false;
    const ColumnTilesJob job = {.src = values,
                                .dst = row_view(args.dst.data),
                                .groups = shape.groups,
                                .extent = shape.extent,
                                .panels = static_cast<int>(panels),
                                .scales = args.dst.scales.as<float>(),
                                .rule = args.rule,
                                .maxima = static_cast<ColumnMaxima*>(args.zeros)};
    const auto map = [&src](int rows) {
        return tensor_map(src.data, src.dtype, src.dim(0), src.cols(), rows);
    };
    const ColumnMaps maps = {map(kRows), map(kPiece)};
    const unsigned ctas = grid_for(most_runs, launch_args, 1);
    if (args.dst.data.dtype == DType::e5m2)
        launch<DType::e5m2>(job, maps, ctas, launch_args);
    else
        launch<DType::e4m3>(job, maps, ctas, launch_args);
    return true;
}

}  // namespace fp8flow::hopper
