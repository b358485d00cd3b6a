// SPDX-License-Identifier: MIT
// Copies out, exchanges on the host, copies in. Every tensor keeps its bytes, so the order contract is that
// of the exchange on the host.
#include "kernels/comm/staged_exchange.h"

#include <utility>

namespace fp8flow {

StagedExchange::StagedExchange(Device& device, std::unique_ptr<Ops> host_ops, std::unique_ptr<Exchange> host)
    : device_(device),
      host_ops_(std::move(host_ops)),
      host_(std::move(host)),
      arena_(host_ops_->device(), "staged exchange") {}

int64_t StagedExchange::row_base(const TensorView& view, const Launch& launch) {
    int64_t base = 0;
    if (view.row_base != nullptr) device_.copy_out(&base, view.row_base, sizeof base, launch.stream);
    return base;
}

TensorView StagedExchange::mirror(const TensorView& view, int64_t rows) {
    if (!view) return view;
    const int64_t first = rows >= 0 ? rows : view.dims[0];
    if (view.rank == 1) return arena_.tensor(view.dtype, {first}, "mirror");
    if (view.rank == 2) return arena_.tensor(view.dtype, {first, view.dims[1]}, "mirror");
    return arena_.tensor(view.dtype, {first, view.dims[1], view.dims[2]}, "mirror");
}

TensorView StagedExchange::copy_out(const TensorView& view, const Launch& launch, int64_t rows) {
    if (!view) return view;
    const TensorView host = mirror(view, rows);
    const int64_t row_bytes = view.dims[0] > 0 ? view.bytes() / view.dims[0] : 0;
    const uint8_t* from = view.bytes_ptr() + row_base(view, launch) * row_bytes;
    device_.copy_out(host.data, from, static_cast<std::size_t>(host.bytes()), launch.stream);
    return host;
}

ScaledTensor StagedExchange::copy_out(const ScaledTensor& tensor, const Launch& launch) {
    return {.data = copy_out(tensor.data, launch),
            .scales = copy_out(tensor.scales, launch),
            .layout = tensor.layout,
            .format = tensor.format};
}

void StagedExchange::copy_in(const TensorView& host, const TensorView& device, const Launch& launch) {
    device_.copy_in(device.data, host.data, static_cast<std::size_t>(host.bytes()), launch.stream);
}

DispatchPlan StagedExchange::host_plan(const DispatchPlan& plan, const Launch& launch) {
    DispatchPlan host = plan;
    const int64_t rows = plan.groups.row_capacity;
    host.all_ids = copy_out(plan.all_ids, launch);
    host.all_probs = copy_out(plan.all_probs, launch);
    host.groups.counts = copy_out(plan.groups.counts, launch);
    host.groups.offsets = copy_out(plan.groups.offsets, launch);
    host.row_source = copy_out(plan.row_source, launch, rows);
    host.row_prob = copy_out(plan.row_prob, launch, rows);
    host.recv_rows = copy_out(plan.recv_rows, launch);
    host.recv_offsets = copy_out(plan.recv_offsets, launch);
    host.recv_source = copy_out(plan.recv_source, launch);
    host.send_tokens = copy_out(plan.send_tokens, launch);
    host.send_counts = copy_out(plan.send_counts, launch);
    host.prob_rows = copy_out(plan.prob_rows, launch);
    return host;
}

void StagedExchange::add_wire_bytes() {
    const WireBytes sent = host_->wire_bytes();
    wire_.routing += sent.routing;
    wire_.dispatch += sent.dispatch;
    wire_.combine += sent.combine;
    wire_.between_hosts += sent.between_hosts;
    host_->reset_counts();
}

void StagedExchange::do_gather_routing(const TensorView& ids, const TensorView& probs,
                                       const TensorView& all_ids, const TensorView& all_probs,
                                       const Launch& launch) {
    ArenaScope scope(arena_);
    const TensorView host_ids = mirror(all_ids), host_probs = mirror(all_probs);
    host_->gather_routing(copy_out(ids, launch), copy_out(probs, launch), host_ids, host_probs);
    copy_in(host_ids, all_ids, launch);
    copy_in(host_probs, all_probs, launch);
    add_wire_bytes();
}

void StagedExchange::do_dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst,
                                 Arena&, const Launch& launch) {
    ArenaScope scope(arena_);
    const DispatchPlan host = host_plan(plan, launch);
    const int64_t capacity = plan.groups.row_capacity, width = dst.data.cols();
    const ScaledTensor out = arena_.fp8(dst.data.dtype, {capacity, width}, dst.layout, "mirror");
    host_->dispatch(copy_out(rows, launch), host, out, arena_);

    // Only the rows of this layer: the rest of a shared buffer belongs to other layers. vec128 scales have
    // one stripe per block of columns.
    const int64_t total = host.groups.offsets.as<int64_t>()[host.groups.num_groups];
    const int64_t base = row_base(dst.data, launch), row_bytes = width * size_of(dst.data.dtype);
    device_.copy_in(dst.data.bytes_ptr() + base * row_bytes, out.data.data,
                    static_cast<std::size_t>(total * row_bytes), launch.stream);
    if (dst.scales) {
        for (int64_t block = 0; block < dst.scales.dim(0); ++block) {
            device_.copy_in(dst.scales.as<float>() + block * dst.scales.dim(1) + base,
                            out.scales.as<float>() + block * capacity,
                            static_cast<std::size_t>(total) * sizeof(float), launch.stream);
        }
    }
    device_.synchronize();  // the mirrors are reused by the next call
    add_wire_bytes();
}

void StagedExchange::do_dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan,
                                      const ScaledTensor& received, Arena&, const Launch& launch) {
    ArenaScope scope(arena_);
    ScaledTensor out{
        .data = mirror(received.data), .scales = mirror(received.scales), .layout = received.layout};
    const DispatchPlan host = host_plan(plan, launch);
    host_->dispatch_rows(copy_out(rows, launch), host, out, arena_);
    const int64_t arrived = host.recv_offsets.as<int64_t>()[size()];  // rows past these are not written
    copy_in(out.data.slice(0, arrived), received.data, launch);
    if (received.scales) copy_in(out.scales.slice(0, arrived), received.scales, launch);
    device_.synchronize();
    add_wire_bytes();
}

void StagedExchange::do_combine(const Combine& args, const DispatchPlan& plan, Arena&, const Launch& launch) {
    ArenaScope scope(arena_);
    const int64_t rows = plan.groups.row_capacity;
    Combine host{.src = copy_out(args.src, launch, rows),
                 .row_prob = copy_out(args.row_prob, launch, rows),
                 .residual = copy_out(args.residual, launch),
                 .addend = copy_out(args.addend, launch),
                 .drow_prob = copy_out(args.drow_prob, launch, plan.prob_rows ? -1 : rows),
                 .y = mirror(args.y),
                 .dprob = mirror(args.dprob)};
    host_->combine(host, host_plan(plan, launch), arena_);
    copy_in(host.y, args.y, launch);
    if (args.dprob) copy_in(host.dprob, args.dprob, launch);
    device_.synchronize();
    add_wire_bytes();
}

template <class Step>
void StagedExchange::on_host(const TensorView& values, const Launch& launch, Step step) {
    ArenaScope scope(arena_);
    const TensorView host = copy_out(values, launch);
    step(host);
    copy_in(host, values, launch);
    device_.synchronize();
}

void StagedExchange::do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values,
                                   const Launch& launch) {
    if (num_ranks(ranks) == 1) return;
    on_host(values, launch, [&](const TensorView& host) { host_->all_reduce(reduce, ranks, host); });
}

void StagedExchange::do_reduce_scatter(Ranks ranks, const TensorView& values, const Shares& shares,
                                       const Launch& launch) {
    on_host(values, launch, [&](const TensorView& host) { host_->reduce_scatter(ranks, host, shares); });
}

void StagedExchange::do_all_gather(Ranks ranks, const TensorView& values, const Shares& shares,
                                   const Launch& launch) {
    on_host(values, launch, [&](const TensorView& host) { host_->all_gather(ranks, host, shares); });
}

}  // namespace fp8flow
