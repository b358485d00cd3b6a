// SPDX-License-Identifier: MIT
// The median of recent losses, and error texts.
#include "model/train/divergence.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace fp8flow {

double DivergenceLimits::loss_of(int64_t step) const {
    if (training_.loss_spike_factor <= 0) return 0;
    std::vector<double> known;
    for (auto it = losses_.rbegin(); it != losses_.rend() && known.size() < kWindow; ++it)
        if (it->first < step - kUnderWay) known.push_back(it->second);
    if (known.size() < kWindow) return 0;
    const auto middle = known.begin() + kWindow / 2;
    std::nth_element(known.begin(), middle, known.end());
    return training_.loss_spike_factor * *middle;
}

void DivergenceLimits::accept(int64_t step, double loss) {
    losses_.emplace_back(step, loss);
    if (losses_.size() > kWindow + kUnderWay) losses_.pop_front();
}

std::string DivergenceLimits::reason(double loss, double loss_limit, double grad_norm) const {
    if (!std::isfinite(loss) || !std::isfinite(grad_norm))
        return "the loss or the norm of the gradients is not finite";
    if (loss_limit > 0 && loss > loss_limit)
        return fmt::format("the loss is {:.4g}, the limit {:.4g} (training.loss_spike_factor is {:.4g})",
                           loss, loss_limit, training_.loss_spike_factor);
    return fmt::format("the norm of the gradients is {:.4g}, the limit {:.4g} (training.grad_norm_limit)",
                       grad_norm, training_.grad_norm_limit);
}

}  // namespace fp8flow
