// SPDX-License-Identifier: MIT
// Argument checks and costs of the quantisers, the FP8 transposes and scales. Checks look at shapes only:
// counts, offsets and row bases are device data.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

#include <algorithm>

namespace fp8flow {

namespace {

using L = ScaleLayout;

int64_t routed_rows(const RowGroups& groups, int64_t rows) {
    return groups.num_groups > 0 ? groups.cost_rows() : rows;
}

// The M dimension of a routed tensor: exactly the source's without groups, at least the row capacity with
// them. `wider`: a transposed copy, which may have pads at its end.
void check_extent(const TensorView& view, const char* what, int64_t extent, const RowGroups& groups,
                  int64_t rows, bool wider = false) {
    if (groups.num_groups > 0) {
        FP8FLOW_CHECK(extent >= groups.row_capacity, "{} is {}: too small for a row capacity of {}", what,
                      describe(view), groups.row_capacity);
        return;
    }
    check_own_rows(view, what);
    FP8FLOW_CHECK(extent == rows || (wider && extent > rows), "{} is {}, the source has {} rows", what,
                  describe(view), rows);
}

void check_source(const TensorView& src, const RowGroups& groups) {
    FP8FLOW_CHECK(src.rank == 2 && is_float(src.dtype), "src is {}", describe(src));
    check_optional_groups(groups);
    check_extent(src, "src", src.dim(0), groups, src.dim(0));
}

// dst [M, K] of src [M, K].
void check_rows(const ScaledTensor& dst, const char* what, const TensorView& src, const RowGroups& groups,
                ScaleFormat format, std::initializer_list<L> layouts) {
    check_quantized(dst, what, format, layouts);
    check_tensor(dst.data, what, dst.data.dtype, {kAny, src.dim(1)});
    check_extent(dst.data, what, dst.data.dim(0), groups, src.dim(0));
}

// dst [K, M] of src [M, K]; a block along M must not straddle two groups.
void check_columns(const ScaledTensor& dst, const char* what, const TensorView& src, const RowGroups& groups,
                   ScaleFormat format, std::initializer_list<L> layouts) {
    check_quantized(dst, what, format, layouts, std::max<int64_t>(groups.num_groups, 1));
    check_tensor(dst.data, what, dst.data.dtype, {src.dim(1), kAny});
    check_extent(dst.data, what, dst.data.dim(1), groups, src.dim(0), true);
    if (groups.num_groups > 0) check_alignment(groups, what, dst.layout);
}

double share(double bytes, int64_t rows, int64_t extent) {
    return extent > 0 ? bytes * static_cast<double>(rows) / static_cast<double>(extent) : 0;
}

// Bytes of this op's rows; `extent` is the M dimension of the (possibly shared) buffer.
double bytes_of_rows(const TensorView& view, int64_t rows) {
    return view ? share(static_cast<double>(view.bytes()), rows, view.dim(0)) : 0;
}
double bytes_of_fp8(const ScaledTensor& tensor, int64_t rows, int64_t extent) {
    if (!tensor) return 0;
    const double scales = static_cast<double>(tensor.scales.bytes());
    const bool whole = tensor.layout == L::tensor || tensor.layout == L::group_row;
    return share(static_cast<double>(tensor.data.bytes()), rows, extent) +
           (whole ? scales : share(scales, rows, extent));
}
double bytes_of_fp8_rows(const ScaledTensor& tensor, int64_t rows) {
    return tensor ? bytes_of_fp8(tensor, rows, tensor.data.dim(0)) : 0;
}
double bytes_of_fp8_columns(const ScaledTensor& tensor, int64_t rows) {
    return tensor ? bytes_of_fp8(tensor, rows, tensor.data.dim(-1)) : 0;
}

// Maximum and multiplication.
double flops_of(int64_t rows, const TensorView& src) { return 2.0 * static_cast<double>(rows * src.cols()); }

// The dimension of values that counts rows: of a transposed copy the last one.
int routed_dim(L layout) { return layout == L::tile128 || layout == L::group_row ? 1 : 0; }

void check_transpose(const ScaledTensor& src, const RowGroups& groups, const ScaledTensor& dst,
                     ScaleFormat format, L layout) {
    check_optional_groups(groups);
    check_layout(src, "src", {L::vec128});
    check_fp8(src, "src");
    check_tensor(src.data, "src", src.data.dtype, {kAny, kAny});
    check_extent(src.data, "src", src.data.dim(0), groups, src.data.dim(0));
    check_columns(dst, "dst", src.data, groups, format, {layout});
}

int64_t batch_of(const TensorView& view) { return view.rank == 3 ? view.dim(0) : 1; }

void check_copy(const ScaledTensor& copy, const char* what, const TensorView& src, ScaleFormat format,
                int64_t rows, int64_t cols) {
    if (!copy) return;
    check_quantized(copy, what, format, {L::block128, L::row, L::tensor, L::mx32});
    FP8FLOW_CHECK(batch_of(copy.data) == batch_of(src) && copy.data.dim(-2) == rows &&
                      copy.data.dim(-1) == cols && copy.data.row_base == nullptr,
                  "{} is {}, src {}", what, describe(copy.data), describe(src));
}

}  // namespace

void check(const op::QuantizeRows& args) {
    check_source(args.src, args.groups);
    check_rows(args.dst, "dst", args.src, args.groups, args.scale_format,
               {L::vec128_wire, L::vec128, L::row, L::mx32, L::tensor});
}
OpCost cost(const op::QuantizeRows& args) {
    const int64_t rows = routed_rows(args.groups, args.src.dim(0));
    return moves(bytes_of_rows(args.src, rows), bytes_of_fp8_rows(args.dst, rows), flops_of(rows, args.src));
}

void check(const op::QuantizeColumns& args) {
    const std::initializer_list<L> layouts = {L::vec128, L::group_row, L::mx32};
    check_source(args.src, args.groups);
    check_columns(args.dst, "dst", args.src, args.groups, args.scale_format, layouts);
    FP8FLOW_CHECK(static_cast<bool>(args.src2) == static_cast<bool>(args.dst2), "src2 is {}, dst2 is {}",
                  describe(args.src2), describe(args.dst2.data));
    if (!args.src2) return;
    check_source(args.src2, args.groups);
    check_columns(args.dst2, "dst2", args.src2, args.groups, args.scale_format, layouts);
}
OpCost cost(const op::QuantizeColumns& args) {
    const int64_t rows = routed_rows(args.groups, args.src.dim(0));
    return moves(bytes_of_rows(args.src, rows) + bytes_of_rows(args.src2, rows),
                 bytes_of_fp8_columns(args.dst, rows) + bytes_of_fp8_columns(args.dst2, rows),
                 flops_of(rows, args.src) + flops_of(rows, args.src2));
}

void check(const op::QuantizeDual& args) {
    check_source(args.src, args.groups);
    check_rows(args.rows, "rows", args.src, args.groups, args.scale_format, {L::vec128, L::row, L::mx32});
    check_columns(args.columns, "columns", args.src, args.groups, args.scale_format,
                  {L::vec128, L::group_row, L::mx32});
}
OpCost cost(const op::QuantizeDual& args) {
    const int64_t rows = routed_rows(args.groups, args.src.dim(0));
    return moves(bytes_of_rows(args.src, rows),
                 bytes_of_fp8_rows(args.rows, rows) + bytes_of_fp8_columns(args.columns, rows),
                 2 * flops_of(rows, args.src));
}

void check(const op::QuantizeTensor& args) {
    check_source(args.src, args.groups);
    FP8FLOW_CHECK(args.rows || args.transposed, "nothing to write");
    if (args.rows) check_rows(args.rows, "rows", args.src, args.groups, args.scale_format, {L::tensor});
    if (args.transposed)
        check_columns(args.transposed, "transposed", args.src, args.groups, args.scale_format, {L::tensor});
    FP8FLOW_CHECK(!args.rows || !args.transposed || args.rows.data.dtype == args.transposed.data.dtype,
                  "rows are {}, transposed {}", describe(args.rows.data), describe(args.transposed.data));
}
OpCost cost(const op::QuantizeTensor& args) {
    const int64_t rows = routed_rows(args.groups, args.src.dim(0));  // the source is read twice
    return moves(2 * bytes_of_rows(args.src, rows),
                 bytes_of_fp8_rows(args.rows, rows) + bytes_of_fp8_columns(args.transposed, rows),
                 flops_of(rows, args.src));
}

void check(const op::QuantizeWeight& args) {
    const TensorView& src = args.src;
    FP8FLOW_CHECK((src.rank == 2 || src.rank == 3) && is_bf16_or_f32(src.dtype), "src is {}", describe(src));
    check_own_rows(src, "src");
    FP8FLOW_CHECK(args.fprop || args.dgrad, "nothing to write");
    check_copy(args.fprop, "fprop", src, args.scale_format, src.dim(-2), src.dim(-1));
    check_copy(args.dgrad, "dgrad", src, args.scale_format, src.dim(-1), src.dim(-2));
    if (!args.fprop || !args.dgrad) return;
    FP8FLOW_CHECK(args.fprop.layout == args.dgrad.layout && args.fprop.data.dtype == args.dgrad.data.dtype,
                  "copies differ: {} {} and {} {}", describe(args.fprop.data), name_of(args.fprop.layout),
                  describe(args.dgrad.data), name_of(args.dgrad.layout));
}
OpCost cost(const op::QuantizeWeight& args) {
    return moves(bytes_of({args.src}), bytes_of_scaled(args.fprop) + bytes_of_scaled(args.dgrad),
                 2 * count_of(args.src));
}

void check(const op::Dequantize& args) {
    const TensorView& values = args.src.data;
    check_optional_groups(args.groups);
    check_fp8(args.src, "src", std::max<int64_t>(args.groups.num_groups, 1));
    FP8FLOW_CHECK(args.dst.rank == values.rank && is_float(args.dst.dtype), "dst is {}, src {}",
                  describe(args.dst), describe(values));
    const int routed = routed_dim(args.src.layout);
    for (int i = 0; i < values.rank; ++i) {
        const bool free_extent = i == routed && args.groups.num_groups > 0;
        FP8FLOW_CHECK(free_extent || args.dst.dims[i] == values.dims[i], "dst is {}, src {}",
                      describe(args.dst), describe(values));
    }
    FP8FLOW_CHECK(values.rank == 2 || args.groups.num_groups == 0, "groups of rows in {}", describe(values));
    check_extent(values, "src", values.dim(routed), args.groups, values.dim(routed));
    check_extent(args.dst, "dst", args.dst.dim(routed), args.groups, values.dim(routed));
}
OpCost cost(const op::Dequantize& args) {
    const int routed = routed_dim(args.src.layout);
    const int64_t rows = routed_rows(args.groups, args.src.data.dim(routed)), written = args.dst.dim(routed);
    return moves(bytes_of_fp8(args.src, rows, args.src.data.dim(routed)),
                 share(bytes_of({args.dst}), rows, written), share(count_of(args.dst), rows, written));
}

void check(const op::ClipFp8& args) {
    check_optional_groups(args.groups);
    FP8FLOW_CHECK(args.rows.rank == 2 && is_fp8(args.rows.dtype) && args.share > 0 && args.share <= 1,
                  "rows {} share {}", describe(args.rows), args.share);
    check_extent(args.rows, "rows", args.rows.dim(0), args.groups, args.rows.dim(0));
}
OpCost cost(const op::ClipFp8& args) {
    const double bytes = bytes_of_rows(args.rows, routed_rows(args.groups, args.rows.dim(0)));
    return moves(bytes, bytes);
}

void check(const op::MeasureQuantization& args) {
    const bool transposed = args.copy == op::MeasureQuantization::Copy::transposed;
    const TensorView &values = args.quantized.data, &source = args.source.data;
    check_optional_groups(args.groups);
    check_fp8(args.quantized, "quantized");
    if (is_fp8(source.dtype)) check_fp8(args.source, "source");
    if (transposed)
        check_layout(args.quantized, "quantized", {L::vec128, L::tile128});
    else
        check_layout(args.quantized, "quantized",
                     {L::tensor, L::row, L::vec128_wire, L::vec128, L::block128, L::mx32});
    FP8FLOW_CHECK(values.rank == 2 && source.rank == 2 && values.dim(transposed ? 0 : 1) == source.dim(1),
                  "quantized {} source {}", describe(values), describe(source));
    check_extent(source, "source", source.dim(0), args.groups, source.dim(0));
    check_extent(values, "quantized", values.dim(transposed ? 1 : 0), args.groups, source.dim(0), transposed);
    check_tensor(args.sums, "sums", DType::f64, {op::kQuantizationWords});
}
OpCost cost(const op::MeasureQuantization& args) {
    const int64_t rows = routed_rows(args.groups, args.source.data.dim(0));
    const bool transposed = args.copy == op::MeasureQuantization::Copy::transposed;
    return {(is_fp8(args.source.data.dtype) ? bytes_of_fp8_rows(args.source, rows)
                                            : bytes_of_rows(args.source.data, rows)) +
                (transposed ? bytes_of_fp8_columns(args.quantized, rows)
                            : bytes_of_fp8_rows(args.quantized, rows)),
            0};
}

void check(const op::TransposeFp8& args) {
    check_transpose(args.src, args.groups, args.dst, ScaleFormat::pow2, L::tile128);
    require(format_of(args.src) == ScaleFormat::pow2, ExitCode::usage,
            "src declares scales {}, want pow2: exponents are shifted and mantissas ignored (quantise with "
            "scale_format pow2 and declare it, or use transpose_requantize)",
            name_of(format_of(args.src)));
    FP8FLOW_CHECK(args.src.data.dtype == args.dst.data.dtype, "src is {}, dst {}", describe(args.src.data),
                  describe(args.dst.data));
}
OpCost cost(const op::TransposeFp8& args) {
    const int64_t rows = routed_rows(args.groups, args.src.data.dim(0));
    return moves(bytes_of_fp8_rows(args.src, rows), bytes_of_fp8_columns(args.dst, rows));
}

void check(const op::TransposeRequantize& args) {
    check_transpose(args.src, args.groups, args.dst, args.scale_format, L::vec128);
}
OpCost cost(const op::TransposeRequantize& args) {
    const int64_t rows = routed_rows(args.groups, args.src.data.dim(0));
    return moves(bytes_of_fp8_rows(args.src, rows), bytes_of_fp8_columns(args.dst, rows),
                 flops_of(rows, args.src.data) * 1.5);
}

void check(const op::RelayoutScales& args) {
    FP8FLOW_CHECK(args.wire.rank == 2 && (args.wire.dtype == DType::e8m0 || args.wire.dtype == DType::f32),
                  "wire scales {}", describe(args.wire));
    check_tensor(args.vec128, "vec128", DType::f32, {args.wire.dim(1), args.wire.dim(0)});
}
OpCost cost(const op::RelayoutScales& args) { return moves({args.wire}, {args.vec128}); }

void check(const op::DelayedScaleUpdate& args) {
    FP8FLOW_CHECK(args.amax.numel() == 1 && args.scale.numel() == 1 && args.history.numel() >= 1,
                  "amax {} history {} scale {}", describe(args.amax), describe(args.history),
                  describe(args.scale));
    check_tensor(args.position, "position", DType::i64, {1});
}
OpCost cost(const op::DelayedScaleUpdate& args) { return moves({args.history}, {}); }

}  // namespace fp8flow
