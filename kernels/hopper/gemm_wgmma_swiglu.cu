// fc1 with its activation: the grouped FP8 product of gemm_wgmma_overlap.h, beside whose products three more warps make silu(gate) * up * prob
// of the tile before and quantise it in 1x128 blocks. Bit-equal to the product followed by swiglu_quantize (kernels/ops/gemm.h).
// Read next: gemm_wgmma_overlap.h (the loop, untouched), swiglu.cu (the same activation as a kernel), docs/gemm_worklog.md.
//
// Floor: the product's FLOPs; x and W1 read once, F codes and F / 128 scales a row written, 4 F bytes more where h is kept. At the DeepSeek-V3
// shape (32 x 1024 rows, F 2048, K 7168) 0.24 + 0.94 + 0.07 (+ 0.27) GB for 1.92 TFLOP: 0.30 (0.36) ms of memory under 1.37 ms of tensor cores.
// One CTA: as in gemm_wgmma_fp8.cu, but of a tile's 256 columns the first warpgroup computes 128 of gate and the second the 128 of up that
// belong to them: one scale of B a warpgroup as before, and the tile is a whole 1x128 block of the activation. They store BF16 as always,
// behind the next tile's first products: to h, or, if h is not kept, to 64 KiB of this CTA's own that stay in L2 (8.7 MB for all). The
// three idle warps of the loading warpgroup read the tile back, two rows at a time, sixteen lanes a row, the next two rows requested before
// these are computed, and write codes and scales. Behind the last tile there is nothing to hide it: the computing warps then help.
// Beside the products: 64 turns of 295 instructions (SASS) a tile, 6,300 issue slots on three of the four schedulers of the 65,000 clocks that
// a tile's products take at K 7168, 37,000 at K 4096. A warp's 22 turns take 600 to 800 clocks each, latencies included, 13,000 to 18,000 in
// all: one buffer is enough, and the product's stores never wait unless K is below about 2048. Expected: the plain product's time and
// 1 to 2 %, of which 3 us are the last tile's.
//
// Shared memory: as there, and two descriptions of stored tiles, by turns.
// Barriers: as there; stored: one arrival a computing warp once its part of a tile is stored (generic writes of a warp, ordered by __syncwarp, then
// released by one lane's arrival: what waits for it sees them), waited for by the other warps; freed: one arrival for each of those once
// it has read and used a tile, waited for by the computing warps before they store the next one. Phase i of either is this CTA's tile i.
// No deadlock: a computing warp waits for `freed` of tile i - 1 when it stores tile i, in the first step of tile i + 1. That phase needs the
// activation of tile i - 1, which waits for nothing but `stored` of tile i - 1: for all computing warps to pass the first step of tile i. Each of
// them can: the stages up to there have arrived, because this warp has passed them, and the loader does not write them again before the
// other warp has released them; its own wait there is one for tile i - 2, so that the argument goes down to the first tile, which waits
// for nothing. The loader, the other CTA and the tensor cores wait for `stored` and `freed` nowhere. A description is written at
// the end of tile i's products, where the writer has waited for `freed` of tile i - 2, its last user.
// Deterministic: a sum is one thread's over ascending k, a maximum is the same in any order, every output has one writer.
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/gemm_wgmma_overlap.h"

namespace fp8flow::hopper {

namespace {

constexpr int kActs = kColumns;  // columns of the activation in a tile: one scale block
static_assert(kActs == kBlock && kMathWarpgroups == 2);
constexpr int kBesideWarps = 3;
constexpr int kTurnRows = 2;              // of a warp at a time
constexpr int kRowLanes = kActs / kUnit;  // that share a row
constexpr int kBesideRegisters = 56, kMultiplyingRegisters = 224;
static_assert((kBesideRegisters + kMathWarpgroups * kMultiplyingRegisters) * kWarpgroup <=
              168 * kWgmmaThreads);  // what a CTA starts with
static_assert(kTurnRows * kRowLanes == 32);
static_assert(kSwigluScratch >= int64_t{kNumSms} * kTileRows * kTileCols);
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// Beside h, which is the product's D.
struct Activation {
    RowView prob;             // [M] f32; absent: 1
    RowView codes;            // [M, F] e4m3
    float* scales = nullptr;  // [F / 128, M]
    int64_t scales_pitch = 0;
    ScaleFormat format = ScaleFormat::pow2;
    Bf16* scratch = nullptr;  // a tile for each CTA, where h is not kept
};

// What is known of a tile when it has been stored.
struct StoredTile {
    int64_t a_row, d_row;  // its first row in A and in D
    int32_t block;         // 128 columns of the activation
    int32_t rows, valid;   // to write, of them with products; none past the last column
    int32_t last;          // of this CTA: 0 or 1
};

struct SwigluShared : WgmmaShared {
    StoredTile done[2];
    Barrier stored, freed;
};
__device__ inline void init_barriers(SwigluShared& shared) {
    init_barriers(static_cast<WgmmaShared&>(shared));
    barrier_init(&shared.stored, kMathWarps);
    barrier_init(&shared.freed, kBesideWarps);
}

__device__ __forceinline__ Bf16* scratch_of_cta(const Activation& out) {
    return out.scratch + static_cast<int64_t>(blockIdx.x) * kTileRows * kTileCols;
}

// Rows 2 * worker and the next of every 2 * workers of a tile: from stored h to codes and scales. By whole warps.
template <op::SaveH kSave>
__device__ __forceinline__ void activate_rows(const DeviceProduct& p, const Activation& out,
                                              const StoredTile& tile, int worker, int workers) {
    const int lane = static_cast<int>(threadIdx.x) % 32, own = lane / kRowLanes,
              col = lane % kRowLanes * kUnit;
    constexpr bool kKept = kSave == op::SaveH::yes;
    const int64_t row0 = tile.a_row - p.a.base(),  // relative to the row bases
        act_row0 = row0 + out.codes.base(), col0 = int64_t{tile.block} * kActs + col;
    // inside a tile
    const int width = out.codes.cols, pitch = kKept ? 2 * width : kTileCols, to_up = kKept ? width : kActs;
    const Bf16* gates =
        kKept ? static_cast<const Bf16*>(p.d) + tile.d_row * p.n + col0 : scratch_of_cta(out) + col;
    const float* probs =
        out.prob ? static_cast<const float*>(out.prob.data) + row0 + out.prob.base() : nullptr;
    uint8_t* codes = static_cast<uint8_t*>(out.codes.data) + act_row0 * width + col0;
    float* scales = out.scales + tile.block * out.scales_pitch + act_row0;

    struct Raw {
        uint4 gate, up;
        float prob;
    };
    const auto fetch = [&](int row) {
        Raw raw = {{0, 0, 0, 0}, {0, 0, 0, 0}, 1.0f};
        if (row < tile.valid) {  // through L2: other threads of this CTA have written it
            const Bf16* at = gates + row * pitch;
            raw.gate = __ldcg(reinterpret_cast<const uint4*>(at));
            raw.up = __ldcg(reinterpret_cast<const uint4*>(at + to_up));
            if (probs != nullptr) raw.prob = probs[row];
        }
        return raw;
    };
    Raw next = fetch(kTurnRows * worker + own);
#pragma unroll 1
    for (int first = kTurnRows * worker; first < tile.rows; first += kTurnRows * workers) {
        const int row = first + own;
        const Raw raw = next;
        next = fetch(row + kTurnRows * workers);
        float gate[kUnit], up[kUnit], sigmoid[kUnit], a[kUnit], amax = 0.0f;
        unpack_unit(raw.gate, DType::bf16, gate);
        unpack_unit(raw.up, DType::bf16, up);
        sigmoids_of(gate, sigmoid);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            a[i] = gate[i] * sigmoid[i] * up[i] * raw.prob;
            amax = fmaxf(amax, fabsf(a[i]));  // NaN ignored
        }
#pragma unroll
        for (int step = kRowLanes / 2; step > 0; step /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(kWholeWarp, amax, step));
        const QuantScale scale = quant_scale(amax, kE4m3Max, out.format);
        if (row >= tile.rows) continue;
        *reinterpret_cast<uint2*>(codes + row * width) = encode_unit(a, scale.multiplier, DType::e4m3);
        if (col == 0) scales[row] = row < tile.valid ? scale.dequant : 0.0f;
    }
}

// What multiply_tiles_overlapped does with finished tiles. `turn`: whether an even or an odd tile of this CTA is stored next.
template <op::SaveH kSave> struct IntoActivation {
    const DeviceProduct& p;
    const Activation& out;
    SwigluShared& shared;
    int turn = 0;
    static constexpr bool kKept = kSave == op::SaveH::yes;

    __device__ int64_t column(const MathTile& tile, int warpgroup) const {
        return warpgroup * (p.n / 2) + tile.b_output / kMathWarpgroups;
    }
    struct Rows {
        void* d;
        int64_t n;
    };
    __device__ Rows rows() const { return kKept ? Rows{p.d, p.n} : Rows{scratch_of_cta(out), kTileCols}; }
    __device__ static bool describes() { return threadIdx.x == kWarpgroup; }  // the first computing thread

    // A pair may reach past the last column.
    __device__ TileStore place(const MathTile& tile, int warpgroup) const {
        const bool inside = tile.b_output < p.n;
        const int32_t rows = inside ? tile.rows : 0, valid = inside ? tile.valid : 0;
        if (kKept) return {tile.d_row, static_cast<int32_t>(column(tile, warpgroup)), rows, valid};
        return {0, warpgroup * kActs, rows, valid};
    }
    __device__ void known(const MathTile& tile, bool more) const {
        const TileStore stored = place(tile, 0);
        if (describes())
            shared.done[turn] = {tile.a_output, tile.d_row, static_cast<int32_t>(tile.b_output / kTileCols),
                                 stored.rows,   stored.valid, more ? 0 : 1};
        __syncwarp();
    }
    __device__ void before_stores() const { barrier_wait(&shared.freed, turn ^ 1); }
    __device__ void after_stores() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.stored);
        __syncwarp();
        turn ^= 1;
    }
    __device__ void no_tile() {
        if (describes()) shared.done[turn] = {0, 0, 0, 0, 0, 1};
        after_stores();
    }
    __device__ void after_last() const {
        barrier_wait(&shared.stored, turn ^ 1);
        const int warp = static_cast<int>(threadIdx.x) / 32 - kWarpgroup / 32;
        activate_rows<kSave>(p, out, shared.done[turn ^ 1], kBesideWarps + warp, kBesideWarps + kMathWarps);
        __syncwarp();  // the CTAs of a cluster meet by whole warps
    }
};

// One of the warps beside the loading one: the activation of every tile of this CTA.
template <op::SaveH kSave>
__device__ __forceinline__ void activate_tiles(const DeviceProduct& p, const Activation& out,
                                               SwigluShared& shared, int warp) {
    for (int turn = 0;; turn ^= 1) {
        barrier_wait(&shared.stored, turn);
        const StoredTile tile = shared.done[turn];
        activate_rows<kSave>(p, out, tile, warp, tile.last ? kBesideWarps + kMathWarps : kBesideWarps);
        if (tile.last) return;
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.freed);
    }
}

template <op::SaveH kSave>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    swiglu_product_kernel(const __grid_constant__ DeviceProduct product,
                          const __grid_constant__ CUtensorMap map_a,
                          const __grid_constant__ CUtensorMap map_b, const __grid_constant__ Activation out) {
    const auto load = [&](SwigluShared& shared) {
        const int rank = static_cast<int>(cluster_rank());
        constexpr uint32_t kRowBytes = kTileRows * sizeof(float);
        load_tiles<kFp8Depth>(
            product, shared, kStageBytes + kRowBytes,
            [&](const MathTile& tile, int step, int index, Barrier* full) {
                const int k = step * kFp8Depth, a = static_cast<int>(tile.a_output),
                          width = static_cast<int>(product.n / 2),
                          gate = static_cast<int>(tile.group * product.n + tile.b_output / kMathWarpgroups);
                const auto load_of = [&](Common operand) {
                    return tile.common == operand ? Load::common : Load::own;
                };
                uint8_t *to_a = shared.stages[index], *to_b = to_a + kTileRows * kStageRowBytes;
                load_operand<2>(load_of(Common::a), rank, &map_a, full, to_a, kTileRows / 2 * kStageRowBytes,
                                [&](int i) { return make_int2(k, a + i * kTileRows / 2); });
                load_operand<2>(load_of(Common::b), rank, &map_b, full, to_b, kActs * kStageRowBytes,
                                [&](int i) { return make_int2(k, gate + i * width); });
                bulk_load(static_cast<const float*>(product.a.scale.scales) +
                              step * product.a.scale.block_stride + tile.a_output,
                          full, shared.row_scales[index], kRowBytes);
            });
    };
    run_roles<SwigluShared, kBesideRegisters, kMultiplyingRegisters>(
        load,
        [&](SwigluShared& shared, int warpgroup) {
            multiply_tiles_overlapped<WgmmaE4m3>(product, shared, warpgroup,
                                                 IntoActivation<kSave>{product, out, shared});
        },
        [&](SwigluShared& shared, int warp) { activate_tiles<kSave>(product, out, shared, warp); });
}

}  // namespace

bool launch_wgmma_swiglu(const op::GroupedGemmSwigluQuantize& args, Bf16* scratch, const Launch& launch) {
    const TensorView &a = args.a.codes, &b = args.b.codes, &act = args.act.codes;
    const DeviceProduct p =
        product_of(op::GroupedGemm{.a = args.a, .b = args.b, .groups = args.groups, .d = args.h});
    if (!wgmma_takes_fp8(p, args.groups.alignment) || p.a.scale.outputs_per_scale != 1 ||
        p.a.scale.block != kBlock || p.b.scale.outputs_per_scale != kBlock)
        return false;
    if (!addressable(a) || !addressable(b) || !addressable(act) || !addressable(args.h) || a.numel() == 0 ||
        b.numel() == 0)
        return false;
    if (a.dtype != DType::e4m3 || act.dtype != DType::e4m3 || act.cols() % kActs != 0) return false;
    const CUtensorMap map_a = tensor_map(p.a.codes, p.a.dtype, a.rows(), a.cols(), kTileRows / 2),
                      map_b = tensor_map(p.b.codes, p.b.dtype, b.rows(), b.cols(), kActs);
    const Activation out{row_view(args.prob), row_view(act),     args.act.scales.as<float>(),
                         act.dim(0),          args.scale_format, scratch};
    const auto kernel = args.save_h == op::SaveH::yes ? swiglu_product_kernel<op::SaveH::yes>
                                                      : swiglu_product_kernel<op::SaveH::no>;
    launch_wgmma_kernel(kernel, p, map_a, map_b, launch, sizeof(SwigluShared) + 1024, out);
    return true;
}

}  // namespace fp8flow::hopper
