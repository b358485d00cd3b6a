// SPDX-License-Identifier: MIT
// combine over peer memory. The rank that hosts the experts stores sums (order `rank`) or single rows (order
// `invariant`) into fixed slots of the owner's receive buffer. The owner adds them in ascending expert order,
// which is also ascending rank order, then the residual, and rounds once. The bits are those of the reference
// exchange. This file has PeerExchange::do_combine and the kernels for what combine_sums.cu does not support:
// other row types and widths, merging weights, order `invariant`, gradients of probabilities. Here the owner
// adds after the group barrier.
#include "kernels/core/error.h"
#include "kernels/core/scalar_math.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/vector_io.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/merging_weights.h"
#include "kernels/hopper/exchange/peer/combine.h"
#include "kernels/hopper/exchange/peer/peer_exchange.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::peer {

namespace {

// How rows are accessed: any dtype and alignment, or BF16 in whole vectors, which needs no branches and keeps
// loads in flight.
enum class Access { any, bf16_vectors };

// A row to add. fma(1, x, sum) has the bits of sum + x, so rows without merging weights have weight 1.
struct WeightedRow {
    int64_t number;
    float weight;
};

// Merging weights: by expert row for the rank that has the rows (order rank), or in ascending expert order
// for the owner (order invariant). Null: none.
struct WeightedArgs : CombineArgs {
    DeviceView row_prob;   // [M]
    const float* weights;  // [T, K]
};

template <Access kAccess> struct Rows {
    void* data;
    DType dtype;
    bool vectorised;
    int64_t hidden;

    __device__ __forceinline__ void load(int64_t row, int64_t column, float (&values)[kUnit]) const {
        if constexpr (kAccess == Access::bf16_vectors)
            unpack_unit(
                *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + row * hidden + column),
                DType::bf16, values);
        else
            load_up_to_8(data, dtype, row * hidden + column, hidden - column, vectorised, values);
    }
    __device__ __forceinline__ void store(int64_t row, int64_t column, const float (&values)[kUnit]) const {
        if constexpr (kAccess == Access::bf16_vectors)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + row * hidden + column) =
                pack_unit_bf16(values);
        else
            store_up_to_8(data, dtype, row * hidden + column, hidden - column, vectorised, values);
    }
    __device__ __forceinline__ static void add(float weight, const float (&values)[kUnit],
                                               float (&sum)[kUnit]) {
#pragma unroll
        for (int e = 0; e < kUnit; ++e) sum[e] = fma_float(weight, values[e], sum[e]);
    }
    // Adds eight columns of `count` rows to sum in order, each row multiplied by its weight in one fma.
    // next_row() returns the rows in order, and any row past the last. Four loads are in flight: vectors are
    // unpacked only after all four are issued.
    template <class NextRow>
    __device__ __forceinline__ void add(int count, NextRow next_row, int64_t column,
                                        float (&sum)[kUnit]) const {
        constexpr int kInFlight = 4;
        for (int first = 0; first < count; first += kInFlight) {
            if constexpr (kAccess == Access::bf16_vectors) {
                uint4 raw[kInFlight];
                WeightedRow row[kInFlight];
#pragma unroll
                for (int j = 0; j < kInFlight; ++j) {
                    row[j] = next_row();
                    if (first + j < count)
                        raw[j] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) +
                                                                       row[j].number * hidden + column));
                }
#pragma unroll
                for (int j = 0; j < kInFlight; ++j) {
                    if (first + j >= count) continue;
                    float values[kUnit];
                    unpack_unit(raw[j], DType::bf16, values);
                    add(row[j].weight, values, sum);
                }
            } else {
                for (int j = 0; j < min(kInFlight, count - first); ++j) {
                    const auto row = next_row();
                    float values[kUnit];
                    load(row.number, column, values);
                    add(row.weight, values, sum);
                }
            }
        }
    }
};

// Order rank, for any rows and weights. Traffic: reads the expert rows of each received row once, writes one
// row, to other ranks over NVLink. One warp per received row, eight columns per thread. Adds in FP32 in the
// order of recv_rows and rounds once. No barriers, one writer per byte.
template <Access kAccess>
__global__ __launch_bounds__(kPeerThreads) void push_sums_kernel(const WeightedArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    const int64_t base = args.src.base();
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const Rows<kAccess> src{args.src.data, args.src.dtype, args.vectorised, args.hidden};
    const float* weights = static_cast<const float*>(args.row_prob.data);
    if (weights != nullptr) weights += args.row_prob.base();
    args.received.for_each(group.rank, group.size, [&](int64_t i, int owner, int64_t token) {
        const int32_t* rows = args.recv_rows + i * args.topk;
        int count = 0;
        while (count < args.topk && rows[count] >= 0) ++count;
        const Rows<kAccess> slots{group.next_buffer(owner), args.src.dtype, args.vectorised, args.hidden};
        for (int64_t column = lane * kUnit; column < args.hidden; column += kWarpSize * kUnit) {
            float sum[kUnit] = {};
            int next = 0;
            const auto next_row = [&] {
                const int32_t row = next < count ? rows[next++] : 0;
                return WeightedRow{base + row, weights != nullptr ? weights[row] : 1.0f};
            };
            src.add(count, next_row, column, sum);
            slots.store(group.rank * args.slots + token, column, sum);
        }
    });
    if (grid_thread() == 0) count_sums(args);
}

// Order invariant. Traffic: reads and writes every expert row once, to other ranks over NVLink. One warp per
// received row copies the row of each of its experts on this rank to the owner's slot of that (token,
// expert), or zeros if an overflow dropped the row. Copies only, one writer per byte.
__global__ __launch_bounds__(kPeerThreads) void push_choices_kernel(const CombineArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    const int64_t base = args.src.base();
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int64_t sent = 0;
    args.received.for_each(group.rank, group.size, [&](int64_t i, int owner, int64_t token) {
        const TokenChoices choices = args.choices(owner, token);
        uint8_t* slots = group.next_buffer(owner) + token * args.topk * args.row_bytes;
        for (int64_t k = 0; k < args.topk; ++k) {
            if (!choices.exists(k) || choices.host(k) != group.rank) continue;
            const int32_t row = args.recv_rows[i * args.topk + choices.position_on(k, group.rank)];
            uint8_t* to = slots + choices.position(k) * args.row_bytes;
            if (row >= 0) {
                copy_contiguous(to,
                                static_cast<const uint8_t*>(args.src.data) + (base + row) * args.row_bytes,
                                args.row_bytes, lane, kWarpSize);
            } else {
                for (int64_t at = lane; at < args.row_bytes; at += kWarpSize) to[at] = 0;
            }
            if (owner != group.rank) ++sent;
        }
    });
    if (lane == 0) count_wire(&group.words->wire[2], sent * args.row_bytes);
}

// Sends 4 bytes per (token, expert) to the token's owner. One thread per (received row, k). Among a token's
// rows on this rank, the row of an expert comes after those of experts with smaller ids.
__global__ __launch_bounds__(kPeerThreads) void push_probs_kernel(const CombineArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    const int64_t base = args.drow_prob.base(), items = args.received.offsets[group.size] * args.topk;
    const float* values = static_cast<const float*>(args.drow_prob.data);
    unsigned sent = 0;
    for (int64_t item = grid_thread(); item < items; item += grid_threads()) {
        const int64_t i = item / args.topk, k = item % args.topk, source = args.received.source[i];
        const int owner = static_cast<int>(source / args.slots);
        const int64_t token = source % args.slots;
        const TokenChoices choices = args.choices(owner, token);
        if (!choices.exists(k) || choices.host(k) != group.rank) continue;
        const int32_t row = args.recv_rows[i * args.topk + choices.position_on(k, group.rank)];
        args.buffer_probs(group.next_buffer(owner))[token * args.topk + k] =
            row >= 0 ? values[base + row] : 0.0f;
        if (owner != group.rank) ++sent;
    }
    const unsigned of_warp = __reduce_add_sync(kFullMask, sent);
    if (threadIdx.x % kWarpSize == 0) count_wire(&group.words->wire[2], int64_t{of_warp} * 4);
}

// Traffic: reads every returned row and the residual once, writes y, all in local memory. One warp per slab
// of a token's columns, eight columns per thread. FP32 sum over the slots that were written, in ascending
// order, weighted in order invariant; then the residual, then one rounding. The last tokens are added first,
// because their rows arrived last and are still in L2. No barriers, one writer per byte.
template <Access kAccess>
__global__ __launch_bounds__(kPeerThreads) void add_returned_kernel(const WeightedArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    uint8_t* buffer = group.current_buffer(group.rank);
    const bool by_rank = args.order == CombineOrder::rank;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const Rows<kAccess> slots{buffer, args.src.dtype, args.vectorised, args.hidden},
        residual{args.residual.data, args.residual.dtype, args.vectorised_y, args.hidden},
        y{args.y.data, args.y.dtype, args.vectorised_y, args.hidden};
    constexpr int64_t kStep = kWarpSize * kUnit;
    const int64_t width = (args.hidden + args.slabs * kStep - 1) / (args.slabs * kStep) * kStep,
                  items = args.tokens * args.slabs;
    for (int64_t item = grid_thread() / kWarpSize; item < items; item += grid_threads() / kWarpSize) {
        const int64_t token = args.tokens - 1 - item / args.slabs, first = item % args.slabs * width;
        const TokenChoices choices = args.choices(group.rank, token);
        // Bit n: slot n of the token holds a row. Order rank: of rank n. Order invariant: of its n-th expert.
        uint32_t written = 0;
        for (int64_t k = 0; k < args.topk; ++k)
            if (choices.exists(k)) written |= by_rank ? 1u << choices.host(k) : written << 1 | 1u;
        for (int64_t column = first + lane * kUnit; column < min(args.hidden, first + width);
             column += kStep) {
            float sum[kUnit] = {};
            uint32_t left = written;
            const auto next_slot = [&] {
                const int64_t slot = __ffs(static_cast<int>(left)) - 1;
                left &= left - 1;
                const int64_t choice = token * args.topk + slot;
                return WeightedRow{by_rank ? slot * args.slots + token : choice,
                                   args.weights != nullptr && slot >= 0 ? args.weights[choice] : 1.0f};
            };
            float values[kUnit] = {};
            if (residual.data != nullptr) residual.load(token, column, values);  // in flight with the slots'
            slots.add(__popc(written), next_slot, column, sum);
            if (residual.data != nullptr) {
#pragma unroll
                for (int e = 0; e < kUnit; ++e) sum[e] += values[e];
            }
            y.store(token, column, sum);
        }
    }
}

// Traffic: reads 4 bytes per (token, k) from the receive buffer. No barriers, one writer per word.
__global__ __launch_bounds__(kPeerThreads) void copy_probs_kernel(const CombineArgs args) {
    const PeerGroup& group = args.group;
    if (group.lost()) return;
    const float* probs = args.buffer_probs(group.current_buffer(group.rank));
    const int64_t own = group.rank * args.slots * args.topk;
    for (int64_t i = grid_thread(); i < args.tokens * args.topk; i += grid_threads()) {
        const int32_t id = args.all_ids[own + i];
        args.dprob[i] = id >= 0 && id < group.size * args.local_experts ? probs[i] : 0.0f;
    }
}

constexpr int64_t kSlabs = 4;  // so that a few hundred tokens keep all SMs busy

// Rows, or sums of them, to their owners.
void launch_push(const WeightedArgs& args, Access access, const Launch& launch) {
    const unsigned grid = peer_grid(args.group.size * args.slots, launch);
    constexpr const char* kWhat = "returning rows to their owners";
    if (args.order == CombineOrder::invariant)
        launch_kernel(push_choices_kernel, grid, kPeerThreads, launch, kWhat, args);
    else if (access == Access::bf16_vectors)
        launch_kernel(push_sums_kernel<Access::bf16_vectors>, grid, kPeerThreads, launch, kWhat, args);
    else
        launch_kernel(push_sums_kernel<Access::any>, grid, kPeerThreads, launch, kWhat, args);
}

// The owner adds. Order rank: the sums already have their weights.
void launch_add(const WeightedArgs& args, Access access, const Launch& launch) {
    const auto add = access == Access::bf16_vectors ? add_returned_kernel<Access::bf16_vectors>
                                                    : add_returned_kernel<Access::any>;
    launch_kernel(add, peer_grid(args.tokens * args.slabs, launch), kPeerThreads, launch,
                  "adding returned rows", args);
}

}  // namespace

void PeerExchange::do_combine(const Combine& args, const Call& call) {
    const auto& [plan, scratch, launch] = call;
    ArenaScope scope(scratch);
    last_stream_ = launch.stream;
    const int64_t slots = plan.all_ids.dim(1), topk = plan.topk, hidden = args.src.data.cols(),
                  row_bytes = hidden * size_of(args.src.data.dtype);
    const bool by_rank = order_ == CombineOrder::rank;
    const int64_t prob_offset = peer_aligned((by_rank ? size() : topk) * slots * row_bytes);
    check_fits(prob_offset + slots * topk * 4, "a combine");
    FP8FLOW_CHECK(topk <= limits_.topk, "top-{}, but the exchange was made for top-{}", topk, limits_.topk);
    const TensorView residual = residual_with_addend(args, launch);
    const bool vectorised = is_vectorisable(args.src.data.data, hidden),
               vectorised_y = is_vectorisable(args.y.data.data, hidden) &&
                              (!residual || is_vectorisable(residual.data, hidden)),
               fast = args.src.data.dtype == DType::bf16 && args.y.data.dtype == DType::bf16 &&
                      hidden % kUnit == 0;
    // Which kernels run, and so how ranks synchronise, must not depend on one rank's addresses.
    FP8FLOW_CHECK(!fast || (vectorised && vectorised_y), "rows of {} BF16 must be aligned to 16 bytes",
                  hidden);
    const CombineArgs kernel_args{
        .group = device_groups_[kExpertParallel],
        .all_ids = plan.all_ids.as<int32_t>(),
        .slots = slots,
        .topk = topk,
        .local_experts = plan.num_local_experts,
        .received = {plan.recv_offsets.as<int64_t>(), plan.recv_source.as<int32_t>(), slots},
        .send_tokens = plan.send_tokens.as<int32_t>(),
        .send_counts = plan.send_counts.as<int64_t>(),
        .recv_rows = plan.recv_rows.as<int32_t>(),
        .src = device_view(args.src.data),
        .drow_prob = device_view(args.drow_prob),
        .hidden = hidden,
        .row_bytes = row_bytes,
        .vectorised = vectorised,
        .prob_offset = prob_offset,
        .tokens = plan.num_tokens,
        .slabs = fast ? kSlabs : 1,
        .order = order_,
        .residual = device_view(residual),
        .y = device_view(args.y.data),
        .vectorised_y = vectorised_y,
        .dprob = args.dprob ? args.dprob.as<float>() : nullptr};
    const int64_t received = size() * slots, tokens = plan.num_tokens;
    if (args.dprob) {
        CombineArgs probs = kernel_args;
        probs.recv_rows = plan.rows_of_probs().as<int32_t>();
        launch_kernel(push_probs_kernel, peer_grid(ceil_div(received * topk, kWarpSize), launch),
                      kPeerThreads, launch, "returning the gradients of the probabilities", probs);
    }
    if (by_rank && fast && !args.row_prob) {
        launch_combine_sums(kernel_args, barrier_of(kExpertParallel, PeerOperation::combine),
                            reinterpret_cast<CombineWords*>(memory_->own() + layout_.combine_words),
                            layout_.combine_progress, launch);
    } else {
        WeightedArgs weighted{kernel_args, device_view(args.row_prob), nullptr};
        if (args.row_prob && !by_rank)
            weighted.weights = weights_in_expert_order(plan, rank(), scratch, launch).as<float>();
        const Access access = fast ? Access::bf16_vectors : Access::any;
        launch_push(weighted, access, launch);
        synchronize(kExpertParallel, PeerOperation::combine, launch);
        launch_add(weighted, access, launch);
    }
    if (!args.dprob) return;
    launch_kernel(copy_probs_kernel, peer_grid(ceil_div(tokens * topk, kWarpSize), launch), kPeerThreads,
                  launch, "copying the gradients of the probabilities", kernel_args);
}

}  // namespace fp8flow::hopper::peer
