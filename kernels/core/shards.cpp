// SPDX-License-Identifier: MIT
// Cuts shards into rounds.
#include "kernels/core/shards.h"

#include "kernels/core/error.h"

#include <algorithm>

namespace fp8flow {

namespace {

// Where the next round of a rank begins: `taken` elements into slice `at`.
struct Cursor {
    size_t at = 0;
    int64_t taken = 0;
};

std::vector<Slice> next_round(const std::vector<Slice>& shard, const RoundLimits& limits, Cursor& cursor) {
    std::vector<Slice> round;
    int64_t left = limits.elements;
    while (cursor.at < shard.size() && left > 0 && static_cast<int64_t>(round.size()) < limits.slices) {
        const Slice& slice = shard[cursor.at];
        const int64_t count = std::min(left, slice.count - cursor.taken);
        if (count > 0) round.push_back({slice.first + cursor.taken, count});
        left -= count;
        cursor.taken += count;
        if (cursor.taken < slice.count) continue;
        ++cursor.at;
        cursor.taken = 0;
    }
    return round;
}

}  // namespace

int64_t elements_of(const std::vector<Slice>& shard) {
    int64_t sum = 0;
    for (const Slice& slice : shard) sum += slice.count;
    return sum;
}

std::vector<Shards> rounds_of(const Shards& shards, const RoundLimits& limits) {
    FP8FLOW_CHECK(limits.elements > 0 && limits.slices > 0, "rounds of {} elements, {} slices",
                  limits.elements, limits.slices);
    std::vector<Cursor> cursors(shards.size());
    std::vector<Shards> rounds;
    while (true) {
        Shards round;
        int64_t elements = 0;
        for (size_t rank = 0; rank < shards.size(); ++rank)
            elements += elements_of(round.emplace_back(next_round(shards[rank], limits, cursors[rank])));
        if (elements == 0) return rounds;
        rounds.push_back(std::move(round));
    }
}

}  // namespace fp8flow
