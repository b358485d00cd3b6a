// SPDX-License-Identifier: MIT
// RowArena: saved tensors with one row per routed token copy. All MoE layers share one buffer per tensor
// kind, with the capacity of all layers together. The first row of a layer is a word on the device, because
// it depends on routing. Layers push in the forward and pop in the backward.
#pragma once

#include "kernels/core/arena.h"

#include <map>
#include <string>

namespace fp8flow {

class RowArena {
public:
    // Holds `capacity` rows over all saved layers, at most `max_layers` of them. Buffers are allocated on
    // first use and kept.
    RowArena(Device& device, int64_t capacity, int64_t max_layers);
    ~RowArena();
    RowArena(const RowArena&) = delete;
    RowArena& operator=(const RowArena&) = delete;

    int64_t capacity() const { return capacity_; }
    int64_t depth() const { return depth_; }
    // The layer being pushed: its first row, and the word in which its plan writes the next layer's first
    // row.
    const int64_t* row_base() const { return words_ + depth_; }
    TensorView next_row_base() const;
    // The plan of the layer being pushed raises this word to the number of rows that the layer needs.
    TensorView rows_wanted() const;
    void push() {
        ++depth_;
        deepest_ = depth_ > deepest_ ? depth_ : deepest_;
    }
    void pop(int64_t depth) { depth_ = depth; }

    // [capacity, width] (plain), or FP8 values with scales; transposed: [width, capacity].
    // row_base is the current layer's.
    TensorView tensor(DType dtype, int64_t width, const char* kind);
    TensorView vector(DType dtype, const char* kind);  // [capacity]
    ScaledTensor fp8(DType dtype, int64_t width, ScaleLayout layout, const char* kind);
    ScaledTensor fp8_transposed(DType dtype, int64_t width, ScaleLayout layout, const char* kind);

    // Bytes per row of every kind in use, and bytes reserved.
    const std::map<std::string, double>& bytes_per_row() const { return bytes_per_row_; }
    int64_t reserved_bytes() const { return reserved_; }
    // Rows in use with padding, of all layers that were last saved at the same time. (With recompute of whole
    // layers: of the last layer.) Waits for the device.
    int64_t used_rows() const;
    // The most rows that plans have needed so far, even if they did not fit, in blocks of 128: for one layer,
    // and over the layers saved at the same time. Waits for the device.
    struct Wanted {
        int64_t layer = 0, together = 0;
    };
    Wanted wanted() const;
    int64_t num_growths() const { return static_cast<int64_t>(buffers_.size()); }

private:
    void place(TensorView& view, const std::string& key);  // in the buffer of this key
    Device& device_;
    int64_t capacity_, max_layers_, depth_ = 0, deepest_ = 0, reserved_ = 0;
    int64_t* words_ = nullptr;  // device [2, max_layers + 1]: first rows; rows wanted by depth
    std::map<std::string, void*> buffers_;
    std::map<std::string, double> bytes_per_row_;
};

}  // namespace fp8flow
