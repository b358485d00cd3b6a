// SPDX-License-Identifier: MIT
// The timeline of one GPU: CUDA events, created once and recorded again after each reset. Event times resolve
// about half a microsecond. Where cycles are counted, a small kernel before each event stores every SM's
// cycle count with the time.
#include "kernels/hopper/runtime/cuda_timeline.h"

#include "kernels/core/error.h"
#include "kernels/hopper/device/clock.h"
#include "kernels/hopper/runtime/cuda_check.h"
#include "kernels/hopper/runtime/launch.h"

#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <vector>

namespace fp8flow {

namespace {

using hopper::check_cuda;
using hopper::stream_of;

// An SM's cycle count, the time of the reading, and the number of the mark that it belongs to.
struct Cycles {
    unsigned long long counted, when, mark;
};
// [kNumSms] in host memory. There is one CTA for each SM, but several may run on one SM and none on another:
// the entry of the SM without a CTA keeps an older mark.
__global__ void count_cycles_kernel(Cycles* cycles, unsigned long long mark) {
    cycles[hopper::sm_id()] = {static_cast<unsigned long long>(clock64()), hopper::global_nanoseconds(),
                               mark};
}

class CudaTimeline final : public Timeline {
public:
    CudaTimeline() = default;
    ~CudaTimeline() override {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        for (Cycles* chunk : chunks_) cudaFreeHost(chunk);
    }
    CudaTimeline(const CudaTimeline&) = delete;
    CudaTimeline& operator=(const CudaTimeline&) = delete;

    int64_t mark(Stream stream) override {
        if (next_ == events_.size()) {
            cudaEvent_t event = nullptr;
            check_cuda(cudaEventCreate(&event), "creating an event");
            events_.push_back(event);
        }
        if (counts_) count(stream);
        check_cuda(cudaEventRecord(events_[next_], stream_of(stream)), "recording an event");
        return static_cast<int64_t>(next_++);
    }

    double seconds_between(int64_t a, int64_t b) override {
        const cudaEvent_t first = at(a), last = at(b);
        check_cuda(cudaEventSynchronize(first), "waiting for the start of a measurement");
        check_cuda(cudaEventSynchronize(last), "waiting for the end of a measurement");
        float milliseconds = 0;
        check_cuda(cudaEventElapsedTime(&milliseconds, first, last), "reading the time between two events");
        return static_cast<double>(milliseconds) * 1e-3;
    }

    void reset() override { next_ = 0; }

    void count_cycles() override { counts_ = true; }
    // The mean of all SMs that both marks know.
    double clock_between(int64_t a, int64_t b) override {
        if (!counts_) return 0;
        check_cuda(cudaEventSynchronize(at(a)), "waiting for the start of a measurement");
        check_cuda(cudaEventSynchronize(at(b)), "waiting for the end of a measurement");
        const Counts &first = counts_of(a), &last = counts_of(b);
        double sum = 0, known = 0;
        for (int sm = 0; sm < hopper::kNumSms; ++sm) {
            const Cycles &from = first.cycles[sm], &to = last.cycles[sm];
            if (from.mark != first.mark || to.mark != last.mark || to.when <= from.when) continue;
            sum += 1e9 * static_cast<double>(to.counted - from.counted) /
                   static_cast<double>(to.when - from.when);
            known += 1;
        }
        return known > 0 ? sum / known : 0;
    }

    void begin_range(const char* direction, const char* name) override {
        char text[256];
        std::snprintf(text, sizeof text, "%s/%s", direction, name);
        nvtxRangePushA(text);  // copied
    }
    void end_range() override { nvtxRangePop(); }
    void begin_capture() override { check_cuda(cudaProfilerStart(), "starting the profiler's capture"); }
    void end_capture() override { check_cuda(cudaProfilerStop(), "ending the profiler's capture"); }

private:
    static constexpr std::size_t kChunk = 64;  // marks whose counts are allocated at a time
    struct Counts {
        Cycles* cycles = nullptr;
        unsigned long long mark = 0;
    };

    const Counts& counts_of(int64_t index) const { return marked_[static_cast<std::size_t>(index)]; }
    void count(Stream stream) {
        if (next_ == marked_.size()) {
            Cycles* chunk = nullptr;
            check_cuda(cudaMallocHost(&chunk, kChunk * hopper::kNumSms * sizeof(Cycles)),
                       "allocating host memory for counts of cycles");
            chunks_.push_back(chunk);
            for (std::size_t i = 0; i < kChunk; ++i) marked_.push_back({chunk + i * hopper::kNumSms});
        }
        Counts& counts = marked_[next_];
        counts.mark = ++num_marks_;
        hopper::launch_kernel(count_cycles_kernel, hopper::kNumSms, 1, {.stream = stream}, "counting cycles",
                              counts.cycles, counts.mark);
    }
    cudaEvent_t at(int64_t index) const {
        FP8FLOW_CHECK(index >= 0 && static_cast<std::size_t>(index) < next_, "mark {} of {}", index, next_);
        return events_[static_cast<std::size_t>(index)];
    }
    std::vector<cudaEvent_t> events_;
    std::size_t next_ = 0;
    bool counts_ = false;
    std::vector<Counts> marked_;  // by mark
    std::vector<Cycles*> chunks_;
    unsigned long long num_marks_ = 0;  // never reset
};

}  // namespace

std::unique_ptr<Timeline> make_cuda_timeline() { return std::make_unique<CudaTimeline>(); }

}  // namespace fp8flow
