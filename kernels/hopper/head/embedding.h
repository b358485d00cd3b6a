// SPDX-License-Identifier: MIT
// The gradient of an embedding with few ids.
#pragma once

#include "kernels/core/tensor.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::head {

struct EmbeddingRows {
    const int32_t* sorted_ids;  // [tokens], ascending
    const int32_t* order;       // [tokens]: the position of the i-th
    const uint16_t* dy;         // [tokens, hidden] bf16; rows are whole 16-byte words
    int64_t tokens, hidden;
    Gradient mode;
    float* dtable;  // [vocab, hidden]; every element is written with Gradient::overwrite
    int64_t vocab;
};
void embedding_backward_few_ids(const EmbeddingRows& job, const Launch& launch);

}  // namespace fp8flow::hopper::head
