// SPDX-License-Identifier: MIT
// The kernels of the NCCL exchange: they find the positions of rows in messages, pack messages, and add
// returned rows. A choice is one (token, expert) pair. Messages have consecutive rows in the order (source
// rank, token) or (source rank, token, expert), as in the reference exchange. Letters: G ranks, S slots, K
// top-k, T tokens of this rank, R received rows.
//
// `stride`: messages of a fixed size; that of rank g begins at row g * stride. 0: messages have no gaps.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stream.h"
#include "kernels/core/tensor.h"
#include "kernels/exchange.h"

namespace fp8flow::hopper::nccl {

// Positions in the messages of one plan; device data.
struct Positions {
    // Prefix sums, with the total at the end (index T or R).
    TensorView choice_starts;  // [G, S + 1] i32: choices of own tokens before t with an expert on rank g
    TensorView row_starts;     // [G, S + 1] i32: own tokens before t that rank g needs
    TensorView first_choice;   // [G * S + 1] i32: choices on this rank of received rows before i
    // [4, G] i64, for rank g: rows sent to it, rows received from it, choices of own tokens that it hosts,
    // choices of its tokens on this rank
    TensorView counts;
};
Positions make_positions(const DispatchPlan& plan, Arena& scratch);
void find_positions(const DispatchPlan& plan, int64_t rank, const Positions& positions, const Launch& launch);

// Packs the rows for each rank in ascending token order. Rows for this rank go directly to `received`.
struct PackRows {
    ScaledTensor rows;       // [T, H]; wire layout
    TensorView sent_rows;    // [rows sent, H]
    TensorView sent_scales;  // [rows sent, H/128]; with scales
    ScaledTensor received;   // [G * S, H]
    int64_t num_rows = 0;    // rows sent, with those for this rank; with a stride: G * stride
    int64_t stride = 0;
};
void pack_rows(const PackRows& args, const DispatchPlan& plan, const Positions& positions, int64_t rank,
               const Launch& launch);

// Copies rows between messages of a fixed size (`strided`) and R rows without gaps (`packed`), in the given
// direction. Both are [*, width] with equal row bytes.
enum class Repack { to_packed, to_strided };
struct MoveRows {
    TensorView packed, strided;
    Repack direction = Repack::to_packed;
    bool skip_own = false;  // leave out the rows of this rank
    int64_t stride = 0;
};
void move_rows(const MoveRows& args, const DispatchPlan& plan, int64_t rank, const Launch& launch);

// out row n = src row of the n-th choice on this rank; zeros if an overflow dropped the row.
void pack_choices(const TensorView& src, const DispatchPlan& plan, const Positions& positions,
                  const TensorView& out, int64_t stride, const Launch& launch);
// The same for one float per row.
void pack_choice_values(const TensorView& values, const DispatchPlan& plan, const Positions& positions,
                        const TensorView& out, int64_t stride, const Launch& launch);

// y row t = sum of the returned rows of token t in ascending rank and expert order, plus the residual: FP32,
// one rounding. With weights each row is multiplied by its weight in the fma that adds it. starts: row_starts
// if each rank returns one row per token, choice_starts if it returns every choice.
struct AddReturned {
    TensorView returned;  // [*, H]: by rank, then token, then expert
    TensorView starts;
    TensorView weights;   // [T, K] f32, of the returned rows of each token in their order; optional
    TensorView residual;  // optional
    TensorView y;         // out [T, H]
    int64_t stride = 0;   // of `returned`
};
void add_returned(const AddReturned& args, const Launch& launch);
// dprob[t, k] = the returned value of that choice; 0 for an absent expert.
void place_choice_values(const TensorView& returned, const DispatchPlan& plan, const Positions& positions,
                         int64_t rank, int64_t stride, const TensorView& dprob, const Launch& launch);

// result[i] = rows[0][i] (+) rows[1][i] (+) ..., from left to right; rows are `count` long and `count` apart.
// f32 sum and max (which ignores NaN), i64 sum, i32 max.
void reduce_rows(Reduce reduce, DType dtype, const void* rows, int64_t num_rows, int64_t count, void* result,
                 const Launch& launch);

}  // namespace fp8flow::hopper::nccl
