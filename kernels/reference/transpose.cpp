// SPDX-License-Identifier: MIT
// The transpose for weight gradients: scaling-aware on the FP8 values, or dequantise + requantise. Contracts:
// kernels/ops/transpose.h.
#include "kernels/core/error.h"
#include "kernels/reference/quantizers.h"
#include "kernels/reference/reference_ops.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace fp8flow {

namespace reference {

namespace {

// fp8_shift_down of every FP8 value for every shift that can matter: past kMaxShift all finite values have
// become 0.
constexpr int kMaxShift = 63;
using ShiftTable = std::array<std::array<uint8_t, 256>, kMaxShift + 1>;
const ShiftTable& shift_table(DType dtype) {
    auto build = [](DType t) {
        ShiftTable table{};
        for (int k = 0; k <= kMaxShift; ++k)
            for (int code = 0; code < 256; ++code)
                table[static_cast<std::size_t>(k)][static_cast<std::size_t>(code)] =
                    fp8_shift_down(static_cast<uint8_t>(code), k, t);
        return table;
    };
    static const ShiftTable e4m3 = build(DType::e4m3), e5m2 = build(DType::e5m2);
    return dtype == DType::e5m2 ? e5m2 : e4m3;
}

// Checks that every scale is 0 (a pad) or a normal power of two, as the declared format says.
void check_powers_of_two(const ScaledRows& src, const std::vector<GroupRange>& ranges) {
    for (int64_t block = 0; block < ceil_div(src.dim, kBlock); ++block)
        for (const GroupRange& range : ranges)
            for (int64_t row = range.first; row < range.first + range.count; ++row) {
                const float scale = src.scales[block * src.scale_stride + row];
                const uint32_t bits = float_bits(scale);
                const bool power = (bits & 0x807FFFFFu) == 0 && bits != 0x7F800000u;
                require(power, ExitCode::usage,
                        "src declares scales pow2, and that of row {} in columns {} and following is {}", row,
                        block * kBlock, scale);
            }
}

int exponent_of(float scale) { return static_cast<int>(float_bits(scale) >> 23); }

// Rows of one tile, at most 128 x 128. fp8: first value of the tile in dst, row stride dst_stride. Returns
// the tile's scale.
float transpose_tile(const ScaledRows& src, const ShiftTable& shifts, const Tile& tile, uint8_t* dst,
                     int64_t dst_stride) {
    const float* scales = src.scales + tile.col / kBlock * src.scale_stride + tile.row;
    float target = 0.0f;
    for (int64_t r = 0; r < tile.count; ++r) target = max_ignore_nan(target, scales[r]);

    uint8_t fp8[kBlock][kBlock];  // [column][row]
    const int64_t rows = tile.end - tile.row;
    for (int64_t r = 0; r < rows; ++r) {
        if (r >= tile.count || !(scales[r] > 0.0f)) {
            for (int64_t c = 0; c < tile.cols; ++c) fp8[c][r] = 0;
            continue;
        }
        const int k = std::min(exponent_of(target) - exponent_of(scales[r]), kMaxShift);
        const auto& shift = shifts[static_cast<std::size_t>(k)];
        const uint8_t* in = src.data + (tile.row + r) * src.dim + tile.col;
        for (int64_t c = 0; c < tile.cols; ++c) fp8[c][r] = shift[in[c]];
    }
    for (int64_t c = 0; c < tile.cols; ++c)
        std::memcpy(dst + c * dst_stride, fp8[c], static_cast<std::size_t>(rows));
    return target;
}

}  // namespace

void transpose_tiles(const ScaledRows& src, DType dtype, const std::vector<GroupRange>& ranges,
                     const ScaledTensor& dst) {
    const ShiftTable& shifts = shift_table(dtype);
    const std::vector<Tile> tiles = tiles_of(ranges, src.dim);
    const int64_t stride = dst.data.cols(), base = base_of(dst.data);
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < tiles.size(); ++i) {
        const Tile& tile = tiles[i];
        uint8_t* out = dst.data.bytes_ptr() + tile.col * stride + base + tile.row;
        const float scale = transpose_tile(src, shifts, tile, out, stride);
        dst.scales.as<float>()[(base + tile.row) / kBlock * dst.scales.cols() + tile.col / kBlock] = scale;
    }
}

}  // namespace reference

using namespace reference;

void ReferenceOps::do_transpose_fp8(const op::TransposeFp8& args, const Launch&) {
    const TensorView& fp8 = args.src.data;
    const int64_t base = base_of(fp8);
    const ScaledRows rows = {fp8.bytes_ptr() + base * fp8.cols(), args.src.scales.as<float>() + base,
                             fp8.cols(), fp8.dim(0)};
    const std::vector<GroupRange> ranges = column_ranges(args.groups, fp8.dim(0), args.dst.data);
    check_powers_of_two(rows, ranges);
    transpose_tiles(rows, fp8.dtype, ranges, args.dst);
}

void ReferenceOps::do_transpose_requantize(const op::TransposeRequantize& args, const Launch&) {
    const TensorView& fp8 = args.src.data;
    const float* scales = args.src.scales.as<float>();
    const int64_t base = base_of(fp8), capacity = fp8.dim(0), dim = fp8.cols();
    const LoadSegment dequantized = [&](int64_t row, int64_t col, int64_t count, float* out) {
        load_floats(fp8, (base + row) * dim + col, count, out);
        for (int64_t i = 0; i < count; ++i) out[i] *= scales[(col + i) / kBlock * capacity + base + row];
    };
    quantize_by_columns(dequantized, dim, column_ranges(args.groups, capacity, args.dst.data),
                        {args.scale_format, MxRounding::rceil}, args.dst);
}

}  // namespace fp8flow
