// SPDX-License-Identifier: MIT
// The tensors of one benchmarked call. To keep the cache cold a call rotates over several sets of them: the
// first set is drawn on the host, the others are copies of it on the device, made by running the same builder
// again.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/random_fill.h"
#include "kernels/ops.h"
#include "model/bench/shape.h"

#include <functional>
#include <memory>
#include <vector>

namespace fp8flow::bench {

class Buffers {
public:
    // `first`: the set to copy, null for the first one. The arena's memory must outlive all calls. `filler`:
    // shared with other cases, so that random values are drawn once.
    Buffers(Device& device, Arena& arena, const Buffers* first, RandomFiller& filler)
        : device_(device), arena_(arena), first_(first), filler_(filler) {}
    Buffers(const Buffers&) = delete;
    Buffers& operator=(const Buffers&) = delete;

    using Dims = std::initializer_list<int64_t>;
    TensorView output(DType dtype, Dims shape);  // no result of any call
    TensorView zeros(DType dtype, Dims shape);   // for outputs that are accumulated into
    TensorView normal(DType dtype, Dims shape, double spread = 1.0);
    TensorView pow2(DType dtype, Dims shape);                          // positive, near 1
    TensorView integers(DType dtype, Dims shape, int64_t below);       // 0 to below - 1
    template <class T> TensorView values(const std::vector<T>& host);  // [n]

    ScaledTensor fp8_input(DType dtype, Dims shape, ScaleLayout layout, int64_t groups = 0);
    // scale: fp32 stores f32 scales on the wire
    ScaledTensor fp8_output(DType dtype, Dims shape, ScaleLayout layout, int64_t groups = 0,
                            ScaleFormat scale = ScaleFormat::undeclared);
    // A transposed copy [dim, M] of random rows, M a multiple of 128; zeros in the padding of the groups.
    ScaledTensor transposed_input(Ops& ops, DType dtype, int64_t dim, ScaleLayout layout,
                                  const RowGroups& groups);
    // Plain values or, for an FP8 dtype, FP8 values with scales.
    ScaledTensor operand(DType dtype, Dims shape, ScaleLayout layout, int64_t groups = 0);

    // Rows in groups after the keys M, G, rows, align (see group_keys); G = 0: no groups, row_capacity plain
    // rows.
    RowGroups routed(const Shape& shape);
    RowGroups routed(const std::vector<int64_t>& counts, int64_t alignment);

    // What `make` returns, computed for the first set only.
    template <class T, class Make> const T& once(Make make) {
        const std::size_t at = made_.size();
        made_.push_back(first_ != nullptr ? first_->made_.at(at) : std::make_shared<T>(make()));
        return *static_cast<const T*>(made_.back().get());
    }

    int64_t bytes() const { return bytes_; }  // of all tensors of this set
    Device& device() { return device_; }

private:
    TensorView allocate(DType dtype, Dims shape);
    // What the first set has here, or what `draw` writes.
    TensorView input(const TensorView& view, const std::function<void(uint64_t seed)>& draw);
    TensorView filled(const TensorView& view, Distribution distribution, double spread);
    TensorView values(const void* host, DType dtype, int64_t count);

    Device& device_;
    Arena& arena_;
    const Buffers* first_;
    RandomFiller& filler_;
    std::vector<TensorView> inputs_;
    std::vector<std::shared_ptr<void>> made_;
    int64_t bytes_ = 0;
};

template <class T> TensorView Buffers::values(const std::vector<T>& host) {
    return values(host.data(), dtype_of<T>::value, static_cast<int64_t>(host.size()));
}

// Counts of `total` rows in `groups` groups. balanced: equal; ragged: 0.4 to 1.75 of the mean, irregular;
// skewed: falling from twice the mean to none; empty: every second group empty; ragged128: as ragged, in
// multiples of 128.
std::vector<int64_t> group_counts(int64_t total, int64_t groups, int64_t distribution);
const std::vector<std::string>& distribution_names();

// The keys of routed rows: M, G, rows, align.
Keys group_keys(const char* alignment = "128");
Keys operator+(Keys first, const Keys& more);

}  // namespace fp8flow::bench
