// SPDX-License-Identifier: MIT
// class Exchange: the steps of a MoE layer that cross ranks. gather_routing sends every rank's routing to all
// ranks, dispatch sends rows to their experts, combine sends sums back. The backward pass of dispatch is
// combine, that of combine is dispatch, with the same plan. Read next: kernels/dispatch_plan.h,
// layers/flows/.
//
// Ordering contract
// - Dispatch sends each token once to every rank that hosts one of its experts. There the row is copied to
//   the experts. No arithmetic.
// - Combine, order `rank`: (1) each rank sums its rows of a token in FP32, in ascending expert order, and
//   rounds the sum to the row dtype. (2) The token's owner adds these sums in FP32, in ascending rank order.
// - Combine, order `rank`, over two levels (parallel.moe_token_dispatcher_type: hierarchical): (1) as above.
//   (2) On each host these sums are added in FP32, in ascending rank order, and the host's sum is rounded to
//   the row dtype once, also on the owner's host. (3) The owner adds one sum per host in FP32, in ascending
//   order of the hosts' lowest ranks. With one rank per host the bits are those of one level.
// - Combine, order `invariant`: each (token, k) row is sent to the owner. The owner adds them in FP32, in
//   ascending expert order. The bits do not depend on the number of ranks.
// - Merging weights: each row is multiplied by its weight as it is added, in one FP32 fma. In order `rank`
//   the rank that has the row does this. In order `invariant` the owner does, with its own copy of the
//   probability.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/shards.h"
#include "kernels/dispatch_plan.h"
#include "kernels/ops.h"

namespace fp8flow {

enum class CombineOrder : uint8_t { rank, invariant };
enum class Reduce : uint8_t { sum, max };
// world: all ranks of the job. expert_replicas: the ranks that hold the same experts (expert data
// parallelism).
enum class Ranks : uint8_t { world, expert_replicas };

// Bytes that this rank sent to other ranks since the last reset.
struct WireBytes {
    double routing = 0, dispatch = 0, combine = 0;
    // The part that went to ranks on other hosts; 0 if the exchange does not know the hosts.
    double between_hosts = 0;
    double total() const { return routing + dispatch + combine; }
    double inside_hosts() const { return total() - between_hosts; }
};

class Exchange {
public:
    // This rank in a group of `size` ranks.
    struct GroupRank {
        int rank = 0, size = 1;
    };
    struct GroupRanks {
        GroupRank experts;  // expert-parallel group
        GroupRank world, replicas;
    };
    virtual ~Exchange() = default;
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;
    const GroupRanks& group_ranks() const { return group_ranks_; }
    int rank() const { return group_ranks_.experts.rank; }
    int size() const { return group_ranks_.experts.size; }
    int rank_among(Ranks ranks) const { return group_rank(ranks).rank; }
    int num_ranks(Ranks ranks) const { return group_rank(ranks).size; }
    // True on exactly one of the ranks that hold the same experts.
    bool holds_first_replica() const { return group_ranks_.replicas.rank == 0; }

    // Sends every rank's routing to all ranks: ids [T, K] i32 and probs [T, K] f32 -> all_ids, all_probs
    // [G, S, K], S = tokens_per_rank >= T. Absent tokens get id -1 and probability 0.
    void gather_routing(const TensorView& ids, const TensorView& probs, const TensorView& all_ids,
                        const TensorView& all_probs, const Launch& launch = {});

    // rows [T, H] (plain, or FP8 with vec128_wire scales) -> dst [M, H] in the plan's groups. Padding rows
    // become zero. FP8 rows get vec128 scales. `scratch` provides the buffer of received rows.
    void dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst, Arena& scratch,
                  const Launch& launch = {});

    // The first half of dispatch, for the unfused ablation and recompute: received rows [G*S, H] in order
    // (source rank, token), with wire scales.
    void dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& received,
                       Arena& scratch, const Launch& launch = {});

    // src [M, H] -> y [T, H]: the sum over each token's experts, in the order above. The residual is added in
    // FP32 before the last rounding. With an addend, the residual is the sum of both, rounded to y's dtype.
    // y may alias the residual or the addend. dprob[t, k] is the drow_prob of the row of (t, k).
    // src and y are plain today: an FP8 combine would take and give scales here.
    struct Combine {
        ScaledTensor src;      // [M, H] bf16 or f32, layout none
        TensorView row_prob;   // [M] f32, optional: the plan's merging weights
        TensorView residual;   // [T, H], optional
        TensorView addend;     // [T, H], optional, with residual
        TensorView drow_prob;  // [M] f32, optional
        ScaledTensor y;        // out [T, H] bf16 or f32, layout none
        TensorView dprob;      // out [T, K] f32, with drow_prob
    };
    void combine(const Combine& args, const DispatchPlan& plan, Arena& scratch, const Launch& launch = {});

    // In place over `ranks`, in ascending rank order: f32 (sum, max), bf16 (sum in f32, rounded to nearest
    // even at the end), i64 (sum), one i32 (max).
    void all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch = {});
    // The two halves of a sum over ranks. values [N], in place. `shards` lists the slices of each rank and is
    // the same on all ranks. Elements of no shard are not changed. With one rank nothing changes.
    // reduce_scatter: this rank's shard becomes the sum over the ranks, f32, bf16 or i64, with the bits of
    // all_reduce; other shards are not changed.
    void reduce_scatter(Ranks ranks, const TensorView& values, const Shards& shards,
                        const Launch& launch = {});
    // all_gather: every rank receives every shard. Any dtype: bytes are copied.
    void all_gather(Ranks ranks, const TensorView& values, const Shards& shards, const Launch& launch = {});
    // Throws Error(peer) if a wait for another rank on the device passed its deadline. Call it after waiting
    // for the device. Results since then are invalid.
    virtual void check_peers() {}
    // Throws Error(usage) if a call waits on the host: such calls cannot be captured (Device::capture).
    virtual void require_capturable() const;

    // May wait for the device, if it counts bytes that depend on routing. Call it between steps.
    virtual WireBytes wire_bytes() const { return wire_; }
    // Copies the counters at this point of the stream, without a wait on the host: bytes of routing, dispatch
    // and combine to host[0..2], bytes to other hosts to host[3] if hosts are known. `host` is page-locked
    // (Device::allocate_host). Read it after waiting for a later event. Only differences between two copies
    // count, because an exchange that counts on the device never resets its words. An exchange made of others
    // copies kWireWords words for each of them, at most kMostWireSets sets. The caller zeroes all words and
    // adds up the sets.
    static constexpr int kWireWords = 4, kMostWireSets = 3;
    virtual void copy_wire_counters(uint64_t* host, const Launch&) {
        host[0] = static_cast<uint64_t>(wire_.routing);
        host[1] = static_cast<uint64_t>(wire_.dispatch);
        host[2] = static_cast<uint64_t>(wire_.combine);
        host[3] = static_cast<uint64_t>(wire_.between_hosts);
    }
    int64_t num_dispatches() const { return num_dispatches_; }
    int64_t num_combines() const { return num_combines_; }
    virtual void reset_counts();
    // Called at every step with the bytes sent (0 if the device counts them, or the parts of this exchange
    // do: copy_wire_counters). Pass null to remove the observer.
    void observe(OpObserver* observer) { observer_ = observer; }

protected:
    // `ops` work where the tensors are, and outlive the exchange.
    Exchange(Ops& ops, CombineOrder order, const GroupRanks& group_ranks)
        : ops_(ops), order_(order), group_ranks_(group_ranks) {}
    // For an exchange that forwards its calls to `inner`.
    explicit Exchange(const Exchange* inner) : Exchange(inner->ops_, inner->order_, inner->group_ranks_) {}

    // The calls after their checks. An exchange of one rank has no reductions.
    struct Routing {
        const TensorView &ids, &probs, &all_ids, &all_probs;
    };
    struct Call {  // of dispatch and combine
        const DispatchPlan& plan;
        Arena& scratch;
        const Launch& launch;
    };
    struct Sharded {
        Ranks ranks;
        const TensorView& values;
        const Shards& shards;
    };
    virtual void do_gather_routing(const Routing& routing, const Launch& launch) = 0;
    // By default do_dispatch_rows into scratch, then permute and pad.
    virtual void do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call);
    virtual void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received,
                                  const Call& call) = 0;
    virtual void do_combine(const Combine& args, const Call& call) = 0;
    // Called with more than one rank, and values.
    virtual void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch);
    virtual void do_reduce_scatter(const Sharded& sharded, const Launch& launch);
    virtual void do_all_gather(const Sharded& sharded, const Launch& launch);

    // Uninitialised tensors for `count` rows like `rows`.
    static ScaledTensor rows_like(const ScaledTensor& rows, int64_t count, Arena& scratch);
    // residual + addend, computed in y; for backends with kernels that add one tensor.
    TensorView residual_with_addend(const Combine& args, const Launch& launch) const;

    Ops& ops_;
    const CombineOrder order_;
    WireBytes wire_;  // backends add what they send

private:
    const GroupRank& group_rank(Ranks ranks) const {
        return ranks == Ranks::world ? group_ranks_.world : group_ranks_.replicas;
    }
    template <class Step> void observed(const char* name, const OpCost& cost, Step step);
    template <class Step> void reduced(const char* name, double sent, Step step);
    const GroupRanks group_ranks_;
    int64_t num_dispatches_ = 0, num_combines_ = 0;
    OpObserver* observer_ = nullptr;
};

}  // namespace fp8flow
