// SPDX-License-Identifier: MIT
// The one GEMM kernel of the reference backend: every dense, grouped and weight-gradient GEMM, plain or FP8,
// is a list of GemmProblems over strided operands. gemm.cpp translates the operations into them; the order of
// summation is that of kernels/ops/gemm.h.
#pragma once

#include "kernels/core/scale_place.h"
#include "kernels/reference/reference_ops.h"

#include <cstdint>
#include <vector>

namespace fp8flow::reference {

// Scale of entry (i, k) of an operand, i the output index (row of D for A, column for B), k along the
// contraction: scales[offset + place.of(i, k)]; absent scales mean 1.
struct OperandScale {
    TensorView scales;  // f32 | e8m0
    int64_t offset = 0;
    ScalePlace place;
};

// Entry (i, k) is data[offset + i * output_stride + k * k_stride]; one of the strides is 1.
struct Operand {
    TensorView data;  // f32 | bf16 | f16 | e4m3 | e5m2
    int64_t offset = 0;
    int64_t output_stride = 0;
    int64_t k_stride = 0;
    OperandScale scale;
};

// Where a sum starts: at zero, or at the value of D (f32), which continues the sum of an earlier GEMM.
enum class Start { zero, d };

// D[i, j] (+)= sum over k of A(i, k) B(j, k).
struct GemmProblem {
    int64_t m = 0, n = 0, k = 0;
    Operand a;
    Operand b;
    Gradient mode = Gradient::overwrite;
    TensorView d;
    int64_t d_offset = 0;  // of D[0, 0]; rows are n apart
    Start start = Start::zero;
};

// Runs GEMMs with disjoint outputs. Bits do not depend on the number of threads or on the tiling.
void run_gemms(const std::vector<GemmProblem>& problems, SummationOrder order);

}  // namespace fp8flow::reference
