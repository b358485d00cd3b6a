// One transformer block, forward and backward, on given rows spread over the ranks of a group: output, input gradient and every weight
// gradient of the whole, to compare between numbers of ranks. A pass on NaN goes first, so that every buffer holds poison.
#pragma once

#include "layers/transformer_block.h"
#include "model/backend.h"
#include "model/config.h"

#include "kernels/core/random.h"
#include "kernels/core/scalar_math.h"
#include "tests/support/training.h"

#include <limits>
#include <numeric>

namespace fp8flow::test {

struct BlockCase {
    Config config;  // of which layer 1 is built; the number of its expert-parallel ranks included
    std::vector<int64_t> tokens;  // per rank; whole sequences where the block has attention
    int64_t favourite = -1;       // an expert that every token prefers
};

struct BlockRun {
    Values values;  // "y", "dx" [T, H] of all ranks; "gradient NAME"
    std::vector<int64_t> counts;

    double distance(const BlockRun& other, const std::string& name) const {
        return norm_wise_error(values.at(name), other.values.at(name));
    }
};

// Rows [first, first + count) of a fixed infinite matrix.
inline std::vector<float> matrix_rows(uint64_t stream, int64_t first, int64_t count, int64_t width,
                                      bool positive) {
    std::vector<float> rows;
    for (int64_t i = first * width; i < (first + count) * width; ++i) {
        const float value = random_normal(17, stream, static_cast<uint64_t>(i));
        rows.push_back(to_float(to_bf16(positive ? 0.25f + std::abs(value) : value)));
    }
    return rows;
}

inline void write_rows(const TensorView& view, const std::vector<float>& rows) {
    for (size_t i = 0; i < rows.size(); ++i) {
        if (view.dtype == DType::f32)
            view.as<float>()[i] = rows[i];
        else
            view.as<Bf16>()[i] = to_bf16(rows[i]);
    }
}

inline std::vector<float> read_rows(const TensorView& view) {
    std::vector<float> rows(static_cast<size_t>(view.numel()));
    for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = view.dtype == DType::f32 ? view.as<float>()[i] : to_float(view.as<Bf16>()[i]);
    return rows;
}

// Rows of all ranks one behind the other; tokens[r] rows on rank r.
inline std::vector<float> gather_rows(ProcessGroup& world, std::vector<float> mine,
                                      const std::vector<int64_t>& tokens, int64_t width) {
    const int64_t slots = *std::max_element(tokens.begin(), tokens.end());
    mine.resize(static_cast<size_t>(slots * width));
    std::vector<float> all(mine.size() * tokens.size()), result;
    world.all_gather(mine.data(), mine.size() * sizeof(float), all.data());
    for (size_t r = 0; r < tokens.size(); ++r) {
        const auto begin = all.begin() + static_cast<int64_t>(r) * slots * width;
        result.insert(result.end(), begin, begin + tokens[r] * width);
    }
    return result;
}

inline BlockRun run_block_on(ProcessGroup& world, const BlockCase& given) {
    const Config& config = given.config;
    const int ranks = static_cast<int>(config.parallel.expert_model_parallel_size);
    const BackendChoice backend = choose_backend(BackendKind::reference);
    const auto ops = make_ops(backend, Arithmetic::stated);
    const RankGroups groups = make_rank_groups(world, ranks);
    const auto exchange = make_exchange(backend, groups, *ops, config.moe.moe_combine_order);
    const DType activation = config.precision.recipe == Recipe::fp32 ? DType::f32 : DType::bf16;
    ParameterStore store(*ops, 11);
    TransformerBlock block(store, ops->device(), config.model, config.moe, config.precision, config.recompute,
                           activation, {1, groups.expert_parallel->rank(), ranks});
    Arena words(ops->device(), "words"), saved(ops->device(), "saved", true),
        scratch(ops->device(), "scratch", true);
    if (block.attention() != nullptr) {
        const std::vector<float> table = SelfAttention::rope_table(config.model);
        const TensorView view =
            words.tensor(DType::f32, {config.model.seq_length, config.model.kv_channels / 2, 2}, "rope");
        ops->device().copy_in(view.data, table.data(), table.size() * sizeof(float));
        block.attention()->set_rope_table(view);
    }
    for (Parameter& p : store.all()) {
        if (given.favourite < 0 || p.spec.name.find("router") == std::string::npos) continue;
        std::fill_n(p.master.as<float>(), p.numel(), 0.0f);
        std::fill_n(p.master.as<float>() + given.favourite * config.model.hidden_size,
                    config.model.hidden_size, 0.25f);
        store.write_copies(p);
    }

    const auto rank = static_cast<size_t>(world.rank());
    const int64_t mine = given.tokens[rank], hidden = config.model.hidden_size;
    const int64_t first =
        std::accumulate(given.tokens.begin(), given.tokens.begin() + world.rank(), int64_t{0});
    const int64_t slots = *std::max_element(given.tokens.begin(), given.tokens.end());
    const int64_t capacity = MoeLayer::row_capacity(config.moe, slots, ranks);
    RowArena rows(ops->device(), capacity, 2);
    StageTimer timer;
    Context ctx{
        .ops = *ops, .exchange = *exchange, .saved = saved, .scratch = scratch, .rows = rows, .timer = timer};
    ctx.activation = activation;
    ctx.tokens = mine;
    ctx.tokens_per_rank = slots;
    ctx.seq_length = config.model.seq_length;
    ctx.layer_row_capacity = capacity;
    ctx.data_parallel_size = world.size();
    ctx.global_tokens = std::accumulate(given.tokens.begin(), given.tokens.end(), int64_t{0});
    ctx.step_status = words.tensor(DType::i32, {1}, "words");
    ctx.all_tokens = {.num_groups = 1,
                      .counts = words.tensor(DType::i64, {1}, "words"),
                      .offsets = words.tensor(DType::i64, {2}, "words"),
                      .row_capacity = mine,
                      .alignment = kBlock};
    *ctx.step_status.as<int32_t>() = 0;
    ctx.all_tokens.counts.as<int64_t>()[0] = mine;
    ctx.all_tokens.offsets.as<int64_t>()[0] = 0;
    ctx.all_tokens.offsets.as<int64_t>()[1] = mine;
    const TensorView x = words.tensor(activation, {mine, hidden}, "words"),
                     y = words.tensor(activation, {mine, hidden}, "words"),
                     dy = words.tensor(activation, {mine, hidden}, "words"),
                     dx = words.tensor(activation, {mine, hidden}, "words");
    const std::vector<float> poison(static_cast<size_t>(mine * hidden),
                                    std::numeric_limits<float>::quiet_NaN());
    for (const bool poisoned : {true, false}) {
        write_rows(x, poisoned ? poison : matrix_rows(0, first, mine, hidden, given.favourite >= 0));
        write_rows(dy, poisoned ? poison : matrix_rows(1, first, mine, hidden, false));
        ops->device().fill(y.data, 0xFF, static_cast<size_t>(y.bytes()));
        ops->device().fill(dx.data, 0xFF, static_cast<size_t>(dx.bytes()));
        const ArenaScope saved_scope(saved), scratch_scope(scratch);
        rows.pop(0);
        block.begin_step(ctx);
        BlockSaved kept;
        block.forward(ctx, x, kept, y);
        block.backward(ctx, dy, kept, dx);
    }
    EXPECT_EQ(*ctx.step_status.as<int32_t>(), 0);
    BlockRun run;
    run.values["y"] = gather_rows(world, read_rows(y), given.tokens, hidden);
    run.values["dx"] = gather_rows(world, read_rows(dx), given.tokens, hidden);
    for (const Parameter& p : store.all()) {
        exchange->all_reduce(Reduce::sum, p.spec.expert ? Ranks::expert_replicas : Ranks::world, p.main_grad);
        std::vector<float> gradient = read_rows(p.main_grad);
        if (p.spec.expert)
            gradient = gather_rows(*groups.expert_parallel, gradient,
                                   std::vector<int64_t>(static_cast<size_t>(ranks), p.numel()), 1);
        run.values["gradient " + p.spec.name] = gradient;
    }
    block.end_step(ctx, 0);
    if (block.router() != nullptr) {
        const TensorView counts = block.router()->step_counts();
        run.counts.assign(counts.as<int64_t>(), counts.as<int64_t>() + counts.numel());
    }
    return run;
}

// The same over threads of this process.
inline BlockRun run_block(const BlockCase& given) {
    std::vector<BlockRun> runs(given.tokens.size());
    run_thread_ranks(static_cast<int>(given.tokens.size()), kTestDeadline, [&](ProcessGroup& world) {
        runs[static_cast<size_t>(world.rank())] = run_block_on(world, given);
    });
    for (const BlockRun& run : runs) expect_same_bits(run.values, runs[0].values);
    return runs[0];
}

}  // namespace fp8flow::test
