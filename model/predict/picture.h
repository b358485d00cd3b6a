// SPDX-License-Identifier: MIT
// What the pictures of a plan and its report.html show alike. Read next: picture.cpp.
#pragma once

#include "model/predict/choose.h"

#include <string>
#include <vector>

namespace fp8flow::predict {

std::string label_of(const Choice& choice);  // "64 GPUs, fp8_flow, EP 8"
// The word of a bar: parts of a step, the MoE layer by what it does.
std::string kind_of(const Work& work);
// ", fp8_flow on 64 GPUs: 1.31 x as fast as bf16" of the largest number of GPUs that has both; empty: none.
// Within the error of the prediction it says so.
std::string speed_up_of(const std::vector<Choice>& choices, const Gpu& gpu);

}  // namespace fp8flow::predict
