// SPDX-License-Identifier: MIT
// Masters of sharded weights with FP8 copies, gathered some at a time and all at once: the copies are those
// of an undivided store, and each batch is one call.
#include "kernels/comm/group_exchange.h"
#include "kernels/reference/reference_ops.h"
#include "layers/parameter.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fp8flow::test {
namespace {

// Counts collectives.
class CountingGroup final : public ProcessGroup {
public:
    explicit CountingGroup(ProcessGroup& group)
        : ProcessGroup(std::make_shared<std::string>()), group_(group) {}
    int rank() const override { return group_.rank(); }
    int size() const override { return group_.size(); }
    std::unique_ptr<ProcessGroup> split(int color, int order) override { return group_.split(color, order); }
    int transfers = 0;

protected:
    void transfer(const char*, const void* send, std::span<const Part> send_parts, void* recv,
                  std::span<const Part> recv_parts) override {
        ++transfers;
        group_.all_to_all(send, send_parts, recv, recv_parts);
    }

private:
    ProcessGroup& group_;
};

const std::vector<std::array<int64_t, 3>> kWeights = {
    {1, 256, 384}, {1, 128, 128}, {2, 128, 256}, {1, 130, 70}, {1, 384, 128}};

void add_weights(ParameterStore& store) {
    for (size_t i = 0; i < kWeights.size(); ++i) {
        ParameterSpec spec;
        spec.name = fmt::format("weight {}", i);
        spec.rank = 3;
        std::copy(kWeights[i].begin(), kWeights[i].end(), spec.shape);
        spec.expert = i == 2;
        spec.format = {.plain = false, .fp8_layout = ScaleLayout::block128};
        store.add(spec);
    }
    store.allocate_gradients();
}

float value_of(int64_t weight, int64_t element) {
    return static_cast<float>((element * 7919 + weight * 104729) % 2003 - 1001) / 256.0f;
}

void expect_same_copies(ParameterStore& divided, ParameterStore& whole) {
    for (size_t i = 0; i < kWeights.size(); ++i) {
        const Parameter &a = divided.all()[i], &b = whole.all()[i];
        for (const auto& [x, y] : {std::pair(a.fprop, b.fprop), std::pair(a.dgrad, b.dgrad)}) {
            EXPECT_TRUE(same_bytes(x, y)) << a.spec.name;
        }
    }
}

// most: elements gathered together; calls: of all_gather for all copies.
void expect_copies(int64_t most, int calls) {
    SCOPED_TRACE(fmt::format("{} elements at most", most));
    constexpr int kRanks = 3;
    run_thread_ranks(kRanks, 60, [&](ProcessGroup& thread) {
        CountingGroup group(thread);
        ReferenceOps ops;
        GroupExchange exchange({group, group, group}, ops, CombineOrder::rank);
        const StateShards::GroupRank place{group.rank(), group.size()};
        ParameterStore whole(ops, 5),
            divided(ops, 5, {}, {.dense = place, .expert = place, .most_gathered = most});
        add_weights(whole);
        add_weights(divided);
        divided.write_all_copies(exchange);
        expect_same_copies(divided, whole);
        for (size_t i = 0; i < kWeights.size(); ++i) {
            Parameter &all = whole.all()[i], &mine = divided.all()[i];
            for (int64_t e = 0; e < all.numel(); ++e)
                all.master.as<float>()[e] = value_of(static_cast<int64_t>(i), e);
            for (int64_t e = 0; e < mine.slice.count; ++e)
                mine.master.as<float>()[e] = value_of(static_cast<int64_t>(i), mine.slice.first + e);
            whole.write_copies(all);
        }
        group.transfers = 0;
        divided.gather_copies(exchange, 0, kWeights.size());
        EXPECT_EQ(group.transfers, calls);
        expect_same_copies(divided, whole);
        // a part of the parameters
        group.transfers = 0;
        divided.gather_copies(exchange, 1, 3);
        EXPECT_EQ(group.transfers, 2);  // one dense, one of experts
        expect_same_copies(divided, whole);
    });
}

TEST(GatheredMasters, CopiesDoNotDependOnHowManyAreGatheredTogether) {
    expect_copies(1, 3);                 // dense: the largest alone, then three
    expect_copies(120'000, 3);           // dense: two, then two
    expect_copies(int64_t{1} << 20, 2);  // all dense ones, all of experts
}

TEST(GatheredMasters, TheBufferHoldsTheLargestAndNoMoreThanAll) {
    EXPECT_EQ(gathered_elements({}), 0);
    EXPECT_EQ(gathered_elements({100, 1000, 30}, 10), 1000);
    EXPECT_EQ(gathered_elements({100, 1000, 30}, 1100), 1100);
    EXPECT_EQ(gathered_elements({100, 1000, 30}, 10'000), 128 + 1024 + 64);
}

}  // namespace
}  // namespace fp8flow::test
