// SPDX-License-Identifier: MIT
// TensorView: a borrowed, row-major, contiguous tensor of run-time dtype and rank; what every op takes and
// returns. RowGroups: routed rows sorted by expert, with sizes that live on the device. Read next:
// scaled_tensor.h.
#pragma once

#include "kernels/core/dtype.h"

#include <cstdint>
#include <initializer_list>
#include <string>

namespace fp8flow {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Borrowed and trivially copyable; owns nothing. A default-constructed view is "absent" (optional arguments).
//
// row_base: tensors with one row per routed token copy ([M, *], and transposed copies [*, M]) may share one
// buffer with the same tensor of other layers (RowArena). Then `data` is the start of the shared buffer, the
// M dimension is its whole capacity, and *row_base, read on the device, is the first row of this layer. Null
// means 0.
struct TensorView {
    static constexpr int kMaxRank = 4;

    void* data = nullptr;
    DType dtype = DType::f32;
    int rank = 0;
    int64_t dims[kMaxRank] = {0, 0, 0, 0};
    const int64_t* row_base = nullptr;

    explicit operator bool() const { return rank > 0; }  // present (possibly with zero elements)

    int64_t dim(int i) const { return i < 0 ? dims[rank + i] : dims[i]; }
    int64_t numel() const {
        int64_t n = rank > 0 ? 1 : 0;
        for (int i = 0; i < rank; ++i) n *= dims[i];
        return n;
    }
    int64_t bytes() const { return numel() * size_of(dtype); }
    int64_t cols() const { return rank > 0 ? dims[rank - 1] : 0; }  // size of the contiguous dimension
    int64_t rows() const { return cols() > 0 ? numel() / cols() : (rank > 1 ? dims[0] : 0); }

    // Typed pointer; the type must match dtype.
    template <class T> T* as() const {
        if (dtype != dtype_of<T>::value) fail_dtype(dtype_of<T>::value);
        return static_cast<T*>(data);
    }
    uint8_t* bytes_ptr() const { return static_cast<uint8_t*>(data); }

    // The same elements under another shape (equal element count).
    TensorView reshape(std::initializer_list<int64_t> shape) const;
    // `count` entries of the leading dimension from `first`.
    TensorView slice(int64_t first, int64_t count) const;
    // Entry `index` of the leading dimension, rank reduced by one.
    TensorView operator[](int64_t index) const;

private:
    [[noreturn]] void fail_dtype(DType asked) const;
};

TensorView make_view(void* data, DType dtype, std::initializer_list<int64_t> shape);
std::string describe(const TensorView& view);  // "bf16[128, 256]"

// M routed rows in `num_groups` groups, one after the other: the local experts, or for each source rank the
// local experts (op::PlanDispatch::num_sources). Group g holds counts[g] valid rows followed by pads up
// to offsets[g+1]; offsets are multiples of `alignment`, offsets[num_groups] is the padded total. Rows are
// relative to the row_base of the tensor at hand. A group of 0 rows has no pads. counts and offsets are
// device data.
struct RowGroups {
    int64_t num_groups = 0;
    TensorView counts;         // [num_groups] i64
    TensorView offsets;        // [num_groups + 1] i64
    int64_t row_capacity = 0;  // upper bound of offsets[num_groups]
    int64_t alignment = 1;
    int64_t known_rows = 0;  // valid rows where the host happens to know them; for costs only

    // Rows to count in bytes and FLOPs.
    int64_t cost_rows() const {
        return known_rows > 0 && known_rows < row_capacity ? known_rows : row_capacity;
    }
    // Groups [first, first + count), where they are.
    RowGroups slice(int64_t first, int64_t count) const;
};

// Whether a gradient replaces or adds to what the output holds.
enum class Gradient { overwrite, accumulate };

}  // namespace fp8flow
