// Tensors with more than 2^31 elements: the rows under test stand behind that mark in buffers that exist on the GPU only; the reference
// runs on the same rows in small buffers.
#include "kernels/hopper/hopper_ops.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <vector>

namespace fp8flow::test {
namespace {

constexpr int64_t kCols = 8192, kBase = (int64_t{1} << 31) / kCols, kCapacity = kBase + 1024, kTotal = 512;

class LargeIndex : public ::testing::Test {
protected:
    LargeIndex() : groups_({130, 0, 200}, 128) {
        base_ = static_cast<int64_t*>(allocate(sizeof(int64_t)));
        gpu_.device().copy_in(base_, &kBase, sizeof(kBase));
        gpu_groups_ = groups_;
        gpu_groups_.counts = upload(gpu_groups_.counts);
        gpu_groups_.offsets = upload(gpu_groups_.offsets);
    }
    ~LargeIndex() override {
        for (void* memory : memory_) gpu_.device().free(memory);
    }

    void* allocate(int64_t bytes) {
        memory_.push_back(gpu_.device().allocate(static_cast<std::size_t>(bytes)));
        return memory_.back();
    }
    TensorView buffer(DType dtype, std::initializer_list<int64_t> shape) {
        TensorView view = make_view(nullptr, dtype, shape);
        view.data = allocate(view.bytes());
        return view;
    }
    TensorView routed(DType dtype,
                      std::initializer_list<int64_t> shape) {  // an M-tensor whose rows start at kBase
        TensorView view = buffer(dtype, shape);
        view.row_base = base_;
        return view;
    }
    TensorView upload(TensorView host) {
        void* data = allocate(host.bytes());
        gpu_.device().copy_in(data, host.data, static_cast<std::size_t>(host.bytes()));
        host.data = data;
        return host;
    }
    void put_rows(const TensorView& large, const TensorView& small, int64_t row) {
        const int64_t width = small.cols() * size_of(small.dtype);
        gpu_.device().copy_in(large.bytes_ptr() + row * width, small.data,
                              static_cast<std::size_t>(small.bytes()));
    }
    // `count` elements of the GPU's buffer from `from` against the reference's from `at`.
    void expect_same(const TensorView& large, int64_t from, const TensorView& small, int64_t at,
                     int64_t count, const char* what) {
        const int64_t width = size_of(small.dtype);
        std::vector<uint8_t> got(static_cast<std::size_t>(count * width));
        gpu_.device().copy_out(got.data(), large.bytes_ptr() + from * width, got.size());
        EXPECT_EQ(std::memcmp(got.data(), small.bytes_ptr() + at * width, got.size()), 0)
            << what << " from element " << from;
    }
    void expect_same_rows(const TensorView& large, const TensorView& small, int64_t row, const char* what) {
        expect_same(large, row * small.cols(), small, 0, small.numel(), what);
    }
    // Transposed copies, or vec128 scales: stretches of the M dimension, some of them.
    void expect_same_stretches(const TensorView& large, const TensorView& small, const char* what) {
        for (int64_t r = 0; r < small.dim(0);
             r = r == small.dim(0) - 1 ? r + 1 : std::min(r + 61, small.dim(0) - 1))
            expect_same(large, r * large.cols() + kBase, small, r * small.cols(), kTotal, what);
    }
    Fp8Tensor large_rows(int64_t cols) {
        return {routed(DType::e4m3, {kCapacity, cols}), buffer(DType::f32, {cols / kBlock, kCapacity}),
                ScaleLayout::vec128};
    }

    ReferenceOps cpu_;
    HopperOps gpu_;
    GroupsFixture groups_;
    RowGroups gpu_groups_;
    int64_t* base_ = nullptr;
    std::vector<void*> memory_;
};

TEST_F(LargeIndex, QuantizeTransposeDequantize) {
    const HostTensor src(DType::bf16, {kTotal, kCols}), back(DType::bf16, {kTotal, kCols});
    fill_normal(src, 1, 2.0);
    const HostFp8 rows(DType::e4m3, {kTotal, kCols}, ScaleLayout::vec128),
        turned(DType::e4m3, {kCols, kTotal}, ScaleLayout::tile128),
        columns(DType::e4m3, {kCols, kTotal}, ScaleLayout::vec128);
    const TensorView large_src = routed(DType::bf16, {kCapacity, kCols});
    put_rows(large_src, src, kBase);

    const Fp8Tensor large = large_rows(kCols);
    gpu_.quantize_rows({.src = large_src, .groups = gpu_groups_, .dst = large});
    cpu_.quantize_rows({.src = src, .groups = groups_, .dst = rows});
    expect_same_rows(large.codes, rows.codes, kBase, "rows");
    expect_same_stretches(large.scales, rows.scales, "scales of rows");

    const TensorView tile_scales = buffer(DType::f32, {kCapacity / kBlock, kCols / kBlock});
    const Fp8Tensor large_turned = {routed(DType::e4m3, {kCols, kCapacity}), tile_scales,
                                    ScaleLayout::tile128};
    gpu_.transpose_fp8({.src = large, .groups = gpu_groups_, .dst = large_turned});
    cpu_.transpose_fp8({.src = rows, .groups = groups_, .dst = turned});
    expect_same_stretches(large_turned.codes, turned.codes, "transposed");
    expect_same_rows(tile_scales, turned.scales, kBase / kBlock, "scales of the transposed copy");

    const Fp8Tensor large_columns = {large_turned.codes, buffer(DType::f32, {kCapacity / kBlock, kCols}),
                                     ScaleLayout::vec128};
    gpu_.quantize_columns(
        {.src = large_src, .groups = gpu_groups_, .dst = large_columns, .src2 = {}, .dst2 = {}});
    cpu_.quantize_columns({.src = src, .groups = groups_, .dst = columns, .src2 = {}, .dst2 = {}});
    expect_same_stretches(large_columns.codes, columns.codes, "columns");
    expect_same_rows(large_columns.scales, columns.scales, kBase / kBlock, "scales of columns");

    gpu_.dequantize({.src = large, .groups = gpu_groups_, .dst = large_src});
    cpu_.dequantize({.src = rows, .groups = groups_, .dst = back});
    expect_same_rows(large_src, back, kBase, "dequantized");
}

TEST_F(LargeIndex, Swiglu) {
    const HostTensor h(DType::bf16, {kTotal, kCols}), da(DType::bf16, {kTotal, kCols / 2}),
        dprob(DType::f32, {kTotal});
    fill_normal(h, 2, 2.0);
    fill_normal(da, 3, 0.1);
    const HostFp8 a(DType::e4m3, {kTotal, kCols / 2}, ScaleLayout::vec128),
        dh(DType::e4m3, {kTotal, kCols}, ScaleLayout::vec128);
    const TensorView large_h = routed(DType::bf16, {kCapacity, kCols}),
                     large_da = routed(DType::bf16, {kCapacity, kCols / 2}),
                     large_dprob = routed(DType::f32, {kCapacity});
    put_rows(large_h, h, kBase);
    put_rows(large_da, da, kBase);
    const Fp8Tensor large_a = large_rows(kCols / 2), large_dh = large_rows(kCols);
    gpu_.swiglu_quantize({.h = large_h, .prob = {}, .groups = gpu_groups_, .a = large_a});
    cpu_.swiglu_quantize({.h = h, .prob = {}, .groups = groups_, .a = a});
    expect_same_rows(large_a.codes, a.codes, kBase, "a");
    expect_same_stretches(large_a.scales, a.scales, "scales of a");
    gpu_.swiglu_backward_quantize({.da = large_da,
                                   .h = large_h,
                                   .prob = {},
                                   .groups = gpu_groups_,
                                   .dh = large_dh,
                                   .dprob = large_dprob});
    cpu_.swiglu_backward_quantize(
        {.da = da, .h = h, .prob = {}, .groups = groups_, .dh = dh, .dprob = dprob});
    expect_same_rows(large_dh.codes, dh.codes, kBase, "dh");
    expect_same_stretches(large_dh.scales, dh.scales, "scales of dh");
    expect_same(large_dprob, kBase, dprob, 0, kTotal, "dprob");
}

// No row base here: all rows are worked on, the last ones compared.
TEST_F(LargeIndex, Norm) {
    constexpr int64_t kLast = 40, kRows = kBase + kLast;
    const HostTensor x(DType::bf16, {kLast, kCols}), y(DType::bf16, {kLast, kCols}),
        dx(DType::bf16, {kLast, kCols}), gamma(DType::f32, {kCols}), rstd(DType::f32, {kLast}),
        dgamma(DType::f32, {kCols});
    fill_normal(x, 4);
    fill_uniform(gamma, 5, 0.5, 1.5);
    const TensorView large_x = buffer(DType::bf16, {kRows, kCols}),
                     large_y = buffer(DType::bf16, {kRows, kCols}), large_rstd = buffer(DType::f32, {kRows}),
                     gpu_gamma = upload(gamma), gpu_dgamma = buffer(DType::f32, {kCols});
    gpu_.device().fill(large_x.data, 0x3F, static_cast<std::size_t>(large_x.bytes()));
    put_rows(large_x, x, kBase);
    gpu_.rms_norm({.x = large_x, .gamma = gpu_gamma, .y = large_y, .rstd = large_rstd});
    cpu_.rms_norm({.x = x, .gamma = gamma, .y = y, .rstd = rstd});
    expect_same_rows(large_y, y, kBase, "y");
    expect_same(large_rstd, kBase, rstd, 0, kLast, "rstd");
    // y serves as dy and is replaced by dx
    gpu_.rms_norm_backward({.dy = large_y,
                            .x = large_x,
                            .gamma = gpu_gamma,
                            .rstd = large_rstd,
                            .dresidual = {},
                            .dx = large_y,
                            .dgamma = gpu_dgamma});
    cpu_.rms_norm_backward(
        {.dy = y, .x = x, .gamma = gamma, .rstd = rstd, .dresidual = {}, .dx = dx, .dgamma = dgamma});
    expect_same_rows(large_y, dx, kBase, "dx");
}

}  // namespace
}  // namespace fp8flow::test
