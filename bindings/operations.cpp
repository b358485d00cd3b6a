// SPDX-License-Identifier: MIT
// The operations of include/fp8flow/c.h: C structs become views, and the method of Ops checks and runs.
#include "bindings/handles.h"
#include "kernels/core/error.h"
#include "layers/moe_layer.h"

#include <algorithm>

namespace fp8flow::bindings {

namespace {

static_assert(FP8FLOW_F32 == static_cast<int>(DType::f32) && FP8FLOW_BF16 == static_cast<int>(DType::bf16) &&
              FP8FLOW_F16 == static_cast<int>(DType::f16) && FP8FLOW_E4M3 == static_cast<int>(DType::e4m3) &&
              FP8FLOW_E5M2 == static_cast<int>(DType::e5m2) &&
              FP8FLOW_E8M0 == static_cast<int>(DType::e8m0) && FP8FLOW_I32 == static_cast<int>(DType::i32) &&
              FP8FLOW_I64 == static_cast<int>(DType::i64));
static_assert(FP8FLOW_PLAIN == static_cast<int>(ScaleLayout::none) &&
              FP8FLOW_VEC128_WIRE == static_cast<int>(ScaleLayout::vec128_wire) &&
              FP8FLOW_VEC128 == static_cast<int>(ScaleLayout::vec128) &&
              FP8FLOW_BLOCK128 == static_cast<int>(ScaleLayout::block128) &&
              FP8FLOW_TILE128 == static_cast<int>(ScaleLayout::tile128));

TensorView view_of(const fp8flow_tensor* from, const char* what) {
    const fp8flow_tensor& tensor = given(from, what);
    require(tensor.dtype >= FP8FLOW_F32 && tensor.dtype <= FP8FLOW_I64, ExitCode::usage,
            "{}: dtype {}, want 0 to {} (enum fp8flow_dtype)", what, tensor.dtype,
            static_cast<int>(FP8FLOW_I64));
    require(tensor.rank >= 1 && tensor.rank <= TensorView::kMaxRank, ExitCode::usage,
            "{}: rank {}, want 1 to {}", what, tensor.rank, TensorView::kMaxRank);
    TensorView view{.data = tensor.data, .dtype = static_cast<DType>(tensor.dtype), .rank = tensor.rank};
    for (int i = 0; i < tensor.rank; ++i) {
        require(tensor.dims[i] >= 0, ExitCode::usage, "{}: dimension {} is {}", what, i, tensor.dims[i]);
        view.dims[i] = tensor.dims[i];
    }
    require(view.data != nullptr || view.numel() == 0, ExitCode::usage, "{}: the data are null", what);
    return view;
}

// What a tensor declares, 0 being nothing.
ScaleFormat declared_format(int format, const char* what) {
    constexpr ScaleFormat kFormats[] = {ScaleFormat::undeclared, ScaleFormat::pow2, ScaleFormat::fp32};
    require(format >= FP8FLOW_UNDECLARED && format <= FP8FLOW_FP32, ExitCode::usage,
            "{}: scale_format is {}, want {} (undeclared), {} (pow2) or {} (fp32)", what, format,
            static_cast<int>(FP8FLOW_UNDECLARED), static_cast<int>(FP8FLOW_POW2),
            static_cast<int>(FP8FLOW_FP32));
    return kFormats[format];
}
ScaleFormat format_of(int format) {
    require(format == FP8FLOW_POW2 || format == FP8FLOW_FP32, ExitCode::usage,
            "scale_format is {}, want {} (pow2) or {} (fp32)", format, static_cast<int>(FP8FLOW_POW2),
            static_cast<int>(FP8FLOW_FP32));
    return declared_format(format, "scale_format");
}

ScaledTensor scaled_of(const fp8flow_scaled* from, const char* what) {
    const fp8flow_scaled* const tensor = &given(from, what);
    if (tensor->layout == FP8FLOW_PLAIN) return {.data = view_of(&tensor->codes, what)};
    require(tensor->layout >= FP8FLOW_VEC128_WIRE && tensor->layout <= FP8FLOW_TILE128, ExitCode::usage,
            "{}: layout {}, want one of enum fp8flow_layout", what, tensor->layout);
    return {.data = view_of(&tensor->codes, what),
            .scales = view_of(&tensor->scales, what),
            .layout = static_cast<ScaleLayout>(tensor->layout),
            .format = declared_format(tensor->scale_format, what)};
}

// Sizes are written by plan_rows and read by all others.
TensorView words(const int64_t* data, int64_t count) {
    return make_view(const_cast<int64_t*>(data), DType::i64, {count});
}

RowGroups groups_of(const fp8flow_groups* groups) {
    if (groups == nullptr) return {};
    given(groups, "groups");
    require(groups->num_groups > 0 && groups->counts != nullptr && groups->offsets != nullptr,
            ExitCode::usage, "{} groups, their counts or offsets are null", groups->num_groups);
    return {.num_groups = groups->num_groups,
            .counts = words(groups->counts, groups->num_groups),
            .offsets = words(groups->offsets, groups->num_groups + 1),
            .row_capacity = groups->row_capacity,
            .alignment = groups->alignment};
}

TensorView floats(const float* data, int64_t count) {
    return data == nullptr ? TensorView{} : make_view(const_cast<float*>(data), DType::f32, {count});
}

const fp8flow_plan& present(const fp8flow_plan* from) {
    const fp8flow_plan& plan = given(from, "plan");
    given(&plan.groups, "plan.groups");
    const bool rows = plan.groups.row_capacity > 0, tokens = plan.tokens > 0;
    require((!rows || (plan.row_source != nullptr && plan.row_prob != nullptr)) &&
                (!tokens || plan.token_rows != nullptr) && plan.token_offsets != nullptr,
            ExitCode::usage, "a pointer of the plan is null");
    require(plan.tokens >= 0 && plan.choices >= 1 && plan.choices <= plan.groups.num_groups, ExitCode::usage,
            "the plan has {} tokens and {} choices of {} experts", plan.tokens, plan.choices,
            plan.groups.num_groups);
    return plan;
}
TensorView token_rows(const fp8flow_plan& plan) {
    return make_view(plan.token_rows, DType::i32, {plan.tokens, plan.choices});
}
TensorView row_source(const fp8flow_plan& plan) {
    return make_view(plan.row_source, DType::i32, {plan.groups.row_capacity});
}
TensorView num_tokens(const fp8flow_plan& plan) { return words(plan.token_offsets + 1, 1); }

}  // namespace

}  // namespace fp8flow::bindings

using namespace fp8flow;
using namespace fp8flow::bindings;

int fp8flow_quantize_rows(fp8flow_context* context, const fp8flow_tensor* src, const fp8flow_groups* groups,
                          int scale_format, const fp8flow_scaled* dst, void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        ops.quantize_rows({.src = view_of(src, "src"),
                           .groups = groups_of(groups),
                           .scale_format = format_of(scale_format),
                           .dst = scaled_of(dst, "dst")},
                          launch);
    });
}

int fp8flow_quantize_columns(fp8flow_context* context, const fp8flow_tensor* src,
                             const fp8flow_groups* groups, int scale_format, const fp8flow_scaled* dst,
                             void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        ops.quantize_columns({.src = view_of(src, "src"),
                              .groups = groups_of(groups),
                              .scale_format = format_of(scale_format),
                              .dst = scaled_of(dst, "dst")},
                             launch);
    });
}

int fp8flow_quantize_weight(fp8flow_context* context, const fp8flow_tensor* src, int scale_format,
                            const fp8flow_scaled* fprop, const fp8flow_scaled* dgrad, void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        ops.quantize_weight({.src = view_of(src, "src"),
                             .scale_format = format_of(scale_format),
                             .fprop = fprop == nullptr ? ScaledTensor{} : scaled_of(fprop, "fprop"),
                             .dgrad = dgrad == nullptr ? ScaledTensor{} : scaled_of(dgrad, "dgrad")},
                            launch);
    });
}

int fp8flow_transpose_fp8(fp8flow_context* context, const fp8flow_scaled* src, const fp8flow_groups* groups,
                          const fp8flow_scaled* dst, void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        ops.transpose_fp8(
            {.src = scaled_of(src, "src"), .groups = groups_of(groups), .dst = scaled_of(dst, "dst")},
            launch);
    });
}

int64_t fp8flow_max_rows(int64_t tokens, int64_t choices, int64_t experts, int64_t alignment) {
    if (tokens < 0 || choices <= 0 || experts <= 0 || alignment <= 0) return -1;
    if (std::max({tokens, choices, experts, alignment}) > INT32_MAX) return -1;
    const int64_t rows = MoeLayer::worst_rows(
        {.num_experts = experts, .moe_router_topk = choices, .moe_row_alignment = alignment}, tokens, 1);
    return rows > INT32_MAX ? -1 : rows;
}

int fp8flow_plan_rows(fp8flow_context* context, const fp8flow_tensor* ids, const fp8flow_tensor* probs,
                      const fp8flow_plan* plan, void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        const fp8flow_plan& p = present(plan);
        const int64_t experts = p.groups.num_groups,
                      least = fp8flow_max_rows(p.tokens, p.choices, experts, p.groups.alignment);
        const TensorView id_view = view_of(ids, "ids"), prob_view = view_of(probs, "probs");
        for (const TensorView& view : {id_view, prob_view})
            require(view.rank == 2 && view.dims[0] == p.tokens && view.dims[1] == p.choices, ExitCode::usage,
                    "ids or probs are {}, want [{}, {}] as the plan", describe(view), p.tokens, p.choices);
        require(least >= 0 && p.groups.row_capacity >= least, ExitCode::usage,
                "row_capacity is {}, want at least {} for {} tokens, {} choices, {} experts, alignment {}",
                p.groups.row_capacity, least, p.tokens, p.choices, experts, p.groups.alignment);
        // -1 would be a token of a rank that has fewer
        if (context->backend.kind == BackendKind::reference && id_view.dtype == DType::i32)
            for (int64_t i = 0; i < id_view.numel(); ++i)
                require(id_view.as<int32_t>()[i] >= 0, ExitCode::usage,
                        "ids: token {} names expert {}, want 0 to {}", i / p.choices,
                        id_view.as<int32_t>()[i], experts - 1);
        // Rows past the last group feed nothing; the operation leaves them as they are.
        const auto bytes = static_cast<size_t>(p.groups.row_capacity) * sizeof(int32_t);
        if (bytes > 0) {
            ops.device().fill(p.row_source, 0xFF, bytes, launch.stream);
            ops.device().fill(p.row_prob, 0, bytes, launch.stream);
        }
        ArenaScope scope(context->scratch);
        const TensorView overflow = context->scratch.tensor(DType::i32, {1}, "plan");
        op::PlanDispatch args{.all_ids = id_view.reshape({1, p.tokens, p.choices}),
                              .all_probs = prob_view.reshape({1, p.tokens, p.choices}),
                              .num_local_experts = experts,
                              .groups = groups_of(&p.groups),
                              .row_source = row_source(p),
                              .row_prob = floats(p.row_prob, p.groups.row_capacity),
                              .recv_rows = token_rows(p),
                              .recv_offsets = words(p.token_offsets, 2),
                              .overflow = overflow};
        allocate_plan(args, [&](DType dtype, std::initializer_list<int64_t> shape) {
            return context->scratch.tensor(dtype, shape, "plan");
        });
        ops.plan_dispatch(args, launch);
    });
}

int fp8flow_permute_pad(fp8flow_context* context, const fp8flow_scaled* src, const fp8flow_plan* plan,
                        const fp8flow_scaled* dst, void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        const fp8flow_plan& p = present(plan);
        ops.permute_pad({.src = scaled_of(src, "src"),
                         .row_source = row_source(p),
                         .recv_rows = token_rows(p),
                         .num_rows = num_tokens(p),
                         .groups = groups_of(&p.groups),
                         .dst = scaled_of(dst, "dst")},
                        launch);
    });
}

int fp8flow_unpermute(fp8flow_context* context, const fp8flow_tensor* src, const fp8flow_plan* plan,
                      const float* weights, const fp8flow_tensor* dst, void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        const fp8flow_plan& p = present(plan);
        const TensorView rows = view_of(src, "src");
        require(rows.dims[0] >= p.groups.row_capacity, ExitCode::usage, "src is {}, want {} rows of the plan",
                describe(rows), p.groups.row_capacity);
        ops.unpermute_unpad({.src = rows,
                             .recv_rows = token_rows(p),
                             .num_rows = num_tokens(p),
                             .row_prob = floats(weights, rows.dims[0]),
                             .dst = view_of(dst, "dst")},
                            launch);
    });
}

int fp8flow_grouped_gemm(fp8flow_context* context, const fp8flow_scaled* a, const fp8flow_scaled* b,
                         const fp8flow_groups* groups, const fp8flow_tensor* d, void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        ops.grouped_gemm({.a = scaled_of(a, "a"),
                          .b = scaled_of(b, "b"),
                          .groups = groups_of(groups),
                          .d = view_of(d, "d")},
                         launch);
    });
}

int fp8flow_grouped_gemm_wgrad(fp8flow_context* context, const fp8flow_scaled* dy, const fp8flow_scaled* x,
                               const fp8flow_groups* groups, const fp8flow_tensor* dw, void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        ops.grouped_gemm_wgrad({.dy = scaled_of(dy, "dy"),
                                .x = scaled_of(x, "x"),
                                .groups = groups_of(groups),
                                .dw = view_of(dw, "dw"),
                                .second = {}},
                               launch);
    });
}

int fp8flow_swiglu_quantize(fp8flow_context* context, const fp8flow_tensor* h, const float* prob,
                            const fp8flow_groups* groups, int scale_format, const fp8flow_scaled* a,
                            void* stream) {
    return call(context, stream, [&](Ops& ops, const Launch& launch) {
        const TensorView rows = view_of(h, "h");
        ops.swiglu_quantize({.h = rows,
                             .prob = floats(prob, rows.dims[0]),
                             .groups = groups_of(groups),
                             .scale_format = format_of(scale_format),
                             .a = scaled_of(a, "a")},
                            launch);
    });
}
