// SPDX-License-Identifier: MIT
// What `bench` can measure: one case per operation. A case makes the tensors for a shape, states the least
// bytes and FLOPs of the call, and calls it. Every operation of kernels/ops/list.h and every exchange has
// one. Read next: buffers.h, registry.cpp, then any file of this folder.
#pragma once

#include "kernels/comm/process_group.h"
#include "kernels/ops.h"
#include "model/bench/buffers.h"
#include "model/bench/plugin.h"
#include "model/bench/shape.h"
#include "model/job/backend.h"
#include "model/measure/measure.h"

#include <functional>
#include <string>
#include <vector>

namespace fp8flow::bench {

// Which MMA rate is the ceiling. none: arithmetic is not the limit.
enum class Unit : uint8_t { none, bf16, fp8 };

// The fewest bytes and FLOPs for the data at hand, each input read once and each output written once.
struct Work {
    double bytes_read = 0, bytes_written = 0;
    double flops = 0;
    Unit unit = Unit::none;
    double wire_bytes = 0;  // sent to other ranks

    double bytes() const { return bytes_read + bytes_written; }
    Work& reads(double bytes) {
        bytes_read += bytes;
        return *this;
    }
    Work& writes(double bytes) {
        bytes_written += bytes;
        return *this;
    }
    template <class... Views> Work& reads_all(const Views&... views) {
        return reads((0.0 + ... + static_cast<double>(views.bytes())));
    }
    template <class... Views> Work& writes_all(const Views&... views) {
        return writes((0.0 + ... + static_cast<double>(views.bytes())));
    }
    Work& computes(double count, Unit by = Unit::none) {
        flops += count;
        unit = by;
        return *this;
    }
};

// One call on one set of tensors.
struct Call {
    std::function<void(const Launch&)> run;
    Work work;
    // The same result from another implementation, measured next to it; no name: there is none.
    struct Baseline {
        std::string name = {};
        std::function<void(const Launch&)> run = {};
        std::vector<NamedTensor> tensors = {};  // of both, if the results can be compared
        std::vector<std::string> numbers = {};
    } baseline = {};
    // After exactly one run: normalised mean square error against a GEMM in double, on a sample. GEMMs only.
    std::function<double()> error = {};
};

// Where the calls run. The exchange cases make an exchange of their own, for the shape's limits.
struct Machine {
    Ops& ops;
    ProcessGroup& world;
    BackendChoice backend;
    const Plugin* plugin = nullptr;  // timed with the operations that it has
};

enum class Runs : uint8_t { on_each_rank, together };

struct Case {
    std::string name;
    std::string meaning;
    Keys keys;
    Call (*build)(Machine& machine, Buffers& buffers, const Shape& shape);
    Runs runs = Runs::on_each_rank;  // together: ranks wait for each other
};

const std::vector<Case>& all_cases();
const Case& find_case(const std::string& name);  // throws Error(usage) with the nearest name

// By file of this folder.
std::vector<Case> attention_cases();
std::vector<Case> exchange_cases();
std::vector<Case> gemm_cases();
std::vector<Case> norm_cases();
std::vector<Case> optimizer_cases();
std::vector<Case> permute_cases();
std::vector<Case> quantize_cases();
std::vector<Case> router_cases();
std::vector<Case> swiglu_cases();
std::vector<Case> token_cases();

// A call of a local operation on the default stream. Checks the arguments at once.
template <class Args>
Call call_of(Machine& machine, void (Ops::*operation)(const Args&, const Launch&), const Args& args,
             const Work& work) {
    check(args);
    Ops& ops = machine.ops;
    Call call{[&ops, operation, args](const Launch& launch) { (ops.*operation)(args, launch); }, work};
    if (machine.plugin != nullptr)
        if (Plugin::Call theirs = machine.plugin->call(args); theirs.run)
            call.baseline = {machine.plugin->name(), std::move(theirs.run), std::move(theirs.tensors),
                             std::move(theirs.numbers)};
    return call;
}

// Two operations one after the other: what a fused form replaces. `work` is that of the whole.
template <class First, class Second>
Call two_calls(Machine& machine, void (Ops::*first)(const First&, const Launch&), const First& first_args,
               void (Ops::*second)(const Second&, const Launch&), const Second& second_args,
               const Work& work) {
    check(first_args);
    check(second_args);
    Ops& ops = machine.ops;
    return {[&ops, first, first_args, second, second_args](const Launch& launch) {
                (ops.*first)(first_args, launch);
                (ops.*second)(second_args, launch);
            },
            work};
}

}  // namespace fp8flow::bench
