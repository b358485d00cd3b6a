// SPDX-License-Identifier: MIT
// Host tensors for tests: owning buffers with guard zones, which the destructor checks; fills (random,
// poison); RowGroups from a list of counts; error measures. A new HostTensor holds 0xFF bytes (NaN in every
// float format, -1 in integers), so an element that an op forgets is noticed.
#pragma once

#include "kernels/core/random.h"
#include "kernels/core/scalar_math.h"
#include "kernels/core/scaled_tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

namespace fp8flow::test {

// ---- reading and writing single elements of any dtype
inline double get(const TensorView& view, int64_t i) {
    switch (view.dtype) {
        case DType::f32: return static_cast<const float*>(view.data)[i];
        case DType::bf16: return to_float(static_cast<const Bf16*>(view.data)[i]);
        case DType::f16: return to_float(static_cast<const Fp16*>(view.data)[i]);
        case DType::e4m3:
        case DType::e5m2: return fp8_to_float(view.bytes_ptr()[i], view.dtype);
        case DType::e8m0: return e8m0_to_float(view.bytes_ptr()[i]);
        case DType::i32: return static_cast<const int32_t*>(view.data)[i];
        case DType::i64: return static_cast<double>(static_cast<const int64_t*>(view.data)[i]);
        case DType::f64: return static_cast<const double*>(view.data)[i];
    }
    return 0;
}

inline void set(const TensorView& view, int64_t i, double value) {  // one rounding
    const float f = static_cast<float>(value);
    switch (view.dtype) {
        case DType::f32: static_cast<float*>(view.data)[i] = f; return;
        case DType::bf16: static_cast<Bf16*>(view.data)[i] = to_bf16(f); return;
        case DType::f16: static_cast<Fp16*>(view.data)[i] = to_f16(f); return;
        case DType::e4m3:
        case DType::e5m2: view.bytes_ptr()[i] = to_fp8(f, view.dtype); return;
        case DType::e8m0: view.bytes_ptr()[i] = float_to_e8m0(f); return;
        case DType::i32: static_cast<int32_t*>(view.data)[i] = static_cast<int32_t>(value); return;
        case DType::i64: static_cast<int64_t*>(view.data)[i] = static_cast<int64_t>(value); return;
        case DType::f64: static_cast<double*>(view.data)[i] = value; return;
    }
}

// ---- an owning tensor
constexpr int64_t kGuard = 256;  // bytes before and after it
constexpr uint8_t kGuardByte = 0xA5;

// Fails the test if anything wrote before or after the tensor.
struct CheckGuards {
    const uint8_t* tensor = nullptr;
    int64_t bytes = 0;
    void operator()(const uint8_t* buffer) const {
        const auto intact = [](const uint8_t* guard) {
            return std::count(guard, guard + kGuard, kGuardByte) == kGuard;
        };
        EXPECT_TRUE(intact(tensor - kGuard)) << "written before a tensor of " << bytes << " bytes";
        EXPECT_TRUE(intact(tensor + bytes)) << "written past a tensor of " << bytes << " bytes";
        delete[] buffer;
    }
};

class HostTensor {
public:
    HostTensor() = default;
    HostTensor(DType dtype, std::initializer_list<int64_t> shape) : view_(make_view(nullptr, dtype, shape)) {
        allocate();
    }
    // rank and sizes known at run time only
    HostTensor(DType dtype, const int64_t* dims, int rank) {
        view_.dtype = dtype;
        view_.rank = rank;
        for (int i = 0; i < rank; ++i) view_.dims[i] = dims[i];
        allocate();
    }
    template <class T> static HostTensor of(const std::vector<T>& values) {  // 1-D
        HostTensor tensor(dtype_of<T>::value, {static_cast<int64_t>(values.size())});
        if (!values.empty()) std::memcpy(tensor.view_.data, values.data(), values.size() * sizeof(T));
        return tensor;
    }

    operator TensorView() const { return view_; }  // NOLINT: a HostTensor is passed wherever a view is wanted
    const TensorView& view() const { return view_; }
    template <class T> T* as() const { return view_.as<T>(); }
    double operator()(int64_t i) const { return get(view_, i); }
    int64_t numel() const { return view_.numel(); }
    std::vector<uint8_t> bytes() const { return {view_.bytes_ptr(), view_.bytes_ptr() + view_.bytes()}; }

    // Makes this an M-tensor whose rows start at `base` of its buffer; the view points at the owned value.
    void set_row_base(int64_t base) {
        row_base_ = std::make_unique<int64_t>(base);
        view_.row_base = row_base_.get();
    }

    void fill_bytes(uint8_t value) {
        std::memset(view_.data, value, static_cast<std::size_t>(view_.bytes()));
    }
    void poison() { fill_bytes(0xFF); }
    void zero() { fill_bytes(0); }

private:
    void allocate() {
        constexpr uintptr_t kAlignment = 256;
        const int64_t size = view_.bytes() + 2 * kGuard + static_cast<int64_t>(kAlignment);
        auto* const buffer = new uint8_t[static_cast<std::size_t>(size)];
        std::memset(buffer, kGuardByte, static_cast<std::size_t>(size));
        const uintptr_t start = reinterpret_cast<uintptr_t>(buffer) + kGuard;
        view_.data = reinterpret_cast<void*>((start + kAlignment - 1) / kAlignment * kAlignment);
        buffer_ = {buffer, CheckGuards{view_.bytes_ptr(), view_.bytes()}};
        poison();
    }

    TensorView view_;
    std::unique_ptr<uint8_t[], CheckGuards> buffer_;
    std::unique_ptr<int64_t> row_base_;
};

// FP8 values with scales of the layout's shape; converts to ScaledTensor. With layout none: a plain tensor of
// any dtype.
struct HostScaled {
    HostTensor data;
    HostTensor scales;
    ScaleLayout layout = ScaleLayout::none;
    ScaleFormat format = ScaleFormat::undeclared;

    HostScaled() = default;
    // groups: for group_row. scale_dtype: f32 picks the free form of vec128_wire.
    HostScaled(DType dtype, std::initializer_list<int64_t> shape, ScaleLayout scale_layout,
               int64_t groups = 0, DType scale_dtype = DType::e8m0)
        : data(dtype, shape), layout(scale_layout) {
        const ScaleShape want = scale_shape(layout, data, groups);
        const bool free_form = layout == ScaleLayout::vec128_wire && scale_dtype == DType::f32;
        if (want.rank > 0) scales = HostTensor(free_form ? DType::f32 : want.dtype, want.dims, want.rank);
    }

    operator ScaledTensor() const { return {data.view(), scales.view(), layout, format}; }  // NOLINT
    HostScaled declared(ScaleFormat scale_format) && {
        format = scale_format;
        return std::move(*this);
    }
    void set_row_base(int64_t base) { data.set_row_base(base); }
};

// ---- fills
// element i = make(i), rounded once to the tensor's dtype
template <class Make> void fill(const TensorView& view, Make make) {
    for (int64_t i = 0; i < view.numel(); ++i) set(view, i, make(i));
}
inline void fill_normal(const TensorView& view, uint64_t seed, double stddev = 1.0) {
    fill(view, [&](int64_t i) { return stddev * random_normal(seed, 0, static_cast<uint64_t>(i)); });
}
inline void fill_uniform(const TensorView& view, uint64_t seed, double low, double high) {
    fill(view,
         [&](int64_t i) { return low + (high - low) * random_uniform(seed, 0, static_cast<uint64_t>(i)); });
}
// Powers of two 2^e, e uniform in [low, high]: scales.
inline void fill_pow2(const TensorView& view, uint64_t seed, int low, int high) {
    fill(view, [&](int64_t i) {
        const uint64_t word = random_words(seed, 1, static_cast<uint64_t>(i))[0];
        return std::ldexp(1.0, low + static_cast<int>(word % static_cast<uint64_t>(high - low + 1)));
    });
}

// ---- routed rows
// RowGroups from counts: group g takes counts[g] rows padded to `alignment`. extra_rows: capacity beyond the
// padded total.
class GroupsFixture {
public:
    GroupsFixture(const std::vector<int64_t>& counts, int64_t alignment, int64_t extra_rows = 0) {
        std::vector<int64_t> offsets{0};
        for (int64_t count : counts) offsets.push_back(offsets.back() + round_up(count, alignment));
        total_ = offsets.back();
        counts_ = HostTensor::of(counts);
        offsets_ = HostTensor::of(offsets);
        groups_ = {static_cast<int64_t>(counts.size()), counts_, offsets_, total_ + extra_rows, alignment};
    }

    operator RowGroups() const { return groups_; }  // NOLINT: as HostTensor
    int64_t num_groups() const { return groups_.num_groups; }
    int64_t capacity() const { return groups_.row_capacity; }
    int64_t total() const { return total_; }  // offsets[num_groups]
    int64_t count(int64_t g) const { return counts_.as<int64_t>()[g]; }
    int64_t first(int64_t g) const { return offsets_.as<int64_t>()[g]; }
    int64_t end(int64_t g) const { return offsets_.as<int64_t>()[g + 1]; }
    // Group of a row below total(), and whether the row is a pad.
    int64_t group_of(int64_t row) const {
        int64_t g = 0;
        while (end(g) <= row) ++g;
        return g;
    }
    bool is_pad(int64_t row) const {
        const int64_t g = group_of(row);
        return row >= first(g) + count(g);
    }

private:
    HostTensor counts_, offsets_;
    RowGroups groups_;
    int64_t total_ = 0;
};

// ---- comparing
inline std::vector<double> to_doubles(const TensorView& view) {
    std::vector<double> values(static_cast<std::size_t>(view.numel()));
    for (int64_t i = 0; i < view.numel(); ++i) values[static_cast<std::size_t>(i)] = get(view, i);
    return values;
}
// sum (a-b)^2 / sum b^2; NaN if anything is NaN, so that a forgotten (poisoned) element fails every bound.
// 0/0 is 0.
inline double nmse(const std::vector<double>& actual, const std::vector<double>& wanted) {
    if (actual.size() != wanted.size()) return std::nan("");
    double error = 0, power = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        error += (actual[i] - wanted[i]) * (actual[i] - wanted[i]);
        power += wanted[i] * wanted[i];
    }
    return error == 0 ? 0 : error / power;
}
inline double nmse(const TensorView& actual, const std::vector<double>& wanted) {
    return nmse(to_doubles(actual), wanted);
}
inline bool same_bytes(const TensorView& a, const TensorView& b) {
    return a.dtype == b.dtype && a.numel() == b.numel() &&
           (a.numel() == 0 || std::memcmp(a.data, b.data, static_cast<std::size_t>(a.bytes())) == 0);
}

inline bool same_bytes(const ScaledTensor& a, const ScaledTensor& b) {
    return same_bytes(a.data, b.data) && same_bytes(a.scales, b.scales);
}
inline void expect_same(const HostScaled& got, const HostScaled& want) {
    EXPECT_TRUE(same_bytes(got, want)) << name_of(got.layout);
}

// The derivative of loss() in `x`, which it reads, by a central difference.
template <class Loss> double slope(double& x, double step, const Loss& loss) {
    const double kept = x;
    x = kept + step;
    const double above = loss();
    x = kept - step;
    const double below = loss();
    x = kept;
    return (above - below) / (2 * step);
}

}  // namespace fp8flow::test
