// SPDX-License-Identifier: MIT
// Scales, FP8 values and column blocks: see quantizers.h.
#include "kernels/reference/quantizers.h"

#include <algorithm>
#include <cstring>

namespace fp8flow::reference {

namespace {

constexpr int64_t kColumns =
    64;  // columns worked on at once: kColumns x kBlock floats stay in the L1 / L2 cache

// |x| as ordered bits; NaN counts as 0.
inline uint32_t magnitude_bits(float x) {
    const uint32_t bits = float_bits(x) & 0x7FFFFFFFu;
    return bits > 0x7F800000u ? 0u : bits;
}

// The stored scale and the multiplier of a block; `layout` decides between the MX rule and the block rule.
struct BlockScale {
    float multiplier;
    float dequant;  // f32 scales
    uint8_t e8m0;   // e8m0 scales
};
BlockScale block_scale(float amax, DType dtype, ScaleLayout layout, const QuantizeRule& rule) {
    if (layout == ScaleLayout::mx32) {
        const MxScale scale = mx_scale(amax, dtype, rule.mx_rounding);
        return {scale.multiplier, 0.0f, scale.code};
    }
    const QuantScale scale = quant_scale(amax, fp8_max(dtype), rule.scale_format);
    return {scale.multiplier, scale.dequant, float_to_e8m0(scale.dequant)};
}

void store_scale(const TensorView& scales, int64_t index, const BlockScale& scale) {
    if (scales.dtype == DType::e8m0) {
        scales.bytes_ptr()[index] = scale.e8m0;
    } else {
        static_cast<float*>(scales.data)[index] = scale.dequant;
    }
}

constexpr BlockScale kPadScale = {0.0f, 0.0f, 0};

int64_t block_length(ScaleLayout layout, int64_t whole) {
    switch (layout) {
        case ScaleLayout::vec128:
        case ScaleLayout::vec128_wire: return kBlock;
        case ScaleLayout::mx32: return kMxBlock;
        default: return whole;
    }
}

// Place of the scale of (row, block) for layouts that scale along the row.
int64_t row_scale_index(const ScaledTensor& t, int64_t row, int64_t block) {
    if (t.layout == ScaleLayout::row) return row;
    if (t.layout == ScaleLayout::vec128_wire) return row * t.scales.cols() + block;
    return block * t.data.rows() + row;
}

// fp8[r][c] = to_fp8(values[r][c] * multipliers[c]) for rows of kColumns.
template <class To>
void encode_columns(const float* values, int64_t rows, const float* multipliers, uint8_t* fp8, To to) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < kColumns; ++c)
            fp8[r * kColumns + c] = to(values[r * kColumns + c] * multipliers[c]).bits;
}

// A block of rows that share one scale per column; scale_row is its row in the scale table.
struct ColumnBlock {
    int64_t first, count, end, scale_row;
};

std::vector<ColumnBlock> column_blocks(const std::vector<GroupRange>& ranges, const ScaledTensor& dst) {
    const int64_t base = base_of(dst.data);
    std::vector<ColumnBlock> blocks;
    for (const GroupRange& range : ranges) {
        if (dst.layout == ScaleLayout::group_row || dst.layout == ScaleLayout::row) {
            blocks.push_back({range.first, range.count, range.end, range.group});
            continue;
        }
        const int64_t length = block_length(dst.layout, 0);
        for (int64_t row = range.first; row < range.end; row += length) {
            const int64_t end = std::min(row + length, range.end);
            const int64_t count = std::clamp<int64_t>(range.first + range.count - row, 0, end - row);
            blocks.push_back({row, count, end, (base + row) / length});
        }
    }
    return blocks;
}

void load_chunk(const LoadSegment& load, int64_t row, int64_t rows, int64_t col, int64_t cols, float* out) {
    for (int64_t r = 0; r < rows; ++r) {
        load(row + r, col, cols, out + r * kColumns);
        std::fill(out + r * kColumns + cols, out + (r + 1) * kColumns, 0.0f);
    }
}

void quantize_column_block(const LoadSegment& load, const ColumnBlock& block, int64_t col, int64_t cols,
                           const QuantizeRule& rule, const ScaledTensor& dst) {
    float values[kBlock * kColumns];
    uint8_t fp8[kBlock * kColumns];
    uint32_t amax[kColumns] = {};
    float multipliers[kColumns] = {};
    for (int64_t row = 0; row < block.count; row += kBlock) {
        const int64_t rows = std::min(kBlock, block.count - row);
        load_chunk(load, block.first + row, rows, col, cols, values);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < kColumns; ++c)
                amax[c] = std::max(amax[c], magnitude_bits(values[r * kColumns + c]));
    }
    const int64_t dim = dst.data.dim(0), stride = dst.data.cols();
    for (int64_t c = 0; c < cols; ++c) {
        const BlockScale scale =
            block.count > 0 ? block_scale(bits_float(amax[c]), dst.data.dtype, dst.layout, rule) : kPadScale;
        multipliers[c] = scale.multiplier;
        store_scale(dst.scales, block.scale_row * dim + col + c, scale);
    }
    uint8_t* out = dst.data.bytes_ptr() + col * stride + base_of(dst.data) + block.first;
    for (int64_t row = 0; row < block.count; row += kBlock) {
        const int64_t rows = std::min(kBlock, block.count - row);
        if (block.count > kBlock) load_chunk(load, block.first + row, rows, col, cols, values);
        if (dst.data.dtype == DType::e5m2) {
            encode_columns(values, rows, multipliers, fp8, [](float x) { return to_e5m2(x); });
        } else {
            encode_columns(values, rows, multipliers, fp8, [](float x) { return to_e4m3(x); });
        }
        for (int64_t c = 0; c < cols; ++c)
            for (int64_t r = 0; r < rows; ++r) out[c * stride + row + r] = fp8[r * kColumns + c];
    }
    const std::size_t pads = static_cast<std::size_t>(block.end - block.first - block.count);
    for (int64_t c = 0; c < cols && pads > 0; ++c) std::memset(out + c * stride + block.count, 0, pads);
}

}  // namespace

float amax_of(const float* values, int64_t count) {
    constexpr int64_t kLanes = 16;  // so that the compiler vectorises; a maximum is the same in any order
    uint32_t lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane)
            lanes[lane] = std::max(lanes[lane], magnitude_bits(values[i + lane]));
    for (; i < count; ++i) lanes[0] = std::max(lanes[0], magnitude_bits(values[i]));
    return bits_float(*std::max_element(lanes, lanes + kLanes));
}

void encode(const float* values, int64_t count, float multiplier, DType dtype, uint8_t* fp8) {
    if (dtype == DType::e5m2) {
        for (int64_t i = 0; i < count; ++i) fp8[i] = to_e5m2(values[i] * multiplier).bits;
    } else {
        for (int64_t i = 0; i < count; ++i) fp8[i] = to_e4m3(values[i] * multiplier).bits;
    }
}

void quantize_row(const float* values, const ScaledTensor& dst, int64_t row, const QuantizeRule& rule) {
    const int64_t cols = dst.data.cols(), length = block_length(dst.layout, cols);
    uint8_t* fp8 = dst.data.bytes_ptr() + row * cols;
    for (int64_t col = 0; col < cols; col += length) {
        const int64_t count = std::min(length, cols - col);
        const BlockScale scale = block_scale(amax_of(values + col, count), dst.data.dtype, dst.layout, rule);
        encode(values + col, count, scale.multiplier, dst.data.dtype, fp8 + col);
        store_scale(dst.scales, row_scale_index(dst, row, col / length), scale);
    }
}

void zero_row(const ScaledTensor& dst, int64_t row) {
    const int64_t cols = dst.data.cols(), length = block_length(dst.layout, cols);
    std::memset(dst.data.bytes_ptr() + row * cols, 0, static_cast<std::size_t>(cols));
    for (int64_t block = 0; block < ceil_div(cols, length); ++block)
        store_scale(dst.scales, row_scale_index(dst, row, block), kPadScale);
}

void quantize_by_rows(const TensorView& src, const std::vector<GroupRange>& ranges, const QuantizeRule& rule,
                      const ScaledTensor& dst) {
    const int64_t src_base = base_of(src), dst_base = base_of(dst.data);
    for_each_row(ranges, src.cols(), [&](int64_t row, RowKind kind, float* values) {
        if (kind == RowKind::pad) return zero_row(dst, dst_base + row);
        load_row(src, src_base + row, values);
        quantize_row(values, dst, dst_base + row, rule);
    });
}

LoadSegment segments_of(const TensorView& src) {
    return [src, base = base_of(src)](int64_t row, int64_t col, int64_t count, float* out) {
        load_floats(src, (base + row) * src.cols() + col, count, out);
    };
}

std::vector<Tile> tiles_of(const std::vector<GroupRange>& ranges, int64_t num_cols) {
    std::vector<Tile> tiles;
    for (const GroupRange& range : ranges)
        for (int64_t row = range.first; row < range.end; row += kBlock) {
            const int64_t end = std::min(row + kBlock, range.end);
            const int64_t count = std::clamp<int64_t>(range.first + range.count - row, 0, end - row);
            for (int64_t col = 0; col < num_cols; col += kBlock)
                tiles.push_back({row, count, end, col, std::min(kBlock, num_cols - col)});
        }
    return tiles;
}

void load_tile(const LoadSegment& load, const Tile& tile, float* values) {
    for (int64_t r = 0; r < tile.count; ++r) load(tile.row + r, tile.col, tile.cols, values + r * tile.cols);
}

void store_tile(const float* values, const Tile& tile, float multiplier, const TensorView& rows,
                const TensorView& transposed) {
    uint8_t fp8[kBlock * kBlock];
    const DType dtype = rows ? rows.dtype : transposed.dtype;
    encode(values, tile.count * tile.cols, multiplier, dtype, fp8);
    std::memset(fp8 + tile.count * tile.cols, 0,
                static_cast<std::size_t>((tile.end - tile.row - tile.count) * tile.cols));
    if (rows) {
        uint8_t* out = rows.bytes_ptr() + (base_of(rows) + tile.row) * rows.cols() + tile.col;
        for (int64_t r = 0; r < tile.end - tile.row; ++r)
            std::memcpy(out + r * rows.cols(), fp8 + r * tile.cols, static_cast<std::size_t>(tile.cols));
    }
    if (transposed) {
        const int64_t stride = transposed.cols();
        uint8_t* out = transposed.bytes_ptr() + tile.col * stride + base_of(transposed) + tile.row;
        for (int64_t c = 0; c < tile.cols; ++c)
            for (int64_t r = 0; r < tile.end - tile.row; ++r) out[c * stride + r] = fp8[r * tile.cols + c];
    }
}

std::vector<GroupRange> column_ranges(const RowGroups& groups, int64_t rows, const TensorView& transposed) {
    std::vector<GroupRange> ranges = group_ranges(groups, rows);
    if (groups.num_groups == 0) ranges[0].end = transposed.cols();
    return ranges;
}

void quantize_by_columns(const LoadSegment& load, int64_t num_cols, const std::vector<GroupRange>& ranges,
                         const QuantizeRule& rule, const ScaledTensor& dst) {
    const std::vector<ColumnBlock> blocks = column_blocks(ranges, dst);
    const int64_t panels = ceil_div(num_cols, kColumns), tasks = panels * static_cast<int64_t>(blocks.size());
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
        const int64_t col = task % panels * kColumns;
        quantize_column_block(load, blocks[static_cast<std::size_t>(task / panels)], col,
                              std::min(kColumns, num_cols - col), rule, dst);
    }
}

}  // namespace fp8flow::reference
