// SPDX-License-Identifier: MIT
// One MoE layer of a configuration, alone on this rank's share of given tokens: what `fp8flow replay` runs.
// The caller fills the weights, then calls forward and, with a gradient, backward. Read next:
// commands/replay.cpp.
#pragma once

#include "layers/lone/lone_layer.h"
#include "model/job/backend.h"
#include "model/weights/load.h"

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fp8flow::replay {

enum class ReplayNorm { skip, apply };
enum class ReplayRecord { results, intermediates };

// A tensor on the host, floats or integers.
struct HostValues {
    std::vector<int64_t> shape;
    std::vector<float> floats;
    std::vector<int32_t> integers;
};

class ReplayLayer final : GemmObserver {
public:
    // `config`: one MoE layer without attention (replay_config). This rank has `tokens` of at most
    // `tokens_per_rank` tokens.
    ReplayLayer(const Config& config, ProcessGroup& world, const BackendChoice& backend, ReplayNorm norm,
                ReplayRecord record, int64_t tokens, int64_t tokens_per_rank);

    std::vector<weights::WeightTarget> targets();
    std::vector<weights::WeightTarget> gradients();  // values: the main gradients
    ParameterStore& parameters() { return layer_->parameters(); }
    Device& device() { return ops_->device(); }
    const Ops& ops() const { return *ops_; }
    ProcessGroup& expert_parallel_group() { return *groups_.expert_parallel; }
    const std::string& exchange_note() const { return exchange_.note; }

    // Bits of BF16, [tokens, H]. Results are this rank's rows; BF16 values come as floats.
    void forward(std::span<const Bf16> hidden);
    HostValues output() const { return floats_of(y_); }
    HostValues router_logits() const { return floats_of(layer_->saved().route.logits); }
    HostValues topk_weights() const { return floats_of(layer_->saved().route.probs); }
    HostValues topk_ids() const { return integers_of(layer_->saved().route.ids); }
    // With ReplayRecord::intermediates: the plan of the rows routed to this rank, and what each GEMM of
    // the experts read and wrote so far, FP8 dequantised; of the shared expert under "shared.". A name with
    // grad_ is the gradient of what has the name without.
    const std::map<std::string, HostValues>& intermediates() const { return intermediates_; }
    // Gradients of weights are summed over the ranks.
    void backward(std::span<const Bf16> gradient);
    HostValues grad_hidden() const { return floats_of(dx_); }

private:
    void copy_rows(std::span<const Bf16> values, const TensorView& rows);
    HostValues floats_of(const TensorView& view) const;
    HostValues routed_rows(const TensorView& rows, int64_t count) const;
    void record_plan();
    void gemm(Context& ctx, std::string_view stage, const ScaledTensor& operand, const TensorView& result,
              const RowGroups& groups) override;
    void router_gradient(Context& ctx, const TensorView& dprobs) override;
    HostValues integers_of(const TensorView& view) const;

    ProcessGroup& world_;
    ReplayRecord record_;
    RankGroups groups_;
    std::unique_ptr<Ops> ops_;
    ExchangeChoice exchange_;
    Arena state_;
    int64_t slots_;
    std::unique_ptr<LoneLayer> layer_;
    TensorView x_, y_, dx_;
    std::map<std::string, HostValues> intermediates_;
};

}  // namespace fp8flow::replay
