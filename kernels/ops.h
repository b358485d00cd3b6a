// SPDX-License-Identifier: MIT
// class Ops: every local operation, one method each (the contracts: kernels/ops/*.h). A method checks its
// arguments, counts calls, bytes and FLOPs, tells the observer, then calls the backend's do_x. The same
// operations as macros, for generated code: kernels/ops/list.h. Read next: kernels/exchange.h.
#pragma once

#include "kernels/core/device.h"
#include "kernels/core/op_observer.h"
#include "kernels/ops/list.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace fp8flow {

struct OpCount {
    int64_t calls = 0;
    double bytes = 0;
    double flops = 0;
};

// Argument checks and costs, one overload per op (kernels/ops/checks_*.cpp, kernels/ops/costs.cpp). check
// throws Error(internal).
#define FP8FLOW_DECLARE(name, Args)   \
    void check(const op::Args& args); \
    OpCost cost(const op::Args& args);
FP8FLOW_FOR_EACH_OP(FP8FLOW_DECLARE)
FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_DECLARE)
#undef FP8FLOW_DECLARE

// Whether an op is an explicit cast: a stand-alone quantiser (or dequantiser) of activations.
bool is_cast(std::string_view op);

class Ops {
public:
    virtual ~Ops() = default;

    // Memory of the device the ops run on, and copies to and from the host.
    virtual Device& device() = 0;

    // ---- norm
    void rms_norm(const op::RmsNorm& args, const Launch& launch = {});
    void rms_norm_quantize(const op::RmsNormQuantize& args, const Launch& launch = {});
    void rms_norm_backward(const op::RmsNormBackward& args, const Launch& launch = {});

    // ---- router
    void router_logits(const op::RouterLogits& args, const Launch& launch = {});
    void router_logits_backward(const op::RouterLogitsBackward& args, const Launch& launch = {});
    void router_top_k(const op::RouterTopK& args, const Launch& launch = {});
    void router_top_k_backward(const op::RouterTopKBackward& args, const Launch& launch = {});
    void expert_bias_update(const op::ExpertBiasUpdate& args, const Launch& launch = {});

    // ---- quantise and transpose
    void quantize_rows(const op::QuantizeRows& args, const Launch& launch = {});
    void quantize_columns(const op::QuantizeColumns& args, const Launch& launch = {});
    void quantize_dual(const op::QuantizeDual& args, const Launch& launch = {});
    void quantize_tensor(const op::QuantizeTensor& args, const Launch& launch = {});
    void quantize_weight(const op::QuantizeWeight& args, const Launch& launch = {});
    void dequantize(const op::Dequantize& args, const Launch& launch = {});
    void clip_fp8(const op::ClipFp8& args, const Launch& launch = {});
    void measure_quantization(const op::MeasureQuantization& args, const Launch& launch = {});
    void relayout_scales(const op::RelayoutScales& args, const Launch& launch = {});
    void delayed_scale_update(const op::DelayedScaleUpdate& args, const Launch& launch = {});
    void transpose_fp8(const op::TransposeFp8& args, const Launch& launch = {});
    void transpose_requantize(const op::TransposeRequantize& args, const Launch& launch = {});

    // ---- plan and permute
    void plan_dispatch(const op::PlanDispatch& args, const Launch& launch = {});
    void permute_pad(const op::PermutePad& args, const Launch& launch = {});
    void unpermute_unpad(const op::UnpermuteUnpad& args, const Launch& launch = {});
    void unpermute_probs_backward(const op::UnpermuteProbsBackward& args, const Launch& launch = {});
    void pad_rows(const op::PadRows& args, const Launch& launch = {});
    void unpad_rows(const op::UnpadRows& args, const Launch& launch = {});

    // ---- experts
    void gemm(const op::Gemm& args, const Launch& launch = {});
    void grouped_gemm(const op::GroupedGemm& args, const Launch& launch = {});
    void grouped_gemm_wgrad(const op::GroupedGemmWgrad& args, const Launch& launch = {});
    void swiglu(const op::Swiglu& args, const Launch& launch = {});
    void swiglu_backward(const op::SwigluBackward& args, const Launch& launch = {});
    void swiglu_quantize(const op::SwigluQuantize& args, const Launch& launch = {});
    void swiglu_backward_quantize(const op::SwigluBackwardQuantize& args, const Launch& launch = {});

    // ---- attention
    void rope(const op::Rope& args, const Launch& launch = {});
    void attention(const op::Attention& args, const Launch& launch = {});
    void attention_backward(const op::AttentionBackward& args, const Launch& launch = {});
    void split_qkv(const op::SplitQkv& args, const Launch& launch = {});
    void merge_qkv(const op::MergeQkv& args, const Launch& launch = {});
    void latent_heads(const op::LatentHeads& args, const Launch& launch = {});
    void latent_heads_backward(const op::LatentHeadsBackward& args, const Launch& launch = {});

    // ---- both ends and element-wise
    void embedding(const op::Embedding& args, const Launch& launch = {});
    void embedding_backward(const op::EmbeddingBackward& args, const Launch& launch = {});
    void cross_entropy(const op::CrossEntropy& args, const Launch& launch = {});
    void sum(const op::Sum& args, const Launch& launch = {});
    void add(const op::Add& args, const Launch& launch = {});
    void cast(const op::Cast& args, const Launch& launch = {});
    void zero(const op::Zero& args, const Launch& launch = {});
    void fill_normal(const op::FillNormal& args, const Launch& launch = {});
    void count_non_finite(const op::CountNonFinite& args, const Launch& launch = {});

    // ---- optimizer
    void norm_squared(const op::NormSquared& args, const Launch& launch = {});
    void add_squares(const op::AddSquares& args, const Launch& launch = {});
    void clip_factor(const op::ClipFactor& args, const Launch& launch = {});
    void adamw(const op::AdamW& args, const Launch& launch = {});

    // ---- fused; composed of the above unless a backend overrides them
    void grouped_gemm_swiglu_quantize(const op::GroupedGemmSwigluQuantize& args, const Launch& launch = {});
    void qkv_heads(const op::QkvHeads& args, const Launch& launch = {});
    void qkv_heads_backward(const op::QkvHeadsBackward& args, const Launch& launch = {});
    void adamw_quantize(const op::AdamWQuantize& args, const Launch& launch = {});

    // Calls, bytes and FLOPs per op name since the last reset. The number of explicit casts of a layer is the
    // number of calls to the stand-alone activation quantisers.
    const std::map<std::string, OpCount>& counts() const { return counts_; }
    int64_t num_casts() const;
    void reset_counts() { counts_.clear(); }
    // Told of every call from now on; null: no observer.
    void observe(OpObserver* observer) { observer_ = observer; }

protected:
#define FP8FLOW_VIRTUAL(name, Args) virtual void do_##name(const op::Args& args, const Launch& launch) = 0;
    FP8FLOW_FOR_EACH_OP(FP8FLOW_VIRTUAL)
#undef FP8FLOW_VIRTUAL
#define FP8FLOW_COMPOSED(name, Args) virtual void do_##name(const op::Args& args, const Launch& launch);
    FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_COMPOSED)
#undef FP8FLOW_COMPOSED

private:
    template <class Args> void begin(const char* name, const Args& args);

    std::map<std::string, OpCount> counts_;
    OpObserver* observer_ = nullptr;
};

}  // namespace fp8flow
