// SPDX-License-Identifier: MIT
// Peer memory and the exchange over it in one process: one rank against the brute-force oracle, and threads
// that share one GPU, each with a stream of its own: a replayed graph, a rank that does not arrive, memory
// that is mapped and freed many times. Exchanges between several ranks are tested under mpirun.
#include "kernels/core/error.h"
#include "kernels/hopper/exchange/peer/peer_exchange.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/device_query.h"
#include "tests/support/exchange_oracle.h"

#include <cmath>
#include <cstdlib>
#include <span>

namespace fp8flow::test {
namespace {

// Threads of one process shard a GPU here. A kernel that is loaded while another rank's kernel waits for this
// rank would never start, nor one after it in a queue that two streams shard; so kernels are loaded at the
// start, and there are more queues than the default 8.
const int eager_loading = setenv("CUDA_MODULE_LOADING", "EAGER", 0);
const int many_queues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);

constexpr double kDeadline = 20;
constexpr int64_t kCopyBytes = int64_t{64} << 20;  // of all tensors of one call

// One rank's device side. Memory is taken before ranks begin to wait for each other and freed after they have
// ended.
struct Rank {
    ProcessGroup& world;
    std::unique_ptr<ProcessGroup> expert_parallel, expert_replicas;
    HopperOps ops;
    Arena arena{ops.device(), "copies"};
    cudaStream_t stream = nullptr;
    int sm_limit = 0;
    std::unique_ptr<Exchange> exchange;
    std::string reason;

    Rank(ProcessGroup& group, int expert_ranks, const ExchangeLimits& limits, CombineOrder order,
         double deadline)
        : world(group) {
        expert_parallel = world.split(world.rank() / expert_ranks);
        expert_replicas = world.split(world.rank() % expert_ranks);
        hopper::check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
        {
            ArenaScope scope(arena);
            arena.tensor(DType::e8m0, {kCopyBytes}, "warm-up");
        }
        exchange = hopper::make_peer_exchange(ops, {world, *expert_parallel, *expert_replicas}, limits, order,
                                              deadline, PeerMapping::cuda_ipc, reason);
        world.barrier();
    }
    ~Rank() {
        if (std::uncaught_exceptions() == 0) world.barrier();
        exchange.reset();
        cudaStreamDestroy(stream);
    }
    Launch launch() const { return {.stream = {stream}, .sm_limit = sm_limit}; }
};

// The oracle's host tensors on the device: copied in, exchanged, copied back. Nothing is allocated.
class OnStream final : public Exchange {
public:
    explicit OnStream(Rank& rank) : Exchange(rank.exchange.get()), rank_(rank), inner_(*rank.exchange) {}
    void check_peers() override { inner_.check_peers(); }
    WireBytes wire_bytes() const override { return inner_.wire_bytes(); }
    void reset_counts() override { inner_.reset_counts(); }

protected:
    void do_gather_routing(const Routing& routing, const Launch&) override {
        const auto& [ids, probs, all_ids, all_probs] = routing;
        ArenaScope scope(rank_.arena);
        const TensorView to_ids = put(all_ids), to_probs = put(all_probs);
        inner_.gather_routing(put(ids), put(probs), to_ids, to_probs, rank_.launch());
        get(to_ids, all_ids);
        get(to_probs, all_probs);
    }
    void do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) override {
        ArenaScope scope(rank_.arena);
        const ScaledTensor to = put(dst);
        inner_.dispatch(put(rows), put(call.plan), to, call.scratch, rank_.launch());
        get(to.data, dst.data);
        get(to.scales, dst.scales);
    }
    void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received, const Call& call) override {
        ArenaScope scope(rank_.arena);
        const ScaledTensor to = put(received);
        inner_.dispatch_rows(put(rows), put(call.plan), to, call.scratch, rank_.launch());
        get(to.data, received.data);
        get(to.scales, received.scales);
    }
    void do_combine(const Combine& args, const Call& call) override {
        ArenaScope scope(rank_.arena);
        const Combine copies{.src = put(args.src),
                             .row_prob = put(args.row_prob),
                             .residual = put(args.residual),
                             .addend = put(args.addend),
                             .drow_prob = put(args.drow_prob),
                             .y = put(args.y),
                             .dprob = put(args.dprob)};
        inner_.combine(copies, put(call.plan), call.scratch, rank_.launch());
        get(copies.y.data, args.y.data);
        get(copies.dprob, args.dprob);
    }
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch&) override {
        ArenaScope scope(rank_.arena);
        const TensorView copy = put(values);
        inner_.all_reduce(reduce, ranks, copy, rank_.launch());
        get(copy, values);
    }
    void do_reduce_scatter(const Sharded& sharded, const Launch&) override {
        ArenaScope scope(rank_.arena);
        const TensorView copy = put(sharded.values);
        inner_.reduce_scatter(sharded.ranks, copy, sharded.shards, rank_.launch());
        get(copy, sharded.values);
    }
    void do_all_gather(const Sharded& sharded, const Launch&) override {
        ArenaScope scope(rank_.arena);
        const TensorView copy = put(sharded.values);
        inner_.all_gather(sharded.ranks, copy, sharded.shards, rank_.launch());
        get(copy, sharded.values);
    }

private:
    static constexpr int64_t kGuard = 256;

    // With the host tensor's guard zones.
    TensorView put(const TensorView& host) {
        if (!host) return host;
        TensorView view = host;
        Device& device = rank_.ops.device();
        auto* memory = rank_.arena.tensor(DType::e8m0, {host.bytes() + 2 * kGuard}, "copies").bytes_ptr();
        device.copy_in(memory, host.bytes_ptr() - kGuard, static_cast<std::size_t>(host.bytes() + 2 * kGuard),
                       rank_.launch().stream);
        view.data = memory + kGuard;
        if (host.row_base != nullptr) {
            const TensorView word = rank_.arena.tensor(DType::i64, {1}, "copies");
            device.copy_in(word.data, host.row_base, sizeof(int64_t), rank_.launch().stream);
            view.row_base = word.as<int64_t>();
        }
        return view;
    }
    ScaledTensor put(const ScaledTensor& host) { return {put(host.data), put(host.scales), host.layout}; }
    DispatchPlan put(DispatchPlan plan) {
        for (TensorView* view : {&plan.all_ids, &plan.all_probs, &plan.groups.counts, &plan.groups.offsets,
                                 &plan.row_source, &plan.row_prob, &plan.recv_rows, &plan.recv_offsets,
                                 &plan.recv_source, &plan.send_tokens, &plan.send_counts})
            *view = put(*view);
        return plan;
    }
    void get(const TensorView& copy, const TensorView& host) {
        if (!host) return;
        rank_.ops.device().copy_out(host.bytes_ptr() - kGuard, copy.bytes_ptr() - kGuard,
                                    static_cast<std::size_t>(host.bytes() + 2 * kGuard),
                                    rank_.launch().stream);
    }

    Rank& rank_;
    Exchange& inner_;
};

void check_case(const ExchangeCase& c) {
    run_thread_ranks(1, kDeadline, [&](ProcessGroup& world) {
        const ExchangeLayer layer(c, 0);
        Rank rank(world, 1,
                  {.tokens_per_rank = c.slots(), .topk = c.topk, .hidden = c.hidden, .row = c.dtype}, c.order,
                  kDeadline);
        ASSERT_TRUE(rank.exchange) << rank.reason;
        OnStream exchange(rank);
        Arena scratch(rank.ops.device(), "scratch");
        for (int turn = 0; turn < 2; ++turn) {
            rank.sm_limit = turn;  // all of them, then one: who moves a row does not change it
            layer.gather(exchange);
            layer.dispatch(exchange, scratch, 1);
            layer.combine(exchange, scratch, 2, true, false);
            layer.dispatch(exchange, scratch, 3);
            layer.combine(exchange, scratch, 4, turn == 0, true);
        }
        exchange.check_peers();
        // only merging weights in order invariant take memory: their own
        EXPECT_LE(scratch.num_growths(), c.order == CombineOrder::invariant ? 1 : 0);
        EXPECT_EQ(scratch.bytes_in_use(), 0);
    });
}

constexpr CombineOrder kOrders[] = {CombineOrder::rank, CombineOrder::invariant};

// Several ranks as threads of one process shard copy queues, in which a copy can be queued after another
// rank's that waits for it; so exchanges between several ranks are tested under mpirun.
TEST(PeerExchange, OneRankAgreesWithTheOracle) {
    for (CombineOrder order : kOrders) {
        for (Wire wire : {Wire::plain, Wire::fp8, Wire::fp8_free_scales})
            check_case({.tokens = {33},
                        .topk = 3,
                        .experts = 12,
                        .hidden = 384,
                        .alignment = 128,
                        .wire = wire,
                        .order = order,
                        .row_base = wire == Wire::fp8 ? 128 : 0});
        // rows that are no whole vectors, and rows longer than what a thread holds at once
        for (int64_t hidden : {3, 100, 8320})
            for (DType dtype : {DType::bf16, DType::f32})
                check_case({.tokens = {9},
                            .topk = 2,
                            .experts = 4,
                            .hidden = hidden,
                            .dtype = dtype,
                            .order = order});
    }
}

// Group barriers are counted on the device, so a captured exchange can be run again.
TEST(PeerExchange, ReplaysAsAGraph) {
    constexpr int kRanks = 2, kReplays = 50;
    constexpr int64_t kCount = 1000;
    run_thread_ranks(kRanks, kDeadline, [&](ProcessGroup& world) {
        Rank rank(world, kRanks, {.tokens_per_rank = 1, .topk = 1, .hidden = 128}, CombineOrder::rank,
                  kDeadline);
        ASSERT_TRUE(rank.exchange) << rank.reason;
        HostTensor ones(DType::f32, {kCount});
        for (int64_t i = 0; i < kCount; ++i) set(ones, i, 1);
        const TensorView values = rank.arena.tensor(DType::f32, {kCount}, "values"),
                         shared = rank.arena.tensor(DType::f32, {kCount}, "values");
        const Shards shards = {{{0, 500}}, {{500, 500}}};
        for (const TensorView& to : {values, shared})
            rank.ops.device().copy_in(to.data, ones.view().data, kCount * sizeof(float),
                                      rank.launch().stream);
        hopper::check_cuda(cudaStreamSynchronize(rank.stream), "waiting");
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        hopper::check_cuda(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "capture");
        rank.exchange->all_reduce(Reduce::sum, Ranks::world, values, rank.launch());
        rank.exchange->reduce_scatter(Ranks::world, shared, shards, rank.launch());
        rank.exchange->all_gather(Ranks::world, shared, shards, rank.launch());
        hopper::check_cuda(cudaStreamEndCapture(rank.stream, &graph), "capture");
        hopper::check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
        hopper::check_cuda(cudaGraphUpload(executable, rank.stream), "uploading a graph");
        hopper::check_cuda(cudaStreamSynchronize(rank.stream), "waiting");
        world.barrier();
        for (int i = 0; i < kReplays; ++i)
            hopper::check_cuda(cudaGraphLaunch(executable, rank.stream), "launching a graph");
        HostTensor sums(DType::f32, {kCount});
        rank.ops.device().copy_out(ones.view().data, values.data, kCount * sizeof(float),
                                   rank.launch().stream);
        rank.ops.device().copy_out(sums.view().data, shared.data, kCount * sizeof(float),
                                   rank.launch().stream);
        rank.exchange->check_peers();
        world.barrier();
        cudaGraphExecDestroy(executable);
        cudaGraphDestroy(graph);
        for (int64_t i = 0; i < kCount; ++i) {
            ASSERT_EQ(ones(i), std::ldexp(1.0, kReplays));
            ASSERT_EQ(sums(i), std::ldexp(1.0, kReplays));
        }
    });
}

TEST(PeerExchange, NamesARankThatDoesNotArrive) {
    constexpr int kRanks = 3;
    run_thread_ranks(kRanks, kDeadline, [&](ProcessGroup& world) {
        world.set_activity("step 12, stage dispatch");
        Rank rank(world, kRanks, {.tokens_per_rank = 1, .topk = 1, .hidden = 128}, CombineOrder::rank, 0.5);
        ASSERT_TRUE(rank.exchange) << rank.reason;
        OnStream exchange(rank);
        HostTensor value(DType::f32, {4});
        value.zero();
        exchange.all_reduce(Reduce::sum, Ranks::world, value);
        EXPECT_NO_THROW(exchange.check_peers());
        world.barrier();
        if (world.rank() != 1) {
            exchange.all_reduce(Reduce::sum, Ranks::world, value);
            exchange.all_reduce(Reduce::sum, Ranks::world, value);  // returns at once
            try {
                exchange.check_peers();
                ADD_FAILURE() << "the absence of rank 1 is not noticed";
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), ExitCode::peer);
                EXPECT_EQ(
                    std::string(error.what()),
                    fmt::format(
                        "rank {}: no answer from rank 1 for 0.5 s in all-reduce over peer memory (step "
                        "12, stage dispatch; group barrier 2); parallel.peer_deadline_seconds is the limit",
                        world.rank()));
            }
        }
        world.barrier();
        // The others have abandoned their memory; this one must not wait for them for ever.
        if (world.rank() == 1) EXPECT_NO_THROW(exchange.check_peers());
    });
}

// One more expert a token than the owner's word has bits: another exchange has to do, and the job goes on.
TEST(PeerExchange, SaysWhyItCannotBeMade) {
    run_thread_ranks(1, kDeadline, [&](ProcessGroup& world) {
        const Rank rank(world, 1, {.tokens_per_rank = 1, .topk = 33, .hidden = 128}, CombineOrder::rank,
                        kDeadline);
        EXPECT_FALSE(rank.exchange);
        EXPECT_EQ(rank.reason, "moe.moe_router_topk is 33, at most 32 over peer memory");
    });
}

TEST(PeerMemory, IsCreatedAndFreedManyTimes) {
    std::size_t free_before = 0, free_after = 0, total = 0;
    run_thread_ranks(3, kDeadline, [&](ProcessGroup& world) {
        for (int i = 0; i < 20; ++i) {
            std::string reason;
            const auto memory =
                hopper::peer::PeerMemory::create(world, PeerMapping::cuda_ipc, (3 << 20) + 1, reason);
            ASSERT_TRUE(memory) << reason;
            EXPECT_EQ(memory->own(), memory->of(world.rank()));
            world.barrier();
            if (i == 0 && world.rank() == 0) cudaMemGetInfo(&free_before, &total);
            if (i == 19 && world.rank() == 0) cudaMemGetInfo(&free_after, &total);
            world.barrier();
        }
    });
    EXPECT_EQ(free_before, free_after);
}

}  // namespace
}  // namespace fp8flow::test
