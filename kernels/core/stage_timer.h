// StageTimer: seconds per stage of the token's journey, forward and backward. Off by default at no cost.
// The stage names are the words of the journey: norm, route, plan, dispatch, fc1, swiglu, fc2, combine, ...
#pragma once

#include <chrono>
#include <map>
#include <string>

namespace fp8flow {

class StageTimer {
public:
    void enable(bool on) { enabled_ = on; }
    bool enabled() const { return enabled_; }
    void set_direction(const char* direction) { direction_ = direction; }  // "forward" or "backward"
    const char* direction() const { return direction_; }

    // Times one stage until the end of the scope (host clock; the CUDA backend records events instead).
    class Scope {
    public:
        Scope(StageTimer& timer, const char* stage)
            : timer_(timer.enabled_ ? &timer : nullptr), stage_(stage) {
            if (timer_) start_ = std::chrono::steady_clock::now();
        }
        ~Scope() {
            if (!timer_) return;
            const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
            timer_->seconds_[std::string(timer_->direction_) + "/" + stage_] += elapsed.count();
        }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

    private:
        StageTimer* timer_;
        const char* stage_;
        std::chrono::steady_clock::time_point start_;
    };

    // "forward/fc1" -> seconds since the last reset.
    const std::map<std::string, double>& seconds() const { return seconds_; }
    void reset() { seconds_.clear(); }

private:
    bool enabled_ = false;
    const char* direction_ = "forward";
    std::map<std::string, double> seconds_;
};

}  // namespace fp8flow
