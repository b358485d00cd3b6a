// fc1, SwiGLU x prob and the quantiser in one kernel: the FP8 product of gemm_wgmma_fp8.cu, whose tiles are activated and quantised in
// registers, without h in memory. Contract: op::GroupedGemmSwigluQuantize (kernels/ops/gemm.h), bit-equal to its parts, which are faster where h
// is kept. Read next: gemm_wgmma_overlap.h.
//
// Floor: the product's 2 m n k FLOPs; a tile leaves as 16 KiB of codes instead of 64 of BF16, and the 64 activations of a thread, about 1,200
// instructions a warp and tile, stand where those stores stood, behind the next tile's first product. A warpgroup owns 64 rows of gate and
// up: what SwiGLU and a 1x128 block need of a row is in four lanes.
// Barriers: as gemm_wgmma_fp8.cu, without its turns; named barrier 1: the table of sigmoids is filled.
// Measured (H200, burst): 1.409 ms (best 1.392) at 32x1024 rows, F 2048, K 7168, where the plain product takes 1.325 and the parts 1.408; 0.614 at
// 16x2048, 1536, 4096 (0.572, 0.636).
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
        uint8_t* codes = static_cast<uint8_t*>(out_.act.data) + row * out_.act.cols + col0 + 16 * (quad % 2) +
                         4 * (quad / 2);
        float* scale_at = out_.scales + col0 / kBlock * out_.pitch + row;
        float prob = prob_[0];
        int of_tile = row0_;
#pragma unroll 1
        for (int r = 0;; ++r) {
            const bool wanted = inside && of_tile < tile.rows, valid = of_tile < tile.valid;
            float a[32];
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < 32; i += 2) {
                activate(pack_bf16(sums[0][2 * i], sums[0][2 * i + 1]),
                         pack_bf16(sums[1][2 * i], sums[1][2 * i + 1]), a[i], a[i + 1]);
                largest = fmaxf(fmaxf(largest, fabsf(a[i])), fabsf(a[i + 1]));  // NaN ignored
            }
            const QuantScale scale =
                quant_scale(fmaxf(quad_max(largest) * fabsf(prob), 0.0f), kE4m3Max, out_.format);
            float m = scale.multiplier;
            if (out_.format == ScaleFormat::pow2 && fabsf(prob) < 0x1p64f) {
                m *= prob;  // exact: the order of the two products does not matter
            } else {
#pragma unroll
                for (int i = 0; i < 32; ++i) a[i] *= prob;
            }
            store_codes(a, m, codes, valid, wanted);
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
    // silu(gate) * up of two neighbours
    __device__ __forceinline__ void activate(uint32_t gates, uint32_t ups, float& first,
                                             float& second) const {
        float low, high;
        table_.of_pair(gates, low, high);
        first = bits_float(gates << 16) * low * bits_float(ups << 16);
        second = bits_float(gates & 0xFFFF0000u) * high * bits_float(ups & 0xFFFF0000u);
    }
    // One of the thread's rows, 4 bytes an access: of every two chunks of 16 columns a lane has four neighbours each from its own sums and from those
    // of the next lane, the even one in the first chunk. Pads are zeros.
    __device__ __forceinline__ static void store_codes(const float (&a)[32], float m, uint8_t* to, bool valid,
                                                       bool wanted) {
        const bool odd = threadIdx.x % 2 == 1;
        const uint32_t first_halves = odd ? 0x1054 : 0x5410, second_halves = odd ? 0x3276 : 0x7632;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float* v = &a[8 * pair];
            const uint32_t even_chunk = pack_fp8(v[0] * m, v[1] * m, v[2] * m, v[3] * m, DType::e4m3),
                           odd_chunk = pack_fp8(v[4] * m, v[5] * m, v[6] * m, v[7] * m, DType::e4m3);
            const uint32_t own = odd ? odd_chunk : even_chunk,
                           got = __shfl_xor_sync(0xFFFFFFFFu, odd ? even_chunk : odd_chunk, 1);
            if (!wanted) continue;
            uint32_t* const at = reinterpret_cast<uint32_t*>(to + 32 * pair);
            at[0] = valid ? __byte_perm(own, got, first_halves) : 0;
            at[2] = valid ? __byte_perm(own, got, second_halves) : 0;
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
