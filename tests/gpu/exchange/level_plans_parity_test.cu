// SPDX-License-Identifier: MIT
// The plans of two levels derived on the GPU against the loops that define them: every list and size, byte by
// byte, for every rank of hosts in any order, with uneven ranks, hot experts, cut rows and rows in an arena.
#include "kernels/comm/levels/level_plans.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/hopper_ops.h"
#include "tests/support/device_exchange.h"
#include "tests/support/plans.h"

#include <fmt/ranges.h>

#include <string>

namespace fp8flow::test {
namespace {

// The bytes that deriving writes: all lists and sizes, and the rows of row_source that the plan has.
struct Bytes {
    std::vector<uint8_t> lists, sizes, row_source;
    bool operator==(const Bytes&) const = default;
};

Bytes bytes_of(const LevelPlans& levels, int64_t rows, Device& device) {
    const auto read = [&](const TensorView& view) {
        std::vector<uint8_t> bytes(static_cast<std::size_t>(view.bytes()));
        device.copy_out(bytes.data(), view.data, bytes.size());
        return bytes;
    };
    return {read(levels.lists), read(levels.sizes), read(levels.inside.row_source.slice(0, rows))};
}

class LevelPlansParity : public testing::Test {
protected:
    void expect_same(const Routing& routing, const std::vector<int>& host_of,
                     const std::vector<int64_t>& tokens, int64_t alignment, int64_t capacity = -1,
                     int64_t row_base = 0) {
        const HostLayout hosts(host_of);
        for (int rank = 0; rank < hosts.num_ranks(); ++rank) {
            SCOPED_TRACE(fmt::format("hosts {}, rank {}, tokens {}", fmt::join(host_of, "/"), rank,
                                     fmt::join(tokens, "/")));
            const PlanFixture fixture(routing, rank, alignment, capacity, row_base);
            const DispatchPlan plan = plan_of(fixture.args, tokens[static_cast<std::size_t>(rank)]);
            EXPECT_EQ(derived(gpu_.device(), plan, hosts, rank, fixture.total(), hopper::derive_level_plans),
                      derived(cpu_.device(), plan, hosts, rank, fixture.total(), derive_level_plans));
        }
    }

private:
    // Twice out of the same memory, for the same bytes.
    static Bytes derived(Device& device, const DispatchPlan& host_plan, const HostLayout& hosts, int rank,
                         int64_t rows, DeriveLevelPlans& derive) {
        Arena copies(device, "copies"), scratch(device, "scratch", true);
        const DispatchPlan plan = DeviceTensors(device, copies).put(host_plan);
        const LevelMap map = make_level_map(hosts, rank, device, copies);
        const LevelPlans levels = allocate_level_plans(plan, map, scratch);
        derive(plan, map, levels, scratch, {});
        const Bytes once = bytes_of(levels, rows, device);
        derive(plan, map, levels, scratch, {.stream = {}, .sm_limit = 1});
        EXPECT_EQ(bytes_of(levels, rows, device), once) << "the second call gave other bytes";
        return once;
    }

    ReferenceOps cpu_;
    HopperOps gpu_;
};

const std::vector<std::vector<int>> kHosts = {{0},
                                              {0, 0},
                                              {0, 1},
                                              {0, 0, 1, 1},
                                              {0, 1, 0, 1},
                                              {0, 1, 1, 0},
                                              {0, 1, 2, 3},
                                              {0, 1, 2, 2, 1, 0},
                                              {0, 0, 0, 0, 1, 1, 1, 1},
                                              {0, 0, 1, 1, 2, 2, 3, 3}};

TEST_F(LevelPlansParity, HostsAndTokens) {
    uint64_t seed = 1;
    for (const std::vector<int>& host_of : kHosts) {
        const auto ranks = static_cast<int64_t>(host_of.size());
        std::vector<int64_t> uneven{129, 0, 1030, 1, 64, 300, 7, 2100};
        uneven.resize(host_of.size());
        for (const auto& tokens :
             {std::vector<int64_t>(host_of.size(), 0), std::vector<int64_t>(host_of.size(), 40), uneven})
            for (const int64_t topk : {1, 3, 8}) {
                const int64_t slots = *std::max_element(tokens.begin(), tokens.end());
                expect_same(Routing::random(tokens, slots, topk, 8 * ranks, seed, topk == 3 ? 5 : -1),
                            host_of, tokens, 16, -1, seed % 2 == 0 ? 128 : 0);
                ++seed;
            }
    }
}

// Rows that an overflow cuts off are missing in both plans alike.
TEST_F(LevelPlansParity, CutRows) {
    const std::vector<int64_t> tokens{90, 200, 33, 150};
    const Routing routing = Routing::random(tokens, 200, 4, 16, 91, 2);
    for (const int64_t capacity : {0, 16, 160, 480})
        expect_same(routing, {0, 0, 1, 1}, tokens, 16, capacity, 256);
}

// Several iterations of every scan, more rows than threads.
TEST_F(LevelPlansParity, ManyTokens) {
    const std::vector<int64_t> tokens{4096, 4095, 4000, 1};
    expect_same(Routing::random(tokens, 4096, 8, 64, 92), {0, 0, 1, 1}, tokens, 128);
}

}  // namespace
}  // namespace fp8flow::test
