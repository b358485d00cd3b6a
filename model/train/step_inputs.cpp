// SPDX-License-Identifier: MIT
// Allocates the words of a step.
#include "model/train/step_inputs.h"

namespace fp8flow {

StepInputs::StepInputs(Device& device, int64_t num_slots)
    : device_(device),
      memory_(device, "inputs of a step"),
      words_(memory_.tensor(DType::i64, {static_cast<int64_t>(sizeof(Values) / sizeof(int64_t))}, "step")),
      slots_(device, at(num_slots)) {
    static_assert(sizeof(Values) % sizeof(int64_t) == 0);
}

}  // namespace fp8flow
