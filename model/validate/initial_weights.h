// SPDX-License-Identifier: MIT
// The initial weights of an arm: their fingerprint, and those of the control arm.
#pragma once

#include "kernels/comm/process_group.h"
#include "model/train/transformer.h"

#include <string>

namespace fp8flow::validate {

// Of the FP32 masters of all ranks, as hexadecimal digits. Collective.
std::string weights_fingerprint(Transformer& model, Device& device, ProcessGroup& world);

// Flips the last bit of every master that is not 0: this adds or subtracts one unit in the last place. The
// caller then writes the working copies (Trainer::weights_replaced).
void move_by_one_unit(Transformer& model, Device& device);

}  // namespace fp8flow::validate
