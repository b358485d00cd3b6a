// SPDX-License-Identifier: MIT
// Tensors for benchmarked calls: drawn once, copied for the other sets; routed rows by distribution.
#include "model/bench/buffers.h"

#include "kernels/core/random.h"

#include <numeric>

namespace fp8flow::bench {

TensorView Buffers::allocate(DType dtype, Dims shape) {
    const TensorView view = arena_.tensor(dtype, shape, "bench");
    bytes_ += view.bytes();
    return view;
}

TensorView Buffers::input(const TensorView& view, const std::function<void(uint64_t seed)>& draw) {
    const std::size_t at = inputs_.size();
    inputs_.push_back(view);
    if (first_ != nullptr)
        device_.copy(view.data, first_->inputs_.at(at).data, static_cast<std::size_t>(view.bytes()));
    else
        draw(at + 1);
    return view;
}

TensorView Buffers::filled(const TensorView& view, Distribution distribution, double spread) {
    return input(view, [&](uint64_t seed) {
        filler_.fill(device_, view, {.distribution = distribution, .spread = spread, .seed = seed});
    });
}

TensorView Buffers::output(DType dtype, Dims shape) {
    const TensorView view = allocate(dtype, shape);
    device_.fill(view.data, 0x7f, static_cast<std::size_t>(view.bytes()));  // NaN or huge
    return view;
}

TensorView Buffers::zeros(DType dtype, Dims shape) {
    const TensorView view = allocate(dtype, shape);
    device_.fill(view.data, 0, static_cast<std::size_t>(view.bytes()));
    return view;
}

TensorView Buffers::normal(DType dtype, Dims shape, double spread) {
    return filled(allocate(dtype, shape), Distribution::normal, spread);
}

TensorView Buffers::pow2(DType dtype, Dims shape) {
    return filled(allocate(dtype, shape), Distribution::pow2, 3);
}

TensorView Buffers::integers(DType dtype, Dims shape, int64_t below) {
    return filled(allocate(dtype, shape), Distribution::integers, static_cast<double>(below));
}

TensorView Buffers::values(const void* host, DType dtype, int64_t count) {
    const TensorView view = allocate(dtype, {count});
    device_.copy_in(view.data, host, static_cast<std::size_t>(view.bytes()));
    device_.synchronize();  // the host's memory may end after the call
    return view;
}

ScaledTensor Buffers::fp8_output(DType dtype, Dims shape, ScaleLayout layout, int64_t groups,
                                 ScaleFormat scale) {
    ScaledTensor tensor = arena_.fp8(dtype, shape, layout, "bench", groups);
    tensor.format = scale;
    if (layout == ScaleLayout::vec128_wire && scale == ScaleFormat::fp32)
        tensor.scales = arena_.tensor(DType::f32, {tensor.scales.dim(0), tensor.scales.dim(1)}, "bench");
    bytes_ += tensor.data.bytes() + tensor.scales.bytes();
    return tensor;
}

ScaledTensor Buffers::fp8_input(DType dtype, Dims shape, ScaleLayout layout, int64_t groups) {
    const ScaledTensor tensor = fp8_output(dtype, shape, layout, groups, ScaleFormat::pow2);
    filled(tensor.data, Distribution::normal, 1);
    if (tensor.scales) filled(tensor.scales, Distribution::pow2, 3);
    return tensor;
}

ScaledTensor Buffers::transposed_input(Ops& ops, DType dtype, int64_t dim, ScaleLayout layout,
                                       const RowGroups& groups) {
    const int64_t rows = groups.row_capacity;
    const ScaledTensor tensor = fp8_output(dtype, {dim, rows}, layout, groups.num_groups);
    input(tensor.data, [&](uint64_t seed) {
        // scales of 1 leave the FP8 values as they were drawn
        Arena scratch(device_, "bench rows");
        ScaledTensor source = scratch.fp8(dtype, {rows, dim}, ScaleLayout::vec128, "rows");
        source.format = ScaleFormat::pow2;
        const ScaledTensor tiles{
            tensor.data, scratch.tensor(DType::f32, {ceil_div(rows, kBlock), ceil_div(dim, kBlock)}, "tiles"),
            ScaleLayout::tile128};
        filler_.fill(device_, source.data, {.seed = seed});
        filler_.fill(device_, source.scales, {.distribution = Distribution::pow2, .spread = 0});
        ops.transpose_fp8({.src = source, .groups = groups, .dst = tiles}, {});
        device_.synchronize();
    });
    if (tensor.scales) filled(tensor.scales, Distribution::pow2, 3);
    return tensor;
}

ScaledTensor Buffers::operand(DType dtype, Dims shape, ScaleLayout layout, int64_t groups) {
    if (is_fp8(dtype)) return fp8_input(dtype, shape, layout, groups);
    return {normal(dtype, shape), {}, ScaleLayout::none};
}

RowGroups Buffers::routed(const Shape& shape) {
    const int64_t rows = shape.number("M"), groups = shape.number("G");
    const int64_t distribution = shape.choice("rows", distribution_names());
    const int64_t alignment = shape.positive("align");
    if (groups == 0) return {.row_capacity = rows};
    return routed(group_counts(rows, groups, distribution), alignment);
}

RowGroups Buffers::routed(const std::vector<int64_t>& counts, int64_t alignment) {
    std::vector<int64_t> offsets{0};
    for (int64_t count : counts) offsets.push_back(offsets.back() + round_up(count, alignment));
    return {.num_groups = static_cast<int64_t>(counts.size()),
            .counts = values(counts),
            .offsets = values(offsets),
            .row_capacity = offsets.back(),
            .alignment = alignment,
            .known_rows = std::accumulate(counts.begin(), counts.end(), int64_t{0})};
}

const std::vector<std::string>& distribution_names() {
    static const std::vector<std::string> names = {"balanced", "ragged", "skewed", "empty", "ragged128"};
    return names;
}

std::vector<int64_t> group_counts(int64_t total, int64_t groups, int64_t distribution) {
    if (distribution == 4) {  // what is left of whole blocks goes to the last group
        std::vector<int64_t> counts = group_counts(total / kBlock, groups, 1);
        for (int64_t& count : counts) count *= kBlock;
        if (groups > 0) counts.back() += total % kBlock;
        return counts;
    }
    std::vector<double> weights;
    for (int64_t g = 0; g < groups; ++g) {
        const double ragged = 0.4 + 1.35 * random_uniform(1, 0, static_cast<uint64_t>(g));
        const double skewed =
            groups > 1 ? 2.0 * static_cast<double>(groups - 1 - g) / static_cast<double>(groups - 1) : 1.0;
        const double every_second = groups == 1 || g % 2 == 0 ? 1.0 : 0.0;
        weights.push_back(
            std::vector{1.0, ragged, skewed, every_second}.at(static_cast<std::size_t>(distribution)));
    }
    // shares of the running sum, so that the counts add up to `total`
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<int64_t> counts;
    double running = 0;
    int64_t given = 0;
    for (double weight : weights) {
        running += weight;
        const auto end = static_cast<int64_t>(static_cast<double>(total) * running / sum + 0.5);
        counts.push_back(end - given);
        given = end;
    }
    return counts;
}

Keys group_keys(const char* alignment) {
    return {
        {"M", "32768", "192", "rows in all groups, without pads"},
        {"G", "32", "4", "groups of rows (local experts); 0: plain rows"},
        {"rows", "balanced", "ragged", "rows of the groups: balanced | ragged | skewed | empty | ragged128"},
        {"align", alignment, alignment, "multiple of rows that a group is padded to"}};
}

Keys operator+(Keys first, const Keys& more) {
    first.insert(first.end(), more.begin(), more.end());
    return first;
}

}  // namespace fp8flow::bench
