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
        load_config(std::string(FP8FLOW_SOURCE_DIR) + "/configs/test.yaml", {"precision.recipe=fp8_flow"}, 1);
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

}  // namespace
}  // namespace fp8flow::test
