// SPDX-License-Identifier: MIT
// Shares cut into rounds.
#include "kernels/core/shares.h"

#include "kernels/core/error.h"

#include <algorithm>

namespace fp8flow {

namespace {

// The next slices of one rank, from `taken` elements of slice `at` on.
struct Place {
    size_t at = 0;
    int64_t taken = 0;
};

std::vector<Slice> next_round(const std::vector<Slice>& share, const RoundLimits& limits, Place& place) {
    std::vector<Slice> round;
    int64_t left = limits.elements;
    while (place.at < share.size() && left > 0 && static_cast<int64_t>(round.size()) < limits.slices) {
        const Slice& slice = share[place.at];
        const int64_t count = std::min(left, slice.count - place.taken);
        if (count > 0) round.push_back({slice.first + place.taken, count});
        left -= count;
        place.taken += count;
        if (place.taken < slice.count) continue;
        ++place.at;
        place.taken = 0;
    }
    return round;
}

}  // namespace

int64_t elements_of(const std::vector<Slice>& share) {
    int64_t sum = 0;
    for (const Slice& slice : share) sum += slice.count;
    return sum;
}

std::vector<Shares> rounds_of(const Shares& shares, const RoundLimits& limits) {
    FP8FLOW_CHECK(limits.elements > 0 && limits.slices > 0, "rounds of {} elements, {} slices",
                  limits.elements, limits.slices);
    std::vector<Place> places(shares.size());
    std::vector<Shares> rounds;
    while (true) {
        Shares round;
        int64_t elements = 0;
        for (size_t rank = 0; rank < shares.size(); ++rank)
            elements += elements_of(round.emplace_back(next_round(shares[rank], limits, places[rank])));
        if (elements == 0) return rounds;
        rounds.push_back(std::move(round));
    }
}

}  // namespace fp8flow
