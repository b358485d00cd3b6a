// SPDX-License-Identifier: MIT
// Recipe bf16, the baseline of all comparisons: BF16 on the wire and in every GEMM, no casts.
// The internal recipe fp32 of the gradient checks is the same file with fp32 tensors.
#include "layers/flows/steps.h"

namespace fp8flow {

using namespace steps;

namespace {

class Bf16Flow final : public Flow {
public:
    using Flow::Flow;
    WeightFormat weight_format() const override { return {}; }
    std::vector<int64_t> row_alignments() const override { return {1, 16, 32, 128}; }
    double operand_bytes() const override { return kPlainBytes; }
    // x, h, a
    double saved_bytes_routed(int64_t hidden, int64_t width) const override {
        return kPlainBytes *
               static_cast<double>(hidden + (drops_h() ? 0 : 2 * width) + (drops_a() ? 0 : width));
    }
    double saved_bytes_local(int64_t, int64_t width) const override {
        return kPlainBytes * static_cast<double>(3 * width);
    }

    void forward(Context& ctx, const Forward& io, ExpertsSaved& saved) const override {
        ArenaScope scope(ctx.scratch);
        begin_routed(saved, io.plan, precision_);
        const int64_t hidden = io.x.plain.cols();
        saved.x.data = rows(ctx, saved, Life::backward, ctx.activation, hidden, "dispatch");  // [M, H] bf16
        const TensorView ye = rows(ctx, saved, Life::call, ctx.activation, hidden, "fc2");    // [M, H] bf16

        dispatch(ctx, {.data = io.x.plain}, io.plan, PermutePadding::fused, saved.x);
        experts_forward(ctx, io.weights, saved, ye);
        combine_output(ctx, io, ye, precision_);
    }

    void backward(Context& ctx, const Backward& io, ExpertsSaved& saved) const override {
        begin_backward(saved, io.plan);
        const int64_t hidden = io.dx.cols();
        ScaledTensor dye{
            .data = rows(ctx, saved, Life::call, ctx.activation, hidden, "dispatch")};       // [M, H] bf16
        const TensorView dxe = rows(ctx, saved, Life::call, ctx.activation, hidden, "fc1");  // [M, H] bf16
        const TensorView drow_prob = row_vector(ctx, saved, Life::call, "swiglu");           // [M] f32

        dispatch(ctx, {.data = io.dy.plain}, io.plan, PermutePadding::fused, dye);
        experts_backward(ctx, io.weights, saved, dye, drow_prob, dxe);
        combine_gradient(ctx, io, dxe, drow_prob);
    }

    void dense_forward(Context& ctx, const TokenRows& x, const ExpertWeights& weights, ExpertsSaved& saved,
                       const TensorView& y) const override {
        ArenaScope scope(ctx.scratch);
        begin_dense(ctx, saved);
        saved.x.data = x.plain;
        experts_forward(ctx, weights, saved, y);
    }

    void dense_backward(Context& ctx, const TokenRows& x, const TokenRows& dy, const ExpertWeights& weights,
                        ExpertsSaved& saved, const TensorView& dx) const override {
        ArenaScope scope(ctx.scratch);
        saved.x.data = x.plain;
        experts_backward(ctx, weights, saved, {.data = dy.plain}, saved.dprob, dx);
    }

private:
    // x [M, H] -> h [M, 2F] -> a [M, F] -> ye [M, H]
    void experts_forward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved,
                         const TensorView& ye) const {
        const bool drop_h = drops_h(), drop_a = drops_a(saved.routed);
        saved.h = rows(ctx, saved, keep_unless(drop_h), ctx.activation, w.w1->spec.shape[1], "fc1");
        saved.a.data = rows(ctx, saved, keep_unless(drop_a), ctx.activation, w.w2->spec.shape[2], "swiglu");

        forward_gemm(ctx, "fc1", saved.x, *w.w1, saved.groups, saved.h);
        swiglu(ctx, saved, saved.a.data);
        forward_gemm(ctx, "fc2", saved.a, *w.w2, saved.groups, ye);
        if (drop_h) saved.h = {};
        if (drop_a) saved.a = {};
    }

    void experts_backward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved, const ScaledTensor& dye,
                          const TensorView& drow_prob, const TensorView& dxe) const {
        const int64_t ffn = w.w2->spec.shape[2];
        if (!saved.h) {  // moe_expert
            saved.h = rows(ctx, saved, Life::call, ctx.activation, w.w1->spec.shape[1], "fc1");
            forward_gemm(ctx, "fc1", saved.x, *w.w1, saved.groups, saved.h);
        }
        if (!saved.a) {  // moe_act, moe_expert
            saved.a.data = rows(ctx, saved, Life::call, ctx.activation, ffn, "swiglu");
            swiglu(ctx, saved, saved.a.data);
        }
        const TensorView da = rows(ctx, saved, Life::call, ctx.activation, ffn, "fc2");            // [M, F]
        ScaledTensor dh{.data = rows(ctx, saved, Life::call, ctx.activation, 2 * ffn, "swiglu")};  // [M, 2F]

        aside(ctx, saved, [&](Context& side_ctx) {
            weight_gradient(side_ctx, "fc2 wgrad", dye, saved.a, saved.groups, *w.w2);
        });
        data_gradient(ctx, "fc2 dgrad", dye, *w.w2, saved.groups, da);
        swiglu_backward(ctx, saved, da, dh.data, drow_prob);
        aside(ctx, saved, [&](Context& side_ctx) {
            weight_gradient(side_ctx, "fc1 wgrad", dh, saved.x, saved.groups, *w.w1);
        });
        data_gradient(ctx, "fc1 dgrad", dh, *w.w1, saved.groups, dxe);
    }
};

}  // namespace

std::unique_ptr<Flow> make_bf16_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    return std::make_unique<Bf16Flow>(precision, recompute);
}

}  // namespace fp8flow
