// SPDX-License-Identifier: MIT
// The quantisers and their inverse on the GPU against the reference, bit by bit: every layout, dtype and
// scale format; pads, empty groups, row bases, ragged shapes, zeros, infinities and NaN.
#include "kernels/hopper/device/view.h"
#include "tests/support/parity.h"

#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;

struct Case {
    std::vector<int64_t> counts;  // empty: no groups
    int64_t alignment, rows, cols;
    DType dtype;
    int64_t base, extra;  // extra: additional columns of the transposed copy (no groups) or rows of capacity
};
const std::vector<Case>& cases() {
    static const std::vector<Case> all = {
        {{}, 1, 0, 128, DType::bf16, 0, 0},
        {{}, 1, 1, 128, DType::bf16, 0, 31},
        {{}, 1, 127, 384, DType::f32, 0, 0},
        {{}, 1, 128, 256, DType::f16, 0, 128},
        {{}, 1, 129, 100, DType::bf16, 0, 0},
        {{}, 1, 40, 7, DType::f32, 0, 9},
        {{}, 1, 130, 1152, DType::bf16, 0, 0},
        {{}, 1, 3, 8192, DType::bf16, 0, 0},
        {{}, 1, 19, 2432, DType::f16, 0, 0},
        {{}, 1, 600, 136, DType::bf16, 0, 0},
        {{0, 1, 0, 127, 128, 129, 0}, 128, 0, 384, DType::bf16, 0, 128},
        {{700, 3, 0}, 128, 0, 136, DType::bf16, 256, 0},
        {{0, 130, 0, 1}, 128, 0, 1280, DType::bf16, 128, 0},
        {{0, 0}, 128, 0, 128, DType::bf16, 128, 128},
        {{33, 0, 64, 1}, 32, 0, 200, DType::f32, 64, 5},
        {{5, 0, 131, 1}, 1, 0, 256, DType::bf16, 3, 2},
    };
    return all;
}
std::vector<Case> cases_here() {
    std::vector<Case> here;
    for (const Case& c : cases()) {
        const int64_t rows = std::accumulate(c.counts.begin(), c.counts.end(), c.rows);
        if (!too_large_here(2 * rows * c.cols)) here.push_back(c);
    }
    return here;
}
bool fits(const Case& c, ScaleLayout layout) {
    const int64_t block = layout == L::vec128 ? kBlock : layout == L::mx32 ? kMxBlock : 1;
    return c.counts.empty() || c.alignment % block == 0;
}
std::string text(const Case& c) {
    return std::to_string(c.counts.size()) + " groups aligned to " + std::to_string(c.alignment) + ", " +
           std::to_string(c.rows) + " rows of " + std::to_string(c.cols) + " " + name_of(c.dtype) +
           ", base " + std::to_string(c.base);
}

// Values over many binades with blocks of zeros; with `special` also an infinity and a NaN.
void fill_values(const TensorView& view, uint64_t seed, bool special) {
    fill(view, [&](int64_t i) {
        const uint64_t block = static_cast<uint64_t>(i / 512);
        const int exponent = static_cast<int>(random_words(seed, 1, block)[0] % 16) - 10;
        return block % 7 == 3 ? 0.0 : std::ldexp(random_normal(seed, 0, static_cast<uint64_t>(i)), exponent);
    });
    if (!special || view.numel() < 100) return;
    set(view, view.numel() / 2, -std::numeric_limits<double>::infinity());
    set(view, view.numel() / 3, std::numeric_limits<double>::quiet_NaN());
}

struct Tensors {
    GroupsFixture groups;
    RowGroups row_groups;
    HostTensor src;
    int64_t rows, columns;  // of the buffers

    explicit Tensors(const Case& c, bool special = true) : groups(c.counts, c.alignment, c.extra) {
        const bool grouped = !c.counts.empty();
        rows = grouped ? c.base + groups.capacity() + 7 : c.rows;
        columns = grouped ? rows : c.rows + c.extra;
        if (grouped) row_groups = groups;
        src = HostTensor(c.dtype, {rows, c.cols});
        fill_values(src, 11, special);
        if (grouped) src.set_row_base(c.base);
    }
    HostScaled by_rows(const Case& c, DType dtype, L layout, DType scale_dtype = DType::e8m0) const {
        return based(c, HostScaled(dtype, {rows, c.cols}, layout, 0, scale_dtype));
    }
    HostScaled by_columns(const Case& c, DType dtype, L layout) const {
        return based(c,
                     HostScaled(dtype, {c.cols, columns}, layout, std::max<int64_t>(1, groups.num_groups())));
    }
    static HostScaled based(const Case& c, HostScaled t) {
        if (!c.counts.empty()) t.set_row_base(c.base);
        return t;
    }
};

struct Formats {
    DType dtype;
    ScaleFormat format;
    MxRounding rounding;
};
const Formats kFormats[] = {{DType::e4m3, ScaleFormat::pow2, MxRounding::rceil},
                            {DType::e5m2, ScaleFormat::fp32, MxRounding::floor}};

TEST(QuantizeParity, Rows) {
    for (const Case& c : cases_here())
        for (const Formats& f : kFormats)
            for (const L layout : {L::vec128_wire, L::vec128, L::row, L::mx32, L::tensor}) {
                SCOPED_TRACE(text(c) + " " + name_of(layout));
                for (const int sms : {0, 1}) {  // 1: a CTA takes many rows
                    Parity p;
                    const Tensors t(c);
                    const HostScaled dst = t.by_rows(
                        c, f.dtype, layout, f.format == ScaleFormat::fp32 ? DType::f32 : DType::e8m0);
                    p.check(op::QuantizeRows{.src = t.src,
                                             .groups = t.row_groups,
                                             .scale_format = f.format,
                                             .mx_rounding = f.rounding,
                                             .dst = dst},
                            Launch{.sm_limit = sms});
                }
            }
}

TEST(QuantizeParity, Columns) {
    for (const Case& c : cases_here())
        for (const Formats& f : kFormats)
            for (const L layout : {L::vec128, L::group_row, L::mx32}) {
                if (!fits(c, layout)) continue;
                SCOPED_TRACE(text(c) + " " + name_of(layout));
                const Launch launch{.sm_limit = f.dtype == DType::e5m2 ? 1 : 0};  // 1: a CTA takes many tiles
                Parity p;
                const Tensors t(c);
                const Case other{c.counts, c.alignment, c.rows, 144, c.dtype, c.base, c.extra};
                const Tensors second(other);
                const HostScaled dst = t.by_columns(c, f.dtype, layout),
                                 dst2 = second.by_columns(other, f.dtype, layout);
                p.check(op::QuantizeColumns{.src = t.src,
                                            .groups = t.row_groups,
                                            .scale_format = f.format,
                                            .mx_rounding = f.rounding,
                                            .dst = dst,
                                            .src2 = second.src,
                                            .dst2 = dst2},
                        launch);
            }
}

void expect_group_columns(const Case& c, const Formats& f) {
    SCOPED_TRACE(text(c));
    const int64_t rows = std::accumulate(c.counts.begin(), c.counts.end(), c.rows);
    if (too_large_here(rows * c.cols)) return;
    Parity p;
    const Tensors t(c);
    const HostScaled dst = t.by_columns(c, f.dtype, L::group_row);
    p.check(op::QuantizeColumns{.src = t.src,
                                .groups = t.row_groups,
                                .scale_format = f.format,
                                .mx_rounding = f.rounding,
                                .dst = dst,
                                .src2 = {},
                                .dst2 = {}},
            Launch{.sm_limit = f.dtype == DType::e5m2 ? 2 : 0});
}

// Groups of no rows, of a part of a tile and of many tiles, starting anywhere in a tile. On two SMs (e5m2)
// the larger ones do not fit on chip and are read twice.
TEST(QuantizeParity, GroupColumns) {
    for (const int64_t alignment : {1, 16, 128})
        for (const Formats& f : kFormats)
            expect_group_columns(
                {{1300, 0, 3, 1152, 1, 129, 16, 2305, 40, 1}, alignment, 0, 1280, DType::bf16, 128, 5}, f);
}
TEST(QuantizeParity, GroupColumnsOfFewGroups) {
    for (const Formats& f : kFormats) {
        expect_group_columns({{2500}, 16, 0, 640, DType::bf16, 48, 0}, f);
        expect_group_columns({{1700, 0, 2100, 3}, 1, 0, 192, DType::bf16, 3, 2}, f);
        expect_group_columns({{}, 1, 1333, 448, DType::bf16, 0, 51}, f);
        expect_group_columns({{0, 0}, 16, 0, 128, DType::bf16, 16, 0}, f);
        expect_group_columns({{20001}, 16, 0, 160, DType::bf16, 16, 0}, f);
        expect_group_columns({{1500, 40, 33}, 1, 0, 2880, DType::bf16, 7, 0}, f);
    }
}
// More groups than a warp has lanes, and columns that do not fill a tile.
TEST(QuantizeParity, GroupColumnsOfManyGroups) {
    std::vector<int64_t> counts(75);
    for (std::size_t g = 0; g < counts.size(); ++g)
        counts[g] = g % 5 == 3 ? 0 : static_cast<int64_t>(g) * 37 % 300;
    for (const int64_t alignment : {1, 16})
        for (const Formats& f : kFormats)
            for (const int64_t cols : {328, 320})  // group_columns.cu; small_groups.cu
                expect_group_columns({counts, alignment, 0, cols, DType::bf16, 48, 5}, f);
    std::vector<int64_t> small(210);
    for (std::size_t g = 0; g < small.size(); ++g) small[g] = static_cast<int64_t>(g % 7);
    for (const Formats& f : kFormats)
        for (const int64_t cols : {64, 72}) expect_group_columns({small, 1, 0, cols, DType::bf16, 2, 1}, f);
}
// Column blocks of 64, 32 and 16 columns, chosen by the rows of the groups, the last ones narrower; one group
// that is read twice among many small ones.
TEST(QuantizeParity, GroupColumnsOfEveryWidth) {
    std::vector<int64_t> outlier(101, 150), large(20, 3);
    outlier[40] = 1850;
    large[2] = 4000;
    large[11] = 3790;
    for (const Formats& f : kFormats) {
        expect_group_columns({{1750, 1700, 1500, 1, 1650, 128}, 16, 0, 2176, DType::bf16, 16, 0}, f);
        for (const int64_t cols : {136, 160})
            expect_group_columns({outlier, 1, 0, cols, DType::bf16, 9, 0}, f);
        expect_group_columns({large, 16, 0, 648, DType::bf16, 32, 0}, f);
    }
}
// More rows than all SMs hold: maxima are published first, values encoded after a second read.
TEST(QuantizeParity, GroupColumnsReadTwice) {
    for (const Formats& f : kFormats) expect_group_columns({{28000, 70}, 16, 0, 192, DType::bf16, 48, 0}, f);
}

TEST(QuantizeParity, Dual) {
    for (const Case& c : cases_here())
        for (const Formats& f : kFormats)
            for (const L row_layout : {L::vec128, L::row, L::mx32})
                for (const L column_layout : {L::vec128, L::group_row, L::mx32}) {
                    if (!fits(c, column_layout)) continue;
                    SCOPED_TRACE(text(c) + " " + name_of(row_layout) + " " + name_of(column_layout));
                    const Launch launch{.sm_limit = f.dtype == DType::e4m3 ? 1 : 0};
                    Parity p;
                    const Tensors t(c);
                    const HostScaled rows = t.by_rows(c, f.dtype, row_layout),
                                     columns = t.by_columns(c, f.dtype, column_layout);
                    p.check(op::QuantizeDual{.src = t.src,
                                             .groups = t.row_groups,
                                             .scale_format = f.format,
                                             .mx_rounding = f.rounding,
                                             .rows = rows,
                                             .columns = columns},
                            launch);
                }
}

TEST(QuantizeParity, Tensor) {
    for (const Case& c : cases_here())
        for (const Formats& f : kFormats)
            for (const bool special : {false, true}) {
                SCOPED_TRACE(text(c));
                Parity p;
                const Tensors t(c, special);
                const HostScaled rows = t.by_rows(c, f.dtype, L::tensor),
                                 columns = t.by_columns(c, f.dtype, L::tensor);
                p.check(op::QuantizeTensor{.src = t.src,
                                           .groups = t.row_groups,
                                           .scale_format = f.format,
                                           .rows = rows,
                                           .transposed = columns});
            }
}

struct Weight {
    int64_t experts, rows, cols;  // experts 0: rank 2
    DType dtype;
};
const Weight kWeights[] = {{0, 128, 128, DType::f32},  {1, 1, 1, DType::f32},     {3, 256, 384, DType::bf16},
                           {0, 200, 1000, DType::f32}, {2, 130, 72, DType::bf16}, {5, 64, 2048, DType::f32},
                           {2, 256, 384, DType::f32},  {0, 520, 136, DType::bf16}};

HostTensor weight_like(const Weight& w, DType dtype, bool transposed) {
    const int64_t n = transposed ? w.cols : w.rows, k = transposed ? w.rows : w.cols;
    return w.experts > 0 ? HostTensor(dtype, {w.experts, n, k}) : HostTensor(dtype, {n, k});
}
HostScaled weight_copy(const Weight& w, DType dtype, L layout, bool transposed) {
    const int64_t n = transposed ? w.cols : w.rows, k = transposed ? w.rows : w.cols;
    return w.experts > 0 ? HostScaled(dtype, {w.experts, n, k}, layout) : HostScaled(dtype, {n, k}, layout);
}

TEST(QuantizeParity, Weight) {
    for (const Weight& w : kWeights)
        for (const Formats& f : kFormats)
            for (const L layout : {L::block128, L::row, L::tensor, L::mx32})
                for (const int which : {1, 2, 3}) {
                    SCOPED_TRACE(std::to_string(w.experts) + " experts " + std::to_string(w.rows) + " x " +
                                 std::to_string(w.cols) + " " + name_of(layout));
                    Parity p;
                    const HostTensor src = weight_like(w, w.dtype, false);
                    fill_values(src, 21, false);
                    const HostScaled fprop = weight_copy(w, f.dtype, layout, false),
                                     dgrad = weight_copy(w, f.dtype, layout, true);
                    const ScaledTensor first = which & 1 ? ScaledTensor(fprop) : ScaledTensor{},
                                       second = which & 2 ? ScaledTensor(dgrad) : ScaledTensor{};
                    p.check(op::QuantizeWeight{.src = src,
                                               .scale_format = f.format,
                                               .mx_rounding = f.rounding,
                                               .fprop = first,
                                               .dgrad = second},
                            Launch{.sm_limit = f.dtype == DType::e5m2 ? 1 : 0});
                    if (!first) continue;
                    const HostTensor back = weight_like(w, DType::bf16, false);
                    p.check(op::Dequantize{.src = first, .groups = {}, .dst = back});
                }
}

// Random finite FP8 values and scales; the routed dimension is the columns for tile128 and group_row.
TEST(QuantizeParity, Dequantize) {
    for (const Case& c : cases_here())
        for (const DType to : {DType::f32, DType::bf16, DType::f16})
            for (const L layout :
                 {L::tensor, L::row, L::vec128_wire, L::vec128, L::mx32, L::tile128, L::group_row}) {
                SCOPED_TRACE(text(c) + " " + name_of(layout) + " to " + name_of(to));
                const bool by_columns = layout == L::tile128 || layout == L::group_row;
                if (by_columns && c.alignment % (layout == L::tile128 ? kBlock : 1) != 0 && !c.counts.empty())
                    continue;
                Parity p;
                const Tensors t(c, false);
                const HostScaled src =
                    by_columns ? t.by_columns(c, DType::e5m2, layout) : t.by_rows(c, DType::e4m3, layout);
                fill_normal(src.data, 31, 8.0);
                fill_pow2(src.scales, 32, -9, 0);
                HostTensor dst(to, src.data.view().dims, 2);
                if (!c.counts.empty()) dst.set_row_base(c.base);
                p.check(op::Dequantize{.src = src, .groups = t.row_groups, .dst = dst});
            }
}

// Counts and extremes are equal; energies are added in another order. Twice: the second call adds up.
TEST(QuantizeParity, MeasureQuantization) {
    for (const Case& c : cases_here())
        for (const L layout : {L::tensor, L::row, L::vec128_wire, L::vec128, L::mx32, L::tile128}) {
            const bool transposed = layout == L::tile128;
            if (transposed && c.alignment % kBlock != 0 && !c.counts.empty()) continue;
            SCOPED_TRACE(text(c) + " " + name_of(layout));
            Parity p;
            const Tensors t(c, false);
            const HostScaled rows = t.by_rows(c, DType::e4m3, transposed ? L::vec128 : layout),
                             copy = t.by_columns(c, DType::e4m3, L::tile128);
            for (const HostScaled* one : {&rows, &copy}) {
                fill_normal(one->data, 31, 200.0);
                fill_pow2(one->scales, 32, -9, 0);
            }
            const HostTensor sums(DType::f64, {op::kQuantizationWords});
            fill(sums, [](int64_t) { return 0.0; });
            using Copy = op::MeasureQuantization::Copy;
            const op::MeasureQuantization args{
                .quantized = transposed ? copy : rows,
                .source = transposed ? ScaledTensor(rows) : ScaledTensor{.data = t.src},
                .groups = t.row_groups,
                .copy = transposed ? Copy::transposed : Copy::rows,
                .sums = sums};
            p.run(args);
            p.run(args);
            p.expect_close(sums, 1e-24, "sums");
        }
}

TEST(QuantizeParity, ClipFp8) {
    for (const Case& c : cases_here())
        for (const DType dtype : {DType::e4m3, DType::e5m2}) {
            SCOPED_TRACE(text(c) + " " + name_of(dtype));
            Parity p;
            const Tensors t(c, false);
            const HostScaled rows = t.by_rows(c, dtype, L::row);
            fill_normal(rows.data, 31, dtype == DType::e4m3 ? 200.0 : 20000.0);
            p.check(op::ClipFp8{.groups = t.row_groups, .share = 0.5f, .rows = rows.data});
        }
}

TEST(QuantizeParity, RelayoutScales) {
    for (const DType dtype : {DType::e8m0, DType::f32})
        for (const int64_t tokens : {0, 1, 31, 129, 1000})
            for (const int64_t blocks : {1, 7, 56}) {
                Parity p;
                const HostTensor wire(dtype, {tokens, blocks}), vec128(DType::f32, {blocks, tokens});
                fill_pow2(wire, 41, -100, 20);
                p.check(op::RelayoutScales{.wire = wire, .vec128 = vec128});
            }
}

TEST(QuantizeParity, DelayedScaleUpdate) {
    for (const int32_t step_status : {0, 1})
        for (const int64_t step : {0, 5, 17}) {
            Parity p;
            const HostTensor position = HostTensor::of(std::vector<int64_t>{step}),
                             status = HostTensor::of(std::vector<int32_t>{step_status}),
                             amax = HostTensor::of(std::vector<float>{3.25f}),
                             history =
                                 HostTensor::of(std::vector<float>{0.5f, 2.0f, 0.0f, 7.0f, 1.0f, 0.25f}),
                             scale = HostTensor::of(std::vector<float>{1.0f});
            p.check(op::DelayedScaleUpdate{
                .position = position, .status = status, .amax = amax, .history = history, .scale = scale});
        }
}

}  // namespace
}  // namespace fp8flow::test
