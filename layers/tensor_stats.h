// SPDX-License-Identifier: MIT
// TensorStats (--tensor-stats): what quantisation did to each tensor of the flow: underflow, saturation,
// scale range, error against the plain source; and what the transposed copies of weight gradients lost of
// the rows they were made from. A diagnosis: it copies tensors to the host and is not meant for timed steps.
#pragma once

#include "layers/context.h"

#include <string>
#include <vector>

namespace fp8flow {

struct TensorStatsRow {
    // "norm", "dispatch", "fc1 input", "swiglu", "dY" or "swiglu backward"; of FP8 projections "qkv input",
    // "qkv gradient", "proj input" or "proj gradient"
    std::string tensor;
    int64_t values = 0;       // valid values seen
    int64_t zeros = 0;        // quantised values that are zero
    int64_t underflows = 0;   // non-zero source values that became zero
    int64_t at_maximum = 0;   // quantised values of the largest magnitude, clipped or not
    int64_t saturations = 0;  // source values that were clipped: beyond the largest value times their scale
    double scale_min = 0, scale_max = 0;         // over scales of valid rows, pads left out
    double error_energy = 0, source_energy = 0;  // sums of (q - source)^2 and source^2
    bool has_source = false;
    double nmse() const { return source_energy > 0 ? error_energy / source_energy : 0.0; }
};

// A transposed copy that a weight gradient reads, in one iteration. A value is flushed where it is not 0 in
// the rows and 0 in the copy. Energies are sums of squares of dequantised values.
struct TransposeStatsRow {
    int64_t iteration = 0;
    std::string weight;   // its gradient reads the copy: "layers.1.moe.experts.linear_fc2.weight"
    std::string tensor;   // "dye^T", "a^T", "dh^T" or "xe^T"
    int64_t values = 0;   // of valid rows
    int64_t nonzero = 0;  // of these not 0 in the rows
    int64_t flushed = 0;  // of these 0 in the copy
    double energy = 0, flushed_energy = 0;  // of the rows: of all values, of flushed ones
    double error_energy = 0;                // of copy - rows
    double flushed_share() const {
        return nonzero > 0 ? static_cast<double>(flushed) / static_cast<double>(nonzero) : 0.0;
    }
    double flushed_energy_share() const { return energy > 0 ? flushed_energy / energy : 0.0; }
    double nmse() const { return energy > 0 ? error_energy / energy : 0.0; }
};

class TensorStats {
public:
    // What is observed from here on belongs to this iteration.
    void begin_iteration(int64_t iteration) {
        iteration_ = iteration;
        if (first_iteration_ == 0) first_iteration_ = iteration;
    }
    // Observed from the first to the last; 0: none.
    int64_t first_iteration() const { return first_iteration_; }
    int64_t last_iteration() const { return iteration_; }
    // quantized [M, C] with row scales of any layout; groups as the ops take them (num_groups 0: all rows).
    void observe(Context& ctx, const char* name, const ScaledTensor& quantized, const RowGroups& groups,
                 const TensorView& source);
    // rows [M, C] with row scales, copy [C, M] with scales tile128 or vec128, of the same groups. Several
    // micro-batches of an iteration add up.
    void observe_transposed(Context& ctx, const std::string& weight, const char* tensor,
                            const ScaledTensor& rows, const ScaledTensor& copy, const RowGroups& groups);
    const std::vector<TensorStatsRow>& rows() const { return rows_; }
    std::vector<TensorStatsRow>& rows() { return rows_; }
    const std::vector<TransposeStatsRow>& transposed() const { return transposed_; }  // iterations ascending

private:
    TransposeStatsRow& transposed_row(const std::string& weight, const char* tensor);

    std::vector<TensorStatsRow> rows_;
    std::vector<TransposeStatsRow> transposed_;
    int64_t first_iteration_ = 0, iteration_ = 0;
};

}  // namespace fp8flow
