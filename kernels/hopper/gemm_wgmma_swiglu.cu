// fc1, SwiGLU x prob and the quantiser in one kernel: the FP8 product of gemm_wgmma_fp8.cu, whose tiles are activated and quantised in
// registers, without h in memory. Contract: op::GroupedGemmSwigluQuantize (kernels/ops/gemm.h), bit-equal to its parts, which are faster where h
// is kept. Read next: gemm_wgmma_overlap.h.
//
// Floor: the product's 2 m n k FLOPs; a tile leaves as 16 KiB of codes instead of 64 of BF16, and the 64 activations of a thread, about 1,100
// instructions a warp and tile, stand where those stores stood, behind the next tile's first product. A warpgroup owns 64 rows of gate and
// up: what SwiGLU and a 1x128 block need of a row is in four lanes.
// Barriers: as gemm_wgmma_fp8.cu, without its turns; named barrier 1: the table of sigmoids is filled.
// Measured (H200, burst): 1.396 ms at 32x1024 rows, F 2048, K 7168, where the plain product takes 1.341 and the parts 1.426; 0.611 at
// 16x2048, 1536, 4096 (0.580, 0.645).
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/gemm_wgmma_overlap.h"

namespace fp8flow::hopper {

namespace {

// WgmmaShared with the table in place of scales of columns.
struct SwigluShared {
    alignas(1024) uint8_t stages[kStages][kStageBytes];
    alignas(16) float row_scales[kStages][kTileRows];
    SigmoidTable table;
    MathTile tiles[kRing];
    Barrier full[kStages], empty[kStages], tile_full[kRing], tile_empty[kRing];
};
constexpr size_t kSwigluBytes = sizeof(SwigluShared) + 1024;  // the stages are aligned inside
static_assert(kSwigluBytes <= 227 * 1024, "what a CTA may have");

// What the activation is multiplied by, and where it goes.
struct Activation {
    RowView prob, act;
    float* scales = nullptr;  // of act: blocks of a row stand `pitch` apart, rows side by side
    int64_t pitch = 0;
    ScaleFormat format = ScaleFormat::pow2;
};

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

// What becomes of finished tiles: 128 x 128 codes and their scales. A thread has gate (first chain) and up (second) of 32 columns of two rows, a
// quad of lanes those of a whole 1x128 block: nothing is exchanged but its largest value.
class ActivateTile {
public:
    static constexpr Owned kOwned = Owned::rows;

    __device__ ActivateTile(const DeviceProduct& p, const Activation& out, const SigmoidTable& table,
                            int warpgroup)
        : out_(out), table_(table), row0_(first_row<kOwned>(warpgroup)) {
        const int64_t h_base = p.d_row_base != nullptr ? *p.d_row_base : 0;
        prob_from_ = out.prob ? static_cast<const float*>(out.prob.data) + out.prob.base() - h_base : nullptr;
        act_from_ = out.act.base() - h_base;
    }
    // Probabilities, to be there when the tile is finished.
    __device__ __forceinline__ void prepare(const MathTile& tile, float (&)[2][64]) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            prob_[r] = prob_from_ != nullptr && row0_ + 8 * r < tile.valid
                           ? prob_from_[tile.d_row + row0_ + 8 * r]
                           : 1.0f;
    }
    __device__ __forceinline__ void end() const {}
    // One row after the other by the same code: half of what would otherwise be fetched once a tile.
    template <int kChain>
    __device__ __forceinline__ void behind(const MathTile& tile, float (&sums)[2][64]) const {
        if (kChain == 1) return;
        // the second CTA of a pair may be past the last column
        const int64_t col0 = tile.b_output / 2, row = tile.d_row + act_from_ + row0_;
        const bool inside = col0 < out_.act.cols;
        const int quad = static_cast<int>(threadIdx.x % 4);
        uint8_t* codes = static_cast<uint8_t*>(out_.act.data) + row * out_.act.cols + col0 + 16 * quad;
        float* scale_at = out_.scales + col0 / kBlock * out_.pitch + row;
        float prob = prob_[0];
        int of_tile = row0_;
#pragma unroll 1
        for (int r = 0;; ++r) {
            const bool wanted = inside && of_tile < tile.rows, valid = of_tile < tile.valid;
            float a[4][kUnit], largest = 0.0f;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                activate(round_unit(sums[0], 16 * k), round_unit(sums[1], 16 * k), prob, a[k]);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) largest = fmaxf(largest, fabsf(a[k][i]));  // NaN ignored
            }
            const QuantScale scale = quant_scale(quad_max(largest), kE4m3Max, out_.format);
            store_codes(a, scale.multiplier, codes, valid, wanted);
            if (quad == 0 && wanted) *scale_at = valid ? scale.dequant : 0.0f;
            if (r == 1) return;
            codes += 8 * out_.act.cols;
            scale_at += 8;
            of_tile += 8;
            prob = prob_[1];
#pragma unroll
            for (int i = 0; i < 64; ++i)
                sums[i / 32][i % 32 / 2 * 4 + i % 2] = sums[i / 32][i % 32 / 2 * 4 + i % 2 + 2];
        }
    }

private:
    // Two neighbouring sums each from `first` on, and those of the next three chunks of columns.
    __device__ __forceinline__ static uint4 round_unit(const float (&sum)[64], int first) {
        return {pack_bf16(sum[first], sum[first + 1]), pack_bf16(sum[first + 4], sum[first + 5]),
                pack_bf16(sum[first + 8], sum[first + 9]), pack_bf16(sum[first + 12], sum[first + 13])};
    }
    // a = silu(gate) * up * prob
    __device__ __forceinline__ void activate(const uint4& gates, const uint4& ups, float prob,
                                             float (&a)[kUnit]) const {
        float gate[kUnit], up[kUnit], sigmoid[kUnit];
        table_.sigmoids(gates, sigmoid);
        unpack_unit(gates, DType::bf16, gate);
        unpack_unit(ups, DType::bf16, up);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) a[i] = gate[i] * sigmoid[i] * up[i] * prob;
    }
    // One of the thread's rows, 16 bytes an access, 64 of a quad; pads are zeros.
    __device__ __forceinline__ static void store_codes(const float (&a)[4][kUnit], float m, uint8_t* to,
                                                       bool valid, bool wanted) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t
                words[4];  // of every 16 columns, those of this thread: two neighbours, and two 8 further on
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float* v = &a[2 * half + c / 2][4 * (c % 2)];
                words[c] = pack_fp8(v[0] * m, v[1] * m, v[2] * m, v[3] * m, DType::e4m3);
            }
            const uint4 got = gather_chunk(words);  // of 16 columns, those of the four threads
            const uint4 codes = {__byte_perm(got.x, got.y, 0x5410), __byte_perm(got.z, got.w, 0x5410),
                                 __byte_perm(got.x, got.y, 0x7632), __byte_perm(got.z, got.w, 0x7632)};
            if (wanted) store_in_memory(reinterpret_cast<uint4*>(to + 64 * half), valid ? codes : uint4{});
        }
    }

    const Activation& out_;
    const SigmoidTable& table_;
    int row0_;
    const float* prob_from_;  // nullptr: 1
    int64_t act_from_;
    float prob_[2];
};

__global__ void __launch_bounds__(kWgmmaThreads, 1)
    fp8_swiglu_kernel(const __grid_constant__ DeviceProduct product,
                      const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                      const __grid_constant__ Activation out) {
    run_roles<SwigluShared>(
        [&](SwigluShared& shared) {
            load_operands<Scales::rows_tiles, Owned::rows>(product, shared, &map_a, &map_b);
        },
        [&](SwigluShared& shared, int warpgroup) {
            shared.table.fill(static_cast<int>(threadIdx.x) - kWarpgroup, kMathThreads);
            meet(1, kMathThreads);
            multiply_tiles_overlapped<WgmmaE4m3>(product, shared, warpgroup,
                                                 ActivateTile(product, out, shared.table, warpgroup));
        });
}

}  // namespace

bool launch_wgmma_swiglu(const op::GroupedGemmSwigluQuantize& args, const Launch& launch) {
    const DeviceProduct p =
        product_of(op::GroupedGemm{.a = args.a, .b = args.b, .groups = args.groups, .d = args.h});
    const TensorView &a = args.a.codes, &b = args.b.codes;
    if (args.save_h == op::SaveH::yes || !wgmma_takes(p, a, b, args.groups.alignment) ||
        a.dtype != DType::e4m3 || args.act.codes.dtype != DType::e4m3 || p.n / 2 % kBlock != 0 ||
        reinterpret_cast<uintptr_t>(args.act.codes.data) % 16 != 0)
        return false;
    const CUtensorMap map_a = tensor_map(a.data, a.dtype, a.rows(), a.cols(), kTileRows / 2),
                      map_b = tensor_map(b.data, b.dtype, b.rows(), b.cols(), kTileCols / 2);
    const Activation out{row_view(args.prob), row_view(args.act.codes), args.act.scales.as<float>(),
                         args.act.codes.dim(0), args.scale_format};
    launch_wgmma_kernel(fp8_swiglu_kernel, p, launch, kSwigluBytes, map_a, map_b, out);
    return true;
}

}  // namespace fp8flow::hopper
