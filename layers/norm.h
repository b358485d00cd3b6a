// SPDX-License-Identifier: MIT
// The norm before attention or the FFN. One operation writes BF16 rows for the router and the BF16 GEMMs, and
// the FP8 rows of the recipe.
#pragma once

#include "layers/flows/flow.h"

namespace fp8flow {

struct NormSaved {
    TensorView x;     // [T, H] input (the residual stream, owned by the block)
    TensorView rstd;  // [T] f32
    TokenRows out;
};

class Norm {
public:
    // `output`: what to deliver in addition to plain rows, quantised by `rule`. tensor_scaled keeps a delayed
    // scale (history of maxima) as state.
    Norm(ParameterStore& store, Device& device, const ModelSpec& model, const PrecisionSpec& precision,
         NormOutput output, const Rule& rule, const std::string& name);

    // out: allocated in `arena` (saved, or scratch where recompute `layernorm` drops it). rstd always goes to
    // ctx.saved.
    void forward(Context& ctx, const TensorView& x, Arena& arena, NormSaved& saved) const;
    // Rebuilds saved.out in `arena`, bit for bit.
    void recompute(Context& ctx, Arena& arena, NormSaved& saved) const;
    // dx = norm backward of dy + dresidual.
    void backward(Context& ctx, const TensorView& dy, const TensorView& dresidual, const NormSaved& saved,
                  const TensorView& dx) const;
    // begin_step sets the running maximum to zero, also for a redone step. update_state computes the delayed
    // scale of the next step.
    void begin_step(Context& ctx) const;
    void update_state(Context& ctx, const TensorView& step) const;
    // History and scale, for checkpoints; none without a delayed scale.
    std::vector<NamedTensor> state() const;

private:
    void write(Context& ctx, Arena& arena, NormSaved& saved) const;
    op::GammaForm form() const {
        return model_.zero_centered_gamma ? op::GammaForm::zero_centered : op::GammaForm::plain;
    }

    ModelSpec model_;
    PrecisionSpec precision_;
    NormOutput output_;
    Rule rule_;
    Parameter* gamma_;
    std::shared_ptr<Arena> state_;  // tensor_scaled only
    TensorView amax_, history_, scale_;
};

}  // namespace fp8flow
