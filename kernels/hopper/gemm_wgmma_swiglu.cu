// fc1 with its activation: the grouped FP8 product of gemm_wgmma_fp8.cu whose epilogue rounds h = [gate, up] to BF16, makes
// silu(gate) * up * prob and quantises it in 1x128 blocks. Bit-equal to the product followed by swiglu_quantize (kernels/ops/gemm.h).
// Read next: gemm_wgmma.h (tiles, barriers), device/sigmoid.h, docs/gemm_worklog.md.
//
// Floor: the product's FLOPs; x and W1 read once, F codes and F / 128 scales a row written (4 F bytes more where h is kept). At the DeepSeek-V3
// shape (32 x 1024 rows, F 2048, K 7168) 0.24 + 0.94 + 0.07 GB for 1.92 TFLOP: bound by tensor cores, and 0.54 GB less than the parts move.
// One CTA: as there, but the 256 columns of a tile are 128 of gate and the 128 of up that belong to them, so that a tile is a whole 1x128 block
// of the activation. Each warpgroup holds, of all 128 rows, 64 columns of gate and the same 64 of up: a thread has both halves of
// 16 activations in each of its four rows, and needs of the other warpgroup no more than each row's largest value.
//
// Shared memory: as there; B of a stage is [gate 0-63 | up 0-63 | gate 64-127 | up 64-127] x 128 bytes; the rows' largest values, for two tiles by
// turns: a warpgroup writes those of the next tile but one only after both have met for the next.
// Barriers: as there; named barrier 4, once a tile: both warpgroups have written their rows' largest values. It adds no wait in a circle: the
// loader needs nothing of a tile whose stages are released, and the second warpgroup has been let in before the first can come here.
// Deterministic: a sum is one thread's over ascending k, maxima are the same in any order.
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/gemm_wgmma.h"

namespace fp8flow::hopper {

namespace {

constexpr int kDepth = 128;                     // contraction elements of a stage, and per promotion
constexpr int kActs = kTileCols / 2;            // columns of the activation in a tile: one scale block
constexpr int kPart = kActs / kMathWarpgroups;  // of them in a warpgroup, and rows of a box of B
constexpr int kRowsHeld = 4;                    // by a thread: row0 + {0, 8, 64, 72}
constexpr int kWords = kPart / 8;               // pairs of columns held of a row's gate, and of its up
constexpr int kSteps = 16;                      // whose scales of B a warp holds
constexpr int kMaximaBarrier = kRing + 2;       // behind those by which the warpgroups take turns
static_assert(kActs == kBlock);

// Beside h, which is the product's D.
struct Activation {
    RowView prob;      // [M] f32; absent: 1
    RowView codes;     // [M, F] e4m3
    RowScales scales;  // [F / 128, M]
    ScaleFormat scale_format = ScaleFormat::pow2;
    op::SaveH save_h = op::SaveH::yes;
};

// ---- epilogue ---------------------------------------------------------------------------------------------------------------------------
// h as the product stores it: BF16 pairs of columns 8 * j + 2 * (lane % 4) of this warpgroup's part.
struct HalfRow {
    uint32_t gate[kWords], up[kWords];
};

// 8 columns of every four words gathered into one lane of the quad: 16 bytes a thread and access.
__device__ __forceinline__ void store_half(Bf16* row, const uint32_t (&words)[kWords], bool wanted) {
    const int quad = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kWords; j += 4) {
        uint32_t piece[4] = {words[j], words[j + 1], words[j + 2], words[j + 3]};
        const uint4 chunk = gather_chunk(piece);
        if (wanted) *reinterpret_cast<uint4*>(row + 8 * (j + quad)) = chunk;
    }
}

__device__ __forceinline__ float bf16_of(uint32_t pair, int which) {
    return __uint_as_float(which == 0 ? pair << 16 : pair & 0xFFFF0000u);
}

// How far the gates of a warp reach: up to kNear, or anywhere.
enum class Range { near, any };

// (silu(gate) * up) * prob of 16 columns; the largest magnitude of them that is a number.
template <Range kRange>
__device__ __forceinline__ float activate(const HalfRow& h, float prob, float (&a)[2 * kWords]) {
    float sigmoid[2 * kWords], largest = 0.0f;
    if (kRange == Range::near) {
#pragma unroll
        for (int i = 0; i < 2 * kWords; ++i) sigmoid[i] = sigmoid_near(bf16_of(h.gate[i / 2], i % 2));
    } else {
#pragma unroll
        for (int i = 0; i < 2 * kWords; ++i) sigmoid[i] = bf16_of(h.gate[i / 2], i % 2);
#pragma unroll 1
        for (int i = 0; i < 2 * kWords; ++i) {
            sigmoid[0] = sigmoid_float(sigmoid[0]);
            rotate(sigmoid);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) {
        a[i] = bf16_of(h.gate[i / 2], i % 2) * sigmoid[i] * bf16_of(h.up[i / 2], i % 2) * prob;
        largest = fmaxf(largest, fabsf(a[i]));  // of a number and NaN: the number
    }
    return largest;
}

// From the sums of a tile to codes, scales and h. Called by all threads of both warpgroups for every tile; `turn` alternates.
__device__ __forceinline__ void finish_tile(const DeviceProduct& p, const Activation& out,
                                            const MathTile& tile, WgmmaShared& shared, int warpgroup,
                                            int turn, int row0, const float (&sum)[2][64]) {
    const int quad = static_cast<int>(threadIdx.x % 4);
    const int64_t width = p.n / 2, block = tile.b_output / kTileCols,
                  col0 = block * kActs + warpgroup * kPart;
    const bool inside = tile.b_output < p.n;         // a pair may reach past the last column
    const int64_t row = tile.a_output - p.a.base(),  // relative to the row bases
        act_row = out.codes.base() + row, prob_row = out.prob.base() + row;
    const auto row_of = [&](int r) { return row0 + r / 2 * 64 + r % 2 * 8; };

    float prob[kRowsHeld];
#pragma unroll
    for (int r = 0; r < kRowsHeld; ++r)
        prob[r] = out.prob && row_of(r) < tile.valid
                      ? static_cast<const float*>(out.prob.data)[prob_row + row_of(r)]
                      : 1.0f;

    HalfRow h[kRowsHeld];
#pragma unroll
    for (int r = 0; r < kRowsHeld; ++r)
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const int gate = 4 * j + r % 2 * 2, up = gate + 4 * kWords;
            h[r].gate[j] = pack_bf16(sum[r / 2][gate], sum[r / 2][gate + 1]);
            h[r].up[j] = pack_bf16(sum[r / 2][up], sum[r / 2][up + 1]);
        }
    if (tile.valid < kTileRows) {  // pads: what stands in their rows of A is anything
#pragma unroll
        for (int r = 0; r < kRowsHeld; ++r)
            if (row_of(r) >= tile.valid) h[r] = HalfRow{};
    }
    if (out.save_h == op::SaveH::yes) {
#pragma unroll
        for (int r = 0; r < kRowsHeld; ++r) {
            const bool wanted = inside && use_of(tile, row_of(r)) != RowUse::none;
            Bf16* to = static_cast<Bf16*>(p.d) + (tile.d_row + row_of(r)) * p.n + col0;
            store_half(to, h[r].gate, wanted);
            store_half(to + width, h[r].up, wanted);
        }
    }

    // Gates beyond kNear, infinite or NaN ones included, are rare: then the whole warp takes the general way.
    constexpr uint32_t kNearBf16 = 0x42A0, kMagnitudes = 0x7FFF7FFF;
    uint32_t farthest = 0;
#pragma unroll
    for (int r = 0; r < kRowsHeld; ++r)
#pragma unroll
        for (int j = 0; j < kWords; ++j) farthest = __vmaxu2(farthest, h[r].gate[j] & kMagnitudes);
    const bool near = __all_sync(0xFFFFFFFFu, max(farthest & 0xFFFFu, farthest >> 16) <= kNearBf16);

    float a[kRowsHeld][2 * kWords], largest[kRowsHeld];
    if (near) {
#pragma unroll
        for (int r = 0; r < kRowsHeld; ++r) largest[r] = activate<Range::near>(h[r], prob[r], a[r]);
    } else {
#pragma unroll
        for (int r = 0; r < kRowsHeld; ++r) largest[r] = activate<Range::any>(h[r], prob[r], a[r]);
    }
    float(&maxima)[kMathWarpgroups][kTileRows] = shared.row_maxima[turn];
#pragma unroll
    for (int r = 0; r < kRowsHeld; ++r) {
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xFFFFFFFFu, largest[r], 1));
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xFFFFFFFFu, largest[r], 2));
        if (quad == 0) maxima[warpgroup][row_of(r)] = largest[r];
    }
    __syncwarp();
    meet(kMaximaBarrier, kMathThreads);

    // of the quad's four rows, each lane makes the scale of one; both warpgroups do, and each stores those of 64 rows
    const int own = row_of(quad);
    const QuantScale scale = quant_scale(fmaxf(maxima[0][own], maxima[1][own]), kE4m3Max, out.scale_format);
    if (const RowUse use = use_of(tile, own); inside && use != RowUse::none && quad / 2 == warpgroup)
        static_cast<float*>(out.scales.data)[out.scales.index(act_row + own, block)] =
            use == RowUse::product ? scale.dequant : 0.0f;
#pragma unroll
    for (int r = 0; r < kRowsHeld; ++r) {
        const float m = __shfl_sync(0xFFFFFFFFu, scale.multiplier, r, 4);
        uint32_t words[4];  // columns 16 * c + 2 * quad, the next, and the two 8 further on
#pragma unroll
        for (int c = 0; c < 4; ++c)
            words[c] = pack_fp8(a[r][4 * c] * m, a[r][4 * c + 1] * m, a[r][4 * c + 2] * m,
                                a[r][4 * c + 3] * m, DType::e4m3);
        const uint4 pieces = gather_chunk(words);
        constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;  // halves of two words
        const uint4 codes = {__byte_perm(pieces.x, pieces.y, kLow), __byte_perm(pieces.z, pieces.w, kLow),
                             __byte_perm(pieces.x, pieces.y, kHigh), __byte_perm(pieces.z, pieces.w, kHigh)};
        if (inside && use_of(tile, row_of(r)) != RowUse::none)
            *reinterpret_cast<uint4*>(static_cast<uint8_t*>(out.codes.data) + (act_row + row_of(r)) * width +
                                      col0 + 16 * quad) = codes;
    }
}

// ---- computing: one warpgroup -----------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void multiply_tiles(const DeviceProduct& p, const Activation& out,
                                               WgmmaShared& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * 16 + lane / 4;
    const float* scales_b = static_cast<const float*>(p.b.scale.scales);
    const int64_t last_block = p.n / kTileCols - 1;
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;
    int turn = 0, maxima_turn = 0;
    for (;;) {
        MathTile tile;
        if (!next_tile(shared, ring, tile)) return;

        // scales of B, constant over the tile's gate and over its up: of every 16 steps, lane l holds that of gate in step l, lane 16 + l
        // that of up
        const int64_t block = min(tile.b_output / kTileCols, last_block);
        const float* at_b = scales_b + tile.group * p.b.scale.group_stride +
                            (block + lane / kSteps * (last_block + 1)) * p.b.scale.output_stride;
        const auto read_scale = [&](int first) {
            const int step = first + lane % kSteps;
            return step < tile.steps ? at_b[step * p.b.scale.block_stride] : 0.0f;
        };
        float scales = read_scale(0), next_scales = 0.0f;
        float sum[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.0f;
        // The second warpgroup starts when the first has its first sums: from then on they take turns on the tensor cores.
        if (warpgroup == 1) meet(1 + turn, kMathThreads);
        for (int step = 0; step < tile.steps; ++step) {
            if (step % kSteps == 0) {
                if (step > 0) scales = next_scales;
                next_scales = read_scale(step + kSteps);
            }
            const float of_gate = __shfl_sync(0xFFFFFFFFu, scales, step % kSteps),
                        of_up = __shfl_sync(0xFFFFFFFFu, scales, step % kSteps + kSteps);
            barrier_wait(&shared.full[stage.index], stage.parity);
            const uint8_t* rows = shared.stages[stage.index];
            const float* row_scales = shared.row_scales[stage.index] + row0;
            const float of_rows[kRowsHeld] = {row_scales[0], row_scales[8], row_scales[64], row_scales[72]};
            const uint64_t b = swizzled_rows(rows + (kTileRows + warpgroup * 2 * kPart) * kDepth);
            // 64 rows: sums of 128 products, scaled and added; `read` is called once nothing of the stage is needed any more
            const auto multiply = [&](int half, float(&result)[64], auto read) {
                float partial[64];
                const uint64_t a = swizzled_rows(rows + half * 64 * kDepth);
                wgmma_fence();
                keep_in_place(partial);
#pragma unroll
                for (int k = 0; k < kDepth / 32; ++k)
                    WgmmaE4m3::multiply(partial, a + 2 * k, b + 2 * k, k > 0);
                wgmma_commit();
                wgmma_wait<0>();
                keep_in_place(partial);
                read();
                const float above = of_rows[2 * half], below = of_rows[2 * half + 1];
                const float factors[2][2] = {{above * of_gate, below * of_gate},
                                             {above * of_up, below * of_up}};
#pragma unroll
                for (int i = 0; i < 64; ++i)
                    result[i] = fma_float(partial[i], factors[i / (4 * kWords)][i / 2 % 2], result[i]);
            };
            multiply(0, sum[0], [] {});
            if (step == 0 && warpgroup == 0) announce(1 + turn, kMathThreads);
            multiply(1, sum[1], [&] { release_stage(shared, stage.index); });
            stage.advance();
        }
        turn = turn == kRing ? 0 : turn + 1;
        finish_tile(p, out, tile, shared, warpgroup, maxima_turn, row0, sum);
        maxima_turn ^= 1;
    }
}

__global__ void __launch_bounds__(kWgmmaThreads, 1)
    swiglu_product_kernel(const __grid_constant__ DeviceProduct product,
                          const __grid_constant__ CUtensorMap map_a,
                          const __grid_constant__ CUtensorMap map_b, const __grid_constant__ Activation out) {
    const auto load = [&](WgmmaShared& shared) {
        const int rank = static_cast<int>(cluster_rank());
        constexpr uint32_t kRowBytes = kTileRows * sizeof(float);
        load_tiles<kDepth>(
            product, shared, kStageBytes + kRowBytes,
            [&](const MathTile& tile, int step, int index, Barrier* full) {
                const int at_k = step * kDepth, a = static_cast<int>(tile.a_output),
                          width = static_cast<int>(product.n / 2),
                          gate = static_cast<int>(tile.group * product.n + tile.b_output / 2);
                const auto load_of = [&](Common operand) {
                    return tile.common == operand ? Load::common : Load::own;
                };
                uint8_t *to_a = shared.stages[index], *to_b = to_a + kTileRows * kStageRowBytes;
                load_operand<2>(load_of(Common::a), rank, &map_a, full, to_a, kTileRows / 2 * kStageRowBytes,
                                [&](int i) { return make_int2(at_k, a + i * kTileRows / 2); });
                load_operand<4>(load_of(Common::b), rank, &map_b, full, to_b, kPart * kStageRowBytes,
                                [&](int i) { return make_int2(at_k, gate + i / 2 * kPart + i % 2 * width); });
                bulk_load(static_cast<const float*>(product.a.scale.scales) +
                              step * product.a.scale.block_stride + tile.a_output,
                          full, shared.row_scales[index], kRowBytes);
            });
    };
    run_roles(load,
              [&](WgmmaShared& shared, int warpgroup) { multiply_tiles(product, out, shared, warpgroup); });
}

}  // namespace

bool launch_wgmma_swiglu(const op::GroupedGemmSwigluQuantize& args, const Launch& launch) {
    const TensorView &a = args.a.codes, &b = args.b.codes, &act = args.act.codes;
    const DeviceProduct p =
        product_of(op::GroupedGemm{.a = args.a, .b = args.b, .groups = args.groups, .d = args.h});
    if (!wgmma_takes_fp8(p, args.groups.alignment) || !addressable(a) || !addressable(b) ||
        !addressable(act) || !addressable(args.h) || a.numel() == 0 || b.numel() == 0)
        return false;
    if (a.dtype != DType::e4m3 || act.dtype != DType::e4m3 || act.cols() % kActs != 0) return false;
    const CUtensorMap map_a = tensor_map(p.a.codes, p.a.dtype, a.rows(), a.cols(), kTileRows / 2),
                      map_b = tensor_map(p.b.codes, p.b.dtype, b.rows(), b.cols(), kPart);
    const Activation out{row_view(args.prob), row_view(act), row_scales(args.act), args.scale_format,
                         args.save_h};
    launch_wgmma_kernel(swiglu_product_kernel, p, map_a, map_b, launch, out);
    return true;
}

}  // namespace fp8flow::hopper
