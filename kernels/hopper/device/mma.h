// SPDX-License-Identifier: MIT
// Warp-level MMA of BF16 operands with FP32 accumulators (m16n8k16), and loads and stores of 8x8 matrices in
// shared memory. Source of the fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#pragma once

#include <cstdint>

namespace fp8flow::hopper {

// Four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8 (16 bytes,
// aligned). Fragment i of lane l holds elements (l / 4, 2 * (l % 4)) and the next of matrix i, or of its
// transpose.
template <bool kTransposed>
__device__ __forceinline__ void ldmatrix_x4(const uint16_t* row, uint32_t (&fragments)[4]) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    if constexpr (kTransposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                     : "r"(address)
                     : "memory");
}

// The inverse: fragment i of lane l is stored to matrix i, lanes pass addresses in shared memory as above.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, const uint32_t (&fragments)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(fragments[0]), "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
                 : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8]. Lane l holds of c the elements (l / 4, 2 * (l % 4)) and the next, and
// the same eight rows below.
__device__ __forceinline__ void mma_bf16(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fp8flow::hopper
