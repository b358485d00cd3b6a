// SPDX-License-Identifier: MIT
// Sizes and order of messages, derived from a plan on both sides, and sums of rows. Private to kernels/comm.
#pragma once

#include "kernels/comm/process_group.h"
#include "kernels/core/arena.h"
#include "kernels/core/scalar_math.h"
#include "kernels/dispatch_plan.h"

#include <cstring>
#include <type_traits>
#include <vector>

namespace fp8flow::comm {

using Parts = std::vector<ProcessGroup::Part>;

inline int64_t base_of(const TensorView& view) { return view.row_base != nullptr ? *view.row_base : 0; }

// Consecutive parts: part r holds counts[r] items.
Parts packed_parts(const std::vector<int64_t>& counts, int64_t item_bytes);
inline int64_t offset_of(const Parts& parts, int64_t r) {
    return static_cast<int64_t>(parts[static_cast<std::size_t>(r)].offset);
}

// Sizes of a plan.
struct Sizes {
    int64_t ranks, slots, topk, local_experts;

    explicit Sizes(const DispatchPlan& plan)
        : ranks(plan.all_ids.dim(0)),
          slots(plan.all_ids.dim(1)),
          topk(plan.topk),
          local_experts(plan.num_local_experts) {}
    // The rank that hosts an expert; -1 for the id of an absent token.
    int64_t rank_of(int64_t expert) const {
        return expert >= 0 && expert < ranks * local_experts ? expert / local_experts : -1;
    }
};

// Rows that arrive from each rank, and rows that go to each rank.
std::vector<int64_t> received_counts(const DispatchPlan& plan);
std::vector<int64_t> sent_counts(const DispatchPlan& plan);
// Number of (token, k) choices of rank `owner`'s tokens, by the rank that hosts the expert.
std::vector<int64_t> choices_of(const DispatchPlan& plan, int64_t owner);
// Number of choices of every rank's tokens for the experts of `rank`.
std::vector<int64_t> choices_for(const DispatchPlan& plan, int64_t rank);
// The choices of one token, numbered as in `ids`, in ascending expert order.
void sort_choices(const int32_t* ids, int64_t topk, std::vector<int64_t>& order);

// Calls visit(n, row) for the n-th (token, expert) choice that `rank` hosts, in order (source rank,
// token, expert); row is that of the choice in `rows_of` (the plan's recv_rows, or its rows of
// probabilities), -1 where an overflow cut it off (the step is then redone, but counts must still agree).
template <class Visit>
void for_each_choice(const DispatchPlan& plan, int64_t rank, const TensorView& rows_of, Visit visit) {
    const Sizes sizes(plan);
    const int32_t* ids = plan.all_ids.as<int32_t>();
    const int32_t* source = plan.recv_source.as<int32_t>();
    const int32_t* rows = rows_of.as<int32_t>();
    const int64_t received = plan.recv_offsets.as<int64_t>()[sizes.ranks];
    int64_t n = 0;
    for (int64_t i = 0; i < received; ++i) {
        int64_t next = 0;  // choice of this token
        for (int64_t k = 0; k < sizes.topk; ++k)
            if (sizes.rank_of(ids[source[i] * sizes.topk + k]) == rank)
                visit(n++, int64_t{rows[i * sizes.topk + next++]});
    }
}

// sum += row, or sum = fma(weight, row, sum).
template <class T, class... Weight>
void add_row_as(const TensorView& rows, int64_t row, float* sum, Weight... weight) {
    const int64_t width = rows.dim(1);
    const T* values = rows.as<T>() + row * width;
    for (int64_t h = 0; h < width; ++h) {
        float value;
        if constexpr (std::is_same_v<T, float>) {
            value = values[h];
        } else {
            value = to_float(values[h]);
        }
        if constexpr (sizeof...(Weight) == 0) {
            sum[h] += value;
        } else {
            sum[h] = fma_float(weight..., value, sum[h]);
        }
    }
}
template <class... Weight> void add_row(const TensorView& rows, int64_t row, float* sum, Weight... weight) {
    rows.dtype == DType::f32 ? add_row_as<float>(rows, row, sum, weight...)
                             : add_row_as<Bf16>(rows, row, sum, weight...);
}
void store_row(const float* sum, const TensorView& rows, int64_t row);

inline TensorView byte_buffer(Arena& scratch, int64_t bytes, const char* category) {
    return scratch.tensor(DType::e8m0, {bytes}, category);  // the one-byte type
}

// Bytes of a row in a message: its values and its scales.
struct MessageShape {
    int64_t row_bytes, scale_bytes;

    explicit MessageShape(const ScaledTensor& rows)
        : row_bytes(rows.data.cols() * size_of(rows.data.dtype)),
          scale_bytes(rows.scales ? rows.scales.cols() * size_of(rows.scales.dtype) : 0) {}
    int64_t total() const { return row_bytes + scale_bytes; }
};

inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace fp8flow::comm
