// SPDX-License-Identifier: MIT
// Chooses the kernel that quantises activations to transposed FP8 with scales along the rows, alone or
// together with the row copy. README.md lists the kernels. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/quantize/quantize_rows.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;
using namespace hopper::quantize;

namespace {

Granularity granularity_of(const ScaledTensor& dst) {
    return dst.layout == ScaleLayout::mx32 ? Granularity::mx : Granularity::block;
}

// The transposed output of one source. One scale per column of a group needs a separate pass for its amax.
TileOutput column_output(const TileSource& source, const TileShape& shape, const ScaledTensor& dst,
                         const QuantizeRule& rule, const HopperOps::Workspace& workspace,
                         const Launch& launch) {
    if (dst.layout != ScaleLayout::group_row) return tile_columns(dst, granularity_of(dst));
    uint32_t* amax = workspace.partials_for<uint32_t>(shape.groups.num_groups * shape.cols);
    const TileOutput output = launch_column_scales(source, shape, amax, rule, dst, launch);
    if (shape.groups.counts == nullptr && shape.groups.rows == 0)  // one group of 0 rows
        clear_memory(dst.scales.data, dst.scales.bytes(), launch, "clearing scales");
    return output;
}

// Transposed copy alone. One scale per column of a group: with one read of the source if a kernel supports
// the shape.
void launch_columns(const TensorView& src, const RowGroups& groups, const ScaledTensor& dst,
                    const QuantizeRule& rule, HopperOps::Workspace& workspace, const Launch& launch) {
    const TileShape shape = tile_shape(src, groups, dst.data);
    const std::size_t zeros = column_tiles_zeros(shape);
    if (dst.layout == ScaleLayout::group_row && zeros <= HopperOps::Workspace::kZerosBytes &&
        launch_quantize_group_columns(
            {src, shape, dst, rule, workspace.zeros_for<uint8_t>(static_cast<int64_t>(zeros))}, launch))
        return;
    const TileSource source = {.values = row_view(src)};
    launch_quantize_tiles(source, shape, {}, column_output(source, shape, dst, rule, workspace, launch), rule,
                          launch);
}

}  // namespace

void HopperOps::do_quantize_columns(const op::QuantizeColumns& args, const Launch& launch) {
    const QuantizeRule rule = {args.scale_format, args.mx_rounding};
    launch_columns(args.src, args.groups, args.dst, rule, workspace(launch), launch);
    if (args.src2) launch_columns(args.src2, args.groups, args.dst2, rule, workspace(launch), launch);
}

void HopperOps::do_quantize_dual(const op::QuantizeDual& args, const Launch& launch) {
    const QuantizeRule rule = {args.scale_format, args.mx_rounding};
    // one scale per row or column does not fit into tiles
    if (args.rows.layout == ScaleLayout::row || args.columns.layout == ScaleLayout::group_row) {
        launch_quantize_rows(args.src, args.groups, rule, args.rows, launch);
        launch_columns(args.src, args.groups, args.columns, rule, workspace(launch), launch);
        return;
    }
    launch_quantize_tiles({.values = row_view(args.src)},
                          tile_shape(args.src, args.groups, args.columns.data),
                          tile_rows(args.rows, granularity_of(args.rows)),
                          tile_columns(args.columns, granularity_of(args.columns)), rule, launch);
}

void HopperOps::do_transpose_requantize(const op::TransposeRequantize& args, const Launch& launch) {
    const TileSource source = {.values = row_view(args.src.data),
                               .block_scales = args.src.scales.as<float>(),
                               .scale_stride = args.src.data.dim(0)};
    launch_quantize_tiles(source, tile_shape(args.src.data, args.groups, args.dst.data), {},
                          tile_columns(args.dst, Granularity::block), {.scale_format = args.scale_format},
                          launch);
}

}  // namespace fp8flow
