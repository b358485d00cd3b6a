// SPDX-License-Identifier: MIT
// Sizes of messages, the order of choices, and storing a row of sums.
#include "kernels/comm/plan_messages.h"

#include <algorithm>
#include <numeric>

namespace fp8flow::comm {

Parts packed_parts(const std::vector<int64_t>& counts, int64_t item_bytes) {
    Parts parts;
    std::size_t offset = 0;
    for (int64_t count : counts) {
        parts.push_back({offset, static_cast<std::size_t>(count * item_bytes)});
        offset += parts.back().bytes;
    }
    return parts;
}

std::vector<int64_t> received_counts(const DispatchPlan& plan) {
    const int64_t* offsets = plan.recv_offsets.as<int64_t>();
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < plan.all_ids.dim(0); ++r) counts.push_back(offsets[r + 1] - offsets[r]);
    return counts;
}

std::vector<int64_t> sent_counts(const DispatchPlan& plan) {
    const int64_t* counts = plan.send_counts.as<int64_t>();
    return {counts, counts + plan.all_ids.dim(0)};
}

std::vector<int64_t> choices_of(const DispatchPlan& plan, int64_t owner) {
    const Sizes sizes(plan);
    const int32_t* ids = plan.all_ids.as<int32_t>() + owner * sizes.slots * sizes.topk;
    std::vector<int64_t> counts(static_cast<std::size_t>(sizes.ranks), 0);
    for (int64_t i = 0; i < sizes.slots * sizes.topk; ++i)
        if (const int64_t rank = sizes.rank_of(ids[i]); rank >= 0) ++counts[static_cast<std::size_t>(rank)];
    return counts;
}

std::vector<int64_t> choices_for(const DispatchPlan& plan, int64_t rank) {
    std::vector<int64_t> counts;
    for (int64_t owner = 0; owner < plan.all_ids.dim(0); ++owner)
        counts.push_back(choices_of(plan, owner)[static_cast<std::size_t>(rank)]);
    return counts;
}

void sort_choices(const int32_t* ids, int64_t topk, std::vector<int64_t>& order) {
    order.resize(static_cast<std::size_t>(topk));
    std::iota(order.begin(), order.end(), int64_t{0});
    std::ranges::sort(order, [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
}

void store_row(const float* sum, const TensorView& rows, int64_t row) {
    const int64_t width = rows.dim(1);
    if (rows.dtype == DType::f32) {
        std::copy_n(sum, width, rows.as<float>() + row * width);
    } else {
        std::transform(sum, sum + width, rows.as<Bf16>() + row * width, [](float x) { return to_bf16(x); });
    }
}

}  // namespace fp8flow::comm
