// SPDX-License-Identifier: MIT
// Sharded optimizer state (use_distributed_optimizer): the slice of each rank, the reduction of gradients,
// and gathering of what each rank updated. Source: ZeRO stage 1 (Rajbhandari et al. 2019), Megatron-LM's
// distributed optimizer.
#include "layers/parameter.h"

#include <algorithm>

namespace fp8flow {

namespace {

constexpr int64_t kNormBlock = op::kNormSquaredBlock;

TensorView flat(const TensorView& whole) { return make_view(whole.data, whole.dtype, {whole.numel()}); }

constexpr int64_t kGatheredAlign = 64;  // elements: alignment of each master in the gather buffer

}  // namespace

int64_t gathered_elements(const std::vector<int64_t>& masters, int64_t most) {
    int64_t all = 0, largest = 0;
    for (const int64_t master : masters) {
        all += round_up(master, kGatheredAlign);
        largest = std::max(largest, master);
    }
    return std::max(largest, std::min(all, most));
}

Shards state_shards(int64_t numel, int64_t size, const StateCut& at) {
    const int64_t end = at.first + numel;
    // the first and the last block that begin inside this parameter
    const int64_t first = (at.first / kNormBlock + 1) * kNormBlock,
                  last = (end - 1) / kNormBlock * kNormBlock;
    const auto cut = [&](int64_t part) {
        if (part == 0) return at.first;
        if (part == size || first > last) return end;
        const int64_t nearest = (at.first + numel * part / size + kNormBlock / 2) / kNormBlock * kNormBlock;
        return std::clamp(nearest, first, last);
    };
    Shards shards(static_cast<size_t>(size));
    for (int64_t part = 0; part < size; ++part)
        shards[static_cast<size_t>((at.rank + part) % size)] = {
            {cut(part) - at.first, cut(part + 1) - cut(part)}};
    return shards;
}

StateCut next_cut(const StateCut& at, int64_t numel, int64_t size, int64_t alignment) {
    const bool ends_in_another_block = (at.first + numel - 1) / kNormBlock > at.first / kNormBlock;
    return {at.first + round_up(numel, alignment),
            ends_in_another_block ? (at.rank + size - 1) % size : at.rank};
}

int64_t Parameter::numel() const {
    int64_t n = 1;
    for (int i = 0; i < spec.rank; ++i) n *= spec.shape[i];
    return n;
}

TensorView Parameter::part_here(const TensorView& whole) const {
    return flat(whole).slice(slice.first, slice.count);
}

bool ParameterStore::shards_gradients(bool expert) const {
    return expert ? shards_.expert.size > 1 && !shards_.whole_expert_gradients : shards_.dense.size > 1;
}

// Two slices of a rank become one if only padding is between them.
Shards ParameterStore::gradient_shards(size_t first, size_t last, bool expert) const {
    Shards shards(static_cast<size_t>((expert ? shards_.expert : shards_.dense).size));
    int64_t begin = -1;
    for (size_t i = first; i < last; ++i) {
        const Parameter& p = parameters_[i];
        if (p.spec.expert != expert || p.frozen) continue;
        if (begin < 0) begin = p.first_gradient;
        for (size_t r = 0; r < shards.size(); ++r) {
            const Slice& slice = p.shards[r].front();
            const int64_t at = p.first_gradient - begin + slice.first;
            std::vector<Slice>& shard = shards[r];
            if (slice.count == 0) continue;
            if (!shard.empty() && at - shard.back().first - shard.back().count < gradient_alignment(expert))
                shard.back().count = at + slice.count - shard.back().first;
            else
                shard.push_back({at, slice.count});
        }
    }
    return shards;
}

void ParameterStore::reduce_gradients(Exchange& exchange, int64_t replica, size_t first, size_t last,
                                      const Launch& launch) {
    const auto [dense, expert] = gradients_of(first, last);
    if (dense && shards_gradients(false))
        exchange.reduce_scatter(Ranks::world, dense, gradient_shards(first, last, false), launch);
    else if (dense)
        exchange.all_reduce(Reduce::sum, Ranks::world, dense, launch);
    if (expert && shards_gradients(true))
        exchange.reduce_scatter(Ranks::expert_replicas, expert, gradient_shards(first, last, true), launch);
    else if (expert)
        reduce_expert_gradients(exchange, replica, expert, launch);
}

void ParameterStore::gather_gradients(Exchange& exchange) {
    if (dense_gradients_ && shards_gradients(false))
        exchange.all_gather(Ranks::world, dense_gradients_, gradient_shards(false));
    if (expert_gradients_ && shards_gradients(true))
        exchange.all_gather(Ranks::expert_replicas, expert_gradients_, gradient_shards(true));
}

void ParameterStore::gather_master(Exchange& exchange, const Parameter& p, const TensorView& whole,
                                   const Launch& launch) {
    place_slice(p, whole, launch);
    exchange.all_gather(p.ranks(), flat(whole), p.shards, launch);
}

void ParameterStore::place_slice(const Parameter& p, const TensorView& whole, const Launch& launch) {
    const TensorView here = p.part_here(whole);
    if (here.numel() > 0)
        ops_.device().copy(here.data, p.master.data, static_cast<size_t>(here.bytes()), launch.stream);
}

namespace {

// Tensors of one dtype that are contiguous and sharded over the same ranks, gathered in one call.
struct Run {
    Ranks ranks = Ranks::world;
    TensorView values;  // [N], with the gaps between the tensors
    Shards shards;

    void add(const Parameter& p, const TensorView& whole) {
        if (!values) *this = {p.ranks(), make_view(whole.data, whole.dtype, {0}), Shards(p.shards.size())};
        const int64_t begin = (whole.bytes_ptr() - values.bytes_ptr()) / size_of(values.dtype);
        values = make_view(values.data, values.dtype, {begin + p.numel()});
        for (size_t r = 0; r < shards.size(); ++r) {
            const Slice& slice = p.shards[r].front();
            if (slice.count > 0) shards[r].push_back({begin + slice.first, slice.count});
        }
    }
};

}  // namespace

void ParameterStore::gather_copies(Exchange& exchange, size_t first, size_t last, const Launch& launch) {
    std::vector<const Parameter*> trained;
    for (size_t i = first; i < last; ++i)
        if (!parameters_[i].frozen) trained.push_back(&parameters_[i]);
    gather_copies(exchange, trained, launch);
}

void ParameterStore::gather_copies(Exchange& exchange, const std::vector<const Parameter*>& parameters,
                                   const Launch& launch) {
    for (const bool expert : {false, true}) gather_masters(exchange, expert, parameters, launch);
    std::map<std::pair<CopyKind, size_t>, Run> runs;
    for (const Parameter* p : parameters)
        if (p->is_sharded() && p->plain && !p->fprop)
            runs[{kind_of_copy(p->spec), p->plain_chunk}].add(*p, p->plain);
    for (const auto& [place, run] : runs) exchange.all_gather(run.ranks, run.values, run.shards, launch);
}

// Gathers as many masters per call as the buffer holds, then writes their copies.
void ParameterStore::gather_masters(Exchange& exchange, bool expert,
                                    const std::vector<const Parameter*>& parameters, const Launch& launch) {
    std::vector<std::pair<const Parameter*, TensorView>> masters;
    Run run;
    int64_t end = 0;
    const auto finish = [&] {
        if (masters.empty()) return;
        exchange.all_gather(run.ranks, run.values, run.shards, launch);
        for (const auto& [p, master] : masters) write_copies(*p, master, launch);
        masters.clear();
        run = {};
        end = 0;
    };
    for (const Parameter* parameter : parameters) {
        const Parameter& p = *parameter;
        if (!p.is_sharded() || !p.fprop || p.spec.expert != expert) continue;
        if (end + p.numel() > gathered_.numel()) finish();
        const auto [e, n, k] = p.spec.matrices();
        const TensorView master = gathered_.slice(end, p.numel()).reshape({e, n, k});
        place_slice(p, master, launch);
        run.add(p, master);
        masters.emplace_back(&p, master);
        end = round_up(end + p.numel(), kGatheredAlign);
    }
    finish();
}

void ParameterStore::write_all_copies(Exchange& exchange) {
    std::vector<const Parameter*> all;
    for (Parameter& p : parameters_) {
        all.push_back(&p);
        if (!p.is_sharded())
            write_copies(p);
        else if (p.plain && !p.fprop && p.slice.count > 0)
            ops_.cast({.x = p.master, .y = p.part_here(p.plain)});
    }
    gather_copies(exchange, all, {});
}

}  // namespace fp8flow
