// SPDX-License-Identifier: MIT
// Which lane a call of the exchange runs on, and who follows it.
#include "layers/schedule/wire_lane.h"

#include <algorithm>

namespace fp8flow {

namespace {

// A cluster of two CTAs needs two SMs of one GPC; a call on the wire may leave odd ones.
constexpr int kSparedSms = 4;

}  // namespace

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

Launch WireLane::begin(const Context& ctx) {
    device_.record(main_, ctx.launch.stream);
    device_.follow(stream_, main_);
    // What comes next on the context's lane starts no earlier than the call, which would else find all SMs
    // taken.
    device_.record(ready_, stream_);
    device_.follow(ctx.launch.stream, ready_);
    busy_ = true;
    return {.stream = stream_, .sm_limit = divides(ctx) ? wire_sms_ : 0, .lane = Lane::wire};
}

// One rank has no wire: its row movers need the memory's bandwidth.
bool WireLane::divides(const Context& ctx) const { return wire_sms_ > 0 && ctx.exchange.size() > 1; }

int WireLane::sms_beside(const Context& ctx) const {
    const int left = device_.num_sms() - wire_sms_ - kSparedSms;
    return divides(ctx) ? std::max(left, 0) / 2 * 2 : 0;
}

void WireLane::mark(Event point) { device_.record(point, stream_); }

void WireLane::await(const Context& ctx, Event point) { device_.follow(ctx.launch.stream, point); }

void WireLane::join(const Context& ctx) {
    mark(wire_);
    await(ctx, wire_);
    busy_ = false;
}

Launch begin_wire(const Context& ctx, Beside beside) {
    if (ctx.wire == nullptr) return ctx.launch;
    if (ctx.turn != nullptr) return ctx.wire->begin(ctx);
    if (ctx.side != nullptr && (beside == Beside::work || ctx.side->busy())) return ctx.wire->begin(ctx);
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
