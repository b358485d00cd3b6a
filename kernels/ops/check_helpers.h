// SPDX-License-Identifier: MIT
// What the argument checks and costs of several op families share. A check throws Error(internal) that says
// what an argument is and what it must be.
#pragma once

#include "kernels/core/error.h"
#include "kernels/core/op_observer.h"
#include "kernels/core/scaled_tensor.h"

#include <initializer_list>
#include <string>

namespace fp8flow {

using Shape = std::initializer_list<int64_t>;
constexpr int64_t kAny = -1;  // of a shape: any extent

inline bool is_bf16_or_f32(DType dtype) { return dtype == DType::bf16 || dtype == DType::f32; }
inline bool is_float(DType dtype) { return is_bf16_or_f32(dtype) || dtype == DType::f16; }

inline bool has_shape(const TensorView& view, Shape shape) {
    bool same = view.rank == static_cast<int>(shape.size());
    int i = 0;
    for (int64_t dim : shape) {
        same = same && (dim == kAny || view.dims[i] == dim);
        ++i;
    }
    return same;
}
inline std::string describe(Shape shape) {
    std::string text;
    for (int64_t dim : shape)
        text += (text.empty() ? "" : ", ") + (dim == kAny ? "any" : std::to_string(dim));
    return "[" + text + "]";
}

// ---- tensors
inline void check_tensor(const TensorView& view, const char* what, DType dtype, Shape shape) {
    FP8FLOW_CHECK(has_shape(view, shape) && view.dtype == dtype, "{} is {}, must be {}{}", what,
                  describe(view), name_of(dtype), describe(shape));
}
inline void check_optional(const TensorView& view, const char* what, DType dtype, Shape shape) {
    if (view) check_tensor(view, what, dtype, shape);
}
inline void check_plain(const TensorView& view, const char* what, Shape shape) {
    FP8FLOW_CHECK(has_shape(view, shape) && is_bf16_or_f32(view.dtype), "{} is {}, must be bf16 or f32 {}",
                  what, describe(view), describe(shape));
}

// For ops on whole tensors that know nothing of row arenas: they would touch the rows of other layers.
inline void check_own_rows(const TensorView& view, const char* what) {
    FP8FLOW_CHECK(view.row_base == nullptr, "{} is a view into a row arena", what);
}

inline void check_layout(const ScaledTensor& tensor, const char* what,
                         std::initializer_list<ScaleLayout> layouts) {
    std::string wanted;
    for (ScaleLayout layout : layouts) {
        if (tensor.layout == layout) return;
        wanted += (wanted.empty() ? "" : " or ") + std::string(name_of(layout));
    }
    fail(ExitCode::internal, "{} has scales {}, must be {}", what, name_of(tensor.layout), wanted);
}
// Of a quantiser: FP8 values in one of these layouts, with scales of this format.
inline void check_quantized(const ScaledTensor& out, const char* what, ScaleFormat format,
                            std::initializer_list<ScaleLayout> layouts, int64_t groups = 0) {
    check_layout(out, what, layouts);
    check_fp8(out, what, groups);
    check_written(out, what, format);
}

// ---- routed rows
inline void check_groups(const RowGroups& groups) {
    FP8FLOW_CHECK(groups.num_groups >= 1 && groups.alignment >= 1 && groups.row_capacity >= 0,
                  "{} groups, alignment {} (moe_row_alignment), row capacity {}", groups.num_groups,
                  groups.alignment, groups.row_capacity);
    check_tensor(groups.counts, "group counts", DType::i64, {groups.num_groups});
    check_tensor(groups.offsets, "group offsets", DType::i64, {groups.num_groups + 1});
}
inline void check_optional_groups(const RowGroups& groups) {
    if (groups.num_groups > 0) check_groups(groups);
}
// Consecutive rows of a group that share a scale, which is stored along the rows.
inline int64_t rows_per_scale(ScaleLayout layout) {
    if (layout == ScaleLayout::mx32) return kMxBlock;
    return layout == ScaleLayout::tile128 || layout == ScaleLayout::vec128 ? kBlock : 1;
}
inline void check_alignment(const RowGroups& groups, const char* what, ScaleLayout layout) {
    const int64_t rows = rows_per_scale(layout);
    FP8FLOW_CHECK(groups.alignment % rows == 0,
                  "{} has scales {} along the rows, so groups must start at multiples of {}, not {} "
                  "(moe_row_alignment)",
                  what, name_of(layout), rows, groups.alignment);
}

// One entry per routed row; there may be more than the row capacity (row arenas).
inline void check_capacity(const TensorView& view, const char* what, const RowGroups& groups) {
    FP8FLOW_CHECK(view.rank >= 1 && view.dim(0) >= groups.row_capacity,
                  "{} is {}: too few rows for a row capacity of {}", what, describe(view),
                  groups.row_capacity);
}

// ---- costs
inline double bytes_of(std::initializer_list<TensorView> views) {
    double total = 0;
    for (const TensorView& view : views) total += static_cast<double>(view.bytes());
    return total;
}
inline double bytes_of_scaled(const ScaledTensor& tensor) { return bytes_of({tensor.data, tensor.scales}); }
inline double count_of(const TensorView& view) { return static_cast<double>(view.numel()); }
// Of one row: of a vector one entry, of FP8 values their 1x128 scales too.
inline double row_bytes(const TensorView& view) {
    return static_cast<double>((view.rank > 1 ? view.cols() : view.rank) * size_of(view.dtype));
}
inline double row_bytes(const ScaledTensor& rows) {
    const int64_t scales = rows.scales ? ceil_div(rows.data.cols(), kBlock) * size_of(rows.scales.dtype) : 0;
    return row_bytes(rows.data) + static_cast<double>(scales);
}

inline OpCost moves(double read, double written, double flops = 0, Unit unit = Unit::vector) {
    return {read + written, flops, unit, written};
}
// Each tensor once.
inline OpCost moves(std::initializer_list<TensorView> read, std::initializer_list<TensorView> written,
                    double flops = 0, Unit unit = Unit::vector) {
    return moves(bytes_of(read), bytes_of(written), flops, unit);
}

}  // namespace fp8flow
