// SPDX-License-Identifier: MIT
// One rank's surroundings of a layer (ops, exchange, poisoned arenas, Context), and two runs built on it: a
// transformer block without or with attention, and a whole model. Every allocation starts as NaN, so a flow
// that reads what nobody wrote is noticed.
#pragma once

#include "kernels/comm/group_exchange.h"
#include "layers/schedule/wire_stream.h"
#include "model/train/forced_routing.h"
#include "model/train/transformer.h"
#include "tests/support/layers/late_stream.h"
#include "tests/support/tensors.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fp8flow::test {

// Passes everything on, and fills what it hands out with 0xFF.
class PoisonDevice final : public Device {
public:
    explicit PoisonDevice(Device& device) : device_(device) {}
    void* allocate(std::size_t bytes) override;
    void free(void* data) override { device_.free(data); }
    void copy_in(void* device, const void* host, std::size_t bytes, Stream stream) override {
        device_.copy_in(device, host, bytes, stream);
    }
    void copy_out(void* host, const void* device, std::size_t bytes, Stream stream) override {
        device_.copy_out(host, device, bytes, stream);
    }
    void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
        device_.copy(to, from, bytes, stream);
    }
    void fill(void* device, uint8_t value, std::size_t bytes, Stream stream) override {
        device_.fill(device, value, bytes, stream);
    }
    void synchronize() override { device_.synchronize(); }
    int64_t free_bytes() const override { return device_.free_bytes(); }

private:
    Device& device_;
};

// Model, recipe and batch of a test: small enough that a step takes milliseconds.
struct LayerCase {
    ModelSpec model;
    MoeSpec moe;
    PrecisionSpec precision;
    RecomputeSpec recompute;
    ScheduleSpec schedule;
    std::vector<int64_t> tokens{64};  // by rank; expert parallel over all of them
    bool forced_routing = true;       // round robin: the same experts under every recipe
    uint64_t seed = 1;
    double gradient_size = 1.0;  // of a block's dy
    bool main_is_late = false;   // LateDevice::be_late_on_main
    bool divided_state = false;  // of dense parameters, over all ranks (use_distributed_optimizer)

    LayerCase();
    static LayerCase of(Recipe recipe) {
        LayerCase c;
        c.precision.recipe = recipe;
        return c;
    }
    int ranks() const { return static_cast<int>(tokens.size()); }
    int64_t slots() const { return *std::max_element(tokens.begin(), tokens.end()); }
    DType activation() const { return precision.recipe == Recipe::fp32 ? DType::f32 : DType::bf16; }
    MoeSpec moe_spec() const {
        MoeSpec spec = moe;
        spec.moe_router_force_load_balancing = forced_routing;
        return with_forced_routing(spec);
    }
    // Layer 0 on one of the ranks that share its experts.
    BlockSpec block_spec(int expert_parallel_rank, int expert_parallel_size) const;
};

// What one rank lends to its layers.
struct RankFixture {
    const LayerCase& c;
    LateOps ops;
    GroupExchange group_exchange;
    LateExchange exchange;
    PoisonDevice poison{ops.device()};
    // Poisoned, but where the main stream is late: the poison of what another stream takes would be late as
    // well.
    Arena state{ops.device(), "state"}, saved{ops.device(), "saved", !c.main_is_late},
        scratch{ops.device(), "scratch", !c.main_is_late};
    int64_t layer_rows;
    RowArena rows;
    std::unique_ptr<SideStream> side;
    std::unique_ptr<WireStream> wire;
    StageTimer timer;
    RowGroups all_tokens;
    TensorView status, step_number;  // of the first step

    RankFixture(const ExchangeGroups& groups, const LayerCase& layer_case);
    int64_t tokens() const { return c.tokens[static_cast<std::size_t>(exchange.rank())]; }

    Context context() { return context(saved, scratch, rows); }
    // On other memory: of another micro-batch.
    Context context(Arena& own_saved, Arena& own_scratch, RowArena& own_rows);
};

// What one rank has after one forward and backward.
struct LayerResult {
    std::vector<double> x, dy, y, dx;  // block only
    double loss = 0;                   // model only: summed over this rank's tokens
    double balancing_loss = 0, z_loss = 0;
    std::map<std::string, std::vector<double>> gradients;  // by parameter; this rank's part
    std::vector<std::vector<int64_t>> router_counts;       // by MoE layer, over all ranks
    std::map<std::string, OpCount> ops;
    int64_t casts = 0;
    WireBytes wire;
    int64_t dispatches = 0, combines = 0;
    int64_t saved_bytes = 0;                  // arena `saved` at its fullest
    std::map<std::string, double> row_bytes;  // saved bytes per routed row, by kind
    int64_t in_use = 0;                       // of both arenas, after the backward
    int32_t status = 0;

    int64_t calls(const std::string& op) const {
        const auto found = ops.find(op);
        return found == ops.end() ? 0 : found->second.calls;
    }
};

// Everything that the passes compute has the same bits, and `got` has left no memory in use.
void expect_same_result(const LayerResult& got, const LayerResult& wanted);
void expect_same_results(const std::vector<LayerResult>& got, const std::vector<LayerResult>& wanted);

// What `run` returns on each rank of the case.
template <class Run> auto on_ranks(const LayerCase& c, const Run& run) {
    std::vector<std::invoke_result_t<Run, ProcessGroup&>> results(c.tokens.size());
    run_thread_ranks(c.ranks(), 120, [&](ProcessGroup& group) {
        results[static_cast<std::size_t>(group.rank())] = run(group);
    });
    return results;
}

// As the model does at the end of a step, for one block.
void end_step(const TransformerBlock& block, Context& ctx, const TensorView& step);
void read_router(const Router& router, LayerResult& result);
void read_rank(RankFixture& rank, ParameterStore& store, LayerResult& result);

// Values that BF16 holds, so that every recipe and fp32 start from the same numbers.
void fill_bf16_normal(const TensorView& view, uint64_t seed, double stddev);

// Layer 0 of the case as a block, forward and backward. x is small, so that the residual stream adds little
// to y's rounding; the norm makes it unit-sized.
LayerResult run_block(ProcessGroup& group, const LayerCase& c, TensorStats* stats = nullptr);
std::vector<LayerResult> run_block(const LayerCase& c);

// A whole model on one rank, with the tokens of one micro-batch; parameters stay between runs, so that a test
// can move them.
class ModelFixture {
public:
    ModelFixture(ProcessGroup& group, const LayerCase& c);

    ParameterStore& parameters() { return model_.parameters(); }
    RankFixture& rank() { return rank_; }
    Transformer& model() { return model_; }
    TensorView tokens() const { return tokens_; }

    // One micro-batch; gradients are those of the mean over all ranks' tokens plus the router's losses.
    // `offset` is where the sum of losses starts: -(what is expected) keeps small differences from being
    // rounded away.
    LayerResult step(float offset = 0, Gradient mode = Gradient::overwrite);

private:
    RankFixture rank_;
    Transformer model_;
    TensorView tokens_, labels_, loss_;
};

}  // namespace fp8flow::test
