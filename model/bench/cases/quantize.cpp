// SPDX-License-Identifier: MIT
// Bench cases of the quantisers and the FP8 transposes.
#include "model/bench/cases/case.h"

namespace fp8flow::bench {

namespace {

using L = ScaleLayout;

const Keys kSource = {{"H", "7168", "256", "columns"},
                      {"dtype", "bf16", "bf16", "of the source: bf16 | f16 | f32"},
                      {"codes", "e4m3", "e4m3", "e4m3 | e5m2"},
                      {"scale", "pow2", "pow2", "scales: pow2 | fp32"}};
const Key kRounding = {"rounding", "rceil", "rceil", "scales of mx32: floor | rceil"};

DType source_dtype(const Shape& shape) { return shape.dtype("dtype", {DType::bf16, DType::f16, DType::f32}); }
DType fp8_type(const Shape& shape) { return shape.dtype("codes", {DType::e4m3, DType::e5m2}); }
// Of a transposed copy: groups hold whole blocks, plain rows are padded to one.
int64_t wide(const RowGroups& routed) {
    return routed.num_groups > 0 ? routed.row_capacity : round_up(routed.row_capacity, kBlock);
}
int64_t scale_groups(const RowGroups& routed) { return std::max<int64_t>(1, routed.num_groups); }

// Rows [routed, H] to quantise, and where the copies of them go.
struct Source {
    Buffers& buffers;
    const Shape& shape;
    RowGroups routed = buffers.routed(shape);
    int64_t rows = routed.row_capacity, columns = shape.positive("H");
    DType fp8 = fp8_type(shape);
    ScaleFormat scale = shape.scale_format();
    TensorView src = buffers.normal(source_dtype(shape), {rows, columns});

    ScaledTensor transposed(int64_t width, L layout) const {
        return buffers.fp8_output(fp8, {width, wide(routed)}, layout, scale_groups(routed));
    }
};

op::QuantizeRows rows(Buffers& buffers, const Shape& shape) {
    const Source in{buffers, shape};
    const L layout = shape.layout("layout", {L::vec128_wire, L::vec128, L::row, L::mx32, L::tensor});
    return {.src = in.src,
            .groups = in.routed,
            .scale_format = in.scale,
            .mx_rounding = shape.mx_rounding(),
            .dst = buffers.fp8_output(in.fp8, {in.rows, in.columns}, layout, 0, in.scale)};
}

Call columns(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Source in{buffers, shape};
    const L layout = shape.layout("layout", {L::vec128, L::group_row, L::mx32});
    op::QuantizeColumns args{.src = in.src,
                             .groups = in.routed,
                             .scale_format = in.scale,
                             .mx_rounding = shape.mx_rounding(),
                             .dst = in.transposed(in.columns, layout)};
    if (const int64_t second = shape.number("H2"); second > 0) {
        args.src2 = buffers.normal(in.src.dtype, {in.rows, second});
        args.dst2 = in.transposed(second, layout);
    }
    return call_of(machine, &Ops::quantize_columns, args);
}

op::QuantizeDual dual(Buffers& buffers, const Shape& shape) {
    const Source in{buffers, shape};
    return {
        .src = in.src,
        .groups = in.routed,
        .scale_format = in.scale,
        .mx_rounding = shape.mx_rounding(),
        .rows = buffers.fp8_output(in.fp8, {in.rows, in.columns},
                                   shape.layout("layout", {L::vec128, L::row, L::mx32})),
        .columns = in.transposed(in.columns, shape.layout("columns", {L::vec128, L::group_row, L::mx32}))};
}

Call whole(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Source in{buffers, shape};
    op::QuantizeTensor args{.src = in.src, .groups = in.routed, .scale_format = in.scale};
    if (shape.yes("plain")) args.rows = buffers.fp8_output(in.fp8, {in.rows, in.columns}, L::tensor);
    if (shape.yes("transposed"))
        args.transposed = buffers.fp8_output(in.fp8, {in.columns, wide(in.routed)}, L::tensor);
    return call_of(machine, &Ops::quantize_tensor, args);
}

Call weight(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t experts = shape.positive("E"), n = shape.positive("N"), k = shape.positive("K");
    const L layout = shape.layout("layout", {L::block128, L::row, L::tensor, L::mx32});
    op::QuantizeWeight args{
        .src = buffers.normal(shape.dtype("dtype", {DType::bf16, DType::f32}), {experts, n, k}, 0.02),
        .scale_format = shape.scale_format(),
        .mx_rounding = shape.mx_rounding()};
    if (shape.yes("fprop")) args.fprop = buffers.fp8_output(fp8_type(shape), {experts, n, k}, layout);
    if (shape.yes("dgrad")) args.dgrad = buffers.fp8_output(fp8_type(shape), {experts, k, n}, layout);
    return call_of(machine, &Ops::quantize_weight, args);
}

op::Dequantize back(Buffers& buffers, const Shape& shape) {
    const RowGroups routed = buffers.routed(shape);
    const int64_t columns = shape.positive("H");
    const L layout = shape.layout(
        "layout", {L::vec128_wire, L::vec128, L::row, L::mx32, L::tensor, L::tile128, L::group_row});
    const bool transposed = layout == L::tile128 || layout == L::group_row;
    const Buffers::Dims as_rows = {routed.row_capacity, columns}, as_columns = {columns, routed.row_capacity};
    const Buffers::Dims dims = transposed ? as_columns : as_rows;
    return {.src = buffers.fp8_input(fp8_type(shape), dims, layout, scale_groups(routed)),
            .groups = routed,
            .dst = buffers.output(source_dtype(shape), dims)};
}

// The quantised rows against values of another distribution: as much to read, and every branch.
Call measure(Machine& machine, Buffers& buffers, const Shape& shape) {
    const RowGroups routed = buffers.routed(shape);
    const int64_t columns = shape.positive("H");
    const L layout = shape.layout("layout", {L::vec128, L::tile128});
    const bool transposed = layout == L::tile128;
    using Copy = op::MeasureQuantization::Copy;
    op::MeasureQuantization args{.groups = routed,
                                 .copy = transposed ? Copy::transposed : Copy::rows,
                                 .sums = buffers.zeros(DType::f64, {op::kQuantizationWords})};
    const Buffers::Dims rows = {routed.row_capacity, columns}, turned = {columns, wide(routed)};
    args.quantized = buffers.fp8_input(fp8_type(shape), transposed ? turned : rows, layout);
    if (transposed)
        args.source = buffers.fp8_input(fp8_type(shape), rows, L::vec128);
    else
        args.source.data = buffers.normal(DType::bf16, rows);
    return call_of(machine, &Ops::measure_quantization, args);
}

op::ClipFp8 clip(Buffers& buffers, const Shape& shape) {
    const RowGroups routed = buffers.routed(shape);
    return {
        .groups = routed,
        .share = 0.5f,
        .rows = buffers.fp8_input(fp8_type(shape), {routed.row_capacity, shape.positive("H")}, L::row).data};
}

op::RelayoutScales relayout(Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), blocks = ceil_div(shape.positive("H"), kBlock);
    const DType wire = shape.scale_format() == ScaleFormat::pow2 ? DType::e8m0 : DType::f32;
    return {.wire = buffers.pow2(wire, {tokens, blocks}),
            .vec128 = buffers.output(DType::f32, {blocks, tokens})};
}

op::DelayedScaleUpdate delayed(Buffers& buffers, const Shape& shape) {
    return {.position = buffers.zeros(DType::i64, {1}),
            .scale_format = shape.scale_format(),
            .amax = buffers.pow2(DType::f32, {1}),
            .history = buffers.pow2(DType::f32, {shape.positive("N")}),
            .scale = buffers.output(DType::f32, {1})};
}

op::TransposeFp8 transpose(Buffers& buffers, const Shape& shape) {
    const RowGroups routed = buffers.routed(shape);
    const int64_t columns = shape.positive("H");
    return {.src = buffers.fp8_input(fp8_type(shape), {routed.row_capacity, columns}, L::vec128),
            .groups = routed,
            .dst = buffers.fp8_output(fp8_type(shape), {columns, wide(routed)}, L::tile128)};
}

Call requantize(Machine& machine, Buffers& buffers, const Shape& shape) {
    const RowGroups routed = buffers.routed(shape);
    const int64_t columns = shape.positive("H");
    const op::TransposeRequantize args{
        .src = buffers.fp8_input(fp8_type(shape), {routed.row_capacity, columns}, L::vec128),
        .groups = routed,
        .scale_format = shape.scale_format(),
        .dst = buffers.fp8_output(fp8_type(shape), {columns, wide(routed)}, L::vec128)};
    if (shape.yes("fused")) return call_of(machine, &Ops::transpose_requantize, args);
    const op::Dequantize plain{.src = args.src,
                               .groups = args.groups,
                               .dst = buffers.output(DType::bf16, {routed.row_capacity, columns})};
    const op::QuantizeColumns again{
        .src = plain.dst, .groups = args.groups, .scale_format = args.scale_format, .dst = args.dst};
    return two_calls(machine, args, &Ops::dequantize, plain, &Ops::quantize_columns, again);
}

const Keys kFp8 = {{"H", "7168", "256", "columns"}, {"codes", "e4m3", "e4m3", "e4m3 | e5m2"}};

}  // namespace

std::vector<Case> quantize_cases() {
    return {
        {"quantize_rows", "activations to FP8 along the rows",
         group_keys() + kSource +
             Keys{{"layout", "vec128", "vec128", "scales: vec128_wire | vec128 | row | mx32 | tensor"},
                  kRounding},
         local<&Ops::quantize_rows, rows>},
        {"quantize_columns", "activations to transposed FP8, scaled along the rows of a group",
         group_keys() + kSource +
             Keys{{"layout", "group_row", "vec128", "scales: vec128 | group_row | mx32"},
                  {"H2", "0", "0", "columns of a second operand in the same call; 0: none"},
                  kRounding},
         columns},
        {"quantize_dual", "both orientations from one read",
         group_keys() + kSource +
             Keys{{"layout", "vec128", "vec128", "scales of the rows: vec128 | row | mx32"},
                  {"columns", "vec128", "vec128", "of the transposed copy: vec128 | group_row | mx32"},
                  kRounding},
         local<&Ops::quantize_dual, dual>},
        {"quantize_tensor", "one scale for the whole tensor",
         group_keys() + kSource +
             Keys{{"plain", "yes", "yes", "codes as the source: yes | no"},
                  {"transposed", "no", "yes", "transposed codes: yes | no"}},
         whole},
        {"quantize_weight",
         "weights to FP8, for forward and for the gradient of the input",
         {{"E", "32", "2", "experts"},
          {"N", "4096", "256", "rows of a weight"},
          {"K", "7168", "384", "columns of a weight"},
          {"dtype", "f32", "f32", "of the source: bf16 | f32"},
          {"codes", "e4m3", "e4m3", "e4m3 | e5m2"},
          {"scale", "pow2", "pow2", "scales: pow2 | fp32"},
          {"layout", "block128", "block128", "scales: block128 | row | tensor | mx32"},
          {"fprop", "yes", "yes", "copy for the forward pass: yes | no"},
          {"dgrad", "yes", "yes", "transposed copy (3-D column-wise): yes | no"},
          kRounding},
         weight},
        {"dequantize", "FP8 back to a plain type",
         group_keys() + Keys{{"H", "7168", "256", "columns"},
                             {"dtype", "bf16", "bf16", "of the result: bf16 | f16 | f32"},
                             {"codes", "e4m3", "e4m3", "e4m3 | e5m2"},
                             {"layout", "vec128", "vec128",
                              "scales: vec128_wire | vec128 | row | mx32 | tensor | tile128 | group_row"}},
         local<&Ops::dequantize, back>},
        {"measure_quantization", "counts, errors and scale exponents of quantised rows against their source",
         group_keys() + kFp8 +
             Keys{{"layout", "vec128", "vec128", "scales: vec128, rows | tile128, a transposed copy"}},
         measure},
        {"clip_fp8", "clips FP8 rows at a share of the largest value", group_keys() + kFp8,
         local<&Ops::clip_fp8, clip>},
        {"relayout_scales",
         "scales from the wire's layout to the GEMM's",
         {{"T", "4096", "40", "rows"},
          {"H", "7168", "256", "columns"},
          {"scale", "pow2", "pow2", "wire: pow2 | fp32"}},
         local<&Ops::relayout_scales, relayout>},
        {"delayed_scale_update",
         "the scale of the next step from a history of magnitudes",
         {{"N", "1024", "16", "steps remembered"}, {"scale", "pow2", "pow2", "pow2 | fp32"}},
         local<&Ops::delayed_scale_update, delayed>},
        {"transpose_fp8", "scaling-aware transpose of FP8 rows, all experts in one call", group_keys() + kFp8,
         local<&Ops::transpose_fp8, transpose>},
        {"transpose_requantize", "the naive transpose: dequantise and quantise again",
         group_keys() + kFp8 +
             Keys{{"scale", "fp32", "fp32", "scales: pow2 | fp32"},
                  {"fused", "yes", "yes", "yes | no: BF16 rows in memory between two passes"}},
         requantize}};
}

}  // namespace fp8flow::bench
