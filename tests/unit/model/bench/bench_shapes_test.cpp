// SPDX-License-Identifier: MIT
// The parts of `fp8flow bench` that need no clock: suites whose every shape can be read, made-up
// routing, distributions of rows, and the fresh copy that each set of tensors is.
#include "model/bench/cases/routing.h"
#include "model/bench/suite.h"

#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <numeric>
#include <set>

namespace fp8flow::bench {
namespace {

TEST(BenchSuites, EveryShapeCanBeRead) {
    for (const auto& [name, meaning] : suite_names()) {
        std::set<std::string> seen;
        for (const SuiteEntry& entry : suite(name)) {
            const Case& what = find_case(entry.operation);
            const Shape shape(what.name, what.keys, entry.size, entry.shape);
            EXPECT_TRUE(seen.insert(what.name + " " + shape.text()).second)
                << name << " has twice: " << what.name << " " << shape.text();
        }
        EXPECT_GE(seen.size(), 10u) << name;
    }
}

// Address space without memory: what is large is neither copied nor filled, so that shapes of a GPU
// can be set up here.
class EmptyDevice final : public Device {
public:
    ~EmptyDevice() override {
        for (const auto& [data, bytes] : spaces_) munmap(data, bytes);
    }
    void* allocate(std::size_t bytes) override {
        bytes = std::max<std::size_t>(bytes, 1);
        void* data =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        require(data != MAP_FAILED, ExitCode::memory, "no address space for {} bytes", bytes);
        spaces_[data] = bytes;
        return data;
    }
    void free(void* data) override {
        munmap(data, spaces_.at(data));
        spaces_.erase(data);
    }
    void copy_in(void* to, const void* from, std::size_t bytes, Stream) override {
        copy(to, from, bytes, {});
    }
    void copy_out(void* to, const void* from, std::size_t bytes, Stream) override {
        copy(to, from, bytes, {});
    }
    void copy(void* to, const void* from, std::size_t bytes, Stream) override {
        if (bytes <= kMost) std::memcpy(to, from, bytes);
    }
    void fill(void* data, uint8_t value, std::size_t bytes, Stream) override {
        if (bytes <= kMost) std::memset(data, value, bytes);
    }
    void synchronize() override {}
    int64_t free_bytes() const override { return int64_t{1} << 40; }

private:
    static constexpr std::size_t kMost = std::size_t{1} << 20;
    std::map<void*, std::size_t> spaces_;
};

// A suite that an operation refuses in the middle has cost its time on a GPU for nothing.
TEST(BenchSuites, NoOperationRefusesItsShapeInUpstream) {
    ReferenceOps ops;
    EmptyDevice device;
    const auto world = make_thread_groups(1, 60.0);
    Machine machine{ops, *world[0], {}};
    RandomFiller filler;
    for (const SuiteEntry& entry : suite("upstream")) {
        const Case& what = find_case(entry.operation);
        if (what.runs == Runs::together) continue;
        const Shape shape(what.name, what.keys, entry.size, entry.shape);
        Arena arena(device, "test");
        Buffers buffers(device, arena, nullptr, filler);
        EXPECT_NO_THROW({
            const Call call = what.build(machine, buffers, shape);
            EXPECT_GT(call.work.bytes, 0.0);
        }) << what.name
           << " " << shape.text();
    }
}

TEST(BenchShape, LaterValuesReplaceEarlierOnes) {
    const std::vector<Key> keys = {{"T", "4096", "24", ""}, {"dtype", "bf16", "bf16", ""}};
    const Shape shape("op", keys, Size::small, "dtype=f32,T=7,T=9");
    EXPECT_EQ(shape.number("T"), 9);
    EXPECT_EQ(shape.text(), "T=9 dtype=f32");
    EXPECT_EQ(Shape("op", keys, Size::layer, "").text(), "T=4096 dtype=bf16");
    EXPECT_EQ(Shape("op", keys, Size::layer, "").short_text(), "T=4096");
    EXPECT_THROW(Shape("op", keys, Size::small, "T=9999999999999").number("T"), Error);
    EXPECT_THROW(Shape("op", keys, Size::small, "T=12x").number("T"), Error);
    // a product that 64 bits do not hold
    const std::vector<Key> sizes = {{"T", "4096", "24", ""}, {"H", "7168", "256", ""}};
    EXPECT_NO_THROW(Shape("op", sizes, Size::small, "T=1099511627776"));
    EXPECT_THROW(Shape("op", sizes, Size::small, "T=1099511627776,H=16777216"), Error);
}

TEST(BenchRows, DistributionsAddUp) {
    const auto distributions = static_cast<int64_t>(distribution_names().size());
    for (int64_t distribution = 0; distribution < distributions; ++distribution) {
        for (const int64_t groups : {1, 2, 32, 33}) {
            for (const int64_t total : {32768, 100}) {
                const auto counts = group_counts(total, groups, distribution);
                ASSERT_EQ(static_cast<int64_t>(counts.size()), groups);
                EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), int64_t{0}), total);
                for (const int64_t count : counts) EXPECT_GE(count, 0);
            }
        }
    }
    const auto largest = [](int64_t distribution) {
        const auto counts = group_counts(32768, 32, distribution);
        return *std::max_element(counts.begin(), counts.end());
    };
    EXPECT_EQ(largest(0), 1024);
    EXPECT_NEAR(static_cast<double>(largest(2)), 2048, 8);  // skewed: twice the mean
    EXPECT_EQ(largest(3), 2048);                            // every second group is empty
    const auto empty = group_counts(32768, 32, 3);
    EXPECT_EQ(std::count(empty.begin(), empty.end(), 0), 16);
    // others are timed with the same list (docs/results)
    const std::vector<int64_t> blocks = {13, 11, 6,  12, 6,  5, 8, 9, 12, 6, 6, 11, 7, 8,  12, 8,
                                         10, 7,  10, 5,  11, 8, 5, 7, 4,  6, 6, 6,  4, 11, 5,  11};
    const auto ragged = group_counts(32768, 32, 4);
    for (size_t g = 0; g < ragged.size(); ++g) EXPECT_EQ(ragged[g], 128 * blocks[g]) << g;
}

TEST(BenchRouting, ExpertsOfATokenAreDistinct) {
    for (int64_t distribution = 0; distribution < 5; ++distribution) {
        for (const auto& [experts, topk] :
             {std::pair<int64_t, int64_t>{8, 2}, {7, 3}, {5, 5}, {160, 6}, {1, 1}}) {
            const Routing routing = make_routing(200, experts, topk, distribution, 3);
            std::vector<int64_t> counts(static_cast<size_t>(experts));
            for (int64_t t = 0; t < 200; ++t) {
                std::set<int32_t> chosen;
                for (int64_t k = 0; k < topk; ++k) {
                    const int32_t id = routing.ids[static_cast<size_t>(t * topk + k)];
                    ASSERT_TRUE(id >= 0 && id < experts);
                    chosen.insert(id);
                    ++counts[static_cast<size_t>(id)];
                }
                EXPECT_EQ(static_cast<int64_t>(chosen.size()), topk);
            }
            if (distribution != 0 || experts % topk != 0) continue;
            const auto [low, high] = std::minmax_element(counts.begin(), counts.end());
            EXPECT_LE(*high - *low, 1) << experts << " experts, top-" << topk;
        }
    }
}

// The host's counts against what plan_dispatch finds.
TEST(BenchRouting, CountsAgreeWithThePlan) {
    ReferenceOps ops;
    Arena arena(ops.device(), "test");
    for (int64_t distribution = 0; distribution < 4; ++distribution) {
        std::vector<Routing> all;
        std::vector<int32_t> ids;
        std::vector<float> probs;
        for (uint64_t rank = 0; rank < 4; ++rank) {
            all.push_back(make_routing(50, 8, 3, distribution, rank + 1));
            ids.insert(ids.end(), all.back().ids.begin(), all.back().ids.end());
            probs.insert(probs.end(), all.back().probs.begin(), all.back().probs.end());
        }
        for (int64_t rank = 0; rank < 4; ++rank) {
            RandomFiller filler;
            Buffers buffers(ops.device(), arena, nullptr, filler);
            const PlanCounts counts = plan_counts(all, rank, 16);
            const op::PlanDispatch plan =
                plan_arguments(buffers, buffers.values(ids).reshape({4, 50, 3}),
                               buffers.values(probs).reshape({4, 50, 3}), rank, counts, 16);
            ops.plan_dispatch(plan);
            EXPECT_EQ(plan.overflow.as<int32_t>()[0], 0);
            EXPECT_EQ(plan.groups.offsets.as<int64_t>()[2], counts.padded);
            for (int64_t g = 0; g < 2; ++g)
                EXPECT_EQ(plan.groups.counts.as<int64_t>()[g], counts.rows[static_cast<size_t>(g)]);
            EXPECT_EQ(plan.recv_offsets.as<int64_t>()[4], counts.received);
            int64_t sent = 0;
            for (int64_t to = 0; to < 4; ++to) sent += to == rank ? 0 : plan.send_counts.as<int64_t>()[to];
            EXPECT_EQ(sent, counts.sent_away);
        }
    }
}

TEST(BenchBuffers, OtherSetsAreCopiesOfTheFirst) {
    ReferenceOps ops;
    Arena arena(ops.device(), "test");
    RandomFiller filler;
    Buffers first(ops.device(), arena, nullptr, filler), second(ops.device(), arena, &first, filler);
    int made = 0;
    std::vector<std::vector<TensorView>> sets;
    for (Buffers* buffers : {&first, &second}) {
        std::vector<TensorView> set = {buffers->normal(DType::bf16, {3, 50}),
                                       buffers->integers(DType::i32, {40}, 9)};
        const ScaledTensor fp8 = buffers->fp8_input(DType::e4m3, {20, 256}, ScaleLayout::vec128);
        set.insert(set.end(), {fp8.data, fp8.scales, buffers->zeros(DType::f32, {7})});
        EXPECT_EQ(buffers->once<int>([&] { return ++made; }), 1);
        sets.push_back(set);
    }
    EXPECT_EQ(made, 1);
    EXPECT_EQ(first.bytes(), second.bytes());
    EXPECT_EQ(first.bytes(), 300 + 160 + 20 * 256 + 40 * 4 + 28);
    for (size_t i = 0; i < sets[0].size(); ++i) {
        EXPECT_NE(sets[0][i].data, sets[1][i].data);
        EXPECT_TRUE(test::same_bytes(sets[0][i], sets[1][i])) << i;
    }
}

// What the contract of weight gradients says of pads.
TEST(BenchBuffers, TransposedInputsHaveZerosInPads) {
    ReferenceOps ops;
    Arena arena(ops.device(), "test");
    RandomFiller filler;
    Buffers buffers(ops.device(), arena, nullptr, filler);
    const RowGroups routed = buffers.routed({100, 0, 70}, 128);
    const ScaledTensor x = buffers.transposed_input(ops, DType::e4m3, 256, ScaleLayout::tile128, routed);
    for (int64_t row = 100; row < 128; ++row)
        EXPECT_EQ(x.data.bytes_ptr()[5 * routed.row_capacity + row], 0) << row;
    EXPECT_NE(x.data.bytes_ptr()[5 * routed.row_capacity + 99], 0);
}

}  // namespace
}  // namespace fp8flow::bench
