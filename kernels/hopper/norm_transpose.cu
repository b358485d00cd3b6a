// RMSNorm forward to FP8 rows and their transposed copy in one kernel: CTAs that take rows and CTAs that turn tiles side by side. Contract:
// kernels/ops/norm.h.
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/norm_forward.h"
#include "kernels/hopper/norm_transpose.h"
#include "kernels/hopper/transpose_tile.h"

namespace fp8flow::hopper {

namespace {

using turning::Held;
using turning::Shift;
using turning::Transposer;

constexpr int kTile = static_cast<int>(kBlock);

// In which order CTAs come: bands of `band_tiles` tiles of rows; `norms` CTAs make a band's rows, `tiles` CTAs turn them, `lag` bands later.
struct Order {
    int bands, lag, norms, tiles, band_tiles, interleaved, ahead;
    __host__ __device__ int items() const { return bands * (norms + tiles); }
};
struct Item {
    bool turns;
    int band, index;
};
__device__ __forceinline__ Item item_of(const Order& order, int at) {
    const int head = order.lag * order.norms, step_items = order.norms + order.tiles;
    if (at < head) return {false, at / order.norms, at % order.norms};
    at -= head;
    const int step = at / step_items, j = at % step_items;
    if (step < order.bands - order.lag) {
        if (order.interleaved == 0) {
            if (j < order.tiles) return {true, step, j};
            return {false, step + order.lag, j - order.tiles};
        }
        const int before = j * order.tiles / step_items;
        if ((j + 1) * order.tiles / step_items > before) return {true, step, before};
        return {false, step + order.lag, j - before};
    }
    at -= (order.bands - order.lag) * step_items;
    return {true, order.bands - order.lag + at / order.tiles, at % order.tiles};
}

struct Job {
    NormForward norm;
    Transposer tiles;
    Order order;
    uint32_t*
        done;  // of every 128 rows: how many are written, and then how many tiles have seen that; 0 before and afterwards
};

// What all threads of the CTA wrote, in front of a barrier, comes before this count; behind the last of `most` counts the word is 0 again.
__device__ __forceinline__ void count_release(uint32_t* word, uint32_t most) {
    asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(word), "r"(most - 1) : "memory");
}
__device__ __forceinline__ void count_relaxed(uint32_t* word, uint32_t most) {
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(word), "r"(most - 1) : "memory");
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

template <int kTeamWarps> constexpr int rows_of_cta() { return kTeam / kTeamWarps; }

template <DType kCodes, Shift kShift, int kTeamWarps>
__device__ __forceinline__ void turn_tile(const Job& job, const Item& item, uint32_t* turned_of_cta) {
    const int team = static_cast<int>(threadIdx.x) / turning::kThreads,
              teams = static_cast<int>(blockDim.x) / turning::kThreads,
              thread = static_cast<int>(threadIdx.x) % turning::kThreads, t = item.index * teams + team;
    const int row_tile = item.band * job.order.band_tiles + t % job.order.band_tiles;
    const TilePlace place = {t / job.order.band_tiles, int64_t{row_tile} * kTile};
    const int rows = static_cast<int>(min(int64_t{kTile}, job.tiles.extent - place.row)),
              count = static_cast<int>(max(int64_t{0}, min(int64_t{rows}, job.norm.rows - place.row)));
    const bool there = place.col_tile < job.tiles.tile_cols && rows > 0;
    const uint32_t ctas =
        static_cast<uint32_t>((count + rows_of_cta<kTeamWarps>() - 1) / rows_of_cta<kTeamWarps>());
    uint32_t* done = job.done + row_tile;
    if (there && thread == 0 && count > 0)
        while (load_relaxed(done) < ctas) __nanosleep(100);
    __syncthreads();
    uint32_t* turned = turned_of_cta + team * kTurnedWords;
    if (there) {
        Held held;
        turning::fetch<kShift, true>(job.tiles, 0, place, count, thread, held);
        if (thread == 0 && count > 0) count_relaxed(done, ctas + job.tiles.tile_cols);
        if constexpr (kShift == Shift::by_row) {
            const float target = turning::shift_rows<kCodes>(held, thread);
            if (thread == 0)
                job.tiles.tile_scales[row_tile * job.tiles.scale_stride + place.col_tile] = target;
        }
        turning::turn(held, thread, turned);
    }
    __syncthreads();
    const bool aligned =
        (reinterpret_cast<uintptr_t>(job.tiles.dst.data) | static_cast<uintptr_t>(job.tiles.dst.cols)) %
            turning::kPiece ==
        0;
    if (there) turning::store_columns(job.tiles, turned, 0, aligned, place, rows, thread);
}

template <NormForm kForm, DType kType, int kTeamWarps>
__global__ __launch_bounds__(kTeamWarps == kTeam ? 512 : 128,
                             kTeamWarps == kTeam ? 2 : 8) void norm_transpose_kernel(const Job job) {
    extern __shared__ uint4 turned_pieces[];
    __shared__ float warp_sums[kMostTeams * kNormWarps];
    constexpr Shift kShift = kForm == NormForm::blocks ? Shift::by_row : Shift::none;
    let_next_start();
    const NormForward& args = job.norm;
    const HeldPart at = held_part<kTeamWarps>(args);
    const int row_in_cta = kTeamWarps == kTeam ? 0 : at.team;
    const Item item = item_of(job.order, static_cast<int>(blockIdx.x));
    const auto row_of = [&](const Item& i) {
        return int64_t{i.band} * job.order.band_tiles * kTile + i.index * rows_of_cta<kTeamWarps>();
    };
    if (!item.turns && at.thread == 0 && row_of(item) + row_in_cta < args.rows)
        prefetch_row(args.x, row_of(item) + row_in_cta, at.part);
    wait_for_kernel_before();
    const float multiplier = args.tensor_scale != nullptr ? div_float(1.0f, *args.tensor_scale) : 0.0f;
    int32_t seen = 0;
    if (threadIdx.x % kWarp == 0 && args.amax != nullptr)
        seen = *static_cast<const volatile int32_t*>(args.amax);
    if (item.turns) {
        turn_tile<DType::e4m3, kShift, kTeamWarps>(job, item, reinterpret_cast<uint32_t*>(turned_pieces));
        return;
    }
    const int64_t first_row = row_of(item), row = first_row + row_in_cta;
    if (first_row >= args.rows) return;
    uint32_t largest = 0;
    if (at.thread == 0 && job.order.ahead > 0 && row + job.order.ahead < args.rows)
        prefetch_row(args.x, row + job.order.ahead, at.part);
    if (kTeamWarps > 1 || row < args.rows)
        held_row<kTeamUnits, kForm, kType, kTeamWarps>(args, row, at, multiplier,
                                                       warp_sums + row_in_cta * kNormWarps, largest);
    if constexpr (kForm == NormForm::tensor)
        if (args.amax != nullptr) {
            largest = __reduce_max_sync(0xFFFFFFFFu, largest);
            if (threadIdx.x % kWarp == 0 && static_cast<int32_t>(largest) > seen)
                atomicMax(args.amax, static_cast<int32_t>(largest));
        }
    __syncthreads();
    if (threadIdx.x == 0) {
        const int count = static_cast<int>(min(int64_t{kTile}, args.rows - first_row / kTile * kTile)),
                  ctas = (count + rows_of_cta<kTeamWarps>() - 1) / rows_of_cta<kTeamWarps>();
        count_release(job.done + first_row / kTile, ctas + job.tiles.tile_cols);
    }
}

using Kernel = void (*)(Job);
template <DType kType, int kTeamWarps> Kernel kernel_of(NormForm form) {
    return form == NormForm::blocks ? norm_transpose_kernel<NormForm::blocks, kType, kTeamWarps>
                                    : norm_transpose_kernel<NormForm::tensor, kType, kTeamWarps>;
}
template <DType kType> Kernel kernel_of(const NormForward& args, NormForm form) {
    if (args.x.cols <= 2048) return kernel_of<kType, 1>(form);
    if (args.x.cols <= 4096) return kernel_of<kType, 2>(form);
    return kernel_of<kType, kTeam>(form);
}

}  // namespace

bool launch_norm_transpose(const NormForward& args, const Fp8Tensor& rows, const Fp8Tensor& transposed,
                           uint32_t* zeros, const Launch& launch, const NormTransposeKnobs& knobs) {
    const NormForm form = form_of(args);
    const bool f16 = args.x.dtype == DType::f16;
    if (!(f16 || args.x.dtype == DType::bf16) || !has_whole_units(args, form)) return false;
    if (form != NormForm::tensor && form != NormForm::blocks) return false;
    const bool whole_pieces = args.codes.cols % turning::kPiece == 0 &&
                              reinterpret_cast<uintptr_t>(args.codes.data) % turning::kPiece == 0;
    if (!whole_pieces || args.segments > kMostTeams || launch.sm_limit > 0 || transposed.codes.cols() == 0)
        return false;
    const int cols = args.x.cols;
#ifdef NT_ONE
    const Kernel kernel = kernel_of<DType::bf16>(args, form);
#else
    const Kernel kernel = f16 ? kernel_of<DType::f16>(args, form) : kernel_of<DType::bf16>(args, form);
#endif
    const int rows_a_cta = cols <= 2048   ? 4
                           : cols <= 4096 ? 2
                                          : 1,
              teams = args.segments, tile_cols = static_cast<int>(ceil_div(cols, kTile));
    const int64_t extent = transposed.codes.cols();
    const int band_tiles = knobs.band_tiles,
              bands = static_cast<int>(ceil_div(extent, int64_t{band_tiles} * kTile));
    const int band_rows = band_tiles * kTile;
    const Order order = {.bands = bands,
                         .lag = std::min(bands, static_cast<int>(ceil_div(knobs.lag_rows, band_rows))),
                         .norms = band_rows / rows_a_cta,
                         .tiles = static_cast<int>(ceil_div(band_tiles * tile_cols, teams)),
                         .band_tiles = band_tiles,
                         .interleaved = knobs.interleaved,
                         .ahead = knobs.ahead};
    const Job job = {.norm = args,
                     .tiles = {.src = row_view(rows.codes),
                               .dst = row_view(transposed.codes),
                               .scales = row_scales(rows),
                               .groups = {},
                               .extent = extent,
                               .tile_scales = transposed.scales.as<float>(),
                               .tile_cols = tile_cols,
                               .scale_stride = static_cast<int>(transposed.scales.cols()),
                               .wide = true},
                     .order = order,
                     .done = zeros};
    const int shared = teams * kTile * kTile;
    allow_shared_memory(kernel, shared);
    launch_behind(kernel, static_cast<unsigned>(order.items()), dim3(teams * turning::kThreads), shared,
                  launch, "rms_norm, transposed", job);
    return true;
}

}  // namespace fp8flow::hopper
