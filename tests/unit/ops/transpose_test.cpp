// SPDX-License-Identifier: MIT
// The scaling-aware transpose byte for byte (every code x every distance of scales), and the naive dequantise
// + requantise with the error of double quantisation, measured.
#include "kernels/reference/reference_ops.h"
#include "tests/support/files.h"
#include "tests/support/fp8_reference.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>

namespace fp8flow {
namespace {

using namespace test;

int64_t base_of(const HostTensor& tensor) { return tensor.view().row_base ? *tensor.view().row_base : 0; }

// Reads of the source, by definition of the layout vec128.
float row_scale(const HostScaled& rows, int64_t row, int64_t col) {
    return rows.scales.as<float>()[col / 128 * rows.data.view().dim(0) + base_of(rows.data) + row];
}
uint8_t row_code(const HostScaled& rows, int64_t row, int64_t col) {
    return rows.data.view().bytes_ptr()[(base_of(rows.data) + row) * rows.data.view().cols() + col];
}

// One tile: rows [row, row + count) are valid, up to `end` pads. Values in double: code * 2^-k by table
// search.
void expect_tile(const HostScaled& src, int64_t row, int64_t count, int64_t end, int64_t col,
                 HostScaled& want) {
    const DType dtype = src.data.view().dtype;
    const int64_t dim = src.data.view().cols(), stride = want.data.view().cols(), base = base_of(want.data);
    const int64_t cols = std::min<int64_t>(128, dim - col);
    float target = 0.0f;
    for (int64_t r = row; r < row + count; ++r) target = std::max(target, row_scale(src, r, col));
    for (int64_t r = row; r < end; ++r)
        for (int64_t c = col; c < col + cols; ++c) {
            uint8_t code = 0;
            const float scale = r < row + count ? row_scale(src, r, c) : 0.0f;
            if (scale > 0.0f) {
                code = row_code(src, r, c);
                const double value = code_value(code, dtype);
                const int k = std::ilogb(target) - std::ilogb(scale);
                if (std::isfinite(value) && k > 0) code = nearest_code(std::ldexp(value, -k), dtype);
            }
            want.data.view().bytes_ptr()[c * stride + base + r] = code;
        }
    want.scales.as<float>()[(base + row) / 128 * ceil_div(dim, 128) + col / 128] = target;
}

void expect_range(const HostScaled& src, int64_t first, int64_t count, int64_t end, HostScaled& want) {
    for (int64_t row = first; row < end; row += 128)
        for (int64_t col = 0; col < src.data.view().cols(); col += 128) {
            const int64_t tile_end = std::min(row + 128, end);
            expect_tile(src, row, std::clamp<int64_t>(first + count - row, 0, tile_end - row), tile_end, col,
                        want);
        }
}

HostScaled tiles_for(const HostScaled& src, int64_t rows) {
    return HostScaled(src.data.view().dtype, {src.data.view().cols(), rows}, ScaleLayout::tile128);
}

// Rows 0..126 lie k = 0, 1, ..., and row 127 holds the largest scale; each row holds every code (in two
// blocks of columns).
TEST(TransposeFp8, EveryCodeByEveryDistanceOfScales) {
    ReferenceOps ops;
    for (DType dtype : {DType::e4m3, DType::e5m2})
        for (int first : {0, 127, 126 + 127}) {
            HostScaled src = HostScaled(dtype, {128, 256}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
            for (int r = 0; r < 128; ++r) {
                for (int c = 0; c < 256; ++c)
                    src.data.view().bytes_ptr()[r * 256 + c] = static_cast<uint8_t>(c);
                for (int b = 0; b < 2; ++b) {
                    // distances first .. first + 126; beyond 253 there is no normal float left: the least one
                    const int exponent = r == 127 ? 127 : std::max(127 - (first + r), -126);
                    src.scales.as<float>()[b * 128 + r] = std::ldexp(1.0f, exponent);
                }
            }
            HostScaled dst = tiles_for(src, 128), want = tiles_for(src, 128);
            expect_range(src, 0, 128, 128, want);
            ops.transpose_fp8({.src = src, .dst = dst});
            expect_same(dst, want);
            // NaN of both signs is still NaN in every row
            for (int r = 0; r < 128; ++r)
                for (int code : {0x7F, 0xFF}) EXPECT_EQ(dst.data.view().bytes_ptr()[code * 128 + r], code);
        }
}

void fill_rows(HostScaled& rows, uint64_t seed, int low, int high) {
    for (int64_t i = 0; i < rows.data.numel(); ++i)
        rows.data.view().bytes_ptr()[i] =
            static_cast<uint8_t>(random_words(seed, 0, static_cast<uint64_t>(i))[0]);
    fill_pow2(rows.scales, seed, low, high);
}

TEST(TransposeFp8, RaggedGroupsPadsAndRowBases) {
    ReferenceOps ops;
    const GroupsFixture groups({0, 1, 128, 0, 200, 127, 129, 0, 384}, 128, 256);
    for (DType dtype : {DType::e4m3, DType::e5m2})
        for (int64_t dim : {128, 384, 200}) {
            const int64_t src_base = 128, base = 384;
            HostScaled src = HostScaled(dtype, {groups.capacity() + src_base, dim}, ScaleLayout::vec128)
                                 .declared(ScaleFormat::pow2);
            fill_rows(src, 11, -12, 3);
            src.set_row_base(src_base);
            for (int64_t row = 0; row < groups.total(); ++row)
                for (int64_t b = 0; b < ceil_div(dim, 128); ++b) {
                    float& scale = src.scales.as<float>()[b * src.data.view().dim(0) + src_base + row];
                    if (groups.is_pad(row))
                        scale = 0x1.0p100f;  // stale bytes in a pad must not be read
                    else if (row % 19 == 3)
                        scale = 0.0f;  // as a pad inside the valid rows
                }
            const int64_t width = groups.capacity() + base;
            HostScaled dst = tiles_for(src, width), want = tiles_for(src, width);
            dst.set_row_base(base);
            want.set_row_base(base);
            for (int64_t g = 0; g < groups.num_groups(); ++g)
                expect_range(src, groups.first(g), groups.count(g), groups.end(g), want);
            ops.transpose_fp8({.src = src, .groups = groups, .dst = dst});
            expect_same(dst, want);
        }
}

TEST(TransposeFp8, WithoutGroupsTheCopyIsPaddedWithZeros) {
    ReferenceOps ops;
    for (int64_t rows : {0, 1, 127, 130, 256}) {
        HostScaled src =
            HostScaled(DType::e4m3, {rows, 256}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
        fill_rows(src, 12, -5, 5);
        const int64_t width = round_up(rows, 128);
        HostScaled dst = tiles_for(src, width), want = tiles_for(src, width);
        expect_range(src, 0, rows, width, want);
        ops.transpose_fp8({.src = src, .dst = dst});
        expect_same(dst, want);
        if (rows % 128 != 0) {
            HostScaled narrow = tiles_for(src, rows), want_narrow = tiles_for(src, rows);
            expect_range(src, 0, rows, rows, want_narrow);
            ops.transpose_fp8({.src = src, .dst = narrow});
            expect_same(narrow, want_narrow);
        }
    }
}

TEST(TransposeFp8, ZeroRowsDoNotDegradeTheirNeighbours) {
    ReferenceOps ops;
    HostTensor x(DType::bf16, {256, 128});
    for (double size : {1.0, 1e-6, 1e-14, 1e-24}) {  // all above kAmaxEps
        fill(x, [&](int64_t i) {
            const bool zero = i / 128 < 128 ? (i / 128) % 2 == 0 : true;  // second tile: zeros only
            return zero ? 0.0 : size * (1.0 + 0.4 * random_uniform(13, 0, static_cast<uint64_t>(i)));
        });
        const HostScaled rows =
            HostScaled(DType::e4m3, {256, 128}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
        HostScaled dst = tiles_for(rows, 256);
        ops.quantize_rows({.src = x, .dst = rows});
        ops.transpose_fp8({.src = rows, .dst = dst});
        float largest = 0.0f;
        for (int r = 1; r < 128; r += 2) largest = std::max(largest, rows.scales.as<float>()[r]);
        EXPECT_EQ(dst.scales.as<float>()[0], largest);  // of real rows
        for (int r = 0; r < 128; ++r)
            for (int c = 0; c < 128; ++c) {
                const int k = std::ilogb(largest) - std::ilogb(rows.scales.as<float>()[r]);
                const uint8_t code = row_code(rows, r, c);
                ASSERT_EQ(dst.data.view().bytes_ptr()[c * 256 + r],
                          r % 2 == 0
                              ? 0
                              : nearest_code(std::ldexp(code_value(code, DType::e4m3), -k), DType::e4m3));
            }
        const float zero_scale =
            dst.scales.as<float>()[1];  // a tile of zeros: tiny, finite, not the 0 of pads
        EXPECT_GT(zero_scale, 0.0f);
        EXPECT_LT(zero_scale, 1e-30f);
    }
}

// What a tensor declares decides; the reference backend also reads what it is given.
TEST(TransposeFp8, TakesDeclaredPowersOfTwoOnly) {
    ReferenceOps ops;
    HostTensor x(DType::bf16, {256, 256});
    fill_normal(x, 17);
    const auto transpose = [&](const HostScaled& rows) {
        ops.transpose_fp8({.src = rows, .dst = tiles_for(rows, 256)});
    };
    const auto refused = [&](const HostScaled& rows, const std::string& reason) {
        expect_contains(error_of(ExitCode::usage, [&] { transpose(rows); }), reason);
    };
    for (const ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
        const HostScaled rows = HostScaled(DType::e4m3, {256, 256}, ScaleLayout::vec128).declared(format);
        ops.quantize_rows({.src = x, .scale_format = format, .dst = rows});
        if (format == ScaleFormat::pow2)
            transpose(rows);
        else
            refused(rows, "src declares scales fp32, want pow2");
    }
    HostScaled rows(DType::e4m3, {256, 256}, ScaleLayout::vec128);
    ops.quantize_rows({.src = x, .dst = rows});
    refused(rows, "src declares scales undeclared, want pow2");
    rows.format = ScaleFormat::pow2;
    transpose(rows);
    for (const float wrong : {1.5f * 0x1p-8f, -0x1p-8f, 0x1p-130f, INFINITY, NAN}) {
        const float right = std::exchange(rows.scales.as<float>()[256 + 200], wrong);
        refused(rows, "that of row 200 in columns 128 and following is");
        rows.scales.as<float>()[256 + 200] = right;
    }
    rows.scales.as<float>()[3] = 0.0f;
    transpose(rows);
}

// Every quantiser, and every operation that moves scales, keeps to what its output declares.
TEST(ScaleFormats, NoOperationWritesAnotherFormatThanTheTensorDeclares) {
    ReferenceOps ops;
    const RowGroups all;
    HostTensor x(DType::bf16, {128, 256}), weight(DType::f32, {1, 128, 256}), gamma(DType::f32, {256}),
        rstd(DType::f32, {128});
    for (const HostTensor* tensor : {&x, &weight, &gamma}) fill_normal(tensor->view(), 18);
    const auto declared = [](std::initializer_list<int64_t> shape, ScaleLayout layout, ScaleFormat format) {
        return HostScaled(DType::e4m3, shape, layout).declared(format);
    };
    using L = ScaleLayout;
    const ScaleFormat formats[] = {ScaleFormat::pow2, ScaleFormat::fp32};
    for (const ScaleFormat own : formats) {
        const ScaleFormat other = formats[own == ScaleFormat::pow2 ? 1 : 0];
        const HostScaled rows = declared({128, 256}, L::vec128, own),
                         half = declared({128, 128}, L::vec128, own),
                         columns = declared({256, 128}, L::vec128, own),
                         one = declared({128, 256}, L::tensor, own),
                         copy = declared({1, 128, 256}, L::block128, own),
                         from = declared({128, 256}, L::vec128, other);
        const auto write = [&](ScaleFormat format, int which) {
            switch (which) {
                case 0: return ops.quantize_rows({x, all, format, {}, rows});
                case 1: return ops.quantize_columns({x, all, format, {}, columns, {}, {}});
                case 2: return ops.quantize_dual({x, all, format, {}, rows, columns});
                case 3: return ops.quantize_tensor({x, all, format, one, {}});
                case 4: return ops.quantize_weight({weight, format, {}, copy, {}});
                case 5:
                    return ops.rms_norm_quantize(
                        {.x = x, .gamma = gamma, .scale_format = format, .rows = rows, .rstd = rstd});
                case 6: return ops.swiglu_quantize({x, {}, all, {}, format, half});
                case 7: return ops.transpose_requantize({rows, all, format, columns});
            }
        };
        for (int which = 0; which < 8; ++which) {
            SCOPED_TRACE(which);
            EXPECT_NO_THROW(write(own, which));
            EXPECT_THROW(write(other, which), Error);
            EXPECT_THROW(write(ScaleFormat::undeclared, which), Error);
        }
        const GroupsFixture groups({100, 0}, 128);
        EXPECT_NO_THROW(ops.pad_rows({rows, groups, groups, rows}));
        EXPECT_THROW(ops.pad_rows({from, groups, groups, rows}), Error);
    }
}

// ---- double quantisation
TEST(TransposeRequantize, EveryByteAgainstDequantiseThenBlocks) {
    ReferenceOps ops;
    const GroupsFixture groups({0, 1, 200, 128, 0, 129}, 128, 128);
    for (ScaleFormat format : {ScaleFormat::fp32, ScaleFormat::pow2})
        for (DType dtype : {DType::e4m3, DType::e5m2}) {
            const int64_t dim = 192, src_base = 256, base = 128, width = groups.capacity() + base;
            HostScaled src(dtype, {groups.capacity() + src_base, dim}, ScaleLayout::vec128);
            fill_rows(src, 14, -10, 2);
            if (format == ScaleFormat::fp32)
                fill(src.scales, [](int64_t i) {
                    return 1e-3 * (0.1 + random_uniform(15, 0, static_cast<uint64_t>(i)));
                });
            src.set_row_base(src_base);
            HostScaled dst(dtype, {dim, width}, ScaleLayout::vec128),
                want(dtype, {dim, width}, ScaleLayout::vec128);
            dst.set_row_base(base);
            want.set_row_base(base);
            for (int64_t g = 0; g < groups.num_groups(); ++g)
                for (int64_t first = groups.first(g); first < groups.end(g); first += 128)
                    for (int64_t col = 0; col < dim; ++col) {
                        const int64_t count =
                            std::clamp<int64_t>(groups.first(g) + groups.count(g) - first, 0, 128);
                        std::vector<float> values;
                        for (int64_t row = first; row < first + count; ++row)
                            values.push_back(static_cast<float>(code_value(row_code(src, row, col), dtype)) *
                                             row_scale(src, row, col));
                        ReferenceBlock block;
                        if (count > 0)
                            block = reference_block(values, dtype, ScaleLayout::vec128, format,
                                                    MxRounding::rceil);
                        block.data.resize(128, 0);
                        std::copy(block.data.begin(), block.data.end(),
                                  want.data.view().bytes_ptr() + col * width + base + first);
                        want.scales.as<float>()[(base + first) / 128 * dim + col] = block.scale;
                    }
            ops.transpose_requantize({.src = src, .groups = groups, .scale_format = format, .dst = dst});
            expect_same(dst, want);
        }
}

// NMSE of a transposed copy against the source values and, on its own, against the row-quantised values.
struct Errors {
    double total, extra;
};
Errors errors_of(ReferenceOps& ops, const HostTensor& x, const HostScaled& rows,
                 const HostScaled& transposed) {
    const int64_t m = x.view().dim(0), dim = x.view().dim(1);
    HostTensor row_values(DType::f32, {m, dim}), column_values(DType::f32, {dim, m});
    ops.dequantize({.src = rows, .dst = row_values});
    ops.dequantize({.src = transposed, .dst = column_values});
    std::vector<double> back(static_cast<std::size_t>(m * dim));
    for (int64_t r = 0; r < m; ++r)
        for (int64_t c = 0; c < dim; ++c)
            back[static_cast<std::size_t>(r * dim + c)] = column_values(c * m + r);
    return {nmse(back, to_doubles(x)), nmse(back, to_doubles(row_values))};
}

TEST(TransposeRequantize, DoubleQuantisationCostsWithFreeScalesOnly) {
    ReferenceOps ops;
    const int64_t m = 512, dim = 512;
    HostTensor x(DType::bf16, {m, dim});
    fill_normal(x, 16);
    auto measure = [&](ScaleFormat format, bool scaling_aware) {
        const HostScaled rows = HostScaled(DType::e4m3, {m, dim}, ScaleLayout::vec128).declared(format);
        HostScaled dst(DType::e4m3, {dim, m}, scaling_aware ? ScaleLayout::tile128 : ScaleLayout::vec128);
        ops.quantize_rows({.src = x, .scale_format = format, .dst = rows});
        if (scaling_aware) {
            ops.transpose_fp8({.src = rows, .dst = dst});
        } else {
            ops.transpose_requantize({.src = rows, .scale_format = format, .dst = dst});
        }
        return errors_of(ops, x, rows, dst);
    };
    const Errors free = measure(ScaleFormat::fp32, false), pow2 = measure(ScaleFormat::pow2, false),
                 aware = measure(ScaleFormat::pow2, true);
    // One E4M3 rounding of normal data costs 6.6e-4 (2.6 % in the root); a second one with other scales as
    // much again.
    EXPECT_GT(free.extra, 5.9e-4);
    EXPECT_LT(free.extra, 7.2e-4);
    EXPECT_GT(free.total, aware.total * 1.7);
    // powers of two only move exponents: what is lost is in subnormals
    EXPECT_LT(pow2.extra, 1e-12);
    EXPECT_LT(aware.extra, 1e-8);
    EXPECT_NEAR(pow2.total, aware.total, 1e-3 * aware.total);
}

}  // namespace
}  // namespace fp8flow
