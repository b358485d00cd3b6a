// SPDX-License-Identifier: MIT
// `plan` against hand counts: parameters of published models, FLOPs of small ones, bytes per routed row, wire
// rows.
#include "model/plan/plan.h"

#include "model/report/plan_report.h"
#include "model/report/table.h"
#include "tests/support/settings.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace fp8flow {

using namespace plan;

namespace {

int64_t total_of(const Config& config, const std::string& part) {
    for (const auto& entry : count_parameters(config)) {
        if (entry.part == part) return entry.total;
    }
    ADD_FAILURE() << part;
    return 0;
}

TEST(RunPlan, ParametersOfMixtral8x7b) {
    const Config config = shipped("mixtral_8x7b");
    const RunPlan plan = make_plan(config, 8);
    EXPECT_EQ(total_of(config, "embedding"), int64_t{32000} * 4096);
    EXPECT_EQ(total_of(config, "attention"), int64_t{32} * (2 * 4096 * 4096 + 2 * 4096 * 1024));
    EXPECT_EQ(total_of(config, "experts"), int64_t{32} * 8 * 3 * 4096 * 14336);
    EXPECT_EQ(total_of(config, "norms"), int64_t{32} * 2 * 4096 + 4096);
    EXPECT_EQ(plan.total_parameters(), 46702792704);   // the published checkpoint: 46.7 B
    EXPECT_EQ(plan.active_parameters(), 12879925248);  // 12.9 B
}

TEST(RunPlan, AbsurdSizesAreRefused) {
    const auto refusal = [](const std::vector<std::string>& overrides) {
        return error_of(ExitCode::usage, [&] { make_plan(shipped("test", overrides), 1); });
    };
    const std::vector<std::string> wide = {"hidden_size=1048576", "moe_ffn_hidden_size=1048576",
                                           "num_experts=4096"};
    auto deep = wide;
    deep.insert(deep.end(), {"num_layers=4096", "moe_layer_freq=1"});
    expect_contains(refusal(deep),
                    "parameters are more than the 1.2e+18 that are counted; lower model.num_layers");
    expect_contains(refusal({"micro_batch_size=1048576", "global_batch_size=1048576", "seq_length=16777216",
                             "train_iters=20", "hidden_size=1048576"}),
                    "more than 63 bits count; lower training.micro_batch_size");
    // a factor beyond any routing is the worst case of routing
    const Config worst = shipped("test", {"moe_expert_rank_capacity_factor=0"}),
                 more = shipped("test", {"moe_expert_rank_capacity_factor=1e38"});
    EXPECT_EQ(rank_row_capacity(more), rank_row_capacity(worst));
}

TEST(RunPlan, ParametersOfQwen3) {
    const RunPlan plan = make_plan(shipped("qwen3_30b_a3b"), 8);
    EXPECT_EQ(plan.total_parameters(), 30532122624);  // the published checkpoint: 30.5 B
    EXPECT_EQ(plan.active_parameters(), 3353032704);  // 3.3 B
    int64_t per_rank = 0;
    for (const auto& part : plan.parameters) per_rank += part.per_rank;
    const int64_t experts = int64_t{48} * 128 * 3 * 2048 * 768;
    EXPECT_EQ(per_rank, plan.total_parameters() - experts + experts / 8);
}

// One MoE layer of DeepSeek-V3: 256 routed experts and one shared expert of 3 x 7168 x 2048 weights.
TEST(RunPlan, ParametersOfOneDeepSeekLayer) {
    const Config config = shipped("layer_deepseek_v3");
    const int64_t expert = int64_t{3} * 7168 * 2048;
    EXPECT_EQ(total_of(config, "experts"), 256 * expert);
    EXPECT_EQ(total_of(config, "shared expert"), expert);
    EXPECT_EQ(total_of(config, "router"), int64_t{7168} * 256);
    EXPECT_EQ(total_of(config, "attention"), 0);
    EXPECT_EQ(total_of(config, "norms"), 2 * 7168);  // before the MoE layer, and the final one
}

TEST(RunPlan, DenseLayersAndTiedHead) {
    const Config config = parse_config(
        "model: {num_layers: 3, hidden_size: 128, moe_layer_freq: [0, 1, 0], ffn_hidden_size: 384, "
        "untie_embeddings_and_output_weights: false}",
        "t");
    EXPECT_EQ(total_of(config, "dense FFN"), int64_t{2} * 3 * 128 * 384);
    EXPECT_EQ(total_of(config, "experts"), int64_t{1} * 8 * 3 * 128 * 256);
    EXPECT_EQ(total_of(config, "head"), 0);
}

// Counted GEMM by GEMM: every weight multiplies a token once, an expert's for each of its K experts.
TEST(RunPlan, FlopsPerTokenByHand) {
    const Config config = parse_config(
        "model: {num_layers: 2, hidden_size: 256, num_attention_heads: 4, num_query_groups: 2, kv_channels: "
        "64, "
        "seq_length: 127, vocab_size: 257, moe_layer_freq: [0, 1], ffn_hidden_size: 512}\n"
        "moe: {num_experts: 8, moe_router_topk: 2, moe_ffn_hidden_size: 128, "
        "moe_shared_expert_intermediate_size: 384}",
        "t");
    std::map<std::string, double> forward;
    for (const auto& part : count_flops(config)) {
        forward[part.part] = part.forward;
        EXPECT_EQ(part.backward, 2 * part.forward) << part.part;
    }
    EXPECT_EQ(forward.at("attention projections"), 2.0 * 2 * (256 * 256 + 256 * 128 + 256 * 128 + 256 * 256));
    // Query i sees i + 1 keys; scores and values cost heads x channels multiply-adds a key each.
    double pairs = 0;
    for (int i = 0; i < 127; ++i) pairs += i + 1;
    EXPECT_EQ(forward.at("attention core (causal)"), 2.0 * 2 * (2 * 4 * 64) * pairs / 127);
    EXPECT_EQ(forward.at("router"), 2.0 * 256 * 8);
    EXPECT_EQ(forward.at("experts"), 2.0 * 2 * 3 * 256 * 128);
    EXPECT_EQ(forward.at("shared expert"), 2.0 * 3 * 256 * 384);
    EXPECT_EQ(forward.at("dense FFN"), 2.0 * 3 * 256 * 512);
    EXPECT_EQ(forward.at("head"), 2.0 * 256 * 384);
    // latent attention: 192 columns of q and k, 128 of v
    const std::vector<FlopPart> parts = count_flops(shipped("deepseek_v3"));
    const auto core = std::ranges::find(parts, "attention core (causal)", &FlopPart::part);
    EXPECT_EQ(core->forward, 2.0 * 61 * 128 * (192 + 128) * 2049 / 2);
}

// A frozen weight has no gradient: its GEMM does not count. One of two layers is MoE; the head is tied.
TEST(RunPlan, FrozenWeightsHaveNoGradientFlops) {
    const Config all = parse_config(
        "model: {num_layers: 2, hidden_size: 256, moe_layer_freq: [0, 1], num_attention_heads: 4, "
        "num_query_groups: 2, kv_channels: 64, untie_embeddings_and_output_weights: false}\n"
        "moe: {num_experts: 8, moe_router_topk: 2, moe_ffn_hidden_size: 128}",
        "t");
    const auto removed = [&](std::vector<std::string> names) {
        Config config = all;
        config.training.freeze.names = std::move(names);
        EXPECT_EQ(sum_of(count_flops(config), &FlopPart::forward),
                  sum_of(count_flops(all), &FlopPart::forward));
        return sum_of(count_flops(all), &FlopPart::backward) -
               sum_of(count_flops(config), &FlopPart::backward);
    };
    EXPECT_EQ(removed({"router"}), 2.0 * 256 * 8);
    EXPECT_EQ(removed({"experts.linear_fc1"}), 2.0 * 2 * 2 * 128 * 256);
    EXPECT_EQ(removed({"layers.0.self_attention.linear_proj"}), 2.0 * 256 * 256);
    EXPECT_EQ(removed({"word_embeddings"}), 2.0 * 256 * 384);
    EXPECT_EQ(removed({"norm"}), 0);
}

// The published bytes per routed row of DeepSeek-V3's shape: H 7168, F 2048.
TEST(RunPlan, SavedBytesPerRoutedRow) {
    const Config config = shipped("layer_deepseek_v3");
    const auto row = [&](Recipe recipe, RecomputeSpec recompute) {
        return saved_activation_bytes(with_recipe(config, recipe), 0, recompute).per_row;
    };
    using enum RecomputeGranularity;
    constexpr double kSource = 4;  // not in the published figures: the source of a row
    EXPECT_EQ(row(Recipe::bf16, {}), 26628 + kSource);
    EXPECT_EQ(row(Recipe::fp8_blockwise, {}), 17700 + kSource);
    EXPECT_EQ(row(Recipe::fp8_flow, {}), 17700 + kSource);
    EXPECT_EQ(row(Recipe::fp8_flow, {.recompute_granularity = selective, .moe_act = true}), 15588 + kSource);
    EXPECT_EQ(row(Recipe::fp8_flow, {.recompute_granularity = selective, .moe_expert = true}),
              7396 + kSource);
    EXPECT_EQ(row(Recipe::fp8_flow, {.recompute_granularity = selective, .moe = true}), 0);
    EXPECT_EQ(row(Recipe::fp8_flow, {.recompute_granularity = full}), 0);
    EXPECT_EQ(saved_activation_bytes(config, 0, {.recompute_granularity = full}).per_token, 2 * 7168);
}

// Rows kept once a (token, rank), FP8 values and a byte for each 128 of them, and all tables of the plan: per
// real routed row of DeepSeek-V3 with its group-limited routing.
TEST(RunPlan, SavedRowsPerRealRoutedRow) {
    const auto per_row = [&](int64_t ranks, SavedRows rows) {
        Config config = shipped("layer_deepseek_v3");
        config.parallel.expert_model_parallel_size = ranks;
        config.recompute = {
            .recompute_granularity = RecomputeGranularity::selective, .moe_expert = true, .saved_rows = rows};
        config.precision.recipe = Recipe::fp8_flow;
        const SavedBytes saved = saved_activation_bytes(config, 0, config.recompute);
        const double topk = static_cast<double>(config.moe.moe_router_topk), g = static_cast<double>(ranks);
        const double tokens = static_cast<double>(config.training.micro_batch_size * config.model.seq_length);
        const double tables = g * 2 * 4 * topk + g * 4 * (topk + 2);  // of the plan, per token
        return saved.per_row + (tables + expected_received_rows(config) / tokens * saved.per_received) / topk;
    };
    EXPECT_LE(per_row(4, SavedRows::received), 2800);
    EXPECT_GT(per_row(4, SavedRows::received), 2500);
    EXPECT_LE(per_row(2, SavedRows::received), 1900);
    EXPECT_GT(per_row(2, SavedRows::received), 1700);
    EXPECT_LE(per_row(4, SavedRows::none), 200);
    EXPECT_GT(per_row(4, SavedRows::none), 8);
    EXPECT_GT(per_row(4, SavedRows::sorted), 7400);
}

TEST(RunPlan, Bf16LayersAtBothEnds) {
    const Config config = parse_config(
        "model: {num_layers: 4, num_layers_at_start_in_bf16: 1, num_layers_at_end_in_bf16: 2}", "t");
    EXPECT_EQ(layer_precision(config, 0).recipe, Recipe::bf16);
    EXPECT_EQ(layer_precision(config, 1).recipe, Recipe::fp8_flow);
    EXPECT_EQ(layer_precision(config, 2).recipe, Recipe::bf16);
    EXPECT_EQ(layer_precision(config, 3).recipe, Recipe::bf16);
}

// Against sampled routings, with and without group limits.
TEST(RunPlan, DistinctRanksMatchSampling) {
    struct Case {
        int64_t experts, topk, groups, group_topk, ranks;
    };
    for (const auto& [experts, topk, groups, group_topk, ranks] :
         {Case{256, 8, 0, 0, 4}, Case{8, 2, 0, 0, 2}, Case{64, 6, 0, 0, 8}, Case{256, 8, 8, 4, 4},
          Case{64, 8, 4, 2, 8}, Case{16, 16, 0, 0, 4}, Case{8, 1, 0, 0, 8}, Case{12, 3, 0, 0, 1},
          Case{64, 4, 8, 1, 2}}) {
        MoeSpec moe;
        moe.num_experts = experts;
        moe.moe_router_topk = topk;
        moe.moe_router_num_groups = groups;
        moe.moe_router_group_topk = group_topk;
        std::mt19937 random(7);
        constexpr int kSamples = 20000;
        double sum = 0;
        std::vector<int64_t> group_order(static_cast<size_t>(std::max<int64_t>(groups, 1)));
        for (int sample = 0; sample < kSamples; ++sample) {
            std::iota(group_order.begin(), group_order.end(), 0);
            std::shuffle(group_order.begin(), group_order.end(), random);
            std::vector<int64_t> open;
            for (int64_t expert = 0; expert < experts; ++expert) {
                const int64_t group = groups > 0 ? expert / (experts / groups) : 0;
                const auto at =
                    std::find(group_order.begin(), group_order.end(), group) - group_order.begin();
                if (groups == 0 || at < group_topk) open.push_back(expert);
            }
            std::shuffle(open.begin(), open.end(), random);
            std::set<int64_t> hit;
            for (int64_t k = 0; k < topk; ++k) hit.insert(open[static_cast<size_t>(k)] / (experts / ranks));
            sum += static_cast<double>(hit.size());
        }
        EXPECT_NEAR(expected_distinct_ranks(moe, ranks), sum / kSamples, 0.02)
            << experts << " " << topk << " " << groups;
    }
}

std::map<std::string, WireItem> legs_of(const Config& config, Recipe recipe) {
    std::map<std::string, WireItem> by_name;
    for (const auto& leg : wire_bytes(with_recipe(config, recipe))) by_name[leg.leg] = leg;
    return by_name;
}

// T = 4096, H = 7168, K = 8 over 4 ranks without group limits: 11103 remote rows a rank.
TEST(RunPlan, WireBytesOfDeepSeekLayer) {
    Config config = shipped("layer_deepseek_v3");
    config.moe.moe_router_num_groups = config.moe.moe_router_group_topk = 0;
    const auto legs = [&](Recipe recipe) { return legs_of(config, recipe); };
    auto flow = legs(Recipe::fp8_flow), bf16 = legs(Recipe::bf16);
    EXPECT_NEAR(bf16["dispatch"].forward / (2 * 7168), 11103, 1);
    EXPECT_NEAR(flow["dispatch"].forward / (7168 + 56), 11103, 1);  // codes and one E8M0 byte per 128
    EXPECT_EQ(flow["dispatch"].backward, flow["dispatch"].forward);
    EXPECT_EQ(flow["combine"].forward, bf16["combine"].forward);
    EXPECT_EQ(flow["combine"].forward, bf16["dispatch"].forward);
    EXPECT_EQ(flow["routing"].forward, 3.0 * 4096 * 8 * 8);
    EXPECT_EQ(legs(Recipe::fp8_blockwise)["dispatch"].forward, bf16["dispatch"].forward);
    config.moe.moe_combine_order = CombineOrder::invariant;
    EXPECT_EQ(legs(Recipe::bf16)["combine"].forward, 4096.0 * 8 * 3 / 4 * 2 * 7168);
    config.parallel.expert_model_parallel_size = 1;
    EXPECT_EQ(legs(Recipe::bf16)["combine"].forward + legs(Recipe::bf16)["dispatch"].forward, 0);
}

// 8 ranks on two hosts: over two levels a row crosses once for each (token, host), and is sent on inside to
// three of four ranks.
TEST(RunPlan, WireBytesBetweenHosts) {
    Config config = shipped("layer_deepseek_v3");
    config.moe.moe_router_num_groups = config.moe.moe_router_group_topk = 0;
    config.parallel.expert_model_parallel_size = 8;
    const double row = 4096 * 2 * 7168, ranks = expected_distinct_ranks(config.moe, 8),
                 hosts = expected_distinct_ranks(config.moe, 2);
    const auto legs = [&] { return legs_of(config, Recipe::bf16); };
    EXPECT_EQ(legs()["dispatch"].between_hosts, 0);
    config.parallel.hosts = 2;
    config.parallel.ranks_per_host = 4;
    auto flat = legs();
    EXPECT_DOUBLE_EQ(flat["dispatch"].forward, row * ranks * 7 / 8);
    EXPECT_DOUBLE_EQ(flat["dispatch"].between_hosts, 2 * row * ranks / 2);
    EXPECT_DOUBLE_EQ(flat["routing"].between_hosts, 4.0 * 4096 * 8 * 8);
    config.parallel.moe_token_dispatcher_type = TokenDispatcher::hierarchical;
    auto two = legs();
    EXPECT_DOUBLE_EQ(two["dispatch"].forward, row * (hosts / 2 + ranks * 3 / 4));
    EXPECT_DOUBLE_EQ(two["dispatch"].between_hosts, 2 * row * hosts / 2);
    EXPECT_DOUBLE_EQ(two["combine"].between_hosts, two["dispatch"].between_hosts);
    EXPECT_EQ(two["routing"].between_hosts, flat["routing"].between_hosts);
    EXPECT_DOUBLE_EQ(two["prob gradients"].between_hosts, flat["prob gradients"].between_hosts);
    EXPECT_DOUBLE_EQ(two["prob gradients"].backward, 4096.0 * 8 * 4 * (0.5 + 0.75));
    EXPECT_EQ(two["routing"].forward, flat["routing"].forward);
    config.moe.moe_combine_order = CombineOrder::invariant;
    EXPECT_DOUBLE_EQ(legs()["combine"].between_hosts, 2 * row * 8 / 2);
    config.parallel.ranks_per_host = 8;  // every group inside one
    EXPECT_EQ(legs()["dispatch"].between_hosts, 0);
}

TEST(RunPlan, RowCapacity) {
    Config config = shipped("layer_deepseek_v3");
    EXPECT_EQ(rank_row_capacity(config), 1.25 * 4096 * 8 + 127 * 64 + 64);
    config.moe.moe_expert_rank_capacity_factor = 0;
    // Every token of every rank to 8 experts here, a pad of 127 each, up to a multiple of 128.
    EXPECT_EQ(rank_row_capacity(config), 4 * 4096 * 8 + 127 * 64 + 64);
    config.moe.moe_expert_rank_capacity_factor = 1.5;
    EXPECT_EQ(rank_row_capacity(config), 1.5 * 4096 * 8 + 127 * 64 + 64);
    config.moe.moe_expert_rank_capacity_factor = 100;
    EXPECT_EQ(rank_row_capacity(config), 4 * 4096 * 8 + 127 * 64 + 64);
    // every expert of every source rank
    config.moe.moe_combine_order = CombineOrder::invariant;
    EXPECT_EQ(rank_row_capacity(config), 4 * 4096 * 8 + 127 * 256);
}

// One MoE layer of 64 tokens on two ranks.
Config small_layer(const std::vector<std::string>& overrides = {}) {
    return parse_config(
        "model: {num_layers: 1, hidden_size: 128, attention: false, vocab_size: 256, seq_length: 64}\n"
        "moe: {num_experts: 4, moe_router_topk: 2, moe_ffn_hidden_size: 128}\nprecision: {recipe: fp8_flow}\n"
        "parallel: {expert_model_parallel_size: 2}",
        "t", overrides);
}
std::map<std::string, double> memory_of(const Config& config, int64_t gpus = 2) {
    std::map<std::string, double> bytes;
    for (const auto& item : make_plan(config, gpus).memory) bytes[item.category] = item.bytes;
    return bytes;
}

TEST(RunPlan, MemoryByCategory) {
    const Config config = small_layer();
    std::map<std::string, double> bytes = memory_of(config);
    const double dense = 2 * 256 * 128 + 2 * 128 + 128 * 4, experts = 2 * 3 * 128 * 128;
    EXPECT_EQ(bytes.at("weights (BF16)"), 2 * dense);
    // Two copies of the codes; scales of W1 [2,1] and W2 [1,1] blocks in both orientations, rows padded to 4.
    EXPECT_EQ(bytes.at("weights (FP8 copies)"), 2 * experts + 2 * 4 * ((2 * 4 + 1 * 4) + (1 * 4 + 1 * 4)));
    EXPECT_EQ(bytes.at("master weights (FP32)"), 4 * (dense + experts));
    EXPECT_EQ(bytes.at("Adam moments (FP32)"), 8 * (dense + experts));
    EXPECT_EQ(bytes.at("main gradients (FP32)"), 4 * (dense + experts));
    EXPECT_EQ(bytes.at("logits and their gradient"), 64 * 256 * 6);
    const double rows = 512;  // 2 ranks x 64 tokens x 2, two experts' pads of 127, up to a multiple of 128
    const double norm = 2 * 128 + 128 + 1, plan = 2 * (2 * 4 * 2 + 4 * (2 + 2)), router = 4 * (4 + 2 * 2);
    const double last = 2 * 2 * 128 + 4;  // the final norm's input, output and 1/rms
    EXPECT_EQ(bytes.at("saved activations"),
              rows * (132 + 4 * 128 + 132 + 8) + 64 * (2 * 128 + 4 + norm + router + plan + last));
    const auto exchanged = [](double row) {
        return 2 * (2 * 64 * 2 * 6 + 64 * (row + 2 * 256) + 64 * 2 * 4);
    };
    EXPECT_EQ(bytes.at("exchange buffers"), exchanged(129));
    std::map<std::string, double> plain = memory_of(with_recipe(config, Recipe::bf16));
    EXPECT_EQ(plain.at("exchange buffers"), exchanged(256));
    EXPECT_EQ(plain.at("weights (FP8 copies)"), 0);
    EXPECT_EQ(plain.at("weights (BF16)"), 2 * (dense + experts));
    Config invariant = config;
    invariant.moe.moe_combine_order = CombineOrder::invariant;
    EXPECT_EQ(memory_of(invariant).at("main gradients (FP32)"), 4 * (dense + 2 * experts));
    EXPECT_EQ(make_plan(config, 2).balanced_rows, 64 * 2 + 2 * 63.5);
    EXPECT_EQ(make_plan(invariant, 2).balanced_rows, 64 * 2 + 4 * 63.5);
    invariant.training.state.main_grads_dtype = StateDtype::bf16;
    EXPECT_EQ(memory_of(invariant).at("main gradients (BF16)"), 4 * dense + 2 * 2 * experts);
    // Four ranks share the dense state, two the experts' state and the masters of a gather.
    bytes = memory_of(small_layer({"training.use_distributed_optimizer=true"}), 4);
    EXPECT_EQ(bytes.at("master weights (FP32)"), 4 * (dense / 4 + experts / 2));
    EXPECT_EQ(bytes.at("gathered master"), 4 * experts);
}

TEST(RunPlan, MemoryOfSchedules) {
    const auto of = [](const std::vector<std::string>& overrides) {
        return memory_of(small_layer(overrides));
    };
    const auto serial = of({}), interleaved = of({"schedule.overlap_moe_expert_parallel_comm=true"});
    for (const char* category : {"saved activations", "MoE workspace"})
        EXPECT_EQ(interleaved.at(category), 2 * serial.at(category)) << category;
    // dY [H] and a [F] of fc2, dh [2F] and x [H] of fc1, with a scale for each 128 x 128
    const std::string joined = "precision.moe_wgrad_micro_batches=2";
    const double waiting = 512 * 128 * (1 + 4.0 / (128 * 128));
    EXPECT_EQ(of({joined}).at("delayed weight gradients"), 5 * waiting);
    EXPECT_EQ(of({joined, "training.freeze=[linear_fc1]"}).at("delayed weight gradients"), 2 * waiting);
    // the backward of a shared expert is that of routed experts of its width
    const std::string shared = "moe.moe_shared_expert_intermediate_size=256";
    EXPECT_EQ(of({shared, "schedule.moe_shared_expert_overlap=true"}).at("side stream"),
              64 * of({"moe.moe_ffn_hidden_size=256"}).at("MoE workspace") / 512);
    const double kept = saved_activation_bytes(small_layer(), 0, {}).per_token;
    EXPECT_EQ(of({"recompute.recompute_granularity=full"}).at("workspace, layer run again"),
              64 * (kept - 2 * 128));
}

TEST(RunPlan, RecomputeModes) {
    const Config config = shipped("layer_deepseek_v3");
    const RunPlan plan = make_plan(config, 4);
    std::map<std::string, RecomputeChoice> modes;
    for (const auto& choice : plan.recompute) modes[choice.mode] = choice;
    EXPECT_EQ(modes.count("core_attn"), 0u);  // no attention in this configuration
    EXPECT_EQ(modes.count("shared_experts"), 1u);
    EXPECT_LT(modes.at("moe_act").saved_bytes, modes.at("none").saved_bytes);
    EXPECT_LT(modes.at("moe_expert").saved_bytes, modes.at("moe_act").saved_bytes);
    EXPECT_LT(modes.at("moe").saved_bytes, modes.at("moe_expert").saved_bytes);
    EXPECT_LT(modes.at("full").saved_bytes, modes.at("moe").saved_bytes);
    EXPECT_EQ(modes.at("none").extra_flops_per_token, 0);
    EXPECT_EQ(modes.at("moe_expert").extra_wire_bytes, 0);
    EXPECT_EQ(modes.at("moe_expert").extra_flops_per_token, 2.0 * 8 * 2 * 7168 * 2048);  // fc1 of 8 experts
    double forward_wire = 0;
    for (const auto& leg : plan.wire) forward_wire += leg.forward;
    EXPECT_EQ(modes.at("moe").extra_wire_bytes, forward_wire);
    const RunPlan tensorwise = make_plan(with_recipe(config, Recipe::fp8_tensorwise), 4);
    constexpr size_t kSavedRows = 2;  // of fp8_flow alone; every other mode is exact under every recipe
    EXPECT_EQ(tensorwise.recompute.size() + kSavedRows, plan.recompute.size());
    const RecomputeChoice &received = modes.at("moe_expert, saved_rows: received"),
                          &none = modes.at("moe_expert, saved_rows: none");
    EXPECT_LT(received.saved_bytes, modes.at("moe_expert").saved_bytes);
    EXPECT_LT(none.saved_bytes, received.saved_bytes);
    EXPECT_EQ(received.extra_wire_bytes, 0);
    EXPECT_EQ(none.extra_wire_bytes, plan.wire[1].forward);
    EXPECT_EQ(modes.at("shared_experts").extra_flops_per_token, 2.0 * 2 * 7168 * 2048);
    // with attention and dense layers: all but the head runs again, or what rebuilds q, k and v
    const Config whole = shipped("deepseek_v3");
    double forward = 0;
    for (const FlopPart& part : count_flops(whole)) forward += part.part == "head" ? 0 : part.forward;
    for (const auto& choice : recompute_choices(whole)) modes[choice.mode] = choice;
    EXPECT_DOUBLE_EQ(modes.at("full").extra_flops_per_token, forward);
    EXPECT_EQ(modes.at("mla_up_proj").extra_flops_per_token, 61 * 2.0 * 128 * (192 * 1536 + 256 * 512));
    Config again = config;
    again.recompute = none.spec;
    EXPECT_EQ(wire_bytes(again)[1].backward, 2 * plan.wire[1].forward);
    again.precision.scale_format = ScaleFormat::fp32;
    EXPECT_DOUBLE_EQ(wire_bytes(again)[1].forward / plan.wire[1].forward, (128 + 4) / (128 + 1.0));
}

TEST(RunPlan, RefusesAnIllegalNumberOfGpus) {
    Config config = shipped("mixtral_8x7b");
    config.training.global_batch_size = 252;
    expect_contains(error_of(ExitCode::usage, [&] { make_plan(config, 12); }),
                    "parallel.expert_model_parallel_size: got 8, want a divisor of the world size 12");
}

TEST(RunPlan, TextAndJsonAgree) {
    for (const char* file : {"quickstart", "test", "qwen3_30b_a3b", "layer_deepseek_v3"}) {
        const Config config = shipped(file);
        const RunPlan plan = make_plan(config, config.parallel.expert_model_parallel_size);
        const std::string text = report::plan_text(config, plan);
        for (const auto& item : plan.memory) {
            EXPECT_EQ(text.find("  " + item.category) != std::string::npos, item.bytes > 0) << item.category;
        }
        const auto json = report::plan_json(config, plan, {.commit = "abc", .command = "fp8flow plan"});
        EXPECT_EQ(json["commit"], "abc");
        const auto& bytes = json["memory_bytes"];
        EXPECT_EQ(bytes["row_capacity"], plan.row_capacity);
        EXPECT_EQ(bytes["host_tokens_of_steps"], plan.host.bytes);
        for (const auto& [what, key, reserved, used] :
             {std::tuple{"saved activations", "saved", plan.saved_reserved, plan.saved_used},
              {"MoE workspace", "workspace", plan.workspace_reserved, plan.workspace_used}}) {
            EXPECT_EQ(bytes[fmt::format("{}_reserved", key)], reserved);
            EXPECT_EQ(bytes[fmt::format("{}_used", key)], used);
            expect_contains(text, fmt::format("  {}: {} reserved, {} used with even load\n", what,
                                              report::format_bytes(reserved), report::format_bytes(used)));
        }
        EXPECT_LE(plan.saved_used, plan.saved_reserved);
        EXPECT_GT(plan.saved_used, 0.0);
        EXPECT_EQ(json["parameters"]["total"], plan.total_parameters());
        for (size_t i = 0; i < plan.parameters.size(); ++i)
            EXPECT_EQ(json["parameters"]["parts"][i]["per_rank"], plan.parameters[i].per_rank);
        if (const double total = static_cast<double>(plan.total_parameters()); total > 1e9 && total < 1e11)
            expect_contains(text, fmt::format("{:.{}f} B", total / 1e9, total < 1e10 ? 3 : 2));
        EXPECT_EQ(json["memory_bytes"]["categories"].size(), plan.memory.size());
        EXPECT_EQ(json["memory_bytes"]["total"], plan.total_bytes());
        EXPECT_EQ(json["wire_bytes_per_layer"]["total"], plan.wire_bytes());
    }
}

}  // namespace
}  // namespace fp8flow
