// SPDX-License-Identifier: MIT
// The members of every operation's arguments with their names, for code that treats all operations alike:
// bench's plugins, and tests that copy arguments to a device. A member that is missing here, or an operation,
// does not compile.
#pragma once

#include "kernels/ops/list.h"

#include <concepts>
#include <type_traits>

namespace fp8flow::op {

// FP8FLOW_FIELDS(Args, members...): each_field(args, visit) calls visit("name", args.name) in this order.
#define FP8FLOW_PARENTHESES ()
#define FP8FLOW_EXPAND(...) \
    FP8FLOW_EXPAND_4(FP8FLOW_EXPAND_4(FP8FLOW_EXPAND_4(FP8FLOW_EXPAND_4(__VA_ARGS__))))
#define FP8FLOW_EXPAND_4(...) \
    FP8FLOW_EXPAND_1(FP8FLOW_EXPAND_1(FP8FLOW_EXPAND_1(FP8FLOW_EXPAND_1(__VA_ARGS__))))
#define FP8FLOW_EXPAND_1(...) __VA_ARGS__
#define FP8FLOW_VISIT(name, ...) \
    visit(#name, args.name);     \
    __VA_OPT__(FP8FLOW_VISIT_REST FP8FLOW_PARENTHESES(__VA_ARGS__))
#define FP8FLOW_VISIT_REST() FP8FLOW_VISIT
#define FP8FLOW_FIELDS(Args, ...)                                                      \
    template <class A, class F>                                                        \
    requires std::same_as<std::remove_const_t<A>, Args>                                \
    void each_field(A& args, F&& visit) {                                              \
        [[maybe_unused]] const auto& [__VA_ARGS__] = args; /* neither more nor less */ \
        FP8FLOW_EXPAND(FP8FLOW_VISIT(__VA_ARGS__))                                     \
    }

// Parts of arguments.
FP8FLOW_FIELDS(RouterOptions, score, pre_softmax, normalise, num_groups, group_topk, scaling_factor)
FP8FLOW_FIELDS(RouterBalance, set_tokens, counts, score_sums, log_squares)
FP8FLOW_FIELDS(BalanceTerm, counts, weight)
FP8FLOW_FIELDS(WgradOperands, dy, x, groups)
FP8FLOW_FIELDS(GluForm, alpha, offset, limit)

FP8FLOW_FIELDS(RmsNorm, x, gamma, eps, gamma_form, y, rstd)
FP8FLOW_FIELDS(RmsNormQuantize, x, gamma, eps, gamma_form, scale_format, y, rows, transposed, amax, rstd)
FP8FLOW_FIELDS(RmsNormBackward, dy, x, gamma, rstd, dresidual, gamma_form, dgamma_mode, dx, dgamma)
FP8FLOW_FIELDS(RouterLogits, x, weight, logits)
FP8FLOW_FIELDS(RouterLogitsBackward, dlogits, x, weight, dx_in, dweight_mode, dx, dweight)
FP8FLOW_FIELDS(RouterTopK, logits, expert_bias, options, forced_ids, ids, probs, counts, balance)
FP8FLOW_FIELDS(RouterTopKBackward, logits, ids, dprobs, options, terms, z_weight, balance, losses, dlogits)
FP8FLOW_FIELDS(ExpertBiasUpdate, counts, rate, status, bias)
FP8FLOW_FIELDS(QuantizeRows, src, groups, scale_format, mx_rounding, dst)
FP8FLOW_FIELDS(QuantizeColumns, src, groups, scale_format, mx_rounding, dst, src2, dst2)
FP8FLOW_FIELDS(QuantizeDual, src, groups, scale_format, mx_rounding, rows, columns)
FP8FLOW_FIELDS(QuantizeTensor, src, groups, scale_format, rows, transposed)
FP8FLOW_FIELDS(QuantizeWeight, src, scale_format, mx_rounding, fprop, dgrad)
FP8FLOW_FIELDS(Dequantize, src, groups, dst)
FP8FLOW_FIELDS(ClipFp8, groups, share, rows)
FP8FLOW_FIELDS(MeasureQuantization, quantized, source, groups, copy, sums)
FP8FLOW_FIELDS(RelayoutScales, wire, vec128)
FP8FLOW_FIELDS(DelayedScaleUpdate, position, scale_format, status, amax, history, scale)
FP8FLOW_FIELDS(TransposeFp8, src, groups, dst)
FP8FLOW_FIELDS(TransposeRequantize, src, groups, scale_format, dst)
FP8FLOW_FIELDS(PlanDispatch, all_ids, all_probs, rank, first_expert, num_local_experts, num_sources, row_base,
               groups, row_source, row_prob, recv_rows, recv_offsets, recv_source, send_tokens, send_counts,
               next_row_base, rows_wanted, overflow)
FP8FLOW_FIELDS(PermutePad, src, row_source, recv_rows, num_rows, groups, dst)
FP8FLOW_FIELDS(UnpermuteUnpad, src, recv_rows, num_rows, row_prob, dst)
FP8FLOW_FIELDS(UnpermuteProbsBackward, ddst, src, row_source, recv_rows, num_rows, groups, drow_prob)
FP8FLOW_FIELDS(PadRows, src, src_groups, dst_groups, dst)
FP8FLOW_FIELDS(UnpadRows, src, src_groups, dst_groups, dst)
FP8FLOW_FIELDS(Gemm, a, b, form, mode, d)
FP8FLOW_FIELDS(GroupedGemm, a, b, groups, form, d)
FP8FLOW_FIELDS(GroupedGemmWgrad, dy, x, groups, mode, dw, second, more, rounding, squares)
FP8FLOW_FIELDS(GroupedGemmSwigluQuantize, a, b, groups, prob, form, scale_format, save_h, h, act)
FP8FLOW_FIELDS(Swiglu, h, prob, groups, form, a)
FP8FLOW_FIELDS(SwigluQuantize, h, prob, groups, form, scale_format, a)
FP8FLOW_FIELDS(SwigluBackward, da, h, prob, groups, form, dh, dprob)
FP8FLOW_FIELDS(SwigluBackwardQuantize, da, h, prob, groups, form, scale_format, dh, dprob)
FP8FLOW_FIELDS(Rope, table, direction, x)
FP8FLOW_FIELDS(Attention, q, k, v, seq_length, scale, documents, o, lse)
FP8FLOW_FIELDS(AttentionBackward, dout, q, k, v, o, lse, seq_length, scale, documents, dq, dk, dv)
FP8FLOW_FIELDS(SplitQkv, qkv, bias, q, k, v)
FP8FLOW_FIELDS(MergeQkv, q, k, v, dbias_mode, qkv, dbias)
FP8FLOW_FIELDS(QkvHeads, qkv, bias, table, q_gamma, k_gamma, eps, q, k, v, q_raw, k_raw, q_rstd, k_rstd)
FP8FLOW_FIELDS(QkvHeadsBackward, dq, dk, dv, table, q_raw, k_raw, q_gamma, k_gamma, q_rstd, k_rstd,
               dgamma_mode, scale_format, dqkv, rows, dq_gamma, dk_gamma, dbias)
FP8FLOW_FIELDS(LatentHeads, kv, k_rope, table, q, k, v)
FP8FLOW_FIELDS(LatentHeadsBackward, dk, dv, table, dq, dkv, dk_rope)
FP8FLOW_FIELDS(Embedding, ids, table, y)
FP8FLOW_FIELDS(EmbeddingBackward, ids, dy, mode, dtable)
FP8FLOW_FIELDS(CrossEntropy, logits, labels, vocab_size, grad_scale, loss, dlogits)
FP8FLOW_FIELDS(Sum, values, sum)
FP8FLOW_FIELDS(Add, a, b, y)
FP8FLOW_FIELDS(Cast, x, y)
FP8FLOW_FIELDS(Zero, y)
FP8FLOW_FIELDS(FillNormal, seed, stream, first, standard_deviation, y)
FP8FLOW_FIELDS(CountNonFinite, x, count, first)
FP8FLOW_FIELDS(NormSquared, x, block_sums, sum)
FP8FLOW_FIELDS(AddSquares, squares, sum)
FP8FLOW_FIELDS(AdamW, grad, schedule, beta1, beta2, eps, weight_decay, grad_scale, status, master, m, v,
               m_key, v_key, rounding_step, first_element, copy)
FP8FLOW_FIELDS(AdamWQuantize, adamw, scale_format, mx_rounding, fprop, dgrad)
FP8FLOW_FIELDS(ClipFactor, norm_squared, clip, limit, status, norm, factor)

#undef FP8FLOW_FIELDS
#undef FP8FLOW_VISIT_REST
#undef FP8FLOW_VISIT
#undef FP8FLOW_EXPAND_1
#undef FP8FLOW_EXPAND_4
#undef FP8FLOW_EXPAND
#undef FP8FLOW_PARENTHESES

// Arguments, and structs in them, with members that can be visited.
struct NoVisit {
    template <class Member> void operator()(const char*, Member&) const {}
};
template <class T>
concept HasFields = requires(T& t) {
    each_field(t, NoVisit{});
};

#define FP8FLOW_HAS_FIELDS(name, Args) static_assert(HasFields<Args> && HasFields<const Args>);
FP8FLOW_FOR_EACH_OP(FP8FLOW_HAS_FIELDS)
FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_HAS_FIELDS)
#undef FP8FLOW_HAS_FIELDS

}  // namespace fp8flow::op
