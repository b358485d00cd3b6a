// SPDX-License-Identifier: MIT
// StepInputs: the inputs of a step except tokens, as words on the device: update number, learning-rate
// schedule, limits, counter of stochastic rounding. Kernels read them there, so that a captured graph can be
// launched for another step. Read next: captured_steps.h.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/pinned.h"

#include <array>

namespace fp8flow {

class StepInputs {
public:
    struct Values {
        int64_t update = 0;                         // 0-based, among the steps that are applied
        int64_t rounding = 0;                       // rounding_step()
        std::array<float, 3> schedule = {0, 1, 1};  // op::AdamW
        float loss_limit = 0, grad_norm_limit = 0;  // op::ClipFactor; the first of the square root of the sum
        std::array<float, 2> sums = {0, 0};         // before the first micro-batch
    };
    static_assert(sizeof(Values) % sizeof(int64_t) == 0);

    StepInputs(Device& device, int64_t num_slots)
        : device_(device),
          memory_(device, "inputs of a step"),
          words_(memory_.tensor(DType::i64, {sizeof(Values) / sizeof(int64_t)}, "step")),
          slots_(device, at(num_slots)) {}
    // Writes into page-locked memory; the last load of the slot must have completed.
    void write(int64_t slot, const Values& values) { *slots_.at<Values>(at(slot)) = values; }
    void load(int64_t slot, Stream stream) {
        device_.copy_in_async(words_.data, slots_.at<Values>(at(slot)), sizeof(Values), stream);
    }

    TensorView update() const { return word(DType::i64, 1, offsetof(Values, update)); }      // [1]
    TensorView rounding() const { return word(DType::i64, 1, offsetof(Values, rounding)); }  // [1]
    TensorView schedule() const { return word(DType::f32, 3, offsetof(Values, schedule)); }  // [3]
    TensorView loss_limit() const { return word(DType::f32, 1, offsetof(Values, loss_limit)); }
    TensorView grad_norm_limit() const { return word(DType::f32, 1, offsetof(Values, grad_norm_limit)); }
    // [2] f32, summed over tokens and ranks: losses, and not 0 if a rank wants to stop. The step adds to
    // them.
    TensorView sums() const { return word(DType::f32, 2, offsetof(Values, sums)); }

private:
    static std::size_t at(int64_t slot) { return sizeof(Values) * static_cast<std::size_t>(slot); }
    TensorView word(DType dtype, int64_t count, std::size_t offset) const {
        return make_view(words_.bytes_ptr() + offset, dtype, {count});
    }

    Device& device_;
    Arena memory_;
    TensorView words_;
    PinnedBuffer slots_;
};

}  // namespace fp8flow
