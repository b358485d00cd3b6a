// SPDX-License-Identifier: MIT
// Tensor maps: how TMA sees a tensor in global memory. Made on the host, passed to a kernel as a
// __grid_constant__ argument. Device side: device/tma.h.
#pragma once

#include "kernels/core/dtype.h"

#include <cuda.h>

#include <cstdint>

namespace fp8flow::hopper {

// A row-major [rows, cols] tensor of 1- or 2-byte elements in boxes of `box_rows` rows x `box_row_bytes`
// (128, 64 or 32), swizzled at the same width. Elements outside the tensor are loaded as zeros and not
// stored.
CUtensorMap tensor_map(const void* data, DType dtype, int64_t rows, int64_t cols, int box_rows,
                       int box_row_bytes = 128);
// A tensor [groups, rows, cols] f32 | bf16 in boxes of 1 x box_rows rows x 128 bytes, 128-byte swizzled.
CUtensorMap tensor_map_of_groups(const void* data, DType dtype, int64_t groups, int64_t rows, int64_t cols,
                                 int box_rows);

}  // namespace fp8flow::hopper
