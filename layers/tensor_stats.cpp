// SPDX-License-Identifier: MIT
// Copies a quantised tensor and its source, or its transposed copy, to the host and counts what the values
// lost.
#include "layers/tensor_stats.h"

#include "kernels/core/error.h"
#include "kernels/core/scalar_math.h"

#include <algorithm>
#include <cmath>
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

// Index of the scale of code (row, column) in `scales`; both are absolute in the tensor as stored.
int64_t scale_index(const ScaledTensor& tensor, int64_t row, int64_t column) {
    const int64_t rows = tensor.data.dim(0), columns = tensor.data.dim(1);
    switch (tensor.layout) {
        case ScaleLayout::tensor: return 0;
        case ScaleLayout::row: return row;
        case ScaleLayout::vec128_wire: return row * ceil_div(columns, kBlock) + column / kBlock;
        case ScaleLayout::vec128: return column / kBlock * rows + row;
        case ScaleLayout::mx32: return column / kMxBlock * rows + row;
        case ScaleLayout::tile128: return column / kBlock * tensor.scales.cols() + row / kBlock;
        default: break;
    }
    FP8FLOW_CHECK(false, "tensor stats do not read the layout {}", name_of(tensor.layout));
}

// A quantised tensor on the host.
struct HostCopy {
    const ScaledTensor& tensor;
    std::vector<uint8_t> bytes, scales;
    int64_t base, columns;

    HostCopy(Context& ctx, const ScaledTensor& of)
        : tensor(of),
          bytes(to_host<uint8_t>(ctx, of.data)),
          scales(to_host<uint8_t>(ctx, of.scales)),
          base(base_of(ctx, of.data)),
          columns(of.data.dim(1)) {}
    uint8_t code(int64_t row, int64_t column) const {
        return bytes[static_cast<size_t>(row * columns + column)];
    }
    double scale(int64_t row, int64_t column) const {
        return value_at(tensor.scales, scales, scale_index(tensor, row, column));
    }
    double value(int64_t row, int64_t column) const {
        return static_cast<double>(fp8_to_float(code(row, column), tensor.data.dtype)) * scale(row, column);
    }
};

// Whether a value lies beyond the largest code at this scale. A scale amax / largest is rounded itself, and a
// source in BF16 may have been rounded up from what was quantised: neither clips anything.
bool is_clipped(double truth, double scale, double largest) {
    int exponent = 0;
    const bool exact = std::frexp(scale, &exponent) == 0.5;
    return std::abs(truth) > largest * scale * (exact ? 1.0 : 1.0 + 0x1p-8);
}

bool is_zero(uint8_t code) { return (code & 0x7F) == 0; }

// visit(first row, count) for each group's valid rows, from the base; without groups all rows.
template <class Visit>
void visit_valid_rows(Context& ctx, const RowGroups& groups, int64_t all_rows, Visit visit) {
    if (groups.num_groups == 0) return visit(0, all_rows);
    const auto counts = to_host<int64_t>(ctx, groups.counts);
    const auto offsets = to_host<int64_t>(ctx, groups.offsets);
    for (size_t g = 0; g < counts.size(); ++g) visit(offsets[g], counts[g]);
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
    const HostCopy copy(ctx, quantized);
    const int64_t columns = copy.columns, base = copy.base;
    const int64_t source_base = source ? base_of(ctx, source) : 0;
    const auto plain = source ? to_host<uint8_t>(ctx, source) : std::vector<uint8_t>{};
    const uint8_t largest = quantized.data.dtype == DType::e5m2 ? 0x7B : 0x7E;
    row.has_source = static_cast<bool>(source);

    visit_valid_rows(ctx, groups, quantized.data.dim(0), [&](int64_t first, int64_t count) {
        for (int64_t r = first; r < first + count; ++r) {
            for (int64_t c = 0; c < columns; ++c) {
                const uint8_t code = copy.code(base + r, c);
                const double scale = copy.scale(base + r, c);
                const bool zero = is_zero(code);
                ++row.values;
                row.zeros += zero;
                row.at_maximum += (code & 0x7F) == largest;
                row.scale_min = std::min(row.scale_min, scale);
                row.scale_max = std::max(row.scale_max, scale);
                if (!source) continue;
                const double truth = value_at(source, plain, (source_base + r) * columns + c);
                const double error =
                    static_cast<double>(fp8_to_float(code, quantized.data.dtype)) * scale - truth;
                row.underflows += zero && truth != 0.0;
                row.saturations += is_clipped(truth, scale, fp8_max(quantized.data.dtype));
                row.error_energy += error * error;
                row.source_energy += truth * truth;
            }
        }
    });
}

TransposeStatsRow& TensorStats::transposed_row(const std::string& weight, const char* tensor) {
    const auto found =
        std::find_if(transposed_.rbegin(), transposed_.rend(), [&](const TransposeStatsRow& row) {
            return row.iteration == iteration_ && row.weight == weight && row.tensor == tensor;
        });
    if (found != transposed_.rend()) return *found;
    return transposed_.emplace_back(
        TransposeStatsRow{.iteration = iteration_, .weight = weight, .tensor = tensor});
}

void TensorStats::observe_transposed(Context& ctx, const std::string& weight, const char* tensor,
                                     const ScaledTensor& rows, const ScaledTensor& copy,
                                     const RowGroups& groups) {
    TransposeStatsRow& row = transposed_row(weight, tensor);
    const HostCopy from(ctx, rows), to(ctx, copy);
    visit_valid_rows(ctx, groups, rows.data.dim(0), [&](int64_t first, int64_t count) {
        for (int64_t r = first; r < first + count; ++r) {
            for (int64_t c = 0; c < from.columns; ++c) {
                const double value = from.value(from.base + r, c);
                const double error = to.value(c, to.base + r) - value;
                ++row.values;
                row.energy += value * value;
                row.error_energy += error * error;
                if (value == 0) continue;
                ++row.nonzero;
                if (!is_zero(to.code(c, to.base + r))) continue;
                ++row.flushed;
                row.flushed_energy += value * value;
            }
        }
    });
}

}  // namespace fp8flow
