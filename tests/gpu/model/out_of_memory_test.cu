// SPDX-License-Identifier: MIT
// A GPU whose memory ends at every place of a start and of the first steps: an error with exit status 12, and
// the next trainer works in the same process.
#include "model/train/trainer.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fp8flow::test {
namespace {

constexpr size_t kMegabyte = size_t{1} << 20;

// Holds all memory of the GPU but about `left` bytes.
class Hog {
public:
    explicit Hog(size_t left) {
        size_t free = 0, total = 0;
        for (size_t block = 1024 * kMegabyte; block >= 2 * kMegabyte; block /= 2)
            while (cudaMemGetInfo(&free, &total) == cudaSuccess && free >= left + block) {
                void* data = nullptr;
                if (cudaMalloc(&data, block) != cudaSuccess) break;
                blocks_.push_back(data);
            }
        cudaGetLastError();
    }
    ~Hog() {
        for (void* block : blocks_) cudaFree(block);
    }

private:
    std::vector<void*> blocks_;
};

size_t free_bytes() {
    size_t free = 0, total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return free;
}

// Two steps; "" or the error's message, and its code must be that of memory. free: of the GPU, with the
// trainer.
std::string train(const Config& config, const std::shared_ptr<const data::TokenSource>& data,
                  size_t* free = nullptr) {
    const auto groups = make_thread_groups(1, 60.0);
    try {
        Trainer trainer(config, *groups[0], choose_backend(BackendKind::hopper), Arithmetic::stated, data);
        trainer.run_step();
        trainer.run_step();
        if (free != nullptr) *free = free_bytes();
        return "";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::memory) << error.what();
        return error.what();
    }
}

TEST(OutOfMemory, IsAnErrorWhereverItHappensAndTheNextRunWorks) {
    const Config config =
        load_config(FP8FLOW_SOURCE_DIR "/configs/test.yaml", {"precision.recipe=fp8_flow"}, 1);
    const auto data = open_data(config);
    ASSERT_EQ(train(config, data), "");  // libraries and kernels are loaded
    const size_t before = free_bytes();
    size_t with = 0;
    ASSERT_EQ(train(config, data, &with), "");
    const size_t needed = before - with;
    ASSERT_GT(needed, 16 * kMegabyte);
    int failed = 0, worked = 0;
    for (size_t left = 0; left <= 2 * needed && worked < 2; left += needed / 40) {
        SCOPED_TRACE(fmt::format("{} MiB left", left / kMegabyte));
        const Hog hog(left);
        const std::string error = train(config, data);
        error.empty() ? ++worked : ++failed;
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
    EXPECT_GT(failed, 20);
    EXPECT_EQ(worked, 2);
    EXPECT_EQ(train(config, data), "");
}

// Rows that do not fit, and no memory for more: the step is not applied, and once there is memory the same
// trainer goes on.
TEST(OutOfMemory, RowsThatCannotGrowLeaveTheModelBeforeTheStep) {
    const Config config =
        load_config(FP8FLOW_SOURCE_DIR "/configs/test.yaml",
                    {"precision.recipe=fp8_flow", "model.seq_length=128", "training.micro_batch_size=64",
                     "training.global_batch_size=64", "model.moe_layer_freq=[1, 1]",
                     "moe.moe_router_force_biased=2.0", "moe.moe_expert_rank_capacity_factor=0.25"},
                    1);
    const auto groups = make_thread_groups(1, 60.0);
    Trainer trainer(config, *groups[0], choose_backend(BackendKind::hopper), Arithmetic::stated,
                    open_data(config));
    Device& device = trainer.ops().device();
    const auto weights = [&] {
        std::vector<float> all;
        for (const Parameter& p : trainer.transformer().parameters().all()) {
            all.resize(all.size() + static_cast<size_t>(p.numel()));
            device.copy_out(all.data() + all.size() - p.numel(), p.master.data,
                            static_cast<size_t>(p.master.bytes()));
        }
        return all;
    };
    const std::vector<float> before = weights();
    trainer.step();  // takes all that it needs, and runs out of rows
    {
        const Hog hog(0);
        try {
            trainer.drain();
            ADD_FAILURE() << "the rows grew";
        } catch (const OutOfRowMemory& error) {
            EXPECT_EQ(error.code(), ExitCode::memory);
            EXPECT_NE(std::string(error.what()).find("step 1: routed rows exceed"), std::string::npos)
                << error.what();
        }
    }
    EXPECT_EQ(trainer.steps_done(), 0);
    EXPECT_EQ(weights(), before);
    const StepResult step = trainer.run_step();
    EXPECT_EQ(step.step, 0);
    EXPECT_GE(step.redone, 1);
    EXPECT_NE(weights(), before);
}

}  // namespace
}  // namespace fp8flow::test
