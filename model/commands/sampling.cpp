// SPDX-License-Identifier: MIT
// Sorted by logit, cut, and one uniform number.
#include "model/commands/sampling.h"

#include "kernels/core/random.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace fp8flow {

int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t position) {
    const auto best = std::ranges::max_element(logits);
    if (sampling.temperature == 0) return static_cast<int32_t>(best - logits.begin());
    std::vector<int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    const auto logit = [&](int32_t id) { return logits[static_cast<size_t>(id)]; };
    std::ranges::stable_sort(ids, [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
    if (sampling.top_k > 0) ids.resize(std::min(ids.size(), static_cast<size_t>(sampling.top_k)));
    std::vector<double> sums;  // running sums of the probabilities, unnormalised
    for (const int32_t id : ids) {
        const double weight = std::exp((static_cast<double>(logit(id)) - *best) / sampling.temperature);
        sums.push_back((sums.empty() ? 0 : sums.back()) + weight);
    }
    const auto last = std::ranges::lower_bound(sums, sampling.top_p * sums.back()) - sums.begin();
    sums.resize(static_cast<size_t>(std::min(last + 1, std::ssize(sums))));
    const double drawn = random_uniform(sampling.seed, 0, static_cast<uint64_t>(position)) * sums.back();
    return ids[static_cast<size_t>(std::upper_bound(sums.begin(), sums.end() - 1, drawn) - sums.begin())];
}

}  // namespace fp8flow
