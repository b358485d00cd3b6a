// SPDX-License-Identifier: MIT
// Inputs of the tests at the widths of real models: groups of rows, FP8 values, and powers of two that differ
// from block to block.
#pragma once

#include "tests/support/tensors.h"

#include <cstdint>

namespace fp8flow::test {

// 5, 11, 16, 22.5, 32, 40 and 56 blocks of 128.
inline constexpr int64_t kWideRows[] = {640, 1408, 2048, 2880, 4096, 5120, 7168};

inline constexpr uint8_t kLargest = 0x7E;  // 448

// 2^-6 to 2^6, no two neighbours alike, along rows and along blocks, and none equal to that of a place 2, 4,
// 8, ... away.
inline int exponent_of(int64_t row, int64_t block) {
    return static_cast<int>((row * 5 + block * 11) % 13) - 6;
}
// Sign and mantissa of any kind, exponent field 15: 256 to 416, or -256 to -416.
inline uint8_t code_of(int64_t row, int64_t col) {
    const int64_t hash = (row * 31 + col * 17 + row * col) % 12;
    return static_cast<uint8_t>((hash >= 6 ? 0x80 : 0) | 0x78 | (hash % 6));
}

// Ragged groups at a row base: groups of 0 rows, of 1, of more than a tile.
struct WideGroups {
    static constexpr int64_t base = 128;
    GroupsFixture groups{{0, 130, 1, 0, 128}, 128, 128};
    int64_t rows = base + groups.capacity();  // of the tensors

    // f(row in the tensor, whether it is a pad)
    template <class F> void for_rows(F f) const {
        for (int64_t row = 0; row < groups.total(); ++row) f(base + row, groups.is_pad(row));
    }
};

// FP8 rows in the layout vec128 with the FP8 values and scales above. Values in pads must not be read.
inline HostScaled scaled_rows(const WideGroups& g, int64_t width, DType dtype = DType::e4m3) {
    HostScaled rows = HostScaled(dtype, {g.rows, width}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
    rows.set_row_base(g.base);
    g.for_rows([&](int64_t row, bool pad) {
        // In E5M2 two of the FP8 values would be infinity and NaN. With bytes smaller by 8 all are finite.
        const int below = dtype == DType::e5m2 ? 8 : 0;
        for (int64_t c = 0; c < width; ++c)
            rows.data.view().bytes_ptr()[row * width + c] = static_cast<uint8_t>(code_of(row, c) - below);
        for (int64_t b = 0; b < ceil_div(width, kBlock); ++b)
            set(rows.scales, b * g.rows + row, pad ? 0x1.0p100 : std::ldexp(1.0, exponent_of(row, b)));
    });
    return rows;
}

}  // namespace fp8flow::test
