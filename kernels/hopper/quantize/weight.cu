// SPDX-License-Identifier: MIT
// Weights to FP8, once per optimizer step: the fprop copy and the dgrad copy from one read. The kernels are
// in weight_tiles.cu, weight_mx.cu, quantize_tiles.cu and quantize_rows.cu. One launch has the tiles of all
// experts. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/quantize/quantize_rows.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/quantize/weight_tiles.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;
using namespace hopper::quantize;

void HopperOps::do_quantize_weight(const op::QuantizeWeight& args, const Launch& launch) {
    if (!args.fprop && !args.dgrad) return;
    const ScaleLayout layout = args.fprop ? args.fprop.layout : args.dgrad.layout;
    const DType dtype = args.fprop ? args.fprop.data.dtype : args.dgrad.data.dtype;
    const QuantizeRule rule = {args.scale_format, args.mx_rounding};
    const int64_t rows = args.src.dim(-2), cols = args.src.dim(-1);
    const TileSource source = {.values = row_view(args.src), .batch_stride = rows * cols};
    const TileShape shape = {.groups = device_groups({}, rows),
                             .extent = rows,
                             .capacity = rows,
                             .batches = args.src.rank == 3 ? args.src.dim(0) : 1,
                             .cols = static_cast<int>(cols)};
    Granularity share = Granularity::tile;
    const float* multipliers = nullptr;
    switch (layout) {
        case ScaleLayout::block128:
            if (launch_weight_tiles(args.src, nullptr, rule, args.fprop, args.dgrad, launch)) return;
            // scale tables are padded to a multiple of 4 columns: the pads hold 0
            for (const TensorView* scales : {&args.fprop.scales, &args.dgrad.scales})
                clear_memory(scales->data, scales->bytes(), launch, "clearing scales");
            break;
        case ScaleLayout::mx32:
            if (!args.fprop && launch_mx_columns(args.src, rule, args.dgrad, launch)) return;
            share = Granularity::mx;
            break;
        case ScaleLayout::tensor: {
            uint32_t* amax = workspace(launch).partials_for<uint32_t>(1);
            launch_tensor_scale(source, shape, amax, dtype, rule, args.fprop, args.dgrad, launch);
            share = Granularity::tensor;
            multipliers = reinterpret_cast<const float*>(amax);
            break;
        }
        default: {  // row: the fprop copy by rows; the dgrad copy needs the amax of every column first
            if (args.fprop) launch_quantize_rows(args.src, {}, rule, args.fprop, launch);
            if (!args.dgrad) return;
            uint32_t* amax = workspace(launch).partials_for<uint32_t>(shape.batches * cols);
            launch_quantize_tiles(source, shape, {},
                                  launch_column_scales(source, shape, amax, rule, args.dgrad, launch), rule,
                                  launch);
            return;
        }
    }
    TileOutput fprop = tile_rows(args.fprop, share), dgrad = tile_columns(args.dgrad, share);
    fprop.multipliers = dgrad.multipliers = multipliers;
    launch_quantize_tiles(source, shape, fprop, dgrad, rule, launch);
}

}  // namespace fp8flow
