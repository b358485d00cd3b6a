// SPDX-License-Identifier: MIT
// The FP8 transposes on the GPU against the reference, bit by bit: every code under every shift, pads, rows
// of zeros, empty groups, row bases.
#include "kernels/hopper/device/view.h"
#include "tests/support/parity.h"

namespace fp8flow::test {
namespace {

struct Case {
    std::vector<int64_t> counts;     // empty: no groups
    int64_t rows, dim, base, extra;  // extra: additional columns of the copy (no groups) or rows of capacity
};
const std::vector<Case>& cases() {
    static const std::vector<Case> all = {
        {{}, 0, 128, 0, 0},
        {{}, 0, 128, 0, 40},
        {{}, 1, 128, 0, 0},
        {{}, 127, 200, 0, 1},
        {{}, 128, 256, 0, 0},
        {{}, 129, 24, 0, 127},
        {{}, 300, 1000, 0, 0},
        {{}, 130, 8192, 0, 16},
        {{}, 5, 7, 0, 0},
        {{0, 1, 0, 127, 128, 129, 0}, 0, 384, 0, 128},
        {{700, 3, 0}, 0, 136, 256, 0},
        {{0, 0}, 0, 128, 128, 128},
        {{128, 128}, 0, 7168, 384, 0},
        {{1100, 3, 900}, 0, 256, 128, 640},  // CTAs of several tiles, across groups and past the last
    };
    return all;
}

struct Tensors {
    GroupsFixture groups;
    RowGroups row_groups;
    HostScaled src;
    int64_t columns;  // of the copy

    Tensors(const Case& c, DType dtype, int low, int high) : groups(c.counts, 128, c.extra) {
        const bool grouped = !c.counts.empty();
        const int64_t rows = grouped ? c.base + groups.capacity() + 128 : c.rows;
        columns = grouped ? rows : c.rows + c.extra;
        if (grouped) row_groups = groups;
        src = HostScaled(dtype, {rows, c.dim}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
        for (int64_t i = 0; i < src.data.numel(); ++i)
            src.data.view().bytes_ptr()[i] =
                static_cast<uint8_t>(random_words(9, 0, static_cast<uint64_t>(i))[0]);
        fill_pow2(src.scales, 10, low, high);
        for (int64_t i = 0; i < src.scales.numel(); i += 37) set(src.scales, i, 0.0);  // as pads
        if (grouped) src.set_row_base(c.base);
    }
    HostScaled output(const Case& c, DType dtype, ScaleLayout layout) const {
        HostScaled dst(dtype, {c.dim, columns}, layout);
        if (!c.counts.empty()) dst.set_row_base(c.base);
        return dst;
    }
};
std::string text(const Case& c) {
    return std::to_string(c.counts.size()) + " groups, " + std::to_string(c.rows) + " rows, dim " +
           std::to_string(c.dim) + ", base " + std::to_string(c.base);
}

TEST(TransposeParity, ScalingAware) {
    for (const Case& c : cases())
        for (const DType dtype : {DType::e4m3, DType::e5m2})
            for (const int spread : {0, 3, 80}) {
                SCOPED_TRACE(text(c));
                if (too_large_here(c.rows * c.dim)) continue;
                for (const int sms : {0, 1}) {  // 1: a CTA takes many tiles
                    Parity p;
                    const Tensors t(c, dtype, -8 - spread, -8);
                    const HostScaled dst = t.output(c, dtype, ScaleLayout::tile128);
                    p.check(op::TransposeFp8{.src = t.src, .groups = t.row_groups, .dst = dst},
                            Launch{.sm_limit = sms});
                }
            }
}

// Row r has the scale 2^-r of row 0's, column c the code c.
TEST(TransposeParity, EveryCodeUnderEveryShift) {
    for (const DType dtype : {DType::e4m3, DType::e5m2}) {
        Parity p;
        const HostScaled src =
            HostScaled(dtype, {kBlock, 256}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
        const HostScaled dst(dtype, {256, kBlock}, ScaleLayout::tile128);
        for (int64_t r = 0; r < kBlock; ++r) {
            for (int64_t c = 0; c < 256; ++c)
                src.data.view().bytes_ptr()[r * 256 + c] = static_cast<uint8_t>(c);
            for (int64_t block = 0; block < 2; ++block)
                set(src.scales, block * kBlock + r, std::ldexp(1.0, static_cast<int>(60 - r)));
        }
        p.check(op::TransposeFp8{.src = src, .groups = {}, .dst = dst});
    }
}

TEST(TransposeParity, Requantize) {
    for (const Case& c : cases())
        for (const DType dtype : {DType::e4m3, DType::e5m2})
            for (const ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
                SCOPED_TRACE(text(c));
                if (too_large_here(c.rows * c.dim)) continue;
                Parity p;
                Tensors t(c, dtype, -10, -4);
                // the same NaN everywhere: the GPU does not keep the sign of a NaN, and infinity times a
                // scale of 0 is a NaN
                for (int64_t i = 0; i < t.src.data.numel(); ++i)
                    if (!std::isfinite(t.src.data(i))) t.src.data.view().bytes_ptr()[i] = 0x7F;
                const HostScaled dst =
                    t.output(c, dtype == DType::e4m3 ? DType::e5m2 : DType::e4m3, ScaleLayout::vec128);
                p.check(
                    op::TransposeRequantize{
                        .src = t.src, .groups = t.row_groups, .scale_format = format, .dst = dst},
                    Launch{.sm_limit = format == ScaleFormat::pow2 ? 1 : 0});
            }
}

}  // namespace
}  // namespace fp8flow::test
