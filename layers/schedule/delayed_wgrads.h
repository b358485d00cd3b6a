// SPDX-License-Identifier: MIT
// Expert weight gradients that wait for the second of two micro-batches (moe_wgrad_pair_micro_batches): the
// operands of the first, in memory of their own. One GEMM then sums over the rows of both and reads and
// writes dW once; the traffic of dW is its bound. Read next: flows/steps.h.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/ops/gemm.h"
#include "layers/parameter.h"

#include <map>
#include <optional>

namespace fp8flow {

class DelayedWgrads {
public:
    explicit DelayedWgrads(Device& device) : arena_(device, "delayed weight gradients") {}

    // Micro-batch `index` of the `count` of a step. What the first of two keeps stays until the first of the
    // next two begins; the last of an odd number keeps nothing.
    void begin_micro_batch(int64_t index, int64_t count);
    // Whether the weight gradients of this micro-batch wait for those of the next one.
    bool waits() const { return waits_; }
    // For operands that wait, and the sizes of their groups.
    Arena& arena() { return arena_; }
    const Arena& arena() const { return arena_; }

    // What an abandoned step kept is forgotten. Nothing is under way.
    void forget();

    struct Waiting {
        op::WgradOperands operands;
        Gradient mode;  // of their micro-batch
    };
    void keep(const Parameter& weight, const Waiting& waiting);
    // What waits for this micro-batch's gradient of the weight, if anything does. It is valid until the next
    // micro-batch begins.
    std::optional<Waiting> take(const Parameter& weight);

private:
    Arena arena_;
    bool waits_ = false;
    std::map<const Parameter*, Waiting> waiting_;
};

}  // namespace fp8flow
