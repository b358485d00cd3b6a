// SPDX-License-Identifier: MIT
// Maps our parameters to tensors with Hugging Face names: one list of pieces per parameter, used by loading
// and by export. Read next: load.h, export.h.
#pragma once

#include "layers/parameter.h"
#include "layers/spec.h"
#include "model/config/config.h"
#include "model/config/hf_families.h"
#include "model/safetensors/tensor_set.h"

#include <string>
#include <vector>

namespace fp8flow::weights {

constexpr int64_t kScaleBlock = 128;                   // FP8 weights have one scale for 128 x 128 values
constexpr int64_t kElementsAtOnce = int64_t{1} << 22;  // of a tensor in memory

// Of the scales of an FP8 tensor: its name, and its shape [.., ceil(N/128), ceil(K/128)] for [.., N, K].
std::string scale_name(const std::string& tensor);
std::vector<int64_t> scale_shape(std::vector<int64_t> shape);

struct HfNames {
    HfStorage storage;
    ExpertNames shared = ExpertNames::projections;  // of the shared expert; linear: gate and up in one
    int64_t first_layer = 0;                        // the files' number of our layer 0
    bool only_block = false;   // the files hold one MoE block alone; its names begin with block_prefix
    std::string block_prefix;  // with only_block: "", "mlp.", "block_sparse_moe."
    WeightFolds folds;
    // Of dense FFNs in the files, where the parameters are wider; 0: theirs. What is added to gate, up and
    // down is zero and stays zero: the activation there is silu(0) * 0 = 0, which is a column of zeros in the
    // gradient of down, and down's zeros make the gradients of gate and up zero. AdamW and weight decay move
    // no zero without a gradient, and no recipe rounds a zero to anything else.
    int64_t dense_width = 0;

    std::string layer(int64_t ours) const;     // "model.layers.3."
    std::string ffn(int64_t our_layer) const;  // "model.layers.3.mlp."
    std::string shared_expert(int64_t our_layer) const;
    bool joins_experts() const {  // all experts of a layer are in one tensor, so one rank writes them
        return storage.experts != ExpertNames::projections && storage.experts != ExpertNames::numbered;
    }
    // What names of our layer 0's MoE block begin with.
    std::vector<std::string> scopes() const;
};

// Finds out how the tensors of a MoE layer are named, from the name of its router's weight. `layer`: its
// number in the files; `family`: the names that are tried first, those of the other families follow. Throws
// Error(data) with the reason for layouts that are not supported.
HfNames find_names(const TensorSet& set, int64_t layer, const std::string& family = {});

// Rows [file_row, file_row + rows) of a tensor in a file are rows [row, row + rows) of a parameter; both are
// seen as [all rows, cols], the last dimension being contiguous. One-dimensional tensors have one column.
struct WeightPiece {
    std::string tensor;
    std::vector<int64_t> shape;  // of the whole tensor in the file
    int64_t file_row = 0, row = 0, rows = 0, cols = 0;
    double scale = 1;            // values are multiplied by it, here and in gradients of what the file holds
    std::vector<int64_t> order;  // row i of so many is the file's row order[i]; empty: as they are
    bool transposed = false;  // rows and cols are the file's; ours are [cols, rows], and `row` counts those
    int64_t wider = 0;        // columns of the parameter, the last ones are zero; 0: cols
    int64_t zero_rows = 0;    // rows of the parameter after these that no file has, all zero

    int64_t our_rows() const { return transposed ? cols : rows; }
    int64_t our_cols() const { return transposed ? rows : wider > 0 ? wider : cols; }
    bool plain() const { return scale == 1 && order.empty() && !transposed && wider == 0; }
    int64_t file_row_of(int64_t our_row) const {
        if (order.empty()) return file_row + our_row;
        const auto size = static_cast<int64_t>(order.size());
        return file_row + our_row / size * size + order[to_size(our_row % size)];
    }
};

// The pieces of a parameter in the order of its rows (embedding and head: without the rows that pad the
// vocabulary). Experts are those from spec.first_expert.
std::vector<WeightPiece> pieces_of(const ParameterSpec& spec, const ModelSpec& model, const MoeSpec& moe,
                                   const HfNames& names);

// The parameter with the experts of all ranks.
ParameterSpec of_all_experts(const ParameterSpec& spec, const MoeSpec& moe);

}  // namespace fp8flow::weights
