// SPDX-License-Identifier: MIT
// The model: embedding, blocks, head and loss; backward in reverse order.
#include "model/train/transformer.h"

#include "layers/projection.h"
#include "layers/rope.h"
#include "layers/schedule/wire_stream.h"

#include <algorithm>

namespace fp8flow {

Transformer::Transformer(const TransformerSpec& spec, Ops& ops)
    : spec_(spec),
      ops_(ops),
      activation_(spec.block.precision.recipe == Recipe::fp32 ? DType::f32 : DType::bf16),
      store_(ops, spec.seed, spec.state, spec.shards, Masters::own, spec.freeze),
      constants_(ops.device(), "constants") {
    const ModelSpec& model = spec.block.model;
    auto table = [&](const char* name, double init_std) {
        return &store_.add({.name = name,
                            .shape = {model.padded_vocab_size, model.hidden_size, 0},
                            .init_std = init_std,
                            .plain_dtype = activation_});
    };
    embedding_ =
        table("embedding.word_embeddings.weight",
              model.embedding_init_method_std > 0 ? model.embedding_init_method_std : model.init_method_std);
    BlockSpec of_block = spec.block;
    of_block.plain_dtype = activation_;
    for (int layer = 0; layer < model.num_layers; ++layer) {
        const size_t first = store_.all().size();
        of_block.layer = layer;
        blocks_.push_back(std::make_unique<TransformerBlock>(store_, ops.device(), of_block));
        block_parameters_.push_back({first, store_.all().size()});
    }
    PrecisionSpec plain;
    plain.recipe = Recipe::bf16;
    final_norm_ = std::make_unique<Norm>(store_, ops.device(), model, plain, NormOutput::plain, Rule{},
                                         "final_layernorm");
    output_ = model.untie_embeddings_and_output_weights ? table("output_layer.weight", model.init_method_std)
                                                        : embedding_;
    store_.allocate_gradients();
    place_router_statistics();
    if (!model.attention) return;
    const std::vector<float> rope = rope_table(model);
    const TensorView rope_view =
        constants_.tensor(DType::f32, {model.seq_length, rope_dims(model) / 2, 2}, "rope");
    ops.device().copy_in(rope_view.data, rope.data(), rope.size() * sizeof(float));
    for (auto& block : blocks_) block->attention()->set_rope_table(rope_view);
}

// Contiguous over all layers, so that they need one fill, one reduction and one copy to the host.
void Transformer::place_router_statistics() {
    const int64_t layers = num_moe_layers(), experts = spec_.block.moe.num_experts;
    if (layers == 0) return;
    router_counts_ = constants_.tensor(DType::i64, {layers, experts}, "router");
    router_losses_ = constants_.tensor(DType::f32, {layers, op::kRouterLosses}, "router");
    reduced_losses_ = constants_.tensor(DType::f32, {layers, op::kRouterLosses}, "router");
    for (const TensorView& view : {router_counts_, router_losses_, reduced_losses_})
        ops_.device().fill(view.data, 0, static_cast<size_t>(view.bytes()));
    int64_t layer = 0;
    for (auto& block : blocks_) {
        if (Router* router = block->router()) {
            router->use_model_statistics(layer, router_counts_[layer], router_losses_[layer]);
            ++layer;
        }
    }
}

int64_t Transformer::num_moe_layers() const {
    return std::ranges::count_if(blocks_, [](const auto& block) { return block->is_moe(); });
}

TensorView Transformer::forward_blocks(Context& ctx, const TensorView& tokens,
                                       std::vector<BlockSaved>& saved) {
    ctx.timer.set_direction("forward");
    const int64_t hidden = spec_.block.model.hidden_size;
    auto residual = [&] { return ctx.saved.tensor(ctx.activation, {ctx.tokens, hidden}, "residual"); };
    TensorView x = residual();
    gather_copies(ctx, {0, block_parameters_.front().first});
    await_copies(ctx);
    gather_copies(ctx, block_parameters_.front());
    {
        auto timed = ctx.part("embedding");
        ctx.ops.embedding({.ids = tokens, .table = embedding_->plain, .y = x}, ctx.launch);
    }
    saved.resize(blocks_.size());
    for (size_t i = 0; i < blocks_.size(); ++i) {
        const TensorView y = residual();
        await_copies(ctx);
        gather_copies(ctx, i + 1 < blocks_.size()
                               ? block_parameters_[i + 1]
                               : Range{block_parameters_.back().last, store_.all().size()});
        ctx.timer.set_layer(static_cast<int>(i));
        blocks_[i]->forward(ctx, x, saved[i], y);
        x = y;
    }
    ctx.timer.set_layer(-1);
    await_copies(ctx);
    return x;
}

// The layer's own exchange calls come later on the wire, on every rank.
void Transformer::gather_copies(Context& ctx, const Range& range) {
    if (!ctx.overlaps_param_gather || ctx.micro_batch > 0) return;
    const Launch wire = ctx.wire->begin(ctx, WireStream::Width::narrow);
    const StageTimer::Scope timed(ctx.timer, StageLevel::part, "parameter gather", wire);
    store_.gather_copies(ctx.exchange, range.first, range.last, wire);
}

void Transformer::await_copies(Context& ctx) {
    if (ctx.overlaps_param_gather && ctx.wire->busy()) ctx.wire->join(ctx);
}

void Transformer::head(Context& ctx, const TensorView& xn, const TensorView& labels, float loss_scale,
                       const TensorView& loss_sum, const TensorView& dxn, const ReadHead& read) {
    auto timed = ctx.part("head");
    const int64_t vocab = spec_.block.model.padded_vocab_size;
    const Projection output(*output_);
    Gradient mode = ctx.grad_mode;
    // A rank without tokens must still overwrite its main gradient with zeros.
    int64_t first = 0;
    do {
        ArenaScope scope(ctx.scratch);
        const int64_t count = std::min(kHeadChunk, ctx.tokens - first);
        const TensorView x = xn.slice(first, count);
        const TensorView logits = ctx.scratch.tensor(DType::f32, {count, vocab}, "head");
        const TensorView loss = ctx.scratch.tensor(DType::f32, {count}, "head");
        const TensorView dlogits =
            dxn ? ctx.scratch.tensor(ctx.activation, {count, vocab}, "head") : TensorView{};
        output.forward(ctx, x, logits);
        ctx.ops.cross_entropy({.logits = logits,
                               .labels = labels.slice(first, count),
                               .vocab_size = spec_.block.model.vocab_size,
                               .grad_scale = loss_scale,
                               .loss = loss,
                               .dlogits = dlogits},
                              ctx.launch);
        ctx.ops.sum({.values = loss, .sum = loss_sum}, ctx.launch);
        if (read && count > 0) read({ctx, first, logits, loss});
        if (dxn) {
            output.backward(ctx, dlogits, x, mode, dxn.slice(first, count));
            mode = Gradient::accumulate;
        }
        first += kHeadChunk;
    } while (first < ctx.tokens);
}

void Transformer::forward(Context& ctx, MicroBatch& batch) {
    batch.saved = ctx.saved.mark();
    ctx.rows.pop(0);
    if (ctx.delayed != nullptr) ctx.delayed->begin_micro_batch(ctx.micro_batch, ctx.num_micro_batches);
    batch.out = forward_blocks(ctx, batch.tokens, batch.blocks);
    auto timed = ctx.part("final norm");
    final_norm_->forward(ctx, batch.out, ctx.saved, batch.norm);
}

void Transformer::backward(Context& ctx, MicroBatch& batch) {
    ArenaScope scratch_scope(ctx.scratch);
    const int64_t hidden = spec_.block.model.hidden_size;
    const TensorView dxn = ctx.scratch.tensor(ctx.activation, {ctx.tokens, hidden}, "residual");
    ctx.timer.set_direction("forward");
    head(ctx, batch.norm.out.plain, batch.labels, batch.loss_scale, batch.loss_sum, dxn);

    ctx.timer.set_direction("backward");
    TensorView dy = ctx.scratch.tensor(ctx.activation, {ctx.tokens, hidden}, "residual");
    TensorView dx = dxn;  // two alternating buffers
    {
        auto timed = ctx.part("final norm");
        final_norm_->backward(ctx, dxn, {}, batch.norm, dy);
    }
    reduce_gradients(ctx, {block_parameters_.back().last, store_.all().size()});
    for (size_t i = blocks_.size(); i-- > 0;) {
        ctx.timer.set_layer(static_cast<int>(i));
        blocks_[i]->backward(ctx, dy, batch.blocks[i], dx);
        reduce_gradients(ctx, block_parameters_[i]);
        std::swap(dy, dx);
    }
    ctx.timer.set_layer(-1);
    if (!embedding_->frozen) {
        auto timed = ctx.part("embedding");
        const bool tied = output_ == embedding_;
        ctx.ops.embedding_backward({.ids = batch.tokens,
                                    .dy = dy,
                                    .mode = tied ? Gradient::accumulate : ctx.grad_mode,
                                    .dtable = embedding_->main_grad},
                                   ctx.launch);
    }
    reduce_gradients(ctx, {0, block_parameters_.front().first});
    ctx.saved.rewind(batch.saved);
}

// A tied embedding is complete at the end of the backward, with the embedding.
void Transformer::reduce_gradients(Context& ctx, const Range& range) {
    if (!ctx.reduces_gradients) return;
    const Launch wire = ctx.wire->begin(ctx, WireStream::Width::narrow);
    const StageTimer::Scope timed(ctx.timer, StageLevel::part, "gradient reduction", wire);
    store_.reduce_gradients(ctx.exchange, ctx.rounding.replica, range.first, range.last, wire);
}

void Transformer::evaluate(Context& ctx, const TensorView& tokens, const TensorView& labels,
                           const TensorView& loss_sum, const ReadHead& read) {
    ArenaScope saved_scope(ctx.saved);
    ArenaScope scratch_scope(ctx.scratch);
    ctx.rows.pop(0);
    ctx.recomputing = true;  // tokens of an evaluation count in no statistics
    ctx.routing = {};
    ctx.delayed = nullptr;
    ctx.overlaps_param_gather = false;
    std::vector<BlockSaved> saved;
    const TensorView out = forward_blocks(ctx, tokens, saved);
    NormSaved norm;
    final_norm_->forward(ctx, out, ctx.saved, norm);
    head(ctx, norm.out.plain, labels, 0.0f, loss_sum, {}, read);
    ctx.rows.pop(0);
    ctx.recomputing = false;
}

std::vector<NamedTensor> Transformer::state() const {
    std::vector<NamedTensor> state;
    for (const auto& block : blocks_)
        for (NamedTensor& tensor : block->state()) state.push_back(std::move(tensor));
    return state;
}

void Transformer::begin_step(Context& ctx) const {
    for (const TensorView& view : {router_counts_, router_losses_})
        if (view) ctx.ops.zero({.y = view}, ctx.launch);
    for (const auto& block : blocks_) block->begin_step(ctx);
}

void Transformer::end_step(Context& ctx, const TensorView& step) const {
    if (router_counts_) {
        ctx.exchange.all_reduce(Reduce::sum, Ranks::world, router_counts_, ctx.launch);
        ctx.ops.device().copy(reduced_losses_.data, router_losses_.data,
                              static_cast<size_t>(router_losses_.bytes()), ctx.launch.stream);
        ctx.exchange.all_reduce(Reduce::sum, Ranks::world, reduced_losses_, ctx.launch);
    }
    for (const auto& block : blocks_) block->update_state(ctx, step);
}

}  // namespace fp8flow
