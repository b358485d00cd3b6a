// SPDX-License-Identifier: MIT
// Kernels of the user next to ours (`bench --plugin`): loads the library, passes it the arguments of an
// operation as named tensors and numbers, and compares the results. The part of the library:
// include/fp8flow/plugin.h.
#pragma once

#include "kernels/ops.h"

#include <fp8flow/plugin.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fp8flow::bench {

struct NamedTensor {
    std::string name;
    TensorView view;
    std::string layout = {};  // of scales: "vec128 pow2"
};

class Plugin {
public:
    // Throws Error(usage) for a file that cannot be loaded, another version, and operations that are not in
    // the list or occur twice. `gpu`: tensors are in the memory of a GPU.
    Plugin(const std::string& path, bool gpu);
    // Has every operation and runs none: for the names of their arguments.
    explicit Plugin(bool gpu);

    const std::string& name() const { return name_; }
    bool has(const std::string& operation) const;
    std::vector<std::string> operations() const;

    // The library's kernel on these arguments, which are named once and not at each run; no `run` where the
    // library has no such operation. run throws Error(usage) where the library refuses the arguments.
    struct Call {
        std::function<void(const Launch&)> run;
        std::vector<NamedTensor> tensors;  // all of the arguments
        std::vector<std::string> numbers;  // the other arguments: "groups.num_groups 4"
    };
#define FP8FLOW_DECLARE(name, Args) Call call(const op::Args& args) const;
    FP8FLOW_FOR_EACH_OP(FP8FLOW_DECLARE)
    FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_DECLARE)
#undef FP8FLOW_DECLARE

private:
    bool gpu_;
    std::string name_;
    std::map<std::string, fp8flow_plugin_run> runs_;
};

// Compares the results of both: "equal", or where they differ: "y: nmse 1.2e-06", "a: 3 of 4096 values". The
// tensors hold the same values before each of the two calls, and again afterwards.
std::string compare_results(Device& device, const std::vector<NamedTensor>& tensors,
                            const std::function<void()>& ours, const std::function<void()>& theirs);

}  // namespace fp8flow::bench
