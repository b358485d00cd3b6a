// SPDX-License-Identifier: MIT
// When the work of a slot is captured: once that slot's work ran without stopping the host.
#include "model/train/captured_steps.h"

#include "kernels/reference/host_device.h"

#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

// Counts captures and launches.
class GraphDevice final : public HostDevice {
public:
    bool can_capture() const override { return true; }
    std::unique_ptr<WorkGraph> capture(Stream, const std::function<void()>& work) override {
        const int64_t before = num_synchronisations();
        work();
        EXPECT_EQ(num_synchronisations(), before) << "the host stopped in a capture";
        return std::make_unique<Graph>(*this);
    }
    int launches = 0;

private:
    struct Graph final : WorkGraph {
        explicit Graph(GraphDevice& of) : device(of) {}
        void launch(Stream) override { ++device.launches; }
        LaunchCount launches() const override { return {}; }
        GraphDevice& device;
    };
};

// Slots 0 and 1 use memory of their own, of which each grows once.
struct TwoMemories {
    GraphDevice device;
    CapturedSteps steps{device, 2};
    bool grown[2] = {};
    int runs = 0;

    void run(size_t slot, int64_t layout) {
        steps.run(slot, layout, {}, [&] {
            ++runs;
            if (!grown[slot]) device.synchronize();
            grown[slot] = true;
            return CapturedSteps::Known{};
        });
    }
};

TEST(CapturedSteps, ASlotIsCapturedOnceItsOwnWorkIsWarm) {
    TwoMemories memories;
    memories.run(0, 1);  // grows
    memories.run(0, 1);  // warm
    memories.run(1, 1);  // grows: slot 0's work says nothing of slot 1's memory
    EXPECT_EQ(memories.steps.num_captures(), 0);
    memories.run(0, 1);
    EXPECT_EQ(memories.steps.num_captures(), 1);
    memories.run(1, 1);  // warm
    EXPECT_EQ(memories.steps.num_captures(), 1);
    memories.run(1, 1);
    EXPECT_EQ(memories.steps.num_captures(), 2);
    const int runs = memories.runs;
    for (const size_t slot : {0, 1, 0, 1}) memories.run(slot, 1);
    EXPECT_EQ(memories.runs, runs);
    EXPECT_EQ(memories.device.launches, 2 + 4);
}

TEST(CapturedSteps, AnotherLayoutForgetsAllGraphs) {
    TwoMemories memories;
    for (int i = 0; i < 3; ++i)
        for (const size_t slot : {0, 1}) memories.run(slot, 1);
    EXPECT_EQ(memories.steps.num_captures(), 2);
    memories.grown[1] = false;
    memories.run(0, 2);
    memories.run(1, 2);  // grows again
    EXPECT_EQ(memories.steps.num_captures(), 2);
    memories.run(0, 2);
    memories.run(1, 2);
    EXPECT_EQ(memories.steps.num_captures(), 3);
    memories.run(1, 2);
    EXPECT_EQ(memories.steps.num_captures(), 4);
}

}  // namespace
}  // namespace fp8flow::test
