// SPDX-License-Identifier: MIT
// Dispatch plans for tests: the routing of all ranks, random or given, and one rank's plan_dispatch with
// owned, poisoned outputs.
#pragma once

#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace fp8flow::test {

// ids and probs [G, S, K] of all ranks; tokens beyond a rank's count are absent (id -1).
struct Routing {
    int64_t ranks, slots, topk, experts;
    HostTensor ids, probs;

    Routing(int64_t ranks_, int64_t slots_, int64_t topk_, int64_t experts_)
        : ranks(ranks_),
          slots(slots_),
          topk(topk_),
          experts(experts_),
          ids(DType::i32, {ranks_, slots_, topk_}),
          probs(DType::f32, {ranks_, slots_, topk_}) {
        probs.zero();  // ids are -1 already: nobody is there
    }
    int64_t local_experts() const { return experts / ranks; }
    int32_t& id(int64_t rank, int64_t token, int64_t k) {
        return ids.as<int32_t>()[(rank * slots + token) * topk + k];
    }
    float& prob(int64_t rank, int64_t token, int64_t k) {
        return probs.as<float>()[(rank * slots + token) * topk + k];
    }

    // tokens[g] tokens on rank g, each to topk distinct random experts; `hot` >= 0: always among them.
    static Routing random(const std::vector<int64_t>& tokens, int64_t slots, int64_t topk, int64_t experts,
                          uint64_t seed, int64_t hot = -1) {
        Routing routing(static_cast<int64_t>(tokens.size()), slots, topk, experts);
        uint64_t draw = 0;
        for (int64_t g = 0; g < routing.ranks; ++g) {
            for (int64_t t = 0; t < tokens[g]; ++t) {
                std::vector<int64_t> order(static_cast<std::size_t>(experts));
                std::iota(order.begin(), order.end(), 0);
                for (int64_t e = experts - 1; e > 0; --e)
                    std::swap(order[e],
                              order[random_words(seed, 0, draw++)[0] % static_cast<uint64_t>(e + 1)]);
                if (hot >= 0) std::swap(order[0], *std::find(order.begin(), order.end(), hot));
                for (int64_t k = 0; k < topk; ++k) {
                    routing.id(g, t, k) = static_cast<int32_t>(order[k]);
                    routing.prob(g, t, k) = static_cast<float>(random_uniform(seed, 1, draw++));
                }
            }
        }
        return routing;
    }
};

// One rank's plan. capacity < 0: the worst case. num_sources: 1 or the number of ranks.
struct PlanFixture {
    HostTensor counts, offsets, row_source, row_prob, recv_rows, recv_offsets, recv_source, send_tokens,
        send_counts, next_row_base, rows_wanted, overflow;
    RowGroups groups;
    int64_t base;
    op::PlanDispatch args;

    PlanFixture(const Routing& routing, int64_t rank, int64_t alignment, int64_t capacity = -1,
                int64_t row_base = 0, int64_t num_sources = 1)
        : base(row_base) {
        const int64_t local = routing.local_experts(), sources = routing.ranks * routing.slots,
                      num_groups = num_sources * local;
        if (capacity < 0) capacity = num_groups * round_up(sources / num_sources, alignment);
        counts = HostTensor(DType::i64, {num_groups});
        offsets = HostTensor(DType::i64, {num_groups + 1});
        row_source = HostTensor(DType::i32, {base + capacity});
        row_prob = HostTensor(DType::f32, {base + capacity});
        recv_rows = HostTensor(DType::i32, {sources, routing.topk});
        recv_rows.fill_bytes(0x11);  // -1 means something here, so another poison
        recv_offsets = HostTensor(DType::i64, {routing.ranks + 1});
        recv_source = HostTensor(DType::i32, {sources});
        recv_source.fill_bytes(0x11);
        row_source.fill_bytes(0x11);
        send_tokens = HostTensor(DType::i32, {routing.ranks, routing.slots});
        send_tokens.fill_bytes(0x11);
        send_counts = HostTensor(DType::i64, {routing.ranks});
        next_row_base = HostTensor(DType::i64, {1});
        rows_wanted = HostTensor::of<int64_t>({0});
        overflow = HostTensor::of<int32_t>({0});
        if (base > 0) {
            row_source.set_row_base(base);
            row_prob.set_row_base(base);
        }
        groups = {num_groups, counts, offsets, capacity, alignment};
        args = {.all_ids = routing.ids,
                .all_probs = routing.probs,
                .rank = rank,
                .first_expert = rank * local,
                .num_local_experts = local,
                .num_sources = num_sources,
                .row_base = base > 0 ? &base : nullptr,
                .groups = groups,
                .row_source = row_source,
                .row_prob = row_prob,
                .recv_rows = recv_rows,
                .recv_offsets = recv_offsets,
                .recv_source = recv_source,
                .send_tokens = send_tokens,
                .send_counts = send_counts,
                .next_row_base = next_row_base,
                .rows_wanted = rows_wanted,
                .overflow = overflow};
        ReferenceOps().plan_dispatch(args);
    }
    PlanFixture(const PlanFixture&) = delete;
    PlanFixture& operator=(const PlanFixture&) = delete;

    int64_t count(int64_t group) const { return counts.as<int64_t>()[group]; }
    int64_t offset(int64_t group) const { return offsets.as<int64_t>()[group]; }
    int64_t total() const { return offset(groups.num_groups); }
    int64_t received() const { return recv_offsets.as<int64_t>()[args.all_ids.dim(0)]; }
    int32_t source_of(int64_t row) const { return row_source.as<int32_t>()[base + row]; }
    float prob_of(int64_t row) const { return row_prob.as<float>()[base + row]; }
};

}  // namespace fp8flow::test
