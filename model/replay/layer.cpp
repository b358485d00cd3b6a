// SPDX-License-Identifier: MIT
// The layer's surroundings for one forward and backward, and its results on the host.
#include "model/replay/layer.h"

#include "kernels/core/scalar_math.h"

#include <algorithm>

namespace fp8flow::replay {

using namespace weights;

ReplayLayer::ReplayLayer(const Config& config, ProcessGroup& world, const BackendChoice& backend,
                         ReplayNorm norm, ReplayRecord record, int64_t tokens, int64_t tokens_per_rank)
    : world_(world),
      record_(record),
      groups_(make_rank_groups(world, static_cast<int>(config.parallel.expert_model_parallel_size))),
      ops_(make_ops(backend, Arithmetic::stated, config.kernels)),
      exchange_(make_exchange(backend, groups_, *ops_, config)),
      state_(ops_->device(), "rows"),
      slots_(tokens_per_rank) {
    layer_ = std::make_unique<LoneLayer>(
        *ops_, *exchange_.exchange,
        LoneLayerSpec{.hidden_size = config.model.hidden_size,
                      .max_tokens = tokens_per_rank,
                      .moe = config.moe,
                      .precision = config.precision,
                      .recompute = config.recompute,
                      .norm = norm == ReplayNorm::apply,
                      .zero_centered_gamma = config.model.zero_centered_gamma,
                      .norm_epsilon = config.model.norm_epsilon,
                      .glu = config.model.glu,
                      .init_method_std = config.model.init_method_std,
                      .seed = config.training.seed,
                      .replica = groups_.expert_replicas->rank(),
                      .gemms = record == ReplayRecord::intermediates ? this : nullptr});
    for (TensorView* view : {&x_, &y_, &dx_})
        *view = state_.tensor(DType::bf16, {tokens, config.model.hidden_size}, "residual");
}

std::vector<WeightTarget> ReplayLayer::targets() {
    std::vector<WeightTarget> all = gradients();
    for (WeightTarget& target : all) target.values = target.parameter->master;
    if (const TensorView bias = layer_->router().expert_bias()) all.push_back(bias_target(0, bias));
    return all;
}

std::vector<WeightTarget> ReplayLayer::gradients() {
    std::vector<WeightTarget> all;
    for (Parameter& parameter : parameters().all())
        all.push_back({parameter.spec, parameter.main_grad, &parameter});
    return all;
}

void ReplayLayer::forward(std::span<const Bf16> hidden) {
    copy_rows(hidden, x_);
    layer_->forward(x_, y_);
    device().synchronize();
    if (record_ == ReplayRecord::intermediates) record_plan();
}

void ReplayLayer::backward(std::span<const Bf16> gradient) {
    const TensorView dy = state_.tensor(DType::bf16, {x_.dims[0], x_.dims[1]}, "residual");
    copy_rows(gradient, dy);
    layer_->backward(dy, dx_);
    layer_->reduce_gradients();
    device().synchronize();
}

void ReplayLayer::copy_rows(std::span<const Bf16> values, const TensorView& rows) {
    FP8FLOW_CHECK(static_cast<int64_t>(values.size()) == rows.numel(), "{} values for {}", values.size(),
                  describe(rows));
    device().copy_in(rows.data, values.data(), values.size_bytes());
}

HostValues ReplayLayer::integers_of(const TensorView& view) const {
    HostValues host;
    host.shape.assign(view.dims, view.dims + view.rank);
    host.integers.resize(to_size(view.numel()));
    ops_->device().copy_out(host.integers.data(), view.data, host.integers.size() * sizeof(int32_t));
    return host;
}

HostValues ReplayLayer::floats_of(const TensorView& view) const {
    HostValues host = routed_rows(view, view.dim(0));
    host.shape.assign(view.dims, view.dims + view.rank);
    return host;
}

// The first `count` rows of bf16 or f32; the only layer's rows begin at 0 of the row arena.
HostValues ReplayLayer::routed_rows(const TensorView& view, int64_t count) const {
    const int64_t width = view.rank > 1 ? view.cols() : 1;
    HostValues host{.shape = {count}};
    if (view.rank > 1) host.shape.push_back(width);
    const auto numel = to_size(count * width);
    host.floats.resize(numel);
    if (view.dtype == DType::f32) {
        ops_->device().copy_out(host.floats.data(), view.data, numel * sizeof(float));
        return host;
    }
    FP8FLOW_CHECK(view.dtype == DType::bf16, "{}", describe(view));
    std::vector<Bf16> narrow(numel);
    ops_->device().copy_out(narrow.data(), view.data, numel * sizeof(Bf16));
    std::ranges::transform(narrow, host.floats.begin(), [](Bf16 x) { return to_float(x); });
    return host;
}

// A row of the experts by its place: source rank, token and routing weight.
void ReplayLayer::record_plan() {
    const DispatchPlan& plan = layer_->saved().plan.padded;
    const auto groups = to_size(plan.groups.num_groups);
    std::vector<int64_t> counts(groups), offsets(groups + 1);
    device().copy_out(counts.data(), plan.groups.counts.data, counts.size() * sizeof(int64_t));
    device().copy_out(offsets.data(), plan.groups.offsets.data, offsets.size() * sizeof(int64_t));
    const std::vector<int32_t> ids = integers_of(plan.all_ids).integers;
    const auto topk = to_size(plan.topk);
    const int64_t local = plan.num_local_experts, first_expert = groups_.expert_parallel->rank() * local;
    const bool by_source = plan.groups.num_groups > local;
    // the ranks that share the experts hold consecutive tokens, in the order of the ranks
    const int64_t first_token = (world_.rank() - groups_.expert_parallel->rank()) * slots_;
    HostValues token_of_row{.shape = {offsets.back()}};
    token_of_row.integers.assign(to_size(offsets.back()), -1);
    std::vector<int64_t> next = offsets;
    for (size_t i = 0; i < ids.size(); ++i) {
        const int64_t expert = ids[i] - first_expert;
        if (ids[i] < 0 || expert < 0 || expert >= local) continue;
        const auto token = static_cast<int64_t>(i / topk);
        const int64_t group = (by_source ? token / slots_ * local : 0) + expert;
        token_of_row.integers[to_size(next[to_size(group)]++)] = static_cast<int32_t>(first_token + token);
    }
    const auto words = [](const std::vector<int64_t>& values) {
        return HostValues{.shape = {static_cast<int64_t>(values.size())},
                          .integers = {values.begin(), values.end()}};
    };
    intermediates_["plan.rows_of_expert"] = words(counts);
    intermediates_["plan.first_row_of_expert"] = words(offsets);
    intermediates_["plan.row_weight"] = routed_rows(plan.row_prob, offsets.back());
    intermediates_["plan.token_of_row"] = std::move(token_of_row);
}

void ReplayLayer::gemm(Context& ctx, std::string_view stage, const ScaledTensor& operand,
                       const TensorView& result, const RowGroups& groups) {
    static const std::map<std::string_view, std::pair<const char*, const char*>> kNames = {
        {"fc1", {"dispatch", "fc1"}},
        {"fc2", {"swiglu", "fc2"}},
        {"fc2 dgrad", {"grad_fc2", "grad_swiglu"}},
        {"fc1 dgrad", {"grad_fc1", "grad_dispatch"}}};
    const auto& [read, written] = kNames.at(stage);
    const std::string owner = groups.counts.data == layer_->all_tokens().counts.data ? "shared." : "";
    int64_t rows = 0;
    device().copy_out(&rows, groups.offsets.as<int64_t>() + groups.num_groups, sizeof rows,
                      ctx.launch.stream);
    intermediates_[owner + written] = routed_rows(result, rows);
    ArenaScope scope(ctx.scratch);
    TensorView plain = operand.data;
    if (operand.layout != ScaleLayout::none) {
        plain = ctx.scratch.tensor(DType::f32, {plain.dim(0), plain.cols()}, "cast");
        ctx.ops.dequantize({.src = operand, .groups = groups, .dst = plain}, ctx.launch);
    }
    intermediates_[owner + read] = routed_rows(plain, rows);
}

void ReplayLayer::router_gradient(Context&, const TensorView& dprobs) {
    intermediates_["grad_topk_weights"] = floats_of(dprobs);
}

}  // namespace fp8flow::replay
