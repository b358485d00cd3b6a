// SPDX-License-Identifier: MIT
// One outcome for all ranks: an error on one of them is an error on all.
#pragma once

#include "kernels/comm/process_group.h"

#include <functional>

namespace fp8flow::checkpoint {

// Runs `work`, which must not talk to other ranks, on every rank. If it throws Error on any, every rank
// throws the Error of the lowest such rank.
void on_all_ranks(ProcessGroup& world, const std::function<void()>& work);

}  // namespace fp8flow::checkpoint
