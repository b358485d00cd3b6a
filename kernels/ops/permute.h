// SPDX-License-Identifier: MIT
// Who receives what, and the row movers: dispatch plan, fused permute + pad, unpermute + unpad, and the
// unfused pair. Source: NVIDIA/TransformerEngine#1921 (fused padding), DeepEP / FlashComm (deduplicated
// dispatch, deterministic slots).
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow::op {

// The plan of one MoE layer on one rank: a pure function of all ranks' routing, so every rank computes
// consistent offsets without another message. Letters: G ranks, S = tokens_per_rank slots per rank (the
// largest T), K top-k, L local experts, R received rows: one per distinct (source rank, token) with at least
// one local expert, ordered by (rank, token). M-tensors' row r of group g: the group's tokens in ascending
// (source rank, token) order, so the order inside an expert does not depend on how experts are spread over
// ranks. Expert e lives on rank e / L, so first_expert is rank * L; a token names an expert at most once.
// row_source and row_prob are M-tensors and begin at their own row_base; row numbers inside recv_rows and
// offsets are relative to it. Their rows past the last group are not written (they may belong to the next
// layer).
struct PlanDispatch {
    TensorView all_ids;    // [G, S, K] i32: global expert ids of every rank's tokens; -1: no such token
    TensorView all_probs;  // [G, S, K] f32
    int64_t rank = 0;      // this rank
    int64_t first_expert = 0;
    int64_t num_local_experts = 0;
    // 1: group l has local expert l's rows of all ranks. G: group s * L + l has those of source rank s alone,
    // so that no block of rows, and no sum over a group, spans two sources.
    int64_t num_sources = 1;
    const int64_t* row_base = nullptr;  // device word: where this layer's M-tensors begin (null: 0)
    RowGroups groups;                   // out: num_sources * L; row_capacity and alignment are inputs
    TensorView row_source;              // out [M cap] i32: received row that feeds M-row r; -1: pad
    TensorView row_prob;                // out [M cap] f32: its probability; 0 in pads (in the row arena)
    TensorView recv_rows;     // out [G*S, K] i32: M-rows of received row i in ascending expert order, then -1
    TensorView recv_offsets;  // out [G+1] i64: received rows by source rank (prefix sums)
    TensorView recv_source;   // out [G*S] i32: source rank * S + token of received row i
    TensorView send_tokens;   // out [G, S] i32: own tokens that rank g needs, ascending; then -1
    TensorView send_counts;   // out [G] i64
    // out [1] i64: row_base + the padded total, rounded up to 128: where the next layer may begin; optional
    TensorView next_row_base;
    // in/out [1] i64: raised to the padded total that the routing needs, whether it fits or not (never
    // lowered); optional
    TensorView rows_wanted;
    // in/out [1] i32: set to 1 (never to 0) if the padded total exceeds row_capacity, or the rows of
    // row_source and row_prob after their row_base. The step must then not be applied. Rows are cut, so that
    // nothing is written past the end: groups in order keep their first rows, in whole alignment units; cut
    // rows are missing from recv_rows. Rows sent and received do not change, because other ranks do not see
    // the cut.
    TensorView overflow;
};

// dst row r = src row row_source[r]; pads are written as zero values and zero scales. Permute and pad in one
// pass. src is FP8 with vec128_wire scales and dst FP8 with vec128 (the GEMM's layout), or both plain
// tensors of one dtype (bf16, f32, or FP8 without scales).
struct PermutePad {
    ScaledTensor src;       // [R, H]; layout none for plain tensors
    TensorView row_source;  // [M cap] i32, of a plan with the same alignment
    // optional: the same plan seen from src's rows, so that one that feeds several rows is read once
    TensorView recv_rows = {};  // [R cap, K] i32
    TensorView num_rows = {};   // [1] i64, with recv_rows
    RowGroups groups;
    ScaledTensor dst;  // out [M, H]
};

// dst row i = sum over recv_rows[i] of src rows, fp32, in the order of recv_rows, one rounding. Optional
// merging weights (probabilities applied at combine instead of before fc2) multiply each row: one fp32 fma
// per row. A row of -1s gives zeros; dst rows past num_rows are not written.
struct UnpermuteUnpad {
    TensorView src;        // [M, H] bf16 | f32
    TensorView recv_rows;  // [R cap, K] i32
    TensorView num_rows;   // [1] i64: how many received rows there are (recv_offsets[G])
    TensorView row_prob;   // [M] f32, optional merging weights
    TensorView dst;        // out [R cap, H]
};

// Backward of UnpermuteUnpad with merging weights: dprob_r = <dst gradient row, src row r> in fp32, in 32
// strands: units of 8 neighbouring columns, unit u to strand u % 32 (fma, ascending; empty strands are 0).
// The strands are added in halves: s + (s+16), then + 8, 4, 2, 1.
constexpr int64_t kProbStrands = 32, kProbUnit = 8;
struct UnpermuteProbsBackward {
    TensorView ddst;        // [R cap, H]
    TensorView src;         // [M, H]
    TensorView row_source;  // [M] i32
    // optional: the same plan seen from ddst's rows, so that a row that feeds several dot products is read
    // once
    TensorView recv_rows = {};  // [R cap, K] i32
    TensorView num_rows = {};   // [1] i64, with recv_rows
    RowGroups groups;
    TensorView drow_prob;  // out [M] f32, 0 in pads
};

// The unfused pair: permute with alignment 1 (PermutePad with unaligned groups), then pad. Both directions;
// plain or FP8 (vec128).
struct PadRows {
    ScaledTensor src;  // [M1, H]
    RowGroups src_groups;
    RowGroups dst_groups;  // same counts, larger alignment
    ScaledTensor dst;      // out [M, H], pads zero
};
struct UnpadRows {
    TensorView src;  // [M, H]
    RowGroups src_groups;
    RowGroups dst_groups;
    TensorView dst;  // out [M1, H]
};

}  // namespace fp8flow::op
