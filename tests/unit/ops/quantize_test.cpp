// SPDX-License-Identifier: MIT
// The activation quantisers, byte for byte against block-by-block references: every layout, storage type,
// format and rounding; ragged and empty groups, pads, row bases, all 2^16 bf16 values.
#include "kernels/reference/reference_ops.h"
#include "tests/support/files.h"
#include "tests/support/fp8_reference.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

using namespace test;

struct Case {
    DType src = DType::bf16;
    DType dst = DType::e4m3;
    ScaleFormat format = ScaleFormat::pow2;
    MxRounding rounding = MxRounding::rceil;
};

std::vector<Case> all_cases() {
    std::vector<Case> cases;
    for (DType src : {DType::bf16, DType::f16, DType::f32})
        for (DType dst : {DType::e4m3, DType::e5m2})
            for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32})
                cases.push_back(
                    {src, dst, format, format == ScaleFormat::pow2 ? MxRounding::rceil : MxRounding::floor});
    return cases;
}

// Values over many octaves, with zeros, whole zero rows and columns, NaN and infinities of both signs.
void fill_hard(const TensorView& view, uint64_t seed) {
    const int64_t cols = view.cols();
    fill(view, [&](int64_t i) -> double {
        const uint64_t index = static_cast<uint64_t>(i);
        const auto words = random_words(seed, 7, index);
        const int64_t row = i / cols, col = i % cols;
        if (row % 13 == 5 || col % 41 == 17 || words[0] % 11 == 0) return 0.0;
        if (words[1] % 997 == 0) return std::nan("");
        if (words[1] % 1999 == 1) return words[0] % 2 ? INFINITY : -INFINITY;
        return std::ldexp(random_normal(seed, 8, index),
                          static_cast<int>(words[2] % 12) - 6 - static_cast<int>(row % 5) * 3);
    });
}

int64_t block_of(ScaleLayout layout, int64_t whole) {
    if (layout == ScaleLayout::mx32) return 32;
    return layout == ScaleLayout::vec128 || layout == ScaleLayout::vec128_wire ? 128 : whole;
}

void put_scale(const HostTensor& scales, int64_t index, const ReferenceBlock& block) {
    if (scales.view().dtype == DType::e8m0) {
        scales.view().bytes_ptr()[index] = block.byte;
    } else {
        scales.as<float>()[index] = block.scale;
    }
}

struct Ragged {
    std::vector<std::array<int64_t, 3>> groups;  // first, count, end
};
Ragged ranges_of(const GroupsFixture& fixture) {
    Ragged ragged;
    for (int64_t g = 0; g < fixture.num_groups(); ++g)
        ragged.groups.push_back({fixture.first(g), fixture.count(g), fixture.end(g)});
    return ragged;
}

// What quantize_rows must leave in a poisoned dst.
void expect_rows(const TensorView& src, const Ragged& ragged, const Case& c, HostScaled& want) {
    const int64_t cols = src.cols(), length = block_of(want.layout, cols);
    const int64_t src_base = src.row_base ? *src.row_base : 0,
                  base = want.data.view().row_base ? *want.data.view().row_base : 0;
    const int64_t capacity = want.data.view().dim(0), blocks = ceil_div(cols, length);
    for (const auto& [first, count, end] : ragged.groups)
        for (int64_t row = first; row < end; ++row)
            for (int64_t b = 0; b < blocks; ++b) {
                std::vector<float> values;
                for (int64_t col = b * length; col < std::min(cols, (b + 1) * length); ++col)
                    values.push_back(static_cast<float>(get(src, (src_base + row) * cols + col)));
                ReferenceBlock block = reference_block(values, c.dst, want.layout, c.format, c.rounding);
                if (row >= first + count) block = {std::vector<uint8_t>(values.size(), 0), 0.0f, 0};
                std::copy(block.data.begin(), block.data.end(),
                          want.data.view().bytes_ptr() + (base + row) * cols + b * length);
                int64_t index = b * capacity + base + row;  // vec128, mx32
                if (want.layout == ScaleLayout::row) index = base + row;
                if (want.layout == ScaleLayout::vec128_wire) index = (base + row) * blocks + b;
                put_scale(want.scales, index, block);
            }
}

// The same for quantize_columns.
void expect_columns(const TensorView& src, const Ragged& ragged, const Case& c, HostScaled& want) {
    const int64_t cols = src.cols(), stride = want.data.view().cols();
    const int64_t src_base = src.row_base ? *src.row_base : 0,
                  base = want.data.view().row_base ? *want.data.view().row_base : 0;
    for (std::size_t g = 0; g < ragged.groups.size(); ++g) {
        const auto [first, count, end] = ragged.groups[g];
        const int64_t length = block_of(want.layout, std::max<int64_t>(end - first, 1));
        const int64_t blocks = want.layout == ScaleLayout::group_row ? 1 : ceil_div(end - first, length);
        for (int64_t b = 0; b < blocks; ++b)
            for (int64_t col = 0; col < cols; ++col) {
                std::vector<float> values;
                for (int64_t row = first + b * length;
                     row < std::min(first + count, first + (b + 1) * length); ++row)
                    values.push_back(static_cast<float>(get(src, (src_base + row) * cols + col)));
                ReferenceBlock block;
                if (!values.empty())
                    block = reference_block(values, c.dst, want.layout, c.format, c.rounding);
                for (int64_t row = first + b * length; row < std::min(end, first + (b + 1) * length); ++row) {
                    const std::size_t i = static_cast<std::size_t>(row - first - b * length);
                    want.data.view().bytes_ptr()[col * stride + base + row] =
                        i < block.data.size() ? block.data[i] : 0;
                }
                const int64_t index = want.layout == ScaleLayout::group_row ? static_cast<int64_t>(g)
                                                                            : (base + first) / length + b;
                put_scale(want.scales, index * cols + col, block);
            }
    }
}

constexpr ScaleLayout kRowLayouts[] = {ScaleLayout::vec128_wire, ScaleLayout::vec128, ScaleLayout::row,
                                       ScaleLayout::mx32};
constexpr ScaleLayout kColumnLayouts[] = {ScaleLayout::vec128, ScaleLayout::group_row, ScaleLayout::mx32};

DType wire_dtype(const Case& c) { return c.format == ScaleFormat::pow2 ? DType::e8m0 : DType::f32; }

// All rows of src, without groups.
void check_rows(const HostTensor& src, const Case& c, ScaleLayout layout, DType scales) {
    const int64_t rows = src.view().dim(0), cols = src.view().dim(1);
    HostScaled dst(c.dst, {rows, cols}, layout, 0, scales), want(c.dst, {rows, cols}, layout, 0, scales);
    expect_rows(src, {{{0, rows, rows}}}, c, want);
    ReferenceOps().quantize_rows(
        {.src = src, .scale_format = c.format, .mx_rounding = c.rounding, .dst = dst});
    expect_same(dst, want);
}

void check_columns(const HostTensor& src, const Case& c, ScaleLayout layout) {
    const int64_t rows = src.view().dim(0), cols = src.view().dim(1), width = round_up(rows, 128);
    HostScaled dst(c.dst, {cols, width}, layout, 1), want(c.dst, {cols, width}, layout, 1);
    expect_columns(src, {{{0, rows, width}}}, c, want);
    ReferenceOps().quantize_columns(
        {.src = src, .scale_format = c.format, .mx_rounding = c.rounding, .dst = dst});
    expect_same(dst, want);
}

TEST(QuantizeRows, EveryLayoutAndType) {
    for (const Case& c : all_cases())
        for (ScaleLayout layout : kRowLayouts)
            for (int64_t cols : {256, 320, 8}) {
                HostTensor src(c.src, {37, cols});
                fill_hard(src, 1);
                check_rows(src, c, layout, wire_dtype(c));
            }
}

TEST(QuantizeRows, WireScalesOfPowersOfTwoMayBeFloats) {
    HostTensor src(DType::bf16, {9, 256});
    fill_hard(src, 2);
    check_rows(src, {}, ScaleLayout::vec128_wire, DType::f32);
}

TEST(QuantizeRows, RaggedGroupsPadsAndRowBase) {
    ReferenceOps ops;
    for (int64_t alignment : {1, 16, 128}) {
        const GroupsFixture groups({5, 0, 129, 1, 0, 64}, alignment, 40);
        for (ScaleLayout layout : kRowLayouts) {
            const int64_t cols = 256, src_base = 128, base = 256;
            HostTensor src(DType::bf16, {groups.capacity() + src_base, cols});
            fill_hard(src, 3);
            src.set_row_base(src_base);
            for (int64_t row = 0; row < groups.total(); ++row)  // pads are not read
                for (int64_t col = 0; col < cols && groups.is_pad(row); ++col)
                    src.as<Bf16>()[(src_base + row) * cols + col] = {0x7FFF};
            HostScaled dst(DType::e4m3, {groups.capacity() + base, cols}, layout),
                want(DType::e4m3, {groups.capacity() + base, cols}, layout);
            dst.set_row_base(base);
            want.set_row_base(base);
            expect_rows(src, ranges_of(groups), {}, want);
            ops.quantize_rows({.src = src, .groups = groups, .dst = dst});
            expect_same(dst, want);
        }
    }
}

// Every bf16 value: blocks of neighbours (one octave each), and blocks that mix all octaves.
TEST(QuantizeRows, AllBf16Values) {
    for (const Case& c : all_cases()) {
        if (c.src != DType::bf16) continue;
        for (int stride : {1, 32771}) {
            HostTensor src(DType::bf16, {512, 128});
            for (int i = 0; i < 65536; ++i) src.as<Bf16>()[i] = {static_cast<uint16_t>(int64_t{i} * stride)};
            for (ScaleLayout layout : kRowLayouts) check_rows(src, c, layout, wire_dtype(c));
            for (ScaleLayout layout : kColumnLayouts) check_columns(src, c, layout);
        }
    }
}

TEST(QuantizeColumns, EveryLayoutAndType) {
    for (const Case& c : all_cases())
        for (ScaleLayout layout : kColumnLayouts)
            for (int64_t rows : {1, 200, 256}) {  // two end within a block of 128: pads
                HostTensor src(c.src, {rows, 70});
                fill_hard(src, 4);
                check_columns(src, c, layout);
            }
}

// torchao#4113: groups of any size (longer than any tile too), empty ones, one scale per group and column;
// both operands of a wgrad at once.
TEST(QuantizeColumns, JaggedGroupsOneScalePerGroupAndColumnInTheDualForm) {
    ReferenceOps ops;
    for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
        const GroupsFixture groups({0, 300, 1, 0, 17, 128, 513, 0}, 16, 24);
        const Case c = {DType::bf16, DType::e4m3, format, MxRounding::rceil};
        const int64_t base = 128, m = groups.capacity() + base;
        HostTensor src(DType::bf16, {m, 96}), src2(DType::bf16, {m, 130});
        fill_hard(src, 5);
        fill_hard(src2, 6);
        src.set_row_base(base);
        src2.set_row_base(base);
        const ScaleLayout layout = ScaleLayout::group_row;
        const int64_t n = groups.num_groups();
        HostScaled dst(c.dst, {96, m}, layout, n), want(c.dst, {96, m}, layout, n),
            dst2(c.dst, {130, m}, layout, n), want2(c.dst, {130, m}, layout, n);
        for (HostScaled* t : {&dst, &want, &dst2, &want2}) t->set_row_base(base);
        expect_columns(src, ranges_of(groups), c, want);
        expect_columns(src2, ranges_of(groups), c, want2);
        ops.quantize_columns(
            {.src = src, .groups = groups, .scale_format = format, .dst = dst, .src2 = src2, .dst2 = dst2});
        expect_same(dst, want);
        expect_same(dst2, want2);
    }
}

TEST(QuantizeColumns, RaggedGroupsPadsAndRowBase) {
    ReferenceOps ops;
    const GroupsFixture groups({5, 0, 129, 128, 1, 0, 300}, 128, 128);
    for (ScaleLayout layout : kColumnLayouts) {
        const int64_t cols = 72, src_base = 128, base = 384, n = groups.num_groups();
        HostTensor src(DType::bf16, {groups.capacity() + src_base, cols});
        fill_hard(src, 11);
        src.set_row_base(src_base);
        for (int64_t row = 0; row < groups.total(); ++row)  // pads are not read
            for (int64_t col = 0; col < cols && groups.is_pad(row); ++col)
                src.as<Bf16>()[(src_base + row) * cols + col] = {0x7F00};
        HostScaled dst(DType::e4m3, {cols, groups.capacity() + base}, layout, n);
        HostScaled want(DType::e4m3, {cols, groups.capacity() + base}, layout, n);
        dst.set_row_base(base);
        want.set_row_base(base);
        expect_columns(src, ranges_of(groups), {}, want);
        ops.quantize_columns({.src = src, .groups = groups, .dst = dst});
        expect_same(dst, want);
    }
}

TEST(QuantizeDual, EqualsRowsAndColumnsAndIsOneCast) {
    ReferenceOps ops;
    const GroupsFixture groups({130, 0, 1, 256, 127}, 128, 128);
    HostTensor src(DType::bf16, {groups.capacity(), 256});
    fill_hard(src, 9);
    const std::pair<ScaleLayout, ScaleLayout> layouts[] = {{ScaleLayout::vec128, ScaleLayout::vec128},
                                                           {ScaleLayout::row, ScaleLayout::group_row},
                                                           {ScaleLayout::mx32, ScaleLayout::mx32}};
    for (const auto& [row_layout, column_layout] : layouts)
        for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
            const Case c = {DType::bf16, DType::e4m3, format, MxRounding::floor};
            HostScaled rows(c.dst, {groups.capacity(), 256}, row_layout),
                want_rows(c.dst, {groups.capacity(), 256}, row_layout);
            HostScaled columns(c.dst, {256, groups.capacity()}, column_layout, 5),
                want_columns(c.dst, {256, groups.capacity()}, column_layout, 5);
            expect_rows(src, ranges_of(groups), c, want_rows);
            expect_columns(src, ranges_of(groups), c, want_columns);
            ops.reset_counts();
            ops.quantize_dual({.src = src,
                               .groups = groups,
                               .scale_format = format,
                               .mx_rounding = c.rounding,
                               .rows = rows,
                               .columns = columns});
            expect_same(rows, want_rows);
            expect_same(columns, want_columns);
            EXPECT_EQ(ops.num_casts(), 1);
        }
}

// fp8_rowwise: a backend may take the column kernels instead of its own form of both, for any groups.
TEST(QuantizeDual, RowwiseHasTheBitsOfRowsThenColumns) {
    ReferenceOps ops;
    for (const ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32})
        for (const DType code : {DType::e4m3, DType::e5m2}) {
            const GroupsFixture groups({0, 300, 1, 0, 17, 128, 513, 0}, 16, 32);
            const int64_t src_base = 64, base = 128, m = groups.capacity(), n = groups.num_groups(),
                          cols = 160;
            HostTensor src(DType::bf16, {m + src_base, cols});
            fill_hard(src, 21);
            src.set_row_base(src_base);
            HostScaled rows(code, {m + base, cols}, ScaleLayout::row),
                rows_alone(code, {m + base, cols}, ScaleLayout::row),
                columns(code, {cols, m + base}, ScaleLayout::group_row, n),
                columns_alone(code, {cols, m + base}, ScaleLayout::group_row, n);
            for (HostScaled* t : {&rows, &rows_alone, &columns, &columns_alone}) t->set_row_base(base);
            ops.quantize_dual(
                {.src = src, .groups = groups, .scale_format = format, .rows = rows, .columns = columns});
            ops.quantize_rows({.src = src, .groups = groups, .scale_format = format, .dst = rows_alone});
            ops.quantize_columns(
                {.src = src, .groups = groups, .scale_format = format, .dst = columns_alone});
            expect_same(rows, rows_alone);
            expect_same(columns, columns_alone);
        }
}

TEST(QuantizeTensor, OneScaleInBothOrientations) {
    ReferenceOps ops;
    const GroupsFixture groups({30, 0, 140, 1}, 16, 16);
    const int64_t cols = 200, base = 128, m = groups.capacity() + base;
    for (const Case& c : all_cases())
        for (bool finite : {true, false}) {
            HostTensor src(c.src, {m, cols});
            fill_hard(src, 10);
            if (finite) fill(src, [&](int64_t i) { return std::isfinite(src(i)) ? src(i) : 1.0; });
            src.set_row_base(base);
            std::vector<float> valid;
            for (int64_t row = 0; row < groups.total(); ++row)
                for (int64_t col = 0; col < cols; ++col) {
                    const int64_t i = (base + row) * cols + col;
                    if (groups.is_pad(row)) {
                        set(src, i, 30000.0);  // must not count
                    } else {
                        valid.push_back(static_cast<float>(src(i)));
                    }
                }
            const ReferenceBlock block =
                reference_block(valid, c.dst, ScaleLayout::tensor, c.format, c.rounding);
            HostScaled rows(c.dst, {m, cols}, ScaleLayout::tensor),
                transposed(c.dst, {cols, m}, ScaleLayout::tensor);
            HostScaled want_rows(c.dst, {m, cols}, ScaleLayout::tensor),
                want_transposed(c.dst, {cols, m}, ScaleLayout::tensor);
            rows.set_row_base(base);
            transposed.set_row_base(base);
            want_rows.scales.as<float>()[0] = want_transposed.scales.as<float>()[0] = block.scale;
            std::size_t next = 0;
            for (int64_t row = 0; row < groups.total(); ++row)
                for (int64_t col = 0; col < cols; ++col) {
                    const uint8_t code = groups.is_pad(row) ? 0 : block.data[next++];
                    want_rows.data.view().bytes_ptr()[(base + row) * cols + col] = code;
                    want_transposed.data.view().bytes_ptr()[col * m + base + row] = code;
                }
            ops.quantize_tensor({.src = src,
                                 .groups = groups,
                                 .scale_format = c.format,
                                 .rows = rows,
                                 .transposed = transposed});
            expect_same(rows, want_rows);
            expect_same(transposed, want_transposed);
            rows.data.poison();
            ops.quantize_rows({.src = src, .groups = groups, .scale_format = c.format, .dst = rows});
            expect_same(rows, want_rows);
        }
}

TEST(ClipFp8, RowsOfGroupsWithTheirPads) {
    const GroupsFixture groups({5, 0, 20}, 16);
    for (const DType dtype : {DType::e4m3, DType::e5m2}) {
        HostTensor rows(dtype, {groups.capacity() + 32, 256});
        rows.set_row_base(32);
        for (int64_t i = 0; i < rows.numel(); ++i) rows.view().bytes_ptr()[i] = static_cast<uint8_t>(i);
        std::vector<uint8_t> want = rows.bytes();
        const float limit = fp8_max(dtype) / 2;
        for (int64_t i = 32 * 256; i < (32 + groups.total()) * 256; ++i) {
            uint8_t& code = want[static_cast<size_t>(i)];
            const float value = fp8_to_float(code, dtype);
            if (std::isfinite(value) && std::abs(value) > limit)
                code = to_fp8(std::copysign(limit, value), dtype);
        }
        ReferenceOps().clip_fp8({.groups = groups, .share = 0.5f, .rows = rows});
        EXPECT_EQ(rows.bytes(), want) << name_of(dtype);
    }
}

TEST(Quantize, NothingToDo) {
    ReferenceOps ops;
    HostTensor src(DType::bf16, {0, 256});
    HostScaled rows(DType::e4m3, {0, 256}, ScaleLayout::vec128),
        columns(DType::e4m3, {256, 0}, ScaleLayout::vec128);
    ops.quantize_dual({.src = src, .rows = rows, .columns = columns});
    HostScaled whole(DType::e4m3, {0, 256}, ScaleLayout::tensor);
    ops.quantize_tensor({.src = src, .rows = whole});
    EXPECT_GT(whole.scales.as<float>()[0], 0.0f);
    EXPECT_LT(whole.scales.as<float>()[0], 1e-30f);
}

// Layouts and shapes that do not fit are our bugs and are named, not computed.
TEST(Quantize, RefusesWhatDoesNotFit) {
    ReferenceOps ops;
    HostTensor src(DType::bf16, {128, 256});
    src.zero();
    const auto refused = [&](const std::function<void()>& call, const std::string& reason) {
        expect_contains(error_of(ExitCode::internal, call), reason);
    };
    const HostScaled wire(DType::e4m3, {128, 256}, ScaleLayout::vec128_wire);
    refused([&] { ops.quantize_rows({.src = src, .scale_format = ScaleFormat::fp32, .dst = wire}); },
            "scale_format fp32");
    const HostScaled short_rows(DType::e4m3, {100, 256}, ScaleLayout::vec128);
    refused([&] { ops.quantize_rows({.src = src, .dst = short_rows}); }, "128 rows");
    const HostScaled tiles(DType::e4m3, {128, 256}, ScaleLayout::tile128);
    refused([&] { ops.quantize_rows({.src = src, .dst = tiles}); }, "tile128");
    const GroupsFixture groups({50, 60}, 16);
    const HostScaled columns(DType::e4m3, {256, 128}, ScaleLayout::vec128);
    refused([&] { ops.quantize_columns({.src = src, .groups = groups, .dst = columns}); },
            "multiples of 128, not 16 (moe_row_alignment)");
    const HostScaled rows =
                         HostScaled(DType::e4m3, {128, 256}, ScaleLayout::vec128).declared(ScaleFormat::pow2),
                     half(DType::e5m2, {256, 128}, ScaleLayout::tile128);
    refused([&] { ops.transpose_fp8({.src = rows, .dst = half}); }, "e5m2");
}

TEST(Quantize, CountsTheBytesOfItsOwnRows) {
    ReferenceOps ops;
    const GroupsFixture groups({100, 28}, 128);  // capacity 256
    HostTensor src(DType::bf16, {1024, 256});    // of a larger shared buffer
    src.zero();
    HostScaled dst(DType::e4m3, {2048, 256}, ScaleLayout::vec128);
    ops.quantize_rows({.src = src, .groups = groups, .dst = dst});
    EXPECT_EQ(ops.counts().at("quantize_rows").calls, 1);
    EXPECT_DOUBLE_EQ(ops.counts().at("quantize_rows").bytes, 256.0 * (2 * 256 + 256 + 2 * 4));
}

}  // namespace
}  // namespace fp8flow
