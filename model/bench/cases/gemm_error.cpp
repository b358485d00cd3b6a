// SPDX-License-Identifier: MIT
// Fetches samples of operands from the device and multiplies them in double precision.
#include "model/bench/cases/gemm_error.h"

#include "kernels/core/device.h"
#include "kernels/core/error.h"
#include "kernels/core/scalar_math.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

namespace fp8flow::bench {

namespace {

using Values = std::vector<double>;

constexpr int64_t kRows = 16, kColumns = 64;  // of the sample

template <class T> T element(const uint8_t* bytes, int64_t i) {
    T value;
    std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
}

double decoded(const uint8_t* bytes, DType dtype, int64_t i) {
    switch (dtype) {
        case DType::f32: return element<float>(bytes, i);
        case DType::bf16: return to_float(element<Bf16>(bytes, i));
        case DType::e4m3: return to_float(element<E4m3>(bytes, i));
        case DType::e5m2: return to_float(element<E5m2>(bytes, i));
        case DType::e8m0: return e8m0_to_float(bytes[i]);
        default: fail(ExitCode::internal, "no GEMM has operands of {}", name_of(dtype));
    }
}

std::vector<uint8_t> fetch(Device& device, const TensorView& view, int64_t first, int64_t count) {
    const int64_t size = size_of(view.dtype);
    std::vector<uint8_t> bytes(static_cast<std::size_t>(count * size));
    if (count > 0) device.copy_out(bytes.data(), view.bytes_ptr() + first * size, bytes.size());
    return bytes;
}

// One matrix of an operand: the operand itself, or that of one group.
class Matrix {
public:
    Matrix(Device& device, const ScaledTensor& tensor, int64_t group)
        : device_(device),
          tensor_(tensor),
          group_(group),
          rows_(tensor.data.dim(-2)),
          columns_(tensor.data.dim(-1)) {
        FP8FLOW_CHECK(tensor.data.row_base == nullptr, "{} has a row base", describe(tensor.data));
        if (tensor.scales) scales_ = fetch(device, tensor.scales, 0, tensor.scales.numel());
    }

    // Values [first, first + count) of a stored row.
    Values along(int64_t row, int64_t first, int64_t count) {
        const auto bytes = fetch(device_, tensor_.data, (offset() + row) * columns_ + first, count);
        Values values(static_cast<std::size_t>(count));
        for (int64_t i = 0; i < count; ++i)
            values[static_cast<std::size_t>(i)] =
                decoded(bytes.data(), tensor_.data.dtype, i) * scale(row, first + i);
        return values;
    }
    // Rows [first, first + count) of a stored column; every call has the same rows.
    Values across(int64_t column, int64_t first, int64_t count) {
        if (block_.empty())
            block_ = fetch(device_, tensor_.data, (offset() + first) * columns_, count * columns_);
        Values values(static_cast<std::size_t>(count));
        for (int64_t i = 0; i < count; ++i)
            values[static_cast<std::size_t>(i)] =
                decoded(block_.data(), tensor_.data.dtype, i * columns_ + column) * scale(first + i, column);
        return values;
    }

private:
    // Stored rows before this matrix.
    int64_t offset() const { return tensor_.data.rank == 3 ? group_ * rows_ : 0; }

    double scale(int64_t row, int64_t column) const {
        if (!tensor_.scales) return 1.0;
        const int64_t matrix = tensor_.data.rank == 3 ? group_ : 0;
        const int64_t row_blocks = ceil_div(rows_, kBlock), column_blocks = ceil_div(columns_, kBlock);
        int64_t at = 0;
        switch (tensor_.layout) {
            case ScaleLayout::none:
            case ScaleLayout::tensor: break;
            case ScaleLayout::row: at = matrix * rows_ + row; break;
            case ScaleLayout::group_row: at = group_ * rows_ + row; break;
            case ScaleLayout::vec128_wire:
                at = (matrix * rows_ + row) * column_blocks + column / kBlock;
                break;
            case ScaleLayout::vec128: at = (matrix * column_blocks + column / kBlock) * rows_ + row; break;
            case ScaleLayout::block128:
                at = (matrix * row_blocks + row / kBlock) * round_up(column_blocks, 4) + column / kBlock;
                break;
            case ScaleLayout::tile128: at = column / kBlock * row_blocks + row / kBlock; break;
            case ScaleLayout::mx32:
                at = (matrix * ceil_div(columns_, kMxBlock) + column / kMxBlock) * rows_ + row;
                break;
        }
        return decoded(scales_.data(), tensor_.scales.dtype, at);
    }

    Device& device_;
    const ScaledTensor tensor_;
    int64_t group_, rows_, columns_;
    std::vector<uint8_t> scales_, block_;
};

double dot(const Values& a, const Values& b) {
    constexpr std::size_t kLanes = 8;  // independent sums
    double sums[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= a.size(); i += kLanes)
        for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    for (; i < a.size(); ++i) sums[0] += a[i] * b[i];
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

// D has `rows` rows, the first being row d_row of its matrix.
double error_of(Device& device, int64_t rows, const TensorView& d, int64_t d_row,
                const std::function<Values(int64_t)>& a_of, const std::function<Values(int64_t)>& b_of) {
    const int64_t columns = d.cols();
    const int64_t some_rows = std::min(rows, kRows), some_columns = std::min(columns, kColumns);
    std::vector<Values> b;
    for (int64_t j = 0; j < some_columns; ++j) b.push_back(b_of(j * columns / some_columns));
    double error = 0, energy = 0;
    for (int64_t i = 0; i < some_rows; ++i) {
        const int64_t row = i * rows / some_rows;
        const Values a = a_of(row);
        const auto bytes = fetch(device, d, (d_row + row) * columns, columns);
        for (int64_t j = 0; j < some_columns; ++j) {
            const double want = dot(a, b[static_cast<std::size_t>(j)]);
            const double off = decoded(bytes.data(), d.dtype, j * columns / some_columns) - want;
            error += off * off;
            energy += want * want;
        }
    }
    return energy > 0 ? error / energy : error;
}

struct Group {
    int64_t index = 0, first = 0, rows = 0;
};
Group group_at(Device& device, const RowGroups& groups, int64_t index) {
    return {index, element<int64_t>(fetch(device, groups.offsets, index, 1).data(), 0),
            element<int64_t>(fetch(device, groups.counts, index, 1).data(), 0)};
}
// The group with the most rows.
Group largest_group(Device& device, const RowGroups& groups) {
    const auto counts = fetch(device, groups.counts, 0, groups.num_groups),
               offsets = fetch(device, groups.offsets, 0, groups.num_groups);
    Group largest;
    for (int64_t g = 0; g < groups.num_groups; ++g)
        if (const auto count = element<int64_t>(counts.data(), g); count > largest.rows)
            largest = {g, element<int64_t>(offsets.data(), g), count};
    return largest;
}

}  // namespace

double gemm_error(Device& device, const op::Gemm& args) {
    Matrix a(device, args.a, 0), b(device, args.b, 0);
    const bool a_across = args.form == op::GemmForm::tn, b_across = args.form != op::GemmForm::nt;
    const int64_t k = args.a.data.dim(a_across ? 0 : 1);
    return error_of(
        device, args.d.dim(0), args.d, 0,
        [&](int64_t i) { return a_across ? a.across(i, 0, k) : a.along(i, 0, k); },
        [&](int64_t j) { return b_across ? b.across(j, 0, k) : b.along(j, 0, k); });
}

double gemm_error(Device& device, const op::GroupedGemm& args) {
    const Group group = largest_group(device, args.groups);
    Matrix a(device, args.a, 0), b(device, args.b, group.index);
    const int64_t k = args.a.data.dim(1);
    return error_of(
        device, group.rows, args.d, group.first, [&](int64_t i) { return a.along(group.first + i, 0, k); },
        [&](int64_t j) { return args.form == op::GemmForm::nn ? b.across(j, 0, k) : b.along(j, 0, k); });
}

double gemm_error(Device& device, const op::GroupedGemmWgrad& args) {
    const Group group = largest_group(device, args.groups);
    const bool fp8 = is_fp8(args.x.data.dtype);
    const auto values = [&](Matrix& of, const Group& rows, int64_t i) {
        return fp8 ? of.along(i, rows.first, rows.rows) : of.across(i, rows.first, rows.rows);
    };
    struct Set {
        Matrix dy, x;
        Group rows;
    };
    std::deque<Set> sets;
    for (int i = 0; i < num_sets(args); ++i) {
        const auto [dy, x, groups] = set_of(args, i);
        sets.push_back({Matrix(device, dy, group.index), Matrix(device, x, group.index),
                        group_at(device, groups, group.index)});
    }
    // contractions one after the other
    const auto all_values = [&](Matrix Set::*of, int64_t i) {
        Values all;
        for (Set& set : sets) {
            const Values own = values(set.*of, set.rows, i);
            all.insert(all.end(), own.begin(), own.end());
        }
        return all;
    };
    return error_of(
        device, args.dw.dim(1), args.dw, group.index * args.dw.dim(1),
        [&](int64_t i) { return all_values(&Set::dy, i); },
        [&](int64_t j) { return all_values(&Set::x, j); });
}

}  // namespace fp8flow::bench
