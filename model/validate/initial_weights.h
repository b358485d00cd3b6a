// SPDX-License-Identifier: MIT
// The weights that an arm starts from: a fingerprint of them, and the start of the control arm next to them.
#pragma once

#include "kernels/comm/process_group.h"
#include "model/train/transformer.h"

#include <string>

namespace fp8flow::validate {

// Of the FP32 masters on all ranks, as hexadecimal digits. Collective.
std::string weights_fingerprint(Transformer& model, Device& device, ProcessGroup& world);

// Flips the last bit of every master that is not 0, which moves it by one unit in the last place, up or down
// as its bit was. The caller then writes the working copies (Trainer::weights_replaced).
void move_by_one_unit(Transformer& model, Device& device);

}  // namespace fp8flow::validate
