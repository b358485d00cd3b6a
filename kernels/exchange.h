// SPDX-License-Identifier: MIT
// class Exchange: what crosses ranks in a MoE layer. One metadata exchange (gather_routing), then rows out to
// their experts (dispatch) and sums back (combine). The backward of dispatch is combine, the backward of
// combine is dispatch, with the same plan. Read next: kernels/dispatch_plan.h, layers/flows/.
//
// Ordering contract. Dispatch moves each token once to every rank that hosts at least one of its experts and
// fans it out there: pure copies. Combine, order `rank`: every rank sums its rows of a token in fp32 in
// ascending expert order, rounds to the row dtype, and the owner adds one row per rank in ascending rank
// order in fp32. Over two levels (parallel.moe_token_dispatcher_type: hierarchical) a host's rank sums are
// added in ascending rank order in fp32, every host's sum (its owner's host's too) is rounded to the row
// dtype once, and the owner adds one sum per host in fp32, in ascending order of the hosts' lowest ranks:
// with one rank on each host, where no sum is rounded twice, the same bits. Order `invariant`: each (token,
// k) row goes to the owner, which sums them in fp32 in ascending expert order: the same bits for every number
// of ranks. Merging weights multiply each row by one fp32 fma as it is added: in order `rank` on the rank
// that has the row, in order `invariant` on the owner, with its own probability of the (token, k), which is
// the same float.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/shares.h"
#include "kernels/dispatch_plan.h"
#include "kernels/ops.h"

#include <map>
#include <string>

namespace fp8flow {

enum class CombineOrder : uint8_t { rank, invariant };
enum class Reduce : uint8_t { sum, max };
// world: all ranks of the job. expert_replicas: the ranks that hold the same experts (expert data
// parallelism).
enum class Ranks : uint8_t { world, expert_replicas };

// Bytes that left this rank (to other ranks only), by leg, since the last reset.
struct WireBytes {
    double routing = 0, dispatch = 0, combine = 0;
    // Of them, to ranks on other hosts; counted where the exchange knows the hosts, else 0.
    double between_hosts = 0;
    double total() const { return routing + dispatch + combine; }
    double inside_hosts() const { return total() - between_hosts; }
};

class Exchange {
public:
    virtual ~Exchange() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;

    // All ranks' routing on every rank: ids [T, K] i32 and probs [T, K] f32 -> all_ids, all_probs [G, S, K],
    // S = tokens_per_rank >= T; absent tokens get id -1, prob 0.
    void gather_routing(const TensorView& ids, const TensorView& probs, const TensorView& all_ids,
                        const TensorView& all_probs, const Launch& launch = {});

    // rows [T, H] (plain, or FP8 with vec128_wire scales) -> dst [M, H] in the plan's groups, pads zero (FP8:
    // vec128 scales). `scratch` provides the received rows' buffer.
    void dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst, Arena& scratch,
                  const Launch& launch = {});

    // The first half of dispatch alone, for the unfused ablation: received rows [G*S, H] in order (source
    // rank, token), wire layout.
    void dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& received,
                       Arena& scratch, const Launch& launch = {});

    // src [M, H] -> y [T, H]: sums over each token's experts in the stated order, + residual (optional, [T,
    // H]) added in fp32 before the one rounding. With an addend [T, H] the residual is the sum of both,
    // rounded to y's dtype. y may alias the residual or the addend. dprob: drow_prob [M] f32 -> dprob [T, K]
    // f32 (optional): each (token, k) gets its row's value. row_prob: the plan's, merging weights (optional).
    struct Combine {
        TensorView src;
        TensorView row_prob;   // optional
        TensorView residual;   // optional
        TensorView addend;     // optional, with residual
        TensorView drow_prob;  // optional
        TensorView y;          // out [T, H]
        TensorView dprob;      // out, with drow_prob
    };
    void combine(const Combine& args, const DispatchPlan& plan, Arena& scratch, const Launch& launch = {});

    // In place over more ranks than the expert-parallel group, in ascending rank order: f32 (sum, max), bf16
    // (sum, in f32, rounded to nearest even at the end), i64 (sum), one i32 (max).
    void all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch = {});
    // The two halves of a sum over ranks. values [N], in place; shares: of each of these ranks, the same on
    // all. What is in no share stays as it is, and where one rank is the group, everything.
    // reduce_scatter: this rank's share becomes the sum over the ranks, f32, bf16 or i64, with the bits of
    // all_reduce; other shares stay as they are.
    void reduce_scatter(Ranks ranks, const TensorView& values, const Shares& shares,
                        const Launch& launch = {});
    // all_gather: every rank's share comes to all ranks; any dtype, since bytes are copied.
    void all_gather(Ranks ranks, const TensorView& values, const Shares& shares, const Launch& launch = {});
    virtual int num_ranks(Ranks ranks) const = 0;
    virtual int rank_among(Ranks ranks) const = 0;
    // Throws Error(peer) if a wait on another rank that was under way on the device passed its deadline. Call
    // it after waiting for the device; what was computed since is worthless then.
    virtual void check_peers() {}
    // Throws Error(usage) unless its calls can be captured (Device::capture), because none stops the host.
    virtual void require_capturable() const;
    // True on exactly one of the ranks that hold the same experts.
    bool holds_first_replica() const { return rank_among(Ranks::expert_replicas) == 0; }

    // May wait for the device, where bytes that depend on routing are counted: for between steps.
    virtual WireBytes wire_bytes() const { return wire_; }
    // Its counters as of this point of the stream, without stopping the host: bytes of routing,
    // dispatch, combine to host[0..2] (page-locked, Device::allocate_host), to be read after a wait for a
    // later event; where hosts are known, what crossed them to host[3]. Differences between two copies count,
    // since an exchange that counts on the device never resets its words; it overrides this with an
    // asynchronous copy of them. An exchange made of others copies four words for each, at most
    // kMostWireSets, which the reader adds up; words that nobody writes are zero before.
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
    // Told of every step from now on and of its bytes sent, 0 where the device or the exchanges that this one
    // is made of count them (copy_wire_counters); null: no observer.
    void observe(OpObserver* observer) { observer_ = observer; }

protected:
    virtual void do_gather_routing(const TensorView& ids, const TensorView& probs, const TensorView& all_ids,
                                   const TensorView& all_probs, const Launch& launch) = 0;
    virtual void do_dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst,
                             Arena& scratch, const Launch& launch) = 0;
    virtual void do_dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan,
                                  const ScaledTensor& received, Arena& scratch, const Launch& launch) = 0;
    virtual void do_combine(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                            const Launch& launch) = 0;
    virtual void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values,
                               const Launch& launch) = 0;
    // Of several ranks.
    virtual void do_reduce_scatter(Ranks ranks, const TensorView& values, const Shares& shares,
                                   const Launch& launch) = 0;
    virtual void do_all_gather(Ranks ranks, const TensorView& values, const Shares& shares,
                               const Launch& launch) = 0;
    // do_dispatch of backends that receive rows first: do_dispatch_rows into scratch, then `ops` permutes and
    // pads.
    void dispatch_through_rows(Ops& ops, const ScaledTensor& rows, const DispatchPlan& plan,
                               const ScaledTensor& dst, Arena& scratch, const Launch& launch);
    // The residual of a combine with its addend in it, made in y; for backends whose kernels add one tensor.
    static TensorView residual_with_addend(Ops& ops, const Combine& args, const Launch& launch);
    WireBytes wire_;  // backends add what they send

private:
    template <class Step> void observed(const char* name, const OpCost& cost, Step step);
    template <class Step> void reduced(const char* name, double sent, Step step);
    int64_t num_dispatches_ = 0, num_combines_ = 0;
    OpObserver* observer_ = nullptr;
};

}  // namespace fp8flow
