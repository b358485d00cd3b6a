// The router's products on BF16 rows. fp32 fma on the CUDA cores: tensor cores round their sums elsewhere than the contract. A thread owns
// 64 outputs, so that a term costs it 64 fma, five loads from shared memory and four conversions. Contract: kernels/ops/router.h.
#include "kernels/hopper/router_products.h"

#include "kernels/hopper/device/rows.h"
#include "kernels/ops/router.h"

#include <cuda_pipeline.h>

namespace fp8flow::hopper {

namespace {

constexpr int kThreads = 128, kWarp = 32;
constexpr int kStage = 32;   // terms in a buffer
constexpr int kLong = 256;   // outputs of a CTA on its wide side,
constexpr int kShort = 32;   // and on its narrow side
constexpr int kPerLong = 4;  // outputs of a thread on either side
constexpr int kPerShort = 16;
constexpr int kWarpLong = kLong / (kThreads / kWarp);
constexpr int kCtasPerSm = 4;
constexpr int kPiece = 8;  // BF16 values of a 16-byte copy
static_assert(kWarpLong == kWarp / 2 * kPerLong && kShort == 2 * kPerShort);
static_assert(kPiece == kUnit && op::kRouterBlock % kStage == 0);

__device__ __forceinline__ float low_half(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return __uint_as_float(word & 0xFFFF0000u); }

// 16 values of the narrow side at one term; two distinct addresses a warp.
__device__ __forceinline__ void load_short(const float* from, float (&v)[kPerShort]) {
#pragma unroll
    for (int j = 0; j < kPerShort; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + j);
        v[j] = four.x, v[j + 1] = four.y, v[j + 2] = four.z, v[j + 3] = four.w;
    }
}

// Starts a 16-byte copy; zeros where there is nothing to read.
__device__ __forceinline__ void start_copy(uint16_t* to, const uint16_t* base, int64_t at, bool valid) {
    __pipeline_memcpy_async(to, valid ? base + at : base, 2 * kPiece, valid ? 0 : 2 * kPiece);
}

// ---- logits -----------------------------------------------------------------------------------------------------------------------
// Rows of x stand 80 bytes apart, so that eight neighbouring rows start in different banks.
constexpr int kRowPitch = kStage + kPiece;
constexpr int kPieces = kStage / kPiece;      // of a row in a buffer
constexpr int kRowStep = kThreads / kPieces;  // rows that the CTA copies at a time

// Bytes at T=4096, H=7168, E=32: x 58.7 MB once, the weight (0.46 MB) once per 256 tokens from L2, the sums 14.7 MB; 0.94 G fma: 30 us at
// 31 T fma/s, which is more than the 18 us of the bytes. A CTA owns 256 tokens x 32 experts x one block of 256 columns (448 CTAs there, all
// resident at once); a warp 64 tokens, a thread 4 tokens x 16 experts. x comes by asynchronous copies one buffer of 32 columns ahead, the
// weight by registers, converted and turned to [term][expert]. Two barriers a buffer: it has arrived; all have read it. All loop bounds
// are the same for the CTA. No term is padded into a sum; one accumulator a sum, one writer: deterministic.
__global__ __launch_bounds__(kThreads, kCtasPerSm) void logit_sums_kernel(const LogitSums job, int blocks,
                                                                          int expert_tiles, int64_t items) {
    __shared__ __align__(16) uint16_t x_tile[2][kLong][kRowPitch];
    __shared__ __align__(16) float w_tile[2][kStage][kShort];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int own_token = warp * kWarpLong + lane % 16, own_expert = lane / 16 * kPerShort;
    const uint16_t* x = static_cast<const uint16_t*>(job.x);
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t first_expert = item % expert_tiles * kShort, rest = item / expert_tiles;
        const int64_t block = rest % blocks, first_token = rest / blocks * kLong;
        const int64_t begin = block * op::kRouterBlock, end = min(job.hidden, begin + op::kRouterBlock);
        const int stages = static_cast<int>((end - begin + kStage - 1) / kStage);

        const int64_t x_token = first_token + thread / kPieces;
        const int x_col = thread % kPieces * kPiece;
        const auto start_x = [&](int stage) {
            const int64_t h = begin + stage * kStage + x_col;
#pragma unroll
            for (int i = 0; i < kLong / kRowStep; ++i) {
                const int64_t token = x_token + i * kRowStep;
                start_copy(&x_tile[stage % 2][thread / kPieces + i * kRowStep][x_col], x,
                           token * job.hidden + h, token < job.tokens && h < end);
            }
        };
        uint4 w;  // eight terms of one expert: warp u reads terms 8u .. 8u + 7
        const int64_t w_expert = first_expert + lane;
        const auto load_w = [&](int stage) {
            const int64_t h = begin + stage * kStage + warp * kPiece;
            w = uint4{};
            if (w_expert < job.experts && h < end)
                w = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(job.weight) +
                                                    w_expert * job.hidden + h);
        };
        const auto store_w = [&](int stage) {
            float v[kPiece];
            unpack_unit(w, DType::bf16, v);
#pragma unroll
            for (int j = 0; j < kPiece; ++j) w_tile[stage % 2][warp * kPiece + j][lane] = v[j];
        };

        float sum[kPerLong][kPerShort] = {};
        start_x(0);
        __pipeline_commit();
        load_w(0);
        store_w(0);
        for (int stage = 0; stage < stages; ++stage) {
            const bool more = stage + 1 < stages;
            if (more) start_x(stage + 1);
            __pipeline_commit();
            if (more) load_w(stage + 1);
            __pipeline_wait_prior(1);
            __syncthreads();
            const int units = static_cast<int>(min(int64_t{kStage}, end - begin - stage * kStage)) / kPiece;
#pragma unroll 1
            for (int unit = 0; unit < units; ++unit) {
                uint4 raw[kPerLong];
#pragma unroll
                for (int i = 0; i < kPerLong; ++i)
                    raw[i] = *reinterpret_cast<const uint4*>(
                        &x_tile[stage % 2][own_token + 16 * i][unit * kPiece]);
#pragma unroll
                for (int k = 0; k < kPiece; ++k) {
                    float b[kPerShort];
                    load_short(&w_tile[stage % 2][unit * kPiece + k][own_expert], b);
#pragma unroll
                    for (int i = 0; i < kPerLong; ++i) {
                        const uint32_t word = k < 2   ? raw[i].x
                                              : k < 4 ? raw[i].y
                                              : k < 6 ? raw[i].z
                                                      : raw[i].w;
                        const float a = k % 2 == 0 ? low_half(word) : high_half(word);
#pragma unroll
                        for (int j = 0; j < kPerShort; ++j) sum[i][j] = fma_float(a, b[j], sum[i][j]);
                    }
                }
            }
            if (more) store_w(stage + 1);
            __syncthreads();
        }

        const int64_t expert = first_expert + own_expert;
        const bool wide = job.experts % 4 == 0 && reinterpret_cast<uintptr_t>(job.sums) % 16 == 0;
#pragma unroll
        for (int i = 0; i < kPerLong; ++i) {
            const int64_t token = first_token + own_token + 16 * i;
            if (token >= job.tokens) continue;
            float* out = job.sums + (block * job.tokens + token) * job.experts + expert;
#pragma unroll
            for (int j = 0; j < kPerShort; j += 4) {
                if (wide && expert + j < job.experts) {
                    *reinterpret_cast<float4*>(out + j) =
                        float4{sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]};
                } else {
#pragma unroll
                    for (int n = j; n < j + 4; ++n)
                        if (expert + n < job.experts) out[n] = sum[i][n];
                }
            }
        }
    }
}

// ---- gradients --------------------------------------------------------------------------------------------------------------------
// A product whose narrow operand is dlogits and whose wide operand is rows of BF16 values, one row a term.
struct RowProduct {
    const float* dlogits;  // [tokens, experts]
    const uint16_t* rows;  // row of a term: `pitch` apart
    int64_t tokens, experts, columns, pitch;
    float* sums;             // dweight
    const uint16_t* addend;  // dx
    uint16_t* out;
    int64_t short_tiles, long_tiles, items;
};

enum class Side {
    weight,
    input
};  // dweight: terms are tokens, outputs experts; dx: terms are experts, outputs tokens

// Bytes at T=4096, H=7168, E=32, each with 0.94 G fma (30 us). dweight: x 58.7 MB once, dlogits 0.5 MB per 256 columns from L2, the sums
// 14.7 MB: 18 us. dx: dx_in and dx 117 MB: 29 us, the weight once per 32 tokens from L2. A CTA owns 32 experts (tokens) x 256 columns x one
// block of 256 tokens (all experts); a warp 64 columns, a thread 16 x 4. Rows come by asynchronous copies one buffer of 32 terms ahead,
// dlogits by registers to [term][output]. Four CTAs on an SM: one computes while another waits for memory. Barriers, bounds and determinism
// as above.
constexpr int kShortPitch = kShort + 4;  // 16-byte aligned rows; turned stores spread over eight banks

template <Side kSide>
__global__ __launch_bounds__(kThreads, kCtasPerSm) void row_product_kernel(const RowProduct job) {
    __shared__ __align__(16) uint16_t row_tile[2][kStage][kLong];
    __shared__ __align__(16) float short_tile[2][kStage][kShortPitch];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int own_column = warp * kWarpLong + lane % 16 * kPerLong, own_short = lane / 16 * kPerShort;
    const int64_t shorts = kSide == Side::weight ? job.experts : job.tokens;
    for (int64_t item = blockIdx.x; item < job.items; item += gridDim.x) {
        const int64_t first_column = item % job.long_tiles * kLong, rest = item / job.long_tiles;
        const int64_t first_short = rest % job.short_tiles * kShort, block = rest / job.short_tiles;
        const int64_t begin = kSide == Side::weight ? block * op::kRouterBlock : 0;
        const int64_t end = kSide == Side::weight ? min(job.tokens, begin + op::kRouterBlock) : job.experts;
        const int stages = static_cast<int>((end - begin + kStage - 1) / kStage);

        const auto start_rows = [&](int stage) {
#pragma unroll
            for (int i = 0; i < kStage * kLong / kPiece / kThreads; ++i) {
                const int piece = thread + i * kThreads, row = piece / (kLong / kPiece),
                          col = piece % (kLong / kPiece) * kPiece;
                const int64_t term = begin + stage * kStage + row, column = first_column + col;
                start_copy(&row_tile[stage % 2][row][col], job.rows, term * job.pitch + column,
                           term < end && column < job.columns);
            }
        };
        // A warp reads one row of dlogits a turn: 32 experts of a token.
        constexpr int kTurns = kStage * kShort / kThreads;
        float values[kTurns];
        const auto load_short_tile = [&](int stage) {
#pragma unroll
            for (int i = 0; i < kTurns; ++i) {
                const int row = warp + i * (kThreads / kWarp);
                const int64_t first_term = begin + stage * kStage;
                const int64_t token = (kSide == Side::weight ? first_term : first_short) + row,
                              expert = (kSide == Side::weight ? first_short : first_term) + lane;
                const bool valid = token < (kSide == Side::weight ? end : job.tokens) && expert < job.experts;
                values[i] = valid ? job.dlogits[token * job.experts + expert] : 0.0f;
            }
        };
        const auto store_short_tile = [&](int stage) {
#pragma unroll
            for (int i = 0; i < kTurns; ++i) {
                const int row = warp + i * (kThreads / kWarp);
                if (kSide == Side::weight)
                    short_tile[stage % 2][row][lane] = values[i];
                else
                    short_tile[stage % 2][lane][row] = values[i];
            }
        };

        float sum[kPerShort][kPerLong] = {};
        start_rows(0);
        __pipeline_commit();
        load_short_tile(0);
        store_short_tile(0);
        for (int stage = 0; stage < stages; ++stage) {
            const bool more = stage + 1 < stages;
            if (more) start_rows(stage + 1);
            __pipeline_commit();
            if (more) load_short_tile(stage + 1);
            __pipeline_wait_prior(1);
            __syncthreads();
            const auto add_term = [&](int k) {
                float a[kPerShort];
                load_short(&short_tile[stage % 2][k][own_short], a);
                const uint2 raw = *reinterpret_cast<const uint2*>(&row_tile[stage % 2][k][own_column]);
                const float b[kPerLong] = {low_half(raw.x), high_half(raw.x), low_half(raw.y),
                                           high_half(raw.y)};
#pragma unroll
                for (int i = 0; i < kPerShort; ++i)
#pragma unroll
                    for (int j = 0; j < kPerLong; ++j) sum[i][j] = fma_float(a[i], b[j], sum[i][j]);
            };
            const int64_t left = end - begin - stage * kStage;
            if (left >= kStage) {
#pragma unroll 4
                for (int k = 0; k < kStage; ++k) add_term(k);
            } else {
#pragma unroll 1
                for (int k = 0; k < static_cast<int>(left); ++k) add_term(k);
            }
            if (more) store_short_tile(stage + 1);
            __syncthreads();
        }

        const int64_t column = first_column + own_column;
        if (column >= job.columns) continue;  // behind the item's last barrier
        if (kSide == Side::weight) {
#pragma unroll
            for (int i = 0; i < kPerShort; ++i) {
                const int64_t expert = first_short + own_short + i;
                if (expert < job.experts)
                    *reinterpret_cast<float4*>(job.sums + (block * job.experts + expert) * job.columns +
                                               column) = float4{sum[i][0], sum[i][1], sum[i][2], sum[i][3]};
            }
            continue;
        }
        constexpr int kBatch =
            8;  // rows of the addend in flight: loads cannot pass stores that may be to the same tensor
#pragma unroll
        for (int i0 = 0; i0 < kPerShort; i0 += kBatch) {
            uint2 more[kBatch] = {};
            if (job.addend != nullptr) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int64_t token = first_short + own_short + i0 + i;
                    if (token < shorts)
                        more[i] = *reinterpret_cast<const uint2*>(job.addend + token * job.columns + column);
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int64_t token = first_short + own_short + i0 + i;
                if (token >= shorts) continue;
                float v[kPerLong] = {sum[i0 + i][0], sum[i0 + i][1], sum[i0 + i][2], sum[i0 + i][3]};
                if (job.addend != nullptr) {
                    v[0] += low_half(more[i].x), v[1] += high_half(more[i].x);
                    v[2] += low_half(more[i].y), v[3] += high_half(more[i].y);
                }
                *reinterpret_cast<uint2*>(job.out + token * job.columns + column) =
                    uint2{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
            }
        }
    }
}

template <Side kSide> void launch_row_product(const RowProduct& job, const Launch& launch, const char* op) {
    if (job.items == 0) return;
    row_product_kernel<kSide>
        <<<grid_for(job.items, launch, kCtasPerSm), kThreads, 0, stream_of(launch)>>>(job);
    check_launch(op);
}

}  // namespace

void launch_logit_sums(const LogitSums& job, const Launch& launch) {
    const int64_t blocks = ceil_div(job.hidden, op::kRouterBlock),
                  expert_tiles = ceil_div(job.experts, kShort);
    const int64_t items = ceil_div(job.tokens, kLong) * blocks * expert_tiles;
    if (items == 0) return;
    logit_sums_kernel<<<grid_for(items, launch, kCtasPerSm), kThreads, 0, stream_of(launch)>>>(
        job, static_cast<int>(blocks), static_cast<int>(expert_tiles), items);
    check_launch("router_logits");
}

void launch_weight_sums(const WeightSums& job, const Launch& launch) {
    RowProduct product{.dlogits = job.dlogits,
                       .rows = static_cast<const uint16_t*>(job.x),
                       .tokens = job.tokens,
                       .experts = job.experts,
                       .columns = job.columns,
                       .pitch = job.pitch,
                       .sums = job.sums,
                       .addend = nullptr,
                       .out = nullptr,
                       .short_tiles = ceil_div(job.experts, kShort),
                       .long_tiles = ceil_div(job.columns, kLong),
                       .items = 0};
    product.items = product.short_tiles * product.long_tiles * ceil_div(job.tokens, op::kRouterBlock);
    launch_row_product<Side::weight>(product, launch, "router_logits_backward: dweight");
}

void launch_input_gradient(const InputGradient& job, const Launch& launch) {
    RowProduct product{.dlogits = job.dlogits,
                       .rows = static_cast<const uint16_t*>(job.weight),
                       .tokens = job.tokens,
                       .experts = job.experts,
                       .columns = job.hidden,
                       .pitch = job.hidden,
                       .sums = nullptr,
                       .addend = static_cast<const uint16_t*>(job.dx_in),
                       .out = static_cast<uint16_t*>(job.dx),
                       .short_tiles = ceil_div(job.tokens, kShort),
                       .long_tiles = ceil_div(job.hidden, kLong),
                       .items = 0};
    product.items = product.short_tiles * product.long_tiles;
    launch_row_product<Side::input>(product, launch, "router_logits_backward: dx");
}

}  // namespace fp8flow::hopper
