// SPDX-License-Identifier: MIT
// Layers with tensors that stay on the device, next to the reference's results for them: for tests in which
// only the exchange synchronises the ranks.
#pragma once

#include "kernels/hopper/runtime/launch.h"
#include "tests/gpu_mpi/gpu_job.h"
#include "tests/support/exchange_oracle.h"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

namespace fp8flow::test {

inline std::vector<int64_t> on_every_rank(int64_t ranks, int64_t tokens) {
    return std::vector<int64_t>(static_cast<std::size_t>(ranks), tokens);
}
// The same four counts for every four ranks, each time with one more token per rank.
inline std::vector<int64_t> by_fours(int64_t ranks, const std::array<int64_t, 4>& tokens) {
    std::vector<int64_t> all;
    for (int64_t r = 0; r < ranks; ++r) all.push_back(tokens[static_cast<std::size_t>(r % 4)] + r / 4);
    return all;
}
inline std::vector<int64_t> uneven(int64_t ranks) { return by_fours(ranks, {17, 64, 1, 0}); }
inline int64_t at_least_one_each(int64_t experts, int64_t ranks) { return std::max(experts, ranks); }

// Adds the number of bytes that differ to *count; an integer sum, so its order does not matter.
static __global__ void count_differences(const uint8_t* a, const uint8_t* b, int64_t bytes,
                                         unsigned long long* count) {
    unsigned long long mine = 0;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x)
        mine += a[i] != b[i];
    if (mine > 0) atomicAdd(count, mine);
}

// A layer with tensors that stay on the device, and the reference's results for them. Calls are only queued:
// outputs are poisoned before each call and compared after it on the stream, so that nothing but the exchange
// itself synchronises the ranks.
class ResidentLayer {
public:
    static constexpr int kLegs = 2;  // sets of data

    ResidentLayer(const ExchangeCase& c, ProcessGroup& group, Device& device, Arena& arena)
        : device_(device), layer_(c, group.rank()) {
        DeviceTensors tensors(device, arena);
        plan_ = tensors.put(layer_.plan());
        ReferenceOps host;
        Arena scratch(host.device(), "scratch", true);
        const auto reference = make_reference_exchange(group, host, c);
        for (int leg = 0; leg < kLegs; ++leg) {
            const auto stream = static_cast<uint64_t>(1 + 2 * leg);
            Data& data = data_[leg];
            const HostScaled rows = layer_.wire_rows(stream, group.rank()), dst = layer_.rows_tensor();
            data.rows = tensors.put(rows);
            data.dst = tensors.put(dst);
            reference->dispatch(rows, layer_.plan(), dst, scratch);
            data.want_dst = tensors.put(dst);

            const ExchangeLayer::CombineInputs in = layer_.combine_inputs(stream + 1);
            const HostTensor y(c.dtype, {layer_.num_tokens(), c.hidden}),
                dprob(DType::f32, {layer_.num_tokens(), c.topk});
            data.args = {.src = {tensors.put(in.src)},
                         .residual = tensors.put(in.residual),
                         .drow_prob = tensors.put(in.drow_prob),
                         .y = {tensors.put(y)},
                         .dprob = tensors.put(dprob)};
            reference->combine({.src = {in.src},
                                .residual = in.residual,
                                .drow_prob = in.drow_prob,
                                .y = {y},
                                .dprob = dprob},
                               layer_.plan(), scratch);
            data.want_y = tensors.put(y);
            data.want_dprob = tensors.put(dprob);
        }
        differences_ = arena.tensor(DType::i64, {1}, "differences");
        device.fill(differences_.data, 0, sizeof(int64_t));
    }

    void dispatch(Exchange& exchange, Arena& scratch, int leg, const Launch& launch = {}) {
        poison_rows(leg);
        queue_dispatch(exchange, scratch, leg, launch);
        compare_rows(leg);
    }
    void combine(Exchange& exchange, Arena& scratch, int leg, const Launch& launch = {}) {
        poison_sums(leg);
        queue_combine(exchange, scratch, leg, launch);
        compare_sums(leg);
    }
    void poison_rows(int leg) {
        poison(data_[leg].dst.data);
        poison(data_[leg].dst.scales);
    }
    void queue_dispatch(Exchange& exchange, Arena& scratch, int leg, const Launch& launch) {
        exchange.dispatch(data_[leg].rows, plan_, data_[leg].dst, scratch, launch);
    }
    void compare_rows(int leg) {
        compare(data_[leg].dst.data, data_[leg].want_dst.data);
        compare(data_[leg].dst.scales, data_[leg].want_dst.scales);
    }
    void poison_sums(int leg) {
        poison(data_[leg].args.y.data);
        poison(data_[leg].args.dprob);
    }
    void queue_combine(Exchange& exchange, Arena& scratch, int leg, const Launch& launch) {
        exchange.combine(data_[leg].args, plan_, scratch, launch);
    }
    void compare_sums(int leg) {
        compare(data_[leg].args.y.data, data_[leg].want_y);
        compare(data_[leg].args.dprob, data_[leg].want_dprob);
    }
    // Waits for the device.
    int64_t differences() {
        int64_t count = 0;
        device_.copy_out(&count, differences_.data, sizeof count);
        return count;
    }

private:
    struct Data {
        ScaledTensor rows, dst, want_dst;
        Exchange::Combine args;
        TensorView want_y, want_dprob;
    };
    void poison(const TensorView& view) {
        if (view) device_.fill(view.data, 0xFF, static_cast<std::size_t>(view.bytes()));
    }
    void compare(const TensorView& got, const TensorView& want) {
        if (!got || got.bytes() == 0) return;
        count_differences<<<16, 256>>>(got.bytes_ptr(), want.bytes_ptr(), got.bytes(),
                                       static_cast<unsigned long long*>(differences_.data));
        hopper::check_cuda(cudaGetLastError(), "comparing");
    }

    Device& device_;
    ExchangeLayer layer_;
    DispatchPlan plan_;
    Data data_[kLegs];
    TensorView differences_;
};

// Layers of different sizes, all alive at once, on the exchange of one order.
struct ResidentLayers {
    Arena arena, scratch;
    std::vector<std::unique_ptr<ResidentLayer>> layers;

    ResidentLayers(Rig& rig, CombineOrder order)
        : ResidentLayers(rig, order, various(rig.exchange->size())) {}
    ResidentLayers(Rig& rig, CombineOrder order, std::vector<ExchangeCase> cases)
        : arena(GpuJob::current().ops().device(), "copies"),
          scratch(GpuJob::current().ops().device(), "scratch", true) {
        uint64_t seed = 40;
        for (ExchangeCase& c : cases) {
            c = of_kind(rig.kind, c);
            c.order = order;
            c.seed = seed++;
            layers.push_back(std::make_unique<ResidentLayer>(c, *rig.expert_parallel,
                                                             GpuJob::current().ops().device(), arena));
        }
    }
    void expect_no_difference() {
        for (std::size_t i = 0; i < layers.size(); ++i)
            EXPECT_EQ(layers[i]->differences(), 0) << "layer " << i;
    }

private:
    static std::vector<ExchangeCase> various(int64_t ranks) {
        const std::vector<int64_t> few = uneven(ranks);
        const std::vector<int64_t> more(few.rbegin(), few.rend());
        const std::vector<int64_t> many = by_fours(ranks, {1100, 2048, 1, 0});
        return {
            {.tokens = few,
             .topk = 2,
             .experts = at_least_one_each(8, ranks),
             .hidden = 256,
             .alignment = 128,
             .wire = Wire::fp8},
            {.tokens = more, .topk = 8, .experts = 16, .hidden = 512, .alignment = 128, .row_base = 128},
            {.tokens = on_every_rank(ranks, 300), .topk = 6, .experts = 16, .wire = Wire::fp8_free_scales},
            {.tokens = on_every_rank(ranks, 1),
             .topk = 1,
             .experts = at_least_one_each(4, ranks),
             .wire = Wire::fp8},
            {.tokens = on_every_rank(ranks, 90),
             .topk = 4,
             .experts = at_least_one_each(8, ranks),
             .hidden = 384,
             .wire = Wire::fp8,
             .skew = Skew::hot_rank},
            {.tokens = many, .topk = 3, .experts = 16, .hidden = 256, .wire = Wire::fp8},
        };
    }
};

}  // namespace fp8flow::test
