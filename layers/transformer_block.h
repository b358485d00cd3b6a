// SPDX-License-Identifier: MIT
// One transformer block: norm, attention, residual; norm, MoE (or dense FFN), residual. The forward saves
// what the backward needs; the backward runs the same steps in reverse.
#pragma once

#include "layers/attention/attention.h"
#include "layers/moe_layer.h"
#include "layers/norm.h"

#include <memory>

namespace fp8flow {

struct BlockSaved {
    TensorView x;      // [T, H] input
    TensorView x_mid;  // [T, H] after attention
    NormSaved attention_norm, ffn_norm;
    AttentionSaved attention;
    MoeSaved moe;
    FfnSaved dense;
};

class TransformerBlock {
public:
    // spec.precision is the model's.
    TransformerBlock(ParameterStore& store, Device& device, const BlockSpec& spec);

    // y [T, H]; x must live until backward (the caller keeps it).
    void forward(Context& ctx, const TensorView& x, BlockSaved& saved, const TensorView& y) const;
    void backward(Context& ctx, const TensorView& dy, BlockSaved& saved, const TensorView& dx) const;

    bool is_moe() const { return moe_ != nullptr; }
    const Router* router() const { return moe_ ? &moe_->router() : nullptr; }
    Router* router() { return moe_ ? &moe_->router() : nullptr; }
    Attention* attention() { return attention_.get(); }
    void begin_step(Context& ctx) const;
    // Updates expert bias and delayed scales, unless the step status is set. The model has reduced the
    // statistics of all routers over ranks.
    void update_state(Context& ctx, const TensorView& step) const;
    // The tensors that update_state changes, for checkpoints.
    std::vector<NamedTensor> state() const;

private:
    void forward_once(Context& ctx, const TensorView& x, BlockSaved& saved, const TensorView& y) const;
    void backward_once(Context& ctx, const TensorView& dy, BlockSaved& saved, const TensorView& dx) const;

    void ffn_backward(Context& ctx, const TensorView& dy, BlockSaved& saved, const TensorView& dxn) const;
    const char* ffn_part() const { return moe_ ? "moe layer" : "dense layer"; }

    std::vector<const Norm*> norms() const;

    RecomputeSpec recompute_;
    int64_t layer_;
    std::unique_ptr<Norm> attention_norm_, ffn_norm_;
    std::unique_ptr<Flow> linear_flow_;  // with FP8 projections
    std::unique_ptr<Attention> attention_;
    std::unique_ptr<MoeLayer> moe_;
    std::unique_ptr<Flow> dense_flow_;
    std::unique_ptr<Ffn> dense_;
};

// The recipe of one layer: layers at the start and the end may stay in BF16.
PrecisionSpec precision_of_layer(const ModelSpec& model, const PrecisionSpec& precision, int layer);

}  // namespace fp8flow
