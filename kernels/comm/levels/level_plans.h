// SPDX-License-Identifier: MIT
// The plans of two levels of exchange: one over the rail, where each rank represents a host, and one inside
// the host, where the tokens are the rows that arrived over the rail. Both follow from the plan of one level
// and the places of the ranks. This file has their memory and the reference that fills them in. On GPUs a
// kernel does (kernels/hopper/exchange/levels), with the same bytes. Read next: hierarchical_exchange.h,
// kernels/ops/permute.h (what the lists of a plan hold).
//
// Letters: G ranks, N hosts, P places (ranks of a host), S slots, K top-k, L local experts.
#pragma once

#include "kernels/comm/host_layout.h"
#include "kernels/core/arena.h"
#include "kernels/core/stream.h"
#include "kernels/dispatch_plan.h"

namespace fp8flow {

// Where the ranks of a group are. The seat of a rank is its place * N + its host.
struct LevelMap {
    int64_t hosts = 1, places = 1;          // N and P: hosts have as many ranks each
    int64_t rank = 0, host = 0, place = 0;  // of this rank
    TensorView ranks;                       // [P, N] i32: rank by seat
    TensorView seats;                       // [G] i32: seat by rank
};
// Its tables are in `memory`, which must outlive it. Every host must have the same number of ranks.
LevelMap make_level_map(const HostLayout& hosts, int rank, Device& device, Arena& memory);

// The lists of one layer. Written in full: list entries past the last one are -1.
struct LevelPlans {
    // Tokens: this rank's. Rank n: host n, by its rank on this rank's rail. Expert e of place p on host n:
    // n * P * L + p * L + e % L, so that a host has P * L experts and a token has all its choices. Received
    // rows: one for each token with an expert on this host, of all hosts, by (host, token): `landed` rows.
    // Their recv_rows are their own numbers: combine sends back row i of its source as it is; prob_rows:
    // value i * K + k of choice k. No row_source: for dispatch_rows and combine.
    DispatchPlan rail;
    // Tokens: landed rows, N * S at most; the others choose nobody, and nobody reads their sums. Rank p:
    // place p of this host. Received rows: those of the plan of one level, in order (place, host, token);
    // they feed the same M-rows.
    DispatchPlan inside;
    TensorView arrival;  // [G * S] i32: by received row of the plan of one level, its number in `inside`
    RowGroups received;  // one group of that many rows, for a permutation of them

    TensorView lists;  // i32: every list but row_source
    TensorView sizes;  // i64: every offset and count
};

// Uninitialised. Neither plan has all_probs, which combine order `rank` does not read.
LevelPlans allocate_level_plans(const DispatchPlan& plan, const LevelMap& map, Arena& scratch);

// Fills in the plans of two levels from the plan of one level. That plan's row_source begins at its row base.
// `scratch`: for temporary tensors.
using DeriveLevelPlans = void(const DispatchPlan& plan, const LevelMap& map, const LevelPlans& levels,
                              Arena& scratch, const Launch& launch);
// In host memory, by loops.
DeriveLevelPlans derive_level_plans;

}  // namespace fp8flow
