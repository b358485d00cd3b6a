// SPDX-License-Identifier: MIT
// The exchange of a group of one rank, on the GPU. Dispatch is permute_pad, combine is unpermute_unpad plus
// the residual (one kernel for BF16 rows). Roundings follow the ordering contract (kernels/exchange.h), so it
// equals the reference exchange bit for bit. No host synchronisation.
#include "kernels/core/error.h"
#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/permute/permute.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::local {

namespace {

constexpr int kThreads = 256;

// dprob[t, k] = drow_prob of the row of (t, k). The rows of a token are in ascending expert order, so the
// position of choice k is the number of smaller expert ids of the token. One thread per (t, k); 12 + 4K bytes
// per value.
__global__ void return_probs_kernel(const int32_t* ids, const int32_t* recv_rows, DeviceView drow_prob,
                                    float* dprob, int64_t tokens, int64_t topk) {
    pdl_wait();
    const int64_t base = drow_prob.base();
    const float* values = static_cast<const float*>(drow_prob.data);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < tokens * topk;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        const int64_t token = i / topk;
        const int32_t expert = ids[i];
        int64_t position = 0;
        for (int64_t k = 0; k < topk; ++k) {
            const int32_t other = ids[token * topk + k];
            position += other >= 0 && other < expert;
        }
        const int32_t row = expert < 0 ? -1 : recv_rows[token * topk + position];
        dprob[i] = row < 0 ? 0.0f : values[base + row];
    }
}

class LocalExchange final : public Exchange {
public:
    LocalExchange(Ops& ops, CombineOrder order) : Exchange(ops, order, {}) {}
    void require_capturable() const override {}

protected:
    void do_gather_routing(const Routing& routing, const Launch& launch) override {
        const auto& [ids, probs, all_ids, all_probs] = routing;
        FP8FLOW_CHECK(ids.dim(0) == all_ids.dim(1), "one rank has {} tokens, but {} slots", ids.dim(0),
                      all_ids.dim(1));
        Device& device = ops_.device();
        device.copy(all_ids.data, ids.data, static_cast<std::size_t>(ids.bytes()), launch.stream);
        device.copy(all_probs.data, probs.data, static_cast<std::size_t>(probs.bytes()), launch.stream);
    }

    // Received row t is token t: tokens without an expert on this rank (hierarchical exchange) come last.
    // Nobody reads what combine writes for them.
    void do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) override {
        const auto& [plan, scratch, launch] = call;
        const op::PermutePad args{.src = rows,
                                  .row_source = plan.row_source,
                                  .recv_rows = plan.recv_rows.slice(0, plan.num_tokens),
                                  .num_rows = plan.recv_offsets.slice(1, 1),
                                  .groups = plan.groups,
                                  .dst = dst};
        if (!hopper::permute::launch_fan_out(args, launch)) ops_.permute_pad(args, launch);
    }

    void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received, const Call& call) override {
        const auto copy = [&](const TensorView& from, const TensorView& to) {
            if (from)
                ops_.device().copy(to.data, from.data, static_cast<std::size_t>(from.bytes()),
                                   call.launch.stream);
        };
        copy(rows.data, received.data);
        copy(rows.scales, received.scales);
    }

    void do_combine(const Combine& given, const Call& call) override {
        const auto& [plan, scratch, launch] = call;
        const int64_t tokens = plan.num_tokens;
        Combine args = given;
        if (args.row_prob) {  // weighted sums add one tensor only
            args.residual = residual_with_addend(given, launch);
            args.addend = {};
        }
        // order rank: the sum is rounded to the row dtype before the residual is added; invariant: one
        // rounding
        const bool by_rank = order_ == CombineOrder::rank;
        op::UnpermuteUnpad sums{.src = args.src.data,
                                .recv_rows = plan.recv_rows.slice(0, tokens),
                                .num_rows = plan.recv_offsets.slice(1, 1),
                                .row_prob = args.row_prob,
                                .dst = args.y.data};
        const auto rounding =
            by_rank ? hopper::permute::SumRounding::before_residual : hopper::permute::SumRounding::once;
        if (!hopper::permute::launch_unpermute_sums(sums, {args.residual, args.addend, rounding}, launch)) {
            ArenaScope scope(scratch);
            sums.dst = scratch.tensor(by_rank ? args.src.data.dtype : DType::f32,
                                      {tokens, args.src.data.cols()}, "combine");
            // the rows of tokens without an expert on this rank are read below, but their results are not
            // used
            ops_.device().fill(sums.dst.data, 0, static_cast<std::size_t>(sums.dst.bytes()), launch.stream);
            ops_.unpermute_unpad(sums, launch);
            const TensorView residual = residual_with_addend(args, launch);
            if (residual)
                ops_.add({.a = sums.dst, .b = residual, .y = args.y.data}, launch);
            else
                ops_.cast({.x = sums.dst, .y = args.y.data}, launch);
        }
        if (!args.dprob || tokens == 0) return;
        launch_pdl(return_probs_kernel, grid_for(ceil_div(tokens * plan.topk, kThreads), launch), kThreads,
                   launch, "returning the gradients of the probabilities", plan.all_ids.as<int32_t>(),
                   plan.rows_of_probs().as<int32_t>(), device_view(args.drow_prob), args.dprob.as<float>(),
                   tokens, plan.topk);
    }
};

}  // namespace

}  // namespace fp8flow::hopper::local

namespace fp8flow::hopper {

std::unique_ptr<Exchange> make_local_exchange(Ops& ops, CombineOrder order) {
    return std::make_unique<local::LocalExchange>(ops, order);
}

}  // namespace fp8flow::hopper
