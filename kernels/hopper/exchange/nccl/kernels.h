// SPDX-License-Identifier: MIT
// The kernels of the NCCL exchange: positions of rows and choices in messages, packing, and the owner's sums.
// A choice is one (token, expert) pair. Messages carry consecutive rows in the order (source rank, token) or
// (source rank, token, expert), as in the reference exchange. Letters: G ranks, S slots, K top-k, T tokens of
// this rank, R received rows.
//
// `stride`: where messages have a fixed size, that of rank g begins at row g * stride, whatever it holds; 0:
// each begins where the one before ends.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stream.h"
#include "kernels/core/tensor.h"
#include "kernels/exchange.h"

namespace fp8flow::hopper::nccl {

// Positions in the messages of one plan; device data.
struct Positions {
    TensorView choice_starts;  // [G, S + 1] i32: choices of own tokens before t with an expert on rank g; at
                               // T: all of them
    TensorView row_starts;     // [G, S + 1] i32: own tokens before t that rank g needs; at T: all of them
    TensorView first_choice;   // [G * S + 1] i32: local choices of received rows before i; at R: all of them
    // [4, G] i64, of rank g: rows sent to it, rows received from it, choices of own tokens that it hosts,
    // local choices of its tokens
    TensorView counts;
};
Positions make_positions(const DispatchPlan& plan, Arena& scratch);
void find_positions(const DispatchPlan& plan, int64_t rank, const Positions& positions, const Launch& launch);

// Packs the rows that others need, by rank in ascending token order; rows for this rank go to their place
// among the received ones.
struct PackRows {
    ScaledTensor rows;      // [T, H]; wire layout
    TensorView out_codes;   // [rows sent, H]
    TensorView out_scales;  // [rows sent, H/128]; with scales
    ScaledTensor received;  // [G * S, H]
    int64_t num_rows = 0;   // sent, this rank's included; with a stride G * stride
    int64_t stride = 0;
};
void pack_rows(const PackRows& args, const DispatchPlan& plan, const Positions& positions, int64_t rank,
               const Launch& launch);

// Between messages of a fixed size and R rows without gaps, but for those of this rank where `skip_own`.
// packed, spread: [*, width] of equal row bytes.
enum class Gaps { close, open };
struct MoveRows {
    TensorView packed, spread;
    Gaps gaps = Gaps::close;  // close: packed is written
    bool skip_own = false;
    int64_t stride = 0;
};
void move_rows(const MoveRows& args, const DispatchPlan& plan, int64_t rank, const Launch& launch);

// out row n = src row of the n-th local choice; zeros where an overflow cut it off.
void pack_choices(const TensorView& src, const DispatchPlan& plan, const Positions& positions,
                  const TensorView& out, int64_t stride, const Launch& launch);
// The same for one float a row.
void pack_choice_values(const TensorView& values, const DispatchPlan& plan, const Positions& positions,
                        const TensorView& out, int64_t stride, const Launch& launch);

// y row t = sum of the returned rows of token t, ascending rank and expert, + residual: fp32, one rounding.
// With weights each row is multiplied as it is added, by one fma.
// starts: row_starts where each rank returns one row a token, choice_starts where it returns every choice.
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
