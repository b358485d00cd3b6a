// SPDX-License-Identifier: MIT
// Maps our parameters to tensors with Hugging Face names: one list of pieces per parameter, used by loading
// and by export. Read next: load.h, export.h.
#pragma once

#include "layers/parameter.h"
#include "layers/spec.h"
#include "model/safetensors/tensor_set.h"

#include <string>
#include <vector>

namespace fp8flow::weights {

constexpr int64_t kScaleBlock = 128;                   // FP8 weights have one scale for 128 x 128 values
constexpr int64_t kElementsAtOnce = int64_t{1} << 22;  // of a tensor in memory

// Of the scales of an FP8 tensor: its name, and its shape [.., ceil(N/128), ceil(K/128)] for [.., N, K].
std::string scale_name(const std::string& tensor);
std::vector<int64_t> scale_shape(std::vector<int64_t> shape);

// How the experts of a layer are stored.
enum class ExpertNames {
    projections,  // experts.E.gate_proj.weight, up_proj, down_proj (DeepSeek-V3, Qwen3-MoE)
    numbered,     // experts.E.w1.weight (gate), w3 (up), w2 (down): Mixtral
    fused         // experts.gate_up_proj [E, 2F, H], experts.down_proj [E, H, F]: Transformers 5
};

struct HfNames {
    std::string root = "model.";  // in front of layers, embed_tokens and norm
    std::string block = "mlp";    // of a layer's FFN; Mixtral: "block_sparse_moe"
    ExpertNames experts = ExpertNames::projections;
    std::string bias = "gate.e_score_correction_bias";  // of the router; MiniMax-M2: without "gate."
    int64_t first_layer = 0;                            // the files' number of our layer 0
    bool only_block = false;   // the files hold one MoE block alone; its names begin with block_prefix
    std::string block_prefix;  // with only_block: "", "mlp.", "block_sparse_moe."

    std::string layer(int64_t ours) const;     // "model.layers.3."
    std::string ffn(int64_t our_layer) const;  // "model.layers.3.mlp."
};

// Finds out how the tensors of a MoE layer are named, from the name of its router's weight. `layer`: its
// number in the files. Throws Error(set.code()) with the reason for layouts that are not supported.
HfNames find_names(const TensorSet& set, int64_t layer);

// Rows [file_row, file_row + rows) of a tensor in a file are rows [row, row + rows) of a parameter; both are
// seen as [all rows, cols], the last dimension being contiguous. One-dimensional tensors have one column.
struct WeightPiece {
    std::string tensor;
    std::vector<int64_t> shape;  // of the whole tensor in the file
    int64_t file_row = 0, row = 0, rows = 0, cols = 0;
};

// The pieces of a parameter in the order of its rows (embedding and head: without the rows that pad the
// vocabulary). Experts are those from spec.first_expert.
std::vector<WeightPiece> pieces_of(const ParameterSpec& spec, const ModelSpec& model, const MoeSpec& moe,
                                   const HfNames& names);

// The parameter with the experts of all ranks.
ParameterSpec of_all_experts(const ParameterSpec& spec, const MoeSpec& moe);

}  // namespace fp8flow::weights
