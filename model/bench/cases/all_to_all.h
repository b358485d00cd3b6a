// SPDX-License-Identifier: MIT
// The exchange without deduplication: one row for every (token, expert) pair, and stand-alone permutes at
// both ends. The baseline of dispatch and combine: the same bytes arrive at the experts, and the sums have
// combine's order `invariant`.
#pragma once

#include "kernels/comm/messages.h"
#include "model/bench/cases/routing.h"

#include <functional>
#include <vector>

namespace fp8flow::bench {

// One rank's side. Sent rows are ordered by (expert, token), and so by rank; received rows by (source
// rank, expert, token).
class PairExchange {
public:
    // Not collective: everything follows from the routing of all ranks. `plan_groups`: those of this
    // rank's M-rows.
    PairExchange(Buffers& buffers, const std::vector<Routing>& all, int64_t rank,
                 const RowGroups& plan_groups);

    // rows [T, H], plain or with vec128_wire scales -> dst [M, H], pads zero. Buffers for what travels are
    // taken at once.
    std::function<void(const Launch&)> dispatch(Ops& ops, Messages& messages, Buffers& buffers,
                                                const ScaledTensor& rows, const ScaledTensor& dst) const;
    // src [M, H] bf16 -> y [T, H].
    std::function<void(const Launch&)> combine(Ops& ops, Messages& messages, Buffers& buffers,
                                               const TensorView& src, const TensorView& y) const;

private:
    // Lists of one routing, on the host.
    struct Lists {
        std::vector<int64_t> sent_to, received_from;  // rows by rank
        std::vector<int64_t> expert_rows;             // own pairs of each expert
        std::vector<int32_t> sent_token;              // of each sent row
        std::vector<int32_t> place_source;            // of each M-row: received row, -1: a pad
        std::vector<int32_t> received_place;          // of each received row: its M-row
        std::vector<int32_t> sent_rows;               // [T, K]: sent rows of a token in ascending order
        int64_t sent = 0, received = 0;               // this rank's own included
    };
    static Lists lists_of(const std::vector<Routing>& all, int64_t rank, int64_t alignment);

    const Lists& lists_;
    int64_t tokens_, topk_;
    RowGroups plan_groups_;
    RoutedRows by_expert_, in_one_group_;
    TensorView sent_token_, place_source_, received_place_, sent_rows_, num_tokens_;
};

}  // namespace fp8flow::bench
