// SPDX-License-Identifier: MIT
// The launch functions opt in to shared memory beyond 48 KB. A launch with less never lowers the limit of a
// launch with more, whether that is in a captured graph or comes from another thread.
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/runtime/work_graph.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace fp8flow::hopper {
namespace {

constexpr unsigned kSmall = 60 << 10, kLarge = 200 << 10;

// Adds the value of the last word of the shared memory: its number.
template <int kTest> __global__ void last_word_kernel(unsigned words, unsigned long long* sum) {
    extern __shared__ unsigned memory[];
    memory[words - 1] = words;
    atomicAdd(sum, static_cast<unsigned long long>(memory[words - 1]));
}
using LastWordKernel = void (*)(unsigned, unsigned long long*);

// A stream, and the sum on the device.
class Job {
public:
    Job() {
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
        check_cuda(cudaMalloc(&sum_, sizeof *sum_), "allocating a sum");
        check_cuda(cudaMemset(sum_, 0, sizeof *sum_), "clearing a sum");
        check_cuda(cudaDeviceSynchronize(), "clearing a sum");
    }
    ~Job() {
        cudaFree(sum_);
        cudaStreamDestroy(stream_);
    }
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    cudaStream_t stream() const { return stream_; }
    Launch launch() const { return {.stream = {stream_}}; }
    void run(LastWordKernel kernel, unsigned bytes) const {
        launch_kernel(kernel, 1, 1, bytes, launch(), "last word", bytes / 4, sum_);
    }
    unsigned long long sum() const {
        unsigned long long result = 0;
        check_cuda(cudaStreamSynchronize(stream_), "waiting for a sum");
        check_cuda(cudaMemcpy(&result, sum_, sizeof result, cudaMemcpyDefault), "reading a sum");
        return result;
    }

private:
    cudaStream_t stream_ = nullptr;
    unsigned long long* sum_ = nullptr;
};

TEST(Launch, LessSharedMemoryDoesNotLowerTheLimitOfAGraph) {
    const LastWordKernel kernel = last_word_kernel<0>;
    const Job job;
    const auto graph = capture_work(job.stream(), [&] { job.run(kernel, kLarge); });
    job.run(kernel, kSmall);
    graph->launch({job.stream()});
    EXPECT_EQ(job.sum(), (kLarge + kSmall) / 4);
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "reading attributes");
    EXPECT_EQ(attributes.maxDynamicSharedSizeBytes, static_cast<int>(kLarge));
}

TEST(Launch, ThreadsWithDifferentSizesDoNotFailEachOther) {
    constexpr unsigned kThreads = 8, kLaunches = 200;
    const LastWordKernel kernel = last_word_kernel<1>;
    std::vector<std::thread> threads;
    std::vector<Job> jobs(kThreads);
    for (unsigned t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
            for (unsigned i = 0; i < kLaunches; ++i) jobs[t].run(kernel, t % 2 == 0 ? kSmall : kLarge);
        });
    for (std::thread& thread : threads) thread.join();
    for (unsigned t = 0; t < kThreads; ++t)
        EXPECT_EQ(jobs[t].sum(), kLaunches * ((t % 2 == 0 ? kSmall : kLarge) / 4)) << "thread " << t;
}

}  // namespace
}  // namespace fp8flow::hopper
