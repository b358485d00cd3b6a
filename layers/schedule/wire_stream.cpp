// SPDX-License-Identifier: MIT
// Chooses the stream of each exchange call and orders it with the other streams.
#include "layers/schedule/wire_stream.h"

namespace fp8flow {

WireStream::WireStream(Device& device, const ScheduleSpec& schedule)
    : device_(device),
      wire_sms_(static_cast<int>(schedule.wire_sms)),
      next_to_side_(schedule.gemm_tile_queue ? Width::narrow : Width::all),
      stream_(device.make_stream(Device::Priority::urgent)),
      main_(device.make_event()),
      ready_(device.make_event()),
      wire_(device.make_event()) {}

WireStream::~WireStream() {
    for (const Event event : {main_, ready_, wire_}) device_.free_event(event);
    device_.free_stream(stream_);
}

Launch WireStream::begin(const Context& ctx, Width width) {
    device_.record(main_, ctx.launch.stream);
    device_.follow(stream_, main_);
    // Later work of the context's stream does not start before the call: it could occupy all SMs.
    device_.record(ready_, stream_);
    device_.follow(ctx.launch.stream, ready_);
    busy_ = true;
    // a single rank sends nothing: its row kernels need the full memory bandwidth
    const bool narrow = width == Width::narrow && ctx.exchange.size() > 1;
    return {.stream = stream_, .sm_limit = narrow ? wire_sms_ : 0, .role = StreamRole::wire};
}

void WireStream::mark(Event point) { device_.record(point, stream_); }

void WireStream::await(const Context& ctx, Event point) { device_.follow(ctx.launch.stream, point); }

void WireStream::join(const Context& ctx) {
    mark(wire_);
    await(ctx, wire_);
    busy_ = false;
}

Launch begin_wire(const Context& ctx) {
    if (ctx.wire == nullptr) return ctx.launch;
    if (ctx.interleaved != nullptr) return ctx.wire->begin(ctx, WireStream::Width::narrow);
    if (ctx.side != nullptr && ctx.side->busy()) return ctx.wire->begin(ctx, ctx.wire->width_next_to_side());
    if (ctx.wire->busy()) ctx.wire->join(ctx);
    return ctx.launch;
}

void end_wire(Context& ctx) {
    if (ctx.wire == nullptr || !ctx.wire->busy()) return;
    if (ctx.interleaved == nullptr) return ctx.wire->join(ctx);
    ctx.wire->mark(ctx.interleaved->point());
    ctx.interleaved->yield(ctx);
    ctx.wire->await(ctx, ctx.interleaved->point());
}

}  // namespace fp8flow
