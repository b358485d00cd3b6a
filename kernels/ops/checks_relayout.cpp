// SPDX-License-Identifier: MIT
// Checks and costs of relayout_scales and of the state update between steps, delayed_scale_update.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

void check(const op::RelayoutScales& args) {
    FP8FLOW_CHECK(args.wire.rank == 2 && (args.wire.dtype == DType::e8m0 || args.wire.dtype == DType::f32),
                  "wire scales {}", describe(args.wire));
    FP8FLOW_CHECK(args.vec128.rank == 2 && args.vec128.dtype == DType::f32 &&
                      args.vec128.dim(0) == args.wire.dim(1) && args.vec128.dim(1) == args.wire.dim(0),
                  "wire {} vec128 {}", describe(args.wire), describe(args.vec128));
}

OpCost cost(const op::RelayoutScales& args) {
    return with_writes({.bytes = static_cast<double>(args.wire.bytes() + args.vec128.bytes()), .flops = 0},
                       static_cast<double>(args.vec128.bytes()));
}

void check(const op::DelayedScaleUpdate& args) {
    FP8FLOW_CHECK(args.amax.numel() == 1 && args.scale.numel() == 1 && args.history.numel() >= 1,
                  "amax {} history {} scale {}", describe(args.amax), describe(args.history),
                  describe(args.scale));
    check_tensor(args.position, "position", DType::i64, {1});
}

OpCost cost(const op::DelayedScaleUpdate& args) {
    return {.bytes = static_cast<double>(args.history.bytes()), .flops = 0};
}

}  // namespace fp8flow
