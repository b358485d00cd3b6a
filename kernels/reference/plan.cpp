// SPDX-License-Identifier: MIT
// plan_dispatch: from all ranks' routing to the expert-sorted, padded row order of this rank and the send and
// receive lists. Three passes over the ids: count, place, list what this rank sends. Integers only, so it is
// exact in every backend.
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <vector>

namespace fp8flow {

namespace {

using reference::base_of;

// Rows of this layer that M-tensors can hold: row_capacity, and what the (possibly shared) buffers hold past
// their base.
int64_t rows_available(const op::PlanDispatch& args) {
    int64_t available = args.groups.row_capacity;
    for (const TensorView* view : {&args.row_source, &args.row_prob})
        available = std::min(available, view->dim(0) - base_of(*view));
    return std::max<int64_t>(available, 0);
}

struct GroupRows {
    std::vector<int64_t> counts, offsets;
    bool overflow = false;
};

// Padded group offsets; groups that do not fit are cut to whole alignment units, the first rows of a group
// kept.
GroupRows place_groups(const std::vector<int64_t>& wanted, int64_t alignment, int64_t available) {
    GroupRows rows;
    rows.offsets.push_back(0);
    for (int64_t count : wanted) {
        const int64_t first = rows.offsets.back();
        const int64_t fitting = std::min(count, (available - first) / alignment * alignment);
        rows.overflow |= fitting < count;
        rows.counts.push_back(fitting);
        rows.offsets.push_back(first + round_up(fitting, alignment));
    }
    return rows;
}

void list_sends(const op::PlanDispatch& args) {
    const int64_t ranks = args.all_ids.dim(0), slots = args.all_ids.dim(1), topk = args.all_ids.dim(2);
    const int32_t* own_ids = args.all_ids.as<int32_t>() + args.rank * slots * topk;
    int32_t* tokens = args.send_tokens.as<int32_t>();
    int64_t* counts = args.send_counts.as<int64_t>();
    std::fill_n(tokens, ranks * slots, -1);
    std::fill_n(counts, ranks, 0);
    std::vector<int64_t> last_token(static_cast<std::size_t>(ranks), -1);  // a token is sent to a rank once
    for (int64_t token = 0; token < slots; ++token) {
        for (int64_t k = 0; k < topk; ++k) {
            const int64_t expert = own_ids[token * topk + k];
            if (expert < 0) continue;
            const int64_t to = expert / args.num_local_experts;
            if (last_token[to] == token) continue;
            last_token[to] = token;
            tokens[to * slots + counts[to]++] = static_cast<int32_t>(token);
        }
    }
}

}  // namespace

void ReferenceOps::do_plan_dispatch(const op::PlanDispatch& args, const Launch&) {
    reference::check_expert_ids(args.all_ids, "all_ids", -1, args.all_ids.dim(0) * args.num_local_experts);
    const int64_t ranks = args.all_ids.dim(0), slots = args.all_ids.dim(1), topk = args.all_ids.dim(2);
    const int64_t num_groups = args.groups.num_groups, received_capacity = ranks * slots;
    const int32_t* ids = args.all_ids.as<int32_t>();
    const float* probs = args.all_probs.as<float>();
    const auto group_of = [&](int64_t index) -> int64_t {  // -1: absent or on another rank
        const int64_t expert = ids[index] - args.first_expert;
        if (expert < 0 || expert >= args.num_local_experts) return -1;
        const int64_t source = args.num_sources > 1 ? index / (slots * topk) : 0;
        return source * args.num_local_experts + expert;
    };

    std::vector<int64_t> wanted(static_cast<std::size_t>(num_groups), 0);
    for (int64_t i = 0; i < received_capacity * topk; ++i)
        if (const int64_t group = group_of(i); group >= 0) ++wanted[group];
    const GroupRows rows = place_groups(wanted, args.groups.alignment, rows_available(args));
    std::copy(rows.counts.begin(), rows.counts.end(), args.groups.counts.as<int64_t>());
    std::copy(rows.offsets.begin(), rows.offsets.end(), args.groups.offsets.as<int64_t>());
    if (rows.overflow) *args.overflow.as<int32_t>() = 1;
    if (args.rows_wanted) {
        int64_t total = 0;
        for (int64_t count : wanted) total += round_up(count, args.groups.alignment);
        *args.rows_wanted.as<int64_t>() = std::max(*args.rows_wanted.as<int64_t>(), total);
    }
    if (args.next_row_base) {
        const int64_t base = args.row_base != nullptr ? *args.row_base : 0;
        *args.next_row_base.as<int64_t>() = round_up(base + rows.offsets.back(), kBlock);
    }

    int32_t* row_source = args.row_source.as<int32_t>() + base_of(args.row_source);
    float* row_prob = args.row_prob.as<float>() + base_of(args.row_prob);
    int32_t* recv_rows = args.recv_rows.as<int32_t>();
    int32_t* recv_source = args.recv_source.as<int32_t>();
    int64_t* recv_offsets = args.recv_offsets.as<int64_t>();
    std::fill_n(row_source, rows.offsets.back(), -1);
    std::fill_n(row_prob, rows.offsets.back(), 0.0f);
    std::fill_n(recv_rows, received_capacity * topk, -1);
    std::fill_n(recv_source, received_capacity, -1);

    struct Choice {
        int64_t group;
        float prob;
    };
    std::vector<int64_t> placed(static_cast<std::size_t>(num_groups), 0);
    std::vector<Choice> choices;
    int64_t received = 0;
    for (int64_t source = 0; source < received_capacity; ++source) {
        if (source % slots == 0) recv_offsets[source / slots] = received;
        choices.clear();
        for (int64_t i = source * topk; i < (source + 1) * topk; ++i)
            if (const int64_t group = group_of(i); group >= 0) choices.push_back({group, probs[i]});
        if (choices.empty()) continue;
        std::sort(choices.begin(), choices.end(),
                  [](const Choice& a, const Choice& b) { return a.group < b.group; });
        recv_source[received] = static_cast<int32_t>(source);
        int32_t* token_rows = recv_rows + received * topk;
        for (const Choice& choice : choices) {
            const int64_t place = placed[choice.group]++;
            if (place >= rows.counts[choice.group]) continue;  // cut by overflow
            const int64_t row = rows.offsets[choice.group] + place;
            row_source[row] = static_cast<int32_t>(received);
            row_prob[row] = choice.prob;
            *token_rows++ = static_cast<int32_t>(row);
        }
        ++received;
    }
    if (slots == 0) std::fill_n(recv_offsets, ranks, 0);
    recv_offsets[ranks] = received;
    list_sends(args);
}

}  // namespace fp8flow
