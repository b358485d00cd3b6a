// SPDX-License-Identifier: MIT
// StepRouting: reads the experts of a step's tokens from a file, or writes them into one (data.routing_path,
// output.record_routing). It uses page-locked slots as BatchFeed does: the host fills a slot before the step
// or reads it after the step, and the device copies in between, also in a captured step. Read next:
// data/routing_file.h.
#pragma once

#include "kernels/comm/process_group.h"
#include "kernels/core/pinned.h"
#include "layers/context.h"
#include "model/config/config.h"
#include "model/data/data.h"
#include "model/data/routing_file.h"

#include <optional>

namespace fp8flow {

class StepRouting {
public:
    // Sizes of slots. buffers: micro-batches on the device at the same time.
    struct Sizes {
        int64_t samples = 0, slots = 0, buffers = 1;  // samples: of a rank in a micro-batch, at most
    };
    // order: order_fingerprint of the data.
    StepRouting(Device& device, const Config& config, uint64_t order, const Sizes& sizes);

    // Collective, before each step; the first call alone does something: it refuses a given file that is too
    // short, and creates the file to record. A run that skipped samples before (training.on_divergence:
    // rollback) reads as many after those of train_iters.
    struct Start {
        bool continues = false;
        int64_t skipped_samples = 0;
    };
    void open(ProcessGroup& world, const Start& start);
    // On the host: copies given ids into the slot.
    void fill(const data::Batcher::Range& samples, int64_t slot);
    // Where the routers of a micro-batch read given ids.
    void place(Context& ctx) const;
    // On the device, before the forward: copies the ids, and sets where the routers' choices go.
    void load(Context& ctx, int64_t slot);
    // After the step: writes its choices to the file. equal [layers], if not empty, += number of choices that
    // are among the given ids.
    void keep(const data::Batcher::Range& samples, int64_t slot, std::span<int64_t> equal);

    bool gives() const { return given_.has_value(); }
    std::string note() const { return recorded_ ? recorded_->note() : ""; }
    size_t num_layers() const { return shape_.layers.size(); }

private:
    // Ids of a layer in a slot.
    int32_t* at(const std::unique_ptr<PinnedBuffer>& slots, int64_t slot, size_t layer) const {
        return slots->at<int32_t>((to_size(slot) * num_layers() + layer) * layer_bytes_);
    }

    Device& device_;
    bool is_open_ = false;
    std::string record_path_, recipe_, out_;
    bool resumes_;
    data::RoutingShape shape_;
    size_t layer_bytes_;
    std::optional<data::GivenRouting> given_;
    std::optional<data::RecordedRouting> recorded_;
    std::unique_ptr<PinnedBuffer> given_slots_, chosen_slots_;
    Arena memory_;
    std::vector<TensorView> buffers_;  // [layers, S, K] i32
};

}  // namespace fp8flow
