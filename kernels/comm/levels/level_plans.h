// SPDX-License-Identifier: MIT
// The two plans of the hierarchical exchange. `rail`: between hosts, over the ranks of this rank's rail, one
// per host. `inside`: between the ranks of one host. Its tokens are the rows that arrived over the rail. Both
// are derived from the plan of the whole group and its HostLayout. This file allocates them and declares the
// reference that fills them in. On GPUs kernels/hopper/exchange/levels writes the same bytes. Read next:
// hierarchical_exchange.h, kernels/ops/permute.h (the lists of a plan).
//
// Letters: G ranks, N hosts, P ranks per host, S slots, K top-k, L local experts.
#pragma once

#include "kernels/comm/host_layout.h"
#include "kernels/core/arena.h"
#include "kernels/core/stream.h"
#include "kernels/dispatch_plan.h"

namespace fp8flow {

// Where the ranks of a group are. The rail index of a rank is its local rank * N + its host.
struct LevelMap {
    int64_t hosts = 1, ranks_per_host = 1;       // N and P
    int64_t rank = 0, host = 0, local_rank = 0;  // of this rank
    TensorView ranks;                            // [P, N] i32: rank by rail index
    TensorView rail_index;                       // [G] i32: rail index by rank
};
// Its tables are in `memory`, which must outlive it. Every host must have the same number of ranks.
LevelMap make_level_map(const HostLayout& hosts, int rank, Device& device, Arena& memory);

// The lists of one layer. All entries are written; those past the last one are -1.
struct LevelPlans {
    // Tokens: those of this rank. Rank n of the plan: this rail's rank on host n. A host counts as one rank
    // with P * L experts: expert e of local rank p on host n is n * P * L + p * L + e % L. So a token keeps
    // all its experts. Received rows: one per token with an expert on this host, ordered by (host, token), at
    // most N * S. recv_rows are their own numbers, so that combine sends row i of its source back unchanged.
    // prob_rows: value i * K + k for the token's k-th expert. No row_source: the plan serves dispatch_rows
    // and combine only.
    DispatchPlan rail;
    // Tokens: the rows received over the rail, at most N * S. Tokens past the last one have no expert, and
    // nobody reads their sums. Rank p of the plan: local rank p of this host. Received rows: those of the
    // one-level plan, in order (local rank, host, token). Their rows at the experts are the same.
    DispatchPlan inside;
    TensorView
        inside_row_of;   // [G * S] i32: for received row i of the one-level plan, its number in `inside`
    RowGroups received;  // one group of that many rows, to permute them

    TensorView lists;  // i32: every list but row_source
    TensorView sizes;  // i64: every offset and count
};

// Uninitialised. Neither plan has all_probs, which combine order `rank` does not read.
LevelPlans allocate_level_plans(const DispatchPlan& plan, const LevelMap& map, Arena& scratch);

// Fills in both plans from the one-level plan. The row_source of that plan begins at its row base.
// `scratch`: for temporary tensors.
using DeriveLevelPlans = void(const DispatchPlan& plan, const LevelMap& map, const LevelPlans& levels,
                              Arena& scratch, const Launch& launch);
// In host memory, by loops.
DeriveLevelPlans derive_level_plans;

}  // namespace fp8flow
