// SPDX-License-Identifier: MIT
// Copies a quantised tensor and its source to the host and counts what the codes lost.
#include "layers/tensor_stats.h"

#include "kernels/core/scalar_math.h"

#include <algorithm>
#include <limits>

namespace fp8flow {

namespace {

template <class T> std::vector<T> to_host(Context& ctx, const TensorView& view) {
    std::vector<T> host(static_cast<size_t>(view.bytes()) / sizeof(T));
    ctx.ops.device().copy_out(host.data(), view.data, static_cast<size_t>(view.bytes()), ctx.launch.stream);
    return host;
}

int64_t base_of(Context& ctx, const TensorView& view) {
    int64_t base = 0;
    if (view.row_base != nullptr)
        ctx.ops.device().copy_out(&base, view.row_base, sizeof base, ctx.launch.stream);
    return base;
}

float value_at(const TensorView& view, const std::vector<uint8_t>& bytes, int64_t index) {
    const uint8_t* data = bytes.data();
    if (view.dtype == DType::f32) return reinterpret_cast<const float*>(data)[index];
    if (view.dtype == DType::bf16) return to_float(reinterpret_cast<const Bf16*>(data)[index]);
    if (view.dtype == DType::e8m0) return e8m0_to_float(data[index]);
    return fp8_to_float(data[index], view.dtype);
}

// Index of the scale of code (row, column) in `scales`; rows are absolute in the tensor.
int64_t scale_index(const ScaledTensor& tensor, int64_t row, int64_t column) {
    const int64_t rows = tensor.data.dim(0), columns = tensor.data.dim(1);
    switch (tensor.layout) {
        case ScaleLayout::tensor: return 0;
        case ScaleLayout::row: return row;
        case ScaleLayout::vec128_wire: return row * ceil_div(columns, kBlock) + column / kBlock;
        case ScaleLayout::vec128: return column / kBlock * rows + row;
        case ScaleLayout::mx32: return column / kMxBlock * rows + row;
        default: break;
    }
    FP8FLOW_CHECK(false, "tensor stats read row layouts, not {}", name_of(tensor.layout));
}

}  // namespace

void TensorStats::observe(Context& ctx, const char* name, const ScaledTensor& quantized,
                          const RowGroups& groups, const TensorView& source) {
    auto found = std::find_if(rows_.begin(), rows_.end(),
                              [&](const TensorStatsRow& row) { return row.tensor == name; });
    if (found == rows_.end()) {
        found =
            rows_.insert(rows_.end(), {.tensor = name, .scale_min = std::numeric_limits<double>::infinity()});
    }
    TensorStatsRow& row = *found;
    const int64_t columns = quantized.data.dim(1), base = base_of(ctx, quantized.data);
    const int64_t source_base = source ? base_of(ctx, source) : 0;
    const auto codes = to_host<uint8_t>(ctx, quantized.data);
    const auto scales = to_host<uint8_t>(ctx, quantized.scales);
    const auto plain = source ? to_host<uint8_t>(ctx, source) : std::vector<uint8_t>{};
    const uint8_t largest = quantized.data.dtype == DType::e5m2 ? 0x7B : 0x7E;
    row.has_source = static_cast<bool>(source);

    auto visit_rows = [&](int64_t first, int64_t count) {
        for (int64_t r = first; r < first + count; ++r) {
            for (int64_t c = 0; c < columns; ++c) {
                const uint8_t code = codes[static_cast<size_t>((base + r) * columns + c)];
                const double scale = value_at(quantized.scales, scales, scale_index(quantized, base + r, c));
                const bool zero = (code & 0x7F) == 0;
                ++row.values;
                row.zeros += zero;
                row.saturations += (code & 0x7F) == largest;
                row.scale_min = std::min(row.scale_min, scale);
                row.scale_max = std::max(row.scale_max, scale);
                if (!source) continue;
                const double truth = value_at(source, plain, (source_base + r) * columns + c);
                const double error =
                    static_cast<double>(fp8_to_float(code, quantized.data.dtype)) * scale - truth;
                row.underflows += zero && truth != 0.0;
                row.error_energy += error * error;
                row.source_energy += truth * truth;
            }
        }
    };
    if (groups.num_groups == 0) {
        visit_rows(0, quantized.data.dim(0));
        return;
    }
    const auto counts = to_host<int64_t>(ctx, groups.counts);
    const auto offsets = to_host<int64_t>(ctx, groups.offsets);
    for (size_t g = 0; g < counts.size(); ++g) visit_rows(offsets[g], counts[g]);
}

}  // namespace fp8flow
