// SPDX-License-Identifier: MIT
// The tensors that each operation's arguments name, and one `call` for all operations, so that a test can
// copy arguments to a device and run any operation on any backend. An operation of kernels/ops/list.h that is
// missing here does not compile.
#pragma once

#include "kernels/ops.h"

#include <type_traits>
#include <utility>

namespace fp8flow::test {

namespace detail {
struct Ignore {
    template <class Member> void operator()(Member&) const {}
};
template <class F, class... Members> void visit(F& f, Members&... members) { (f(members), ...); }
}  // namespace detail

// Calls f with every member that points to memory: TensorView&, ScaledTensor&, RowGroups& or const int64_t*&;
// inputs and outputs alike.
#define FP8FLOW_VIEWS(Args, ...)                               \
    template <class F> void each_view(op::Args& args, F&& f) { \
        auto& a = args;                                        \
        detail::visit(f, __VA_ARGS__);                         \
    }
FP8FLOW_VIEWS(RmsNorm, a.x, a.gamma, a.y, a.rstd)
FP8FLOW_VIEWS(RmsNormQuantize, a.x, a.gamma, a.y, a.rows, a.transposed, a.amax, a.rstd)
FP8FLOW_VIEWS(RmsNormBackward, a.dy, a.x, a.gamma, a.rstd, a.dresidual, a.dx, a.dgamma)
FP8FLOW_VIEWS(RouterLogits, a.x, a.weight, a.logits)
FP8FLOW_VIEWS(RouterLogitsBackward, a.dlogits, a.x, a.weight, a.dx_in, a.dx, a.dweight)
FP8FLOW_VIEWS(RouterTopK, a.logits, a.expert_bias, a.forced_ids, a.ids, a.probs, a.counts, a.balance.counts,
              a.balance.score_sums, a.balance.log_squares)
FP8FLOW_VIEWS(RouterTopKBackward, a.logits, a.ids, a.dprobs, a.terms[0].counts, a.terms[1].counts,
              a.terms[2].counts, a.balance.score_sums, a.balance.log_squares, a.losses, a.dlogits)
FP8FLOW_VIEWS(ExpertBiasUpdate, a.counts, a.status, a.bias)
FP8FLOW_VIEWS(QuantizeRows, a.src, a.groups, a.dst)
FP8FLOW_VIEWS(QuantizeColumns, a.src, a.groups, a.dst, a.src2, a.dst2)
FP8FLOW_VIEWS(QuantizeDual, a.src, a.groups, a.rows, a.columns)
FP8FLOW_VIEWS(QuantizeTensor, a.src, a.groups, a.rows, a.transposed)
FP8FLOW_VIEWS(QuantizeWeight, a.src, a.fprop, a.dgrad)
FP8FLOW_VIEWS(Dequantize, a.src, a.groups, a.dst)
FP8FLOW_VIEWS(RelayoutScales, a.wire, a.vec128)
FP8FLOW_VIEWS(DelayedScaleUpdate, a.position, a.status, a.amax, a.history, a.scale)
FP8FLOW_VIEWS(TransposeFp8, a.src, a.groups, a.dst)
FP8FLOW_VIEWS(TransposeRequantize, a.src, a.groups, a.dst)
FP8FLOW_VIEWS(PlanDispatch, a.all_ids, a.all_probs, a.row_base, a.groups, a.row_source, a.row_prob,
              a.recv_rows, a.recv_offsets, a.recv_source, a.send_tokens, a.send_counts, a.next_row_base,
              a.rows_wanted, a.overflow)
FP8FLOW_VIEWS(PermutePad, a.src, a.row_source, a.recv_rows, a.num_rows, a.groups, a.dst)
FP8FLOW_VIEWS(UnpermuteUnpad, a.src, a.recv_rows, a.num_rows, a.row_prob, a.dst)
FP8FLOW_VIEWS(UnpermuteProbsBackward, a.ddst, a.src, a.row_source, a.recv_rows, a.num_rows, a.groups,
              a.drow_prob)
FP8FLOW_VIEWS(PadRows, a.src, a.src_groups, a.dst_groups, a.dst)
FP8FLOW_VIEWS(UnpadRows, a.src, a.src_groups, a.dst_groups, a.dst)
FP8FLOW_VIEWS(Gemm, a.a, a.b, a.d)
FP8FLOW_VIEWS(GroupedGemm, a.a, a.b, a.groups, a.d)
FP8FLOW_VIEWS(GroupedGemmWgrad, a.dy, a.x, a.groups, a.dw, a.second.dy, a.second.x, a.second.groups,
              a.squares)
FP8FLOW_VIEWS(QkvHeads, a.qkv, a.table, a.q_gamma, a.k_gamma, a.q, a.k, a.v, a.q_raw, a.k_raw, a.q_rstd,
              a.k_rstd)
FP8FLOW_VIEWS(QkvHeadsBackward, a.dq, a.dk, a.dv, a.table, a.q_raw, a.k_raw, a.q_gamma, a.k_gamma, a.q_rstd,
              a.k_rstd, a.dqkv, a.dq_gamma, a.dk_gamma)
FP8FLOW_VIEWS(GroupedGemmSwigluQuantize, a.a, a.b, a.groups, a.prob, a.h, a.act)
FP8FLOW_VIEWS(Swiglu, a.h, a.prob, a.groups, a.a)
FP8FLOW_VIEWS(SwigluQuantize, a.h, a.prob, a.groups, a.a)
FP8FLOW_VIEWS(SwigluBackward, a.da, a.h, a.prob, a.groups, a.dh, a.dprob)
FP8FLOW_VIEWS(SwigluBackwardQuantize, a.da, a.h, a.prob, a.groups, a.dh, a.dprob)
FP8FLOW_VIEWS(Rope, a.table, a.x)
FP8FLOW_VIEWS(Attention, a.q, a.k, a.v, a.o, a.lse)
FP8FLOW_VIEWS(AttentionBackward, a.dout, a.q, a.k, a.v, a.o, a.lse, a.dq, a.dk, a.dv)
FP8FLOW_VIEWS(SplitQkv, a.qkv, a.q, a.k, a.v)
FP8FLOW_VIEWS(MergeQkv, a.q, a.k, a.v, a.qkv)
FP8FLOW_VIEWS(Embedding, a.ids, a.table, a.y)
FP8FLOW_VIEWS(EmbeddingBackward, a.ids, a.dy, a.dtable)
FP8FLOW_VIEWS(CrossEntropy, a.logits, a.labels, a.loss, a.dlogits)
FP8FLOW_VIEWS(Sum, a.values, a.sum)
FP8FLOW_VIEWS(Add, a.a, a.b, a.y)
FP8FLOW_VIEWS(Cast, a.x, a.y)
FP8FLOW_VIEWS(Zero, a.y)
FP8FLOW_VIEWS(FillNormal, a.y)
FP8FLOW_VIEWS(CountNonFinite, a.x, a.count, a.first)
FP8FLOW_VIEWS(NormSquared, a.x, a.sum)
FP8FLOW_VIEWS(AddSquares, a.squares, a.sum)
FP8FLOW_VIEWS(AdamW, a.grad, a.schedule, a.grad_scale, a.status, a.master, a.m, a.v, a.rounding_step, a.copy)
FP8FLOW_VIEWS(AdamWQuantize, a.adamw.grad, a.adamw.schedule, a.adamw.grad_scale, a.adamw.status,
              a.adamw.master, a.adamw.m, a.adamw.v, a.adamw.rounding_step, a.adamw.copy, a.fprop, a.dgrad)
FP8FLOW_VIEWS(ClipFactor, a.norm_squared, a.limit, a.status, a.norm, a.factor)
#undef FP8FLOW_VIEWS

#define FP8FLOW_CALL(name, Args)                                                                         \
    inline void call(Ops& ops, const op::Args& args, const Launch& launch = {}) {                        \
        static_assert(std::is_void_v<decltype(each_view(std::declval<op::Args&>(), detail::Ignore{}))>); \
        ops.name(args, launch);                                                                          \
    }
FP8FLOW_FOR_EACH_OP(FP8FLOW_CALL)
FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_CALL)
#undef FP8FLOW_CALL

}  // namespace fp8flow::test
