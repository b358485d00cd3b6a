// SPDX-License-Identifier: MIT
// class Ops: every operation of kernels/ops/list.h, one method each (the contracts: kernels/ops/*.h). A
// method checks its arguments, counts calls, bytes and FLOPs, calls the observer, then the backend's do_x.
// Read next: kernels/exchange.h.
#pragma once

#include "kernels/core/device.h"
#include "kernels/core/op_observer.h"
#include "kernels/ops/list.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace fp8flow {

struct OpCount {
    int64_t calls = 0;
    double bytes = 0;
    double flops = 0;
};

// Argument checks and costs, one overload per op (kernels/ops/checks_*.cpp). check throws Error(internal).
#define FP8FLOW_DECLARE(name, Args)   \
    void check(const op::Args& args); \
    OpCost cost(const op::Args& args);
FP8FLOW_FOR_EACH_OP(FP8FLOW_DECLARE)
FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_DECLARE)
#undef FP8FLOW_DECLARE

// Whether an op is an explicit cast: a stand-alone quantiser (or dequantiser) of activations.
bool is_cast(std::string_view op);

class Ops {
public:
    virtual ~Ops() = default;

    // Memory of the device the ops run on, and copies to and from the host.
    virtual Device& device() = 0;

    // Every operation: void rms_norm(const op::RmsNorm& args, const Launch& launch = {}), and so on.
#define FP8FLOW_METHOD(name, Args) void name(const op::Args& args, const Launch& launch = {});
    FP8FLOW_FOR_EACH_OP(FP8FLOW_METHOD)
    FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_METHOD)
#undef FP8FLOW_METHOD

    // Calls, bytes and FLOPs per op name since the last reset. The number of explicit casts of a layer is the
    // number of calls to the stand-alone activation quantisers.
    const std::map<std::string, OpCount>& counts() const { return counts_; }
    int64_t num_casts() const;
    void reset_counts() { counts_.clear(); }
    // Called at every operation from now on; null: no observer.
    void observe(OpObserver* observer) { observer_ = observer; }

protected:
#define FP8FLOW_VIRTUAL(name, Args) virtual void do_##name(const op::Args& args, const Launch& launch) = 0;
    FP8FLOW_FOR_EACH_OP(FP8FLOW_VIRTUAL)
#undef FP8FLOW_VIRTUAL
#define FP8FLOW_COMPOSED(name, Args) virtual void do_##name(const op::Args& args, const Launch& launch);
    FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_COMPOSED)
#undef FP8FLOW_COMPOSED

private:
    template <class Args> void begin(const char* name, const Args& args);

    std::map<std::string, OpCount> counts_;
    OpObserver* observer_ = nullptr;
};

}  // namespace fp8flow
