// SPDX-License-Identifier: MIT
// The list of every local operation, by family, as X(name, Args). From it come the methods and virtual do_x
// of Ops, the overrides of both backends, bench's registry and the tests' coverage: a missing operation is a
// compile error. Adding one: here, check and cost, both backends.
#pragma once

#include "kernels/ops/attention.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/measure.h"
#include "kernels/ops/norm.h"
#include "kernels/ops/optimizer.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/quantize.h"
#include "kernels/ops/router.h"
#include "kernels/ops/squares.h"
#include "kernels/ops/swiglu.h"
#include "kernels/ops/token.h"
#include "kernels/ops/transpose.h"

// Operations every backend writes itself.
#define FP8FLOW_FOR_EACH_OP(X)                          \
    /* norm */                                          \
    X(rms_norm, RmsNorm)                                \
    X(rms_norm_quantize, RmsNormQuantize)               \
    X(rms_norm_backward, RmsNormBackward)               \
    /* router */                                        \
    X(router_logits, RouterLogits)                      \
    X(router_logits_backward, RouterLogitsBackward)     \
    X(router_top_k, RouterTopK)                         \
    X(router_top_k_backward, RouterTopKBackward)        \
    X(expert_bias_update, ExpertBiasUpdate)             \
    /* quantise and transpose */                        \
    X(quantize_rows, QuantizeRows)                      \
    X(quantize_columns, QuantizeColumns)                \
    X(quantize_dual, QuantizeDual)                      \
    X(quantize_tensor, QuantizeTensor)                  \
    X(quantize_weight, QuantizeWeight)                  \
    X(dequantize, Dequantize)                           \
    X(clip_fp8, ClipFp8)                                \
    X(measure_quantization, MeasureQuantization)        \
    X(relayout_scales, RelayoutScales)                  \
    X(delayed_scale_update, DelayedScaleUpdate)         \
    X(transpose_fp8, TransposeFp8)                      \
    X(transpose_requantize, TransposeRequantize)        \
    /* plan and permute */                              \
    X(plan_dispatch, PlanDispatch)                      \
    X(permute_pad, PermutePad)                          \
    X(unpermute_unpad, UnpermuteUnpad)                  \
    X(unpermute_probs_backward, UnpermuteProbsBackward) \
    X(pad_rows, PadRows)                                \
    X(unpad_rows, UnpadRows)                            \
    /* experts */                                       \
    X(gemm, Gemm)                                       \
    X(grouped_gemm, GroupedGemm)                        \
    X(grouped_gemm_wgrad, GroupedGemmWgrad)             \
    X(swiglu, Swiglu)                                   \
    X(swiglu_backward, SwigluBackward)                  \
    X(swiglu_quantize, SwigluQuantize)                  \
    X(swiglu_backward_quantize, SwigluBackwardQuantize) \
    /* attention */                                     \
    X(rope, Rope)                                       \
    X(attention, Attention)                             \
    X(attention_backward, AttentionBackward)            \
    X(split_qkv, SplitQkv)                              \
    X(merge_qkv, MergeQkv)                              \
    X(latent_heads, LatentHeads)                        \
    X(latent_heads_backward, LatentHeadsBackward)       \
    /* both ends and element-wise */                    \
    X(embedding, Embedding)                             \
    X(embedding_backward, EmbeddingBackward)            \
    X(cross_entropy, CrossEntropy)                      \
    X(sum, Sum)                                         \
    X(add, Add)                                         \
    X(cast, Cast)                                       \
    X(zero, Zero)                                       \
    X(fill_normal, FillNormal)                          \
    X(count_non_finite, CountNonFinite)                 \
    /* optimizer */                                     \
    X(norm_squared, NormSquared)                        \
    X(add_squares, AddSquares)                          \
    X(clip_factor, ClipFactor)                          \
    X(adamw, AdamW)

// Fused operations that the base class composes from the above; a backend may override them with one kernel.
#define FP8FLOW_FOR_EACH_COMPOSED_OP(X)                        \
    X(grouped_gemm_swiglu_quantize, GroupedGemmSwigluQuantize) \
    X(qkv_heads, QkvHeads)                                     \
    X(qkv_heads_backward, QkvHeadsBackward)                    \
    X(adamw_quantize, AdamWQuantize)
