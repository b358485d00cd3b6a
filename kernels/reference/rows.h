// SPDX-License-Identifier: MIT
// Row helpers of the reference backend: any float tensor is read and written as fp32, one row at a time, so
// that the operations are plain fp32 loops for every storage type; and the iteration over routed rows.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/core/scaled_tensor.h"

#include <cstdint>
#include <vector>

namespace fp8flow::reference {

// First row of an M-tensor in its (possibly shared) buffer.
inline int64_t base_of(const TensorView& view) { return view.row_base != nullptr ? *view.row_base : 0; }

// count elements from `offset` of a f32 | bf16 | f16 | e4m3 | e5m2 | e8m0 tensor, as fp32 (FP8 without
// their scale).
void load_floats(const TensorView& view, int64_t offset, int64_t count, float* out);
// One rounding (RNE) per element; FP8 saturates.
void store_floats(const TensorView& view, int64_t offset, int64_t count, const float* values);

inline void load_row(const TensorView& view, int64_t row, float* out) {
    load_floats(view, row * view.cols(), view.cols(), out);
}
inline void store_row(const TensorView& view, int64_t row, const float* values) {
    store_floats(view, row * view.cols(), view.cols(), values);
}

// Rotates the pairs (x[i], x[i + dim/2]) by angles [dim/2, 2] of cos and sin; sign -1: back.
inline void rotate_pairs(float* x, int64_t dim, const float* angles, float sign) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float cosine = angles[2 * i], sine = sign * angles[2 * i + 1];
        const float low = x[i], high = x[i + half];
        x[i] = fma_float(low, cosine, -(high * sine));
        x[i + half] = fma_float(high, cosine, low * sine);
    }
}

// One group of routed rows: rows [first, first + count) are valid, [first + count, end) are pads; relative to
// base_of(tensor).
struct GroupRange {
    int64_t group, first, count, end;
};
// Groups in order. groups.num_groups == 0: one group of `rows` valid rows. Throws Error(usage) where counts
// and offsets contradict each other or the capacity.
std::vector<GroupRange> group_ranges(const RowGroups& groups, int64_t rows);

enum class RowKind { valid, pad };

// Calls body(row, kind, scratch) for every row of every group, pads included, on all threads; `scratch` holds
// num_floats and belongs to the thread.
template <class Body>
void for_each_row(const std::vector<GroupRange>& ranges, int64_t num_floats, Body body) {
#pragma omp parallel
    {
        std::vector<float> scratch(static_cast<std::size_t>(num_floats));
        for (const GroupRange& range : ranges) {
#pragma omp for schedule(static) nowait
            for (int64_t row = range.first; row < range.end; ++row)
                body(row, row < range.first + range.count ? RowKind::valid : RowKind::pad, scratch.data());
        }
    }
}
// The same with body(row, scratch) for `rows` rows without groups.
template <class Body> void for_each_row(int64_t rows, int64_t num_floats, Body body) {
    const std::vector<GroupRange> all = {{0, 0, rows, rows}};
    for_each_row(all, num_floats, [&](int64_t row, RowKind, float* scratch) { body(row, scratch); });
}

// Throws Error(usage) unless each of the first `count` numbers is -1 or below `end`.
void check_rows_named(const TensorView& numbers, int64_t count, const char* what, int64_t end);
// The same for ids [.., K] of experts: each in [least, experts), no expert twice in a row; -1 may repeat.
void check_expert_ids(const TensorView& ids, const char* what, int32_t least, int64_t experts);

// Adds the upper half of N strands to the lower half until one is left.
template <int64_t N, class T> T sum_in_halves(T* strands) {
    for (int64_t step = N / 2; step > 0; step /= 2)
        for (int64_t s = 0; s < step; ++s) strands[s] += strands[s + step];
    return strands[0];
}

// Sum of values in 8 interleaved lanes (i % 8), lanes added as ((0+4)+(2+6)) + ((1+5)+(3+7)): the reduction
// order of this project.
float lane_sum(const float* values, int64_t count);
float lane_dot(const float* a, const float* b, int64_t count);  // fma into the lanes

}  // namespace fp8flow::reference
