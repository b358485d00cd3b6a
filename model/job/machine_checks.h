// SPDX-License-Identifier: MIT
// What `doctor` prints of the GPUs. In backend.cpp, which alone names a concrete backend.
#pragma once

#include <string>
#include <vector>

namespace fp8flow {

// What runs need of a machine, and the command or setting that brings what is missing; empty: nothing is.
struct MachineCheck {
    std::string what, text, fix = {};
};
// The GPUs, how they reach each other, and their libraries.
std::vector<MachineCheck> check_gpus();

}  // namespace fp8flow
