// SPDX-License-Identifier: MIT
// Allocates the two plans of the hierarchical exchange, and defines them by plain loops.
#include "kernels/comm/levels/level_plans.h"

#include "kernels/comm/plan_messages.h"
#include "kernels/core/error.h"

#include <algorithm>
#include <vector>

namespace fp8flow {

using namespace comm;

LevelMap make_level_map(const HostLayout& hosts, int rank, Device& device, Arena& memory) {
    const int num_hosts = hosts.num_hosts(), ranks_per_host = hosts.num_ranks() / num_hosts;
    std::vector<int32_t> ranks, rail_index(static_cast<std::size_t>(hosts.num_ranks()));
    for (int local_rank = 0; local_rank < ranks_per_host; ++local_rank)
        for (int host = 0; host < num_hosts; ++host) {
            const int there = hosts.ranks(host)[static_cast<std::size_t>(local_rank)];
            rail_index[static_cast<std::size_t>(there)] = static_cast<int32_t>(ranks.size());
            ranks.push_back(there);
        }
    const auto on_device = [&](const std::vector<int32_t>& values) {
        const TensorView view = memory.tensor(DType::i32, {static_cast<int64_t>(values.size())}, "exchange");
        device.copy_in(view.data, values.data(), static_cast<std::size_t>(view.bytes()));
        return view;
    };
    return {.hosts = num_hosts,
            .ranks_per_host = ranks_per_host,
            .rank = rank,
            .host = hosts.host(rank),
            .local_rank = hosts.local_rank(rank),
            .ranks = on_device(ranks).reshape({ranks_per_host, num_hosts}),
            .rail_index = on_device(rail_index)};
}

namespace {

// Cuts one tensor into 256-byte aligned views of one type. A first pass without the tensor counts the bytes.
class Slices {
public:
    explicit Slices(DType dtype) : aligned_(256 / size_of(dtype)) {}
    void use(const TensorView& all) {
        all_ = all;
        taken_ = 0;
    }
    int64_t taken() const { return taken_; }
    TensorView take(int64_t count) {
        const int64_t first = taken_;
        taken_ += round_up(count, aligned_);
        return all_ ? all_.slice(first, count) : TensorView{};
    }
    TensorView take(int64_t rows, int64_t columns) {
        const TensorView flat = take(rows * columns);
        return flat ? flat.reshape({rows, columns}) : flat;
    }

private:
    int64_t aligned_, taken_ = 0;
    TensorView all_;
};

// Takes the lists and sizes of a plan with these dimensions.
void take_plan(Slices& lists, Slices& sizes, int64_t ranks, int64_t slots, int64_t topk, DispatchPlan& plan) {
    const TensorView ids = lists.take(ranks * slots * topk);
    plan.all_ids = ids ? ids.reshape({ranks, slots, topk}) : ids;
    plan.recv_rows = lists.take(ranks * slots, topk);
    plan.recv_source = lists.take(ranks * slots);
    plan.send_tokens = lists.take(ranks, slots);
    plan.recv_offsets = sizes.take(ranks + 1);
    plan.send_counts = sizes.take(ranks);
    plan.topk = topk;
}

}  // namespace

LevelPlans allocate_level_plans(const DispatchPlan& plan, const LevelMap& map, Arena& scratch) {
    const Sizes flat(plan);
    const int64_t rail_capacity = map.hosts * flat.slots;  // at most
    FP8FLOW_CHECK(flat.ranks == map.hosts * map.ranks_per_host, "a plan of {} ranks for {} hosts of {}",
                  flat.ranks, map.hosts, map.ranks_per_host);
    FP8FLOW_CHECK(flat.ranks * flat.slots * flat.topk <= INT32_MAX,
                  "{} ranks of {} tokens with {} choices: their numbers must fit 32 bits", flat.ranks,
                  flat.slots, flat.topk);
    LevelPlans levels;
    Slices lists(DType::i32), sizes(DType::i64);
    const auto take_all = [&] {
        take_plan(lists, sizes, map.hosts, flat.slots, flat.topk, levels.rail);
        levels.rail.prob_rows = lists.take(rail_capacity, flat.topk);
        take_plan(lists, sizes, map.ranks_per_host, rail_capacity, flat.topk, levels.inside);
        levels.inside_row_of = lists.take(flat.ranks * flat.slots);
        levels.received.counts = sizes.take(1);
        levels.received.offsets = sizes.take(2);
    };
    take_all();
    levels.lists = scratch.tensor(DType::i32, {lists.taken()}, "exchange");
    levels.sizes = scratch.tensor(DType::i64, {sizes.taken()}, "exchange");
    lists.use(levels.lists);
    sizes.use(levels.sizes);
    take_all();
    levels.rail.num_local_experts = map.ranks_per_host * flat.local_experts;
    levels.rail.num_tokens = plan.num_tokens;
    levels.rail.groups.row_capacity = rail_capacity;
    levels.inside.num_local_experts = flat.local_experts;
    levels.inside.num_tokens = rail_capacity;
    levels.inside.groups = plan.groups;
    levels.inside.row_prob = plan.row_prob;
    levels.inside.row_source = scratch.tensor(DType::i32, {plan.groups.row_capacity}, "exchange");
    levels.received.num_groups = 1;
    levels.received.row_capacity = flat.ranks * flat.slots;
    return levels;
}

namespace {

// Where the experts of each token are.
class Choices {
public:
    Choices(const DispatchPlan& plan, const LevelMap& map) : plan_(plan), map_(map), sizes_(plan) {}

    const Sizes& sizes() const { return sizes_; }
    int64_t rank_at(int64_t local_rank, int64_t host) const {
        return map_.ranks.as<int32_t>()[local_rank * map_.hosts + host];
    }
    const int32_t* ids(int64_t rank, int64_t token) const {
        return plan_.all_ids.as<int32_t>() + (rank * sizes_.slots + token) * sizes_.topk;
    }
    // Rail index of the rank that hosts an expert; -1 without an expert.
    int64_t rail_index_of(int32_t id) const {
        const int64_t rank = sizes_.rank_of(id);
        return rank < 0 ? -1 : map_.rail_index.as<int32_t>()[rank];
    }
    bool is_on_host(int32_t id, int64_t host) const {
        const int64_t rail_index = rail_index_of(id);
        return rail_index >= 0 && rail_index % map_.hosts == host;
    }
    bool goes_to_host(int64_t rank, int64_t token, int64_t host) const {
        const int32_t* all = ids(rank, token);
        return std::any_of(all, all + sizes_.topk, [&](int32_t id) { return is_on_host(id, host); });
    }
    bool goes_to_rank_here(int64_t rank, int64_t token, int64_t local_rank) const {  // of this host
        const int32_t* all = ids(rank, token);
        return std::any_of(all, all + sizes_.topk, [&](int32_t id) {
            return rail_index_of(id) == local_rank * map_.hosts + map_.host;
        });
    }
    // Number of the expert among those of its host, by local rank, then by its number on the rank.
    int32_t id_on_host(int32_t id) const {
        return static_cast<int32_t>(rail_index_of(id) / map_.hosts * sizes_.local_experts +
                                    id % sizes_.local_experts);
    }
    int32_t id_on_rail(int32_t id) const {
        return static_cast<int32_t>(rail_index_of(id) % map_.hosts * map_.ranks_per_host *
                                    sizes_.local_experts) +
               id_on_host(id);
    }

private:
    const DispatchPlan& plan_;
    const LevelMap& map_;
    Sizes sizes_;
};

// Lists this rank's tokens by host, and writes the experts of all tokens of the rail.
void send_over_rail(const Choices& choices, const LevelMap& map, int64_t num_tokens,
                    const DispatchPlan& rail) {
    const auto& [ranks, slots, topk, local_experts] = choices.sizes();
    for (int64_t host = 0; host < map.hosts; ++host) {
        for (int64_t token = 0; token < slots; ++token) {
            const int32_t* ids = choices.ids(choices.rank_at(map.local_rank, host), token);
            int32_t* to = rail.all_ids.as<int32_t>() + (host * slots + token) * topk;
            for (int64_t k = 0; k < topk; ++k)
                to[k] = choices.rail_index_of(ids[k]) < 0 ? -1 : choices.id_on_rail(ids[k]);
        }
        int64_t count = 0;
        for (int64_t token = 0; token < num_tokens; ++token)
            if (choices.goes_to_host(map.rank, token, host))
                rail.send_tokens.as<int32_t>()[host * slots + count++] = static_cast<int32_t>(token);
        rail.send_counts.as<int64_t>()[host] = count;
    }
}

// Writes the entries of a token that arrives at this rank as row `row`: what the rail returns for it, and
// which ranks of the host need it.
void receive_row(const Choices& choices, const LevelMap& map, int64_t host, int64_t token, int64_t row,
                 const LevelPlans& levels) {
    const auto& [ranks, slots, topk, local_experts] = choices.sizes();
    const int64_t source = choices.rank_at(map.local_rank, host), rail_capacity = map.hosts * slots;
    levels.rail.recv_source.as<int32_t>()[row] = static_cast<int32_t>(host * slots + token);
    levels.rail.recv_rows.as<int32_t>()[row * topk] = static_cast<int32_t>(row);
    std::vector<int64_t> order;
    const int32_t* ids = choices.ids(source, token);
    sort_choices(ids, topk, order);
    int32_t* prob_rows = levels.rail.prob_rows.as<int32_t>() + row * topk;
    for (int64_t k : order)
        if (choices.is_on_host(ids[k], map.host)) *prob_rows++ = static_cast<int32_t>(row * topk + k);
    for (int64_t local_rank = 0; local_rank < map.ranks_per_host; ++local_rank)
        if (choices.goes_to_rank_here(source, token, local_rank))
            levels.inside.send_tokens.as<int32_t>()[local_rank * rail_capacity +
                                                    levels.inside.send_counts.as<int64_t>()[local_rank]++] =
                static_cast<int32_t>(row);
}

// Numbers the rows that each rank of this host receives over its rail. Returns the number by source rank and
// token; -1: no expert on this host.
std::vector<int64_t> receive_over_rail(const Choices& choices, const LevelMap& map,
                                       const LevelPlans& levels) {
    const auto& [ranks, slots, topk, local_experts] = choices.sizes();
    const int64_t rail_capacity = map.hosts * slots;
    std::vector<int64_t> rows(static_cast<std::size_t>(ranks * slots), -1);
    for (int64_t local_rank = 0; local_rank < map.ranks_per_host; ++local_rank) {
        int64_t row = 0;
        for (int64_t host = 0; host < map.hosts; ++host) {
            if (local_rank == map.local_rank) levels.rail.recv_offsets.as<int64_t>()[host] = row;
            const int64_t source = choices.rank_at(local_rank, host);
            for (int64_t token = 0; token < slots; ++token) {
                if (!choices.goes_to_host(source, token, map.host)) continue;
                const int32_t* ids = choices.ids(source, token);
                int32_t* to = levels.inside.all_ids.as<int32_t>() + (local_rank * rail_capacity + row) * topk;
                for (int64_t k = 0; k < topk; ++k)
                    if (choices.is_on_host(ids[k], map.host)) to[k] = choices.id_on_host(ids[k]);
                if (local_rank == map.local_rank) receive_row(choices, map, host, token, row, levels);
                rows[static_cast<std::size_t>(source * slots + token)] = row++;
            }
        }
        if (local_rank == map.local_rank) levels.rail.recv_offsets.as<int64_t>()[map.hosts] = row;
    }
    return rows;
}

// Orders the received rows of the one-level plan as they arrive inside the host, and maps the experts' rows
// to them.
void receive_inside(const DispatchPlan& plan, const Choices& choices, const LevelMap& map,
                    const std::vector<int64_t>& rail_rows, const LevelPlans& levels) {
    const auto& [ranks, slots, topk, local_experts] = choices.sizes();
    const int64_t* offsets = plan.recv_offsets.as<int64_t>();
    const int64_t rail_capacity = map.hosts * slots;
    int64_t row = 0;
    for (int64_t local_rank = 0; local_rank < map.ranks_per_host; ++local_rank) {
        levels.inside.recv_offsets.as<int64_t>()[local_rank] = row;
        for (int64_t host = 0; host < map.hosts; ++host) {
            const int64_t source = choices.rank_at(local_rank, host);
            for (int64_t i = offsets[source]; i < offsets[source + 1]; ++i, ++row) {
                const auto token = static_cast<std::size_t>(plan.recv_source.as<int32_t>()[i]);
                levels.inside.recv_source.as<int32_t>()[row] =
                    static_cast<int32_t>(local_rank * rail_capacity + rail_rows[token]);
                std::copy_n(plan.recv_rows.as<int32_t>() + i * topk, topk,
                            levels.inside.recv_rows.as<int32_t>() + row * topk);
                levels.inside_row_of.as<int32_t>()[i] = static_cast<int32_t>(row);
            }
        }
    }
    levels.inside.recv_offsets.as<int64_t>()[map.ranks_per_host] = row;
    levels.received.counts.as<int64_t>()[0] = levels.received.offsets.as<int64_t>()[1] = row;
    const int32_t* from = plan.row_source.as<int32_t>() + base_of(plan.row_source);
    const int64_t rows = plan.groups.offsets.as<int64_t>()[plan.groups.num_groups];
    std::transform(from, from + rows, levels.inside.row_source.as<int32_t>(),
                   [&](int32_t i) { return i < 0 ? -1 : levels.inside_row_of.as<int32_t>()[i]; });
}

}  // namespace

void derive_level_plans(const DispatchPlan& plan, const LevelMap& map, const LevelPlans& levels, Arena&,
                        const Launch&) {
    std::fill_n(levels.lists.as<int32_t>(), levels.lists.numel(), -1);
    std::fill_n(levels.sizes.as<int64_t>(), levels.sizes.numel(), int64_t{0});
    const Choices choices(plan, map);
    send_over_rail(choices, map, plan.num_tokens, levels.rail);
    receive_inside(plan, choices, map, receive_over_rail(choices, map, levels), levels);
}

}  // namespace fp8flow
