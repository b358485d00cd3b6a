// SPDX-License-Identifier: MIT
// Tensors with more than 2^31 elements for tests: the rows under test come after that index in buffers that
// exist on the GPU only; the reference runs on the same rows in small buffers.
#pragma once

#include "kernels/hopper/hopper_ops.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fp8flow::test {

inline constexpr int64_t kCols = 8192, kBase = (int64_t{1} << 31) / kCols, kCapacity = kBase + 1024,
                         kTotal = 512;

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
    // All elements of `small` into the GPU's buffer, from element `from` on.
    void put(const TensorView& large, int64_t from, const TensorView& small) {
        gpu_.device().copy_in(large.bytes_ptr() + from * size_of(small.dtype), small.data,
                              static_cast<std::size_t>(small.bytes()));
    }
    void put_rows(const TensorView& large, const TensorView& small, int64_t row) {
        put(large, row * small.cols(), small);
    }
    // Transposed copies, or vec128 scales: every row of `small` into the M dimension of `large`, from kBase
    // on.
    void put_stretches(const TensorView& large, const TensorView& small) {
        for (int64_t r = 0; r < small.dim(0); ++r) put(large, r * large.cols() + kBase, small.slice(r, 1));
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
    ScaledTensor large_rows(int64_t cols) {
        return {routed(DType::e4m3, {kCapacity, cols}), buffer(DType::f32, {cols / kBlock, kCapacity}),
                ScaleLayout::vec128, ScaleFormat::pow2};
    }

    ReferenceOps cpu_;
    HopperOps gpu_;
    GroupsFixture groups_;
    RowGroups gpu_groups_;
    int64_t* base_ = nullptr;
    std::vector<void*> memory_;
};

}  // namespace fp8flow::test
