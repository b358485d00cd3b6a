// SPDX-License-Identifier: MIT
// TensorStats (--tensor-stats): what quantisation did to each tensor of the flow: underflow, saturation,
// scale range, error against the plain source. A diagnosis: it copies tensors to the host and is not meant
// for timed steps.
#pragma once

#include "layers/context.h"

#include <string>
#include <vector>

namespace fp8flow {

struct TensorStatsRow {
    std::string tensor;       // "norm", "dispatch", "fc1 input", "swiglu", "dY" or "swiglu backward"
    int64_t values = 0;       // valid values seen
    int64_t zeros = 0;        // codes that are zero
    int64_t underflows = 0;   // non-zero source values whose code is zero
    int64_t saturations = 0;  // codes at the largest magnitude
    double scale_min = 0, scale_max = 0;         // over scales of valid rows, pads left out
    double error_energy = 0, source_energy = 0;  // sums of (q - source)^2 and source^2
    bool has_source = false;
    double nmse() const { return source_energy > 0 ? error_energy / source_energy : 0.0; }
};

class TensorStats {
public:
    // quantized [M, C] with row scales of any layout; groups as the ops take them (num_groups 0: all rows).
    void observe(Context& ctx, const char* name, const ScaledTensor& quantized, const RowGroups& groups,
                 const TensorView& source);
    const std::vector<TensorStatsRow>& rows() const { return rows_; }
    std::vector<TensorStatsRow>& rows() { return rows_; }

private:
    std::vector<TensorStatsRow> rows_;
};

}  // namespace fp8flow
