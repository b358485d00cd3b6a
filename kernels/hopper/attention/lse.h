// SPDX-License-Identifier: MIT
// Copies log-sum-exps between [T, heads] and cuDNN's packed layout: before 9.26 some of cuDNN's backward
// kernels ignore the strides they are given for them, and newer cudnn-frontends accept packed ones only (its
// pull request 304).
#pragma once

#include "kernels/core/stream.h"

#include <cstdint>

namespace fp8flow::hopper::attention {

// A part of lse [T, heads]: `sequences` of `length` rows from `first_row`, `part_heads` heads from
// `first_head`. Packed: contiguous [sequences, part_heads, length].
struct LsePart {
    int64_t sequences, length;
    int64_t heads;
    int64_t first_row, first_head, part_heads;
};

enum class LseCopy { pack, unpack };
void copy_lse(float* lse, const LsePart& part, float* packed, LseCopy copy, const Launch& launch);

}  // namespace fp8flow::hopper::attention
