// SPDX-License-Identifier: MIT
// Quantises BF16 rows to transposed FP8 with one scale per column of a group, with one read: one CTA keeps a
// column block of a group in shared memory. small_groups.cu is for small groups, column_tiles.cu for few or
// very large ones. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/quantize/column_blocks.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/runtime/tensor_map.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kSlots = kBlockSlots, kTileBytes = kBlockTileBytes;
constexpr int kParts = 8;                                 // of a tile, each one unit x kPartRows rows
constexpr int kPiece = 16, kPieces = kPartRows / kPiece;  // rows of a column that a thread stores at once
// The smallest box of a tile that TMA loads.
constexpr int kQuarters = 4, kQuarterBytes = kTileBytes / kQuarters;
constexpr int kMaximaSlots = 16;  // column blocks with maxima in shared memory; more than kSlots

// Warps of a CTA, in this order: encoder warps, amax warps, the producer warp. An encoder warp transposes two
// parts of a tile. Sets of encoder warps alternate over the tiles.
constexpr int kEncoderSets = 2, kSetWarps = kParts / 2, kAmaxWarps = 8;
constexpr int kFirstAmaxWarp = kEncoderSets * kSetWarps, kProducer = kFirstAmaxWarp + kAmaxWarps,
              kThreads = 32 * (kProducer + 1);
// Threads of the named barrier of a slot: one encoder set and the amax warps arrive, the producer warp waits.
constexpr int kSlotThreads = 32 * (kSetWarps + kAmaxWarps + 1);
static_assert(kSlots < 16 && kEncoderSets <= kSlots - 2);

struct GroupColumnsJob {
    RowView src, dst;
    DeviceGroups groups;
    int64_t extent;  // without groups: rows with padding
    float* scales;   // [group, cols]
    QuantizeRule rule;
    uint32_t* claimed;  // column blocks claimed by CTAs; 0 between launches
};
// Tensor maps with boxes of 16, 32 and 64 columns: half a tile, and a quarter.
struct ColumnBlockMaps {
    CUtensorMap half[3], quarter[3];
};

struct alignas(16) Task {
    int item;             // counts the CTA's column blocks; negative: no more
    int col, row, group;  // first column; first row, counted in the output
    int begin, valid_end,
        end;  // in the tile: first row of the group, end of its valid rows, end of its padding
    int shift;
    bool takes_amax, encodes, first, last, stores_scales, empty;
};

struct GroupShared {
    Mbarrier full[kSlots], maxima_ready[kMaximaSlots];
    Task tasks[kSlots];
    uint32_t maxima[kMaximaSlots][kParts][kUnit / 2];  // two columns each
};

// Signals that the calling warp has read the tile in the slot.
__device__ __forceinline__ void release(int slot) {
    __syncwarp();
    named_barrier_arrive(slot + 1, kSlotThreads);
}

// The producer warp claims column blocks and loads their rows.
class GroupProducer {
public:
    __device__ GroupProducer(const GroupColumnsJob& job, const ColumnBlockMaps& maps, GroupShared& shared,
                             uint8_t* slots)
        : job_(job),
          maps_(maps),
          shared_(shared),
          slots_(slots),
          lane_(static_cast<int>(threadIdx.x) % 32),
          src_base_(static_cast<int>(job.src.base())),
          dst_base_(static_cast<int>(job.dst.base())) {}

    __device__ void run() {
        ColumnBlockScheduler scheduler(job_.groups, job_.extent, dst_base_, job_.src.cols);
        const int ctas = static_cast<int>(gridDim.x), blocks = scheduler.blocks();
        for (int number = static_cast<int>(blockIdx.x), item = 0; number < blocks; ++item) {
            load(scheduler.find(number), item);
            const uint32_t claimed = __shfl_sync(kFullMask, claimed_, 0);
            // there are as many claims as column blocks; the last claim resets the counter
            if (lane_ == 0 && claimed == static_cast<uint32_t>(blocks) - 1) *job_.claimed = 0;
            number = static_cast<int>(claimed) + ctas;
        }
        end();
    }

private:
    // A column block that does not fit is read twice: the tiles of its last rows stay, and the others are
    // loaded again, in descending order, mostly from L2. The next column block is claimed with the last load,
    // not earlier, so that SMs end together and read neighbouring column blocks at about the same time.
    __device__ void load(const ColumnBlock& block, int item) {
        const int held = block.tiles <= kSlots ? block.tiles : kSlots - 2, again = block.tiles - held,
                  loads = block.tiles + again;
        for (int i = 0; i < loads; ++i) {
            const bool first_read = i < block.tiles;
            if (lane_ == 0 && i == loads - 1) claimed_ = atomicAdd(job_.claimed, 1u);
            Task task = {};
            task.item = item;
            task.takes_amax = first_read;
            task.encodes = i >= again;
            task.first = i == 0;
            task.last = i == block.tiles - 1;
            task.stores_scales = i == again;
            load_tile(block, first_read ? i : loads - 1 - i, task);
        }
    }
    // At most two TMA loads per tile, because one thread issues them one after the other. Rows of
    // neighbouring groups in the box are ignored.
    __device__ void load_tile(const ColumnBlock& block, int tile, Task task) {
        const int rows = block_tile_rows(block.shift), quarter_rows = rows / kQuarters,
                  first = tile * rows - block.lead;
        task.col = block.col;
        task.row = dst_base_ + block.offset + first;
        task.group = block.group;
        task.begin = max(0, -first);
        task.valid_end = max(task.begin, min(rows, block.count - first));
        task.end = max(task.begin, min(rows, block.rows - first));
        task.shift = block.shift;
        task.empty = block.count == 0;
        wait_slot();
        if (lane_ == 0) {
            const int quarters = task.valid_end > task.begin ? (task.valid_end - 1) / quarter_rows + 1 : 0;
            const int row = src_base_ + block.offset + first, map = block.shift - kNarrowestShift;
            Mbarrier* full = &shared_.full[slot_];
            uint8_t* to = slots_ + slot_ * kTileBytes;
            shared_.tasks[slot_] = task;
            mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(quarters * kQuarterBytes));
            if (quarters >= 2) tma_load(&maps_.half[map], full, to, task.col, row);
            const int second = quarters / 2 * 2;  // quarters of the first load
            to += second % kQuarters * kQuarterBytes;
            if (quarters % 2 != 0)
                tma_load(&maps_.quarter[map], full, to, task.col, row + second * quarter_rows);
            else if (quarters == kQuarters)
                tma_load(&maps_.half[map], full, to + 2 * kQuarterBytes, task.col, row + 2 * quarter_rows);
        }
        __syncwarp();
        advance();
    }
    __device__ void end() {
        const int tiles = loaded_;
        for (int i = 0; i < kEncoderSets; ++i) {  // one for each set of encoder warps
            wait_slot();
            if (lane_ == 0) {
                shared_.tasks[slot_].item = -1;
                mbarrier_arrive(&shared_.full[slot_]);
            }
            __syncwarp();
            advance();
        }
        for (int i = max(0, loaded_ - kSlots); i < tiles; ++i)
            named_barrier_sync(i % kSlots + 1, kSlotThreads);
    }
    __device__ void wait_slot() const {
        if (loaded_ >= kSlots) named_barrier_sync(slot_ + 1, kSlotThreads);
    }
    __device__ void advance() {
        ++loaded_;
        if (++slot_ == kSlots) slot_ = 0;
    }

    const GroupColumnsJob& job_;
    const ColumnBlockMaps& maps_;
    GroupShared& shared_;
    uint8_t* const slots_;
    const int lane_, src_base_, dst_base_;
    int slot_ = 0, loaded_ = 0;
    uint32_t claimed_ = 0;  // of lane 0
};

// Amax warp: finds the maxima of some parts of every tile, in registers until the last tile of the column
// block.
__device__ __forceinline__ void amax_warp(GroupShared& shared, const uint8_t* slots, int warp) {
    constexpr int kOwn = kParts / kAmaxWarps, kSteps = kPartRows / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t largest[kOwn][4] = {};
    for (SlotCursor<kSlots, 1> cursor(0);; cursor.advance()) {
        const Task task = cursor.wait_full(shared);
        if (task.item < 0) return;
        if (!task.takes_amax) {
            release(cursor.index);
            continue;
        }
        const uint8_t* tile = slots + cursor.index * kTileBytes;
        const int step = 32 << (4 + task.shift);
        const bool whole = task.begin == 0 && task.valid_end == block_tile_rows(task.shift);
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const int part = warp * kOwn + own, unit = part & ((1 << task.shift) - 1),
                      row = (part >> task.shift) * kPartRows + lane;
            const uint8_t* column = tile + unit_offset(row, unit, task.shift);
            if (task.first) {
#pragma unroll
                for (uint32_t& word : largest[own]) word = 0;
            }
            uint4 words[kSteps] = {};
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
                if (whole || (row + 32 * i >= task.begin && row + 32 * i < task.valid_end))
                    words[i] = *reinterpret_cast<const uint4*>(column + i * step);
#pragma unroll
            for (int i = 0; i < kSteps; ++i) update_maxima(largest[own], words[i]);
        }
        release(cursor.index);
        if (!task.last) continue;
        const int at = task.item % kMaximaSlots;
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const uint32_t pair = reduce_maxima(largest[own], lane);
            if (holds_word(lane)) shared.maxima[at][warp * kOwn + own][word_of_lane(lane)] = pair;
        }
        mbarrier_arrive(&shared.maxima_ready[at]);  // each lane, for its own stores
    }
}

// Encoder warp: transposes two parts of a tile. A thread has 16 rows of four columns, so 8 threads store a
// line.
template <DType kFp8>
__device__ __forceinline__ void encoder_warp(const GroupColumnsJob& job, GroupShared& shared,
                                             const uint8_t* slots, int warp) {
    constexpr int kOwn = 4;  // columns of a thread
    const int lane = static_cast<int>(threadIdx.x) % 32, piece = lane % kPieces, half = lane / kPieces % 2,
              part = warp % kSetWarps * 2 + lane / (2 * kPieces);
    const int64_t stride = job.dst.cols;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.dst.data) | static_cast<uintptr_t>(stride)) % kPiece == 0;
    const PieceEncoder encoder(piece);
    int current = -1, col = 0, first_row = 0, below = 0;
    int offsets[kPieces];  // of row i ^ piece
    float multipliers[kOwn];
    for (SlotCursor<kSlots, kEncoderSets> cursor(warp / kSetWarps);; cursor.advance()) {
        const Task task = cursor.wait_full(shared);
        if (task.item < 0) return;
        if (!task.encodes) {
            release(cursor.index);
            continue;
        }
        if (task.item != current) {
            current = task.item;
            const int unit = part & ((1 << task.shift) - 1);
            col = task.col + unit * kUnit + half * kOwn;
            first_row = (part >> task.shift) * kPartRows + piece * kPiece;
            below = kPieces << (4 + task.shift);
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
                offsets[i] = unit_offset(first_row + (i ^ piece), unit, task.shift) + half * kOwn * 2;
            const int at = task.item % kMaximaSlots;
            mbarrier_wait(&shared.maxima_ready[at], static_cast<uint32_t>(task.item / kMaximaSlots) & 1);
            uint2 pairs = {0, 0};
            for (int p = unit; p < kParts; p += 1 << task.shift) {
                const uint2 other = *reinterpret_cast<const uint2*>(&shared.maxima[at][p][half * kOwn / 2]);
                pairs.x = max_bf16x2(pairs.x, other.x);
                pairs.y = max_bf16x2(pairs.y, other.y);
            }
            // each of the eight threads of these columns computes one scale
            const uint32_t pair = (piece & 2) != 0 ? pairs.y : pairs.x;
            const BlockScale scale =
                task.empty ? BlockScale{0.0f, 0.0f, 0}
                           : block_scale((piece & 1) != 0 ? high_magnitude(pair) : low_magnitude(pair), kFp8,
                                         false, job.rule);
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                multipliers[i] = __shfl_sync(kFullMask, scale.multiplier, lane / kPieces * kPieces + i);
            if (task.stores_scales && part >> task.shift == 0 && piece < kOwn && col < job.src.cols)
                job.scales[static_cast<int64_t>(task.group) * job.src.cols + col + piece] = scale.dequant;
        }
        const uint8_t* tile = slots + cursor.index * kTileBytes;
        uint32_t words[2][kPiece];
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            const uint2 both =
                *reinterpret_cast<const uint2*>(tile + offsets[i % kPieces] + i / kPieces * below);
            words[0][i] = both.x;
            words[1][i] = both.y;
        }
        release(cursor.index);
        const int begin = task.begin - first_row, valid_end = task.valid_end - first_row,
                  end = task.end - first_row;
        if (task.valid_end < task.end) {
#pragma unroll
            for (int i = 0; i < kPiece; ++i)
                if ((i % kPieces ^ piece) + i / kPieces * kPieces >= valid_end) words[0][i] = words[1][i] = 0;
        }
        if (col >= job.src.cols) continue;
        uint8_t* out = static_cast<uint8_t*>(job.dst.data) + col * stride + task.row + first_row;
#pragma unroll
        for (int i = 0; i < 2; ++i, out += 2 * stride) {
            store_piece(out, encoder.encode<kFp8, false>(words[i], multipliers[2 * i]), begin, end, aligned);
            store_piece(out + stride, encoder.encode<kFp8, true>(words[i], multipliers[2 * i + 1]), begin,
                        end, aligned);
        }
    }
}

// BF16 rows -> transposed FP8 [columns, rows], one FP32 scale per column of a group.
// Lower bound: reads 2 bytes and writes 1 byte per value: 706 MB, 0.172 ms at 32768 x 7168 and 4.1 TB/s
// (with two passes 1.18 GB, 0.29 ms).
// Grid: one persistent CTA per SM. It claims one column block (64, 32 or 16 columns of a group) after the
// other. The rows of a column block are loaded into a ring of 14 slots of 16 KB and stay there until the
// maxima of its columns are known. Rows of the next column block are loaded into slots that are free again.
// No CTA waits for another.
// Barriers:
// full[slot]          mbarrier: TMA has written the tile
// maxima_ready[item]  mbarrier, one per column block: each lane of the amax warps arrives after its stores.
//                     Used again after kMaximaSlots column blocks; at most kSlots are in shared memory.
// slot + 1            named barrier: the amax warps and one encoder set have read the tile; the producer
//                     warp waits for it and refills the slot
// Deterministic: only maxima are reduced.
// Measured, 32768 x 7168, ragged groups: 181.6 us, 95 % of the bound.
template <DType kFp8>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_group_columns_kernel(const __grid_constant__ GroupColumnsJob job,
                                  const __grid_constant__ ColumnBlockMaps maps) {
    extern __shared__ __align__(1024) uint8_t slots[];
    __shared__ GroupShared shared;
    if (threadIdx.x == 0) {
        for (Mbarrier& barrier : shared.full) mbarrier_init(&barrier, 1);
        for (Mbarrier& barrier : shared.maxima_ready) mbarrier_init(&barrier, 32 * kAmaxWarps);
        fence_mbarrier_init();
    }
    __syncthreads();
    pdl_wait();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kFirstAmaxWarp)
        encoder_warp<kFp8>(job, shared, slots, warp);
    else if (warp < kProducer)
        amax_warp(shared, slots, warp - kFirstAmaxWarp);
    else
        GroupProducer(job, maps, shared, slots).run();
}

ColumnBlockMaps block_maps(const TensorView& src) {
    ColumnBlockMaps maps;
    for (int shift = kNarrowestShift; shift <= kWidestShift; ++shift) {
        const int rows = block_tile_rows(shift), row_bytes = 2 * block_columns(shift),
                  i = shift - kNarrowestShift;
        maps.half[i] = tensor_map(src.data, src.dtype, src.dim(0), src.cols(), rows / 2, row_bytes);
        maps.quarter[i] =
            tensor_map(src.data, src.dtype, src.dim(0), src.cols(), rows / kQuarters, row_bytes);
    }
    return maps;
}

}  // namespace

bool launch_quantize_group_columns(const GroupColumns& args, const Launch& launch) {
    const TensorView& src = args.src;
    const TileShape& shape = args.shape;
    const RowView values = row_view(src);
    const int64_t blocks = shape.groups.num_groups * ceil_div(shape.cols, block_columns(kWidestShift)),
                  mean_rows = shape.capacity / std::max<int64_t>(1, shape.groups.num_groups);
    // Too few column blocks for all SMs, or groups that do not fit with 32 columns: column blocks of 16
    // columns are slower than column_tiles.cu.
    constexpr int64_t kMostRows = int64_t{kSlots} * block_tile_rows(kWidestShift - 1);
    if (blocks < int64_t{kNumSms} * 3 / 2 || mean_rows > kMostRows)
        return launch_quantize_column_tiles(args, launch);
    if (launch_quantize_small_groups(args, launch)) return true;
    if (values.dtype != DType::bf16 || !values.vector || src.numel() == 0 || blocks > INT32_MAX / 16 ||
        src.dim(0) > INT32_MAX / 2 || shape.capacity > INT32_MAX / 2)
        return false;
    const GroupColumnsJob job = {.src = values,
                                 .dst = row_view(args.dst.data),
                                 .groups = shape.groups,
                                 .extent = shape.extent,
                                 .scales = args.dst.scales.as<float>(),
                                 .rule = args.rule,
                                 .claimed = static_cast<uint32_t*>(args.zeros)};
    constexpr const char* kWhat = "quantize_group_columns";
    constexpr int kBytes = kSlots * kTileBytes;
    const auto kernel =
        of_fp8(args.dst.data.dtype, [&]<DType kFp8>() { return quantize_group_columns_kernel<kFp8>; });
    launch_pdl(kernel, grid_for(blocks, launch, 1), dim3(kThreads), kBytes, launch, kWhat, job,
               block_maps(src));
    return true;
}

}  // namespace fp8flow::hopper::quantize
