// SPDX-License-Identifier: MIT
// LoneLayer: one MoE layer together with its parameters, saved activations and workspace, for `fp8flow
// replay` and other programs. In a model, layers share these. Read next: moe_layer.h.
#pragma once

#include "layers/moe_layer.h"
#include "layers/norm.h"

#include <memory>

namespace fp8flow {

struct LoneLayerSpec {
    int64_t hidden_size = 0;  // H
    int64_t max_tokens = 0;   // S: of one call, on any rank
    MoeSpec moe;
    PrecisionSpec precision;
    RecomputeSpec recompute;
    // An RMSNorm in front of the layer, in one kernel with the recipe's cast. Where the recipe has delayed
    // scales, which need the history of a run (fp8_tensorwise), the experts cast for themselves.
    bool norm = false;
    bool zero_centered_gamma = false;
    double norm_epsilon = 1e-5;
    GluSpec glu = {};
    bool residual = false;  // y = x + layer(x)
    double init_method_std = 0.02;
    uint64_t seed = 1;
    Masters masters = Masters::own;
    int64_t replica = 0;  // of this rank, among the ranks that hold the same experts
    GemmObserver* gemms = nullptr;
};

// Rows are [T, H] bf16 on the device of the operations; T <= S may differ between ranks. Calls are made on
// one stream, and all ranks make the same calls. Buffers are sized for the worst routing, so no call is
// redone; they grow in the first calls. Balancing losses are scaled as if every rank had S tokens. Errors are
// thrown as Error.
class LoneLayer {
public:
    // The ranks of `exchange` share the experts, an equal part each; `ops` and `exchange` outlive the layer.
    // Weights are those of the seed, the same for every number of ranks.
    LoneLayer(Ops& ops, Exchange& exchange, const LoneLayerSpec& spec);

    // y may be x only without residual.
    void forward(const TensorView& x, const TensorView& y, const Launch& launch = {});
    // Backward of the last forward; x must be unmodified. Writes dx and overwrites the main gradients of all
    // weights, or adds to them. Expert gradients cover all ranks' tokens, all others this rank's tokens.
    void backward(const TensorView& dy, const TensorView& dx, Gradient mode = Gradient::overwrite,
                  const Launch& launch = {});
    // The sum over all ranks of the gradients that every rank has a part of (router, norm, shared expert;
    // experts that several ranks hold).
    void reduce_gradients(const Launch& launch = {});
    // Before and after the micro-batches of an optimizer step: begin_step sets the routing statistics to zero
    // (as in a new layer), end_step updates the expert bias, if there is one.
    void begin_step(const Launch& launch = {});
    void end_step(const Launch& launch = {});

    // Names, FP32 masters, main gradients, in the order router, fc1, fc2. After a change of masters:
    // write_copies. With Masters::callers there are neither (ParameterStore).
    ParameterStore& parameters() { return store_; }
    void write_copies() { store_.write_all_copies(exchange_); }
    // Of the last forward.
    const MoeSaved& saved() const { return saved_moe_; }
    const Router& router() const { return layer_->router(); }
    const RowGroups& all_tokens() const { return all_tokens_; }

private:
    Context context(const Launch& launch);
    TokenRows layer_input(Context& ctx);
    void set_tokens(int64_t tokens, const Launch& launch);

    Ops& ops_;
    Exchange& exchange_;
    LoneLayerSpec spec_;
    ParameterStore store_;
    Arena state_, kept_, scratch_;
    int64_t layer_rows_;
    RowArena rows_;
    StageTimer timer_;
    std::unique_ptr<Flow> flow_;  // says what the experts want from the norm
    std::unique_ptr<Norm> norm_;
    std::unique_ptr<MoeLayer> layer_;
    int64_t tokens_ = -1;
    RowGroups all_tokens_;
    TensorView status_, zero_, x_;
    TokenRows input_;
    NormSaved saved_norm_;
    MoeSaved saved_moe_;
};

}  // namespace fp8flow
