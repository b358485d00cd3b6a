// SPDX-License-Identifier: MIT
// TensorStats (--tensor-stats): the quantisation error of each tensor of each layer in an observed step, and
// the error of transposed copies against the rows they were made from. The device measures the tensors that
// the step uses (kernels/ops/measure.h); the host reads the sums after it has launched the step.
#pragma once

#include "layers/context.h"

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow {

struct Parameter;

struct TensorStatsRow {
    int64_t iteration = 0;
    int64_t layer = 0;
    // "norm", "dispatch", "fc1 input", "swiglu", "dY", "swiglu backward", "fc1 weight", "fc2 weight"; of FP8
    // projections "qkv input", "qkv gradient", "qkv weight" and those of proj; of copies "dye^T", "a^T", ...
    std::string tensor;
    std::string weight;  // of a transposed copy: its gradient reads it
    op::QuantizationCounts counts;
    int first_exponent = 0;  // exponents[i]: values with a scale of 2^(first_exponent + i), fractions dropped
    std::vector<double> exponents;

    void join(const TensorStatsRow& other);
    double flushed_share() const { return share(counts.flushed, counts.nonzero); }
    double clipped_share() const { return share(counts.clipped, counts.values); }
    double flushed_energy_share() const { return share(counts.flushed_energy, counts.energy); }
    double nmse() const { return share(counts.error_energy, counts.energy); }

private:
    static double share(double part, double of) { return of > 0 ? part / of : 0; }
};

class TensorStats {
public:
    // Observations until end_iteration belong to this iteration. Drops earlier rows of it.
    void begin_iteration(int64_t iteration);
    // Waits for the device and reads what it has measured.
    void end_iteration();
    void forget_from(int64_t iteration);

    // quantized [M, C] with row scales of any layout; groups as the ops take them (num_groups 0: all rows).
    // Several calls for a tensor of a layer add up.
    void observe(Context& ctx, const char* name, const ScaledTensor& quantized, const RowGroups& groups,
                 const TensorView& source);
    // rows [M, C] with row scales, copy [C, M] with scales tile128 or vec128, of the same groups.
    void observe_transposed(Context& ctx, const std::string& weight, const char* tensor,
                            const ScaledTensor& rows, const ScaledTensor& copy, const RowGroups& groups);
    // The FP8 copy against its master; nothing if the master is sharded.
    void observe_weight(Context& ctx, std::string_view stage, const Parameter& weight);

    // Iterations ascending, then as observed.
    const std::vector<TensorStatsRow>& rows() const { return rows_; }
    const std::vector<TensorStatsRow>& transposed() const { return transposed_; }
    // One row per tensor, over all layers and iterations.
    std::vector<TensorStatsRow> totals() const;

private:
    struct Slot {
        TensorStatsRow row;
        TensorView sums;
    };
    const TensorView& sums_of(Context& ctx, std::string_view tensor, const std::string& weight);

    std::vector<TensorStatsRow> rows_, transposed_;
    int64_t iteration_ = 0;
    std::vector<Slot> slots_;  // of the iteration
    std::unique_ptr<Arena> arena_;
    Device* device_ = nullptr;
    Stream stream_ = {};
};

}  // namespace fp8flow
