// SPDX-License-Identifier: MIT
// The baseline of the exchanges in `bench`, one row for every (token, expert) pair: the same bytes at the
// experts and the same sums as the reference exchange, so that both sides of the comparison do the same work.
#include "model/bench/cases/all_to_all.h"

#include "kernels/comm/group_exchange.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstring>

namespace fp8flow::bench {
namespace {

using test::same_bytes;

// Bytes that differ between ranks and rows.
void mark(const TensorView& view, int rank) {
    for (int64_t i = 0; i < view.bytes(); ++i)
        view.bytes_ptr()[i] = static_cast<uint8_t>(i * 37 + i / 256 * 11 + rank * 101);
}
void poison(const ScaledTensor& tensor) {
    std::memset(tensor.data.data, 0xFF, static_cast<size_t>(tensor.data.bytes()));
    if (tensor.scales) std::memset(tensor.scales.data, 0xFF, static_cast<size_t>(tensor.scales.bytes()));
}

void compare(ProcessGroup& group, int64_t tokens, int64_t experts, int64_t topk, int64_t distribution) {
    constexpr int64_t kColumns = 256, kAlignment = 16;
    SCOPED_TRACE(fmt::format("{} ranks, {} tokens, {} experts, top-{}, distribution {}", group.size(), tokens,
                             experts, topk, distribution));
    const int64_t ranks = group.size(), rank = group.rank();
    ReferenceOps ops;
    Arena arena(ops.device(), "test"), scratch(ops.device(), "scratch");
    Buffers buffers(ops.device(), arena, nullptr);
    std::vector<Routing> all;
    std::vector<int32_t> ids;
    std::vector<float> probs;
    for (int64_t r = 0; r < ranks; ++r) {
        all.push_back(make_routing(tokens, experts, topk, distribution, static_cast<uint64_t>(r + 7)));
        ids.insert(ids.end(), all.back().ids.begin(), all.back().ids.end());
        probs.insert(probs.end(), all.back().probs.begin(), all.back().probs.end());
    }
    const PlanCounts counts = plan_counts(all, rank, kAlignment);
    const op::PlanDispatch made =
        plan_arguments(buffers, buffers.values(ids).reshape({ranks, tokens, topk}),
                       buffers.values(probs).reshape({ranks, tokens, topk}), rank, counts, kAlignment);
    ops.plan_dispatch(made);
    const DispatchPlan plan = plan_of(made, tokens);
    GroupExchange exchange(group, ops, CombineOrder::invariant);
    const auto messages = make_host_messages(group);
    const PairExchange pairs(buffers, all, rank, plan.groups);

    for (const DType dtype : {DType::e4m3, DType::bf16}) {
        const bool scaled = dtype == DType::e4m3;
        const ScaledTensor rows = buffers.operand(dtype, {tokens, kColumns}, ScaleLayout::vec128_wire);
        mark(rows.data, group.rank());
        if (scaled) mark(rows.scales, group.rank());
        const auto output = [&] {
            return scaled ? buffers.fp8_output(dtype, {counts.padded, kColumns}, ScaleLayout::vec128)
                          : ScaledTensor{
                                buffers.output(dtype, {counts.padded, kColumns}), {}, ScaleLayout::none};
        };
        const ScaledTensor want = output(), got = output();
        poison(want);
        poison(got);
        exchange.dispatch(rows, plan, want, scratch);
        pairs.dispatch(ops, *messages, buffers, rows, got)({});
        EXPECT_TRUE(same_bytes(got.data, want.data)) << name_of(dtype);
        EXPECT_TRUE(!scaled || same_bytes(got.scales, want.scales));
    }

    const TensorView src = buffers.normal(DType::bf16, {counts.padded, kColumns}, 1.0 + group.rank()),
                     want = buffers.output(DType::bf16, {tokens, kColumns}),
                     got = buffers.output(DType::bf16, {tokens, kColumns});
    std::memset(got.data, 0xFF, static_cast<size_t>(got.bytes()));
    exchange.combine({.src = {src}, .y = {want}}, plan, scratch);
    pairs.combine(ops, *messages, buffers, src, got)({});
    EXPECT_TRUE(same_bytes(got, want));
}

TEST(BenchExchange, PairsArriveWhereTheReferencePutsThem) {
    for (const int ranks : {1, 2, 4})
        run_thread_ranks(ranks, 60, [](ProcessGroup& group) {
            for (int64_t distribution = 0; distribution < 4; ++distribution) {
                compare(group, 30, 8, 3, distribution);
                compare(group, 7, 16, 8, distribution);
                compare(group, 5, 4, 1, distribution);
            }
        });
}

}  // namespace
}  // namespace fp8flow::bench
