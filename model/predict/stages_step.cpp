// SPDX-License-Identifier: MIT
// Counts outside the layers: embedding, final norm and head of a micro-batch; reduction and optimizer of a
// step.
#include "model/plan/plan.h"
#include "model/predict/stages.h"
#include "model/train/transformer.h"

#include <cmath>

namespace fp8flow::predict {

namespace {

struct Held {
    double dense = 0, experts = 0;  // by one rank
    double tensors = 0;             // the share of all that is trained
};

// Of every parameter that a rank trains `each`, of weights with FP8 copies `ffn`.
Held held_of(const Config& config, double each, double ffn) {
    Held result;
    double tensors = 0;
    for (const plan::ParameterPart& part : plan::count_parameters(config)) {
        const bool own_ffn = part.part == "shared expert" || part.part == "dense FFN";
        if (part.part == "experts")
            result.experts += ffn * f64(part.trained);
        else
            result.dense += (own_ffn ? ffn : each) * f64(part.trained);
        tensors += f64(part.tensors);
        result.tensors += f64(part.trained_tensors);
    }
    result.tensors /= tensors;
    return result;
}

}  // namespace

std::vector<Work> ends_work(const Config& config, double accumulates) {
    const double t = f64(config.training.micro_batch_size * config.model.seq_length),
                 h = f64(config.model.hidden_size), v = f64(config.model.padded_vocab_size);
    const double row = kPlain * t * h, table = v * h;
    const double chunks = std::ceil(t / f64(kHeadChunk));
    const auto trained = [&](const char* weight) {
        return is_frozen(config.training.freeze, weight) ? 0.0 : 1.0;
    };
    const double embedding = trained("embedding.word_embeddings.weight");
    const double output =
        config.model.untie_embeddings_and_output_weights ? trained("output_layer.weight") : embedding;
    // every chunk after a step's first one adds to the head's gradient
    const double added = (chunks - 1 + accumulates) / chunks;
    return {
        {.part = "embedding", .stage = "embedding", .direction = "forward", .launches = 1, .bytes = 2 * row},
        {.part = "embedding",
         .stage = "embedding",
         .direction = "backward",
         .launches = 3 * embedding,
         .bytes = embedding * (row + 2 * kWord * t * h + kWord * table * (1 - accumulates))},
        {.part = "final norm", .stage = "norm", .direction = "forward", .launches = 1, .bytes = 2 * row},
        {.part = "final norm", .stage = "norm", .direction = "backward", .launches = 2, .bytes = 3 * row},
        {.part = "head",
         .stage = "head",
         .direction = "forward",
         .launches = (4 + output) * chunks,
         .bytes = (2 + output) * (row + kPlain * t * v) + 2 * kWord * t * v + 2 * chunks * kPlain * table +
                  output * chunks * kWord * table * (1 + added),
         .bf16_flops = (4 + 2 * output) * t * h * v}};
}

std::vector<Work> update_work(const Config& config, int64_t gpus) {
    const Held parameters = held_of(config, 1, 1);
    const StateDtypes& state = config.training.state;
    const double gradient = state.main_grads_dtype == StateDtype::bf16 ? 2 : kWord;
    const double moments =
        f64(size_of(state_dtype(state.exp_avg_dtype)) + size_of(state_dtype(state.exp_avg_sq_dtype)));
    const double replicas = f64(gpus / config.parallel.expert_model_parallel_size), all = f64(gpus);
    // crossings: of all bytes but a rank's own; an all-reduce is a reduce-scatter and an all-gather
    const auto reduction = [&](const char* name, Wire wire, double bytes, double ranks,
                               double crossings = 2) {
        const double sent = crossings * (ranks - 1) / ranks * bytes;
        return Work{.part = name,
                    .stage = name,
                    .direction = "update",
                    .launches = ranks > 1 ? 2.0 : 0.0,
                    .bytes = 2 * sent,
                    .wire = wire,
                    .wire_bytes = sent};
    };
    // master and moments read and written, the gradient read here and for its norm, copies written: BF16, or
    // FP8 in two orientations. The GEMMs that write experts' gradients leave their squares too, unless the
    // sums come later: from other ranks, or with combine order `invariant`.
    const double state_bytes = 2 * (kWord + moments) + kPlain;
    const bool divided = config.training.use_distributed_optimizer;
    const double dense = divided ? parameters.dense / all : parameters.dense,
                 experts = divided ? parameters.experts / replicas : parameters.experts;
    // every rank gets the sums of its slices alone; order invariant: all of experts'
    const bool divides_experts = divided && config.moe.moe_combine_order == CombineOrder::rank;
    const bool reads_for_norm = replicas > 1 || config.moe.moe_combine_order != CombineOrder::rank;
    const double normed = !reads_for_norm ? 0 : divides_experts ? experts : parameters.experts;
    // a tensor's update overlaps those before it: 1.6 us in profile_100m_4gpu_schedules.json, a quarter of a
    // launch
    const double updates =
        (f64(config.model.num_layers) * (config.model.attention ? 10 : 6) + 4) / 4 * parameters.tensors;
    const char* const reduced = "gradient reduction";
    std::vector<Work> work = {
        reduction(reduced, Wire::dense_reduction, kWord * parameters.dense, all, divided ? 1 : 2),
        reduction(reduced, Wire::expert_reduction, gradient * parameters.experts, replicas,
                  divides_experts ? 1 : 2),
        {.part = "optimizer",
         .stage = "optimizer",
         .direction = "update",
         .launches = updates,
         .bytes = (dense + experts) * state_bytes + kWord * 2 * dense + gradient * (normed + experts)}};
    if (divided) {
        // BF16 copies, or the FP32 masters of weights with FP8 copies
        const double ffn = config.precision.recipe == Recipe::bf16 ? kPlain : kWord;
        const Held bytes = held_of(config, kPlain, ffn);
        work.push_back(reduction("parameter gather", Wire::dense_reduction, bytes.dense, all, 1));
        // masters and plain copies are gathered in a few calls; FP8 copies are made weight by weight
        work.back().launches = 4 * (f64(config.model.num_layers) + 1);
        work.push_back(reduction("parameter gather", Wire::expert_reduction, bytes.experts, replicas, 1));
    }
    return work;
}

}  // namespace fp8flow::predict
