// SPDX-License-Identifier: MIT
// The side stream and the events between it and the main stream.
#include "layers/schedule/side_stream.h"

namespace fp8flow {

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
