// SPDX-License-Identifier: MIT
// plan_dispatch on the GPU against the reference: every list, byte by byte, for every rank, with uneven
// ranks, hot experts, overflow at its exact boundary, and rows in an arena.
#include "tests/support/parity.h"
#include "tests/support/plans.h"

#include <string>

namespace fp8flow::test {
namespace {

// Runs both backends on poisoned outputs and compares everything.
void expect_same_plan(const Routing& routing, int64_t rank, int64_t alignment, int64_t capacity,
                      int64_t row_base, int64_t num_sources) {
    PlanFixture plan(routing, rank, alignment, capacity, row_base, num_sources);
    HostTensor* outputs[] = {&plan.counts,      &plan.offsets,      &plan.row_source,  &plan.row_prob,
                             &plan.recv_rows,   &plan.recv_offsets, &plan.recv_source, &plan.send_tokens,
                             &plan.send_counts, &plan.next_row_base};
    Parity parity;
    for (HostTensor* output : outputs) output->fill_bytes(0x33);
    plan.overflow.zero();
    plan.rows_wanted.as<int64_t>()[0] = num_sources == 1 ? 0 : 1000;  // below and above what is asked for
    parity.check(plan.args);
}

struct Case {
    std::vector<int64_t> tokens;
    int64_t slots, topk, experts, alignment;
    int64_t hot = -1;
    int64_t row_base = 0;
};

const std::vector<Case> kCases = {
    {{0}, 0, 1, 1, 128},
    {{0}, 5, 2, 8, 128},  // slots without a token
    {{1}, 1, 1, 1, 128},
    {{127}, 127, 2, 8, 128},
    {{128}, 128, 2, 8, 128, -1, 256},
    {{129}, 129, 8, 8, 128},  // K = E
    {{129, 0, 128, 1}, 200, 8, 64, 128, 5, 384},
    {{17, 300, 65}, 300, 6, 96, 16, 95},
    {{1000, 1000}, 1000, 8, 256, 128, 200},
    {{400}, 400, 2, 512, 128},
    {{20}, 20, 512, 512, 128},  // K = E = 512
    {{5, 6, 7, 8, 9, 1, 0, 3}, 9, 1, 8, 1},
    {{5000}, 5000, 2, 512, 128},          // more blocks than loads in flight, one segment
    {{9000, 10}, 9000, 1, 512, 128, 77},  // several segments of more blocks than that
    {{3000, 2999}, 3000, 2, 16, 16},      // many short segments
    {{40000}, 40000, 1, 8, 128, 3},       // more blocks than CTAs
};

TEST(PlanParity, EdgeShapes) {
    for (const Case& c : kCases) {
        const Routing routing = Routing::random(c.tokens, c.slots, c.topk, c.experts, 17, c.hot);
        for (int64_t rank = 0; rank < routing.ranks; ++rank) {
            SCOPED_TRACE("G " + std::to_string(routing.ranks) + ", S " + std::to_string(c.slots) + ", K " +
                         std::to_string(c.topk) + ", E " + std::to_string(c.experts) + ", rank " +
                         std::to_string(rank));
            for (const int64_t sources : {int64_t{1}, routing.ranks})
                expect_same_plan(routing, rank, c.alignment, -1, c.row_base, sources);
        }
    }
}

TEST(PlanParity, OverflowAroundTheBoundary) {
    const Routing routing = Routing::random({150, 90}, 150, 2, 8, 23, 2);
    for (int64_t rank = 0; rank < 2; ++rank) {
        for (const int64_t alignment : {1, 16, 128}) {
            for (const int64_t sources : {1, 2}) {
                const int64_t needed = PlanFixture(routing, rank, alignment, -1, 0, sources).total();
                for (const int64_t capacity :
                     {int64_t{0}, int64_t{1}, alignment, needed / 2, needed - 1, needed, needed + 1}) {
                    SCOPED_TRACE("rank " + std::to_string(rank) + ", alignment " + std::to_string(alignment) +
                                 ", sources " + std::to_string(sources) + ", capacity " +
                                 std::to_string(capacity) + " of " + std::to_string(needed));
                    expect_same_plan(routing, rank, alignment, capacity, 128, sources);
                }
            }
        }
    }
}

TEST(PlanParity, ArenaShorterThanTheCapacity) {
    const Routing routing = Routing::random({200}, 200, 2, 4, 29);
    PlanFixture plan(routing, 0, 128, 600, 256);
    // the buffers hold fewer rows past their base than row_capacity says
    for (const int64_t rows : {256 + 599, 256 + 300, 256 + 0}) {
        SCOPED_TRACE(rows);
        Parity parity;
        plan.row_source.fill_bytes(0x33);
        plan.row_prob.fill_bytes(0x33);
        plan.overflow.zero();
        op::PlanDispatch args = plan.args;
        args.row_source.dims[0] = rows;
        args.row_prob.dims[0] = rows;
        parity.check(args);
    }
}

}  // namespace
}  // namespace fp8flow::test
