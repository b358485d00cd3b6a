// SPDX-License-Identifier: MIT
// Transposed FP8 with one scale for a column of a group from one read: a panel of a group stays on chip, in
// one CTA. Small groups: group_strips.cu; few or very large ones: column_tiles.cu. Contract:
// kernels/ops/quantize.h.
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/quantize/column_panels.h"
#include "kernels/hopper/quantize/tiles.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/runtime/tensor_map.h"

namespace fp8flow::hopper {

namespace {

constexpr int kSlots = kPanelSlots, kTileBytes = kPanelTileBytes;
constexpr int kParts = 8;  // of a tile: units side by side times kPartRows rows below each other
constexpr int kPiece = 16, kPieces = kPartRows / kPiece;  // rows of a column that a thread stores at once
// Of a tile: what is copied at the least.
constexpr int kQuarters = 4, kQuarterBytes = kTileBytes / kQuarters;
constexpr int kKnown = 16;  // panels whose maxima are kept: more than there can be on chip

// Warps of a CTA, in this order; the loader is the last. A warp turns two parts of a tile, sets of warps take
// tiles in turn.
constexpr int kSets = 2, kSetWarps = kParts / 2, kLookers = 8;
constexpr int kFirstLooker = kSets * kSetWarps, kLoader = kFirstLooker + kLookers,
              kThreads = 32 * (kLoader + 1);
// That meet when a tile may be replaced.
constexpr int kSlotThreads = 32 * (kSetWarps + kLookers + 1);
static_assert(kSlots < 16 && kSets <= kSlots - 2);

struct PanelJob {
    RowView src, dst;
    DeviceGroups groups;
    int64_t extent;  // without groups: rows and pads
    float* scales;   // [group, cols]
    QuantizeRule rule;
    uint32_t* drawn;  // panels that CTAs have drawn; 0 between launches
};
// Boxes of 16, 32 and 64 columns: half a tile, and a quarter.
struct PanelMaps {
    CUtensorMap half[3], quarter[3];
};

struct alignas(16) Task {
    int item;                   // counts the CTA's panels; negative: none any more
    int col, row, group;        // the tile's first ones; the row is one of the output
    int begin, valid_end, end;  // of its rows: the first of the group, behind its valid ones, behind its pads
    int shift;
    bool looks, encodes, first, last, stores_scales, empty;
};

struct Shared {
    Mbarrier full[kSlots], known[kKnown];
    Task tasks[kSlots];
    uint32_t maxima[kKnown][kParts][kUnit / 2];  // of two columns each
};

// A warp has read the tile in a slot.
__device__ __forceinline__ void release(int slot) {
    __syncwarp();
    named_barrier_arrive(slot + 1, kSlotThreads);
}

// One warp draws panels and asks for their rows.
class Loader {
public:
    __device__ Loader(const PanelJob& job, const PanelMaps& maps, Shared& shared, uint8_t* slots)
        : job_(job),
          maps_(maps),
          shared_(shared),
          slots_(slots),
          lane_(static_cast<int>(threadIdx.x) % 32),
          src_base_(static_cast<int>(job.src.base())),
          dst_base_(static_cast<int>(job.dst.base())) {}

    __device__ void run() {
        PanelFinder finder(job_.groups, job_.extent, dst_base_, job_.src.cols);
        const int ctas = static_cast<int>(gridDim.x), panels = finder.panels();
        for (int number = static_cast<int>(blockIdx.x), item = 0; number < panels; ++item) {
            load(finder.find(number), item);
            const uint32_t drawn = __shfl_sync(kFullMask, drawn_, 0);
            // as many draws as panels
            if (lane_ == 0 && drawn == static_cast<uint32_t>(panels) - 1) *job_.drawn = 0;
            number = static_cast<int>(drawn) + ctas;
        }
        end();
    }

private:
    // A panel that does not fit is read twice: tiles of the last rows stay, the others come again, the last
    // of them first, mostly from L2. The next panel is drawn with the last request, no earlier:
    // SMs then end together, and read neighbouring panels at about the same time.
    __device__ void load(const Panel& panel, int item) {
        const int held = panel.tiles <= kSlots ? panel.tiles : kSlots - 2, again = panel.tiles - held,
                  requests = panel.tiles + again;
        for (int i = 0; i < requests; ++i) {
            const bool looks = i < panel.tiles;
            if (lane_ == 0 && i == requests - 1) drawn_ = atomicAdd(job_.drawn, 1u);
            Task task = {};
            task.item = item;
            task.looks = looks;
            task.encodes = i >= again;
            task.first = i == 0;
            task.last = i == panel.tiles - 1;
            task.stores_scales = i == again;
            request(panel, looks ? i : requests - 1 - i, task);
        }
    }
    // At most two copies, for they are issued one after the other: rows of the groups beside this one come
    // along, and are not looked at.
    __device__ void request(const Panel& panel, int tile, Task task) {
        const int rows = panel_tile_rows(panel.shift), quarter_rows = rows / kQuarters,
                  first = tile * rows - panel.lead;
        task.col = panel.col;
        task.row = dst_base_ + panel.offset + first;
        task.group = panel.group;
        task.begin = max(0, -first);
        task.valid_end = max(task.begin, min(rows, panel.count - first));
        task.end = max(task.begin, min(rows, panel.rows - first));
        task.shift = panel.shift;
        task.empty = panel.count == 0;
        await_slot();
        if (lane_ == 0) {
            const int quarters = task.valid_end > task.begin ? (task.valid_end - 1) / quarter_rows + 1 : 0;
            const int row = src_base_ + panel.offset + first, map = panel.shift - kNarrowestTile;
            Mbarrier* full = &shared_.full[slot_];
            uint8_t* to = slots_ + slot_ * kTileBytes;
            shared_.tasks[slot_] = task;
            mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(quarters * kQuarterBytes));
            if (quarters >= 2) tma_load(&maps_.half[map], full, to, task.col, row);
            const int second = quarters / 2 * 2;  // quarters that come first
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
        const int tiles = requested_;
        for (int i = 0; i < kSets; ++i) {  // every warp finds an end
            await_slot();
            if (lane_ == 0) {
                shared_.tasks[slot_].item = -1;
                mbarrier_arrive(&shared_.full[slot_]);
            }
            __syncwarp();
            advance();
        }
        for (int i = max(0, requested_ - kSlots); i < tiles; ++i)
            named_barrier_sync(i % kSlots + 1, kSlotThreads);
    }
    __device__ void await_slot() const {
        if (requested_ >= kSlots) named_barrier_sync(slot_ + 1, kSlotThreads);
    }
    __device__ void advance() {
        ++requested_;
        if (++slot_ == kSlots) slot_ = 0;
    }

    const PanelJob& job_;
    const PanelMaps& maps_;
    Shared& shared_;
    uint8_t* const slots_;
    const int lane_, src_base_, dst_base_;
    int slot_ = 0, requested_ = 0;
    uint32_t drawn_ = 0;  // lane 0's
};

// A warp sees some parts of every tile, and keeps their maxima up to the panel's last.
__device__ __forceinline__ void look_at_tiles(Shared& shared, const uint8_t* slots, int warp) {
    constexpr int kOwn = kParts / kLookers, kSteps = kPartRows / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t largest[kOwn][4] = {};
    for (RingTurn<kSlots, 1> turn(0);; turn.advance()) {
        const Task task = turn.landed(shared);
        if (task.item < 0) return;
        if (!task.looks) {
            release(turn.index);
            continue;
        }
        const uint8_t* tile = slots + turn.index * kTileBytes;
        const int step = 32 << (4 + task.shift);
        const bool whole = task.begin == 0 && task.valid_end == panel_tile_rows(task.shift);
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const int part = warp * kOwn + own, unit = part & ((1 << task.shift) - 1),
                      row = (part >> task.shift) * kPartRows + lane;
            const uint8_t* column = tile + unit_place(row, unit, task.shift);
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
            for (int i = 0; i < kSteps; ++i) take_maxima(largest[own], words[i]);
        }
        release(turn.index);
        if (!task.last) continue;
        const int known = task.item % kKnown;
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const uint32_t pair = maxima_over_lanes(largest[own], lane);
            if (has_word(lane)) shared.maxima[known][warp * kOwn + own][word_of_lane(lane)] = pair;
        }
        mbarrier_arrive(&shared.known[known]);  // each lane, for its own stores
    }
}

// A warp turns two parts of a tile, a thread 16 rows of four columns, so that 8 threads store a line.
template <DType kCodes>
__device__ __forceinline__ void encode_tiles(const PanelJob& job, Shared& shared, const uint8_t* slots,
                                             int warp) {
    constexpr int kOwn = 4;  // columns of a thread
    const int lane = static_cast<int>(threadIdx.x) % 32, piece = lane % kPieces, half = lane / kPieces % 2,
              part = warp % kSetWarps * 2 + lane / (2 * kPieces);
    const int64_t stride = job.dst.cols;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.dst.data) | static_cast<uintptr_t>(stride)) % kPiece == 0;
    const PieceOrder order(piece);
    int current = -1, col = 0, first_row = 0, below = 0;
    int places[kPieces];  // of row i ^ piece
    float multipliers[kOwn];
    for (RingTurn<kSlots, kSets> turn(warp / kSetWarps);; turn.advance()) {
        const Task task = turn.landed(shared);
        if (task.item < 0) return;
        if (!task.encodes) {
            release(turn.index);
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
                places[i] = unit_place(first_row + (i ^ piece), unit, task.shift) + half * kOwn * 2;
            const int known = task.item % kKnown;
            mbarrier_wait(&shared.known[known], static_cast<uint32_t>(task.item / kKnown) & 1);
            uint2 pairs = {0, 0};
            for (int p = unit; p < kParts; p += 1 << task.shift) {
                const uint2 other =
                    *reinterpret_cast<const uint2*>(&shared.maxima[known][p][half * kOwn / 2]);
                pairs.x = max_bf16x2(pairs.x, other.x);
                pairs.y = max_bf16x2(pairs.y, other.y);
            }
            // the eight threads of these columns compute a scale each
            const uint32_t pair = (piece & 2) != 0 ? pairs.y : pairs.x;
            const BlockScale scale =
                task.empty ? BlockScale{0.0f, 0.0f, 0}
                           : block_scale((piece & 1) != 0 ? high_magnitude(pair) : low_magnitude(pair),
                                         kCodes, false, job.rule);
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                multipliers[i] = __shfl_sync(kFullMask, scale.multiplier, lane / kPieces * kPieces + i);
            if (task.stores_scales && part >> task.shift == 0 && piece < kOwn && col < job.src.cols)
                job.scales[static_cast<int64_t>(task.group) * job.src.cols + col + piece] = scale.dequant;
        }
        const uint8_t* tile = slots + turn.index * kTileBytes;
        uint32_t words[2][kPiece];
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            const uint2 both =
                *reinterpret_cast<const uint2*>(tile + places[i % kPieces] + i / kPieces * below);
            words[0][i] = both.x;
            words[1][i] = both.y;
        }
        release(turn.index);
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
            store_piece(out, order.encode<kCodes, false>(words[i], multipliers[2 * i]), begin, end, aligned);
            store_piece(out + stride, order.encode<kCodes, true>(words[i], multipliers[2 * i + 1]), begin,
                        end, aligned);
        }
    }
}

// Moves 2 bytes a value in and 1 out: 706 MB, 0.172 ms at 32768 x 7168 and 4.1 TB/s (two passes: 1.18 GB,
// 0.29 ms). A CTA draws a panel (64, 32 or 16 columns of a group) after the other; all rows of one come
// through a ring of 14 tiles and stay there until the maxima of its columns are known, while rows of the next
// panel arrive where tiles have left. No CTA waits for another. The next panel is drawn with a panel's last
// request: 32768 x 7168, ragged, 181.6 us, drawn two ahead 194.7 (alone, 20 calls back to back, three sets of
// buffers, medians of 7): SMs end together (active 97 % of the time instead of 95), and 477 MB
// come from memory instead of 506. A slot passes from the loader (full: rows landed) to the lookers, whose
// maxima of a panel's last tile make it known (known: maxima of all columns, one a panel), and to a set of
// encoders; it may be replaced when lookers and encoders have read it (named barrier slot + 1: they announce
// themselves, the loader waits). Lanes arrive at `known` each for their own stores. A place for maxima is
// used again 16 panels later, of which only 14 can be on chip. Only maxima are reduced: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_group_columns_kernel(const __grid_constant__ PanelJob job,
                                  const __grid_constant__ PanelMaps maps) {
    extern __shared__ __align__(1024) uint8_t slots[];
    __shared__ Shared shared;
    if (threadIdx.x == 0) {
        for (Mbarrier& barrier : shared.full) mbarrier_init(&barrier, 1);
        for (Mbarrier& barrier : shared.known) mbarrier_init(&barrier, 32 * kLookers);
        fence_mbarrier_init();
    }
    __syncthreads();
    pdl_wait();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kFirstLooker)
        encode_tiles<kCodes>(job, shared, slots, warp);
    else if (warp < kLoader)
        look_at_tiles(shared, slots, warp - kFirstLooker);
    else
        Loader(job, maps, shared, slots).run();
}

template <DType kCodes>
void launch(const PanelJob& job, const PanelMaps& maps, unsigned ctas, const Launch& launch) {
    constexpr const char* kWhat = "quantize_group_columns";
    constexpr int kBytes = kSlots * kTileBytes;
    const auto kernel = quantize_group_columns_kernel<kCodes>;
    allow_shared_memory(kernel, kBytes, kWhat);
    launch_pdl(kernel, ctas, dim3(kThreads), kBytes, launch, kWhat, job, maps);
}

PanelMaps panel_maps(const TensorView& src) {
    PanelMaps maps;
    for (int shift = kNarrowestTile; shift <= kWidestTile; ++shift) {
        const int rows = panel_tile_rows(shift), row_bytes = 2 * panel_columns(shift),
                  i = shift - kNarrowestTile;
        maps.half[i] = tensor_map(src.data, src.dtype, src.dim(0), src.cols(), rows / 2, row_bytes);
        maps.quarter[i] =
            tensor_map(src.data, src.dtype, src.dim(0), src.cols(), rows / kQuarters, row_bytes);
    }
    return maps;
}

}  // namespace

bool launch_quantize_group_columns(const GroupColumns& args, const Launch& launch_args) {
    const TensorView& src = args.src;
    const TileShape& shape = args.shape;
    const RowView values = row_view(src);
    const int64_t panels = shape.groups.num_groups * ceil_div(shape.cols, panel_columns(kWidestTile)),
                  mean_rows = shape.capacity / std::max<int64_t>(1, shape.groups.num_groups);
    // too few panels for all SMs, or most of them larger than what fits at half the width: 16
    // columns a CTA are slower than tiles
    constexpr int64_t kMostRows = int64_t{kSlots} * panel_tile_rows(kWidestTile - 1);
    if (panels < int64_t{kNumSms} * 3 / 2 || mean_rows > kMostRows)
        return launch_quantize_column_tiles(args, launch_args);
    if (launch_quantize_group_strips(args, launch_args)) return true;
    if (values.dtype != DType::bf16 || !values.vector || src.numel() == 0 || panels > INT32_MAX / 16 ||
        src.dim(0) > INT32_MAX / 2 || shape.capacity > INT32_MAX / 2)
        return false;
    const PanelJob job = {.src = values,
                          .dst = row_view(args.dst.data),
                          .groups = shape.groups,
                          .extent = shape.extent,
                          .scales = args.dst.scales.as<float>(),
                          .rule = args.rule,
                          .drawn = static_cast<uint32_t*>(args.zeros)};
    const PanelMaps maps = panel_maps(src);
    const unsigned ctas = grid_for(panels, launch_args, 1);
    if (args.dst.data.dtype == DType::e5m2)
        launch<DType::e5m2>(job, maps, ctas, launch_args);
    else
        launch<DType::e4m3>(job, maps, ctas, launch_args);
    return true;
}

}  // namespace fp8flow::hopper
