// fc1, SwiGLU x prob and the quantiser in one kernel: the FP8 product of gemm_wgmma_fp8.cu, whose tiles are activated and quantised in
// registers. Contract: op::GroupedGemmSwigluQuantize (kernels/ops/gemm.h), bit-equal to its parts. Read next: gemm_wgmma_overlap.h.
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

// What the product is multiplied by and becomes. Pointers are moved so that a row of h (DeviceProduct::d) counts for all.
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

// What becomes of finished tiles: 128 x 128 codes and their scales, and 128 x 256 of h where it is kept. A thread has gate (first chain) and up
// (second) of 32 columns of two rows, a quad of lanes those of a whole 1x128 block: nothing is exchanged but its largest value.
template <op::SaveH kSaveH> class ActivateTile {
public:
    static constexpr Owned kOwned = Owned::rows;
    static constexpr bool kClears = false;

    __device__ ActivateTile(const DeviceProduct& p, const Activation& out, const SigmoidTable& table,
                            int warpgroup)
        : p_(p), out_(out), table_(table), row0_(first_row<kOwned>(warpgroup)) {
        const int64_t h_base = p.d_row_base != nullptr ? *p.d_row_base : 0;
        prob_from_ = out.prob ? static_cast<const float*>(out.prob.data) + out.prob.base() - h_base : nullptr;
        act_from_ = out.act.base() - h_base;
    }
    // Probabilities, to be there when the tile is finished.
    __device__ __forceinline__ void prepare(const MathTile& tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            prob_[r] = prob_from_ != nullptr && row0_ + 8 * r < tile.valid
                           ? prob_from_[tile.d_row + row0_ + 8 * r]
                           : 1.0f;
    }
    template <int kChain>
    __device__ __forceinline__ void behind(const MathTile& tile, float (&sums)[2][64]) const {
        if (kChain == 1) return;
        // the second CTA of a pair may be past the last column
        const int64_t col0 = tile.b_output / 2;
        const bool inside = col0 < out_.act.cols;
#pragma unroll
        for (int chain = 0; chain < 2; ++chain) {
            clear_pads(tile, row0_, sums[chain]);
            if (kSaveH == op::SaveH::yes)
                store_chain(p_, tile, col0 + chain * out_.act.cols, inside ? kColumns : 0, row0_,
                            sums[chain]);
        }
        const float largest[2] = {activate<0>(sums), activate<1>(sums)};
        float multipliers[2], dequant[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const QuantScale scale = quant_scale(quad_max(largest[r]), kE4m3Max, out_.format);
            multipliers[r] = scale.multiplier;
            dequant[r] = scale.dequant;
        }
        const int quad = static_cast<int>(threadIdx.x % 4);
        const int64_t row = tile.d_row + act_from_ + row0_;
        uint8_t* const codes = static_cast<uint8_t*>(out_.act.data) + row * out_.act.cols + col0 + 16 * quad;
        store_codes<0>(sums[0], multipliers[0], codes, inside && row0_ < tile.rows);
        store_codes<1>(sums[0], multipliers[1], codes + 8 * out_.act.cols, inside && row0_ + 8 < tile.rows);
        const int of_tile = row0_ + 8 * quad;  // lanes 0 and 1 of a quad store a scale each; pads have 0
        if (quad < 2 && inside && of_tile < tile.rows)
            out_.scales[col0 / kBlock * out_.pitch + row + 8 * quad] =
                of_tile < tile.valid ? dequant[quad] : 0.0f;
    }

private:
    // a = silu(gate) * up * prob of one of the thread's rows, in place of the gates; the largest magnitude.
    template <int kRow> __device__ __forceinline__ float activate(float (&sums)[2][64]) const {
        float largest = 0.0f;
#pragma unroll
        for (int i = 2 * kRow; i < 64; i += 4) {
            const uint32_t gates = pack_bf16(sums[0][i], sums[0][i + 1]),
                           ups = pack_bf16(sums[1][i], sums[1][i + 1]);
            float sigmoids[2];
            table_.of_pair(gates, sigmoids[0], sigmoids[1]);
            sums[0][i] = bits_float(gates << 16) * sigmoids[0] * bits_float(ups << 16) * prob_[kRow];
            sums[0][i + 1] =
                bits_float(gates & 0xFFFF0000u) * sigmoids[1] * bits_float(ups & 0xFFFF0000u) * prob_[kRow];
            largest = fmaxf(largest, fmaxf(fabsf(sums[0][i]), fabsf(sums[0][i + 1])));  // NaN ignored
        }
        return largest;
    }
    // One of the thread's rows, 16 bytes an access, 64 of a quad.
    template <int kRow>
    __device__ __forceinline__ static void store_codes(const float (&a)[64], float m, uint8_t* to,
                                                       bool wanted) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t
                words[4];  // of every 16 columns, those of this thread: two neighbours, and two 8 further on
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int i = 8 * (4 * half + c) + 2 * kRow;
                words[c] = pack_fp8(a[i] * m, a[i + 1] * m, a[i + 4] * m, a[i + 5] * m, DType::e4m3);
            }
            const uint4 got = gather_chunk(words);  // of 16 columns, those of the four threads
            const uint4 codes = {__byte_perm(got.x, got.y, 0x5410), __byte_perm(got.z, got.w, 0x5410),
                                 __byte_perm(got.x, got.y, 0x7632), __byte_perm(got.z, got.w, 0x7632)};
            if (wanted) store_in_memory(reinterpret_cast<uint4*>(to + 64 * half), codes);
        }
    }

    const DeviceProduct& p_;
    const Activation& out_;
    const SigmoidTable& table_;
    int row0_;
    const float* prob_from_;  // nullptr: 1
    int64_t act_from_;
    float prob_[2];
};

template <op::SaveH kSaveH>
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
                                                 ActivateTile<kSaveH>(product, out, shared.table, warpgroup));
        });
}

}  // namespace

bool launch_wgmma_swiglu(const op::GroupedGemmSwigluQuantize& args, const Launch& launch) {
    const DeviceProduct p =
        product_of(op::GroupedGemm{.a = args.a, .b = args.b, .groups = args.groups, .d = args.h});
    const TensorView &a = args.a.codes, &b = args.b.codes;
    if (!wgmma_takes(p, a, b, args.groups.alignment) || a.dtype != DType::e4m3 ||
        args.act.codes.dtype != DType::e4m3 || p.n / 2 % kBlock != 0 ||
        reinterpret_cast<uintptr_t>(args.act.codes.data) % 16 != 0)
        return false;
    const CUtensorMap map_a = tensor_map(a.data, a.dtype, a.rows(), a.cols(), kTileRows / 2),
                      map_b = tensor_map(b.data, b.dtype, b.rows(), b.cols(), kTileCols / 2);
    const Activation out{row_view(args.prob), row_view(args.act.codes), args.act.scales.as<float>(),
                         args.act.codes.dim(0), args.scale_format};
    launch_wgmma_kernel(
        args.save_h == op::SaveH::yes ? fp8_swiglu_kernel<op::SaveH::yes> : fp8_swiglu_kernel<op::SaveH::no>,
        p, launch, kSwigluBytes, map_a, map_b, out);
    return true;
}

}  // namespace fp8flow::hopper
