// SPDX-License-Identifier: MIT
// Expert weight gradients of pairs of micro-batches (moe_wgrad_pair_micro_batches): the operands of the first
// are kept in an arena of their own. One GEMM then sums over the rows of both and reads and writes dW once,
// because the traffic of dW is its bound. Read next: flows/steps.h.
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

    // Micro-batch `index` of the `count` of a step. Operands of the first of a pair are kept until the next
    // pair begins. The last micro-batch of an odd number keeps nothing.
    void begin_micro_batch(int64_t index, int64_t count);
    // Whether the weight gradients of this micro-batch wait for those of the next one.
    bool waits() const { return waits_; }
    // Holds the waiting operands and their group sizes.
    Arena& arena() { return arena_; }
    const Arena& arena() const { return arena_; }

    // Drops the operands of an abandoned step. No step may be running.
    void forget();

    struct Waiting {
        op::WgradOperands operands;
        Gradient mode;  // of their micro-batch
    };
    void keep(const Parameter& weight, const Waiting& waiting);
    // The operands that wait for this micro-batch's gradient of the weight, if there are any. They are valid
    // until the next micro-batch begins.
    std::optional<Waiting> take(const Parameter& weight);

private:
    Arena arena_;
    bool waits_ = false;
    std::map<const Parameter*, Waiting> waiting_;
};

}  // namespace fp8flow
