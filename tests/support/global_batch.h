// SPDX-License-Identifier: MIT
// One transformer block, forward and backward, on one global batch of rows spread over any number of ranks:
// output, input gradient and every weight gradient of the whole, to compare between layouts.
#pragma once

#include "layers/rope.h"
#include "model/job/backend.h"
#include "tests/support/layers/layer_fixture.h"
#include "tests/support/training.h"

#include <numeric>

namespace fp8flow::test {

// Rows [T, H] of all ranks "y" and "dx", "gradient NAME" reduced over ranks, experts in global order; tokens
// of each expert.
struct GlobalResult {
    Values values;
    std::vector<int64_t> counts;

    double distance(const GlobalResult& other, const std::string& name) const {
        return norm_wise_error(values.at(name), other.values.at(name));
    }
};

// Rows [first, first + view.rows()) of a fixed infinite matrix.
inline void fill_global_rows(const TensorView& view, uint64_t stream, int64_t first, bool positive) {
    const int64_t offset = first * view.cols();
    fill(view, [&](int64_t i) {
        const float value = random_normal(17, stream, static_cast<uint64_t>(offset + i));
        return to_float(to_bf16(positive ? 0.25f + std::abs(value) : value));
    });
}

inline std::vector<float> read_floats(const TensorView& view) {
    std::vector<float> values(static_cast<size_t>(view.numel()));
    for (size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>(get(view, static_cast<int64_t>(i)));
    return values;
}

// sizes[r] values of rank r, one after the other.
inline std::vector<float> gather_values(ProcessGroup& group, std::vector<float> mine,
                                        const std::vector<int64_t>& sizes) {
    const int64_t slots = *std::max_element(sizes.begin(), sizes.end());
    mine.resize(static_cast<size_t>(slots));
    std::vector<float> all(mine.size() * sizes.size()), result;
    group.all_gather(mine.data(), mine.size() * sizeof(float), all.data());
    for (size_t r = 0; r < sizes.size(); ++r) {
        const auto begin = all.begin() + static_cast<int64_t>(r) * slots;
        result.insert(result.end(), begin, begin + sizes[r]);
    }
    return result;
}

// c.tokens: of every rank of the world. Groups of `expert_ranks` ranks share the experts. With `favourite` >=
// 0 every token prefers that expert.
inline GlobalResult run_global_batch(ProcessGroup& world, const LayerCase& c, int expert_ranks,
                                     int64_t favourite) {
    const RankGroups groups = make_rank_groups(world, expert_ranks);
    const int64_t first = std::accumulate(c.tokens.begin(), c.tokens.begin() + world.rank(), int64_t{0});
    const auto group_begin = c.tokens.begin() + world.rank() / expert_ranks * expert_ranks;
    LayerCase own = c;  // of this expert-parallel group
    own.tokens.assign(group_begin, group_begin + expert_ranks);
    RankFixture rank({*groups.world, *groups.expert_parallel, *groups.expert_replicas}, own);
    ParameterStore store(rank.ops, c.seed);
    TransformerBlock block(store, rank.poison, c.block_spec(groups.expert_parallel->rank(), expert_ranks));
    store.allocate_gradients();
    if (block.attention() != nullptr) {
        const std::vector<float> table = rope_table(c.model);
        const TensorView view =
            rank.state.tensor(DType::f32, {c.model.seq_length, rope_dims(c.model) / 2, 2}, "rope");
        rank.ops.device().copy_in(view.data, table.data(), table.size() * sizeof(float));
        block.attention()->set_rope_table(view);
    }
    const int64_t hidden = c.model.hidden_size;
    for (Parameter& p : store.all()) {
        for (int64_t source = 0; source < p.spec.sources; ++source)
            std::memset(p.gradient_of(source).data, 0xFF, static_cast<size_t>(p.main_grad.bytes()));
        if (favourite < 0 || p.spec.name.find("router") == std::string::npos) continue;
        std::fill_n(p.master.as<float>(), p.numel(), 0.0f);
        std::fill_n(p.master.as<float>() + favourite * hidden, hidden, 0.25f);
        store.write_copies(p);
    }

    Context ctx = rank.context();
    ctx.data_parallel_size = world.size();
    ctx.global_tokens = std::accumulate(c.tokens.begin(), c.tokens.end(), int64_t{0});
    const HostTensor x(c.activation(), {ctx.tokens, hidden}), y(c.activation(), {ctx.tokens, hidden}),
        dy(c.activation(), {ctx.tokens, hidden}), dx(c.activation(), {ctx.tokens, hidden});
    fill_global_rows(x, 0, first, favourite >= 0);
    fill_global_rows(dy, 1, first, false);
    block.begin_step(ctx);
    BlockSaved saved;
    block.forward(ctx, x, saved, y);
    block.backward(ctx, dy, saved, dx);
    end_step(block, ctx, rank.step_number);

    GlobalResult result;
    std::vector<int64_t> sizes = c.tokens;
    for (int64_t& size : sizes) size *= hidden;
    result.values["y"] = gather_values(world, read_floats(y), sizes);
    result.values["dx"] = gather_values(world, read_floats(dx), sizes);
    for (const Parameter& p : store.all()) {
        if (p.spec.expert)
            store.reduce_expert_gradients(rank.exchange, groups.expert_replicas->rank(),
                                          p.main_grad.reshape({p.numel()}));
        else
            rank.exchange.all_reduce(Reduce::sum, Ranks::world, p.main_grad);
        std::vector<float> gradient = read_floats(p.main_grad);
        if (p.spec.expert)
            gradient = gather_values(*groups.expert_parallel, gradient,
                                     std::vector<int64_t>(static_cast<size_t>(expert_ranks), p.numel()));
        result.values["gradient " + p.spec.name] = gradient;
    }
    if (block.router() != nullptr) {
        const TensorView counts = block.router()->step_counts();
        result.counts.assign(counts.as<int64_t>(), counts.as<int64_t>() + counts.numel());
    }
    EXPECT_EQ(*rank.status.as<int32_t>(), 0);
    return result;
}

// The same over threads of this process; all ranks must have the same in the end.
inline GlobalResult run_global_batch(const LayerCase& c, int expert_ranks, int64_t favourite = -1) {
    const std::vector<GlobalResult> results =
        on_ranks(c, [&](ProcessGroup& world) { return run_global_batch(world, c, expert_ranks, favourite); });
    for (const GlobalResult& result : results) expect_same_bits(result.values, results[0].values);
    return results[0];
}

}  // namespace fp8flow::test
