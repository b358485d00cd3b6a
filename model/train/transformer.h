// SPDX-License-Identifier: MIT
// The model: embedding, blocks, final norm, LM head, cross-entropy; forward and backward of one micro-batch.
// Read next: trainer.h.
#pragma once

#include "layers/transformer_block.h"

#include <functional>
#include <memory>
#include <vector>

namespace fp8flow {

inline constexpr int64_t kHeadChunk = 2048;  // tokens with fp32 logits in memory at once

struct TransformerSpec {
    BlockSpec block;  // of every block, but for layer and plain_dtype
    uint64_t seed = 0;
    StateDtypes state = {};
    StateShards shards = {};
    Freeze freeze = {};
};

// Outputs of the head for tokens of an evaluation, on the device, for callers that need more than the loss.
struct HeadChunk {
    Context& ctx;
    int64_t first = 0;          // token of this rank's micro-batch
    TensorView logits, losses;  // [n, padded vocabulary] f32, [n] f32
};
using ReadHead = std::function<void(const HeadChunk&)>;

class Transformer {
public:
    Transformer(const TransformerSpec& spec, Ops& ops);

    // One micro-batch. tokens, labels [T] i32 on the device. loss_sum [1] f32 += sum of the tokens' losses.
    // loss_scale: 1 / tokens of the global batch.
    struct MicroBatch {
        TensorView tokens, labels;
        float loss_scale = 0;
        TensorView loss_sum;
        // from the forward to the backward
        Arena::Mark saved;
        std::vector<BlockSaved> blocks;
        TensorView out;
        NormSaved norm;
    };
    // Embedding to final norm. With ctx.overlaps_param_gather the first micro-batch gathers the copies of
    // each layer in parallel with the layer before.
    void forward(Context& ctx, MicroBatch& batch);
    // Head and loss, then all layers in reverse order. Main gradients are overwritten or accumulated
    // (ctx.grad_mode). With ctx.reduces_gradients they are also summed over ranks, on the wire stream.
    void backward(Context& ctx, MicroBatch& batch);
    void evaluate(Context& ctx, const TensorView& tokens, const TensorView& labels,
                  const TensorView& loss_sum, const ReadHead& read = {});

    void begin_step(Context& ctx) const;
    // Reduces statistics over ranks; updates expert bias and delayed scales unless the step status is set.
    void end_step(Context& ctx, const TensorView& step) const;

    ParameterStore& parameters() { return store_; }
    // State of a step besides the parameters and their moments: expert biases, delayed scales.
    std::vector<NamedTensor> state() const;
    const std::vector<std::unique_ptr<TransformerBlock>>& blocks() const { return blocks_; }
    DType activation() const { return activation_; }
    int64_t num_moe_layers() const;
    // Of the MoE layers in order, after end_step, over all ranks: tokens per expert [layers, E] i64;
    // losses [layers, op::kRouterLosses] f32 as Router::losses, coefficients included. Absent without MoE
    // layers.
    TensorView router_counts() const { return router_counts_; }
    TensorView router_losses() const { return reduced_losses_; }

private:
    // Parameters in the order of the store.
    struct Range {
        size_t first = 0, last = 0;
    };
    void reduce_gradients(Context& ctx, const Range& range);
    void gather_copies(Context& ctx, const Range& range);
    static void await_copies(Context& ctx);
    void place_router_statistics();
    // Returns the output of the last block.
    TensorView forward_blocks(Context& ctx, const TensorView& tokens, std::vector<BlockSaved>& saved);
    // Loss of the final hidden states; with dx, also its gradient. Logits exist for kHeadChunk tokens at a
    // time.
    void head(Context& ctx, const TensorView& xn, const TensorView& labels, float loss_scale,
              const TensorView& loss_sum, const TensorView& dxn, const ReadHead& read = {});

    TransformerSpec spec_;
    Ops& ops_;
    DType activation_;
    ParameterStore store_;
    Parameter* embedding_;
    Parameter* output_;
    std::vector<std::unique_ptr<TransformerBlock>> blocks_;
    std::vector<Range> block_parameters_;
    std::unique_ptr<Norm> final_norm_;
    Arena constants_;  // and the words below
    TensorView router_counts_, router_losses_, reduced_losses_;
};

}  // namespace fp8flow
