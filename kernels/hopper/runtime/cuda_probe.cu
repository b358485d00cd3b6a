// SPDX-License-Identifier: MIT
// The probe of one GPU: a streaming kernel (its rate is the ceiling of every memory-bound operation), a delay
// kernel, and the properties that the driver reports.
#include "kernels/core/error.h"
#include "kernels/core/scaled_tensor.h"
#include "kernels/core/tensor.h"
#include "kernels/hopper/device/clock.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/probe.h"

namespace fp8flow {

namespace {

using hopper::check_cuda;

constexpr int kThreads = 256;

// `total` words in as many shares as there are CTAs: the first `longer` shares have one word more than
// `share`.
struct Shares {
    int64_t total, share, longer;
    __device__ int64_t begin(int64_t cta) const { return cta * share + min(cta, longer); }
};
Shares shares_of(int64_t words, int64_t ctas) { return {words, words / ctas, words % ctas}; }

// Bytes: 16 * (reads + writes), nothing else. A CTA moves its share of the words read and of the words
// written, so that both directions overlap over the whole kernel at any ratio; a share is at most kThreads *
// Depth words. A thread issues all its loads before it uses one. Every word is written by one thread:
// deterministic. No barriers. The words read are combined by exclusive or, which is what is written, or, if
// nothing is written, could reach `sink`.
template <int Depth>
__global__ void __launch_bounds__(kThreads)
    traffic_kernel(const uint4* from, Shares reads, uint4* to, Shares writes, uint4* sink) {
    const int64_t cta = blockIdx.x;
    const int64_t read_begin = reads.begin(cta), read_end = reads.begin(cta + 1);
    const int64_t write_begin = writes.begin(cta), write_end = writes.begin(cta + 1);
    uint4 words[Depth];
#pragma unroll
    for (int i = 0; i < Depth; ++i) {
        const int64_t at = read_begin + i * kThreads + threadIdx.x;
        words[i] = at < read_end ? __ldcs(from + at) : make_uint4(0, 0, 0, 0);
    }
    uint4 sum = make_uint4(threadIdx.x, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < Depth; ++i) {
        sum.x ^= words[i].x;
        sum.y ^= words[i].y;
        sum.z ^= words[i].z;
        sum.w ^= words[i].w;
    }
#pragma unroll
    for (int i = 0; i < Depth; ++i) {
        const int64_t at = write_begin + i * kThreads + threadIdx.x;
        if (at < write_end) __stcs(to + at, sum);
    }
    constexpr uint32_t kNever = 0x9E3779B9u;  // any value: random data equal it once in 2^128
    if (writes.total == 0 && sum.x == kNever && sum.y == kNever && sum.z == kNever && sum.w == kNever)
        *sink = sum;
}

template <int Depth> void launch_traffic(const Traffic& traffic, uint4* sink, const Launch& launch) {
    const int64_t reads = ceil_div(traffic.bytes_read, 16), writes = ceil_div(traffic.bytes_written, 16);
    const int64_t ctas = ceil_div(std::max(reads, writes), kThreads * Depth);
    if (ctas == 0) return;
    FP8FLOW_CHECK(ctas <= INT32_MAX, "{} CTAs", ctas);
    hopper::launch_kernel(traffic_kernel<Depth>, static_cast<unsigned>(ctas), kThreads, launch,
                          "memory traffic", static_cast<const uint4*>(traffic.from), shares_of(reads, ctas),
                          static_cast<uint4*>(traffic.to), shares_of(writes, ctas), sink);
}

// One thread that polls the nanosecond clock.
__global__ void delay_kernel(unsigned long long nanoseconds) {
    const unsigned long long start = hopper::global_nanoseconds();
    while (hopper::global_nanoseconds() - start < nanoseconds) __nanosleep(500);
}

class CudaProbe final : public Probe {
public:
    explicit CudaProbe(Device& device) : device_(device) {
        int id = 0;
        check_cuda(cudaGetDevice(&id), "reading the current GPU");
        check_cuda(cudaGetDeviceProperties(&properties_, id), "reading the GPU's properties");
        sink_ = static_cast<uint4*>(device_.allocate(sizeof(uint4)));
    }
    ~CudaProbe() override { device_.free(sink_); }
    CudaProbe(const CudaProbe&) = delete;
    CudaProbe& operator=(const CudaProbe&) = delete;

    std::string device_name() const override { return properties_.name; }
    int64_t cache_bytes() const override { return properties_.l2CacheSize; }

    void stream_traffic(const Traffic& traffic, const Launch& launch) override {
        switch (traffic.depth) {
            case 2: return launch_traffic<2>(traffic, sink_, launch);
            case 4: return launch_traffic<4>(traffic, sink_, launch);
            case 8: return launch_traffic<8>(traffic, sink_, launch);
            default: fail(ExitCode::internal, "{} accesses in flight, want 2, 4 or 8", traffic.depth);
        }
    }

    void delay(double seconds, Stream stream) override {
        if (seconds <= 0) return;
        hopper::launch_kernel(delay_kernel, 1, 1, {.stream = stream}, "delay", seconds * 1e9);
    }

private:
    Device& device_;
    cudaDeviceProp properties_{};
    uint4* sink_ = nullptr;
};

}  // namespace

namespace hopper {
std::unique_ptr<Probe> make_probe(Ops& ops) { return std::make_unique<CudaProbe>(ops.device()); }
}  // namespace hopper

}  // namespace fp8flow
