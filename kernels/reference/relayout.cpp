// SPDX-License-Identifier: MIT
// relayout_scales: the wire's scales in the order the GEMM reads them; and the delayed scale's update between
// steps.
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

namespace fp8flow {

void ReferenceOps::do_relayout_scales(const op::RelayoutScales& args, const Launch&) {
    const int64_t tokens = args.wire.dim(0), blocks = args.wire.dim(1);
    float* out = args.vec128.as<float>();
    std::vector<float> row(static_cast<size_t>(blocks));
    for (int64_t t = 0; t < tokens; ++t) {
        reference::load_row(args.wire, t, row.data());
        for (int64_t b = 0; b < blocks; ++b) out[b * tokens + t] = row[static_cast<size_t>(b)];
    }
}

void ReferenceOps::do_delayed_scale_update(const op::DelayedScaleUpdate& args, const Launch&) {
    if (args.status && *args.status.as<int32_t>() != 0) return;
    float* history = args.history.as<float>();
    const int64_t length = args.history.numel();
    history[*args.position.as<int64_t>() % length] = *args.amax.as<float>();
    float largest = 0.0f;
    for (int64_t i = 0; i < length; ++i) largest = max_ignore_nan(largest, history[i]);
    *args.scale.as<float>() = quant_scale(largest, kE4m3Max, args.scale_format).dequant;
    *args.amax.as<float>() = 0.0f;
}

}  // namespace fp8flow
