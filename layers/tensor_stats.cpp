// SPDX-License-Identifier: MIT
// Sums on the device, one slot per tensor and layer of an iteration, and the rows that become of them.
#include "layers/tensor_stats.h"

#include "layers/parameter.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace fp8flow {

namespace {

using Words = double[op::kQuantizationCounts];

constexpr int kBias = 127;

}  // namespace

void TensorStatsRow::join(const TensorStatsRow& other) {
    Words own, others;
    std::memcpy(own, &counts, sizeof own);
    std::memcpy(others, &other.counts, sizeof others);
    for (int w = 0; w < op::kQuantizationCounts; ++w) own[w] = op::join_quantization(w, own[w], others[w]);
    std::memcpy(&counts, own, sizeof own);
}

void TensorStats::begin_iteration(int64_t iteration) {
    forget_from(iteration);
    iteration_ = iteration;
}

void TensorStats::forget_from(int64_t iteration) {
    for (std::vector<TensorStatsRow>* rows : {&rows_, &transposed_})
        std::erase_if(*rows, [&](const TensorStatsRow& row) { return row.iteration >= iteration; });
}

const TensorView& TensorStats::sums_of(Context& ctx, std::string_view tensor, const std::string& weight) {
    const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) {
        return slot.row.layer == ctx.layer && slot.row.tensor == tensor && slot.row.weight == weight;
    });
    if (found != slots_.end()) return found->sums;
    device_ = &ctx.ops.device();
    stream_ = ctx.launch.stream;
    if (!arena_) arena_ = std::make_unique<Arena>(*device_, "tensor stats");
    Slot& slot = slots_.emplace_back();
    slot.row = {.iteration = iteration_, .layer = ctx.layer, .tensor = std::string(tensor), .weight = weight};
    slot.sums = arena_->tensor(DType::f64, {op::kQuantizationWords}, "tensor stats");
    device_->fill(slot.sums.data, 0, sizeof(op::QuantizationSums), stream_);
    return slot.sums;
}

void TensorStats::observe(Context& ctx, const char* name, const ScaledTensor& quantized,
                          const RowGroups& groups, const TensorView& source) {
    ctx.ops.measure_quantization({.quantized = quantized,
                                  .source = {.data = source},
                                  .groups = groups,
                                  .sums = sums_of(ctx, name, {})},
                                 ctx.launch);
}

void TensorStats::observe_transposed(Context& ctx, const std::string& weight, const char* tensor,
                                     const ScaledTensor& rows, const ScaledTensor& copy,
                                     const RowGroups& groups) {
    ctx.ops.measure_quantization({.quantized = copy,
                                  .source = rows,
                                  .groups = groups,
                                  .copy = op::MeasureQuantization::Copy::transposed,
                                  .sums = sums_of(ctx, tensor, weight)},
                                 ctx.launch);
}

void TensorStats::observe_weight(Context& ctx, std::string_view stage, const Parameter& weight) {
    if (!weight.fprop || !weight.master || weight.is_sharded() || weight.master.dtype != DType::f32) return;
    const auto [experts, rows, cols] = weight.spec.matrices();
    const TensorView master = weight.master.reshape({experts, rows, cols});
    for (int64_t e = 0; e < experts; ++e) {
        ScaledTensor expert = weight.fprop;
        expert.data = weight.fprop.data[e];
        if (expert.layout != ScaleLayout::tensor) expert.scales = weight.fprop.scales[e];
        observe(ctx, (std::string(stage) + " weight").c_str(), expert, {}, master[e]);
    }
}

void TensorStats::end_iteration() {
    for (Slot& slot : slots_) {
        op::QuantizationSums sums;
        device_->copy_out(&sums, slot.sums.data, sizeof sums, stream_);
        slot.row.counts = sums.counts;
        const auto is_used = [](double values) { return values > 0; };
        const auto begin = std::begin(sums.exponents), end = std::end(sums.exponents),
                   first = std::find_if(begin, end, is_used);
        slot.row.first_exponent = static_cast<int>(first - begin) - kBias;
        slot.row.exponents.assign(
            first, std::find_if(std::reverse_iterator(end), std::reverse_iterator(first), is_used).base());
        (slot.row.weight.empty() ? rows_ : transposed_).push_back(std::move(slot.row));
    }
    slots_.clear();
    arena_.reset();
}

std::vector<TensorStatsRow> TensorStats::totals() const {
    std::vector<TensorStatsRow> totals;
    for (const TensorStatsRow& row : rows_) {
        const auto found = std::find_if(totals.begin(), totals.end(),
                                        [&](const TensorStatsRow& sum) { return sum.tensor == row.tensor; });
        if (found == totals.end())
            totals.push_back(row);
        else
            found->join(row);
    }
    return totals;
}

}  // namespace fp8flow
