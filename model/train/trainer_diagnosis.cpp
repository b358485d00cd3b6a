// SPDX-License-Identifier: MIT
// Finds the tensor that first shows why a step was not applied. Read next: divergence.h.
#include "model/train/trainer.h"

#include <algorithm>

namespace fp8flow {

std::string Trainer::reason_of(const Flight& flight) {
    const StepRecord& record = record_of(flight);
    return limits_.reason(mean_loss(record), flight.loss_limit, record.grad_norm());
}

// The first tensor with a NaN or Inf: weights before gradients, low ranks before high ranks. All ranks agree
// on it, because a bad weight of one rank gives bad gradients on all.
void Trainer::report_non_finite(int64_t step) {
    struct Finding {
        int64_t kind = 2;  // 0: a weight, 1: a gradient, 2: none
        int64_t parameter = 0, count = 0, first = 0;
    };
    Arena words(ops_->device(), "search");
    const TensorView count = words.tensor(DType::i64, {1}, "search"),
                     first = words.tensor(DType::i64, {1}, "search");
    const auto& parameters = transformer_->parameters().all();
    const auto search = [&](int64_t kind) {
        for (size_t i = 0; i < parameters.size(); ++i) {
            const Parameter& p = parameters[i];
            const int64_t zero = 0, none = -1;
            const TensorView& searched = kind == 0 ? p.master : p.main_grad;
            if (searched.numel() == 0 || (kind == 1 && p.frozen)) continue;
            ops_->device().copy_in(count.data, &zero, sizeof zero);
            ops_->device().copy_in(first.data, &none, sizeof none);
            ops_->count_non_finite({.x = searched, .count = count, .first = first});
            const int64_t found = read_word<int64_t>(count);
            if (found == 0) continue;
            const int64_t offset = p.first_element() + (kind == 0 ? p.slice.first : 0);
            return Finding{kind, static_cast<int64_t>(i), found, offset + read_word<int64_t>(first)};
        }
        return Finding{};
    };
    Finding mine = search(0);
    if (mine.kind == 2) mine = search(1);
    std::vector<Finding> all(to_size(world_.size()));
    world_.all_gather(&mine, sizeof mine, all.data());
    const auto worst = std::ranges::min_element(all, {}, &Finding::kind);
    if (worst->kind == 2)
        throw Diverged(
            step, fmt::format("step {}: the loss or the norm of the gradients is not finite, though "
                              "every weight and gradient is; the step was not applied; lower training.lr",
                              step + 1));
    const std::string& name = parameters[to_size(worst->parameter)].spec.name;
    throw Diverged(
        step,
        fmt::format("step {}: rank {}: {}{} has {} values that are not finite, the first at index {}; the "
                    "step was not applied{}",
                    step + 1, worst - all.begin(), worst->kind == 0 ? "" : "the gradient of ", name,
                    worst->count, worst->first,
                    worst->kind == 0 ? "" : "; lower training.lr or check the data"));
}

// By its norm, over all ranks.
std::string Trainer::largest_gradient() {
    Arena words(ops_->device(), "search");
    const TensorView sum = words.tensor(DType::f32, {1}, "search");
    const auto& parameters = transformer_->parameters().all();
    std::vector<float> squares;
    for (const Parameter& p : parameters) {
        ops_->zero({.y = sum});
        if (!p.frozen) ops_->norm_squared({.x = p.main_grad, .sum = sum});
        squares.push_back(read_word<float>(sum));
    }
    world_.all_reduce_max(squares);
    return parameters[to_size(std::ranges::max_element(squares) - squares.begin())].spec.name;
}

}  // namespace fp8flow
