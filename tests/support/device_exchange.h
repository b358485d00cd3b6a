// SPDX-License-Identifier: MIT
// The host checks of exchange_oracle.h on an exchange between GPUs: tensors go to the device with guard zones
// and whatever poison they hold, the exchange runs there, and every byte of its outputs comes back, so a byte
// written outside is noticed.
#pragma once

#include "kernels/exchange.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace fp8flow::test {

// Copies of host tensors in device memory; they last until the arena is rewound.
class DeviceTensors {
public:
    DeviceTensors(Device& device, Arena& arena) : device_(device), arena_(arena) {}

    TensorView put(const TensorView& host) {
        if (!host) return host;
        TensorView view = host;
        auto* memory =
            static_cast<uint8_t*>(arena_.tensor(DType::e8m0, {host.bytes() + 2 * kGuard}, "copies").data);
        device_.fill(memory, kGuardByte, static_cast<std::size_t>(host.bytes() + 2 * kGuard));
        device_.copy_in(memory + kGuard, host.data, static_cast<std::size_t>(host.bytes()));
        view.data = memory + kGuard;
        if (host.row_base != nullptr) {
            void* word = arena_.tensor(DType::i64, {1}, "copies").data;
            device_.copy_in(word, host.row_base, sizeof(int64_t));
            view.row_base = static_cast<const int64_t*>(word);
        }
        return view;
    }
    ScaledTensor put(const ScaledTensor& host) {
        return {put(host.data), put(host.scales), host.layout, host.format};
    }
    DispatchPlan put(DispatchPlan plan) {
        for (TensorView* view : {&plan.all_ids, &plan.all_probs, &plan.groups.counts, &plan.groups.offsets,
                                 &plan.row_source, &plan.row_prob, &plan.recv_rows, &plan.recv_offsets,
                                 &plan.recv_source, &plan.send_tokens, &plan.send_counts})
            *view = put(*view);
        return plan;
    }

    // Waits for the device and copies back; the guard zones must be as they were.
    void get(const TensorView& copy, const TensorView& host) {
        if (!host) return;
        std::vector<uint8_t> all(static_cast<std::size_t>(host.bytes() + 2 * kGuard));
        device_.copy_out(all.data(), copy.bytes_ptr() - kGuard, all.size());
        int64_t spoiled = 0;
        for (std::size_t i = 0; i < kGuard; ++i)
            spoiled += (all[i] != kGuardByte) + (all[all.size() - 1 - i] != kGuardByte);
        EXPECT_EQ(spoiled, 0) << "guard zones of " << describe(host);
        if (host.bytes() > 0)
            std::memcpy(host.data, all.data() + kGuard, static_cast<std::size_t>(host.bytes()));
    }
    void get(const ScaledTensor& copy, const ScaledTensor& host) {
        get(copy.data, host.data);
        get(copy.scales, host.scales);
    }

private:
    static constexpr int64_t kGuard = 256;
    static constexpr uint8_t kGuardByte = 0xA5;
    Device& device_;
    Arena& arena_;
};

class OnDevice final : public Exchange {
public:
    // `inner` works on memory of `device`; both outlive this.
    OnDevice(Exchange& inner, Device& device)
        : Exchange(&inner),
          inner_(inner),
          device_(device),
          arena_(device, "copies"),
          scratch_(device, "scratch", true) {}

protected:
    void do_gather_routing(const Routing& routing, const Launch& launch) override {
        ArenaScope scope(arena_);
        DeviceTensors tensors(device_, arena_);
        const TensorView to_ids = tensors.put(routing.all_ids), to_probs = tensors.put(routing.all_probs);
        inner_.gather_routing(tensors.put(routing.ids), tensors.put(routing.probs), to_ids, to_probs, launch);
        tensors.get(to_ids, routing.all_ids);
        tensors.get(to_probs, routing.all_probs);
        end_call();
    }
    void do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) override {
        ArenaScope scope(arena_);
        DeviceTensors tensors(device_, arena_);
        const ScaledTensor to = tensors.put(dst);
        inner_.dispatch(tensors.put(rows), tensors.put(call.plan), to, scratch_, call.launch);
        tensors.get(to, dst);
        end_call();
    }
    void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received, const Call& call) override {
        ArenaScope scope(arena_);
        DeviceTensors tensors(device_, arena_);
        const ScaledTensor to = tensors.put(received);
        inner_.dispatch_rows(tensors.put(rows), tensors.put(call.plan), to, scratch_, call.launch);
        tensors.get(to, received);
        end_call();
    }
    void do_combine(const Combine& args, const Call& call) override {
        ArenaScope scope(arena_);
        DeviceTensors tensors(device_, arena_);
        const Combine copies{.src = tensors.put(args.src),
                             .row_prob = tensors.put(args.row_prob),
                             .residual = tensors.put(args.residual),
                             .addend = tensors.put(args.addend),
                             .drow_prob = tensors.put(args.drow_prob),
                             .y = tensors.put(args.y),
                             .dprob = tensors.put(args.dprob)};
        inner_.combine(copies, tensors.put(call.plan), scratch_, call.launch);
        tensors.get(copies.y.data, args.y.data);
        tensors.get(copies.dprob, args.dprob);
        end_call();
    }
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) override {
        on_copy(values, [&](const TensorView& copy) { inner_.all_reduce(reduce, ranks, copy, launch); });
    }
    void do_reduce_scatter(const Sharded& sharded, const Launch& launch) override {
        on_copy(sharded.values, [&](const TensorView& copy) {
            inner_.reduce_scatter(sharded.ranks, copy, sharded.shards, launch);
        });
    }
    void do_all_gather(const Sharded& sharded, const Launch& launch) override {
        on_copy(sharded.values, [&](const TensorView& copy) {
            inner_.all_gather(sharded.ranks, copy, sharded.shards, launch);
        });
    }

private:
    // A collective in place: on a copy of the values on the device.
    template <class Step> void on_copy(const TensorView& values, Step step) {
        ArenaScope scope(arena_);
        DeviceTensors tensors(device_, arena_);
        const TensorView copy = tensors.put(values);
        step(copy);
        tensors.get(copy, values);
        end_call();
    }
    void end_call() {
        inner_.check_peers();
        EXPECT_EQ(scratch_.bytes_in_use(), 0);
        const WireBytes sent = inner_.wire_bytes();
        wire_.routing += sent.routing;
        wire_.dispatch += sent.dispatch;
        wire_.combine += sent.combine;
        wire_.between_hosts += sent.between_hosts;
        inner_.reset_counts();
    }

    Exchange& inner_;
    Device& device_;
    Arena arena_, scratch_;
};

}  // namespace fp8flow::test
