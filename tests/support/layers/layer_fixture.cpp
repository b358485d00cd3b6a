// SPDX-License-Identifier: MIT
// What layer_fixture.h declares: compiled once for the tests of layers and models.
#include "tests/support/layers/layer_fixture.h"

#include "layers/rope.h"
#include "layers/tensor_stats.h"

#include <fmt/format.h>

#include <cstring>

namespace fp8flow::test {

void* PoisonDevice::allocate(std::size_t bytes) {
    void* data = device_.allocate(bytes);
    std::memset(data, 0xFF, bytes);  // at once, also where the device is late
    return data;
}

LayerCase::LayerCase() {
    model.num_layers = 1;
    model.hidden_size = 128;
    model.attention = false;
    model.num_attention_heads = 4;
    model.num_query_groups = 2;
    model.kv_channels = 32;
    model.ffn_hidden_size = 256;
    model.vocab_size = 100;
    model.padded_vocab_size = 128;
    model.init_method_std = 0.1;
    model.seq_length = 16;
    model.moe_layer_freq = {1};
    moe.num_experts = 4;
    moe.moe_ffn_hidden_size = 128;
}

BlockSpec LayerCase::block_spec(int expert_parallel_rank, int expert_parallel_size) const {
    return {.model = model,
            .moe = moe_spec(),
            .precision = precision,
            .recompute = recompute,
            .plain_dtype = activation(),
            .expert_parallel_rank = expert_parallel_rank,
            .expert_parallel_size = expert_parallel_size};
}

RankFixture::RankFixture(const ExchangeGroups& groups, const LayerCase& layer_case)
    : c(layer_case),
      group_exchange(groups, ops, c.moe.moe_combine_order),
      exchange(group_exchange, ops.late_device()),
      layer_rows(MoeLayer::worst_rows(c.moe, c.slots(), exchange.size())),
      rows(poison, layer_rows * c.model.num_layers, c.model.num_layers + 1) {
    if (c.main_is_late) ops.late_device().be_late_on_main();
    if (c.schedule.has_side_stream()) side = std::make_unique<SideStream>(ops.device(), c.schedule);
    if (c.schedule.overlaps()) wire = std::make_unique<WireStream>(ops.device(), c.schedule);
    status = state.tensor(DType::i32, {1}, "step");
    step_number = state.tensor(DType::i64, {1}, "step");
    ops.zero({.y = status});
    ops.zero({.y = step_number});
    const int64_t count = tokens(), group_words[3] = {count, 0, count};
    all_tokens = {.num_groups = 1,
                  .counts = state.tensor(DType::i64, {1}, "batch"),
                  .offsets = state.tensor(DType::i64, {2}, "batch"),
                  .row_capacity = count,
                  .alignment = kBlock};
    ops.device().copy_in(all_tokens.counts.data, group_words, sizeof(int64_t));
    ops.device().copy_in(all_tokens.offsets.data, group_words + 1, 2 * sizeof(int64_t));
}

Context RankFixture::context(Arena& own_saved, Arena& own_scratch, RowArena& own_rows) {
    Context ctx{{.ops = ops,
                 .exchange = exchange,
                 .saved = own_saved,
                 .scratch = own_scratch,
                 .rows = own_rows,
                 .timer = timer},
                {.activation = c.activation()}};
    ctx.tokens = tokens();
    ctx.tokens_per_rank = c.slots();
    ctx.seq_length = c.model.seq_length;
    ctx.layer_row_capacity = layer_rows;
    ctx.all_tokens = all_tokens;
    ctx.data_parallel_size = exchange.size();
    for (int64_t count : c.tokens) ctx.global_tokens += count;
    ctx.step_status = status;
    ctx.side = side.get();
    ctx.wire = wire.get();
    return ctx;
}

void expect_same_result(const LayerResult& got, const LayerResult& wanted) {
    EXPECT_TRUE(got.y == wanted.y);
    EXPECT_TRUE(got.dx == wanted.dx);
    EXPECT_EQ(got.loss, wanted.loss);
    EXPECT_EQ(got.balancing_loss, wanted.balancing_loss);
    EXPECT_EQ(got.z_loss, wanted.z_loss);
    EXPECT_EQ(got.router_counts, wanted.router_counts);
    EXPECT_EQ(got.status, wanted.status);
    EXPECT_EQ(got.in_use, 0);
    EXPECT_FALSE(wanted.gradients.empty());
    for (const auto& [name, gradient] : wanted.gradients)
        EXPECT_TRUE(got.gradients.at(name) == gradient) << "gradient of " << name;
}

void expect_same_results(const std::vector<LayerResult>& got, const std::vector<LayerResult>& wanted) {
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t rank = 0; rank < wanted.size(); ++rank) {
        SCOPED_TRACE(fmt::format("rank {}", rank));
        expect_same_result(got[rank], wanted[rank]);
    }
}

void end_step(const TransformerBlock& block, Context& ctx, const TensorView& step) {
    if (block.router() != nullptr) block.router()->reduce_counts(ctx);
    block.update_state(ctx, step);
}

void read_router(const Router& router, LayerResult& result) {
    const TensorView counts = router.step_counts();
    result.router_counts.emplace_back(counts.as<int64_t>(), counts.as<int64_t>() + counts.numel());
    result.balancing_loss += get(router.balancing_loss(), 0);
    result.z_loss += get(router.z_loss(), 0);
}

void read_rank(RankFixture& rank, ParameterStore& store, LayerResult& result) {
    for (const Parameter& p : store.all()) {
        std::vector<double>& gradient = result.gradients[p.spec.name];
        gradient = to_doubles(p.main_grad);
        for (int64_t source = 1; source < p.spec.sources; ++source) {
            const std::vector<double> other = to_doubles(p.gradient_of(source));
            for (size_t i = 0; i < gradient.size(); ++i)
                gradient[i] = static_cast<float>(gradient[i] + other[i]);
        }
    }
    result.ops = rank.ops.counts();
    result.casts = rank.ops.num_casts();
    result.wire = rank.exchange.wire_bytes();
    result.dispatches = rank.exchange.num_dispatches();
    result.combines = rank.exchange.num_combines();
    result.saved_bytes = rank.saved.peak_bytes();
    result.row_bytes = rank.rows.bytes_per_row();
    result.in_use = rank.saved.bytes_in_use() + rank.scratch.bytes_in_use();
    result.status = rank.status.as<int32_t>()[0];
}

void fill_bf16_normal(const TensorView& view, uint64_t seed, double stddev) {
    fill(view, [&](int64_t i) {
        const double value = stddev * random_normal(seed, 0, static_cast<uint64_t>(i));
        return to_float(to_bf16(static_cast<float>(value)));
    });
}

LayerResult run_block(ProcessGroup& group, const LayerCase& c, TensorStats* stats) {
    RankFixture rank(group, c);
    LayerResult result;
    ParameterStore store(rank.ops, c.seed);
    TransformerBlock block(store, rank.poison, c.block_spec(group.rank(), group.size()));
    store.allocate_gradients();
    const std::vector<float> angles = rope_table(c.model);
    const TensorView table =
        rank.state.tensor(DType::f32, {c.model.seq_length, rope_dims(c.model) / 2, 2}, "rope");
    rank.ops.device().copy_in(table.data, angles.data(), angles.size() * sizeof(float), {});
    if (block.attention() != nullptr) block.attention()->set_rope_table(table);
    Context ctx = rank.context();
    ctx.tensor_stats = stats;
    const int64_t hidden = c.model.hidden_size;
    const uint64_t seed = 100 * c.seed + static_cast<uint64_t>(group.rank());
    HostTensor x(c.activation(), {ctx.tokens, hidden}), dy(c.activation(), {ctx.tokens, hidden}),
        y(c.activation(), {ctx.tokens, hidden}), dx(c.activation(), {ctx.tokens, hidden});
    fill_bf16_normal(x, seed, 0.0625);
    fill_bf16_normal(dy, seed + 50, c.gradient_size);
    for (Parameter& p : store.all())
        for (int64_t source = 0; source < p.spec.sources; ++source)
            rank.ops.device().fill(p.gradient_of(source).data, 0xFF, p.main_grad.bytes());

    rank.ops.reset_counts();
    block.begin_step(ctx);
    {
        ArenaScope scope(rank.saved);
        BlockSaved saved;
        block.forward(ctx, x, saved, y);
        block.backward(ctx, dy, saved, dx);
    }
    end_step(block, ctx, rank.step_number);
    if (stats != nullptr) stats->end_iteration();
    rank.ops.device().synchronize();
    if (block.router() != nullptr) read_router(*block.router(), result);
    read_rank(rank, store, result);
    result.x = to_doubles(x);
    result.dy = to_doubles(dy);
    result.y = to_doubles(y);
    result.dx = to_doubles(dx);
    return result;
}

std::vector<LayerResult> run_block(const LayerCase& c) {
    return on_ranks(c, [&](ProcessGroup& group) { return run_block(group, c); });
}

ModelFixture::ModelFixture(ProcessGroup& group, const LayerCase& c)
    : rank_(group, c),
      model_({.block = c.block_spec(group.rank(), group.size()),
              .seed = c.seed,
              .shards = c.divided_state ? StateShards{.dense = {group.rank(), group.size()}, .expert = {}}
                                        : StateShards{}},
             rank_.ops) {
    const int64_t count = rank_.tokens();
    tokens_ = rank_.state.tensor(DType::i32, {count}, "batch");
    labels_ = rank_.state.tensor(DType::i32, {count}, "batch");
    loss_ = rank_.state.tensor(DType::f32, {1}, "step");
    for (int64_t i = 0; i < count; ++i) {
        const auto words =
            random_words(c.seed + 7, static_cast<uint64_t>(group.rank()), static_cast<uint64_t>(i));
        tokens_.as<int32_t>()[i] = static_cast<int32_t>(words[0] % static_cast<uint64_t>(c.model.vocab_size));
        labels_.as<int32_t>()[i] = static_cast<int32_t>(words[1] % static_cast<uint64_t>(c.model.vocab_size));
    }
}

LayerResult ModelFixture::step(float offset, Gradient mode) {
    Context ctx = rank_.context();
    ctx.grad_mode = mode;
    rank_.ops.reset_counts();
    rank_.exchange.reset_counts();
    rank_.saved.reset_peak();
    loss_.as<float>()[0] = offset;
    model_.begin_step(ctx);
    Transformer::MicroBatch batch{.tokens = tokens_,
                                  .labels = labels_,
                                  .loss_scale = 1.0f / static_cast<float>(ctx.global_tokens),
                                  .loss_sum = loss_};
    model_.forward(ctx, batch);
    model_.backward(ctx, batch);
    rank_.ops.device().synchronize();
    LayerResult result;
    read_rank(rank_, model_.parameters(), result);
    model_.end_step(ctx, rank_.step_number);
    rank_.ops.device().synchronize();
    result.loss = get(loss_, 0);
    for (const auto& block : model_.blocks())
        if (block->router() != nullptr) read_router(*block->router(), result);
    return result;
}

}  // namespace fp8flow::test
