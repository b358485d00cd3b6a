// SPDX-License-Identifier: MIT
// The side stream and the events between it and the main stream.
#include "layers/schedule/side_stream.h"

namespace fp8flow {

Context Context::with(Arena& other_saved, Arena& other_scratch) const {
    return {.ops = ops,
            .exchange = exchange,
            .saved = other_saved,
            .scratch = other_scratch,
            .rows = rows,
            .timer = timer,
            .activation = activation,
            .tokens = tokens,
            .tokens_per_rank = tokens_per_rank,
            .seq_length = seq_length,
            .layer_row_capacity = layer_row_capacity,
            .known_rows = known_rows,
            .all_tokens = all_tokens,
            .num_micro_batches = num_micro_batches,
            .micro_batch = micro_batch,
            .data_parallel_size = data_parallel_size,
            .global_tokens = global_tokens,
            .grad_mode = grad_mode,
            .reduces_gradients = reduces_gradients,
            .sums_squares = sums_squares,
            .delayed = delayed,
            .recomputing = recomputing,
            .rounding = rounding,
            .step_status = step_status,
            .tensor_stats = tensor_stats,
            .layer = layer,
            .gemms = gemms,
            .side = side,
            .wire = wire,
            .interleaved = interleaved,
            .launch = launch};
}

SideStream::SideStream(Device& device, const ScheduleSpec& schedule)
    : device_(device),
      schedule_(schedule),
      scratch_(device, "side stream's scratch"),
      dropped_(device, "side stream's saved"),
      stream_(device.make_stream()),
      main_(device.make_event()),
      side_(device.make_event()),
      mark_(device.make_event()) {}

SideStream::~SideStream() {
    for (const Event event : {main_, side_, mark_}) device_.free_event(event);
    device_.free_stream(stream_);
}

Context SideStream::begin(const Context& main, Kept kept) {
    device_.record(main_, main.launch.stream);
    device_.follow(stream_, main_);
    busy_ = true;
    marked_ = false;
    Context own = main.with(kept == Kept::dropped ? dropped_ : main.saved, scratch_);
    own.launch = {.stream = stream_, .role = StreamRole::side, .shared_device = schedule_.gemm_tile_queue};
    own.side = nullptr;
    own.wire = nullptr;
    return own;
}

Event SideStream::mark() {
    device_.record(mark_, stream_);
    marked_ = true;
    return mark_;
}

void SideStream::await(const Context& main, Event mark) {
    device_.follow(main.launch.stream, mark);
    if (marked_) busy_ = false;
}

void SideStream::join(const Context& main) {
    device_.record(side_, stream_);
    device_.follow(main.launch.stream, side_);
    busy_ = false;
}

}  // namespace fp8flow
