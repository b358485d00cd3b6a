// SPDX-License-Identifier: MIT
// A whole MoE layer, forward and backward, captured in a CUDA graph: group sizes are read on the device only,
// so a graph that was captured with one routing gives, with other inputs and other routing, the bytes of a
// run without a graph. One rank, local exchange.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/cuda_check.h"
#include "layers/transformer_block.h"
#include "tests/support/layers/layer_fixture.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace fp8flow::test {
namespace {

using hopper::check_cuda;

enum class Routing { learned, balanced };

struct GraphCase {
    const char* name;
    Recipe recipe;
    Routing routing;
    int64_t alignment;
    bool delayed = false;  // two micro-batches; one GEMM for their expert weight gradients
};

constexpr int64_t kTokens = 256, kHidden = 256;

LayerCase layer_case(const GraphCase& graph_case) {
    LayerCase c = LayerCase::of(graph_case.recipe);
    c.tokens = {kTokens};
    c.model.hidden_size = kHidden;
    c.model.seq_length = 64;
    c.moe.num_experts = 8;
    c.moe.moe_router_topk = 2;
    c.moe.moe_ffn_hidden_size = 384;
    c.moe.moe_shared_expert_intermediate_size = 256;
    c.moe.moe_router_load_balancing_type = {BalancingLoss::aux_loss};
    c.moe.moe_aux_loss_coeff = {0.01};
    c.moe.moe_z_loss_coeff = 0.001;
    c.moe.moe_row_alignment = graph_case.alignment;
    c.forced_routing = graph_case.routing == Routing::balanced;
    return c;
}

// A block without attention: norm, router, plan, dispatch, experts, shared expert, combine; all on one
// stream.
class Layer {
public:
    Layer(const LayerCase& c, bool delayed)
        : micro_batches_(delayed ? 2 : 1),
          exchange_(hopper::make_local_exchange(ops_, CombineOrder::rank)),
          layer_rows_(MoeLayer::worst_rows(c.moe, kTokens, 1)),
          rows_(ops_.device(), layer_rows_, 2),
          store_(ops_, c.seed),
          block_(store_, ops_.device(), c.block_spec(0, 1)) {
        store_.allocate_gradients();
        // a stream that synchronises with the default one: work on that during a capture fails the capture
        check_cuda(cudaStreamCreate(&stream_), "making a stream");
        for (TensorView* view : {&x_, &dy_, &y_, &dx_})
            *view = state_.tensor(DType::bf16, {kTokens, kHidden}, "test");
        status_ = state_.tensor(DType::i32, {1}, "test");
        ops_.zero({.y = status_});
        all_tokens_ = {.num_groups = 1,
                       .counts = state_.tensor(DType::i64, {1}, "test"),
                       .offsets = state_.tensor(DType::i64, {2}, "test"),
                       .row_capacity = kTokens,
                       .alignment = kBlock};
        const int64_t words[3] = {kTokens, 0, kTokens};
        device().copy_in(all_tokens_.counts.data, words, sizeof(int64_t));
        device().copy_in(all_tokens_.offsets.data, words + 1, 2 * sizeof(int64_t));
        device().synchronize();
    }
    ~Layer() {
        device().synchronize();
        cudaStreamDestroy(stream_);
    }

    Device& device() { return ops_.device(); }
    cudaStream_t stream() const { return stream_; }

    // The host's tensors as input; everything that a run writes is poisoned.
    void prepare(const HostTensor& x, const HostTensor& dy) {
        device().copy_in(x_.data, x.view().data, static_cast<std::size_t>(x_.bytes()));
        device().copy_in(dy_.data, dy.view().data, static_cast<std::size_t>(dy_.bytes()));
        for (const TensorView& view : outputs())
            device().fill(view.data, 0xFF, static_cast<std::size_t>(view.bytes()));
        device().synchronize();
    }
    // Enqueues one forward and backward of each micro-batch; the second has the two inputs exchanged.
    void run() {
        for (int64_t m = 0; m < micro_batches_; ++m) run(m, m == 0 ? x_ : dy_, m == 0 ? dy_ : x_);
    }
    // After a run: y, dx, the gradients of all weights, tokens per expert and losses, byte by byte.
    std::vector<std::vector<uint8_t>> results() {
        check_cuda(cudaStreamSynchronize(stream_), "the layer");
        std::vector<std::vector<uint8_t>> bytes;
        for (const TensorView& view : outputs()) {
            bytes.emplace_back(static_cast<std::size_t>(view.bytes()));
            device().copy_out(bytes.back().data(), view.data, bytes.back().size());
        }
        return bytes;
    }
    std::vector<int64_t> tokens_per_expert() {
        const TensorView counts = block_.router()->step_counts();
        std::vector<int64_t> values(static_cast<std::size_t>(counts.numel()));
        device().copy_out(values.data(), counts.data, values.size() * sizeof(int64_t));
        return values;
    }
    std::vector<std::string> names() {
        std::vector<std::string> names = {"y", "dx", "tokens per expert", "balancing loss", "z loss"};
        for (const Parameter& p : store_.all()) names.push_back("gradient of " + p.spec.name);
        return names;
    }
    int32_t status() {
        int32_t word = -1;
        device().copy_out(&word, status_.data, sizeof word);
        return word;
    }

private:
    void run(int64_t index, const TensorView& x, const TensorView& dy) {
        Context ctx{{.ops = ops_,
                     .exchange = *exchange_,
                     .saved = saved_,
                     .scratch = scratch_,
                     .rows = rows_,
                     .timer = timer_}};
        ctx.tokens = ctx.tokens_per_rank = ctx.global_tokens = kTokens;
        ctx.seq_length = 64;
        ctx.layer_row_capacity = layer_rows_;
        ctx.all_tokens = all_tokens_;
        ctx.step_status = status_;
        ctx.launch.stream.handle = stream_;
        ctx.grad_mode = index == 0 ? Gradient::overwrite : Gradient::accumulate;
        if (micro_batches_ > 1) {
            delayed_.begin_micro_batch(index, micro_batches_);
            ctx.delayed = &delayed_;
        }
        if (index == 0) block_.begin_step(ctx);
        const ArenaScope scope(saved_);
        BlockSaved saved;
        block_.forward(ctx, x, saved, y_);
        block_.backward(ctx, dy, saved, dx_);
    }

    std::vector<TensorView> outputs() {
        const Router& router = *block_.router();
        std::vector<TensorView> views = {y_, dx_, router.step_counts(), router.balancing_loss(),
                                         router.z_loss()};
        for (const Parameter& p : store_.all()) views.push_back(p.main_grad);
        return views;
    }

    int64_t micro_batches_;
    HopperOps ops_;
    DelayedWgrads delayed_{ops_.device(), 2};
    std::unique_ptr<Exchange> exchange_;
    int64_t layer_rows_;
    Arena state_{ops_.device(), "state"}, saved_{ops_.device(), "saved"}, scratch_{ops_.device(), "scratch"};
    RowArena rows_;
    StageTimer timer_;
    ParameterStore store_;
    TransformerBlock block_;
    RowGroups all_tokens_;
    TensorView status_, x_, dy_, y_, dx_;
    cudaStream_t stream_ = nullptr;
};

struct Input {
    HostTensor x{DType::bf16, {kTokens, kHidden}}, dy{DType::bf16, {kTokens, kHidden}};
};

// Independent tokens, or all close to one another, so that most experts get none.
enum class Tokens { different, alike };
Input make_input(uint64_t seed, Tokens tokens) {
    Input input;
    fill(input.x, [&](int64_t i) {
        const double own = random_normal(seed, 0, static_cast<uint64_t>(i));
        const double common = random_normal(seed, 1, static_cast<uint64_t>(i % kHidden));
        return tokens == Tokens::different ? own : common + 0.01 * own;
    });
    fill_bf16_normal(input.dy, seed + 1000, 1.0);
    return input;
}

class MoeGraph : public testing::TestWithParam<GraphCase> {};

TEST_P(MoeGraph, ReplaysWithOtherInputsGiveTheBytesOfARun) {
    const LayerCase c = layer_case(GetParam());
    Layer layer(c, GetParam().delayed);
    std::vector<Input> inputs;
    inputs.push_back(make_input(1, Tokens::different));
    inputs.push_back(make_input(2, Tokens::different));
    inputs.push_back(make_input(3, Tokens::alike));

    // without a graph; the first run allocates all memory
    std::vector<std::vector<std::vector<uint8_t>>> wanted;
    std::vector<std::vector<int64_t>> routed;
    layer.prepare(inputs[0].x, inputs[0].dy);
    layer.run();
    const auto first = layer.results();
    for (const Input& input : inputs) {
        layer.prepare(input.x, input.dy);
        layer.run();
        wanted.push_back(layer.results());
        routed.push_back(layer.tokens_per_expert());
    }
    ASSERT_TRUE(first == wanted[0]) << "two runs without a graph differ";
    ASSERT_EQ(layer.status(), 0);
    if (GetParam().routing == Routing::learned) {
        EXPECT_NE(routed[0], routed[1]);
        // of two micro-batches only one has similar tokens
        if (!GetParam().delayed) {
            EXPECT_EQ(*std::min_element(routed[2].begin(), routed[2].end()), 0)
                << "no expert is without tokens";
        }
    } else {
        for (const auto& counts : routed) EXPECT_EQ(counts, std::vector<int64_t>(8, kTokens * 2 / 8));
    }

    const int64_t stops = layer.device().num_synchronisations(), waits = layer.device().num_waits();
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(layer.stream(), cudaStreamCaptureModeThreadLocal),
               "beginning a capture");
    std::string problem;
    try {
        layer.run();
    } catch (const std::exception& error) {
        problem = error.what();
    }
    const cudaError_t ended = cudaStreamEndCapture(layer.stream(), &graph);
    EXPECT_EQ(problem, "");
    ASSERT_EQ(ended, cudaSuccess) << cudaGetErrorString(ended);
    EXPECT_EQ(layer.device().num_synchronisations(), stops);
    EXPECT_EQ(layer.device().num_waits(), waits);
    std::size_t nodes = 0;
    check_cuda(cudaGraphGetNodes(graph, nullptr, &nodes), "counting nodes");
    EXPECT_GT(nodes, 20u);
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");

    const std::vector<std::string> names = layer.names();
    for (const std::size_t which : {1u, 2u, 0u, 2u, 1u}) {
        layer.prepare(inputs[which].x, inputs[which].dy);
        check_cuda(cudaGraphLaunch(executable, layer.stream()), "replaying a graph");
        const auto got = layer.results();
        ASSERT_EQ(got.size(), names.size());
        for (std::size_t i = 0; i < got.size(); ++i)
            EXPECT_TRUE(got[i] == wanted[which][i]) << names[i] << " of input " << which;
    }
    EXPECT_EQ(layer.status(), 0);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, MoeGraph,
    testing::Values(GraphCase{"fp8_flow", Recipe::fp8_flow, Routing::learned, 128},
                    GraphCase{"fp8_flow_balanced", Recipe::fp8_flow, Routing::balanced, 128},
                    GraphCase{"bf16", Recipe::bf16, Routing::learned, 16},
                    GraphCase{"bf16_balanced", Recipe::bf16, Routing::balanced, 16},
                    GraphCase{"fp8_rowwise", Recipe::fp8_rowwise, Routing::learned, 16},
                    GraphCase{"fp8_tensorwise", Recipe::fp8_tensorwise, Routing::learned, 16},
                    GraphCase{"fp8_blockwise", Recipe::fp8_blockwise, Routing::learned, 128},
                    GraphCase{"fp8_flow_delayed", Recipe::fp8_flow, Routing::learned, 128, true},
                    GraphCase{"fp8_blockwise_delayed", Recipe::fp8_blockwise, Routing::learned, 128, true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace fp8flow::test
