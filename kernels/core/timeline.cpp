// SPDX-License-Identifier: MIT
// The host's timeline, for devices that work while the caller waits: a mark is the time at which it is made.
#include "kernels/core/timeline.h"

#include "kernels/core/device.h"
#include "kernels/core/error.h"

#include <chrono>
#include <vector>

namespace fp8flow {

double clock_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

class HostTimeline final : public Timeline {
public:
    int64_t mark(Stream) override {
        marks_.push_back(clock_seconds());
        return static_cast<int64_t>(marks_.size()) - 1;
    }
    double seconds_between(int64_t a, int64_t b) override { return at(b) - at(a); }
    void reset() override { marks_.clear(); }

private:
    double at(int64_t index) const {
        FP8FLOW_CHECK(index >= 0 && index < static_cast<int64_t>(marks_.size()), "mark {} of {}", index,
                      marks_.size());
        return marks_[static_cast<std::size_t>(index)];
    }
    std::vector<double> marks_;
};

}  // namespace

std::unique_ptr<Timeline> Device::make_timeline() { return std::make_unique<HostTimeline>(); }

}  // namespace fp8flow
