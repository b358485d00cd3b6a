// SPDX-License-Identifier: MIT
// A caller's kernels beside ours (`bench --plugin`): loads the library, hands it the arguments of an
// operation as named tensors and numbers, and compares what both wrote. The library's side:
// include/fp8flow/plugin.h.
#pragma once

#include "kernels/ops.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fp8flow::bench {

struct NamedTensor {
    std::string name;
    TensorView view;
};

class Plugin {
public:
    // Throws Error(usage) for a file that cannot be loaded, another version, and operations that are not in
    // the list or occur twice. `gpu`: tensors are in the memory of a GPU.
    Plugin(const std::string& path, Device& device, bool gpu);
    ~Plugin();
    Plugin(const Plugin&) = delete;
    Plugin& operator=(const Plugin&) = delete;

    const std::string& name() const { return name_; }
    bool has(const std::string& operation) const;
    std::vector<std::string> operations() const;
    // The library's operations, to be called as ours are. One that it does not have, or that refuses a call,
    // throws Error(usage).
    Ops& ops();

private:
    class Calls;
    std::string name_;
    std::unique_ptr<Calls> calls_;
};

// Of an operation's arguments: the name of the operation, and all tensors.
template <class Args> const char* operation_of(const Args& args);
template <class Args> std::vector<NamedTensor> tensors_of(const Args& args);

// What both wrote, in words: "equal", or where they differ: "y: nmse 1.2e-06", "a: 3 of 4096 values". The
// tensors hold the same values before each of the two, and those again afterwards.
std::string compare_results(Device& device, const std::vector<NamedTensor>& tensors,
                            const std::function<void()>& ours, const std::function<void()>& theirs);

}  // namespace fp8flow::bench
