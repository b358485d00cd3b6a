// SPDX-License-Identifier: MIT
// What the argument checks of several op families share: dtype and shape of a tensor, and the bytes of a list
// of tensors.
#pragma once

#include "kernels/core/error.h"
#include "kernels/core/op_observer.h"
#include "kernels/core/tensor.h"

#include <initializer_list>

namespace fp8flow {

inline bool is_bf16_or_f32(DType dtype) { return dtype == DType::bf16 || dtype == DType::f32; }

inline bool has_shape(const TensorView& view, std::initializer_list<int64_t> shape) {
    bool same = view.rank == static_cast<int>(shape.size());
    int i = 0;
    for (int64_t dim : shape) {
        same = same && view.dims[i] == dim;
        ++i;
    }
    return same;
}

inline void check_tensor(const TensorView& view, const char* what, DType dtype,
                         std::initializer_list<int64_t> shape) {
    FP8FLOW_CHECK(has_shape(view, shape) && view.dtype == dtype, "{} is {}, must be {}", what, describe(view),
                  describe(make_view(nullptr, dtype, shape)));
}

// For ops on whole tensors that know nothing of row arenas: they would touch the rows of other layers.
inline void check_own_rows(const TensorView& view, const char* what) {
    FP8FLOW_CHECK(view.row_base == nullptr, "{} is a view into a row arena", what);
}

// counts and offsets of RowGroups with at least one group.
inline void check_group_arrays(const RowGroups& groups) {
    FP8FLOW_CHECK(groups.alignment >= 1 && groups.row_capacity >= 0,
                  "alignment {} (moe_row_alignment), row capacity {}", groups.alignment, groups.row_capacity);
    check_tensor(groups.counts, "group counts", DType::i64, {groups.num_groups});
    check_tensor(groups.offsets, "group offsets", DType::i64, {groups.num_groups + 1});
}

// [M, row_shape...] with one entry per routed row; M may exceed the row capacity (row arenas).
inline void check_routed_rows(const TensorView& view, const char* what, const RowGroups& groups,
                              std::initializer_list<int64_t> row_shape) {
    bool same = view.rank == 1 + static_cast<int>(row_shape.size()) && view.dim(0) >= groups.row_capacity;
    int i = 1;
    for (int64_t dim : row_shape) {
        same = same && view.dims[i] == dim;
        ++i;
    }
    FP8FLOW_CHECK(same, "{} is {}, must have at least {} rows of {}", what, describe(view),
                  groups.row_capacity, row_shape.size() == 0 ? 1 : *row_shape.begin());
}

inline double bytes_of(std::initializer_list<TensorView> views) {
    double total = 0;
    for (const TensorView& view : views) total += static_cast<double>(view.bytes());
    return total;
}

inline OpCost with_writes(OpCost cost, double written) {
    cost.written = written;
    return cost;
}

}  // namespace fp8flow
