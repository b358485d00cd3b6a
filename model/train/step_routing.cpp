// SPDX-License-Identifier: MIT
// The samples of a micro-batch between file, slot and device.
#include "model/train/step_routing.h"

#include "kernels/core/random.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

namespace fp8flow {

using namespace data;

namespace {

RoutingShape shape_of(const Config& config, uint64_t order) {
    const int64_t seq = config.model.seq_length;
    RoutingShape shape{.tokens = config.training.train_iters * config.training.global_batch_size * seq,
                       .topk = config.moe.moe_router_topk,
                       .num_experts = config.moe.num_experts,
                       .seq_length = seq,
                       .data = order};
    for (size_t layer = 0; layer < config.model.moe_layer_freq.size(); ++layer)
        if (config.model.moe_layer_freq[layer] != 0) shape.layers.push_back(static_cast<int64_t>(layer));
    return shape;
}

}  // namespace

StepRouting::StepRouting(Device& device, const Config& config, uint64_t order, const Sizes& sizes)
    : device_(device),
      record_path_(config.output.record_routing),
      recipe_(recipe_name(config.precision)),
      out_(config.output.out),
      resumes_(config.checkpoint.load == "auto"),
      shape_(shape_of(config, order)),
      layer_bytes_(to_size(sizes.samples * shape_.seq_length * shape_.topk) * sizeof(int32_t)),
      memory_(device, "given routing") {
    require(!shape_.layers.empty() && shape_.num_experts <= std::numeric_limits<int16_t>::max(),
            ExitCode::usage,
            "data.routing_path, output.record_routing: got {} MoE layers of {} experts, want "
            "at least one layer and at most {} experts",
            shape_.layers.size(), shape_.num_experts, std::numeric_limits<int16_t>::max());
    const size_t bytes = to_size(sizes.slots) * num_layers() * layer_bytes_;
    chosen_slots_ = std::make_unique<PinnedBuffer>(device, bytes);
    if (config.data.routing_path.empty()) return;
    given_.emplace(existing("data.routing_path", config.data.routing_path, ExitCode::data), shape_);
    given_slots_ = std::make_unique<PinnedBuffer>(device, bytes);
    for (int64_t i = 0; i < sizes.buffers; ++i)
        buffers_.push_back(memory_.tensor(
            DType::i32, {static_cast<int64_t>(num_layers()), sizes.samples * shape_.seq_length, shape_.topk},
            "routing"));
}

void StepRouting::open(ProcessGroup& world, const Start& start) {
    if (std::exchange(is_open_, true)) return;
    const int64_t tokens = shape_.tokens + start.skipped_samples * shape_.seq_length;
    if (given_) given_->require_after_rollback(tokens);
    if (record_path_.empty()) return;
    RoutingShape shape = shape_;
    shape.tokens = tokens;
    std::error_code none;
    const std::string folder = std::filesystem::weakly_canonical(out_, none).string();
    // the others open what the first rank has made
    for (const bool makes_file : {true, false}) {
        if (makes_file == (world.rank() == 0))
            recorded_.emplace(record_path_, shape,
                              RecordedRouting::Options{.makes_file = makes_file,
                                                       .continues = start.continues,
                                                       .resumes = resumes_,
                                                       .recipe = recipe_,
                                                       .run = checksum_text(fnv1a64(folder))});
        world.barrier();
    }
}

void StepRouting::fill(const Batcher::Range& samples, int64_t slot) {
    if (!given_) return;
    const auto ids = to_size(samples.count * shape_.seq_length * shape_.topk);
    for (size_t layer = 0; layer < num_layers(); ++layer)
        given_->read(layer, samples.first * shape_.seq_length, {at(given_slots_, slot, layer), ids});
}

void StepRouting::place(Context& ctx) const {
    if (given_) ctx.routing.given = buffers_[to_size(ctx.micro_batch) % buffers_.size()];
}

void StepRouting::load(Context& ctx, int64_t slot) {
    if (given_)
        device_.copy_in_async(ctx.routing.given.data, at(given_slots_, slot, 0), num_layers() * layer_bytes_,
                              ctx.launch.stream);
    ctx.routing.chosen = at(chosen_slots_, slot, 0);
}

void StepRouting::keep(const Batcher::Range& samples, int64_t slot, std::span<int64_t> equal) {
    const auto k = to_size(shape_.topk), ids = to_size(shape_.seq_length) * k;
    for (size_t layer = 0; layer < num_layers(); ++layer) {
        const int32_t* chosen = at(chosen_slots_, slot, layer);
        for (int64_t i = 0; recorded_ && i < samples.count; ++i)
            recorded_->write(layer, samples.first + i, {chosen + to_size(i) * ids, ids});
        if (equal.empty()) continue;
        const int32_t* given = at(given_slots_, slot, layer);
        for (size_t i = 0; i < to_size(samples.count) * ids; ++i) {
            const int32_t* token = given + i / k * k;
            equal[layer] += std::find(token, token + k, chosen[i]) != token + k ? 1 : 0;
        }
    }
    for (int64_t i = 0; recorded_ && i < samples.count; ++i) recorded_->mark(samples.first + i);
}

}  // namespace fp8flow
