// SPDX-License-Identifier: MIT
// A GEMM as a kernel argument: operands, scales and rows of D that each tile reads and writes, resolved on
// the device from the group sizes; and the launch functions of this folder. The counterpart of
// kernels/reference/gemm_kernel.h. Read next: README.md, gemm.cu, fallback/simt.cu.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stochastic_rounding.h"
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/ops/gemm.h"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace fp8flow::hopper::gemm {

// Scale of element (i, k) of an operand, i the output index (row of D for A, column for B), k along the
// contraction: scales[group * group_stride + (i / outputs_per_scale) * output_stride + (k / block) *
// block_stride]; null scales mean 1.
struct OperandScale {
    const void* scales = nullptr;
    DType dtype = DType::f32;  // f32 | e8m0
    int outputs_per_scale = 1;
    int block = 0;  // contraction elements per scale; 0: constant along the contraction
    int64_t output_stride = 0;
    int64_t block_stride = 0;
    int64_t group_stride = 0;
};

// Element (i, k) is at data[group * group_stride + i * output_stride + k * k_stride]; one of the two strides
// is 1.
struct GemmOperand {
    const void* data = nullptr;
    DType dtype = DType::f32;
    int64_t output_stride = 0;
    int64_t k_stride = 0;
    int64_t group_stride = 0;
    const int64_t* row_base = nullptr;
    OperandScale scale;

    __device__ int64_t base() const { return row_base != nullptr ? *row_base : 0; }
    __device__ __forceinline__ int64_t at(int64_t group, int64_t output, int64_t k) const {
        return group * group_stride + output * output_stride + k * k_stride;
    }
};

// Which axis the groups divide: the rows of A and D (a dense GEMM is one group), or the contraction (weight
// gradients).
enum class Grouped { rows, contraction };

// Another set of operands over which a grouped contraction continues, with groups of its own.
struct OperandSet {
    DeviceGroups groups{};
    GemmOperand a;
    GemmOperand b;
};

// Counters of a launch that takes its tiles one after the other: all zero before and after it.
struct TileQueue {
    unsigned next, ended;  // the next pair of tiles; clusters that have ended
};

// D(i, j) (+)= sum over k of A(i, k) B(j, k) for every group.
struct GemmProblem {
    Grouped grouped = Grouped::rows;
    DeviceGroups groups{};
    int64_t num_weights = 1;  // Grouped::rows: entries of B; group g reads g % num_weights
    int64_t m = 0;  // rows of D of one group; Grouped::rows: upper bound of the padded rows of all groups
    int64_t n = 0;
    int64_t k = 0;  // Grouped::contraction: upper bound of the padded rows of all groups
    GemmOperand a;
    GemmOperand b;
    Gradient mode = Gradient::overwrite;
    void* d = nullptr;
    DType d_dtype = DType::f32;
    const int64_t* d_row_base = nullptr;
    OperandSet second;            // num_groups 0: none; read by adds_nothing alone
    StochasticRounding rounding;  // of weight gradients in BF16
    double* squares = nullptr;    // of weight gradients: sums of squares, kernels/ops/squares.h; null: none
    TileQueue* queue = nullptr;   // of wgmma kernels next to other streams' work; null: tiles divided evenly

    // The entry of B that a group of rows is multiplied by.
    __host__ __device__ int64_t weight_of(int64_t group) const {
        return group < num_weights ? group : group % num_weights;
    }
    // Whether a weight gradient adds nothing to a group; sets after the second are not asked.
    __device__ bool adds_nothing(int64_t group) const {
        return groups.count(group) == 0 && (second.groups.num_groups == 0 || second.groups.count(group) == 0);
    }
    __host__ __device__ bool scaled() const { return a.scale.scales != nullptr || b.scale.scales != nullptr; }
};

// A tile of D of the fallback kernels (sm90/ has its own, WorkTile): `rows` rows are written, the first
// `valid` with results, the others (pads) with zeros.
struct Tile {
    int64_t group;               // Grouped::rows: weight_of it
    int64_t a_output, b_output;  // output index of the tile's first row and column in A and B
    int64_t a_k, b_k, k;         // contraction: its first index in A and B, its length
    int64_t d_row;               // first row, in rows of n elements
    int64_t rows, valid;         // rows <= 0: nothing to do
    bool past_end;               // Grouped::rows: no group has a tile of this or any later index
};

// Upper bound of the number of row tiles; the exact number is known on the device only.
inline int64_t row_tiles_bound(const GemmProblem& p, int64_t tile_rows) {
    if (p.grouped == Grouped::contraction) return p.groups.num_groups * ceil_div(p.m, tile_rows);
    return p.groups.num_groups == 1 ? ceil_div(p.m, tile_rows) : p.m / tile_rows + p.groups.num_groups;
}

// Tile `index`, columns fastest, groups in order; a tile never spans two groups.
__device__ inline Tile find_tile(const GemmProblem& p, int64_t index, int64_t tile_rows, int64_t tile_cols) {
    const int64_t col_tiles = (p.n + tile_cols - 1) / tile_cols;
    int64_t row_tile = index / col_tiles;
    Tile tile{};
    tile.b_output = index % col_tiles * tile_cols;
    if (p.grouped == Grouped::contraction) {
        const int64_t row_tiles = (p.m + tile_rows - 1) / tile_rows;
        tile.group = row_tile / row_tiles;
        tile.a_output = row_tile % row_tiles * tile_rows;
        tile.k = p.groups.count(tile.group);
        tile.a_k = p.a.base() + p.groups.offset(tile.group);
        tile.b_k = p.b.base() + p.groups.offset(tile.group);
        tile.d_row = tile.group * p.m + tile.a_output;
        // a group without rows adds nothing
        tile.rows = tile.k == 0 && p.mode == Gradient::accumulate ? 0 : min(p.m - tile.a_output, tile_rows);
        tile.valid = tile.rows;
        return tile;
    }
    for (int64_t g = 0; g < p.groups.num_groups; ++g) {
        const int64_t first = p.groups.offset(g), padded = p.groups.offset(g + 1) - first;
        const int64_t tiles = (padded + tile_rows - 1) / tile_rows;
        if (row_tile >= tiles) {
            row_tile -= tiles;
            continue;
        }
        const int64_t row = row_tile * tile_rows;
        tile.group = p.weight_of(g);
        tile.a_output = p.a.base() + first + row;
        tile.k = p.k;
        tile.d_row = (p.d_row_base != nullptr ? *p.d_row_base : 0) + first + row;
        tile.rows = min(padded - row, tile_rows);
        tile.valid = max(min(p.groups.count(g) - row, tile.rows), int64_t{0});
        return tile;
    }
    tile.past_end = true;
    return tile;
}

// Contraction elements between promotions into the FP32 accumulator; 0: none before the end.
__device__ __forceinline__ int64_t promotion_block(const GemmProblem& p) {
    const int a = p.a.scale.block, b = p.b.scale.block;
    return a == 0 ? b : (b == 0 ? a : min(a, b));
}

__device__ __forceinline__ float load_scale(const OperandScale& s, int64_t group, int64_t output, int64_t k) {
    if (s.scales == nullptr) return 1.0f;
    const int64_t at_k = s.block != 0 ? k / s.block * s.block_stride : 0;
    return load_float(s.scales, s.dtype,
                      group * s.group_stride + output / s.outputs_per_scale * s.output_stride + at_k);
}

// Four consecutive elements as fp32, without their scale; zeros from `count` on. One vector load where
// aligned.
__device__ __forceinline__ float4 load_quad(const void* data, DType dtype, int64_t offset, int64_t count) {
    const int64_t width = dtype == DType::f32 ? 4 : (dtype == DType::bf16 ? 2 : 1);
    const uint8_t* at = static_cast<const uint8_t*>(data) + offset * width;
    if (count >= 4 && reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(4 * width) == 0) {
        if (dtype == DType::f32) return *reinterpret_cast<const float4*>(at);
        if (dtype == DType::bf16) {
            const uint2 bits = *reinterpret_cast<const uint2*>(at);
            return {bits_float(bits.x << 16), bits_float(bits.x & 0xFFFF0000u), bits_float(bits.y << 16),
                    bits_float(bits.y & 0xFFFF0000u)};
        }
        const uint32_t fp8 = *reinterpret_cast<const uint32_t*>(at);
        const __nv_fp8_interpretation_t kind = dtype == DType::e5m2 ? __NV_E5M2 : __NV_E4M3;
        const auto low = static_cast<__nv_fp8x2_storage_t>(fp8 & 0xFFFFu);
        const auto high = static_cast<__nv_fp8x2_storage_t>(fp8 >> 16);
        const float2 x = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(low, kind)));
        const float2 y = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(high, kind)));
        return {x.x, x.y, y.x, y.y};
    }
    return {count > 0 ? load_float(data, dtype, offset) : 0.0f,
            count > 1 ? load_float(data, dtype, offset + 1) : 0.0f,
            count > 2 ? load_float(data, dtype, offset + 2) : 0.0f,
            count > 3 ? load_float(data, dtype, offset + 3) : 0.0f};
}

// Writes a sum to an element of D, or adds it. What is added to BF16 is rounded stochastically.
__device__ __forceinline__ void store_sum(const GemmProblem& p, int64_t row, int64_t col, float sum) {
    const int64_t at = row * p.n + col;
    if (p.mode == Gradient::accumulate) sum = load_float(p.d, p.d_dtype, at) + sum;
    if (p.mode == Gradient::accumulate && p.d_dtype == DType::bf16)
        static_cast<Bf16*>(p.d)[at] = round_stochastically(
            sum, rounding_bits(rounding_row(p.rounding.step_key(), p.rounding.first + row), col));
    else
        store_float(p.d, p.d_dtype, at, sum);
}

// An operation as a GEMM problem (problem.cu), and what else decides which kernel runs. The form of FP8
// operands is nt, because weight gradients read the transposed copies.
struct GemmCall {
    GemmProblem problem;
    op::GemmForm form = op::GemmForm::nt;
    ScaledTensor a, b;            // as stored
    int64_t group_alignment = 1;  // padded group sizes are multiples of it
};
GemmCall call_of(const op::Gemm& args);
GemmCall call_of(const op::GroupedGemm& args);
GemmCall call_of(const op::GroupedGemmSwigluQuantize& args);  // its GEMM
GemmCall call_of(const op::GroupedGemmWgrad& args);

// Any GEMM, summed exactly in the order of kernels/ops/gemm.h.
void launch_simt(const GemmProblem& problem, const Launch& launch);

// Grouped and dense GEMMs on wgmma (sm90/wgmma_dispatch.cu), where dtypes, layouts and alignments allow.
bool wgmma_supports(const GemmCall& call);
// The launch functions below return false, and do nothing, where the kernels do not support the GEMM. call:
// call_of(args).
bool launch_wgmma_swiglu(const op::GroupedGemmSwigluQuantize& args, const GemmCall& call,
                         const Launch& launch);
// problem.squares is written by weight gradients with writes_squares only.
bool launch_wgmma(const GemmCall& call, const Launch& launch);
// Weight gradients of kernels that sum the squares of what they store (sm90/fp8_wgrad.cu, bf16_wgrad.cu).
bool writes_squares(const GemmProblem& problem);
// A weight gradient with several sets of operands, in one pass over D. problem: of call_of(args).
bool launch_wgmma_wgrad_sets(const op::GroupedGemmWgrad& args, const GemmProblem& problem,
                             const Launch& launch);

// Writes the sums of squares of D: of all groups, or of those that the kernels of sm90/ pass over because
// they have no rows (squares.cu).
enum class SquaresOf { all_groups, empty_groups };
void launch_squares(const GemmProblem& problem, SquaresOf which, const Launch& launch);

// Any GEMM by the general kernel that `backend` names: tensor cores (fallback/mma.cu; f32 operands on CUDA
// cores all the same), or the reference's bits (fallback/simt.cu).
void launch_fallback(const GemmProblem& problem, GemmBackend backend, const Launch& launch);

}  // namespace fp8flow::hopper::gemm
