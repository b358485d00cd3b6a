// The timeline of one GPU: CUDA events, created once and recorded again after each reset. Event times resolve about half a microsecond.
#include "kernels/hopper/cuda_timeline.h"

#include "kernels/hopper/cuda_check.h"
#include "kernels/hopper/launch.h"

#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <vector>

namespace fp8flow {

namespace {

using hopper::check_cuda;
using hopper::stream_of;

class CudaTimeline final : public Timeline {
public:
    CudaTimeline() = default;
    ~CudaTimeline() override {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
    }
    CudaTimeline(const CudaTimeline&) = delete;
    CudaTimeline& operator=(const CudaTimeline&) = delete;

    int64_t mark(Stream stream) override {
        if (next_ == events_.size()) {
            cudaEvent_t event = nullptr;
            check_cuda(cudaEventCreate(&event), "creating an event");
            events_.push_back(event);
        }
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

    void begin_range(const char* direction, const char* name) override {
        char text[256];
        std::snprintf(text, sizeof text, "%s/%s", direction, name);
        nvtxRangePushA(text);  // copied
    }
    void end_range() override { nvtxRangePop(); }
    void begin_capture() override { check_cuda(cudaProfilerStart(), "starting the profiler's capture"); }
    void end_capture() override { check_cuda(cudaProfilerStop(), "ending the profiler's capture"); }

private:
    cudaEvent_t at(int64_t index) const {
        FP8FLOW_CHECK(index >= 0 && static_cast<std::size_t>(index) < next_, "mark {} of {}", index, next_);
        return events_[static_cast<std::size_t>(index)];
    }
    std::vector<cudaEvent_t> events_;
    std::size_t next_ = 0;
};

}  // namespace

std::unique_ptr<Timeline> make_cuda_timeline() { return std::make_unique<CudaTimeline>(); }

}  // namespace fp8flow
