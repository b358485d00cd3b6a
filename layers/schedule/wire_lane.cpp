// SPDX-License-Identifier: MIT
// Which lane a call of the exchange runs on, and who follows it.
#include "layers/schedule/wire_lane.h"

namespace fp8flow {

WireLane::WireLane(Device& device, const ScheduleSpec& schedule)
    : device_(device),
      wire_sms_(static_cast<int>(schedule.wire_sms)),
      stream_(device.make_stream(Device::Priority::urgent)),
      main_(device.make_event()),
      ready_(device.make_event()),
      wire_(device.make_event()) {}

WireLane::~WireLane() {
    for (const Event event : {main_, ready_, wire_}) device_.free_event(event);
    device_.free_stream(stream_);
}

Launch WireLane::begin(const Context& ctx, Width width) {
    device_.record(main_, ctx.launch.stream);
    device_.follow(stream_, main_);
    // What comes next on the context's lane starts no earlier than the call, which would else find all SMs
    // taken.
    device_.record(ready_, stream_);
    device_.follow(ctx.launch.stream, ready_);
    busy_ = true;
    // one rank has no wire: its row movers need the memory's bandwidth
    const bool narrow = width == Width::narrow && ctx.exchange.size() > 1;
    return {.stream = stream_, .sm_limit = narrow ? wire_sms_ : 0, .lane = Lane::wire};
}

void WireLane::mark(Event point) { device_.record(point, stream_); }

void WireLane::await(const Context& ctx, Event point) { device_.follow(ctx.launch.stream, point); }

void WireLane::join(const Context& ctx) {
    mark(wire_);
    await(ctx, wire_);
    busy_ = false;
}

Launch begin_wire(const Context& ctx) {
    if (ctx.wire == nullptr) return ctx.launch;
    if (ctx.turn != nullptr) return ctx.wire->begin(ctx, WireLane::Width::narrow);
    if (ctx.side != nullptr && ctx.side->busy()) return ctx.wire->begin(ctx, WireLane::Width::all);
    if (ctx.wire->busy()) ctx.wire->join(ctx);
    return ctx.launch;
}

void end_wire(Context& ctx) {
    if (ctx.wire == nullptr || !ctx.wire->busy()) return;
    if (ctx.turn == nullptr) return ctx.wire->join(ctx);
    ctx.wire->mark(ctx.turn->point());
    ctx.turn->pass(ctx);
    ctx.wire->await(ctx, ctx.turn->point());
}

}  // namespace fp8flow
