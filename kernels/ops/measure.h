// SPDX-License-Identifier: MIT
// What quantisation did to a tensor, against its source: counts, energies, extremes and the exponents of its
// scales. A diagnosis (--tensor-stats), in both backends from the tensors that the step uses.
#pragma once

#include "kernels/core/scalar_math.h"

namespace fp8flow::op {

FP8FLOW_HD double least_scale(double a, double b) { return b == 0 || (a != 0 && a < b) ? a : b; }

// Over valid rows. All are added up but the three extremes. All 0: of no value.
struct QuantizationCounts {
    double values = 0;
    double nonzero = 0, flushed = 0;   // of the source; of these 0 after quantisation
    double zeros = 0, at_maximum = 0;  // quantised values that are 0; of the largest magnitude
    double clipped = 0;                // values of the source beyond the largest value times their scale
    double energy = 0, flushed_energy = 0, error_energy = 0;  // squares: source, flushed source, difference
    double amax = 0, scale_max = 0;                           // of the source; over scales of values
    double scale_min = 0;                                     // 0: of no value

    // One value. largest: of the dtype.
    FP8FLOW_HD void count(float code, float scale, double truth, float largest) {
        const double error = static_cast<double>(code) * static_cast<double>(scale) - truth,
                     magnitude = truth < 0 ? -truth : truth;
        // A scale that is no power of two is rounded itself, and a source in BF16 may have been rounded up
        // from what was quantised: neither clips anything.
        const bool exact = (float_bits(scale) & 0x7FFFFFu) == 0;
        const double limit =
            static_cast<double>(largest) * static_cast<double>(scale) * (exact ? 1.0 : 1.0 + 0x1p-8);
        const bool lost = truth != 0 && code == 0;
        values += 1;
        nonzero += truth != 0 ? 1 : 0;
        flushed += lost ? 1 : 0;
        zeros += code == 0 ? 1 : 0;
        at_maximum += abs_float(code) == largest ? 1 : 0;
        clipped += magnitude > limit ? 1 : 0;
        energy += truth * truth;
        flushed_energy += lost ? truth * truth : 0;
        error_energy += error * error;
        amax = magnitude > amax ? magnitude : amax;
        scale_max = static_cast<double>(scale) > scale_max ? static_cast<double>(scale) : scale_max;
        scale_min = least_scale(scale_min, static_cast<double>(scale));
    }
};
struct QuantizationSums {
    static constexpr int kExponents = 256;
    QuantizationCounts counts;
    double exponents[kExponents] = {};  // values by the biased exponent of their scale, 2^(i - 127)
};
constexpr int kQuantizationCounts = sizeof(QuantizationCounts) / sizeof(double);
constexpr int kQuantizationWords = sizeof(QuantizationSums) / sizeof(double);
// Word `word` of two sums together.
FP8FLOW_HD double join_quantization(int word, double a, double b) {
    if (word == kQuantizationCounts - 1) return least_scale(a, b);
    if (word == kQuantizationCounts - 2 || word == kQuantizationCounts - 3) return a > b ? a : b;
    return a + b;
}

// sums joins those of these tensors, in an order of the backend's (energies: relative difference 1e-12).
struct MeasureQuantization {
    enum class Copy : uint8_t { rows, transposed };
    // [M, C] with layouts of rows or block128; transposed: [C, M] vec128 or tile128
    ScaledTensor quantized;
    ScaledTensor source;  // [M, C] bf16 | f16 | f32, or FP8 rows with their scales
    RowGroups groups;
    Copy copy = Copy::rows;
    TensorView sums;  // in/out [kQuantizationWords] f64
};

}  // namespace fp8flow::op
