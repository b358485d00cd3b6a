// SPDX-License-Identifier: MIT
// Nothing out of reach, kernels: for every __global__ function of kernels/hopper the operation it serves, the
// condition of its launcher, and a configuration that meets the condition. What starts from no configuration
// says so: start-up (probes and first values), profile, replay, tests only, bench only. A kernel that the
// table lacks fails the test, and so does an entry whose kernel is gone. What the conditions say is read from
// the launchers, not run: no GPU is needed here. The operations: reach_test.cpp.
#include "kernels/ops/list.h"
#include "model/config/config.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fp8flow {
namespace {

namespace fs = std::filesystem;

struct Variant {
    std::string file, kernel;  // below kernels/hopper
    std::string operation;     // of kernels/ops/list.h; or exchange, runtime
    std::string when;
    std::string reached_by;
};

const std::vector<Variant> kVariants = {
    {"attention/attention.cu", "attention_kernel", "attention",
     "kernels.attention_backend=native, or what cuDNN does not take",
     "configs/test.yaml kernels.attention_backend=native"},
    {"attention/attention.cu", "delta_kernel", "attention_backward", "as attention_kernel",
     "configs/test.yaml kernels.attention_backend=native"},
    {"attention/attention.cu", "attention_dq_kernel", "attention_backward", "as attention_kernel",
     "configs/test.yaml kernels.attention_backend=native"},
    {"attention/attention.cu", "attention_dkv_kernel", "attention_backward", "as attention_kernel",
     "configs/test.yaml kernels.attention_backend=native"},
    {"attention/heads.cu", "heads_kernel", "qkv_heads", "BF16, half a head a multiple of 8, at most 256",
     "configs/quickstart.yaml"},
    {"attention/heads.cu", "heads_backward_kernel", "qkv_heads_backward", "as heads_kernel",
     "configs/quickstart.yaml"},
    {"attention/layout.cu", "rope_units_kernel", "qkv_heads", "heads of more than 256 columns",
     "configs/test.yaml model.kv_channels=512 kernels.attention_backend=native"},
    {"attention/layout.cu", "rope_kernel", "qkv_heads", "other heads",
     "configs/test.yaml model.kv_channels=50"},
    {"attention/layout.cu", "packed_kernel", "qkv_heads", "as both above",
     "configs/test.yaml model.kv_channels=50"},
    {"attention/lse.cu", "lse_kernel", "attention", "cuDNN: its log-sum-exps in our layout",
     "configs/mixtral_8x7b.yaml"},
    {"exchange/levels/plans.cu", "mark_kernel", "exchange",
     "dispatcher hierarchical, ranks on several hosts share the experts",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=hierarchical"},
    {"exchange/levels/plans.cu", "place_kernel", "exchange",
     "dispatcher hierarchical, ranks on several hosts share the experts",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=hierarchical"},
    {"exchange/local/exchange.cu", "return_probs_kernel", "exchange", "one rank, backward",
     "configs/layer_deepseek_v3_1gpu.yaml"},
    {"exchange/merging_weights.cu", "weights_kernel", "exchange",
     "several ranks, combine order invariant with merging weights",
     "configs/layer_deepseek_v3.yaml moe.moe_combine_order=invariant precision.moe_apply_probs_in=combine"},
    {"exchange/nccl/kernels.cu", "positions_kernel", "exchange", "dispatcher alltoall",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=alltoall"},
    {"exchange/nccl/kernels.cu", "pack_rows_kernel", "exchange", "dispatcher alltoall, dispatch",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=alltoall"},
    {"exchange/nccl/kernels.cu", "move_rows_kernel", "exchange",
     "dispatcher alltoall, schedule.cuda_graph_impl full_iteration: messages of a fixed size",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=alltoall "
     "schedule.cuda_graph_impl=full_iteration"},
    {"exchange/nccl/kernels.cu", "pack_choices_kernel", "exchange",
     "dispatcher alltoall, combine order invariant",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=alltoall "
     "moe.moe_combine_order=invariant"},
    {"exchange/nccl/kernels.cu", "pack_values_kernel", "exchange",
     "dispatcher alltoall, gradients of probabilities",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=alltoall"},
    {"exchange/nccl/kernels.cu", "add_returned_kernel", "exchange", "dispatcher alltoall, combine",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=alltoall"},
    {"exchange/nccl/kernels.cu", "place_values_kernel", "exchange",
     "dispatcher alltoall, gradients of probabilities",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=alltoall"},
    {"exchange/nccl/kernels.cu", "reduce_rows_kernel", "exchange",
     "dispatcher alltoall, all_reduce of gradients",
     "configs/layer_deepseek_v3.yaml parallel.moe_token_dispatcher_type=alltoall"},
    {"exchange/nccl/regions.cu", "window_addresses_kernel", "exchange", "peer memory by NCCL windows",
     "configs/layer_deepseek_v3.yaml parallel.moe_flex_dispatcher_backend=nccl_window"},
    {"exchange/peer/combine.cu", "push_sums_kernel", "exchange",
     "combine order rank with merging weights; without them for rows that are not BF16, of the tests",
     "configs/layer_deepseek_v3.yaml precision.moe_apply_probs_in=combine"},
    {"exchange/peer/combine.cu", "push_choices_kernel", "exchange", "combine order invariant",
     "configs/layer_deepseek_v3.yaml moe.moe_combine_order=invariant"},
    {"exchange/peer/combine.cu", "push_probs_kernel", "exchange", "backward",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/combine.cu", "add_returned_kernel", "exchange",
     "combine order invariant, or merging weights",
     "configs/layer_deepseek_v3.yaml moe.moe_combine_order=invariant"},
    {"exchange/peer/combine.cu", "copy_probs_kernel", "exchange", "backward",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/combine_sums.cu", "combine_sums_kernel", "exchange", "combine order rank, BF16",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/dispatch.cu", "dispatch_kernel", "exchange", "rows of whole 16 bytes",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/dispatch_plain.cu", "send_plain_rows_kernel", "exchange",
     "other rows; every configuration has whole 16 bytes, as widths are multiples of 128", "tests only"},
    {"exchange/peer/dispatch_plain.cu", "wait_for_deferred_rows_kernel", "exchange",
     "after every dispatch, for peers that were late", "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/dispatch_plain.cu", "receive_deferred_rows_kernel", "exchange",
     "after every dispatch, for peers that were late", "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/exchange.cu", "group_barrier_kernel", "exchange",
     "a barrier of the ranks: routing, all_reduce, combine order invariant",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/memory.cu", "write_patterns_kernel", "exchange", "peer memory is tried when it is mapped",
     "start-up"},
    {"exchange/peer/memory.cu", "check_patterns_kernel", "exchange", "peer memory is tried when it is mapped",
     "start-up"},
    {"exchange/peer/probe.cu", "peer_kernel", "exchange",
     "profile and bench measure the ceiling between GPUs", "start-up"},
    {"exchange/peer/reduce.cu", "push_values_kernel", "exchange", "all_reduce of up to 64 KiB",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/reduce.cu", "reduce_values_kernel", "exchange", "all_reduce of up to 64 KiB",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/reduce.cu", "stage_chunk_kernel", "exchange", "larger all_reduce",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/reduce.cu", "reduce_shard_kernel", "exchange", "larger all_reduce",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/reduce.cu", "fetch_shards_kernel", "exchange", "larger all_reduce",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/reduce.cu", "pack_pieces_kernel", "exchange", "reduce_scatter, all_gather",
     "configs/layer_deepseek_v3.yaml training.use_distributed_optimizer=true"},
    {"exchange/peer/reduce.cu", "unpack_pieces_kernel", "exchange", "reduce_scatter, all_gather",
     "configs/layer_deepseek_v3.yaml training.use_distributed_optimizer=true"},
    {"exchange/peer/routing.cu", "push_routing_kernel", "exchange", "always",
     "configs/layer_deepseek_v3.yaml"},
    {"exchange/peer/routing.cu", "copy_routing_kernel", "exchange", "always",
     "configs/layer_deepseek_v3.yaml"},
    {"gemm/fallback/mma.cu", "mma_kernel", "grouped_gemm",
     "what WGMMA does not take: mxfp8; validate's control arm",
     "configs/quickstart.yaml precision.recipe=mxfp8"},
    {"gemm/fallback/simt.cu", "simt_kernel", "gemm",
     "FP32 operands: recipe fp32 of the tests, which also ask for these kernels by name", "tests only"},
    {"gemm/squares.cu", "squares_kernel", "grouped_gemm_wgrad",
     "sums of squares after other kernels, or of groups without rows after the first micro-batch",
     "configs/quickstart.yaml precision.recipe=fp8_tensorwise"},
    {"gemm/sm90/bf16.cu", "bf16_kernel", "grouped_gemm", "BF16",
     "configs/quickstart.yaml precision.recipe=bf16"},
    {"gemm/sm90/bf16_wgrad.cu", "wgrad_kernel", "grouped_gemm_wgrad", "BF16",
     "configs/quickstart.yaml precision.recipe=bf16"},
    {"gemm/sm90/fp8.cu", "fp8_kernel", "grouped_gemm", "FP8, scales constant along the contraction",
     "configs/quickstart.yaml precision.recipe=fp8_rowwise"},
    {"gemm/sm90/fp8.cu", "fp8_overlapped_kernel", "grouped_gemm", "FP8, scales per 128, D in BF16",
     "configs/quickstart.yaml"},
    {"gemm/sm90/fp8_swiglu.cu", "fp8_swiglu_kernel", "grouped_gemm_swiglu_quantize",
     "h not kept, K at least three steps of 128", "configs/small_4gpu.yaml"},
    {"gemm/sm90/fp8_wgrad.cu", "wgrad_kernel", "grouped_gemm_wgrad", "FP8, scales per 128 of the contraction",
     "configs/quickstart.yaml"},
    {"head/cross_entropy.cu", "row_kernel", "cross_entropy",
     "columns that are no multiple of 8, or more than a cluster holds",
     "configs/quickstart.yaml model.make_vocab_size_divisible_by=1"},
    {"head/cross_entropy_clusters.cu", "row_cluster_kernel", "cross_entropy", "columns that a cluster holds",
     "configs/quickstart.yaml"},
    {"head/elementwise.cu", "add_kernel", "add", "a residual that no kernel adds", "configs/quickstart.yaml"},
    {"head/elementwise.cu", "sum_kernel", "sum", "the loss", "configs/quickstart.yaml"},
    {"head/elementwise.cu", "count_non_finite_kernel", "count_non_finite", "looking for the culprit of a NaN",
     "configs/quickstart.yaml training.lr=1e30"},
    {"head/elementwise.cu", "fill_normal_kernel", "fill_normal", "initial weights", "start-up"},
    {"head/embedding.cu", "embedding_copy_kernel", "embedding", "BF16 rows of whole 16 bytes",
     "configs/quickstart.yaml"},
    {"head/embedding.cu", "embedding_kernel", "embedding", "FP32: recipe fp32 of the tests", "tests only"},
    {"head/embedding.cu", "embedding_backward_kernel", "embedding_backward", "always",
     "configs/quickstart.yaml"},
    {"head/sort_tokens.cu", "count_before_kernel", "embedding_backward",
     "up to 8192 tokens a rank and micro-batch", "configs/quickstart.yaml"},
    {"head/sort_tokens.cu", "positions_kernel", "embedding_backward", "more tokens",
     "configs/test.yaml training.micro_batch_size=512 training.global_batch_size=512"},
    {"norm/front_backward.cu", "norm_backward_front_kernel", "rms_norm_backward",
     "2049 columns to four segments", "configs/layer_deepseek_v3.yaml"},
    {"norm/held_rows.cu", "held_rows_kernel", "rms_norm_quantize", "up to four segments",
     "configs/quickstart.yaml"},
    {"norm/norm.cu", "rms_norm_kernel", "rms_norm", "rows that are no whole 16 bytes: heads of 50 columns",
     "configs/quickstart.yaml model.kv_channels=50"},
    {"norm/norm.cu", "rms_norm_dx_kernel", "rms_norm_backward", "fewer than 1024 columns",
     "configs/quickstart.yaml"},
    {"norm/dgamma.cu", "narrow_gamma_kernel", "rms_norm_backward",
     "BF16, an even number of columns below 1024; the norm of heads", "configs/quickstart.yaml"},
    {"norm/norm.cu", "dgamma_partial_kernel", "rms_norm_backward", "more than eight segments of 8192 columns",
     "configs/test.yaml model.hidden_size=131072"},
    {"norm/norm.cu", "dgamma_kernel", "rms_norm_backward", "other rows",
     "configs/layer_deepseek_v3_1gpu.yaml"},
    {"norm/rows.cu", "norm_rows_kernel", "rms_norm", "five to eight segments of 8192 columns",
     "configs/test.yaml model.hidden_size=40960"},
    {"norm/rows_backward.cu", "norm_backward_rows_kernel", "rms_norm_backward", "1024 to 2048 columns",
     "configs/layer_qwen3_30b_a3b.yaml"},
    {"optimizer/optimizer.cu", "block_sums_kernel", "norm_squared", "always", "configs/quickstart.yaml"},
    {"optimizer/optimizer.cu", "add_squares_kernel", "add_squares", "experts that no other rank replicates",
     "configs/quickstart.yaml"},
    {"optimizer/optimizer.cu", "finish_sum_kernel", "norm_squared", "always", "configs/quickstart.yaml"},
    {"optimizer/optimizer.cu", "clip_factor_kernel", "clip_factor", "always", "configs/quickstart.yaml"},
    {"optimizer/optimizer.cu", "adamw_kernel", "adamw", "parameters without FP8 copies",
     "configs/quickstart.yaml"},
    {"permute/fan_out.cu", "fan_out_kernel", "permute_pad",
     "up to 8 rows a token: one rank; recompute.saved_rows=received", "configs/layer_deepseek_v3_1gpu.yaml"},
    {"permute/permute.cu", "move_rows_kernel", "pad_rows", "permute and pad apart",
     "configs/quickstart.yaml precision.moe_permute_padding_for_fp8=false"},
    {"permute/plan.cu", "count_kernel", "plan_dispatch", "always", "configs/quickstart.yaml"},
    {"permute/plan.cu", "place_kernel", "plan_dispatch", "always", "configs/quickstart.yaml"},
    {"permute/unpermute.cu", "unpermute_sums_kernel", "unpermute_unpad",
     "one rank, BF16, up to 8 rows a token; with weights: precision.moe_apply_probs_in=combine",
     "configs/layer_deepseek_v3_1gpu.yaml"},
    {"permute/unpermute.cu", "unpermute_kernel", "unpermute_unpad", "one rank, more than 8 rows a token",
     "configs/layer_deepseek_v3_1gpu.yaml moe.moe_router_topk=16"},
    {"permute/unpermute.cu", "token_probs_backward_kernel", "unpermute_probs_backward",
     "the published kernel's operation; SwiGLU's backward gives recipes this gradient", "bench only"},
    {"permute/unpermute.cu", "unpermute_probs_backward_kernel", "unpermute_probs_backward",
     "the published kernel's operation; SwiGLU's backward gives recipes this gradient", "bench only"},
    {"quantize/column_amax.cu", "column_amax_kernel", "quantize_dual",
     "group_row, BF16, more column blocks than counters: the first of two reads",
     "configs/layer_deepseek_v3_1gpu.yaml precision.recipe=fp8_rowwise moe.num_experts=1024"},
    {"quantize/column_tiles.cu", "quantize_column_tiles_kernel", "quantize_dual",
     "group_row in one read, few column blocks", "configs/quickstart.yaml precision.recipe=fp8_rowwise"},
    {"quantize/dequantize.cu", "dequantize_blocks_kernel", "dequantize", "vec128 to BF16",
     "configs/quickstart.yaml precision.fp8_wgrad=false"},
    {"quantize/dequantize.cu", "dequantize_rows_kernel", "dequantize", "other layouts along rows",
     "replay --intermediates precision.recipe=fp8_rowwise"},
    {"quantize/dequantize.cu", "dequantize_columns_kernel", "dequantize", "transposed layouts", "bench only"},
    {"quantize/group_columns.cu", "quantize_group_columns_kernel", "quantize_dual", "group_row in one read",
     "configs/layer_deepseek_v3.yaml precision.recipe=fp8_rowwise"},
    {"quantize/small_groups.cu", "quantize_small_groups_kernel", "quantize_dual",
     "group_row in one read, small groups",
     "configs/layer_deepseek_v3.yaml precision.recipe=fp8_rowwise model.seq_length=256"},
    {"quantize/relayout.cu", "relayout_kernel", "relayout_scales",
     "scales from the wire for a shared expert or a dense layer", "configs/test.yaml"},
    {"quantize/relayout.cu", "delayed_scale_kernel", "delayed_scale_update", "fp8_tensorwise",
     "configs/test.yaml precision.recipe=fp8_tensorwise"},
    {"quantize/requantize.cu", "requantize_kernel", "transpose_requantize",
     "no scaling-aware transpose, powers of two",
     "configs/quickstart.yaml precision.moe_scaling_aware_transpose=false"},
    {"quantize/rows.cu", "quantize_blocks_kernel", "quantize_rows", "16-bit, scales per 128",
     "configs/quickstart.yaml"},
    {"quantize/rows.cu", "amax_kernel", "quantize_tensor", "16-bit",
     "configs/quickstart.yaml precision.recipe=fp8_tensorwise"},
    {"quantize/rows.cu", "scaled_codes_kernel", "quantize_tensor", "rows alone",
     "configs/quickstart.yaml precision.recipe=fp8_tensorwise precision.fp8_wgrad=false"},
    {"quantize/rows.cu", "quantize_whole_rows_kernel", "quantize_dual", "a scale a row, 1024 to 8192 columns",
     "configs/layer_deepseek_v3.yaml precision.recipe=fp8_rowwise"},
    {"quantize/rows.cu", "quantize_rows_kernel", "quantize_dual", "a scale a row, narrower",
     "configs/quickstart.yaml precision.recipe=fp8_rowwise"},
    {"quantize/tiles.cu", "quantize_tiles_kernel", "quantize_dual", "mx32",
     "configs/quickstart.yaml precision.recipe=mxfp8"},
    {"quantize/tiles.cu", "tile_amax_kernel", "quantize_weight", "FP32 weights, scales by tensor or row",
     "configs/quickstart.yaml precision.recipe=fp8_tensorwise"},
    {"quantize/tiles.cu", "table_scales_kernel", "quantize_weight", "a scale a column of a weight",
     "configs/quickstart.yaml precision.recipe=fp8_rowwise"},
    {"quantize/transpose.cu", "transpose_kernel", "transpose_fp8", "always", "configs/quickstart.yaml"},
    {"quantize/weight_mx.cu", "mx_columns_kernel", "quantize_weight",
     "mx32, the dgrad copy alone; recipes write both copies at once", "bench only"},
    {"quantize/weight_tiles.cu", "weight_tiles_kernel", "quantize_weight", "block128",
     "configs/quickstart.yaml"},
    {"quantize/weight_tiles.cu", "step_tiles_kernel", "adamw_quantize", "block128",
     "configs/quickstart.yaml"},
    {"quantize/wide_tiles.cu", "quantize_wide_tiles_kernel", "quantize_dual", "vec128",
     "configs/quickstart.yaml precision.recipe=fp8_blockwise"},
    {"router/expert_bias.cu", "expert_bias_kernel", "expert_bias_update", "moe_router_enable_expert_bias",
     "configs/layer_deepseek_v3.yaml"},
    {"router/gemm_mma.cu", "mma_kernel", "router_logits", "up to 32 experts", "configs/quickstart.yaml"},
    {"router/gemm_mma.cu", "split_gradient_kernel", "router_logits_backward", "always",
     "configs/quickstart.yaml"},
    {"router/gemm_wgmma.cu", "logits_kernel", "router_logits", "more than 32 experts, a multiple of 8",
     "configs/layer_deepseek_v3.yaml"},
    {"router/gemm_wgmma.cu", "input_kernel", "router_logits_backward", "up to 256 experts",
     "configs/quickstart.yaml"},
    {"router/gemm_wgmma.cu", "add_weight_parts_kernel", "router_logits_backward", "more than 32 experts",
     "configs/layer_deepseek_v3.yaml"},
    {"router/logits.cu", "simt_kernel", "router_logits_backward",
     "parts of dlogits beyond 64 MiB of workspace; FP32",
     "configs/layer_deepseek_v3.yaml training.micro_batch_size=32 training.global_batch_size=128"},
    {"router/logits.cu", "add_blocks_kernel", "router_logits", "sums of several blocks of columns",
     "configs/layer_deepseek_v3.yaml"},
    {"router/top_k.cu", "top_k_kernel", "router_top_k", "always", "configs/quickstart.yaml"},
    {"router/top_k_backward.cu", "top_k_backward_kernel", "router_top_k_backward", "always",
     "configs/quickstart.yaml"},
    {"runtime/cuda_timeline.cu", "count_cycles_kernel", "runtime", "profile: the clock of timed stages",
     "profile"},
    {"runtime/probe.cu", "traffic_kernel", "runtime", "profile and bench measure the ceiling of memory",
     "start-up"},
    {"runtime/probe.cu", "delay_kernel", "runtime", "profile and bench queue work after it", "start-up"},
    {"runtime/self_test.cu", "evaluate_kernel", "runtime", "scalar_math.h on the device against the host",
     "tests only"},
    {"swiglu/rows.cu", "swiglu_rows_kernel", "swiglu_quantize", "at least 2^20 outputs",
     "configs/layer_deepseek_v3.yaml"},
    {"swiglu/rows.cu", "swiglu_backward_rows_kernel", "swiglu_backward_quantize", "at least 2^20 outputs",
     "configs/layer_deepseek_v3.yaml"},
    {"swiglu/swiglu.cu", "swiglu_kernel", "swiglu_quantize", "fewer outputs", "configs/test.yaml"},
    {"swiglu/swiglu.cu", "swiglu_backward_kernel", "swiglu_backward_quantize", "fewer outputs",
     "configs/test.yaml"},
};

// The bench-only operations of reach_test.cpp, and forms that only bench asks for. A longer list needs a
// reason here.
const std::set<std::string> kBenchOnly = {"token_probs_backward_kernel", "unpermute_probs_backward_kernel",
                                          "dequantize_columns_kernel", "mx_columns_kernel"};

using Name = std::pair<std::string, std::string>;  // file, kernel

// The names after __global__, launch bounds skipped; comments do not count.
std::vector<std::string> kernels_in(const std::string& text) {
    const std::string code = std::regex_replace(text, std::regex("//[^\n]*"), "");
    static const std::regex bounds(R"(__launch_bounds__\s*\(([^()]|\([^()]*\))*\))"), name(R"((\w+)\s*\()");
    std::vector<std::string> names;
    for (size_t at = code.find("__global__"); at != std::string::npos; at = code.find("__global__", at + 1)) {
        const std::string after = std::regex_replace(code.substr(at + 10, 400), bounds, "");
        std::smatch found;
        if (std::regex_search(after, found, name)) names.push_back(found[1]);
    }
    return names;
}

// "configs/NAME.yaml section.key=value ...": a configuration that the program takes.
void expect_legal(const std::string& configuration) {
    std::istringstream words(configuration);
    std::string file, setting;
    words >> file;
    std::vector<std::string> settings;
    while (words >> setting) settings.push_back(setting);
    EXPECT_NO_THROW(load_config(FP8FLOW_SOURCE_DIR "/" + file, settings)) << configuration;
}

TEST(KernelReach, FindsNames) {
    using Names = std::vector<std::string>;
    EXPECT_EQ(kernels_in("__global__ void a_kernel(int x) {}"), Names{"a_kernel"});
    EXPECT_EQ(
        kernels_in("template <int N>\n__global__ void __launch_bounds__(kThreads, f(2))\n    b(const A a)"),
        Names{"b"});
    EXPECT_EQ(kernels_in("// a __global__ void c() in words"), Names{});
}

TEST(KernelReach, EveryKernelHasAWayIn) {
    const fs::path hopper = FP8FLOW_SOURCE_DIR "/kernels/hopper";
    std::set<Name> written;
    for (const auto& entry : fs::recursive_directory_iterator(hopper)) {
        const std::string extension = entry.path().extension();
        if (extension != ".cu" && extension != ".h" && extension != ".cpp") continue;
        for (const std::string& kernel : kernels_in(read_whole(entry.path().string())))
            written.insert({fs::relative(entry.path(), hopper).string(), kernel});
    }
    ASSERT_GT(written.size(), 100u);
    std::set<Name> told;
    for (const Variant& v : kVariants)
        EXPECT_TRUE(told.insert({v.file, v.kernel}).second) << v.file << " " << v.kernel << " twice";
    for (const auto& [file, kernel] : written)
        EXPECT_TRUE(told.contains({file, kernel}))
            << file << ": " << kernel << " is not in the table: say what reaches it";
    for (const auto& [file, kernel] : told)
        EXPECT_TRUE(written.contains({file, kernel})) << file << ": " << kernel << " is in the table alone";
}

TEST(KernelReach, WaysInAreRealOnes) {
    std::set<std::string> operations = {"exchange", "runtime"};
#define FP8FLOW_NAME(name, Args) operations.insert(#name);
    FP8FLOW_FOR_EACH_OP(FP8FLOW_NAME)
    FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_NAME)
#undef FP8FLOW_NAME
    std::set<std::string> bench_only;
    for (const Variant& v : kVariants) {
        SCOPED_TRACE(v.file + " " + v.kernel);
        EXPECT_TRUE(operations.contains(v.operation)) << v.operation;
        EXPECT_FALSE(v.when.empty());
        const std::string first = v.reached_by.substr(0, v.reached_by.find(' '));
        if (v.reached_by == "bench only") {
            bench_only.insert(v.kernel);
        } else if (first.starts_with("configs/")) {
            expect_legal(v.reached_by);
        } else {
            const std::set<std::string> others = {"start-up", "profile", "replay", "tests"};
            EXPECT_TRUE(others.contains(first)) << v.reached_by;
        }
    }
    EXPECT_EQ(bench_only, kBenchOnly);
}

}  // namespace
}  // namespace fp8flow
