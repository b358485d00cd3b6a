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

// The least bytes and FLOPs of a call, counted as `profile` counts them (cost in kernels/ops/checks_*.cpp):
// valid rows, no pads.
struct Work : OpCost {
    double wire_bytes = 0;  // sent to other ranks
};

// One call on one set of tensors.
struct Call {
    std::function<void(const Launch&)> run;
    Work work;
    // The same result from the plugin, measured next to it; without `run` there is none.
    Plugin::Call baseline = {};
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

// A call of a local operation. Checks the arguments at once.
template <class Args>
Call call_of(Machine& machine, void (Ops::*operation)(const Args&, const Launch&), const Args& args) {
    check(args);
    Ops& ops = machine.ops;
    return {[&ops, operation, args](const Launch& launch) { (ops.*operation)(args, launch); },
            {cost(args)},
            machine.plugin != nullptr ? machine.plugin->call(args) : Plugin::Call{}};
}

// Builds the call of one operation from its arguments.
template <auto operation, auto arguments> Call local(Machine& machine, Buffers& buffers, const Shape& shape) {
    return call_of(machine, operation, arguments(buffers, shape));
}

// Two operations one after the other, which `fused` replaces: its work is that of the whole.
template <class Fused, class First, class Second>
Call two_calls(Machine& machine, const Fused& fused, void (Ops::*first)(const First&, const Launch&),
               const First& first_args, void (Ops::*second)(const Second&, const Launch&),
               const Second& second_args) {
    check(first_args);
    check(second_args);
    Ops& ops = machine.ops;
    return {[&ops, first, first_args, second, second_args](const Launch& launch) {
                (ops.*first)(first_args, launch);
                (ops.*second)(second_args, launch);
            },
            {cost(fused)}};
}

}  // namespace fp8flow::bench
