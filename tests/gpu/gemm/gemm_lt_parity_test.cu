// SPDX-License-Identifier: MIT
// The cuBLASLt baseline (kernels.gemm_backend: cublaslt) at shapes it must take itself: every recipe's
// layouts, forward, data gradient and weight gradient, against the GEMM of the same FP8 values in double
// precision (on the GPU), at the bounds of a correct kernel. Ragged and empty groups, row bases, contractions
// whose number of scale blocks is not a multiple of 4, pads, untouched rows, and twice the same bits.
#include "kernels/hopper/device/view.h"
#include "kernels/ops/gemm.h"

#include "tests/support/parity.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <functional>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;
using op::GemmForm;

// ---- the GEMM in double precision
//
// want[i, j] += sum over k of a[i, k] b[j, k]; one thread an element, ascending k.
__global__ void gemm_in_double_kernel(const double* a, const double* b, int64_t m, int64_t n, int64_t k,
                                      double* want) {
    const int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
    if (at >= m * n) return;
    double sum = want[at];
    for (int64_t i = 0; i < k; ++i) sum = fma(a[at / n * k + i], b[at % n * k + i], sum);
    want[at] = sum;
}

struct Matrix {  // [rows, cols]
    int64_t rows, cols;
    std::vector<double> values;
    Matrix(int64_t r, int64_t c, const std::function<double(int64_t, int64_t)>& at) : rows(r), cols(c) {
        for (int64_t i = 0; i < r; ++i)
            for (int64_t j = 0; j < c; ++j) values.push_back(at(i, j));
    }
};

void add_gemm_in_double(Device& device, const Matrix& a, const Matrix& b, double* want) {
    const auto on_gpu = [&](const double* host, int64_t count) {
        auto* copy = static_cast<double*>(device.allocate(static_cast<std::size_t>(count) * sizeof(double)));
        device.copy_in(copy, host, static_cast<std::size_t>(count) * sizeof(double));
        return copy;
    };
    const int64_t m = a.rows, n = b.rows;
    double* const da = on_gpu(a.values.data(), m * a.cols);
    double* const db = on_gpu(b.values.data(), n * b.cols);
    double* const dw = on_gpu(want, m * n);
    gemm_in_double_kernel<<<static_cast<unsigned>(ceil_div(m * n, 256)), 256>>>(da, db, m, n, a.cols, dw);
    device.copy_out(want, dw, static_cast<std::size_t>(m * n) * sizeof(double));
    for (double* copy : {da, db, dw}) device.free(copy);
}

// Element (batch, row, col) of a stored tensor, by the definition of its layout
// (kernels/core/scaled_tensor.h); `group` of group_row.
double value_of(const HostScaled& t, int64_t batch, int64_t row, int64_t col, int64_t group = 0) {
    const TensorView& codes = t.data.view();
    const int64_t R = codes.dim(-2), C = codes.dim(-1);
    const double code = get(codes, (batch * R + row) * C + col);
    switch (t.layout) {
        case L::none: return code;
        case L::tensor: return code * t.scales(0);
        case L::row: return code * t.scales(batch * R + row);
        case L::group_row: return code * t.scales(group * R + row);
        case L::vec128_wire: return code * t.scales(row * ceil_div(C, 128) + col / 128);
        case L::vec128: return code * t.scales(col / 128 * R + row);
        case L::block128: {
            const int64_t per_row = round_up(ceil_div(C, 128), 4);
            return code * t.scales((batch * ceil_div(R, 128) + row / 128) * per_row + col / 128);
        }
        case L::tile128: return code * t.scales(col / 128 * ceil_div(R, 128) + row / 128);
        case L::mx32: return code * t.scales((batch * ceil_div(C, 32) + col / 32) * R + row);
    }
    return 0;
}

// Free fp32 scales, so that one at a wrong place shows; powers of two where the layout stores E8M0.
void fill_operand(const HostScaled& t, uint64_t seed) {
    fill_normal(t.data, seed, is_fp8(t.data.view().dtype) ? 8.0 : 1.0);
    if (t.scales.view().dtype == DType::e8m0)
        fill_pow2(t.scales, seed + 1, -3, 3);
    else if (t.scales.view())
        fill_uniform(t.scales, seed + 1, 0.25, 2.0);
}

// BF16: the rounding of the output, about 2.7e-6. FP32: FP8 tensor cores add with about 14 bits and are
// promoted inside the contraction, about 1.6e-8; without promotion it would be 1e-6 and more. The same bound
// for scalar and vector scales, whose kernels promote as well (FAST_ACCUM off), at intervals that are not
// documented.
double bound_of(DType dtype) { return dtype == DType::f32 ? 1e-7 : 4e-6; }

class LtParity : public Parity {
public:
    LtParity() { gpu.choose_kernels({.gemm = GemmBackend::cublaslt}); }

    // Elements of d that `wanted` names (NaN: not written, bytes 0xFF; zero pads exactly), after `run`,
    // twice, each of `gemms` GEMMs on cuBLASLt.
    void expect(const TensorView& d, const std::vector<double>& wanted, int64_t gemms, Gradient mode,
                const std::string& what, const std::function<void()>& run) {
        run();
        EXPECT_EQ(gpu.cublaslt_counts().native, 0) << what << ": the native kernel took GEMMs";
        EXPECT_EQ(gpu.cublaslt_counts().cublaslt, gemms) << what;
        const HostTensor got = from_gpu(d);
        double error = 0, energy = 0;
        for (int64_t i = 0; i < d.numel(); ++i) {
            const double want = wanted[static_cast<std::size_t>(i)], have = got(i);
            if (std::isnan(want)) {
                ASSERT_TRUE(std::isnan(have)) << what << ": wrote element " << i;
                continue;
            }
            ASSERT_FALSE(std::isnan(have)) << what << ": element " << i;
            if (want == 0 && std::signbit(want)) {
                ASSERT_EQ(have, 0) << what << ": pad " << i;
            }
            error += (have - want) * (have - want);
            energy += want * want;
        }
        if (energy > 0) {
            fmt::print("{}: NMSE {:.2e}\n", what, error / energy);
            EXPECT_LE(error / energy, bound_of(d.dtype)) << what;
        }
        if (mode == Gradient::accumulate) return;
        run();
        EXPECT_TRUE(same_bytes(got, from_gpu(d))) << what << ": the second call gave other bits";
    }
};

struct Operands {
    DType a, b;
    L a_layout, b_layout;
    GemmForm form = GemmForm::nt;
    int64_t alignment = 128;
};
std::string name(const Operands& o) {
    return fmt::format("{} {} x {} {}", name_of(o.a), name_of(o.a_layout), name_of(o.b), name_of(o.b_layout));
}

const double kUntouched = std::nan("");
const double kPad = -0.0;  // exactly zero; a sum that happens to be zero is +0

// ---- forward and data gradient
void run_grouped(const Operands& o, const std::vector<int64_t>& counts, int64_t a_base, int64_t d_base,
                 int64_t n, int64_t k, DType d_dtype) {
    const GroupsFixture groups(counts, o.alignment, counts.size() > 1 ? 128 : 0);
    const int64_t G = groups.num_groups(), capacity = groups.capacity();
    HostScaled a(o.a, {a_base + capacity, k}, o.a_layout);
    HostScaled b = o.form == GemmForm::nt ? HostScaled(o.b, {G, n, k}, o.b_layout)
                                          : HostScaled(o.b, {G, k, n}, o.b_layout);
    fill_operand(a, 11);  // pads too: their values must not show
    fill_operand(b, 12);
    HostTensor d(d_dtype, {d_base + capacity, n});
    if (a_base > 0) a.set_row_base(a_base);
    if (d_base > 0) d.set_row_base(d_base);
    LtParity parity;
    std::vector<double> wanted(static_cast<std::size_t>(d.numel()), kUntouched);
    int64_t gemms = 0;
    for (int64_t g = 0; g < G; ++g) {
        double* want = wanted.data() + (d_base + groups.first(g)) * n;
        std::fill_n(want, (groups.end(g) - groups.first(g)) * n, kPad);
        if (groups.count(g) == 0) continue;
        ++gemms;
        const Matrix left(groups.count(g), k, [&](int64_t i, int64_t j) {
            return value_of(a, 0, a_base + groups.first(g) + i, j);
        });
        const Matrix right(n, k, [&](int64_t i, int64_t j) {
            return o.form == GemmForm::nt ? value_of(b, g, i, j) : value_of(b, g, j, i);
        });
        add_gemm_in_double(parity.gpu.device(), left, right, want);
    }
    parity.expect(
        d, wanted, gemms, Gradient::overwrite,
        fmt::format("{} form {} -> {}, align {}, n {} k {}, counts {}", name(o), static_cast<int>(o.form),
                    name_of(d_dtype), o.alignment, n, k, fmt::join(counts, ",")),
        [&] {
            parity.gpu.grouped_gemm({.a = parity.to_gpu(a),
                                     .b = parity.to_gpu(b),
                                     .groups = parity.to_gpu(RowGroups(groups)),
                                     .form = o.form,
                                     .d = parity.to_gpu(d.view())});
        });
}

const std::vector<Operands> kRowOperands = {
    {DType::bf16, DType::bf16, L::none, L::none, GemmForm::nt, 16},
    {DType::bf16, DType::bf16, L::none, L::none, GemmForm::nn, 1},
    {DType::e4m3, DType::e4m3, L::vec128, L::block128},
    {DType::e5m2, DType::e4m3, L::vec128, L::block128},
    {DType::e4m3, DType::e4m3, L::row, L::row, GemmForm::nt, 16},
    {DType::e5m2, DType::e4m3, L::row, L::row},
    {DType::e4m3, DType::e4m3, L::tensor, L::tensor, GemmForm::nt, 16},
    {DType::e5m2, DType::e4m3, L::tensor, L::tensor},
    {DType::e4m3, DType::e4m3, L::mx32, L::mx32, GemmForm::nt, 32},
    {DType::e5m2, DType::e4m3, L::mx32, L::mx32, GemmForm::nt, 32},
};

TEST(LtGroupedGemm, EveryRecipe) {
    for (const Operands& o : kRowOperands) {
        for (DType d : {DType::bf16, DType::f32}) {
            run_grouped(o, {130, 0, 256, 3, 1}, 0, 0, 384, 640, d);  // 5 scale blocks
            run_grouped(o, {0, 77, 300}, 256, 128, 256, 2048, d);
            run_grouped(o, {128}, 0, 0, 128, 384, d);  // one group: scales as stored
            run_grouped(o, {0, 0}, 0, 0, 128, 128, d);
        }
    }
}

// ---- weight gradients
void run_wgrad(const Operands& o, const std::vector<int64_t>& counts, int64_t a_base, int64_t b_base,
               int64_t n, int64_t k, Gradient mode) {
    const GroupsFixture groups(counts, o.alignment, 128);
    const int64_t G = groups.num_groups();
    const bool fp8 = is_fp8(o.b);
    const int64_t dy_rows = round_up(a_base + groups.capacity(), 128),
                  x_rows = round_up(b_base + groups.capacity(), 128) + 128;
    HostScaled dy =
        fp8 ? HostScaled(o.a, {n, dy_rows}, o.a_layout, G) : HostScaled(o.a, {dy_rows, n}, o.a_layout);
    HostScaled x =
        fp8 ? HostScaled(o.b, {k, x_rows}, o.b_layout, G) : HostScaled(o.b, {x_rows, k}, o.b_layout);
    fill_operand(dy, 21);
    fill_operand(x, 22);
    const auto zero_pads = [&](const HostScaled& t,
                               int64_t base) {  // as quantisers and transposes write them
        const TensorView& codes = t.data.view();
        for (int64_t row = 0; row < groups.total(); ++row)
            for (int64_t i = 0; groups.is_pad(row) && i < codes.dim(0); ++i)
                codes.bytes_ptr()[i * codes.dim(1) + base + row] = 0;
    };
    if (fp8 && o.a_layout != L::mx32) {
        zero_pads(dy, a_base);
        zero_pads(x, b_base);
    }
    if (a_base > 0) dy.set_row_base(a_base);
    if (b_base > 0) x.set_row_base(b_base);
    HostTensor dw(DType::f32, {G, n, k});
    if (mode == Gradient::accumulate) fill_normal(dw, 23, 50.0);
    LtParity parity;
    std::vector<double> wanted(static_cast<std::size_t>(dw.numel()), kPad);
    if (mode == Gradient::accumulate) wanted = to_doubles(dw);
    int64_t gemms = 0;
    for (int64_t g = 0; g < G; ++g) {
        if (groups.count(g) == 0) continue;
        ++gemms;
        const auto operand = [&](const HostScaled& t, int64_t dim, int64_t base) {
            return Matrix(dim, groups.count(g), [&](int64_t i, int64_t j) {
                const int64_t row = base + groups.first(g) + j;
                return fp8 ? value_of(t, 0, i, row, g) : value_of(t, 0, row, i);
            });
        };
        add_gemm_in_double(parity.gpu.device(), operand(dy, n, a_base), operand(x, k, b_base),
                           wanted.data() + g * n * k);
    }
    parity.expect(dw, wanted, gemms, mode,
                  fmt::format("dW: {} {}, align {}, counts {}", name(o),
                              mode == Gradient::accumulate ? "accumulate" : "overwrite", o.alignment,
                              fmt::join(counts, ",")),
                  [&] {
                      parity.gpu.grouped_gemm_wgrad({.dy = parity.to_gpu(dy),
                                                     .x = parity.to_gpu(x),
                                                     .groups = parity.to_gpu(RowGroups(groups)),
                                                     .mode = mode,
                                                     .dw = parity.to_gpu(dw.view())});
                  });
}

TEST(LtGroupedGemmWgrad, EveryRecipe) {
    const std::vector<Operands> operands = {
        {DType::bf16, DType::bf16, L::none, L::none, GemmForm::tn, 1},
        {DType::bf16, DType::bf16, L::none, L::none, GemmForm::tn, 16},
        {DType::e4m3, DType::e4m3, L::tile128, L::tile128},
        {DType::e5m2, DType::e4m3, L::tile128, L::tile128},
        {DType::e4m3, DType::e4m3, L::vec128, L::vec128},
        {DType::e5m2, DType::e4m3, L::vec128, L::vec128},
        {DType::e4m3, DType::e4m3, L::group_row, L::group_row, GemmForm::nt, 16},
        {DType::e5m2, DType::e4m3, L::group_row, L::group_row},
        {DType::e4m3, DType::e4m3, L::tensor, L::tensor, GemmForm::nt, 16},
        {DType::e5m2, DType::e4m3, L::tensor, L::tensor},
        {DType::e4m3, DType::e4m3, L::mx32, L::mx32, GemmForm::nt, 32},
        {DType::e5m2, DType::e4m3, L::mx32, L::mx32, GemmForm::nt, 32},
    };
    for (const Operands& o : operands) {
        for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            run_wgrad(o, {130, 0, 256, 3, 1}, 0, 0, 384, 256, mode);
            run_wgrad(o, {0, 77, 1500}, 256, 128, 256, 128, mode);
            run_wgrad(o, {0, 0}, 0, 0, 128, 128, mode);
        }
    }
}

// ---- dense
TEST(LtGemm, EveryRecipe) {
    const int64_t m = 264, n = 384, k = 640;
    std::vector<Operands> operands = kRowOperands;
    operands.push_back({DType::e4m3, DType::e4m3, L::tile128, L::tile128});
    operands.push_back({DType::e4m3, DType::e4m3, L::vec128, L::vec128});
    operands.push_back({DType::e4m3, DType::e4m3, L::vec128_wire, L::block128});
    for (const Operands& o : operands) {
        for (DType d_dtype : {DType::bf16, DType::f32}) {
            HostScaled a(o.a, {m, k}, o.a_layout);
            HostScaled b = o.form == GemmForm::nt ? HostScaled(o.b, {n, k}, o.b_layout)
                                                  : HostScaled(o.b, {k, n}, o.b_layout);
            fill_operand(a, 31);
            fill_operand(b, 32);
            HostTensor d(d_dtype, {m, n});
            LtParity parity;
            std::vector<double> wanted(static_cast<std::size_t>(m * n), 0.0);
            add_gemm_in_double(
                parity.gpu.device(), Matrix(m, k, [&](int64_t i, int64_t j) { return value_of(a, 0, i, j); }),
                Matrix(n, k,
                       [&](int64_t i, int64_t j) {
                           return o.form == GemmForm::nt ? value_of(b, 0, i, j) : value_of(b, 0, j, i);
                       }),
                wanted.data());
            parity.expect(
                d, wanted, 1, Gradient::overwrite,
                fmt::format("dense {} form {} -> {}", name(o), static_cast<int>(o.form), name_of(d_dtype)),
                [&] {
                    parity.gpu.gemm({.a = parity.to_gpu(a),
                                     .b = parity.to_gpu(b),
                                     .form = o.form,
                                     .d = parity.to_gpu(d.view())});
                });
        }
    }
}

// cuBLASLt does not support two E5M2 operands; the native kernel answers.
TEST(LtGemm, BothE5m2RunsNative) {
    HostScaled a(DType::e5m2, {128, 256}, L::tensor), b(DType::e5m2, {128, 256}, L::tensor);
    fill_operand(a, 41);
    fill_operand(b, 42);
    HostTensor d(DType::f32, {128, 128});
    LtParity parity;
    parity.gpu.gemm({.a = parity.to_gpu(a), .b = parity.to_gpu(b), .d = parity.to_gpu(d.view())});
    parity.cpu.gemm({.a = a, .b = b, .d = d});
    parity.expect_close(d, 1e-7, "d");
    EXPECT_EQ(parity.gpu.cublaslt_counts().cublaslt, 0);
    EXPECT_EQ(parity.gpu.cublaslt_counts().native, 1);
}

}  // namespace
}  // namespace fp8flow::test
