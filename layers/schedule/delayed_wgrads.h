// SPDX-License-Identifier: MIT
// Expert weight gradients of several micro-batches in one GEMM (moe_wgrad_micro_batches). An arena keeps the
// operands until the last of these micro-batches. The GEMM then reads and writes dW once: traffic of dW
// limits its speed. Read next: flows/steps.h.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/ops/gemm.h"
#include "layers/parameter.h"

#include <map>
#include <optional>

namespace fp8flow {

class DelayedWgrads {
public:
    // joined: micro-batches of one GEMM, at least two.
    DelayedWgrads(Device& device, int64_t joined)
        : joined_(joined), arena_(device, "delayed weight gradients") {}

    int64_t joined() const { return joined_; }
    // Micro-batch `index` of the `count` of a step. Operands are kept until the next group of micro-batches
    // begins. The last micro-batch of a step keeps nothing, so the last group may have fewer.
    void begin_micro_batch(int64_t index, int64_t count);
    // Whether the weight gradients of this micro-batch wait for those of the next one.
    bool waits() const { return waits_; }
    // Holds the waiting operands and their group sizes.
    Arena& arena() { return arena_; }
    const Arena& arena() const { return arena_; }

    // Drops the operands of an abandoned step. No step may be running.
    void forget();

    // In the order of their micro-batches.
    struct Waiting {
        std::array<op::WgradOperands, op::kMaxWgradSets> operands = {};
        int64_t count = 0;
        Gradient mode = Gradient::overwrite;  // of the first micro-batch
    };
    void keep(const Parameter& weight, const op::WgradOperands& operands, Gradient mode);
    // The operands that wait for this micro-batch's gradient of the weight, if there are any. They are valid
    // until the next micro-batch begins.
    std::optional<Waiting> take(const Parameter& weight);

private:
    const int64_t joined_;
    Arena arena_;
    int64_t index_ = 0;  // of the micro-batch in its group
    bool waits_ = false;
    std::map<const Parameter*, Waiting> waiting_;
};

}  // namespace fp8flow
