// SPDX-License-Identifier: MIT
// The exchange between GPUs over NCCL's sends and receives: between hosts, and wherever peer memory is not
// usable. It equals the reference exchange byte for byte: the same messages in the same order, the same sums.
//
// Messages as routed (MessageSizes::own) cost two waits on the host in every call that moves rows. The sizes
// are read first. The end of the transfer is awaited because only the host can check the deadline. Messages
// of a fixed size have space for every token (order invariant: for every choice) and are sent whole. They
// cost no wait, so a step can be captured. The host that waits for the step then checks the deadline.
#include "kernels/hopper/exchange/nccl/comm.h"

#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/exchange/merging_weights.h"
#include "kernels/hopper/exchange/nccl/kernels.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/launch.h"

#include <algorithm>
#include <numeric>

namespace fp8flow::hopper::nccl {

namespace {

// Up to this many bytes every rank gathers all values and reduces them itself: one round instead of two.
constexpr int64_t kSmallReduceBytes = 4096;
// Larger tensors are reduced in pieces of this size, which bounds the buffer.
constexpr int64_t kReducePieceBytes = int64_t{64} << 20;
// Slices of a shard in one operation. Each slice is a message to or from every rank.
constexpr int64_t kSlicesAtOnce = 16;

// Rows or values per rank, as the host knows them.
struct Counts {
    std::vector<int64_t> rows_sent, rows_received, choices_returned, choices_sent;
};

int64_t sum_of(const std::vector<int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

class NcclExchange final : public Exchange {
public:
    NcclExchange(Ops& ops, const ExchangeGroups& groups, CombineOrder order, MessageSizes sizes,
                 double deadline_seconds)
        : Exchange(ops, order, groups.group_ranks()), groups_(groups), sizes_(sizes) {
        const int own_rank = groups.rank_of_job();
        const auto comm_of = [&](ProcessGroup& group) {
            if (group.size() == 1) return std::shared_ptr<NcclComm>();
            if (world_ != nullptr && group.size() == world_->size()) return world_;
            return std::make_shared<NcclComm>(group, own_rank, deadline_seconds);
        };
        world_ = comm_of(groups.world);
        expert_parallel_ = comm_of(groups.expert_parallel);
        expert_replicas_ = groups.expert_replicas != nullptr ? comm_of(*groups.expert_replicas) : nullptr;
        void* memory = nullptr;
        check_cuda(cudaMallocHost(&memory, static_cast<std::size_t>(4 * size()) * sizeof(int64_t)),
                   "allocating pinned memory");
        host_counts_ = static_cast<int64_t*>(memory);
    }
    ~NcclExchange() override {
        cudaFreeHost(host_counts_);
        if (reduce_buffer_ != nullptr) ops_.device().free(reduce_buffer_);
    }
    void require_capturable() const override {
        if (sizes_ == MessageSizes::own) Exchange::require_capturable();
    }

protected:
    void do_gather_routing(const Routing& routing, const Launch& launch) override;
    void do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received, const Call& call) override;
    void do_combine(const Combine& args, const Call& call) override;
    void do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) override;
    void do_reduce_scatter(const Sharded& sharded, const Launch& launch) override;
    void do_all_gather(const Sharded& sharded, const Launch& launch) override;

private:
    Counts read_counts(const Positions& positions, const Launch& launch);
    // For messages of a fixed size.
    Counts fixed_counts(const DispatchPlan& plan) const;
    int64_t stride(const DispatchPlan& plan) const {
        return sizes_ == MessageSizes::fixed ? plan.all_ids.dim(1) : 0;
    }
    void wait(NcclComm* comm, const char* operation, const Launch& launch) {
        if (comm == nullptr || sizes_ == MessageSizes::fixed) return;
        comm->wait(operation, stream_of(launch));
        ops_.device().count_synchronisation();
    }
    // Sends consecutive segments, one per rank, from `sent` to `returned`. The segment of this rank is
    // copied.
    void return_segments(const TensorView& sent, const std::vector<int64_t>& sends,
                         const TensorView& returned, const std::vector<int64_t>& receives, int64_t item_bytes,
                         const Launch& launch);
    void add_returned_dprob(const Combine& args, const DispatchPlan& plan, const Positions& positions,
                            const Counts& counts, Arena& scratch, const Launch& launch);
    void count_sent(double& counter, int to, int64_t bytes) {
        if (to == rank()) return;
        counter += static_cast<double>(bytes);
        if (!groups_.hosts.same_host(to, rank())) wire_.between_hosts += static_cast<double>(bytes);
    }
    void copy(void* to, const void* from, int64_t bytes, const Launch& launch) {
        ops_.device().copy(to, from, static_cast<std::size_t>(bytes), launch.stream);
    }
    NcclComm& comm_among(Ranks ranks) { return *(ranks == Ranks::world ? world_ : expert_replicas_); }
    uint8_t* reduce_buffer(int64_t bytes);
    void reduce_piece(NcclComm& comm, Reduce reduce, const TensorView& piece, const Launch& launch);
    void reduce_round(NcclComm& comm, const TensorView& values, const Shards& round, const Launch& launch);

    ExchangeGroups groups_;
    MessageSizes sizes_;
    std::shared_ptr<NcclComm> world_, expert_parallel_, expert_replicas_;  // null: one rank; may be the same
    int64_t* host_counts_ = nullptr;                                       // pinned [4, G]
    uint8_t* reduce_buffer_ = nullptr;
    int64_t reduce_buffer_bytes_ = 0;
};

Counts NcclExchange::read_counts(const Positions& positions, const Launch& launch) {
    check_cuda(cudaMemcpyAsync(host_counts_, positions.counts.data,
                               static_cast<std::size_t>(positions.counts.bytes()), cudaMemcpyDeviceToHost,
                               stream_of(launch)),
               "reading the sizes of messages");
    check_cuda(cudaStreamSynchronize(stream_of(launch)), "reading the sizes of messages");
    ops_.device().count_synchronisation();
    const auto row = [&](int i) {
        return std::vector<int64_t>(host_counts_ + i * size(), host_counts_ + (i + 1) * size());
    };
    return {row(0), row(1), row(2), row(3)};
}

Counts NcclExchange::fixed_counts(const DispatchPlan& plan) const {
    const std::vector<int64_t> rows(static_cast<std::size_t>(size()), plan.all_ids.dim(1)),
        choices(static_cast<std::size_t>(size()), plan.all_ids.dim(1) * plan.topk);
    return {rows, rows, choices, choices};
}

void NcclExchange::do_gather_routing(const Routing& routing, const Launch& launch) {
    const auto& [ids, probs, all_ids, all_probs] = routing;
    Device& device = ops_.device();
    const int64_t own = all_ids.dim(1) * all_ids.dim(2) * static_cast<int64_t>(sizeof(int32_t)),
                  present = ids.bytes();
    uint8_t *own_ids = all_ids.bytes_ptr() + rank() * own, *own_probs = all_probs.bytes_ptr() + rank() * own;
    copy(own_ids, ids.data, present, launch);
    device.fill(own_ids + present, 0xFF, static_cast<std::size_t>(own - present), launch.stream);  // -1
    copy(own_probs, probs.data, present, launch);
    device.fill(own_probs + present, 0, static_cast<std::size_t>(own - present), launch.stream);
    for (int r = 0; r < size(); ++r) count_sent(wire_.routing, r, 2 * own);
    if (expert_parallel_ == nullptr) return;
    expert_parallel_->all_gather("gather_routing", all_ids.data, own, stream_of(launch));
    expert_parallel_->all_gather("gather_routing", all_probs.data, own, stream_of(launch));
    wait(expert_parallel_.get(), "gather_routing", launch);
}

// Values and scales are two messages, so that both arrive where they stay: received rows are in the order of
// the messages.
void NcclExchange::do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received,
                                    const Call& call) {
    const auto& [plan, scratch, launch] = call;
    ArenaScope scope(scratch);
    const Positions positions = make_positions(plan, scratch);
    find_positions(plan, rank(), positions, launch);
    const bool fixed = sizes_ == MessageSizes::fixed;
    const Counts counts = fixed ? fixed_counts(plan) : read_counts(positions, launch);
    const int64_t num_rows = sum_of(counts.rows_sent);
    const ScaledTensor sent = rows_like(rows, num_rows, scratch);
    pack_rows({.rows = rows,
               .sent_rows = sent.data,
               .sent_scales = sent.scales,
               .received = received,
               .num_rows = num_rows,
               .stride = stride(plan)},
              plan, positions, rank(), launch);
    if (expert_parallel_ == nullptr) return;
    const ScaledTensor arrived = fixed ? rows_like(rows, num_rows, scratch) : received;

    NcclComm::Messages messages{rank()};
    const auto add_messages = [&](const TensorView& out, const TensorView& in) {
        if (!out) return;
        const int64_t row_bytes = in.dim(1) * size_of(in.dtype);
        int64_t from = 0, to = 0;
        for (int r = 0; r < size(); ++r) {
            const auto peer = static_cast<std::size_t>(r);
            const int64_t out_bytes = counts.rows_sent[peer] * row_bytes,
                          in_bytes = counts.rows_received[peer] * row_bytes;
            messages.send(out.bytes_ptr() + from, out_bytes, r);
            messages.receive(in.bytes_ptr() + to, in_bytes, r);
            count_sent(wire_.dispatch, r, out_bytes);
            from += out_bytes;
            to += in_bytes;
        }
    };
    add_messages(sent.data, arrived.data);
    add_messages(sent.scales, arrived.scales);
    expert_parallel_->send_receive("dispatch", messages, stream_of(launch));
    wait(expert_parallel_.get(), "dispatch", launch);
    if (!fixed) return;
    const auto repack = [&](const TensorView& packed, const TensorView& strided) {
        if (packed)
            move_rows({.packed = packed, .strided = strided, .skip_own = true, .stride = stride(plan)}, plan,
                      rank(), launch);
    };
    repack(received.data, arrived.data);
    repack(received.scales, arrived.scales);
}

void NcclExchange::return_segments(const TensorView& sent, const std::vector<int64_t>& sends,
                                   const TensorView& returned, const std::vector<int64_t>& receives,
                                   int64_t item_bytes, const Launch& launch) {
    NcclComm::Messages messages{rank()};
    int64_t from = 0, to = 0;
    for (int r = 0; r < size(); ++r) {
        const auto peer = static_cast<std::size_t>(r);
        const int64_t out_bytes = sends[peer] * item_bytes, in_bytes = receives[peer] * item_bytes;
        if (r == rank()) copy(returned.bytes_ptr() + to, sent.bytes_ptr() + from, in_bytes, launch);
        messages.send(sent.bytes_ptr() + from, out_bytes, r);
        messages.receive(returned.bytes_ptr() + to, in_bytes, r);
        count_sent(wire_.combine, r, out_bytes);
        from += out_bytes;
        to += in_bytes;
    }
    if (expert_parallel_ != nullptr) expert_parallel_->send_receive("combine", messages, stream_of(launch));
}

void NcclExchange::do_combine(const Combine& args, const Call& call) {
    const auto& [plan, scratch, launch] = call;
    ArenaScope scope(scratch);
    const bool by_rank = order_ == CombineOrder::rank;
    const int64_t ranks = plan.all_ids.dim(0), slots = plan.all_ids.dim(1), width = args.src.data.dim(1),
                  row_bytes = width * size_of(args.src.data.dtype);
    const Positions positions = make_positions(plan, scratch);
    find_positions(plan, rank(), positions, launch);
    const bool fixed = sizes_ == MessageSizes::fixed;
    const Counts counts = fixed ? fixed_counts(plan) : read_counts(positions, launch);
    const int64_t rows_of_token = by_rank ? 1 : plan.topk;
    const std::vector<int64_t>& sends = by_rank ? counts.rows_received : counts.choices_sent;
    const std::vector<int64_t>& receives = by_rank ? counts.rows_sent : counts.choices_returned;

    TensorView sent = scratch.tensor(
        args.src.data.dtype, {by_rank ? ranks * slots : sum_of(counts.choices_sent), width}, "combine");
    if (by_rank)
        ops_.unpermute_unpad({.src = args.src.data,
                              .recv_rows = plan.recv_rows,
                              .num_rows = plan.recv_offsets.slice(ranks, 1),
                              .row_prob = args.row_prob,
                              .dst = sent},
                             launch);
    else
        pack_choices(args.src.data, plan, positions, sent, rows_of_token * stride(plan), launch);
    if (by_rank && fixed) {
        const TensorView strided = scratch.tensor(args.src.data.dtype, {ranks * slots, width}, "combine");
        move_rows(
            {.packed = sent, .strided = strided, .direction = Repack::to_strided, .stride = stride(plan)},
            plan, rank(), launch);
        sent = strided;
    }
    const TensorView returned = scratch.tensor(args.src.data.dtype, {sum_of(receives), width}, "combine");
    return_segments(sent, sends, returned, receives, row_bytes, launch);
    TensorView weights;
    if (args.row_prob && !by_rank) weights = weights_in_expert_order(plan, rank(), scratch, launch);
    add_returned({.returned = returned,
                  .starts = by_rank ? positions.row_starts : positions.choice_starts,
                  .weights = weights,
                  .residual = residual_with_addend(args, launch),
                  .y = args.y.data,
                  .stride = rows_of_token * stride(plan)},
                 launch);
    if (args.dprob) add_returned_dprob(args, plan, positions, counts, scratch, launch);
    wait(expert_parallel_.get(), "combine", launch);
}

void NcclExchange::add_returned_dprob(const Combine& args, const DispatchPlan& plan,
                                      const Positions& positions, const Counts& counts, Arena& scratch,
                                      const Launch& launch) {
    const TensorView sent = scratch.tensor(DType::f32, {sum_of(counts.choices_sent)}, "combine"),
                     returned = scratch.tensor(DType::f32, {sum_of(counts.choices_returned)}, "combine");
    const int64_t choices = plan.topk * stride(plan);
    pack_choice_values(args.drow_prob, plan, positions, sent, choices, launch);
    return_segments(sent, counts.choices_sent, returned, counts.choices_returned, sizeof(float), launch);
    place_choice_values(returned, plan, positions, rank(), choices, args.dprob, launch);
}

uint8_t* NcclExchange::reduce_buffer(int64_t bytes) {
    if (bytes > reduce_buffer_bytes_) {
        if (reduce_buffer_ != nullptr) ops_.device().free(reduce_buffer_);
        reduce_buffer_ = nullptr;
        reduce_buffer_bytes_ = 0;  // in case the allocation throws
        reduce_buffer_ = static_cast<uint8_t*>(ops_.device().allocate(static_cast<std::size_t>(bytes)));
        reduce_buffer_bytes_ = bytes;
    }
    return reduce_buffer_;
}

// Every rank receives its shard from all others, adds in ascending rank order, and sends the sum to all
// others.
void NcclExchange::reduce_piece(NcclComm& comm, Reduce reduce, const TensorView& piece,
                                const Launch& launch) {
    const int64_t element = size_of(piece.dtype), count = piece.numel(), ranks = comm.size();
    const int64_t shard = ceil_div(count, ranks);
    const auto begin = [&](int64_t r) { return std::min(r * shard, count); };
    const int64_t own = comm.rank(), own_count = begin(own + 1) - begin(own);
    const auto at = [&](int64_t r) { return piece.bytes_ptr() + begin(r) * element; };
    const auto bytes_of = [&](int64_t r) { return (begin(r + 1) - begin(r)) * element; };
    uint8_t* rows = reduce_buffer(ranks * shard * element);

    NcclComm::Messages gather{comm.rank()}, scatter{comm.rank()};
    for (int r = 0; r < ranks; ++r) {
        gather.send(at(r), bytes_of(r), r);
        gather.receive(rows + r * own_count * element, own_count * element, r);
        scatter.send(at(own), own_count * element, r);
        scatter.receive(at(r), bytes_of(r), r);
    }
    copy(rows + own * own_count * element, at(own), own_count * element, launch);
    comm.send_receive("all_reduce", gather, stream_of(launch));
    reduce_rows(reduce, piece.dtype, rows, ranks, own_count, at(own), launch);
    comm.send_receive("all_reduce", scatter, stream_of(launch));
}

void NcclExchange::do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) {
    NcclComm& comm = comm_among(ranks);
    const TensorView flat = values.reshape({values.numel()});
    if (values.bytes() <= kSmallReduceBytes) {
        uint8_t* rows = reduce_buffer(kSmallReduceBytes * comm.size());
        copy(rows + comm.rank() * values.bytes(), values.data, values.bytes(), launch);
        comm.all_gather("all_reduce", rows, values.bytes(), stream_of(launch));
        reduce_rows(reduce, values.dtype, rows, comm.size(), values.numel(), values.data, launch);
    } else {
        const int64_t piece = kReducePieceBytes / size_of(values.dtype);
        for (int64_t first = 0; first < values.numel(); first += piece)
            reduce_piece(comm, reduce, flat.slice(first, std::min(piece, values.numel() - first)), launch);
    }
    wait(&comm, "all_reduce", launch);
}

// Every rank receives its slices from all others and adds them in ascending rank order.
void NcclExchange::reduce_round(NcclComm& comm, const TensorView& values, const Shards& round,
                                const Launch& launch) {
    const int64_t element = size_of(values.dtype), ranks = comm.size(), own = comm.rank();
    const std::vector<Slice>& here = round[static_cast<std::size_t>(own)];
    const auto at = [&](const Slice& slice) { return values.bytes_ptr() + slice.first * element; };
    uint8_t* const rows = reduce_buffer(ranks * elements_of(here) * element);

    NcclComm::Messages messages{comm.rank()};
    for (int r = 0; r < ranks; ++r)
        for (const Slice& slice : round[static_cast<std::size_t>(r)])
            messages.send(at(slice), slice.count * element, r);
    uint8_t* row = rows;  // for every slice one row per rank
    for (const Slice& slice : here) {
        const int64_t bytes = slice.count * element;
        for (int r = 0; r < ranks; ++r, row += bytes) {
            if (r == own) copy(row, at(slice), bytes, launch);
            messages.receive(row, bytes, r);
        }
    }
    comm.send_receive("reduce_scatter", messages, stream_of(launch));
    row = rows;
    for (const Slice& slice : here) {
        reduce_rows(Reduce::sum, values.dtype, row, ranks, slice.count, at(slice), launch);
        row += ranks * slice.count * element;
    }
}

void NcclExchange::do_reduce_scatter(const Sharded& sharded, const Launch& launch) {
    const auto& [ranks, values, shards] = sharded;
    NcclComm& comm = comm_among(ranks);
    const int64_t most = kReducePieceBytes / (comm.size() * size_of(values.dtype));
    for (const Shards& round : rounds_of(shards, {.elements = most, .slices = kSlicesAtOnce}))
        reduce_round(comm, values, round, launch);
    wait(&comm, "reduce_scatter", launch);
}

// Slices are received where they stay, so rounds have no limit of elements.
void NcclExchange::do_all_gather(const Sharded& sharded, const Launch& launch) {
    const auto& [ranks, values, shards] = sharded;
    NcclComm& comm = comm_among(ranks);
    const int64_t element = size_of(values.dtype);
    for (const Shards& round : rounds_of(shards, {.elements = values.numel() + 1, .slices = kSlicesAtOnce})) {
        NcclComm::Messages messages{comm.rank()};
        for (int r = 0; r < comm.size(); ++r) {
            for (const Slice& slice : round[static_cast<std::size_t>(comm.rank())])
                messages.send(values.bytes_ptr() + slice.first * element, slice.count * element, r);
            for (const Slice& slice : round[static_cast<std::size_t>(r)])
                messages.receive(values.bytes_ptr() + slice.first * element, slice.count * element, r);
        }
        comm.send_receive("all_gather", messages, stream_of(launch));
    }
    wait(&comm, "all_gather", launch);
}

}  // namespace

}  // namespace fp8flow::hopper::nccl

namespace fp8flow::hopper {

bool built_with_nccl() { return true; }

std::unique_ptr<Exchange> make_nccl_exchange(Ops& ops, const ExchangeGroups& groups, CombineOrder order,
                                             MessageSizes sizes, double deadline_seconds) {
    return std::make_unique<nccl::NcclExchange>(ops, groups, order, sizes, deadline_seconds);
}

}  // namespace fp8flow::hopper
