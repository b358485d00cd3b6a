// SPDX-License-Identifier: MIT
// The layer's surroundings for one forward and backward, and its results on the host.
#include "model/replay/layer.h"

#include "kernels/core/scalar_math.h"

#include <algorithm>

namespace fp8flow::replay {

using namespace weights;

ReplayLayer::ReplayLayer(const Config& config, ProcessGroup& world, const BackendChoice& backend,
                         ReplayNorm norm, ReplayRecord record, int64_t tokens, int64_t tokens_per_rank)
    : config_(config),
      world_(world),
      record_(record),
      groups_(make_rank_groups(world, static_cast<int>(config.parallel.expert_model_parallel_size))),
      ops_(make_ops(backend, Arithmetic::stated, config.kernels)),
      store_(*ops_, config.training.seed),
      state_(ops_->device(), "state"),
      saved_(ops_->device(), "saved"),
      scratch_(ops_->device(), "scratch"),
      tokens_(tokens),
      slots_(tokens_per_rank),
      layer_rows_(MoeLayer::worst_rows(config.moe, slots_, groups_.expert_parallel->size())),
      rows_(ops_->device(), layer_rows_, 2) {
    ExchangeChoice exchange = make_exchange(backend, groups_, *ops_, config);
    exchange_ = std::move(exchange.exchange);
    exchange_note_ = std::move(exchange.note);
    flow_ = make_flow(config.precision, {});
    layer_ = std::make_unique<MoeLayer>(store_, ops_->device(),
                                        BlockSpec{.model = config.model,
                                                  .moe = config.moe,
                                                  .precision = config.precision,
                                                  .recompute = config.recompute,
                                                  .expert_parallel_rank = groups_.expert_parallel->rank(),
                                                  .expert_parallel_size = groups_.expert_parallel->size()});
    if (norm == ReplayNorm::apply) {
        // delayed scales belong to a run of many steps; without them the experts cast for themselves
        const NormOutput output =
            flow_->norm_output() == NormOutput::tensor_scaled ? NormOutput::plain : flow_->norm_output();
        norm_ = std::make_unique<Norm>(store_, ops_->device(), config.model, config.precision, output,
                                       "layers.0.pre_mlp_layernorm");
    }
    store_.allocate_gradients();
    const int64_t hidden = config.model.hidden_size;
    status_ = state_.tensor(DType::i32, {1}, "step");
    zero_ = state_.tensor(DType::bf16, {tokens, hidden}, "residual");
    y_ = state_.tensor(DType::bf16, {tokens, hidden}, "residual");
    dx_ = state_.tensor(DType::bf16, {tokens, hidden}, "residual");
    all_tokens_ = {.num_groups = 1,
                   .counts = state_.tensor(DType::i64, {1}, "batch"),
                   .offsets = state_.tensor(DType::i64, {2}, "batch"),
                   .row_capacity = tokens,
                   .alignment = kBlock};
    const int64_t words[3] = {tokens, 0, tokens};
    device().copy_in(all_tokens_.counts.data, words, sizeof(int64_t));
    device().copy_in(all_tokens_.offsets.data, words + 1, 2 * sizeof(int64_t));
    for (const TensorView& view : {status_, zero_})
        device().fill(view.data, 0, static_cast<size_t>(view.bytes()));
}

std::vector<WeightTarget> ReplayLayer::targets() {
    std::vector<WeightTarget> all = gradients();
    for (WeightTarget& target : all) target.values = target.parameter->master;
    if (layer_->router().expert_bias()) all.push_back(bias_target(0, layer_->router().expert_bias()));
    return all;
}

std::vector<WeightTarget> ReplayLayer::gradients() {
    std::vector<WeightTarget> all;
    for (Parameter& parameter : store_.all())
        all.push_back({parameter.spec, parameter.main_grad, &parameter});
    return all;
}

Context ReplayLayer::context() {
    Context ctx{.ops = *ops_,
                .exchange = *exchange_,
                .saved = saved_,
                .scratch = scratch_,
                .rows = rows_,
                .timer = timer_};
    ctx.tokens = tokens_;
    ctx.tokens_per_rank = slots_;
    ctx.seq_length = slots_;
    ctx.layer_row_capacity = layer_rows_;
    ctx.all_tokens = all_tokens_;
    ctx.data_parallel_size = world_.size();
    ctx.step_status = status_;
    if (record_ == ReplayRecord::intermediates) ctx.gemms = this;
    return ctx;
}

TensorView ReplayLayer::rows_on_device(std::span<const Bf16> values) {
    const TensorView view = state_.tensor(DType::bf16, {tokens_, config_.model.hidden_size}, "residual");
    FP8FLOW_CHECK(static_cast<int64_t>(values.size()) == view.numel(), "{} values for {}", values.size(),
                  describe(view));
    device().copy_in(view.data, values.data(), values.size_bytes());
    return view;
}

// The norm's output, or without one the rows as they are, with the FP8 rows that the recipe sends.
TokenRows ReplayLayer::layer_input(Context& ctx) {
    if (norm_) {
        norm_->forward(ctx, x_, saved_, saved_norm_);
        return saved_norm_.out;
    }
    TokenRows rows{.plain = x_};
    if (flow_->norm_output() != NormOutput::wire_rows) return rows;
    const ScaleFormat format = config_.precision.scale_format;
    rows.quantized = wire_rows(saved_, DType::e4m3, tokens_, x_.cols(), format, "cast");
    ops_->quantize_rows({.src = x_, .scale_format = format, .dst = rows.quantized}, ctx.launch);
    return rows;
}

void ReplayLayer::forward(std::span<const Bf16> hidden) {
    x_ = rows_on_device(hidden);
    Context ctx = context();
    layer_->router().begin_step(ctx);
    input_ = layer_input(ctx);
    layer_->forward(ctx, input_, zero_, saved_moe_, y_);
    device().synchronize();
    if (record_ == ReplayRecord::intermediates) record_plan();
}

void ReplayLayer::backward(std::span<const Bf16> gradient) {
    const TensorView dy = rows_on_device(gradient);
    Context ctx = context();
    if (norm_) {
        const TensorView dxn = scratch_.tensor(DType::bf16, {tokens_, x_.cols()}, "norm");
        layer_->backward(ctx, input_, dy, saved_moe_, dxn);
        norm_->backward(ctx, dxn, zero_, saved_norm_, dx_);
    } else {
        layer_->backward(ctx, input_, dy, saved_moe_, dx_);
    }
    exchange_->all_reduce(Reduce::sum, Ranks::world, store_.dense_gradients(), ctx.launch);
    store_.reduce_expert_gradients(*exchange_, groups_.expert_replicas->rank(), store_.expert_gradients(),
                                   ctx.launch);
    device().synchronize();
}

HostValues ReplayLayer::topk_ids() const {
    return integers_of(saved_moe_.route.ids, saved_moe_.route.ids.numel());
}

HostValues ReplayLayer::integers_of(const TensorView& view, int64_t count) const {
    HostValues host;
    host.shape.assign(view.dims, view.dims + view.rank);
    if (view.rank == 1) host.shape[0] = count;
    host.integers.resize(static_cast<size_t>(count));
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
    const auto numel = static_cast<size_t>(count * width);
    host.floats.resize(numel);
    if (view.dtype == DType::f32) {
        ops_->device().copy_out(host.floats.data(), view.data, numel * sizeof(float));
        return host;
    }
    FP8FLOW_CHECK(view.dtype == DType::bf16, "{}", describe(view));
    std::vector<Bf16> narrow(numel);
    ops_->device().copy_out(narrow.data(), view.data, numel * sizeof(Bf16));
    std::transform(narrow.begin(), narrow.end(), host.floats.begin(), [](Bf16 x) { return to_float(x); });
    return host;
}

// A row of the experts by its place: source rank, token and routing weight.
void ReplayLayer::record_plan() {
    const DispatchPlan& plan = saved_moe_.plan.padded;
    const auto groups = static_cast<size_t>(plan.groups.num_groups);
    std::vector<int64_t> counts(groups), offsets(groups + 1);
    device().copy_out(counts.data(), plan.groups.counts.data, counts.size() * sizeof(int64_t));
    device().copy_out(offsets.data(), plan.groups.offsets.data, offsets.size() * sizeof(int64_t));
    const std::vector<int32_t> ids = integers_of(plan.all_ids, plan.all_ids.numel()).integers;
    const auto topk = static_cast<size_t>(plan.topk);
    const int64_t local = plan.num_local_experts, first_expert = groups_.expert_parallel->rank() * local;
    const bool by_source = plan.groups.num_groups > local;
    // the ranks that share the experts hold consecutive tokens, in the order of the ranks
    const int64_t first_token = (world_.rank() - groups_.expert_parallel->rank()) * slots_;
    HostValues token_of_row{.shape = {offsets.back()}};
    token_of_row.integers.assign(static_cast<size_t>(offsets.back()), -1);
    std::vector<int64_t> next = offsets;
    for (size_t i = 0; i < ids.size(); ++i) {
        const int64_t expert = ids[i] - first_expert;
        if (ids[i] < 0 || expert < 0 || expert >= local) continue;
        const auto token = static_cast<int64_t>(i / topk);
        const int64_t group = (by_source ? token / slots_ * local : 0) + expert;
        token_of_row.integers[static_cast<size_t>(next[static_cast<size_t>(group)]++)] =
            static_cast<int32_t>(first_token + token);
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
    const char* const owner = groups.counts.data == all_tokens_.counts.data ? "shared." : "";
    int64_t rows = 0;
    device().copy_out(&rows, groups.offsets.as<int64_t>() + groups.num_groups, sizeof rows,
                      ctx.launch.stream);
    intermediates_[fmt::format("{}{}", owner, written)] = routed_rows(result, rows);
    if (operand.layout == ScaleLayout::none) {
        intermediates_[fmt::format("{}{}", owner, read)] = routed_rows(operand.data, rows);
        return;
    }
    ArenaScope scope(ctx.scratch);
    const TensorView plain =
        ctx.scratch.tensor(DType::f32, {operand.data.dim(0), operand.data.cols()}, "cast");
    ctx.ops.dequantize({.src = operand, .groups = groups, .dst = plain}, ctx.launch);
    intermediates_[fmt::format("{}{}", owner, read)] = routed_rows(plain, rows);
}

void ReplayLayer::router_gradient(Context&, const TensorView& dprobs) {
    intermediates_["grad_topk_weights"] = floats_of(dprobs);
}

}  // namespace fp8flow::replay
